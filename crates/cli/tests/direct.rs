//! What direct mode refuses, and what disturbs it while it is under way: each has a clear line, and the guest runs.

mod support;

use std::process::Command;
use std::time::Duration;

use serde_json::json;
use sterna_lab::{Backend, Guest, QemuOptions, QemuVersion};
use sterna_wire::switchover::{RecordState, SourceState};
use support::pair::{Pair, eventually};
use support::settle::{Migration, Side};
use support::{Hold, LONG, Sterna, receive, report, send_by};

const FAILED: Option<i32> = Some(1);
const CANCELLED: Option<i32> = Some(3);
/// So slow that a migration is under way for seconds.
const SLOW: &[&str] = &["--bandwidth", "20MB/s", "--method", "none"];

fn boot_sector() -> QemuOptions {
    QemuOptions::new(QemuVersion::V10_0, Guest::BootSector)
}

/// A pair whose source's guest is at work.
fn pair(source: &QemuOptions, destination: &QemuOptions) -> Option<Pair> {
    let pair = Pair::start(source, destination)?;
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    Some(pair)
}

/// `receive` with more words, and `send` by this mode, to the end of `send`: its exit code and lines.
fn sent(pair: &Pair, mode: &str, receiver: &Sterna) -> (Option<i32>, Vec<String>) {
    let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
    let mut command = send_by(mode, qmp, &receiver.address(), &state, &json);
    let (status, lines) = Sterna::start("send", command.args(["--insecure", "--downtime", "2s"])).finish_with_lines();
    (status.code(), lines)
}

fn receiver(pair: &Pair, words: &[&str]) -> Sterna {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    Sterna::start("receive", command.arg("--insecure").args(words))
}

/// `send --mode direct` is refused in one line that has `words`; the guest runs on untouched, and the destination can still take one.
fn refused(pair: &Pair, words: &[&str]) {
    let receiver = receiver(pair, &[]);
    let (code, lines) = sent(pair, "direct", &receiver);
    assert_eq!(code, FAILED, "{lines:?}");
    let told = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    for word in words {
        assert!(told.contains(word), "{word:?}: {told}");
    }
    assert!(pair.source.runs(), "the guest runs on");
    receiver.interrupt();
    receiver.finish();
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
}

/// `send --mode auto` takes QEMU's stream, says why in one line that has `word`, and moves the guest.
fn falls_back(pair: Pair, receiver: Sterna, word: &str) {
    let (code, lines) = sent(&pair, "auto", &receiver);
    assert_eq!(code, Some(0), "{lines:?}");
    let told = lines.iter().find(|line| line.contains("mode: stream")).expect("a line says which way it takes");
    assert!(told.contains(word), "{told}");
    assert!(receiver.finish().0.success());
    assert_eq!(report(&pair.report())["mode"], "stream");
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

/// A process that does something to a QEMU until this is dropped.
struct Busy(std::process::Child);

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_qemu_that_is_traced_already_is_refused_and_auto_takes_the_stream() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let pid = pair.source.qemu.pid();
    let Ok(tracer) =
        Command::new("strace").args(["-q", "-o", "/dev/null", "-e", "trace=none", "-p"]).arg(pid.to_string()).spawn()
    else {
        return eprintln!("skipped: there is no strace to trace QEMU with");
    };
    let tracer = Busy(tracer);
    let traced = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        !status.contains("TracerPid:\t0")
    };
    assert!(eventually(LONG, traced), "strace attaches");
    refused(&pair, &["traced by process", "strace", "not touched"]);
    let receiver = receiver(&pair, &[]);
    let (code, lines) = sent(&pair, "auto", &receiver);
    drop(tracer);
    assert_eq!(code, Some(0), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("mode: stream") && line.contains("traced")), "{lines:?}");
    assert!(receiver.finish().0.success());
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

#[test]
fn a_qemu_7_2_is_refused_and_auto_takes_the_stream() {
    let options = QemuOptions::new(QemuVersion::V7_2, Guest::BootSector);
    let Some(pair) = pair(&options, &options.incoming()) else { return };
    refused(&pair, &["QEMU 7.2", "not touched"]);
    let receiver = receiver(&pair, &[]);
    falls_back(pair, receiver, "QEMU 7.2");
}

#[test]
fn a_receiver_that_places_in_the_stream_gets_the_stream() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let receiver = receiver(&pair, &["--placement", "in-stream"]);
    falls_back(pair, receiver, "destination");
}

#[test]
fn a_receiver_that_places_in_the_stream_refuses_a_source_that_must_be_direct() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let mut receiver = receiver(&pair, &["--placement", "in-stream"]);
    let (code, lines) = sent(&pair, "direct", &receiver);
    assert_eq!(code, FAILED, "{lines:?}");
    assert!(pair.source.runs() && receiver.poll().is_none(), "{lines:?}");
    assert_eq!(pair.source.untouched(), Ok(()));
}

