//! `sterna send --mode direct --on-no-convergence post-copy`: the guest of a stock QEMU continues at the destination
//! before all of its memory has arrived. Each guest verifies its memory; whichever process is killed meanwhile, no
//! guest ever reads zeros in place of missing memory.
//!
//! Where KVM does not run Linux guests, they are emulated, and their page faults occur in user space. KVM handles a
//! guest's faults in the kernel: a boot-sector guest shows that these faults are noticed too, where KVM runs it.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use crate::support::pair::{Pair, Watched, eventually};
use crate::support::relay::Network;
use crate::support::settle::{Migration, Side};
use crate::support::{LONG, LOST, PEER_REFUSED, Sterna, receive, report, send_by};
use sterna_memory::ram::RamBlock;
use sterna_qemu_lab::{Accel, Backend, Dirty, Fill, Guest, LinuxGuest, QemuOptions, QemuVersion};
use sterna_wire::switchover::{CrashPoint, DestinationState, Moment, RecordState, Step};

const MEMORY: u64 = 256 << 20;
const FILLED: u64 = 64 << 20;
/// So slow that the guest writes all of its memory in each round, which takes seconds, and that what is missing at the destination takes
/// seconds, too.
const POST_COPY: &[&str] =
    &["--method", "none", "--bandwidth", "20MB/s", "--on-no-convergence", "post-copy:1", "--downtime", "100ms"];
/// The same for a boot-sector guest, which writes all of its memory all the while.
const SHORT_OF_MEMORY: &[&str] =
    &["--method", "none", "--bandwidth", "30MB/s", "--on-no-convergence", "post-copy:1", "--downtime", "200ms"];
/// Cases at once; most of each is waiting.
const WORKERS: usize = 4;
/// The guest runs at the destination without all of its memory.
const RUNS_SHORT: &str = "pages are still at the source";

fn machine(backend: Backend) -> QemuOptions {
    let linux = LinuxGuest {
        fill: Fill::Random,
        memory: Some(FILLED),
        // Stamps take so little of a CPU that the guest keeps the rate up where it gets little of one.
        dirty_rate: 48 << 20,
        dirty: Dirty::Stamp,
        verify_rate: 16 << 20,
        ..LinuxGuest::default()
    };
    let mut machine = QemuOptions::new(QemuVersion::V10_0, Guest::Linux(linux));
    (machine.memory, machine.backend) = (MEMORY, backend);
    machine
}

/// Starts two QEMUs; the source's guest works.
fn pair(backend: Backend) -> Option<Pair> {
    pair_of(&machine(backend.clone()), &machine(backend).incoming())
}

fn pair_of(source: &QemuOptions, destination: &QemuOptions) -> Option<Pair> {
    let pair = Pair::start(source, destination)?;
    pair.source.qemu.guest().wait_ready(LONG).unwrap();
    pair.source.qemu.guest().wait_tick_after(0, LONG).unwrap();
    Some(pair)
}

/// Starts `receive` and `send` of a pair.
fn start(pair: &Pair) -> (Sterna, Sterna) {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let sender = sender(pair, &receiver);
    (receiver, sender)
}

fn sender(pair: &Pair, receiver: &Sterna) -> Sterna {
    sender_to(pair, &receiver.address())
}

fn sender_to(pair: &Pair, address: &str) -> Sterna {
    let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
    let mut command = send_by("direct", qmp, address, &state, &json);
    Sterna::start("send", command.arg("--insecure").args(POST_COPY))
}

/// Returns how many mappings of a QEMU have no transparent huge pages, and how many a userfaultfd watches for missing
/// pages.
fn without_huge_pages_and_watched(qemu: &Watched) -> [usize; 2] {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", qemu.qemu.pid())).unwrap();
    ["nh", "um"].map(|wanted| {
        let flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
        flags.filter(|flags| flags.split_whitespace().any(|flag| flag == wanted)).count()
    })
}

