//! Migrations that succeed.

use std::io::{self, BufRead, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use sterna_devices::migration::VfioSource;
use sterna_devices::vfio::model::{Call, Config, Fault, ModelDevice};
use sterna_devices::vfio::{Flags, Peers, State, VfioError};
use sterna_engine::device_state::{Ahead, DeviceChannels, LoadDevice, SaveDevice};
use sterna_engine::migration::{ErrorKind, GuestState};
use sterna_engine::vmm::VmmError;

use crate::machine::{Guest, id, some_state};
use crate::reached::{By, Reached};
use crate::server::Manner;

const CHANNELS: [DeviceChannels; 3] = [DeviceChannels::Mixed, DeviceChannels::Own(2), DeviceChannels::Serial];

#[test]
fn one_four_and_sixteen_devices_move_over_every_kind_of_channel() {
    for ways in CHANNELS {
        for count in [1, 4, 16] {
            let mut guest = Guest::with(count, 50_000);
            let (sent, received) = guest.migrate(ways);
            received.unwrap();
            let report = sent.unwrap();
            guest.has_moved();
            assert!(guest.from.models.iter().all(|model| model.is_in() == State::Stop));
            assert_eq!(report.devices.len(), count);
            for device in &report.devices {
                assert!(device.bytes > 50_000, "{device:?}");
                assert_eq!(device.ahead_bytes > 50_000, ways != DeviceChannels::Serial, "{device:?}");
            }
        }
    }
}

#[test]
fn devices_of_every_kind_move_together() {
    for p2p in [true, false] {
        let flags = [Flags::STOP_COPY, Flags::STOP_COPY.with_pre_copy(), Flags::STOP_COPY.with_p2p().with_pre_copy()];
        let flags = flags.map(|flags| if p2p { flags.with_p2p() } else { flags });
        let here = |(number, flags): (usize, &Flags)| Config {
            max_transfer: 777,
            seed: Some(number as u64),
            reports_size: number % 2 == 0,
            zero_for_nothing: number == 1,
            ..Config::with_state(some_state(number, 9_000 * number + 300)).flags(*flags)
        };
        let there = |(number, flags): (usize, &Flags)| Config::empty(9_000 * number + 300).flags(*flags);
        let peers = if p2p { Peers::MayWrite } else { Peers::Separate };
        let mut guest = Guest::new(
            flags.iter().enumerate().map(here).collect(),
            flags.iter().enumerate().map(there).collect(),
            peers,
        );
        let (sent, received) = guest.migrate(DeviceChannels::Mixed);
        received.unwrap();
        let report = sent.unwrap();
        assert_eq!(report.devices.iter().map(|device| device.ahead_bytes > 0).collect::<Vec<_>>(), [false, true, true]);
        for (from, to) in guest.from.models.iter().zip(&guest.to.models) {
            assert_eq!(from.contents(), to.contents());
        }
        assert_eq!((guest.from.fabric.running(), guest.to.fabric.running()), (0, 3));
        guest.no_violations();
    }
}

#[test]
fn devices_of_vfio_user_servers_move_with_the_memory_that_they_write_meanwhile() {
    let flags = [Flags::STOP_COPY, Flags::STOP_COPY.with_pre_copy()];
    for ways in CHANNELS {
        for count in [1, 4] {
            // Larger than one message.
            let size = |number| 700_000 * number + 2_000;
            let flagged = |config: Config, number: usize| config.flags(flags[number % 2]);
            let here = (0..count).map(|at| flagged(Config::with_state(some_state(at, size(at))), at)).collect();
            let there = (0..count).map(|at| flagged(Config::empty(size(at)), at)).collect();
            let mut guest = Guest::by_servers(here, there, [Manner::default(), Manner::default()]);
            let (sent, received) = guest.migrate(ways);
            received.unwrap();
            let report = sent.unwrap();
            guest.has_moved();
            for (number, device) in report.devices.iter().enumerate() {
                assert!(device.bytes > size(number) as u64, "{device:?}");
                let ahead = ways != DeviceChannels::Serial && number % 2 == 1;
                assert_eq!(device.ahead_bytes > size(number) as u64, ahead, "{device:?}");
            }
        }
    }
}

#[test]
fn a_vfio_user_device_that_fails_leaves_the_guest_at_the_source() {
    for (at_source, call) in [(true, Call::Read), (true, Call::SetStateTo(State::StopCopy)), (false, Call::Write)] {
        let with = |config: Config| config.flags(Flags::STOP_COPY);
        let here = (0..3).map(|number| with(Config::with_state(some_state(number, 50_000)))).collect();
        let there = (0..3).map(|_| with(Config::empty(50_000))).collect();
        let mut guest = Guest::by_servers(here, there, [Manner::default(), Manner::default()]);
        let model = if at_source { &guest.from.models[1] } else { &guest.to.models[1] };
        model.fail(Fault::of(call));
        let (sent, _) = guest.migrate(DeviceChannels::Mixed);
        let error = sent.unwrap_err();
        assert!(error.guest == GuestState::RunsAtSource && error.to_string().contains("nic/1"), "{error}");
        guest.stays();
        guest.clear_destination();
        let (sent, received) = guest.migrate(DeviceChannels::Mixed);
        received.unwrap();
        sent.unwrap();
        guest.has_moved();
    }
}

/// The number of calls of a device, and of bytes that it writes in them.
#[derive(Default)]
struct Counts {
    calls: AtomicU64,
    bytes: AtomicU64,
    remaining: AtomicU64,
}

struct Counted {
    device: Box<dyn SaveDevice>,
    counts: Arc<Counts>,
}

struct CountedWrite<'a>(&'a mut dyn Write, &'a AtomicU64);

impl Write for CountedWrite<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.0.write(bytes)?;
        self.1.fetch_add(written as u64, Ordering::SeqCst);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl SaveDevice for Counted {
    fn save_ahead(&mut self, state: &mut dyn Write) -> Result<Ahead, VmmError> {
        let ahead = self.device.save_ahead(&mut CountedWrite(state, &self.counts.bytes))?;
        self.counts.calls.fetch_add(1, Ordering::SeqCst);
        Ok(ahead)
    }

    fn remaining(&mut self) -> u64 {
        let remaining = self.device.remaining();
        self.counts.remaining.store(remaining, Ordering::SeqCst);
        remaining
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.device.save(state)
    }

    fn saving_ended(&mut self) {
        self.device.saving_ended();
    }
}

/// Loads nothing until a condition holds; until then the guest is not paused.
struct Held<F> {
    device: Box<dyn LoadDevice>,
    until: F,
}

impl<F: Fn() -> bool + Send> LoadDevice for Held<F> {
    fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError> {
        let deadline = Instant::now() + Duration::from_secs(300);
        while !(self.until)() {
            if Instant::now() > deadline {
                return Err("the awaited condition did not occur".into());
            }
            std::thread::yield_now();
        }
        self.device.load(state)
    }
}

#[test]
fn a_device_that_keeps_changing_is_read_ahead_repeatedly() {
    const SIZE: usize = 40_000;
    let mut guest = Guest::with(2, SIZE);
    let counts: [Arc<Counts>; 2] = Default::default();
    let (mine, seen) = (counts.clone(), counts.clone());
    let saving = move |number: usize, device| -> Box<dyn SaveDevice> {
        Box::new(Counted { device, counts: Arc::clone(&mine[number]) })
    };
    // Far more than the first pass over the state: only changes of a running device can be so much.
    let often = move |counts: &Arc<Counts>| {
        counts.calls.load(Ordering::SeqCst) >= 4 && counts.bytes.load(Ordering::SeqCst) > 3 * SIZE as u64
    };
    let loading = move |_, device| -> Box<dyn LoadDevice> {
        let seen = seen.clone();
        Box::new(Held { device, until: move || seen.iter().all(often) })
    };
    let (sent, received) = guest.migrate_with(DeviceChannels::Mixed, &saving, &loading);
    received.unwrap();
    let report = sent.unwrap();
    guest.has_moved();
    for (device, counts) in report.devices.iter().zip(&counts) {
        assert!(device.ahead_bytes > 3 * SIZE as u64, "{device:?}");
        // Less than all of the state, but never nothing: the end of a state is read when its device is stopped.
        let remaining = counts.remaining.load(Ordering::SeqCst);
        assert!((1..2 * SIZE as u64).contains(&remaining), "{remaining}");
    }
}

#[test]
fn no_more_is_saved_ahead_than_allowed() {
    let mut guest = Guest::with(3, 30_000);
    guest.from.devices = guest.from.devices.clone().ahead_at_most(5_000);
    let (sent, _) = guest.migrate(DeviceChannels::Mixed);
    guest.has_moved();
    assert!(sent.unwrap().devices.iter().all(|device| device.ahead_bytes == 5_000 && device.bytes > 30_000));
}

#[test]
fn devices_that_cannot_be_stopped_together_are_refused_before_anything_is_begun() {
    let device = || ModelDevice::new(Config::with_state(vec![1; 100]).flags(Flags::STOP_COPY));
    let both = || [(id(0), device()), (id(1), device())];
    let error = VfioSource::new(both(), Peers::MayWrite).unwrap_err();
    assert!(matches!(&error, VfioError::Peers { device } if device == "nic/0"), "{error}");
    VfioSource::new(both(), Peers::Separate).unwrap();
    VfioSource::new([(id(0), device())], Peers::MayWrite).unwrap();
}

#[test]
fn a_migration_that_is_cancelled_while_the_guest_runs_leaves_devices_that_can_be_moved_again() {
    for ways in [DeviceChannels::Mixed, DeviceChannels::Own(2)] {
        let mut guest = Guest::with(4, 20_000);
        let cancel = guest.cancel.clone();
        let counts = Arc::new(Counts::default());
        let (mine, seen) = (Arc::clone(&counts), Arc::clone(&counts));
        let saving =
            move |_, device| -> Box<dyn SaveDevice> { Box::new(Counted { device, counts: Arc::clone(&mine) }) };
        let loading = move |_, device| -> Box<dyn LoadDevice> {
            let (seen, cancel) = (Arc::clone(&seen), cancel.clone());
            let until = move || {
                // Saving has begun for each device.
                let begun = seen.calls.load(Ordering::SeqCst) >= 4;
                if begun {
                    cancel.cancel();
                }
                cancel.is_cancelled()
            };
            Box::new(Held { device, until })
        };
        let (sent, _) = guest.migrate_with(ways, &saving, &loading);
        let sent = sent.unwrap_err();
        assert!(sent.kind == ErrorKind::Cancelled && sent.guest == GuestState::RunsAtSource, "{sent}");
        guest.stays();
        guest.clear_destination();
        guest.cancel = Default::default();
        let (sent, received) = guest.migrate(ways);
        received.unwrap();
        sent.unwrap();
        guest.has_moved();
    }
}

#[test]
fn a_monitor_that_forgets_to_stop_its_devices_gets_an_error() {
    let model = ModelDevice::new(Config::with_state(vec![1; 100]));
    let devices = VfioSource::new([(id(0), model.clone())], Peers::MayWrite).unwrap();
    let (_, mut device) = devices.save_devices().pop().unwrap();
    let mut state = Vec::new();
    assert_eq!(device.save_ahead(&mut state).unwrap(), Ahead::Later);
    let ahead = state.len();
    let error = device.save(&mut state).unwrap_err();
    assert!(error.to_string().contains("VfioSource::stop"), "{error}");
    assert_eq!(state.len(), ahead);
    // Once the device was stopped, nothing is saved ahead any more.
    devices.stop().unwrap();
    assert_eq!(device.save_ahead(&mut state).unwrap(), Ahead::Nothing);
    assert_eq!(state.len(), ahead);
    device.save(&mut state).unwrap();
    assert!(state.len() > ahead);
    // Reading the state does not decide to which host the guest belongs.
    device.saving_ended();
    assert_eq!(model.is_in(), State::Stop);
    devices.run_on().unwrap();
    assert_eq!(model.is_in(), State::Running);
}

/// A network that accepts the first bytes only after the monitor has stopped all devices.
struct TakesWhenStopped<'a>(&'a VfioSource<ModelDevice>, bool);

