//! `sterna proxy` between QEMUs that another program controls: here the test, as libvirt would.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::support::{LONG, Sterna, busy_guest, certificates, sterna};
use serde_json::{Value, json};
use sterna_qemu::qmp::Qmp;
use sterna_qemu_lab::{Guest, Qemu, QemuOptions, QemuVersion, skip_if_unavailable};

/// Sets a QEMU up as libvirt does for a parallel migration over unix sockets; `channels` 0: one stream.
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
    let ended = |data: &Value| matches!(data["status"].as_str(), Some("completed" | "failed"));
    let event = qmp.wait_event("MIGRATION", ended, Instant::now() + LONG).unwrap().expect("the migration ends");
    assert_eq!(event.data["status"], wanted, "{:?}", qmp.query_migrate());
}

/// A pair of proxies on this machine, and the directory of its sockets.
struct Pair {
    scratch: tempfile::TempDir,
    sender: Sterna,
    receiver: Sterna,
}

/// The connection between the proxies of a pair.
#[derive(Clone, Copy, PartialEq)]
enum Between {
    Plain,
    Tls,
}

impl Pair {
    /// Starts a pair with the sockets `from.sock` and `to.sock`, and the options that `more` adds to either command.
    fn start(between: Between, method: &str, more: impl Fn(&mut Command, &mut Command, &Path)) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name);
        let (mut receive, mut send) = (sterna(), sterna());
        receive.args(["proxy", "receive", "--listen", "127.0.0.1:0", "--json"]).arg(path("received.json"));
        send.args(["proxy", "send", "--method", method, "--json"]).arg(path("sent.json"));
        match between {
            Between::Plain => {
                receive.arg("--insecure");
                send.arg("--insecure");
            }
            Between::Tls => {
                certificates(&path("certs"));
                receive.arg("--tls").arg(path("certs")).args(["--allow", "sterna-sender"]);
                send.arg("--tls").arg(path("certs"));
            }
        }
        more(&mut receive, &mut send, scratch.path());
        let receiver = Sterna::start("proxy receive", &mut receive);
        let sender = Sterna::start("proxy send", send.args(["--to", &receiver.address()]));
        sender.wait_for("listening on ");
        Self { scratch, sender, receiver }
    }

    /// Starts a pair with one migration socket on each side.
    fn with_one_socket(between: Between, method: &str) -> Self {
        Self::start(between, method, |receive, send, scratch| {
            receive.arg("--unix").arg(scratch.join("to.sock"));
            send.arg("--unix").arg(scratch.join("from.sock"));
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Stops both, and returns the reports of both. Checks that neither has complained.
    fn stop(self) -> (Vec<Value>, Vec<Value>) {
        let Self { scratch, sender, receiver } = self;
        sender.interrupt();
        let (status, lines) = sender.finish_with_lines();
        assert!(status.success() && !lines.iter().any(|line| line.contains("was lost")), "{status}: {lines:?}");
        receiver.interrupt();
        let (status, lines) = receiver.finish_with_lines();
        assert!(status.success(), "{status}: {lines:?}");
        assert!(!lines.iter().any(|line| line.contains("goodbye") || line.contains("was lost")), "{lines:?}");
        let reports = |name: &str| {
            let text = std::fs::read_to_string(scratch.path().join(name)).unwrap_or_default();
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        (reports("sent.json"), reports("received.json"))
    }
}

/// Two QEMUs; the source's guest is ready.
struct Guests {
    source: Qemu,
    destination: Qemu,
    source_qmp: Qmp,
    destination_qmp: Qmp,
}

impl Guests {
    fn start(options: &QemuOptions) -> Option<Self> {
        let source = skip_if_unavailable(Qemu::start(options))?;
        let destination = Qemu::start(&options.incoming()).unwrap();
        source.guest().wait_ready(LONG).unwrap();
        let source_qmp = Qmp::connect(source.qmp_path()).unwrap();
        let destination_qmp = Qmp::connect(destination.qmp_path()).unwrap();
        Some(Self { source, destination, source_qmp, destination_qmp })
    }

    fn migrate(&self, from: &Path, to: &Path, channels: u8) {
        migrate(&self.source_qmp, &self.destination_qmp, from, to, channels);
    }

    /// Waits until the migration completes, and checks that the guest is intact.
    fn arrive(&self) {
        wait_migration(&self.source_qmp, "completed");
        wait_migration(&self.destination_qmp, "completed");
        // QEMU reports completion a moment before it enters the following state.
        let deadline = Instant::now() + LONG;
        while self.source_qmp.status().unwrap() == "finish-migrate" {
            assert!(Instant::now() < deadline, "the source QEMU stays at the end of its migration");
        }
        assert_eq!(self.source_qmp.status().unwrap(), "postmigrate");
        assert_eq!(self.destination.guest().verify(LONG).unwrap().bad, 0);
    }
}

fn assert_carried(report: &Value, channels: u8) {
    assert_eq!(report["outcome"], "completed", "{report}");
    assert_eq!(report["multifd_channels"], channels, "{report}");
    let figure = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("no {name} in {report}"));
    assert!(figure("wire_bytes") > 0.0 && figure("normal_pages") > 0.0 && figure("ratio") > 0.0, "{report}");
    // The destination QEMU reports that it has loaded after the last round.
    assert!(figure("downtime_seen_ms") > 0.0 && figure("downtime_seen_ms") <= figure("total_ms"), "{report}");
}

/// Moves a busy guest through a pair of proxies, driven by QMP.
fn move_through_proxies(options: &QemuOptions, channels: u8, between: Between, method: &str) {
    let Some(guests) = Guests::start(options) else { return };
    let pair = Pair::with_one_socket(between, method);
    guests.migrate(&pair.path("from.sock"), &pair.path("to.sock"), channels);
    guests.arrive();
    let (sent, received) = pair.stop();
    let ([sent], [received]) = (&sent[..], &received[..]) else { panic!("one report each: {sent:?} {received:?}") };
    assert_carried(sent, channels);
    assert_eq!(received["outcome"], "completed", "{received}");
    assert_eq!(received["id"], sent["id"]);
    assert_eq!(sent["encrypted"], between == Between::Tls);
}

#[test]
fn a_parallel_migration_of_7_2_goes_through_the_proxies() {
    // An emulating QEMU 7.2 itself loses some of the guest's writes while it migrates (see `table.rs`), so the guest
    // writes little.
    let mut options = busy_guest(QemuVersion::V7_2, "pc-q35-7.2");
    let Guest::Linux(guest) = &mut options.guest else { unreachable!("it is a Linux guest") };
    (guest.dirty_rate, guest.verify_rate) = (0, 0);
    move_through_proxies(&options, 2, Between::Tls, "none");
}

#[test]
fn a_parallel_migration_of_10_0_goes_through_the_proxies_compressed() {
    move_through_proxies(&busy_guest(QemuVersion::V10_0, "pc-q35-10.0"), 4, Between::Tls, "lz4");
}

#[test]
fn a_single_stream_migration_goes_through_the_proxies() {
    move_through_proxies(&busy_guest(QemuVersion::V10_0, "pc-q35-9.2"), 0, Between::Plain, "zstd");
}

#[test]
fn one_pair_moves_guests_one_after_the_other_and_at_the_same_time() {
    let options = busy_guest(QemuVersion::V10_0, "pc-q35-10.0");
    let Some(first) = Guests::start(&options) else { return };
    let (second, third) = (Guests::start(&options).unwrap(), Guests::start(&options).unwrap());
    let pair = Pair::start(Between::Tls, "auto", |receive, send, scratch| {
        receive.arg("--unix").arg(scratch.join("to.sock"));
        send.arg("--unix").arg(scratch.join("from.sock"));
        receive.arg("--unix").arg(format!("vm3={}", scratch.join("to3.sock").display()));
        send.arg("--unix").arg(format!("vm3={}", scratch.join("from3.sock").display()));
    });

    first.migrate(&pair.path("from.sock"), &pair.path("to.sock"), 2);
    third.migrate(&pair.path("from3.sock"), &pair.path("to3.sock"), 0);
    first.arrive();
    // The socket is free for the next QEMU.
    second.migrate(&pair.path("from.sock"), &pair.path("to.sock"), 3);
    second.arrive();
    third.arrive();

    let (sent, received) = pair.stop();
    assert_eq!((sent.len(), received.len()), (3, 3));
    for (socket, channels) in [("", 2), ("", 3), ("vm3", 0)] {
        let report = sent.iter().find(|report| report["socket"] == socket && report["multifd_channels"] == channels);
        assert_carried(report.unwrap_or_else(|| panic!("none of {socket:?} with {channels}: {sent:?}")), channels);
    }
}

#[test]
fn two_qemus_migrate_to_the_same_socket_at_the_same_time() {
    let options = busy_guest(QemuVersion::V10_0, "pc-q35-10.0");
    let Some(first) = Guests::start(&options) else { return };
    let second = Guests::start(&options).unwrap();
    let pair = Pair::with_one_socket(Between::Plain, "none");
    // The destination QEMUs use their socket in turn; the source QEMUs use theirs together. A QEMU that listens removes
    // an existing socket, and all channels of the first migration are connected once its pages are requested.
    first.migrate(&pair.path("from.sock"), &pair.path("to.sock"), 4);
    let deadline = Instant::now() + LONG;
    let active = |qmp: &Qmp| qmp.query_migrate().unwrap().status == "active";
    while !active(&first.destination_qmp) {
        assert!(Instant::now() < deadline, "the first migration does not begin");
    }
    second.migrate(&pair.path("from.sock"), &pair.path("to.sock"), 4);
    first.arrive();
    second.arrive();
    let (sent, _) = pair.stop();
    assert_eq!(sent.len(), 2);
    sent.iter().for_each(|report| assert_carried(report, 4));
}

/// Makes both QEMUs encrypt their migration by their own TLS, with the certificates in `certs`.
fn encrypt_by_qemu(guests: &Guests, certs: &Path) {
    let credentials = |qmp: &Qmp, endpoint: &str| {
        let object = json!({
            "qom-type": "tls-creds-x509", "id": "tls", "dir": certs, "endpoint": endpoint, "verify-peer": true,
            // Sterna's certificates permit only signatures, which suffice for TLS 1.3; QEMU 10.0 requires more.
            "sanity-check": false,
        });
        qmp.execute("object-add", object).unwrap();
        let parameters = json!({ "tls-creds": "tls", "tls-hostname": "guest.example" });
        qmp.execute("migrate-set-parameters", parameters).unwrap();
    };
    credentials(&guests.source_qmp, "client");
    credentials(&guests.destination_qmp, "server");
}

/// The set-up in which libvirt ended with two running guests: QEMU's own TLS, several channels, and the connection by
/// which libvirt controls the migration, all carried by the same pair.
#[test]
fn connections_of_others_outlive_an_encrypted_parallel_migration_carried_beside_them() {
    let Some(guests) = Guests::start(&busy_guest(QemuVersion::V10_0, "pc-q35-10.0")) else { return };
    let pair = Pair::start(Between::Tls, "none", |receive, send, scratch| {
        receive.arg("--unix").arg(scratch.join("to.sock"));
        send.arg("--unix").arg(scratch.join("from.sock"));
        receive.arg("--opaque").arg(format!("control={}", scratch.join("libvirt.sock").display()));
        send.arg("--opaque").arg(format!("control={}", scratch.join("control.sock").display()));
    });
    let certs = pair.path("qemu-certs");
    let made = sterna().args(["cert", "--host", "guest.example", "--dir"]).arg(&certs).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    encrypt_by_qemu(&guests, &certs);
    let server = echo_server(&pair.path("libvirt.sock"));
    let mut control = UnixStream::connect(pair.path("control.sock")).unwrap();
    let mut ask = |word: &[u8; 4]| {
        control.write_all(word).unwrap();
        let mut answer = [0; 4];
        control.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, word);
    };
    ask(b"open");

    guests.migrate(&pair.path("from.sock"), &pair.path("to.sock"), 4);
    wait_migration(&guests.source_qmp, "completed");
    wait_migration(&guests.destination_qmp, "completed");

    // libvirt uses the same connection after the migration.
    ask(b"done");
    drop(control);
    assert_eq!(guests.destination.guest().verify(LONG).unwrap().bad, 0);
    let (sent, _) = pair.stop();
    assert!(sent.is_empty(), "nothing of an encrypted migration is read: {sent:?}");
    drop(server);
}

/// Sends the bytes of each connection back, until the connection ends. The server ends with the test.
fn echo_server(path: &Path) -> UnixListener {
    let listener = UnixListener::bind(path).unwrap();
    let accepting = listener.try_clone().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = accepting.accept() {
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(length) = stream.read(&mut bytes)
                    && length > 0
                    && stream.write_all(&bytes[..length]).is_ok()
                {}
            });
        }
    });
    listener
}

