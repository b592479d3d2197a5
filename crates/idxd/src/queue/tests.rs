//! Queues over portals that answer by a script.
//!
//! Under Miri: `MIRIFLAGS="-Zmiri-ignore-leaks -Zmiri-permissive-provenance" cargo +nightly miri test -p sterna-idxd
//! --lib`. One test leaks a record on purpose, and devices only have addresses.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::sysfs::{Device, OperationSet};

/// The portal's action on the next descriptor.
#[derive(Clone, Copy, Debug)]
enum Answer {
    /// Accepts it and writes this status.
    Complete(u8),
    /// Accepts it and never answers.
    Silent,
    Retry,
    Refuse(i32),
}

#[derive(Debug)]
struct Scripted {
    method: SubmitMethod,
    answers: Mutex<VecDeque<Answer>>,
    /// The answer after the end of the script.
    then: Answer,
    seen: Mutex<Vec<[u8; 64]>>,
    calls: AtomicUsize,
}

impl Scripted {
    fn new(method: SubmitMethod, answers: &[Answer], then: Answer) -> Arc<Self> {
        Arc::new(Self {
            method,
            answers: Mutex::new(answers.iter().copied().collect()),
            then,
            seen: Mutex::default(),
            calls: AtomicUsize::new(0),
        })
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Portal for Scripted {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let answer = self.answers.lock().unwrap().pop_front().unwrap_or(self.then);
        match answer {
            Answer::Retry => return Submission::Retry,
            Answer::Refuse(errno) => return Submission::Refused(io::Error::from_raw_os_error(errno)),
            Answer::Complete(_) | Answer::Silent => self.seen.lock().unwrap().push(*descriptor.as_bytes()),
        }
        if let (Answer::Complete(status), Some(record)) = (answer, descriptor.record()) {
            let word = std::ptr::with_exposed_provenance::<std::sync::atomic::AtomicU64>(record as usize);
            // SAFETY: the record is alive, aligned, and accessed only through atomics.
            unsafe { (*word).store(status.into(), Ordering::Release) };
        }
        Submission::Accepted
    }

    fn submit_method(&self) -> SubmitMethod {
        self.method
    }
}

const DONE: Answer = Answer::Complete(0x01);

fn info(mode: Mode) -> QueueInfo {
    let mut info = QueueInfo::new("wq0.0", Arc::new(Device::new("dsa0", Kind::Dsa)), mode, 4);
    info.max_batch = 1;
    info
}

fn quick() -> Duration {
    Duration::from_millis(30)
}

#[test]
fn a_queue_is_proved_by_exactly_one_noop_with_a_record() {
    let portal = Scripted::new(SubmitMethod::Enqcmd, &[], DONE);
    let queue = WorkQueue::with_portal(info(Mode::Shared), portal.clone()).unwrap();
    assert_eq!(queue.submit_method(), SubmitMethod::Enqcmd);
    let seen = portal.seen.lock().unwrap();
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0][4], seen[0][7]), (0x0c, 0x00));
    assert_eq!(u64::from_le_bytes(seen[0][8..16].try_into().unwrap()) % 64, 0, "right for both kinds of device");
}

#[test]
fn the_proof_waits_while_a_queue_is_full_and_says_so_in_the_end() {
    let portal = Scripted::new(SubmitMethod::Enqcmd, &[Answer::Retry, Answer::Retry], DONE);
    assert!(WorkQueue::with_portal(info(Mode::Shared), portal).is_ok());

    let portal = Scripted::new(SubmitMethod::Enqcmd, &[], Answer::Retry);
    let error = WorkQueue::with_portal_within(info(Mode::Shared), portal, quick()).unwrap_err();
    assert!(matches!(error, OpenError::NotProven { why: NotProven::NotAccepted(_), .. }), "{error}");
}

#[test]
fn a_queue_that_does_not_answer_is_refused_and_its_record_leaked() {
    let portal = Scripted::new(SubmitMethod::Movdir64b, &[], Answer::Silent);
    let error = WorkQueue::with_portal_within(info(Mode::Dedicated), portal.clone(), quick()).unwrap_err();
    assert!(matches!(error, OpenError::NotProven { why: NotProven::NoAnswer(_), .. }), "{error}");
    // A late answer goes to memory that has not been reused.
    let record = u64::from_le_bytes(portal.seen.lock().unwrap()[0][8..16].try_into().unwrap());
    let word = std::ptr::with_exposed_provenance::<std::sync::atomic::AtomicU64>(record as usize);
    // SAFETY: leaked, so still allocated.
    unsafe {
        assert_eq!((*word).load(Ordering::Relaxed), 0);
        (*word).store(1, Ordering::Relaxed);
    }
}

