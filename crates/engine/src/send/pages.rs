//! The middle stage of a channel's sending thread: decides how pages that were read are sent.
//!
//! A batch of pages passes three questions, and its rest becomes a packet ([`super::packet`]):
//!
//! 1. Were pages refused meanwhile? They are retransmitted first ([`super::retransmit`]): the answers that follow build on what the
//!    destination has acknowledged and not refused.
//! 2. Which pages are unchanged since they were sent ([`super::sent_pages`])? For blocks with huge pages, whose dirty log is coarse. They
//!    are left out.
//! 3. For which pages does a delta against earlier content pay ([`super::delta`])? These become a packet of deltas. The others are sent
//!    whole.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_memory::PAGE_SIZE;
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_wire::packet::{PacketKind, Run};

use super::ahead::PageCopy;
use super::blocks::DeltaBlocks;
use super::counters::PageCounts;
use super::delta::{DeltaBase, Deltas, NormalPages, Whole, WrongResult};
use super::error::SendError;
use super::ledger::ChannelLedger;
use super::packet::{Packet, PacketWriter, Table};
use super::retransmit::{Caches, Retransmitter};
use super::sent_pages::{HashKey, SentPages};
use super::{DeltaSetting, SendContext};
use crate::accelerator::Accelerator;
use crate::batch::Batch;
use crate::item::SendMode;

/// Pages of one RAM block, read and not sent.
#[derive(Clone, Copy)]
pub(super) struct ReadPages<'a> {
    pub(super) block: u16,
    pub(super) runs: &'a [Run],
    /// Bytes of the window that the pages hold.
    pub(super) in_window: u64,
    pub(super) content: PageContent<'a>,
    pub(super) mode: SendMode,
}

/// Where the content of normal pages lies.
#[derive(Clone, Copy)]
pub(super) enum PageContent<'a> {
    /// In memory of this process, with its CRC-32C if that was computed.
    Buffer { bytes: &'a [u8], checksum: Option<u32> },
    /// In a copy that an accelerator has made, perhaps with deltas that lead from these bases to the copy.
    Copied { copy: &'a PageCopy, bases: &'a [DeltaBase] },
    /// In guest RAM, from where it is sent.
    InPlace(&'a RamBlock),
}

impl PageContent<'_> {
    /// Returns the CRC-32C of all content, if that was computed.
    fn checksum(&self) -> Option<u32> {
        match self {
            Self::Buffer { checksum, .. } => *checksum,
            Self::Copied { copy, .. } => copy.checksum(),
            Self::InPlace(_) => None,
        }
    }
}

impl<'a> ReadPages<'a> {
    /// The pages of `batch`, with its content.
    pub(super) fn of(batch: &'a Batch, mode: SendMode) -> Self {
        Self::with(batch, PageContent::Buffer { bytes: batch.content(), checksum: batch.checksum() }, mode)
    }

    /// The pages of `batch`, whose content is `content`.
    pub(super) fn with(batch: &'a Batch, content: PageContent<'a>, mode: SendMode) -> Self {
        Self { block: batch.block, runs: batch.runs(), in_window: batch.in_window(), content, mode }
    }

    /// Returns the packet that sends all of these pages whole, whose normal ones have the content `bytes`.
    fn whole(&self, bytes: &'a [u8]) -> Packet<'a> {
        let producer = if let PageContent::Copied { copy, .. } = self.content { copy.producer() } else { None };
        Packet {
            checksum: self.content.checksum(),
            producer,
            in_window: self.in_window,
            ..Packet::pages(self.block, self.runs, bytes)
        }
    }
}

/// Sends the pages of one channel: the first two questions.
pub(super) struct PageSender {
    packet_size: usize,
    /// The secret for hashes of sent pages, until these are made with the first pages of guest RAM.
    hash_key: Option<HashKey>,
    /// None where no block has huge pages, and in post-copy.
    sent_pages: Option<SentPages>,
    retransmitter: Retransmitter,
    changed: ChangedPages,
}

impl PageSender {
    pub(super) fn new(packets: PacketWriter, ledger: Arc<ChannelLedger>, context: &SendContext) -> Self {
        Self {
            packet_size: context.rules.packet_size,
            hash_key: context.hash_key.clone(),
            sent_pages: None,
            retransmitter: Retransmitter::new(Arc::clone(&ledger), context.refusals.clone(), context.rules),
            changed: ChangedPages {
                deltas: DeltaStage::new(&context.deltas, context.rules.packet_size, &ledger),
                ledger,
                accelerator: context.accelerator.clone(),
                packets,
            },
        }
    }

