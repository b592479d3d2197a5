//! The opening of a migration: the destination's monitor gets the source's message and description, makes RAM and devices, or refuses.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::common::within_a_minute;
use crate::device::{Device, Devices};
use crate::guest::{Memory, Monitor, Running, Workload};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::{Destination, Listening};
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError, Phase};
use sterna_engine::opening::{Opening, Prepared};
use sterna_engine::report::Report;
use sterna_engine::session::Handshake;
use sterna_engine::source::Source;
use sterna_engine::transport::{Limits, Listener, Security};
use sterna_engine::vmm::{DestinationVmm, VmmError};
use sterna_memory::userfault::{Faults, Userfault};
use sterna_wire::control::{Block, Capabilities, ControlMessage, Hello, Machine, Mode};
use sterna_wire::header::{ChannelHeader, ChannelKind};
use sterna_wire::identity::{MigrationId, MigrationKey, ProofSubject};
use sterna_wire::limits::MAX_OPENING;

const CALM: Workload = Workload { writers: 1, span: 300, seed: 3, burst: 8 };

type Answer = Box<dyn FnMut(&mut Receiver, &Opening) -> Result<Prepared, VmmError> + Send>;

/// A monitor that has nothing until a source has come.
struct Receiver {
    running: Running,
    /// What it answers to sources, one after the other, last first.
    answers: Vec<Answer>,
    openings: Vec<Opening>,
    devices: Devices,
    monitor: Option<Monitor>,
}

impl Receiver {
    fn new(running: &Running, answers: impl IntoIterator<Item = Answer>) -> Self {
        let mut answers: Vec<_> = answers.into_iter().collect();
        answers.reverse();
        let (running, devices) = (running.clone(), Devices::default());
        Self { running, answers, openings: Vec::new(), devices, monitor: None }
    }

    /// Makes a machine with these pages in its two blocks.
    fn make(&mut self, pages: [u64; 2]) -> Prepared {
        let memory = Memory::new(pages[0] as usize, pages[1] as usize);
        self.monitor = Some(Monitor::new(&memory, &self.running, CALM).0);
        Prepared::Made { ram: memory.ram(), devices: self.devices.to_load() }
    }

    fn monitor(&mut self) -> Result<&mut Monitor, VmmError> {
        Ok(self.monitor.as_mut().ok_or("there is no machine")?)
    }
}

impl DestinationVmm for Receiver {
    fn name(&self) -> String {
        "receiver 1".into()
    }

    fn prepare(&mut self, opening: &Opening) -> Result<Prepared, VmmError> {
        self.openings.push(opening.clone());
        let mut answer = self.answers.pop().ok_or("no more sources were expected")?;
        answer(self, opening)
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        self.monitor()?.load(state)
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        DestinationVmm::resume(self.monitor()?)
    }
}

/// Makes what the opening describes.
fn as_described() -> Answer {
    Box::new(|receiver, opening| {
        let pages: Vec<_> = opening.blocks.iter().map(|block| block.bytes / 4096).collect();
        Ok(receiver.make(pages.try_into().map_err(|_| "not two RAM blocks")?))
    })
}

fn refuses(reason: &'static str) -> Answer {
    Box::new(move |_, _| Err(reason.into()))
}

fn makes(pages: [u64; 2]) -> Answer {
    Box::new(move |receiver, _| Ok(receiver.make(pages)))
}

fn with_what_is_there() -> Answer {
    Box::new(|_, _| Ok(Prepared::AsGiven))
}

/// A source with an opening message, and its guest, which runs.
struct Sender {
    running: Running,
    monitor: Monitor,
    source: Source,
    devices: Devices,
}

impl Sender {
    fn new(message: &[u8]) -> Self {
        let (memory, running) = (Memory::new(700, 300), Running::default());
        let (mut monitor, log) = Monitor::new(&memory, &running, CALM);
        monitor.start();
        let devices = Devices(vec![Device::new("device", 3, 1000, 100_000)]);
        let source = Source::new(memory.ram(), Box::new(log)).method(MethodChoice::default());
        let source = devices.at_source(source.downtime(Duration::from_secs(20)).opening_message(message));
        Self { running, monitor, source, devices }
    }

    /// Runs the source `times` times; only the last run moves the guest.
    fn run(&mut self, times: usize, listening: Listening, to: &mut Receiver) -> Vec<Result<Report, MigrationError>> {
        let address = listening.address().clone();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(move || listening.run(to, &Cancel::new(), &()));
            let run = |_| self.source.run(address.clone(), &Security::Insecure, &mut self.monitor, &Cancel::new(), &());
            let sent = (0..times).map(run).collect();
            receiving.join().unwrap().unwrap();
            sent
        })
    }

    fn was_refused(&self, sent: &Result<Report, MigrationError>, words: &str) {
        let error = sent.as_ref().unwrap_err();
        assert!(error.reason.contains(words), "{error}");
        assert_eq!((error.kind, error.phase), (ErrorKind::Refused, Phase::SettingUp), "{error}");
        assert_eq!(error.guest, GuestState::Untouched);
    }

    fn has_moved(&self, to: &Receiver) {
        assert!(!self.monitor.runs() && to.monitor.as_ref().is_some_and(Monitor::runs));
        assert_eq!((self.running.now(), self.running.ever_twice()), (1, false));
        assert!(self.devices.all_whole());
    }
}

