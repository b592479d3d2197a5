//! Wrong and hostile input: each is refused with the reason, the source's guest runs on, and memory stays bounded.

use crate::support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::support::pair::{Pair, eventually};
use crate::support::relay::{Spoil, relay};
use crate::support::settle::{Migration, Side, outcome};
use crate::support::{LONG, NOWHERE, Sterna, certificates, receive, send, sterna};
use serde_json::{Value, json};
use sterna_qemu::qmp::Qmp;
use sterna_qemu_lab::{Guest, QemuOptions, QemuVersion};
use sterna_wire::control::{Capabilities, ControlMessage, Hello, Machine, Mode};
use sterna_wire::header::{CHANNEL_HEADER_LENGTH, ChannelHeader, ChannelKind};
use sterna_wire::identity::{MigrationId, MigrationKey, ProofSubject};
use sterna_wire::limits::HEARTBEAT_INTERVAL;
use sterna_wire::reason::Reason;

const FAILED: Option<i32> = Some(1);
const CANCELLED: Option<i32> = Some(3);
/// So slow that a migration takes seconds, and that the guest writes more meanwhile than fits its downtime.
const SLOW: &[&str] = &["--bandwidth", "20MB/s", "--method", "none", "--downtime", "2s"];
/// Maximum memory of a sterna for any input, in KiB: without a migration there is no window.
const MAX_MEMORY_KIB: u64 = 48 << 10;
/// Maximum bytes of a text that quotes a peer, plus one.
const MAX_TEXT_BYTES: usize = 8 << 10;

/// Starts two machines without a guest system, which is enough for a refusal.
fn idle_pair() -> Option<Pair> {
    let options = QemuOptions::new(QemuVersion::V10_0, Guest::None);
    Pair::start(&options, &options.incoming())
}

/// Runs `send` to its end, which must be a refusal in one line that has all of `words`; the guest runs on as it was.
fn refused_send(pair: &Pair, to: &str, options: &[&str], words: &[&str]) {
    let before = pair.source.migration_settings();
    let mut command = send(pair.source.qemu.qmp_path(), to, &pair.source_state(), &pair.report());
    command.arg("--quiet").args(options);
    refusal("send", Sterna::start("send", &mut command), words);
    assert!(pair.source.runs(), "the guest runs on");
    assert_eq!(pair.source.migration_settings(), before, "QEMU's settings are as they were");
    assert_eq!(outcome(&pair.report()).as_deref(), Some("failed"));
}

fn refusal(name: &str, process: Sterna, words: &[&str]) {
    let (status, lines) = process.finish_with_lines();
    assert!(support::nothing_was_touched(status.code()), "{name}, {status}: {lines:?}");
    let errors: Vec<_> = lines.iter().filter(|line| line.starts_with("sterna: ")).collect();
    assert_eq!(errors.len(), 1, "{name} says one line: {lines:?}");
    for word in words {
        assert!(errors[0].contains(word), "{name} speaks of {word:?}: {}", errors[0]);
    }
}

/// Returns the resident memory in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn what_cannot_be_carried_is_refused_before_the_guest_is_touched() {
    let Some(pair) = idle_pair() else { return };
    let monitor = &pair.source.monitor;
    let set = |command: &str, arguments: Value| drop(monitor.execute(command, arguments).unwrap());
    let capability = |name: &str, on: bool| {
        set("migrate-set-capabilities", json!({ "capabilities": [{ "capability": name, "state": on }] }));
    };
    for (name, word) in [("postcopy-ram", "post-copy"), ("xbzrle", "xbzrle"), ("background-snapshot", "snapshot")] {
        capability(name, true);
        refused_send(&pair, NOWHERE, &["--insecure"], &[word]);
        capability(name, false);
    }
    capability("multifd", true);
    for method in ["zlib", "zstd"] {
        set("migrate-set-parameters", json!({ "multifd-compression": method }));
        refused_send(&pair, NOWHERE, &["--insecure"], &["multifd-compression", method, "--method"]);
    }
    set("migrate-set-parameters", json!({ "multifd-compression": "none", "tls-creds": "credentials" }));
    refused_send(&pair, NOWHERE, &["--insecure"], &["tls-creds", "--tls"]);
    set("migrate-set-parameters", json!({ "tls-creds": "" }));
    // Now the only obstacle is that no process listens.
    refused_send(&pair, NOWHERE, &["--insecure"], &[NOWHERE, "not touched"]);
}

