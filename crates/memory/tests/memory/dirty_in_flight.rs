//! The limitation of every log that protects pages: a device that has pinned a page before its protection writes it
//! afterwards without a fault. These tests demonstrate it, and so why the barrier between collecting and reading is
//! necessary.

use crate::dirty_support::held_disk::{BYTES, CONTENT, HeldDisk, Read};
use crate::dirty_support::process::{Process, serve};
use crate::dirty_support::{Memory, collected, works};
use std::sync::atomic::Ordering;
use sterna_memory::PAGE_SIZE;
use sterna_memory::dirty::DirtyLog;
use sterna_memory::dirty::write_protect::WriteProtectLog;
use sterna_memory::userfault::wait::{FaultBuffer, Stop};
use sterna_memory::userfault::{Faults, Userfault};

const PAGES: u64 = 100;
const WRITTEN: u64 = (BYTES / PAGE_SIZE) as u64;
/// A word of the written content.
const NEW: u64 = u64::from_ne_bytes([CONTENT; 8]);

/// The test that [`Process`] runs as a child.
#[test]
fn as_a_child() {
    serve();
}

/// Returns a started log, or prints why there is none.
fn log_of(process: &mut Process) -> Option<WriteProtectLog> {
    let userfault = match Userfault::from_descriptor(process.userfaultfd(), WriteProtectLog::FEATURES) {
        Ok(userfault) => userfault,
        Err(error) => {
            println!("skipped: {error}");
            return None;
        }
    };
    let mut log = WriteProtectLog::of_process(process.target(), userfault, process.blocks()).unwrap();
    works(&mut log).then_some(log)
}

/// Pages 0 to 15 are pinned and not written yet. `word` returns the first word of page 0.
fn demonstrate_limitation(log: &mut dyn DirtyLog, word: impl Fn() -> u64, end: impl FnOnce()) {
    // The pinning was a write fault.
    assert_eq!(collected(log, 0, PAGES), (0..WRITTEN).collect::<Vec<_>>());
    assert_ne!(word(), NEW, "a reader of the named pages would read too early now");
    assert_eq!(collected(log, 0, PAGES), []);
    end();
    // A reader that has waited gets the written content: collect, wait for I/O in flight, read.
    assert_eq!(word(), NEW);
    assert_eq!(collected(log, 0, PAGES), [], "if the page is named now, the limitation does not exist");
}

#[test]
fn a_direct_read_in_flight_is_named_before_its_data_arrives_and_never_after_in_own_memory() {
    let disk = match HeldDisk::new("own") {
        Ok(disk) => disk,
        Err(lacking) => return println!("skipped: {lacking}"),
    };
    let memory = Memory::small(PAGES as usize);
    memory.populate();
    let mut log = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
    if !works(&mut log) {
        return;
    }
    // SAFETY: this process's memory, accessed by atomics; `end` below waits for the read.
    let read = disk.hold_thread(|| unsafe { Read::begin(&disk.path, memory.addresses().start) });
    let read = match read {
        Ok(read) => read.unwrap(),
        Err(lacking) => return println!("skipped: {lacking}"),
    };
    demonstrate_limitation(
        &mut log,
        || memory.word(0, 0).load(Ordering::Relaxed),
        || {
            disk.release().unwrap();
            assert_eq!(read.end(), BYTES as i64);
        },
    );
    log.stop().unwrap();
}

#[test]
fn a_direct_read_in_flight_is_named_before_its_data_arrives_and_never_after_in_another_process() {
    let disk = match HeldDisk::new("other") {
        Ok(disk) => disk,
        Err(lacking) => return println!("skipped: {lacking}"),
    };
    for kind in ["small", "memfd"] {
        let Some(mut process) = Process::start(&format!("{kind}:{PAGES}")) else { return };
        process.ask("populate 0");
        let Some(mut log) = log_of(&mut process) else { return };
        disk.hold().unwrap();
        if let Err(error) = disk.hold_process(process.pid()) {
            return println!("skipped: a process cannot be put into the cgroup: {error}");
        }
        process.ask(&format!("begin-read 0 {}", disk.path.display()));
        let start = process.addresses(0).start;
        let process = std::cell::RefCell::new(process);
        let word = || {
            let mut bytes = [0; 8];
            process.borrow().read(start, &mut bytes);
            u64::from_ne_bytes(bytes)
        };
        demonstrate_limitation(&mut log, word, || {
            disk.release().unwrap();
            assert_eq!(process.borrow_mut().ask("end-read"), BYTES.to_string());
        });
        log.stop().unwrap();
    }
}

/// Shows the same without a disk: the kernel copies from memory that arrives late to pages that it has pinned.
fn a_copy_by_the_kernel_is_held(log: &mut WriteProtectLog, pid: i32, target: usize, word: impl Fn() -> u64) {
    let source = Memory::small(WRITTEN as usize);
    let missing = match Userfault::open(Faults::All, 0) {
        Ok(missing) => missing,
        Err(error) => return println!("skipped: {error}"),
    };
    missing.register_missing(source.addresses()).unwrap();
    let from = source.addresses().start;
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || {
            let local = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(from), iov_len: BYTES };
            let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(target), iov_len: BYTES };
            // SAFETY: the local entry is a mapping of that length; the remote one is accessed by atomics only.
            unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) }
        });
        // The kernel accesses the first page of the source after it has pinned the pages to write.
        let (stop, mut buffer) = (Stop::new().unwrap(), FaultBuffer::new());
        let faults = missing.wait_faults(&stop, &mut buffer).unwrap().unwrap();
        assert_eq!(faults[0].address(), from);
        demonstrate_limitation(log, word, || {
            // SAFETY: nothing in this process accesses the source.
            unsafe { missing.copy(from, &[CONTENT; BYTES]).unwrap() };
            assert_eq!(writer.join().unwrap(), BYTES as isize);
        });
    });
}

#[test]
fn a_copy_into_pinned_pages_is_named_before_its_data_arrives_and_never_after_in_own_memory() {
    let memory = Memory::small(PAGES as usize);
    memory.populate();
    let mut log = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
    if !works(&mut log) {
        return;
    }
    let word = || memory.word(0, 0).load(Ordering::Relaxed);
    a_copy_by_the_kernel_is_held(&mut log, std::process::id() as i32, memory.addresses().start, word);
    log.stop().unwrap();
}

#[test]
fn a_copy_into_pinned_pages_is_named_before_its_data_arrives_and_never_after_in_another_process() {
    let Some(mut process) = Process::start(&format!("memfd:{PAGES}")) else { return };
    process.ask("populate 0");
    let Some(mut log) = log_of(&mut process) else { return };
    let start = process.addresses(0).start;
    let word = || {
        let mut bytes = [0; 8];
        process.read(start, &mut bytes);
        u64::from_ne_bytes(bytes)
    };
    a_copy_by_the_kernel_is_held(&mut log, process.pid(), start, word);
    log.stop().unwrap();
}
