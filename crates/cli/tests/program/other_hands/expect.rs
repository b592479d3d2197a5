//! What becomes of a move, derived from the kind of the act and the moment.

use super::Cell;
use super::act::{Act, Done};
use super::moment::Moment;

/// What becomes of the move and the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// It completes: the guest executes at the destination.
    Moves,
    /// It fails: the guest executes at the source.
    StaysAndRuns,
    /// One of both, depending on the instant.
    MovesOrStays,
    /// It completes, at the latest when an operator has ended the source's QEMU, whose disks keep the destination from starting the guest.
    MovesAtLast,
    /// It fails, and the guest is stopped at the source, because another program has stopped it or moved it elsewhere.
    StaysStopped,
    /// The guest has ended, and nothing is left of it.
    Ends,
    /// The source's QEMU has ended, and the destination has the only copy, which an operator starts.
    EndsPrepared,
    /// Somebody has started the guest at the source, although it belongs to the destination. It executes at one place, because
    /// the disk can be written at one place only.
    Contradiction,
}

/// What an act means to a move.
enum Kind {
    /// It does not concern it.
    Harmless,
    /// The move must not complete after it: disks, media, devices and other migrations would not be at the destination what they are here.
    Obstacle,
    Reset,
    Stops,
    Runs,
    EndsGuest,
    MovesElsewhere,
}

fn kind(act: Act) -> Kind {
    match act {
        Act::Reset => Kind::Reset,
        Act::Stop => Kind::Stops,
        Act::Cont | Act::StopAndCont => Kind::Runs,
        Act::PowerOff | Act::Quit => Kind::EndsGuest,
        Act::MigrateFinished => Kind::MovesElsewhere,
        Act::MigrateRunning
        | Act::Backup
        | Act::Mirror
        | Act::Stream
        | Act::Commit
        | Act::Eject
        | Act::ChangeMedium
        | Act::Resize
        | Act::Blocker
        | Act::Mount
        | Act::Plug
        | Act::Unplug => Kind::Obstacle,
        Act::MigrateCancelled | Act::SnapshotSave | Act::SnapshotLoad | Act::Dump | Act::SigStop => Kind::Harmless,
    }
}

pub(super) fn expected(cell: Cell, done: &Done) -> Expected {
    use Expected::*;
    let Cell { act, moment, mode } = cell;
    let decided = moment == Moment::Decided;
    match kind(act) {
        _ if matches!(done, Done::Refused(_)) => Moves,
        // QEMU makes the disks active again if the other migration had come so far that they were inactive for it.
        Kind::Harmless if act == Act::MigrateCancelled && decided => MovesAtLast,
        Kind::Harmless if act == Act::MigrateCancelled && !moment.guest_executes() => MovesOrStays,
        Kind::Harmless => Moves,
        Kind::EndsGuest if decided => Moves,
        // In QEMU's own migration all has been sent when it is saved, and nothing else of the source's QEMU is needed for a prepared destination.
        Kind::EndsGuest if moment == Moment::Prepared || moment == Moment::Saved && mode == "stream" => EndsPrepared,
        Kind::EndsGuest => Ends,
        Kind::Runs if decided => Contradiction,
        Kind::Runs | Kind::Stops | Kind::MovesElsewhere if decided => Moves,
        Kind::Runs if moment.guest_executes() => Moves,
        Kind::Runs => StaysAndRuns,
        Kind::Stops if moment.guest_executes() => StaysStopped,
        Kind::Stops => Moves,
        Kind::MovesElsewhere => StaysStopped,
        // In QEMU's own migration the reset has no state of its own, and concerns only a guest whose devices were not saved.
        Kind::Reset if mode == "stream" || moment.guest_executes() || decided => Moves,
        Kind::Reset => StaysAndRuns,
        Kind::Obstacle if moment.looked_at_later() => StaysAndRuns,
        // Migrations are checked again right before the decision.
        Kind::Obstacle if act == Act::MigrateRunning && !decided => StaysAndRuns,
        // After the last look QEMU refuses what would write to a disk. The rest is of no consequence: the destination has the state of before.
        Kind::Obstacle => Moves,
    }
}
