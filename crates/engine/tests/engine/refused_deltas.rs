//! Deltas at a source that cannot read its pages again: only of the blocks that the destination takes them of, and what is refused is
//! sent again from what the channel has of it until it is acknowledged, kept for deltas or not.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{PAGE, halves, sockets, within_a_minute};
use proptest::prelude::*;
use sterna_codec::{Engines, MethodChoice};
use sterna_engine::abort::Abort;
use sterna_engine::batch::BatchPool;
use sterna_engine::entry::{Entry, Pipeline};
use sterna_engine::item::Item;
use sterna_engine::pacer::Pacer;
use sterna_engine::receive::{ChannelSink, PacketRules, PageSink, ReceiveCounters, SinkError, receive_packets};
use sterna_engine::send::{Compression, DeltaBlocks, DeltaSetting, MAX_REFUSED, Refusals, SendChannel, SendContext};
use sterna_engine::window::Window;
use sterna_memory::delta::apply;
use sterna_wire::checksum::crc32c;
use sterna_wire::delta::PageDeltas;
use sterna_wire::packet::{
    Ack, BlockShape, PACKET_HEADER_LENGTH, PacketHeader, PacketKind, PageRequest, Refusal, Run, RunKind,
};

/// Of each of two blocks.
const PAGES: u64 = 48;
/// Of the first only deltas are taken.
const TAKEN: u16 = 0;
const PACKET: usize = 8 * PAGE;
const RULES: PacketRules = PacketRules { packet_size: PACKET, checksums: true };

/// One channel of a source, and its alarm.
struct Source {
    pipeline: Arc<Pipeline>,
    refusals: Arc<Refusals>,
    abort: Arc<Abort>,
}

impl Source {
    /// That may keep `cache` bytes; gives the destination's end too.
    fn new(cache: u64) -> (Self, TcpStream) {
        let window = Arc::new(Window::new(PACKET as u64, Duration::ZERO, Duration::from_millis(300)));
        let (abort, blocks) = (Arc::new(Abort::default()), Arc::new(DeltaBlocks::default()));
        let shape = BlockShape { pages: PAGES, page_size: PAGE as u32 };
        let kept = blocks.set(vec![shape, shape], &[TAKEN, 77], cache, 1);
        assert_eq!(kept, cache.min(PAGES * PAGE as u64), "no more than the block has of which deltas are taken");
        let refusals = Arc::new(Refusals::of_kept_pages(Arc::clone(&blocks)));
        let context = SendContext {
            refusals: Some(Arc::clone(&refusals)),
            deltas: DeltaSetting::SomeBlocks(blocks),
            ..SendContext::new(
                Arc::clone(&window),
                Arc::new(Pacer::new(None)),
                Arc::clone(&abort),
                Compression::new("lz4".parse::<MethodChoice>().unwrap().by_cpu().unwrap(), Engines::default(), 1, None),
                RULES,
            )
        };
        let (near, far) = sockets();
        let (writer, reader) = halves(near);
        let channels = vec![SendChannel::start("ram-0", writer, reader, context).unwrap()];
        let pool = BatchPool::new(8, PACKET);
        (Self { pipeline: Arc::new(Pipeline { channels, pool, window, page_size: PAGE }), refusals, abort }, far)
    }

    fn send(&self, pages: &[((u16, u64), Vec<u8>)]) {
        let mut entry = Entry::new(Arc::clone(&self.pipeline));
        for ((block, page), content) in pages {
            let offset = page * PAGE as u64;
            if content.iter().all(|byte| *byte == 0) {
                entry.zero_page(*block, offset).unwrap();
                continue;
            }
            entry.enter(PAGE as u64).unwrap();
            entry.page(*block, offset, content).unwrap();
        }
        entry.flush().unwrap();
    }

    fn channel(&self) -> &SendChannel {
        &self.pipeline.channels[0]
    }
}

/// What pages hold, by block and number.
type Pages = HashMap<(u16, u64), Vec<u8>>;

