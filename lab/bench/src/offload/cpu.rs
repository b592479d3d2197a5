//! The CPU's own cost per page: of the zero test and of a snapshot.
//!
//! Both have a lower bound, which is measured beside them: a loop that only reads the same memory, and a plain copy of
//! it into the same buffer. *Hot* is memory that stays in the cache, *cold* is walked once from start to end, as a
//! migration walks a guest, in batches of 128 pages.

use std::cell::RefCell;
use std::hint::black_box;

use rustix::mm::{Advice, madvise};
use rustix::time::{ClockId, clock_gettime};
use sterna_engine::cancel::Cancel;
use sterna_memory::PAGE_SIZE;
use sterna_memory::scan::{Implementation, zero_map_raw};
use sterna_memory::snapshot::Snapshot;

use crate::BenchArgs;
use crate::harness::{Cell, Findings, Spread, interleaved};
use crate::hosts::HostsError;

const BATCH: usize = 128 * PAGE_SIZE;
const HUGE: usize = 2 << 20;
/// The number of short runs whose median is one run of a cell: this excludes interruptions by other work.
const SHORT_RUNS: usize = 9;

/// The memory of a cell.
#[derive(Clone, Copy)]
struct Place {
    name: &'static str,
    bytes: usize,
    huge_pages: bool,
    /// How many times a short run walks it.
    walks: usize,
}

const PLACES: [Place; 3] = [
    Place { name: "hot", bytes: 256 << 10, huge_pages: true, walks: 200 },
    Place { name: "cold", bytes: 256 << 20, huge_pages: true, walks: 1 },
    Place { name: "cold, small pages", bytes: 256 << 20, huge_pages: false, walks: 1 },
];

/// How many of eight pages are zero.
pub(super) const CONTENTS: [(&str, usize); 3] = [("all zero", 8), ("mixed", 4), ("all normal", 0)];

/// Work on a batch of pages, with a buffer of the same size and a zero map.
type Work = fn(&[u8], &mut [u8], &mut [u64]);

const READ: &str = "read loop";
const SCAN: &str = "scan";
const COPY: &str = "plain copy";
const SNAPSHOT: &str = "snapshot";
const WAYS: [(&str, Work); 4] = [(READ, read), (SCAN, scan), (COPY, copy), (SNAPSHOT, snapshot)];

/// Returns the cell of the CPU's scan with which a device is compared: memory that is in no cache, as in a migration.
pub(super) fn scan_cell(content: &str) -> String {
    name("cold", content, SCAN)
}

fn name(place: &str, content: &str, way: &str) -> String {
    format!("cpu, {place}, {content}: {way}")
}

/// Returns the names of the cells.
pub(super) fn cells() -> Vec<String> {
    let parts = PLACES.iter().flat_map(|place| CONTENTS.map(|(content, _)| (place.name, content)));
    parts.flat_map(|(place, content)| WAYS.map(|(way, _)| name(place, content, way))).collect()
}

/// Measures the selected cells.
pub(super) fn measure(
    args: &BenchArgs,
    cancel: &Cancel,
    progress: &dyn Fn(&str),
    findings: &mut Findings,
) -> Result<(), HostsError> {
    let buffer = RefCell::new(Pages::new(BATCH, true)?);
    for place in PLACES {
        let mut memory = Pages::new(place.bytes, place.huge_pages)?;
        for (content, zero_of_8) in CONTENTS {
            let wanted = WAYS.into_iter().filter(|(way, _)| args.wants(&name(place.name, content, way)));
            let wanted: Vec<_> = wanted.collect();
            if wanted.is_empty() {
                continue;
            }
            memory.fill(zero_of_8);
            let (memory, buffer) = (&memory, &buffer);
            let mut cells: Vec<Cell<'_>> = wanted
                .into_iter()
                .map(|(way, work)| Cell {
                    name: name(place.name, content, way),
                    run: Box::new(move || {
                        let ns = ns_per_page(work, memory.bytes(), buffer.borrow_mut().bytes_mut(), place.walks);
                        Ok(vec![ns, PAGE_SIZE as f64 * 1e9 / ns, 0.0, ns, 0.0, 0.0, 0.0])
                    }),
                })
                .collect();
            findings.rows.extend(interleaved(&mut cells, args.rounds(), cancel, progress)?);
        }
    }
    Ok(())
}

/// Adds the targets: the ratio to the lower bound.
pub(super) fn judge(findings: &mut Findings) {
    for place in PLACES {
        for (what, limit, content, way, floor) in [
            ("scan of zero pages to a read loop", 1.05, "all zero", SCAN, READ),
            ("snapshot with checksum to a plain copy", 1.25, "all normal", SNAPSHOT, COPY),
        ] {
            findings.at_most(
                &format!("{what}, {}", place.name),
                limit,
                &name(place.name, content, way),
                &name(place.name, content, floor),
                "ns_per_page",
            );
        }
    }
}

/// Returns the notes for the reader.
pub(super) fn notes() -> Vec<String> {
    vec![
        format!(
            "The CPU's cells are CPU time of one thread; a run is the median of {SHORT_RUNS} short ones. Vectors: {} \
             (STERNA_CPU chooses others).",
            Implementation::chosen().name()
        ),
        "The snapshot is copy, zero test and CRC-32C together; the plain copy is memcpy into the same page-aligned buffer, \
         and copies zero pages too. 95 % and 80 % of the floor's speed are 1.05 and 1.25 times its time."
            .into(),
    ]
}

