//! A virtiofsd process beside a QEMU: the back-end of a directory that is shared with a guest.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::{Error, Tools, process};

/// A running virtiofsd. It is killed when this is dropped.
pub struct Virtiofsd {
    child: Child,
    directory: TempDir,
}

impl Virtiofsd {
    /// Shares `directory`, with additional `options`. Its sandbox is off, because not every user may make namespaces; seccomp stays on.
    ///
    /// # Errors
    /// [`Error::ToolsMissing`] without `scripts/setup`, [`Error::Io`] if it cannot be started.
    pub fn start(directory: &Path, options: &[&str]) -> Result<Virtiofsd, Error> {
        let program = Tools::locate()?.virtiofsd()?;
        let own = tempfile::Builder::new()
            .prefix("sterna-virtiofsd-")
            .tempdir()
            .map_err(Error::io("making a private directory for virtiofsd"))?;
        // The socket is inherited and already listening, so QEMU need not wait for the daemon.
        let socket = own.path().join("socket");
        let listener = UnixListener::bind(&socket).map_err(Error::path("listening on", &socket))?;
        let log = own.path().join("log");
        let mut command = Command::new(&program);
        command
            .arg(format!("--shared-dir={}", directory.display()))
            .arg(format!("--fd={}", listener.as_raw_fd()))
            .args(["--sandbox=none", "--log-level=warn"])
            .args(options)
            .stdin(Stdio::null())
            .stderr(File::create(&log).map_err(Error::path("creating", &log))?);
        let child = process::spawn(command, vec![OwnedFd::from(listener)])
            .map_err(Error::io(format!("starting {}", program.display())))?;
        Ok(Virtiofsd { child, directory: own })
    }

    /// Returns the options that give a QEMU this directory, under `tag`. QEMU's memory must be shared ([`crate::Backend::Memfd`]).
    #[must_use]
    pub fn qemu_words(&self, tag: &str) -> [String; 4] {
        let socket = self.directory.path().join("socket");
        [
            "-chardev".into(),
            format!("socket,id=virtiofsd,path={}", socket.display()),
            "-device".into(),
            format!("vhost-user-fs-pci,chardev=virtiofsd,tag={tag}"),
        ]
    }

    /// Returns its log.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Virtiofsd {
    fn drop(&mut self) {
        // It may have ended by itself, as it does when its QEMU ends.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("virtiofsd logged:\n{}", self.log());
        }
    }
}
