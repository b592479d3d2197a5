//! Deltas at the destination: a page is read back from guest RAM into a buffer, changed there, compared with its checksum, and
//! only then written to guest RAM.
//!
//! Before the switchover only the gateway writes guest RAM that is filled directly: QEMU loads no ROMs into it while it waits for a
//! migration, memory of virtio-mem goes in-stream, and a balloon's discards begin with the guest. The checksum would detect any
//! other writer.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::AtomicPageBitmap;
use sterna_memory::delta::apply;
use sterna_memory::place::{Piece, Place, PlaceError};
use sterna_wire::checksum::crc32c;
use sterna_wire::delta::PageDeltas;
use sterna_wire::packet::{BlockShape, Run, RunKind};

/// Pages that are read back and written together.
const PAGES_AT_ONCE: usize = 64;

/// The buffer in which one channel applies deltas to pages.
#[derive(Debug)]
pub(super) struct DeltaBuffer {
    bytes: Box<[u8]>,
    /// The part of `bytes` that begins on a page boundary.
    aligned: Range<usize>,
}

impl DeltaBuffer {
    pub(super) fn new() -> Self {
        let length = PAGES_AT_ONCE * PAGE_SIZE;
        let bytes = vec![0; length + PAGE_SIZE - 1].into_boxed_slice();
        // Deltas consist of words of eight bytes, which must be aligned.
        let start = bytes.as_ptr().align_offset(PAGE_SIZE);
        Self { bytes, aligned: start..start + length }
    }

    /// Applies `deltas` to the pages of `runs` in `place`. Returns false if a delta is damaged or its result does not have the checksum
    /// of the source's page; earlier pages may then have been written, correctly.
    pub(super) fn apply(
        &mut self,
        place: &dyn Place,
        runs: &[Run],
        mut deltas: PageDeltas<'_>,
    ) -> Result<bool, PlaceError> {
        let mut numbers = runs.iter().flat_map(|run| run.first..run.end()).peekable();
        let mut offsets = [0; PAGES_AT_ONCE];
        while numbers.peek().is_some() {
            let mut count = 0;
            for (offset, number) in offsets.iter_mut().zip(&mut numbers) {
                *offset = number * PAGE_SIZE as u64;
                count += 1;
            }
            let offsets = &offsets[..count];
            let pages = &mut self.bytes[self.aligned.clone()][..count * PAGE_SIZE];
            place.read_pages(offsets, pages)?;
            for page in pages.chunks_exact_mut(PAGE_SIZE) {
                let Some(Ok(delta)) = deltas.next() else { return Ok(false) };
                if apply(delta.record, page).is_err() || crc32c(page) != delta.checksum {
                    return Ok(false);
                }
            }
            let mut pieces = [Piece { offset: 0, data: &[] }; PAGES_AT_ONCE];
            for (piece, (offset, data)) in pieces.iter_mut().zip(offsets.iter().zip(pages.chunks_exact(PAGE_SIZE))) {
                *piece = Piece { offset: *offset, data };
            }
            place.write_pieces(&pieces[..count])?;
        }
        Ok(deltas.next().is_none())
    }
}

/// Pages that arrived damaged, were refused, and have not been retransmitted yet.
#[derive(Debug, Default)]
pub(super) struct MissingPages {
    blocks: OnceLock<Vec<AtomicPageBitmap>>,
    pages: AtomicU64,
}

impl MissingPages {
    /// Records that the normal pages of `runs` arrived damaged. The source ends the migration where too many do.
    pub(super) fn add(&self, shapes: &[BlockShape], block: u16, runs: &[Run]) {
        let none = || shapes.iter().map(|shape| AtomicPageBitmap::new(shape.pages)).collect();
        let pages = &self.blocks.get_or_init(none)[usize::from(block)];
        for run in runs.iter().filter(|run| run.kind == RunKind::Normal) {
            let new = pages.test_and_set(run.first..run.end(), |_| {});
            self.pages.fetch_add(new, Ordering::AcqRel);
        }
    }

    /// Removes the pages of `runs`, which have arrived undamaged. Returns whether any of them was missing.
    pub(super) fn remove(&self, block: u16, runs: &[Run]) -> bool {
        let Some(blocks) = self.blocks.get().filter(|_| self.pages() > 0) else { return false };
        let mut found = 0;
        for run in runs {
            blocks[usize::from(block)].take_runs(run.first..run.end(), |pages| found += pages.end - pages.start);
        }
        self.pages.fetch_sub(found, Ordering::AcqRel);
        found > 0
    }

    /// Returns the number of missing pages.
    pub(super) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use sterna_memory::place::{FileWrite, ZeroBy};
    use sterna_wire::delta::PageDelta;

    use super::*;

    const PAGES: u64 = 400;