#[test]
fn a_qemu_that_does_not_wait_for_a_guest_is_refused_as_destination() {
    let Some(pair) = idle_pair() else { return };
    let mut command = receive(pair.source.qemu.qmp_path(), &pair.destination_state());
    refusal("receive", Sterna::start("receive", command.args(["--quiet", "--insecure"])), &["-incoming defer"]);
    assert!(pair.source.runs());
    let mut command = send(pair.destination.qemu.qmp_path(), NOWHERE, &pair.source_state(), &pair.report());
    refusal("send", Sterna::start("send", command.args(["--quiet", "--insecure"])), &["destination"]);
}

#[test]
fn machine_types_must_be_the_same() {
    let source = QemuOptions::new(QemuVersion::V10_0, Guest::None);
    let mut destination = source.incoming();
    destination.machine = "pc-q35-9.0".into();
    let Some(pair) = Pair::start(&source, &destination) else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let mut receiver = Sterna::start("receive", command.arg("--insecure"));
    refused_send(&pair, &receiver.address(), &["--insecure"], &["machine type", "pc-q35-10.0", "pc-q35-9.0"]);
    assert!(receiver.poll().is_none(), "the receiver waits for a better source");
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
}

#[test]
fn a_qmp_socket_that_is_busy_missing_or_no_monitor_is_named() {
    let Some(pair) = idle_pair() else { return };
    let other = Qmp::connect(pair.source.qemu.qmp_path()).unwrap();
    refused_send(&pair, NOWHERE, &["--insecure"], &["QMP socket busy"]);
    drop(other);
    let missing = pair.scratch.path().join("missing.sock");
    let mut command = send(&missing, NOWHERE, &pair.source_state(), &pair.report());
    refusal("send", Sterna::start("send", command.args(["--quiet", "--insecure"])), &["missing.sock"]);
}

#[test]
fn a_peer_that_is_silent_or_speaks_something_else_is_refused() {
    let Some(pair) = idle_pair() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let web = std::thread::spawn(move || {
        // The second is left without an answer until `send` gives up.
        let (mut first, _) = listener.accept().unwrap();
        first.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").unwrap();
        drop(first);
        let (mut second, _) = listener.accept().unwrap();
        let _ = second.read_to_end(&mut Vec::new());
    });
    refused_send(&pair, &address, &["--insecure"], &["not a Sterna receiver"]);
    refused_send(&pair, &address, &["--insecure"], &[&address]);
    web.join().unwrap();
}

/// Signs a certificate for the client that ended long ago, by the directory's authority.
fn expire_client(certs: &Path) {
    let read = |name: &str| std::fs::read_to_string(certs.join(name)).unwrap();
    let authority = rcgen::KeyPair::from_pem(&read("ca-key.pem")).unwrap();
    let issuer = rcgen::Issuer::from_ca_cert_pem(&read("ca-cert.pem"), authority).unwrap();
    let mut params = rcgen::CertificateParams::new(["sterna-sender".to_owned()]).unwrap();
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    params.not_before = rcgen::date_time_ymd(2001, 1, 1);
    params.not_after = rcgen::date_time_ymd(2002, 1, 1);
    let key = rcgen::KeyPair::generate().unwrap();
    std::fs::write(certs.join("client-cert.pem"), params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
    std::fs::write(certs.join("client-key.pem"), key.serialize_pem()).unwrap();
}

#[test]
fn a_certificate_that_is_foreign_not_allowed_or_expired_is_refused_and_the_right_one_taken() {
    let Some(pair) = idle_pair() else { return };
    let directory = |name: &str| {
        let directory = pair.scratch.path().join(name);
        certificates(&directory);
        directory
    };
    let (good, foreign) = (directory("good"), directory("foreign"));
    let copy = |name: &str| {
        let directory = pair.scratch.path().join(name);
        std::fs::create_dir(&directory).unwrap();
        for file in std::fs::read_dir(&good).unwrap().flatten() {
            std::fs::copy(file.path(), directory.join(file.file_name())).unwrap();
        }
        directory
    };
    let (expired, stranger) = (copy("expired"), copy("stranger"));
    expire_client(&expired);
    let renamed = sterna()
        .args(["cert", "--force", "--host", "127.0.0.1", "--client", "somebody-else", "--dir"])
        .arg(&stranger)
        .output()
        .unwrap();
    assert!(renamed.status.success());

    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    command.args(["--allow", "sterna-sender", "--tls"]).arg(&good);
    let mut receiver = Sterna::start("receive", &mut command);
    let address = receiver.address();
    let tls = |directory: &Path| ["--tls".to_owned(), directory.display().to_string()];
    let refused = |directory: &Path, words: &[&str]| {
        let options = tls(directory);
        refused_send(&pair, &address, &options.each_ref().map(String::as_str), words);
    };
    refused(&foreign, &["certificate"]);
    refused(&expired, &["expired"]);
    refused(&stranger, &["somebody-else", "must allow one of its names"]);
    refused_send(&pair, &address, &["--insecure"], &[]);
    receiver.wait_until("a line about each", |lines| {
        let about = |words: &str| lines.iter().any(|line| line.contains("turned away: ") && line.contains(words));
        let turned_away = lines.iter().filter(|line| line.contains("turned away: ")).count();
        (turned_away == 4 && about("expired") && about("somebody-else")).then_some(())
    });
    assert!(receiver.poll().is_none() && resident(receiver.pid()) < MAX_MEMORY_KIB);
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));

    let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    let (sent, _) = Sterna::start("send", command.args(tls(&good))).finish();
    let (received, _) = receiver.finish();
    assert!(sent.success() && received.success() && pair.destination.runs());
    pair.never_both().unwrap();
}

