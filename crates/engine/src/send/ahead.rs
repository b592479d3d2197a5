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

use super::delta::{Against, Answers, Deltas, Whole};
use crate::accelerator::Accelerator;

/// Number of packets under way: while one is written, one is copied and two are searched for zero pages.
const DEPTH: usize = 4;

/// Minimum and maximum number of pieces that are not requested after one that was late; the number doubles each time.
const MIN_SKIPPED: u32 = 8;
const MAX_SKIPPED: u32 = 4096;

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
    pub(super) against: Vec<Against>,
    /// Maximum length of their records.
    most: usize,
}

/// How far a piece has come.
enum Stage {
    /// Its zero map is being made.
    Looked(Ticket),
    /// It is known which of its pages are zero.
    Known,
    /// Its normal pages are being copied.
    Copied(Ticket),
    /// Its normal pages are copied.
    Here(Copy),
    /// Its normal pages are copied, and deltas to the copy are being made.
    Compared(Copy, Ticket),
    /// Its normal pages are copied, and all deltas are made.
    Complete(Copy),
    /// No accelerator could be used to find zero pages: the thread must read all of it.
    Unasked,
    /// Its normal pages could not be copied: the thread must read them.
    Uncopied,
}

impl Stage {
    fn waits_for(&self, ticket: TicketId) -> bool {
        matches!(self, Self::Looked(its) | Self::Copied(its) | Self::Compared(_, its) if its.id() == ticket)
    }
}

/// How the thread sends a piece.
pub(super) enum Ready {
    /// By its runs alone: all of it is zero, or it is sent directly from guest RAM.
    Known,
    /// With this content of its normal pages.
    Here(Copy),
    /// After reading its normal runs, for which there is room in the window.
    Uncopied,
    /// After reading all of it.
    Unasked,
}

/// A copy of a piece's normal pages, deltas that lead to it, and the devices that have made them.
pub(super) struct Copy {
    batch: Batch,
    maker: Option<Producer>,
    deltas: Option<Batch>,
    deltas_maker: Option<Producer>,
}

