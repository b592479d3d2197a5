//! `send --delta-cache`: a Linux guest moves that writes a few words here and there all the while. Before it is started at the
//! destination all of its memory is compared from outside, afterwards it verifies its own.

mod support;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;
use sterna_lab::huge::HugeTmpfs;
use sterna_lab::ram::{CHANGED_BY_LOADING, compare};
use sterna_lab::{Backend, Dirty, Fill, Guest, LinuxGuest, QemuOptions, QemuVersion, or_skip};
use sterna_wire::header::{CHANNEL_HEADER_LENGTH, ChannelHeader, ChannelKind};
use sterna_wire::limits::MAX_CONTENT;
use sterna_wire::packet::{PACKET_HEADER_LENGTH, PacketHeader, PacketKind};
use support::pair::{Pair, eventually};
use support::{Hold, LONG, Sterna, receive, report, send};

use QemuVersion::{V7_2, V10_0};

const MEMORY: u64 = 320 << 20;
const FILLED: u64 = 96 << 20;

/// A machine whose guest writes the stamps of its pages, as many as make several rounds at [`SLOW`].
fn options(version: QemuVersion, machine: &str) -> QemuOptions {
    // With separate page tables for the kernel each interrupt drops cached translations, through which QEMU 7.2 loses writes by
    // itself when it emulates (tests/table.rs).
    let kernel_words = if version == V7_2 { "pti=on".into() } else { String::new() };
    let linux = LinuxGuest {
        fill: Fill::Random,
        memory: Some(FILLED),
        dirty_rate: 48 << 20,
        dirty: Dirty::Stamp,
        kernel_words,
        ..LinuxGuest::default()
    };
    let mut options = QemuOptions::new(version, Guest::Linux(linux));
    options.machine = machine.into();
    options.memory = MEMORY;
    options
}

const SLOW: &[&str] = &["--insecure", "--bandwidth", "40MB/s"];

struct Row {
    from: QemuVersion,
    to: QemuVersion,
    machine: &'static str,
    backend: Backend,
    send: &'static [&'static str],
    receive: &'static [&'static str],
}

/// Moves a guest; gives the report. An error where memory differs before the destination's guest starts.
fn moved(row: &Row, relay: impl Fn(String) -> String) -> Option<Result<Value, String>> {
    let options = options(row.from, row.machine);
    let mut incoming = options.incoming();
    (incoming.version, incoming.backend) = (row.to, row.backend.clone());
    let pair = Pair::start(&options, &incoming)?;
    pair.source.qemu.guest().wait_ready(LONG).unwrap();
    pair.source.qemu.guest().wait_tick_after(0, LONG).unwrap();
    Some(move_pair(&pair, row, relay))
}

fn move_pair(pair: &Pair, row: &Row, relay: impl Fn(String) -> String) -> Result<Value, String> {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    command.arg("--insecure").args(row.receive);
    let hold = Hold::at("destination.before-cont", pair.scratch.path(), &mut command);
    let receiver = Sterna::start("receive", &mut command);
    let address = relay(receiver.address());
    let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", command.args(SLOW).args(row.send));

    let held = hold.reached(&receiver);
    let mut differing = compare(pair.source.qemu.pid(), pair.destination.qemu.pid(), MEMORY).unwrap();
    differing.retain(|page| !CHANGED_BY_LOADING.contains(page));
    if let Some(first) = differing.first() {
        return Err(format!("{} pages differ, the first at {first:#x}", differing.len()));
    }
    drop(held);
    let (sent, _) = sender.finish();
    let (received, _) = receiver.finish();
    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
    let verified = pair.destination.qemu.guest().verify(LONG).unwrap();
    assert!(verified.bad == 0 && verified.table_whole, "{verified:?}");
    pair.never_both().unwrap();
    Ok(report(&pair.report()))
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("{name} in {report}"))
}

/// As [`moved`], where deltas must have been made. QEMU 7.2 loses writes by itself (tests/table.rs): pages that differ say something
/// only if they always do.
fn with_deltas(row: &Row) {
    for left in (0..if row.from == V7_2 { 3 } else { 1 }).rev() {
        match moved(row, |address| address) {
            None => return,
            Some(Ok(report)) => {
                assert!(number(&report, "delta_pages") > 1000, "{report}");
                assert!(number(&report, "delta_cache") > 0 && report.get("no_deltas").is_none(), "{report}");
                assert_eq!(number(&report, "refused_packets"), 0);
                // Whole, those alone would be as much again.
                let whole = (number(&report, "normal_pages") - number(&report, "delta_pages")) * 4096;
                assert!(number(&report, "wire_bytes") < whole + whole / 4, "{report}");
                return;
            }
            Some(Err(differing)) if left > 0 => eprintln!("QEMU 7.2 as the source, once more: {differing}"),
            Some(Err(differing)) => panic!("{differing}"),
        }
    }
}

