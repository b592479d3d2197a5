//! Measures the engine `qat` by whatever QATzip finds (a device, or its own software where there is none) beside the CPU's gzip, on
//! batches of 512 KiB, one channel:
//! `STERNA_QATZIP=DIR cargo run --release -p sterna-bench --example qat_throughput -- FILE…`
//!
//! CPU is that of all threads. Everything in memory, best of three passes.

use std::time::{Duration, Instant};

use sterna_codec::{Encoded, Encoder, Encoding, Engine, Engines, MethodChoice, Qatzip, QatzipSoftware};

const BATCH: usize = 512 << 10;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut content = Vec::new();
    for file in std::env::args_os().skip(1) {
        content.extend(std::fs::read(file)?);
    }
    if content.len() < BATCH {
        return Err("name files of a megabyte or more together".into());
    }
    let qatzip = Qatzip { software: QatzipSoftware::Always, ..Qatzip::default() };
    println!("| method | MB/s | CPU ns per byte | ratio |\n|---|---|---|---|");
    for level in [1, 6] {
        for engine in [Engine::Cpu, Engine::Qat] {
            let choice: MethodChoice = format!("deflate {level} by {engine}").parse()?;
            let (engines, line) = qatzip.engines(choice, 1)?;
            line.iter().for_each(|line| eprintln!("{line}"));
            measure(engines.encoding(choice)?, &engines, &content)?;
        }
    }
    Ok(())
}

fn measure(encoding: Encoding, engines: &Engines, content: &[u8]) -> Result<(), sterna_codec::CodecError> {
    let mut encoder: Box<dyn Encoder> = encoding.non_adaptive_encoder(engines)?;
    let mut packet = vec![0; BATCH];
    let mut best = (Duration::MAX, Duration::MAX, 0);
    for _ in 0..3 {
        let (cpu, begun, mut packed) = (cpu_time(), Instant::now(), 0);
        for batch in content.chunks_exact(BATCH) {
            packed += match encoder.encode(batch, &mut packet)? {
                Encoded::Shrunk(bytes) => bytes,
                Encoded::Incompressible => BATCH,
            };
        }
        best = best.min((begun.elapsed(), cpu_time() - cpu, packed));
    }
    let (wall, cpu, packed) = best;
    let plain = content.len() / BATCH * BATCH;
    let rate = plain as f64 / wall.as_secs_f64() / 1e6;
    let nanos = cpu.as_nanos() as f64 / plain as f64;
    let by = engines.account(encoding).map(|account| format!(", {account}")).unwrap_or_default();
    println!("| {encoding}{by} | {rate:.0} | {nanos:.1} | {:.3} |", plain as f64 / packed as f64);
    Ok(())
}

/// Of this process, all threads.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one structure.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
