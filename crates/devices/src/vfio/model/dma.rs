//! The DMA log of the model, checked as the kernel's core does it (`drivers/vfio/vfio_main.c`).

use std::collections::BTreeSet;

use super::super::device::DmaRange;

/// Ranges that fit one page of the kernel.
const MAX_RANGES: usize = 256;

#[derive(Debug)]
pub(super) struct Log {
    page_size: u64,
    ranges: Vec<DmaRange>,
    /// Numbers of pages that were written.
    written: BTreeSet<u64>,
}

fn end(range: DmaRange) -> Result<u64, i32> {
    range.iova.checked_add(range.length).ok_or(libc::EOVERFLOW)
}

impl Log {
    pub(super) fn new(hint: u64, smallest: u64, ranges: &[DmaRange]) -> Result<Self, i32> {
        if ranges.is_empty() || !hint.is_power_of_two() {
            return Err(libc::EINVAL);
        }
        if ranges.len() > MAX_RANGES {
            return Err(libc::E2BIG);
        }
        for (index, range) in ranges.iter().enumerate() {
            if !range.iova.is_multiple_of(hint) || !range.length.is_multiple_of(hint) || range.length == 0 {
                return Err(libc::EINVAL);
            }
            let to = end(*range)?;
            for other in &ranges[..index] {
                if range.iova < end(*other)? && other.iova < to {
                    return Err(libc::EINVAL);
                }
            }
        }
        Ok(Self { page_size: hint.max(smallest), ranges: ranges.to_vec(), written: BTreeSet::new() })
    }

    pub(super) fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Records a write of the device.
    pub(super) fn note(&mut self, write: DmaRange) {
        for range in &self.ranges {
            let from = write.iova.max(range.iova);
            let to = (write.iova.saturating_add(write.length)).min(range.iova + range.length);
            if from < to {
                self.written.extend(from / self.page_size..=(to - 1) / self.page_size);
            }
        }
    }

    pub(super) fn report(&mut self, range: DmaRange, page_size: u64, bitmap: &mut [u64]) -> Result<(), i32> {
        if page_size < 4096 || !page_size.is_power_of_two() || range.length == 0 {
            return Err(libc::EINVAL);
        }
        let to = end(range)?;
        if bitmap.len() as u64 * 64 < range.length.div_ceil(page_size) {
            return Err(libc::EFAULT);
        }
        let pages = range.iova / self.page_size..=(to - 1) / self.page_size;
        for page in self.written.range(pages.clone()) {
            let first = (page * self.page_size).max(range.iova) - range.iova;
            let last = ((page + 1) * self.page_size).min(to) - 1 - range.iova;
            for bit in first / page_size..=last / page_size {
                bitmap[(bit / 64) as usize] |= 1 << (bit % 64);
            }
        }
        // Pages that are partly outside of the range stay, and are reported again with the rest.
        let page_size = self.page_size;
        self.written
            .retain(|page| !(pages.contains(page) && page * page_size >= range.iova && (page + 1) * page_size <= to));
        Ok(())
    }
}