    /// Returns a block in a file, whose pages hold [`before`].
    fn block() -> FileWrite {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGES * PAGE_SIZE as u64).unwrap();
        let place = FileWrite::new(file, 0, PAGES * PAGE_SIZE as u64, ZeroBy::Writing).unwrap();
        (0..PAGES).for_each(|number| place.write(number * PAGE_SIZE as u64, &before(number)).unwrap());
        place
    }

    /// The first content of page `number`.
    fn before(number: u64) -> Vec<u8> {
        (0..PAGE_SIZE as u64).map(|at| (at * 7 + number * 3) as u8).collect()
    }

    /// The content of page `number` after its delta: one word differs, at an offset that depends on the page.
    fn after(number: u64) -> Vec<u8> {
        let mut page = before(number);
        page[number as usize % 512 * 8..][..8].copy_from_slice(&[0xf7; 8]);
        page
    }

    fn delta_of(number: u64) -> Vec<u8> {
        let mut record = (number as u16 % 512).to_le_bytes().to_vec();
        record.extend([0xf7; 8]);
        let header = PageDelta { checksum: crc32c(&after(number)), record: &record }.header();
        [&header[..], &record].concat()
    }

    fn page(place: &FileWrite, number: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE_SIZE];
        place.read_pages(&[number * PAGE_SIZE as u64], &mut page).unwrap();
        page
    }

    /// Every second page, then more contiguous pages than are read at once.
    fn runs() -> (Vec<Run>, Vec<u64>) {
        let run = |first, count| Run { kind: RunKind::Normal, first, count };
        let mut runs: Vec<_> = (0..90).map(|at| run(at * 2 + 1, 1)).collect();
        runs.extend([run(200, 150), run(PAGES - 1, 1)]);
        let pages = runs.iter().flat_map(|run| run.first..run.end()).collect();
        (runs, pages)
    }

    #[test]
    fn deltas_change_their_pages_and_no_others() {
        let place = block();
        let (runs, pages) = runs();
        let content: Vec<u8> = pages.iter().flat_map(|number| delta_of(*number)).collect();
        let deltas = PageDeltas::new(&content, pages.len() as u64);
        assert!(DeltaBuffer::new().apply(&place, &runs, deltas).unwrap());
        for number in 0..PAGES {
            let expected = if pages.contains(&number) { after(number) } else { before(number) };
            assert!(page(&place, number) == expected, "page {number}");
        }
    }

    #[test]
    fn a_result_that_differs_from_the_sources_page_is_not_placed() {
        let (runs, pages) = runs();
        let good: Vec<u8> = pages.iter().flat_map(|number| delta_of(*number)).collect();
        let one = delta_of(1).len();
        let spoilt = |at: usize| {
            let mut content = good.clone();
            content[at] ^= 4;
            content
        };
        let wrong = 170;
        // A bit of a word, of an offset, of a checksum; a truncated record; below, one delta too many, and a page that has changed.
        let cases = [
            spoilt(wrong * one + 12),
            spoilt(wrong * one + 8),
            spoilt(wrong * one + 5),
            good[..good.len() - 1].to_vec(),
        ];
        for content in cases {
            let place = block();
            let deltas = PageDeltas::new(&content, pages.len() as u64);
            assert!(!DeltaBuffer::new().apply(&place, &runs, deltas).unwrap());
            for number in 0..PAGES {
                let now = page(&place, number);
                assert!(now == before(number) || (pages.contains(&number) && now == after(number)), "page {number}");
            }
            let last = *pages.last().unwrap();
            assert!(page(&place, last) == before(last), "no page after the damaged one is placed");
        }
        let too_many = [&good[..], &delta_of(0)].concat();
        let deltas = PageDeltas::new(&too_many, pages.len() as u64 + 1);
        assert!(!DeltaBuffer::new().apply(&block(), &runs, deltas).unwrap());
        let place = block();
        place.write(pages[wrong] * PAGE_SIZE as u64, &[0; 1]).unwrap();
        place.write(pages[wrong] * PAGE_SIZE as u64 + 9, &[1; 1]).unwrap();
        let deltas = PageDeltas::new(&good, pages.len() as u64);
        assert!(!DeltaBuffer::new().apply(&place, &runs, deltas).unwrap());
    }

    #[test]
    fn a_refused_page_is_missing_until_it_arrives_undamaged() {
        let shapes = [BlockShape { pages: 10, page_size: 4096 }, BlockShape { pages: 100, page_size: 4096 }];
        let run = |kind, first, count| Run { kind, first, count };
        let missing = MissingPages::default();
        assert!(!missing.remove(1, &[run(RunKind::Normal, 0, 100)]));
        // Zero pages of a damaged packet are placed from its table, and a page counts once.
        missing.add(&shapes, 1, &[run(RunKind::Normal, 3, 4), run(RunKind::Zero, 50, 9)]);
        missing.add(&shapes, 1, &[run(RunKind::Normal, 5, 4)]);
        assert_eq!(missing.pages(), 6);
        assert!(!missing.remove(0, &[run(RunKind::Normal, 0, 10)]) && !missing.remove(1, &[run(RunKind::Zero, 9, 9)]));
        assert!(missing.remove(1, &[run(RunKind::Zero, 0, 5), run(RunKind::Normal, 8, 1)]));
        assert_eq!(missing.pages(), 3);
        assert!(missing.remove(1, &[run(RunKind::Normal, 0, 100)]));
        assert_eq!(missing.pages(), 0);
    }
}
