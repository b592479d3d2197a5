//! Pages on their way through an accelerator, a few packets ahead of the one that is sent.
//!
//! The work that a channel's thread does in one pass on the CPU is done here in steps, each requested of the accelerator: find the zero
//! pages; copy the others, with a checksum; where they may be sent as deltas, compare the kept page with that copy, which does not change
//! as the guest's page does. While one packet is written the accelerator works on the next ones. They leave in the order in which they
//! were queued. Offload has the CPU do whatever an accelerator leaves undone: nothing here fails.

use std::collections::VecDeque;

use sterna_memory::PAGE_SIZE;
use sterna_memory::checksum::crc32c_combine;
use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_memory::ram::GuestRam;
use sterna_offload::{Batch, Channel, Delta, Done, Nanos, Operation, Outcome, Producer, Ticket, TicketId};

use sterna_wire::packet::{Run, RunKind};

use super::delta::{DeltaBase, Deltas, DeviceResults, Whole};
use crate::accelerator::Accelerator;

/// Number of packets in flight: while one is written, one is copied and two are searched for zero pages.
const DEPTH: usize = 4;

/// Minimum and maximum number of pieces that are not requested after one that was late; the number doubles each time.
const MIN_SKIPPED: u32 = 8;
const MAX_SKIPPED: u32 = 4096;

/// Maximum bytes of an item: less than a device transfers at once.
const MAX_ITEM: usize = 512 << 10;

/// A packet's worth of pages.
pub(super) struct Piece {
    pub(super) block: u16,
    /// Its pages; by kind once it is known which are zero.
    pub(super) runs: Vec<Run>,
    /// Bytes of its normal pages, once that is known. They count in the window from when they are being copied.
    pub(super) normal: u64,
    stage: Stage,
    /// When its current step was requested.
    since: Nanos,
    /// Its pages as they were queued, from which `runs` by kind is made.
    queued: Vec<Run>,
    /// Its normal pages that may be sent as deltas, as known when their copying was requested.
    pub(super) bases: Vec<DeltaBase>,
    /// Maximum length of their records.
    longest_record: usize,
}

/// How far a piece has come.
enum Stage {
    /// Its zero map is being made.
    Searching(Ticket),
    /// It is known which of its pages are zero.
    Searched,
    /// Its normal pages are being copied.
    Copying(Ticket),
    /// Its normal pages are copied.
    Copied(PageCopy),
    /// Its normal pages are copied, and deltas that lead to the copy are being made.
    Comparing(PageCopy, Ticket),
    /// Its normal pages are copied, and all deltas are made.
    Compared(PageCopy),
    /// No accelerator could be used to find zero pages: the thread must read all of it.
    NotSearched,
    /// Its normal pages could not be copied: the thread must read them.
    NotCopied,
}

impl Stage {
    fn waits_for(&self, ticket: TicketId) -> bool {
        matches!(self, Self::Searching(its) | Self::Copying(its) | Self::Comparing(_, its) if its.id() == ticket)
    }
}

/// How the thread sends a piece.
pub(super) enum Ready {
    /// By its runs alone: all of it is zero, or it is sent directly from guest RAM.
    Searched,
    /// With this content of its normal pages.
    Copied(PageCopy),
    /// After reading its normal runs, for which there is room in the window.
    NotCopied,
    /// After reading all of it.
    NotSearched,
}

/// A copy of a piece's normal pages, deltas that lead to it, and the devices that have made them.
pub(super) struct PageCopy {
    batch: Batch,
    producer: Option<Producer>,
    deltas: Option<Batch>,
    deltas_maker: Option<Producer>,
}

impl PageCopy {
    /// Returns the device that has made the copy.
    pub(super) fn producer(&self) -> Option<Producer> {
        self.producer
    }

    /// Returns the device that has made the deltas.
    pub(super) fn deltas_maker(&self) -> Option<Producer> {
        self.deltas_maker
    }

    /// Returns the content.
    pub(super) fn bytes(&self) -> &[u8] {
        self.batch.copies()
    }

    /// Returns the CRC-32C of the content, if it was requested.
    pub(super) fn checksum(&self) -> Option<u32> {
        if self.batch.operation() != Operation::CopyChecksum {
            return None;
        }
        let ranges = (0..self.batch.len()).map(|item| (self.batch.checksum(item), self.batch.copy(item).len() as u64));
        ranges
            .reduce(|(first, before), (second, bytes)| (crc32c_combine(first, second, bytes), before + bytes))
            .map(|all| all.0)
    }
}

