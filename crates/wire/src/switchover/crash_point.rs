//! Names for the moments at which a test build of the gateway kills itself: before and after every action of either
//! machine. `tests/switchover_model.rs` checks that each of them is reached; the end-to-end tests go through them all.

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
    /// The source has QEMU start its migration.
    SourceStartMigration = "source" "start-migration";
    /// The source says `Prepare`.
    SourceSendPrepare = "source" "send-prepare";
    /// The source passes SHUT on to its QEMU.
    SourceRelayShut = "source" "relay-shut";
    /// The source writes the decision.
    SourceRecordCommitted = "source" "record-committed";
    /// The source says `Commit`.
    SourceSendCommit = "source" "send-commit";
    /// The source ends its QEMU, whose guest runs at the destination.
    SourceEndGuest = "source" "end-guest";
    /// The source writes `finished`.
    SourceRecordFinished = "source" "record-finished";
    /// The source writes `aborted`.
    SourceRecordAborted = "source" "record-aborted";
    /// The source ends QEMU's migration.
    SourceEndMigration = "source" "end-migration";
    /// The source says `Abort`.
    SourceSendAbort = "source" "send-abort";
    /// The source has QEMU run the guest again.
    SourceCont = "source" "cont";
    /// The source writes `resumed`.
    SourceRecordResumed = "source" "record-resumed";
    /// The source writes that its QEMU is gone.
    SourceRecordGone = "source" "record-gone";
    /// The source answers that it committed.
    SourceSendOutcomeCommitted = "source" "send-outcome-committed";
    /// The source answers that it aborted.
    SourceSendOutcomeAborted = "source" "send-outcome-aborted";
    /// The destination writes `started`.
    DestinationRecordStarted = "destination" "record-started";
    /// The destination has QEMU stay paused after loading.
    DestinationClearAutostart = "destination" "clear-autostart";
    /// The destination lets the stream flow.
    DestinationAcceptStream = "destination" "accept-stream";
    /// The destination writes `prepared`.
    DestinationRecordPrepared = "destination" "record-prepared";
    /// The destination says `Prepared`.
    DestinationSendPrepared = "destination" "send-prepared";
    /// The destination writes `committed`.
    DestinationRecordCommitted = "destination" "record-committed";
    /// The destination has QEMU run the guest.
    DestinationCont = "destination" "cont";
    /// The destination writes `running`.
    DestinationRecordRunning = "destination" "record-running";
    /// The destination says `Running`.
    DestinationSendRunning = "destination" "send-running";
    /// The destination writes `aborted`.
    DestinationRecordAborted = "destination" "record-aborted";
    /// The destination ends its QEMU.
    DestinationQuit = "destination" "quit";
    /// The destination says `Abort`.
    DestinationSendAbort = "destination" "send-abort";
    /// The destination asks what was decided.
    DestinationAskOutcome = "destination" "ask-outcome";
    /// The destination says `Lost`.
    DestinationSendLost = "destination" "send-lost";
}

/// Before an action is performed, or after it (for a record: after it is durable).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Moment {
    /// Nothing of the action has happened.
    Before,
    /// The action has happened, the machine has not been told.
    After,
}

/// A named moment to crash at, such as `source.before-record-committed`.
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
    /// The step that this action is, if one may crash around it.
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
    /// The step that this action is, if one may crash around it.
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
