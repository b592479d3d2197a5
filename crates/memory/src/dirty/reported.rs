//! The dirty log of writers that report their writes: device models, vhost back ends, DMA of devices.
//!
//! A bitmap per RAM block, set by [`DirtyMarker`] from any thread and collected by [`ReportedLog`].

use super::{DirtyLog, DirtyLogError, check_collect};
use crate::bitmap::{AtomicPageBitmap, PageBitmap};
use std::ops::Range;
use std::sync::Arc;

/// Marks pages for a [`ReportedLog`]; cheap to clone, one for each thread that writes.
///
/// **Write first, then mark.** A mark set before the write can be collected, and the old content read, before the new
/// content is there.
#[derive(Clone, Debug)]
pub struct DirtyMarker {
    blocks: Arc<[AtomicPageBitmap]>,
}

impl DirtyMarker {
    /// Marks `pages` of RAM block `block` as written. It may be called outside of migrations too: then it costs no more
    /// than reading a bit that is set already.
    ///
    /// # Panics
    /// If there is no such block or the pages are not within it.
    pub fn mark(&self, block: usize, pages: Range<u64>) {
        self.blocks[block].set(pages);
    }
}

/// Collects the marked pages. Names exactly those.
#[derive(Debug)]
pub struct ReportedLog {
    marker: DirtyMarker,
    pages: Vec<u64>,
    started: bool,
}

impl ReportedLog {
    /// Makes a log for RAM blocks of these numbers of pages.
    pub fn new(pages: &[u64]) -> Self {
        let blocks = pages.iter().map(|pages| AtomicPageBitmap::new(*pages)).collect();
        Self { marker: DirtyMarker { blocks }, pages: pages.to_vec(), started: false }
    }

    /// Returns the marker for writers.
    pub fn marker(&self) -> DirtyMarker {
        self.marker.clone()
    }
}

impl DirtyLog for ReportedLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        if self.started {
            return Err(DirtyLogError::AlreadyStarted);
        }
        // Markers do not check whether the log is started: a writer could read "no" and then be overtaken by the first
        // round. Pages marked so far were written before they were marked, and so before the first round reads them.
        for block in self.marker.blocks.iter() {
            block.clear(0..block.pages());
        }
        self.started = true;
        Ok(())
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        check_collect(self.started, &self.pages, block, dirty)?;
        self.marker.blocks[block].take_runs(0..self.pages[block], |run| dirty.set(run));
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.started = false;
        Ok(())
    }
}
