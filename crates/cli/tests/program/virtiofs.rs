//! A Linux guest works with files of a directory that its host shares by virtiofs, and continues with the same open
//! files at another virtiofsd, whose state QEMU's own stream carries.

#[path = "../../../devices/tests/virtiofsd/support/handles.rs"]
mod handles;
use std::path::Path;

use crate::support::pair::{Pair, Watched, eventually};
use crate::support::{Hold, LONG, PEER_REFUSED, REFUSED, Sterna, receive, report, send, send_by};
use handles::may_open_by_handle;
use sterna_qemu_lab::ram::{CHANGED_BY_LOADING, compare};
use sterna_qemu_lab::{
    Backend, FilesDone, Guest, LinuxGuest, QemuOptions, QemuVersion, Share, SharedDirectory, Virtiofsd,
    skip_if_unavailable,
};
use tempfile::TempDir;

const MEMORY: u64 = 384 << 20;
const TAG: &str = "shared";
/// Steps with each file that show that the guest goes on with it.
const STEPS: u64 = 10;

/// Two QEMUs, each with its virtiofsd; the source's guest works with its files.
struct Hosts {
    pair: Pair,
    machine: QemuOptions,
    daemons: Vec<Virtiofsd>,
}

impl Hosts {
    /// Starts both; `None` if the tools are missing.
    fn start(source: (&Path, &[&str]), destination: (&Path, &[&str]), deleted: bool) -> Option<Hosts> {
        let daemons =
            [source, destination].map(|(directory, options)| skip_if_unavailable(Virtiofsd::start(directory, options)));
        let [Some(first), Some(second)] = daemons else { return None };
        let share = Some(Share { tag: TAG.into(), deleted });
        let linux = LinuxGuest { memory: Some(96 << 20), dirty_rate: 4 << 20, share, ..LinuxGuest::default() };
        let mut machine = QemuOptions::new(QemuVersion::V10_0, Guest::Linux(linux));
        machine.memory = MEMORY;
        machine.backend = Backend::Memfd;
        let pair = Pair::start(&with(&machine, &first), &with(&machine.incoming(), &second))?;
        pair.source.qemu.guest().wait_ready(LONG).unwrap();
        let hosts = Hosts { pair, machine, daemons: vec![first, second] };
        hosts.source_goes_on(&FilesDone::default());
        Some(hosts)
    }

    /// Waits until the guest at the source has done further steps with each file.
    fn source_goes_on(&self, before: &FilesDone) {
        let guest = self.pair.source.qemu.guest();
        guest.wait_files(before, STEPS, LONG).unwrap();
        assert_eq!(guest.bad_lines(), [""; 0]);
    }

    /// Returns what the guest has done at the source, by its latest report.
    fn done_at_source(&self) -> FilesDone {
        self.pair.source.qemu.guest().last_files().expect("it reports this with every tick")
    }

    /// Starts `receive`, held before the destination's guest starts, and `send` by QEMU's stream, held until the guest
    /// has worked with its files while QEMU and virtiofsd already log what they write.
    fn begin(&self) -> Moving {
        self.begin_by("stream")
    }

    /// Starts both as `begin` does, in this mode.
    fn begin_by(&self, mode: &str) -> Moving {
        let Pair { source, destination, .. } = &self.pair;
        let scratch = tempfile::tempdir_in(self.pair.scratch.path()).unwrap();
        let mut command = receive(destination.qemu.qmp_path(), &self.pair.destination_state());
        let loaded = Hold::at("destination.before-cont", scratch.path(), command.arg("--insecure"));
        let receiver = Sterna::start("receive", &mut command);
        let mut command =
            send_by(mode, source.qemu.qmp_path(), &receiver.address(), &self.pair.source_state(), &self.pair.report());
        let begun = Hold::at("source.after-start-migration", scratch.path(), command.arg("--insecure"));
        let sender = Sterna::start("send", &mut command);
        let held = begun.reached(&sender);
        assert!(mode == "direct" || eventually(LONG, || source.migration_status().as_deref() == Some("active")));
        self.source_goes_on(&self.done_at_source());
        drop(held);
        Moving { sender, receiver, loaded, _scratch: scratch }
    }

    /// Moves the guest; all memory is compared before it starts at the destination, where it then does more with each
    /// file.
    fn moves(&self) {
        self.moves_by("stream");
    }