/// A destination that finds fault with what `plan` says, by the number of packets with deltas so far.
#[derive(Clone, Default)]
struct Destination {
    pages: Arc<Mutex<Pages>>,
    faults: Vec<bool>,
    seen: usize,
    refused: Arc<Mutex<u32>>,
}

impl PageSink for Destination {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        Ok(vec![BlockShape { pages: PAGES, page_size: PAGE as u32 }; 2].into())
    }

    fn pages(&mut self, block: u16, runs: &[Run], mut content: &[u8]) -> Result<(), SinkError> {
        let mut pages = self.pages.lock().unwrap();
        for run in runs {
            for page in run.first..run.end() {
                let (now, later) = content.split_at(if run.kind == RunKind::Normal { PAGE } else { 0 });
                content = later;
                pages.insert((block, page), if now.is_empty() { vec![0; PAGE] } else { now.to_vec() });
            }
        }
        Ok(())
    }

    fn deltas(&mut self, block: u16, runs: &[Run], mut deltas: PageDeltas<'_>) -> Result<bool, SinkError> {
        assert_eq!(block, TAKEN, "deltas of a block of which none are taken");
        self.seen += 1;
        let fault = self.faults.get(self.seen - 1).copied().unwrap_or(false);
        let mut pages = self.pages.lock().unwrap();
        for page in runs.iter().flat_map(|run| run.first..run.end()) {
            let delta = deltas.next().unwrap().unwrap();
            let there = pages.get_mut(&(block, page)).expect("a delta of a page that was sent before");
            let mut changed = there.clone();
            apply(delta.record, &mut changed).unwrap();
            assert_eq!(crc32c(&changed), delta.checksum, "a delta is against what is here");
            if !fault {
                *there = changed;
            }
        }
        Ok(!fault)
    }

    fn refuse(&mut self, block: u16, runs: &[Run]) -> Result<bool, SinkError> {
        *self.refused.lock().unwrap() += 1;
        let mut pages = self.pages.lock().unwrap();
        for run in runs.iter().filter(|run| run.kind == RunKind::Zero) {
            pages.extend((run.first..run.end()).map(|page| ((block, page), vec![0; PAGE])));
        }
        Ok(true)
    }
}

/// What is done to the pages of a round.
#[derive(Clone, Copy, Debug)]
enum Change {
    Zero,
    Word,
    All,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![1 => Just(Change::Zero), 2 => Just(Change::Word), 5 => Just(Change::All)]
}