/// Returns how many threads of a QEMU wait for a missing page, by the userfaultfd that QEMU keeps open
/// (`userfaultfd_show_fdinfo` in the kernel's `fs/userfaultfd.c`).
fn waiting_threads(qemu: &Watched) -> u64 {
    let process = Path::new("/proc").join(qemu.qemu.pid().to_string());
    let of = |entry: std::fs::DirEntry| {
        let name = std::fs::read_link(entry.path()).ok()?;
        name.to_string_lossy().contains("[userfaultfd]").then_some(())?;
        let info = std::fs::read_to_string(process.join("fdinfo").join(entry.file_name())).ok()?;
        info.lines().find_map(|line| line.strip_prefix("total:")?.trim().parse::<u64>().ok())
    };
    std::fs::read_dir(process.join("fd")).unwrap().flatten().filter_map(of).sum()
}

/// Checks that the guest at the destination waits for a page that no process sends, and has found no wrong page until
/// then.
fn waits_and_never_read_zeros(pair: &Pair) {
    let guest = &pair.destination;
    assert!(eventually(LONG, || waiting_threads(guest) > 0), "the guest works, and touches a page that is missing");
    assert!(without_huge_pages_and_watched(guest)[1] > 0, "missing pages stay missing");
    assert_eq!(guest.qemu.guest().bad_lines(), [""; 0]);
    assert_eq!(pair.source.status().as_deref(), Some("paused"), "the source's guest was handed over");
}

/// Moves the guest of a pair. Checks that the guest finds all of its memory, and that nothing is left in its QEMU.
fn moved(pair: &Pair) {
    let before = without_huge_pages_and_watched(&pair.destination);
    let (receiver, sender) = start(pair);
    receiver.wait_for(RUNS_SHORT);
    let (status, lines) = sender.finish_with_lines();
    assert!(status.success(), "{lines:?}");
    let (received, lines) = receiver.finish_with_lines();
    assert!(received.success(), "{lines:?}");
    let report = report(&pair.report());
    assert_eq!((&report["mode"], &report["outcome"]), (&"direct".into(), &"completed".into()));
    assert!(!report["post_copy"].is_null(), "{report}");
    let verified = pair.destination.qemu.guest().verify(LONG).unwrap();
    assert!(verified.bad == 0 && verified.table_whole, "{verified:?}");
    assert_eq!(pair.destination.qemu.guest().bad_lines(), [""; 0]);
    pair.never_both().unwrap();
    pair.destination.untouched().unwrap();
    assert_eq!(without_huge_pages_and_watched(&pair.destination), before);
    assert_eq!(pair.source.status(), None, "the source's QEMU was ended once nothing of it was needed");
}

#[test]
fn a_guest_in_anonymous_memory_continues_before_its_memory_has_arrived_and_finds_all_of_it() {
    let Some(pair) = pair(Backend::Anonymous) else { return };
    moved(&pair);
}

#[test]
fn a_guest_in_shared_memory_continues_before_its_memory_has_arrived_and_finds_all_of_it() {
    let Some(pair) = pair(Backend::Memfd) else { return };
    moved(&pair);
}

#[test]
fn a_guest_of_qemus_in_pid_namespaces_of_their_own_continues_before_its_memory_has_arrived() {
    let machine = QemuOptions { own_processes: true, ..machine(Backend::Anonymous) };
    let Some(pair) = pair_of(&machine, &machine.incoming()) else { return };
    moved(&pair);
}

#[test]
fn a_guest_whose_network_is_cut_gets_the_rest_of_its_memory_over_a_new_connection() {
    let Some(pair) = pair(Backend::Anonymous) else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let network = Network::to(&receiver.address());
    let sender = sender_to(&pair, &network.address);
    receiver.wait_for(RUNS_SHORT);
    network.cut();
    sender.wait_for("the destination is back");
    let (status, lines) = sender.finish_with_lines();
    assert!(status.success(), "{lines:?}");
    assert!(receiver.finish().0.success());
    assert!(report(&pair.report())["post_copy"]["reconnected"].as_u64().unwrap() > 0);
    let verified = pair.destination.qemu.guest().verify(LONG).unwrap();
    assert!(verified.bad == 0 && verified.table_whole, "{verified:?}");
    pair.destination.untouched().unwrap();
}

