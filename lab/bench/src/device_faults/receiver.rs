//! A destination whose normal pages are written by a device, and its counters.

use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use sterna_idxd_model::memory::Watch;
use sterna_idxd_model::{DeviceConfig, Kind, Model, ModelConfig, QueueConfig};
use sterna_memory::PAGE_SIZE;
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_memory::received::{Freshness, ReceivedBitmap};
use sterna_offload::{Channel, Done, NEVER, Offload, Operation, Outcome, Region, Settings, Ticket};

use super::arrivals::{Arrival, Arrivals, PACKET, ROUNDS};
use super::blocking;
use crate::hosts::{HostsError, doing};
use crate::ram::guest::{Guest, Memory};

/// Pages in a huge page.
const HUGE: u64 = 512;

/// How the device writes a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// DSA moves it.
    Place,
    /// IAA decompresses it.
    Inflate,
}

impl Way {
    fn operation(self) -> Operation {
        match self {
            Self::Place => Operation::Place,
            Self::Inflate => Operation::Inflate,
        }
    }

    /// Batches in flight together. IAA has no batch operation: the descriptors of a batch are in the queue one by one,
    /// and the queue must hold them.
    fn in_flight(self) -> usize {
        match self {
            Self::Place => 16,
            Self::Inflate => 8,
        }
    }
}

/// The settings of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) way: Way,
    /// Zero pages for fresh memory are not touched.
    pub(super) bitmap: bool,
    /// Pages are populated before placing.
    pub(super) populate: bool,
    /// The device requests missing pages and waits; else the CPU finishes the work.
    pub(super) block: bool,
    /// The memory is advised to have huge pages, as by QEMU; else it has 4 KiB pages.
    pub(super) huge: bool,
}

/// Pages as they are sent: plain or deflated.
pub(super) struct Contents {
    pub(super) pages: Vec<Vec<u8>>,
    deflated: Vec<Vec<u8>>,
}

impl Contents {
    pub(super) fn new(pages: Vec<Vec<u8>>) -> Result<Self, HostsError> {
        // Without a device: the product's encoder of the same format.
        let offload = Offload::with_queues(Vec::new(), &settings()).map_err(doing("deflating pages"))?;
        let channel = offload.channel();
        let deflate = |page: &Vec<u8>| {
            let memory = Arc::new(page.clone());
            let start = std::ptr::NonNull::from(memory.as_slice()).cast::<u8>();
            // SAFETY: the region keeps the memory, which is only read.
            let region = unsafe { Region::new(start, memory.len(), Some(Arc::<Vec<u8>>::clone(&memory))) };
            let mut batch = channel.batch(Operation::Deflate);
            let range = region.range(0, PAGE_SIZE).map_err(doing("a page"))?;
            batch.push(&range).map_err(doing("a page"))?;
            let done = submit(&channel, batch).map(|()| channel.wait(NEVER))?;
            let deflated = done.and_then(|done| done.batch.deflated(0).map(<[u8]>::to_vec));
            deflated.ok_or_else(|| HostsError("a page of the benchmark does not deflate".into()))
        };
        let deflated = pages.iter().map(deflate).collect::<Result<_, _>>()?;
        Ok(Self { pages, deflated })
    }

    fn sent(&self, way: Way, number: usize) -> &[u8] {
        match way {
            Way::Place => &self.pages[number],
            Way::Inflate => &self.deflated[number],
        }
    }
}

/// The counters of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Pages that the device found missing or not writable: faults that ended a descriptor, and page requests.
    pub(super) device_faults: u64,
    /// Translations that the IOMMU had to invalidate.
    pub(super) flushes: u64,
    /// Those of them that the device had cached and used again.
    pub(super) used_flushes: u64,
    pub(super) page_requests: u64,
    pub(super) page_request_ns: u64,
    pub(super) longest_request_ns: u64,
    /// Page faults of the placing thread; those of the model's threads are the device's.
    pub(super) cpu_faults: u64,
    /// CPU time of the placing thread.
    pub(super) cpu_ns: f64,
    /// Items that were meant for a device and done by the CPU.
    pub(super) cpu_finished: u64,
    /// Pages that arrived, in all rounds.
    pub(super) arrived: u64,
    /// Normal pages, which the device was to write.
    pub(super) normal: u64,
}