    fn moves_by(&self, mode: &str) {
        let Pair { source, destination, .. } = &self.pair;
        let Moving { sender, receiver, loaded, _scratch } = self.begin_by(mode);
        let held = loaded.reached(&receiver);
        let mut differing = compare(source.qemu.pid(), destination.qemu.pid(), MEMORY).unwrap();
        differing.retain(|page| !CHANGED_BY_LOADING.contains(page));
        assert_eq!(differing, [0u64; 0]);
        drop(held);
        let (sent, _) = sender.finish();
        let (received, _) = receiver.finish();
        assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
        destination.qemu.guest().wait_files(&self.done_at_source(), STEPS, LONG).unwrap();
        self.pair.never_both().unwrap();
    }

    /// Makes the guest read all of its files again at the destination, and verifies its memory. Returns what it has
    /// done.
    fn closed(&self) -> FilesDone {
        let guest = self.pair.destination.qemu.guest();
        let done = guest.close_files(LONG).unwrap();
        let verified = guest.verify(LONG).unwrap();
        assert_eq!((verified.bad, verified.table_whole), (0, true));
        done
    }
}

struct Moving {
    sender: Sterna,
    receiver: Sterna,
    loaded: Hold,
    _scratch: TempDir,
}

/// Returns the machine with the directory that `daemon` shares.
fn with(machine: &QemuOptions, daemon: &Virtiofsd) -> QemuOptions {
    let mut machine = machine.clone();
    machine.extra.extend(daemon.qemu_words(TAG));
    machine
}

#[test]
fn a_guest_continues_with_its_open_files_behind_another_virtiofsd() {
    let shared = SharedDirectory::new(&std::env::temp_dir()).unwrap();
    // All of the state is in QEMU's stream: a megabyte of names.
    shared.fill_with_names(4000).unwrap();
    let side = (shared.path(), &[][..]);
    let Some(hosts) = Hosts::start(side, side, false) else { return };
    hosts.moves();
    let done = hosts.closed();
    assert_eq!(hosts.pair.destination.qemu.guest().bad_lines(), [""; 0]);
    shared.check(&done).unwrap();
}

#[test]
fn a_guest_moves_directly_and_its_virtiofsds_writes_into_its_memory_are_tracked() {
    let shared = SharedDirectory::new(&std::env::temp_dir()).unwrap();
    let side = (shared.path(), &[][..]);
    let Some(hosts) = Hosts::start(side, side, false) else { return };
    hosts.moves_by("direct");
    let report = report(&hosts.pair.report());
    let tracking = report["tracking"].as_str().unwrap();
    assert!(report["mode"] == "direct" && tracking.contains("(virtiofsd)"), "{report}");
    let done = hosts.closed();
    assert_eq!(hosts.pair.destination.qemu.guest().bad_lines(), [""; 0]);
    shared.check(&done).unwrap();
}

#[test]
fn a_virtiofsd_that_reads_files_past_the_page_cache_is_not_moved_directly() {
    let shared = SharedDirectory::new(&std::env::temp_dir()).unwrap();
    let side = (shared.path(), &["--allow-direct-io"][..]);
    let Some(hosts) = Hosts::start(side, side, false) else { return };
    let (state, report) = (hosts.pair.source_state(), hosts.pair.report());
    let mut command = send_by("direct", hosts.pair.source.qemu.qmp_path(), "127.0.0.1:1", &state, &report);
    let (sent, lines) = Sterna::start("send", command.arg("--insecure")).finish_with_lines();
    assert_eq!(sent.code(), REFUSED);
    assert!(
        lines.iter().any(|line| line.contains("--allow-direct-io") && line.contains("was not touched")),
        "{lines:?}"
    );
    hosts.source_goes_on(&hosts.done_at_source());
}

