//! `sterna send --dry-run`: it names every refusal of both sides, changes nothing of either QEMU, and the receiver then takes the guest.

use serde_json::{Value, json};
use sterna_qemu_lab::{Guest, QemuOptions, QemuVersion};

use crate::support::pair::Pair;
use crate::support::settle::{Migration, Side};
use crate::support::{LONG, NOWHERE, PEER_REFUSED, REFUSED, Sterna, UNREACHABLE, receive, report, send_by};

fn boot_sector() -> QemuOptions {
    QemuOptions::new(QemuVersion::V10_0, Guest::BootSector)
}

fn receiver(pair: &Pair) -> Sterna {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    Sterna::start("receive", command.arg("--insecure"))
}

/// Makes a dry run, which must change nothing of either QEMU. Returns its exit code and its result.
fn dry_run(pair: &Pair, mode: &str, to: &str, options: &[&str]) -> (Option<i32>, Value) {
    let state = |pair: &Pair| {
        let both = [&pair.source, &pair.destination];
        both.map(|qemu| (qemu.migration_settings(), qemu.status(), qemu.migration_status()))
    };
    let before = state(pair);
    let mut command = send_by(mode, pair.source.qemu.qmp_path(), to, &pair.source_state(), &pair.report());
    let (status, text) = Sterna::start("send", command.args(["--insecure", "--dry-run"]).args(options)).finish();
    assert_eq!(state(pair), before, "{text}");
    let result = report(&pair.report());
    let begins = result["would_begin"].as_bool().expect("it says so");
    assert_eq!(status.success(), begins, "{text}");
    assert!(text.contains(if begins { "would begin" } else { "would be refused" }), "{text}");
    for refusal in result["refusals"].as_array().unwrap() {
        assert!(text.contains(refusal["reason"].as_str().unwrap()), "{refusal}: {text}");
    }
    (status.code(), result)
}

/// The reasons of one side.
fn reasons(result: &Value, side: &str) -> Vec<String> {
    let all = result["refusals"].as_array().unwrap().iter().filter(|refusal| refusal["side"] == side);
    all.map(|refusal| refusal["reason"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_migration_that_would_begin_is_estimated_and_then_moves_the_guest() {
    for (mode, expected) in [("auto", "direct"), ("direct", "direct"), ("stream", "stream")] {
        let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
        let receiver = receiver(&pair);
        for options in [&[][..], &["--bandwidth", "100MB/s"]] {
            let (_, result) = dry_run(&pair, mode, &receiver.address(), options);
            assert_eq!(
                (result["would_begin"].as_bool(), result["mode"].as_str()),
                (Some(true), Some(expected)),
                "{result}"
            );
            let (ram, populated) = (result["ram_bytes"].as_u64().unwrap(), result["populated_bytes"].as_u64().unwrap());
            assert!(ram >= pair.source.qemu.memory() && (1..=ram).contains(&populated), "{result}");
            let times = result["times"].as_array().unwrap();
            assert_eq!(times.len(), if options.is_empty() { 3 } else { 1 });
            let (rate, seconds) =
                (times[0]["bits_per_second"].as_f64().unwrap(), times[0]["seconds"].as_f64().unwrap());
            assert!((seconds * rate / 8.0 - populated as f64).abs() < 1.0, "{result}");
            assert!(result["round_trip_ms"].as_f64().unwrap() > 0.0);
        }
        receiver.wait_for("a migration would begin; nothing was begun");
        let (qmp, state) = (pair.source.qemu.qmp_path(), pair.source_state());
        let mut command = send_by(mode, qmp, &receiver.address(), &state, &pair.report());
        let (sent, _) = Sterna::start("send", command.args(["--insecure", "--downtime", "10s"])).finish();
        assert!(sent.success() && receiver.finish().0.success(), "{mode}");
        let migration = Migration { pair, sender: None, receiver: None };
        assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    }
}

#[test]
fn every_refusal_of_both_sides_is_named_and_the_first_one_determines_the_code() {
    let mut other = boot_sector().incoming();
    other.machine = "pc-q35-9.0".into();
    other.memory = 192 << 20;
    let Some(pair) = Pair::start(&boot_sector(), &other) else { return };
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    let mut receiver = receiver(&pair);
    let (code, result) = dry_run(&pair, "direct", &receiver.address(), &[]);
    let there = reasons(&result, "destination");
    assert_eq!(code, PEER_REFUSED, "{result}");
    for word in ["pc-q35-9.0", "RAM block pc.ram"] {
        assert!(there.iter().any(|reason| reason.contains(word)), "{word}: {there:?}");
    }
    receiver.wait_for("a migration would be refused: ");

    pair.source.monitor.execute("stop", json!({})).unwrap();
    let set = json!({ "capabilities": [{ "capability": "xbzrle", "state": true }] });
    pair.source.monitor.execute("migrate-set-capabilities", set).unwrap();
    let (code, result) =
        dry_run(&pair, "direct", &receiver.address(), &["--method", "deflate", "--engine", "iaa", "--accel", "iaa"]);
    assert_eq!(code, REFUSED, "{result}");
    let here = reasons(&result, "source");
    for word in ["does not run", "xbzrle", "iaa"] {
        assert!(here.iter().any(|reason| reason.contains(word)), "{word}: {here:?}");
    }
    assert_eq!(reasons(&result, "destination"), there);
    assert!(receiver.poll().is_none(), "it waits for a better source");
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
}

#[test]
fn without_a_destination_the_rest_is_told_all_the_same() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    let (code, result) = dry_run(&pair, "auto", NOWHERE, &[]);
    assert_eq!((code, result["mode"].as_str()), (UNREACHABLE, Some("direct")), "{result}");
    assert!(reasons(&result, "connection")[0].contains(NOWHERE), "{result}");
    assert_eq!(result["round_trip_ms"], Value::Null);
}

#[test]
fn what_speaks_against_direct_mode_is_named_and_the_stream_is_taken() {
    // This release does not report where its RAM lies.
    let Some(pair) = Pair::boot_sector(QemuVersion::V7_2) else { return };
    let receiver = receiver(&pair);
    let (_, result) = dry_run(&pair, "auto", &receiver.address(), &["--accel", "auto"]);
    assert_eq!((result["would_begin"].as_bool(), result["mode"].as_str()), (Some(true), Some("stream")), "{result}");
    assert!(result["not_direct"][0].as_str().unwrap().contains("QEMU 7.2"), "{result}");
    for (option, value) in [("--on-no-convergence", "give-up"), ("--accel", "dsa:/dev/dsa/wq0.0")] {
        let (code, result) = dry_run(&pair, "auto", &receiver.address(), &[option, value]);
        assert_eq!(code, REFUSED, "{result}");
        let reason = &reasons(&result, "source")[0];
        assert!(reason.starts_with(option) && reason.contains(" needs direct mode"), "{result}");
    }
    receiver.interrupt();
}