/// Receives all rounds into fresh memory, and verifies the memory.
pub(super) fn receive(setting: Setting, arrivals: Arrivals, contents: &Contents) -> Result<Counts, HostsError> {
    // Declared before its users, so that it is unmapped last.
    let memory = if setting.huge { Memory::Anonymous } else { Memory::SmallPages };
    let guest = Guest::new(memory, arrivals.pages * PAGE_SIZE as u64).map_err(doing("guest memory"))?;
    let ram = guest.ram();
    let model = Model::start(device(setting)).map_err(doing("the model"))?;
    let queues = blocking::queues(&model, setting.block).map_err(HostsError)?;
    let offload = Offload::with_queues(queues, &settings()).map_err(doing("offload"))?;
    let mut receiver = Receiver::new(setting, &ram, &offload, contents)?;
    let mut counts = Counts::default();
    let before = model.counters();
    for round in 0..ROUNDS {
        let pages = arrivals.of(round);
        let (cpu, faults) = (cpu_ns(), cpu_faults()?);
        for packet in pages.chunks(PACKET) {
            receiver.packet(packet)?;
        }
        receiver.finish()?;
        counts.cpu_ns += cpu_ns() - cpu - std::mem::take(&mut receiver.watching_ns);
        counts.cpu_faults += cpu_faults()? - faults;
        receiver.changed += receiver.watch.count_changes().map_err(doing("the page tables"))?;
        counts.arrived += pages.len() as u64;
        counts.normal += pages.iter().filter(|arrival| arrival.content.is_some()).count() as u64;
    }
    let after = model.counters();
    counts.flushes = receiver.changed / if setting.huge { HUGE } else { 1 };
    counts.page_requests = after.page_requests - before.page_requests;
    counts.device_faults = after.faults - before.faults + counts.page_requests;
    counts.used_flushes = after.translation_flushes - before.translation_flushes;
    counts.page_request_ns = after.page_request_ns - before.page_request_ns;
    counts.longest_request_ns = after.longest_page_request_ns;
    let report = offload.report();
    if let Some(out) = report.taken_out.first() {
        return Err(HostsError(format!("{} was taken out of service: {}", out.device, out.reason)));
    }
    let engines = report.operations.iter().flat_map(|operation| &operation.engines);
    counts.cpu_finished = engines.flat_map(|engine| &engine.fallbacks).map(|(_, items)| items).sum();
    drop(receiver);
    offload.shutdown();
    arrivals.check(block(&ram), &contents.pages).map_err(HostsError)?;
    Ok(counts)
}

fn block(ram: &GuestRam) -> &RamBlock {
    &ram.blocks()[0]
}

fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.batch_pages = PACKET;
    // The model decompresses in software, maybe on a machine that has other work.
    settings.patience = Duration::from_secs(20);
    settings
}

fn device(setting: Setting) -> ModelConfig {
    let mut device = match setting.way {
        Way::Place => DeviceConfig::default(),
        Way::Inflate => DeviceConfig::iaa(),
    };
    let name = if device.kind == Kind::Dsa { "wq0.0" } else { "wq1.0" };
    device.queues = vec![QueueConfig {
        name: name.into(),
        size: 128,
        max_batch_size: PACKET as u32,
        block_on_fault: setting.block,
        ..QueueConfig::default()
    }];
    ModelConfig { devices: vec![device], ..ModelConfig::default() }
}

fn submit(channel: &Channel, batch: sterna_offload::Batch) -> Result<(), HostsError> {
    channel.submit(batch).map(Ticket::into_id).map(drop).map_err(|(reason, _)| HostsError(reason.to_string()))
}

struct Receiver<'a> {
    setting: Setting,
    ram: &'a GuestRam,
    contents: &'a Contents,
    received: Option<ReceivedBitmap>,
    region: Arc<Region>,
    channel: Channel,
    watch: Watch,
    /// Mapped pages whose mapping changed.
    changed: u64,
    /// CPU time of counting these, which is not part of receiving.
    watching_ns: f64,
}

impl<'a> Receiver<'a> {
    fn new(setting: Setting, ram: &'a GuestRam, offload: &Offload, contents: &'a Contents) -> Result<Self, HostsError> {
        let block = block(ram);
        let received = setting.bitmap.then(|| ReceivedBitmap::new(block.pages()));
        // SAFETY: the guest's memory is unmapped after offload has shut down, which waits for devices; there is no
        // reference to it.
        let region = unsafe { Region::new(block.start().expect("mapped here"), block.bytes() as usize, None) };
        let channel = offload.channel();
        // The pools are made before anything is counted.
        let pools: Vec<_> = (0..=setting.way.in_flight()).map(|_| channel.batch(setting.way.operation())).collect();
        drop(pools);
        let watch = Watch::new(block.start().expect("mapped here").as_ptr().addr() as u64, block.bytes() as usize);
        let watch = watch.map_err(doing("the page tables"))?;
        Ok(Self { setting, ram, contents, received, region, channel, watch, changed: 0, watching_ns: 0.0 })
    }