#[test]
fn post_copy_is_refused_where_a_virtiofsd_would_read_missing_memory() {
    let shared = SharedDirectory::new(&std::env::temp_dir()).unwrap();
    let side = (shared.path(), &[][..]);
    let Some(hosts) = Hosts::start(side, side, false) else { return };
    let Pair { source, destination, .. } = &hosts.pair;
    let mut command = receive(destination.qemu.qmp_path(), &hosts.pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let (state, report) = (hosts.pair.source_state(), hosts.pair.report());
    let mut command = send_by("direct", source.qemu.qmp_path(), &receiver.address(), &state, &report);
    command.args(["--insecure", "--on-no-convergence", "post-copy"]);
    let (sent, lines) = Sterna::start("send", &mut command).finish_with_lines();
    assert_eq!(sent.code(), PEER_REFUSED);
    let words = ["post-copy is not possible at the destination", "1 vhost-user back ends", "was not touched"];
    assert!(lines.iter().any(|line| words.iter().all(|word| line.contains(word))), "{lines:?}");
    hosts.source_goes_on(&hosts.done_at_source());
}

#[test]
fn a_deleted_file_stays_open_with_file_handles() {
    let shared = SharedDirectory::new(&std::env::temp_dir()).unwrap();
    if !may_open_by_handle(shared.path()) {
        return;
    }
    let options = ["--cache=never", "--migration-mode=file-handles", "--modcaps=+dac_read_search"];
    let side = (shared.path(), &options[..]);
    let Some(hosts) = Hosts::start(side, side, true) else { return };
    hosts.moves();
    let done = hosts.closed();
    assert_eq!(hosts.pair.destination.qemu.guest().bad_lines(), [""; 0]);
    assert!(done.deleted > 0);
    shared.check(&done).unwrap();
}

#[test]
fn a_state_that_the_destination_refuses_leaves_the_guest_at_the_source_with_its_files() {
    let [shared, another] = [(); 2].map(|()| SharedDirectory::new(&std::env::temp_dir()).unwrap());
    let Some(mut hosts) = Hosts::start((shared.path(), &[]), (another.path(), &[]), false) else { return };
    let Moving { sender, receiver, .. } = hosts.begin();
    let (sent, sent_lines) = sender.finish_with_lines();
    let (received, received_lines) = receiver.finish_with_lines();
    assert_eq!((sent.code(), received.code()), (Some(1), Some(1)), "{sent_lines:?} {received_lines:?}");
    let report = report(&hosts.pair.report());
    // QEMU ends at once, and may be seen to end before it is seen to have failed.
    let reason = report["reason"].as_str().unwrap();
    assert!(["could not load the guest", "has ended", "closed"].iter().any(|words| reason.contains(words)), "{report}");
    // Only QEMU and virtiofsd report the reason.
    let (qemu, daemon) = (hosts.pair.destination.qemu.standard_error(), hosts.daemons[1].log());
    assert!(qemu.contains("Back-end failed to process its internal state"), "{qemu}");
    assert!(daemon.contains("No such file or directory"), "{daemon}");
    hosts.source_goes_on(&hosts.done_at_source());

    // Then it moves to a destination that has the files.
    let daemon = Virtiofsd::start(shared.path(), &[]).unwrap();
    let incoming = with(&hosts.machine.incoming(), &daemon);
    hosts.pair.destination = Watched::start(&incoming, hosts.pair.scratch.path(), "another").unwrap();
    hosts.daemons[1] = daemon;
    hosts.moves();
    let done = hosts.closed();
    assert_eq!(hosts.pair.destination.qemu.guest().bad_lines(), [""; 0]);
    shared.check(&done).unwrap();
}

#[test]
fn a_file_that_cannot_be_found_again_is_the_only_one_lost_if_the_option_permits_it() {
    let shared = SharedDirectory::new(&std::env::temp_dir()).unwrap();
    let destination = (shared.path(), &["--migration-on-error=guest-error"][..]);
    let Some(hosts) = Hosts::start((shared.path(), &[]), destination, true) else { return };
    hosts.moves();
    let before = FilesDone { bad: 1, deleted: 0, ..hosts.done_at_source() };
    hosts.pair.destination.qemu.guest().wait_files(&before, STEPS, LONG).unwrap();
    let done = hosts.closed();
    let bad = hosts.pair.destination.qemu.guest().bad_lines();
    assert!(bad.len() == 1 && bad[0].contains("BAD file deleted") && bad[0].contains("Input/output error"), "{bad:?}");
    shared.check(&done).unwrap();
}

#[test]
fn a_qemu_that_cannot_move_the_device_is_refused_and_its_guest_continues() {
    let shared = SharedDirectory::new(&std::env::temp_dir()).unwrap();
    let Some(daemon) = skip_if_unavailable(Virtiofsd::start(shared.path(), &[])) else { return };
    let mut machine = QemuOptions::new(QemuVersion::V7_2, Guest::BootSector);
    machine.backend = Backend::Memfd;
    let Some(source) = skip_if_unavailable(Watched::start(&with(&machine, &daemon), shared.path(), "source")) else {
        return;
    };
    let mut command = send(source.qemu.qmp_path(), "127.0.0.1:1", shared.path(), &shared.path().join("report"));
    let (sent, sent_lines) = Sterna::start("send", command.arg("--insecure")).finish_with_lines();
    assert_eq!(sent.code(), REFUSED);
    assert!(
        sent_lines.iter().any(|line| line.contains("non-migratable device") && line.contains("vhost-user-fs")),
        "{sent_lines:?}"
    );
    source.wait_progress().unwrap();
}