#[test]
fn clients_that_disconnect_do_not_end_a_migration() {
    let Some(guests) = Guests::start(&busy_guest(QemuVersion::V10_0, "pc-q35-10.0")) else { return };
    let pair = Pair::start(Between::Plain, "lz4", |receive, send, scratch| {
        receive.arg("--unix").arg(scratch.join("to.sock"));
        send.arg("--unix").arg(scratch.join("from.sock"));
        receive.arg("--opaque").arg(format!("control={}", scratch.join("libvirt.sock").display()));
        send.arg("--opaque").arg(format!("control={}", scratch.join("control.sock").display()));
        send.arg("--opaque").arg(format!("unknown={}", scratch.join("unknown.sock").display()));
    });
    let _server = echo_server(&pair.path("libvirt.sock"));
    guests.migrate(&pair.path("from.sock"), &pair.path("to.sock"), 4);

    // Like a `virsh` that is killed in the middle of a request: far more clients than a session once had numbers for.
    let over = AtomicBool::new(false);
    let clients = std::thread::scope(|scope| {
        let breaking_off = scope.spawn(|| {
            let mut clients = 0;
            while !over.load(Ordering::Acquire) || clients < 200 {
                let mut client = UnixStream::connect(pair.path("control.sock")).unwrap();
                let _ = client.write_all(&[7; 100_000][..clients * 997 % 100_000]);
                if clients % 3 == 1 {
                    let _ = client.read(&mut [0; 10]);
                }
                drop(client);
                if clients % 10 == 0 {
                    drop(UnixStream::connect(pair.path("unknown.sock")).unwrap());
                }
                clients += 1;
            }
            clients
        });
        guests.arrive();
        over.store(true, Ordering::Release);
        breaking_off.join().unwrap()
    });
    eprintln!("{clients} clients broke off");
    let (sent, _) = pair.stop();
    let [sent] = &sent[..] else { panic!("one migration: {sent:?}") };
    assert_carried(sent, 4);
}

