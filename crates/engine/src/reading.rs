//! Guest RAM read into a batch: once per page, with the zero test and the checksum in the same pass.

use sterna_memory::PAGE_SIZE;
use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_memory::ram::{GuestRam, RamBlock, RamError};
use sterna_memory::snapshot::Snapshot;

use sterna_wire::limits::MAX_RUNS;
use sterna_wire::packet::{Run, RunKind};

use crate::batch::Batch;
use crate::in_place;
use crate::receive::PacketRules;

/// The buffer into which guest RAM is read. Each thread that reads has its own, which stays in that core's cache.
#[derive(Debug)]
pub(crate) struct Reading {
    batch: Batch,
    /// One bit per page of a batch.
    zero_map: Vec<u64>,
    checksums: bool,
    /// Zero pages that count as normal.
    ratio: NormalPageRatio,
    /// The RAM from which the batch's pages are sent directly.
    in_place: Option<GuestRam>,
}

impl Reading {
    /// Makes a buffer for batches of `rules`.
    pub(crate) fn new(rules: PacketRules) -> Self {
        let pages = rules.packet_size / PAGE_SIZE;
        Self {
            batch: Batch::new(rules.packet_size),
            zero_map: vec![0; pages.div_ceil(64)],
            checksums: rules.checksums,
            ratio: NormalPageRatio::default(),
            in_place: None,
        }
    }

    /// Sets the part of the zero pages that count as normal.
    pub(crate) fn with_ratio(self, ratio: NormalPageRatio) -> Self {
        Self { ratio, ..self }
    }

    /// Begins a batch of pages of `block`.
    pub(crate) fn begin(&mut self, block: u16) {
        self.batch.clear();
        self.batch.block = block;
        self.in_place = None;
    }

    /// As [`Reading::read`], but only finds the zero pages: the others will be sent directly from guest RAM.
    pub(crate) fn find_zero_pages(&mut self, ram: &GuestRam, runs: &[Run]) {
        if self.in_place.is_none() {
            self.in_place = Some(ram.clone());
        }
        in_place::find_zero_pages(ram, runs, &mut self.batch, &mut self.ratio);
    }

    /// Returns the block from which the batch's pages are sent directly, if they are.
    pub(crate) fn in_place(&self) -> Option<&RamBlock> {
        self.in_place.as_ref().map(|ram| &ram.blocks()[usize::from(self.batch.block)])
    }

    /// Returns the batch.
    pub(crate) fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Returns whether `runs` of `block` may be read into the batch: it must have no content yet, its pages ascend, and its table has a
    /// limit.
    pub(crate) fn takes(&self, block: u16, runs: &[Run]) -> bool {
        let Some(last) = self.batch.runs().last() else { return self.batch.block == block };
        let pages: usize = runs.iter().map(|run| run.count as usize).sum();
        self.batch.block == block
            && self.batch.in_window() == 0
            && runs.first().is_none_or(|run| last.end() <= run.first)
            && self.batch.runs().len() + pages <= MAX_RUNS
    }

    /// Adds `runs`, which [`Reading::takes`], with their kinds and without content, which is elsewhere.
    pub(crate) fn add(&mut self, runs: &[Run]) {
        let mut normal = 0;
        for run in runs {
            match run.kind {
                RunKind::Zero => self.batch.push_zero(run.first, run.count),
                RunKind::Normal => {
                    self.batch.push_normal(run.first, run.count, 0);
                    normal += u64::from(run.count) * PAGE_SIZE as u64;
                }
            }
        }
        self.batch.set_in_window(normal);
    }

    /// Reads the normal ones of `runs`, at most a packet's worth of pages that [`Reading::takes`], from `ram`, which the guest
    /// may be writing. The other runs are zero.
    ///
    /// # Errors
    /// RAM that lies in another process cannot be read.
    pub(crate) fn read(&mut self, ram: &GuestRam, runs: &[Run]) -> Result<(), RamError> {
        let block = &ram.blocks()[usize::from(self.batch.block)];
        debug_assert!(self.batch.content().is_empty() && self.in_place.is_none());
        let mut snapshot = Snapshot::new(self.batch.spare_mut(), &mut self.zero_map);
        if !self.checksums {
            snapshot = snapshot.unchecked();
        }
        if !self.ratio.is_none() {
            snapshot = snapshot.keeping(&mut self.ratio);
        }
        let normal = runs.iter().filter(|run| run.kind == RunKind::Normal);
        block.read(normal.map(|run| run.first..run.end()), &mut snapshot)?;
        let result = snapshot.finish();
        let mut seen = 0;
        for run in runs {
            if run.kind == RunKind::Zero {
                self.batch.push_zero(run.first, run.count);
                continue;
            }
            for page in run.first..run.end() {
                if self.zero_map[seen / 64] >> (seen % 64) & 1 == 1 {
                    self.batch.push_zero(page, 1);
                } else {
                    self.batch.push_normal(page, 1, PAGE_SIZE);
                }
                seen += 1;
            }
        }
        debug_assert_eq!(result.normal_bytes(), self.batch.content().len());
        if self.checksums {
            self.batch.set_checksum(result.checksum);
        }
        self.batch.set_in_window(result.normal_bytes() as u64);
        Ok(())
    }
}
