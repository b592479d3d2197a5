//! Random devices, random faults: the state arrives byte for byte, or the failure is clean and the source runs again.
//! Never do both sides run.

use std::thread;

use sterna_devices::vfio::model::{Call, Config, Fabric, Fault, Leaves, ModelDevice};
use sterna_devices::vfio::{
    Chunk, Loader, Peers, Saver, State, VfioError, abort_together, run_together, stop_together,
};

use sterna_test_kit::Random;

use super::FLAGS;

const CASES: u64 = 1500;

/// One guest's devices on one host.
struct Side {
    fabric: Fabric,
    devices: Vec<ModelDevice>,
    all_p2p: bool,
}

impl Side {
    fn new(random: &mut Random, states: &[Vec<u8>], live: bool) -> Self {
        let fabric = Fabric::default();
        let only_p2p = random.once_in(2);
        let mut all_p2p = true;
        let devices = states.iter().map(|state| {
            let flags = random.one_of(&FLAGS);
            let flags = if only_p2p { flags.with_p2p() } else { flags };
            all_p2p &= flags.p2p();
            ModelDevice::new(Config {
                flags: Some(flags),
                state: if live { state.clone() } else { vec![0; state.len()] },
                live,
                max_transfer: 1 + random.index(2000),
                seed: random.once_in(2).then(|| random.next_u64()),
                zero_for_nothing: random.once_in(4),
                bad_state_is_error: random.once_in(2),
                fabric: fabric.clone(),
                ..Config::empty(0)
            })
        });
        let devices = devices.collect();
        Self { fabric, devices, all_p2p }
    }

    fn contents(&self) -> Vec<Vec<u8>> {
        self.devices.iter().map(ModelDevice::contents).collect()
    }

    fn check_peers(&self) {
        if self.all_p2p {
            assert_eq!(self.fabric.violations(), [""; 0]);
        }
    }
}

fn fault(random: &mut Random) -> Fault {
    let call = match random.index(9) {
        0 | 1 => Call::SetState,
        2 | 3 => Call::SetStateTo(random.one_of(&State::ALL)),
        4 => Call::Read,
        5 => Call::Write,
        6 => Call::State,
        7 => random.one_of(&[Call::DataSize, Call::PrecopyInfo]),
        _ => Call::Reset,
    };
    Fault {
        call,
        after: random.index(if matches!(call, Call::Read | Call::Write) { 12 } else { 3 }) as u32,
        errno: random.one_of(&[libc::EIO, libc::ENOSPC, libc::EINTR, libc::EAGAIN, libc::ENOMSG]),
        leaves: random.one_of(&[Leaves::Unchanged, Leaves::Midway(1), Leaves::Midway(2), Leaves::InError]),
    }
}

/// Moves a device's state before or after the stop: reads until there is nothing now, or the end.
fn carry(
    saver: &mut Saver<ModelDevice>,
    loader: &mut Loader<ModelDevice>,
    buffer: &mut [u8],
) -> Result<Chunk, VfioError> {
    loop {
        match saver.read(buffer)? {
            Chunk::Bytes(count) => loader.write(&buffer[..count])?,
            other => return Ok(other),
        }
    }
}

/// Runs a migration up to the decision to which host the guest belongs.
fn migrate(
    random: &mut Random,
    from: &Side,
    to: &Side,
    savers: &mut [Saver<ModelDevice>],
    loaders: &mut [Loader<ModelDevice>],
) -> Result<(), VfioError> {
    let never_both = || assert!(from.fabric.running() == 0 || to.fabric.running() == 0);
    let mut buffer = vec![0; 1 + random.index(3000)];
    for (saver, loader) in savers.iter_mut().zip(loaders.iter_mut()) {
        loader.begin()?;
        saver.begin(if random.once_in(3) { random.next_u64() % 4000 } else { u64::MAX })?;
        never_both();
    }
    for _ in 0..random.index(4) {
        for (saver, loader) in savers.iter_mut().zip(loaders.iter_mut()) {
            if saver.remaining()?.ahead.unwrap_or_default().initial_bytes > 0 || random.once_in(2) {
                carry(saver, loader, &mut buffer)?;
            }
            never_both();
        }
        for device in &from.devices {
            let size = device.contents().len();
            for _ in 0..random.index(6) {
                let at = random.index(size + 1);
                assert_eq!(device.run(at), at < size, "a device that is read ahead runs");
            }
        }
    }
    let peers = if from.all_p2p { Peers::MayWrite } else { Peers::Separate };
    stop_together(&mut savers.iter_mut().collect::<Vec<_>>(), peers)?;
    assert_eq!(from.fabric.running(), 0);
    // Each device's state on a separate thread, as in an engine.
    thread::scope(|scope| {
        let moving: Vec<_> = savers
            .iter_mut()
            .zip(loaders.iter_mut())
            .map(|(saver, loader)| {
                scope.spawn(move || {
                    assert_eq!(carry(saver, loader, &mut [0; 777])?, Chunk::End);
                    saver.finish()?;
                    loader.finish()
                })
            })
            .collect();
        moving.into_iter().map(|one| one.join().unwrap()).fold(Ok(()), Result::and)
    })?;
    never_both();
    Ok(())
}