/// Starts a pair for connections only, named `nbd`, from `nbd.sock` to `nbd-server.sock`.
fn pair_for_connections() -> Pair {
    Pair::start(Between::Tls, "none", |receive, send, scratch| {
        receive.arg("--unix").arg(scratch.join("qemu.sock"));
        receive.arg("--opaque").arg(format!("nbd={}", scratch.join("nbd-server.sock").display()));
        send.arg("--unix").arg(scratch.join("from.sock"));
        send.arg("--opaque").arg(format!("nbd={}", scratch.join("nbd.sock").display()));
        send.arg("--opaque").arg(format!("unknown={}", scratch.join("unknown.sock").display()));
    })
}

#[test]
fn opaque_connections_are_carried_unchanged_with_their_half_closes() {
    let pair = pair_for_connections();
    let server = UnixListener::bind(pair.path("nbd-server.sock")).unwrap();

    // The server greets first, as NBD servers do, then answers everything it read once the client has closed its half.
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        stream.write_all(b"NBDMAGIC").unwrap();
        let mut asked = Vec::new();
        stream.read_to_end(&mut asked).unwrap();
        stream.write_all(&asked.iter().map(|byte| !byte).collect::<Vec<_>>()).unwrap();
    });
    let mut client = UnixStream::connect(pair.path("nbd.sock")).unwrap();
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
    let mut refused = UnixStream::connect(pair.path("unknown.sock")).unwrap();
    assert_eq!(refused.read(&mut [0; 1]).unwrap(), 0);
    pair.sender.wait_for("no socket is known here by the name");
    drop(client);
    pair.stop();
}

