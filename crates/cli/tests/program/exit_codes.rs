//! The exit codes of docs/operating.md in real situations, one for each kind of ending. That of an unconfirmed end (4) is in `outcomes`.

use std::process::Command;

use serde_json::json;
use sterna_qemu_lab::{Guest, QemuOptions, QemuVersion};

use crate::support::pair::Pair;
use crate::support::{
    CANCELLED, FAILED, LONG, LOST, NOT_PERMITTED, NOWHERE, PEER_REFUSED, REFUSED, Sterna, UNREACHABLE,
    nothing_was_touched, receive, report, send, sterna,
};

/// How a `send` is made to end, and its code.
type Situation = (&'static str, fn(&Pair) -> Option<i32>, Option<i32>);

const SITUATIONS: &[Situation] = &[
    ("wrong options", |pair| code(sender(pair, "127.0.0.1:1").arg("--level").arg("99")), Some(2)),
    ("nobody listens", |pair| code(&mut sender(pair, NOWHERE)), UNREACHABLE),
    ("no directory for the report", no_report, REFUSED),
    ("a paused guest", paused, REFUSED),
    ("a monitor of another user", by_another_user, NOT_PERMITTED),
    ("another machine", another_machine, PEER_REFUSED),
    ("cancelled at the source", cancelled, CANCELLED),
    ("cancelled at the destination", cancelled_there, FAILED),
    ("the source's QEMU dies", dies, LOST),
    ("nothing in the way", moved, Some(0)),
];

#[test]
fn each_kind_of_ending_has_its_code() {
    for (what, situation, expected) in SITUATIONS {
        let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
        let code = situation(&pair);
        assert_eq!(code, *expected, "{what}");
        if nothing_was_touched(code) {
            assert_eq!(report(&pair.report())["exit_code"].as_i64(), code.map(i64::from), "{what}");
            assert_eq!(pair.source.migration_status().as_deref(), Some("none"), "{what}");
        }
    }
}

fn sender(pair: &Pair, to: &str) -> Command {
    let mut command = send(pair.source.qemu.qmp_path(), to, &pair.source_state(), &pair.report());
    command.arg("--insecure");
    command
}

fn code(command: &mut Command) -> Option<i32> {
    Sterna::start("send", command).finish().0.code()
}

fn receiver(pair: &Pair) -> Sterna {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    Sterna::start("receive", command.arg("--insecure"))
}

/// A migration that takes seconds, once pages move.
fn slow(pair: &Pair) -> (Sterna, Sterna) {
    let receiver = receiver(pair);
    let mut command = sender(pair, &receiver.address());
    let sender = Sterna::start("send", command.args(["--bandwidth", "20MB/s", "--method", "none", "--downtime", "2s"]));
    sender.wait_for("placement: ");
    (sender, receiver)
}

fn no_report(pair: &Pair) -> Option<i32> {
    let missing = pair.scratch.path().join("missing/report.json");
    let mut command = send(pair.source.qemu.qmp_path(), "127.0.0.1:1", &pair.source_state(), &missing);
    let code = code(command.arg("--insecure"));
    // For the test's own look at it.
    std::fs::write(pair.report(), json!({ "exit_code": code }).to_string()).unwrap();
    code
}

fn paused(pair: &Pair) -> Option<i32> {
    pair.source.monitor.execute("stop", json!({})).unwrap();
    code(&mut sender(pair, "127.0.0.1:1"))
}

fn by_another_user(pair: &Pair) -> Option<i32> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        std::fs::write(pair.report(), json!({ "exit_code": NOT_PERMITTED }).to_string()).unwrap();
        return NOT_PERMITTED;
    }
    use std::os::unix::fs::PermissionsExt;
    // The program and its places must be within reach of the user; QEMU's monitor is not.
    let home = tempfile::tempdir().unwrap();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let program = home.path().join("sterna");
    std::fs::copy(sterna().get_program(), &program).unwrap();
    let (qmp, json) = (pair.source.qemu.qmp_path(), home.path().join("report.json"));
    std::fs::set_permissions(qmp, std::fs::Permissions::from_mode(0o600)).unwrap();
    let command = send(qmp, "127.0.0.1:1", &home.path().join("state"), &json);
    let mut other = Command::new("setpriv");
    other.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&program).args(command.get_args());
    let code = code(other.arg("--insecure").env("HOME", home.path()).current_dir(home.path()));
    std::fs::copy(&json, pair.report()).unwrap();
    code
}

fn another_machine(pair: &Pair) -> Option<i32> {
    let mut options = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector).incoming();
    options.machine = "pc-q35-9.0".into();
    let other = sterna_qemu_lab::Qemu::start(&options).unwrap();
    let mut command = receive(other.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    code(&mut sender(pair, &receiver.address()))
}

fn cancelled(pair: &Pair) -> Option<i32> {
    let (sender, _receiver) = slow(pair);
    sender.interrupt();
    sender.finish().0.code()
}

fn cancelled_there(pair: &Pair) -> Option<i32> {
    let (sender, receiver) = slow(pair);
    receiver.interrupt();
    assert_eq!(receiver.finish().0.code(), CANCELLED);
    sender.finish().0.code()
}

fn dies(pair: &Pair) -> Option<i32> {
    let (sender, _receiver) = slow(pair);
    let pid = rustix::process::Pid::from_raw(pair.source.qemu.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    sender.finish().0.code()
}

fn moved(pair: &Pair) -> Option<i32> {
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    let receiver = receiver(pair);
    // So long that the guest, which writes all its memory all the time, converges.
    let code = code(sender(pair, &receiver.address()).args(["--downtime", "10s"]));
    assert!(receiver.finish().0.success());
    code
}