#[test]
fn an_answer_other_than_success_is_no_proof() {
    for code in [0x02, 0x10, 0x1d, 0x20] {
        let portal = Scripted::new(SubmitMethod::Write, &[], Answer::Complete(code));
        let error = WorkQueue::with_portal(info(Mode::Shared), portal).unwrap_err();
        assert!(
            matches!(error, OpenError::NotProven { why: NotProven::Answered(status), .. } if status.code() == code),
            "{error}"
        );
    }
    let portal = Scripted::new(SubmitMethod::Write, &[], Answer::Refuse(libc::EINVAL));
    let error = WorkQueue::with_portal(info(Mode::Shared), portal).unwrap_err();
    assert_eq!(error.os_error(), Some(libc::EINVAL));
}

#[test]
fn queues_that_must_not_be_used_are_not_even_tried() {
    let portal = Scripted::new(SubmitMethod::Enqcmd, &[], DONE);
    let mut ats = info(Mode::Shared);
    ats.ats_disable = true;
    let error = WorkQueue::with_portal(ats, portal.clone()).unwrap_err();
    assert!(error.to_string().contains("ats_disable"), "{error}");
    let mut unknown = info(Mode::Shared);
    unknown.mode = None;
    assert!(WorkQueue::with_portal(unknown, portal.clone()).is_err());
    let mut nothing = info(Mode::Dedicated);
    nothing.size = 0;
    assert!(WorkQueue::with_portal(nothing, portal.clone()).is_err());
    assert_eq!(portal.calls(), 0);
}

#[test]
fn credits_are_taken_by_submissions_and_come_back_only_when_seen() {
    let portal = Scripted::new(SubmitMethod::Movdir64b, &[DONE], Answer::Silent);
    let queue = WorkQueue::with_portal(info(Mode::Dedicated), portal.clone()).unwrap();
    assert_eq!(queue.credits(), Some(4), "the proof's own came back");
    let noop = Descriptor::noop();
    for _ in 0..4 {
        // SAFETY: the portal is no device.
        unsafe { queue.submit(&noop) }.unwrap();
    }
    // SAFETY: as above.
    assert!(matches!(unsafe { queue.submit(&noop) }, Err(SubmitError::Busy)));
    assert_eq!(portal.calls(), 5, "the fifth never reached the portal");
    queue.seen_complete(1);
    // SAFETY: as above.
    unsafe { queue.submit(&noop) }.unwrap();
    assert_eq!((queue.credits(), queue.outstanding()), (Some(0), Some(4)));
    queue.seen_complete(100);
    assert_eq!(queue.credits(), Some(4), "never more than there are entries");
}

#[test]
fn what_was_not_taken_costs_no_credit() {
    let answers = [DONE, Answer::Retry, Answer::Refuse(libc::EINVAL)];
    let portal = Scripted::new(SubmitMethod::Write, &answers, Answer::Silent);
    let queue = WorkQueue::with_portal(info(Mode::Dedicated), portal).unwrap();
    // SAFETY: the portal is no device.
    unsafe {
        assert!(matches!(queue.submit(&Descriptor::noop()), Err(SubmitError::Busy)));
        assert!(matches!(queue.submit(&Descriptor::noop()), Err(SubmitError::Refused(_))));
    }
    assert_eq!(queue.credits(), Some(4));
}

#[test]
fn shared_queues_have_no_credits_and_say_busy_themselves() {
    let portal = Scripted::new(SubmitMethod::Enqcmd, &[DONE, Answer::Retry], DONE);
    let queue = WorkQueue::with_portal(info(Mode::Shared), portal).unwrap();
    assert_eq!(queue.credits(), None);
    // SAFETY: the portal is no device.
    unsafe {
        assert!(matches!(queue.submit(&Descriptor::noop()), Err(SubmitError::Busy)));
        queue.submit(&Descriptor::noop()).unwrap();
    }
}