/// Writes until the other end is closed.
fn write_until_closed(stream: &mut UnixStream) {
    let error = loop {
        if let Err(error) = stream.write_all(&[1; 4096]) {
            break error;
        }
    };
    // A reset where the other end had bytes that it never read (net/unix/af_unix.c, unix_release_sock).
    assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
}

#[test]
fn all_data_of_a_server_that_closes_arrives_and_writing_to_it_fails() {
    let pair = pair_for_connections();
    let server = UnixListener::bind(pair.path("nbd-server.sock")).unwrap();
    let mut client = UnixStream::connect(pair.path("nbd.sock")).unwrap();
    let (mut stream, _) = server.accept().unwrap();
    stream.write_all(b"no room").unwrap();
    drop(stream);

    // Without proxies, writing would fail at once; with them, it fails when the bytes in transit are lost.
    write_until_closed(&mut client);
    let mut last_words = Vec::new();
    // Behind the data the kernel reports the same reset, unless a write has reported it.
    let end = client.read_to_end(&mut last_words);
    assert!(end.is_ok() || end.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset), "{end:?}");
    assert_eq!(last_words, b"no room");
    drop(client);
    pair.stop();
}

#[test]
fn a_client_that_is_gone_is_noticed_by_a_server_that_writes() {
    let pair = pair_for_connections();
    let server = UnixListener::bind(pair.path("nbd-server.sock")).unwrap();
    let client = UnixStream::connect(pair.path("nbd.sock")).unwrap();
    let (mut stream, _) = server.accept().unwrap();
    drop(client);
    write_until_closed(&mut stream);
    drop(stream);
    pair.stop();
}

