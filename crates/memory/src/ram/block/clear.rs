//! Making a block read as zero where content was left in it, and populating it: what a destination does before a guest's memory arrives.
//!
//! Memory that another process has preallocated is large and almost all zero, so it is read in large pieces and hardly written.

use std::ops::Range;

use super::{Backing, Location, RamBlock};
use crate::PAGE_SIZE;
use crate::holes::PageMap;
use crate::place::Place;
use crate::process_memory::ProcessMemory;
use crate::ram::RamError;
use crate::scan::is_zero;

/// Pages that are read at once to be cleared: 256 KiB, which stay in a CPU's cache until they have been tested.
const CLEARED_AT_ONCE: usize = 64;

/// Returns the runs of consecutive numbers in `pages`, which ascend.
fn runs_of(pages: &[u64]) -> impl Iterator<Item = Range<u64>> {
    pages.chunk_by(|page, next| page + 1 == *next).map(|run| run[0]..run[0] + run.len() as u64)
}

impl RamBlock {
    /// Fills the pages of `run` with zeros, but writes only those that are populated and not zero.
    ///
    /// # Errors
    /// The populated pages cannot be determined, or they lie in another process that has ended.
    ///
    /// # Panics
    /// If they are not in the block.
    pub fn clear_written(&self, run: Range<u64>) -> Result<(), RamError> {
        let written = self.populated_runs(run)?;
        match &self.home {
            Location::Here(_) => {
                for run in written {
                    self.map_read(run.clone());
                    let not_zero = run.filter(|page| !self.is_zero(*page));
                    not_zero.for_each(|page| self.zero(page..page + 1));
                }
                Ok(())
            }
            Location::Process(memory) => self.clear_in_process(memory, written),
        }
    }

    /// Clears the pages of `written` that are not zero. They are read in large pieces: a page needs three system calls, and most pages of
    /// preallocated memory are zero.
    fn clear_in_process(&self, memory: &ProcessMemory, written: Vec<Range<u64>>) -> Result<(), RamError> {
        let not_cleared = |source| self.not_written(source);
        let writer = memory.writer().map_err(not_cleared)?;
        let mut content = vec![0; CLEARED_AT_ONCE * PAGE_SIZE];
        let mut pages = Vec::with_capacity(CLEARED_AT_ONCE);
        let mut rest = written.into_iter().flatten();
        loop {
            pages.clear();
            pages.extend(rest.by_ref().take(CLEARED_AT_ONCE));
            if pages.is_empty() {
                return Ok(());
            }
            let content = &mut content[..pages.len() * PAGE_SIZE];
            let parts = runs_of(&pages).map(|run| run.start as usize * PAGE_SIZE..run.end as usize * PAGE_SIZE);
            memory.read(parts, content).map_err(|source| RamError::Read { name: self.name.clone(), source })?;
            let mut content = content.chunks_exact(PAGE_SIZE);
            pages.retain(|_| content.next().is_some_and(|page| !is_zero(page)));
            for run in runs_of(&pages) {
                let (offset, bytes) = (run.start * PAGE_SIZE as u64, (run.end - run.start) * PAGE_SIZE as u64);
                writer.zero(offset, bytes).map_err(not_cleared)?;
            }
        }
    }

    /// Returns the pages of `run` that may hold anything but zeros, in ascending order.
    ///
    /// # Panics
    /// If they are not in the block.
    fn populated_runs(&self, run: Range<u64>) -> Result<Vec<Range<u64>>, RamError> {
        self.check_run(run.start, run.end - run.start);
        let mut map = PageMap::own().map_err(|source| RamError::Holes { name: self.name.clone(), source })?;
        let mut runs = Vec::new();
        self.populated_of(run, &mut map, |part| runs.push(part))?;
        Ok(runs)
    }

