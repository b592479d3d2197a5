//! virtiofsd as a process: finding, starting and stopping it, and its log.

use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Mutex;

use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tempfile::TempDir;

/// Returns the program that `scripts/setup` unpacked. Without it, prints why the test is skipped, or panics if tools are
/// required.
pub(crate) fn program() -> Option<PathBuf> {
    let named = std::env::var_os("STERNA_TOOLS").map(PathBuf::from);
    let places = named.into_iter().chain([PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/tools")]);
    let places: Vec<_> = places.collect();
    let found = places.iter().map(|tools| tools.join("virtiofsd/bin/virtiofsd")).find(|program| program.is_file());
    if found.is_none() {
        let excused = places.iter().any(|tools| tools.join("virtiofsd-absent").is_file());
        assert!(excused || std::env::var_os("STERNA_REQUIRE_TOOLS").is_none(), "scripts/setup left no virtiofsd");
        sterna_test_kit::tools::skipped("there is no virtiofsd (scripts/setup --only virtiofsd unpacks it)");
    }
    found
}

/// A running virtiofsd. When it is dropped, it is killed, and its log is printed if the test has failed.
pub(crate) struct Daemon {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
    _directory: TempDir,
}

/// Held while a listening socket can be inherited, so that no other daemon is started meanwhile.
static STARTING: Mutex<()> = Mutex::new(());

impl Daemon {
    /// Starts a daemon that shares `directory`. `--sandbox=none` because the tests also run where namespaces may not be
    /// made; seccomp stays on.
    pub(crate) fn start(program: &Path, directory: &Path, options: &[&str]) -> Daemon {
        let own = tempfile::tempdir().expect("a directory");
        let (socket, log) = (own.path().join("socket"), own.path().join("log"));
        let _alone = STARTING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // A socket passed as a file descriptor listens before the daemon runs, so no test has to wait for it.
        let listener = UnixListener::bind(&socket).expect("a socket");
        rustix::io::fcntl_setfd(&listener, FdFlags::empty()).expect("inheritable");
        let child = Command::new(program)
            .arg(format!("--shared-dir={}", directory.display()))
            .arg(format!("--fd={}", std::os::fd::AsRawFd::as_raw_fd(&listener)))
            .args(["--sandbox=none", "--log-level=warn"])
            .args(options)
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("virtiofsd starts");
        Daemon { child, socket, log, _directory: own }
    }

    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.socket).expect("virtiofsd listens")
    }

    /// Kills the daemon. It has ended when this returns.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }

    /// Returns whether the daemon has ended.
    pub(crate) fn is_dead(&mut self) -> bool {
        self.child.try_wait().expect("its status").is_some()
    }

    /// Stops the daemon like a process that hangs. It is stopped when this returns.
    pub(crate) fn hang(&mut self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::STOP).expect("it can be stopped");
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).expect("it is ours").expect("its status");
        assert!(status.stopped(), "{status:?}");
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("its log")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The daemon may have ended by itself, as it does when its front-end disconnects.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("virtiofsd logged:\n{}", self.log());
        }
    }
}