#[test]
fn a_proxy_waits_for_a_peer_and_a_server_that_do_not_listen_yet() {
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name);
    // A port without a listener, of an address that no other test uses.
    let address = format!("127.{}.{}.9:0", 1 + std::process::id() % 200, std::process::id() / 200 % 250);
    let to = TcpListener::bind(address).unwrap().local_addr().unwrap().to_string();
    let mut send = sterna();
    send.args(["proxy", "send", "--insecure", "--wait", "2min", "--to", &to]);
    send.arg("--unix").arg(path("from.sock"));
    send.arg("--opaque").arg(format!("nbd={}", path("nbd.sock").display()));
    let sender = Sterna::start("proxy send", &mut send);
    sender.wait_for("listening on ");
    let mut client = UnixStream::connect(path("nbd.sock")).unwrap();
    client.write_all(b"are you there").unwrap();
    client.shutdown(Shutdown::Write).unwrap();

    let mut receive = sterna();
    receive.args(["proxy", "receive", "--insecure", "--wait", "2min", "--listen", &to]);
    receive.arg("--unix").arg(path("to.sock"));
    receive.arg("--opaque").arg(format!("nbd={}", path("server.sock").display()));
    let receiver = Sterna::start("proxy receive", &mut receive);
    receiver.wait_for("listening on ");
    let server = UnixListener::bind(path("server.sock")).unwrap();
    let (mut stream, _) = server.accept().unwrap();
    let mut asked = Vec::new();
    stream.read_to_end(&mut asked).unwrap();
    assert_eq!(asked, b"are you there");
}