/// Returns the median of several short runs of `work` over all of `memory`, in CPU time per page.
fn ns_per_page(work: Work, memory: &[u8], buffer: &mut [u8], walks: usize) -> f64 {
    let mut map = [0; BATCH / PAGE_SIZE / 64];
    let pages = (walks * memory.len() / PAGE_SIZE) as f64;
    let runs: Vec<f64> = (0..SHORT_RUNS)
        .map(|_| {
            let began = cpu_ns();
            for _ in 0..walks {
                memory.chunks(BATCH).for_each(|batch| work(black_box(batch), buffer, &mut map));
            }
            (cpu_ns() - began) / pages
        })
        .collect();
    Spread::of(&runs).expect("there are runs").median
}

/// Returns the CPU time of this thread.
pub(super) fn cpu_ns() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

fn scan(batch: &[u8], _: &mut [u8], map: &mut [u64]) {
    // SAFETY: the slice is readable and whole pages.
    black_box(unsafe { zero_map_raw(batch.as_ptr(), batch.len() / PAGE_SIZE, map) });
}

fn copy(batch: &[u8], buffer: &mut [u8], _: &mut [u64]) {
    black_box(&mut buffer[..batch.len()]).copy_from_slice(batch);
}

fn snapshot(batch: &[u8], buffer: &mut [u8], map: &mut [u64]) {
    let mut taking = Snapshot::new(buffer, map);
    // SAFETY: the slice is readable and whole pages.
    unsafe { taking.read(batch.as_ptr(), batch.len() / PAGE_SIZE) };
    black_box(taking.finish());
}

/// Only reads the batch.
fn read(batch: &[u8], _: &mut [u8], _: &mut [u64]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        return unsafe { read_avx2(batch) };
    }
    black_box(batch.as_chunks::<8>().0.iter().fold(0, |any, word| any | u64::from_ne_bytes(*word)));
}

/// Eight sums side by side, so that no addition waits for another; wider vectors were no faster.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2(batch: &[u8]) {
    use std::arch::x86_64::*;
    let mut any = [_mm256_setzero_si256(); 8];
    for block in batch.as_chunks::<256>().0 {
        for (any, part) in any.iter_mut().zip(block.as_chunks::<32>().0) {
            // SAFETY: the part is 32 bytes.
            *any = _mm256_or_si256(*any, unsafe { _mm256_loadu_si256(part.as_ptr().cast()) });
        }
    }
    black_box(any);
}

/// Memory that begins at a huge page.
pub(super) struct Pages {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    pub(super) fn new(len: usize, huge: bool) -> Result<Self, HostsError> {
        let mut room: Vec<u8> = Vec::new();
        room.try_reserve_exact(len + 2 * HUGE)
            .map_err(|error| HostsError(format!("no {len} bytes of memory to work on: {error}")))?;
        let start = room.as_ptr().align_offset(HUGE);
        let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the range is within our own allocation and not yet used; the advice changes no content. A kernel
        // without huge pages refuses it, and has small pages either way.
        let _ = unsafe { madvise(room.as_mut_ptr().add(start).cast(), len.next_multiple_of(HUGE), advice) };
        room.resize(start + len, 0);
        Ok(Self { room, start, len })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.room[self.start..][..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.start..][..self.len]
    }

    pub(super) fn fill(&mut self, zero_of_8: usize) {
        for (number, page) in self.bytes_mut().chunks_mut(PAGE_SIZE).enumerate() {
            // In an irregular order, so that the branch predictor learns nothing.
            let zero = (number.wrapping_mul(0x9e37_79b9) >> 13) % 8 < zero_of_8;
            page.fill(if zero { 0 } else { number as u8 | 1 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Row;
    use crate::offload::COLUMNS;

    #[test]
    fn every_way_gives_a_time_and_the_scan_finds_the_zero_pages_of_each_content() {
        for (content, zero_of_8) in CONTENTS {
            let (mut memory, mut buffer) = (Pages::new(BATCH, true).unwrap(), Pages::new(BATCH, true).unwrap());
            memory.fill(zero_of_8);
            for (way, work) in WAYS {
                let ns = ns_per_page(work, memory.bytes(), buffer.bytes_mut(), 1);
                assert!(ns > 0.0 && ns.is_finite(), "{content}, {way}: {ns}");
            }
            let mut map = [0; 2];
            scan(memory.bytes(), buffer.bytes_mut(), &mut map);
            let zero = map.iter().map(|word| word.count_ones()).sum::<u32>() as usize;
            let expected = memory.bytes().chunks(PAGE_SIZE).filter(|page| page.iter().all(|byte| *byte == 0)).count();
            assert_eq!(zero, expected, "{content}");
            assert_eq!((zero == 0, zero == 128), (zero_of_8 == 0, zero_of_8 == 8), "{content}");
        }
    }

    #[test]
    fn every_target_is_about_cells_that_exist() {
        let row = |name| Row { name, detail: String::new(), runs: vec![vec![100.0; COLUMNS.len()]], void: None };
        let mut findings = Findings {
            name: "offload",
            columns: COLUMNS,
            rows: cells().into_iter().map(row).collect(),
            targets: Vec::new(),
            notes: notes(),
        };
        judge(&mut findings);
        assert_eq!(findings.targets.len(), 2 * PLACES.len());
        assert!(findings.targets.iter().all(|target| target.met() == Some(true)));
    }
}
