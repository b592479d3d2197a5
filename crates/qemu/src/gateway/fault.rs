//! Places where a test may stop or kill a Sterna process: at each step of the switchover, by its name.
//!
//! Only in builds with the feature `fault-points`; others contain none of it. `STERNA_FAULT=NAME:crash` kills the
//! process at the crash point of that name as SIGKILL would, `STERNA_FAULT=NAME:hold:PATH` opens the FIFO at `PATH` for
//! writing, which tells the test that the point is reached, and waits until the test closes its end.

use sterna_wire::switchover::{CrashPoint, Moment, Step};

/// The process has come to `step`.
pub(super) fn point(moment: Moment, step: Option<Step>) {
    if let Some(step) = step {
        reached(CrashPoint { moment, step });
    }
}

#[cfg(not(feature = "fault-points"))]
fn reached(_: CrashPoint) {}

#[cfg(feature = "fault-points")]
fn reached(point: CrashPoint) {
    let Ok(wanted) = std::env::var("STERNA_FAULT") else { return };
    let Some((name, action)) = wanted.split_once(':') else { panic!("STERNA_FAULT has no action: {wanted}") };
    if name != point.to_string() {
        return;
    }
    if action == "crash" {
        tracing::warn!("crashing at {point}, as asked");
        let own = rustix::process::getpid();
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        unreachable!("SIGKILL cannot be survived");
    } else if let Some(path) = action.strip_prefix("hold:") {
        tracing::warn!("holding at {point}, as asked");
        let fifo = std::fs::OpenOptions::new().write(true).open(path).expect("the test has made its FIFO");
        wait_for_hang_up(&fifo);
    } else {
        panic!("STERNA_FAULT names no action that exists: {wanted}");
    }
}

/// Waits until the reader of `fifo` closes it.
#[cfg(feature = "fault-points")]
fn wait_for_hang_up(fifo: &std::fs::File) {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut fds = [PollFd::new(fifo, PollFlags::empty())];
    while !fds[0].revents().contains(PollFlags::ERR) {
        let _ = poll(&mut fds, None);
    }
}