#[test]
fn a_stopped_proxy_continues_what_is_under_way_until_a_second_signal() {
    let pair = pair_for_connections();
    let server = UnixListener::bind(pair.path("nbd-server.sock")).unwrap();
    let mut client = UnixStream::connect(pair.path("nbd.sock")).unwrap();
    let (mut stream, _) = server.accept().unwrap();
    for proxy in [&pair.sender, &pair.receiver] {
        proxy.interrupt();
        proxy.wait_for("those in progress go on to their ends");
    }
    // No new connections, even of those that arrive while the socket is being closed; existing ones continue.
    if let Ok(mut late) = UnixStream::connect(pair.path("nbd.sock")) {
        assert!(!matches!(late.read(&mut [0; 1]), Ok(1)));
    }
    client.write_all(b"still there").unwrap();
    let mut heard = [0; 11];
    stream.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"still there");

    let Pair { sender, receiver, .. } = pair;
    sender.interrupt();
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    let (status, _) = sender.finish();
    assert_eq!(status.code(), Some(3), "something was cut off");
    // The connection has ended, if not by itself; the receiver cut nothing off.
    let (status, _) = receiver.finish();
    assert_eq!(status.code(), Some(0));
}

#[test]
fn post_copy_is_refused_before_anything_is_sent() {
    let Some(guests) = Guests::start(&busy_guest(QemuVersion::V10_0, "pc-q35-10.0")) else { return };
    let pair = Pair::with_one_socket(Between::Plain, "none");
    let post_copy = json!({ "capabilities": [{ "capability": "postcopy-ram", "state": true }] });
    guests.source_qmp.execute("migrate-set-capabilities", post_copy.clone()).unwrap();
    guests.destination_qmp.execute("migrate-set-capabilities", post_copy).unwrap();
    guests.migrate(&pair.path("from.sock"), &pair.path("to.sock"), 0);
    wait_migration(&guests.source_qmp, "failed");
    let line = pair.sender.wait_for("post-copy");
    assert!(line.contains("leave out --postcopy"), "{line}");
    assert_eq!(guests.source.guest().verify(LONG).unwrap().bad, 0);
    let (sent, received) = pair.stop();
    assert_eq!(sent[0]["outcome"], "failed");
    assert_eq!((&sent[0]["wire_bytes"], received.len()), (&json!(0), 0), "nothing was dialled: {sent:?} {received:?}");
}

#[test]
fn a_destination_qemu_that_is_killed_fails_its_migration_alone() {
    let options = busy_guest(QemuVersion::V10_0, "pc-q35-10.0");
    let Some(guests) = Guests::start(&options) else { return };
    let next = Guests::start(&options).unwrap();
    let pair = Pair::with_one_socket(Between::Plain, "none");
    let slow = json!({ "max-bandwidth": 8 << 20 });
    prepare(&guests.source_qmp, 2);
    prepare(&guests.destination_qmp, 2);
    guests.source_qmp.execute("migrate-set-parameters", slow).unwrap();
    let unix = |path: PathBuf| json!({ "uri": format!("unix:{}", path.display()) });
    guests.destination_qmp.execute("migrate-incoming", unix(pair.path("to.sock"))).unwrap();
    guests.source_qmp.execute("migrate", unix(pair.path("from.sock"))).unwrap();
    pair.receiver.wait_for("migration ");
    let Guests { source, source_qmp, destination, .. } = guests;
    drop(destination);
    wait_migration(&source_qmp, "failed");
    assert_eq!(source.guest().verify(LONG).unwrap().bad, 0, "it runs on");

    next.migrate(&pair.path("from.sock"), &pair.path("to.sock"), 2);
    next.arrive();
    let (sent, _) = pair.stop();
    let outcomes: Vec<_> = sent.iter().map(|report| report["outcome"].as_str().unwrap()).collect();
    assert_eq!(outcomes, ["failed", "completed"], "{sent:?}");
    assert!(sent[0]["reason"].as_str().unwrap().contains("QEMU"), "the destination says why: {sent:?}");
}

#[test]
fn a_proxy_replaces_the_socket_of_a_killed_proxy_and_no_other() {
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
    assert_eq!(status.code(), Some(6));

    second.interrupt();
    let line = second.wait_for("SIGINT: ");
    assert!(line.contains("no new connections are accepted") && !line.contains("switchover"), "{line}");
    let (status, _) = second.finish();
    assert_eq!(status.code(), Some(0), "nothing was cut off");
    assert!(!path.exists());
}
