//! A trial of every operation on every opened queue, compared with plain code: `sterna accel test`.
//!
//! The queues are tried one by one, each by an offload of its own: an offload rotates the queues of a device, so that
//! an operation of two batches would always meet the same ones. The trial works on its own memory with content that it
//! makes, so every expected result is known in advance.

use std::ptr::NonNull;
use std::sync::Arc;

use sterna_memory::PAGE_SIZE;

use crate::accelerators::Accelerators;
use crate::arena::Slab;
use crate::batch::{Batch, Delta};
use crate::deflate::Inflater;
use crate::helpers::CallError;
use crate::kind::{Cause, Kind};
use crate::offload::Offload;
use crate::operation::Operation;
use crate::region::{Range, Region};
use crate::report::TakenOut;
use crate::request::Answer;
use crate::settings::Settings;
use crate::start::{self, Opened, StartError};

/// Pages of the memory that the trial works on, half of them for each range of a pair.
const PAGES: usize = 64;

/// Bytes of it that the placing operations write.
const PLACED: usize = 8 * PAGE_SIZE;

/// The result of one operation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Trial {
    /// The operation.
    pub operation: Operation,
    /// Items of the batches whose results were right.
    pub items: u64,
    /// Items that an accelerator did, by kind. Those that it left undone are in `fallbacks`.
    pub done_by: Vec<(Kind, u64)>,
    /// Items that the CPU did instead of an accelerator, by cause.
    pub fallbacks: Vec<(Cause, u64)>,
    /// The first wrong result.
    pub wrong: Option<String>,
}

/// The result of one queue.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct QueueTrial {
    /// The queue, `dsa0/wq0.0`; `cpu` where none is used.
    pub queue: String,
    /// Every operation of its kind of device.
    pub operations: Vec<Trial>,
    /// Its device, if it was taken out of service.
    pub taken_out: Vec<TakenOut>,
}

impl QueueTrial {
    /// Returns the faults of the queue, a sentence each.
    pub fn faults(&self) -> Vec<String> {
        let queue = &self.queue;
        let wrong = self.operations.iter().filter_map(|trial| Some((trial.operation.name(), trial.wrong.as_ref()?)));
        let mut faults: Vec<_> = wrong.map(|(name, wrong)| format!("{queue}: {name} is wrong ({wrong})")).collect();
        for TakenOut { device, reason, .. } in &self.taken_out {
            faults.push(format!("{queue}: {device} was taken out of service: {reason}"));
        }
        // Consequences of that are not listed.
        if self.taken_out.is_empty() {
            let undone: Vec<_> = self.operations.iter().filter_map(Trial::undone).collect();
            match self.operations.iter().all(|trial| trial.done_by.is_empty() && !trial.fallbacks.is_empty()) {
                // It accepted nothing at all, normally for one reason.
                true => faults.extend(undone.first().map(|first| format!("{queue} did nothing; {first}"))),
                false => faults.extend(undone.into_iter().map(|undone| format!("{queue}: {undone}"))),
            }
        }
        faults
    }
}

impl Trial {
    /// Returns what the device failed at, or that it did nothing at all, so that nothing was tried.
    fn undone(&self) -> Option<String> {
        let failures = [Cause::DeviceError, Cause::Timeout, Cause::WrongResult, Cause::OutOfService];
        let left: u64 = self.fallbacks.iter().map(|(_, items)| items).sum();
        let failed = self.fallbacks.iter().any(|(cause, _)| failures.contains(cause));
        if !failed && (left < self.items || left == 0) {
            return None;
        }
        let causes: Vec<_> = self.fallbacks.iter().map(|(cause, items)| format!("{items} because {cause}")).collect();
        let name = self.operation.name();
        Some(format!("{name}: of {} items {left} were not done by it ({})", self.items, causes.join(", ")))
    }
}

/// Queues that are opened for a trial and not in use yet.
#[derive(Debug)]
pub struct Trials {
    opened: Opened,
}

