//! Migrations with faults: the guest runs at the source with all its devices, or it belongs to the destination, never
//! both.

use sterna_devices::vfio::model::{Call, Config, Fault, Leaves};
use sterna_devices::vfio::{Flags, Peers, State, VfioError};
use sterna_devices::vfio_user::Command;
use sterna_engine::device_state::DeviceChannels;
use sterna_engine::migration::GuestState;
use sterna_test_kit::Random;

use crate::machine::{Guest, some_state};
use crate::server::{Manner, Trouble};

const SIZE: usize = 30_000;
const COUNT: usize = 3;

/// The side whose device has a fault.
#[derive(Clone, Copy, Debug)]
enum At {
    Source,
    Destination,
}

/// Returns a guest with three devices, read and written in pieces, so that a fault occurs in the middle.
fn guest(flags: Flags) -> Guest {
    let here = |number| Config { max_transfer: 1000, ..Config::with_state(some_state(number, SIZE)).flags(flags) };
    let there = |_| Config { max_transfer: 1000, ..Config::empty(SIZE).flags(flags) };
    Guest::new((0..COUNT).map(here).collect(), (0..COUNT).map(there).collect(), Peers::MayWrite)
}

fn fault(call: Call, after: u32, leaves: Leaves) -> Fault {
    Fault { after, leaves, ..Fault::of(call) }
}

/// Checks that the guest stays, that its devices run, and that it moves once there is no fault any more.
fn ends_at_the_source(flags: Flags, at: At, fault: Fault) {
    let what = format!("{flags:?} {at:?} {fault:?}");
    for ways in [DeviceChannels::Mixed, DeviceChannels::Serial] {
        if ways == DeviceChannels::Serial && fault.call == Call::SetStateTo(State::PreCopy) {
            // Nothing is read ahead.
            continue;
        }
        let mut guest = guest(flags);
        let models = match at {
            At::Source => &guest.from.models,
            At::Destination => &guest.to.models,
        };
        models[1].fail(fault);
        let (sent, received) = guest.migrate(ways);
        let (sent, received) = (sent.expect_err(&what), received.expect_err(&what));
        assert_eq!((sent.guest, received.guest), (GuestState::RunsAtSource, GuestState::NotHere), "{what}: {sent}");
        assert!(sent.reason.contains("nic/1"), "{what}: {sent}");
        guest.stays();
        let lost = matches!(at, At::Source) && fault.leaves == Leaves::InError;
        assert_eq!(guest.from.reset.len(), usize::from(lost), "{what}");
        guest.clear_destination();
        let (sent, received) = guest.migrate(ways);
        received.expect(&what);
        let report = sent.expect(&what);
        let read_ahead = flags.pre_copy() && ways != DeviceChannels::Serial;
        assert!(report.devices.iter().all(|device| (device.ahead_bytes > 0) == read_ahead), "{what}: {report:?}");
        assert_eq!((guest.from.fabric.running(), guest.running.now()), (0, 1), "{what}");
        for (from, to) in guest.from.models.iter().zip(&guest.to.models) {
            assert_eq!(from.contents(), to.contents(), "{what}");
        }
    }
}

const ALL: Flags = Flags::STOP_COPY.with_p2p().with_pre_copy();
const NOTHING_AHEAD: Flags = Flags::STOP_COPY.with_p2p();

#[test]
fn a_device_that_fails_while_it_is_read_ahead_ends_the_migration_at_the_source() {
    ends_at_the_source(ALL, At::Source, fault(Call::SetStateTo(State::PreCopy), 0, Leaves::Unchanged));
    ends_at_the_source(ALL, At::Source, fault(Call::SetStateTo(State::PreCopy), 0, Leaves::InError));
    for after in [0, 1, 20] {
        ends_at_the_source(ALL, At::Source, fault(Call::Read, after, Leaves::Unchanged));
    }
}

#[test]
fn a_device_that_does_not_stop_ends_the_migration_at_the_source() {
    for leaves in [Leaves::Unchanged, Leaves::Midway(1), Leaves::InError] {
        ends_at_the_source(ALL, At::Source, fault(Call::SetStateTo(State::StopCopy), 0, leaves));
        ends_at_the_source(NOTHING_AHEAD, At::Source, fault(Call::SetStateTo(State::RunningP2p), 0, leaves));
    }
}

#[test]
fn a_device_that_fails_while_it_is_saved_ends_the_migration_at_the_source() {
    for after in [0, 15] {
        ends_at_the_source(NOTHING_AHEAD, At::Source, fault(Call::Read, after, Leaves::Unchanged));
    }
}

#[test]
fn a_device_that_fails_when_all_of_its_state_was_read_moves() {
    for (leaves, state) in [(Leaves::Unchanged, State::StopCopy), (Leaves::InError, State::Error)] {
        for ways in [DeviceChannels::Mixed, DeviceChannels::Serial] {
            let mut guest = guest(ALL);
            guest.from.models[1].fail(fault(Call::SetStateTo(State::Stop), 0, leaves));
            let (sent, received) = guest.migrate(ways);
            received.unwrap();
            sent.unwrap();
            guest.has_moved();
            assert_eq!(guest.from.models[1].is_in(), state);
        }
    }
}

