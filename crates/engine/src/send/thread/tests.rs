//! What a sending thread tells of itself where the way is chosen batch by batch.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use sterna_codec::{Encoding, Engines};
use sterna_wire::packet::{BlockShape, PACKET_HEADER_LENGTH};

use super::super::{Compression, DeltaBlocks, SendCounters, Sent};
use super::*;
use crate::abort::Abort;
use crate::pacer::Pacer;
use crate::receive::PacketRules;
use crate::transport::{Connection, Security};
use crate::window::Window;

const PACKET: usize = 16 * PAGE_SIZE;

/// The sending thread of a channel, and the other end, which holds more than is sent here.
fn sending(delta_cache: usize, delta_blocks: Option<Arc<DeltaBlocks>>) -> (Sending, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let context = SendContext {
        normal_page_ratio: Default::default(),
        hash_key: None,
        window: Arc::new(Window::new(PACKET as u64, Duration::ZERO, Duration::ZERO)),
        pacer: Arc::new(Pacer::new(None)),
        abort: Arc::new(Abort::default()),
        compression: Compression::new(Encoding::auto(), Engines::default(), 1, None),
        rules: PacketRules { packet_size: PACKET, checksums: true },
        accelerator: None,
        again: None,
        delta_cache,
        delta_blocks,
        devices: None,
    };
    let shared = Arc::new(Shared {
        progress: std::sync::Mutex::default(),
        changed: std::sync::Condvar::new(),
        counters: SendCounters::default(),
        placing: std::sync::atomic::AtomicU64::new(0),
    });
    let (writer, _) = Connection::accept(near, &Security::Insecure).unwrap().split();
    let mut sending = Sending::new(writer, shared, context).unwrap();
    sending.waits = Some(OffCpu::new());
    (sending, far)
}

#[test]
fn what_no_way_was_chosen_for_counts_with_the_next_packet_of_which_one_was() {
    let (mut sending, _far) = sending(0, None);
    let content = [7; PACKET];
    let pages = Content::of(&content);
    let deltas = Content::of(&content[..100]);
    let bytes = |sending: &Sending| sending.shared.counters.packet_bytes.load(Ordering::Relaxed) as usize;

    sending.packet(PacketKind::Pages, 0, 0, &pages).unwrap();
    assert_eq!((sending.times.written, sending.times.writing), (0, Duration::ZERO), "the selection was told");

    let before = bytes(&sending);
    sending.packet(PacketKind::Deltas, 0, 0, &deltas).unwrap();
    assert_eq!(sending.times.written, PACKET_HEADER_LENGTH + 100);
    // Pages that were refused, and zero pages.
    sending.mode = SendMode::Plain;
    sending.packet(PacketKind::Pages, 0, 0, &pages).unwrap();
    sending.mode = SendMode::Usual;
    sending.packet(PacketKind::Pages, 0, 0, &Content::of(&[])).unwrap();
    assert_eq!(sending.times.written, 3 * PACKET_HEADER_LENGTH + 100 + PACKET);
    assert_eq!(sending.times.written, bytes(&sending) - before, "nothing is left out");

    sending.packet(PacketKind::Pages, 0, 0, &pages).unwrap();
    assert_eq!((sending.times.written, sending.times.writing), (0, Duration::ZERO), "and was told of all of them");
}

#[test]
fn what_there_is_no_memory_for_is_not_said_to_be_kept() {
    // More than any address space has.
    const TOO_MUCH: usize = 1 << 60;
    let lacks = |sending: &Sending| sending.shared.counters.lacks_delta_cache.load(Ordering::Relaxed);
    assert_eq!([1 << 20, TOO_MUCH].map(|bytes| lacks(&sending(bytes, None).0)), [0, 1]);

    let blocks = Arc::new(DeltaBlocks::default());
    let shape = BlockShape { pages: 1 << 48, page_size: PAGE_SIZE as u32 };
    assert_eq!(blocks.set(vec![shape], &[0], TOO_MUCH as u64, 1), TOO_MUCH as u64);
    let mut gateway = sending(0, Some(blocks)).0;
    assert_eq!(lacks(&gateway), 0, "it is not known yet whether there will be any");
    drop(gateway.deltas_of(0));
    assert_eq!(lacks(&gateway), 1);

    let sent = |lack| Sent { lack_delta_cache: lack, ..Sent::default() };
    assert_eq!(sent(0).delta_cache(1000, 4), (1000, None));
    assert_eq!(sent(1).delta_cache(1000, 4), (750, None));
    let (bytes, why) = sent(4).delta_cache(1000, 4);
    assert!(bytes == 0 && why.unwrap().contains("no memory"));
    // Connected once more, without memory then.
    assert_eq!(Sent { delta_pages: 1, ..sent(8) }.delta_cache(1000, 4), (0, None));
}