impl Trials {
    /// Opens the accelerators that `choice` selects.
    ///
    /// # Errors
    /// An accelerator requested by name does not exist.
    pub fn open(choice: &Accelerators, settings: &Settings) -> Result<Self, StartError> {
        start::open(choice, settings).map(|opened| Self { opened })
    }

    /// Returns one line: the opened queues, and why others are not.
    pub fn summary(&self) -> String {
        self.opened.summary()
    }

    /// Returns how many queues are opened.
    pub fn queues(&self) -> usize {
        self.opened.queues.len()
    }

    /// Returns why others are not opened.
    pub fn not_used(&self) -> &[String] {
        &self.opened.not_used
    }

    /// Tries every operation on every queue, in `rounds` batches each, with content chosen by `seed`, while `go_on`
    /// returns true. Without a queue the CPU alone is tried. `settings` may differ from those that the queues were
    /// opened with.
    ///
    /// # Errors
    /// A setting is out of its range, or a thread cannot be started.
    pub fn run(
        self,
        settings: &Settings,
        seed: u64,
        rounds: u32,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Vec<QueueTrial>, StartError> {
        let queues = self.opened.queues.into_iter().map(|queue| (queue.info().full_name(), vec![queue]));
        let mut queues: Vec<_> = queues.collect();
        if queues.is_empty() {
            queues.push(("cpu".into(), Vec::new()));
        }
        let mut trials = Vec::new();
        for (queue, opened) in queues {
            if !go_on() {
                break;
            }
            let cpu = opened.is_empty();
            let offload = Offload::with_queues(opened, settings)?;
            let mut ground = Ground::new(seed);
            let all = Operation::ALL.into_iter().filter(|operation| cpu || offload.accelerates(*operation));
            let operations = all.map(|operation| ground.trial(&offload, operation, rounds, go_on)).collect();
            offload.shutdown();
            trials.push(QueueTrial { queue, operations, taken_out: offload.report().taken_out });
        }
        Ok(trials)
    }
}

/// Tries every operation in `rounds` batches each, with content chosen by `seed`. Ends early when the run is traced and
/// the trace cannot be written ([`Trace::finish`](crate::trace::Trace::finish) returns the error).
pub fn try_all(offload: &Offload, seed: u64, rounds: u32) -> Vec<Trial> {
    let mut ground = Ground::new(seed);
    Operation::ALL.into_iter().map(|operation| ground.trial(offload, operation, rounds, &|| true)).collect()
}

/// The memory of a trial, and its expected content.
struct Ground {
    region: Arc<Region>,
    memory: Arc<Slab>,
    content: Vec<u8>,
    random: u64,
}

impl Ground {
    fn new(seed: u64) -> Self {
        let memory = Arc::new(Slab::new(PAGES * PAGE_SIZE, None));
        let start = NonNull::new(memory.pointer()).expect("memory is not at address 0");
        let owner: Arc<Slab> = Arc::clone(&memory);
        // SAFETY: the region keeps the memory, and it is written through its pointer only (`Ground::show`).
        let region = unsafe { Region::new(start, PAGES * PAGE_SIZE, Some(owner)) };
        Self { region, memory, content: vec![0; PAGES * PAGE_SIZE], random: seed }
    }

    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Makes new content: pages of zeros, of zeros except one byte, and of numbers; the second half is the first with
    /// some changes.
    fn fill(&mut self) {
        let half = PAGES / 2 * PAGE_SIZE;
        for page in 0..PAGES / 2 {
            let kind = self.below(3);
            let (mut number, at) = (self.next() | 1, self.below(PAGE_SIZE));
            let bytes = &mut self.content[page * PAGE_SIZE..][..PAGE_SIZE];
            bytes.fill(0);
            match kind {
                0 => {}
                1 => bytes[at] = 1,
                _ => bytes.chunks_mut(8).for_each(|word| {
                    number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    word.copy_from_slice(&(number >> 60).to_le_bytes());
                }),
            }
        }
        self.content.copy_within(..half, half);
        // One change in the pages that deltas are applied to.
        let first = half + self.below(PLACED);
        self.content[first] ^= 0x20;
        for _ in 0..self.below(40) {
            let at = half + self.below(half);
            self.content[at] ^= 0x10;
        }
        self.show();
    }

