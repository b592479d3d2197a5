//! The process's real page tables, real threads, and real instructions that trap.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use sterna_idxd_model::config::{Script, ScriptedFault};
use sterna_idxd_model::memory::Watch;
use sterna_idxd_model::{DeviceConfig, Mode, Model, ModelConfig, QueueConfig};

use crate::common::*;

const READ: i32 = libc::PROT_READ;
const BOTH: i32 = libc::PROT_READ | libc::PROT_WRITE;
const PAGE: usize = 4096;

/// A manual device on this process's memory, with a touched page for records.
struct Real {
    model: Arc<Model>,
    records: Mapping,
    /// Touched pages; each is filled with its number + 1.
    data: Mapping,
}

impl Real {
    fn new() -> Real {
        let mut device = DeviceConfig::default();
        device.queues[0].block_on_fault = true;
        let model = Model::manual(ModelConfig { devices: vec![device], ..ModelConfig::default() }).unwrap();
        let (records, data) = (Mapping::anonymous(PAGE, BOTH), Mapping::anonymous(16 * PAGE, BOTH));
        records.put(0, &[0; 64]);
        for page in 0..16 {
            data.put(page * PAGE, &[page as u8 + 1; PAGE]);
        }
        Real { model, records, data }
    }

    fn run(&self, raw: Raw) -> Seen {
        self.records.put(0, &[0; 32]);
        assert!(self.model.queue("wq0.0").unwrap().enqcmd(&raw.0));
        self.model.settle();
        seen(&self.records.get(0, 32))
    }

    fn copy_to(&self, address: u64, pages: usize) -> Raw {
        memmove(self.records.address, self.data.address, address, (pages * PAGE) as u32)
    }

    fn copy_from(&self, address: u64, pages: usize) -> Raw {
        memmove(self.records.address, address, self.data.address + 8 * PAGE as u64, (pages * PAGE) as u32)
    }
}

#[test]
fn an_untouched_page_faults_and_a_page_request_maps_it() {
    let real = Real::new();
    let fresh = Mapping::anonymous(4 * PAGE, BOTH);
    fresh.put(0, &[9]);
    let record = real.run(real.copy_to(fresh.address, 3));
    assert_eq!((record.status, record.completed, record.fault), (0x83, 4096, fresh.address + 4096));
    let record = real.run(real.copy_from(fresh.address + 2 * PAGE as u64, 1));
    assert_eq!((record.status, record.completed), (0x03, 0));
    let record = real.run(real.copy_to(fresh.address, 3).flags(BLOCK));
    assert_eq!(record.status, 1);
    assert_eq!(fresh.get(PAGE, 1), [2]);
    let counters = real.model.counters();
    assert_eq!((counters.faults, counters.page_requests), (2, 2));
    let (sum, longest) = (counters.page_request_ns, counters.longest_page_request_ns);
    assert!(sum >= 2_000 && longest < sum && 2 * longest >= sum && counters.device_ns >= sum, "{counters:?}");
}

#[test]
fn a_page_request_for_a_write_takes_one_fault_and_maps_no_zero_page_first() {
    let real = Real::new();
    let faults = || {
        // SAFETY: a plain structure of numbers, filled by the call.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: as above; the pointer is to it.
        assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }, 0);
        usage.ru_minflt
    };
    let fresh = Mapping::anonymous(512 * PAGE, BOTH);
    fresh.advise(0, 512 * PAGE, libc::MADV_NOHUGEPAGE);
    let before = faults();
    for page in (0..512).step_by(8) {
        assert_eq!(real.run(real.copy_to(fresh.address + (page * PAGE) as u64, 8).flags(BLOCK)).status, 1);
    }
    assert_eq!(real.model.counters().page_requests, 512);
    let taken = faults() - before;
    assert!((512..700).contains(&taken), "{taken} faults");
}

#[test]
fn the_shared_zero_page_can_be_read_and_not_written() {
    let real = Real::new();
    let fresh = Mapping::anonymous(2 * PAGE, BOTH);
    assert_eq!(fresh.get(0, 1), [0], "reading maps the zero page");
    assert_eq!(real.run(real.copy_from(fresh.address, 1)).status, 1);
    let record = real.run(real.copy_to(fresh.address, 1));
    assert_eq!((record.status, record.completed, record.fault), (0x83, 0, fresh.address));
    assert_eq!(real.run(real.copy_to(fresh.address, 1).flags(BLOCK)).status, 1, "copied on write");
    assert_eq!(fresh.get(0, 1), [1]);
}

