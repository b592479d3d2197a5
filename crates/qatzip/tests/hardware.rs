//! What differs with a device behind the library, which no test machine has: against a made-up library that behaves as the real
//! one's sources say (`hardware.c`). It proves this crate's branches, not the real library.

use std::num::NonZeroUsize;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use sterna_qatzip::{By, Choice, Done, Failure, Job, Library, Options, Params, Pool, Reason, Session, Software, Work};
use sterna_test_kit::content::code_like;
use sterna_test_kit::qatzip::{read_gzip, write_gzip};

/// The library, and its functions' counters, which tests must not change under each other.
fn library() -> (Arc<Library>, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    static DIRECTORY: OnceLock<tempfile::TempDir> = OnceLock::new();
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = DIRECTORY.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-w", "-o"])
            .arg(directory.path().join("libqatzip.so.3"))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hardware.c"))
            .status()
            .unwrap();
        assert!(status.success());
        directory
    });
    (Library::open(&Choice::Path(directory.path().to_owned())).unwrap(), guard)
}

fn counter(library: &Library, name: &str) -> i32 {
    // SAFETY: the made-up library's own integers, read while no other test runs.
    unsafe {
        let loaded = libloading::os::unix::Library::new(library.file()).unwrap();
        **loaded.get::<*const i32>(name.as_bytes()).unwrap()
    }
}

fn session(library: &Arc<Library>, software: Software) -> Session {
    library.session(&Params { software, ..Params::default() }).unwrap()
}

#[test]
fn a_device_makes_several_members_and_takes_them_back() {
    let (library, _alone) = library();
    for software in [Software::Forbidden, Software::WhenBusy, Software::Always] {
        let mut session = session(&library, software);
        assert!(session.on_hardware());
        let plain = code_like(1, 200_000);
        let (mut packed, mut back) = (Vec::new(), Vec::new());
        let done = session.compress(&plain, &mut packed, usize::MAX).unwrap();
        assert_eq!(done, Done { bytes: 200_000 + 4 * 37, by: By::Hardware });
        assert_eq!(read_gzip(&packed), plain);
        let done = session.decompress(&packed, &mut back, 200_000).unwrap();
        assert_eq!((done, &back), (Done { bytes: 200_000, by: By::Hardware }, &plain));
    }
    assert_eq!(counter(&library, "hits_of_init"), 1, "hardware is looked for once per process");
}

#[test]
fn what_the_library_did_in_software_is_told_and_where_forbidden_refused() {
    let (library, _alone) = library();
    let plain = [&b"SOFTW"[..], &code_like(1, 5000)].concat();
    let mut output = Vec::new();
    assert_eq!(session(&library, Software::WhenBusy).compress(&plain, &mut output, 9000).unwrap().by, By::Software);
    let mut strict = session(&library, Software::Forbidden);
    assert_eq!(strict.compress(&plain, &mut output, 9000), Err(Failure::DoneInSoftware));
    assert!(output.is_empty());
    assert_eq!(strict.compress(&plain[5..800], &mut output, 9000), Err(Failure::TooSmall { bytes: 795 }));
    assert_eq!(strict.compress(&plain[5..], &mut output, 9000).unwrap().by, By::Hardware);
}

#[test]
fn members_that_do_not_say_their_lengths_are_not_shown_to_the_device() {
    let (library, _alone) = library();
    let before = counter(&library, "software_calls");
    let packed = write_gzip(b"plain");
    let mut output = Vec::new();
    let refused = session(&library, Software::Forbidden).decompress(&packed, &mut output, 100);
    assert!(matches!(refused, Err(Failure::BadInput(_))), "{refused:?}");
    assert_eq!(counter(&library, "software_calls"), before);
    // The made-up software path does not say that the stream ended, so this is not believed either.
    let refused = session(&library, Software::WhenBusy).decompress(&packed, &mut output, 100);
    assert_eq!(refused, Err(Failure::BadInput("it ends within a member")));
    assert_eq!(counter(&library, "software_calls"), before + 1);
}

#[test]
fn answers_that_cannot_be_are_refused_and_the_session_is_set_up_again() {
    let (library, _alone) = library();
    let mut session = session(&library, Software::WhenBusy);
    let sessions = counter(&library, "sessions");
    let mut output = Vec::new();
    let good = code_like(3, 70_000);
    for (at, (word, code)) in
        [("BROKE", Some(-2)), ("TIMED", Some(-5)), ("PARTS", None), ("LARGE", None), ("EMPTY", None)]
            .into_iter()
            .enumerate()
    {
        let plain = [word.as_bytes(), &good].concat();
        let failure = session.compress(&plain, &mut output, usize::MAX).unwrap_err();
        match code {
            Some(code) => assert_eq!(failure, Failure::Library { call: "qzCompress", code }),
            None => assert!(matches!(failure, Failure::Inconsistent { .. }), "{word}: {failure}"),
        }
        assert!(output.is_empty());
        assert_eq!((session.renewed(), counter(&library, "sessions")), (at as u64 + 1, sessions));
        session.compress(&good, &mut output, usize::MAX).unwrap();
        assert_eq!(read_gzip(&output), good);
    }
    drop(session);
    assert_eq!(counter(&library, "sessions"), sessions - 2);
}

#[test]
fn content_of_another_length_than_its_members_say_is_refused() {
    let (library, _alone) = library();
    let mut session = session(&library, Software::WhenBusy);
    let plain = [&b"SHORT"[..], &code_like(1, 5000)].concat();
    let (mut packed, mut back) = (Vec::new(), Vec::new());
    session.compress(&plain, &mut packed, usize::MAX).unwrap();
    assert!(matches!(session.decompress(&packed, &mut back, 9000), Err(Failure::BadInput(_))));
    assert_eq!((back.len(), session.renewed()), (0, 1));
    let last = packed.len() - 9;
    packed[last] ^= 1;
    assert_eq!(session.decompress(&packed, &mut back, 9000), Err(Failure::BadInput("its content is corrupt")));
}

#[test]
fn a_job_that_hangs_in_the_device_holds_up_neither_others_nor_the_shutdown() {
    let (library, _alone) = library();
    let two = NonZeroUsize::new(2).unwrap();
    let pool = Pool::start(&library, &Options { workers: two, queue: two, params: Params::default() }).unwrap();
    let channel = pool.channel(two);
    let job = |tag, input: Vec<u8>| Job {
        tag,
        work: Work::Compress,
        input: input.into(),
        output: Vec::new().into(),
        room: 1 << 20,
    };
    channel.submit(job(0, b"HANGS in the device".to_vec())).unwrap();
    for tag in 1..20 {
        channel.submit(job(tag, code_like(tag, 20_000))).unwrap();
        let done = channel.wait(Instant::now() + Duration::from_secs(120)).unwrap();
        assert_eq!((done.tag, done.result.map(|done| done.by)), (tag, Ok(By::Hardware)));
    }
    let before = pool.statistics();
    assert_eq!((before.compressed, before.by_hardware, before.failed), (19, 19, 0));
    pool.shutdown(Duration::from_millis(1)).unwrap_err();
    assert_eq!((channel.in_flight(), channel.poll().is_none()), (1, true));
    assert_eq!(channel.submit(job(99, vec![0; 5000])).unwrap_err().reason, Reason::ShutDown);
}
