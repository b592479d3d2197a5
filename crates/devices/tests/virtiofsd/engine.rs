//! The same moves by the library: the guest's memory in rounds, the state of virtiofsd as a device's, and the monitor's
//! own state (the positions of the rings).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_devices::migration::{VhostUserDestination, VhostUserSource};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::{Before, Destination};
use sterna_engine::device_state::{DeviceChannels, DeviceId, LoadDevice, SaveDevice};
use sterna_engine::migration::{GuestState, MigrationError};
use sterna_engine::report::Report;
use sterna_engine::source::Source;
use sterna_engine::transport::{Security, simulated::Network};
use sterna_engine::vmm::{DestinationVmm, ResumeReason, SourceVmm, VmmError};
use sterna_memory::dirty::reported::{DirtyMarker, ReportedLog};

use super::support::{Daemon, Fuse, Machine, ROOT};
use super::{Shared, Side, lengthen};

const CHANNELS: [DeviceChannels; 3] = [DeviceChannels::Mixed, DeviceChannels::Own(2), DeviceChannels::Serial];
/// A time limit that no correct back-end reaches.
const PATIENCE: Duration = Duration::from_secs(300);

/// A daemon that a test may end.
type Process = Arc<Mutex<Daemon>>;

fn kill(daemon: &Process) {
    daemon.lock().unwrap().kill();
}

/// A monitor, on either side.
struct Monitor {
    guest: Fuse,
    device: super::Device,
    daemon: Process,
    dirty: DirtyMarker,
    /// A file that the guest writes when it is about to be paused: its last request.
    last: Option<(u64, u64)>,
    runs: bool,
    /// The time limit of the destination's back-end in the next migration.
    loading: Duration,
}

impl Monitor {
    fn new(side: Side, runs: bool) -> (Self, ReportedLog) {
        let log = ReportedLog::new(&[Machine::pages()]);
        let Side { daemon, device, guest } = side;
        let daemon = Arc::new(Mutex::new(daemon));
        (Self { guest, device, daemon, dirty: log.marker(), last: None, runs, loading: PATIENCE }, log)
    }

    fn read(&mut self, (node, handle): (u64, u64)) -> Vec<u8> {
        self.guest.read(&self.device, node, handle, 0, 1000).expect("READ")
    }

    fn write(&mut self, (node, handle): (u64, u64), at: u64, bytes: &[u8]) {
        self.guest.write(&self.device, node, handle, at, bytes).expect("WRITE");
    }

    fn start(&mut self) -> Result<(), VmmError> {
        if self.daemon.lock().unwrap().is_dead() {
            return Err("the back-end fs0 has ended".into());
        }
        self.guest.machine.start(&mut self.device);
        self.runs = true;
        Ok(())
    }
}

impl SourceVmm for Monitor {
    fn name(&self) -> String {
        "with virtiofs 1".into()
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        if let Some(opened) = self.last {
            self.write(opened, 0, b"written last");
        }
        self.guest.machine.suspend(&self.device);
        // This back-end does not log its writes; the monitor knows where they can be.
        self.dirty.mark(0, Machine::written());
        self.runs = false;
        Ok(())
    }

    fn resume(&mut self, _: ResumeReason) -> Result<(), VmmError> {
        self.start()
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        state.write_all(&self.guest.machine.digest().to_le_bytes())?;
        Ok(state.write_all(&self.guest.state())?)
    }
}

impl DestinationVmm for Monitor {
    fn name(&self) -> String {
        "with virtiofs 1".into()
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        let mut digest = [0; 8];
        state.read_exact(&mut digest)?;
        if u64::from_le_bytes(digest) != self.guest.machine.digest() {
            return Err("the memory is not what the source had".into());
        }
        let mut bytes = [0; 14];
        state.read_exact(&mut bytes)?;
        self.guest.set_state(bytes);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        self.start()
    }
}

