//! Devices whose state is sent separately from the monitor's: over loopback, with both sides in this process and a
//! guest that writes all the time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::relay::Relay;
use crate::common::within_a_minute;
use crate::device::{Device, Devices};
use crate::guest::{Memory, Monitor, Running, Signal, Workload};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::{Before, Destination};
use sterna_engine::device_state::{DeviceChannels, DevicePhase};
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError, Phase};
use sterna_engine::report::{Observer, Progress, ReceiveReport, Report};
use sterna_engine::source::{Source, TimeLimits};
use sterna_engine::transport::{Address, Security};

const CALM: Workload = Workload { writers: 1, span: 300, seed: 1, burst: 8 };
const ALL_WAYS: [DeviceChannels; 4] =
    [DeviceChannels::Mixed, DeviceChannels::Own(1), DeviceChannels::Own(5), DeviceChannels::Serial];

type Ends = (Result<Report, MigrationError>, Result<ReceiveReport, MigrationError>);

/// A guest, and both its monitors.
struct Guest {
    source: Arc<Memory>,
    destination: Arc<Memory>,
    running: Running,
    from: Monitor,
    to: Monitor,
    cancel: (Cancel, Cancel),
    limits: TimeLimits,
    queue: u64,
    downtime: Duration,
    bandwidth: Option<u64>,
    workload: Workload,
    give_up_after: Option<Duration>,
    observer: Box<dyn Observer>,
}

impl Guest {
    fn new() -> Self {
        let (source, destination) = (Memory::new(1000, 500), Memory::new(1000, 500));
        let running = Running::default();
        let (mut from, _) = Monitor::new(&source, &running, CALM);
        let (to, _) = Monitor::new(&destination, &running, CALM);
        from.state_bytes = 100_000;
        let cancel = (Cancel::new(), Cancel::new());
        // So long that the guest is paused also on a busy machine.
        let downtime = Duration::from_secs(20);
        Self {
            source,
            destination,
            running,
            from,
            to,
            cancel,
            limits: TimeLimits::default().reporting_abort(Duration::from_millis(100)),
            queue: 64 << 20,
            downtime,
            bandwidth: None,
            workload: CALM,
            give_up_after: None,
            observer: Box::new(()),
        }
    }

    fn migrate(&mut self, ways: DeviceChannels, devices: &Devices) -> Ends {
        self.between(ways, devices, devices, |address| address)
    }

    /// Migrates with these devices at the source and those at the destination. The source connects to the address that
    /// `through` returns for the destination's.
    fn between(
        &mut self,
        ways: DeviceChannels,
        here: &Devices,
        there: &Devices,
        through: impl FnOnce(SocketAddr) -> SocketAddr,
    ) -> Ends {
        let (from, log) = Monitor::new(&self.source, &self.running, self.workload);
        let from = std::mem::replace(&mut self.from, from);
        self.from.state_bytes = from.state_bytes;
        self.from.on_call = { from }.on_call.take();
        self.from.start();
        let destination = Destination::new(self.destination.ram()).memory_before(Before::Anything);
        let destination = destination.linger(Duration::from_millis(200));
        let destination = there.at_destination(destination).device_queue(self.queue);
        let listening = destination.listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let address = through(listening.address().to_string().parse().unwrap());
        let source = here.at_source(Source::new(self.source.ram(), Box::new(log)));
        let source = source.channels(3).device_channels(ways).method(MethodChoice::default());
        let source = source.downtime(self.downtime).time_limits(self.limits).bandwidth(self.bandwidth);
        let mut source = source.give_up_after(self.give_up_after);
        std::thread::scope(|scope| {
            let (to, cancel) = (&mut self.to, &self.cancel.1);
            let receiving = scope.spawn(move || listening.run(to, cancel, &()));
            let to = Address::from(address);
            let sent = source.run(to, &Security::Insecure, &mut self.from, &self.cancel.0, &*self.observer);
            if sent.as_ref().is_err_and(|error| error.phase == Phase::SettingUp) {
                // The destination waits for another source.
                self.cancel.1.cancel();
            }
            (sent, receiving.join().unwrap())
        })
    }

    fn has_moved(&self, devices: &Devices) {
        assert!(!self.from.runs() && self.to.runs());
        assert_eq!((self.running.now(), self.running.ever_twice()), (1, false));
        assert!(devices.all_whole());
    }

