//! Both ends of the protocol against each other in one process: no sockets, no threads, no clock.
//!
//! A source and a destination are made of the crate's own types and exchange nothing but bytes, which arrive in pieces
//! of random length, channel by channel in random order. Whatever the order, memory ends equal, every page's newest
//! content wins, and the destination is prepared only when everything is there. The seed is printed with a failure.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use proptest::test_runner::contextualize_config;
use sterna_wire::checksum::crc32c;
use sterna_wire::control::{Capabilities, ControlMessage, ControlReader, Hello, Machine, Mode, Totals, Welcome};
use sterna_wire::handshake::{choose, conclude};
use sterna_wire::header::{CHANNEL_HEADER_LENGTH, ChannelHeader, ChannelKind};
use sterna_wire::identity::{MigrationId, MigrationKey, ProofSubject};
use sterna_wire::packet::{
    ACK_LENGTH, Ack, BlockShape, PACKET_HEADER_LENGTH, PacketHeader, PacketKind, PageTable, Run, RunKind,
};
use sterna_wire::reason::Reason;
use sterna_wire::sequence::{ReceiveSequence, SendSequence};
use sterna_wire::switchover::{
    DestinationAction, DestinationEvent, DestinationGuest, DestinationSwitchover, SourceAction, SourceEnd, SourceEvent,
    SourceGuest, SourceSwitchover,
};

const PAGE: usize = 64;
const PAGES: u64 = 32;
const PACKET_SIZE: usize = 4096;
const UNTOUCHED: u8 = 0xee;

/// Bytes on their way, delivered in pieces.
#[derive(Default)]
struct Pipe {
    travelling: VecDeque<u8>,
    arrived: Vec<u8>,
}

impl Pipe {
    fn send(&mut self, bytes: &[u8]) {
        self.travelling.extend(bytes);
    }

    fn deliver(&mut self, length: usize) {
        let length = length.min(self.travelling.len());
        self.arrived.extend(self.travelling.drain(..length));
    }

    /// Takes `length` arrived bytes, once they are all there.
    fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        (self.arrived.len() >= length).then(|| self.arrived.drain(..length).collect())
    }
}

/// One RAM channel, both ends.
#[derive(Default)]
struct Channel {
    to_destination: Pipe,
    to_source: Pipe,
    sent: SendSequence,
    received: ReceiveSequence,
    /// A header that has arrived and waits for the rest of its packet.
    header: Option<(PacketHeader, [u8; PACKET_HEADER_LENGTH])>,
}

impl Channel {
    /// Sends one page of the guest, or that it is zero.
    fn send_page(&mut self, page: u64, content: Option<&[u8]>) {
        let run = Run { kind: if content.is_some() { RunKind::Normal } else { RunKind::Zero }, first: page, count: 1 };
        let (table, content) = (run.encode(), content.unwrap_or(&[]));
        let header = PacketHeader {
            kind: PacketKind::Pages,
            method: 0,
            subject: 0,
            sequence: self.sent.advance(),
            table_length: table.len() as u32,
            payload_length: content.len() as u32,
            content_length: content.len() as u32,
            content_checksum: crc32c(content),
            detail: 0,
        };
        self.to_destination.send(&header.encode(&table));
        self.to_destination.send(&table);
        self.to_destination.send(content);
    }

    /// Places the packets that have arrived whole, and acknowledges them.
    fn receive(&mut self, memory: &mut [u8]) {
        let blocks = [BlockShape { pages: PAGES, page_size: PAGE as u32 }];
        loop {
            if self.header.is_none() {
                let Some(bytes) = self.to_destination.take(PACKET_HEADER_LENGTH) else { return };
                let bytes = bytes.try_into().unwrap();
                self.header = Some((PacketHeader::decode(&bytes, PACKET_SIZE).unwrap(), bytes));
            }
            let (header, bytes) = self.header.unwrap();
            let (table, payload) = (header.table_length as usize, header.payload_length as usize);
            let Some(rest) = self.to_destination.take(table + payload) else { return };
            self.header = None;
            let (table, content) = rest.split_at(table);
            PacketHeader::check_table(&bytes, table).unwrap();
            self.received.expect(header.sequence).unwrap();
            assert_eq!(crc32c(content), header.content_checksum);
            let mut pages = PageTable::new();
            pages.read(&header, table, &blocks).unwrap();
            let mut rest = content;
            for run in pages.runs() {
                let range = run.first as usize * PAGE..run.end() as usize * PAGE;
                match run.kind {
                    RunKind::Zero => memory[range].fill(0),
                    RunKind::Normal => {
                        let (now, later) = rest.split_at(range.len());
                        memory[range].copy_from_slice(now);
                        rest = later;
                    }
                }
            }
            self.to_source.send(&Ack { sequence: self.received.placed(), busy_us: 0 }.encode());
        }
    }

    fn take_acknowledgements(&mut self) {
        while let Some(bytes) = self.to_source.take(ACK_LENGTH) {
            let ack = Ack::decode(&bytes.try_into().unwrap()).unwrap();
            self.sent.acknowledge(ack.sequence).unwrap();
        }
    }
}

