//! The dirty log of reported pages, and several logs as one.

// The guests that write here are x86-64 machine code.
#![cfg(target_arch = "x86_64")]

use crate::dirty_support::guest::{BLOCKS, FIRST_FREE, Guest, fd_of};
use crate::dirty_support::{Memory, Writer, Writers, collected, misuse_is_refused, rounds_against_writers};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::kvm_log::KvmLog;
use sterna_memory::dirty::punched::PunchedLog;
use sterna_memory::dirty::reported::{DirtyMarker, ReportedLog};
use sterna_memory::dirty::union::UnionLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_test_kit::Random;

/// A device model, which writes and then reports the page.
fn device<'a>(memories: &'a [&'a Memory], marker: DirtyMarker, seed: u64) -> Writer<'a> {
    Box::new(move |writers| {
        let mut random = Random::new(seed);
        while !writers.stopped() {
            let block = random.next_u64() as usize % memories.len();
            let page = random.next_u64() % memories[block].pages();
            memories[block].word(page, random.next_u64() as usize % 512).store(random.next_u64(), Ordering::Relaxed);
            marker.mark(block, page..page + 1);
            writers.writes.fetch_add(1, Ordering::Relaxed);
        }
    })
}

#[test]
fn exactly_the_reported_pages_are_named() {
    let mut log = ReportedLog::new(&[100, 1000]);
    let marker = log.marker();
    marker.mark(0, 5..9);
    log.start().unwrap();
    assert_eq!(collected(&mut log, 0, 100), []);
    marker.mark(0, 99..100);
    marker.mark(1, 60..70);
    marker.clone().mark(1, 65..66);
    assert_eq!(collected(&mut log, 1, 1000), (60..70).collect::<Vec<u64>>());
    assert_eq!(collected(&mut log, 1, 1000), []);
    assert_eq!(collected(&mut log, 0, 100), [99]);
    misuse_is_refused(&mut ReportedLog::new(&[7, 8]), &[7, 8]);
}

#[test]
fn no_write_of_devices_that_report_is_lost() {
    let memory = [&Memory::small(500), &Memory::small(64)];
    let mut log = ReportedLog::new(&[500, 64]);
    println!("seeds 5EED0004 5EED0005");
    let threads = vec![device(&memory, log.marker(), 0x5EED_0004), device(&memory, log.marker(), 0x5EED_0005)];
    rounds_against_writers(&mut log, &memory, 300, 100, threads);
}

#[test]
fn a_union_names_pages_of_vcpus_by_kvm_and_of_a_device_by_its_reports() {
    let memories = BLOCKS.map(|pages| Memory::small(pages as usize));
    let Some(mut guest) = Guest::new(memories, 1, |_| true) else { return };
    // SAFETY: these are the guest's slots.
    let kvm = unsafe { KvmLog::new(fd_of(&guest.vm), &BLOCKS, guest.slots.clone()).unwrap() };
    let device_log = ReportedLog::new(&BLOCKS);
    let marker = device_log.marker();
    let mut log = UnionLog::new(vec![Box::new(kvm), Box::new(device_log)]);
    let memories = [&guest.memories[0], &guest.memories[1]];
    let mut threads = Guest::writers(&mut guest.vcpus, None);
    // The device does not touch the pages with the guest's code and page tables, nor words that the guest writes.
    threads.push(Box::new(move |writers: &Writers| {
        let mut random = Random::new(0x5EED_0006);
        while !writers.stopped() {
            let block = random.next_u64() as usize % 2;
            let page = FIRST_FREE + random.next_u64() % (BLOCKS[block] - FIRST_FREE);
            memories[block].word(page, 100).store(random.next_u64(), Ordering::Relaxed);
            marker.mark(block, page..page + 1);
            writers.writes.fetch_add(1, Ordering::Relaxed);
        }
    }));
    rounds_against_writers(&mut log, &memories, 60, 20_000, threads);
    misuse_is_refused(
        &mut UnionLog::new(vec![Box::new(ReportedLog::new(&BLOCKS)), Box::new(ReportedLog::new(&BLOCKS))]),
        &BLOCKS,
    );
}

/// A log that records its calls, and fails at the chosen one.
struct Recorder {
    name: &'static str,
    calls: Arc<Mutex<Vec<String>>>,
    fails: &'static str,
}

impl Recorder {
    fn call(&self, what: &str) -> Result<(), DirtyLogError> {
        self.calls.lock().unwrap().push(format!("{} {what}", self.name));
        if what == self.fails {
            return Err(DirtyLogError::Missing { what: self.name, instead: "use another" });
        }
        Ok(())
    }
}

impl DirtyLog for Recorder {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.call("start")
    }
    fn found_populated(&mut self, _block: usize, populated: &PageBitmap) -> Result<(), DirtyLogError> {
        self.call(&format!("found {}", populated.count()))
    }
    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        dirty.set(block as u64..block as u64 + 1);
        self.call("collect")
    }
    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.call("stop")
    }
}

#[test]
fn a_union_that_cannot_start_stops_its_started_logs_and_one_that_cannot_stop_stops_the_rest() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let union = |fails: [&'static str; 3]| {
        let names = ["a", "b", "c"];
        let logs = names.into_iter().zip(fails);
        let boxed = |(name, fails)| Box::new(Recorder { name, calls: Arc::clone(&calls), fails }) as Box<dyn DirtyLog>;
        UnionLog::new(logs.map(boxed).collect())
    };
    let error = union(["", "start", ""]).start().unwrap_err();
    assert_eq!(error.to_string(), "b is not available here: use another");
    assert_eq!(*calls.lock().unwrap(), ["a start", "b start", "a stop"]);

    calls.lock().unwrap().clear();
    let error = union(["stop", "stop", ""]).stop().unwrap_err();
    assert_eq!(error.to_string(), "a is not available here: use another");
    assert_eq!(*calls.lock().unwrap(), ["a stop", "b stop", "c stop"]);

    calls.lock().unwrap().clear();
    union(["", "collect", ""]).collect(0, &mut PageBitmap::new(1)).unwrap_err();
    assert_eq!(*calls.lock().unwrap(), ["a collect", "b collect"]);

    calls.lock().unwrap().clear();
    union(["", "", ""]).found_populated(0, &PageBitmap::new(1)).unwrap();
    assert_eq!(*calls.lock().unwrap(), ["a found 0", "b found 0", "c found 0"]);
    calls.lock().unwrap().clear();
    let mut wrapping = PunchedLog::new(Box::new(union(["", "", ""])), vec![]);
    wrapping.found_populated(0, &PageBitmap::new(1)).unwrap();
    assert_eq!(*calls.lock().unwrap(), ["a found 0", "b found 0", "c found 0"]);
}
