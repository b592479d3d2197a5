//! A channel whose peer, or whose network, does not do what it should: each end notices, says so, and does not hang.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use crate::common::{HANG_LIMIT, PAGE, Placed, halves, sockets, within_a_minute};
use sterna_codec::{Engines, MethodChoice};
use sterna_engine::abort::Abort;
use sterna_engine::batch::BatchPool;
use sterna_engine::item::{GuestPages, Item, SendMode};
use sterna_engine::pacer::Pacer;
use sterna_engine::receive::{ChannelSink, PacketRules, ReceiveCounters, ReceiveError, receive_packets};
use sterna_engine::send::{Compression, DeltaSetting, HashKey, MAX_REFUSED, Refusals, SendChannel, SendContext};
use sterna_engine::window::{Window, WindowClosed};
use sterna_memory::ram::{Backing, GuestRam, RamBlock};
use sterna_wire::packet::{Ack, PACKET_HEADER_LENGTH, PacketError, PacketHeader, PacketKind, PageRequest, Refusal};

const PACKET: usize = 16 * PAGE;
const RULES: PacketRules = PacketRules { packet_size: PACKET, checksums: true };
/// Bytes of the window that a packet of [`Source::send_zero_page`] holds.
const IN_WINDOW: u64 = 100;

/// A channel's sending end, with nothing behind its other end yet.
struct Source {
    channel: SendChannel,
    window: Arc<Window>,
    pool: Arc<BatchPool>,
    abort: Arc<Abort>,
    alarm: Receiver<()>,
    peer: TcpStream,
}

impl Source {
    fn start(method: &str) -> Self {
        Self::with(method, |_| ())
    }

    fn hearing_refusals(method: &str, refusals: Option<Arc<Refusals>>) -> Self {
        Self::with(method, |context| context.refusals = refusals)
    }

    /// With what `change` makes of the context of a plain channel.
    fn with(method: &str, change: impl FnOnce(&mut SendContext)) -> Self {
        let window = Arc::new(Window::new(PACKET as u64, Duration::ZERO, Duration::ZERO));
        let abort = Arc::new(Abort::default());
        let (raised, alarm) = mpsc::channel();
        abort.on_end(move || {
            // A test that has ended does not listen any more.
            let _ = raised.send(());
        });
        let mut context = SendContext::new(
            Arc::clone(&window),
            Arc::new(Pacer::new(None)),
            Arc::clone(&abort),
            Compression::new(method.parse::<MethodChoice>().unwrap().by_cpu().unwrap(), Engines::default(), 1, None),
            RULES,
        );
        change(&mut context);
        let (near, peer) = sockets();
        let (writer, reader) = halves(near);
        let channel = SendChannel::start("ram-7", writer, reader, context).unwrap();
        Self { channel, window, pool: BatchPool::new(2, PACKET), abort, alarm, peer }
    }

    /// Sends a packet of one zero page, without content. The peer takes it off the wire, so that its closing is clean,
    /// and answers nothing.
    fn send_zero_page(&mut self) {
        self.send_pages(0);
    }

    /// As [`Source::send_zero_page`], with so many pages that are not zero from the second on.
    fn send_pages(&mut self, normal: u32) {
        let mut batch = self.pool.take(0).unwrap();
        batch.push_zero(0, 1);
        if normal > 0 {
            batch.push_normal(1, normal, normal as usize * PAGE).fill(7);
        }
        self.window.enter(IN_WINDOW).unwrap();
        batch.set_in_window(IN_WINDOW);
        self.channel.send(Item::Pages(batch)).unwrap();
        take_packet(&mut self.peer);
    }

    fn acknowledge(&mut self, sequence: u64) {
        self.peer.write_all(&Ack { sequence, busy_us: 0 }.encode()).unwrap();
    }

    /// Waits for the alarm and gives its reason.
    fn reason(&self) -> String {
        self.alarm.recv_timeout(HANG_LIMIT).expect("the alarm is raised");
        self.abort.reason().unwrap().text
    }
}

