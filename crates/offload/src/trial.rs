//! A trial of every operation on whatever was opened, beside what plain code says: `sterna accel test`.
//!
//! It works on memory of its own with content that it has made itself, so what must come out is known before anything is asked.

use std::ptr::NonNull;
use std::sync::Arc;

use sterna_memory::PAGE_SIZE;

use crate::arena::Slab;
use crate::batch::{Batch, Delta};
use crate::deflate::inflate;
use crate::engine::{Cause, Kind};
use crate::helpers::CallError;
use crate::offload::Offload;
use crate::operation::Operation;
use crate::region::{Range, Region};
use crate::request::Answer;

/// Pages of the memory that the trial works on, half of them for each range of a pair.
const PAGES: usize = 64;

/// How one operation went.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Trial {
    /// The operation.
    pub operation: Operation,
    /// Items that were asked for.
    pub items: u64,
    /// Those of them that an accelerator took on, by which. What it left undone of them is in `fallbacks`.
    pub done_by: Vec<(Kind, u64)>,
    /// Those that the CPU did in an accelerator's place, and why.
    pub fallbacks: Vec<(Cause, u64)>,
    /// What came out wrong, of the first batch that did.
    pub wrong: Option<String>,
}

/// Tries every operation in `rounds` batches each, with content chosen by `seed`. Ends early when the run is traced and the trace
/// cannot be written ([`Trace::finish`](crate::trace::Trace::finish) says why).
pub fn try_all(offload: &Offload, seed: u64, rounds: u32) -> Vec<Trial> {
    let mut ground = Ground::new(seed);
    Operation::ALL.into_iter().map(|operation| ground.trial(offload, operation, rounds)).collect()
}