    /// Populates the pages of `run` of a block that lies in another process, all of which read as zero. Pages that are known to be
    /// populated are left alone.
    ///
    /// # Errors
    /// There is no memory for them, or the process has ended.
    ///
    /// # Panics
    /// If they are not in the block, or it does not lie in another process.
    pub fn populate_zeros(&self, run: Range<u64>) -> Result<(), RamError> {
        let Some(writer) = self.process_write().map_err(|source| self.not_written(source))? else {
            panic!("RAM block {} does not lie in another process", self.name);
        };
        let mut populated = match &self.backing {
            Backing::Anonymous | Backing::Shared(..) => self.populated_runs(run.clone())?,
            // Of other memory `populated` says nothing.
            Backing::Other => Vec::new(),
        };
        populated.push(run.end..run.end);
        let mut at = run.start;
        for present in populated {
            let (offset, bytes) = (at * PAGE_SIZE as u64, (present.start - at) * PAGE_SIZE as u64);
            writer.zero(offset, bytes).map_err(|source| self.not_written(source))?;
            at = present.end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::tests::block;
    use super::*;
    use crate::place::TargetProcess;
    use crate::test_util::Area;

    /// What a page was used for before.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Used {
        Never,
        Zeroed,
        /// One byte was written, at this offset.
        Written(usize),
    }

    fn used() -> impl Strategy<Value = Used> {
        prop_oneof![Just(Used::Never), Just(Used::Zeroed), (0..PAGE_SIZE).prop_map(Used::Written)]
    }

    /// Returns memory whose pages were used so, and the block that it is, for this process or as if it were another one's.
    fn memory_of(used: &[Used], elsewhere: bool) -> (Area, RamBlock) {
        let bytes = used.len() * PAGE_SIZE;
        let area = Area::small_pages(bytes);
        for (page, used) in used.iter().enumerate().filter(|(_, used)| **used != Used::Never) {
            let content = &mut area.bytes_mut()[page * PAGE_SIZE..][..PAGE_SIZE];
            content.fill(0);
            if let Used::Written(at) = used {
                content[*at] = 7;
            }
        }
        let block = match elsewhere {
            false => block(&area, bytes),
            true => {
                let process = Arc::new(TargetProcess::open(std::process::id() as i32).unwrap());
                RamBlock::in_process("ram", &process, area.ptr().addr(), bytes, Backing::Anonymous)
            }
        };
        (area, block)
    }

    fn populated_pages(block: &RamBlock) -> Vec<u64> {
        let mut pages = Vec::new();
        block.populated(&mut PageMap::own().unwrap(), |run| pages.extend(run)).unwrap();
        pages
    }

    proptest! {
        /// Longer than what is read at once.
        #[test]
        fn clearing_leaves_zeros_in_the_run_and_all_else_as_it_was(
            used in proptest::collection::vec(used(), 1..4 * CLEARED_AT_ONCE),
            cuts in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
            elsewhere in any::<bool>(),
        ) {
            let (area, block) = memory_of(&used, elsewhere);
            let (cut, other) = (cuts.0.index(used.len() + 1) as u64, cuts.1.index(used.len() + 1) as u64);
            let run = cut.min(other)..cut.max(other);
            block.clear_written(run.clone()).unwrap();
            let expected = (0..used.len() as u64).filter(|page| used[*page as usize] != Used::Never);
            prop_assert_eq!(populated_pages(&block), expected.collect::<Vec<_>>());
            for (page, (used, content)) in used.iter().zip(area.bytes().chunks(PAGE_SIZE)).enumerate() {
                let expected = match used {
                    Used::Written(at) if !run.contains(&(page as u64)) => Some(*at),
                    _ => None,
                };
                prop_assert_eq!(content.iter().position(|byte| *byte != 0), expected, "page {}", page);
            }
        }

        #[test]
        fn populating_memory_of_a_process_writes_only_pages_that_were_never_used(
            used in proptest::collection::vec(used(), 1..2 * CLEARED_AT_ONCE),
            cuts in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        ) {
            let (area, block) = memory_of(&used, true);
            let (cut, other) = (cuts.0.index(used.len() + 1) as u64, cuts.1.index(used.len() + 1) as u64);
            let run = cut.min(other)..cut.max(other);
            block.populate_zeros(run.clone()).unwrap();
            let expected = |page: &u64| used[*page as usize] != Used::Never || run.contains(page);
            prop_assert_eq!(populated_pages(&block), (0..used.len() as u64).filter(expected).collect::<Vec<_>>());
            for (used, content) in used.iter().zip(area.bytes().chunks(PAGE_SIZE)) {
                let expected = if let Used::Written(at) = used { Some(*at) } else { None };
                prop_assert_eq!(content.iter().position(|byte| *byte != 0), expected);
            }
        }
    }

    #[test]
    fn of_a_shared_file_what_another_mapping_wrote_is_cleared_and_its_holes_stay_holes() {
        const PAGES: usize = 200;
        let file = File::from(rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len((PAGES * PAGE_SIZE) as u64).unwrap();
        for page in (0..PAGES).filter(|page| page % 3 != 0) {
            let byte = if page % 3 == 1 { 0 } else { 9 };
            file.write_all_at(&[byte; PAGE_SIZE], (page * PAGE_SIZE) as u64).unwrap();
        }
        let blocks = |file: &File| file.metadata().unwrap().blocks();
        let before = blocks(&file);
        let block = RamBlock::of_file("ram", Arc::new(file.try_clone().unwrap()), 0, PAGES * PAGE_SIZE, PAGE_SIZE);
        block.unwrap().clear_written(0..PAGES as u64 - 3).unwrap();
        let mut content = vec![0; PAGES * PAGE_SIZE];
        assert_eq!(blocks(&file), before);
        file.read_exact_at(&mut content, 0).unwrap();
        let not_zero = content.chunks(PAGE_SIZE).enumerate().filter(|(_, page)| !is_zero(page)).map(|(page, _)| page);
        assert_eq!(not_zero.collect::<Vec<_>>(), [PAGES - 3]);
    }
}