#[test]
fn a_guest_whose_receive_is_killed_waits_for_its_memory_and_recover_reports_it_lost() {
    for backend in [Backend::Anonymous, Backend::Memfd] {
        let Some(mut pair) = pair(backend) else { return };
        let (mut receiver, sender) = start(&pair);
        receiver.wait_for(RUNS_SHORT);
        receiver.kill();
        waits_and_never_read_zeros(&pair);

        let recovery = Side::Destination.recover(&pair, &[], None).expect("it has a record");
        let (status, lines) = recovery.finish_with_lines();
        assert_eq!(status.code(), LOST, "{lines:?}");
        let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
        let end = format!("kill -KILL {}", pair.destination.qemu.pid());
        assert!(message.contains("The guest is lost here") && message.contains(&end), "{message}");
        assert_eq!(pair.destination.qemu.guest().bad_lines(), [""; 0]);

        // The source waits for the destination to reconnect, until it is cancelled.
        sender.wait_for("the connection to the destination is lost");
        pair.destination.kill();
        sender.interrupt();
        let (status, lines) = sender.finish_with_lines();
        assert!(!status.success(), "{lines:?}");
        assert_eq!(report(&pair.report())["outcome"], "lost");
        assert_eq!(pair.source.status().as_deref(), Some("paused"));
    }
}

#[test]
fn a_guest_whose_send_is_killed_waits_for_its_memory_until_its_qemu_is_ended() {
    let Some(mut pair) = pair(Backend::Anonymous) else { return };
    let (receiver, mut sender) = start(&pair);
    receiver.wait_for(RUNS_SHORT);
    sender.kill();
    receiver.wait_for("part of the guest's memory with it");
    waits_and_never_read_zeros(&pair);
    pair.destination.kill();
    let (status, lines) = receiver.finish_with_lines();
    assert!(!status.success() && lines.iter().any(|line| line.contains("the guest's process has ended")), "{lines:?}");
}

#[test]
fn a_guest_whose_send_died_before_the_decision_continues_at_the_source() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    // Just before the decision: the destination watches its memory, and has loaded the devices.
    let crash = Some("source.before-record-committed:crash");
    let mut migration = Migration::start_by("direct", pair, SHORT_OF_MEMORY, crash, None);
    migration.wait_crash(Side::Source).unwrap();
    migration.settle().unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
    assert_eq!(migration.pair.destination.status(), None, "the incomplete guest was discarded");
}

#[test]
fn a_guest_that_never_ran_at_the_destination_can_be_resumed_at_the_source() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    // The destination knows the decision, but has not resumed the guest.
    let crash = Some("destination.before-cont:crash");
    let mut migration = Migration::start_by("direct", pair, SHORT_OF_MEMORY, None, crash);
    migration.wait_crash(Side::Destination).unwrap();
    assert_eq!(
        Side::Destination.state(&migration.pair),
        Some(RecordState::Destination(DestinationState::CommittedIncomplete))
    );
    let recovery = Side::Destination.recover(&migration.pair, &[], None).expect("it has a record");
    let (status, lines) = recovery.finish_with_lines();
    assert_eq!(status.code(), LOST, "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("Then run this again")), "{lines:?}");
    assert!(!migration.pair.destination.runs() && !migration.pair.source.runs());

    migration.pair.destination.kill();
    let mut sender = migration.sender.take().expect("it was started");
    sender.kill();
    let recovery = Side::Source.recover(&migration.pair, &["--fenced-peer"], None).expect("it has a record");
    let (status, lines) = recovery.finish_with_lines();
    assert!(status.success(), "{lines:?}");
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_guest_whose_page_faults_kvm_handles_in_the_kernel_finds_its_memory() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    if pair.destination.qemu.accel() != Accel::Kvm {
        return eprintln!("skipped: KVM does not run the boot-sector guest here");
    }
    let mut migration = Migration::start_by("direct", pair, SHORT_OF_MEMORY, None, None);
    migration.receiver.as_ref().expect("it was started").wait_for(RUNS_SHORT);
    migration.settle().unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    let report = report(&migration.pair.report());
    assert!(report["post_copy"]["requests"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn a_qemu_without_privileges_in_its_sandbox_receives_the_device() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can start a QEMU as another user");
    }
    let source = machine(Backend::Anonymous);
    let mut destination = source.incoming();
    destination.user = Some(65534);
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    destination.extra.extend(["-sandbox".into(), sandbox.into()]);
    let Some(pair) = pair_of(&source, &destination) else { return };
    moved(&pair);
}

/// Starts `receive` on a host where /dev/userfaultfd is an empty file.
fn receive_without_device(pair: &Pair) -> Option<Sterna> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can hide /dev/userfaultfd from a process");
        return None;
    }
    let empty = pair.scratch.path().join("no-device");
    std::fs::write(&empty, "").unwrap();
    let of_receive = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let mut command = Command::new("unshare");
    let script = "mount --bind \"$1\" /dev/userfaultfd && shift && exec \"$@\"";
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(&empty).arg(of_receive.get_program());
    Some(Sterna::start("receive", command.args(of_receive.get_args()).arg("--insecure")))
}