    fn stays_at_source(&self) {
        assert!(self.from.runs() && !self.to.runs());
        assert_eq!((self.running.now(), self.running.ever_twice()), (1, false));
    }
}

fn moves(ways: DeviceChannels, devices: &Devices) -> Report {
    let mut guest = Guest::new();
    let (sent, received) = guest.migrate(ways, devices);
    received.unwrap();
    guest.has_moved(devices);
    sent.unwrap()
}

#[test]
fn one_four_and_sixteen_devices_move_completely_over_every_kind_of_channel() {
    within_a_minute(|| {
        for ways in ALL_WAYS {
            for count in [1, 4, 16] {
                for size in [1 << 10, 1_000_000] {
                    // One of them has no state, another none at the end.
                    let device = |instance| match instance {
                        1 => Device::new("nothing", instance, 0, 0),
                        2 => Device::new("ahead", instance, size, 0),
                        _ => Device::new("device", instance, size / 3, size),
                    };
                    let devices = Devices((0..count).map(device).collect());
                    let report = moves(ways, &devices);
                    let reported: u64 = report.devices.iter().map(|device| device.bytes).sum();
                    assert_eq!((reported, report.devices.len()), (devices.bytes(), count as usize));
                }
            }
        }
    });
}

#[test]
fn devices_of_256_mib_move_completely() {
    within_a_minute(|| {
        let mut large = Devices(vec![Device::new("large", 0, 0, 256 << 20), Device::new("small", 0, 0, 1 << 10)]);
        moves(DeviceChannels::Mixed, &large);
        large.0[0].seen = Arc::default();
        large.0[0].ahead = 200 << 20;
        large.0[0].rest = 56 << 20;
        large.0[0].turns = 1;
        let report = moves(DeviceChannels::Own(2), &large);
        assert_eq!((report.devices[0].bytes, report.devices[0].ahead_bytes), (256 << 20, 200 << 20));
    });
}

#[test]
fn state_saved_ahead_is_loaded_before_the_guest_is_paused() {
    within_a_minute(|| {
        for ways in [DeviceChannels::Mixed, DeviceChannels::Own(2)] {
            let devices = Devices((0..3).map(|instance| Device::new("device", instance, 700_000, 10_000)).collect());
            let mut guest = Guest::new();
            let seen: Vec<_> = devices.0.iter().map(|device| Arc::clone(&device.seen)).collect();
            guest.from.on_call = Some(Box::new(move |what| {
                if what == "pause" {
                    // The first turn of three.
                    assert!(seen.iter().all(|seen| seen.loaded_bytes.load(Ordering::SeqCst) >= 700_000 / 3));
                }
            }));
            let (sent, _) = guest.migrate(ways, &devices);
            guest.has_moved(&devices);
            let report = sent.unwrap();
            assert!(report.devices.iter().all(|device| device.ahead_bytes >= 700_000 / 3), "{report:?}");
        }
    });
}

/// Sets a signal once progress was reported twice, which is after the rounds have converged.
struct SomeTimeLater(AtomicU64, Signal);

impl Observer for SomeTimeLater {
    fn progress(&self, _: &Progress) {
        if self.0.fetch_add(1, Ordering::SeqCst) == 2 {
            self.1.set();
        }
    }

    fn note(&self, _: &str) {}
}

#[test]
fn a_guest_is_not_paused_before_a_device_has_loaded_the_state_saved_ahead() {
    within_a_minute(|| {
        let loads = Signal::default();
        let slow = Device { loads_on: Some(loads.clone()), ..Device::new("slow", 0, 100_000, 1000) };
        let devices = Devices(vec![slow, Device::new("other", 0, 100_000, 1000)]);
        let mut guest = Guest::new();
        let seen = Arc::clone(&devices.0[0].seen);
        guest.from.on_call = Some(Box::new(move |what| {
            if what == "pause" {
                assert!(seen.loaded_bytes.load(Ordering::SeqCst) >= 100_000 / 3, "not loaded yet");
            }
        }));
        guest.observer = Box::new(SomeTimeLater(AtomicU64::new(0), loads));
        let (sent, _) = guest.migrate(DeviceChannels::Mixed, &devices);
        sent.unwrap();
        guest.has_moved(&devices);
    });
}

