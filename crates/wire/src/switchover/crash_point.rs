//! Crash points: the moments at which a test build of a driver kills itself, before and after every action of either
//! machine. `tests/switchover_model.rs` checks that each is reached; the end-to-end tests go through all of them.

use super::{DestinationAction, DestinationState, Outcome, SourceAction, SourceState, SwitchoverMessage};
use std::fmt;
use std::str::FromStr;

macro_rules! steps {
    (
        every: { $($(#[$doc:meta])* $variant:ident = $side:literal $name:literal;)* }
        post_copy: { $($(#[$post_doc:meta])* $post_variant:ident = $post_side:literal $post_name:literal;)* }
    ) => {
        /// An action at a commit transition, of one side.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Step { $($(#[$doc])* $variant,)* $($(#[$post_doc])* $post_variant,)* }

        impl Step {
            fn side_and_name(self) -> (&'static str, &'static str) {
                match self {
                    $(Self::$variant => ($side, $name),)*
                    $(Self::$post_variant => ($post_side, $post_name),)*
                }
            }
        }

        impl CrashPoint {
            /// The crash points of every migration, the source's first, in the order of a migration.
            pub const ALL: &[Self] = &[$(
                Self { moment: Moment::Before, step: Step::$variant },
                Self { moment: Moment::After, step: Step::$variant },
            )*];

            /// The crash points that only a migration in post-copy has, besides [`CrashPoint::ALL`].
            pub const POST_COPY: &[Self] = &[$(
                Self { moment: Moment::Before, step: Step::$post_variant },
                Self { moment: Moment::After, step: Step::$post_variant },
            )*];
        }
    };
}

steps! {
    every: {
        /// The source writes `started`.
        SourceRecordStarted = "source" "record-started";
        /// The source begins to move the guest.
        SourceStartMigration = "source" "start-migration";
        /// The source sends `Prepare`.
        SourceSendPrepare = "source" "send-prepare";
        /// The source has its monitor complete (QEMU: forwards SHUT).
        SourceRelayShut = "source" "relay-shut";
        /// The source writes the decision.
        SourceRecordCommitted = "source" "record-committed";
        /// The source sends `Commit`.
        SourceSendCommit = "source" "send-commit";
        /// The source ends its monitor, whose guest runs at the destination.
        SourceEndGuest = "source" "end-guest";
        /// The source writes `finished`.
        SourceRecordFinished = "source" "record-finished";
        /// The source writes `aborted`.
        SourceRecordAborted = "source" "record-aborted";
        /// The source ends its monitor's migration.
        SourceEndMigration = "source" "end-migration";
        /// The source sends `Abort`.
        SourceSendAbort = "source" "send-abort";
        /// The source resumes the guest.
        SourceCont = "source" "cont";
        /// The source writes `resumed`.
        SourceRecordResumed = "source" "record-resumed";
        /// The source writes that its monitor is gone.
        SourceRecordGone = "source" "record-gone";
        /// The source replies that it committed.
        SourceSendOutcomeCommitted = "source" "send-outcome-committed";
        /// The source replies that it aborted.
        SourceSendOutcomeAborted = "source" "send-outcome-aborted";
        /// The destination writes `started`.
        DestinationRecordStarted = "destination" "record-started";
        /// The destination makes the guest stay paused after loading.
        DestinationClearAutostart = "destination" "clear-autostart";
        /// The destination lets memory and state through to its monitor.
        DestinationAcceptStream = "destination" "accept-stream";
        /// The destination writes `prepared`.
        DestinationRecordPrepared = "destination" "record-prepared";
        /// The destination sends `Prepared`.
        DestinationSendPrepared = "destination" "send-prepared";
        /// The destination writes `committed`.
        DestinationRecordCommitted = "destination" "record-committed";
        /// The destination starts the guest.
        DestinationCont = "destination" "cont";
        /// The destination writes `running`.
        DestinationRecordRunning = "destination" "record-running";
        /// The destination sends `Running`.
        DestinationSendRunning = "destination" "send-running";
        /// The destination writes `aborted`.
        DestinationRecordAborted = "destination" "record-aborted";
        /// The destination ends its monitor.
        DestinationQuit = "destination" "quit";
        /// The destination sends `Abort`.
        DestinationSendAbort = "destination" "send-abort";
        /// The destination asks for the decision.
        DestinationAskOutcome = "destination" "ask-outcome";
        /// The destination sends `Lost`.
        DestinationSendLost = "destination" "send-lost";
    }
    post_copy: {
        /// The source requests that missing pages are watched.
        SourceSendPostCopy = "source" "send-post-copy";
        /// The source opens the post-copy channel and pauses the guest.
        SourceStartPostCopy = "source" "start-post-copy";
        /// The source sends what the destination lacks.
        SourceServePages = "source" "serve-pages";
        /// The source sends that pages are lost with its monitor.
        SourceSendMemoryLost = "source" "send-memory-lost";
        /// The destination has missing pages watched.
        DestinationWatchMissingPages = "destination" "watch-missing-pages";
        /// The destination sends `PostCopyReady`.
        DestinationSendPostCopyReady = "destination" "send-post-copy-ready";
        /// The destination writes `prepared_incomplete`.
        DestinationRecordPreparedIncomplete = "destination" "record-prepared-incomplete";
        /// The destination writes `committed_incomplete`.
        DestinationRecordCommittedIncomplete = "destination" "record-committed-incomplete";
        /// The destination writes `running_incomplete`.
        DestinationRecordRunningIncomplete = "destination" "record-running-incomplete";
        /// The destination sends `RunningIncomplete`.
        DestinationSendRunningIncomplete = "destination" "send-running-incomplete";
        /// The destination admits new data channels.
        DestinationRenewChannels = "destination" "renew-channels";
        /// The destination sends `MemoryLost`.
        DestinationSendMemoryLost = "destination" "send-memory-lost";
    }
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
        let found = Self::ALL.iter().chain(Self::POST_COPY).find(|point| point.to_string() == name);
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
            Self::StartPostCopy => Step::SourceStartPostCopy,
            Self::ServePages => Step::SourceServePages,
            Self::Send(SwitchoverMessage::PostCopy) => Step::SourceSendPostCopy,
            Self::Send(SwitchoverMessage::MemoryLost { .. }) => Step::SourceSendMemoryLost,
            Self::Send(_)
            | Self::HoldRounds
            | Self::ContinueRounds
            | Self::AnnounceSelf
            | Self::Connect
            | Self::Done(_) => return None,
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
            Self::WriteRecord(DestinationState::PreparedIncomplete) => Step::DestinationRecordPreparedIncomplete,
            Self::WriteRecord(DestinationState::CommittedIncomplete) => Step::DestinationRecordCommittedIncomplete,
            Self::WriteRecord(DestinationState::RunningIncomplete) => Step::DestinationRecordRunningIncomplete,
            Self::WatchMissingPages => Step::DestinationWatchMissingPages,
            Self::RenewChannels => Step::DestinationRenewChannels,
            Self::Send(SwitchoverMessage::PostCopyReady) => Step::DestinationSendPostCopyReady,
            Self::Send(SwitchoverMessage::RunningIncomplete) => Step::DestinationSendRunningIncomplete,
            Self::Send(SwitchoverMessage::MemoryLost { .. }) => Step::DestinationSendMemoryLost,
            Self::Send(_)
            | Self::AnnounceSelf
            | Self::AwaitMemory
            | Self::HangUp
            | Self::AwaitSource
            | Self::Leave
            | Self::Done(_) => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_parse_back() {
        let points = || CrashPoint::ALL.iter().chain(CrashPoint::POST_COPY);
        let names: std::collections::BTreeSet<String> = points().map(ToString::to_string).collect();
        assert_eq!(names.len(), points().count());
        assert!(names.contains("source.before-record-committed") && names.contains("destination.after-cont"));
        for point in points() {
            assert_eq!(point.to_string().parse::<CrashPoint>().unwrap(), *point);
        }
        assert!("source.before-lunch".parse::<CrashPoint>().is_err());
    }
}