/// Carries a RAM channel's packets, and flips a bit of the content of those that `faults` says, no more than may be refused; counts
/// them.
fn damage(mut near: TcpStream, mut far: TcpStream, faults: &[bool], damaged: &Mutex<u32>) -> std::io::Result<()> {
    for number in 0.. {
        let mut header = [0; PACKET_HEADER_LENGTH];
        near.read_exact(&mut header)?;
        let packet = PacketHeader::decode(&header, PACKET).unwrap();
        let mut rest = vec![0; (packet.table_length + packet.payload_length) as usize];
        near.read_exact(&mut rest)?;
        let mut damaged = damaged.lock().unwrap();
        if packet.payload_length > 0 && *damaged < MAX_REFUSED && faults.get(number).copied().unwrap_or(false) {
            *rest.last_mut().unwrap() ^= 4;
            *damaged += 1;
        }
        drop(damaged);
        far.write_all(&header)?;
        far.write_all(&rest)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// However little of it is kept: the guest rewrites its pages until its regions rest, and the cache holds eight pages, or none.
    #[test]
    fn what_is_damaged_on_its_way_comes_again_whether_it_was_kept_or_not(
        rounds in prop::collection::vec((change(), prop::collection::btree_set(0..PAGES, 1..60)), 2..24),
        faults in prop::collection::vec(prop::bool::weighted(0.2), 0..200),
        cache in prop_oneof![Just(0u64), Just(8 * PAGE as u64), Just(1 << 30)],
    ) {
        within_a_minute(move || {
            let (source, far) = Source::new(cache);
            let (damaging, there) = sockets();
            let damaged = Arc::new(Mutex::new(0));
            let struck = Arc::clone(&damaged);
            let mut back = (damaging.try_clone().unwrap(), far.try_clone().unwrap());
            // These end when the source's channel is dropped.
            std::thread::spawn(move || damage(far, damaging, &faults, &struck));
            std::thread::spawn(move || std::io::copy(&mut back.0, &mut back.1));
            let destination = Destination::default();
            let mut sink = ChannelSink::new().with_pages(destination.clone());
            std::thread::spawn(move || {
                let (mut writer, mut reader) = halves(there);
                let _ = receive_packets(&mut reader, Some(&mut writer), &mut sink, RULES, &ReceiveCounters::default());
            });
            let mut memory = HashMap::new();
            for (round, (change, touched)) in rounds.into_iter().enumerate() {
                let pages: Vec<_> = touched.into_iter().map(|page| {
                    let content: &mut Vec<u8> = memory.entry((TAKEN, page)).or_insert_with(|| vec![1; PAGE]);
                    match change {
                        Change::Zero => content.fill(0),
                        Change::Word => content[round * 8] = content[round * 8].wrapping_add(2) | 1,
                        Change::All => content.iter_mut().enumerate().for_each(|(at, byte)| {
                            *byte = byte.wrapping_mul(5).wrapping_add((at + round) as u8) | 1;
                        }),
                    }
                    ((TAKEN, page), content.clone())
                }).collect();
                source.send(&pages);
            }
            source.channel().drained().unwrap();
            let (refused, damaged) = (*destination.refused.lock().unwrap(), *damaged.lock().unwrap());
            assert!(*destination.pages.lock().unwrap() == memory, "after {refused} refusals");
            assert_eq!((refused, source.refusals.packets()), (damaged, damaged));
            assert!(source.abort.reason().is_none());
        });
    }

    #[test]
    fn what_is_refused_comes_again_before_the_channel_has_drained(
        rounds in prop::collection::vec(prop::collection::btree_set((0u16..2, 0..PAGES), 1..60), 2..12),
        faults in prop::collection::vec(prop::bool::weighted(0.3), 0..40),
    ) {
        let expected = faults.iter().filter(|fault| **fault).count() as u32;
        within_a_minute(move || {
            let (source, far) = Source::new(1 << 30);
            let destination = Destination { faults, ..Destination::default() };
            let mut sink = ChannelSink::new().with_pages(destination.clone());
            std::thread::spawn(move || {
                let (mut writer, mut reader) = halves(far);
                // It ends when the source's channel is dropped.
                let _ = receive_packets(&mut reader, Some(&mut writer), &mut sink, RULES, &ReceiveCounters::default());
            });
            let mut memory = HashMap::new();
            for (round, touched) in rounds.into_iter().enumerate() {
                let pages: Vec<_> = touched.into_iter().map(|page| {
                    let fresh = || (0..PAGE).map(|at| (at as u64 * 31 + page.1) as u8 | 1).collect::<Vec<u8>>();
                    let content = memory.entry(page).or_insert_with(fresh);
                    content[round * 8] = content[round * 8].wrapping_add(2);
                    (page, content.clone())
                }).collect();
                source.send(&pages);
            }
            source.channel().drained().unwrap();
            let refused = *destination.refused.lock().unwrap();
            assert!(*destination.pages.lock().unwrap() == memory, "after {refused} refusals");
            assert!(refused <= expected && source.refusals.packets() == refused);
            assert!(source.abort.reason().is_none());
        });
    }
}

#[test]
fn pages_go_as_deltas_only_where_they_are_taken() {
    within_a_minute(|| {
        let (source, far) = Source::new(1 << 30);
        let mut sink = ChannelSink::new().with_pages(Destination::default());
        std::thread::spawn(move || {
            let (mut writer, mut reader) = halves(far);
            let _ = receive_packets(&mut reader, Some(&mut writer), &mut sink, RULES, &ReceiveCounters::default());
        });
        for round in 1..4 {
            let page = vec![round; PAGE];
            source.send(&[
                ((0, 3), [&page[..8], &[9; PAGE - 8]].concat()),
                ((1, 3), [&page[..8], &[9; PAGE - 8]].concat()),
            ]);
            source.channel().drained().unwrap();
        }
        assert_eq!(source.channel().counters().delta_pages.load(Ordering::Relaxed), 2);
    });
}

/// Takes one packet.
fn packet(far: &mut TcpStream) -> PacketHeader {
    let mut header = [0; PACKET_HEADER_LENGTH];
    far.read_exact(&mut header).unwrap();
    let header = PacketHeader::decode(&header, PACKET).unwrap();
    far.read_exact(&mut vec![0; (header.table_length + header.payload_length) as usize]).unwrap();
    header
}

fn refusal(sequence: u64, request: PageRequest) -> Vec<u8> {
    [&Refusal { sequence, requests: 1 }.encode()[..], &request.encode(), &Ack { sequence, busy_us: 0 }.encode()]
        .concat()
}

/// Why the source gave up after `answer` to its first packet, page 3 of block 0.
fn after(answer: &[u8]) -> String {
    let (source, mut far) = Source::new(1 << 20);
    source.send(&[((0, 3), vec![7; PAGE])]);
    packet(&mut far);
    far.write_all(answer).unwrap();
    // Where it has to send something again it fails, and the channel ends.
    let drained = source.channel().drained();
    assert!(drained.is_err(), "it gives up");
    source.abort.reason().unwrap().text
}

#[test]
fn what_is_no_refusal_ends_the_migration() {
    within_a_minute(|| {
        let page = PageRequest { block: 0, first: 3, count: 1 };
        // Pages that were in no packet, more than were in it, or of a block of which nothing is held; outside of RAM, and a packet that was not sent.
        let reason = after(&refusal(1, PageRequest { first: 4, ..page }));
        assert!(reason.contains("page 4 of RAM block 0, which was not in the packet"), "{reason}");
        let reason = after(&refusal(1, PageRequest { count: 2, ..page }));
        assert!(reason.contains("more pages than were in the packet"), "{reason}");
        let twice = [&Refusal { sequence: 1, requests: 2 }.encode()[..], &page.encode(), &page.encode()].concat();
        let reason = after(&twice);
        assert!(reason.contains("more pages than were in the packet"), "{reason}");
        let reason = after(&refusal(1, PageRequest { block: 1, ..page }));
        assert!(reason.contains("page 3 of RAM block 1"), "{reason}");
        let reason = after(&refusal(1, PageRequest { count: PAGES as u32, ..page }));
        assert!(reason.contains("48"), "{reason}");
        let reason = after(&refusal(1, PageRequest { block: 2, ..page }));
        assert!(reason.contains("RAM"), "{reason}");
        let reason = after(&refusal(2, page));
        assert!(reason.contains("not in flight"), "{reason}");
    });
}

#[test]
fn a_destination_that_refuses_for_ever_is_given_up() {
    for cache in [0, 1 << 20] {
        within_a_minute(move || refused_for_ever(cache));
    }
}

fn refused_for_ever(cache: u64) {
    let (source, mut far) = Source::new(cache);
    source.send(&[((0, 3), vec![7; PAGE])]);
    let refusing = std::thread::spawn(move || {
        for sequence in 1.. {
            let header = packet(&mut far);
            assert_eq!((header.kind, header.sequence), (PacketKind::Pages, sequence));
            // Compressed at first, then as it is.
            assert_eq!(header.method == 0, sequence > 1);
            far.write_all(&refusal(sequence, PageRequest { block: 0, first: 3, count: 1 })).unwrap();
            if sequence > u64::from(MAX_REFUSED) {
                break;
            }
        }
        far
    });
    assert!(source.channel().drained().is_err());
    assert!(source.abort.reason().unwrap().text.contains("has refused more than 64 packets"));
    refusing.join().unwrap();
    let _ = source.channel().send(Item::Retransmit);
}
