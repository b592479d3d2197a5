//! Post-copy at the source: the list of pages that the destination still lacks, the thread that answers its requests, and the streaming
//! of the rest.
//!
//! The guest is paused here, so its memory does not change. A page leaves the list when it is handed to a channel. The destination keeps
//! the list that counts, and sends it again after a connection was lost.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::{AtomicPageBitmap, PageBitmap};
use sterna_memory::ram::GuestRam;
use sterna_wire::packet::{BlockShape, PAGE_REQUEST_LENGTH, PacketHeader, PacketKind, PageRequest, Run, RunKind};
use sterna_wire::sequence::SendSequence;

use crate::batch::REGION;
use crate::entry::PageSearch;
use crate::item::{PostCopyPages, SendMode};
use crate::migration::shapes;
use crate::pacer::Pacer;
use crate::reading::Reading;
use crate::receive::PacketRules;
use crate::transport::{Reader, Writer};
use crate::window::WindowClosed;

/// Pages are read by the CPU: the guest runs at the destination, so a page that a device wrongly called zero could not be corrected.
const MODE: SendMode = SendMode::ByCpu;
const REGION_PAGES: u64 = REGION / PAGE_SIZE as u64;
/// Regions that are streamed ahead of the rest after a request: the guest works near where it faulted.
const FOLLOWED: u64 = 4;

/// The pages that the destination lacks.
#[derive(Debug)]
pub(super) struct Unsent {
    blocks: Vec<AtomicPageBitmap>,
    /// By block: whether its pages are huge, so that only whole ones can be placed.
    huge: Vec<bool>,
    /// What the channels share about these pages.
    shared: Arc<PostCopyPages>,
    /// Where the guest faulted last.
    fault: Mutex<Option<(u16, u64)>>,
}

impl Unsent {
    /// Makes an empty list of pages of `ram`.
    pub(super) fn none_of(ram: &GuestRam) -> Self {
        let blocks = ram.blocks().iter().map(|block| AtomicPageBitmap::new(block.pages())).collect();
        let huge = ram.blocks().iter().map(|block| block.page_size() > PAGE_SIZE).collect();
        Self { blocks, huge, shared: Arc::new(PostCopyPages::none_of(ram)), fault: Mutex::default() }
    }

    /// Adds the pages of `pending`, block by block. Widens `pending` to whole pages of each block's backing: the destination lacks only whole
    /// ones.
    pub(super) fn add(&self, ram: &GuestRam, pending: &mut [PageBitmap]) {
        widen(ram, pending);
        for (number, pending) in pending.iter().enumerate() {
            pending.for_each_run(|run| self.add_run(number as u16, run));
        }
    }

    /// Adds the pages of `late`, which were written after those of `listed` had been [added](Self::add). Leaves in `late` the pages that
    /// are new, widened.
    ///
    /// # Errors
    /// A page that was written again has been sent already, because the destination had requested it.
    pub(super) fn add_late(
        &self,
        ram: &GuestRam,
        late: &mut [PageBitmap],
        listed: &[PageBitmap],
    ) -> Result<(), String> {
        widen(ram, late);
        for (number, (late, listed)) in late.iter_mut().zip(listed).enumerate() {
            let unsent = &self.blocks[number];
            let mut known = Vec::new();
            late.for_each_run(|run| known.extend(run.filter(|page| listed.contains(*page))));
            for page in known {
                if !unsent.contains(page) {
                    let block = ram.blocks()[number].name();
                    return Err(format!(
                        "page {page} of RAM block {block} was written while the state was saved, after a device at the destination had \
                         requested it"
                    ));
                }
                late.clear(page..page + 1);
            }
            late.for_each_run(|run| self.add_run(number as u16, run));
        }
        Ok(())
    }

    fn add_run(&self, block: u16, run: Range<u64>) {
        self.shared.add_unread(block, run.clone());
        self.blocks[usize::from(block)].set(run);
    }

    /// Returns how many pages were not handed to a channel yet.
    pub(super) fn pages(&self) -> u64 {
        self.blocks.iter().map(AtomicPageBitmap::count).sum()
    }

    /// Returns how many pages no channel has begun to read. The destination lacks each of them, whatever it reports.
    pub(super) fn unread(&self) -> u64 {
        self.shared.unread()
    }

    /// Hands all pages of the list to the channels, those near the last fault first.
    pub(super) fn stream(&self, search: &mut PageSearch) -> Result<(), WindowClosed> {
        search.share(&self.shared);
        for (number, block) in self.blocks.iter().enumerate() {
            for region in 0..block.pages().div_ceil(REGION_PAGES) {
                while let Some((number, page)) = self.take_fault() {
                    let first = page / REGION_PAGES;
                    for region in first..first + FOLLOWED {
                        self.stream_region(search, number, region)?;
                    }
                    search.flush()?;
                }
                self.stream_region(search, number as u16, region)?;
            }
        }
        search.flush()
    }

    fn take_fault(&self) -> Option<(u16, u64)> {
        self.fault.lock().expect("no thread panics with the lock held").take()
    }

