//! `sterna send --mode direct` with the options of direct mode: accelerators (of a model), and the reaction to a guest that writes too fast.
//! Each guest verifies its own memory after the move.

use std::path::Path;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::pair::{Pair, eventually};
use crate::support::relay::{Still, still_relay};
use crate::support::{CANCELLED, LONG, Sterna, receive, report, send_by};
use serde_json::{Value, json};
use sterna_qemu_lab::huge::HugePages;
use sterna_qemu_lab::kvm::kvm_runs;
use sterna_qemu_lab::{
    Accel, Backend, Dirty, Fill, Guest, LinuxGuest, Qemu, QemuOptions, QemuVersion, skip_if_unavailable,
};

const MEMORY: u64 = 256 << 20;
const FILLED: u64 = 32 << 20;
/// More than a guest can write, so that the actual rate depends on its vCPU's time.
pub(crate) const ALL_THE_TIME: u64 = 2 << 30;

/// A DSA and an IAA.
const MODEL: &str = r#"{"devices":[{"name":"dsa0","queues":[{"name":"wq0.0","size":64,"max_batch_size":128}]},
    {"name":"iax1","kind":"iaa","engines":8,"queues":[{"name":"wq1.0","size":64}]}]}"#;

/// A guest, and how it is moved.
pub(crate) struct Case<'a> {
    pub(crate) backend: Backend,
    pub(crate) fill: Fill,
    /// How fast it writes pages, in bytes a second, and how.
    pub(crate) writes: (u64, Dirty),
    pub(crate) send: &'a str,
    pub(crate) receive: &'a str,
    /// Whether `send` waits for devices however long they take. Otherwise the CPU does what a model is too slow for, which depends on the
    /// machine's speed.
    pub(crate) patient: bool,
}

pub(crate) const CASE: Case<'_> = Case {
    backend: Backend::Memfd,
    fill: Fill::Mixed,
    writes: (16 << 20, Dirty::Stamp),
    send: "",
    receive: "",
    patient: false,
};

/// A guest that a model can keep up with, and a sender that waits for it.
const PATIENT: Case<'_> = Case { writes: (256 << 10, Dirty::Stamp), patient: true, ..CASE };

/// The result of a case.
pub(crate) struct Moved {
    status: ExitStatus,
    pub(crate) report: Value,
    source: Qemu,
    destination: Qemu,
}

impl Case<'_> {
    /// Moves the guest while it writes, and calls `meanwhile` once `send` has started; none if there is no QEMU. In `send`, `MODEL` stands
    /// for the file of a model.
    fn run_while(&self, meanwhile: impl FnOnce(&Sterna, &Qemu)) -> Option<Moved> {
        let linux = LinuxGuest {
            fill: self.fill,
            memory: Some(FILLED),
            dirty_rate: self.writes.0,
            dirty: self.writes.1,
            ..LinuxGuest::default()
        };
        let mut machine = QemuOptions::new(QemuVersion::V10_0, Guest::Linux(linux));
        (machine.memory, machine.backend) = (MEMORY, self.backend.clone());
        let source = skip_if_unavailable(Qemu::start(&machine))?;
        let destination = Qemu::start(&machine.incoming()).unwrap();
        source.guest().wait_ready(LONG).unwrap();
        source.guest().wait_tick_after(0, LONG).unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let model = scratch.path().join("model.json");
        std::fs::write(&model, MODEL).unwrap();
        let json = scratch.path().join("report.json");

        let mut command = receive(destination.qmp_path(), &scratch.path().join("destination"));
        let receiver = Sterna::start("receive", command.arg("--insecure").args(self.receive.split_whitespace()));
        let state = scratch.path().join("source");
        let mut command = send_by("direct", source.qmp_path(), &receiver.address(), &state, &json);
        command.env("STERNA_PATIENT_WITH_DEVICES", if self.patient { "1" } else { "0" });
        let words = self.send.replace("MODEL", &format!("model:{}", model.display()));
        let sender = Sterna::start("send", command.arg("--insecure").args(words.split_whitespace()));
        meanwhile(&sender, &source);
        let (status, _) = sender.finish();
        // After a refused source, `receive` waits for another one; it ends with the test.
        if status.success() {
            let (received, _) = receiver.finish();
            assert!(received.success(), "{received}");
        }
        Some(Moved { status, report: report(&json), source, destination })
    }

    /// Moves the guest, and makes it verify its memory.
    pub(crate) fn moved(&self) -> Option<Moved> {
        self.moved_while(|_, _| {})
    }

    /// Moves the guest as [`Case::moved`] does, and calls `meanwhile` once `send` has started.
    fn moved_while(&self, meanwhile: impl FnOnce(&Sterna, &Qemu)) -> Option<Moved> {
        let moved = self.run_while(meanwhile)?;
        assert!(moved.status.success(), "{}", moved.report);
        assert_eq!((&moved.report["mode"], &moved.report["outcome"]), (&"direct".into(), &"completed".into()));
        let verified = moved.destination.guest().verify(LONG).unwrap();
        assert!(verified.bad == 0 && verified.table_whole, "{verified:?}");
        Some(moved)
    }
}