/// Memory for a trial, and what must be in it.
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

    /// New content: pages of zeros, of zeros but for one byte, and of numbers; the second half is the first with some changes.
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
        for _ in 0..self.below(40) {
            let at = half + self.below(half);
            self.content[at] ^= 0x10;
        }
        self.show();
    }

    /// Puts the content into memory. Nothing is under way.
    fn show(&self) {
        // SAFETY: both are of this length and do not overlap; all batches on this memory are done.
        unsafe { std::ptr::copy_nonoverlapping(self.content.as_ptr(), self.memory.pointer(), self.content.len()) };
    }

    /// What is in memory. Nothing is under way.
    fn seen(&self) -> Vec<u8> {
        let mut seen = vec![0; self.content.len()];
        // SAFETY: as in `show`.
        unsafe { std::ptr::copy_nonoverlapping(self.memory.pointer(), seen.as_mut_ptr(), seen.len()) };
        seen
    }

    fn range(&self, offset: usize, bytes: usize) -> Range {
        self.region.range(offset, bytes).expect("the trial stays within its memory")
    }

    fn trial(&mut self, offload: &Offload, operation: Operation, rounds: u32) -> Trial {
        let before = counted(offload, operation);
        let (mut items, mut wrong) = (0, None);
        for round in 0..rounds {
            if offload.trace().is_some_and(|trace| trace.failed()) {
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

    /// One batch; says of how many items, or what is wrong with what came out.
    fn round(&mut self, offload: &Offload, operation: Operation) -> Result<u64, String> {
        let half = PAGES / 2 * PAGE_SIZE;
        match operation {
            Operation::ZeroMap => {
                let done = told(offload.call(operation, |batch| batch.push(&self.range(0, half)).map(drop)))?;
                for page in 0..PAGES / 2 {
                    let zero = self.content[page * PAGE_SIZE..][..PAGE_SIZE].iter().all(|byte| *byte == 0);
                    same("page", page, done.is_zero(page), zero)?;
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
        let done = told(offload.call(operation, |batch| {
            let page = |page: usize| self.range(page * PAGE_SIZE, PAGE_SIZE);
            (0..PAGES / 2).try_for_each(|at| batch.push_pair(&page(at), &page(PAGES / 2 + at)).map(drop))
        }))?;
        for item in 0..done.len() {
            let first = &self.content[item * PAGE_SIZE..][..PAGE_SIZE];
            let second = &self.content[half + item * PAGE_SIZE..][..PAGE_SIZE];
            let differs = (0..PAGE_SIZE).find(|at| first[*at] != second[*at]);
            if operation == Operation::Compare {
                same("pair", item, done.difference(item), differs)?;
                continue;
            }
            match done.delta(item) {
                Delta::Equal => same("pair", item, true, differs.is_none())?,
                Delta::Record(record) => {
                    same("record of pair", item, apply(first, record).as_deref(), Some(second))?;
                    same("record of pair", item, differs.is_some(), true)?;
                }
                Delta::TooLong => return Err(format!("the delta of pair {item} is called too long")),
            }
        }
        Ok(done.len() as u64)
    }

    fn singles(&mut self, offload: &Offload, operation: Operation) -> Result<u64, String> {
        let parts: Vec<_> = (0..8)
            .map(|part| {
                let most = PAGES / 2 * PAGE_SIZE / 8;
                // Odd places and lengths too; a deflate job is of whole pages.
                let (at, bytes) = match operation {
                    Operation::Deflate => (part * most, most),
                    _ => (part * most + self.below(63), 1 + self.below(most - 63)),
                };
                (at, bytes)
            })
            .collect();
        let fill =
            |batch: &mut Batch| parts.iter().try_for_each(|(at, bytes)| batch.push(&self.range(*at, *bytes)).map(drop));
        let done = told(offload.call(operation, fill))?;
        for (item, (at, bytes)) in parts.iter().enumerate() {
            let content = &self.content[*at..at + bytes];
            if matches!(operation, Operation::Copy | Operation::CopyChecksum) {
                same("copy", item, done.copy(item), content)?;
            }
            if matches!(operation, Operation::Checksum | Operation::CopyChecksum) {
                same("checksum", item, done.checksum(item), crc32c(content))?;
            }
            if operation == Operation::Deflate {
                let Some(stream) = done.deflated(item) else {
                    return Err(format!("the stream of item {item}, which compresses well, is called too long"));
                };
                let mut read = vec![0; *bytes];
                same("stream", item, inflate(stream, &mut read), Answer::Written(*bytes as u32))?;
                same("content of stream", item, &read[..], content)?;
            }
        }
        Ok(done.len() as u64)
    }

    fn placed(&mut self, offload: &Offload, operation: Operation) -> Result<u64, String> {
        let half = PAGES / 2 * PAGE_SIZE;
        let bytes = 8 * PAGE_SIZE;
        // Inputs for the first quarter; what it must hold then comes from the third.
        let inputs: Vec<Vec<u8>> = match operation {
            Operation::Place => vec![self.content[half..half + bytes].to_vec()],
            Operation::ApplyDelta => {
                vec![delta(&self.content[..bytes], &self.content[half..half + bytes])]
            }
            _ => {
                let streams =
                    told(offload.call(Operation::Deflate, |batch| batch.push(&self.range(half, bytes)).map(drop)))?;
                match streams.deflated(0) {
                    Some(stream) => vec![stream.to_vec()],
                    None => return Ok(0),
                }
            }
        };
        let input = &inputs[0];
        if input.is_empty() {
            // Nothing differs, so there is nothing to be applied.
            return Ok(0);
        }
        let fill = |batch: &mut Batch| {
            let room = batch.push_input(input.len(), &self.range(0, bytes))?;
            room.copy_from_slice(input);
            Ok(())
        };
        let done = told(offload.call(operation, fill))?;
        let mut expected = self.content.clone();
        expected.copy_within(half..half + bytes, 0);
        same("range", 0, done.placed(0).is_some(), true)?;
        same("memory after item", 0, self.seen() == expected, true)?;
        Ok(1)
    }
}

fn told(called: Result<Batch, CallError>) -> Result<Batch, String> {
    called.map_err(|error| error.to_string())
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, item: usize, is: T, should: T) -> Result<(), String> {
    if is == should {
        return Ok(());
    }
    let shown = |value: T| {
        let mut text = format!("{value:?}");
        text.truncate(60);
        text
    };
    Err(format!("{what} {item} is {}, and should be {}", shown(is), shown(should)))
}

fn of<T: PartialEq + Copy>(counts: &[(T, u64)], which: T) -> u64 {
    counts.iter().find(|(one, _)| *one == which).map_or(0, |(_, count)| *count)
}

/// What the counters of an operation say.
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

/// A delta record, word by word.
fn delta(first: &[u8], second: &[u8]) -> Vec<u8> {
    let words = first.chunks(8).zip(second.chunks(8)).enumerate();
    let changed = words.filter(|(_, (first, second))| first != second);
    changed.flat_map(|(at, (_, second))| (at as u16).to_le_bytes().into_iter().chain(second.iter().copied())).collect()
}

/// `first` with a delta record applied; none if the record is none.
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
    use crate::{Accelerators, Settings};

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
    fn the_cpu_passes_its_own_trial() {
        let offload = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
        for trial in try_all(&offload, 1, 20) {
            assert_eq!(trial.wrong, None, "{trial:?}");
            assert!(trial.items > 0 && trial.done_by.is_empty() && trial.fallbacks.is_empty(), "{trial:?}");
        }
    }
}