/// Repeats `act` until it succeeds, because faults are few. Returns the last error if they are not.
fn insist(mut act: impl FnMut() -> Result<(), VfioError>) -> Result<(), VfioError> {
    for _ in 0..5 {
        if act().is_ok() {
            return Ok(());
        }
    }
    act()
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Outcome {
    Moved,
    Stayed,
    /// The source runs, after one of its devices had failed and was reset.
    StayedAfterReset,
    /// The guest belongs to the destination, where a device has failed.
    MovedToFailed,
}

fn case(seed: u64) -> (Outcome, usize) {
    let random = &mut Random::new(seed);
    let states: Vec<Vec<u8>> = (0..1 + random.index(4))
        .map(|_| {
            (0..random.one_of(&[0, 1, 511, 512, 513, 6000]) + random.index(3))
                .map(|_| random.next_u64() as u8)
                .collect()
        })
        .collect();
    let (from, to) = (Side::new(random, &states, true), Side::new(random, &states, false));
    let mut savers: Vec<_> = from.devices.iter().map(|device| Saver::new(device.clone(), "from").unwrap()).collect();
    let mut loaders: Vec<_> = to.devices.iter().map(|device| Loader::new(device.clone(), "to").unwrap()).collect();
    let faults = random.index(4);
    for _ in 0..faults {
        let side = if random.once_in(2) { &from } else { &to };
        side.devices[random.index(side.devices.len())].fail(fault(random));
    }

    let outcome = match migrate(random, &from, &to, &mut savers, &mut loaders) {
        Ok(()) => {
            assert_eq!(to.contents(), from.contents());
            let mut loaders: Vec<_> = loaders.iter_mut().collect();
            let result = insist(|| run_together(&mut loaders));
            match result {
                Ok(()) => {
                    assert_eq!(to.fabric.running(), states.len());
                    assert_eq!(to.contents(), from.contents());
                    Outcome::Moved
                }
                Err(VfioError::NeedsReset { .. }) => Outcome::MovedToFailed,
                Err(other) => panic!("{other}"),
            }
        }
        Err(_) => {
            assert!(faults > 0, "failed without a fault");
            let contents = from.contents();
            for loader in &mut loaders {
                insist(|| loader.abort()).unwrap();
            }
            assert_eq!(to.fabric.running(), 0);
            let mut all: Vec<_> = savers.iter_mut().collect();
            let mut reset = false;
            // As many resets as there are faults that can take a device to ERROR, also during the abort.
            while let Err(error) = insist(|| abort_together(&mut all)) {
                assert!(matches!(error, VfioError::NeedsReset { .. }), "{error}");
                let failed: Vec<_> = all.iter_mut().filter(|saver| saver.state() == Some(State::Error)).collect();
                assert!(!failed.is_empty());
                for saver in failed {
                    insist(|| saver.reset()).unwrap();
                    reset = true;
                }
            }
            assert!(from.devices.iter().all(|device| device.is_in() == State::Running));
            if reset {
                Outcome::StayedAfterReset
            } else {
                assert_eq!(from.contents(), contents, "the abort changed the state");
                assert_eq!(from.fabric.running(), states.len());
                Outcome::Stayed
            }
        }
    };
    if matches!(outcome, Outcome::Moved | Outcome::MovedToFailed) {
        assert_eq!(from.fabric.running(), 0);
    } else {
        assert_eq!(to.fabric.running(), 0);
    }
    from.check_peers();
    to.check_peers();
    (outcome, faults)
}

/// Runs the cases of consecutive seeds.
fn cases(first: u64, count: u64) {
    let mut outcomes = Vec::new();
    for seed in (0..count).map(|number| first.wrapping_add(number)) {
        let result = std::panic::catch_unwind(|| case(seed));
        match result {
            Ok(outcome) => outcomes.push(outcome),
            Err(_) => panic!("repeat with STERNA_TEST_SEED={seed}"),
        }
    }
    let number = |wanted: Outcome| outcomes.iter().filter(|(outcome, _)| *outcome == wanted).count();
    let all = [Outcome::Moved, Outcome::Stayed, Outcome::StayedAfterReset, Outcome::MovedToFailed];
    println!("seeds from {first}: {:?}", all.map(|outcome| (outcome, number(outcome))));
    if count > 1 {
        assert!(all.iter().all(|outcome| number(*outcome) > 0), "an outcome that these seeds never produced");
        assert!(outcomes.iter().all(|(outcome, faults)| *faults > 0 || *outcome == Outcome::Moved));
    }
}

#[test]
fn state_arrives_or_the_source_runs_again() {
    cases(1, CASES);
}

mod soak {
    use sterna_test_kit::random::announced_seed;

    /// With other seeds each time. `STERNA_TEST_SEED` repeats one.
    #[test]
    fn state_arrives_or_the_source_runs_again() {
        let one = std::env::var_os("STERNA_TEST_SEED").is_some();
        super::cases(announced_seed(), if one { 1 } else { super::CASES });
    }
}