impl Moved {
    fn number(&self, name: &str) -> u64 {
        self.report[name].as_u64().unwrap_or_else(|| panic!("{name} in {}", self.report))
    }

    /// Returns the report's lines about accelerators, as one text.
    fn accelerators(&self) -> String {
        let lines = self.report["accelerators"].as_array().map(Vec::as_slice).unwrap_or_default();
        lines.iter().map(|line| line.as_str().unwrap()).collect::<Vec<_>>().join("\n")
    }

    /// Returns the work of the `engine` for `operation`, by the report's line about it.
    ///
    /// # Panics
    /// If there is none.
    fn work(&self, engine: &str, operation: &str) -> Work {
        let accelerators = self.accelerators();
        let line = format!("{engine}, for all guests of this process: {operation} of ");
        let line = accelerators.lines().find_map(|whole| whole.strip_prefix(&line));
        let line = line.unwrap_or_else(|| panic!("no {operation} by {engine}: {accelerators}"));
        // "5 items (20480 bytes) in 2 batches, 1 left to the CPU (a reason)"
        let mut parts = line.split(", ");
        let number = |word: Option<&str>| word.and_then(|word| word.trim_start_matches('(').parse::<u64>().ok());
        let done: Vec<_> = parts.next().unwrap().split(' ').collect();
        let (items, bytes, batches) = (number(Some(done[0])), number(Some(done[2])), number(Some(done[5])));
        let left = parts.map(|part| {
            let (items, cause) = part.split_once(" left to the CPU ").unwrap_or_else(|| panic!("{part}"));
            (number(Some(items)).unwrap(), cause.to_owned())
        });
        let numbers = [items, bytes, batches].map(|number| number.unwrap_or_else(|| panic!("{line}")));
        let [items, bytes, batches] = numbers;
        Work { items, bytes, batches, left: left.collect() }
    }

    /// Returns the work of the `engine` for `operation`, after checking that it did nearly all that it was given. A page that the kernel
    /// moves in memory at that moment is missing for a device.
    ///
    /// # Panics
    /// If the CPU did more than 5 of 100 items.
    fn done(&self, engine: &str, operation: &str) -> Work {
        let work = self.work(engine, operation);
        let left: u64 = work.left.iter().map(|(items, _)| items).sum();
        assert!(work.items > 0 && left * 20 <= work.items, "{operation} by {engine}: {work:?}");
        work
    }
}

/// What the report has about one operation of a kind of accelerator.
#[derive(Debug)]
struct Work {
    items: u64,
    bytes: u64,
    batches: u64,
    /// Items that the CPU did in its place, and why.
    left: Vec<(u64, String)>,
}

pub(crate) const DELTAS_BY_DSA: &str =
    "--accel MODEL --method none --delta-cache 512MiB --bandwidth 40MB/s --channels 1";
const OUT_OF_REACH: &str = "could not be mapped here";

#[test]
fn shared_memory_is_searched_copied_and_compared_by_a_dsa() {
    // Enough writes that pages are sent again, as deltas.
    let writes = (4 << 20, Dirty::Stamp);
    let Some(moved) = (Case { fill: Fill::Random, writes, send: DELTAS_BY_DSA, ..PATIENT }).moved() else { return };
    let accelerators = moved.accelerators();
    // QEMU's process has filled the memory, and all of it was searched, and what is not zero was copied.
    assert!(moved.done("dsa", "zero map").items >= FILLED / 4096, "{accelerators}");
    assert!(moved.done("dsa", "copy and checksum").bytes >= FILLED, "{accelerators}");
    moved.done("dsa", "create delta");
    assert!(moved.number("device_deltas") > 0, "{}", moved.report);
    // Firmware and video memory are not shared; guest RAM is.
    assert!(!accelerators.contains("RAM block pc.ram "), "{accelerators}");
    for field in ["tracking", "injection_ms", "longest_settling_ms"] {
        assert!(!moved.report[field].is_null(), "{field}: {}", moved.report);
    }
}

