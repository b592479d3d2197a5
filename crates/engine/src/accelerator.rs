//! A guest's RAM as accelerators use it, for one migration.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use sterna_codec::{Engines, Iaa};
use sterna_memory::bitmap::AtomicPageBitmap;
use sterna_memory::node::node_of;
use sterna_memory::ram::GuestRam;
use sterna_offload::{Channel, Guest, Nanos, Offload, Operation, Producer, Region, RegionBusy};
use sterna_wire::packet::{Run, RunKind};

/// How long abandoned work may still use a guest's RAM at the end.
const LEAVING: Duration = Duration::from_secs(2);

/// An accelerator that a migration uses, with the guest's RAM registered for it.
#[derive(Clone, Debug)]
pub struct Accelerator {
    offload: Arc<Offload>,
    ram: GuestRam,
    /// By block; none for a block that lies in another process.
    regions: Arc<[Option<Arc<Region>>]>,
    /// By block: pages that have been made present for devices.
    present: Arc<[AtomicPageBitmap]>,
    /// The guest's identity and share in offload.
    guest: Arc<Guest>,
    unverified: Arc<UnverifiedZeroPages>,
}

/// Pages of a guest that devices have called zero and the CPU has not verified.
#[derive(Debug)]
struct UnverifiedZeroPages {
    /// By block: pages that a device called zero.
    zero: Vec<AtomicPageBitmap>,
    /// How many wrong results of devices were found in this process before this guest.
    wrong_results_before: u64,
    doubts: Mutex<Vec<Doubt>>,
}

/// A page that a device called zero and the CPU then found not to be zero. Either the guest has written it in between, and the dirty log
/// will name it, or the device has erred.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Doubt {
    pub(crate) block: u16,
    pub(crate) page: u64,
    pub(crate) producer: Producer,
}

/// Maximum number of doubts that wait for the dirty log. A single page that the log does not name convicts the device, so more need not be
/// kept.
const MAX_DOUBTS: usize = 1024;

impl Accelerator {
    /// Makes `offload` usable for the guest whose RAM is `ram`, with `weight` beside the other guests of the process. Returns none where
    /// the CPU would do all of the work.
    pub fn new(offload: &Arc<Offload>, ram: &GuestRam, weight: u32) -> Option<Self> {
        let does = |operation| offload.accelerates(operation);
        (does(Operation::ZeroMap) || does(Operation::Deflate)).then(|| Self::over(offload, ram, weight))
    }

    /// Returns whether accelerators find zero pages and copy the others. Where they only compress, the CPU does both in one pass.
    pub(crate) fn finds_zero_pages(&self) -> bool {
        self.offload.accelerates(Operation::ZeroMap)
    }

    fn over(offload: &Arc<Offload>, ram: &GuestRam, weight: u32) -> Self {
        let regions = ram.blocks().iter().map(|block| Region::of_block(block, node_of(block.addresses()))).collect();
        let unverified = UnverifiedZeroPages {
            zero: ram.blocks().iter().map(|block| AtomicPageBitmap::new(block.pages())).collect(),
            wrong_results_before: offload.wrong_results(),
            doubts: Mutex::new(Vec::with_capacity(MAX_DOUBTS)),
        };
        let present = ram.blocks().iter().map(|block| AtomicPageBitmap::new(block.pages())).collect();
        let guest = offload.guest(weight);
        Self {
            offload: Arc::clone(offload),
            ram: ram.clone(),
            regions,
            present,
            guest,
            unverified: Arc::new(unverified),
        }
    }

    /// Makes the pages of `runs` present for devices, as far as they are populated. Each page once: if it has left the page tables since, the
    /// CPU does the device's work, which maps the page again.
    pub(crate) fn make_present(&self, block: u16, runs: &[Run]) {
        let (present, block) = (&self.present[usize::from(block)], &self.ram.blocks()[usize::from(block)]);
        for pages in runs.iter().filter(|run| run.kind == RunKind::Normal).map(|run| run.first..run.end()) {
            if present.test_and_set(pages.clone(), |_| {}) > 0 {
                block.map_populated(pages);
            }
        }
    }

    /// Records which pages of `block` a device has called zero.
    pub(crate) fn record_zero_pages(&self, block: u16, runs: &[Run]) {
        let zero = &self.unverified.zero[usize::from(block)];
        runs.iter().filter(|run| run.kind == RunKind::Zero).for_each(|run| zero.set(run.first..run.end()));
    }

    /// Records that `producer` called `page` zero, and that the CPU found the page not to be zero.
    pub(crate) fn doubt(&self, block: u16, page: u64, producer: Producer) {
        let mut doubts = self.doubts();
        if doubts.len() < MAX_DOUBTS {
            doubts.push(Doubt { block, page, producer });
        }
    }

    /// Takes all doubts. The caller judges them by a dirty log that is collected afterwards.
    pub(crate) fn take_doubts(&self) -> Vec<Doubt> {
        let mut doubts = self.doubts();
        if doubts.is_empty() { Vec::new() } else { std::mem::replace(&mut doubts, Vec::with_capacity(MAX_DOUBTS)) }
    }

