//! The pipeline from end to end with its second entry: memory that is written while it is read.
//!
//! Real sockets, all methods, a thread that writes the "guest's" memory all the time. Each page that arrives must be as
//! it was read at some moment (the checksum of each packet ensures this, if there is one), and after a last round over
//! the unchanging memory both sides must be equal.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{PAGE, halves, sockets};
use sterna_codec::{Engines, MethodChoice};
use sterna_engine::abort::Abort;
use sterna_engine::batch::BatchPool;
use sterna_engine::entry::{PageSearch, Pipeline};
use sterna_engine::pacer::Pacer;
use sterna_engine::receive::{ChannelSink, PacketRules, PageSink, ReceiveCounters, SinkError, receive_packets};
use sterna_engine::send::{Compression, SendChannel, SendContext};
use sterna_engine::window::Window;
use sterna_memory::place::{OwnMemory, Place};
use sterna_memory::ram::{Backing, GuestRam, RamBlock};
use sterna_memory::received::{Freshness, ReceivedBitmap};
use sterna_test_kit::Random;
use sterna_wire::packet::{BlockShape, Run, RunKind};

const PAGES: usize = 4096;
const CHANNELS: usize = 3;
const PACKET: usize = 128 * PAGE;

/// Returns a guest's memory: words that other threads write.
fn memory() -> Box<[AtomicU64]> {
    // Pages must start at page boundaries.
    let words = PAGES * PAGE / 8;
    let layout = std::alloc::Layout::from_size_align(words * 8, PAGE).unwrap();
    // SAFETY: the layout is that of `words` AtomicU64 (align 8 divides a page); zeroed memory is a valid value of them.
    // It could not be freed through a layout with smaller alignment, so the callers leak it.
    unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(std::alloc::alloc_zeroed(layout).cast(), words)) }
}

struct ToMemory {
    place: Arc<OwnMemory>,
    received: Arc<ReceivedBitmap>,
    generations: Arc<AtomicU64>,
}

impl PageSink for ToMemory {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        Ok(Arc::new([BlockShape { pages: PAGES as u64, page_size: PAGE as u32 }]))
    }

    fn pages(&mut self, block: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError> {
        assert_eq!(block, 0);
        let mut rest = content;
        for run in runs {
            match run.kind {
                RunKind::Normal => {
                    let (now, later) = rest.split_at(run.count as usize * PAGE);
                    rest = later;
                    self.received.mark(run.first..run.end());
                    self.place.write(run.first * PAGE as u64, now)?;
                }
                RunKind::Zero => self.received.zero(run.first..run.end(), Freshness::Fresh, |part| {
                    self.place.zero(part.start * PAGE as u64, (part.end - part.start) * PAGE as u64).unwrap();
                }),
            }
        }
        Ok(())
    }

    fn generation_end(&mut self, _: u64) -> Result<(), SinkError> {
        self.generations.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn move_memory(method: &str, checksums: bool) {
    let rules = PacketRules { packet_size: PACKET, checksums };
    let (source, destination): (&'static [AtomicU64], &'static [AtomicU64]) =
        (Box::leak(memory()), Box::leak(memory()));
    // Every other page is zero, so that a packet has the maximum number of runs; in the others every other word
    // differs.
    for (index, word) in source.iter().enumerate().filter(|(index, _)| !(index * 8 / PAGE).is_multiple_of(2)) {
        word.store(index as u64 | 1, Ordering::Relaxed);
    }
    // SAFETY: the memory is leaked, so it is valid for ever; only atomics and this place write it.
    let place = unsafe { OwnMemory::new(destination.as_ptr().cast_mut().cast(), PAGES * PAGE) };
    let place = Arc::new(place);
    let received = Arc::new(ReceivedBitmap::new(PAGES as u64));
    let generations = Arc::new(AtomicU64::new(0));

    let abort = Arc::new(Abort::default());
    let window = Arc::new(Window::new(PACKET as u64, Duration::ZERO, Duration::from_millis(100)));
    let context = SendContext::new(
        Arc::clone(&window),
        Arc::new(Pacer::new(None)),
        Arc::clone(&abort),
        Compression::new(method.parse::<MethodChoice>().unwrap().by_cpu().unwrap(), Engines::default(), 1, None),
        rules,
    );
    let mut channels = Vec::new();
    let mut receivers = Vec::new();
    for index in 0..CHANNELS {
        let (near, far) = sockets();
        let (writer, reader) = halves(near);
        channels.push(SendChannel::start(&format!("ram-{index}"), writer, reader, context.clone()).unwrap());
        let mut sink = ChannelSink::new().with_pages(ToMemory {
            place: Arc::clone(&place),
            received: Arc::clone(&received),
            generations: Arc::clone(&generations),
        });
        receivers.push(std::thread::spawn(move || {
            let (mut writer, mut reader) = halves(far);
            receive_packets(&mut reader, Some(&mut writer), &mut sink, rules, &ReceiveCounters::default())
        }));
    }
    let pool = BatchPool::new(4 * CHANNELS, 0);
    let pipeline = Arc::new(Pipeline { channels, pool, window: Arc::clone(&window), page_size: PAGE });
    let start = NonNull::from(source).cast();
    // SAFETY: the memory is leaked, and only atomics write it.
    let block = unsafe { RamBlock::new("ram", start, PAGES * PAGE, Backing::Other) };
    let ram = GuestRam::new(vec![block]).unwrap();
    let mut search = PageSearch::new(Arc::clone(&pipeline), ram, PACKET);

    let stop = Arc::new(AtomicBool::new(false));
    let (begun, beginning) = std::sync::mpsc::channel();
    let writer = {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            let mut random = Random::new(1);
            begun.send(()).unwrap();
            while !stop.load(Ordering::Relaxed) {
                source[random.index(source.len())].store(random.next_u64(), Ordering::Relaxed);
            }
        })
    };
    let mut round = |generation| {
        search.pages(0, 0..PAGES as u64).unwrap();
        search.flush().unwrap();
        pipeline.end_generation(generation).unwrap();
    };
    beginning.recv().unwrap();
    round(1);
    round(2);
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    round(3);

    for channel in &pipeline.channels {
        channel.drained().unwrap();
    }
    assert_eq!(generations.load(Ordering::Relaxed), 3 * CHANNELS as u64);
    drop(search);
    abort.finish();
    Arc::try_unwrap(pipeline).expect("no other owner is left").channels.into_iter().for_each(SendChannel::join);
    for receiver in receivers {
        receiver.join().unwrap().unwrap();
    }
    // Checked after the channels' threads have ended: packets leave the window a moment after they count as
    // acknowledged.
    assert_eq!(window.in_flight(), 0);
    let differing = source
        .iter()
        .zip(destination)
        .filter(|(source, destination)| source.load(Ordering::Relaxed) != destination.load(Ordering::Relaxed));
    assert_eq!(differing.count(), 0);
}

#[test]
fn memory_that_is_written_while_it_is_read_arrives_raw() {
    move_memory("none", true);
}

#[test]
fn memory_that_is_written_while_it_is_read_arrives_by_lz4() {
    move_memory("lz4", true);
}

#[test]
fn memory_that_is_written_while_it_is_read_arrives_by_zstd() {
    move_memory("zstd", true);
}

#[test]
fn memory_that_is_written_while_it_is_sent_in_place_arrives() {
    move_memory("none", false);
}
