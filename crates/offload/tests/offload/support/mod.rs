//! What the tests have in common: a device in virtual time that does what a script says, good or bad, and guest memory.
//!
//! The device decodes its 64 bytes by its own table of the specification (chapter 8), not by the driver's.

#![allow(dead_code, reason = "each test uses its part of it")]

pub(crate) mod operations;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use sterna_idxd::{Device, Kind, Mode, OperationSet, Portal, QueueInfo, Submission, SubmitMethod, WorkQueue};
use sterna_offload::{Bell, NEVER, Nanos, Region, Time};
use sterna_test_kit::Random;
use sterna_test_kit::portal::FakePortal;

pub(crate) const PAGE: usize = 4096;

/// Pages that a region is made of.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: accessed by raw pointers only; the tests decide who does when.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(pages: usize) -> Arc<Self> {
        let bytes = pages * PAGE;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(Self::layout(bytes)) };
        Arc::new(Self { start: NonNull::new(start).unwrap(), bytes })
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, PAGE).unwrap()
    }

    pub(crate) fn region(self: &Arc<Self>) -> Arc<Region> {
        // SAFETY: the region keeps the memory; it is accessed by raw pointers only.
        let region = unsafe { Region::new(self.start, self.bytes, Some(self.clone())) };
        region.set_racing(false);
        region
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.bytes);
        // SAFETY: inside the memory.
        unsafe { self.start.as_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub(crate) fn read(&self, at: usize, bytes: usize) -> Vec<u8> {
        assert!(at + bytes <= self.bytes);
        // SAFETY: inside the memory, and copied at once.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at), bytes) }.to_vec()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // What a device reads or writes after this is not what the tests expect, if it is still mapped at all.
        // SAFETY: our own memory, and nobody has it any more.
        unsafe {
            self.start.as_ptr().write_bytes(0xdd, self.bytes);
            dealloc(self.start.as_ptr(), Self::layout(self.bytes));
        }
    }
}

/// Virtual time: it passes when somebody sleeps, a little with each look at the clock, and when a test says so.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    now: AtomicU64,
    devices: Mutex<Vec<Arc<Fake>>>,
}

impl Clock {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { now: AtomicU64::new(1), devices: Mutex::default() })
    }

    pub(crate) fn attach(&self, device: &Arc<Fake>) {
        self.devices.lock().unwrap().push(device.clone());
    }

    /// Lets time pass, with everything that devices do meanwhile.
    pub(crate) fn pass_until(&self, end: Nanos) {
        loop {
            let devices = self.devices.lock().unwrap().clone();
            let next = devices.iter().filter_map(|device| device.next_event()).min();
            match next {
                Some(at) if at <= end => {
                    self.now.fetch_max(at, Ordering::SeqCst);
                    devices.iter().for_each(|device| device.run(at));
                }
                _ => break,
            }
        }
        self.now.fetch_max(end, Ordering::SeqCst);
    }

    pub(crate) fn pass(&self, nanos: Nanos) {
        self.pass_until(self.now.load(Ordering::SeqCst) + nanos);
    }
}

impl Time for Clock {
    fn now(&self) -> Nanos {
        self.now.fetch_add(30, Ordering::SeqCst) + 30
    }

    fn wait(&self, bell: &Bell, heard: u64, until: Nanos) {
        if bell.heard() == heard {
            let now = self.now.load(Ordering::SeqCst);
            self.pass_until(if until == NEVER { now + 1_000_000 } else { until });
        }
    }
}

/// What goes wrong, once in so many times; 0 is never.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Script {
    /// A page fault in a descriptor.
    pub(crate) page_fault: u64,
    /// A fault on the list of a batch.
    pub(crate) list_fault: u64,
    /// A hardware error of a descriptor.
    pub(crate) hardware_error: u64,
    /// A descriptor that is accepted and never answered.
    pub(crate) lost: u64,
    /// The queue is full, for the next few attempts.
    pub(crate) full: u64,
    /// The device stops for ever.
    pub(crate) halt: u64,
    /// A page that is not zero is called zero.
    pub(crate) lie: u64,
    /// The device refuses a descriptor.
    pub(crate) refuse: u64,
    /// How much slower than usual, at most; 1 at least.
    pub(crate) slowness: u64,
    /// It says less than what it knows of where a range differs.
    pub(crate) coarse: bool,
    /// The members' records of a batch that went as predicted are made wrong: nobody is to read them.
    pub(crate) poison: bool,
}