    /// Writes the content to memory. No batch is in progress.
    fn show(&self) {
        // SAFETY: both are of this length and do not overlap; all batches on this memory are done.
        unsafe { std::ptr::copy_nonoverlapping(self.content.as_ptr(), self.memory.pointer(), self.content.len()) };
    }

    /// Returns the content of memory. No batch is in progress.
    fn seen(&self) -> Vec<u8> {
        let mut seen = vec![0; self.content.len()];
        // SAFETY: as in `show`.
        unsafe { std::ptr::copy_nonoverlapping(self.memory.pointer(), seen.as_mut_ptr(), seen.len()) };
        seen
    }

    fn range(&self, offset: usize, bytes: usize) -> Range {
        self.region.range(offset, bytes).expect("the trial stays within its memory")
    }

    fn trial(&mut self, offload: &Offload, operation: Operation, rounds: u32, go_on: &dyn Fn() -> bool) -> Trial {
        let before = counted(offload, operation);
        let (mut items, mut wrong) = (0, None);
        for round in 0..rounds {
            if !go_on() || offload.trace().is_some_and(|trace| trace.failed()) {
                break;
            }
            self.fill();
            match self.round(offload, operation) {
                Ok(done) => items += done,
                Err(what) => wrong = wrong.or(Some(format!("batch {round}: {what}"))),
            }
        }
        let mut trial = counted(offload, operation);
        trial.done_by.iter_mut().for_each(|(kind, count)| *count -= of(&before.done_by, *kind));
        trial.done_by.retain(|(_, count)| *count > 0);
        trial.fallbacks.iter_mut().for_each(|(cause, count)| *count -= of(&before.fallbacks, *cause));
        trial.fallbacks.retain(|(_, count)| *count > 0);
        Trial { items, wrong, ..trial }
    }

    /// Does one batch. Returns its number of items, or what is wrong with the results.
    fn round(&mut self, offload: &Offload, operation: Operation) -> Result<u64, String> {
        let half = PAGES / 2 * PAGE_SIZE;
        match operation {
            Operation::ZeroMap => {
                let done = describe_error(offload.call(operation, |batch| batch.push(&self.range(0, half)).map(drop)))?;
                for page in 0..PAGES / 2 {
                    let zero = self.content[page * PAGE_SIZE..][..PAGE_SIZE].iter().all(|byte| *byte == 0);
                    if done.is_zero(page) != zero {
                        let (is, should) = if zero { ("not zero", "zero") } else { ("zero", "not zero") };
                        return Err(format!("page {page} is called {is}, and is {should}"));
                    }
                }
                Ok(done.len() as u64)
            }
            Operation::Compare | Operation::CreateDelta => self.pairs(offload, operation),
            Operation::Checksum | Operation::Copy | Operation::CopyChecksum | Operation::Deflate => {
                self.singles(offload, operation)
            }
            Operation::Place | Operation::ApplyDelta | Operation::Inflate => self.placed(offload, operation),
        }
    }

    fn pairs(&mut self, offload: &Offload, operation: Operation) -> Result<u64, String> {
        let half = PAGES / 2 * PAGE_SIZE;
        let done = describe_error(offload.call(operation, |batch| {
            let page = |page: usize| self.range(page * PAGE_SIZE, PAGE_SIZE);
            (0..PAGES / 2).try_for_each(|at| batch.push_pair(&page(at), &page(PAGES / 2 + at)).map(drop))
        }))?;
        for item in 0..done.len() {
            let first = &self.content[item * PAGE_SIZE..][..PAGE_SIZE];
            let second = &self.content[half + item * PAGE_SIZE..][..PAGE_SIZE];
            let differs = (0..PAGE_SIZE).find(|at| first[*at] != second[*at]);
            if operation == Operation::Compare {
                if done.difference(item) != differs {
                    let (is, should) = (where_differs(done.difference(item)), where_differs(differs));
                    let values = values(first, second, done.difference(item).into_iter().chain(differs).min());
                    return Err(format!("pair {item} is said to {is}, and does {should} ({values})"));
                }
                continue;
            }
            match (done.delta(item), differs) {
                (Delta::Equal, None) => {}
                (Delta::Equal, Some(_)) => {
                    let (should, values) = (where_differs(differs), values(first, second, differs));
                    return Err(format!("pair {item} is called equal, and does {should} ({values})"));
                }
                (Delta::Record(record), None) => {
                    return Err(format!("pair {item} is equal, and has a delta of {} bytes", record.len()));
                }
                (Delta::Record(record), Some(_)) => match apply(first, record) {
                    Some(applied) => same_bytes(&format!("what the delta of pair {item} makes"), &applied, second)?,
                    None => {
                        let bytes = record.len();
                        return Err(format!(
                            "the delta of pair {item}, of {bytes} bytes, is no list of entries within the page"
                        ));
                    }
                },
                (Delta::TooLong, _) => return Err(format!("the delta of pair {item} is called too long")),
            }
        }
        Ok(done.len() as u64)
    }

