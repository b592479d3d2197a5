//! The workers, over the real library's software path.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use sterna_qatzip::{
    By, Bytes, Channel, Completion, Failure, Job, Options, Params, Pool, Reason, Software, StartError, Statistics, Work,
};
use sterna_test_kit::content::{code_like, noise};
use sterna_test_kit::qatzip::{library, read_gzip, software, write_gzip};

const LARGEST: usize = 256 << 10;

fn number(of: usize) -> NonZeroUsize {
    NonZeroUsize::new(of).unwrap()
}

fn pool(workers: usize, queue: usize) -> Option<Pool> {
    let options = Options { workers: number(workers), queue: number(queue), params: software(LARGEST) };
    Some(Pool::start(&library()?, &options).unwrap())
}

fn job(tag: u64, work: Work, input: impl Into<Bytes>) -> Job {
    Job { tag, work, input: input.into(), output: Vec::new().into(), room: LARGEST }
}

fn next(channel: &Channel) -> Completion {
    channel.wait(Instant::now() + Duration::from_secs(120)).expect("a completion")
}

#[test]
fn many_threads_share_the_workers_and_each_gets_its_own_jobs_back_exactly_once() {
    const THREADS: u64 = 6;
    const JOBS: u64 = 40;
    let Some(pool) = pool(3, 4) else { return };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let channel = pool.channel(number(5));
            scope.spawn(move || {
                let plain = |tag: u64| code_like(thread * 1000 + tag, 4096 + (tag as usize * 5333) % (LARGEST - 4096));
                let mut waiting: Vec<Job> = (0..JOBS).map(|tag| job(tag, Work::Compress, plain(tag))).collect();
                let (mut packed, mut plained) = (0, 0);
                while plained < JOBS {
                    while let Some(next) = waiting.pop() {
                        if let Err(refused) = channel.submit(next) {
                            assert!(matches!(refused.reason, Reason::Full | Reason::ChannelFull));
                            waiting.push(refused.job);
                            break;
                        }
                    }
                    // With nothing of its own in flight there is nothing to wait for: others have the queue.
                    let Some(done) = channel.wait(Instant::now() + Duration::from_secs(120)) else {
                        std::thread::yield_now();
                        continue;
                    };
                    done.result.unwrap();
                    if *done.input == *plain(done.tag) {
                        packed += 1;
                        assert_eq!(read_gzip(&done.output), *done.input);
                        waiting.push(job(done.tag, Work::Decompress, done.output));
                    } else {
                        plained += 1;
                        assert_eq!(*done.output, *plain(done.tag));
                    }
                }
                assert_eq!((packed, channel.in_flight()), (JOBS, 0));
            });
        }
    });
    let statistics = pool.shutdown(Duration::from_secs(60)).unwrap();
    let jobs = THREADS * JOBS;
    assert_eq!((statistics.compressed, statistics.decompressed, statistics.by_software), (jobs, jobs, 2 * jobs));
    assert_eq!((statistics.by_hardware, statistics.failed, statistics.bytes_in), (0, 0, statistics.bytes_out));
}

#[test]
fn what_happened_is_counted() {
    let Some(pool) = pool(1, 8) else { return };
    let channel = pool.channel(number(8));
    let plain = code_like(1, 50_000);
    channel.submit(job(1, Work::Compress, plain.clone())).unwrap();
    channel.submit(Job { room: 49_000, ..job(2, Work::Compress, noise(2, 50_000)) }).unwrap();
    channel.submit(job(3, Work::Decompress, write_gzip(&plain)[..700].to_vec())).unwrap();
    channel.submit(job(4, Work::Decompress, vec![7; 9])).unwrap();
    let results: Vec<_> =
        (0..4).map(|_| next(&channel)).map(|done| (done.tag, done.result, done.output.len())).collect();
    assert!(matches!(results[0], (1, Ok(done), len) if done.bytes == len && done.by == By::Software), "{results:?}");
    assert_eq!(results[1], (2, Err(Failure::TooLong { room: 49_000 }), 0));
    assert!(matches!(results[2], (3, Err(Failure::BadInput(_)), 0)), "{results:?}");
    assert!(matches!(results[3], (4, Err(Failure::BadInput(_)), 0)), "{results:?}");
    let expected = Statistics {
        compressed: 1,
        by_software: 1,
        too_long: 1,
        failed: 2,
        bytes_in: 50_000,
        bytes_out: results[0].2 as u64,
        renewed: 1,
        ..Statistics::default()
    };
    assert_eq!(pool.shutdown(Duration::from_secs(60)), Ok(expected));
}

