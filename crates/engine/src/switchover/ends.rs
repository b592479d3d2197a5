//! What an end of the state machine means: the outcome for the report, where the guest is, and the reason.

use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{DestinationEnd, SourceEnd};

use super::receiving::Receiving;
use super::{DestinationKernel, DestinationOutcome, Ledger, SourceKernel};
use crate::migration::GuestState;
use crate::report::{Outcome, ReceiveReport};

/// How a migration ended on one side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// For the report.
    pub outcome: Outcome,
    /// Where the guest is.
    pub guest: GuestState,
    /// Why the migration did not complete; none if it did.
    pub reason: Option<Reason>,
}

impl Ending {
    /// Makes the ending of a migration that did not complete.
    pub fn failed(outcome: Outcome, guest: GuestState, reason: Reason) -> Self {
        Self { outcome, guest, reason: Some(reason) }
    }

    /// Returns the reason, and its kind, for the report.
    pub fn for_report(&self) -> (Option<String>, Option<ErrorKind>) {
        let kind = self.reason.as_ref().map(|reason| match self.outcome {
            Outcome::Cancelled => ErrorKind::Cancelled,
            _ => reason.kind,
        });
        (self.reason.as_ref().map(Reason::to_string), kind)
    }

    /// Returns the destination's report of a migration that has ended so. `source`: its address.
    pub fn received(&self, receiving: &Receiving, source: String) -> ReceiveReport {
        let (reason, kind) = self.for_report();
        let (interruptions, interrupted_ms) = receiving.interruptions.figures();
        ReceiveReport {
            id: receiving.acceptor.session().id.to_string(),
            outcome: self.outcome,
            reason,
            kind,
            source,
            placement: receiving.placement.clone(),
            load_ms: receiving.figures.load_ms,
            start_ms: receiving.figures.start_ms,
            interruptions,
            interrupted_ms,
            guest_ended: receiving.figures.guest_ended.clone(),
        }
    }

    /// Makes the ending of a migration whose guest was started at the destination, unless its record is not settled on the disk: that has to be
    /// durable before the migration is reported as ended. `runs`: where the guest runs, and who has confirmed that.
    fn started(ledger: &Ledger, runs: &str) -> Self {
        let does_not_run = ledger.record().does_not_run.as_deref();
        let guest = GuestState::BelongsToDestination;
        match (ledger.unsettled(), does_not_run) {
            (None, None) => Self { outcome: Outcome::Completed, guest, reason: None },
            (None, Some(why)) => {
                let reason = Reason::new(ErrorKind::DoesNotRun, why);
                Self::failed(Outcome::DoesNotRun, GuestState::DoesNotRun, reason)
            }
            (Some(unwritten), why) => {
                let started = why.map(|why| format!("the guest does not run at the destination ({why})"));
                let started = started.as_deref().unwrap_or(runs);
                let text = format_args!("{started}, but the record could not be written: {unwritten}");
                Self::failed(Outcome::Unconfirmed, guest, Reason::new(ErrorKind::Record, text))
            }
        }
    }
}