#[test]
fn anonymous_memory_of_the_newest() {
    let (machine, send) = ("pc-q35-10.0", &["--delta-cache", "512MiB", "--channels", "3"][..]);
    with_deltas(&Row { from: V10_0, to: V10_0, machine, backend: Backend::Anonymous, send, receive: &[] });
}

#[test]
fn a_shared_file_by_writing_it_with_an_old_machine_type_and_compression() {
    let (machine, send) = ("pc-q35-7.2", &["--delta-cache", "256MiB", "--method", "zstd"][..]);
    with_deltas(&Row { from: V10_0, to: V10_0, machine, backend: Backend::Memfd, send, receive: &[] });
}

#[test]
fn a_shared_file_by_a_mapping_and_a_small_cache() {
    let Some(mount) = or_skip(HugeTmpfs::mount(MEMORY + (16 << 20))) else { return };
    let backend = Backend::File { path: mount.file("destination") };
    let send = &["--delta-cache", "64MiB", "--channels", "1", "--method", "lz4"];
    with_deltas(&Row { from: V10_0, to: V10_0, machine: "pc-q35-9.0", backend, send, receive: &[] });
}

#[test]
fn from_the_oldest_to_the_newest() {
    let send = &["--delta-cache", "1GiB"];
    let machine = "pc-q35-7.2";
    with_deltas(&Row { from: V7_2, to: V10_0, machine, backend: Backend::Anonymous, send, receive: &[] });
}

#[test]
fn between_two_of_the_oldest() {
    let send = &["--delta-cache", "1GiB"];
    with_deltas(&Row { from: V7_2, to: V7_2, machine: "pc-i440fx-7.2", backend: Backend::Memfd, send, receive: &[] });
}

#[test]
fn where_pages_go_through_qemus_own_stream_they_go_whole_and_the_report_says_why() {
    let send = &["--delta-cache", "512MiB", "--downtime", "2s"];
    let (machine, receive) = ("pc-q35-10.0", &["--placement", "in-stream"]);
    let row = Row { from: V10_0, to: V10_0, machine, backend: Backend::Anonymous, send, receive };
    let Some(report) = moved(&row, |address| address) else { return };
    let report = report.unwrap();
    assert_eq!(number(&report, "delta_pages") + number(&report, "same_pages") + number(&report, "delta_cache"), 0);
    assert!(report["no_deltas"].as_str().unwrap().contains("QEMU's own stream"), "{report}");
}

#[test]
fn without_the_option_nothing_is_kept() {
    let send = &["--downtime", "2s"];
    let row = Row { from: V10_0, to: V10_0, machine: "pc-q35-10.0", backend: Backend::Anonymous, send, receive: &[] };
    let Some(report) = moved(&row, |address| address) else { return };
    let report = report.unwrap();
    assert_eq!(number(&report, "delta_pages") + number(&report, "same_pages") + number(&report, "delta_cache"), 0);
    assert!(report.get("no_deltas").is_none());
}

/// What becomes of a packet with deltas.
#[derive(PartialEq)]
enum Fate {
    Passes,
    /// A bit of it is flipped.
    Damaged,
    /// It does not go on, and nothing behind it on its channel.
    Held,
}

/// Carries connections to `to`; `plan` says what becomes of packets with deltas, by their number. Counts those that do not pass.
fn relay(to: String, plan: fn(u64) -> Fate, struck: &Arc<AtomicU64>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (seen, struck) = (Arc::new(AtomicU64::new(0)), Arc::clone(struck));
    // These threads end with their connections; the listener's ends with the test's process.
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = TcpStream::connect(&to) else { continue };
            let (mut back_in, mut back_out) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = io::copy(&mut back_in, &mut back_out);
                let _ = back_out.shutdown(Shutdown::Both);
            });
            let (seen, struck) = (Arc::clone(&seen), Arc::clone(&struck));
            std::thread::spawn(move || {
                let _ = carry(&near, &far, plan, &seen, &struck);
                let _ = far.shutdown(Shutdown::Both);
                let _ = near.shutdown(Shutdown::Both);
            });
        }
    });
    address
}