#[test]
fn without_the_device_a_privileged_qemu_makes_the_userfaultfd_by_the_system_call() {
    let Some(pair) = pair(Backend::Anonymous) else { return };
    let Some(receiver) = receive_without_device(&pair) else { return };
    let (status, lines) = sender(&pair, &receiver).finish_with_lines();
    assert!(status.success(), "{lines:?}");
    assert!(receiver.finish().0.success());
    assert_eq!(pair.destination.qemu.guest().verify(LONG).unwrap().bad, 0);
    pair.destination.untouched().unwrap();
}

#[test]
fn without_the_device_and_the_right_to_the_system_call_post_copy_is_refused_before_the_guest_is_touched() {
    let unprivileged = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if unprivileged.trim() == "1" {
        return eprintln!("skipped: vm.unprivileged_userfaultfd is 1, so that every QEMU may");
    }
    let options = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector);
    let mut destination = options.incoming();
    destination.user = Some(65534);
    let Some(pair) = Pair::start(&options, &destination) else { return };
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    let Some(receiver) = receive_without_device(&pair) else { return };
    let (status, lines) = sender(&pair, &receiver).finish_with_lines();
    assert_eq!(status.code(), PEER_REFUSED, "{lines:?}");
    let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    for word in ["post-copy is not possible at the destination", "/dev/userfaultfd", "CAP_SYS_PTRACE", "not touched"] {
        assert!(message.contains(word), "{word:?}: {message}");
    }
    assert!(pair.source.runs());
    assert_eq!(pair.source.untouched(), Ok(()));
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"), "it can still take another guest");
}

#[test]
fn memory_that_another_process_has_mapped_is_refused_before_the_guest_is_touched() {
    let source = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector);
    let mut destination = source.incoming();
    destination.backend = Backend::Memfd;
    let Some(pair) = Pair::start(&source, &destination) else { return };
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    let process = format!("/proc/{}", pair.destination.qemu.pid());
    let maps = std::fs::read_to_string(format!("{process}/maps")).unwrap();
    let memfd = maps.lines().find(|line| line.contains("/memfd:")).expect("guest RAM is a memfd");
    let range = memfd.split(' ').next().unwrap();
    let file = std::fs::File::options().read(true).write(true).open(format!("{process}/map_files/{range}")).unwrap();
    // Mapped by this test's process.
    let bytes = pair.destination.qemu.memory() as usize;
    let _mapped = RamBlock::of_file("pc.ram", Arc::new(file), 0, bytes, 4096).unwrap();
    let (_receiver, sender) = start(&pair);
    let (status, lines) = sender.finish_with_lines();
    assert_eq!(status.code(), PEER_REFUSED, "{lines:?}");
    let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    let own = format!("process {} ", std::process::id());
    assert!(message.contains(&own) && message.contains("would read zeros where pages are missing"), "{message}");
    assert!(pair.source.runs());
    assert_eq!(pair.source.untouched(), Ok(()));
}

#[test]
fn huge_pages_of_a_pool_are_refused_before_the_guest_is_touched() {
    let Some(_pages) = sterna_qemu_lab::skip_if_unavailable(sterna_qemu_lab::huge::HugePages::reserve(MEMORY)) else {
        return;
    };
    let source = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector);
    let mut destination = source.incoming();
    destination.backend = Backend::MemfdHuge;
    let Some(pair) = Pair::start(&source, &destination) else { return };
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    let (receiver, sender) = start(&pair);
    let (status, lines) = sender.finish_with_lines();
    assert_eq!(status.code(), PEER_REFUSED, "{lines:?}");
    let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    assert!(message.contains("RAM block pc.ram") && message.contains("huge pages of 2097152 bytes"), "{message}");
    assert!(pair.source.runs());
    drop(receiver);
}