    /// Places a packet as the library's destination does: runs of one kind, in order.
    fn packet(&mut self, packet: &[Arrival]) -> Result<(), HostsError> {
        let block = block(self.ram);
        let mut batch = self.channel.batch(self.setting.way.operation());
        let alike = |a: &Arrival, b: &Arrival| b.page == a.page + 1 && a.content.is_some() == b.content.is_some();
        for run in packet.chunk_by(alike) {
            let pages = run[0].page..run[0].page + run.len() as u64;
            if run[0].content.is_none() {
                match &self.received {
                    Some(received) => received.zero(pages, Freshness::Fresh, |part| block.zero(part)),
                    // Reading it maps the zero page.
                    None => pages.filter(|page| !block.is_zero(*page)).for_each(|page| block.zero(page..page + 1)),
                }
                continue;
            }
            if let Some(received) = &self.received {
                received.mark(pages.clone());
            }
            if self.setting.populate {
                if self.setting.huge {
                    self.count_changes_before_writing(packet)?;
                }
                block.populate(pages).map_err(doing("populating"))?;
            }
            for Arrival { page, content } in run {
                let sent = self.contents.sent(self.setting.way, content.expect("a run of normal pages"));
                let range = self.region.range(*page as usize * PAGE_SIZE, PAGE_SIZE).map_err(doing("a page"))?;
                batch.push_input(sent.len(), &range).map_err(doing("a page"))?.copy_from_slice(sent);
            }
        }
        if batch.is_empty() {
            return Ok(());
        }
        if self.setting.huge {
            self.count_changes_before_writing(packet)?;
        }
        if self.channel.in_flight() >= self.setting.way.in_flight()
            && let Some(done) = self.channel.wait(NEVER)
        {
            placed(&done)?;
        }
        submit(&self.channel, batch)
    }

    /// In huge pages, a page that was read and one that is written next may be one huge page: its change is counted
    /// only if its mapping was read before the write.
    fn count_changes_before_writing(&mut self, packet: &[Arrival]) -> Result<(), HostsError> {
        let began = cpu_ns();
        let [first, last] = [0, packet.len() - 1].map(|at| packet[at].page / HUGE);
        for huge in first..=last {
            let pages = (huge * HUGE) as usize..((huge + 1) * HUGE) as usize;
            self.changed += self.watch.count_changes_in(pages).map_err(doing("the page tables"))?;
        }
        self.watching_ns += cpu_ns() - began;
        Ok(())
    }

    /// Waits for all batches: a round must end before its pages can arrive again.
    fn finish(&mut self) -> Result<(), HostsError> {
        while let Some(done) = self.channel.wait(NEVER) {
            placed(&done)?;
        }
        Ok(())
    }
}

fn placed(done: &Done) -> Result<(), HostsError> {
    let whole = |item| done.batch.placed(item) == Some(PAGE_SIZE);
    match done.outcome {
        Outcome::Done if (0..done.batch.len()).all(whole) => Ok(()),
        outcome => Err(HostsError(format!("a batch ended as {outcome:?}, or with pages that are not whole"))),
    }
}

/// CPU time of this thread.
fn cpu_ns() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Minor page faults of this thread (proc_pid_stat(5), field 10).
fn cpu_faults() -> Result<u64, HostsError> {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").map_err(doing("/proc/thread-self/stat"))?;
    // The name, field 2, is in brackets and may itself contain brackets and blanks.
    let minor = stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(7)?.parse().ok());
    minor.ok_or_else(|| HostsError(format!("/proc/thread-self/stat says {stat:?}")))
}

#[cfg(test)]
mod tests {
    use super::super::arrivals::contents;
    use super::*;

    fn counted(setting: Setting) -> Counts {
        let contents = Contents::new(contents()).unwrap();
        receive(setting, Arrivals { pages: 8192, normal_of_64: 32 }, &contents).unwrap()
    }

    #[test]
    fn without_bitmap_and_populating_every_page_written_first_is_a_fault_and_every_zero_page_replaced_is_a_flush() {
        for way in [Way::Place, Way::Inflate] {
            let setting = Setting { way, bitmap: false, populate: false, block: true, huge: false };
            let without = counted(setting);
            assert!(without.device_faults > 4096 && without.flushes > 20, "{without:?}");
            assert_eq!((without.page_requests, without.cpu_finished), (without.device_faults, 0), "{without:?}");
            assert!(without.page_request_ns / without.page_requests > 1000, "{without:?}");
            let with = counted(Setting { bitmap: true, ..setting });
            assert_eq!((with.flushes, with.used_flushes), (0, 0), "{with:?}");
            assert_eq!(with.device_faults, without.device_faults, "a page's first write is a fault either way");
            assert!(with.cpu_faults < without.cpu_faults, "{with:?} {without:?}");
        }
    }

    #[test]
    fn what_does_not_block_is_finished_by_the_cpu_and_what_was_populated_is_no_fault() {
        for way in [Way::Place, Way::Inflate] {
            let setting = Setting { way, bitmap: true, populate: false, block: false, huge: false };
            let late = counted(setting);
            assert!(late.device_faults > 4096 && late.page_requests == 0, "{late:?}");
            assert_eq!(late.cpu_finished, late.device_faults, "{late:?}");
            let ahead = counted(Setting { populate: true, ..setting });
            assert_eq!((ahead.device_faults, ahead.cpu_finished, ahead.flushes), (0, 0, 0), "{ahead:?}");
        }
    }
}
