//! `send --delta-cache`: a guest moves that writes a few words of many pages all the time. All of its memory is
//! compared from outside before it starts at the destination; afterwards it verifies its own memory.

use crate::support;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::moving::{Backing, Move, backings, kernel_arguments, tried};
use crate::support::pair::{Pair, eventually};
use crate::support::{LONG, Sterna, receive, report, send};
use serde_json::Value;
use sterna_qemu_lab::kvm::kvm_runs;
use sterna_qemu_lab::{Accel, Dirty, Fill, Guest, LinuxGuest, QemuOptions, QemuVersion};
use sterna_wire::header::{CHANNEL_HEADER_LENGTH, ChannelHeader, ChannelKind};
use sterna_wire::limits::MAX_CONTENT;
use sterna_wire::packet::{PACKET_HEADER_LENGTH, PacketHeader, PacketKind};

use Backing::{Anonymous, HugeTmpfs, Hugetlb, Memfd};
use QemuVersion::{V7_2, V10_0};

/// The guest, which writes single words of its pages.
#[derive(Clone, Copy, PartialEq)]
enum Writes {
    /// Linux, with incompressible memory; it writes the stamps of so many pages that there are several rounds at
    /// [`SLOW`].
    Stamps,
    /// The boot sector, which counts in each of its pages and starts quickly.
    Counters,
    /// The boot sector on KVM, which has a dirty log of its own.
    CountersByKvm,
}
use Writes::{Counters, CountersByKvm, Stamps};

const LINUX_MEMORY: u64 = 320 << 20;
const FILLED: u64 = 48 << 20;
const MEMORY: u64 = 128 << 20;

const SLOW: &str = "--bandwidth 40MB/s";

struct Row {
    guest: Writes,
    from: QemuVersion,
    to: QemuVersion,
    machine: &'static str,
    source: Backing,
    destination: Backing,
    tls: bool,
    send: &'static str,
    receive: &'static str,
}

/// The values of most rows.
const ROW: Row = Row {
    guest: Stamps,
    from: V10_0,
    to: V10_0,
    machine: "pc-q35-10.0",
    source: Anonymous,
    destination: Anonymous,
    tls: false,
    send: "--delta-cache 512MiB",
    receive: "",
};

impl Row {
    fn memory(&self) -> u64 {
        if self.guest == Stamps { LINUX_MEMORY } else { MEMORY }
    }

    fn options(&self) -> QemuOptions {
        let guest = match self.guest {
            Stamps => Guest::Linux(LinuxGuest {
                fill: Fill::Random,
                memory: Some(FILLED),
                dirty_rate: 48 << 20,
                dirty: Dirty::Stamp,
                kernel_arguments: kernel_arguments(self.from),
                ..LinuxGuest::default()
            }),
            Counters | CountersByKvm => Guest::BootSector,
        };
        let mut options = QemuOptions::new(self.from, guest);
        options.machine = self.machine.into();
        options.memory = self.memory();
        options.accel = if self.guest == CountersByKvm { Accel::Kvm } else { Accel::Tcg };
        options
    }

    /// Moves the guest of `pair`, and returns the report. An error means that memory differs before the destination's
    /// guest starts.
    fn move_pair(&self, pair: &Pair, relay: impl Fn(String) -> String) -> Result<Value, String> {
        let words = |words: &str| words.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let send = [words(SLOW), words(self.send)].concat();
        let moved = Move {
            mode: "stream",
            memory: self.memory(),
            tls: self.tls,
            retry: "0s",
            send,
            receive: words(self.receive),
        };
        let report = moved.run(pair, relay)?;
        match self.guest {
            Stamps => {
                let verified = pair.destination.qemu.guest().verify(LONG).unwrap();
                assert!(verified.bad == 0 && verified.table_whole, "{verified:?}");
            }
            Counters | CountersByKvm => {
                pair.destination.wait_progress().unwrap();
                assert!(pair.destination.checked_passes().unwrap() > 0);
            }
        }
        pair.never_both().unwrap();
        Ok(report)
    }