impl DeviceResults for PageCopy {
    fn checksum(&self, number: usize) -> Option<u32> {
        let by_page = self.batch.len() * PAGE_SIZE == self.batch.bytes() as usize;
        (by_page && self.batch.operation() == Operation::CopyChecksum).then(|| self.batch.checksum(number))
    }

    fn delta(&self, item: usize) -> Option<Delta<'_>> {
        self.deltas.as_ref().map(|deltas| deltas.delta(item))
    }
}

/// How normal pages get into a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyMode {
    /// By a copy with its checksum.
    Checked,
    /// By a copy.
    Unchecked,
    /// Directly from guest RAM.
    InPlace,
}

/// The pieces of one channel that are in flight.
pub(super) struct Ahead {
    accelerator: Accelerator,
    channel: Channel,
    copies: CopyMode,
    /// Whether deltas are requested.
    deltas: bool,
    /// Zero pages that count as normal.
    ratio: NormalPageRatio,
    /// Maximum pages of a piece.
    pages: usize,
    /// Oldest first.
    pieces: VecDeque<Piece>,
    /// Unused pieces, whose lists are reused.
    spare: Vec<Piece>,
    /// How many pieces were not requested after the last late one; less by one with each piece that is in time.
    lateness: u32,
    /// How many of the next pieces are not requested.
    skipped: u32,
}

impl Ahead {
    /// Makes it for packets of at most `packet_pages` pages. Of the zero pages, those of `ratio` count as normal.
    pub(super) fn new(accelerator: Accelerator, copies: CopyMode, packet_pages: u64, ratio: NormalPageRatio) -> Self {
        let channel = accelerator.channel();
        let pages = accelerator.offload().batch_pages().min(packet_pages as usize);
        let deltas = accelerator.offload().accelerates(Operation::CreateDelta);
        // All pieces that there will ever be: one is unused whenever there is room.
        let spare = (0..DEPTH).map(|_| Piece::of(pages)).collect();
        Self {
            accelerator,
            channel,
            copies,
            deltas,
            ratio,
            pages,
            pieces: VecDeque::with_capacity(DEPTH),
            spare,
            lateness: 0,
            skipped: 0,
        }
    }

    /// Returns the maximum pages of a piece.
    pub(super) fn piece_pages(&self) -> u64 {
        self.pages as u64
    }

    /// Returns whether pages are sent directly from guest RAM.
    pub(super) fn in_place(&self) -> bool {
        self.copies == CopyMode::InPlace
    }

    /// Returns the guest's RAM.
    pub(super) fn ram(&self) -> &GuestRam {
        self.accelerator.ram()
    }

