//! A system that has no thread left for a driver, from some moment on: a guest that is paused by then moves, or runs on where it was.

use std::sync::Arc;

use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::{GuestState, MigrationError};
use sterna_engine::report::{ReceiveReport, Report};
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_test_kit::threads::no_more_threads;

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Running, Workload};

/// No thread of the guest has to be started where the guest is.
const IDLE: Workload = Workload { writers: 0, span: 600, seed: 1, burst: 8 };

struct Moved {
    sent: Result<Report, MigrationError>,
    received: Result<ReceiveReport, MigrationError>,
    running: Running,
    from: Monitor,
    to: Monitor,
}

/// Migrates. `at_source` and `at_destination`: the call of the monitor from which on its driver can start no thread.
fn migrate(at_source: Option<&'static str>, at_destination: Option<&'static str>) -> Moved {
    let refuse = |at: Option<&'static str>| {
        Some(Box::new(move |call: &'static str| {
            if Some(call) == at {
                no_more_threads();
            }
        }) as Box<dyn Fn(&'static str) + Send>)
    };
    let memory: [Arc<Memory>; 2] = std::array::from_fn(|_| Memory::new(300, 100));
    let running = Running::default();
    let (mut from, log) = Monitor::new(&memory[0], &running, IDLE);
    let (mut to, _) = Monitor::new(&memory[1], &running, IDLE);
    (from.on_call, to.on_call) = (refuse(at_source), refuse(at_destination));
    from.start();
    let cancel = Cancel::new();
    let listening = Destination::new(memory[1].ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let mut source = Source::new(memory[0].ram(), Box::new(log));
    let (sent, received) = std::thread::scope(|scope| {
        let (to, of_destination) = (&mut to, &cancel);
        let receiving = scope.spawn(move || listening.run(to, of_destination, &()));
        let sending = scope.spawn(|| source.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()));
        (sending.join().expect("the source's driver does not panic"), receiving.join().unwrap())
    });
    assert!(!running.ever_twice());
    Moved { sent, received, running, from, to }
}

#[test]
fn a_guest_that_is_paused_moves_where_its_driver_can_start_no_thread() {
    within_a_minute(|| {
        for (source, destination) in [(Some("pause"), None), (Some("save"), None), (None, Some("load"))] {
            let moved = migrate(source, destination);
            moved.sent.unwrap();
            moved.received.unwrap();
            assert!(!moved.from.runs() && moved.to.runs() && moved.running.now() == 1, "{source:?} {destination:?}");
            assert_eq!(
                (&moved.from.called[..], &moved.to.called[..]),
                (&["save_ahead", "pause", "save"][..], &["load", "start"][..])
            );
        }
    });
}

#[test]
fn a_source_that_can_start_no_thread_for_its_rounds_leaves_the_guest_running() {
    within_a_minute(|| {
        let moved = migrate(Some("save_ahead"), None);
        let error = moved.sent.unwrap_err();
        assert!(error.to_string().contains("no thread for the rounds"), "{error}");
        assert_eq!(error.guest, GuestState::RunsAtSource);
        assert!(moved.received.is_err());
        assert!(moved.from.runs() && !moved.to.runs() && moved.running.now() == 1);
    });
}
