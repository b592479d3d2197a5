//! What must always hold, and the drivers that break it: one is worth nothing without the other.

use super::state::{DestinationProcess, DestinationSterna, Mode, SourceProcess, State};
use super::world::World;
use stateright::{Model, Property};
use sterna_wire::switchover::{DestinationEnd, DestinationState, SourceEnd, SourceState};

/// A driver (or operator) that is wrong in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// Right in every way.
    None,
    /// Leaves out the record `aborted`.
    ResumesWithoutRecord,
    /// Never clears the destination QEMU's autostart.
    LeavesAutostart,
    /// Feeds the stream before the `stop` is confirmed.
    FeedsBeforeStop,
    /// Calls the decision written before it is durable.
    CommitsBeforeDurable,
    /// Takes a relayed SHUT for QEMU's `completed`.
    CommitsBeforeCompleted,
    /// Resumes the source when the connection breaks after the decision.
    ResumesAfterDecision,
    /// Starts the prepared destination when the connection breaks.
    ImpatientDestination,
    /// Discards the prepared destination when the connection breaks.
    ForgetfulDestination,
    /// Says `Prepared` without having written it.
    PreparedNotWritten,
    /// `recover` takes a prepared-looking source without decision for a committed one.
    RecoverPresumesCommit,
    /// A source that has decided does not connect again.
    NeverReconnects,
    /// `recover --fenced-peer` at the source while the destination is alive.
    SourceFencesLiving,
    /// `recover --fenced-peer` at the destination while the source is alive.
    DestinationFencesLiving,
    /// No lock: `recover` beside a living `send`.
    NoLock,
    /// Nobody calls `recover`.
    NoRecover,
    /// Does not tell of write leases.
    ForgetsLeases,
    /// Ends the source's QEMU at the decision, before the destination has confirmed that the guest runs there.
    EndsUnconfirmed,
    /// Tells the destination to give up together with the order to end QEMU's migration.
    AbortsBlindly,
    /// In direct mode: decides without looking whether the guest still stands.
    TrustsThatItIsPaused,
    /// In direct mode: `recover` takes a guest that somebody else paused for one that the migration stopped.
    RecoverTakesAnyPause,
    /// Where a lost connection only interrupts the migration: takes a paused guest's rounds for ones that can go on.
    ContinuesWithThePausedGuest,
    /// In post-copy: the source takes a guest that runs without all of its memory for one that needs nothing any more.
    TakesIncompleteForRunning,
    /// In post-copy: after a lost connection the source goes on from its own list, not from the destination's.
    TrustsItsOwnList,
    /// In post-copy: the destination reports that all is there when all was sent.
    TakesSentForPlaced,
    /// In post-copy: what is missing reads as zero from when the connection is lost.
    ReleasesMissingPages,
    /// In post-copy: answers that missing pages are watched although they are not.
    WatchesNothing,
    /// In post-copy: the destination starts the guest although it knows that the channels are broken.
    ForgetsBrokenChannels,
    /// In post-copy: the destination handles no event until what starts the guest has answered.
    WaitsForTheStart,
    /// In post-copy: `recover` at the destination reads the record as if no memory were missing.
    RecoverForgetsMissingMemory,
    /// In post-copy: `recover` at the source neither serves pages nor says that it cannot.
    RecoverIgnoresPages,
    /// In post-copy: `recover` at the source calls pages gone that are there.
    RecoverCallsPagesLost,
}

const NEVER_BOTH: &str = "never do both run";
const DECIDED_FOR_GOOD: &str = "the source never runs after the decision";
const NOT_BEFORE_DECISION: &str = "the destination never runs before the decision";
const EXACTLY_ONE: &str = "where nothing is left to do and a copy is left, exactly one runs";
const NOT_LOST: &str = "the destination never loses the guest unless its QEMU died by itself";
const NO_LATE_WRITE: &str = "no accelerator writes guest RAM under the running guest";
const NOT_ENDED_EARLY: &str = "the source's QEMU is not ended before the guest has run at the destination";
const NOT_ABORTED_BLINDLY: &str = "the destination is told to give up only once the guest runs at the source";
const NOT_LET_RUN: &str = "a guest that somebody else paused is not let run";
const NO_STALE_READ: &str = "a guest never reads a page that was not placed: it waits";
const NOT_FINISHED_EARLY: &str = "memory that is only at the source is not taken for moved";
const NOT_STARTED_BLINDLY: &str = "the guest is not started while nothing can bring what it touches";
const NOT_GIVEN_UP: &str = "memory is called lost only where it is";
const ALL_WELL: &str = "without trouble the guest moves, and all of it";
const ENDS: &str = "where nothing is left to do no process waits for anything";
const NO_CONFLICT: &str = "no machine ever meets a contradiction";