/// A source that follows the protocol up to a chosen point.
struct Fake {
    id: MigrationId,
    key: MigrationKey,
}

impl Fake {
    fn new() -> Self {
        // The tests of other processes have other ids: the directory of a migration's sockets has its id.
        let mut id = [7; 16];
        id[..4].copy_from_slice(&std::process::id().to_le_bytes());
        Self { id: MigrationId::from_bytes(id), key: MigrationKey::from_bytes([8; 32]) }
    }

    fn header(&self, kind: ChannelKind, index: u16) -> [u8; CHANNEL_HEADER_LENGTH] {
        let subject = ProofSubject { id: self.id, kind, index, incarnation: 1, exporter: b"" };
        ChannelHeader::new(&self.key, &subject).encode()
    }

    fn hello(&self, change: impl FnOnce(&mut Hello)) -> Vec<u8> {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let mut hello = Hello {
            program: "a stranger".into(),
            key: self.key.to_hex(),
            mode: Mode::Owner,
            channels: 2,
            capabilities: Capabilities {
                methods: names(&["none", "lz4", "zstd"]),
                packet_size: 512 << 10,
                features: names(&["qemu-stream-1"]),
                required: Vec::new(),
            },
            machine: Machine { machine_type: "pc-q35-10.0".into(), ..Machine::default() },
        };
        change(&mut hello);
        ControlMessage::Hello(Box::new(hello)).encode()
    }
}

