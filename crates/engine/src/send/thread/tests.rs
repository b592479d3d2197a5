//! What a sending thread tells of itself where the way is chosen batch by batch.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use sterna_codec::{Engines, MethodChoice};
use sterna_wire::packet::PACKET_HEADER_LENGTH;

use super::super::{Compression, SendCounters};
use super::*;
use crate::abort::Abort;
use crate::pacer::Pacer;
use crate::receive::PacketRules;
use crate::transport::{Connection, Security};
use crate::window::Window;

const PACKET: usize = 16 * PAGE_SIZE;

/// The sending thread of a channel, and the other end, which holds more than is sent here.
fn sending() -> (Sending, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let context = SendContext {
        window: Arc::new(Window::new(PACKET as u64, Duration::ZERO, Duration::ZERO)),
        pacer: Arc::new(Pacer::new(None)),
        abort: Arc::new(Abort::default()),
        compression: Compression::new(MethodChoice::parse("auto", None).unwrap(), Engines::default(), 1, None),
        rules: PacketRules { packet_size: PACKET, checksums: true },
        accelerator: None,
        again: None,
        delta_cache: 0,
        delta_blocks: None,
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
    let (mut sending, _far) = sending();
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
    sending.way = Way::Plain;
    sending.packet(PacketKind::Pages, 0, 0, &pages).unwrap();
    sending.way = Way::Usual;
    sending.packet(PacketKind::Pages, 0, 0, &Content::of(&[])).unwrap();
    assert_eq!(sending.times.written, 3 * PACKET_HEADER_LENGTH + 100 + PACKET);
    assert_eq!(sending.times.written, bytes(&sending) - before, "nothing is left out");

    sending.packet(PacketKind::Pages, 0, 0, &pages).unwrap();
    assert_eq!((sending.times.written, sending.times.writing), (0, Duration::ZERO), "and was told of all of them");
}
