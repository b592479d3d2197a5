//! Workers that die or hang, which only this crate's own tests can make.

use sterna_test_kit::tools;

use super::*;
use crate::{Choice, OpenError, Software};

fn start(workers: usize) -> Option<Pool> {
    let choice = tools::qatzip_directory().map_or(Choice::System, Choice::Path);
    let library = match Library::open(&choice) {
        Ok(library) => library,
        Err(error @ OpenError::NotFound { .. }) if choice == Choice::System => {
            tools::skip_without_qatzip(&error.to_string());
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let params = Params { software: Software::Always, largest_job: 64 << 10, ..Params::default() };
    let number = |of| NonZeroUsize::new(of).unwrap();
    Some(Pool::start(&library, &Options { workers: number(workers), queue: number(8), params }).unwrap())
}

fn job(tag: u64, work: Work) -> Job {
    Job { tag, work, input: vec![1; 5000].into(), output: Vec::new().into(), room: 5000 }
}

fn next(channel: &Channel) -> Completion {
    channel.wait(Instant::now() + Duration::from_secs(120)).expect("a completion")
}

fn channel(pool: &Pool) -> Channel {
    pool.channel(NonZeroUsize::new(8).unwrap())
}

#[test]
fn a_worker_that_dies_answers_its_job_and_the_others_go_on() {
    let Some(pool) = start(2) else { return };
    let channel = channel(&pool);
    channel.submit(job(1, Work::Die)).unwrap();
    let died = next(&channel);
    assert_eq!((died.tag, died.result, died.input.len()), (1, Err(Failure::WorkerLost), 5000));
    for tag in 2..6 {
        channel.submit(job(tag, Work::Compress)).unwrap();
        let done = next(&channel);
        assert_eq!(done.tag, tag);
        done.result.unwrap();
    }
    let statistics = pool.shutdown(Duration::from_secs(60)).unwrap();
    assert_eq!((statistics.compressed, statistics.failed), (4, 1));
}

#[test]
fn when_the_last_worker_dies_every_job_is_answered_and_more_are_refused() {
    let Some(pool) = start(1) else { return };
    let channel = channel(&pool);
    let mut accepted = 0;
    let refused = loop {
        match channel.submit(job(accepted, Work::Die)) {
            Ok(()) => accepted += 1,
            Err(refused) if refused.reason == Reason::NoWorkers => break refused,
            Err(refused) => assert!(matches!(refused.reason, Reason::Full | Reason::ChannelFull)),
        }
    };
    assert_eq!(refused.job.tag, accepted);
    for _ in 0..accepted {
        assert_eq!(next(&channel).result, Err(Failure::WorkerLost));
    }
    assert_eq!(channel.in_flight(), 0);
    assert_eq!(pool.shutdown(Duration::from_secs(60)).unwrap().failed, accepted);
}

#[test]
fn a_shutdown_leaves_a_worker_behind_that_does_not_come_out_of_the_library() {
    let Some(pool) = start(2) else { return };
    let channel = channel(&pool);
    channel.submit(job(1, Work::Hang)).unwrap();
    channel.submit(job(2, Work::Hang)).unwrap();
    while !lock(&pool.shared.state).jobs.is_empty() {
        std::thread::yield_now();
    }
    channel.submit(job(3, Work::Compress)).unwrap();
    let busy = pool.shutdown(Duration::from_millis(1)).unwrap_err();
    assert_eq!(busy.workers, 2);
    let done = next(&channel);
    assert_eq!(done.result, Err(Failure::ShutDown));
    assert_eq!(channel.submit(job(4, Work::Compress)).unwrap_err().reason, Reason::ShutDown);
}