#[test]
fn batches_only_where_they_are_permitted() {
    const V1: u32 = 0x100;
    const V2: u32 = 0x200;
    let refused = Answer::Complete(0x10);
    let cases = [
        (V1, SubmitMethod::Enqcmd, Some(true), DONE, Ok(32), 1),
        (V1, SubmitMethod::Movdir64b, Some(true), DONE, Ok(32), 1),
        // Hidden by the kernel because of its own `write`: a batch over the portal is tried.
        (V1, SubmitMethod::Enqcmd, Some(false), DONE, Ok(32), 2),
        (V1, SubmitMethod::Enqcmd, Some(false), refused, Err(NoBatches::RefusedByDevice(0x10)), 2),
        (V1, SubmitMethod::Enqcmd, None, DONE, Ok(32), 2),
        // Never tried: INTEL-SA-01084.
        (V1, SubmitMethod::Write, Some(true), DONE, Err(NoBatches::FirstGeneration), 1),
        (0, SubmitMethod::Write, None, DONE, Err(NoBatches::FirstGeneration), 1),
        (V2, SubmitMethod::Write, Some(true), DONE, Ok(32), 2),
        (V2, SubmitMethod::Write, Some(true), Answer::Refuse(libc::EINVAL), Err(NoBatches::RefusedByKernel), 2),
        (V2, SubmitMethod::Write, Some(false), DONE, Err(NoBatches::NotOffered), 1),
        (V2, SubmitMethod::Enqcmd, Some(false), DONE, Err(NoBatches::NotOffered), 1),
    ];
    for (version, method, declared, answer, expected, sent) in cases {
        let mut device = Device::new("dsa0", Kind::Dsa);
        device.version = version;
        device.operations = declared.map(|batch| OperationSet::of(if batch { vec![0, 1] } else { vec![0] }));
        let mode = if method == SubmitMethod::Movdir64b { Mode::Dedicated } else { Mode::Shared };
        let info = QueueInfo::new("wq0.0", Arc::new(device), mode, 4);
        let portal = Scripted::new(method, &[DONE], answer);
        let queue = WorkQueue::with_portal(info, portal.clone()).unwrap();
        let case = format!("{version:#x} {method} {declared:?} {answer:?}");
        assert_eq!(queue.max_batch(), expected, "{case}");
        assert_eq!(portal.calls(), sent, "{case}");
        if sent == 2 && matches!(answer, Answer::Complete(_)) {
            let trial = portal.seen.lock().unwrap()[1];
            assert_eq!((trial[7], trial[32]), (0x01, 2), "a batch of two");
        }
        // SAFETY: the portal is no device and reads neither the list nor its members.
        let batch = unsafe { queue.submit(&Descriptor::batch(0, 2)) };
        assert_eq!(matches!(batch, Err(SubmitError::NoBatches(_))), expected.is_err(), "{case}");
    }
}

#[test]
fn iaa_and_queues_of_single_descriptors_have_no_batches() {
    let portal = Scripted::new(SubmitMethod::Enqcmd, &[], DONE);
    let iaa = QueueInfo::new("wq1.0", Arc::new(Device::new("iax1", Kind::Iaa)), Mode::Shared, 4);
    assert_eq!(WorkQueue::with_portal(iaa, portal.clone()).unwrap().max_batch(), Err(NoBatches::Iaa));
    assert_eq!(WorkQueue::with_portal(info(Mode::Shared), portal).unwrap().max_batch(), Err(NoBatches::Maximum(1)));
}

#[test]
#[cfg(not(miri))]
fn in_a_child_nothing_is_submitted() {
    let portal = Scripted::new(SubmitMethod::Enqcmd, &[], DONE);
    let queue = WorkQueue::with_portal(info(Mode::Shared), portal).unwrap();
    // SAFETY: the child only compares numbers and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: refused before anything is sent.
        let refused = unsafe { queue.submit(&Descriptor::noop()) };
        let right = matches!(refused, Err(SubmitError::Forked { owner, here }) if owner != here);
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(if right { 0 } else { 1 }) }
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
    // SAFETY: the portal is no device.
    unsafe { queue.submit(&Descriptor::noop()) }.unwrap();
}

/// A device file in its own directory: a named pipe, with a thread as the device at its other end. A pipe cannot be
/// mapped, so [`WorkQueue::open`] falls back to `write(2)`.
struct Pipe {
    directory: tempfile::TempDir,
}

impl Pipe {
    fn new() -> Self {
        let pipe = Self { directory: tempfile::tempdir().unwrap() };
        let node = pipe.directories().node(Kind::Dsa, "wq0.0");
        std::fs::create_dir_all(node.parent().unwrap()).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &node, FileMode::from_raw_mode(0o600)).unwrap();
        pipe
    }

    fn directories(&self) -> Directories {
        Directories { sysfs: self.directory.path().to_owned(), dev: self.directory.path().to_owned() }
    }

    /// Answers the next `count` descriptors with success.
    fn device(&self, count: usize) -> std::thread::JoinHandle<Vec<[u8; 64]>> {
        let node = self.directories().node(Kind::Dsa, "wq0.0");
        let file = std::fs::File::options().read(true).write(true).open(node).unwrap();
        std::thread::spawn(move || {
            let mut seen = Vec::new();
            for _ in 0..count {
                let mut bytes = [0; 64];
                io::Read::read_exact(&mut &file, &mut bytes).unwrap();
                let record = Descriptor::from_bytes(bytes).record().unwrap();
                let word = std::ptr::with_exposed_provenance::<std::sync::atomic::AtomicU64>(record as usize);
                // SAFETY: the submitter waits for the record, so it is alive.
                unsafe { (*word).store(1, Ordering::Release) };
                seen.push(bytes);
            }
            seen
        })
    }
}

