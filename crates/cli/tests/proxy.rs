//! `sterna proxy` between QEMUs that somebody else drives: here the test, as libvirt would.

mod support;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;

use serde_json::json;
use sterna_lab::{Guest, Qemu, QemuOptions, QemuVersion, or_skip};
use sterna_qemu::qmp::Qmp;
use support::{LONG, Sterna, busy_guest, sterna};

/// Sets what libvirt sets for a parallel migration over unix sockets; `channels` 0: one stream.
fn prepare(qmp: &Qmp, channels: u8) {
    let capability = |name: &str, state: bool| json!({ "capability": name, "state": state });
    let capabilities =
        json!([capability("multifd", channels > 0), capability("return-path", true), capability("events", true)]);
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).unwrap();
    let mut parameters = json!({ "max-bandwidth": 0 });
    if channels > 0 {
        parameters["multifd-channels"] = channels.into();
    }
    qmp.execute("migrate-set-parameters", parameters).unwrap();
}

fn migrate(source: &Qmp, destination: &Qmp, from: &Path, to: &Path, channels: u8) {
    prepare(source, channels);
    prepare(destination, channels);
    destination.execute("migrate-incoming", json!({ "uri": format!("unix:{}", to.display()) })).unwrap();
    source.execute("migrate", json!({ "uri": format!("unix:{}", from.display()) })).unwrap();
}

fn wait_migration(qmp: &Qmp, wanted: &str) {
    let ended = |data: &serde_json::Value| matches!(data["status"].as_str(), Some("completed" | "failed"));
    let event = qmp.wait_event("MIGRATION", ended, Instant::now() + LONG).unwrap().expect("the migration ends");
    assert_eq!(event.data["status"], wanted, "{:?}", qmp.query_migrate());
}

/// Moves a busy guest through a pair of proxies, driven by QMP.
fn move_through_proxies(options: &QemuOptions, channels: u8, method: &str) {
    let Some(source) = or_skip(Qemu::start(options)) else { return };
    let destination = Qemu::start(&options.incoming()).unwrap();
    source.guest().wait_ready(LONG).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let (from, to) = (scratch.path().join("from.sock"), scratch.path().join("to.sock"));

    let mut command = sterna();
    let receiver = Sterna::start(
        "proxy receive",
        command.args(["proxy", "receive", "--listen", "127.0.0.1:0", "--insecure", "--unix"]).arg(&to),
    );
    let address = receiver.address();
    let mut command = sterna();
    command.args(["proxy", "send", "--insecure", "--method", method, "--to", &address, "--unix"]).arg(&from);
    let sender = Sterna::start("proxy send", &mut command);
    sender.wait_for("listening on ");

    let (source_qmp, destination_qmp) =
        (Qmp::connect(source.qmp_path()).unwrap(), Qmp::connect(destination.qmp_path()).unwrap());
    migrate(&source_qmp, &destination_qmp, &from, &to, channels);
    wait_migration(&source_qmp, "completed");
    wait_migration(&destination_qmp, "completed");
    // QEMU says that it has completed a moment before it is in the state that follows.
    let deadline = Instant::now() + LONG;
    while source_qmp.status().unwrap() == "finish-migrate" {
        assert!(Instant::now() < deadline, "the source QEMU stays at the end of its migration");
    }
    assert_eq!(source_qmp.status().unwrap(), "postmigrate");

    let verified = destination.guest().verify(LONG).unwrap();
    assert_eq!(verified.bad, 0);
    let ((sent, _), (received, _)) = (sender.finish(), receiver.finish());
    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
}

#[test]
fn a_parallel_migration_of_7_2_goes_through_the_proxies() {
    // Emulating, QEMU 7.2 loses some of the guest's writes by itself while it migrates (see `table.rs`): so few of them.
    let mut options = busy_guest(QemuVersion::V7_2, "pc-q35-7.2");
    let Guest::Linux(guest) = &mut options.guest else { unreachable!("it is a Linux guest") };
    (guest.dirty_rate, guest.verify_rate) = (0, 0);
    move_through_proxies(&options, 2, "none");
}

#[test]
fn a_parallel_migration_of_10_0_goes_through_the_proxies_compressed() {
    move_through_proxies(&busy_guest(QemuVersion::V10_0, "pc-q35-10.0"), 4, "lz4");
}

#[test]
fn a_single_stream_migration_goes_through_the_proxies() {
    move_through_proxies(&busy_guest(QemuVersion::V10_0, "pc-q35-9.2"), 0, "zstd");
}

#[test]
fn opaque_connections_are_carried_unchanged_with_their_half_closes() {
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name);
    let server = UnixListener::bind(path("nbd-server.sock")).unwrap();
    let mut command = sterna();
    command.args(["proxy", "receive", "--listen", "127.0.0.1:0", "--insecure", "--unix"]).arg(path("qemu.sock"));
    command.arg("--opaque").arg(format!("nbd={}", path("nbd-server.sock").display()));
    let receiver = Sterna::start("proxy receive", &mut command);
    let mut command = sterna();
    command.args(["proxy", "send", "--insecure", "--to", &receiver.address(), "--unix"]).arg(path("from.sock"));
    command.arg("--opaque").arg(format!("nbd={}", path("nbd.sock").display()));
    command.arg("--opaque").arg(format!("unknown={}", path("unknown.sock").display()));
    let sender = Sterna::start("proxy send", &mut command);
    sender.wait_for("listening on ");

    // The server greets first, as NBD servers do, then answers everything it read once the client has closed its half.
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        stream.write_all(b"NBDMAGIC").unwrap();
        let mut asked = Vec::new();
        stream.read_to_end(&mut asked).unwrap();
        stream.write_all(&asked.iter().map(|byte| !byte).collect::<Vec<_>>()).unwrap();
    });
    let mut client = UnixStream::connect(path("nbd.sock")).unwrap();
    let mut greeting = [0; 8];
    client.read_exact(&mut greeting).unwrap();
    let question: Vec<u8> = (0..3_000_000u32).map(|number| (number / 7) as u8).collect();
    client.write_all(&question).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    answering.join().unwrap();

    assert_eq!(&greeting, b"NBDMAGIC");
    assert!(answer.iter().zip(&question).all(|(answer, question)| *answer == !question));
    assert_eq!(answer.len(), question.len());

    // A name that the other side does not know closes that connection and no other.
    let mut refused = UnixStream::connect(path("unknown.sock")).unwrap();
    assert_eq!(refused.read(&mut [0; 1]).unwrap(), 0);
    sender.wait_for("no socket is known here by the name");
}

#[test]
fn a_proxy_takes_over_the_socket_of_one_that_was_killed_and_no_other() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("from.sock");
    let start = || {
        let mut command = sterna();
        command.args(["proxy", "send", "--insecure", "--to", "127.0.0.1:1", "--unix"]).arg(&path);
        Sterna::start("proxy send", &mut command)
    };
    let mut killed = start();
    killed.wait_for("listening on ");
    killed.kill();
    assert!(path.exists(), "a killed process cannot remove its socket");

    let second = start();
    second.wait_for("listening on ");

    let third = start();
    third.wait_for("another process listens there");
    let (status, _) = third.finish();
    assert_eq!(status.code(), Some(1));

    second.interrupt();
    let line = second.wait_for("SIGINT: ");
    assert!(line.contains("who drives the migration decides") && !line.contains("switchover"), "{line}");
    let (status, _) = second.finish();
    assert_eq!(status.code(), Some(3));
    assert!(!path.exists());
}
