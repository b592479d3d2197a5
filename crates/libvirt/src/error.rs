//! Errors, each defined once: what happened, to what, and what to do.

use crate::version::Version;

/// An error of libvirt, as the thread that has called it reads it right after the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reported {
    /// `virErrorNumber`.
    pub(crate) code: i32,
    pub(crate) message: String,
}

/// Why libvirt's client library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library, or one of its dependencies, is missing.
    #[error("libvirt's client library is not available: {why}; install it (Debian: libvirt0, Fedora: libvirt-libs)")]
    NotFound {
        /// The name under which the loader has looked for it.
        library: String,
        /// The loader's message.
        why: String,
    },
    /// It lacks a function.
    #[error("libvirt's client library has no function {function}: install libvirt {oldest} or a later one", oldest = crate::version::OLDEST)]
    MissingFunction {
        /// The function.
        function: &'static str,
    },
    /// It is older than [`OLDEST`](crate::OLDEST).
    #[error("libvirt's client library is version {found}: install {oldest} or a later one", oldest = crate::version::OLDEST)]
    TooOld {
        /// Its version.
        found: Version,
    },
    /// It could not set itself up, or its event loop.
    #[error("libvirt's client library could not be initialized: {why}")]
    NotInitialized {
        /// Its message.
        why: String,
    },
    /// The thread of the event loop could not be started.
    #[error("no thread delivers libvirt's events: {why}")]
    NoThread {
        /// The system's error.
        why: String,
    },
}

/// What kind of error libvirt has reported (`virErrorNumber`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Code {
    /// `VIR_ERR_NO_SUPPORT`: the driver has no such function.
    NoSupport,
    /// `VIR_ERR_OPERATION_FAILED`, often with QEMU's own reason.
    OperationFailed,
    /// `VIR_ERR_OPERATION_DENIED`: the connection is read-only, for example.
    OperationDenied,
    /// `VIR_ERR_SYSTEM_ERROR`.
    SystemError,
    /// `VIR_ERR_NO_DOMAIN`.
    NoDomain,
    /// `VIR_ERR_AUTH_FAILED` or `VIR_ERR_AUTH_CANCELLED`.
    Authentication,
    /// `VIR_ERR_OPERATION_INVALID`: not in the domain's present state.
    OperationInvalid,
    /// `VIR_ERR_CONFIG_UNSUPPORTED`: the host cannot run such a domain.
    ConfigurationUnsupported,
    /// `VIR_ERR_OPERATION_TIMEOUT`: another job holds the domain, for example.
    Timeout,
    /// `VIR_ERR_OPERATION_UNSUPPORTED`, or `VIR_ERR_ARGUMENT_UNSUPPORTED`.
    OperationUnsupported,
    /// `VIR_ERR_RESOURCE_BUSY`, by a lock manager, for example.
    ResourceBusy,
    /// `VIR_ERR_ACCESS_DENIED`.
    AccessDenied,
    /// Another number.
    Other(i32),
}

impl Code {
    pub(crate) fn of(number: i32) -> Self {
        match number {
            3 => Self::NoSupport,
            9 => Self::OperationFailed,
            29 => Self::OperationDenied,
            38 => Self::SystemError,
            42 => Self::NoDomain,
            45 | 79 => Self::Authentication,
            55 => Self::OperationInvalid,
            67 => Self::ConfigurationUnsupported,
            68 => Self::Timeout,
            74 | 84 => Self::OperationUnsupported,
            87 => Self::ResourceBusy,
            88 => Self::AccessDenied,
            other => Self::Other(other),
        }
    }
}