/// Moves a guest with this device over 40 MiB/s, with a target downtime of 300 ms. Returns the bytes saved and loaded
/// when the guest was paused.
fn saved_and_loaded_at_pause(device: Device) -> (u64, u64) {
    let devices = Devices(vec![device]);
    let mut guest = Guest::new();
    guest.downtime = Duration::from_millis(300);
    guest.bandwidth = Some(40 << 20);
    // The guest dirties hardly anything: the migration waits for the device alone.
    guest.workload = Workload { span: 2, ..CALM };
    let (seen, at_pause) = (Arc::clone(&devices.0[0].seen), Arc::new(Mutex::default()));
    let noted = Arc::clone(&at_pause);
    guest.from.on_call = Some(Box::new(move |what| {
        if what == "pause" {
            *noted.lock().unwrap() = (seen.saved.load(Ordering::SeqCst), seen.loaded_bytes.load(Ordering::SeqCst));
        }
    }));
    let (sent, _) = guest.migrate(DeviceChannels::Mixed, &devices);
    sent.unwrap();
    guest.has_moved(&devices);
    *at_pause.lock().unwrap()
}

#[test]
fn a_guest_is_not_paused_while_its_device_reports_that_much_is_to_be_saved() {
    within_a_minute(|| {
        // Enough to measure the rate, and then a little at each query. Whatever rate is measured, what is reported does not fit.
        let device =
            Device { overstates: 1000, turns: 100, first: 4 << 20, ..Device::new("large", 0, 24 << 20, 1 << 20) };
        let (saved, _) = saved_and_loaded_at_pause(device);
        assert!(saved >= 20 << 20, "{saved}");
    });
}

#[test]
fn serially_nothing_is_sent_ahead() {
    within_a_minute(|| {
        let devices = Devices((0..3).map(|instance| Device::new("device", instance, 700_000, 10_000)).collect());
        let report = moves(DeviceChannels::Serial, &devices);
        assert!(report.devices.iter().all(|device| (device.bytes, device.ahead_bytes) == (710_000, 0)), "{report:?}");
    });
}

#[test]
fn a_device_that_loads_nothing_for_a_while_delays_no_other() {
    within_a_minute(|| {
        for ways in [DeviceChannels::Mixed, DeviceChannels::Own(1)] {
            let others_are_loaded = Signal::default();
            let slow = Device { loads_on: Some(others_are_loaded.clone()), ..Device::new("slow", 0, 0, 3 << 20) };
            let other = Device { loaded: Some(others_are_loaded), ..Device::new("other", 0, 0, 9 << 20) };
            let devices = Devices(vec![slow, other]);
            let mut guest = Guest::new();
            // Both have far more state than that.
            guest.queue = 256 << 10;
            let (sent, _) = guest.migrate(ways, &devices);
            sent.unwrap();
            guest.has_moved(&devices);
            // Saved and not loaded: the device's part of the memory, and a piece that is being filled or emptied on
            // each side.
            let waited = devices.0[0].seen.max_waiting.load(Ordering::SeqCst);
            assert!(waited <= (128 + 2 * 32) << 10, "{waited}");
        }
    });
}

#[test]
fn a_device_that_fails_ends_the_migration_and_the_guest_continues() {
    within_a_minute(|| {
        for ways in ALL_WAYS {
            for (at_source, after) in [(true, 0), (true, 900_000), (true, 2_000_000), (false, 0), (false, 1_500_000)] {
                let mut failing = Device::new("failing", 7, 500_000, 1_500_000);
                if at_source {
                    failing.save_fails = Some(after);
                } else {
                    failing.load_fails = Some(after);
                }
                let other = |instance| Device::new("other", instance, 300_000, 4_000_000);
                let devices = Devices(vec![other(0), failing, other(1)]);
                let mut guest = Guest::new();
                let (sent, received) = guest.migrate(ways, &devices);
                guest.stays_at_source();
                let what = format!("{ways:?}, at the source {at_source}, after {after}");
                let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
                let expected = if at_source {
                    "saving the state of device failing/7 failed: saving was made to fail"
                } else {
                    "loading the state of device failing/7 failed: loading was made to fail"
                };
                assert!(
                    sent.reason.contains(expected) && received.reason.contains(expected),
                    "{what}: {sent}; {received}"
                );
                assert_eq!((sent.guest, received.guest), (GuestState::RunsAtSource, GuestState::NotHere), "{what}");
                // The same guest moves without the faults.
                let mut devices = Devices(devices.0.clone());
                (devices.0[1].save_fails, devices.0[1].load_fails) = (None, None);
                devices.0.iter_mut().for_each(|device| device.seen = Arc::default());
                guest.from.stop();
                let (sent, _) = guest.migrate(ways, &devices);
                sent.unwrap();
                guest.has_moved(&devices);
            }
        }
    });
}

