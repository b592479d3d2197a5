//! Whole migrations by the engine `qat` over the real library's software path, while the guest writes; and those that are refused
//! before anything is begun. One library per process, so the made-up one with a device has a file of its own.

#[path = "engine/common/mod.rs"]
mod common;
#[path = "engine/guest/mod.rs"]
mod guest;

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use common::within_a_minute;
use guest::{Memory, Monitor, Running, Workload, both_sides};
use sterna_codec::{MethodChoice, Qatzip, QatzipSoftware};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::{GuestState, MigrationError};
use sterna_engine::report::{Observer, Progress, Report};
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_test_kit::qatzip;

const PAGES: [usize; 2] = [1500, 700];
const WRITES: Workload = Workload { writers: 2, span: 60, seed: 5, burst: 40 };

/// Keeps what it is told.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Observer for Notes {
    fn progress(&self, _: &Progress) {}

    fn note(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

impl Notes {
    fn of_qatzip(&self) -> Vec<String> {
        self.0.lock().unwrap().iter().filter(|note| note.contains("QATzip")).cloned().collect()
    }
}

/// Moves a guest whose memory shrinks, and which writes.
fn migrate(notes: &Notes, settings: impl FnOnce(Source) -> Source) -> Report {
    let (source, destination) = (Memory::new(PAGES[0], PAGES[1]), Memory::new(PAGES[0], PAGES[1]));
    for block in 0..2 {
        for (at, word) in source.words(block).iter().enumerate() {
            word.store((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44 | 1, Ordering::Relaxed);
        }
    }
    let running = Running::default();
    let (mut from, log) = Monitor::new(&source, &running, WRITES);
    let (mut to, _) = Monitor::new(&destination, &running, WRITES);
    from.start();
    let listening = Destination::new(destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let mut migration = settings(Source::new(source.ram(), Box::new(log)).method(MethodChoice::default()));
    let (sent, received) = both_sides(listening, &mut to, || {
        migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), notes)
    });
    let sent = sent.unwrap();
    received.unwrap();
    assert!(to.runs() && !from.runs() && !running.ever_twice());
    sent
}

/// Nobody listens where this would go.
fn refused(settings: impl FnOnce(Source) -> Source) -> MigrationError {
    let memory = Memory::new(16, 16);
    let running = Running::default();
    let (mut from, log) = Monitor::new(&memory, &running, WRITES);
    from.start();
    let mut migration = settings(Source::new(memory.ram(), Box::new(log)).method(MethodChoice::default()));
    let error = migration.run("127.0.0.1:1", &Security::Insecure, &mut from, &Cancel::new(), &()).unwrap_err();
    assert!(from.runs());
    from.stop();
    error
}

fn method(name: &str) -> MethodChoice {
    name.parse().unwrap()
}

#[test]
fn a_guest_is_moved_by_the_librarys_software_and_the_report_says_so() {
    let Some(library) = qatzip::library() else { return };
    if library.hardware().is_ok() {
        eprintln!("skipped: this machine has QAT hardware");
        return;
    }
    let with = move |software| Qatzip { library: Some(library.file().to_owned()), software, ..Qatzip::default() };
    within_a_minute(move || {
        for (channels, packet, checksums) in [(1, 512 << 10, true), (3, 4096, true), (2, 1 << 20, false)] {
            let notes = Notes::default();
            let sent = migrate(&notes, |source| {
                let source = source.channels(channels).packet_size(packet).checksums(checksums);
                source.method(method("deflate by qat")).qatzip(with(QatzipSoftware::Always))
            });
            assert_eq!(sent.method, "deflate 1 by qat: QATzip's software 100 %");
            assert!(sent.ratio > 1.5 && sent.normal_pages > 2000, "{sent:?}");
            let notes = notes.of_qatzip();
            assert_eq!(notes.len(), 1, "{notes:?}");
            assert!(notes[0].starts_with("engine qat: QATzip's own software, for there is no hardware, by /"));
        }
        // What was not asked for is not used, and not talked about.
        for name in ["deflate", "deflate by cpu", "auto", "none"] {
            let notes = Notes::default();
            let sent = migrate(&notes, |source| source.method(method(name)).qatzip(with(QatzipSoftware::Forbidden)));
            assert!(!sent.method.contains("qat") && notes.of_qatzip().is_empty(), "{}", sent.method);
        }
        // Without hardware it is refused unless the library's software was asked for by name.
        for software in [QatzipSoftware::Forbidden, QatzipSoftware::WhenBusy] {
            let error = refused(|source| source.method(method("deflate by qat")).qatzip(with(software)));
            assert_eq!(error.guest, GuestState::Untouched);
            assert!(error.reason.starts_with("engine qat is not there: QATzip found no QAT hardware"), "{error}");
        }
    });
}