/// Why a call of libvirt has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no connection to libvirt.
    #[error("cannot connect to libvirt at {uri}: {message}{}", connect_advice(*code, uri))]
    Connect {
        /// The URI; `its default URI` if none was given.
        uri: String,
        /// The kind of the error.
        code: Code,
        /// libvirt's message.
        message: String,
    },
    /// The connection leads to a driver other than QEMU's.
    #[error("libvirt at {uri} drives {driver} and not QEMU: use qemu:///system")]
    NotQemu {
        /// The URI.
        uri: String,
        /// The driver's name.
        driver: String,
    },
    /// The server is older than [`OLDEST`](crate::OLDEST).
    #[error("libvirt at {uri} is version {found}: {oldest} or a later one is needed", oldest = crate::version::OLDEST)]
    TooOld {
        /// The URI.
        uri: String,
        /// Its version.
        found: Version,
    },
    /// The connection has ended. What was asked for may have been carried out.
    #[error(
        "the connection to libvirt at {uri} was lost while it was asked to {doing}{}: {message}; see whether its daemon runs (libvirtd or \
         virtqemud); the domain's QEMU goes on without it",
        of(domain)
    )]
    ConnectionLost {
        /// The URI.
        uri: String,
        /// What was asked for.
        doing: &'static str,
        /// The domain; empty where the call was about none.
        domain: String,
        /// libvirt's message.
        message: String,
    },
    /// There is no such domain.
    #[error("libvirt at {uri} has no domain {name} (virsh -c {uri} list --all shows those that it has)")]
    NoDomain {
        /// The URI.
        uri: String,
        /// The name, or the UUID.
        name: String,
    },
    /// libvirt refused a call, or failed to carry it out.
    #[error("libvirt could not {doing}{}: {message}{}", of(domain), advice(*code))]
    Failed {
        /// What was asked for.
        doing: &'static str,
        /// The domain; empty where the call was about none.
        domain: String,
        /// The kind of the error.
        code: Code,
        /// libvirt's message.
        message: String,
    },
    /// This libvirt lacks a function.
    #[error("libvirt cannot {doing} before {since}: its client library here is {client}, its server {server}")]
    Unsupported {
        /// What was asked for.
        doing: &'static str,
        /// The first release that can.
        since: Version,
        /// The version of the client library.
        client: Version,
        /// The version of the server.
        server: Version,
    },
    /// A text for libvirt has a zero byte in it.
    #[error("{what} cannot have a zero byte in it")]
    ZeroByte {
        /// What the text is.
        what: &'static str,
    },
}

impl Error {
    /// Returns the kind of libvirt's error, if libvirt has reported one.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Connect { code, .. } | Self::Failed { code, .. } => Some(*code),
            Self::NoDomain { .. } => Some(Code::NoDomain),
            _ => None,
        }
    }

    pub(crate) fn connect(uri: Option<&str>, reported: Reported) -> Self {
        let uri = uri.unwrap_or("its default URI").to_owned();
        Self::Connect { uri, code: Code::of(reported.code), message: reported.message }
    }
}

fn of(domain: &str) -> String {
    if domain.is_empty() { String::new() } else { format!(" (domain {domain})") }
}

fn connect_advice(code: Code, uri: &str) -> &'static str {
    match code {
        Code::Authentication | Code::AccessDenied => "; run as root, or as a member of the group libvirt",
        _ if uri.ends_with("/session") => "; only domains of this user are there: system domains need qemu:///system",
        _ => "; see whether its daemon runs (libvirtd or virtqemud)",
    }
}

fn advice(code: Code) -> &'static str {
    match code {
        Code::OperationDenied | Code::AccessDenied => "; a connection with all rights is needed, not a read-only one",
        Code::Timeout => "; another client works on this domain (virsh domjobinfo): wait until it has finished",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_what_was_asked_for_the_domain_the_reason_and_what_to_do() {
        let failed = |code| Error::Failed {
            doing: "suspend it",
            domain: "web".into(),
            code: Code::of(code),
            message: "cannot acquire state change lock".into(),
        };
        assert_eq!(
            failed(68).to_string(),
            "libvirt could not suspend it (domain web): cannot acquire state change lock; another client works on this domain (virsh \
             domjobinfo): wait until it has finished"
        );
        assert_eq!(
            failed(55).to_string(),
            "libvirt could not suspend it (domain web): cannot acquire state change lock"
        );
        let session = Error::connect(Some("qemu:///session"), Reported { code: 38, message: "no socket".into() });
        assert!(session.to_string().ends_with("system domains need qemu:///system"), "{session}");
        assert_eq!(session.code(), Some(Code::SystemError));
    }

    #[test]
    fn a_library_that_is_missing_or_too_old_is_an_error_of_one_sentence() {
        let error = LoadError::TooOld { found: Version::of(6_010_000) };
        assert_eq!(error.to_string(), "libvirt's client library is version 6.10.0: install 7.0.0 or a later one");
        let error = LoadError::NotFound { library: "libvirt.so.0".into(), why: "no such file".into() };
        assert!(error.to_string().contains("no such file; install it"), "{error}");
    }
}