fn capabilities() -> Capabilities {
    Capabilities { methods: vec!["none".into()], packet_size: PACKET_SIZE as u32, features: vec![], required: vec![] }
}

/// The control channel opens, both sides agree, over bytes alone.
fn shake_hands() -> Capabilities {
    let (key, id) = (MigrationKey::from_bytes([1; 32]), MigrationId::from_bytes([2; 16]));
    let subject = ProofSubject { id, kind: ChannelKind::Control, index: 0, incarnation: 1, exporter: b"" };
    let hello = ControlMessage::Hello(Box::new(Hello {
        program: "both ends".into(),
        key: key.to_hex(),
        mode: Mode::Owner,
        channels: 2,
        capabilities: capabilities(),
        machine: Machine::default(),
    }));
    let mut bytes = ChannelHeader::new(&key, &subject).encode().to_vec();
    bytes.extend(hello.encode());

    let (header, control) = bytes.split_first_chunk::<CHANNEL_HEADER_LENGTH>().unwrap();
    let header = ChannelHeader::decode(header).unwrap();
    let mut reader = ControlReader::default();
    reader.push(control);
    let Some(ControlMessage::Hello(hello)) = reader.next_message().unwrap() else { panic!("a hello was sent") };
    let (told, chosen) = choose(&capabilities(), &header, b"", &hello).unwrap();
    assert!(told == key);

    let welcome = Welcome { program: "both ends".into(), chosen };
    let mut reader = ControlReader::default();
    reader.push(&ControlMessage::Welcome(welcome).encode());
    let Some(ControlMessage::Welcome(welcome)) = reader.next_message().unwrap() else { panic!("a welcome was sent") };
    conclude(&capabilities(), &welcome).unwrap()
}

/// What becomes of the guest's memory.
#[derive(Clone, Copy, PartialEq)]
enum Memory {
    /// All of it is placed before the guest is started.
    Arrives,
    /// Some of it does not arrive.
    Lacks,
    /// The rest follows the guest.
    Follows,
}

/// Both switchover machines with their control messages over bytes; gives whether the guest runs at (source,
/// destination) at the end.
fn switch_over(memory: Memory) -> (bool, bool) {
    let (mut source, mut source_actions) = SourceSwitchover::begin();
    let (mut destination, mut destination_actions) = DestinationSwitchover::begin();
    let (mut to_destination, mut to_source) = (Vec::new(), Vec::new());
    let (mut runs_at_source, mut runs_at_destination) = (true, false);
    let (mut ended, mut left) = (false, false);
    // In post-copy.
    let (mut state_sent, mut loaded, mut served, mut awaited) = (false, false, false, false);
    for _ in 0..100 {
        if memory == Memory::Follows && state_sent && !std::mem::replace(&mut loaded, state_sent) {
            destination_actions.extend(destination.on(DestinationEvent::AllPlacedAndLoaded));
        }
        if served && awaited && runs_at_destination && destination.lacks_memory() {
            destination_actions.extend(destination.on(DestinationEvent::MemoryComplete));
        }
        for action in std::mem::take(&mut source_actions) {
            let answer = match action {
                SourceAction::WriteRecord(_) => Some(SourceEvent::RecordWritten),
                SourceAction::StartMigration if memory == Memory::Follows => Some(SourceEvent::PostCopyWanted),
                SourceAction::StartMigration | SourceAction::StartPostCopy => {
                    (runs_at_source, state_sent) = (false, true);
                    Some(SourceEvent::FinalStateSent)
                }
                SourceAction::ServePages => {
                    served = true;
                    None
                }
                SourceAction::Send(message) => {
                    to_destination.extend(ControlMessage::Switchover(message).encode());
                    None
                }
                SourceAction::RelayShut => Some(SourceEvent::Guest(SourceGuest::Completed)),
                SourceAction::EndMigration | SourceAction::Cont => {
                    runs_at_source = true;
                    Some(SourceEvent::Guest(SourceGuest::Running))
                }
                SourceAction::EndGuest => {
                    assert!(runs_at_destination, "ended before it ran elsewhere");
                    assert!(!destination.lacks_memory(), "ended while its memory was needed");
                    Some(SourceEvent::Guest(SourceGuest::Gone))
                }
                SourceAction::Done(end) => {
                    ended = true;
                    assert_eq!(matches!(end, SourceEnd::Finished), memory != Memory::Lacks, "{end:?}");
                    None
                }
                SourceAction::AnnounceSelf | SourceAction::Connect => None,
                SourceAction::HoldRounds | SourceAction::ContinueRounds => panic!("no connection was lost"),
            };
            assert!(!(runs_at_source && runs_at_destination), "two guests run");
            source_actions.extend(answer.into_iter().flat_map(|event| source.on(event)));
        }
        for action in std::mem::take(&mut destination_actions) {
            let answer = match action {
                DestinationAction::WriteRecord(_) => Some(DestinationEvent::RecordWritten),
                DestinationAction::ClearAutostart => Some(DestinationEvent::AutostartCleared),
                DestinationAction::Send(message) => {
                    to_source.extend(ControlMessage::Switchover(message).encode());
                    None
                }
                DestinationAction::Cont => {
                    runs_at_destination = true;
                    Some(DestinationEvent::Guest(DestinationGuest::Running))
                }
                DestinationAction::Quit => Some(DestinationEvent::Guest(DestinationGuest::Gone)),
                DestinationAction::AcceptStream => match memory {
                    Memory::Arrives => Some(DestinationEvent::AllPlacedAndLoaded),
                    Memory::Lacks => Some(DestinationEvent::Failed { reason: Reason::other("pages are missing") }),
                    Memory::Follows => None,
                },
                DestinationAction::WatchMissingPages => Some(DestinationEvent::MissingPagesWatched),
                DestinationAction::AwaitMemory => {
                    awaited = true;
                    None
                }
                DestinationAction::Leave => {
                    left = true;
                    None
                }
                DestinationAction::AnnounceSelf | DestinationAction::AwaitSource | DestinationAction::Done(_) => None,
                DestinationAction::HangUp | DestinationAction::RenewChannels => panic!("no connection was lost"),
            };
            assert!(!(runs_at_source && runs_at_destination), "two guests run");
            destination_actions.extend(answer.into_iter().flat_map(|event| destination.on(event)));
        }
        for (bytes, at_source) in [(std::mem::take(&mut to_destination), false), (std::mem::take(&mut to_source), true)]
        {
            let mut reader = ControlReader::default();
            reader.push(&bytes);
            while let Some(message) = reader.next_message().unwrap() {
                let ControlMessage::Switchover(message) = message else { panic!("{message:?}") };
                if at_source {
                    source_actions.extend(source.on(SourceEvent::Message(message)));
                } else {
                    destination_actions.extend(destination.on(DestinationEvent::Message(message)));
                }
            }
        }
    }
    assert!(ended, "the source came to no end");
    assert!(left, "the destination waits for the source");
    (runs_at_source, runs_at_destination)
}