/// Moves the guest of `from` to a new daemon. Returns the destination's monitor, and the results of the two sides.
fn migrate(
    shared: &Shared,
    from: &mut Monitor,
    log: ReportedLog,
    channels: DeviceChannels,
    saving: impl FnOnce(Box<dyn SaveDevice>) -> Box<dyn SaveDevice>,
    loading: impl FnOnce(Box<dyn LoadDevice>, &Process) -> Box<dyn LoadDevice>,
) -> (Monitor, Result<Report, MigrationError>, Result<(), MigrationError>) {
    let network = Network::new(7);
    let id = || DeviceId::new("fs", 0);
    let (mut to, _) = Monitor::new(shared.empty_destination(), false);
    let device = VhostUserDestination::new(to.device.back_end("fs-destination"), from.loading);
    let destination = Destination::new(to.guest.machine.ram()).memory_before(Before::Anything);
    let destination =
        destination.device(id(), loading(Box::new(device), &to.daemon)).linger(Duration::from_millis(200));
    let listening = destination.listen(network.port("there"), &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let device = VhostUserSource::new(from.device.back_end("fs-source"), PATIENCE);
    let source = Source::new(from.guest.machine.ram(), Box::new(log)).device(id(), saving(Box::new(device)));
    // So long that the guest is paused also on a busy machine.
    let mut source = source.device_channels(channels).downtime(Duration::from_secs(20));
    let (sent, received) = std::thread::scope(|scope| {
        let monitor = &mut to;
        let receiving = scope.spawn(move || listening.run(monitor, &Cancel::new(), &()));
        let sent = source.run(address, &Security::Insecure, from, &Cancel::new(), &());
        (sent, receiving.join().unwrap().map(drop))
    });
    (to, sent, received)
}

#[test]
fn a_guest_moves_with_its_memory_and_its_open_files() {
    let Some(shared) = Shared::new() else { return };
    for channels in CHANNELS {
        let mut source = shared.source(&[]);
        let name = format!("file-{channels:?}");
        let opened = source.create(ROOT, &name);
        source.write(opened, 0, b"before the move");
        source.device.announce();
        let (mut from, log) = Monitor::new(source, true);
        from.last = Some(opened);

        let (mut to, sent, received) = migrate(&shared, &mut from, log, channels, |device| device, |device, _| device);

        received.unwrap();
        let report = sent.unwrap();
        assert!(report.devices[0].bytes > 0 && report.devices[0].device == "fs/0", "{report:?}");
        assert!(to.runs && !from.runs);
        kill(&from.daemon);
        assert_eq!(to.read(opened), b"written lastove");
        to.write(opened, 12, b", and there");
        assert_eq!(std::fs::read(shared.host().join(&name)).expect("the file"), b"written last, and there");
        assert_eq!(to.guest.lookup(&to.device, ROOT, &name).expect("LOOKUP"), opened.0, "node numbers stay");
        let next = to.guest.create(&to.device, ROOT, &format!("next-{channels:?}")).expect("CREATE");
        assert!(next.0 != opened.0 && next.1 != opened.1);
    }
}

/// Kills a daemon when the first bytes of its state have arrived.
struct KillsSource(Box<dyn SaveDevice>, Process);

struct KillsOnWrite<'a>(&'a mut dyn Write, &'a Process);

impl Write for KillsOnWrite<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        kill(self.1);
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl SaveDevice for KillsSource {
    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.0.save(&mut KillsOnWrite(state, &self.1))
    }

    fn saving_ended(&mut self) {
        self.0.saving_ended();
    }
}

/// Calls a function on a daemon once it has received the first bytes of its state.
struct Loses(Box<dyn LoadDevice>, Process, fn(&mut Daemon));

impl LoadDevice for Loses {
    fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError> {
        let Self(device, daemon, lose) = self;
        device.load(&mut BufReader::new(LosesOnSecondRead { state, daemon, lose: *lose, reads: 0 }))
    }
}

struct LosesOnSecondRead<'a> {
    state: &'a mut dyn BufRead,
    daemon: &'a Process,
    lose: fn(&mut Daemon),
    reads: u32,
}

impl Read for LosesOnSecondRead<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.reads += 1;
        if self.reads == 2 {
            (self.lose)(&mut self.daemon.lock().unwrap());
        }
        self.state.read(buffer)
    }
}
/// Returns a guest with an open file and a state that is longer than fits a pipe.
fn with_a_long_state(shared: &Shared) -> (Monitor, ReportedLog, (u64, u64)) {
    let mut source = shared.source(&[]);
    let opened = source.create(ROOT, "file");
    source.write(opened, 0, b"content");
    lengthen(shared, &mut source);
    let (from, log) = Monitor::new(source, true);
    (from, log, opened)
}