#[test]
fn pages_without_permission_fault_and_cannot_be_brought() {
    let real = Real::new();
    let guarded = Mapping::anonymous(3 * PAGE, BOTH);
    guarded.put(0, &[3; 3 * PAGE]);
    guarded.protect(PAGE, PAGE, libc::PROT_NONE);
    guarded.protect(2 * PAGE, PAGE, READ);
    let record = real.run(real.copy_from(guarded.address, 3));
    assert_eq!((record.status, record.completed, record.fault), (0x03, 4096, guarded.address + 4096));
    assert_eq!(real.run(real.copy_from(guarded.address, 3).flags(BLOCK)).status, 0x04);
    let read_only = guarded.address + 2 * PAGE as u64;
    assert_eq!(real.run(real.copy_from(read_only, 1)).status, 1);
    assert_eq!(real.run(real.copy_to(read_only, 1)).status, 0x83);
    assert_eq!(real.run(real.copy_to(read_only, 1).flags(BLOCK)).status, 0x84);
    assert_eq!(guarded.get(2 * PAGE, 1), [3]);
}

#[test]
fn unmapped_addresses_fault() {
    let real = Real::new();
    for address in [0, 0x1000, 0x7fff_ffff_f000, 0xffff_8000_0000_0000, 0xffff_ffff_ffff_0000] {
        for block in [0, BLOCK] {
            let status = if block == 0 { 3 } else { 4 };
            assert_eq!(real.run(real.copy_from(address, 1).flags(block)).status, status, "{address:#x}");
            assert_eq!(real.run(real.copy_to(address, 1).flags(block)).status, status | 0x80, "{address:#x}");
        }
    }
    assert_eq!(real.run(batch(real.records.address, 0x1000, 2)).status, 6);
}

fn memfd(pages: usize) -> OwnedFd {
    // SAFETY: a name that ends in zero; the descriptor is new and nobody else's.
    let file = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"model".as_ptr(), 0)) };
    // SAFETY: an open file.
    assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), (pages * PAGE) as i64) }, 0);
    file
}

#[test]
fn pages_beyond_the_end_of_a_file_fault() {
    let real = Real::new();
    let file = memfd(1);
    let shared = Mapping::map(3 * PAGE, BOTH, libc::MAP_SHARED, file.as_raw_fd());
    shared.put(0, &[1]);
    let record = real.run(real.copy_to(shared.address, 2));
    assert_eq!((record.status, record.completed, record.fault), (0x83, 4096, shared.address + 4096));
    assert_eq!(real.run(real.copy_from(shared.address, 2).flags(BLOCK)).status, 0x04);
    assert_eq!(real.run(real.copy_to(shared.address, 2).flags(BLOCK)).status, 0x84);
    assert_eq!(shared.get(0, 1), [1], "the data's first page");
}

#[test]
fn a_private_page_of_a_file_is_copied_on_write_only_after_a_request() {
    let real = Real::new();
    let file = memfd(2);
    let shared = Mapping::map(2 * PAGE, BOTH, libc::MAP_SHARED, file.as_raw_fd());
    shared.put(0, &[7; 2 * PAGE]);
    let private = Mapping::map(2 * PAGE, BOTH, libc::MAP_PRIVATE, file.as_raw_fd());
    assert_eq!(private.get(0, 1), [7]);
    assert_eq!(real.run(real.copy_to(private.address, 1)).status, 0x83, "its page is the file's");
    assert_eq!(real.run(real.copy_to(private.address, 1).flags(BLOCK)).status, 1);
    assert_eq!((shared.get(0, 1), private.get(0, 1)), (vec![7], vec![1]));
    assert_eq!(real.run(real.copy_to(shared.address, 1)).status, 1, "a shared one is written in place");
}

#[test]
fn huge_pages_are_like_small_ones() {
    // Where the kernel has no huge pages these are small pages, with the same results.
    const HUGE: usize = 2 << 20;
    let real = Real::new();
    for touched in [true, false] {
        let mapping = Mapping::anonymous(2 * HUGE, BOTH);
        mapping.advise(0, 2 * HUGE, libc::MADV_HUGEPAGE);
        let at = (mapping.address as usize).next_multiple_of(HUGE) - mapping.address as usize;
        if touched {
            mapping.put(at, &[1]);
        } else {
            assert_eq!(mapping.get(at, 1), [0], "reading maps the huge zero page");
        }
        let address = mapping.address + at as u64;
        assert_eq!(real.run(real.copy_from(address, 1)).status, 1, "touched {touched}");
        let status = real.run(real.copy_to(address, 1)).status;
        assert_eq!(status, if touched { 1 } else { 0x83 }, "touched {touched}");
        assert_eq!(real.run(real.copy_to(address, 1).flags(BLOCK)).status, 1);
    }
}

