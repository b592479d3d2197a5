//! Exit codes: one for each kind of ending that a script has to distinguish. The table is the only place where they are listed; help is
//! printed from it, and a test compares docs/operating.md with it.

use std::process::ExitCode;
use std::sync::LazyLock;

use sterna_engine::report::Outcome;
use sterna_qemu::gateway::GatewayError;
use sterna_wire::reason::ErrorKind;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Completed.
    Completed = 0,
    /// Failed; the guest continues at the source.
    Failed = 1,
    /// The options are wrong; nothing was done.
    Usage = 2,
    /// Cancelled; the guest continues at the source.
    Cancelled = 3,
    /// The switchover was begun, but is not confirmed.
    Unconfirmed = 4,
    /// The guest was lost with its QEMU.
    Lost = 5,
    /// This host refuses; nothing was touched.
    Refused = 6,
    /// No connection with the other host; nothing was touched.
    Unreachable = 7,
    /// The other host refuses; nothing was touched.
    PeerRefused = 8,
    /// The system does not permit what is needed; nothing was touched.
    NotPermitted = 9,
    /// The guest has ended by itself at the source.
    GuestEnded = 10,
    /// The guest has arrived and does not run.
    DoesNotRun = 11,
}

/// All exit codes with their meaning, in the order of their numbers.
pub(crate) const EXITS: &[(Exit, &str)] = &[
    (Exit::Completed, "completed, and on the disk; recover: settled; send --dry-run: the migration would begin"),
    (Exit::Failed, "failed after it had begun, the guest continues at the source; recover: not settled"),
    (Exit::Usage, "the options are wrong, nothing was done"),
    (Exit::Cancelled, "cancelled (Ctrl-C, SIGTERM, SIGHUP), the guest continues at the source"),
    (
        Exit::Unconfirmed,
        "unconfirmed: the switchover was begun, but not confirmed; run `sterna recover ID` on both hosts",
    ),
    (Exit::Lost, "lost: the QEMU that had the guest died; the message says what can be done"),
    (Exit::Refused, "this host refuses (QEMU, its guest, its settings, a device, a file), nothing was touched"),
    (Exit::Unreachable, "no connection with the other host in time, or without proof who it is, nothing was touched"),
    (Exit::PeerRefused, "the other host refuses, nothing was touched"),
    (Exit::NotPermitted, "this process may not do on this host what it needs, nothing was touched"),
    (
        Exit::GuestEnded,
        "the guest has ended by itself at the source (it has shut down, or has panicked) before it was moved; nothing is to be recovered",
    ),
    (
        Exit::DoesNotRun,
        "arrived, does not run: the guest was started at the destination and certainly does not run; the source's QEMU is kept, paused",
    ),
];

/// The end of the help of commands that migrate.
pub(crate) static EXIT_CODES: LazyLock<String> = LazyLock::new(|| {
    let rows: String = EXITS.iter().map(|(exit, meaning)| format!("\n  {}  {meaning}", *exit as u8)).collect();
    format!(
        "Exit codes:{rows}\nA report file that cannot be written at the end is an error message, but does not change the code."
    )
});

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

impl From<Outcome> for Exit {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Completed => Self::Completed,
            Outcome::Cancelled => Self::Cancelled,
            Outcome::Failed => Self::Failed,
            Outcome::Unconfirmed | Outcome::Stuck => Self::Unconfirmed,
            Outcome::Lost => Self::Lost,
            Outcome::GuestEnded => Self::GuestEnded,
            Outcome::DoesNotRun => Self::DoesNotRun,
        }
    }
}

/// The exit codes of failures before anything was touched. With every other kind this host refuses.
const UNTOUCHED: &[(ErrorKind, Exit)] = &[
    (ErrorKind::Cancelled, Exit::Cancelled),
    (ErrorKind::NotPermitted, Exit::NotPermitted),
    (ErrorKind::Network, Exit::Unreachable),
    (ErrorKind::ConnectionLost, Exit::Unreachable),
    (ErrorKind::Refused, Exit::PeerRefused),
    (ErrorKind::OtherSide, Exit::PeerRefused),
];

impl From<ErrorKind> for Exit {
    /// Of a failure before anything was touched.
    fn from(kind: ErrorKind) -> Self {
        UNTOUCHED.iter().find(|(of, _)| *of == kind).map_or(Self::Refused, |(_, exit)| *exit)
    }
}

impl From<&GatewayError> for Exit {
    fn from(error: &GatewayError) -> Self {
        error.outcome.map_or_else(|| error.kind.into(), Self::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_code_once_in_order() {
        let codes: Vec<u8> = EXITS.iter().map(|(exit, _)| *exit as u8).collect();
        assert_eq!(codes, (0..=11).collect::<Vec<u8>>());
    }

    #[test]
    fn each_kind_before_anything_was_touched_has_a_code_that_says_so() {
        let untouched = [Exit::Cancelled, Exit::Refused, Exit::Unreachable, Exit::PeerRefused, Exit::NotPermitted];
        for kind in ErrorKind::ALL {
            assert!(untouched.contains(&kind.into()), "{kind:?}");
        }
    }

    #[test]
    fn the_document_has_the_same_codes_with_the_same_meaning() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operating.md");
        let document = std::fs::read_to_string(path).unwrap();
        let rows: String = EXITS.iter().map(|(exit, meaning)| format!("| {} | {meaning} |\n", *exit as u8)).collect();
        assert!(document.contains(&format!("| code | meaning |\n|---|---|\n{rows}\n")), "as this:\n{rows}");
    }
}