/// How a migration ends whose process crashed at a step of post-copy, and was recovered.
#[derive(Clone, Copy, Debug)]
enum End {
    /// Nothing was decided: the guest runs at the source.
    AtSource,
    /// The guest was given away and never ran: the destination discards its copy, and an operator takes the guest back.
    TakenBack,
    /// The guest may have run at the destination, and the process that could place its memory is gone.
    LostThere,
    /// The process that could send the guest's memory is gone.
    LostHere,
}

/// Returns the end after a crash at `point`; none if an undisturbed migration does not pass it.
fn end(point: CrashPoint) -> Option<End> {
    use Step::*;
    match (point.step, point.moment) {
        (SourceSendPostCopy | SourceStartPostCopy, _) => Some(End::AtSource),
        (SourceServePages, _) => Some(End::LostHere),
        (DestinationWatchMissingPages | DestinationSendPostCopyReady | DestinationRecordPreparedIncomplete, _) => {
            Some(End::AtSource)
        }
        (DestinationRecordCommittedIncomplete, Moment::Before) => Some(End::TakenBack),
        (DestinationRecordCommittedIncomplete, Moment::After) => Some(End::LostThere),
        (DestinationRecordRunningIncomplete | DestinationSendRunningIncomplete, _) => Some(End::LostThere),
        // Passed where a connection or a monitor is lost meanwhile, and by migrations without post-copy.
        _ => None,
    }
}

/// Recovers one side, which must be settled by it, or be reported lost with this text.
fn recovered(pair: &Pair, side: Side, words: &[&str], lost: Option<&str>) -> Result<(), String> {
    let (status, lines) = side.recover(pair, words, None).ok_or("no record was left")?.finish_with_lines();
    let as_expected = match lost {
        Some(text) => status.code() == LOST && lines.iter().any(|line| line.contains(text)),
        None => status.success(),
    };
    if !as_expected {
        return Err(format!("recover of the {}: {status}: {lines:?}", side.name()));
    }
    Ok(())
}

/// Crashes at `point`, recovers, and compares the end.
fn crashed(pair: Pair, point: CrashPoint, end: End) -> Result<(), String> {
    let at_source = point.to_string().starts_with("source.");
    let side = if at_source { Side::Source } else { Side::Destination };
    let fault = format!("{point}:crash");
    let (source, destination) = if at_source { (Some(&*fault), None) } else { (None, Some(&*fault)) };
    let mut migration = Migration::start_by("direct", pair, SHORT_OF_MEMORY, source, destination);
    migration.wait_crash(side)?;
    match end {
        End::AtSource => {
            migration.settle()?;
            match migration.exactly_one()? {
                Side::Source => Ok(()),
                Side::Destination => Err("the guest runs at the destination".into()),
            }
        }
        End::TakenBack => {
            recovered(&migration.pair, Side::Destination, &[], None)?;
            migration.sender.take().expect("it was started").kill();
            recovered(&migration.pair, Side::Source, &["--fenced-peer"], None)?;
            match migration.exactly_one()? {
                Side::Source => Ok(()),
                Side::Destination => Err("the guest runs at the destination".into()),
            }
        }
        End::LostThere | End::LostHere => {
            let text = if at_source { "no process can send any more" } else { "The guest is lost here" };
            recovered(&migration.pair, side, &[], Some(text))?;
            if migration.pair.source.runs() {
                return Err("the source's guest runs although it was given away".into());
            }
            migration.pair.never_both()
        }
    }
}

#[test]
fn after_a_crash_at_any_step_of_post_copy_no_guest_runs_twice_or_without_its_memory() {
    let Some(probe) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    drop(probe);
    let queue = Mutex::new(CrashPoint::POST_COPY.iter().filter_map(|point| Some((*point, end(*point)?))));
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let Some((point, end)) = queue.lock().unwrap().next() else { return };
                    let pair = Pair::boot_sector(QemuVersion::V10_0).expect("there were tools before");
                    match crashed(pair, point, end) {
                        Ok(()) => println!("{point}: {end:?}"),
                        Err(error) => failed.lock().unwrap().push(format!("{point}: not {end:?}: {error}")),
                    }
                }
            });
        }
    });
    assert_eq!(failed.into_inner().unwrap(), [""; 0]);
}
