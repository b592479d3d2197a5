//! What the writer measures where the method is chosen packet by packet.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use sterna_codec::{Encoding, Engines};
use sterna_wire::packet::PACKET_HEADER_LENGTH;

use super::*;
use crate::abort::Abort;
use crate::send::Compression;
use crate::transport::{Connection, Security};

const PACKET: usize = 16 * PAGE_SIZE;

/// The writer of a channel, and the other end, which holds more than is sent here.
fn writer() -> (PacketWriter, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let context = SendContext::new(
        Arc::new(Window::new(PACKET as u64, Duration::ZERO, Duration::ZERO)),
        Arc::new(Pacer::new(None)),
        Arc::new(Abort::default()),
        Compression::new(Encoding::auto(), Engines::default(), 1, None),
        PacketRules { packet_size: PACKET, checksums: true },
    );
    let ledger = Arc::new(ChannelLedger::new(Arc::clone(&context.window), None, false));
    let (writer, _) = Connection::accept(near, &Security::Insecure).unwrap().split();
    let mut packets = PacketWriter::new(writer, ledger, &context).unwrap();
    packets.start_clock();
    (packets, far)
}

#[test]
fn bytes_of_packets_without_an_encoder_count_with_the_next_packet_that_has_one() {
    let (mut packets, _far) = writer();
    let content = [7; PACKET];
    let pages = Packet { table: Table::Empty, ..Packet::pages(0, &[], &content) };
    let measured = |packets: &PacketWriter| (packets.clock.times.written, packets.clock.times.writing);

    packets.write(&pages).unwrap();
    assert_eq!(measured(&packets), (0, Duration::ZERO), "the selection has the figures");

    let mut bytes = packets.write(&Packet::new(PacketKind::Deltas, 0, &content[..100])).unwrap();
    assert_eq!(packets.clock.times.written, PACKET_HEADER_LENGTH + 100);
    // Pages that were refused, and zero pages.
    bytes += packets.write(&Packet::retransmitted(0, &[], &content)).unwrap();
    bytes += packets.write(&Packet::pages(0, &[], &[])).unwrap();
    assert_eq!(packets.clock.times.written, 3 * PACKET_HEADER_LENGTH + 100 + PACKET);
    assert_eq!(packets.clock.times.written, bytes, "nothing is left out");
    assert_eq!(packets.ledger.counters.packets.load(Ordering::Relaxed), 4);

    packets.write(&pages).unwrap();
    assert_eq!(measured(&packets), (0, Duration::ZERO), "the selection has the figures of all of them");
}

#[test]
fn content_larger_than_a_packet_is_an_error_that_names_both_sizes() {
    let (mut packets, _far) = writer();
    let error = packets.write(&Packet::new(PacketKind::Stream, 0, &[0; PACKET + 1])).unwrap_err();
    assert!(matches!(error, SendError::TooLarge { length, limit } if (length, limit) == (PACKET + 1, PACKET)));
    assert_eq!(packets.last(), 0, "no packet has entered the ledger");
}
