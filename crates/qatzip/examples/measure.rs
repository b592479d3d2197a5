//! What QATzip's software path costs beside libdeflate, and what handing a job to a worker costs.
//!
//! ```text
//! STERNA_QATZIP=target/tools/qatzip/usr/lib/x86_64-linux-gnu taskset -c 0 \
//!     cargo run --release -p sterna-qatzip --example measure -- FILE…
//! ```
//! The files' bytes, one after another, are cut into jobs; every figure is CPU time of this process, all threads, the better of
//! three passes.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use sterna_qatzip::{Choice, Job, Library, Options, Params, Pool, Software, Work};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut data = Vec::new();
    for file in std::env::args_os().skip(1) {
        data.extend(std::fs::read(file)?);
    }
    data.truncate(32 << 20);
    if data.len() < 1 << 20 {
        return Err("name files of a megabyte or more together".into());
    }
    let library = Library::open(&Choice::from_environment())?;
    println!("{}, {} MiB of input", library.file().display(), data.len() >> 20);
    println!("| engine, level 1 | KiB per job | compress MB/s | ratio | decompress MB/s |");
    println!("|---|---|---|---|---|");
    for kib in [64, 128, 256, 512] {
        let jobs: Vec<&[u8]> = data.chunks_exact(kib << 10).collect();
        let params = Params { software: Software::Always, largest_job: 512 << 10, ..Params::default() };
        let mut session = library.session(&params)?;
        let mut output = Vec::with_capacity(1 << 20);
        row("qatzip, its software", kib, &jobs, |plain| {
            session.compress(plain, &mut output, 1 << 20).expect("compresses");
            output.clone()
        });
        let mut back = Vec::with_capacity(1 << 20);
        let packed: Vec<Vec<u8>> = jobs
            .iter()
            .map(|plain| {
                session.compress(plain, &mut output, 1 << 20).expect("compresses");
                output.clone()
            })
            .collect();
        decompressed(&jobs, || {
            for packed in &packed {
                session.decompress(packed, &mut back, kib << 10).expect("decompresses");
            }
        });
        let mut compressor = libdeflater::Compressor::new(libdeflater::CompressionLvl::new(1).expect("a level"));
        let mut buffer = vec![0; 1 << 20];
        row("libdeflate", kib, &jobs, |plain| {
            let len = compressor.gzip_compress(plain, &mut buffer).expect("compresses");
            buffer[..len].to_vec()
        });
        let packed: Vec<Vec<u8>> = jobs
            .iter()
            .map(|plain| {
                let len = compressor.gzip_compress(plain, &mut buffer).expect("compresses");
                buffer[..len].to_vec()
            })
            .collect();
        let mut decompressor = libdeflater::Decompressor::new();
        decompressed(&jobs, || {
            for packed in &packed {
                decompressor.gzip_decompress(packed, &mut buffer[..kib << 10]).expect("decompresses");
            }
        });
    }
    hand_over(&library, &data)
}

fn row(engine: &str, kib: usize, jobs: &[&[u8]], mut compress: impl FnMut(&[u8]) -> Vec<u8>) {
    let mut packed = 0;
    let best = best_of_three(|| packed = jobs.iter().map(|plain| compress(plain).len()).sum());
    let plain: usize = jobs.iter().map(|job| job.len()).sum();
    print!("| {engine} | {kib} | {:.0} | {:.3} ", rate(plain, best), plain as f64 / packed as f64);
}

fn decompressed(jobs: &[&[u8]], run: impl FnMut()) {
    let best = best_of_three(run);
    println!("| {:.0} |", rate(jobs.iter().map(|job| job.len()).sum(), best));
}

fn rate(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e6
}

fn best_of_three(mut run: impl FnMut()) -> Duration {
    (0..3)
        .map(|_| {
            let start = cpu_time();
            run();
            cpu_time() - start
        })
        .min()
        .expect("three")
}

fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one structure.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).expect("below a second"))
}

/// The same small jobs by one worker and by a session of this thread's own; the difference is the hand-over. One at a time the
/// worker sleeps and wakes for each; with eight in flight it does not.
fn hand_over(library: &std::sync::Arc<Library>, data: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
    const JOBS: usize = 4000;
    let params = Params { software: Software::Always, largest_job: 64 << 10, ..Params::default() };
    let one = NonZeroUsize::MIN;
    let eight = NonZeroUsize::new(8).expect("not 0");
    println!("\n| 4 KiB jobs | CPU µs per job | wall µs per job |\n|---|---|---|");
    let print = |what: &str, cpu: Duration, wall: Duration| {
        let each = |time: Duration| time.as_secs_f64() * 1e6 / JOBS as f64;
        println!("| {what} | {:.2} | {:.2} |", each(cpu), each(wall));
    };
    let plain = &data[..4096];
    let mut session = library.session(&params)?;
    let mut output = Vec::with_capacity(8192);
    let (cpu, wall) = (cpu_time(), Instant::now());
    for _ in 0..JOBS {
        session.compress(plain, &mut output, 8192)?;
    }
    print("session of this thread", cpu_time() - cpu, wall.elapsed());
    for (what, in_flight) in [("one worker, one in flight", one), ("one worker, eight in flight", eight)] {
        let pool = Pool::start(library, &Options { workers: one, queue: eight, params })?;
        let channel = pool.channel(in_flight);
        let mut idle: Vec<Job> = (0..in_flight.get())
            .map(|tag| Job {
                tag: tag as u64,
                work: Work::Compress,
                input: plain.to_vec().into(),
                output: Vec::with_capacity(8192).into(),
                room: 8192,
            })
            .collect();
        let (cpu, wall) = (cpu_time(), Instant::now());
        for _ in 0..JOBS {
            while let Some(job) = idle.pop() {
                channel.submit(job).map_err(|refused| refused.reason)?;
            }
            let done = channel.wait(Instant::now() + Duration::from_secs(60)).ok_or("no completion")?;
            done.result?;
            idle.push(Job { tag: done.tag, work: Work::Compress, input: done.input, output: done.output, room: 8192 });
        }
        print(what, cpu_time() - cpu, wall.elapsed());
    }
    Ok(())
}
