//! A running Linux guest moves between two real QEMUs, and finds its memory right.

use crate::support::{LONG, Sterna, busy_guest, receive, report, send};
use serde_json::Value;
use sterna_qemu_lab::{Qemu, QemuVersion, skip_if_unavailable};
use sterna_test_kit::tools;

#[test]
fn a_busy_linux_guest_moves_and_its_memory_is_right() {
    moved(&[]);
}

#[test]
fn it_moves_by_the_software_of_the_real_qatzip_and_the_report_says_so() {
    let Some(library) = tools::qatzip_directory() else { return tools::skip_without_qatzip("QATzip is not unpacked") };
    let library = library.to_str().unwrap();
    let options = [
        "--method",
        "deflate",
        "--engine",
        "qat",
        "--level",
        "2",
        "--qatzip-library",
        library,
        "--qatzip-software",
        "always",
    ];
    let Some(report) = moved(&options) else { return };
    let method = report["method"].as_str().unwrap();
    // Or a device, where there is one.
    assert!(method == "deflate 2 by qat: QATzip's software 100 %" || method.contains("QAT hardware"), "{method}");
    assert!(report["ratio"].as_f64().unwrap() > 1.0, "{report}");
}

/// Moves one by `send` with `options`; its report. None where there is no QEMU.
fn moved(options: &[&str]) -> Option<Value> {
    let machine = busy_guest(QemuVersion::V10_0, "pc-q35-10.0");
    let source = skip_if_unavailable(Qemu::start(&machine))?;
    let destination = Qemu::start(&machine.incoming()).unwrap();
    source.guest().wait_ready(LONG).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let json = scratch.path().join("report.json");

    let mut command = receive(destination.qmp_path(), scratch.path());
    let receiver = Sterna::start("receive", command.args(["--insecure"]));
    let mut command = send(source.qmp_path(), &receiver.address(), scratch.path(), &json);
    let sender = Sterna::start("send", command.args(["--insecure"]).args(options));
    let (sent, _) = sender.finish();
    let (received, _) = receiver.finish();

    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
    let report = report(&json);
    assert_eq!(report["outcome"], "completed");
    let verified = destination.guest().verify(LONG).unwrap();
    assert_eq!(verified.bad, 0);
    assert!(verified.pages > 0);
    Some(report)
}

#[test]
fn the_receiving_side_shows_how_much_of_the_announced_ram_it_has_placed() {
    let machine = busy_guest(QemuVersion::V10_0, "pc-q35-10.0");
    let Some(source) = skip_if_unavailable(Qemu::start(&machine)) else { return };
    let destination = Qemu::start(&machine.incoming()).unwrap();
    source.guest().wait_ready(LONG).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let json = scratch.path().join("report.json");

    let mut command = receive(destination.qmp_path(), scratch.path());
    let receiver = Sterna::start("receive", command.args(["--insecure"]));
    let mut command = send(source.qmp_path(), &receiver.address(), scratch.path(), &json);
    // So slow that it is still at it when that was seen.
    let sender = Sterna::start("send", command.args(["--insecure", "--bandwidth", "1MB/s"]));
    let line = receiver.wait_for("of RAM placed (");
    sender.interrupt();
    let (sent, received) = (sender.finish().0, receiver.finish().0);

    assert!(line.starts_with("receiving memory, "), "{line}");
    assert!(!sent.success() && !received.success(), "send: {sent}, receive: {received}");
    assert_eq!(report(&json)["outcome"], "cancelled");
}