/// As [`MUTANTS`], in direct mode.
pub(crate) const DIRECT_MUTANTS: &[(Mutant, &str)] = &[
    (Mutant::ResumesWithoutRecord, NO_CONFLICT),
    (Mutant::CommitsBeforeDurable, NEVER_BOTH),
    (Mutant::ResumesAfterDecision, NEVER_BOTH),
    (Mutant::NoRecover, EXACTLY_ONE),
    (Mutant::EndsUnconfirmed, NOT_ENDED_EARLY),
    (Mutant::TrustsThatItIsPaused, NEVER_BOTH),
    (Mutant::RecoverTakesAnyPause, NOT_LET_RUN),
];

/// As [`MUTANTS`], in direct mode where a lost connection only interrupts the migration.
pub(crate) const RESUMING_MUTANTS: &[(Mutant, &str)] = &[
    (Mutant::ContinuesWithThePausedGuest, EXACTLY_ONE),
    (Mutant::NeverReconnects, ENDS),
    (Mutant::ResumesAfterDecision, NEVER_BOTH),
    (Mutant::CommitsBeforeDurable, NEVER_BOTH),
];

/// As [`MUTANTS`], in post-copy.
pub(crate) const POST_COPY_MUTANTS: &[(Mutant, &str)] = &[
    (Mutant::TakesIncompleteForRunning, NOT_FINISHED_EARLY),
    (Mutant::TrustsItsOwnList, ENDS),
    (Mutant::TakesSentForPlaced, NOT_FINISHED_EARLY),
    (Mutant::ReleasesMissingPages, NO_STALE_READ),
    (Mutant::WatchesNothing, NO_STALE_READ),
    (Mutant::ForgetsBrokenChannels, NOT_STARTED_BLINDLY),
    (Mutant::WaitsForTheStart, ENDS),
    (Mutant::RecoverForgetsMissingMemory, NOT_FINISHED_EARLY),
    (Mutant::RecoverIgnoresPages, ENDS),
    (Mutant::RecoverCallsPagesLost, NOT_GIVEN_UP),
    (Mutant::ResumesAfterDecision, NEVER_BOTH),
    (Mutant::EndsUnconfirmed, NOT_ENDED_EARLY),
    (Mutant::NeverReconnects, ENDS),
];

/// Each mutant and the property that must catch it.
pub(crate) const MUTANTS: &[(Mutant, &str)] = &[
    // Not `NEVER_BOTH`: `recover` sees the running guest beside the record `committed` and refuses.
    (Mutant::ResumesWithoutRecord, NO_CONFLICT),
    (Mutant::LeavesAutostart, NEVER_BOTH),
    (Mutant::FeedsBeforeStop, NEVER_BOTH),
    (Mutant::CommitsBeforeDurable, NEVER_BOTH),
    (Mutant::CommitsBeforeCompleted, NEVER_BOTH),
    (Mutant::ResumesAfterDecision, NEVER_BOTH),
    (Mutant::ImpatientDestination, NEVER_BOTH),
    (Mutant::ForgetfulDestination, NOT_LOST),
    (Mutant::PreparedNotWritten, NOT_LOST),
    (Mutant::RecoverPresumesCommit, NEVER_BOTH),
    (Mutant::NeverReconnects, EXACTLY_ONE),
    (Mutant::SourceFencesLiving, NEVER_BOTH),
    (Mutant::DestinationFencesLiving, NEVER_BOTH),
    (Mutant::NoLock, NEVER_BOTH),
    (Mutant::NoRecover, EXACTLY_ONE),
    (Mutant::ForgetsLeases, NO_LATE_WRITE),
    (Mutant::EndsUnconfirmed, NOT_ENDED_EARLY),
    (Mutant::AbortsBlindly, NOT_ABORTED_BLINDLY),
];

/// Whether nothing is left to do: nothing but trouble can still happen.
fn is_over(world: &World, state: &State) -> bool {
    let mut actions = Vec::new();
    world.actions(state, &mut actions);
    !actions.iter().any(|action| !action.trouble())
}