    fn stream_region(&self, search: &mut PageSearch, number: u16, region: u64) -> Result<(), WindowClosed> {
        let block = &self.blocks[usize::from(number)];
        let pages = (region * REGION_PAGES).min(block.pages())..((region + 1) * REGION_PAGES).min(block.pages());
        let (mut outcome, mut any) = (Ok(()), false);
        block.take_runs(pages.clone(), |run| {
            any = true;
            if outcome.is_ok() && !self.huge[usize::from(number)] {
                outcome = search.pages_by(MODE, number, run);
            }
        });
        if any && self.huge[usize::from(number)] {
            // The whole page, even if a request removes part of it from the list right now: the destination drops a second copy.
            outcome = search.pages_by(MODE, number, pages);
        }
        outcome
    }
}

/// Widens `pages`, block by block, to whole pages of each block's backing.
fn widen(ram: &GuestRam, pages: &mut [PageBitmap]) {
    for (pages, block) in pages.iter_mut().zip(ram.blocks()) {
        let whole = (block.page_size() / PAGE_SIZE) as u64;
        let mut at = 0;
        while whole > 1
            && let Some(run) = pages.next_run(at, u64::MAX)
        {
            at = run.end.next_multiple_of(whole);
            pages.set(run.start / whole * whole..at);
        }
    }
}

/// Answers the destination's requests on the post-copy channel.
#[derive(Debug)]
pub(super) struct PageServer {
    ram: GuestRam,
    shapes: Vec<BlockShape>,
    unsent: Arc<Unsent>,
    reader: Reader,
    writer: Writer,
    packet_size: usize,
    sequence: SendSequence,
    reading: Reading,
    table: Vec<u8>,
    pacer: Arc<Pacer>,
}

impl PageServer {
    pub(super) fn new(
        ram: GuestRam,
        unsent: Arc<Unsent>,
        (writer, reader): (Writer, Reader),
        rules: PacketRules,
        pacer: Arc<Pacer>,
    ) -> io::Result<Self> {
        let shapes = shapes(&ram);
        let (reading, packet_size) = (Reading::new(rules), rules.packet_size);
        let (sequence, table) = (SendSequence::default(), Vec::new());
        let mut server = Self { ram, shapes, unsent, reader, writer, packet_size, sequence, reading, table, pacer };
        // A guest that has all pages that it uses causes no requests. The control channel detects a lost peer.
        server.reader.set_timeout(None)?;
        Ok(server)
    }

    /// Receives the list of missing pages, which the destination sends first on a new connection.
    pub(super) fn receive_list(&mut self) -> io::Result<()> {
        // Pages that were sent before may have been lost.
        self.unsent.shared.forget_requested();
        while let Some(request) = self.next_request()? {
            if request.count == 0 {
                return Ok(());
            }
            self.unsent.add_run(request.block, request.first..request.first + u64::from(request.count));
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    /// Answers requests until the destination closes the channel.
    pub(super) fn serve(mut self) -> io::Result<()> {
        while let Some(request) = self.next_request()? {
            let end = request.first + u64::from(request.count);
            // Copies of these pages that wait in a channel's queue are not sent from there as well.
            self.unsent.shared.begin_requested(request.block, request.first..end);
            self.unsent.blocks[usize::from(request.block)].clear(request.first..end);
            let mut at = request.first;
            while at < end {
                let count = (end - at).min((self.packet_size / PAGE_SIZE) as u64);
                self.send(request.block, at, count as u32)?;
                at += count;
            }
            *self.unsent.fault.lock().expect("no thread panics with the lock held") =
                Some((request.block, request.first));
        }
        Ok(())
    }

    fn next_request(&mut self) -> io::Result<Option<PageRequest>> {
        let mut bytes = [0; PAGE_REQUEST_LENGTH];
        if !self.reader.read_packet_start(&mut bytes)? {
            return Ok(None);
        }
        let request = PageRequest::decode(&bytes, &self.shapes);
        request.map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Sends pages uncompressed: compressing takes longer than sending one page.
    fn send(&mut self, block: u16, first: u64, count: u32) -> io::Result<()> {
        self.reading.begin(block);
        let read = self.reading.read(&self.ram, &[Run { kind: RunKind::Normal, first, count }]);
        read.map_err(io::Error::other)?;
        let batch = self.reading.batch();
        self.table.clear();
        batch.runs().iter().for_each(|run| self.table.extend_from_slice(&run.encode()));
        let content = batch.content();
        let header = PacketHeader {
            kind: PacketKind::Pages,
            method: 0,
            subject: block,
            sequence: self.sequence.advance(),
            table_length: self.table.len() as u32,
            payload_length: content.len() as u32,
            content_length: content.len() as u32,
            content_checksum: batch.checksum().unwrap_or(0),
            detail: 0,
        };
        let header = header.encode(&self.table);
        // The guest waits for these pages, so they are sent at once; the pacer delays the streamed pages for it.
        self.pacer.charge(header.len() + self.table.len() + content.len());
        self.writer.write_all_vectored(&[&header, &self.table, content])
    }
}