impl<E: Send + 'static> SourceKernel<'_, E> {
    /// Returns what the end of the loop means.
    pub fn ending(&self, end: SourceEnd) -> Ending {
        let not_moved = if self.cancelled() { Outcome::Cancelled } else { Outcome::Failed };
        match end {
            SourceEnd::Finished => {
                Ending::started(&self.ledger, "the destination has confirmed that the guest runs there")
            }
            SourceEnd::Aborted { reason } => match &self.guest_end {
                Some(end) => {
                    let reason = Reason::new(ErrorKind::GuestEnded, &end.what);
                    Ending::failed(Outcome::GuestEnded, GuestState::EndedAtSource, reason)
                }
                None => Ending::failed(not_moved, GuestState::RunsAtSource, reason),
            },
            SourceEnd::NotStarted => {
                let why = self.ledger.unwritten().unwrap_or_default();
                let text = format_args!("the migration's record could not be written: {why}");
                Ending::failed(Outcome::Failed, GuestState::Untouched, Reason::new(ErrorKind::Record, text))
            }
            SourceEnd::GuestGone if self.post_copy_begun() && self.moments.decided.is_some() => {
                let text = "the source's monitor has ended, and part of the guest's memory with it";
                Ending::failed(Outcome::Lost, GuestState::LacksMemory, Reason::new(ErrorKind::Monitor, text))
            }
            SourceEnd::GuestGone => {
                let how = self.guest_end.as_ref().map(|end| format!(": {}", end.what)).unwrap_or_default();
                let reason = Reason::new(ErrorKind::Monitor, format_args!("the source's monitor has ended{how}"));
                // Before its last round, the destination cannot have all of the guest.
                let copied = self.moments.pausing.is_some() || self.moments.paused.is_some();
                let guest = if copied { GuestState::PausedAtSource } else { GuestState::EndedAtSource };
                Ending::failed(Outcome::Lost, guest, reason)
            }
            SourceEnd::MemoryLost { reason } | SourceEnd::Unserved { reason } => {
                Ending::failed(Outcome::Lost, GuestState::LacksMemory, reason)
            }
            SourceEnd::Undelivered { reason } => {
                Ending::failed(Outcome::Unconfirmed, GuestState::BelongsToDestination, reason)
            }
            SourceEnd::DestinationLost { never_ran, reason } => {
                let ran = if never_ran { "it never ran there" } else { "it may have run there" };
                let reason =
                    reason.within(format_args!("the destination has lost the guest that was given to it ({ran})"));
                Ending::failed(Outcome::Unconfirmed, GuestState::BelongsToDestination, reason)
            }
            SourceEnd::Stuck { reason } => Ending::failed(Outcome::Stuck, GuestState::PausedAtSource, reason),
            SourceEnd::Conflict => {
                let text = "the guest runs on a side that it does not belong to, because somebody else started it: if it runs on both \
                            sides, stop one of them at once";
                Ending::failed(Outcome::Stuck, GuestState::RunsTwice, Reason::other(text))
            }
        }
    }

    /// Returns the warning about a record that does not hold the end of a migration that was not completed.
    pub fn record_warning(&self, ending: &Ending) -> Option<String> {
        if !matches!(ending.outcome, Outcome::Failed | Outcome::Cancelled | Outcome::GuestEnded) {
            return None;
        }
        let (why, state) = self.ledger.unsettled().zip(self.ledger.on_disk())?;
        let (id, state) = (self.session.id, state.name());
        Some(format!(
            "this end could not be written to the record, which still holds the state `{state}`: {why}. Put that right, then run \
             `sterna recover {id}` here: until then this guest takes part in no other migration"
        ))
    }
}

impl<E: Send + 'static> DestinationKernel<'_, E> {
    /// Returns what the end of the loop means.
    pub fn ending(&self, outcome: DestinationOutcome) -> Ending {
        let end = match outcome {
            DestinationOutcome::Machine(end) => end,
            DestinationOutcome::GivenUp(reason) => {
                return Ending::failed(Outcome::Unconfirmed, GuestState::PausedAtDestination, reason);
            }
        };
        match end {
            DestinationEnd::Running => Ending::started(&self.ledger, "the guest runs here"),
            // The first failure is the reason, and the source may have cancelled too.
            DestinationEnd::Discarded { reason } if self.cancelled() && reason.kind == ErrorKind::Cancelled => {
                Ending::failed(Outcome::Cancelled, GuestState::NotHere, reason)
            }
            DestinationEnd::Discarded { reason } => match &self.ended_at_source {
                Some(end) => Ending::failed(Outcome::GuestEnded, GuestState::NotHere, end.clone()),
                None => Ending::failed(Outcome::Failed, GuestState::NotHere, reason),
            },
            DestinationEnd::Lost { reason } => Ending::failed(Outcome::Lost, GuestState::NotHere, reason),
            DestinationEnd::MemoryLost { reason } => Ending::failed(Outcome::Lost, GuestState::LacksMemory, reason),
            // No thread handles the guest's page faults any more.
            DestinationEnd::Stuck { reason } if self.lacks_memory() => {
                Ending::failed(Outcome::Lost, GuestState::LacksMemory, reason)
            }
            DestinationEnd::Stuck { reason } => {
                Ending::failed(Outcome::Unconfirmed, GuestState::PausedAtDestination, reason)
            }
            DestinationEnd::Conflict => {
                let reason = Reason::other("the guest was started here by somebody else: stop one of the two");
                Ending::failed(Outcome::Unconfirmed, GuestState::RunsTwice, reason)
            }
        }
    }
}