#[test]
fn if_the_destinations_daemon_dies_the_guest_continues_at_the_source_and_moves_later() {
    let Some(shared) = Shared::new() else { return };
    let (mut from, log, opened) = with_a_long_state(&shared);
    let kills =
        |device, daemon: &Process| -> Box<dyn LoadDevice> { Box::new(Loses(device, daemon.clone(), Daemon::kill)) };
    let (to, sent, received) = migrate(&shared, &mut from, log, DeviceChannels::Mixed, |device| device, kills);
    let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
    assert_eq!((sent.guest, received.guest), (GuestState::RunsAtSource, GuestState::NotHere), "{sent}; {received}");
    assert!(sent.reason.contains("fs/0") && sent.reason.contains("fs-destination"), "{sent}");
    assert!(from.runs && !to.runs);
    assert_eq!(from.read(opened), b"content");

    let log = ReportedLog::new(&[Machine::pages()]);
    from.dirty = log.marker();
    let (mut to, sent, received) =
        migrate(&shared, &mut from, log, DeviceChannels::Mixed, |device| device, |device, _| device);
    received.unwrap();
    sent.unwrap();
    kill(&from.daemon);
    assert_eq!(to.read(opened), b"content");
}

#[test]
fn if_the_sources_daemon_dies_the_error_names_it() {
    let Some(shared) = Shared::new() else { return };
    let (mut from, log, _) = with_a_long_state(&shared);
    let daemon = from.daemon.clone();
    let kills = |device| -> Box<dyn SaveDevice> { Box::new(KillsSource(device, daemon)) };
    let (to, sent, received) = migrate(&shared, &mut from, log, DeviceChannels::Mixed, kills, |device, _| device);
    let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
    assert!(received.reason.contains("fs/0") && received.reason.contains("fs-source"), "{received}");
    // The device is gone there too, and this monitor does not resume a guest without it.
    assert!(sent.reason.contains("the back-end fs0 has ended"), "{sent}");
    assert_eq!((sent.guest, received.guest), (GuestState::PausedAtSource, GuestState::NotHere), "{sent}; {received}");
    assert!(!from.runs && !to.runs);
}

#[test]
fn if_the_destinations_daemon_hangs_the_migration_fails_and_the_guest_continues_at_the_source() {
    let Some(shared) = Shared::new() else { return };
    let (mut from, log, opened) = with_a_long_state(&shared);
    from.loading = Duration::from_secs(1);
    let hangs =
        |device, daemon: &Process| -> Box<dyn LoadDevice> { Box::new(Loses(device, daemon.clone(), Daemon::hang)) };
    let (to, sent, received) = migrate(&shared, &mut from, log, DeviceChannels::Mixed, |device| device, hangs);
    let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
    assert_eq!((sent.guest, received.guest), (GuestState::RunsAtSource, GuestState::NotHere), "{sent}; {received}");
    assert!(sent.reason.contains("fs-destination") && sent.reason.contains("deadline passed"), "{sent}");
    assert!(from.runs && !to.runs);
    assert_eq!(from.read(opened), b"content");
}

#[test]
fn if_the_destinations_daemon_refuses_its_state_the_guest_continues_at_the_source() {
    let Some(shared) = Shared::new() else { return };
    let (source, open) = super::with_a_deleted_file(&shared, "--migration-mode=find-paths");
    let (mut from, log) = Monitor::new(source, true);
    let (to, sent, received) =
        migrate(&shared, &mut from, log, DeviceChannels::Mixed, |device| device, |device, _| device);
    let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
    assert_eq!((sent.guest, received.guest), (GuestState::RunsAtSource, GuestState::NotHere), "{sent}; {received}");
    assert!(sent.reason.contains("fs-destination") && sent.reason.contains("in its log"), "{sent}");
    assert!(from.runs && !to.runs);
    for (opened, content) in open.into_iter().zip(["stays", "deleted"]) {
        assert_eq!(from.read(opened), content.as_bytes());
    }
}
