//! Measures the zero test, the snapshot and the checksum on this machine:
//! `cargo run --release -p sterna-memory --example memory_throughput`
//!
//! One thread. Source memory is larger than the caches and walked in batches of 128 pages, as a sender does; the
//! destination is one buffer. Ways are interleaved and the median of the rounds is shown, in GiB/s of source.

use std::hint::black_box;
use std::time::Instant;
use sterna_memory::scan::Implementation;
use sterna_memory::{PAGE_SIZE, snapshot::Snapshot};

const PAGES: usize = 1 << 18;
const BATCH: usize = 128;
const ROUNDS: usize = 7;

/// Works on one batch: its pages, the buffer, the zero map.
type Way<'a> = (String, Box<dyn Fn(&[u8], &mut [u8], &mut [u64]) + 'a>);

fn main() {
    let mut buffer = vec![0; BATCH * PAGE_SIZE];
    let mut memory = vec![1u8; PAGES * PAGE_SIZE];
    for (content, zero_of_8) in [("no zero page", 0), ("half of the pages zero", 4), ("all pages zero", 8)] {
        for (number, page) in memory.chunks_mut(PAGE_SIZE).enumerate() {
            // Mixed up, so that the branch predictor learns nothing.
            let zero = (number.wrapping_mul(0x9e37_79b9) >> 13) % 8 < zero_of_8;
            page.fill(if zero { 0 } else { number as u8 | 1 });
        }
        println!("{content}:");
        for (name, gib_per_second) in measure(&memory, &mut buffer, &ways()) {
            println!("  {name:<44} {gib_per_second:6.1} GiB/s");
        }
    }
    let crc: Vec<Way<'_>> = vec![("checksum, 512 KiB in cache".into(), Box::new(|_, buffer, _| checksum(buffer)))];
    for (name, gib_per_second) in measure(&memory, &mut buffer, &crc) {
        println!("{name:<46} {gib_per_second:6.1} GiB/s");
    }
}

fn checksum(bytes: &[u8]) {
    black_box(crc_fast::crc32_iscsi(bytes));
}

fn ways() -> Vec<Way<'static>> {
    let mut ways: Vec<Way<'static>> = Implementation::available()
        .iter()
        .map(|&way| -> Way<'static> {
            let scan = move |batch: &[u8], _: &mut [u8], _: &mut [u64]| {
                for page in batch.chunks(PAGE_SIZE) {
                    // SAFETY: a slice is readable, and the implementation is one of those available.
                    black_box(unsafe { way.is_zero_raw(page.as_ptr(), page.len()) });
                }
            };
            (format!("zero test, {way:?}"), Box::new(scan))
        })
        .collect();
    ways.push(("memcpy".into(), Box::new(|batch, buffer, _| black_box(buffer).copy_from_slice(batch))));
    ways.push((
        "memcpy, then zero test, then checksum".into(),
        Box::new(|batch, buffer, map| {
            buffer.copy_from_slice(batch);
            for (number, page) in buffer.chunks(PAGE_SIZE).enumerate() {
                map[number / 64] |= u64::from(sterna_memory::scan::is_zero(page)) << (number % 64);
            }
            checksum(buffer);
        }),
    ));
    ways.push((
        "snapshot (copy, zero test, checksum)".into(),
        Box::new(|batch, buffer, map| {
            let mut taking = Snapshot::new(buffer, map);
            // SAFETY: the slice is mapped, readable, page-aligned (large allocations are checked by `read`).
            unsafe { taking.read(batch.as_ptr(), batch.len() / PAGE_SIZE) };
            black_box(taking.finish());
        }),
    ));
    ways
}

fn measure(memory: &[u8], buffer: &mut [u8], ways: &[Way<'_>]) -> Vec<(String, f64)> {
    let start = memory.as_ptr().align_offset(PAGE_SIZE);
    let mut times = vec![Vec::new(); ways.len()];
    for _ in 0..ROUNDS {
        for ((_, way), times) in ways.iter().zip(&mut times) {
            let began = Instant::now();
            for batch in memory[start..].chunks_exact(BATCH * PAGE_SIZE) {
                way(black_box(batch), buffer, &mut [0; BATCH / 64]);
            }
            times.push(began.elapsed().as_secs_f64());
        }
    }
    let gib = (memory[start..].len() / (BATCH * PAGE_SIZE) * BATCH * PAGE_SIZE) as f64 / f64::from(1 << 30);
    ways.iter()
        .zip(&mut times)
        .map(|((name, _), times)| {
            times.sort_by(f64::total_cmp);
            (name.clone(), gib / times[ROUNDS / 2])
        })
        .collect()
}
