//! QEMU's run state (`query-status`), and what each state means for a guest: one table, used wherever Sterna concludes where a guest is.

use std::fmt;

use sterna_wire::text::cleaned;

/// A run state by QEMU's name (`RunState` in qapi/run-state.json).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunState(String);

/// What a run state means for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The guest executes.
    Executes,
    /// The guest is stopped, and `cont` lets it go on.
    Stopped,
    /// The guest is stopped, and `cont` is refused before a reset (`system_reset`).
    NeedsReset,
    /// QEMU's own migration has the guest, or had it.
    Migrated,
    /// QEMU waits for a guest.
    Incoming,
    /// A release of QEMU that this table does not know.
    Unknown,
}

/// `cont` is refused where `runstate_needs_reset` holds (softmmu/runstate.c, later system/runstate.c). A guest that was reset while it was
/// stopped is in `prelaunch`.
const STATES: &[(&str, Meaning)] = &[
    ("running", Meaning::Executes),
    // The guest has suspended itself to RAM; a device or `system_wakeup` wakes it.
    ("suspended", Meaning::Executes),
    ("paused", Meaning::Stopped),
    ("prelaunch", Meaning::Stopped),
    ("debug", Meaning::Stopped),
    ("io-error", Meaning::Stopped),
    ("watchdog", Meaning::Stopped),
    ("guest-panicked", Meaning::Stopped),
    ("save-vm", Meaning::Stopped),
    ("restore-vm", Meaning::Stopped),
    ("internal-error", Meaning::NeedsReset),
    ("shutdown", Meaning::NeedsReset),
    ("finish-migrate", Meaning::Migrated),
    ("postmigrate", Meaning::Migrated),
    ("colo", Meaning::Migrated),
    ("inmigrate", Meaning::Incoming),
];

/// States to which only a guest gets that executes.
const ENDS_OF_EXECUTION: &[&str] = &["shutdown", "internal-error", "io-error", "watchdog", "guest-panicked"];

impl RunState {
    /// Returns the state of this name.
    pub fn named(name: &str) -> Self {
        Self(cleaned(name))
    }

    /// Returns QEMU's name of it.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Returns what it means for the guest.
    pub fn meaning(&self) -> Meaning {
        STATES.iter().find(|(name, _)| *name == self.0).map_or(Meaning::Unknown, |(_, meaning)| *meaning)
    }

    /// Returns why a guest in this state does not execute: a clause that is true whoever has stopped it. None if it executes.
    pub fn why_stopped(&self) -> Option<&'static str> {
        Some(match (self.name(), self.meaning()) {
            (_, Meaning::Executes) => return None,
            ("shutdown", _) => "it has shut down, or was reset where its QEMU does not go on after a reset",
            ("guest-panicked", _) => "it has panicked",
            _ => "another program has stopped it, or it has stopped by itself",
        })
    }

    /// Returns whether a guest that was resumed executes, or did until it stopped by itself.
    pub fn has_executed(&self) -> bool {
        self.meaning() == Meaning::Executes || ENDS_OF_EXECUTION.contains(&self.name())
    }
}

impl fmt::Display for RunState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_states_execute_and_an_unknown_one_means_nothing() {
        let of =
            |wanted| STATES.iter().filter(|(_, meaning)| *meaning == wanted).map(|(name, _)| *name).collect::<Vec<_>>();
        assert_eq!(of(Meaning::Executes), ["running", "suspended"]);
        assert_eq!(of(Meaning::NeedsReset), ["internal-error", "shutdown"]);
        assert_eq!(RunState::named("prelaunch").meaning(), Meaning::Stopped);
        for name in ENDS_OF_EXECUTION {
            assert!(STATES.iter().any(|(known, _)| known == name) && RunState::named(name).has_executed(), "{name}");
        }
        for name in ["paused", "prelaunch", "inmigrate", "postmigrate", "quantum"] {
            assert!(!RunState::named(name).has_executed(), "{name}");
        }
        assert_eq!(RunState::named("quantum").meaning(), Meaning::Unknown);
        assert_eq!(RunState::named("suspended").why_stopped(), None);
        assert!(RunState::named("shutdown").why_stopped().is_some_and(|why| why.contains("it has shut down")));
        assert_eq!(RunState::named("pau\x1b[31msed").name().find('\x1b'), None);
    }
}