/// Takes one packet off the wire: all its bytes.
fn take_packet(from: &mut impl Read) -> Vec<u8> {
    let mut packet = vec![0; PACKET_HEADER_LENGTH];
    from.read_exact(&mut packet).unwrap();
    let header = PacketHeader::decode(packet.first_chunk().unwrap(), PACKET).unwrap();
    packet.resize(PACKET_HEADER_LENGTH + header.table_length as usize + header.payload_length as usize, 0);
    from.read_exact(&mut packet[PACKET_HEADER_LENGTH..]).unwrap();
    packet
}

/// RAM of 512 pages, of which each is filled with its number, in a block with pages of 2 MiB; and its words.
fn ram() -> (GuestRam, &'static [AtomicU64]) {
    const BYTES: usize = 2 << 20;
    let memory: &'static [AtomicU64] = Vec::leak((0..2 * BYTES / 8).map(|_| AtomicU64::new(0)).collect());
    let first = memory.as_ptr().align_offset(BYTES);
    let memory = &memory[first..first + BYTES / 8];
    for (page, words) in (0..).zip(memory.chunks_exact(PAGE / 8)) {
        words.iter().for_each(|word| word.store(u64::from_le_bytes([page as u8; 8]), Ordering::Relaxed));
    }
    let start = std::ptr::NonNull::from(memory).cast();
    // SAFETY: leaked, so it is there for ever, and accessed by atomics only.
    let block = unsafe { RamBlock::new("ram", start, BYTES, Backing::Other) };
    (GuestRam::new(vec![block.with_page_size(BYTES)]).unwrap(), memory)
}

/// A refusal of packet `sequence` that asks for these pages.
fn refusal(sequence: u64, pages: &[PageRequest]) -> Vec<u8> {
    let mut bytes = Refusal { sequence, requests: pages.len() as u32 }.encode().to_vec();
    pages.iter().for_each(|page| bytes.extend(page.encode()));
    bytes
}

#[test]
fn a_peer_refuses_only_what_is_in_flight_and_was_agreed_on_and_asks_for_pages_that_are_there() {
    within_a_minute(|| {
        let page = PageRequest { block: 0, first: 510, count: 2 };
        let cases: [(&str, Vec<u8>, bool); 9] = [
            ("not agreed on", refusal(2, &[page]), false),
            ("that is not in flight", refusal(1, &[page]), true),
            ("that is not in flight", refusal(3, &[page]), true),
            ("does not begin like one", refusal(2, &[]), true),
            ("outside", refusal(2, &[PageRequest { count: 3, ..page }]), true),
            ("outside", refusal(2, &[page, PageRequest { block: 1, ..page }]), true),
            ("more pages than were in the packet", refusal(2, &[PageRequest { first: 0, count: 3, ..page }]), true),
            ("more pages than were in the packet", refusal(2, &[page, PageRequest { count: 1, ..page }]), true),
            ("more pages than were in the packet", refusal(2, &[PageRequest { first: 0, count: 100, ..page }]), true),
        ];
        for (words, bytes, agreed) in cases {
            let refusals = Arc::new(Refusals::of_guest_ram(ram().0));
            let mut source = Source::hearing_refusals("none", agreed.then_some(refusals));
            source.send_zero_page();
            source.send_pages(2);
            source.acknowledge(1);
            source.peer.write_all(&bytes).unwrap();
            let reason = source.reason();
            assert!(reason.contains(words), "{words}: {reason}");
        }
    });
}