    pub(super) fn has_room(&self) -> bool {
        self.pieces.len() < DEPTH
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Queues a piece with the pages `runs` in `block`, which must fit, and requests its zero map. There must be room.
    pub(super) fn queue(&mut self, block: u16, runs: &[Run]) {
        let mut piece = self.spare.pop().expect("a piece is unused where there is room");
        (piece.block, piece.normal, piece.longest_record) = (block, 0, 0);
        piece.runs.clear();
        piece.bases.clear();
        piece.runs.extend_from_slice(runs);
        let asks = self.skipped == 0;
        self.skipped -= u32::from(!asks);
        if asks {
            // Here, while devices work on the pieces before: a device does not wait for a page that is missing.
            self.accelerator.make_present(block, runs);
        }
        piece.since = self.accelerator.offload().now();
        piece.stage = match asks.then(|| self.request(Operation::ZeroMap, block, runs, false)).flatten() {
            Some(ticket) => Stage::Searching(ticket),
            None => Stage::NotSearched,
        };
        self.pieces.push_back(piece);
    }

    /// Waits until the search of the oldest piece for zero pages is complete. Returns how many bytes the others need in the window before
    /// [`Ahead::take`]. There must be a piece.
    pub(super) fn window_needed(&mut self) -> u64 {
        while let Some(Stage::Searching(_)) = self.pieces.front().map(|piece| &piece.stage) {
            self.collect();
        }
        match self.pieces.front() {
            Some(Piece { stage: Stage::Searched, normal, .. }) => *normal,
            _ => 0,
        }
    }

    /// Waits for the oldest piece and returns it, with everything that is needed to send it. There must be a piece, and the bytes that it
    /// needs ([`Ahead::window_needed`]) must have entered the window. Requests copies of the following pieces whose zero pages are known, as
    /// far as `enter` finds room for them too: no piece enters before an older one. With `deltas`, and the cost of a page sent whole, requests
    /// deltas too.
    pub(super) fn take<E>(
        &mut self,
        mut deltas: Option<(&mut Deltas, Whole)>,
        enter: impl FnMut(u64) -> Result<bool, E>,
    ) -> Result<(Piece, Ready), E> {
        if deltas.is_some() {
            // First the completions so far, so that deltas to those pieces are under way while older pieces are sent.
            while let Some(done) = self.channel.poll() {
                self.lateness = self.lateness.saturating_sub(1);
                self.completed(done);
            }
        }
        if !self.in_place() {
            self.begin_copies(&mut deltas, enter)?;
        }
        loop {
            if let Some((deltas, _)) = &deltas {
                self.begin_deltas(deltas);
            }
            match self.pieces.front().map(|piece| &piece.stage) {
                Some(Stage::Copying(_) | Stage::Comparing(..)) => self.collect(),
                _ => break,
            }
        }
        let mut piece = self.pieces.pop_front().expect("a piece is under way");
        let ready = match std::mem::replace(&mut piece.stage, Stage::NotSearched) {
            Stage::Copied(copy) | Stage::Compared(copy) => Ready::Copied(copy),
            Stage::Searched => Ready::Searched,
            Stage::NotCopied => Ready::NotCopied,
            Stage::NotSearched => Ready::NotSearched,
            Stage::Searching(_) | Stage::Copying(_) | Stage::Comparing(..) => unreachable!("waited for"),
        };
        Ok((piece, ready))
    }

    fn begin_copies<E>(
        &mut self,
        deltas: &mut Option<(&mut Deltas, Whole)>,
        mut enter: impl FnMut(u64) -> Result<bool, E>,
    ) -> Result<(), E> {
        let operation = if self.copies == CopyMode::Checked { Operation::CopyChecksum } else { Operation::Copy };
        for at in 0..self.pieces.len() {
            let piece = &mut self.pieces[at];
            match piece.stage {
                Stage::Searched if piece.normal > 0 => {}
                Stage::Searching(_) | Stage::NotSearched => break,
                _ => continue,
            }
            if at > 0 && !enter(piece.normal)? {
                break;
            }
            if let Some((deltas, whole)) = deltas {
                piece.longest_record = deltas.list_bases(piece.block, &piece.runs, *whole, &mut piece.bases);
            }
            let piece = &self.pieces[at];
            // Page by page where each may need its own checksum.
            let by_page = !piece.bases.is_empty();
            let asks = self.skipped == 0;
            let ticket = asks.then(|| self.request(operation, piece.block, &piece.runs, by_page)).flatten();
            self.pieces[at].since = self.accelerator.offload().now();
            self.pieces[at].stage = ticket.map_or(Stage::NotCopied, Stage::Copying);
        }
        Ok(())
    }

    /// Requests deltas to the copies that are complete.
    fn begin_deltas(&mut self, deltas: &Deltas) {
        for piece in &mut self.pieces {
            if !matches!(piece.stage, Stage::Copied(_)) {
                continue;
            }
            let Stage::Copied(copy) = std::mem::replace(&mut piece.stage, Stage::NotSearched) else { unreachable!() };
            let asks = self.deltas && self.skipped == 0 && !piece.bases.is_empty();
            let ask = |channel: &Channel| {
                let mut batch = channel.batch(Operation::CreateDelta);
                for base in &piece.bases {
                    let kept = deltas.range_of(*base);
                    batch.push_delta_to_copy(&kept, &copy.batch, base.number, piece.longest_record).ok()?;
                }
                channel.submit(batch).ok()
            };
            let ticket = asks.then(|| ask(&self.channel)).flatten();
            piece.since = self.accelerator.offload().now();
            piece.stage = match ticket {
                Some(ticket) => Stage::Comparing(copy, ticket),
                None => Stage::Compared(copy),
            };
        }
    }

    /// Returns a piece that was sent, for reuse.
    pub(super) fn recycle(&mut self, piece: Piece) {
        self.spare.push(piece);
    }

    /// Submits a batch for the normal runs of `runs`, or for their pages one by one. Returns none where it is not accepted, or where no
    /// accelerator reaches the block.
    fn request(&self, operation: Operation, block: u16, runs: &[Run], by_page: bool) -> Option<Ticket> {
        let region = self.accelerator.region(block)?;
        let mut batch = self.channel.batch(operation);
        for run in runs.iter().filter(|run| run.kind == RunKind::Normal) {
            let (offset, bytes) = (run.first as usize * PAGE_SIZE, run.count as usize * PAGE_SIZE);
            let each = if by_page { PAGE_SIZE } else { MAX_ITEM };
            for at in (offset..offset + bytes).step_by(each) {
                let range =
                    region.range(at, each.min(offset + bytes - at)).expect("pages of a block are within its region");
                batch.push(&range).ok()?;
            }
        }
        self.channel.submit(batch).ok()
    }

    /// Waits for the next completion, or until the oldest piece is late. The oldest piece must wait for a completion.
    fn collect(&mut self) {
        let late = self.accelerator.offload().lateness();
        let oldest = self.pieces.front_mut().expect("a piece is under way");
        let Some(done) = self.channel.wait(oldest.since.saturating_add(late)) else {
            if self.channel.in_flight() > 0 {
                // Late: the device's result is ignored.
                oldest.give_up();
                self.lateness = (2 * self.lateness).clamp(MIN_SKIPPED, MAX_SKIPPED);
                self.skipped = self.lateness;
            } else {
                // Nothing is in flight although the piece waits: offload was shut down.
                self.pieces.iter_mut().for_each(Piece::give_up);
            }
            return;
        };
        self.lateness = self.lateness.saturating_sub(1);
        self.completed(done);
    }

    /// Handles a completion.
    fn completed(&mut self, done: Done) {
        let Done { ticket, batch, outcome, producer, .. } = done;
        let of_it = |piece: &&mut Piece| piece.stage.waits_for(ticket);
        let Some(piece) = self.pieces.iter_mut().find(of_it) else { return };
        if outcome != Outcome::Done {
            return piece.give_up();
        }
        match std::mem::replace(&mut piece.stage, Stage::NotSearched) {
            Stage::Comparing(copy, _) => {
                piece.stage = Stage::Compared(PageCopy { deltas: Some(batch), deltas_maker: producer, ..copy });
            }
            Stage::Copying(_) => {
                piece.stage = Stage::Copied(PageCopy { batch, producer, deltas: None, deltas_maker: None });
            }
            _ => {
                piece.split(&batch, &mut self.ratio);
                if let Some(producer) = producer {
                    self.accelerator.record_zero_pages(piece.block, &piece.runs);
                    let mut pages = piece.queued.iter().flat_map(|run| run.first..run.end());
                    // Ascending, so that the search for each begins behind the one before.
                    let mut at = 0;
                    for doubted in batch.suspect_pages() {
                        if let Some(page) = pages.nth(doubted - at) {
                            self.accelerator.doubt(piece.block, page, producer);
                        }
                        at = doubted + 1;
                    }
                }
            }
        }
    }
}

impl Piece {
    /// Makes an unused piece with room for so many pages in the worst case: each a run of its own.
    fn of(pages: usize) -> Self {
        let runs = || Vec::with_capacity(pages);
        let bases = Vec::with_capacity(pages);
        Self {
            block: 0,
            runs: runs(),
            normal: 0,
            stage: Stage::NotSearched,
            since: 0,
            queued: runs(),
            bases,
            longest_record: 0,
        }
    }

