//! How the monitor of a QEMU is reached, and the name that it has in records.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::libvirt;
use crate::qmp::{Qmp, QmpError};

/// Beginning of a name in a record that is of no socket. The path of a socket begins with `/`.
const LIBVIRT: &str = "libvirt:";

/// The monitor of a QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Monitor {
    /// QEMU's QMP socket.
    Socket(PathBuf),
    /// The QEMU of a libvirt domain.
    Libvirt {
        /// The URI of libvirt; none: the one that libvirt chooses.
        uri: Option<String>,
        /// The domain's name, or its UUID.
        domain: String,
    },
}

impl Monitor {
    /// Connects to the monitor.
    ///
    /// # Errors
    /// It cannot be reached.
    pub(super) fn connect(&self) -> Result<Qmp, QmpError> {
        match self {
            Self::Socket(path) => Qmp::connect(path),
            Self::Libvirt { uri, domain } => libvirt::connect(uri.as_deref(), domain),
        }
    }

    /// Returns its name in a record, from which [`Monitor::of_record`] makes it again: `recover` may be started in another directory.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Socket(path) => std::path::absolute(path).unwrap_or_else(|_| path.clone()).display().to_string(),
            Self::Libvirt { uri, domain } => format!("{LIBVIRT}{}#{domain}", uri.as_deref().unwrap_or_default()),
        }
    }

    /// Returns the monitor that has this name in a record.
    pub(super) fn of_record(name: &str) -> Self {
        match name.strip_prefix(LIBVIRT).and_then(|rest| rest.split_once('#')) {
            Some((uri, domain)) => {
                Self::Libvirt { uri: Some(uri.to_owned()).filter(|uri| !uri.is_empty()), domain: domain.to_owned() }
            }
            None => Self::Socket(PathBuf::from(name)),
        }
    }

    /// Returns whether libvirt drives the QEMU.
    pub(super) fn is_libvirts(&self) -> bool {
        matches!(self, Self::Libvirt { .. })
    }
}

impl From<&Path> for Monitor {
    fn from(socket: &Path) -> Self {
        Self::Socket(socket.to_owned())
    }
}

impl fmt::Display for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Libvirt { domain, .. } => write!(f, "libvirt's domain {domain}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_monitor_is_found_again_by_its_name_in_a_record() {
        let domain = |uri: Option<&str>, domain: &str| Monitor::Libvirt {
            uri: uri.map(str::to_owned),
            domain: domain.to_owned(),
        };
        for monitor in [
            Monitor::Socket("/run/qmp.sock".into()),
            domain(None, "guest"),
            domain(Some("qemu+unix:///system?socket=/run/x"), "guest #2"),
        ] {
            assert_eq!(Monitor::of_record(&monitor.name()), monitor);
        }
        assert!(Monitor::Socket("qmp.sock".into()).name().starts_with('/'));
    }
}