/// Sends `bytes`. Returns the bytes received until the connection was closed, which must happen soon.
fn answer_to(address: &str, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    // The connection may be closed before all is sent, because of the first bytes.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn whatever_is_thrown_at_a_waiting_receiver_it_answers_in_words_and_then_takes_a_guest() {
    let Some(pair) = idle_pair() else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let mut receiver = Sterna::start("receive", command.args(["--insecure", "--log", "warn"]));
    let address = receiver.address();
    let fake = Fake::new();
    let control = fake.header(ChannelKind::Control, 0);
    let with = |more: &[u8]| [&control[..], more].concat();
    let mut other_version = control;
    other_version[8] = 9;
    let mut damaged = control;
    damaged[30] ^= 1;
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("garbage", vec![0x5a; 1 << 20], "magic"),
        ("a web browser", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".repeat(100), "magic"),
        ("another version", other_version.to_vec(), "version 9"),
        ("a damaged header", damaged.to_vec(), "checksum"),
        ("a RAM channel of no migration", fake.header(ChannelKind::Ram, 0).to_vec(), "no migration"),
        ("an oversized message", with(&u32::MAX.to_le_bytes()), ""),
        ("no JSON", with(&[4, 0, 0, 0, b'{', b'{', b'{', b'{']), ""),
        ("JSON of great depth", with(&[&(1u32 << 19).to_le_bytes()[..], &[b'['; 1 << 19]].concat()), ""),
        ("no hello", with(&ControlMessage::Failed(Reason::other("x")).encode()), ""),
        ("65535 channels", with(&fake.hello(|hello| hello.channels = u16::MAX)), "channels"),
        ("no channels", with(&fake.hello(|hello| hello.channels = 0)), "channels"),
        ("tiny packets", with(&fake.hello(|hello| hello.capabilities.packet_size = 1)), "packet"),
        ("no key", with(&fake.hello(|hello| hello.key = "00".into())), "key"),
        ("another key", with(&fake.hello(|hello| hello.key = MigrationKey::from_bytes([9; 32]).to_hex())), "proof"),
        ("no common method", with(&fake.hello(|hello| hello.capabilities.methods.clear())), "method"),
        ("an unknown need", with(&fake.hello(|hello| hello.capabilities.required.push("magic-1".into()))), "magic-1"),
        ("a proxy", with(&fake.hello(|hello| hello.mode = Mode::Proxy)), "proxy"),
        (
            "another machine",
            with(&fake.hello(|hello| hello.machine.machine_type = "pc-q35-2.0".into())),
            "machine type",
        ),
        (
            "a machine of a megabyte",
            with(&fake.hello(|hello| hello.machine.machine_type = format!("\x1b[2J{}", "A".repeat(900_000)))),
            "machine type",
        ),
    ];
    for (name, bytes, word) in cases {
        let answer = answer_to(&address, &bytes);
        assert!(answer.to_lowercase().contains(word), "{name}: answered {answer:?}, without {word:?}");
        assert!(answer.len() < MAX_TEXT_BYTES, "{name}: an answer of {} bytes", answer.len());
        assert!(receiver.poll().is_none(), "{name}: the receiver lives");
    }
    // More silent connections than are served at once, which stay open; and more control channels without further bytes
    // than are waited for.
    let mut silent: Vec<_> = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
    silent[0].set_read_timeout(Some(LONG)).unwrap();
    let mut answer = Vec::new();
    silent[0].read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("too many connections"), "a dropped connection gets the reason: {answer:?}");
    let halves = std::iter::repeat_with(|| {
        let mut half = TcpStream::connect(&address).unwrap();
        half.write_all(&control).unwrap();
        half.read_exact(&mut [0; 4]).unwrap();
        half
    });
    let halves: Vec<_> = halves.take(40).collect();
    assert!(resident(receiver.pid()) < MAX_MEMORY_KIB, "{} KiB", resident(receiver.pid()));
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));

    let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    let (sent, _) = Sterna::start("send", command.arg("--insecure")).finish();
    assert!(sent.success(), "silent strangers do not keep a guest from moving");
    drop((silent, halves));
    let (received, lines) = receiver.finish_with_lines();
    assert!(received.success() && pair.destination.runs());
    assert!(lines.iter().all(|line| line.len() < MAX_TEXT_BYTES && !line.contains(char::is_control)), "{lines:?}");
    pair.never_both().unwrap();
}

#[test]
fn a_source_that_floods_a_receiver_busy_with_its_qemu_has_to_wait() {
    let Some(pair) = idle_pair() else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.args(["--insecure", "--log", "warn"]));
    let fake = Fake::new();
    let mut source = TcpStream::connect(receiver.address()).unwrap();
    source.set_read_timeout(Some(LONG)).unwrap();
    source.write_all(&[&fake.header(ChannelKind::Control, 0)[..], &fake.hello(|_| {})].concat()).unwrap();
    source.read_exact(&mut [0; 64]).unwrap(); // of the welcome
    let qemu = rustix::process::Pid::from_raw(pair.destination.qemu.pid() as i32).unwrap();
    rustix::process::kill_process(qemu, rustix::process::Signal::STOP).unwrap();
    // The receiver sends QEMU `quit`, and waits for its end.
    source.write_all(&ControlMessage::Failed(Reason::other("over")).encode()).unwrap();
    let message = ControlMessage::Ready { placement: vec!["x".repeat(1_000_000)], deltas: Vec::new() }.encode();
    source.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut pushed_back = false;
    for _ in 0..256 {
        pushed_back = source.write_all(&message).is_err();
        if pushed_back {
            break;
        }
    }
    let memory = resident(receiver.pid());
    rustix::process::kill_process(qemu, rustix::process::Signal::CONT).unwrap();
    assert!(pushed_back && memory < MAX_MEMORY_KIB, "{memory} KiB");
    drop(source);
    // QEMU may have been stopped before the receiver had asked it for its settings.
    let code = receiver.finish().0.code();
    assert!(code == FAILED || support::nothing_was_touched(code), "{code:?}");
}