    fn singles(&mut self, offload: &Offload, operation: Operation) -> Result<u64, String> {
        let parts: Vec<_> = (0..8)
            .map(|part| {
                let most = PAGES / 2 * PAGE_SIZE / 8;
                // Odd addresses and lengths too; a deflate job is of whole pages.
                let (at, bytes) = match operation {
                    Operation::Deflate => (part * most, most),
                    _ => (part * most + self.below(63), 1 + self.below(most - 63)),
                };
                (at, bytes)
            })
            .collect();
        let fill =
            |batch: &mut Batch| parts.iter().try_for_each(|(at, bytes)| batch.push(&self.range(*at, *bytes)).map(drop));
        let done = describe_error(offload.call(operation, fill))?;
        for (item, (at, bytes)) in parts.iter().enumerate() {
            let content = &self.content[*at..at + bytes];
            if matches!(operation, Operation::Copy | Operation::CopyChecksum) {
                same_bytes(&format!("copy {item}"), done.copy(item), content)?;
            }
            if matches!(operation, Operation::Checksum | Operation::CopyChecksum) {
                let (is, should) = (done.checksum(item), crc32c(content));
                if is != should {
                    return Err(format!(
                        "checksum {item}, of {bytes} bytes, is {is:#010x}, and should be {should:#010x}"
                    ));
                }
            }
            if operation == Operation::Deflate {
                let Some(stream) = done.deflated(item) else {
                    return Err(format!("the stream of item {item}, which compresses well, is called too long"));
                };
                let mut read = vec![0; *bytes];
                match Inflater::default().inflate(stream, &mut read) {
                    Answer::Written(length) if length as usize == *bytes => {}
                    Answer::Written(length) => {
                        return Err(format!("stream {item} ends after {length} bytes, and should after {bytes}"));
                    }
                    _ => {
                        return Err(format!(
                            "stream {item}, of {} bytes, is no deflate stream of {bytes}",
                            stream.len()
                        ));
                    }
                }
                same_bytes(&format!("the content of stream {item}"), &read, content)?;
            }
        }
        Ok(done.len() as u64)
    }

