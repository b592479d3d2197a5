//! Measures scan, snapshot and checksum on this machine against a loop that only reads and a plain copy:
//! `taskset -c 2 cargo run --release -p sterna-bench --example memory_throughput [-- SUBSTRING]`
//!
//! One thread, by the CPU time it used. *Hot* is 256 KiB again and again; *cold* is 512 MiB from memory, in batches of 128
//! pages as a sender walks them, backed by huge pages or by small ones. The destination is one page-aligned buffer, as a
//! pool's is. Ways are interleaved; shown are median, least and most in GB/s of source, and the ratio of the medians to
//! `read loop` or `plain copy`. `STERNA_CPU` chooses the vectors of what the library chooses by itself.

use std::hint::black_box;
use sterna_memory::checksum::crc32c;
use sterna_memory::copy::{copy_crc32c_raw, copy_raw, crc32c_raw, store_raw};
use sterna_memory::scan::{Implementation, is_zero_raw, zero_map_raw};
use sterna_memory::{PAGE_SIZE, snapshot::Snapshot};

const HOT: usize = 256 << 10;
const COLD: usize = 512 << 20;
const BATCH: usize = 128 * PAGE_SIZE;
const ROUNDS: usize = 15;

/// Works on one batch: its pages, the buffer, the zero map.
type Way = (&'static str, Box<dyn Fn(&[u8], &mut [u8], &mut [u64])>);

fn main() {
    let only = std::env::args().nth(1).unwrap_or_default();
    let mut room = vec![0; BATCH + PAGE_SIZE];
    let start = room.as_ptr().align_offset(PAGE_SIZE);
    let buffer = &mut room[start..start + BATCH];
    println!("vectors: {}", Implementation::chosen().name());
    for huge in [true, false] {
        let mut hot = Memory::new(HOT, huge);
        let mut cold = Memory::new(COLD, huge);
        let backing = if huge { "huge pages" } else { "small pages" };
        for (content, zero_of_8) in [("normal", 0), ("mixed", 4), ("zero", 8)] {
            for (place, memory, repeat) in [("hot", &mut hot, 64), ("cold", &mut cold, 1)] {
                let title = format!("{place}, {backing}, {content} pages");
                if title.contains(&only) {
                    memory.fill(zero_of_8);
                    println!("{title}:");
                    measure(memory.bytes(), buffer, repeat);
                }
            }
        }
    }
}

fn ways() -> Vec<Way> {
    let mut ways: Vec<Way> = vec![
        ("read loop", Box::new(|batch, _, _| read_loop(batch))),
        (
            "zero map of a run",
            Box::new(|batch, _, map| {
                // SAFETY: the slice is readable and whole pages.
                black_box(unsafe { zero_map_raw(batch.as_ptr(), batch.len() / PAGE_SIZE, map) });
            }),
        ),
        (
            "zero test of each page",
            Box::new(|batch, _, _| {
                for page in batch.chunks(PAGE_SIZE) {
                    // SAFETY: a slice is readable.
                    black_box(unsafe { is_zero_raw(page.as_ptr(), page.len()) });
                }
            }),
        ),
        (
            "CRC-32C, each byte once",
            Box::new(|batch, _, _| {
                // SAFETY: a slice is readable.
                black_box(unsafe { crc32c_raw(batch.as_ptr(), batch.len(), 0) });
            }),
        ),
        ("plain copy", Box::new(|batch, buffer, _| black_box(&mut buffer[..batch.len()]).copy_from_slice(batch))),
        (
            "copy, each byte once",
            Box::new(|batch, buffer, _| {
                // SAFETY: slices are readable and writable; the buffer has room for a batch.
                unsafe { copy_raw(batch.as_ptr(), black_box(buffer).as_mut_ptr(), batch.len()) };
            }),
        ),
        (
            "store to memory that others access",
            Box::new(|batch, buffer, _| {
                // SAFETY: the buffer has room for a batch.
                unsafe { store_raw(batch, black_box(buffer).as_mut_ptr()) };
            }),
        ),
        (
            "copy with CRC-32C",
            Box::new(|batch, buffer, _| {
                // SAFETY: a slice is readable.
                black_box(unsafe { copy_crc32c_raw(batch.as_ptr(), &mut buffer[..batch.len()], 0) });
            }),
        ),
        (
            "plain copy, then zero test, then CRC-32C",
            Box::new(|batch, buffer, map| {
                let copy = &mut buffer[..batch.len()];
                copy.copy_from_slice(batch);
                // SAFETY: the copy is readable and whole pages.
                unsafe { zero_map_raw(copy.as_ptr(), copy.len() / PAGE_SIZE, map) };
                black_box(crc32c(copy));
            }),
        ),
    ];
    for (name, checked) in [("snapshot without CRC-32C", false), ("snapshot", true)] {
        ways.push((
            name,
            Box::new(move |batch, buffer, map| {
                let mut taking = Snapshot::new(buffer, map);
                if !checked {
                    taking = taking.unchecked();
                }
                // SAFETY: the slice is readable and whole pages.
                unsafe { taking.read(batch.as_ptr(), batch.len() / PAGE_SIZE) };
                black_box(taking.finish());
            }),
        ));
    }
    ways
}

fn measure(memory: &[u8], buffer: &mut [u8], repeat: usize) {
    let ways = ways();
    let mut speeds = vec![Vec::new(); ways.len()];
    let mut map = [0; BATCH / PAGE_SIZE / 64];
    // The first round warms up.
    for round in 0..=ROUNDS {
        for ((_, way), speeds) in ways.iter().zip(&mut speeds) {
            let began = cpu_ns();
            for _ in 0..repeat {
                memory.chunks(BATCH).for_each(|batch| way(black_box(batch), buffer, &mut map));
            }
            if round > 0 {
                speeds.push((memory.len() * repeat) as f64 / (cpu_ns() - began));
            }
        }
    }
    speeds.iter_mut().for_each(|speeds| speeds.sort_by(f64::total_cmp));
    let median = |name| speeds[ways.iter().position(|way| way.0 == name).unwrap()][ROUNDS / 2];
    let (read, copy) = (median("read loop"), median("plain copy"));
    for (number, (name, _)) in ways.iter().enumerate() {
        let speeds = &speeds[number];
        let against = if number < 4 { read } else { copy };
        println!(
            "  {name:<42} {:7.1} ({:.1}-{:.1}) GB/s {:6.1} %",
            speeds[ROUNDS / 2],
            speeds[0],
            speeds[ROUNDS - 1],
            100.0 * speeds[ROUNDS / 2] / against
        );
    }
}

/// Reads all of it and looks at nothing: what no scan can be faster than.
fn read_loop(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has it.
        return unsafe { read_loop_avx2(bytes) };
    }
    black_box(bytes.as_chunks::<8>().0.iter().fold(0, |any, word| any | u64::from_ne_bytes(*word)));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_loop_avx2(bytes: &[u8]) {
    use std::arch::x86_64::*;
    let mut all = [_mm256_setzero_si256(); 8];
    for block in bytes.as_chunks::<256>().0 {
        for (all, part) in all.iter_mut().zip(block.as_chunks::<32>().0) {
            // SAFETY: the part is 32 bytes.
            *all = _mm256_or_si256(*all, unsafe { _mm256_loadu_si256(part.as_ptr().cast()) });
        }
    }
    black_box(all);
}

/// The CPU time of this thread.
fn cpu_ns() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Whole pages at the start of a huge page.
struct Memory {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    fn new(len: usize, huge: bool) -> Self {
        const HUGE: usize = 2 << 20;
        let mut room: Vec<u8> = Vec::with_capacity(len + 2 * HUGE);
        let start = room.as_ptr().align_offset(HUGE);
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the range is within our own allocation and not yet used; the advice changes no content.
        unsafe { libc::madvise(room.as_mut_ptr().add(start).cast(), len.next_multiple_of(HUGE), advice) };
        room.resize(start + len, 0);
        Self { room, start, len }
    }

    fn bytes(&self) -> &[u8] {
        &self.room[self.start..][..self.len]
    }

    fn fill(&mut self, zero_of_8: usize) {
        for (number, page) in self.room[self.start..][..self.len].chunks_mut(PAGE_SIZE).enumerate() {
            // Mixed up, so that the branch predictor learns nothing.
            let zero = (number.wrapping_mul(0x9e37_79b9) >> 13) % 8 < zero_of_8;
            page.fill(if zero { 0 } else { number as u8 | 1 });
        }
    }
}