#[test]
fn a_device_that_does_not_load_ends_the_migration_at_the_source() {
    for leaves in [Leaves::Unchanged, Leaves::InError] {
        ends_at_the_source(ALL, At::Destination, fault(Call::SetStateTo(State::Resuming), 0, leaves));
        ends_at_the_source(ALL, At::Destination, fault(Call::SetStateTo(State::Stop), 0, leaves));
    }
    for (flags, after) in [(ALL, 0), (ALL, 25), (NOTHING_AHEAD, 0), (NOTHING_AHEAD, 25)] {
        ends_at_the_source(flags, At::Destination, fault(Call::Write, after, Leaves::Unchanged));
    }
}

#[test]
fn a_log_of_dma_that_fails_ends_the_migration_at_the_source() {
    for call in [Call::DmaLoggingStart, Call::DmaLoggingReport] {
        // The second report is the first of a round: the first one tests whether the kernel can report.
        for after in 0..2 {
            if call == Call::DmaLoggingReport || after == 0 {
                ends_at_the_source(ALL, At::Source, fault(call, after, Leaves::Unchanged));
            }
        }
    }
}

#[test]
fn a_device_that_does_not_report_how_much_is_left_moves_nevertheless() {
    for call in [Call::DataSize, Call::PrecopyInfo] {
        let mut guest = guest(ALL);
        (0..4).for_each(|_| guest.from.models[1].fail(Fault::of(call)));
        let (sent, received) = guest.migrate(DeviceChannels::Mixed);
        received.unwrap();
        sent.unwrap();
        guest.has_moved();
    }
}

#[test]
fn a_device_that_does_not_run_at_the_destination_is_retried_and_the_source_stays_stopped() {
    let mut guest = guest(ALL);
    // One more fault than there are automatic retries.
    (0..3).for_each(|_| guest.to.models[2].fail(Fault::of(Call::SetStateTo(State::RunningP2p))));
    let (_, received) = guest.migrate(DeviceChannels::Mixed);
    let received = received.unwrap_err();
    assert_eq!(received.guest, GuestState::PausedAtDestination, "{received}");
    assert!(received.reason.contains("nic/2"), "{received}");
    assert_eq!((guest.from.fabric.running(), guest.running.now()), (0, 0));
    sterna_engine::vmm::DestinationVmm::resume(&mut guest.to).unwrap();
    guest.has_moved();
}

