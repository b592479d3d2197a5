//! A child of fork(2) has neither the workers nor the devices: everything refuses there, and nothing hangs. Alone in its process,
//! so that no other test holds a lock at the moment of the fork.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use sterna_qatzip::{Choice, Failure, Job, Library, OpenError, Options, Pool, Reason, StartError, Work};
use sterna_test_kit::content::code_like;
use sterna_test_kit::qatzip::{library, software};

#[test]
fn a_child_is_refused_and_the_parent_goes_on() {
    let Some(library) = library() else { return };
    let params = software(64 << 10);
    let mut session = library.session(&params).unwrap();
    let two = NonZeroUsize::new(2).unwrap();
    let pool = Pool::start(&library, &Options { workers: two, queue: two, params }).unwrap();
    let channel = pool.channel(two);
    let job = |tag| Job {
        tag,
        work: Work::Compress,
        input: code_like(tag, 9000).into(),
        output: Vec::new().into(),
        room: 9000,
    };
    channel.submit(job(1)).unwrap();
    // SAFETY: the child calls nothing but this crate and ends by `_exit`; the clock ends it should anything hang.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no arguments that matter.
        unsafe { libc::alarm(60) };
        let mut output = Vec::new();
        let refused = [
            session.compress(&[0; 5000], &mut output, 5000) == Err(Failure::Forked),
            session.decompress(&[0; 5000], &mut output, 5000) == Err(Failure::Forked),
            matches!(Library::open(&Choice::System), Err(OpenError::Forked)),
            matches!(library.session(&params), Err(StartError::Forked)),
            channel.submit(job(2)).is_err_and(|refused| refused.reason == Reason::Forked && refused.job.tag == 2),
            channel.poll().is_none() && channel.wait(Instant::now() + Duration::from_secs(3600)).is_none(),
            matches!(Pool::start(&library, &Options { workers: two, queue: two, params }), Err(StartError::Forked)),
        ];
        drop((session, channel, pool));
        let wrong = refused.iter().position(|right| !right).map_or(0, |at| at + 1);
        // SAFETY: ends the process without running what the parent registered.
        unsafe { libc::_exit(i32::try_from(wrong).unwrap()) };
    }
    assert!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "the child was ended by signal {}", libc::WTERMSIG(status));
    assert_eq!(libc::WEXITSTATUS(status), 0, "which of the refusals was missing in the child, counted from 1");
    let completion = channel.wait(Instant::now() + Duration::from_secs(60)).unwrap();
    assert_eq!(completion.tag, 1);
    completion.result.unwrap();
    session.compress(&[0; 5000], &mut Vec::new(), 5000).unwrap();
}