    /// Moves such a guest, and returns the report; `None` if the test is skipped.
    fn moved(&self, relay: impl Fn(String) -> String) -> Option<Value> {
        if self.guest == CountersByKvm && !kvm_runs(self.from, &Guest::BootSector) {
            eprintln!("skipped: KVM does not run the boot sector here");
            return None;
        }
        tried(self.from, || {
            let mut options = self.options();
            let mut incoming = options.incoming();
            incoming.version = self.to;
            let [source, destination] = backings([self.source, self.destination], self.memory())?;
            (options.backend, incoming.backend) = (source.backend.clone(), destination.backend.clone());
            let pair = Pair::start(&options, &incoming)?;
            if self.guest == Stamps {
                pair.source.qemu.guest().wait_ready(LONG).unwrap();
                pair.source.qemu.guest().wait_tick_after(0, LONG).unwrap();
            } else {
                // The guest has finished its first passes.
                pair.source.qemu.console().wait_for_bytes(3, LONG).unwrap();
            }
            Some(self.move_pair(&pair, &relay))
        })
    }

    /// Moves a guest as [`Row::moved`] does, and checks that deltas were sent.
    fn with_deltas(&self) {
        let Some(report) = self.moved(|address| address) else { return };
        assert!(number(&report, "delta_pages") > 1000, "{report}");
        assert!(number(&report, "delta_cache") > 0 && report.get("no_deltas").is_none(), "{report}");
        assert_eq!(number(&report, "refused_packets"), 0);
        let deltas = number(&report, "delta_pages") * 4096;
        let whole = number(&report, "normal_pages") * 4096 - deltas;
        assert!(number(&report, "wire_bytes") < whole + deltas / 4, "{report}");
    }
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("{name} in {report}"))
}

macro_rules! rows {
    ($($name:ident: { $($field:ident: $value:expr),* };)*) => {$(
        #[test]
        fn $name() {
            Row { $($field: $value,)* ..ROW }.with_deltas();
        }
    )*};
}

rows! {
    anonymous_memory_of_the_newest: { send: "--delta-cache 512MiB --channels 3" };
    a_shared_file_by_writing_it_with_an_old_machine_type_and_compression:
        { machine: "pc-q35-7.2", destination: Memfd, send: "--delta-cache 256MiB --method zstd" };
    a_shared_file_by_a_mapping_and_a_small_cache:
        { machine: "pc-q35-9.0", destination: HugeTmpfs, send: "--delta-cache 64MiB --channels 1 --method lz4" };
    from_the_oldest_to_the_newest: { from: V7_2, machine: "pc-q35-7.2", send: "--delta-cache 1GiB" };
    between_two_of_the_oldest:
        { from: V7_2, to: V7_2, machine: "pc-i440fx-7.2", destination: Memfd, send: "--delta-cache 1GiB" };
    by_tls: { guest: Counters, tls: true, send: "--delta-cache 512MiB --method none" };
    by_kvm: { guest: CountersByKvm, send: "--delta-cache 512MiB --method none" };
    by_kvm_and_tls_into_a_shared_file:
        { guest: CountersByKvm, tls: true, destination: Memfd, send: "--delta-cache 512MiB --method none" };
    from_hugetlb: { guest: Counters, source: Hugetlb, send: "--delta-cache 512MiB --method none" };
    to_hugetlb: { guest: Counters, destination: Hugetlb, send: "--delta-cache 512MiB --method none" };
    between_hugetlb_by_kvm:
        { guest: CountersByKvm, source: Hugetlb, destination: Hugetlb, send: "--delta-cache 512MiB --method none" };
}

#[test]
fn pages_in_qemus_own_stream_are_sent_whole_and_the_report_says_why() {
    let row = Row { send: "--delta-cache 512MiB --downtime 2s", receive: "--placement in-stream", ..ROW };
    let Some(report) = row.moved(|address| address) else { return };
    assert_eq!(number(&report, "delta_pages") + number(&report, "same_pages") + number(&report, "delta_cache"), 0);
    assert!(report["no_deltas"].as_str().unwrap().contains("QEMU's own stream"), "{report}");
}

#[test]
fn without_the_option_nothing_is_kept() {
    let Some(report) = (Row { send: "--downtime 2s", ..ROW }).moved(|address| address) else { return };
    assert_eq!(number(&report, "delta_pages") + number(&report, "same_pages") + number(&report, "delta_cache"), 0);
    assert!(report.get("no_deltas").is_none());
}

