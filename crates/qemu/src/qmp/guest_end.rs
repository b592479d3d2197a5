//! How a guest has ended, by QEMU's events: `SHUTDOWN` comes before QEMU exits, or before it stops its guest for good (`-no-shutdown`), and names
//! the cause; `GUEST_PANICKED` comes when a panicked guest is stopped. So a QEMU that exits without them has crashed, or was killed.

use std::fmt;

use serde_json::Value;
use sterna_wire::text::cleaned;

/// How a guest has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestEnd {
    /// The guest has shut itself down, perhaps because it was asked to (`system_powerdown`).
    ShutDown,
    /// The guest has reset itself, and QEMU ends at a reset.
    Reset,
    /// The guest has panicked, and does not go on.
    Panicked,
    /// The guest has ended by itself in another way: a cause of QEMU's `ShutdownCause` (qapi/run-state.json).
    Other(String),
    /// Something else has ended QEMU: such a cause.
    ByOthers(String),
}

impl GuestEnd {
    /// Returns the end that an event reports, if it reports one.
    pub(super) fn of_event(name: &str, data: &Value) -> Option<Self> {
        let text = |key: &str| data[key].as_str().unwrap_or_default();
        match (name, text("reason"), text("action")) {
            ("SHUTDOWN", "guest-shutdown", _) => Some(Self::ShutDown),
            ("SHUTDOWN", "guest-reset", _) => Some(Self::Reset),
            ("SHUTDOWN", "guest-panic", _) | ("GUEST_PANICKED", _, "pause" | "poweroff") => Some(Self::Panicked),
            ("SHUTDOWN", cause, _) if data["guest"] == true => Some(Self::Other(cleaned(cause))),
            ("SHUTDOWN", cause, _) => Some(Self::ByOthers(cleaned(cause))),
            _ => None,
        }
    }

    /// Returns whether an event shows that the guest goes on after such an end: it was reset, or resumed.
    pub(super) fn is_over_at(name: &str) -> bool {
        matches!(name, "RESET" | "RESUME")
    }

    /// Returns whether the guest has ended by itself. A QEMU that has not started its guest reports no such end.
    pub fn by_itself(&self) -> bool {
        !matches!(self, Self::ByOthers(_))
    }
}

impl fmt::Display for GuestEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::ShutDown => "the guest has shut itself down",
            Self::Reset => "the guest has reset itself, and its QEMU ends at a reset (-no-reboot)",
            Self::Panicked => "the guest has panicked",
            Self::Other(cause) => return write!(f, "the guest has ended itself (QEMU: {cause})"),
            Self::ByOthers(cause) => match cause.as_str() {
                "host-qmp-quit" => "another program has ended it (`quit`)",
                "host-qmp-system-reset" => {
                    "another program has reset its guest (`system_reset`), and it ends at a reset (-no-reboot)"
                }
                "host-signal" => "a signal has ended it",
                "host-ui" => "its window was closed",
                "host-error" => "it has met an error of the host",
                _ => return write!(f, "something else has ended it (QEMU: {cause})"),
            },
        };
        f.write_str(text)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_causes_of_the_guest_are_ends_by_itself() {
        let of = |guest: bool, reason: &str| {
            GuestEnd::of_event("SHUTDOWN", &json!({ "guest": guest, "reason": reason })).unwrap()
        };
        assert_eq!(of(true, "guest-shutdown"), GuestEnd::ShutDown);
        assert_eq!(of(true, "guest-reset"), GuestEnd::Reset);
        assert_eq!(of(true, "guest-panic"), GuestEnd::Panicked);
        assert_eq!(of(true, "subsystem-reset"), GuestEnd::Other("subsystem-reset".into()));
        for cause in ["host-qmp-quit", "host-signal", "host-ui", "host-error", "host-qmp-system-reset", "quantum"] {
            let end = of(false, cause);
            assert!(!end.by_itself() && !end.to_string().contains("the guest has"), "{end}");
        }
        assert!(of(true, "guest-shutdown").by_itself());
        assert!(!of(false, "x\x1b[31m").to_string().contains('\x1b'));
    }

    #[test]
    fn a_panic_is_an_end_unless_the_guest_runs_on() {
        let of = |action: &str| GuestEnd::of_event("GUEST_PANICKED", &json!({ "action": action }));
        assert_eq!((of("pause"), of("poweroff")), (Some(GuestEnd::Panicked), Some(GuestEnd::Panicked)));
        assert_eq!((of("run"), GuestEnd::of_event("STOP", &Value::Null)), (None, None));
    }
}