#[test]
fn an_iaa_compresses_what_a_dsa_has_copied() {
    // Of a packet that is larger than by default, too.
    let send = "--accel MODEL --accel-weight 3 --method deflate --engine iaa --iaa-verify always --packet-size 1MiB";
    let Some(moved) = (Case { send, ..PATIENT }).moved() else { return };
    moved.done("dsa", "copy and checksum");
    moved.done("iaa", "deflate");
    moved.done("iaa", "inflate");
    assert!(moved.report["ratio"].as_f64().unwrap() > 1.5, "{}", moved.report);
}

#[test]
fn zstd_and_larger_packets_take_what_a_dsa_has_copied() {
    let send = "--accel MODEL --method zstd --packet-size 2MiB --delta-cache 256MiB";
    let Some(moved) = (Case { send, ..PATIENT }).moved() else { return };
    let searched = moved.done("dsa", "zero map");
    assert!(searched.bytes > searched.batches * (512 << 10), "packets of the default size: {searched:?}");
    moved.done("dsa", "copy and checksum");
    assert!(moved.report["method"].as_str().unwrap().starts_with("zstd"), "{}", moved.report);
}

#[test]
fn the_report_names_memory_that_no_accelerator_reaches() {
    let backend = Backend::Anonymous;
    let Some(moved) = (Case { backend, send: "--accel MODEL --method deflate --engine iaa", ..PATIENT }).moved() else {
        return;
    };
    let accelerators = moved.accelerators();
    assert!(accelerators.contains("RAM block pc.ram") && accelerators.contains(OUT_OF_REACH), "{accelerators}");
    // The IAA also compresses pages that the CPU has copied.
    moved.done("iaa", "deflate");
}

#[test]
fn of_huge_pages_only_what_has_changed_is_sent_again() {
    let Some(_pages) = skip_if_unavailable(HugePages::reserve(2 * MEMORY)) else { return };
    let send = "--method none --bandwidth 40MB/s";
    // So few stamps that most pages of a huge page stay as they are, at so many places that all huge pages are dirty after each round.
    let writes = (4 << 20, Dirty::Stamp);
    let case = Case { backend: Backend::MemfdHuge, fill: Fill::Random, writes, send, ..CASE };
    let Some(moved) = case.moved() else { return };
    // Each stamp makes 512 pages dirty.
    let (same, normal) = (moved.number("same_pages"), moved.number("normal_pages"));
    assert!(same > FILLED / 4096 && normal > same, "{}", moved.report);
    assert!(moved.number("content_bytes") < (normal - same) * 4096 + (4 << 20), "{}", moved.report);
}

#[test]
fn zero_pages_go_as_normal_ones_by_cpu_and_by_dsa_as_was_asked_for() {
    for (backend, send) in [
        (Backend::Anonymous, "--method none --normal-page-ratio 100"),
        (Backend::Memfd, "--method none --normal-page-ratio 100 --accel MODEL"),
        (Backend::Memfd, "--method none --normal-page-ratio 100 --checksums off"),
    ] {
        // The CPU may do some or all of a model's work.
        let Some(moved) = (Case { backend, send, ..CASE }).moved() else { return };
        assert_eq!(moved.number("zero_pages"), 0, "{send}: {}", moved.report);
    }
    let send = "--method none --normal-page-ratio 0";
    let Some(moved) = (Case { send, ..CASE }).moved() else { return };
    assert!(moved.number("zero_pages") > 0, "{}", moved.report);
}

#[test]
fn all_of_the_destinations_memory_is_there_before_the_source_begins_where_that_was_asked_for() {
    let allocated = |qemu: &Qemu| {
        let process = Path::new("/proc").join(qemu.pid().to_string());
        let maps = std::fs::read_to_string(process.join("maps")).unwrap();
        // Its mapping, by which the file is found whether or not QEMU still has it open.
        let of = |line: &str| {
            let range = line.contains("/memfd:").then(|| line.split(' ').next())??.to_owned();
            let file = std::fs::metadata(process.join("map_files").join(range)).unwrap();
            Some(std::os::linux::fs::MetadataExt::st_blocks(&file) * 512)
        };
        maps.lines().filter_map(of).max().expect("guest RAM is a memfd")
    };
    let Some(moved) = (Case { receive: "--prefault", ..CASE }).moved() else { return };
    assert!(allocated(&moved.destination) >= MEMORY);
    let Some(moved) = CASE.moved() else { return };
    assert!(allocated(&moved.destination) < MEMORY);
}