/// A source that sends its hello, then `more`, and then heartbeats as long as the receiver listens.
fn beating_source(address: &str, more: &[u8]) -> std::thread::JoinHandle<()> {
    let fake = Fake::new();
    let mut source = TcpStream::connect(address).unwrap();
    source.write_all(&[&fake.header(ChannelKind::Control, 0)[..], &fake.hello(|_| {}), more].concat()).unwrap();
    let mut answers = source.try_clone().unwrap();
    std::thread::spawn(move || drop(answers.read_to_end(&mut Vec::new())));
    std::thread::spawn(move || {
        while source.write_all(&ControlMessage::Heartbeat.encode()).is_ok() {
            std::thread::park_timeout(HEARTBEAT_INTERVAL / 2);
        }
    })
}

#[test]
fn a_receiver_ends_although_its_source_never_lets_go() {
    let failed = ControlMessage::Failed(Reason::other("over")).encode();
    for (name, more, options, word) in [
        ("after a failure", &failed[..], &[][..], "the source failed: over"),
        ("with nothing of a guest", &[], &["--stall-limit", "10s"], "the destination's stall limit"),
        ("without an end", &[], &["--time-limit", "10s"], "the destination's time limit"),
    ] {
        let Some(mut pair) = idle_pair() else { return };
        let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
        let mut receiver = Sterna::start("receive", command.args(["--insecure", "--quiet"]).args(options));
        let source = beating_source(&receiver.address(), more);
        assert!(eventually(LONG, || receiver.poll().is_some()), "{name}: it does not end");
        let (status, text) = receiver.finish();
        assert_eq!(status.code(), FAILED, "{name}: {text}");
        assert!(text.contains(word), "{name}: {text}");
        source.join().unwrap();
        pair.destination.qemu.wait_exit(LONG).unwrap();
    }
}

#[test]
fn a_receiver_that_no_source_comes_to_ends_in_its_time_and_leaves_its_qemu_alone() {
    let Some(pair) = idle_pair() else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.args(["--insecure", "--quiet", "--wait", "1s"]));
    receiver.address();
    refusal("receive", receiver, &["no source", "--wait"]);
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
}

#[test]
fn a_receiver_that_could_not_go_on_says_so_before_it_listens() {
    let Some(pair) = idle_pair() else { return };
    let refused = |state: &Path, temporary: &Path, word: &str| {
        let mut command = receive(pair.destination.qemu.qmp_path(), state);
        command.args(["--quiet", "--insecure"]).env("TMPDIR", temporary);
        refusal("receive", Sterna::start("receive", &mut command), &[word]);
        assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"), "its QEMU is left alone");
    };
    let (state, scratch) = (pair.destination_state(), pair.scratch.path());
    let long = scratch.join("l".repeat(100));
    std::fs::create_dir(&long).unwrap();
    refused(&state, &long, "TMPDIR");
    assert_eq!(std::fs::read_dir(&long).unwrap().count(), 0, "nothing is left there");
    refused(&state, &scratch.join("missing"), "TMPDIR");
    refused(&state, Path::new("relative"), "TMPDIR");
    std::fs::write(scratch.join("file"), "").unwrap();
    refused(&scratch.join("file/state"), scratch, "state directory");
}

#[test]
fn strangers_do_not_disturb_a_migration_under_way() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    let mut migration = Migration::start(pair, SLOW, None, None);
    let (sender, receiver) = (migration.sender.as_ref().unwrap(), migration.receiver.as_ref().unwrap());
    sender.wait_for("placement: ");
    let address = receiver.address();
    let fake = Fake::new();
    // A channel of another migration, then one with the id of this migration but without its key.
    let id = receiver.migration().parse().unwrap();
    let impostor = Fake { id, key: MigrationKey::from_bytes([1; 32]) };
    for kind in [ChannelKind::Control, ChannelKind::Ram, ChannelKind::DeviceState] {
        let answer = answer_to(&address, &fake.header(kind, 0));
        assert!(answer.contains("another migration"), "{kind:?}: {answer:?}");
        let answer = answer_to(&address, &impostor.header(kind, 0));
        assert!(answer.contains("proof"), "{kind:?}: {answer:?}");
    }
    answer_to(&address, &[0; 4096]);
    sender.interrupt();
    let (sent, _) = migration.sender.take().unwrap().finish();
    assert_eq!(sent.code(), CANCELLED, "nothing ended it before");
    migration.settle().unwrap();
    assert_eq!(migration.exactly_one().unwrap(), Side::Source);
}

#[test]
fn a_spoilt_packet_ends_the_migration_in_words_and_the_guest_runs_on() {
    // Each on a thread of its own, because one of them waits for the limit of silence.
    std::thread::scope(|scope| {
        let cases = Spoil::ALL.map(|spoil| (spoil, scope.spawn(move || spoilt(spoil))));
        for (spoil, case) in cases {
            assert!(case.join().is_ok(), "{spoil:?}, see above");
        }
    });
}