/// Returns a fault of any kind, at any call.
fn any_fault(random: &mut Random) -> Fault {
    let to = random.one_of(&State::ALL);
    let runs = random.one_of(&[State::RunningP2p, State::Running]);
    let calls = [
        Call::SetState,
        Call::SetStateTo(to),
        Call::SetStateTo(runs),
        Call::Read,
        Call::Write,
        Call::State,
        Call::DataSize,
        Call::DmaLoggingReport,
    ];
    let leaves = [Leaves::Unchanged, Leaves::Midway(1), Leaves::Midway(2), Leaves::InError];
    let errno = random.one_of(&[libc::EIO, libc::ENOSPC, libc::EINTR, libc::EAGAIN, libc::ENOMSG]);
    Fault {
        call: random.one_of(&calls),
        after: random.one_of(&[0, 0, 1, 2, 20]),
        errno,
        leaves: random.one_of(&leaves),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Moved,
    Stayed,
    PausedAtDestination,
}

fn case(seed: u64) -> Outcome {
    let random = &mut Random::new(seed);
    let mut guest = guest(random.one_of(&[ALL, NOTHING_AHEAD]));
    let ways = random.one_of(&[DeviceChannels::Mixed, DeviceChannels::Own(2), DeviceChannels::Serial]);
    let faults = random.one_of(&[0, 1, 1, 2, 3]);
    for _ in 0..faults {
        let device = random.one_of(&[0, 1, 2]);
        let fault = any_fault(random);
        let models = if random.one_of(&[true, false]) { &guest.from.models } else { &guest.to.models };
        models[device].fail(fault);
    }
    let (sent, received) = guest.migrate(ways);
    assert!(!guest.running.ever_twice());
    match (sent, received) {
        (Ok(_), Ok(_)) => {
            guest.has_moved();
            Outcome::Moved
        }
        (Err(sent), Err(received)) if sent.guest == GuestState::RunsAtSource => {
            assert!(faults > 0 && received.guest == GuestState::NotHere, "{sent}; {received}");
            guest.stays();
            Outcome::Stayed
        }
        (sent, Err(received)) if received.guest == GuestState::PausedAtDestination => {
            assert!(sent.is_err_and(|sent| sent.guest != GuestState::RunsAtSource));
            assert_eq!((guest.from.fabric.running(), guest.running.now()), (0, 0));
            // It is retried, which succeeds unless the device has failed.
            let again = || guest.to.devices.run();
            let again = (0..5).map(|_| again()).find(Result::is_ok).unwrap_or_else(again);
            assert!(matches!(again, Ok(()) | Err(VfioError::NeedsReset { .. })), "{again:?}");
            guest.no_violations();
            Outcome::PausedAtDestination
        }
        (sent, received) => panic!("{sent:?}; {received:?}"),
    }
}

/// Runs the cases of consecutive seeds.
fn cases(first: u64, count: u64) {
    let mut outcomes = Vec::new();
    for seed in (0..count).map(|number| first.wrapping_add(number)) {
        match std::panic::catch_unwind(|| case(seed)) {
            Ok(outcome) => outcomes.push(outcome),
            Err(_) => panic!("repeat with STERNA_TEST_SEED={seed}"),
        }
    }
    let number = |wanted| outcomes.iter().filter(|outcome| **outcome == wanted).count();
    let all = [Outcome::Moved, Outcome::Stayed, Outcome::PausedAtDestination];
    println!("seeds from {first}: {:?}", all.map(|outcome| (outcome, number(outcome))));
    assert!(
        count == 1 || all[..2].iter().all(|outcome| number(*outcome) > 0),
        "an outcome that these seeds never produced"
    );
}

const CASES: u64 = 60;

#[test]
fn random_faults_never_leave_two_guests_nor_a_device_of_the_source_stopped() {
    cases(1, CASES);
}

mod soak {
    use sterna_test_kit::random::announced_seed;

    /// With other seeds each time. `STERNA_TEST_SEED` repeats one.
    #[test]
    fn random_faults_never_leave_two_guests_nor_a_device_of_the_source_stopped() {
        let one = std::env::var_os("STERNA_TEST_SEED").is_some();
        super::cases(announced_seed(), if one { 1 } else { super::CASES });
    }
}

/// The replies during which a server's connection ends.
struct Deaths {
    at_source: bool,
    command: Command,
    /// Counts only replies that leave the device in this state.
    only_in: Option<State>,
    /// The first reply that counts, and how many.
    first: u32,
    replies: u32,
}

/// Returns the state of the guest afterwards.
fn a_server_dies(deaths: &Deaths, after: u32, pre_copy: bool) -> Option<GuestState> {
    let flags = if pre_copy { Flags::STOP_COPY.with_pre_copy() } else { Flags::STOP_COPY };
    let dies = Manner { only_in: deaths.only_in, ..Manner::trouble(deaths.command, after, Trouble::EndsMidway) };
    let manners = if deaths.at_source { [dies, Manner::default()] } else { [Manner::default(), dies] };
    let here = vec![Config::with_state(some_state(0, 300_000)).flags(flags)];
    let mut guest = Guest::by_servers(here, vec![Config::empty(300_000).flags(flags)], manners);
    let (sent, _) = guest.migrate(DeviceChannels::Mixed);
    assert!(!guest.running.ever_twice());
    let at = (guest.from.monitor.runs(), guest.to.monitor.runs());
    let Err(error) = sent else {
        guest.has_moved();
        return None;
    };
    let expected = match error.guest {
        GuestState::RunsAtSource => (true, false),
        GuestState::PausedAtSource | GuestState::BelongsToDestination => (false, false),
        other => panic!("{other:?}: {error}"),
    };
    assert_eq!(at, expected, "{error}");
    assert!(error.to_string().contains("vfio-user server"), "{error}");
    Some(error.guest)
}

#[test]
fn wherever_a_vfio_user_server_dies_there_is_one_guest_and_its_device_is_named() {
    // The number of replies while the guest runs depends on the rounds, so replies while it is paused are selected by
    // the state. The first two replies are to queries before anything is begun.
    let all = Deaths { at_source: true, command: Command::DEVICE_FEATURE, only_in: None, first: 2, replies: 12 };
    let reads = Command::MIG_DATA_READ;
    let source = [
        Deaths { command: reads, first: 0, replies: 5, ..all },
        Deaths { only_in: Some(State::StopCopy), first: 0, replies: 2, ..all },
        Deaths { command: reads, only_in: Some(State::StopCopy), first: 0, replies: 2, ..all },
        all,
    ];
    let all = Deaths { at_source: false, command: Command::DEVICE_FEATURE, only_in: None, first: 2, replies: 6 };
    let destination = [
        Deaths { command: Command::MIG_DATA_WRITE, first: 0, replies: 3, ..all },
        Deaths { only_in: Some(State::Running), ..all },
        all,
    ];
    for pre_copy in [true, false] {
        for (deaths, stands) in
            [(&source[..], GuestState::PausedAtSource), (&destination[..], GuestState::BelongsToDestination)]
        {
            let dies = |deaths: &Deaths| {
                let replies = deaths.first..deaths.first + deaths.replies;
                replies.filter_map(|after| a_server_dies(deaths, after, pre_copy)).collect::<Vec<_>>()
            };
            let seen: Vec<_> = deaths.iter().flat_map(dies).collect();
            assert!(seen.contains(&GuestState::RunsAtSource) && seen.contains(&stands), "{pre_copy} {seen:?}");
        }
    }
}
