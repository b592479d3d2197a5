//! What must always hold, and the drivers that break it: one is worth nothing without the other.

use super::world::{DestinationProcess, Mode, SourceProcess, State, World};
use stateright::{Model, Property};
use sterna_wire::switchover::{SourceEnd, SourceState};

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
            let mut actions = Vec::new();
            world.actions(state, &mut actions);
            // What a source keeps after the guest has run elsewhere is no copy any more.
            let copies = (state.source_qemu != SourceProcess::Gone && state.source_disk != Some(SourceState::Finished))
                || matches!(state.destination_qemu, DestinationProcess::Paused | DestinationProcess::Running);
            actions.iter().any(|action| !action.trouble())
                || !copies
                || state.source_qemu.runs() != destination_runs(state)
                || (state.source_qemu == SourceProcess::PausedByOthers && !destination_runs(state))
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