#[derive(Debug)]
struct Entry {
    at: Nanos,
    queue: usize,
    bytes: [u8; 64],
    /// It will not be answered.
    lost: bool,
}

#[derive(Debug)]
struct Inside {
    random: Random,
    script: Script,
    entries: Vec<Entry>,
    halted: bool,
    full_for: u64,
    clock: Nanos,
    executed: u64,
    lies: u64,
    answered_late: u64,
    taken: Vec<u32>,
}

/// A device that does as its script says.
#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    inside: Mutex<Inside>,
    proving: AtomicBool,
    /// A dedicated queue was sent more than it holds.
    pub(crate) overflows: AtomicU32,
    sizes: Vec<(u32, bool)>,
    time: Mutex<Weak<Clock>>,
}

impl Fake {
    /// A device with queues of these sizes, dedicated where it says so.
    pub(crate) fn new(name: &str, kind: Kind, sizes: &[(u32, bool)], seed: u64, script: Script) -> Arc<Self> {
        let inside = Inside {
            random: Random::new(seed),
            script,
            entries: Vec::new(),
            halted: false,
            full_for: 0,
            clock: 0,
            executed: 0,
            lies: 0,
            answered_late: 0,
            taken: vec![0; sizes.len()],
        };
        Arc::new(Self {
            name: name.into(),
            kind,
            inside: Mutex::new(inside),
            proving: AtomicBool::new(true),
            overflows: AtomicU32::new(0),
            sizes: sizes.to_vec(),
            time: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Its queues, opened and proved; with batches of up to `max_batch`.
    pub(crate) fn open(self: &Arc<Self>, clock: &Arc<Clock>, max_batch: u32) -> Vec<Arc<WorkQueue>> {
        self.open_on(clock, max_batch, None)
    }

    /// The same, on a node.
    pub(crate) fn open_on(
        self: &Arc<Self>,
        clock: &Arc<Clock>,
        max_batch: u32,
        node: Option<u32>,
    ) -> Vec<Arc<WorkQueue>> {
        self.open_as(clock, max_batch, node, |_, _| {})
    }

    /// The same, with what else `say` says of each queue.
    pub(crate) fn open_as(
        self: &Arc<Self>,
        clock: &Arc<Clock>,
        max_batch: u32,
        node: Option<u32>,
        say: impl Fn(usize, &mut QueueInfo),
    ) -> Vec<Arc<WorkQueue>> {
        *self.time.lock().unwrap() = Arc::downgrade(clock);
        clock.attach(self);
        let mut device = Device::new(&self.name, self.kind);
        device.version = 0x200;
        device.numa_node = node;
        // All of them, batches too: then none is tried at opening.
        device.operations = OperationSet::parse(&["ffffffff"; 8].join(","));
        let device = Arc::new(device);
        let number = self.name.trim_start_matches(|c: char| !c.is_ascii_digit());
        let mut queues = Vec::new();
        for (queue, (size, dedicated)) in self.sizes.iter().enumerate() {
            let mode = if *dedicated { Mode::Dedicated } else { Mode::Shared };
            let mut info = QueueInfo::new(&format!("wq{number}.{queue}"), device.clone(), mode, *size);
            info.max_batch = if self.kind == Kind::Iaa { 1 } else { max_batch };
            say(queue, &mut info);
            let method = if *dedicated { SubmitMethod::Movdir64b } else { SubmitMethod::Enqcmd };
            let portal = self.portal(queue, method);
            let opened = WorkQueue::with_portal_within(info, portal, Duration::from_secs(5));
            queues.push(opened.expect("a no-op is answered at once while the queue is proved"));
        }
        self.proving.store(false, Ordering::SeqCst);
        queues
    }

    /// A queue that is never proved: its device says nothing.
    pub(crate) fn open_in_vain(self: &Arc<Self>) {
        let device = Arc::new(Device::new(&self.name, self.kind));
        let info = QueueInfo::new("wq9.0", device, Mode::Shared, 1);
        self.lock().halted = true;
        let portal = self.portal(0, SubmitMethod::Enqcmd);
        assert!(WorkQueue::with_portal_within(info, portal, Duration::from_micros(1)).is_err());
    }

    pub(crate) fn set_script(&self, script: Script) {
        self.lock().script = script;
    }

    pub(crate) fn halt(&self) {
        self.lock().halted = true;
    }

    /// What each queue has taken since they were opened.
    pub(crate) fn taken(&self) -> Vec<u32> {
        self.lock().taken.clone()
    }

    pub(crate) fn executed(&self) -> u64 {
        self.lock().executed
    }

    pub(crate) fn lies(&self) -> u64 {
        self.lock().lies
    }

    pub(crate) fn pending(&self) -> usize {
        self.lock().entries.len()
    }

    fn next_event(&self) -> Option<Nanos> {
        let inside = self.lock();
        if inside.halted {
            return None;
        }
        inside.entries.iter().filter(|entry| !entry.lost).map(|entry| entry.at).min()
    }

    fn portal(self: &Arc<Self>, queue: usize, method: SubmitMethod) -> Arc<dyn Portal> {
        let queue = FakeQueue { device: self.clone(), queue };
        FakePortal::new(method, move |descriptor| queue.device.submit(queue.queue, descriptor.as_bytes(), method))
    }

    /// Does what is due at `now`.
    fn run(&self, now: Nanos) {
        let mut inside = self.lock();
        inside.clock = now;
        while !inside.halted
            && let Some(at) = inside.entries.iter().position(|entry| !entry.lost && entry.at <= now)
        {
            let entry = inside.entries.swap_remove(at);
            inside.execute(&entry.bytes, self.kind);
        }
    }

    fn submit(&self, queue: usize, bytes: &[u8; 64], method: SubmitMethod) -> Submission {
        let mut inside = self.lock();
        if self.proving.load(Ordering::SeqCst) && !inside.halted {
            inside.execute(bytes, self.kind);
            return Submission::Accepted;
        }
        let now = self.time.lock().unwrap().upgrade().map_or(0, |time| time.now.load(Ordering::SeqCst));
        let script = inside.script;
        if inside.random.once_in(script.halt) {
            inside.halted = true;
        }
        if inside.random.once_in(script.full) {
            inside.full_for = inside.random.below(40);
        }
        let occupied = inside.entries.iter().filter(|entry| entry.queue == queue).count() as u32;
        let full = occupied >= self.sizes.get(queue).map_or(1, |(size, _)| *size);
        if method == SubmitMethod::Enqcmd {
            if full || inside.full_for > 0 || inside.halted {
                inside.full_for = inside.full_for.saturating_sub(1);
                return Submission::Retry;
            }
        } else if full {
            // What does not fit is dropped, silently.
            self.overflows.fetch_add(1, Ordering::SeqCst);
            return Submission::Accepted;
        }
        let lost = inside.random.once_in(script.lost);
        let slowness = 1 + inside.random.below(script.slowness.max(1));
        let at = now + (500 + inside.random.below(5_000)) * slowness;
        inside.entries.push(Entry { at, queue, bytes: *bytes, lost });
        if let Some(taken) = inside.taken.get_mut(queue) {
            *taken += 1;
        }
        Submission::Accepted
    }

    /// The kernel's part in closing: nothing of the queue is under way afterwards.
    fn close(&self, queue: usize) {
        let mut inside = self.lock();
        while let Some(at) = inside.entries.iter().position(|entry| entry.queue == queue) {
            let entry = inside.entries.swap_remove(at);
            // Half of it is still done, as late as can be; the rest is thrown away.
            if inside.random.once_in(2) {
                inside.execute(&entry.bytes, self.kind);
                inside.answered_late += 1;
            }
        }
    }
}

/// What a queue's portal keeps: closed with it.
struct FakeQueue {
    device: Arc<Fake>,
    queue: usize,
}

impl Drop for FakeQueue {
    fn drop(&mut self) {
        self.device.close(self.queue);
    }
}

fn u32_at(bytes: &[u8; 64], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8; 64], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Memory as a device sees it.
fn load(address: u64, bytes: usize) -> Vec<u8> {
    let source: *const u8 = std::ptr::with_exposed_provenance(address as usize);
    let mut copy = vec![0; bytes];
    // SAFETY: what a test has a device read is mapped, by the contract of submission, and nobody writes it meanwhile.
    unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(source, bytes) };
    copy
}

fn store(address: u64, bytes: &[u8]) {
    let target: *mut u8 = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: what a test has a device write is mapped, by the contract of submission, and nobody else has it.
    unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

/// The result of an operation before it is written down: status, result, bytes completed, detail.
type Outcome = (u8, u8, u32, u64);

impl Inside {
    fn execute(&mut self, bytes: &[u8; 64], kind: Kind) {
        self.executed += 1;
        if kind == Kind::Iaa && matches!(bytes[7], 0x42 | 0x43) {
            return self.execute_iaa(bytes);
        }
        let outcome = if bytes[7] == 0x01 { self.batch(bytes) } else { self.single(bytes) };
        write_record(bytes, outcome);
    }

    fn batch(&mut self, bytes: &[u8; 64]) -> Outcome {
        let (list, count) = (u64_at(bytes, 16), u32_at(bytes, 32));
        assert!(count >= 2 && list.is_multiple_of(64), "a batch of {count} at {list:#x}");
        let list_fault = self.random.once_in(self.script.list_fault);
        let last = if list_fault { self.random.below(count.into()) as u32 } else { count };
        // Members in any order: no fence is used.
        let mut members: Vec<u32> = (0..last).collect();
        for at in (1..members.len()).rev() {
            members.swap(at, self.random.below(at as u64 + 1) as usize);
        }
        let mut all_well = true;
        for member in members {
            let member: [u8; 64] = load(list + u64::from(member) * 64, 64).try_into().unwrap();
            assert_ne!(member[7], 0x01, "a batch in a batch");
            let outcome = self.single(&member);
            all_well &= outcome.0 == 0x01;
            write_record(&member, outcome);
        }
        if self.script.poison && all_well && !list_fault {
            for member in 0..count {
                let member: [u8; 64] = load(list + u64::from(member) * 64, 64).try_into().unwrap();
                // Another result than the expected one.
                write_again(&member, (0x01, 1 - member[40], 0, 0));
            }
        }
        match (list_fault, all_well) {
            (true, _) => (0x06, u8::from(!all_well), last, 0),
            (false, true) => (0x01, 0, count, 0),
            (false, false) => (0x05, 1, count, 0),
        }
    }

    fn single(&mut self, bytes: &[u8; 64]) -> Outcome {
        let (source, destination, size) = (u64_at(bytes, 16), u64_at(bytes, 24), u32_at(bytes, 32));
        let script = self.script;
        if !matches!(bytes[7], 0x00 | 0x02) {
            if self.random.once_in(script.hardware_error) {
                return (0x20, 0, 0, 0);
            }
            if self.random.once_in(script.refuse) {
                return (0x13, 0, 0, 0);
            }
        }
        let fault = self.random.once_in(script.page_fault);
        let done = if fault { self.random.below(size.into()) as usize } else { size as usize };
        // Faults are met at pages.
        let done = if fault { done / PAGE * PAGE } else { done };
        let faulted = |write: bool, result: u8| (if write { 0x83 } else { 0x03 }, result, done as u32, 0);
        let checked = |result: u8, expected: u8, at: u32, detail: u64| {
            let checks = bytes[4] & 0x80 != 0;
            (if checks && result != expected { 0x02 } else { 0x01 }, result, at, detail)
        };
        match bytes[7] {
            0x00 | 0x02 => (0x01, 0, 0, 0),
            0x03 => {
                store(destination, &load(source, done));
                if fault { faulted(true, 0) } else { (0x01, 0, 0, 0) }
            }
            0x05 => {
                let (first, second) = (load(source, done), load(destination, done));
                match first.iter().zip(&second).position(|(a, b)| a != b) {
                    Some(at) => checked(1, bytes[40], at as u32, 0),
                    None if fault => faulted(false, 0),
                    None => checked(0, bytes[40], 0, 0),
                }
            }
            0x06 => {
                assert_eq!(destination, 0, "the pattern of a zero test");
                match load(source, done).iter().position(|byte| *byte != 0) {
                    Some(_) if self.random.once_in(script.lie) => {
                        self.lies += 1;
                        checked(0, bytes[40], 0, 0)
                    }
                    Some(at) => {
                        let at = if script.coarse { at / 64 * 64 } else { at };
                        checked(1, bytes[40], at as u32, 0)
                    }
                    None if fault => faulted(false, 0),
                    None => checked(0, bytes[40], 0, 0),
                }
            }
            0x07 => {
                let (first, second) = (load(source, done), load(destination, done));
                let room = u32_at(bytes, 48) as usize;
                let mut record = Vec::new();
                for (at, (a, b)) in first.chunks(8).zip(second.chunks(8)).enumerate() {
                    if a != b {
                        record.extend((at as u16).to_le_bytes());
                        record.extend(b);
                    }
                }
                let result = if record.is_empty() { 0 } else { 1 + u8::from(record.len() > room) };
                record.truncate(room / 10 * 10);
                store(u64_at(bytes, 40), &record);
                if fault {
                    return faulted(false, result.min(1));
                }
                (0x01, result, 0, record.len() as u64)
            }
            0x08 => {
                let record = load(source, u32_at(bytes, 40) as usize);
                let mut least = 0;
                for entry in record.chunks(10) {
                    let at = u32::from(u16::from_le_bytes([entry[0], entry[1]])) * 8;
                    if at < least {
                        return (0x07, 0, 0, 0);
                    }
                    if at + 8 > size {
                        return (0x08, 0, 0, 0);
                    }
                    if fault && at as usize >= done {
                        return faulted(true, 0);
                    }
                    store(destination + u64::from(at), &entry[2..]);
                    least = at + 8;
                }
                (0x01, 0, 0, 0)
            }
            0x10 => {
                let crc = crc32c(&load(source, done));
                if fault { faulted(false, 0) } else { (0x01, 0, 0, crc.into()) }
            }
            0x11 => {
                let data = load(source, done);
                store(destination, &data);
                if fault { faulted(false, 0) } else { (0x01, 0, 0, crc32c(&data).into()) }
            }
            code => panic!("operation {code:#x} is none that the product uses"),
        }
    }

    /// Writes and reads stored blocks only: the rest is the CPU's.
    fn execute_iaa(&mut self, bytes: &[u8; 64]) {
        let (source, destination, size) = (u64_at(bytes, 16), u64_at(bytes, 24), u32_at(bytes, 32) as usize);
        let room = u32_at(bytes, 48) as usize;
        let mut record = [0; 64];
        if self.random.once_in(self.script.hardware_error) {
            record[0] = 0x24;
        } else if self.random.once_in(self.script.page_fault) {
            record[0] = 0x04;
        } else if bytes[7] == 0x43 {
            if size + 5 > room || size > 0xffff {
                (record[0], record[1]) = (0x0a, 0x19);
            } else {
                let mut stream = vec![1];
                stream.extend((size as u16).to_le_bytes());
                stream.extend((!(size as u16)).to_le_bytes());
                stream.extend(load(source, size));
                store(destination, &stream);
                record[0] = 0x01;
                record[24..28].copy_from_slice(&(stream.len() as u32).to_le_bytes());
            }
        } else {
            let stream = load(source, size);
            let stored = stream.len() >= 5 && stream[0] == 1 && {
                let bytes = usize::from(u16::from_le_bytes([stream[1], stream[2]]));
                bytes <= room && stream.len() >= 5 + bytes
            };
            if stored {
                let bytes = usize::from(u16::from_le_bytes([stream[1], stream[2]]));
                store(destination, &stream[5..5 + bytes]);
                record[0] = 0x01;
                record[24..28].copy_from_slice(&(bytes as u32).to_le_bytes());
            } else {
                (record[0], record[1]) = (0x0a, 0x11);
            }
        }
        let address = u64_at(bytes, 8);
        assert!(address.is_multiple_of(64), "a record of an IAA at {address:#x}");
        assert_eq!(load(address, 1), [0], "the record was not cleared");
        record_to(address, &record);
    }
}

fn write_record(bytes: &[u8; 64], (code, result, completed, detail): Outcome) {
    if bytes[7] == 0x00 && bytes[4] & 0x04 == 0 {
        return;
    }
    let address = u64_at(bytes, 8);
    assert!(bytes[4] & 0x04 != 0 && address.is_multiple_of(32), "a record at {address:#x}, flags {:#x}", bytes[4]);
    assert_eq!(load(address, 1), [0], "the record was not cleared");
    write_again(bytes, (code, result, completed, detail));
}

fn write_again(bytes: &[u8; 64], (code, result, completed, detail): Outcome) {
    let address = u64_at(bytes, 8);
    let mut record = [0; 32];
    (record[0], record[1]) = (code, result);
    record[4..8].copy_from_slice(&completed.to_le_bytes());
    record[16..24].copy_from_slice(&detail.to_le_bytes());
    record_to(address, &record);
}

/// Writes a record in words, the one with the status last, as a device has it.
fn record_to(address: u64, record: &[u8]) {
    let words: *const AtomicU64 = std::ptr::with_exposed_provenance(address as usize);
    for (at, word) in record.chunks_exact(8).enumerate().rev() {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        // SAFETY: a completion record, mapped and aligned, which is made of such words.
        unsafe { &*words.add(at) }.store(word, Ordering::Release);
    }
}

/// CRC-32C by its definition.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    sterna_test_kit::checksum::crc32c(0, bytes)
}

impl Clock {
    /// How much time has passed.
    pub(crate) fn pass_so_far(&self) -> Nanos {
        self.now.load(Ordering::SeqCst)
    }
}