fn without_ram() -> Listening {
    Destination::without_ram().listen("127.0.0.1:0", &Security::Insecure).unwrap()
}

#[test]
fn a_monitor_makes_its_machine_from_what_the_source_sends() {
    within_a_minute(|| {
        let message: Vec<u8> = (0..MAX_OPENING).map(|at| (at * 31) as u8).collect();
        let mut sender = Sender::new(&message);
        let mut to = Receiver::new(&sender.running, [as_described()]);
        to.devices = sender.devices.clone();
        let sent = sender.run(1, without_ram(), &mut to);
        sent.into_iter().for_each(|sent| drop(sent.unwrap()));
        sender.has_moved(&to);
        let [opening] = &to.openings[..] else { panic!("one source") };
        assert_eq!((&opening.message, &opening.monitor[..]), (&message, "test monitor 1"));
        let block = |name: &str, pages: u64| Block { name: name.into(), bytes: pages * 4096, page_size: 4096 };
        assert_eq!(opening.blocks, [block("low", 700), block("high", 300)]);
        assert_eq!(opening.devices, [sender.devices.0[0].id()]);
        assert!(opening.source.starts_with("127.0.0.1:"), "{}", opening.source);
        assert_eq!(sender.monitor.called, ["save_ahead", "pause", "save"]);
    });
}

#[test]
fn a_refused_source_learns_the_reason_before_its_guest_is_touched_and_the_next_one_may_come() {
    within_a_minute(|| {
        let mut sender = Sender::new(b"");
        let mut to = Receiver::new(
            &sender.running,
            [
                refuses("this host has no GPU of that model"),
                Box::new(|_, _| panic!("preparing was made to panic")),
                with_what_is_there(),
                makes([700, 301]),
                Box::new(|receiver, _| {
                    let other = Devices(vec![Device::new("other", 0, 0, 1)]);
                    let devices = std::mem::replace(&mut receiver.devices, other);
                    let made = receiver.make([700, 300]);
                    receiver.devices = devices;
                    Ok(made)
                }),
                as_described(),
            ],
        );
        to.devices = sender.devices.clone();
        let sent = sender.run(6, without_ram(), &mut to);
        let reasons = [
            "refuses: this host has no GPU of that model",
            "the monitor panicked in prepare: preparing was made to panic",
            "the monitor has made no RAM for the guest",
            "RAM block 1 is high, 1228800 bytes, pages of 4096 at the source and high, 1232896 bytes",
            "devices that the destination does not know: device/3",
        ];
        sent.iter().zip(reasons).for_each(|(sent, words)| sender.was_refused(sent, words));
        assert!(sent[5].is_ok(), "{:?}", sent[5]);
        sender.has_moved(&to);
        assert_eq!(sender.monitor.called, ["save_ahead", "pause", "save"], "no call before a source was accepted");
    });
}

#[test]
fn a_monitor_with_ram_of_its_own_may_look_at_the_opening_message_too() {
    within_a_minute(|| {
        let mut sender = Sender::new(b"4 vCPUs");
        let memory = Memory::new(700, 300);
        let mut to = Receiver::new(&sender.running, [refuses("here are 2 vCPUs"), with_what_is_there()]);
        to.monitor = Some(Monitor::new(&memory, &sender.running, CALM).0);
        let destination = sender.devices.at_destination(Destination::new(memory.ram()));
        let listening = destination.listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let sent = sender.run(2, listening, &mut to);
        sender.was_refused(&sent[0], "here are 2 vCPUs");
        assert!(sent[1].is_ok(), "{:?}", sent[1]);
        sender.has_moved(&to);
        assert!(to.openings.iter().all(|opening| opening.message == b"4 vCPUs"));
    });
}

#[test]
fn an_opening_message_that_is_too_long_is_refused_before_a_connection_is_made() {
    let mut sender = Sender::new(&vec![0; MAX_OPENING + 1]);
    let sent = sender.source.run("127.0.0.1:1", &Security::Insecure, &mut sender.monitor, &Cancel::new(), &());
    let error = sent.unwrap_err();
    assert_eq!((error.kind, error.guest), (ErrorKind::Settings, GuestState::Untouched));
    assert!(error.reason.contains("65537 bytes; up to 65536 are possible"), "{error}");
}

