//! Other hands: what another program or an operator does to the source's QEMU (an [`Act`]) while its guest is moved, at each [`Moment`] of a move.
//!
//! The guest writes numbered records to its disk. `send` is held at the moment until the act is done. Afterwards, whatever the act was: the
//! guest executes at exactly one place, or has ended, and that is reported; no acknowledged record is missing; whatever `send`, `receive` and
//! `recover` have reported on standard output about where the guest is, is true; and the next attempt moves the guest. What becomes of the move follows from the kind of
//! the act and the moment ([`expected`]).
//!
//! The tests here are a cut of the table; `soak::other_hands` has all of it.

mod act;
mod expect;
mod judge;
mod machine;
mod moment;
mod mount;

use std::fmt;

use self::act::Act;
use self::judge::Moved;
use self::machine::{Machine, writes};
use self::moment::Moment;
use crate::support::pair::Pair;
use crate::support::{Hold, Sterna, receive, send_by};

/// The target downtime: so long that the guest is paused once, after the first round, however slow this machine is at the moment.
const DOWNTIME: &str = "10s";

/// One field of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    act: Act,
    moment: Moment,
    mode: &'static str,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} {}", self.act, self.moment, self.mode)
    }
}

impl Cell {
    /// All fields that exist.
    pub(crate) fn all() -> Vec<Self> {
        let moments = |mode| {
            Moment::ALL.iter().filter(move |moment| moment.point(mode).is_some()).map(move |moment| (mode, *moment))
        };
        let moments: Vec<_> = moments("direct").chain(moments("stream")).collect();
        let cells = moments
            .into_iter()
            .flat_map(|(mode, moment)| Act::ALL.iter().map(move |act| Self { act: *act, moment, mode }));
        cells.filter(|cell| cell.act.possible(cell.moment, cell.mode)).collect()
    }

    /// Moves a guest, does the act at the moment, and judges. Returns what became of it; none without the tools.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn run(self) -> Option<Result<String, String>> {
        let Cell { act, moment, mode } = self;
        let machine = Machine::new();
        let pair = Pair::start(&machine.source(), &machine.options().incoming())?;
        [&pair.source, &pair.destination].into_iter().for_each(Machine::permit_reset);
        writes(&pair.source, 100).expect("the guest boots");
        act.prepare(&machine, &pair.source);

        let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
        let receiver = Sterna::start("receive", command.arg("--insecure"));
        let mut command =
            send_by(mode, pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
        command.args(["--insecure", "--downtime", DOWNTIME]);
        let hold = Hold::at(moment.point(mode).expect("a moment of this mode"), pair.scratch.path(), &mut command);
        let sender = Sterna::start("send", &mut command);
        let held = hold.reached(&sender);
        let (done, _other_destination) = act.perform(&machine, &pair.source);
        println!("{self}: {done:?}");
        drop(held);
        act.after_release(&pair.source);
        Some(
            Moved { cell: self, machine, pair, done, sender: Some(sender), receiver: Some(receiver), undone: false }
                .judge(),
        )
    }
}

/// Runs each field in a test of its own.
macro_rules! cut {
    ($($name:ident: $act:ident $moment:ident $mode:literal;)*) => {$(
        #[test]
        fn $name() {
            match (Cell { act: Act::$act, moment: Moment::$moment, mode: $mode }).run() {
                None => {}
                Some(Ok(end)) => println!("{end}"),
                Some(Err(error)) => panic!("{error}"),
            }
        }
    )*};
}

cut! {
    a_guest_that_is_stopped_in_a_round_stays_stopped_at_the_source_and_nothing_says_that_it_runs: Stop FirstRound "direct";
    a_guest_that_is_reset_while_it_is_paused_boots_at_the_source: Reset Stopped "direct";
    a_guest_that_is_reset_when_the_destination_is_prepared_boots_at_the_source: Reset Prepared "direct";
    a_guest_that_is_resumed_after_its_state_was_saved_runs_on_at_the_source: Cont Saved "direct";
    a_mirror_that_begins_while_the_guest_is_paused_ends_the_move: Mirror Stopped "direct";
    a_guest_that_mounts_a_directory_by_9p_in_the_first_round_runs_on_at_the_source_with_its_mount: Mount FirstRound "direct";
    a_device_that_is_unplugged_while_the_guest_is_paused_ends_the_move: Unplug Stopped "direct";
    a_guest_that_another_program_has_migrated_while_it_was_paused_is_not_resumed: MigrateFinished Prepared "direct";
    a_guest_that_another_program_begins_to_migrate_while_it_is_paused_runs_on_at_the_source: MigrateRunning Stopped "direct";
    a_guest_that_is_set_back_to_a_snapshot_in_the_first_round_is_moved_as_it_is_then: SnapshotLoad FirstRound "direct";
    a_source_that_ends_when_the_destination_is_prepared_leaves_the_only_copy_there: Quit Prepared "direct";
    a_guest_that_is_stopped_in_a_round_of_qemus_migration_stays_stopped_at_the_source: Stop FirstRound "stream";
    a_source_that_ends_after_the_decision_has_moved_its_guest_by_stream: Quit Decided "stream";
}