proptest! {
    // A default, which PROPTEST_CASES replaces.
    #![proptest_config(contextualize_config(ProptestConfig::with_cases(400)))]
    #[test]
    fn pages_arrive_in_any_pieces_and_the_newest_content_wins(
        writes in proptest::collection::vec((0..PAGES, any::<u8>()), 1..80),
        pieces in proptest::collection::vec((0usize..2, any::<bool>(), 1usize..300), 1..400),
    ) {
        prop_assert_eq!(shake_hands().packet_size as usize, PACKET_SIZE);
        let mut channels = [Channel::default(), Channel::default()];
        let mut memory = vec![UNTOUCHED; PAGES as usize * PAGE];
        let mut sent_pages = BTreeMap::new();
        let mut pieces = pieces.into_iter().cycle();
        let mut step = |channels: &mut [Channel; 2], memory: &mut [u8]| {
            let (which, forward, length) = pieces.next().unwrap();
            let channel = &mut channels[which];
            if forward { channel.to_destination.deliver(length) } else { channel.to_source.deliver(length) }
            channel.receive(memory);
            channel.take_acknowledgements();
        };

        for (page, value) in writes {
            let content = [value; PAGE];
            // Affinity: a page always takes the same channel.
            channels[(page / 4 % 2) as usize].send_page(page, (value != 0).then_some(&content[..]));
            sent_pages.insert(page, value);
            step(&mut channels, &mut memory);
        }
        let totals = Totals { ram: channels.iter().map(|channel| channel.sent.last()).collect(), ..Totals::default() };
        let complete = |channels: &[Channel; 2]| {
            channels.iter().zip(&totals.ram).all(|(channel, last)| channel.received.last() == *last)
        };
        let outstanding = |channels: &[Channel; 2]| channels.iter().map(|channel| channel.sent.outstanding()).sum::<u64>();
        for _ in 0..20_000 {
            if complete(&channels) && outstanding(&channels) == 0 {
                break;
            }
            step(&mut channels, &mut memory);
            // A script of pieces that never touches one direction would starve it: the network delivers in the end.
            for channel in &mut channels {
                channel.to_destination.deliver(1);
                channel.to_source.deliver(1);
                channel.receive(&mut memory);
                channel.take_acknowledgements();
            }
        }

        prop_assert!(complete(&channels) && outstanding(&channels) == 0);
        for page in 0..PAGES {
            // Pages that were never sent were never touched.
            let wanted = sent_pages.get(&page).copied().unwrap_or(UNTOUCHED);
            prop_assert!(memory[page as usize * PAGE..][..PAGE].iter().all(|byte| *byte == wanted), "page {}", page);
        }
    }
}

#[test]
fn the_guest_ends_at_the_destination_when_everything_is_there() {
    assert_eq!(switch_over(Memory::Arrives), (false, true));
}

#[test]
fn the_guest_ends_at_the_source_when_something_is_missing() {
    assert_eq!(switch_over(Memory::Lacks), (true, false));
}

#[test]
fn the_guest_ends_at_the_destination_before_all_of_it_is_there_and_then_all_of_it_is() {
    assert_eq!(switch_over(Memory::Follows), (false, true));
}