#[test]
fn refused_pages_are_read_again_and_retransmitted_before_the_channel_has_drained() {
    within_a_minute(|| {
        let refusals = Arc::new(Refusals::of_guest_ram(ram().0));
        let mut source = Source::hearing_refusals("lz4", Some(Arc::clone(&refusals)));
        source.send_pages(3);
        // Pages 1 to 3 were in it, but only the number of pages counts.
        let pages = [PageRequest { block: 0, first: 3, count: 2 }, PageRequest { block: 0, first: 5, count: 1 }];
        source.peer.write_all(&refusal(1, &pages)).unwrap();
        source.acknowledge(1);
        std::thread::scope(|scope| {
            let drained = scope.spawn(|| source.channel.drained());
            for (sequence, expected) in [(2, &[3u8, 4][..]), (3, &[5])] {
                let packet = take_packet(&mut &source.peer);
                let header = PacketHeader::decode(packet.first_chunk().unwrap(), PACKET).unwrap();
                assert_eq!((header.sequence, header.method), (sequence, 0), "uncompressed");
                let content = &packet[PACKET_HEADER_LENGTH + header.table_length as usize..];
                let expected: Vec<u8> = expected.iter().flat_map(|page| [*page; PAGE]).collect();
                assert!(content == expected);
                (&source.peer).write_all(&Ack { sequence, busy_us: 0 }.encode()).unwrap();
            }
            assert_eq!(drained.join().unwrap(), Ok(3));
        });
        assert_eq!((refusals.packets(), refusals.pages()), (1, 3));
        // They were delivered once.
        assert_eq!(source.window.delivered().1.carried.pages(), 4);
    });
}

/// The page is retransmitted with content that the channel has sent at no other time, and then has its first content again: what the
/// channel has recorded of the page is not what the destination has.
#[test]
fn a_page_that_was_retransmitted_is_neither_left_out_nor_the_base_of_a_delta() {
    within_a_minute(|| {
        let key = HashKey::random().unwrap();
        let deltas = DeltaSetting::AllBlocks { cache: 1 << 20 };
        for (hash_key, deltas) in [(Some(key), DeltaSetting::None), (None, deltas)] {
            let (ram, words) = ram();
            let refusals = Arc::new(Refusals::of_guest_ram(ram.clone()));
            let mut source = Source::with("none", |context| {
                (context.hash_key, context.deltas, context.refusals) = (hash_key, deltas, Some(Arc::clone(&refusals)));
            });
            let page = PageRequest { block: 0, first: 3, count: 1 };
            let word = &words[3 * PAGE / 8];
            let before = word.load(Ordering::Relaxed);
            let send = |source: &Source| {
                let mut pages = source.pool.take(0).unwrap();
                pages.push_normal(3, 1, 0);
                let pages = GuestPages { ram: ram.clone(), pages, post_copy: None, mode: SendMode::Usual };
                source.channel.send(Item::Guest(pages)).unwrap();
            };
            // Takes one packet with page 3 whole, and returns its first word.
            let taken = |source: &mut Source| {
                let packet = take_packet(&mut source.peer);
                let header = PacketHeader::decode(packet.first_chunk().unwrap(), PACKET).unwrap();
                assert_eq!((header.kind, header.content_length as usize), (PacketKind::Pages, PAGE));
                let at = PACKET_HEADER_LENGTH + header.table_length as usize;
                u64::from_le_bytes(packet[at..at + 8].try_into().unwrap())
            };

            send(&source);
            assert_eq!(taken(&mut source), before);
            word.store(7, Ordering::Relaxed);
            source.peer.write_all(&refusal(1, &[page])).unwrap();
            source.acknowledge(1);
            std::thread::scope(|scope| {
                let channel = &source.channel;
                let drained = scope.spawn(|| channel.drained());
                let mut peer = &source.peer;
                let packet = take_packet(&mut peer);
                assert_eq!(packet[packet.len() - PAGE..][..8], 7u64.to_le_bytes());
                peer.write_all(&Ack { sequence: 2, busy_us: 0 }.encode()).unwrap();
                assert_eq!(drained.join().unwrap(), Ok(2));
            });
            word.store(before, Ordering::Relaxed);

            send(&source);

            assert_eq!(taken(&mut source), before);
        }
    });
}

#[test]
fn a_peer_that_refuses_for_ever_is_given_up() {
    within_a_minute(|| {
        let mut source = Source::hearing_refusals("none", Some(Arc::new(Refusals::of_guest_ram(ram().0))));
        let page = PageRequest { block: 0, first: 1, count: 1 };
        source.send_pages(1);
        std::thread::scope(|scope| {
            let drained = scope.spawn(|| source.channel.drained());
            for sequence in 1..=u64::from(MAX_REFUSED) {
                // Also what was retransmitted is refused.
                let answer = [refusal(sequence, &[page]), Ack { sequence, busy_us: 0 }.encode().to_vec()].concat();
                (&source.peer).write_all(&answer).unwrap();
                take_packet(&mut &source.peer);
            }
            (&source.peer).write_all(&refusal(u64::from(MAX_REFUSED) + 1, &[page])).unwrap();
            assert_eq!(drained.join().unwrap(), Err(WindowClosed));
        });
        assert!(source.reason().contains("has refused more than 64 packets"));
    });
}

