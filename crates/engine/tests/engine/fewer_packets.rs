//! Zero pages share packets, and packets share acknowledgements, but only while there is other work, so that no thread
//! ever waits for something that was withheld.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{PAGE, Placed, halves, sockets, within_a_minute};
use sterna_engine::abort::Abort;
use sterna_engine::batch::{BatchPool, REGION};
use sterna_engine::entry::{PageSearch, Pipeline};
use sterna_engine::item::Item;
use sterna_engine::pacer::Pacer;
use sterna_engine::receive::{ChannelSink, PacketRules, ReceiveCounters, receive_packets};
use sterna_engine::send::{Compression, SendChannel, SendContext};
use sterna_engine::window::Window;
use sterna_memory::ram::{Backing, GuestRam, RamBlock};
use sterna_wire::checksum::crc32c;
use sterna_wire::packet::{ACK_LENGTH, Ack, PacketHeader, PacketKind, Run, RunKind};

const REGIONS: usize = 8;
const REGION_PAGES: usize = REGION as usize / PAGE;
/// Page-aligned memory that reads as zero.
#[repr(align(4096))]
struct Memory(#[expect(dead_code, reason = "read through its address")] [u8; REGIONS * REGION as usize]);
static ZERO: Memory = Memory([0; REGIONS * REGION as usize]);

#[test]
fn zero_pages_of_several_batches_share_a_packet_that_is_sent_when_nothing_follows() {
    const PACKET: usize = 4 << 20;
    /// Together more than fits a connection whose peer does not read.
    const RECORDS: u64 = 6;
    within_a_minute(|| {
        let rules = PacketRules { packet_size: PACKET, checksums: true };
        let window = Arc::new(Window::new(PACKET as u64, Duration::ZERO, Duration::ZERO));
        let abort = Arc::new(Abort::default());
        let context = SendContext::new(
            Arc::clone(&window),
            Arc::new(Pacer::new(None)),
            Arc::clone(&abort),
            Compression::none(),
            rules,
        );
        let (near, mut far) = sockets();
        let (writer, reader) = halves(near);
        let channel = SendChannel::start("ram-0", writer, reader, context).unwrap();
        let pool = BatchPool::new(REGIONS + 1, 0);
        let pipeline = Arc::new(Pipeline { channels: vec![channel], pool, window, page_size: PAGE });
        // SAFETY: the memory is static, and a source only reads it.
        let block = unsafe { RamBlock::new("ram", NonNull::from(&ZERO).cast(), size_of_val(&ZERO), Backing::Other) };
        let mut search = PageSearch::new(Arc::clone(&pipeline), GuestRam::new(vec![block]).unwrap(), PAGE);

        // Records that the peer does not read keep the channel busy until all batches of zero pages are in its queue.
        for _ in 0..RECORDS {
            pipeline.channels[0].send(Item::Stream { record: 1, content: vec![1; PACKET] }).unwrap();
        }
        search.pages(0, 0..(REGIONS * REGION_PAGES) as u64).unwrap();
        search.flush().unwrap();
        let mut tables = Vec::new();
        for sequence in 1..=RECORDS + 1 {
            let mut header = [0; sterna_wire::packet::PACKET_HEADER_LENGTH];
            far.read_exact(&mut header).unwrap();
            let header = PacketHeader::decode(&header, PACKET).unwrap();
            let mut rest = vec![0; (header.table_length + header.payload_length) as usize];
            far.read_exact(&mut rest).unwrap();
            far.write_all(&Ack { sequence, busy_us: 0 }.encode()).unwrap();
            if header.kind == PacketKind::Pages {
                tables.push(rest);
            }
        }

        let all = Run { kind: RunKind::Zero, first: 0, count: (REGIONS * REGION_PAGES) as u32 };
        assert_eq!(tables, [all.encode()]);
        assert_eq!(pipeline.channels[0].drained(), Ok(RECORDS + 1));
        let zero_pages = pipeline.channels[0].counters().zero_pages.load(Ordering::Relaxed);
        assert_eq!(zero_pages, u64::from(all.count));
    });
}

#[test]
fn packets_that_arrived_together_share_acknowledgements_and_the_last_ones_do_not_wait() {
    const PACKETS: u64 = 12;
    within_a_minute(|| {
        let rules = PacketRules { packet_size: PAGE, checksums: true };
        let content = [7; PAGE];
        let packets: Vec<u8> = (1..=PACKETS)
            .flat_map(|sequence| {
                let table = Run { kind: RunKind::Normal, first: sequence, count: 1 }.encode();
                let header = PacketHeader {
                    kind: PacketKind::Pages,
                    method: 0,
                    subject: 0,
                    sequence,
                    table_length: table.len() as u32,
                    payload_length: PAGE as u32,
                    content_length: PAGE as u32,
                    content_checksum: crc32c(&content),
                    detail: 0,
                };
                [&header.encode(&table)[..], &table, &content].concat()
            })
            .collect();
        let (mut near, far) = sockets();
        near.write_all(&packets).unwrap();
        let mut arrived = vec![0; packets.len()];
        while far.peek(&mut arrived).unwrap() < packets.len() {
            std::thread::yield_now();
        }

        let placed = Placed::default();
        let mut sink = ChannelSink::new().with_pages(placed.clone());
        let receiving = std::thread::spawn(move || {
            let (mut writer, mut reader) = halves(far);
            receive_packets(&mut reader, Some(&mut writer), &mut sink, rules, &ReceiveCounters::default())
        });
        // At most eight packets share an acknowledgement, while a packet and half as many bytes as are withheld wait to
        // be read.
        let acknowledged = [8, 11, 12].map(|expected| {
            let mut ack = [0; ACK_LENGTH];
            near.read_exact(&mut ack).unwrap();
            (Ack::decode(&ack).unwrap().sequence, expected)
        });

        near.shutdown(Shutdown::Write).unwrap();
        receiving.join().unwrap().unwrap();
        assert_eq!(acknowledged.map(|(said, _)| said), acknowledged.map(|(_, expected)| expected));
        assert_eq!(near.read_to_end(&mut Vec::new()).unwrap(), 0, "nothing is acknowledged twice");
        assert_eq!(placed.take().len() as u64, PACKETS);
    });
}