    /// Returns the writer of the packets.
    pub(super) fn packets(&mut self) -> &mut PacketWriter {
        &mut self.changed.packets
    }

    /// Prepares for pages of `ram`.
    pub(super) fn begin_ram(&mut self, ram: &GuestRam) {
        if let Some(key) = self.hash_key.take() {
            self.sent_pages = SentPages::new(key, ram, self.packet_size);
        }
    }

    /// Returns whether pages are sent directly from guest RAM: no stage looks at their content.
    pub(super) fn sends_in_place(&self) -> bool {
        self.changed.deltas.encoder.is_none() && self.sent_pages.is_none() && self.changed.packets.can_send_in_place()
    }

    /// Returns the kept pages, as bases for deltas that an accelerator makes, and the cost of a page that is sent whole.
    pub(super) fn delta_bases(&mut self) -> Option<(&mut Deltas, Whole)> {
        let costs = self.changed.packets.costs();
        self.changed.deltas.encoder.as_mut().map(|deltas| {
            let whole = deltas.whole(costs);
            (deltas, whole)
        })
    }

    /// Makes no more deltas and leaves out no more pages, because the destination's pages are no longer known.
    pub(super) fn forget_destination(&mut self) {
        (self.sent_pages, self.hash_key) = (None, None);
        self.changed.deltas.end();
    }

    fn caches(&mut self) -> Caches<'_> {
        Caches { sent_pages: self.sent_pages.as_mut(), deltas: self.changed.deltas.encoder.as_mut() }
    }

    /// Retransmits the refused pages. Returns a packet up to which the destination has placed everything.
    pub(super) fn retransmit(&mut self) -> Result<u64, SendError> {
        let caches = Caches { sent_pages: self.sent_pages.as_mut(), deltas: self.changed.deltas.encoder.as_mut() };
        self.retransmitter.run(caches, &mut self.changed.packets)
    }

    /// Sends `pages`.
    pub(super) fn send(&mut self, pages: &ReadPages<'_>) -> Result<(), SendError> {
        let acknowledged = self.retransmit()?;
        let content = match pages.content {
            PageContent::Buffer { bytes, .. } => bytes,
            PageContent::Copied { copy, .. } => copy.bytes(),
            PageContent::InPlace(block) => {
                self.caches().forget(pages.block, pages.runs);
                return self.changed.send_in_place(pages, block);
            }
        };
        if pages.mode != SendMode::Usual {
            self.caches().forget(pages.block, pages.runs);
            return self.changed.send_whole(pages, content);
        }
        let Some(sent_pages) = &mut self.sent_pages else {
            return self.changed.send(pages, content, acknowledged);
        };
        let same = sent_pages.find_same(pages.block, pages.runs, content);
        // Deltas find their bases by position in the batch, so the batch stays whole; they leave out unchanged pages themselves.
        if same == 0 || matches!(pages.content, PageContent::Copied { bases, .. } if !bases.is_empty()) {
            return self.changed.send(pages, content, acknowledged);
        }
        self.changed.ledger.counters.count_pages(PageCounts { normal: same, zero: 0 });
        self.changed.packets.leave_out(same);
        let changed = sent_pages.changed(pages.block, pages.runs, content);
        if changed.is_empty() {
            return Ok(());
        }
        self.changed.send(&ReadPages::of(changed, pages.mode), changed.content(), acknowledged)
    }
}

