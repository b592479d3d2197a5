//! What other programs and the storage do to a guest that is moved directly. QEMU does not know that the guest is being moved, so it neither
//! refuses nor waits for any of it: a block job that copies a disk, storage that fails while the disks are handed over, a medium that is
//! exchanged, a disk that grows, a node that cannot be migrated. Each is noticed, the move is refused or fails with a reason that names the
//! cause, the guest runs on at the source, and nothing that it wrote is lost.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::support::pair::Pair;
use crate::support::settle::{Migration, Side};
use crate::support::{FAILED, LONG, REFUSED, Sterna, in_round, receive, report, send_by};
use serde_json::{Value, json};
use sterna_qemu::qmp::Qmp;
use sterna_qemu_lab::{
    Dirty, DiskImage, DiskLoad, DisksDone, Guest, LinuxGuest, NbdAnswer, NbdError, NbdServer, QemuOptions, QemuVersion,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// Executes a command that must succeed.
fn execute(monitor: &Qmp, command: &str, arguments: Value) -> Value {
    monitor.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
}

/// Waits until a job has this status; `null` is that of a job that is gone.
fn wait_job(monitor: &Qmp, job: &str, status: &str) {
    let wanted = |data: &Value| data["id"] == job && data["status"] == status;
    let event = monitor.wait_event("JOB_STATUS_CHANGE", wanted, Instant::now() + LONG).unwrap();
    event.unwrap_or_else(|| panic!("job {job} is not {status}: {:?}", monitor.execute("query-jobs", json!({}))));
}

/// Returns the words that give a QEMU a block node.
fn blockdev(node: &Value) -> [String; 2] {
    ["-blockdev".into(), node.to_string()]
}

fn receiver(pair: &Pair) -> Sterna {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    Sterna::start("receive", command.arg("--insecure"))
}

fn sender(pair: &Pair, mode: &str, to: &str, words: &[&str]) -> Sterna {
    let mut command = send_by(mode, pair.source.qemu.qmp_path(), to, &pair.source_state(), &pair.report());
    Sterna::start("send", command.arg("--insecure").args(words))
}

/// Checks that a move has failed, and returns the reason.
fn failed(pair: &Pair, sender: Sterna, receiver: Sterna) -> String {
    let (sent, received) = (sender.finish().0, receiver.finish().0);
    assert_eq!(sent.code(), FAILED);
    assert!(!received.success(), "{received}");
    let report = report(&pair.report());
    assert_eq!(report["outcome"], "failed", "{report}");
    report["reason"].as_str().expect("a reason").to_owned()
}

/// Checks that a Linux guest runs at the source only, and is intact.
fn runs_on_at_the_source(pair: &Pair) {
    assert!(pair.source.runs(), "{:?}", pair.states());
    assert_ne!(pair.destination.status().as_deref(), Some("running"));
    pair.source.untouched().unwrap();
    let guest = pair.source.qemu.guest();
    let verified = guest.verify(LONG).unwrap();
    assert_eq!((verified.bad, verified.table_whole), (0, true));
    assert_eq!(guest.bad_lines(), [""; 0]);
    pair.never_both().unwrap();
}

/// A disk in the format qcow2 without data of its own: whatever the guest has not written is read from a base.
///
/// The layout is that of version 3 in QEMU's `docs/interop/qcow2.txt`, with clusters of 64 KiB, each of these in one of them: header,
/// refcount table, refcount block, L1 table, L2 table. The last two have an entry for each cluster of the disk from the beginning. So QEMU
/// writes all its metadata before [`METADATA`], and the guest's data after it.
pub(crate) mod qcow2 {
    use std::collections::BTreeSet;

    use sterna_qemu_lab::NbdServer;

    const CLUSTER: u64 = 64 << 10;
    const REFCOUNT_TABLE: u64 = CLUSTER;
    const REFCOUNT_BLOCK: u64 = 2 * CLUSTER;
    const L1_TABLE: u64 = 3 * CLUSTER;
    const L2_TABLE: u64 = 4 * CLUSTER;
    /// The end of the metadata, in bytes of the file.
    pub(super) const METADATA: u64 = 5 * CLUSTER;
    /// `QCOW_OFLAG_COPIED`: the cluster has one user.
    const COPIED: u64 = 1 << 63;
    /// Bits 9 to 55 of an entry of the L2 table: the place of a cluster in the file.
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

    /// Returns the file of a disk of `bytes`, at most 512 MiB, with space for all its clusters.
    pub(crate) fn empty(bytes: u64) -> Vec<u8> {
        let mut file = vec![0; (METADATA + bytes) as usize];
        let mut put = |at: u64, field: &[u8]| file[at as usize..][..field.len()].copy_from_slice(field);
        let (u16, u32, u64) = (u16::to_be_bytes, u32::to_be_bytes, u64::to_be_bytes);
        put(0, b"QFI\xfb");
        put(4, &u32(3));
        put(20, &u32(CLUSTER.trailing_zeros()));
        put(24, &u64(bytes));
        // Entries of the L1 table, and its place.
        put(36, &u32(1));
        put(40, &u64(L1_TABLE));
        // The refcount table's place, and its clusters.
        put(48, &u64(REFCOUNT_TABLE));
        put(56, &u32(1));
        // A refcount has 2^4 bits. The header's length.
        put(96, &u32(4));
        put(100, &u32(104));
        put(REFCOUNT_TABLE, &u64(REFCOUNT_BLOCK));
        (0..METADATA / CLUSTER).for_each(|cluster| put(REFCOUNT_BLOCK + 2 * cluster, &u16(1)));
        put(L1_TABLE, &u64(L2_TABLE | COPIED));
        file
    }

    /// Returns the clusters that have these bytes of the file.
    pub(super) fn clusters(offset: u64, length: u32) -> impl Iterator<Item = u64> {
        offset / CLUSTER..(offset + u64::from(length)).div_ceil(CLUSTER)
    }

    /// Returns the clusters of data to which the table in the file refers.
    pub(super) fn in_table(file: &NbdServer) -> BTreeSet<u64> {
        let table = file.content(L2_TABLE..METADATA);
        let entries = table.as_chunks::<8>().0.iter().map(|entry| (u64::from_be_bytes(*entry) & OFFSET) / CLUSTER);
        entries.filter(|cluster| *cluster != 0).collect()
    }
}

/// The node of the guest's disk.
const DISK: &str = "guest-disk";

/// Returns the words for the node [`DISK`], in the format qcow2 on `file`, over the raw image `base`.
fn layered_disk(file: &NbdServer, base: &Path) -> Vec<String> {
    // A commit opens the base for writing.
    let base = json!({ "driver": "file", "filename": base, "locking": "off" });
    let base = json!({ "driver": "raw", "node-name": "base", "file": base });
    let disk = json!({ "driver": "qcow2", "node-name": DISK, "file": "export", "backing": base });
    [blockdev(&file.blockdev("export")), blockdev(&disk)].concat()
}

/// The number of the source's connection to the server of its disk: the source starts first.
const SOURCE: u64 = 1;

/// The storage answers EIO to what QEMU itself writes at the source, and serves the guest's data and the destination.
fn a_disk_whose_metadata_cannot_be_written(version: QemuVersion) {
    let base = DiskImage::new(0, 16 * MIB).unwrap();
    let storage = NbdServer::memory(qcow2::empty(16 * MIB)).unwrap();
    let fails = Arc::new(AtomicBool::new(false));
    let written = Arc::new(Mutex::new(BTreeSet::new()));
    storage.decide({
        let (fails, written) = (Arc::clone(&fails), Arc::clone(&written));
        move |request| {
            if request.connection != SOURCE || !request.command.writes() {
                return NbdAnswer::Serve;
            }
            if request.offset >= qcow2::METADATA {
                written.lock().unwrap().extend(qcow2::clusters(request.offset, request.length));
                return NbdAnswer::Serve;
            }
            if fails.load(Ordering::SeqCst) { NbdAnswer::Fail(NbdError::Eio) } else { NbdAnswer::Serve }
        }
    });
    let linux = LinuxGuest {
        memory: Some(96 * MIB),
        dirty_rate: 10 * MIB,
        disk_load: Some(DiskLoad { buffers: 32 * MIB, threads: 2, rate: 16 * MIB }),
        // Its disk is none of the machine's raw ones.
        kernel_arguments: "sterna.disks=1".into(),
        ..LinuxGuest::default()
    };
    let mut machine = QemuOptions { memory: 320 * MIB, ..QemuOptions::new(version, Guest::Linux(linux)) };
    machine.extra = layered_disk(&storage, &base.path());
    machine.extra.extend(["-device".into(), format!("virtio-blk-pci,id=virtio-{DISK},drive={DISK}")]);
    let Some(pair) = Pair::start(&machine, &machine.incoming()) else { return };
    let guest = pair.source.qemu.guest();
    guest.wait_ready(LONG).unwrap();
    // Each of the guest's writes into a cluster of the base changes the table. The guest does not flush, so the change is only in QEMU.
    guest.wait_disks("reads and writes", LONG, |done| done.reads > 100 && done.writes > 20).unwrap();

    fails.store(true, Ordering::SeqCst);
    let receiver = receiver(&pair);
    let sender = sender(&pair, "direct", &receiver.address(), &[]);
    let reason = failed(&pair, sender, receiver);
    assert!(storage.counts().failed > 0);
    assert!(reason.contains(DISK) && reason.contains("could not be made inactive"), "{reason}");

    fails.store(false, Ordering::SeqCst);
    let before = guest.last_disks().unwrap();
    let more = |done: &DisksDone| done.reads > before.reads + 100 && done.writes > before.writes + 20;
    assert_eq!(guest.wait_disks("more reads and writes", LONG, more).unwrap().bad, 0);
    let checked = guest.check_disks(LONG).unwrap();
    assert!(checked.bad == 0 && checked.pages > 0, "{checked:?}");
    runs_on_at_the_source(&pair);
    // QEMU's `stop` ends the requests in flight and flushes: the file then refers to all that the guest has written.
    execute(&pair.source.monitor, "stop", json!({}));
    assert_eq!(qcow2::in_table(&storage), *written.lock().unwrap());
    execute(&pair.source.monitor, "cont", json!({}));
}

#[test]
fn a_disk_of_10_0_whose_metadata_cannot_be_written_stays_at_the_source_with_all_its_data() {
    a_disk_whose_metadata_cannot_be_written(QemuVersion::V10_0);
}

#[test]
fn a_disk_of_11_1_whose_metadata_cannot_be_written_stays_at_the_source_with_all_its_data() {
    a_disk_whose_metadata_cannot_be_written(QemuVersion::V11_1);
}

/// The id of the block job.
const JOB: &str = "nightly-copy";
/// What the reason advises.
const ADVICE: [&str; 3] = ["cancel", "wait", "query-block-jobs"];

fn names_the_job(reason: &str, kind: &str) {
    for word in [JOB, kind].iter().chain(&ADVICE) {
        assert!(reason.contains(word), "{word:?}: {reason}");
    }
}

/// Makes the server hold everything that would change its content.
fn hold_writes(server: &NbdServer) {
    server.decide(|request| if request.command.writes() { NbdAnswer::Hold } else { NbdAnswer::Serve });
}

/// Checks that `send` refuses the guest of `pair` because of the job, before it touches anything.
fn refused(pair: &Pair, to: &str, mode: &str, kind: &str) {
    let (status, lines) = sender(pair, mode, to, &["--downtime", "10s"]).finish_with_lines();
    assert_eq!(status.code(), REFUSED, "--mode {mode}, {kind}: {lines:?}");
    let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    names_the_job(message, kind);
    assert!(message.contains("not touched"), "{message}");
    assert!(mode == "stream" || !lines.iter().any(|line| line.contains("mode: stream")), "{lines:?}");

    let (status, text) = sender(pair, mode, to, &["--dry-run"]).finish();
    let result = report(&pair.report());
    assert_eq!((status.code(), result["would_begin"].as_bool()), (REFUSED, Some(false)), "{result}");
    let refusals = result["refusals"].as_array().unwrap();
    let mut reasons =
        refusals.iter().filter(|each| each["side"] == "source").filter_map(|each| each["reason"].as_str());
    let reason = reasons.find(|reason| reason.contains(JOB)).unwrap_or_else(|| panic!("{result}"));
    names_the_job(reason, kind);
    assert!(text.contains(reason), "{text}");

    assert!(pair.source.runs());
    pair.source.untouched().unwrap();
    assert_eq!(pair.source.migration_status().as_deref(), Some("none"));
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
}

#[test]
fn a_guest_with_a_block_job_is_refused_and_moves_once_the_job_has_ended() {
    // The guest's drive, by the name that QEMU gives it, and its length.
    const BOOT: (&str, u64) = ("ide0-hd0", MIB);
    let base = DiskImage::new(0, 2 * MIB).unwrap();
    let overlay = NbdServer::memory(qcow2::empty(2 * MIB)).unwrap();
    let copy = NbdServer::memory(vec![0; BOOT.1 as usize]).unwrap();
    let boot_sector = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector);
    // No device uses these nodes: the firmware would try to boot from it.
    let source = QemuOptions {
        extra: [layered_disk(&overlay, &base.path()), blockdev(&copy.blockdev("copy")).to_vec()].concat(),
        ..boot_sector.clone()
    };
    let Some(pair) = Pair::start(&source, &boot_sector.incoming()) else { return };
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    let (monitor, receiver) = (&pair.source.monitor, receiver(&pair));
    let to = receiver.address();
    let whole = |to: &str| json!({ "job-id": JOB, "device": BOOT.0, "target": to, "sync": "full" });
    let layers = json!({ "job-id": JOB, "device": DISK });
    // A job that copies is held by its storage. A commit from the active layer copies nothing and stays ready until it is ended, as a mirror
    // does at last. A stream removes the base, so it is the last one.
    let jobs = [
        ("blockdev-backup", whole("copy"), "backup", Some(&copy), false),
        ("blockdev-mirror", whole("copy"), "mirror", Some(&copy), true),
        ("block-commit", layers.clone(), "commit", None, true),
        ("block-stream", layers, "stream", Some(&overlay), false),
    ];
    for (command, arguments, kind, held, gets_ready) in jobs {
        println!("{command}");
        held.into_iter().for_each(hold_writes);
        execute(monitor, command, arguments);
        match held {
            Some(storage) => drop(storage.wait_held(1, LONG).unwrap()),
            None => wait_job(monitor, JOB, "ready"),
        }
        for mode in ["direct", "auto"] {
            refused(&pair, &to, mode, kind);
        }
        // QEMU aborts if it hands a disk over that it mirrors, also in a migration of its own.
        if kind == "mirror" {
            refused(&pair, &to, "stream", kind);
        }
        if let Some(storage) = held {
            storage.serve_all();
            storage.release_all();
        }
        if gets_ready {
            if held.is_some() {
                wait_job(monitor, JOB, "ready");
                refused(&pair, &to, "direct", kind);
            }
            execute(monitor, "block-job-cancel", json!({ "device": JOB }));
        }
        wait_job(monitor, JOB, "null");
    }
    let (sent, lines) = sender(&pair, "direct", &to, &["--downtime", "10s"]).finish_with_lines();
    assert!(sent.success() && receiver.finish().0.success(), "{lines:?}");
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

/// A Linux guest that writes more than is sent, with a disk, two CDs, and the files of these. The guest does not use them.
struct Equipped {
    options: QemuOptions,
    files: TempDir,
}

/// A rate of the guest's writes at which a move does not end, even if the guest gets little of a CPU.
const MANY_WRITES: u64 = 200 * MIB;
const SLOWLY: &[&str] = &["--bandwidth", "16MB/s", "--method", "none"];

impl Equipped {
    fn new() -> Self {
        let files = tempfile::tempdir().unwrap();
        let linux = LinuxGuest {
            memory: Some(32 * MIB),
            dirty_rate: MANY_WRITES,
            dirty: Dirty::Stamp,
            ..LinuxGuest::default()
        };
        let options = QemuOptions { memory: 256 * MIB, ..QemuOptions::new(QemuVersion::V10_0, Guest::Linux(linux)) };
        let mut equipped = Equipped { options, files };
        let node = |name: &str, file: PathBuf, read_only: bool| {
            let file = json!({ "driver": "file", "filename": file });
            blockdev(&json!({ "driver": "raw", "node-name": name, "read-only": read_only, "file": file }))
        };
        let (disk, one, two) = (equipped.file("disk"), equipped.file("medium-1"), equipped.file("medium-2"));
        let extra = &mut equipped.options.extra;
        extra.extend(node(DISK, disk, false));
        extra.extend(["-device".into(), format!("virtio-blk-pci,id=virtio-disk,drive={DISK}")]);
        extra.extend(node("medium-1", one, true));
        extra.extend(["-device".into(), "ide-cd,id=optical-ide,bus=ide.2,drive=medium-1".into()]);
        extra.extend(node("medium-2", two, true));
        extra.extend(["-device", "virtio-scsi-pci,id=scsi", "-device"].map(str::to_owned));
        extra.push("scsi-cd,id=optical-scsi,bus=scsi.0,drive=medium-2".into());
        equipped
    }

    /// Makes a file of 1 MiB of zeros.
    fn file(&self, name: &str) -> PathBuf {
        let path = self.files.path().join(name);
        File::create(&path).unwrap().set_len(MIB).unwrap();
        path
    }

    /// Moves the guest directly and calls `act` with the source's monitor in the second round, before the guest writes less, so that the
    /// move could end. The move must fail. Returns the reason.
    fn moved_while(&self, prepare: impl FnOnce(&Qmp), act: impl FnOnce(&Qmp)) -> Option<String> {
        let pair = Pair::start(&self.options, &self.options.incoming())?;
        let guest = pair.source.qemu.guest();
        guest.wait_ready(LONG).unwrap();
        prepare(&pair.source.monitor);
        let receiver = receiver(&pair);
        let sender = sender(&pair, "direct", &receiver.address(), SLOWLY);
        sender.wait_until("a second round", |lines| in_round(lines, 2));
        act(&pair.source.monitor);
        guest.set_dirty_rate(0).unwrap();
        let reason = failed(&pair, sender, receiver);
        runs_on_at_the_source(&pair);
        Some(reason)
    }
}

#[test]
fn a_block_job_that_begins_during_a_direct_move_ends_it_and_the_guest_runs_on() {
    let copy = NbdServer::memory(vec![0; MIB as usize]).unwrap();
    let begin = |monitor: &Qmp| {
        execute(monitor, "blockdev-add", copy.blockdev("copy"));
        // Without a copy of the whole disk, such a job has no request in flight and ends only when it is cancelled: a job whose storage does
        // not answer would end the move, too, but because QEMU cannot drain its block layer.
        let backup = json!({ "job-id": JOB, "device": DISK, "target": "copy", "sync": "none" });
        execute(monitor, "blockdev-backup", backup);
        wait_job(monitor, JOB, "running");
    };
    let Some(reason) = Equipped::new().moved_while(|_| {}, begin) else { return };
    names_the_job(&reason, "backup");
}

#[test]
fn a_cd_that_is_exchanged_during_a_direct_move_ends_it_and_the_guest_runs_on() {
    let equipped = Equipped::new();
    let other = equipped.file("another-medium");
    let exchange = |monitor: &Qmp| {
        let medium = json!({ "id": "optical-ide", "filename": other, "format": "raw" });
        execute(monitor, "blockdev-change-medium", medium);
    };
    let Some(reason) = equipped.moved_while(|_| {}, exchange) else { return };
    assert!(reason.contains("optical-ide") && !reason.contains("optical-scsi"), "{reason}");
}

#[test]
fn a_cd_that_is_ejected_during_a_direct_move_ends_it_and_the_guest_runs_on() {
    let eject = |monitor: &Qmp| drop(execute(monitor, "eject", json!({ "id": "optical-scsi" })));
    let Some(reason) = Equipped::new().moved_while(|_| {}, eject) else { return };
    assert!(reason.contains("optical-scsi") && !reason.contains("optical-ide"), "{reason}");
}

#[test]
fn a_disk_that_grows_during_a_direct_move_ends_it_and_the_guest_runs_on() {
    let grow = |monitor: &Qmp| drop(execute(monitor, "block_resize", json!({ "node-name": DISK, "size": 2 * MIB })));
    let Some(reason) = Equipped::new().moved_while(|_| {}, grow) else { return };
    assert!(reason.contains("virtio-disk") || reason.contains(DISK), "{reason}");
}

#[test]
fn a_node_that_cannot_be_migrated_and_comes_during_a_direct_move_ends_it_with_the_reason_that_qemu_gives() {
    let equipped = Equipped::new();
    let image = equipped.file("late");
    // QEMU makes the image itself, before the move: that is a job, too.
    let prepare = |monitor: &Qmp| {
        execute(monitor, "blockdev-add", json!({ "driver": "file", "node-name": "late-file", "filename": image }));
        let options = json!({ "driver": "vdi", "file": "late-file", "size": MIB });
        execute(monitor, "blockdev-create", json!({ "job-id": "create", "options": options }));
        wait_job(monitor, "create", "concluded");
        execute(monitor, "job-dismiss", json!({ "id": "create" }));
        assert_eq!(execute(monitor, "query-migrate", json!({})).get("blocked-reasons"), None);
    };
    let mut blockers = Vec::new();
    let add = |monitor: &Qmp| {
        execute(monitor, "blockdev-add", json!({ "driver": "vdi", "node-name": "late", "file": "late-file" }));
        let migration = execute(monitor, "query-migrate", json!({}));
        let reasons = migration["blocked-reasons"].as_array().expect("QEMU refuses to migrate");
        blockers.extend(reasons.iter().map(|reason| reason.as_str().unwrap().to_owned()));
    };
    let Some(reason) = equipped.moved_while(prepare, add) else { return };
    let [blocker] = &blockers[..] else { panic!("{blockers:?}") };
    assert!(blocker.contains("'late'") && reason.contains(blocker), "{reason}");
}