    /// Gives up the result that the piece waits for.
    fn give_up(&mut self) {
        self.stage = match std::mem::replace(&mut self.stage, Stage::NotSearched) {
            Stage::Searching(_) => Stage::NotSearched,
            Stage::Copying(_) => Stage::NotCopied,
            Stage::Comparing(copy, _) => Stage::Compared(copy),
            stage => stage,
        };
    }

    /// Sets the kind of each page by the zero map of `batch`.
    fn split(&mut self, batch: &Batch, ratio: &mut NormalPageRatio) {
        std::mem::swap(&mut self.runs, &mut self.queued);
        self.runs.clear();
        let pages = self.queued.iter().flat_map(|run| run.first..run.end());
        for (index, page) in pages.enumerate() {
            let kind = if batch.is_zero(index) && !ratio.takes_next() { RunKind::Zero } else { RunKind::Normal };
            self.normal += if kind == RunKind::Normal { PAGE_SIZE as u64 } else { 0 };
            match self.runs.last_mut() {
                Some(last) if last.kind == kind && last.end() == page && last.count < Run::MAX_COUNT => last.count += 1,
                _ => self.runs.push(Run { kind, first: page, count: 1 }),
            }
        }
        self.stage = Stage::Searched;
    }
}

#[cfg(test)]
mod tests;