#[test]
fn a_peer_that_closes_with_packets_unacknowledged_raises_the_alarm() {
    within_a_minute(|| {
        let mut source = Source::start("none");
        source.send_zero_page();
        source.send_zero_page();
        source.acknowledge(1);

        source.peer.shutdown(Shutdown::Write).unwrap();

        assert_eq!(source.channel.drained(), Err(WindowClosed));
        assert_eq!(source.reason(), "channel ram-7: the destination was lost: it closed the channel before the end");
    });
}

#[test]
fn a_peer_that_has_acknowledged_everything_and_closes_before_the_end_raises_the_alarm() {
    within_a_minute(|| {
        let mut source = Source::start("none");
        source.send_zero_page();
        source.acknowledge(1);
        assert_eq!(source.channel.drained(), Ok(1));

        source.peer.shutdown(Shutdown::Write).unwrap();

        assert_eq!(source.reason(), "channel ram-7: the destination was lost: it closed the channel before the end");
        // What is handed over from now on will never be acknowledged, and nobody waits for it.
        source.send_zero_page();
        assert_eq!(source.channel.drained(), Err(WindowClosed));
    });
}

#[test]
fn a_peer_that_closes_after_the_source_has_ended_the_channel_raises_no_alarm() {
    within_a_minute(|| {
        let mut source = Source::start("none");
        source.send_zero_page();
        source.acknowledge(1);
        assert_eq!(source.channel.drained(), Ok(1));

        let closing = std::thread::spawn(move || {
            let mut peer = source.peer;
            assert_eq!(peer.read_to_end(&mut Vec::new()).unwrap(), 0);
        });
        source.channel.join();

        closing.join().unwrap();
        assert_eq!(source.abort.reason(), None);
    });
}

#[test]
fn an_acknowledgement_that_cannot_be_true_raises_the_alarm_and_frees_nothing_of_the_window() {
    let lies: &[(&[u64], &str)] = &[
        (&[3], "the peer acknowledges packet 3, but only 0…2 are outstanding"),
        (&[u64::MAX], "the peer acknowledges packet 18446744073709551615, but only 0…2 are outstanding"),
        (&[0], "the peer acknowledges packet 0, but only 0…2 are outstanding"),
        (&[1, 3], "the peer acknowledges packet 3, but only 1…2 are outstanding"),
        (&[1, 1], "the peer acknowledges packet 1, but only 1…2 are outstanding"),
    ];
    for (acknowledged, said) in lies {
        within_a_minute(move || {
            let mut source = Source::start("none");
            source.send_zero_page();
            source.send_zero_page();

            acknowledged.iter().for_each(|sequence| source.acknowledge(*sequence));

            assert_eq!(source.channel.drained(), Err(WindowClosed));
            assert_eq!(source.reason(), format!("channel ram-7: the destination was lost: {said}"));
            let true_ones = acknowledged.len() as u64 - 1;
            assert_eq!(source.window.in_flight(), (2 - true_ones) * IN_WINDOW);
        });
    }
}

#[test]
fn an_acknowledgement_of_packets_before_any_was_sent_raises_the_alarm() {
    within_a_minute(|| {
        let mut source = Source::start("none");
        source.acknowledge(1);
        let said = "the peer acknowledges packet 1, but only 0…0 are outstanding";
        assert_eq!(source.reason(), format!("channel ram-7: the destination was lost: {said}"));
    });
}

#[test]
fn bytes_that_are_no_acknowledgement_raise_the_alarm() {
    within_a_minute(|| {
        let mut source = Source::start("none");
        source.send_zero_page();
        source.peer.write_all(b"HTTP/1.1 400 Bad").unwrap();
        assert_eq!(source.channel.drained(), Err(WindowClosed));
        let said = source.reason();
        assert!(said.starts_with("channel ram-7: the destination was lost: "), "{said}");
        assert_eq!(source.window.in_flight(), IN_WINDOW);
    });
}