/// Connects as a source whose hello has this opening and these features. Returns the connection.
fn odd_source(address: &str, opening: Vec<u8>, features: &[&str]) -> TcpStream {
    let (id, key) = (MigrationId::from_bytes([7; 16]), MigrationKey::from_bytes([8; 32]));
    let subject = ProofSubject { id, kind: ChannelKind::Control, index: 0, incarnation: 1, exporter: b"" };
    let block = |name: &str, pages: u64| Block { name: name.into(), bytes: pages * 4096, page_size: 4096 };
    let hello = Hello {
        program: "odd".into(),
        key: key.to_hex(),
        mode: Mode::Embedded,
        channels: 1,
        capabilities: Capabilities {
            methods: vec!["none".into()],
            packet_size: 64 << 10,
            features: features.iter().map(ToString::to_string).collect(),
            required: Vec::new(),
        },
        machine: Machine { blocks: vec![block("low", 700), block("high", 300)], opening, ..Machine::default() },
    };
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(&ChannelHeader::new(&key, &subject).encode()).unwrap();
    stream.write_all(&ControlMessage::Hello(Box::new(hello)).encode()).unwrap();
    // The reply to the header.
    stream.read_exact(&mut [0; 4]).unwrap();
    stream
}

/// Reads one control message, as text.
fn message(stream: &mut TcpStream) -> String {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut json = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut json).unwrap();
    String::from_utf8(json).unwrap()
}

#[test]
fn a_source_gets_heartbeats_while_the_monitor_prepares_and_no_message_without_the_capability() {
    within_a_minute(|| {
        let (seen, heartbeat) = std::sync::mpsc::channel();
        let waits: Answer = Box::new(move |_, _| {
            heartbeat.recv()?;
            Err("it has waited".into())
        });
        let running = Running::default();
        let mut to = Receiver::new(&running, [waits, refuses("again")]);
        let (listening, cancel) = (without_ram(), Cancel::new());
        let address = listening.address().to_string();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| listening.run(&mut to, &cancel, &()));
            let too_long = vec![1; MAX_OPENING + 1];
            let mut source = odd_source(&address, too_long, &["guest-state-1", "opening-1"]);
            assert!(message(&mut source).contains("the opening message has 65537 bytes"));
            let mut source = odd_source(&address, b"not agreed on".to_vec(), &["guest-state-1"]);
            assert_eq!(message(&mut source), r#""heartbeat""#);
            seen.send(()).unwrap();
            let mut answer = message(&mut source);
            while answer == r#""heartbeat""# {
                answer = message(&mut source);
            }
            assert!(answer.contains("refused") && answer.contains("it has waited"), "{answer}");
            let mut source = odd_source(&address, b"agreed on".to_vec(), &["guest-state-1", "opening-1"]);
            assert!(message(&mut source).contains("again"));
            cancel.cancel();
            receiving.join().unwrap().unwrap_err();
        });
        let messages: Vec<_> = to.openings.iter().map(|opening| &opening.message[..]).collect();
        assert_eq!(messages, [&b""[..], b"agreed on"]);
    });
}

/// Populating the memory waits at its first page, as long as the test decides: far longer than the stall limit, which counts from the
/// acceptance.
#[test]
fn an_accepted_source_gets_heartbeats_however_long_its_memory_is_prepared() {
    within_a_minute(|| {
        let missing = match Userfault::open(Faults::All, 0) {
            Ok(missing) => missing,
            Err(error) => return println!("skipped: {error}"),
        };
        let (memory, running) = (Memory::new(700, 300), Running::default());
        let (mut to, _) = Monitor::new(&memory, &running, CALM);
        let first = memory.ram().blocks()[0].addresses();
        missing.register_missing(first.clone()).unwrap();
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_address();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let address = here.to_string();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(move || {
                let takes = [(Mode::Embedded, Destination::FEATURES)];
                let handshake = Handshake { takes: &takes, refusals: &|_| Vec::new(), describe: None };
                let source = handshake.first(&incoming, &Cancel::new(), |reason| panic!("{reason}")).unwrap();
                let destination =
                    Destination::new(memory.ram()).prefault(true).stall_limit(Some(Duration::from_millis(1)));
                destination.take(source, incoming, &here, &mut to, &Cancel::new(), &()).unwrap_err()
            });
            let mut source = odd_source(&address, Vec::new(), &["guest-state-1"]);
            for _ in 0..3 {
                assert_eq!(message(&mut source), r#""heartbeat""#);
            }
            missing.unregister(first).unwrap();
            let mut answer = message(&mut source);
            while answer == r#""heartbeat""# {
                answer = message(&mut source);
            }
            assert!(answer.contains("welcome"), "{answer}");
            let ended = receiving.join().unwrap();
            assert!(ended.reason.contains("stall limit"), "{ended}");
        });
    });
}
