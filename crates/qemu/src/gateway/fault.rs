//! Fault points: a test can stop or kill a Sterna process at each step of the switchover.
//!
//! Only builds with the feature `fault-points` contain this code. `STERNA_FAULT=NAME:crash` kills the process at the fault point
//! NAME with SIGKILL. `STERNA_FAULT=NAME:hold:PATH` opens the FIFO at `PATH` for writing, which shows the test that the point is
//! reached, and waits until the test closes its end. A hold happens once: at the first time that its point is reached.
//!
//! The fault points are the [crash points](CrashPoint) of the switchover, and the [points of a pause](PausePoint) besides.
//!
//! For direct mode, `STERNA_WITHOUT_SETTLING=1` removes the wait between the scan for written pages and their reading, so that a test
//! can show why the wait is needed; `STERNA_SETTLING_TIME=MILLISECONDS` shortens it, and the time that storage has to answer before the
//! decision. `STERNA_PATIENT_WITH_DEVICES=1` has the sender wait for a device as long as its work takes, so that what a software model does
//! does not depend on the machine's speed. `STERNA_COMMAND_TIME=MILLISECONDS` (see `qmp.rs`) is how long a command may wait for storage
//! before that is reported.

use std::fmt;
use std::time::Duration;

use sterna_engine::report::{Observer, Progress, ReceiveProgress};
use sterna_offload::Settings;
use sterna_wire::switchover::{CrashPoint, Moment, Step};

/// An observer that passes everything on, and stops or kills the process at the steps that a test chose.
pub(super) struct WithFaultPoints<'a>(pub(super) &'a dyn Observer);

impl Observer for WithFaultPoints<'_> {
    fn progress(&self, progress: &Progress) {
        self.0.progress(progress);
    }

    fn received(&self, progress: &ReceiveProgress) {
        self.0.received(progress);
    }

    fn note(&self, text: &str) {
        self.0.note(text);
    }

    fn listening(&self, address: &str) {
        self.0.listening(address);
    }

    fn step(&self, moment: Moment, step: Step) {
        reached(CrashPoint { moment, step });
    }
}

/// A fault point between two commands to QEMU, around the pause of the guest: what other programs do to its QEMU there is of consequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PausePoint {
    /// A round has begun, and was permitted.
    Round,
    /// The guest runs, for the last time before it is stopped.
    BeforeStop,
    /// The guest was stopped, and nothing was done to it since.
    Stopped,
    /// The devices were saved, and QEMU was asked what is checked before the decision.
    Saved,
    /// The saved state is about to be sent.
    SendingState,
    /// The guest was let run, at either side, and was not looked at since.
    Continued,
}

impl fmt::Display for PausePoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Round => "source.in-round",
            Self::BeforeStop => "source.before-stop",
            Self::Stopped => "source.after-stop",
            Self::Saved => "source.after-save",
            Self::SendingState => "source.before-state",
            Self::Continued => "after-cont",
        })
    }
}

/// Stops or kills the process at `point` if a test chose it.
pub(super) fn at(point: PausePoint) {
    reached(point);
}

/// Returns whether pages are to be read without waiting for pending writes, which loses these writes.
#[cfg(not(feature = "fault-points"))]
pub(super) fn without_settling() -> bool {
    false
}

#[cfg(feature = "fault-points")]
pub(super) fn without_settling() -> bool {
    std::env::var("STERNA_WITHOUT_SETTLING").is_ok_and(|value| value == "1")
}

/// Returns how long to wait for storage: `usual`, unless a test sets another time.
#[cfg(not(feature = "fault-points"))]
pub(super) fn settling_time(usual: Duration) -> Duration {
    usual
}

#[cfg(feature = "fault-points")]
pub(super) fn settling_time(usual: Duration) -> Duration {
    let Ok(wanted) = std::env::var("STERNA_SETTLING_TIME") else { return usual };
    Duration::from_millis(wanted.parse().expect("STERNA_SETTLING_TIME is a number of milliseconds"))
}

/// Returns how devices are used: as `usual`, unless a test wants them to be waited for.
#[cfg(not(feature = "fault-points"))]
pub(super) fn with_devices(usual: Settings) -> Settings {
    usual
}

#[cfg(feature = "fault-points")]
pub(super) fn with_devices(mut usual: Settings) -> Settings {
    /// Longer than any test lasts.
    const WAIT: Duration = Duration::from_secs(3600);
    if std::env::var("STERNA_PATIENT_WITH_DEVICES").is_ok_and(|value| value == "1") {
        (usual.lateness, usual.patience, usual.retries) = (WAIT, WAIT, u32::MAX);
        // No work goes to the CPU because it would have to wait.
        usual.shares = sterna_offload::Shares::fair();
    }
    usual
}

#[cfg(not(feature = "fault-points"))]
fn reached(_: impl fmt::Display) {}

#[cfg(feature = "fault-points")]
fn reached(point: impl fmt::Display) {
    use std::sync::atomic::{AtomicBool, Ordering};
    static HELD: AtomicBool = AtomicBool::new(false);
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
        if HELD.swap(true, Ordering::Relaxed) {
            return;
        }
        tracing::warn!("holding at {point}, as asked");
        let fifo = std::fs::OpenOptions::new().write(true).open(path).expect("the test has made its FIFO");
        wait_for_hang_up(&fifo);
    } else {
        panic!("STERNA_FAULT names an unknown action: {wanted}");
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
