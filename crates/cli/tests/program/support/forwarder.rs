//! A process that forwards a monitor's socket, as `socat` does: SO_PEERCRED then names it and not QEMU.

use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Signal, set_parent_process_death_signal};

use super::pair::Watched;

/// Names the socket of a forwarder and that to which it forwards, in the environment of its process.
const NEAR: &str = "STERNA_TEST_FORWARDER";
const FAR: &str = "STERNA_TEST_FORWARDED";
/// What a forwarder prints once it listens.
const LISTENS: &str = "the forwarder listens";

/// A running forwarder. It is killed when this is dropped.
pub(crate) struct Forwarder {
    child: Child,
}

impl Forwarder {
    /// Puts a forwarder between sterna and the monitor of `watched`, by a socket in `scratch`.
    pub(crate) fn before(watched: &mut Watched, scratch: &Path) -> Self {
        watched.qmp_path = scratch.join(format!("forwarder-{}", watched.qemu.pid()));
        Self::start(watched)
    }

    /// Starts it where [`Forwarder::before`] put an earlier one.
    pub(crate) fn start(watched: &Watched) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "support::forwarder::process", "--nocapture"])
            .env(NEAR, &watched.qmp_path)
            .env(FAR, watched.qemu.qmp_path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains(LISTENS)), "the forwarder ended");
        Self { child }
    }

    /// Returns its process number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The forwarder's process. As a test of its own it does nothing.
#[test]
fn process() {
    let (Some(near), Some(far)) = (std::env::var_os(NEAR), std::env::var_os(FAR).map(PathBuf::from)) else { return };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    // An earlier one that was killed has left it.
    let _ = std::fs::remove_file(&near);
    let listener = UnixListener::bind(&near).unwrap();
    writeln!(io::stdout(), "{LISTENS}").unwrap();
    for near in listener.incoming().map(Result::unwrap) {
        let far = UnixStream::connect(&far).unwrap();
        let (back_near, back_far) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        std::thread::spawn(move || forward(&far, &near));
        std::thread::spawn(move || forward(&back_near, &back_far));
    }
}

/// Forwards until one of the two ends, and ends the other.
fn forward(mut from: &UnixStream, mut to: &UnixStream) {
    let _ = io::copy(&mut from, &mut to);
    for socket in [from, to] {
        let _ = socket.shutdown(Shutdown::Both);
    }
}