fn spoilt(spoil: Spoil) {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    let before = pair.source.migration_settings();
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let mut receiver = Sterna::start("receive", command.arg("--insecure"));
    let (address, done) = relay(&receiver.address(), spoil);
    let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    command.args(["--insecure", "--channels", "1", "--bandwidth", "50MB/s"]);
    let sender = Sterna::start("send", &mut command);
    let mut reached = || eventually(LONG, || receiver.poll().is_some() || done.load(Ordering::Acquire));
    assert!(reached(), "{spoil:?}: a packet was spoilt");
    let (sent, lines) = sender.finish_with_lines();
    assert_eq!(sent.code(), FAILED, "{spoil:?}: {lines:?}");
    let (received, _) = receiver.finish();
    assert_eq!(received.code(), FAILED, "{spoil:?}");
    assert_eq!(outcome(&pair.report()).as_deref(), Some("failed"), "{spoil:?}");
    let text = support::report(&pair.report())["reason"].as_str().unwrap_or_default().to_owned();
    println!("{spoil:?}: {text}");
    assert!(text.len() > 20, "{spoil:?}: it is said why: {text:?}");
    assert_eq!(pair.source.migration_settings(), before, "{spoil:?}: QEMU's settings are as they were");
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Source), "{spoil:?}");
}

#[test]
fn ctrl_c_at_the_source_ends_it_cleanly_and_puts_the_settings_back() {
    for version in QemuVersion::ALL {
        let Some(pair) = Pair::boot_sector(version) else { return };
        let before = pair.source.migration_settings();
        let mut migration = Migration::start(pair, SLOW, None, None);
        let sender = migration.sender.take().unwrap();
        sender.wait_for("placement: ");
        assert_ne!(migration.pair.source.migration_settings(), before, "they were changed");
        sender.interrupt();
        let (sent, _) = sender.finish();
        assert_eq!(sent.code(), CANCELLED);
        assert_eq!(outcome(&migration.pair.report()).as_deref(), Some("cancelled"));
        assert_eq!(migration.pair.source.migration_settings(), before);
        let (received, _) = migration.receiver.take().unwrap().finish();
        assert_eq!(received.code(), FAILED);
        // Its QEMU got `quit`, or its stream broke off first.
        migration.pair.destination.qemu.wait_exit(LONG).unwrap();
        assert_eq!(migration.exactly_one(), Ok(Side::Source));
    }
}

#[test]
fn ctrl_c_at_the_destination_leaves_the_guest_at_the_source() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    let before = pair.source.migration_settings();
    let mut migration = Migration::start(pair, SLOW, None, None);
    let (sender, receiver) = (migration.sender.take().unwrap(), migration.receiver.take().unwrap());
    sender.wait_for("placement: ");
    receiver.interrupt();
    assert_eq!(receiver.finish().0.code(), CANCELLED);
    let (sent, _) = sender.finish();
    assert_eq!(sent.code(), FAILED);
    assert!(support::report(&migration.pair.report())["reason"].as_str().unwrap().contains("cancelled"));
    assert_eq!(migration.pair.source.migration_settings(), before);
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn ctrl_c_at_a_receiver_that_waits_ends_it_and_leaves_its_qemu_alone() {
    let Some(pair) = idle_pair() else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    receiver.address();
    receiver.interrupt();
    assert_eq!(receiver.finish().0.code(), CANCELLED);
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
}

#[test]
fn a_guest_that_is_paused_during_its_migration_stays_paused_at_the_source() {
    for version in QemuVersion::ALL {
        let Some(pair) = Pair::boot_sector(version) else { return };
        let mut migration = Migration::start(pair, SLOW, None, None);
        let sender = migration.sender.take().unwrap();
        sender.wait_for("placement: ");
        migration.pair.source.monitor.execute("stop", json!({})).unwrap();
        assert_eq!(sender.finish().0.code(), FAILED);
        let reason = support::report(&migration.pair.report())["reason"].as_str().unwrap().to_owned();
        assert!(reason.contains("paused"), "{reason}");
        migration.receiver.take().unwrap().finish();
        let source = &migration.pair.source;
        assert_eq!(source.status().as_deref(), Some("paused"), "it was somebody else who paused it");
        source.monitor.execute("cont", json!({})).unwrap();
        assert_eq!(migration.exactly_one(), Ok(Side::Source));
    }
}
