//! A running Linux guest moves between two real QEMUs, and finds its memory right.

mod support;

use sterna_lab::{Qemu, QemuVersion, or_skip};
use support::{LONG, Sterna, busy_guest, receive, report, send};

#[test]
fn a_busy_linux_guest_moves_and_its_memory_is_right() {
    let options = busy_guest(QemuVersion::V10_0, "pc-q35-10.0");
    let Some(source) = or_skip(Qemu::start(&options)) else { return };
    let destination = Qemu::start(&options.incoming()).unwrap();
    source.guest().wait_ready(LONG).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let json = scratch.path().join("report.json");

    let mut command = receive(destination.qmp_path(), scratch.path());
    let receiver = Sterna::start("receive", command.args(["--insecure"]));
    let mut command = send(source.qmp_path(), &receiver.address(), scratch.path(), &json);
    let sender = Sterna::start("send", command.args(["--insecure"]));
    let (sent, _) = sender.finish();
    let (received, _) = receiver.finish();

    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
    assert_eq!(report(&json)["outcome"], "completed");
    let verified = destination.guest().verify(LONG).unwrap();
    assert_eq!(verified.bad, 0);
    assert!(verified.pages > 0);
}