impl Copy {
    /// Returns the device that has made the copy.
    pub(super) fn maker(&self) -> Option<Producer> {
        self.maker
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

impl Answers for Copy {
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
pub(super) enum Content {
    /// By a copy with its checksum.
    Checked,
    /// By a copy.
    Copied,
    /// Directly from guest RAM.
    InPlace,
}

/// The pieces of one channel that are under way.
pub(super) struct Ahead {
    accelerator: Accelerator,
    channel: Channel,
    content: Content,
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
    pub(super) fn new(accelerator: Accelerator, content: Content, packet_pages: u64, ratio: NormalPageRatio) -> Self {
        let channel = accelerator.channel();
        let pages = accelerator.offload().batch_pages().min(packet_pages as usize);
        let deltas = accelerator.offload().accelerates(Operation::CreateDelta);
        // All pieces that there will ever be: one is unused whenever there is room.
        let spare = (0..DEPTH).map(|_| Piece::of(pages)).collect();
        Self {
            accelerator,
            channel,
            content,
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
        self.content == Content::InPlace
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
    pub(super) fn look(&mut self, block: u16, runs: &[Run]) {
        let mut piece = self.spare.pop().expect("a piece is unused where there is room");
        (piece.block, piece.normal, piece.most) = (block, 0, 0);
        piece.runs.clear();
        piece.against.clear();
        piece.runs.extend_from_slice(runs);
        let asks = self.skipped == 0;
        self.skipped -= u32::from(!asks);
        piece.since = self.accelerator.offload().now();
        piece.stage = match asks.then(|| self.ask(Operation::ZeroMap, block, runs, false)).flatten() {
            Some(ticket) => Stage::Looked(ticket),
            None => Stage::Unasked,
        };
        self.pieces.push_back(piece);
    }

    /// Waits until it is known which pages of the oldest piece are zero. Returns how much room the others need in the window before
    /// [`Ahead::take`]. There must be a piece.
    pub(super) fn needs(&mut self) -> u64 {
        while let Some(Stage::Looked(_)) = self.pieces.front().map(|piece| &piece.stage) {
            self.collect();
        }
        match self.pieces.front() {
            Some(Piece { stage: Stage::Known, normal, .. }) => *normal,
            _ => 0,
        }
    }

    /// Waits for the oldest piece and returns it, with everything that is needed to send it. There must be a piece, and what it
    /// [`needs`](Ahead::needs) must have entered the window. Requests copies of the following pieces whose zero pages are known, as far as
    /// `enter` finds room for them too: no piece enters before an older one. With `deltas`, and the cost of a page sent whole, requests
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
                Some(Stage::Copied(_) | Stage::Compared(..)) => self.collect(),
                _ => break,
            }
        }
        let mut piece = self.pieces.pop_front().expect("a piece is under way");
        let ready = match std::mem::replace(&mut piece.stage, Stage::Unasked) {
            Stage::Here(copy) | Stage::Complete(copy) => Ready::Here(copy),
            Stage::Known => Ready::Known,
            Stage::Uncopied => Ready::Uncopied,
            Stage::Unasked => Ready::Unasked,
            Stage::Looked(_) | Stage::Copied(_) | Stage::Compared(..) => unreachable!("waited for"),
        };
        Ok((piece, ready))
    }

    fn begin_copies<E>(
        &mut self,
        deltas: &mut Option<(&mut Deltas, Whole)>,
        mut enter: impl FnMut(u64) -> Result<bool, E>,
    ) -> Result<(), E> {
        let operation = if self.content == Content::Checked { Operation::CopyChecksum } else { Operation::Copy };
        for at in 0..self.pieces.len() {
            let piece = &mut self.pieces[at];
            match piece.stage {
                Stage::Known if piece.normal > 0 => {}
                Stage::Looked(_) | Stage::Unasked => break,
                _ => continue,
            }
            if at > 0 && !enter(piece.normal)? {
                break;
            }
            if let Some((deltas, whole)) = deltas {
                piece.most = deltas.against(piece.block, &piece.runs, *whole, &mut piece.against);
            }
            let piece = &self.pieces[at];
            // Page by page where each may need its own checksum.
            let by_page = !piece.against.is_empty();
            let asks = self.skipped == 0;
            let ticket = asks.then(|| self.ask(operation, piece.block, &piece.runs, by_page)).flatten();
            self.pieces[at].since = self.accelerator.offload().now();
            self.pieces[at].stage = ticket.map_or(Stage::Uncopied, Stage::Copied);
        }
        Ok(())
    }

    /// Requests deltas to the copies that are complete.
    fn begin_deltas(&mut self, deltas: &Deltas) {
        for piece in &mut self.pieces {
            if !matches!(piece.stage, Stage::Here(_)) {
                continue;
            }
            let Stage::Here(copy) = std::mem::replace(&mut piece.stage, Stage::Unasked) else { unreachable!() };
            let asks = self.deltas && self.skipped == 0 && !piece.against.is_empty();
            let ask = |channel: &Channel| {
                let mut batch = channel.batch(Operation::CreateDelta);
                for against in &piece.against {
                    let kept = deltas.range_of(*against);
                    batch.push_delta_to_copy(&kept, &copy.batch, against.number, piece.most).ok()?;
                }
                channel.submit(batch).ok()
            };
            let ticket = asks.then(|| ask(&self.channel)).flatten();
            piece.since = self.accelerator.offload().now();
            piece.stage = match ticket {
                Some(ticket) => Stage::Compared(copy, ticket),
                None => Stage::Complete(copy),
            };
        }
    }

    /// Returns a piece that was sent, for reuse.
    pub(super) fn put(&mut self, piece: Piece) {
        self.spare.push(piece);
    }

    /// Submits a batch for the normal runs of `runs`, or for their pages one by one. Returns none where it is not accepted, or where no
    /// accelerator reaches the block.
    fn ask(&self, operation: Operation, block: u16, runs: &[Run], by_page: bool) -> Option<Ticket> {
        let region = self.accelerator.region(block)?;
        let mut batch = self.channel.batch(operation);
        for run in runs.iter().filter(|run| run.kind == RunKind::Normal) {
            let (offset, bytes) = (run.first as usize * PAGE_SIZE, run.count as usize * PAGE_SIZE);
            let each = if by_page { PAGE_SIZE } else { bytes };
            for offset in (offset..offset + bytes).step_by(each) {
                let range = region.range(offset, each).expect("pages of a block are within its region");
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
            if self.channel.under_way() > 0 {
                // Late: the device's result is ignored.
                oldest.forsake();
                self.lateness = (2 * self.lateness).clamp(MIN_SKIPPED, MAX_SKIPPED);
                self.skipped = self.lateness;
            } else {
                // Nothing is under way although the piece waits: offload was shut down.
                self.pieces.iter_mut().for_each(Piece::forsake);
            }
            return;
        };
        self.lateness = self.lateness.saturating_sub(1);
        self.completed(done);
    }

    /// Handles a completion.
    fn completed(&mut self, done: Done) {
        let Done { ticket, batch, outcome, maker, .. } = done;
        let of_it = |piece: &&mut Piece| piece.stage.waits_for(ticket);
        let Some(piece) = self.pieces.iter_mut().find(of_it) else { return };
        if outcome != Outcome::Done {
            return piece.forsake();
        }
        match std::mem::replace(&mut piece.stage, Stage::Unasked) {
            Stage::Compared(copy, _) => {
                piece.stage = Stage::Complete(Copy { deltas: Some(batch), deltas_maker: maker, ..copy });
            }
            Stage::Copied(_) => piece.stage = Stage::Here(Copy { batch, maker, deltas: None, deltas_maker: None }),
            _ => {
                piece.split(&batch, &mut self.ratio);
                if let Some(maker) = maker {
                    self.accelerator.record_zero_pages(piece.block, &piece.runs);
                    let mut pages = piece.queued.iter().flat_map(|run| run.first..run.end());
                    // Ascending, so that the search for each begins behind the one before.
                    let mut at = 0;
                    for doubted in batch.doubted() {
                        if let Some(page) = pages.nth(doubted - at) {
                            self.accelerator.doubt(piece.block, page, maker);
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
        let against = Vec::with_capacity(pages);
        Self { block: 0, runs: runs(), normal: 0, stage: Stage::Unasked, since: 0, queued: runs(), against, most: 0 }
    }

    /// Gives up the result that the piece waits for.
    fn forsake(&mut self) {
        self.stage = match std::mem::replace(&mut self.stage, Stage::Unasked) {
            Stage::Looked(_) => Stage::Unasked,
            Stage::Copied(_) => Stage::Uncopied,
            Stage::Compared(copy, _) => Stage::Complete(copy),
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
        self.stage = Stage::Known;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::tests::{of_cpu, over, ram_of};
    use sterna_memory::checksum::crc32c;
    use sterna_offload::Offload;

    const PAGES: usize = 32;

    fn run(kind: RunKind, first: u64, count: u32) -> Run {
        Run { kind, first, count }
    }

    /// Every second page of the first block is zero, none of the second, all of the third.
    fn ram() -> GuestRam {
        let bytes = |byte: fn(u8) -> u8| (0..PAGES as u8).map(byte).collect::<Vec<_>>();
        ram_of(&[&bytes(|page| page % 2 * page), &bytes(|page| 100 + page), &bytes(|_| 0)])
    }

    /// Queues all pages of these blocks, each as one piece, and returns their runs and content.
    fn through(ahead: &mut Ahead, blocks: &[u16]) -> Vec<(u16, Vec<Run>, Vec<u8>)> {
        for &block in blocks {
            assert!(ahead.has_room());
            ahead.look(block, &[run(RunKind::Normal, 0, PAGES as u32)]);
        }
        let mut out = Vec::new();
        while !ahead.is_empty() {
            let needs = ahead.needs();
            let (piece, ready) = ahead.take(None, |_| Ok::<_, ()>(true)).unwrap();
            let content = match ready {
                Ready::Here(copy) => {
                    assert_eq!(copy.checksum(), Some(crc32c(copy.bytes())));
                    copy.bytes().to_vec()
                }
                Ready::Known => Vec::new(),
                Ready::Uncopied | Ready::Unasked => panic!("nobody refused anything"),
            };
            assert!(needs == piece.normal || needs == 0, "{needs} of {}", piece.normal);
            assert_eq!(content.len() as u64, piece.normal);
            out.push((piece.block, piece.runs.clone(), content));
            ahead.put(piece);
        }
        out
    }

    #[test]
    fn pieces_come_out_in_order_with_their_runs_content_and_checksum() {
        let mut ahead = Ahead::new(of_cpu(&ram()), Content::Checked, PAGES as u64, NormalPageRatio::default());
        let out = through(&mut ahead, &[0, 1, 2, 0]);
        let every_second: Vec<Run> = (0..PAGES as u64)
            .map(|page| run(if page % 2 == 0 { RunKind::Zero } else { RunKind::Normal }, page, 1))
            .collect();
        let pages = |bytes: Vec<u8>| bytes.into_iter().flat_map(|byte| [byte; PAGE_SIZE]).collect::<Vec<u8>>();
        let odd = pages((0..PAGES as u8).filter(|page| page % 2 == 1).collect());
        let first = (0, every_second, odd);
        let second =
            (1, vec![run(RunKind::Normal, 0, PAGES as u32)], pages((0..PAGES as u8).map(|page| 100 + page).collect()));
        let third = (2, vec![run(RunKind::Zero, 0, PAGES as u32)], Vec::new());
        assert_eq!(out, [first.clone(), second, third, first]);
    }

    #[test]
    fn lists_of_runs_never_grow() {
        let mut ahead = Ahead::new(of_cpu(&ram()), Content::Checked, PAGES as u64, NormalPageRatio::default());
        let places = |ahead: &Ahead| {
            let lists = ahead.spare.iter().flat_map(|piece| [&piece.runs, &piece.queued]);
            lists.map(|list| (list.as_ptr(), list.capacity())).collect::<std::collections::BTreeSet<_>>()
        };
        let before = places(&ahead);
        assert_eq!(before.len(), 2 * DEPTH);
        // The first block is the worst: every page is a run.
        through(&mut ahead, &[0, 1, 0, 0]);
        through(&mut ahead, &[0, 0, 0, 0]);
        assert_eq!(places(&ahead), before);
    }

    #[test]
    fn no_piece_enters_the_window_before_an_older_one() {
        let accelerator = of_cpu(&ram());
        accelerator.region(1).unwrap().retire().unwrap();
        let mut ahead = Ahead::new(accelerator, Content::Copied, PAGES as u64, NormalPageRatio::default());
        for block in [0, 1, 0, 0] {
            ahead.look(block, &[run(RunKind::Normal, 0, PAGES as u32)]);
        }
        let mut entered = Vec::new();
        while !ahead.is_empty() {
            let needs = ahead.needs();
            // So that it is known of all what they consist of.
            while ahead.channel.under_way() > 0 {
                ahead.collect();
            }
            let mut meanwhile = 0;
            let (piece, ready) = ahead
                .take(None, |bytes| {
                    meanwhile += bytes;
                    Ok::<_, ()>(true)
                })
                .unwrap();
            entered.push((piece.block, matches!(ready, Ready::Unasked), needs, meanwhile));
            ahead.put(piece);
        }
        let half = (PAGES / 2 * PAGE_SIZE) as u64;
        // The second could not be asked about and has not entered, so the first takes none with it.
        assert_eq!(entered, [(0, false, half, 0), (1, true, 0, 0), (0, false, half, half), (0, false, 0, 0)]);
    }

    /// A clock that goes on when somebody waits.
    #[derive(Debug, Default)]
    struct Waiting(std::sync::atomic::AtomicU64);

    impl sterna_offload::Time for Waiting {
        fn now(&self) -> Nanos {
            self.0.load(std::sync::atomic::Ordering::SeqCst)
        }
        fn wait(&self, _: &sterna_offload::Bell, _: u64, until: Nanos) {
            self.0.fetch_max(until, std::sync::atomic::Ordering::SeqCst);
        }
    }

    #[test]
    fn what_comes_too_late_is_done_by_the_cpu_and_the_device_is_left_alone_for_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.json");
        let queue = r#"{"name":"wq0.0","size":128,"max_batch_size":128}"#;
        // Batches; and compares with a pattern, which go one by one where the queue's trial of a batch was not answered in real time.
        let faults = r#"{"opcode":1,"what":"hang"},{"opcode":6,"what":"hang"}"#;
        let model = format!(r#"{{"devices":[{{"name":"dsa0","queues":[{queue}]}}],"faults":[{faults}]}}"#);
        std::fs::write(&file, model).unwrap();
        let time = std::sync::Arc::new(Waiting::default());
        let mut settings = sterna_offload::Settings::default();
        (settings.time, settings.threads) = (std::sync::Arc::clone(&time) as _, false);
        // It lives, as far as anybody can tell.
        settings.patience = std::time::Duration::from_secs(1000);
        let offload = Offload::start(&sterna_offload::Accelerators::model(file), &settings).unwrap();
        let mut ahead = Ahead::new(over(&offload, &ram()), Content::Checked, PAGES as u64, NormalPageRatio::default());
        let mut through = || {
            let before = offload.now();
            ahead.look(0, &[run(RunKind::Normal, 0, PAGES as u32)]);
            ahead.needs();
            let (piece, ready) = ahead.take(None, |_| Ok::<_, ()>(true)).unwrap();
            assert!(matches!(ready, Ready::Unasked), "nothing came");
            ahead.put(piece);
            offload.now() - before >= offload.lateness()
        };
        for skipped in [MIN_SKIPPED, 2 * MIN_SKIPPED, 4 * MIN_SKIPPED] {
            assert!(through(), "it is waited for");
            assert!((0..skipped).all(|_| !through()), "{skipped} are not");
        }
        assert!(through());
    }

    /// What is kept is all the same but for one page; of two pieces under way both are asked for.
    #[test]
    fn deltas_lead_from_what_is_kept_to_the_copies() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.json");
        let queue = r#"{"name":"wq0.0","size":16,"max_batch_size":32}"#;
        std::fs::write(&file, format!(r#"{{"devices":[{{"name":"dsa0","queues":[{queue}]}}]}}"#)).unwrap();
        let mut settings = sterna_offload::Settings::default();
        settings.lateness = std::time::Duration::from_secs(10);
        let offload = Offload::start(&sterna_offload::Accelerators::model(file), &settings).unwrap();
        let ram = ram();
        let mut ahead = Ahead::new(over(&offload, &ram), Content::Checked, PAGES as u64, NormalPageRatio::default());
        let mut deltas = Deltas::new(4 * PAGES * PAGE_SIZE, PAGES * PAGE_SIZE);
        let costs = deltas.whole(None);
        let all = [run(RunKind::Normal, 0, PAGES as u32)];
        let mut kept: Vec<u8> = (0..PAGES).flat_map(|page| [100 + page as u8; PAGE_SIZE]).collect();
        kept[5 * PAGE_SIZE + 4088] = 0;
        deltas.split(1, &all, super::super::delta::Normal::of(&kept), 0, None, costs);
        deltas.sent(0, &[], 1, 1);
        (0..2).for_each(|_| ahead.look(1, &all));
        while !ahead.is_empty() {
            ahead.needs();
            let (piece, ready) = ahead.take(Some((&mut deltas, costs)), |_| Ok::<_, ()>(true)).unwrap();
            let Ready::Here(copy) = ready else { panic!("nobody refused anything") };
            assert_eq!(piece.against.len(), PAGES);
            for (item, against) in piece.against.iter().enumerate() {
                let page = &copy.bytes()[item * PAGE_SIZE..][..PAGE_SIZE];
                assert_eq!((against.number, Answers::checksum(&copy, item)), (item, Some(crc32c(page))));
                let delta = match item {
                    5 => Delta::Record(&[255, 1, 105, 105, 105, 105, 105, 105, 105, 105]),
                    _ => Delta::Equal,
                };
                assert_eq!(copy.delta(item), Some(delta), "page {item}");
            }
            assert!(copy.deltas_maker().is_some());
            assert_eq!(copy.checksum(), Some(crc32c(copy.bytes())));
            ahead.put(piece);
        }
    }

    #[test]
    fn after_a_shutdown_pieces_are_the_threads_own_and_still_in_order() {
        let accelerator = of_cpu(&ram());
        let mut ahead = Ahead::new(accelerator.clone(), Content::Checked, PAGES as u64, NormalPageRatio::default());
        ahead.look(0, &[run(RunKind::Normal, 0, PAGES as u32)]);
        ahead.look(1, &[run(RunKind::Normal, 0, PAGES as u32)]);
        Offload::shutdown(accelerator.offload());
        ahead.look(2, &[run(RunKind::Normal, 0, PAGES as u32)]);
        let mut out = Vec::new();
        while !ahead.is_empty() {
            ahead.needs();
            let (piece, ready) = ahead.take(None, |_| Ok::<_, ()>(true)).unwrap();
            out.push((piece.block, matches!(ready, Ready::Unasked), matches!(ready, Ready::Uncopied)));
            ahead.put(piece);
        }
        // What was looked at before is known; copies, and looks at others, were refused.
        assert_eq!(out, [(0, false, true), (1, false, true), (2, true, false)]);
    }
}