#[test]
fn another_machine_type_and_other_memory_are_refused_while_the_guest_runs() {
    let mut machine = boot_sector().incoming();
    machine.machine = "pc-q35-9.0".into();
    let mut memory = boot_sector().incoming();
    memory.memory = 192 << 20;
    for (destination, word) in [(machine, "pc-q35-9.0"), (memory, "pc.ram")] {
        let Some(pair) = pair(&boot_sector(), &destination) else { return };
        let receiver = receiver(&pair, &[]);
        let (code, lines) = sent(&pair, "direct", &receiver);
        assert_eq!(code, FAILED, "{lines:?}");
        let told = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
        assert!(told.contains(word), "{told}");
        assert!(pair.source.runs());
        assert_eq!(pair.source.untouched(), Ok(()));
        assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"), "it can still take another guest");
        drop(receiver);
        pair.source.wait_progress().unwrap();
    }
}

#[test]
fn memory_that_is_plugged_in_during_the_move_ends_it_and_the_guest_runs_on() {
    let mut options = boot_sector();
    // QEMU merges it with the one that says how much there is.
    options.extra.extend(["-m".into(), "slots=2,maxmem=1G".into()]);
    let Some(pair) = pair(&options, &options.incoming()) else { return };
    // All of memory fits the downtime, so that the guest is stopped after the first round, which takes more than a second.
    let words = ["--bandwidth", "80MB/s", "--method", "none"];
    let mut migration = Migration::start_by("direct", pair, &words, None, None);
    let sender = migration.sender.take().unwrap();
    sender.wait_for("placement: ");
    let plugged = json!({ "qom-type": "memory-backend-ram", "id": "plugged", "size": 256 << 20 });
    migration.pair.source.monitor.execute("object-add", plugged).unwrap();
    let plugged = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "plugged" });
    migration.pair.source.monitor.execute("device_add", plugged).unwrap();
    assert_eq!(sender.finish().0.code(), FAILED);
    let reason = report(&migration.pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("memory was plugged in or out"), "{reason}");
    migration.receiver.take().unwrap().finish();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_guest_that_somebody_pauses_or_resumes_meanwhile_is_not_given_away() {
    // Paused while its memory is sent.
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let mut migration = Migration::start_by("direct", pair, SLOW, None, None);
    let sender = migration.sender.take().unwrap();
    sender.wait_for("placement: ");
    migration.pair.source.monitor.execute("stop", json!({})).unwrap();
    assert_eq!(sender.finish().0.code(), FAILED);
    let reason = report(&migration.pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("only a running guest is moved"), "{reason}");
    migration.receiver.take().unwrap().finish();
    assert_eq!(migration.pair.source.status().as_deref(), Some("paused"), "it was somebody else who paused it");
    migration.pair.source.monitor.execute("cont", json!({})).unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

/// Holds a direct migration at `point` of the source, has `meanwhile` done to its QEMU, and lets it go on.
fn held(point: &str, meanwhile: impl FnOnce(&Pair)) -> Option<(Migration, Option<i32>)> {
    let pair = pair(&boot_sector(), &boot_sector().incoming())?;
    let receiver = receiver(&pair, &[]);
    let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
    let mut command = send_by("direct", qmp, &receiver.address(), &state, &json);
    command.args(["--insecure", "--downtime", "2s"]);
    let hold = Hold::at(point, pair.scratch.path(), &mut command);
    let sender = Sterna::start("send", &mut command);
    let reached = hold.reached(&sender);
    meanwhile(&pair);
    drop(reached);
    let code = sender.finish().0.code();
    Some((Migration { pair, sender: None, receiver: Some(receiver) }, code))
}

#[test]
fn a_guest_that_somebody_resumes_before_the_decision_stays_at_the_source() {
    let resume = |pair: &Pair| drop(pair.source.monitor.execute("cont", json!({})).unwrap());
    let resume_and_pause = |pair: &Pair| {
        pair.source.monitor.execute("cont", json!({})).unwrap();
        pair.source.monitor.execute("stop", json!({})).unwrap();
    };
    let Some((mut migration, code)) = held("source.before-relay-shut", resume) else { return };
    assert_eq!(code, FAILED);
    let reason = report(&migration.pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("somebody else let the guest run"), "{reason}");
    migration.receiver.take().unwrap().finish();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));

    let (mut migration, code) = held("source.before-relay-shut", resume_and_pause).expect("there were tools before");
    assert_eq!(code, FAILED);
    migration.receiver.take().unwrap().finish();
    migration.pair.never_both().unwrap();
    assert_eq!(migration.pair.source.status().as_deref(), Some("paused"), "it was somebody else who paused it");
    migration.pair.source.monitor.execute("cont", json!({})).unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_guest_that_somebody_else_paused_is_not_let_run_by_recover() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let fault = "source.after-record-aborted:crash";
    let mut migration = Migration::start_by("direct", pair, SLOW, Some(fault), None);
    migration.sender.as_ref().unwrap().wait_for("placement: ");
    migration.pair.source.monitor.execute("stop", json!({})).unwrap();
    migration.wait_crash(Side::Source).unwrap();
    migration.receiver.take().unwrap().finish();
    assert_eq!(Side::Source.state(&migration.pair), Some(RecordState::Source(SourceState::Aborted)));
    let (ended, _) = Side::Source.recover(&migration.pair, &[], None).expect("there is a record").finish();
    assert!(ended.success());
    assert_eq!(migration.pair.source.status().as_deref(), Some("paused"));
    migration.pair.source.monitor.execute("cont", json!({})).unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn cancelling_at_either_side_by_either_signal_at_either_phase_leaves_the_guest_at_the_source() {
    // While the first pages travel; and while the last ones do, with the state of the devices at the destination already: all of memory
    // fits the downtime there, and takes more than a second.
    let phases = [("placement: ", SLOW), ("stopping the guest", &["--bandwidth", "80MB/s", "--method", "none"])];
    for (side, terminate) in
        [(Side::Source, false), (Side::Source, true), (Side::Destination, false), (Side::Destination, true)]
    {
        for (line, words) in phases {
            let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
            let before = pair.source.migration_settings();
            let mut migration = Migration::start_by("direct", pair, words, None, None);
            let (mut sender, mut receiver) = (migration.sender.take().unwrap(), migration.receiver.take().unwrap());
            sender.wait_for(line);
            let cancelled = if side == Side::Source { &sender } else { &receiver };
            if terminate {
                cancelled.terminate()
            } else {
                cancelled.interrupt()
            }
            assert!(eventually(LONG, || sender.poll().is_some() && receiver.poll().is_some()), "both sides end");
            let (sent, received) = (sender.finish().0.code(), receiver.finish().0.code());
            let expected = if side == Side::Source { (CANCELLED, FAILED) } else { (FAILED, CANCELLED) };
            assert_eq!((sent, received), expected, "{side:?}, terminate {terminate}, after {line:?}");
            assert_eq!(migration.pair.source.migration_settings(), before);
            migration.pair.destination.qemu.wait_exit(Duration::from_secs(10)).unwrap();
            assert_eq!(migration.exactly_one(), Ok(Side::Source));
        }
    }
}