fn carry(
    mut near: &TcpStream,
    mut far: &TcpStream,
    plan: fn(u64) -> Fate,
    seen: &AtomicU64,
    struck: &AtomicU64,
) -> io::Result<()> {
    let mut header = [0; CHANNEL_HEADER_LENGTH];
    near.read_exact(&mut header)?;
    far.write_all(&header)?;
    if !ChannelHeader::decode(&header).is_ok_and(|header| header.kind == ChannelKind::Ram) {
        return io::copy(&mut near, &mut far).map(drop);
    }
    let mut rest = Vec::new();
    loop {
        let mut header = [0; PACKET_HEADER_LENGTH];
        near.read_exact(&mut header)?;
        let packet = PacketHeader::decode(&header, MAX_CONTENT).expect("what send writes is right");
        rest.resize((packet.table_length + packet.payload_length) as usize, 0);
        near.read_exact(&mut rest)?;
        if packet.kind == PacketKind::Deltas {
            let fate = plan(seen.fetch_add(1, Ordering::SeqCst));
            struck.fetch_add(u64::from(fate != Fate::Passes), Ordering::SeqCst);
            match fate {
                Fate::Passes => {}
                Fate::Damaged => *rest.last_mut().unwrap() ^= 4,
                // Until the sender gives up.
                Fate::Held => return io::copy(&mut near, &mut io::sink()).map(drop),
            }
        }
        far.write_all(&header)?;
        far.write_all(&rest)?;
    }
}

#[test]
fn deltas_that_arrive_damaged_go_again_as_whole_pages() {
    let send = &["--delta-cache", "512MiB"];
    let machine = "pc-q35-10.0";
    let row = Row { from: V10_0, to: V10_0, machine, backend: Backend::Anonymous, send, receive: &[] };
    let damaged = Arc::default();
    let plan = |number| if number % 5 == 1 && number < 150 { Fate::Damaged } else { Fate::Passes };
    let Some(report) = moved(&row, |address| relay(address, plan, &damaged)) else { return };
    let (report, damaged) = (report.unwrap(), damaged.load(Ordering::SeqCst));
    assert!(damaged > 3, "{damaged}: {report}");
    assert_eq!(number(&report, "refused_packets"), damaged);
}

#[test]
fn a_path_that_damages_all_deltas_ends_the_migration_and_a_later_one_starts_from_nothing() {
    let options = options(V10_0, "pc-q35-10.0");
    let Some(mut pair) = Pair::start(&options, &options.incoming()) else { return };
    pair.source.qemu.guest().wait_ready(LONG).unwrap();
    pair.source.qemu.guest().wait_tick_after(0, LONG).unwrap();
    let again = |pair: &mut Pair, name: &str| {
        let fresh = support::pair::Watched::start(&options.incoming(), pair.scratch.path(), name);
        pair.destination = fresh.expect("another QEMU");
    };

    // All of them are damaged.
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let damaged = Arc::default();
    let address = relay(receiver.address(), |_| Fate::Damaged, &damaged);
    let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    let (sent, _) = Sterna::start("send", command.args(SLOW).args(["--delta-cache", "512MiB"])).finish();
    let (received, _) = receiver.finish();
    let failed = report(&pair.report());
    assert_eq!((sent.code(), received.code()), (Some(1), Some(1)), "{failed}");
    // The last refusals may be overtaken by the destination's word that it gives up.
    assert!(damaged.load(Ordering::SeqCst) > 64 && (1..=64).contains(&number(&failed, "refused_packets")), "{failed}");
    assert!(eventually(LONG, || pair.source.runs()), "the guest runs on");

    // Cancelled when there have been deltas: of pages that the destination had, and the next one has not.
    again(&mut pair, "second");
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let held = Arc::default();
    let plan = |number| if number < 10 { Fate::Passes } else { Fate::Held };
    let address = relay(receiver.address(), plan, &held);
    let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", command.args(SLOW).args(["--delta-cache", "512MiB"]));
    assert!(eventually(LONG, || held.load(Ordering::SeqCst) > 0), "there are deltas");
    sender.interrupt();
    assert_eq!(sender.finish().0.code(), Some(3));
    receiver.finish();
    assert!(number(&report(&pair.report()), "delta_pages") > 0);
    assert!(eventually(LONG, || pair.source.runs()), "the guest runs on");

    // And then all the way, by another QEMU that has nothing of all that.
    again(&mut pair, "third");
    let send = &["--delta-cache", "512MiB"];
    let row = Row { from: V10_0, to: V10_0, machine: "pc-q35-10.0", backend: Backend::Anonymous, send, receive: &[] };
    let report = move_pair(&pair, &row, |address| address).unwrap();
    assert!(number(&report, "delta_pages") > 1000, "{report}");
}
