//! Queues that are full, disabled, halted, hung or late; credits; and the real instructions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sterna_idxd::{CompletionRecord, Descriptor, NotProven, OpenError, Status, SubmitError, SubmitMethod};
use sterna_idxd_model::config::{Script, ScriptedFault};
use sterna_idxd_model::{Model, trap};

use crate::support::*;

fn short() -> Duration {
    Duration::from_millis(50)
}

fn hang() -> Script {
    Script { opcode: Some(0), what: ScriptedFault::Hang, ..Script::default() }
}

#[test]
fn a_dedicated_queue_is_never_overfilled() {
    for rig in Rig::all().into_iter().filter(|rig| rig.queue.credits().is_some()) {
        rig.model.inject(&hang());
        let records: Vec<Arc<CompletionRecord>> = (0..40).map(|_| Arc::new(CompletionRecord::new())).collect();
        let mut taken = 0;
        for record in &records {
            // SAFETY: the records outlive the model, which is reset below.
            match unsafe { rig.queue.submit(&Descriptor::noop().with_record(record.address())) } {
                Ok(()) => taken += 1,
                Err(SubmitError::Busy) => {}
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!((taken, rig.queue.credits()), (16, Some(0)), "{}", rig.what);
        assert_eq!(rig.model.counters().overflows, 0, "{}", rig.what);
        rig.model.reset("dsa0");
        drop(rig);
    }
}

#[test]
fn a_shared_queue_says_when_it_is_full() {
    for rig in Rig::all().into_iter().filter(|rig| rig.queue.credits().is_none()) {
        rig.model.inject(&hang());
        let record = Arc::new(CompletionRecord::new());
        let noop = Descriptor::noop().with_record(record.address());
        let mut taken = 0;
        loop {
            // Engines take entries out of the queue: a queue that was full may have room a moment later.
            let attempt = (0..20).find_map(|_| {
                std::thread::yield_now();
                // SAFETY: the record outlives the model, which is reset below.
                match unsafe { rig.queue.submit(&noop) } {
                    Ok(()) => Some(()),
                    Err(SubmitError::Busy) => None,
                    Err(error) => panic!("{error}"),
                }
            });
            match attempt {
                Some(()) => taken += 1,
                None => break,
            }
            assert!(taken < 100);
        }
        // The queue's entries and the four descriptors on which its engines hang.
        assert!((16..=20).contains(&taken), "{} {taken}", rig.what);
        assert!(rig.model.counters().retries > 0);
        rig.model.reset("dsa0");
        drop(rig);
    }
}

#[test]
fn threads_share_a_queue_and_every_descriptor_is_answered_once() {
    for rig in Rig::all() {
        let before = rig.model.counters().descriptors;
        let done = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        assert_done(&rig.run(Descriptor::noop()), rig.what);
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(done.load(Ordering::Relaxed), 800);
        assert_eq!(rig.model.counters().descriptors - before, 800, "{}", rig.what);
        assert_eq!(rig.model.counters().overflows, 0);
        assert!(rig.queue.credits().is_none_or(|credits| credits == 16));
    }
}

#[test]
fn queues_that_do_not_work_are_not_opened() {
    // Disabled and halted: ENQCMD gets the answer retry for ever, MOVDIR64B gets no answer.
    let broken: [fn(&Model) -> bool; 2] =
        [|model| model.disable("wq0.0") && model.disable("wq0.1"), |model| model.halt("dsa0")];
    for broken in broken {
        let model = Model::start(config(0x200)).unwrap();
        assert!(broken(&model));
        let shared = open(&model, "wq0.0", SubmitMethod::Enqcmd, short()).unwrap_err();
        assert!(matches!(shared, OpenError::NotProven { why: NotProven::NotAccepted(_), .. }), "{shared}");
        let dedicated = open(&model, "wq0.1", SubmitMethod::Movdir64b, short()).unwrap_err();
        assert!(matches!(dedicated, OpenError::NotProven { why: NotProven::NoAnswer(_), .. }), "{dedicated}");
        let written = open(&model, "wq0.0", SubmitMethod::Write, short()).unwrap_err();
        assert!(matches!(written, OpenError::NotProven { why: NotProven::NotAccepted(_), .. }), "{written}");
    }
}

#[test]
fn the_wrong_instruction_for_a_queue_proves_nothing() {
    let model = Model::start(config(0x200)).unwrap();
    assert!(
        open(&model, "wq0.0", SubmitMethod::Movdir64b, short()).is_err(),
        "posted writes to a shared queue are lost"
    );
    assert!(open(&model, "wq0.1", SubmitMethod::Enqcmd, short()).is_err(), "a dedicated queue tells ENQCMD to retry");
}

#[test]
fn a_noop_that_hangs_is_lost_or_fails_is_no_proof() {
    for (what, answered) in [
        (ScriptedFault::Hang, false),
        (ScriptedFault::DropCompletion, false),
        (ScriptedFault::Status { code: 0x20 }, true),
    ] {
        let model = Model::start(config(0x200)).unwrap();
        model.inject(&Script { opcode: Some(0), what, ..Script::default() });
        let deadline = if answered { Duration::from_secs(60) } else { short() };
        match open(&model, "wq0.0", SubmitMethod::Enqcmd, deadline).unwrap_err() {
            OpenError::NotProven { why: NotProven::NoAnswer(_), .. } => assert!(!answered),
            OpenError::NotProven { why: NotProven::Answered(status), .. } => {
                assert!(answered && status == Status::HardwareError);
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn an_answer_after_the_deadline_harms_nobody() {
    let model = Model::start(config(0x200)).unwrap();
    // So late that a test on a busy machine does not look for it only then.
    let what = ScriptedFault::Late { delay_ns: 1_500_000_000 };
    model.inject(&Script { opcode: Some(0), what, ..Script::default() });
    let error = open(&model, "wq0.0", SubmitMethod::Enqcmd, Duration::from_millis(10)).unwrap_err();
    assert!(matches!(error, OpenError::NotProven { why: NotProven::NoAnswer(_), .. }), "{error}");
    // Memory of the record's size is allocated repeatedly: none of it changes when the late answer is written.
    model.clear_scripts();
    let fresh: Vec<Box<[u64; 8]>> = (0..4096).map(|_| Box::new([0x5555_5555_5555_5555; 8])).collect();
    let queue = open(&model, "wq0.0", SubmitMethod::Enqcmd, Duration::from_secs(10)).unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while model.counters().descriptors < 3 || model.queue("wq0.0").unwrap().in_flight() > 0 {
        run(&queue, Descriptor::noop());
        assert!(std::time::Instant::now() < end);
    }
    assert!(fresh.iter().all(|block| block.iter().all(|word| *word == 0x5555_5555_5555_5555)));
}

#[test]
fn a_queue_disabled_under_us_says_busy_and_works_again_when_enabled() {
    let model = Model::start(config(0x200)).unwrap();
    let queue = open(&model, "wq0.0", SubmitMethod::Enqcmd, Duration::from_secs(10)).unwrap();
    model.disable("wq0.0");
    let record = Arc::new(CompletionRecord::new());
    let noop = Descriptor::noop().with_record(record.address());
    // SAFETY: the record is kept until it was seen.
    assert!(matches!(unsafe { queue.submit(&noop) }, Err(SubmitError::Busy)));
    model.enable("wq0.0");
    submit(&queue, &noop);
    assert_done(&wait(&queue, &record), "enabled again");
}

/// Proves that the instructions of the production code were executed, by their number.
#[test]
fn the_real_instructions_are_what_is_trapped() {
    for (name, what) in [("wq0.0", "ENQCMD"), ("wq0.1", "MOVDIR64B")] {
        let before = trap::trapped();
        let Some(rig) = Rig::trapped(&config(0x200), name, what) else { return };
        for _ in 0..130 {
            assert_done(&rig.run(Descriptor::noop()), what);
        }
        let after = trap::trapped();
        let counts = (after.enqcmd - before.enqcmd, after.movdir64b - before.movdir64b);
        // At least the test of the queue and each no-op; other tests trap in parallel.
        assert!(if name == "wq0.0" { counts.0 } else { counts.1 } >= 131, "{what} {counts:?}");
        assert!(rig.model.counters().descriptors >= 131);
    }
}
