//! The first moment of a guest that QEMU has let run, by QEMU's events: what a guest meets at once that this QEMU cannot execute.
//!
//! Only what is certain counts. A vCPU that waits for an interrupt, or runs in a loop, may do so rightly: neither its registers nor the count of
//! its exits show that a guest does not run.

use std::fmt;
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long a guest is watched.
const FIRST_MOMENT: Duration = Duration::from_millis(500);

#[cfg(not(feature = "fault-points"))]
fn first_moment() -> Duration {
    FIRST_MOMENT
}

/// `STERNA_FIRST_MOMENT` is another time, in milliseconds: a busy machine's guest executes late, and most tests have no use for a watch.
#[cfg(feature = "fault-points")]
fn first_moment() -> Duration {
    let wanted = std::env::var("STERNA_FIRST_MOMENT").ok();
    let number = |text: String| text.parse().expect("STERNA_FIRST_MOMENT is a number of milliseconds");
    wanted.map_or(FIRST_MOMENT, |text| Duration::from_millis(number(text)))
}

/// How a guest has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestFailure {
    /// Its kernel has reported a panic.
    Panicked,
    /// It was reset, as x86's CPUs are by a triple fault. QEMU reports a reset that a guest requests in the same way.
    Reset,
}

impl GuestFailure {
    /// Returns the failure that an event reports, if it reports one.
    fn of_event(name: &str, data: &Value) -> Option<Self> {
        match (name, data["reason"].as_str().unwrap_or_default()) {
            ("GUEST_PANICKED", _) | ("SHUTDOWN", "guest-panic") => Some(Self::Panicked),
            ("RESET" | "SHUTDOWN", "guest-reset") => Some(Self::Reset),
            _ => None,
        }
    }
}

impl fmt::Display for GuestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Panicked => "its kernel has panicked at once",
            Self::Reset => {
                "it was reset at once: it has met a fault that it cannot handle (a triple fault), unless it was about to restart anyway"
            }
        })
    }
}

/// How the first moment of a guest has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstMoment {
    /// The guest has failed.
    Failed(GuestFailure),
    /// The connection to QEMU has ended.
    Closed,
    /// The moment has passed, or QEMU has stopped the guest: its run state shows why.
    Passed,
}

/// What is seen of a guest since QEMU has last let it run.
#[derive(Debug, Default)]
pub(super) struct GuestStart {
    /// When that was; none if this connection has not seen it.
    resumed: Option<Instant>,
    /// Whether QEMU has stopped the guest since.
    stopped: bool,
    failure: Option<GuestFailure>,
}

impl GuestStart {
    /// Takes an event, which has come at `now`, into account.
    pub(super) fn note(&mut self, name: &str, data: &Value, now: Instant) {
        match name {
            "RESUME" => *self = Self { resumed: Some(now), ..Self::default() },
            "STOP" => self.stopped = true,
            _ if now < self.first_moment_ends(now) => {
                self.failure = self.failure.or_else(|| GuestFailure::of_event(name, data));
            }
            _ => {}
        }
    }

    /// Returns when the first moment ends; `now` if its beginning was not seen.
    pub(super) fn first_moment_ends(&self, now: Instant) -> Instant {
        self.resumed.map_or(now, |resumed| resumed + first_moment())
    }

    /// Returns how the guest has failed, if it has.
    pub(super) fn failure(&self) -> Option<GuestFailure> {
        self.failure
    }

    /// Returns whether QEMU has stopped the guest.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn failure_after(events: &[(&str, Value, Duration)]) -> Option<GuestFailure> {
        let start = Instant::now();
        let mut moment = GuestStart::default();
        for (name, data, after) in events {
            moment.note(name, data, start + *after);
        }
        moment.failure()
    }

    #[test]
    fn a_guest_that_is_reset_or_panics_right_after_it_was_resumed_has_failed() {
        let resumed = || ("RESUME", Value::Null, Duration::ZERO);
        let at = Duration::from_millis(3);
        let reset = || ("RESET", json!({ "guest": true, "reason": "guest-reset" }), at);
        assert_eq!(failure_after(&[resumed(), reset()]), Some(GuestFailure::Reset));
        // With -no-reboot.
        let shutdown = ("SHUTDOWN", json!({ "guest": true, "reason": "guest-reset" }), at);
        assert_eq!(failure_after(&[resumed(), shutdown]), Some(GuestFailure::Reset));
        for action in ["pause", "poweroff", "run"] {
            let panicked = ("GUEST_PANICKED", json!({ "action": action }), at);
            assert_eq!(failure_after(&[resumed(), panicked]), Some(GuestFailure::Panicked));
        }
        // The first event is nearest to the cause.
        let panicked = ("GUEST_PANICKED", json!({ "action": "run" }), at);
        assert_eq!(failure_after(&[resumed(), panicked, reset()]), Some(GuestFailure::Panicked));
    }

    #[test]
    fn what_others_do_and_what_comes_later_is_no_failure_of_the_start() {
        let resumed = || ("RESUME", Value::Null, Duration::ZERO);
        let at = Duration::from_millis(3);
        let event = |name, reason: &str, after| (name, json!({ "guest": true, "reason": reason }), after);
        for other in [
            event("SHUTDOWN", "guest-shutdown", at),
            event("RESET", "host-qmp-system-reset", at),
            event("SHUTDOWN", "host-signal", at),
            event("RESET", "guest-reset", FIRST_MOMENT),
            ("STOP", Value::Null, at),
        ] {
            assert_eq!(failure_after(&[resumed(), other]), None);
        }
        assert_eq!(failure_after(&[event("RESET", "guest-reset", at)]), None, "its start was not seen");
        let again = ("RESUME", Value::Null, Duration::from_millis(4));
        assert_eq!(failure_after(&[resumed(), event("RESET", "guest-reset", at), again]), None);
    }
}