/// Sends the pages that have changed: the third question.
struct ChangedPages {
    ledger: Arc<ChannelLedger>,
    accelerator: Option<Accelerator>,
    deltas: DeltaStage,
    packets: PacketWriter,
}

impl ChangedPages {
    fn send_in_place(&mut self, pages: &ReadPages<'_>, block: &RamBlock) -> Result<(), SendError> {
        self.ledger.counters.count_pages(PageCounts::of(pages.runs));
        self.packets.write_in_place(pages.block, block, pages.runs)
    }

    fn send_whole(&mut self, pages: &ReadPages<'_>, content: &[u8]) -> Result<(), SendError> {
        let packet = pages.whole(content);
        self.ledger.counters.count_pages(packet.delivers);
        self.packets.write(&packet)?;
        Ok(())
    }

    /// Sends `pages`, whose normal ones have this `content`, as deltas where these pay. The destination has placed all packets up to
    /// `acknowledged`.
    fn send(&mut self, pages: &ReadPages<'_>, content: &[u8], acknowledged: u64) -> Result<(), SendError> {
        let Some(deltas) = self.deltas.of_block(pages.block, &self.ledger) else {
            return self.send_whole(pages, content);
        };
        let (normal, copy) = match pages.content {
            PageContent::Copied { copy, bases } => (NormalPages::with_results(content, copy, bases), Some(copy)),
            PageContent::Buffer { .. } | PageContent::InPlace(_) => (NormalPages::of(content), None),
        };
        let whole = deltas.whole(self.packets.costs());
        let split = deltas.split(pages.block, pages.runs, normal, acknowledged, whole);
        if let (Some(wrong), Some(copy), Some(accelerator)) = (split.wrong, copy, &self.accelerator) {
            report_wrong_result(wrong, copy, accelerator);
        }
        let first = self.packets.last() + 1;
        deltas.sent(pages.block, content, first, first + u64::from(split.deltas > 0));
        let counters = &self.ledger.counters;
        counters.count_pages(PageCounts::of(pages.runs));
        counters.delta_pages.fetch_add(split.deltas, Ordering::Relaxed);
        if copy.is_some_and(|copy| copy.deltas_maker().is_some()) {
            counters.device_deltas.fetch_add(split.by_device, Ordering::Relaxed);
        }
        if split.same > 0 {
            self.packets.leave_out(split.same);
        }
        let producer = copy.and_then(PageCopy::producer);
        if split.deltas > 0 {
            let (runs, records) = deltas.deltas();
            self.packets.write(&Packet {
                table: Table::Pages(runs),
                in_window: split.deltas * PAGE_SIZE as u64,
                delivers: PageCounts { normal: split.deltas, zero: 0 },
                producer,
                ..Packet::new(PacketKind::Deltas, pages.block, records)
            })?;
        }
        let (runs, rest) = deltas.rest(content);
        if runs.is_empty() {
            return Ok(());
        }
        let of_all = || (rest.len() == content.len()).then(|| pages.content.checksum()).flatten();
        let checksum = deltas.rest_checksum().or_else(of_all);
        let in_window = split.whole * PAGE_SIZE as u64;
        let bytes =
            self.packets.write(&Packet { checksum, producer, in_window, ..Packet::pages(pages.block, runs, rest) })?;
        deltas.went_whole(split.whole, bytes);
        Ok(())
    }
}

/// The delta encoder of a channel, for all blocks, for some, or for none.
struct DeltaStage {
    /// Made with the first page of a block of which deltas may be sent.
    encoder: Option<Deltas>,
    /// Where only some blocks may have deltas: which.
    blocks: Option<Arc<DeltaBlocks>>,
    packet_size: usize,
}