#[test]
fn buffers_come_back_as_they_were_given() {
    let Some(pool) = pool(1, 1) else { return };
    let channel = pool.channel(number(1));
    let mut job = Job { output: Vec::with_capacity(LARGEST).into(), ..job(0, Work::Compress, code_like(1, LARGEST)) };
    let places = (job.input.as_ptr(), job.output.as_ptr());
    for tag in 0..5 {
        channel.submit(job).unwrap();
        let done = next(&channel);
        assert_eq!((done.tag, done.input.as_ptr(), done.output.as_ptr()), (tag, places.0, places.1));
        job = Job { tag: tag + 1, work: Work::Compress, input: done.input, output: done.output, room: LARGEST };
    }
}

#[test]
fn what_lies_in_the_librarys_memory_already_is_read_and_written_there() {
    let Some(pool) = pool(2, 2) else { return };
    let channel = pool.channel(number(2));
    let (mut input, mut output) = pool.buffers().unwrap();
    let places = (input.as_ptr(), output.as_ptr());
    assert!((input.len(), output.len(), input.capacity()) == (0, 0, LARGEST) && output.capacity() > LARGEST);
    for (tag, plain) in
        [code_like(1, LARGEST), noise(2, LARGEST), code_like(3, 9), vec![], code_like(5, 70_000)].iter().enumerate()
    {
        let tag = tag as u64;
        input.fill(plain);
        assert_eq!(*input, **plain);
        let compress = Job { tag, work: Work::Compress, input: input.into(), output: output.into(), room: usize::MAX };
        channel.submit(compress).unwrap();
        let done = next(&channel);
        let bytes = done.result.unwrap().bytes;
        assert_eq!(
            (done.tag, done.input.as_ptr(), done.output.as_ptr(), done.output.len()),
            (tag, places.0, places.1, bytes)
        );
        assert_eq!((read_gzip(&done.output), &*done.input), (plain.clone(), &plain[..]));
        // From the library's memory to ordinary memory, and back to the library's: any of the two on either side.
        channel.submit(job(9, Work::Decompress, done.output)).unwrap();
        let back = next(&channel);
        assert_eq!((back.result.unwrap().bytes, &*back.output), (plain.len(), &plain[..]));
        let (Bytes::Pinned(given), Bytes::Pinned(written)) = (done.input, back.input) else {
            panic!("as they were given")
        };
        (input, output) = (given, written);
    }
    // Too small for the worst that could come of it.
    let (mut other, _) = pool.buffers().unwrap();
    input.fill(&code_like(1, LARGEST));
    other.fill(b"something");
    let job = Job { tag: 0, work: Work::Compress, input: input.into(), output: other.into(), room: LARGEST };
    channel.submit(job).unwrap();
    let refused = next(&channel);
    assert!(matches!(refused.result, Err(Failure::TooLarge { limit: LARGEST, .. })), "{:?}", refused.result);
    assert!(refused.output.is_empty());
}

#[test]
fn forbidden_software_stops_the_pool_before_it_has_a_thread() {
    let Some(library) = library() else { return };
    if library.hardware().is_ok() {
        eprintln!("skipped: this machine has QAT hardware");
        return;
    }
    let params = Params { software: Software::Forbidden, ..Params::default() };
    let error = Pool::start(&library, &Options { workers: number(4), queue: number(4), params }).unwrap_err();
    assert!(matches!(error, StartError::NoHardware(_)), "{error}");
}

#[test]
fn after_a_shutdown_jobs_are_refused_and_done_ones_can_still_be_collected() {
    let Some(pool) = pool(1, 4) else { return };
    let channel = pool.channel(number(4));
    for tag in 0..4 {
        channel.submit(job(tag, Work::Compress, code_like(tag, LARGEST))).unwrap();
    }
    pool.shutdown(Duration::from_secs(60)).unwrap();
    let refused = channel.submit(job(9, Work::Compress, vec![0; 5000])).unwrap_err();
    assert_eq!((refused.reason, refused.job.tag), (Reason::ShutDown, 9));
    let mut tags: Vec<u64> = std::iter::from_fn(|| channel.poll())
        .map(|done| {
            assert!(matches!(done.result, Ok(_) | Err(Failure::ShutDown)));
            done.tag
        })
        .collect();
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2, 3]);
    assert!(channel.wait(Instant::now() + Duration::from_secs(3600)).is_none(), "nothing is in flight");
}
