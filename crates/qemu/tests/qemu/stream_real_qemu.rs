//! Real migrations from one QEMU through the readers and writers into another: 7.2 and 10.0, machine types of both, with
//! and without multifd on either side, while the guest writes its memory. The destination's memory is compared byte for byte.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc;
use std::thread;

use serde_json::{Value, json};
use sterna_qemu::stream::{
    ChannelSniff, Event, MainReader, MainWriter, MultifdInit, MultifdPacket, MultifdReader, MultifdWriter, PacketKind,
    PageBatch, ReturnMessage, ReturnPathReader, SectionKind, WireVariant,
};
use sterna_qemu_lab::{QemuVersion, Tools, skip_if_unavailable};
use sterna_test_kit::Random;

const PAGE: usize = 4096;
const RAM: usize = 64 << 20;
/// For the guest's random content.
const SEED: u64 = 1;
/// Where the guest's random content is, bytes.
const RANDOM: std::ops::Range<usize> = 16 << 20..24 << 20;

struct Qemu {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    events: VecDeque<Value>,
}

impl Qemu {
    fn start(tools: &Tools, version: QemuVersion, machine: &str, disk: &Path, more: &[&str]) -> Option<Self> {
        let mut command = skip_if_unavailable(tools.qemu(version))?;
        std::fs::write(disk, boot_sector()).unwrap();
        command.args(["-M", machine, "-accel", "tcg", "-m", "64M", "-nodefaults", "-display", "none", "-qmp", "stdio"]);
        command.arg("-drive").arg(format!("file={},format=raw,if=ide", disk.display())).args(more);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let commands = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut qemu = Self { child, commands, answers, events: VecDeque::new() };
        assert!(qemu.line().get("QMP").is_some());
        qemu.run("qmp_capabilities", &json!({}));
        Some(qemu)
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "QEMU has ended: {:?}", self.child.wait());
        serde_json::from_str(&line).unwrap()
    }

    fn run(&mut self, command: &str, arguments: &Value) -> Value {
        writeln!(self.commands, "{}", json!({"execute": command, "arguments": arguments})).unwrap();
        loop {
            let mut answer = self.line();
            if answer.get("event").is_some() {
                self.events.push_back(answer);
            } else {
                assert!(answer.get("error").is_none(), "{command}: {answer}");
                return answer["return"].take();
            }
        }
    }

    /// Waits for the end of the migration.
    fn completed(&mut self) {
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => self.line(),
            };
            match event["data"]["status"].as_str() {
                Some("completed") if event["event"] == "MIGRATION" => return,
                Some("failed" | "cancelled") => panic!("{}", self.run("query-migrate", &json!({}))),
                _ => {}
            }
        }
    }

    fn capabilities(&mut self, channels: usize, more: &[&str]) {
        let mut list = vec![json!({"capability": "events", "state": true})];
        list.extend(more.iter().map(|name| json!({"capability": name, "state": true})));
        list.push(json!({"capability": "multifd", "state": channels > 0}));
        self.run("migrate-set-capabilities", &json!({"capabilities": list}));
        if channels > 0 {
            self.run("migrate-set-parameters", &json!({"multifd-channels": channels}));
        }
    }

    fn memory(&mut self, directory: &Path, name: &str) -> Vec<u8> {
        let path = directory.join(name);
        self.run("pmemsave", &json!({"val": 0, "size": RAM, "filename": path}));
        std::fs::read(path).unwrap()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes `R` to the serial line, then counts up the first byte of each page from 64 KiB to 576 KiB, for ever.
fn boot_sector() -> Vec<u8> {
    let mut sector = vec![
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xb0, b'R', // mov al, 'R'
        0xee, // out dx, al
        0xb8, 0x00, 0x10, // first: mov ax, 0x1000
        0x8e, 0xd8, // next: mov ds, ax
        0xfe, 0x06, 0x00, 0x00, // inc byte [0]
        0x05, 0x00, 0x01, // add ax, 0x100
        0x3d, 0x00, 0x90, // cmp ax, 0x9000
        0x72, 0xf2, // jb next
        0xeb, 0xed, // jmp back to the first page
    ];
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector.resize(1 << 20, 0);
    sector
}

/// An item of a multifd channel of the source.
enum FromChannel {
    Pages { block: String, normal: Vec<u64>, data: Vec<u8>, zero: Vec<u64> },
    Sync,
}

fn read_channel(mut socket: UnixStream, channels: u8, to: &mpsc::Sender<FromChannel>) {
    let init = MultifdInit::read(&mut socket, channels).unwrap();
    assert_eq!(init.uuid, [0; 16]);
    let mut reader = MultifdReader::new(socket, PAGE).unwrap();
    let mut packet = MultifdPacket::default();
    while reader.read_header(&mut packet).unwrap() == PacketKind::Ram {
        let mut data = vec![0; packet.payload_len];
        reader.read_payload(&mut data).unwrap();
        if !packet.name.is_empty() {
            let (normal, zero) = (packet.normal.clone(), packet.zero.clone());
            to.send(FromChannel::Pages { block: packet.name.clone(), normal, data, zero }).unwrap();
        }
        if packet.sync {
            to.send(FromChannel::Sync).unwrap();
        }
    }
}

/// Statistics of a migration.
#[derive(Debug, Default)]
struct Seen {
    pages: u64,
    /// Pages that came before already: the guest had written them again.
    pages_again: u64,
    main_zero_pages: u64,
    packet_zero_pages: u64,
    sync_points: u64,
    flush_in_setup: bool,
    opaque_bytes: u64,
}

struct Gateway {
    main: MainWriter<UnixStream>,
    channels: Vec<MultifdWriter<UnixStream>>,
    turn: usize,
    blocks: Vec<String>,
    from: Vec<mpsc::Receiver<FromChannel>>,
    seen: Seen,
    pages_seen: HashSet<(usize, u64)>,
}

impl Gateway {
    fn connect(path: &Path, variant: WireVariant, channels: usize, from: Vec<mpsc::Receiver<FromChannel>>) -> Self {
        let mut main = MainWriter::new(UnixStream::connect(path).unwrap(), variant, channels > 0);
        main.header().unwrap();
        let channels = (0..channels)
            .map(|id| {
                let socket = UnixStream::connect(path).unwrap();
                MultifdInit { uuid: [0; 16], id: u8::try_from(id).unwrap() }.write(&socket).unwrap();
                MultifdWriter::new(socket, variant, PAGE).unwrap()
            })
            .collect();
        Self { main, channels, turn: 0, blocks: Vec::new(), from, seen: Seen::default(), pages_seen: HashSet::new() }
    }

    fn pages(&mut self, block: usize, offsets: &[u64], data: &[u8]) {
        self.seen.pages += offsets.len() as u64;
        for &offset in offsets {
            self.seen.pages_again += u64::from(!self.pages_seen.insert((block, offset)));
        }
        if self.channels.is_empty() {
            return self.main.pages(block, offsets, data).unwrap();
        }
        for (offsets, data) in offsets.chunks(128).zip(data.chunks(128 * PAGE)) {
            self.turn = (self.turn + 1) % self.channels.len();
            self.channels[self.turn].pages(&self.blocks[block], offsets, &[data], &[]).unwrap();
        }
    }

    /// Passes on the packets of each channel of the source up to its SYNC.
    fn gather(&mut self) {
        for index in 0..self.from.len() {
            while let FromChannel::Pages { block, normal, data, zero } = self.from[index].recv().unwrap() {
                let block = self.blocks.iter().position(|name| *name == block).unwrap();
                self.pages(block, &normal, &data);
                self.main.zero_pages(block, &zero).unwrap();
                self.seen.packet_zero_pages += zero.len() as u64;
            }
        }
        self.seen.sync_points += 1;
    }

    fn sync(&mut self) {
        for channel in &mut self.channels {
            channel.sync_to(self.main.sync_points()).unwrap();
        }
    }

    fn boundary(&mut self) {
        self.main.generation_boundary().unwrap();
        self.sync();
    }

    fn carry(mut self, source: UnixStream, variant: WireVariant) -> Seen {
        let mut reader = MainReader::new(source);
        let mut buffer = vec![0; 64 * PAGE];
        let mut batch = PageBatch::default();
        let per_section = variant.syncs_per_section();
        let multifd = !self.from.is_empty();
        loop {
            if reader.next_pages(&mut buffer, &mut batch).unwrap() > 0 {
                let length = batch.offsets.len() * PAGE;
                self.pages(batch.block, &batch.offsets, &buffer[..length]);
            }
            match reader.next_event(&mut buffer).unwrap() {
                Event::Header => {}
                Event::Configuration(section) => self.main.configuration(&section).unwrap(),
                Event::Command(command) => self.main.command(&command).unwrap(),
                Event::RamStart(start) => {
                    self.main.ram_start(&start, false).unwrap();
                    self.blocks = start.blocks.into_iter().map(|block| block.name).collect();
                }
                Event::Page { block, offset } => self.pages(block, &[offset], &buffer[..PAGE]),
                Event::ZeroPage { block, offset } => {
                    self.main.zero_pages(block, &[offset]).unwrap();
                    self.seen.main_zero_pages += 1;
                }
                Event::Flush => {
                    self.gather();
                    if reader.setup_had_flush() && self.seen.sync_points > 1 {
                        self.boundary();
                    }
                }
                Event::EndOfSection { kind } => {
                    if per_section && multifd {
                        self.gather();
                    }
                    match kind {
                        SectionKind::Setup => {
                            self.seen.flush_in_setup = reader.setup_had_flush();
                            self.main.end_setup().unwrap();
                            self.sync();
                        }
                        // Without multifd the source's sections are the only boundaries it shows.
                        SectionKind::Iterate if per_section || !multifd => self.boundary(),
                        SectionKind::Iterate => {}
                        SectionKind::Complete => {
                            self.boundary();
                            self.main.begin_complete().unwrap();
                            self.main.end_complete().unwrap();
                            self.sync();
                        }
                    }
                }
                Event::RamEnd => break,
                other => panic!("{other:?}"),
            }
        }
        loop {
            match reader.read_opaque(&mut buffer).unwrap() {
                0 => return self.seen,
                n => {
                    self.main.opaque(&buffer[..n]).unwrap();
                    self.seen.opaque_bytes += n as u64;
                }
            }
        }
    }
}

fn accept(listener: &UnixListener, channels: usize) -> (UnixStream, Vec<UnixStream>) {
    let (mut main, mut multifd) = (None, Vec::new());
    while main.is_none() || multifd.len() < channels {
        let (mut socket, _) = listener.accept().unwrap();
        // Peeked at: the readers need the bytes, too.
        let first = peek(&mut socket);
        match ChannelSniff::of(first) {
            ChannelSniff::Main => main = Some(socket),
            ChannelSniff::Multifd => multifd.push(socket),
            ChannelSniff::Other => panic!("{first:?}"),
        }
    }
    (main.unwrap(), multifd)
}

fn peek(socket: &mut UnixStream) -> [u8; 4] {
    let mut first = [0; 4];
    loop {
        let (n, _) = rustix::net::recv(&*socket, &mut first[..], rustix::net::RecvFlags::PEEK).unwrap();
        match n {
            0 => panic!("the source closed a channel"),
            4 => return first,
            _ => thread::yield_now(),
        }
    }
}

/// One migration of a running guest; `channels` are the source's and the destination's multifd channels.
/// Moves guests that write the same pages over and over until pages of one have come again. Whether a guest has written any between two
/// rounds is up to who had the CPU meanwhile.
fn migrate(from: QemuVersion, to: QemuVersion, machine: &str, channels: (usize, usize)) {
    let moved = || migrate_once(from, to, machine, channels).is_none_or(|seen| seen.pages_again > 0);
    assert!((0..10).any(|_| moved()), "of ten guests, no page came again");
}

/// What was seen; none where there is no QEMU.
fn migrate_once(from: QemuVersion, to: QemuVersion, machine: &str, channels: (usize, usize)) -> Option<Seen> {
    let tools = skip_if_unavailable(Tools::locate())?;
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let path = |name: &str| directory.join(name);
    let mut random = Random::new(SEED);
    let pattern: Vec<u8> = (0..RANDOM.len() / 8).flat_map(|_| random.next_u64().to_be_bytes()).collect();
    File::create(path("random.bin")).unwrap().write_all(&pattern).unwrap();

    let serial = format!("unix:{}", path("serial.sock").display());
    let serial_line = UnixListener::bind(path("serial.sock")).unwrap();
    let loader = format!("loader,file={},addr={:#x},force-raw=on", path("random.bin").display(), RANDOM.start);
    let mut source =
        Qemu::start(&tools, from, machine, &path("source.img"), &["-serial", &serial, "-device", &loader])?;
    let incoming = ["-serial", "null", "-S", "-incoming", "defer"];
    let mut destination = Qemu::start(&tools, to, machine, &path("destination.img"), &incoming)?;
    let (mut serial_line, _) = serial_line.accept().unwrap();
    let mut said = [0];
    while said != *b"R" {
        serial_line.read_exact(&mut said).unwrap();
    }
    source.capabilities(channels.0, &["return-path"]);
    destination.capabilities(channels.1, &[]);
    destination.run("migrate-incoming", &json!({"uri": format!("unix:{}", path("dst.sock").display())}));
    let listener = UnixListener::bind(path("src.sock")).unwrap();
    source.run("migrate", &json!({"uri": format!("unix:{}", path("src.sock").display())}));

    let variant = WireVariant::for_machine(machine).unwrap();
    let (main, multifd) = accept(&listener, channels.0);
    let count = u8::try_from(channels.0).unwrap();
    let mut receivers = Vec::new();
    let mut threads = Vec::new();
    for socket in multifd {
        let (to, from) = mpsc::channel();
        receivers.push(from);
        threads.push(thread::spawn(move || read_channel(socket, count, &to)));
    }
    let gateway = Gateway::connect(&path("dst.sock"), variant, channels.1, receivers);
    let back_from = gateway.main.get_ref().try_clone().unwrap();
    let back_to = main.try_clone().unwrap();
    let back = thread::spawn(move || {
        let mut reader = ReturnPathReader::new(back_from);
        let mut messages = Vec::new();
        while let Some(message) = reader.next_message().unwrap() {
            message.write(&back_to).unwrap();
            messages.push(message);
            if matches!(message, ReturnMessage::Shut(_)) {
                break;
            }
        }
        messages
    });
    let seen = gateway.carry(main, variant);
    assert_eq!(back.join().unwrap(), [ReturnMessage::Pong(1), ReturnMessage::Shut(0)]);
    for thread in threads {
        thread.join().unwrap();
    }
    source.completed();
    destination.completed();

    println!("{from} to {to}, {machine}, channels {channels:?}: {seen:?}");
    let (before, after) = (source.memory(directory, "before"), destination.memory(directory, "after"));
    assert!(before[RANDOM] == pattern, "the source does not have the pattern");
    // Between 640 KiB and 1 MiB the addresses do not lead to plain memory but to what the chip set shows there.
    let plain = |index: &usize| !(0xa_0000..0x10_0000).contains(&(index * PAGE));
    let differing: Vec<usize> = (0..RAM / PAGE)
        .filter(|i| before[i * PAGE..(i + 1) * PAGE] != after[i * PAGE..(i + 1) * PAGE])
        .filter(plain)
        .collect();
    assert!(differing.is_empty(), "pages {differing:x?} differ");
    assert!(seen.pages >= (RANDOM.len() / PAGE) as u64 && seen.opaque_bytes > 1000);
    if channels.0 > 0 {
        assert_eq!(seen.flush_in_setup, !variant.syncs_per_section());
        assert_eq!(WireVariant::from_setup(seen.flush_in_setup).syncs_per_section(), variant.syncs_per_section());
        assert_eq!(seen.packet_zero_pages > 0, variant.zero_pages_in_packets());
        assert!(seen.sync_points >= 3);
    }
    Some(seen)
}

#[test]
fn from_7_2_to_7_2_on_one_stream() {
    migrate(QemuVersion::V7_2, QemuVersion::V7_2, "pc-q35-7.2", (0, 0));
}

#[test]
fn from_7_2_to_7_2_with_multifd() {
    migrate(QemuVersion::V7_2, QemuVersion::V7_2, "pc-q35-7.2", (2, 3));
}

#[test]
fn from_7_2_to_10_0_with_multifd_only_at_the_source() {
    migrate(QemuVersion::V7_2, QemuVersion::V10_0, "pc-i440fx-7.2", (4, 0));
}

#[test]
fn from_10_0_to_10_0_with_multifd_and_an_old_machine_type() {
    migrate(QemuVersion::V10_0, QemuVersion::V10_0, "pc-q35-7.2", (2, 2));
}

#[test]
fn from_10_0_to_10_0_with_multifd_and_synchronisation_per_round() {
    migrate(QemuVersion::V10_0, QemuVersion::V10_0, "pc-q35-8.2", (2, 2));
}

#[test]
fn from_10_0_to_10_0_with_multifd_only_at_the_destination() {
    migrate(QemuVersion::V10_0, QemuVersion::V10_0, "pc-q35-10.0", (0, 2));
}

#[test]
fn from_10_0_to_10_0_with_multifd() {
    migrate(QemuVersion::V10_0, QemuVersion::V10_0, "pc-q35-10.0", (2, 1));
}

#[test]
fn from_10_0_to_11_1_with_multifd() {
    migrate(QemuVersion::V10_0, QemuVersion::V11_1, "pc-q35-10.0", (2, 1));
}

#[test]
fn from_11_1_to_11_1_with_multifd() {
    migrate(QemuVersion::V11_1, QemuVersion::V11_1, "pc-q35-11.1", (1, 2));
}

#[test]
fn from_11_1_to_11_1_on_one_stream() {
    migrate(QemuVersion::V11_1, QemuVersion::V11_1, "pc-q35-11.1", (0, 0));
}
