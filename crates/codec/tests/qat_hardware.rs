//! The method `qatzip` with a device behind the library, by the made-up library of `sterna-qatzip`'s own tests: late, failing, hung and
//! working devices. It proves this crate's branches, not the real library. Each test is a library's whole process, so there is one.

use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use sterna_codec::{Encoded, Encoder, Encoding, Engine, Engines, MethodChoice, Qatzip, QatzipSoftware};
use sterna_test_kit::content::code_like;
use sterna_test_kit::qatzip::read_gzip;

const PIECE: usize = 128 << 10;

fn choice() -> MethodChoice {
    "deflate by qat".parse().unwrap()
}

fn encoding() -> Encoding {
    choice().encoding(Engine::Qat).unwrap()
}

/// A batch of four pieces, some of which begin with what the made-up library makes of it; it shrinks a run of one byte.
fn batch(words: [&str; 4]) -> Vec<u8> {
    let piece = |word: &str| [word.as_bytes(), &vec![7; PIECE - word.len()]].concat();
    words.into_iter().flat_map(piece).collect()
}

fn encode(encoder: &mut dyn Encoder, plain: &[u8]) -> Option<usize> {
    let mut packet = vec![0; plain.len()];
    match encoder.encode(plain, &mut packet).unwrap() {
        Encoded::Incompressible => None,
        Encoded::Shrunk(bytes) => {
            let mut decoded = vec![0; plain.len()];
            encoding().format().decoder().unwrap().decode(&packet[..bytes], &mut decoded).unwrap();
            assert!(decoded == plain && read_gzip(&packet[..bytes]) == plain);
            Some(bytes)
        }
    }
}

fn account(engines: &Engines) -> String {
    engines.account(encoding()).unwrap()
}

#[test]
fn what_a_device_does_not_do_the_cpu_does_and_where_that_is_forbidden_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = concat!(env!("CARGO_MANIFEST_DIR"), "/../qatzip/tests/hardware.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-w", "-o"]).arg(directory.path().join("libqatzip.so.3")).arg(made_up);
    assert!(cc.status().unwrap().success());
    let start_with = |software, patience| {
        let qatzip = Qatzip { library: Some(directory.path().to_owned()), software, patience };
        let (engines, line) = qatzip.engines(choice(), 2).unwrap();
        assert!(line.unwrap().starts_with("engine qat: QAT hardware, by "));
        assert_eq!((engines.encoding(choice()), engines.has_hardware(Engine::Qat)), (Ok(encoding()), true));
        assert_eq!(engines.encoding("deflate".parse().unwrap()), Ok(encoding()));
        engines
    };
    let start = |software| start_with(software, Duration::from_secs(60));
    let good = batch(["", "", "", ""]);

    for software in [QatzipSoftware::Forbidden, QatzipSoftware::WhenBusy, QatzipSoftware::Always] {
        let engines = start(software);
        let names: Vec<_> = Encoding::auto_candidates(&engines).iter().map(ToString::to_string).collect();
        assert_eq!(names, ["none", "lz4", "deflate 1 by qat", "zstd -1", "zstd 1", "zstd 3", "zstd 6"]);
        let mut encoder = encoding().non_adaptive_encoder(&engines).unwrap();
        for _ in 0..10 {
            assert!(encode(&mut *encoder, &good).unwrap() < 20_000);
        }
        // As the device writes it, which shrinks nothing but runs.
        assert_eq!(encode(&mut *encoder, &code_like(1, 4 * PIECE)), None);
        assert_eq!(account(&engines), "QAT hardware 100 %", "{software:?}");
    }

    // A piece that fails: the CPU does that one, and then everything for a while.
    let engines = start(QatzipSoftware::WhenBusy);
    let mut encoder = encoding().non_adaptive_encoder(&engines).unwrap();
    assert!(encode(&mut *encoder, &batch(["", "BROKE", "", ""])).unwrap() < 20_000);
    assert!(account(&engines).ends_with(" (last: QATzip's qzCompress failed with code -2 (unspecified error))"));
    for _ in 0..8 {
        encode(&mut *encoder, &batch(["TIMED", "TIMED", "TIMED", "TIMED"])).unwrap();
    }
    assert!(account(&engines).contains("code -2"), "it was left alone: {}", account(&engines));
    encode(&mut *encoder, &batch(["", "", "", "TIMED"])).unwrap();
    assert!(account(&engines).contains("code -5"), "it was asked again: {}", account(&engines));
    let cpu = |account: &str| {
        account.split("CPU ").nth(1).map(|rest| rest.split(' ').next().unwrap().parse::<u32>().unwrap())
    };
    assert!(cpu(&account(&engines)).unwrap() > 70, "{}", account(&engines));

    // A device that hangs: nobody waits for more than one piece of it, and its buffers stay with it.
    let engines = start_with(QatzipSoftware::WhenBusy, Duration::from_millis(10));
    let mut encoder = encoding().non_adaptive_encoder(&engines).unwrap();
    encode(&mut *encoder, &batch(["HANGS", "", "HANGS", "HANGS"])).unwrap();
    assert!(account(&engines).ends_with(" (last: QATzip did not answer within 10ms)"), "{}", account(&engines));
    for _ in 0..100 {
        encode(&mut *encoder, &good).unwrap();
    }
    std::mem::forget(engines);

    // A device that answers when nobody waits any more: its answers are not taken for those of later batches.
    let gate = |open: bool| {
        // SAFETY: the made-up library's own integer, which it reads atomically; loaded for ever.
        unsafe {
            let loaded = libloading::os::unix::Library::new(directory.path().join("libqatzip.so.3")).unwrap();
            (**loaded.get::<*const AtomicI32>(b"gate").unwrap()).store(i32::from(open), Ordering::SeqCst);
        }
    };
    let engines = start_with(QatzipSoftware::WhenBusy, Duration::from_millis(1));
    for round in 0..20 {
        gate(false);
        let mut encoder = encoding().non_adaptive_encoder(&engines).unwrap();
        encode(&mut *encoder, &batch(["GATED one", "GATED two", "", "GATED"])).unwrap();
        for _ in 0..8 {
            encode(&mut *encoder, &good).unwrap();
        }
        gate(true);
        for _ in 0..round {
            std::thread::yield_now();
        }
        encode(&mut *encoder, &batch(["GATED three", "", "four", "five"])).unwrap();
        encode(&mut *encoder, &good).unwrap();
    }

    // Forbidden: what no device does goes as it is, and what one does is as before.
    let engines = start(QatzipSoftware::Forbidden);
    let mut encoder = encoding().non_adaptive_encoder(&engines).unwrap();
    assert_eq!(encode(&mut *encoder, &batch(["", "SOFTW", "", ""])), None);
    for _ in 0..8 {
        assert_eq!(encode(&mut *encoder, &good), None);
    }
    assert!(encode(&mut *encoder, &good).unwrap() < 20_000);
    let account = account(&engines);
    assert!(account.contains("not encoded") && !account.contains("CPU"), "{account}");
    assert!(account.ends_with(" (last: QATzip did this in software, which is forbidden)"), "{account}");
}
