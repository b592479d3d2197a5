//! Devices that write guest RAM without the dirty log's notice: the monitor waits for them between the collection of
//! the log and the reading of pages.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, PAGE, Running, Workload};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::{GuestState, MigrationError};
use sterna_engine::report::Report;
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_engine::vmm::{DestinationVmm, ResumeReason, SourceVmm, VmmError};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::reported::ReportedLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

/// Pages that the device writes at a time: more than fit the downtime, so that there is another round.
const AT_ONCE: u64 = 200;
/// How often the device begins.
const TIMES: u64 = 5;

/// A device with direct access to memory, like a disk that is read by `O_DIRECT`.
struct Disk {
    memory: Arc<Memory>,
    begun: AtomicU64,
    /// Pages that it has pinned and not written yet.
    pinned: Mutex<Vec<u64>>,
}

impl Disk {
    /// Pins pages and returns them. Pinning causes a page fault, by which the dirty log records them.
    fn begin(&self) -> std::ops::Range<u64> {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        if number >= TIMES {
            return 0..0;
        }
        let pages = number * AT_ONCE..(number + 1) * AT_ONCE;
        self.pinned.lock().unwrap().extend(pages.clone());
        pages
    }

    /// Writes the pinned pages, which causes no page fault.
    fn end(&self) {
        for page in self.pinned.lock().unwrap().drain(..) {
            self.memory.words(0)[page as usize * PAGE / 8].store(page + 1, Ordering::Relaxed);
        }
    }
}

/// The dirty log by write protection of a monitor with such a device, in the worst case: the device pins pages just
/// before each collection, and writes them later.
struct PinnedBefore(ReportedLog, Arc<Disk>);

impl DirtyLog for PinnedBefore {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.0.start()
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        if block == 0 {
            dirty.set(self.1.begin());
        }
        self.0.collect(block, dirty)
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.0.stop()
    }
}

/// A monitor that waits for its device, or does not.
struct WithDisk {
    monitor: Monitor,
    disk: Arc<Disk>,
    settles: Result<bool, &'static str>,
}

impl SourceVmm for WithDisk {
    fn name(&self) -> String {
        SourceVmm::name(&self.monitor)
    }

    fn settle_io(&mut self) -> Result<(), VmmError> {
        if self.settles? {
            self.disk.end();
        }
        Ok(())
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        self.monitor.pause()?;
        // As QEMU's `stop` does.
        self.disk.end();
        Ok(())
    }

    fn resume(&mut self, reason: ResumeReason) -> Result<(), VmmError> {
        SourceVmm::resume(&mut self.monitor, reason)
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.monitor.save(state)
    }
}

struct Other<'a>(&'a mut Monitor);

impl DestinationVmm for Other<'_> {
    fn name(&self) -> String {
        DestinationVmm::name(self.0)
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        self.0.load(state)
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        DestinationVmm::resume(self.0)
    }
}

/// Moves a guest whose device is busy. The destination compares its memory with the source's.
fn moved(settles: Result<bool, &'static str>) -> Result<Report, MigrationError> {
    let running = Running::default();
    let idle = Workload { writers: 0, span: 1, seed: 1, burst: 1 };
    let (source, destination) = (Memory::new(3000, 10), Memory::new(3000, 10));
    let (mut monitor, log) = Monitor::new(&source, &running, idle);
    let (mut to, _) = Monitor::new(&destination, &running, idle);
    monitor.start();
    let disk = Arc::new(Disk { memory: Arc::clone(&source), begun: AtomicU64::new(0), pinned: Mutex::default() });
    let log = PinnedBefore(log, Arc::clone(&disk));
    let mut from = WithDisk { monitor, disk, settles };
    let listening = Destination::new(destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let sent = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| listening.run(&mut Other(&mut to), &Cancel::new(), &()));
        let sent = Source::new(source.ram(), Box::new(log))
            .method(MethodChoice::default())
            .bandwidth(Some(20 << 20))
            .downtime(Duration::from_millis(1))
            .run(address, &Security::Insecure, &mut from, &Cancel::new(), &());
        // The destination reports the same error.
        let _ = receiving.join().unwrap();
        sent
    });
    assert_eq!((running.now(), running.ever_twice()), (1, false));
    sent
}

#[test]
fn pages_that_a_device_writes_after_the_log_was_collected_arrive() {
    within_a_minute(|| {
        let report = moved(Ok(true)).unwrap();
        assert!(report.rounds > TIMES, "{report:?}");
    });
}

#[test]
fn without_waiting_for_the_device_its_writes_are_lost() {
    within_a_minute(|| {
        let error = moved(Ok(false)).unwrap_err();
        assert!(error.reason.contains("the memory is not what the source had"), "{}", error.reason);
        assert_eq!(error.guest, GuestState::RunsAtSource);
    });
}

#[test]
fn if_the_device_does_not_settle_the_guest_continues() {
    within_a_minute(|| {
        let error = moved(Err("the disk hangs")).unwrap_err();
        assert!(error.reason.contains("does not settle: the disk hangs"), "{}", error.reason);
        assert_eq!(error.guest, GuestState::RunsAtSource);
    });
}