/// What the relay does with a packet.
#[derive(PartialEq)]
enum Fate {
    Passes,
    /// A bit is flipped.
    Damaged,
    /// The packet is kept, and so is everything behind it on its channel.
    Held,
}

/// Relays connections to `to`. `plan` decides the fate of packets of `kind` with content of the first block, by their
/// number. Counts those that do not pass.
fn relay(to: String, kind: PacketKind, plan: fn(u64) -> Fate, struck: &Arc<AtomicU64>) -> String {
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
                let _ = carry(&near, &far, kind, plan, &seen, &struck);
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
    kind: PacketKind,
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
        if packet.kind == kind && packet.subject == 0 && packet.payload_length > 0 {
            let fate = plan(seen.fetch_add(1, Ordering::SeqCst));
            struck.fetch_add(u64::from(fate != Fate::Passes), Ordering::SeqCst);
            match fate {
                Fate::Passes => {}
                Fate::Damaged => *rest.last_mut().unwrap() ^= 4,
                // Until the sender ends the connection.
                Fate::Held => return io::copy(&mut near, &mut io::sink()).map(drop),
            }
        }
        far.write_all(&header)?;
        far.write_all(&rest)?;
    }
}

/// Moves a guest while packets of `kind` are damaged in transit.
fn damaged(row: &Row, kind: PacketKind, plan: fn(u64) -> Fate) {
    let damaged = Arc::default();
    let Some(report) = row.moved(|address| relay(address, kind, plan, &damaged)) else { return };
    let damaged = damaged.load(Ordering::SeqCst);
    assert!(damaged > 3, "{damaged}: {report}");
    assert_eq!(number(&report, "refused_packets"), damaged);
}

#[test]
fn damaged_deltas_are_retransmitted_as_whole_pages() {
    damaged(
        &ROW,
        PacketKind::Deltas,
        |number| {
            if number % 5 == 1 && number < 150 { Fate::Damaged } else { Fate::Passes }
        },
    );
}

/// The cache has room for one in a hundred of the pages.
#[test]
fn damaged_whole_pages_are_retransmitted_although_they_are_not_cached() {
    let row = Row { send: "--delta-cache 1MiB --downtime 2s", ..ROW };
    damaged(
        &row,
        PacketKind::Pages,
        |number| {
            if number % 5 == 1 && number < 300 { Fate::Damaged } else { Fate::Passes }
        },
    );
}

fn with_deltas(command: &mut Command) -> &mut Command {
    command.arg("--insecure").args(SLOW.split(' ')).args(ROW.send.split(' '))
}

#[test]
fn a_path_that_damages_all_deltas_ends_the_migration_and_a_later_one_starts_from_nothing() {
    let options = ROW.options();
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
    let address = relay(receiver.address(), PacketKind::Deltas, |_| Fate::Damaged, &damaged);
    let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    let (sent, _) = Sterna::start("send", with_deltas(&mut command)).finish();
    let (received, _) = receiver.finish();
    let failed = report(&pair.report());
    assert_eq!((sent.code(), received.code()), (Some(1), Some(1)), "{failed}");
    // The source gives up with the next refusal.
    assert!(damaged.load(Ordering::SeqCst) > 64 && number(&failed, "refused_packets") == 64, "{failed}");
    assert!(eventually(LONG, || pair.source.runs()), "the guest runs on");

    // Cancelled once deltas were sent, of pages that this destination has and the next one does not.
    again(&mut pair, "second");
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let held = Arc::default();
    let plan = |number| if number < 10 { Fate::Passes } else { Fate::Held };
    let address = relay(receiver.address(), PacketKind::Deltas, plan, &held);
    let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", with_deltas(&mut command));
    assert!(eventually(LONG, || held.load(Ordering::SeqCst) > 0), "there are deltas");
    sender.interrupt();
    assert_eq!(sender.finish().0.code(), Some(3));
    receiver.finish();
    assert!(number(&report(&pair.report()), "delta_pages") > 0);
    assert!(eventually(LONG, || pair.source.runs()), "the guest runs on");

    // Then a complete move, to another QEMU that has none of these pages.
    again(&mut pair, "third");
    let report = ROW.move_pair(&pair, |address| address).unwrap();
    assert!(number(&report, "delta_pages") > 1000, "{report}");
}