    fn placed(&mut self, offload: &Offload, operation: Operation) -> Result<u64, String> {
        let half = PAGES / 2 * PAGE_SIZE;
        let bytes = PLACED;
        // Inputs for the first quarter; its expected content is that of the third.
        let inputs: Vec<Vec<u8>> = match operation {
            Operation::Place => vec![self.content[half..half + bytes].to_vec()],
            Operation::ApplyDelta => {
                vec![delta(&self.content[..bytes], &self.content[half..half + bytes])]
            }
            _ => {
                let streams = describe_error(
                    offload.call(Operation::Deflate, |batch| batch.push(&self.range(half, bytes)).map(drop)),
                )?;
                match streams.deflated(0) {
                    Some(stream) => vec![stream.to_vec()],
                    None => return Err("the stream for it, which compresses well, is called too long".into()),
                }
            }
        };
        let input = &inputs[0];
        let fill = |batch: &mut Batch| {
            let room = batch.push_input(input.len(), &self.range(0, bytes))?;
            room.copy_from_slice(input);
            Ok(())
        };
        let done = describe_error(offload.call(operation, fill))?;
        let mut expected = self.content.clone();
        expected.copy_within(half..half + bytes, 0);
        if done.placed(0).is_none() {
            return Err(format!("the input of {} bytes is called malformed", input.len()));
        }
        same_bytes("memory afterwards", &self.seen(), &expected)?;
        Ok(1)
    }
}

fn describe_error(called: Result<Batch, CallError>) -> Result<Batch, String> {
    called.map_err(|error| error.to_string())
}

/// Compares `is` with `should`.
///
/// # Errors
/// They differ; the error has the first byte that does.
fn same_bytes(what: &str, is: &[u8], should: &[u8]) -> Result<(), String> {
    if is.len() != should.len() {
        return Err(format!("{what} has {} bytes, and should have {}", is.len(), should.len()));
    }
    match is.iter().zip(should).position(|(is, should)| is != should) {
        None => Ok(()),
        Some(at) => {
            let (length, is, should) = (is.len(), is[at], should[at]);
            Err(format!("{what} is wrong at byte {at} of {length} first: {is:#04x} in place of {should:#04x}"))
        }
    }
}

/// Returns text such as `differ at byte 17 first`.
fn where_differs(at: Option<usize>) -> String {
    at.map_or("not differ".into(), |at| format!("differ at byte {at} first"))
}

/// Returns the values of both ranges of a pair at an offset.
fn values(first: &[u8], second: &[u8], at: Option<usize>) -> String {
    let value = |of: &[u8]| at.and_then(|at| of.get(at)).map_or("nothing".into(), |byte| format!("{byte:#04x}"));
    format!("byte {}: {} and {}", at.unwrap_or(0), value(first), value(second))
}

fn of<T: PartialEq + Copy>(counts: &[(T, u64)], which: T) -> u64 {
    counts.iter().find(|(one, _)| *one == which).map_or(0, |(_, count)| *count)
}

/// Reads the counters of an operation.
fn counted(offload: &Offload, operation: Operation) -> Trial {
    let mut trial = Trial { operation, items: 0, done_by: Vec::new(), fallbacks: Vec::new(), wrong: None };
    let report = offload.report();
    for engine in report.operations.iter().filter(|one| one.operation == operation).flat_map(|one| &one.engines) {
        if engine.engine != Kind::Cpu {
            trial.done_by.push((engine.engine, engine.items));
        }
        for (cause, count) in &engine.fallbacks {
            match trial.fallbacks.iter_mut().find(|(known, _)| known == cause) {
                Some((_, sum)) => *sum += count,
                None => trial.fallbacks.push((*cause, *count)),
            }
        }
    }
    trial
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 })
    })
}

/// Creates a delta record, word by word.
fn delta(first: &[u8], second: &[u8]) -> Vec<u8> {
    let words = first.chunks(8).zip(second.chunks(8)).enumerate();
    let changed = words.filter(|(_, (first, second))| first != second);
    changed.flat_map(|(at, (_, second))| (at as u16).to_le_bytes().into_iter().chain(second.iter().copied())).collect()
}

