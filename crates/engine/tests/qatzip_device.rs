//! Whole migrations by the engine `qat` with a device behind the library, by the made-up library of `sterna-qatzip`'s tests; and
//! without any library. What the device does wrong, no guest notices.

#[path = "engine/common/mod.rs"]
mod common;
#[path = "engine/guest/mod.rs"]
mod guest;

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::within_a_minute;
use guest::{Memory, Monitor, Running, Workload, both_sides};
use sterna_codec::{Qatzip, QatzipSoftware};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::report::Report;
use sterna_engine::source::Source;
use sterna_engine::transport::Security;

const PAGES: [usize; 2] = [1500, 700];
const WRITES: Workload = Workload { writers: 1, span: 60, seed: 5, burst: 40 };
/// The made-up library shrinks no page that was written to: how much goes over a slow machine's many rounds is for the guest to say.
const QUIET: Workload = Workload { writers: 0, ..WRITES };

/// Moves a guest whose pages are runs of one byte, which the made-up library shrinks. Every tenth page begins with `word`, as does the
/// piece that it is the first of.
fn migrate(qatzip: Qatzip, word: [u8; 8], workload: Workload) -> Report {
    let (source, destination) = (Memory::new(PAGES[0], PAGES[1]), Memory::new(PAGES[0], PAGES[1]));
    for block in 0..2 {
        for (at, value) in source.words(block).iter().enumerate() {
            let begins = at % (512 * 10) == 0 && word != [0; 8];
            value.store(if begins { u64::from_le_bytes(word) } else { 0x0707_0707_0707_0707 }, Ordering::Relaxed);
        }
    }
    let running = Running::default();
    let (mut from, log) = Monitor::new(&source, &running, workload);
    let (mut to, _) = Monitor::new(&destination, &running, workload);
    from.start();
    let listening = Destination::new(destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let method = "deflate by qat".parse().unwrap();
    // A packet of ten pages: those with the word begin one.
    let mut migration = Source::new(source.ram(), Box::new(log)).method(method).qatzip(qatzip).packet_size(40 << 10);
    let (sent, received) =
        both_sides(listening, &mut to, || migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()));
    let sent = sent.unwrap();
    received.unwrap();
    assert!(to.runs() && !from.runs() && !running.ever_twice());
    sent
}

#[test]
fn whatever_a_device_does_wrong_or_however_little_there_is_the_guest_is_moved() {
    within_a_minute(|| {
        let with = |library: PathBuf, software, patience| Qatzip { library: Some(library), software, patience };
        let directory = tempfile::tempdir().unwrap();
        let made_up = concat!(env!("CARGO_MANIFEST_DIR"), "/../qatzip/tests/hardware.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-w", "-o"]).arg(directory.path().join("libqatzip.so.3")).arg(made_up);
        assert!(cc.status().unwrap().success());
        let with = |software, patience| with(directory.path().into(), software, Duration::from_millis(patience));
        let all = [QatzipSoftware::Forbidden, QatzipSoftware::WhenBusy, QatzipSoftware::Always];
        for software in all {
            for workload in [QUIET, WRITES] {
                let sent = migrate(with(software, 30_000), [0; 8], workload);
                assert_eq!(sent.method, "deflate 1 by qat: QAT hardware 100 %", "{software:?}");
                assert!(workload.writers > 0 || sent.ratio > 2.0, "{software:?}: {sent:?}");
            }
            for (word, told) in [(b"BROKE\0\0\0", "(unspecified error)"), (b"PARTS\0\0\0", "lengths that cannot be")] {
                let sent = migrate(with(software, 30_000), *word, WRITES);
                assert!(sent.method.contains(told), "{software:?}: {}", sent.method);
                let cpu = sent.method.contains("CPU");
                assert_eq!(cpu, software != QatzipSoftware::Forbidden, "{}", sent.method);
                assert_eq!(sent.method.contains("not encoded"), !cpu, "{}", sent.method);
            }
        }
        let sent = migrate(with(QatzipSoftware::Forbidden, 30_000), *b"SOFTW\0\0\0", WRITES);
        assert!(sent.method.contains("in software, which is forbidden"), "{}", sent.method);
        // It never answers: nothing waits for it, not even the end of the migration for longer than a few seconds.
        let sent = migrate(with(QatzipSoftware::WhenBusy, 5), *b"HANGS\0\0\0", WRITES);
        assert!(sent.method.contains("did not answer within 5ms"), "{}", sent.method);
    });
}
