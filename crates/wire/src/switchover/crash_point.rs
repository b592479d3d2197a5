//! Crash points: the moments at which a test build of the gateway kills itself, before and after every action of either
//! machine. `tests/switchover_model.rs` checks that each is reached; the end-to-end tests go through all of them.

use super::{DestinationAction, DestinationState, Outcome, SourceAction, SourceState, SwitchoverMessage};
use std::fmt;
use std::str::FromStr;

macro_rules! steps {
    ($($(#[$doc:meta])* $variant:ident = $side:literal $name:literal;)*) => {
        /// An action at a commit transition, of one side.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Step { $($(#[$doc])* $variant,)* }

        impl Step {
            /// Every step, the source's first, in the order of a migration.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            fn side_and_name(self) -> (&'static str, &'static str) {
                match self { $(Self::$variant => ($side, $name),)* }
            }
        }

        impl CrashPoint {
            /// Every crash point.
            pub const ALL: &[Self] = &[$(
                Self { moment: Moment::Before, step: Step::$variant },
                Self { moment: Moment::After, step: Step::$variant },
            )*];
        }
    };
}

steps! {
    /// The source writes `started`.
    SourceRecordStarted = "source" "record-started";
    /// The source makes QEMU start its migration.
    SourceStartMigration = "source" "start-migration";
    /// The source sends `Prepare`.
    SourceSendPrepare = "source" "send-prepare";
    /// The source forwards SHUT to its QEMU.
    SourceRelayShut = "source" "relay-shut";
    /// The source writes the decision.
    SourceRecordCommitted = "source" "record-committed";
    /// The source sends `Commit`.
    SourceSendCommit = "source" "send-commit";
    /// The source ends its QEMU, whose guest runs at the destination.
    SourceEndGuest = "source" "end-guest";
    /// The source writes `finished`.
    SourceRecordFinished = "source" "record-finished";
    /// The source writes `aborted`.
    SourceRecordAborted = "source" "record-aborted";
    /// The source ends QEMU's migration.
    SourceEndMigration = "source" "end-migration";
    /// The source sends `Abort`.
    SourceSendAbort = "source" "send-abort";
    /// The source makes QEMU resume the guest.
    SourceCont = "source" "cont";
    /// The source writes `resumed`.
    SourceRecordResumed = "source" "record-resumed";
    /// The source writes that its QEMU is gone.
    SourceRecordGone = "source" "record-gone";
    /// The source replies that it committed.
    SourceSendOutcomeCommitted = "source" "send-outcome-committed";
    /// The source replies that it aborted.
    SourceSendOutcomeAborted = "source" "send-outcome-aborted";
    /// The destination writes `started`.
    DestinationRecordStarted = "destination" "record-started";
    /// The destination makes QEMU stay paused after loading.
    DestinationClearAutostart = "destination" "clear-autostart";
    /// The destination lets the stream through to QEMU.
    DestinationAcceptStream = "destination" "accept-stream";
    /// The destination writes `prepared`.
    DestinationRecordPrepared = "destination" "record-prepared";
    /// The destination sends `Prepared`.
    DestinationSendPrepared = "destination" "send-prepared";
    /// The destination writes `committed`.
    DestinationRecordCommitted = "destination" "record-committed";
    /// The destination makes QEMU run the guest.
    DestinationCont = "destination" "cont";
    /// The destination writes `running`.
    DestinationRecordRunning = "destination" "record-running";
    /// The destination sends `Running`.
    DestinationSendRunning = "destination" "send-running";
    /// The destination writes `aborted`.
    DestinationRecordAborted = "destination" "record-aborted";
    /// The destination ends its QEMU.
    DestinationQuit = "destination" "quit";
    /// The destination sends `Abort`.
    DestinationSendAbort = "destination" "send-abort";
    /// The destination asks for the decision.
    DestinationAskOutcome = "destination" "ask-outcome";
    /// The destination sends `Lost`.
    DestinationSendLost = "destination" "send-lost";
}

/// Before an action is performed, or after it (for a record: after it is durable).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Moment {
    /// Nothing of the action has happened.
    Before,
    /// The action has happened, its completion has not been reported to the machine.
    After,
}