/// Opens a userfaultfd and registers a mapping for missing pages. None where the kernel does not permit it.
fn userfaultfd(mapping: &Mapping) -> Option<OwnedFd> {
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    // SAFETY: the call takes flags and nothing else.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the descriptor is new and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut api = [0xaa_u64, 0, 0];
    let mut register = [mapping.address, mapping.bytes as u64, 1, 0];
    // SAFETY: both structures have the size that the request's number says.
    unsafe {
        assert_eq!(libc::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()), 0);
        assert_eq!(libc::ioctl(fd.as_raw_fd(), UFFDIO_REGISTER, register.as_mut_ptr()), 0);
    }
    Some(fd)
}

#[test]
fn missing_pages_of_userfaultfd_memory_are_never_served_to_a_device() {
    let real = Real::new();
    let watched = Mapping::anonymous(2 * PAGE, BOTH);
    watched.put(0, &[4; PAGE]);
    let Some(_fd) = userfaultfd(&watched) else {
        eprintln!("skipped: this process may not use userfaultfd");
        return;
    };
    assert_eq!(real.run(real.copy_to(watched.address, 1)).status, 1, "a page that is present");
    let missing = watched.address + PAGE as u64;
    assert_eq!(real.run(real.copy_from(missing, 1)).status, 0x03);
    assert_eq!(real.run(real.copy_to(missing, 1)).status, 0x83);
    assert_eq!(real.run(real.copy_from(missing, 1).flags(BLOCK)).status, 0x04, "and no hang");
    assert_eq!(real.run(real.copy_to(missing, 1).flags(BLOCK)).status, 0x84);
}

#[test]
fn a_page_shared_with_a_child_is_copied_on_write() {
    let real = Real::new();
    let page = Mapping::anonymous(PAGE, BOTH);
    page.advise(0, PAGE, libc::MADV_DOFORK);
    page.put(0, &[6; PAGE]);
    let mut pipe = [0; 2];
    // SAFETY: an array of two; the child only waits for the end of the pipe and exits without running our code.
    let child = unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        match libc::fork() {
            0 => {
                libc::close(pipe[1]);
                libc::read(pipe[0], (&raw mut pipe).cast(), 1);
                libc::_exit(0);
            }
            child => child,
        }
    };
    let before = real.run(real.copy_to(page.address, 1));
    let record = real.run(real.copy_to(page.address, 1).flags(BLOCK));
    // SAFETY: the pipe's ends and the child are this test's.
    unsafe {
        libc::close(pipe[1]);
        libc::close(pipe[0]);
        assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
    }
    assert_eq!((before.status, before.completed), (0x83, 0));
    assert_eq!(record.status, 1);
    assert_eq!(page.get(0, 1), [1]);
}

#[test]
fn translations_are_flushed_when_pages_change() {
    let real = Real::new();
    let page = Mapping::anonymous(PAGE, BOTH);
    page.put(0, &[6; PAGE]);
    assert_eq!(real.run(real.copy_to(page.address, 1)).status, 1);
    let before = real.model.counters();
    assert!(before.translation_misses >= 3, "{before:?}");
    assert_eq!(real.run(real.copy_to(page.address, 1)).status, 1);
    assert_eq!(real.model.counters().translation_misses, before.translation_misses, "cached");
    page.advise(0, PAGE, libc::MADV_DONTNEED);
    assert_eq!(real.run(real.copy_to(page.address, 1)).status, 0x83);
    assert_eq!(real.model.counters().translation_flushes, before.translation_flushes + 1);
    assert_eq!(real.model.counters().faults, 1);
}