/// What is checked in every state (`always`), and what must be reached at all (`sometimes`).
pub(crate) fn properties() -> Vec<Property<World>> {
    fn destination_runs(state: &State) -> bool {
        state.destination_qemu == DestinationProcess::Running
    }
    vec![
        Property::always(NEVER_BOTH, |_, state: &State| !(state.source_qemu.runs() && destination_runs(state))),
        Property::always(DECIDED_FOR_GOOD, |_, state: &State| {
            !(state.decided && !state.source_fenced && state.source_qemu.runs())
        }),
        Property::always(NOT_BEFORE_DECISION, |_, state: &State| {
            !destination_runs(state) || state.decided || state.destination_fenced
        }),
        Property::always(EXACTLY_ONE, |world: &World, state: &State| {
            // What a source keeps after the guest has run elsewhere is no copy any more.
            let copies = (state.source_qemu != SourceProcess::Gone && state.source_disk != Some(SourceState::Finished))
                || matches!(state.destination_qemu, DestinationProcess::Paused | DestinationProcess::Running);
            !is_over(world, state)
                || !copies
                || state.source_qemu.runs() != destination_runs(state)
                || (state.source_qemu == SourceProcess::PausedByOthers && !destination_runs(state))
        }),
        Property::always(NO_STALE_READ, |_, state: &State| {
            !(destination_runs(state) && state.pages.missing > 0 && !state.pages.watched)
        }),
        Property::always(NOT_FINISHED_EARLY, |_, state: &State| {
            let moved = state.source_disk == Some(SourceState::Finished)
                || state.source_end == Some(SourceEnd::Finished)
                || state.destination_disk == Some(DestinationState::Running)
                || state.destination_end == Some(DestinationEnd::Running);
            state.pages.missing == 0 || !moved
        }),
        Property::always(NOT_STARTED_BLINDLY, |_, state: &State| !state.started_blindly),
        Property::always(NOT_GIVEN_UP, |_, state: &State| {
            !matches!(state.destination_end, Some(DestinationEnd::MemoryLost { .. }))
                || state.pages.unplaceable
                || state.source_qemu == SourceProcess::Gone
                || state.destination_restarted
        }),
        Property::always(ALL_WELL, |world: &World, state: &State| {
            let finished = || {
                state.source_end == Some(SourceEnd::Finished)
                    && state.destination_disk == Some(DestinationState::Running)
                    && destination_runs(state)
                    && state.destination.as_ref().is_none_or(|sterna| sterna.ended)
            };
            state.left.total < world.budget.total || !is_over(world, state) || finished()
        }),
        Property::always(ENDS, |world: &World, state: &State| {
            let waits = |sterna: &DestinationSterna| !sterna.ended;
            !is_over(world, state) || (state.source[0].is_none() && !state.destination.as_ref().is_some_and(waits))
        }),
        Property::sometimes("the guest moves in post-copy", |world: &World, state: &State| {
            state.pages.begun && state.source_end == Some(SourceEnd::Finished) && state.destination_left
                || world.mode != Mode::PostCopy
        }),
        Property::sometimes("pages are served anew after a lost connection", |world: &World, state: &State| {
            state.source_end == Some(SourceEnd::Finished) && state.left.losses < world.budget.losses
                || world.mode != Mode::PostCopy
        }),
        Property::sometimes("what starts the guest gets its page over new channels", |world: &World, state: &State| {
            state.destination_qemu == DestinationProcess::StartWaits
                && state.pages.missing == 0
                && state.left.losses < world.budget.losses
                || world.mode != Mode::PostCopy
        }),
        Property::sometimes("a guest that waits for memory is lost", |world: &World, state: &State| {
            matches!(state.source_end, Some(SourceEnd::MemoryLost { .. })) || world.mode != Mode::PostCopy
        }),
        Property::sometimes("pages stay at the source with nobody to send them", |world: &World, state: &State| {
            matches!(state.source_end, Some(SourceEnd::Unserved { .. })) && state.source_qemu == SourceProcess::Stopped
                || world.mode != Mode::PostCopy
        }),
        Property::always(NOT_LET_RUN, |_, state: &State| !state.paused_guest_resumed),
        Property::sometimes("somebody else lets the guest run, and it stays", |world: &World, state: &State| {
            state.source_qemu == SourceProcess::ResumedByOthers && state.source_disk == Some(SourceState::Resumed)
                || world.mode == Mode::Stream
                || world.budget.strangers == 0
        }),
        Property::always(NOT_LOST, |world: &World, state: &State| {
            !matches!(state.source_end, Some(SourceEnd::DestinationLost { .. }))
                || state.left.qemu_deaths < world.budget.qemu_deaths
                || state.left.hosts < world.budget.hosts
                // What is missing can only be placed by the process that died.
                || (state.pages.begun && (state.destination_restarted || state.pages.unplaceable || state.source_qemu.is_gone()))
                || state.destination_fenced
        }),
        Property::always(NO_CONFLICT, |_, state: &State| {
            !state.conflict || state.source_fenced || state.destination_fenced
        }),
        Property::always(NOT_ENDED_EARLY, |_, state: &State| !state.ended_early),
        Property::always(NOT_ABORTED_BLINDLY, |_, state: &State| !state.aborted_blindly),
        Property::always(NO_LATE_WRITE, |_, state: &State| !state.written_under_guest),
        Property::sometimes("the guest moves after an accelerator has written late", |world: &World, state: &State| {
            destination_runs(state) && state.left.silent_devices < world.budget.silent_devices
                || world.budget.silent_devices == 0
        }),
        Property::sometimes("the guest moves after an interruption", |world: &World, state: &State| {
            let lost = state.left.losses < world.budget.losses;
            lost && state.source_end == Some(SourceEnd::Finished) && state.interrupted || !world.resumes
        }),
        Property::sometimes("the guest moves", |_, state: &State| {
            destination_runs(state) && state.source_end == Some(SourceEnd::Finished)
        }),
        Property::sometimes("the guest moves, and nothing is left of it at the source", |_, state: &State| {
            destination_runs(state)
                && state.source_end == Some(SourceEnd::Finished)
                && state.source_qemu == SourceProcess::Gone
        }),
        Property::sometimes("the guest goes on at the source", |_, state: &State| {
            state.source_disk == Some(SourceState::Resumed) && state.source_qemu.runs()
        }),
    ]
}