/// A named crash point, such as `source.before-record-committed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CrashPoint {
    /// Before or after.
    pub moment: Moment,
    /// The action.
    pub step: Step,
}

impl fmt::Display for CrashPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (side, name) = self.step.side_and_name();
        let moment = match self.moment {
            Moment::Before => "before",
            Moment::After => "after",
        };
        write!(f, "{side}.{moment}-{name}")
    }
}

impl FromStr for CrashPoint {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|point| point.to_string() == name);
        found.copied().ok_or_else(|| format!("{name:?} is no crash point; one is, for example, {}", Self::ALL[0]))
    }
}

impl SourceAction {
    /// Returns the crash step of this action, if it has one.
    pub fn step(&self) -> Option<Step> {
        Some(match self {
            Self::WriteRecord(SourceState::Started) => Step::SourceRecordStarted,
            Self::WriteRecord(SourceState::Committed) => Step::SourceRecordCommitted,
            Self::WriteRecord(SourceState::Aborted) => Step::SourceRecordAborted,
            Self::WriteRecord(SourceState::Resumed) => Step::SourceRecordResumed,
            Self::WriteRecord(SourceState::Finished) => Step::SourceRecordFinished,
            Self::WriteRecord(SourceState::Gone) => Step::SourceRecordGone,
            Self::EndGuest => Step::SourceEndGuest,
            Self::StartMigration => Step::SourceStartMigration,
            Self::Send(SwitchoverMessage::Prepare) => Step::SourceSendPrepare,
            Self::Send(SwitchoverMessage::Commit) => Step::SourceSendCommit,
            Self::Send(SwitchoverMessage::Abort { .. }) => Step::SourceSendAbort,
            Self::Send(SwitchoverMessage::Outcome(Outcome::Committed)) => Step::SourceSendOutcomeCommitted,
            Self::Send(SwitchoverMessage::Outcome(Outcome::Aborted)) => Step::SourceSendOutcomeAborted,
            Self::RelayShut => Step::SourceRelayShut,
            Self::EndMigration => Step::SourceEndMigration,
            Self::Cont => Step::SourceCont,
            Self::Send(_) | Self::AnnounceSelf | Self::Connect | Self::Done(_) => return None,
        })
    }
}

impl DestinationAction {
    /// Returns the crash step of this action, if it has one.
    pub fn step(&self) -> Option<Step> {
        Some(match self {
            Self::WriteRecord(DestinationState::Started) => Step::DestinationRecordStarted,
            Self::WriteRecord(DestinationState::Prepared) => Step::DestinationRecordPrepared,
            Self::WriteRecord(DestinationState::Committed) => Step::DestinationRecordCommitted,
            Self::WriteRecord(DestinationState::Running) => Step::DestinationRecordRunning,
            Self::WriteRecord(DestinationState::Aborted) => Step::DestinationRecordAborted,
            Self::ClearAutostart => Step::DestinationClearAutostart,
            Self::AcceptStream => Step::DestinationAcceptStream,
            Self::Send(SwitchoverMessage::Prepared) => Step::DestinationSendPrepared,
            Self::Send(SwitchoverMessage::Running) => Step::DestinationSendRunning,
            Self::Send(SwitchoverMessage::Abort { .. }) => Step::DestinationSendAbort,
            Self::Send(SwitchoverMessage::AskOutcome) => Step::DestinationAskOutcome,
            Self::Send(SwitchoverMessage::Lost { .. }) => Step::DestinationSendLost,
            Self::Cont => Step::DestinationCont,
            Self::Quit => Step::DestinationQuit,
            Self::Send(_) | Self::AnnounceSelf | Self::AwaitSource | Self::Done(_) => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_parse_back() {
        let names: std::collections::BTreeSet<String> = CrashPoint::ALL.iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), CrashPoint::ALL.len());
        assert!(names.contains("source.before-record-committed") && names.contains("destination.after-cont"));
        for point in CrashPoint::ALL {
            assert_eq!(point.to_string().parse::<CrashPoint>().unwrap(), *point);
        }
        assert!("source.before-lunch".parse::<CrashPoint>().is_err());
    }
}