impl Write for TakesWhenStopped<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !std::mem::replace(&mut self.1, true) {
            let (devices, (done, stopped)) = (self.0.clone(), mpsc::channel());
            std::thread::spawn(move || {
                devices.stop().unwrap();
                // If this comes too late, no thread waits for it any more.
                let _ = done.send(());
            });
            stopped.recv_timeout(Duration::from_secs(300)).map_err(io::Error::other)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn devices_can_be_stopped_while_bytes_of_one_wait_for_the_network() {
    let model =
        |number| ModelDevice::new(Config { max_transfer: 100, ..Config::with_state(some_state(number, 5_000)) });
    let models = [model(0), model(1)];
    let devices = models.iter().cloned().enumerate().map(|(at, model)| (id(at), model));
    let devices = VfioSource::new(devices, Peers::MayWrite).unwrap();
    let (_, mut device) = devices.save_devices().pop().unwrap();
    assert_eq!(device.save_ahead(&mut TakesWhenStopped(&devices, false)).unwrap(), Ahead::Nothing);
    assert!(models.iter().all(|model| model.is_in() == State::StopCopy));
    let mut rest = Vec::new();
    device.save(&mut rest).unwrap();
    assert!(rest.len() > 4_000, "{}", rest.len());
}

#[test]
fn the_remaining_state_is_reported_as_the_device_estimates_it() {
    const SIZE: usize = 6_000;
    let told = |config: Config| {
        let model = ModelDevice::new(config);
        let devices = VfioSource::new([(id(0), model.clone())], Peers::MayWrite).unwrap();
        (model, devices.save_devices().pop().unwrap().1)
    };
    let (_, mut device) = told(Config::with_state(some_state(0, SIZE)).flags(Flags::STOP_COPY));
    assert_eq!(device.save_ahead(&mut io::sink()).unwrap(), Ahead::Nothing);
    assert!(device.remaining() > SIZE as u64, "all of it is read when the device is stopped");
    for reports_size in [true, false] {
        let (model, mut device) = told(Config { reports_size, ..Config::with_state(some_state(0, SIZE)) });
        assert_eq!(device.save_ahead(&mut io::sink()).unwrap(), Ahead::Later);
        let end = device.remaining();
        assert_eq!(end > 0, reports_size, "bytes read at the end");
        model.run(0);
        let changed = device.remaining();
        assert!(changed > end + 100 && changed < SIZE as u64, "{changed}");
        model.fail(Fault::of(if reports_size { Call::DataSize } else { Call::PrecopyInfo }));
        assert_eq!(device.remaining(), changed, "the last known estimate");
    }
}

#[test]
fn a_device_without_estimates_is_expected_to_have_as_much_as_the_last_time() {
    // More than is read at once from such a device.
    const SIZE: usize = 80 << 20;
    let model = ModelDevice::new(Config::with_state(some_state(0, SIZE)).flags(Flags::STOP_COPY.with_pre_copy()));
    let devices =
        VfioSource::new([(id(0), Reached::new(model.clone(), By::VfioUser(Manner::default())))], Peers::MayWrite)
            .unwrap();
    let (_, mut device) = devices.save_devices().pop().unwrap();
    assert_eq!(device.remaining(), 0);
    let mut state = Vec::new();
    for expected in [64 << 20, SIZE] {
        assert_eq!(device.save_ahead(&mut state).unwrap(), Ahead::Later);
        assert!(state.len() >= expected, "{} of {expected}", state.len());
        assert_eq!(device.remaining(), state.len() as u64, "until it has nothing, more is to come");
    }
    let first = state.len();
    model.run(7);
    assert_eq!(device.save_ahead(&mut state).unwrap(), Ahead::Later);
    let second = state.len() - first;
    assert!((1..10_000).contains(&second), "{second}");
    assert_eq!(device.remaining(), second as u64);
}

/// Changes a device with each piece that was read from it, and accepts only so many bytes.
struct Changes<'a>(&'a ModelDevice, usize);

impl Write for Changes<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.run(self.1 % 5_000);
        self.1 += bytes.len();
        if self.1 > 64 << 20 {
            return Err(io::Error::other("the state does not end"));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_device_that_changes_as_fast_as_it_is_read_does_not_prevent_the_pause() {
    let model = ModelDevice::new(Config::with_state(some_state(0, 5_000)));
    let devices = VfioSource::new([(id(0), model.clone())], Peers::MayWrite).unwrap();
    let (_, mut device) = devices.save_devices().pop().unwrap();
    for _ in 0..3 {
        assert_eq!(device.save_ahead(&mut Changes(&model, 0)).unwrap(), Ahead::Later);
    }
}