/// Applies a delta record to `first`. Returns none if the record is malformed.
fn apply(first: &[u8], record: &[u8]) -> Option<Vec<u8>> {
    let mut content = first.to_vec();
    for entry in record.chunks(10) {
        let at = usize::from(u16::from_le_bytes(entry.get(..2)?.try_into().ok()?)) * 8;
        content.get_mut(at..at + 8)?.copy_from_slice(entry.get(2..10)?);
    }
    Some(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_references_of_the_trial_are_right() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let (first, mut second) = ([7; 64], [7; 64]);
        second[17] = 8;
        let record = delta(&first, &second);
        assert_eq!(record, [2, 0, 7, 8, 7, 7, 7, 7, 7, 7]);
        assert_eq!(apply(&first, &record).unwrap(), second);
        assert_eq!(apply(&first, &record[..9]), None);
    }

    #[test]
    fn errors_say_where_the_first_difference_is_and_both_values() {
        let (should, mut is) = (vec![0; 4096], vec![0; 4096]);
        assert_eq!(same_bytes("copy 3", &is, &should), Ok(()));
        is[1234] = 0x5a;
        is[4000] = 1;
        let wrong = same_bytes("copy 3", &is, &should).unwrap_err();
        assert_eq!(wrong, "copy 3 is wrong at byte 1234 of 4096 first: 0x5a in place of 0x00");
        let short = same_bytes("copy 3", &is[1..], &should).unwrap_err();
        assert_eq!(short, "copy 3 has 4095 bytes, and should have 4096");
        assert_eq!(where_differs(None), "not differ");
        assert_eq!(values(&should, &is, Some(1234)), "byte 1234: 0x00 and 0x5a");
        assert_eq!(values(&should, &is, Some(5000)), "byte 5000: nothing and nothing");
    }

    #[test]
    fn of_every_operation_something_is_tried_in_one_round_whatever_the_content() {
        for seed in 0..50 {
            let trials = Trials::open(&Accelerators::cpu(), &Settings::default()).unwrap();
            let tried = trials.run(&Settings::default(), seed, 1, &|| true).unwrap();
            assert_eq!(
                (tried.len(), tried[0].queue.as_str(), tried[0].operations.len()),
                (1, "cpu", Operation::ALL.len())
            );
            assert!(tried[0].operations.iter().all(|trial| trial.items > 0), "seed {seed}: {tried:?}");
            assert_eq!(tried[0].faults(), [] as [&str; 0], "seed {seed}");
        }
    }

    #[test]
    fn a_trial_ends_when_its_caller_stops_it() {
        let trials = Trials::open(&Accelerators::cpu(), &Settings::default()).unwrap();
        let asked = std::cell::Cell::new(0);
        let go_on = || {
            asked.set(asked.get() + 1);
            asked.get() <= 4
        };
        let tried = trials.run(&Settings::default(), 1, 1_000_000, &go_on).unwrap();
        let done = tried[0].operations.iter().filter(|trial| trial.items > 0).count();
        assert_eq!(done, 1, "the first operation's first three batches: {tried:?}");
    }

    #[test]
    fn work_that_a_device_did_not_do_is_a_fault_of_its_queue() {
        let trial = |items, fallbacks: &[(Cause, u64)]| Trial {
            operation: Operation::Copy,
            items,
            done_by: vec![(Kind::Dsa, items)],
            fallbacks: fallbacks.to_vec(),
            wrong: None,
        };
        let faults = |trial| {
            QueueTrial { queue: "dsa0/wq0.1".into(), operations: vec![trial], taken_out: Vec::new() }.faults().join("|")
        };
        assert_eq!(faults(trial(8, &[])), "");
        assert_eq!(faults(trial(8, &[(Cause::PageFault, 7)])), "", "a page fault is ordinary");
        let nothing = faults(trial(8, &[(Cause::QueueFull, 5), (Cause::PageFault, 3)]));
        assert!(nothing.starts_with("dsa0/wq0.1: copy: of 8 items 8 were not done by it"), "{nothing}");
        assert!(faults(trial(8, &[(Cause::DeviceError, 1)])).contains("1 because the device failed"));
        let full = Trial { done_by: Vec::new(), ..trial(8, &[(Cause::QueueFull, 8)]) };
        let queue = QueueTrial { queue: "dsa0/wq0.1".into(), operations: vec![full; 3], taken_out: Vec::new() };
        let said = "dsa0/wq0.1 did nothing; copy: of 8 items 8 were not done by it (8 because the queue stayed full)";
        assert_eq!(queue.faults(), [said], "once for all operations");
    }

    #[test]
    fn the_cpu_passes_its_own_trial() {
        let offload = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
        for trial in try_all(&offload, 1, 20) {
            assert_eq!(trial.wrong, None, "{trial:?}");
            assert!(trial.items > 0 && trial.done_by.is_empty() && trial.fallbacks.is_empty(), "{trial:?}");
        }
    }
}