/// Two packets of two pages each and a zero page, as a channel writes them.
fn two_packets(method: &str) -> [Vec<u8>; 2] {
    let mut source = Source::start(method);
    let packets = [10, 20].map(|first| {
        let mut batch = source.pool.take(0).unwrap();
        for (at, byte) in batch.push_normal(first, 2, 2 * PAGE).iter_mut().enumerate() {
            // Shrinks, but not to nothing: words of few values.
            *byte = (at * at / 97) as u8 & 0x3f;
        }
        batch.push_zero(first + 2, 1);
        source.channel.send(Item::Pages(batch)).unwrap();
        take_packet(&mut source.peer)
    });
    source.abort.finish();
    drop(source.peer);
    source.channel.join();
    packets
}

/// What a receiver says to `bytes` and the end of the connection.
fn receive(bytes: &[u8], placed: &Placed) -> Result<(), ReceiveError> {
    let (mut near, far) = sockets();
    near.write_all(bytes).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    let (mut writer, mut reader) = halves(far);
    let mut sink = ChannelSink::new().with_pages(placed.clone());
    receive_packets(&mut reader, Some(&mut writer), &mut sink, RULES, &ReceiveCounters::default())
}

fn nothing_of_a_damaged_packet_is_placed(method: &str) {
    let [first, second] = two_packets(method);
    let placed = Placed::default();
    receive(&[&first[..], &second].concat(), &placed).unwrap();
    let both = placed.take();
    assert_eq!(both.iter().map(|(page, _)| *page).collect::<Vec<_>>(), [10, 11, 12, 20, 21, 22]);
    let header = PacketHeader::decode(second.first_chunk().unwrap(), PACKET).unwrap();
    let payload_at = PACKET_HEADER_LENGTH + header.table_length as usize;
    assert_eq!(header.payload_length < header.content_length, method != "none");

    for at in (0..payload_at).chain((payload_at..second.len()).step_by(5)) {
        let mut damaged = second.clone();
        damaged[at] ^= 1 << (at % 8);
        let outcome = receive(&[&first[..], &damaged].concat(), &placed);

        let placed = placed.take();
        let fits = match outcome {
            // Some bits of a compressed form have no bearing on what it decodes to: then it is what the source read.
            Ok(()) => at >= payload_at && method != "none" && placed == both,
            Err(_) if placed != both[..3] => false,
            // The lengths are needed before the checksum can be: too long a table ends with the connection.
            Err(ReceiveError::Connection(_)) => (16..20).contains(&at),
            Err(ReceiveError::Packet(PacketError::Magic)) => at < 4,
            Err(ReceiveError::Packet(PacketError::Kind(_))) => at == 4,
            Err(ReceiveError::Packet(PacketError::TooLong { .. })) => (16..28).contains(&at),
            Err(ReceiveError::Packet(PacketError::HeaderChecksum)) => (4..payload_at).contains(&at),
            Err(ReceiveError::Content(2)) => at >= payload_at,
            Err(ReceiveError::Decode { sequence: 2, .. }) => at >= payload_at && method != "none",
            _ => false,
        };
        let pages: Vec<_> = placed.iter().map(|(page, _)| *page).collect();
        assert!(fits, "{method}, byte {at} of {}: {outcome:?}, pages {pages:?} placed", damaged.len());
    }
}

#[test]
fn nothing_of_a_packet_damaged_on_its_way_is_placed_raw() {
    within_a_minute(|| nothing_of_a_damaged_packet_is_placed("none"));
}

#[test]
fn nothing_of_a_packet_damaged_on_its_way_is_placed_by_lz4() {
    within_a_minute(|| nothing_of_a_damaged_packet_is_placed("lz4"));
}

#[test]
fn nothing_of_a_packet_damaged_on_its_way_is_placed_by_zstd() {
    within_a_minute(|| nothing_of_a_damaged_packet_is_placed("zstd"));
}