#[test]
fn a_device_that_panics_fails_like_one_that_returns_an_error() {
    within_a_minute(|| {
        for at_source in [true, false] {
            let mut panicking = Device { panics: true, ..Device::new("panicking", 3, 1000, 1_500_000) };
            let fails = if at_source { &mut panicking.save_fails } else { &mut panicking.load_fails };
            *fails = Some(500_000);
            let mut guest = Guest::new();
            let (sent, received) = guest.migrate(DeviceChannels::Mixed, &Devices(vec![panicking]));
            guest.stays_at_source();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            let expected = "the state of device panicking/3 failed: it panicked";
            assert!(sent.reason.contains(expected) && received.reason.contains(expected), "{sent}; {received}");
        }
    });
}

#[test]
fn devices_that_one_side_lacks_are_refused_before_anything_is_begun() {
    within_a_minute(|| {
        let devices = |list: &[(&'static str, u32)]| {
            Devices(list.iter().map(|(name, instance)| Device::new(name, *instance, 0, 10)).collect())
        };
        let both = devices(&[("net", 0), ("net", 1)]);
        let cases = [
            (devices(&[]), "does not know: net/0, net/1"),
            (devices(&[("net", 0)]), "does not know: net/1"),
            (devices(&[("net", 0), ("net", 2)]), "does not know: net/1"),
            (devices(&[("net", 0), ("net", 1), ("fs", 0)]), "does not send: fs/0"),
        ];
        for (there, words) in cases {
            let mut guest = Guest::new();
            let (sent, _) = guest.between(DeviceChannels::Mixed, &both, &there, |address| address);
            let sent = sent.unwrap_err();
            guest.stays_at_source();
            assert!(sent.reason.contains(words), "{sent}");
            assert_eq!((sent.guest, sent.phase), (GuestState::Untouched, Phase::SettingUp));
            assert!(guest.from.called.is_empty() && guest.to.called.is_empty());
        }
    });
}

#[test]
fn impossible_settings_are_refused_before_anything_is_begun() {
    within_a_minute(|| {
        let twice = Devices(vec![Device::new("net", 0, 0, 10), Device::new("net", 0, 0, 10)]);
        let long = Devices(vec![Device { name: Box::leak("x".repeat(256).into_boxed_str()), ..Device::default() }]);
        let one = Devices(vec![Device::new("net", 0, 0, 10)]);
        let source = |devices: &Devices, channels| {
            let memory = Memory::new(1, 1);
            let (mut from, log) = Monitor::new(&memory, &Running::default(), CALM);
            let mut source = devices.at_source(Source::new(memory.ram(), Box::new(log))).device_channels(channels);
            let sent = source.run("127.0.0.1:1", &Security::Insecure, &mut from, &Cancel::new(), &());
            sent.unwrap_err().reason
        };
        assert!(source(&twice, DeviceChannels::Mixed).contains("the device net/0 is there twice"));
        assert!(source(&long, DeviceChannels::Mixed).contains("name has 256 bytes"));
        for channels in [0, 64] {
            let reason = source(&one, DeviceChannels::Own(channels));
            assert!(reason.contains(&format!("{channels} channels for device state were asked for")), "{reason}");
        }
        let listen = |devices: &Devices, queue| {
            let memory = Memory::new(1, 1);
            let destination = devices.at_destination(Destination::new(memory.ram())).device_queue(queue);
            destination.listen("127.0.0.1:0", &Security::Insecure).map(drop).map_err(|error| error.reason)
        };
        assert!(listen(&twice, 1 << 20).unwrap_err().contains("the device net/0 is there twice"));
        assert!(listen(&one, 65_535).unwrap_err().contains("at least 65536 are needed"));
        listen(&one, 65_536).unwrap();
    });
}

#[test]
fn a_connection_that_breaks_during_the_stop_leaves_the_guest_at_the_source() {
    within_a_minute(|| {
        for ways in ALL_WAYS {
            let devices = Devices((0..4).map(|instance| Device::new("device", instance, 0, 3 << 20)).collect());
            // While the guest is paused: the third device loads its first byte, and then all connections break.
            let cut = Signal::default();
            let mut there = Devices(devices.0.clone());
            there.0[2].loads_on = Some(cut.clone());
            let mut guest = Guest::new();
            // Not all of the state has arrived by then: a complete destination would wait for the source's decision.
            guest.queue = 1 << 20;
            let seen = Arc::clone(&devices.0[2].seen);
            let (sent, received) = guest.between(ways, &devices, &there, |address| {
                let relay = Relay::start(address, Vec::new());
                let near = relay.address();
                std::thread::spawn(move || {
                    while seen.loaded_bytes.load(Ordering::SeqCst) == 0 {
                        std::thread::yield_now();
                    }
                    relay.refuse_all();
                    relay.cut_all();
                    cut.set();
                });
                near
            });
            guest.stays_at_source();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            assert_eq!(
                (sent.guest, received.guest),
                (GuestState::RunsAtSource, GuestState::NotHere),
                "{sent}; {received}"
            );
        }
    });
}

#[test]
fn a_migration_that_is_cancelled_while_devices_are_saved_ends_and_the_guest_continues() {
    within_a_minute(|| {
        for ways in ALL_WAYS {
            for at_source in [true, false] {
                let never = Signal::default();
                let slow = Device { loads_on: Some(never.clone()), ..Device::new("slow", 0, 0, 8 << 20) };
                let devices = Devices(vec![slow, Device::new("other", 0, 0, 8 << 20)]);
                let mut guest = Guest::new();
                guest.queue = 256 << 10;
                let cancel = if at_source { guest.cancel.0.clone() } else { guest.cancel.1.clone() };
                let seen = Arc::clone(&devices.0[0].seen);
                let cancelling = std::thread::spawn(move || {
                    while seen.loaded_bytes.load(Ordering::SeqCst) == 0 {
                        std::thread::yield_now();
                    }
                    cancel.cancel();
                    // The device's call returns by itself; the others have not waited for it.
                    never.set();
                });
                let (sent, received) = guest.migrate(ways, &devices);
                cancelling.join().unwrap();
                guest.stays_at_source();
                let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
                assert_eq!(sent.guest, GuestState::RunsAtSource, "{sent}; {received}");
                assert_eq!(
                    (sent.kind == ErrorKind::Cancelled, received.kind == ErrorKind::Cancelled),
                    (at_source, !at_source),
                    "{sent}; {received}"
                );
            }
        }
    });
}

#[test]
fn a_migration_is_cancelled_while_pausing_waits_for_a_device() {
    within_a_minute(|| {
        for at_source in [true, false] {
            let ended = Signal::default();
            let device = Device { ended: Some(ended.clone()), ..Device::new("device", 0, 100_000, 100_000) };
            let mut guest = Guest::new();
            let cancel = if at_source { guest.cancel.0.clone() } else { guest.cancel.1.clone() };
            guest.from.on_call = Some(Box::new(move |what| {
                if what == "pause" {
                    cancel.cancel();
                    ended.wait();
                }
            }));
            let (sent, received) = guest.migrate(DeviceChannels::Mixed, &Devices(vec![device]));
            guest.stays_at_source();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            assert_eq!(sent.guest, GuestState::RunsAtSource, "{sent}; {received}");
            assert_eq!(
                (sent.kind == ErrorKind::Cancelled, received.kind == ErrorKind::Cancelled),
                (at_source, !at_source),
                "{sent}; {received}"
            );
        }
    });
}

/// An observer that passes progress and notes to two functions.
struct ObserverOf<P, N>(P, N);

impl<P: Fn(&Progress) + Send + Sync, N: Fn(&str) + Send + Sync> Observer for ObserverOf<P, N> {
    fn progress(&self, progress: &Progress) {
        (self.0)(progress);
    }

    fn note(&self, text: &str) {
        (self.1)(text);
    }
}

/// Returns an observer that sets a signal at a note with these words.
fn at_note(words: &'static str, signal: &Signal) -> Box<dyn Observer> {
    let signal = signal.clone();
    Box::new(ObserverOf(
        |_: &Progress| (),
        move |text: &str| {
            if text.contains(words) {
                signal.set();
            }
        },
    ))
}

#[test]
fn progress_shows_what_each_device_is_waiting_for() {
    within_a_minute(|| {
        type Stuck = fn(&mut Device, Signal);
        let cases: [(DevicePhase, u64, Stuck); 4] = [
            (DevicePhase::SavingAhead, 1000, |device, signal| device.ahead_on = Some(signal)),
            (DevicePhase::LoadingAhead, 1000, |device, signal| device.loads_on = Some(signal)),
            (DevicePhase::Saving, 1000, |device, signal| device.saves_on = Some(signal)),
            (DevicePhase::Loading, 0, |device, signal| device.loads_on = Some(signal)),
        ];
        for (phase, ahead, stuck) in cases {
            let (seen, others_come_first) = (Signal::default(), Device::new("other", 0, 1000, 1000));
            let mut slow = Device::new("slow", 0, ahead, 1000);
            stuck(&mut slow, seen.clone());
            let devices = Devices(vec![others_come_first, slow]);
            let mut guest = Guest::new();
            // The device continues only after this was observed.
            let waits = format!("slow/0 ({phase})");
            guest.observer = Box::new(ObserverOf(
                move |progress: &Progress| {
                    if progress.devices[1].phase == phase && !progress.devices[0].phase.is_waited_for() {
                        assert_eq!(progress.waiting_for().as_ref(), Some(&waits));
                        seen.set();
                    }
                },
                |_: &str| (),
            ));
            let (sent, _) = guest.migrate(DeviceChannels::Mixed, &devices);
            guest.has_moved(&devices);
            assert!(sent.unwrap().devices.iter().all(|device| device.phase == DevicePhase::Loaded));
        }
    });
}

#[test]
fn a_note_names_the_device_for_which_the_pause_waits() {
    within_a_minute(|| {
        let reported = Signal::default();
        let slow = Device { loads_on: Some(reported.clone()), ..Device::new("slow", 3, 1000, 1000) };
        let devices = Devices(vec![Device::new("other", 0, 1000, 1000), slow]);
        let mut guest = Guest::new();
        let words = "the guest could be stopped; waiting for slow/3 (loading ahead at the destination)";
        guest.observer = at_note(words, &reported);
        let (sent, _) = guest.migrate(DeviceChannels::Mixed, &devices);
        assert_eq!(sent.unwrap().convergence, None);
        guest.has_moved(&devices);
    });
}

#[test]
fn an_aborted_migration_names_the_device_for_which_it_has_waited() {
    within_a_minute(|| {
        for phase in [DevicePhase::SavingAhead, DevicePhase::LoadingAhead] {
            // The destination's device continues when the source's has ended.
            let over = Signal::default();
            let mut slow = Device { ended: Some(over.clone()), ..Device::new("slow", 0, 1000, 1000) };
            let at_source = phase == DevicePhase::SavingAhead;
            *(if at_source { &mut slow.ahead_on } else { &mut slow.loads_on }) = Some(over.clone());
            let devices = Devices(vec![Device::new("other", 0, 1000, 1000), slow]);
            let mut guest = Guest::new();
            guest.give_up_after = Some(Duration::from_secs(3));
            guest.observer = at_note("before it ends, devices must return from saving: slow/0", &over);
            let (sent, received) = guest.migrate(DeviceChannels::Mixed, &devices);
            guest.stays_at_source();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            let expected = format!("; waiting for slow/0 ({phase})");
            assert!(sent.reason.ends_with(&expected) && received.reason.ends_with(&expected), "{sent}; {received}");
            let report = sent.report.unwrap();
            assert_eq!(report.devices[1].phase, phase);
            assert!(report.convergence.is_none_or(|convergence| convergence.ends_with(&expected)));
        }
    });
}

#[test]
fn the_error_names_the_devices_for_which_the_guest_was_paused_too_long() {
    within_a_minute(|| {
        let three_and_two_more = "slow/0 (loading at the destination), slow/1 (loading at the destination), slow/2 (loading at the \
                                  destination) and 2 more";
        let cases: [(&str, u32, u64, bool, String); 3] = [
            (
                "saves for ever",
                1,
                1000,
                true,
                "the state took too long; waiting for slow/0 (saving at the source)".into(),
            ),
            (
                "loads for ever",
                5,
                1000,
                false,
                format!("loading at the destination took too long; waiting for {three_and_two_more}"),
            ),
            // More than the destination permits: the source's device cannot continue, and is not the cause.
            (
                "is held up",
                1,
                1 << 20,
                false,
                "the state took too long; waiting for slow/0 (loading at the destination)".into(),
            ),
        ];
        for (what, count, rest, at_source, words) in cases {
            let over = Signal::default();
            let slow = |instance| {
                let mut slow = Device::new("slow", instance, 0, rest);
                *(if at_source { &mut slow.saves_on } else { &mut slow.loads_on }) = Some(over.clone());
                slow
            };
            let devices = Devices((0..count).map(slow).collect());
            let mut guest = Guest::new();
            guest.queue = u64::from(count) * (64 << 10);
            guest.limits.step = Duration::from_secs(6);
            guest.downtime = Duration::from_millis(300);
            // The source waits for its device before it resumes the guest, but not for the destination's.
            guest.observer = at_note("before it ends, devices must return from saving: slow/0", &over);
            let resumed = over.clone();
            guest.from.on_call = Some(Box::new(move |call| {
                if call == "resume" {
                    resumed.set();
                }
            }));
            let (sent, received) = guest.migrate(DeviceChannels::Mixed, &devices);
            guest.stays_at_source();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            assert!(sent.reason.contains(&words) && received.reason.contains(&words), "{what}: {sent}; {received}");
        }
    });
}

#[test]
fn a_monitor_that_saves_for_too_long_is_named_with_the_devices() {
    within_a_minute(|| {
        let (loads, ended) = (Signal::default(), Signal::default());
        // The device waits until the migration ends.
        let slow =
            Device { loads_on: Some(loads.clone()), ended: Some(ended.clone()), ..Device::new("slow", 0, 0, 1 << 20) };
        let mut guest = Guest::new();
        guest.queue = 64 << 10;
        guest.limits.step = Duration::from_secs(6);
        guest.downtime = Duration::from_millis(300);
        guest.from.on_call = Some(Box::new(move |what| match what {
            "save" => ended.wait(),
            "resume" => loads.set(),
            _ => {}
        }));
        let (sent, _) = guest.migrate(DeviceChannels::Mixed, &Devices(vec![slow]));
        guest.stays_at_source();
        let sent = sent.unwrap_err();
        let words = "the state took too long; waiting for the monitor's state, slow/0 (loading at the destination)";
        assert!(sent.reason.contains(words), "{sent}");
    });
}

#[test]
fn a_device_that_does_not_finish_is_waited_for_no_longer_than_the_limit() {
    within_a_minute(|| {
        let on = Signal::default();
        let slow = Device { loads_on: Some(on.clone()), ..Device::new("slow", 0, 0, 100_000) };
        let devices = Devices(vec![slow]);
        let mut guest = Guest::new();
        // The limit of every step is ten times the downtime, also of those before.
        guest.downtime = Duration::from_millis(600);
        guest.limits.step = Duration::from_millis(100);
        let signal = on.clone();
        // The source does this when it has aborted.
        guest.from.on_call = Some(Box::new(move |what| {
            if what == "resume" {
                signal.set();
            }
        }));
        let (sent, _) = guest.migrate(DeviceChannels::Mixed, &devices);
        let sent = sent.unwrap_err();
        guest.stays_at_source();
        assert!(sent.reason.contains("loading at the destination took too long"), "{sent}");
    });
}

/// Whether a device's state fits the downtime follows from rates that are measured.
mod soak {
    use super::*;

    #[test]
    fn a_guest_is_not_paused_while_its_device_has_much_to_save() {
        within_a_minute(|| {
            // Enough to measure the rate, and then a little at each query.
            let device = Device { turns: 200, first: 4 << 20, ..Device::new("large", 0, 48 << 20, 1 << 20) };
            let (saved, _) = saved_and_loaded_at_pause(device);
            assert!(saved >= 30 << 20, "{saved}");
        });
    }

    #[test]
    fn a_guest_is_not_paused_while_its_device_has_much_to_load() {
        within_a_minute(|| {
            // The second turn has much more than can be sent, or loaded, within the downtime.
            let device = Device { turns: 3, ..Device::new("large", 0, 48 << 20, 1 << 20) };
            let (_, loaded_bytes) = saved_and_loaded_at_pause(device);
            assert!(loaded_bytes >= 30 << 20, "{loaded_bytes}");
        });
    }
}
