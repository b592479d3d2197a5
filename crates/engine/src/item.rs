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
    /// Post-copy: which pages another channel has sent meanwhile, so that they are left out. The thread records in it what it reads.
    pub post_copy: Option<Arc<PostCopyPages>>,
    /// How the pages are read and sent.
    pub mode: SendMode,
}

/// What the channels of a post-copy share about the pages that only the source has.
///
/// Two channels may send the same page: a RAM channel, in whose queue the page waits, and the post-copy channel, because the destination has
/// requested it. The RAM channel leaves out what was requested. Nor can the destination have a page that neither of the two has read yet.
#[derive(Debug)]
pub struct PostCopyPages(Vec<PostCopyBlock>);

/// The pages of one RAM block.
#[derive(Debug)]
struct PostCopyBlock {
    /// Pages that were sent on the post-copy channel.
    requested: AtomicPageBitmap,
    /// Pages that no channel has begun to read.
    unread: AtomicPageBitmap,
    /// How many pages make up one of the backing, which are sent together or not at all.
    unit: u64,
}

impl PostCopyPages {
    /// Makes empty sets of pages of `ram`.
    pub fn none_of(ram: &GuestRam) -> Self {
        let block = |block: &RamBlock| PostCopyBlock {
            requested: AtomicPageBitmap::new(block.pages()),
            unread: AtomicPageBitmap::new(block.pages()),
            unit: (block.page_size() / PAGE_SIZE) as u64,
        };
        Self(ram.blocks().iter().map(block).collect())
    }

    /// Records that the destination lacks the pages of `run` in `block`, and that no channel has read them.
    pub fn add_unread(&self, block: u16, run: Range<u64>) {
        self.0[usize::from(block)].unread.set(run);
    }

    /// Records that the post-copy channel reads the pages of `run` in `block`, whole pages of its backing. Called before they are sent.
    pub fn begin_requested(&self, block: u16, run: Range<u64>) {
        let block = &self.0[usize::from(block)];
        block.unread.clear(run.clone());
        block.requested.set(run);
    }

    /// Records that a RAM channel reads the pages of `runs` in `block`. Called before they are sent.
    pub(crate) fn begin(&self, block: u16, runs: &[Run]) {
        runs.iter().for_each(|run| self.0[usize::from(block)].unread.clear(run.first..run.end()));
    }

    /// Forgets which pages were sent on the post-copy channel: they may have been lost there.
    pub fn forget_requested(&self) {
        self.0.iter().for_each(|block| block.requested.clear(0..block.requested.pages()));
    }

    /// Returns how many pages no channel has begun to read: the destination cannot have them.
    pub fn unread(&self) -> u64 {
        self.0.iter().map(|block| block.unread.count()).sum()
    }

    /// Appends to `left` the pages of `runs` in `block` that were not sent on the post-copy channel. While another thread adds a page of the
    /// backing to those, the first 4 KiB of it, which are added first, decide for all.
    pub(crate) fn remaining(&self, block: u16, runs: &[Run], left: &mut Vec<Run>) {
        let PostCopyBlock { requested, unit, .. } = &self.0[usize::from(block)];
        for run in runs {
            let mut at = run.first;
            while at < run.end() {
                let count = (unit - at % unit).min(run.end() - at) as u32;
                if !requested.contains(at) {
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