#[test]
fn a_watch_counts_changed_mappings_whether_or_not_a_device_had_translated_them() {
    let real = Real::new();
    let fresh = Mapping::anonymous(100 * PAGE, BOTH);
    let mut watch = Watch::new(fresh.address, 100 * PAGE).unwrap();
    for page in 0..40 {
        assert_eq!(fresh.get(page * PAGE, 1), [0], "reading maps the zero page");
    }
    fresh.put(99 * PAGE, &[1]);
    assert_eq!(watch.count_changes().unwrap(), 0, "nothing was mapped there before");
    for page in 0..30 {
        fresh.put(page * PAGE, &[1]);
    }
    fresh.put(50 * PAGE, &[1]);
    assert_eq!(watch.count_changes_in(25..100).unwrap(), 5);
    assert_eq!(
        watch.count_changes_in(0..10).unwrap() + watch.count_changes().unwrap(),
        25,
        "the zero page was mapped, and is replaced"
    );
    assert_eq!(real.run(real.copy_to(fresh.address + 35 * PAGE as u64, 1).flags(BLOCK)).status, 1);
    fresh.put(0, &[2]);
    assert_eq!(
        watch.count_changes().unwrap(),
        1,
        "a device replaces the zero page too; a write to a page of its own changes no mapping"
    );
    fresh.advise(10 * PAGE, 20 * PAGE, libc::MADV_DONTNEED);
    assert_eq!(watch.count_changes().unwrap(), 20, "unmapped");
    assert_eq!(watch.count_changes().unwrap(), 0);
    assert_eq!(real.model.counters().translation_flushes, 1, "of the translation that the device has cached");
}

#[test]
fn memory_unmapped_in_flight_is_a_fault_never_a_signal() {
    let mut device = DeviceConfig::default();
    device.queues[0].size = 64;
    let model = Model::start(ModelConfig { devices: vec![device], ..ModelConfig::default() }).unwrap();
    let queue = model.queue("wq0.0").unwrap();
    let records = Mapping::anonymous(PAGE, BOTH);
    let data = Mapping::anonymous(64 * PAGE, BOTH);
    data.put(0, &vec![1; 64 * PAGE]);
    let mut seen_statuses = std::collections::BTreeSet::new();
    for round in 0..6000 {
        // Some submissions must come after the unmapping.
        if round >= 60 && seen_statuses.contains(&0x83) {
            break;
        }
        let target = Mapping::anonymous(64 * PAGE, BOTH);
        target.advise(0, 64 * PAGE, libc::MADV_POPULATE_WRITE);
        records.put(0, &[0; PAGE]);
        for slot in 0..32 {
            let raw = memmove(records.address + 32 * slot, data.address, target.address, 64 * PAGE as u32);
            while !queue.enqcmd(&raw.0) {
                std::hint::spin_loop();
            }
        }
        for _ in 0..round % 60 * 50 {
            std::hint::spin_loop();
        }
        target.vanish();
        let deadline = Instant::now() + Duration::from_secs(300);
        for slot in 0..32 {
            while records.byte(32 * slot).load(Ordering::Acquire) == 0 {
                assert!(Instant::now() < deadline, "record {slot} of round {round}");
                thread::yield_now();
            }
            seen_statuses.insert(records.byte(32 * slot).load(Ordering::Acquire));
        }
    }
    assert!(seen_statuses.is_subset(&[0x01, 0x83].into()), "{seen_statuses:x?}");
    assert!(seen_statuses.contains(&0x83), "some submissions came after the unmapping: {seen_statuses:x?}");
}

fn wait_for(records: &Mapping, slot: usize) -> Seen {
    let deadline = Instant::now() + Duration::from_secs(300);
    while records.byte(32 * slot).load(Ordering::Acquire) == 0 {
        assert!(Instant::now() < deadline, "record {slot}");
        thread::yield_now();
    }
    seen(&records.get(32 * slot, 32))
}

#[test]
fn when_the_status_is_seen_the_rest_of_the_record_is_there() {
    let model = Model::start(ModelConfig::dsa()).unwrap();
    let queue = model.queue("wq0.0").unwrap();
    let (records, data) = (Mapping::anonymous(PAGE, BOTH), Mapping::anonymous(PAGE, BOTH));
    records.put(0, &[0; PAGE]);
    data.put(0, b"123456789");
    for round in 0..5000 {
        records.put(0, &[0; 32]);
        while !queue.enqcmd(&crc(records.address, data.address, 9, 0).0) {
            thread::yield_now();
        }
        while records.byte(0).load(Ordering::Acquire) == 0 {
            std::hint::spin_loop();
        }
        assert_eq!(records.get(16, 4), 0xe306_9283_u32.to_le_bytes(), "round {round}");
    }
}