#[test]
fn a_source_that_is_kept_is_warned_of_and_one_that_is_not_is_gone() {
    for (after, status) in [("quit", None), ("keep", Some("paused"))] {
        let mut options = boot_sector();
        options.backend = Backend::Memfd;
        let Some(pair) = pair(&options, &boot_sector().incoming()) else { return };
        let settings = pair.destination.migration_settings();
        let mut migration = Migration::start_by("direct", pair, &["--source-after", after], None, None);
        let (sent, text) = migration.sender.take().unwrap().finish();
        assert!(sent.success() && migration.receiver.take().unwrap().finish().0.success(), "{sent}");
        let report = report(&migration.pair.report());
        assert_eq!((report["mode"].as_str(), report["source_after"].as_str()), (Some("direct"), Some(after)));
        assert_eq!(text.contains("never resume"), after == "keep", "{text}");
        assert_eq!(migration.pair.source.status().as_deref(), status);
        assert_eq!(migration.pair.destination.migration_settings(), settings);
        assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    }
}

#[test]
fn the_destinations_settings_are_put_back_by_a_recovery_that_starts_the_guest() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let before = pair.destination.migration_settings();
    let fault = "destination.after-record-committed:crash";
    let mut migration = Migration::start_by("direct", pair, &[], None, Some(fault));
    migration.wait_crash(Side::Destination).unwrap();
    migration.settle().unwrap();
    assert_eq!(migration.pair.destination.migration_settings(), before);
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

#[test]
fn a_memory_backend_that_no_device_uses_does_not_stand_in_the_way() {
    let mut options = boot_sector();
    options.extra.extend(["-object".into(), "memory-backend-ram,id=unused,size=16M".into()]);
    let Some(pair) = pair(&options, &boot_sector().incoming()) else { return };
    let receiver = receiver(&pair, &[]);
    let (code, lines) = sent(&pair, "direct", &receiver);
    assert_eq!(code, Some(0), "{lines:?}");
    assert!(receiver.finish().0.success());
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}
