//! The dirty log of a device's DMA: the guest pages that it wrote, as recorded by the device itself or its driver.

use std::io;

use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

use super::device::{Device, DmaRange};

/// Ranges that the kernel guarantees to accept: as many as fit one page of 4 KiB, of 16 bytes each.
const MAX_RANGES: usize = 256;
/// Pages queried at once, unless a device requires a whole mapping: 64 KiB of bitmap, 2 GiB of guest memory.
const PIECE: u64 = 8 * 65536;
const PAGE: u64 = PAGE_SIZE as u64;

/// A part of a RAM block, and its I/O addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMapping {
    /// Its first I/O address.
    pub iova: u64,
    /// Its pages.
    pub pages: u64,
    /// The RAM block.
    pub block: usize,
    /// The page of the block at which it begins.
    pub first_page: u64,
}

/// The log of one device's writes. A guest's log unites several ([`union`](sterna_memory::dirty::union)): one for each
/// device that is passed through, and those of the CPUs.
///
/// The last `collect` follows after the device was stopped ([`stop_together`](super::stop_together)); until then the
/// device writes. The log names whole pages of the device's own granularity: with a page size above 4 KiB, also
/// neighbours of written pages. Memory that the device reads and the guest's mappings of I/O addresses are the
/// monitor's responsibility.
///
/// If the device fails to report, its log is useless, and so is this one until it is stopped and started: a caller that
/// continues has to treat every page as written.
#[derive(Debug)]
pub struct DmaLog<D> {
    device: D,
    name: String,
    /// Pages of each block.
    blocks: Vec<u64>,
    mappings: Vec<DmaMapping>,
    /// The ranges that the device is asked to watch.
    ranges: Vec<DmaRange>,
    words: Vec<u64>,
    /// Pages queried at once.
    piece: u64,
    started: bool,
    lost: bool,
}

impl<D: Device> DmaLog<D> {
    /// Makes a log for RAM blocks of these numbers of pages, mapped for the device by `mappings`. `name` is for
    /// messages.
    pub fn new(
        device: D,
        name: impl Into<String>,
        blocks: &[u64],
        mappings: Vec<DmaMapping>,
    ) -> Result<Self, DirtyLogError> {
        let name = name.into();
        for mapping in &mappings {
            let pages = *blocks
                .get(mapping.block)
                .ok_or(DirtyLogError::NoSuchBlock { block: mapping.block, blocks: blocks.len() })?;
            let within = mapping.first_page.checked_add(mapping.pages).is_some_and(|end| end <= pages);
            let addresses = mapping.pages.checked_mul(PAGE).and_then(|length| mapping.iova.checked_add(length));
            if mapping.pages == 0 || !within || !mapping.iova.is_multiple_of(PAGE) || addresses.is_none() {
                let problem = format!(
                    "{} pages from page {} of block {}, at I/O address {:#x}, are not whole pages within its {pages}",
                    mapping.pages, mapping.first_page, mapping.block, mapping.iova
                );
                return Err(refused(&name, "watch", io::Error::new(io::ErrorKind::InvalidInput, problem)));
            }
        }
        let ranges = to_watch(&mappings, MAX_RANGES)
            .ok_or_else(|| refused(&name, "watch", io::Error::new(io::ErrorKind::InvalidInput, "mappings overlap")))?;
        let piece = if device.reports_whole_mappings() { u64::MAX } else { PIECE };
        let most = mappings.iter().map(|mapping| mapping.pages.min(piece)).max().unwrap_or(0);
        let words = vec![0; most.div_ceil(64) as usize];
        Ok(Self { device, name, blocks: blocks.to_vec(), mappings, ranges, words, piece, started: false, lost: false })
    }

    fn report(&mut self, mapping: DmaMapping, dirty: &mut PageBitmap) -> io::Result<()> {
        let mut done = 0;
        while done < mapping.pages {
            let pages = (mapping.pages - done).min(self.piece);
            let words = &mut self.words[..pages.div_ceil(64) as usize];
            words.fill(0);
            let range = DmaRange { iova: mapping.iova + done * PAGE, length: pages * PAGE };
            self.device.dma_logging_report(range, PAGE, words)?;
            let first = mapping.first_page + done;
            for (word, bits) in words.iter().enumerate().filter(|(_, bits)| **bits != 0) {
                let mut bits = *bits;
                while bits != 0 {
                    let (at, run) = (u64::from(bits.trailing_zeros()), bits >> bits.trailing_zeros());
                    let run = u64::from(run.trailing_ones());
                    let from = word as u64 * 64 + at;
                    // Bits past the last page have no meaning.
                    dirty.set(first + from.min(pages)..first + (from + run).min(pages));
                    bits = if at + run == 64 { 0 } else { bits & (u64::MAX << (at + run)) };
                }
            }
            done += pages;
        }
        Ok(())
    }
}