#[test]
fn engines_are_threads_and_are_gone_with_the_model() {
    let named = |name: &str| {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks
            .filter(|task| std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.starts_with(name)))
            .count()
    };
    let device = DeviceConfig { name: "dsa77".into(), queues: vec![queue("wq77.0")], ..DeviceConfig::default() };
    let model = Model::start(ModelConfig { devices: vec![device], ..ModelConfig::default() }).unwrap();
    let records = Mapping::anonymous(PAGE, BOTH);
    records.put(0, &[0; PAGE]);
    let queue = model.queue("wq77.0").unwrap();
    for round in 0..200 {
        records.put(0, &[0; 256]);
        for slot in 0..8 {
            while !queue.enqcmd(&noop(records.address + 32 * slot).0) {
                thread::yield_now();
            }
        }
        assert!((0..8).all(|slot| wait_for(&records, slot).status == 1), "round {round}");
    }
    // A thread sets its name once it runs, and leaves /proc only after the joining thread has been woken.
    let come_to = |count: usize| {
        let deadline = Instant::now() + Duration::from_secs(300);
        while named("dsa77-engine") != count && Instant::now() < deadline {
            thread::yield_now();
        }
        named("dsa77-engine")
    };
    assert_eq!(come_to(4), 4);
    drop(model);
    assert_eq!(come_to(0), 0);
    assert!(!queue.enqcmd(&noop(0).0), "a queue that outlives its model accepts nothing");
    assert_eq!(queue.write(&noop(0).0), Err(libc::EAGAIN));
}

#[test]
fn a_model_is_dropped_with_work_in_flight_and_with_hung_engines() {
    let records = Mapping::anonymous(PAGE, BOTH);
    let data = Mapping::anonymous(512 * PAGE, BOTH);
    data.put(0, &vec![1; 512 * PAGE]);
    for round in 0..20 {
        let model = Model::start(ModelConfig { paced: round % 2 == 0, ..ModelConfig::dsa() }).unwrap();
        if round % 3 == 0 {
            model.inject(&Script { limit: Some(2), what: ScriptedFault::Hang, ..Script::default() });
        }
        model.inject(&Script {
            every: Some(4),
            what: ScriptedFault::Late { delay_ns: 50_000_000 },
            ..Script::default()
        });
        let queue = model.queue("wq0.0").unwrap();
        for _ in 0..16 {
            queue.enqcmd(&memmove(records.address, data.address, data.address + (1 << 20), 1 << 20).0);
        }
        drop(model);
    }
}

#[test]
fn paced_completions_take_the_time_that_the_timing_says() {
    let config = ModelConfig { paced: true, ..ModelConfig::dsa() };
    let model = Model::start(config).unwrap();
    let records = Mapping::anonymous(PAGE, BOTH);
    records.put(0, &[0; PAGE]);
    model.inject(&Script { what: ScriptedFault::Late { delay_ns: 30_000_000 }, ..Script::default() });
    let started = Instant::now();
    assert!(model.queue("wq0.0").unwrap().enqcmd(&noop(records.address).0));
    assert_eq!(wait_for(&records, 0).status, 1);
    assert!(started.elapsed() >= Duration::from_millis(30), "{:?}", started.elapsed());
}

#[test]
fn the_tree_has_the_files_that_the_kernel_has() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = DeviceConfig::default();
    device.queues.push(QueueConfig { mode: Mode::Dedicated, size: 8, ..queue("wq0.1") });
    let config = ModelConfig { devices: vec![device, DeviceConfig::iaa()], ..ModelConfig::default() };
    let model = Model::manual(config).unwrap();
    let tree = model.write_tree(directory.path()).unwrap();
    let read = |path: &str| std::fs::read_to_string(tree.sysfs.join(path)).map(|text| text.trim_end().to_owned());
    assert_eq!(read("dsa0/version").unwrap(), "0x100");
    assert_eq!(read("wq0.1/mode").unwrap(), "dedicated");
    assert_eq!(read("dsa0/wq0.1/size").unwrap(), "8");
    assert_eq!(read("wq0.0/threshold").unwrap(), "16");
    assert_eq!(read("engine0.3/group_id").unwrap(), "0");
    assert_eq!(read("group0.0/work_queues").unwrap(), "wq0.0 wq0.1");
    let op_cap = read("dsa0/op_cap").unwrap();
    assert_eq!(op_cap.split(',').count(), 8);
    assert!(op_cap.ends_with(",00000001,000303fd"), "batches are hidden on version 1: {op_cap}");
    assert!(read("wq1.0/max_batch_size").is_err(), "IAA has no batches");
    assert_eq!(read("iax1/numa_node").unwrap(), "0");
    assert!(tree.dev.join("dsa/wq0.1").is_file() && tree.dev.join("iax/wq1.0").is_file());
    model.write_tree(directory.path()).expect("a second time");
}