#[test]
fn a_guest_that_writes_too_fast_stays_where_that_was_asked_for_and_runs_on() {
    let writes = (ALL_THE_TIME, Dirty::Stamp);
    let send = "--method none --bandwidth 10MB/s --downtime 10ms --on-no-convergence give-up";
    let Some(moved) = (Case { fill: Fill::Random, writes, send, ..CASE }).run_while(|_, _| {}) else { return };
    assert_eq!(moved.status.code(), Some(1));
    assert_eq!(moved.report["outcome"], "failed", "{}", moved.report);
    let convergence = moved.report["convergence"].as_str().expect("why it did not converge");
    assert!(convergence.contains("10 ms"), "{convergence}");
    let verified = moved.source.guest().verify(LONG).unwrap();
    assert_eq!(verified.bad, 0);
}

/// A migration of the boot-sector guest, which writes 99 MiB all the time, over so little bandwidth that this does not fit the target
/// downtime.
pub(crate) struct TooFast {
    pub(crate) pair: Pair,
    pub(crate) sender: Sterna,
    pub(crate) receiver: Sterna,
    /// Stops the network for the guest's memory.
    stands: Arc<AtomicBool>,
}

/// A bandwidth at which a round takes seconds: the guest needs little of its vCPU's time to write more than fits a short downtime.
const LONG_ROUNDS: &str = "30MB/s";

impl TooFast {
    /// Starts a pair; none if there is no QEMU, or no KVM although `accel` requires it.
    pub(crate) fn pair(accel: Accel, cpus: u32) -> Option<Pair> {
        let version = QemuVersion::V10_0;
        if accel == Accel::Kvm && !kvm_runs(version, &Guest::BootSector) {
            println!("skipped: KVM runs no guest here");
            return None;
        }
        let mut machine = QemuOptions::new(version, Guest::BootSector);
        (machine.accel, machine.cpus) = (accel, cpus);
        let pair = Pair::start(&machine, &machine.incoming())?;
        pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
        Some(pair)
    }

    pub(crate) fn start(pair: Pair, bandwidth: &str, words: &str) -> Self {
        let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
        let receiver = Sterna::start("receive", command.arg("--insecure"));
        let (address, stands) = still_relay(&receiver.address(), Still::Data);
        let (state, json) = (pair.source_state(), pair.report());
        let mut command = send_by("direct", pair.source.qemu.qmp_path(), &address, &state, &json);
        command.args(["--insecure", "--method", "none", "--bandwidth", bandwidth, "--stall-limit", "10min"]);
        let sender = Sterna::start("send", command.args(words.split_whitespace()));
        Self { pair, sender, receiver, stands }
    }

    /// Waits until the sender holds a thread of the source's QEMU. From then on no more of the guest's memory arrives, so it stays held: how
    /// little a guest writes that is held depends on the machine's other work.
    fn wait_until_held(&self) {
        self.sender.wait_for("the guest is held for");
        self.stands.store(true, Ordering::Release);
        let holds =
            || self.pair.source.tracers().iter().any(|(_, tracer)| threads_of(self.sender.pid()).contains(tracer));
        assert!(eventually(LONG, holds), "no thread of the guest is held");
    }

    /// Checks that the guest runs at the source, at full speed, and that its memory is right.
    fn runs_at_source(&self) {
        let source = &self.pair.source;
        source.wait_progress().unwrap();
        source.untouched().unwrap();
        assert!(source.runs());
        assert!(source.checked_passes().unwrap() > 0);
    }
}

/// The tracer of a thread is a thread, too.
fn threads_of(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let number = |task: std::fs::DirEntry| task.file_name().to_str()?.parse().ok();
    tasks.map(|tasks| tasks.flatten().filter_map(number).collect()).unwrap_or_default()
}

/// More than the guest is slowed down for by the tests that want it to stay.
const NEVER: &str = "--downtime 1ms --on-no-convergence throttle:60,20,80";

