//! A guest that was started at the destination and certainly does not run: both sides report that, and the source's QEMU is kept, paused, whatever
//! `--source-after` asks for. A guest that waits, or runs in a loop, is no such guest.

use std::time::Duration;

use serde_json::Value;
use sterna_qemu_lab::boot_sector::{TASKS, Task, begin};
use sterna_qemu_lab::{QemuVersion, ram::Ram};
use sterna_wire::switchover::{DestinationState, RecordState, SourceState};

use crate::support::pair::{Pair, Watched, emulated, eventually};
use crate::support::settle::Side;
use crate::support::{DOES_NOT_RUN, FIRST_MOMENT, Hold, LONG, MODES, Sterna, receive, report, send_by};

/// Has the guest of this QEMU leave its passes for `task`, and waits until it has.
fn set_to(source: &Watched, task: Task) {
    let ram = Ram::open(source.qemu.pid(), source.qemu.memory()).unwrap();
    begin(&ram, task).unwrap();
    let works_on_it = || {
        let registers = source.monitor.human("info registers").expect("QEMU answers");
        let instruction = registers.split_once("EIP=").map(|(_, rest)| &rest[..8]);
        instruction.is_some_and(|number| TASKS.contains(&u64::from_str_radix(number, 16).unwrap()))
    };
    assert!(eventually(LONG, works_on_it), "{}", source.state());
}

/// What happens to the destination's QEMU at a step of `receive`.
type AtStep<'a> = (&'a str, fn(&mut Watched));

/// Moves the guest by `mode`, with the options `words` of `send`; `at_hold` is called with the destination's QEMU where `receive` stops, if it is to.
/// The guest is watched for `moment`. Returns the exit codes, the report and the texts of both.
fn moved(
    pair: &mut Pair,
    mode: &str,
    words: &[&str],
    moment: Duration,
    at_hold: Option<AtStep<'_>>,
) -> ([Option<i32>; 2], Value, [String; 2]) {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    command.arg("--insecure").env(FIRST_MOMENT, moment.as_millis().to_string());
    let hold = at_hold.map(|(step, act)| (Hold::at(step, pair.scratch.path(), &mut command), act));
    let receiver = Sterna::start("receive", &mut command);
    let mut command =
        send_by(mode, pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", command.args(["--insecure", "--downtime", "10s"]).args(words));
    if let Some((hold, act)) = hold {
        let reached = hold.reached(&receiver);
        act(&mut pair.destination);
        drop(reached);
    }
    let (sent, text) = sender.finish();
    let (received, at_destination) = receiver.finish();
    ([sent.code(), received.code()], report(&pair.report()), [text, at_destination])
}

/// Checks that the source's QEMU, and what the records and each `recover` say, are those of a guest that has arrived and does not run, because
/// of what these `words` say.
fn arrived_and_does_not_run(pair: &Pair, mode: &str, report: &Value, texts: &[String; 2], words: &str) {
    assert_eq!([&report["outcome"], &report["kind"]], ["does_not_run"; 2], "{report}");
    assert_eq!(report["source_after"], "keep", "{report}");
    assert!(report["reason"].as_str().unwrap().contains(words), "{report}");
    assert!(report["warnings"][0].as_str().unwrap().contains("is kept, whatever --source-after asks for"), "{report}");
    for text in texts {
        assert!(text.contains("THE GUEST DOES NOT RUN") && text.contains(words), "{text}");
    }
    let paused = if mode == "stream" { "postmigrate" } else { "paused" };
    assert_eq!(pair.source.status().as_deref(), Some(paused), "{}", pair.source.state());
    let states = [
        (Side::Source, RecordState::Source(SourceState::Finished)),
        (Side::Destination, RecordState::Destination(DestinationState::Running)),
    ];
    for (side, state) in states {
        assert_eq!(side.state(pair), Some(state));
        let (status, lines) = side.recover(pair, &[], None).expect("there is a record").finish_with_lines();
        assert_eq!(status.code(), DOES_NOT_RUN, "{side:?}: {lines:?}");
        assert!(lines.iter().any(|line| line.contains(words)), "{side:?}: {lines:?}");
    }
    assert_eq!(pair.source.status().as_deref(), Some(paused), "`recover` keeps it, too");
    pair.never_both().unwrap();
}

#[test]
fn a_guest_whose_new_cpu_lacks_what_it_uses_is_reported_and_its_source_is_kept() {
    let strong = emulated(QemuVersion::V10_0, &["-cpu", "max"]);
    // QEMU ends at a reset, or has the guest boot again.
    let weak = [&["-cpu", "qemu64"][..], &["-cpu", "qemu64", "-action", "reboot=reset"]];
    for mode in MODES {
        for weak in weak {
            println!("by {mode}, to {weak:?}");
            let Some(mut pair) = Pair::start_boot_sector(&strong, &emulated(QemuVersion::V10_0, weak)) else { return };
            set_to(&pair.source, Task::UseMovbe);
            let (codes, report, texts) = moved(&mut pair, mode, &["--force-cpu", "--source-after", "quit"], LONG, None);
            assert_eq!(codes, [DOES_NOT_RUN; 2], "{texts:?}");
            arrived_and_does_not_run(&pair, mode, &report, &texts, "a triple fault");
        }
    }
}

#[test]
fn the_oldest_and_the_newest_release_report_a_guest_that_does_not_run() {
    for version in [QemuVersion::V7_2, QemuVersion::V11_1] {
        let (strong, weak) = (emulated(version, &["-cpu", "max"]), emulated(version, &["-cpu", "qemu64"]));
        let Some(mut pair) = Pair::start_boot_sector(&strong, &weak) else { return };
        set_to(&pair.source, Task::UseMovbe);
        let (codes, report, texts) = moved(&mut pair, "stream", &["--force-cpu"], LONG, None);
        assert_eq!(codes, [DOES_NOT_RUN; 2], "{version}: {texts:?}");
        arrived_and_does_not_run(&pair, "stream", &report, &texts, "a triple fault");
    }
}

#[test]
fn a_guest_that_is_halted_or_runs_in_a_loop_counts_as_running() {
    let options = emulated(QemuVersion::V10_0, &["-cpu", "max"]);
    for mode in MODES {
        for task in [Task::Halt, Task::UseMovbe] {
            println!("{task:?} by {mode}");
            let Some(mut pair) = Pair::start_boot_sector(&options, &options) else { return };
            set_to(&pair.source, task);
            let (codes, report, texts) = moved(&mut pair, mode, &[], Duration::from_millis(500), None);
            assert_eq!(codes, [Some(0); 2], "{texts:?}");
            assert_eq!([&report["outcome"], &report["source_after"]], ["completed", "quit"], "{report}");
            assert_eq!(pair.destination.status().as_deref(), Some("running"));
            pair.source.qemu.wait_exit(LONG).unwrap();
        }
    }
}

#[test]
fn a_qemu_that_ends_right_after_it_has_started_the_guest_leaves_the_source_kept() {
    let options = emulated(QemuVersion::V10_0, &[]);
    for mode in MODES {
        println!("by {mode}");
        let Some(mut pair) = Pair::start_boot_sector(&options, &options) else { return };
        let killed: (&str, fn(&mut Watched)) = ("destination.before-record-running", Watched::kill);
        let (codes, report, texts) = moved(&mut pair, mode, &[], LONG, Some(killed));
        assert_eq!(codes, [DOES_NOT_RUN; 2], "{texts:?}");
        arrived_and_does_not_run(&pair, mode, &report, &texts, "its QEMU has ended at once");
    }
}