#[cfg(target_arch = "x86_64")]
mod instructions {
    use super::*;
    use std::arch::asm;
    use std::sync::RwLock;
    use sterna_idxd_model::trap;

    #[repr(align(64))]
    struct Aligned([u8; 64]);

    /// The portal of a queue, mapped as a driver maps it.
    fn portal(model: &Model, name: &str) -> (tempfile::TempDir, Mapping) {
        let directory = tempfile::tempdir().unwrap();
        let tree = model.write_tree(directory.path()).unwrap();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(tree.dev.join("dsa").join(name)).unwrap();
        let mapping = Mapping::map(PAGE, libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd());
        (directory, mapping)
    }

    /// Held shared by threads that trap and exclusively by a thread that forks: a child must not inherit a locked lock.
    static FORK: RwLock<()> = RwLock::new(());

    /// Real instructions are trapped on every processor of this architecture.
    fn install() {
        trap::install().expect("without traps these tests test nothing");
    }

    fn enqcmd(portal: u64, descriptor: &Aligned) -> bool {
        let retry: u8;
        // SAFETY: the portal is mapped; the flags are declared clobbered by default.
        unsafe {
            asm!("enqcmd {portal}, [{source}]", "setz {retry}",
                portal = in(reg) portal, source = in(reg) descriptor.0.as_ptr(), retry = out(reg_byte) retry);
        }
        retry == 0
    }

    #[test]
    fn a_real_enqcmd_reaches_the_model_and_zf_is_retry() {
        install();
        let _guard = FORK.read().unwrap();
        let mut device = DeviceConfig::default();
        device.queues[0].size = 2;
        let model = Model::manual(ModelConfig { devices: vec![device], ..ModelConfig::default() }).unwrap();
        let (_directory, portal) = portal(&model, "wq0.0");
        let records = Mapping::anonymous(PAGE, BOTH);
        records.put(0, &[0; PAGE]);
        let descriptor = Aligned(noop(records.address + 64).0);
        let before = trap::trapped();
        assert!(enqcmd(portal.address, &descriptor));
        assert!(enqcmd(portal.address + 64 * 63, &descriptor), "any slot of the page");
        assert!(!enqcmd(portal.address, &descriptor), "full");
        let after = trap::trapped();
        assert!(after.enqcmd >= before.enqcmd + 3 && after.retries > before.retries);
        model.settle();
        assert_eq!(records.get(64, 1), [1]);
    }

    #[test]
    fn a_real_movdir64b_reaches_a_dedicated_queue_with_other_forms_of_address() {
        install();
        let _guard = FORK.read().unwrap();
        let mut device = DeviceConfig::default();
        device.queues[0].mode = Mode::Dedicated;
        let model = Model::manual(ModelConfig { devices: vec![device], ..ModelConfig::default() }).unwrap();
        let (_directory, portal) = portal(&model, "wq0.0");
        let records = Mapping::anonymous(PAGE, BOTH);
        records.put(0, &[0; PAGE]);
        let descriptors = [noop(records.address).0, noop(records.address + 32).0].concat();
        // SAFETY: the portal is mapped, and both sources are within the vector.
        unsafe {
            asm!("movdir64b {portal}, [{source}]", portal = in(reg) portal.address, source = in(reg) descriptors.as_ptr());
            asm!("movdir64b r11, [{base} + {index} * 8 - 64]", in("r11") portal.address + 128,
                base = in(reg) descriptors.as_ptr(), index = in(reg) 16_u64);
        }
        model.settle();
        assert_eq!((records.get(0, 1), records.get(32, 1)), (vec![1], vec![1]));
    }