impl DeltaStage {
    fn new(setting: &DeltaSetting, packet_size: usize, ledger: &ChannelLedger) -> Self {
        let mut stage = Self { encoder: None, blocks: None, packet_size };
        match setting {
            DeltaSetting::None | DeltaSetting::AllBlocks { cache: 0 } => {}
            DeltaSetting::AllBlocks { cache } => {
                let encoder = stage.encoder.insert(Deltas::new(*cache, packet_size));
                ledger.counters.record_delta_cache(encoder.lacks_memory());
            }
            DeltaSetting::SomeBlocks(blocks) => stage.blocks = Some(Arc::clone(blocks)),
        }
        stage
    }

    /// Returns the encoder, if deltas of `block` may be sent.
    fn of_block(&mut self, block: u16, ledger: &ChannelLedger) -> Option<&mut Deltas> {
        if let Some(blocks) = &self.blocks {
            if !blocks.accepts(block) {
                return None;
            }
            self.encoder.get_or_insert_with(|| {
                let encoder = Deltas::new(blocks.cache(), self.packet_size).keeping_unacknowledged();
                ledger.counters.record_delta_cache(encoder.lacks_memory());
                encoder
            });
        }
        self.encoder.as_mut()
    }

    /// Makes no more deltas.
    fn end(&mut self) {
        (self.encoder, self.blocks) = (None, None);
    }
}

/// Distrusts the device whose wrong result was found before it was sent.
fn report_wrong_result(wrong: WrongResult, copy: &PageCopy, accelerator: &Accelerator) {
    let (producer, what) = match wrong {
        WrongResult::Delta => (copy.deltas_maker(), "a delta that it made does not lead to the page"),
        WrongResult::Copy => (copy.producer(), "its copy is not what it has read"),
    };
    if let Some(producer) = producer {
        accelerator.offload().report_wrong_result(producer, what);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use sterna_wire::packet::BlockShape;

    use super::super::counters::Sent;
    use super::*;
    use crate::window::Window;

    #[test]
    fn a_cache_for_which_there_is_no_memory_is_reported_as_lacking() {
        // More than any address space has.
        const TOO_MUCH: usize = 1 << 60;
        const PACKET: usize = 16 * PAGE_SIZE;
        let ledger =
            || ChannelLedger::new(Arc::new(Window::new(PACKET as u64, Duration::ZERO, Duration::ZERO)), None, false);
        let lacks = |ledger: &ChannelLedger| ledger.counters.lacks_delta_cache.load(Ordering::Relaxed);
        for (cache, lacking) in [(1 << 20, 0), (TOO_MUCH, 1)] {
            let ledger = ledger();
            DeltaStage::new(&DeltaSetting::AllBlocks { cache }, PACKET, &ledger);
            assert_eq!(lacks(&ledger), lacking);
        }

        let blocks = Arc::new(DeltaBlocks::default());
        let shape = BlockShape { pages: 1 << 48, page_size: PAGE_SIZE as u32 };
        assert_eq!(blocks.set(vec![shape], &[0], TOO_MUCH as u64, 1), TOO_MUCH as u64);
        let ledger = ledger();
        let mut stage = DeltaStage::new(&DeltaSetting::SomeBlocks(blocks), PACKET, &ledger);
        assert_eq!(lacks(&ledger), 0, "it is not known yet whether there will be any");
        assert!(stage.of_block(1, &ledger).is_none(), "deltas of this block are not accepted");
        assert!(stage.of_block(0, &ledger).is_some());
        assert_eq!(lacks(&ledger), 1);

        let sent = |lack| Sent { lack_delta_cache: lack, ..Sent::default() };
        assert_eq!(sent(0).delta_cache(1000, 4), (1000, None));
        assert_eq!(sent(1).delta_cache(1000, 4), (750, None));
        let (bytes, why) = sent(4).delta_cache(1000, 4);
        assert!(bytes == 0 && why.unwrap().contains("no memory"));
        // Connected once more, without memory then.
        assert_eq!(Sent { delta_pages: 1, ..sent(8) }.delta_cache(1000, 4), (0, None));
    }
}