#[test]
fn a_boot_sector_guest_that_writes_too_fast_does_not_move_where_that_was_asked_for() {
    let Some(pair) = TooFast::pair(Accel::Tcg, 1) else { return };
    let migration = TooFast::start(pair, LONG_ROUNDS, "--downtime 20ms --on-no-convergence give-up");
    let (status, text) = migration.sender.finish();
    assert_eq!(status.code(), Some(1));
    let told = report(&migration.pair.report());
    assert!(told["reason"].as_str().unwrap().contains("given up after"), "{told}");
    assert!(text.contains("--on-no-convergence throttle or post-copy"), "{text}");
    assert!(migration.pair.source.runs());
}

/// Whether slowing it down is enough depends on the machine's speed: `soak::slowed_down` shows that it is.
#[test]
fn a_linux_guest_that_is_slowed_down_and_then_writes_no_more_moves_with_all_its_memory_right() {
    let writes = (ALL_THE_TIME, Dirty::Stamp);
    let send = "--method none --bandwidth 20MB/s --downtime 100ms --on-no-convergence throttle:99,1,99";
    let stops_writing = |sender: &Sterna, source: &Qemu| {
        sender.wait_for("the guest is held for 99 % of the time");
        source.guest().set_dirty_rate(0).unwrap();
    };
    let Some(moved) = (Case { fill: Fill::Random, writes, send, ..CASE }).moved_while(stops_writing) else { return };
    let convergence = moved.report["convergence"].as_str().expect("why it was slowed down");
    assert!(convergence.contains("it was held for 99 % of the time"), "{convergence}");
}

#[test]
fn qemus_monitor_answers_while_its_guest_is_slowed_down() {
    for accel in [Accel::Tcg, Accel::Kvm] {
        let Some(pair) = TooFast::pair(accel, 2) else { continue };
        let migration = TooFast::start(pair, LONG_ROUNDS, "--downtime 1ms --on-no-convergence throttle:99,1,99");
        migration.wait_until_held();
        let monitor = &migration.pair.source.monitor;
        for _ in 0..20 {
            monitor.status().unwrap();
            // The registers come from the vCPU's own thread.
            let command = json!({ "command-line": "info registers" });
            let registers = monitor.execute("human-monitor-command", command).unwrap();
            assert!(registers.as_str().unwrap().contains("EIP="), "{registers}");
        }
        migration.sender.interrupt();
        assert_eq!(migration.sender.finish().0.code(), CANCELLED);
        assert!(migration.pair.source.runs());
    }
}

#[test]
fn the_guest_of_a_qemu_in_a_pid_namespace_of_its_own_is_slowed_down_and_runs_at_full_speed_afterwards() {
    let machine =
        QemuOptions { own_processes: true, cpus: 2, ..QemuOptions::new(QemuVersion::V10_0, Guest::BootSector) };
    let Some(pair) = Pair::start(&machine, &machine.incoming()) else { return };
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    let mut migration = TooFast::start(pair, LONG_ROUNDS, NEVER);
    migration.wait_until_held();
    migration.sender.terminate();
    eventually(LONG, || migration.sender.poll().is_some());
    assert_eq!(migration.sender.poll().and_then(|status| status.code()), CANCELLED);
    migration.runs_at_source();
}

#[test]
fn a_slowed_guest_whose_migration_is_cancelled_runs_at_full_speed() {
    for accel in [Accel::Tcg, Accel::Kvm] {
        let Some(pair) = TooFast::pair(accel, 2) else { continue };
        let mut migration = TooFast::start(pair, LONG_ROUNDS, NEVER);
        migration.wait_until_held();
        migration.sender.terminate();
        eventually(LONG, || migration.sender.poll().is_some());
        assert_eq!(migration.sender.poll().and_then(|status| status.code()), CANCELLED);
        migration.runs_at_source();
    }
}

#[test]
fn a_slowed_guest_runs_at_full_speed_as_soon_as_its_sterna_is_killed() {
    for accel in [Accel::Tcg, Accel::Kvm] {
        let Some(pair) = TooFast::pair(accel, 2) else { continue };
        let mut migration = TooFast::start(pair, LONG_ROUNDS, NEVER);
        migration.wait_until_held();
        migration.sender.kill();
        assert!(eventually(LONG, || migration.pair.source.tracers().is_empty()), "a dead process holds threads");
        migration.runs_at_source();
    }
}