    fn doubts(&self) -> MutexGuard<'_, Vec<Doubt>> {
        self.unverified.doubts.lock().expect("no thread panics with the lock held")
    }

    /// Calls `run` for all pages that devices have called zero, if a device of the process was found to give wrong results since this guest
    /// was added. Returns how many pages there were.
    pub(crate) fn take_suspect_pages(&self, mut run: impl FnMut(u16, Range<u64>)) -> u64 {
        if self.offload.wrong_results() == self.unverified.wrong_results_before {
            return 0;
        }
        let mut taken = 0;
        for (number, pages) in self.unverified.zero.iter().enumerate() {
            pages.take_runs(0..pages.pages(), |pages| {
                taken += pages.end - pages.start;
                run(number as u16, pages);
            });
        }
        taken
    }

    /// Returns `others` and the engine `iaa`, if there is one. `verifying`: whether IAA's output is decoded and compared.
    pub(crate) fn engines(&self, others: Engines, verifying: bool) -> Engines {
        match Iaa::new(&self.offload, &self.guest) {
            Some(iaa) => others.with_iaa(Arc::new(iaa.verifying(verifying))),
            None => others,
        }
    }

    /// Returns a channel of this guest, with its memory on the NUMA node of the guest's largest block.
    pub(crate) fn channel(&self) -> Channel {
        let channel = self.offload.channel_for(&self.guest);
        let largest =
            self.regions.iter().flatten().filter(|region| region.node().is_some()).max_by_key(|region| region.bytes());
        match largest.and_then(|region| region.node()) {
            Some(node) => channel.near(node),
            None => channel,
        }
    }

    /// Sets whether the guest's work is urgent, on all its channels: it is while the guest is paused.
    pub(crate) fn set_urgent(&self, urgent: bool) {
        self.guest.set_urgent(urgent);
    }

    /// Returns the offload that does the work.
    pub fn offload(&self) -> &Arc<Offload> {
        &self.offload
    }

    /// Returns the guest's RAM.
    pub(crate) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Returns the region of a block, unless the block lies in another process.
    pub(crate) fn region(&self, block: u16) -> Option<&Arc<Region>> {
        self.regions[usize::from(block)].as_ref()
    }

    /// Accepts no new work on this RAM, and waits up to 2 s for the work under way.
    ///
    /// # Errors
    /// A device out of service may still read this RAM (a source gives no device anything to write).
    pub fn retire(&self) -> Result<(), RegionBusy> {
        self.retire_by(self.offload.deadline(LEAVING))
    }

    fn retire_by(&self, deadline: Nanos) -> Result<(), RegionBusy> {
        let regions: Vec<_> = self.regions.iter().flatten().cloned().collect();
        self.offload.retire(&regions, deadline)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use sterna_memory::PAGE_SIZE;
    use sterna_memory::ram::{Backing, RamBlock};
    use sterna_offload::{Accelerators, Batch, NEVER, Reason, Settings};

    /// Returns an accelerator whose work is all done by the CPU.
    pub(crate) fn of_cpu(ram: &GuestRam) -> Accelerator {
        over(&Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap(), ram)
    }

    pub(crate) fn over(offload: &Arc<Offload>, ram: &GuestRam) -> Accelerator {
        Accelerator::over(offload, ram, 1)
    }

    /// Returns RAM with one block for each of `contents`, whose pages are filled with these bytes.
    pub(crate) fn ram_of(contents: &[&[u8]]) -> GuestRam {
        let block = |(number, content): (usize, &&[u8])| {
            // Leaked, so that it stays mapped as long as anything may look at it.
            let room = vec![0u8; (content.len() + 1) * PAGE_SIZE].leak();
            let aligned = room.as_ptr().align_offset(PAGE_SIZE);
            let pages = &mut room[aligned..][..content.len() * PAGE_SIZE];
            pages.chunks_mut(PAGE_SIZE).zip(*content).for_each(|(page, byte)| page.fill(*byte));
            let bytes = pages.len();
            // SAFETY: leaked, and nothing refers to it any more.
            unsafe { RamBlock::new(number.to_string(), std::ptr::NonNull::from(pages).cast(), bytes, Backing::Other) }
        };
        GuestRam::new(contents.iter().enumerate().map(block).collect()).unwrap()
    }

    fn look_at(accelerator: &Accelerator, channel: &Channel, block: u16) -> Result<(), (Reason, Batch)> {
        let mut batch = channel.batch(Operation::ZeroMap);
        batch.push(&accelerator.region(block).unwrap().range(0, PAGE_SIZE).unwrap()).unwrap();
        channel.submit(batch).map(sterna_offload::Ticket::into_id).map(drop)
    }

    #[test]
    fn where_one_block_stays_busy_the_others_take_no_new_work_either() {
        let accelerator = of_cpu(&ram_of(&[&[0], &[0]]));
        let channel = accelerator.channel();
        look_at(&accelerator, &channel, 0).unwrap();
        let now = accelerator.offload().now();
        assert_eq!(accelerator.retire_by(now).map_err(|busy| busy.uses), Err(1));
        for block in 0..2 {
            let refused = look_at(&accelerator, &channel, block).map_err(|(reason, _)| reason);
            assert_eq!(refused, Err(Reason::Retired), "block {block}");
        }
        let _ = channel.wait(NEVER).unwrap();
        assert_eq!(accelerator.retire(), Ok(()));
    }
}
