//! The items of a channel's queue. An entry of the pipeline makes them, and the channel's sending thread takes them; this file knows
//! neither of the two.

use std::ops::Range;
use std::sync::Arc;

use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::AtomicPageBitmap;
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_wire::device::Piece;
use sterna_wire::packet::Run;

use crate::batch::PooledBatch;
use crate::device_bytes::DeviceBytes;

/// An item of a channel's queue.
#[derive(Debug)]
pub enum Item {
    /// Pages.
    Pages(PooledBatch),
    /// Pages that the channel's thread reads from guest RAM.
    Guest(GuestPages),
    /// Pages whose earlier content the destination is to discard, as zero runs.
    Discard(PooledBatch),
    /// No pages: the channel sends all pages that it holds and retransmits those that were refused.
    Retransmit,
    /// All pages of this generation that take this channel have been handed over.
    GenerationEnd(u64),
    /// A record of the virtual machine's own stream.
    Stream {
        /// The kind of the record.
        record: u16,
        /// The record's bytes.
        content: Vec<u8>,
    },
    /// A piece of a device's state.
    Device {
        /// The device's number.
        device: u16,
        /// The piece's place among those of the device.
        place: u64,
        /// The piece.
        piece: Piece<DeviceBytes>,
        /// Bytes of the window that the piece needs.
        in_window: u64,
    },
    /// A buffer of device state, as a QEMU sends it.
    DeviceState {
        /// The device's name.
        name: Vec<u8>,
        /// Which of several devices with this name.
        instance: u32,
        /// The buffer.
        content: Vec<u8>,
    },
    /// Bytes of an opaque connection; none: its writing half was closed.
    Opaque(Vec<u8>),
}

impl Item {
    /// Returns whether a round waits for this item: not for pieces of device state, which have no part in rounds.
    pub(crate) fn is_of_round(&self) -> bool {
        !matches!(self, Self::Device { .. })
    }
}

/// How pages are read from guest RAM and sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SendMode {
    /// With the channel's accelerator, and as deltas where these pay.
    #[default]
    Usual,
    /// Whole, and read by the CPU: an error of an accelerator's zero test could not be corrected any more, or the accelerator is suspect.
    ByCpu,
}

/// Pages that the channel's thread reads from guest RAM.
#[derive(Debug)]
pub struct GuestPages {
    /// The RAM.
    pub ram: GuestRam,
    /// The pages, as normal runs without content.
    pub pages: PooledBatch,
    /// Pages that have been sent on another channel meanwhile, and are left out.
    pub overtaken: Option<Arc<Overtaken>>,
    /// How the pages are read and sent.
    pub mode: SendMode,
}

/// Pages that were sent on another channel while they wait in a channel's queue. The queue's channel leaves them out.
#[derive(Debug)]
pub struct Overtaken {
    /// By block: the pages, and how many of them make up a page of the backing, which are sent together or not at all.
    blocks: Vec<(AtomicPageBitmap, u64)>,
}

impl Overtaken {
    /// Makes an empty set of pages of `ram`.
    pub fn none_of(ram: &GuestRam) -> Self {
        let block = |block: &RamBlock| (AtomicPageBitmap::new(block.pages()), (block.page_size() / PAGE_SIZE) as u64);
        Self { blocks: ram.blocks().iter().map(block).collect() }
    }

    /// Adds the pages of `run` in `block`, whole pages of its backing.
    pub fn add(&self, block: u16, run: Range<u64>) {
        self.blocks[usize::from(block)].0.set(run);
    }

    /// Removes all pages: those that were sent on the other channel may have been lost there.
    pub fn clear(&self) {
        self.blocks.iter().for_each(|(pages, _)| pages.clear(0..pages.pages()));
    }

    /// Appends to `left` the pages of `runs` in `block` that are not in this set. While another thread adds a page of the backing, the
    /// first 4 KiB of it, which are added first, decide for all.
    pub(crate) fn remaining(&self, block: u16, runs: &[Run], left: &mut Vec<Run>) {
        let (overtaken, unit) = &self.blocks[usize::from(block)];
        for run in runs {
            let mut at = run.first;
            while at < run.end() {
                let count = (unit - at % unit).min(run.end() - at) as u32;
                if !overtaken.contains(at) {
                    match left.last_mut().filter(|last| last.end() == at && last.count + count <= Run::MAX_COUNT) {
                        Some(last) => last.count += count,
                        None => left.push(Run { first: at, count, ..*run }),
                    }
                }
                at += u64::from(count);
            }
        }
    }
}