    #[test]
    fn a_trapped_instruction_leaves_flags_and_registers_as_the_cpu_does() {
        install();
        let _guard = FORK.write().unwrap();
        let model = Model::manual(ModelConfig::dsa()).unwrap();
        let (_directory, portal) = portal(&model, "wq0.0");
        let descriptor = Aligned(noop(0).0);
        let (flags, kept): (u64, u64);
        // SAFETY: the portal is mapped; the stack is as it was in the end.
        unsafe {
            asm!(
                "stc", "mov {kept}, 0x1234", "enqcmd {portal}, [{source}]", "pushfq", "pop {flags}",
                portal = in(reg) portal.address, source = in(reg) descriptor.0.as_ptr(),
                kept = out(reg) kept, flags = out(reg) flags,
            );
        }
        assert_eq!(flags & 0x8d5, 0, "CF, PF, AF, ZF, SF and OF are cleared: {flags:#x}");
        assert_eq!(kept, 0x1234);
    }

    /// Returns the signal that ends a child process in which `body` runs.
    fn ends_with(body: impl FnOnce()) -> i32 {
        // SAFETY: the child runs one instruction that ends it, or exits at once.
        unsafe {
            match libc::fork() {
                0 => {
                    body();
                    libc::_exit(0);
                }
                child => {
                    let mut status = 0;
                    assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                    if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { 0 }
                }
            }
        }
    }

    #[test]
    fn other_illegal_instructions_keep_their_signal() {
        install();
        let _guard = FORK.write().unwrap();
        let model = Model::manual(ModelConfig::dsa()).unwrap();
        let (_directory, portal) = portal(&model, "wq0.0");
        let elsewhere = Mapping::anonymous(PAGE, BOTH);
        let descriptor = Aligned(noop(0).0);
        let with_pasid = Aligned(noop(0).u32(0, 1).0);
        // SAFETY: ends the process.
        assert_eq!(ends_with(|| unsafe { asm!("ud2") }), libc::SIGILL);
        // Not `Mapping::anonymous`, whose pages a child does not inherit.
        let code = Mapping::map(2 * PAGE, BOTH, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        code.put(PAGE - 2, &[0x0f, 0x0b]);
        code.protect(0, PAGE, READ | libc::PROT_EXEC);
        code.protect(PAGE, PAGE, libc::PROT_NONE);
        // SAFETY: ends the process.
        let jump = || unsafe { asm!("call {}", in(reg) code.address + PAGE as u64 - 2) };
        assert_eq!(ends_with(jump), libc::SIGILL, "the last bytes before an unmapped page");
        for (why, to, source) in [
            ("no portal", elsewhere.address, &descriptor),
            ("not aligned", portal.address + 8, &descriptor),
            ("PASID in the source", portal.address, &with_pasid),
        ] {
            let signal = ends_with(|| {
                enqcmd(to, source);
            });
            // A processor that has the instruction refuses it with a general protection fault.
            assert!([libc::SIGILL, libc::SIGSEGV].contains(&signal), "{why}: {signal}");
        }
        assert_eq!(
            ends_with(|| {
                enqcmd(portal.address, &descriptor);
            }),
            0
        );
    }

    /// This is why the instructions trap also on a processor that has them.
    #[test]
    fn a_portal_cannot_be_written_without_a_trap() {
        install();
        let _guard = FORK.write().unwrap();
        let model = Model::manual(ModelConfig::dsa()).unwrap();
        let (_directory, portal) = portal(&model, "wq0.0");
        for offset in [0, 64, PAGE - 8] {
            let to = (portal.address as usize + offset) as *mut u64;
            // SAFETY: within the mapping; ends the process.
            assert_eq!(ends_with(|| unsafe { to.write_volatile(1) }), libc::SIGBUS, "{offset}");
        }
    }

    #[test]
    fn threads_trap_at_the_same_time() {
        install();
        let _guard = FORK.read().unwrap();
        let mut device = DeviceConfig::default();
        device.queues[0].size = 128;
        let model = Model::start(ModelConfig { devices: vec![device], ..ModelConfig::default() }).unwrap();
        let (_directory, portal) = portal(&model, "wq0.0");
        let records = Mapping::anonymous(8 * PAGE, BOTH);
        records.put(0, &[0; 8 * PAGE]);
        thread::scope(|scope| {
            for thread in 0..4 {
                let (portal, records) = (&portal, &records);
                scope.spawn(move || {
                    for slot in 0..100 {
                        let at = (thread * 100 + slot) * 32;
                        let descriptor = Aligned(noop(records.address + at as u64).0);
                        while !enqcmd(portal.address + 64 * thread as u64, &descriptor) {
                            thread::yield_now();
                        }
                    }
                });
            }
        });
        assert!((0..400).all(|slot| wait_for(&records, slot).status == 1));
    }
}