impl<D: Device> DirtyLog for DmaLog<D> {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        if self.started {
            return Err(DirtyLogError::AlreadyStarted);
        }
        if let Some(first) = self.mappings.first() {
            self.device.dma_logging_start(PAGE, &self.ranges).map_err(|error| refused(&self.name, "watch", error))?;
            // A kernel may start a log that it cannot report: Linux without `CONFIG_IOMMUFD_DRIVER` (`EOPNOTSUPP`). The
            // log of these pages is cleared thereby, like that of all writes before `start` has returned.
            let pages = DmaRange { iova: first.iova, length: first.pages.min(self.piece) * PAGE };
            if let Err(error) = self.device.dma_logging_report(pages, PAGE, &mut self.words) {
                // The first error is the one to report.
                let _ = self.device.dma_logging_stop();
                return Err(refused(&self.name, "report", error));
            }
        }
        self.started = true;
        self.lost = false;
        Ok(())
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        if !self.started {
            return Err(DirtyLogError::NotStarted);
        }
        let pages = *self.blocks.get(block).ok_or(DirtyLogError::NoSuchBlock { block, blocks: self.blocks.len() })?;
        if dirty.pages() != pages {
            return Err(DirtyLogError::BitmapSize { block, pages, given: dirty.pages() });
        }
        if self.lost {
            let problem = "it failed to before, and its log is lost: stop the log, start it, and send every page";
            return Err(refused(&self.name, "report", io::Error::other(problem)));
        }
        for index in 0..self.mappings.len() {
            let mapping = self.mappings[index];
            if mapping.block == block
                && let Err(error) = self.report(mapping, dirty)
            {
                self.lost = true;
                return Err(refused(&self.name, "report", error));
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        if !std::mem::take(&mut self.started) || self.ranges.is_empty() {
            return Ok(());
        }
        self.device.dma_logging_stop().map_err(|error| refused(&self.name, "cease to watch", error))
    }
}

fn refused(device: &str, what: &str, source: io::Error) -> DirtyLogError {
    DirtyLogError::System { what: format!("have device {device} {what} its DMA"), source }
}

/// Returns the ranges of `mappings`, in order, adjacent ones joined; if more than `most` remain, those with the
/// smallest gaps are joined too, since a device may watch more than requested. `None` if they overlap.
fn to_watch(mappings: &[DmaMapping], most: usize) -> Option<Vec<DmaRange>> {
    let mut ranges: Vec<DmaRange> =
        mappings.iter().map(|m| DmaRange { iova: m.iova, length: m.pages * PAGE }).collect();
    ranges.sort_unstable_by_key(|range| range.iova);
    let between = |pair: &[DmaRange]| pair[1].iova.checked_sub(pair[0].iova + pair[0].length);
    let mut gaps = ranges.windows(2).map(between).collect::<Option<Vec<u64>>>()?;
    gaps.sort_unstable_by(|a, b| b.cmp(a));
    // The `most - 1` widest gaps stay, if there are so many.
    let joined_up_to = gaps.get(most.saturating_sub(1)).copied().unwrap_or(0);
    let mut joined: Vec<DmaRange> = Vec::with_capacity(ranges.len().min(most));
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.iova - (last.iova + last.length) <= joined_up_to => {
                last.length = range.iova + range.length - last.iova;
            }
            _ => joined.push(range),
        }
    }
    Some(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(iova_page: u64, pages: u64) -> DmaMapping {
        DmaMapping { iova: iova_page * PAGE, pages, block: 0, first_page: 0 }
    }

    fn pages(ranges: &[DmaRange]) -> Vec<(u64, u64)> {
        ranges.iter().map(|range| (range.iova / PAGE, range.length / PAGE)).collect()
    }

    #[test]
    fn neighbours_are_one_range_and_others_stay_apart() {
        let ranges = to_watch(&[mapping(20, 5), mapping(0, 10), mapping(10, 2)], 8).unwrap();
        assert_eq!(pages(&ranges), [(0, 12), (20, 5)]);
    }

    #[test]
    fn too_many_ranges_are_joined_at_the_smallest_gaps() {
        let mappings = [mapping(0, 1), mapping(2, 1), mapping(100, 1), mapping(110, 1), mapping(1000, 1)];
        assert_eq!(pages(&to_watch(&mappings, 3).unwrap()), [(0, 3), (100, 11), (1000, 1)]);
        assert_eq!(pages(&to_watch(&mappings, 1).unwrap()), [(0, 1001)]);
        assert_eq!(to_watch(&mappings, 5).unwrap().len(), 5);
    }

    #[test]
    fn equal_gaps_never_leave_more_than_the_maximum() {
        let mappings: Vec<_> = (0..1000).map(|at| mapping(at * 2, 1)).collect();
        let ranges = to_watch(&mappings, MAX_RANGES).unwrap();
        assert!(ranges.len() <= MAX_RANGES, "{}", ranges.len());
        assert_eq!(pages(&ranges), [(0, 1999)]);
    }

    #[test]
    fn overlapping_mappings_are_refused() {
        assert_eq!(to_watch(&[mapping(0, 10), mapping(9, 1)], 8), None);
    }
}