#[test]
#[cfg(not(miri))]
fn a_queue_whose_portal_cannot_be_mapped_is_opened_for_writing() {
    let pipe = Pipe::new();
    for mode in [Mode::Shared, Mode::Dedicated] {
        let device = pipe.device(1);
        // SAFETY: a pipe cannot be mapped, so neither instruction is ever executed.
        let instructions = unsafe { Instructions::trapped() };
        let opening = Opening { instructions, ..Opening::default() };
        let queue = WorkQueue::open_with(info(mode), &pipe.directories(), &opening).unwrap();
        assert_eq!(queue.submit_method(), SubmitMethod::Write);
        assert_eq!(queue.credits().is_some(), mode == Mode::Dedicated, "write(2) has no flow control there");
        assert_eq!(device.join().unwrap()[0][7], 0);
    }
}

#[test]
#[cfg(not(miri))]
fn without_the_instructions_nothing_is_mapped() {
    let pipe = Pipe::new();
    let node = pipe.directories().node(Kind::Dsa, "wq0.0");
    std::fs::remove_file(&node).unwrap();
    // It accepts what is written and never answers.
    std::os::unix::fs::symlink("/dev/null", &node).unwrap();
    let opening = Opening { instructions: Instructions::NONE, deadline: quick(), ..Opening::default() };
    let error = WorkQueue::open_with(info(Mode::Shared), &pipe.directories(), &opening).unwrap_err();
    assert!(
        matches!(error, OpenError::NotProven { method: SubmitMethod::Write, why: NotProven::NoAnswer(_), .. }),
        "{error}"
    );
}

#[test]
#[cfg(not(miri))]
fn nothing_is_written_to_what_is_no_character_device() {
    let pipe = Pipe::new();
    let node = pipe.directories().node(Kind::Dsa, "wq0.0");
    for plain in [false, true] {
        if plain {
            std::fs::remove_file(&node).unwrap();
            std::fs::write(&node, [7; 4096]).unwrap();
        }
        for instructions in [Instructions::NONE, Instructions::detect()] {
            let opening = Opening { instructions, deadline: quick(), ..Opening::default() };
            let error = WorkQueue::open_with(info(Mode::Shared), &pipe.directories(), &opening).unwrap_err();
            assert!(matches!(error, OpenError::NotADevice { .. }), "{error}");
            assert!(error.to_string().contains("no character device"), "{error}");
        }
    }
    assert_eq!(std::fs::read(&node).unwrap(), [7; 4096], "not a byte was changed");
}

#[test]
#[cfg(not(miri))]
fn a_file_that_is_not_there_and_one_that_takes_nothing() {
    let pipe = Pipe::new();
    let node = pipe.directories().node(Kind::Dsa, "wq0.0");
    std::fs::remove_file(&node).unwrap();
    let error = WorkQueue::open(info(Mode::Shared), &pipe.directories()).unwrap_err();
    assert_eq!(error.os_error(), Some(libc::ENOENT));
    assert!(error.to_string().contains("accel-config enable-wq"), "{error}");

    // A file that can be opened, but neither mapped nor written.
    std::os::unix::fs::symlink("/dev/full", &node).unwrap();
    let opening = Opening { map: false, deadline: quick(), ..Opening::default() };
    let error = WorkQueue::open_with(info(Mode::Shared), &pipe.directories(), &opening).unwrap_err();
    assert!(matches!(error, OpenError::NoWay { .. }), "{error}");
    assert_eq!(error.os_error(), Some(libc::ENOSPC));
}

#[test]
#[cfg(not(miri))]
fn a_verdict_of_discovery_stands_unless_the_kernel_is_to_be_asked() {
    let directories = Directories { sysfs: "/nowhere".into(), dev: "/nowhere".into() };
    let mut disabled = info(Mode::Shared);
    disabled.unusable =
        Some(Unusable { reason: Reason::QueueDisabled, commands: vec!["accel-config enable-wq x".into()] });
    let error = WorkQueue::open(disabled, &directories).unwrap_err();
    assert!(error.to_string().contains("accel-config enable-wq x"), "{error}");
    let mut taken = info(Mode::Dedicated);
    taken.unusable = Some(Unusable { reason: Reason::InUse, commands: Vec::new() });
    assert!(matches!(WorkQueue::open(taken, &directories).unwrap_err(), OpenError::Open { .. }));
}
