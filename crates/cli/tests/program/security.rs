//! Attacks by other users of a host, and QEMUs that see other files, on `send` and `receive`; docs/security.md has the
//! guarantees.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::pair::{Pair, Watched};
use crate::support::settle::outcome;
use crate::support::{Hold, Sterna, UNREACHABLE, certificates, nothing_was_touched, receive, send, sterna};
use sterna_qemu::qmp::Qmp;
use sterna_qemu_lab::{Guest, Qemu, QemuOptions, QemuVersion, Tools, skip_if_unavailable};

/// Two machines that run nothing, which is enough to move.
fn idle(own_directory: Option<PathBuf>, extra: &[String]) -> (QemuOptions, QemuOptions) {
    let mut source = QemuOptions::new(QemuVersion::V10_0, Guest::None);
    source.own_directory = own_directory;
    let mut destination = source.incoming();
    destination.extra.extend_from_slice(extra);
    (source, destination)
}

fn idle_pair() -> Option<Pair> {
    let (source, destination) = idle(None, &[]);
    Pair::start(&source, &destination)
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: namespaces and other users need root");
    }
    root
}

/// Returns the only error line of a process that has failed.
fn refusal(process: Sterna) -> String {
    let (status, lines) = process.finish_with_lines();
    assert!(nothing_was_touched(status.code()), "{status}: {lines:?}");
    lines.into_iter().find(|line| line.starts_with("sterna: ")).expect("an error")
}

fn directory(path: PathBuf) -> PathBuf {
    std::fs::create_dir(&path).unwrap();
    path
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Field 22 of `/proc/PID/stat`, proc(5): when the process was started.
fn start_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(22 - 3).unwrap().parse().unwrap()
}

#[test]
fn a_lock_name_that_another_process_has_guessed_and_bound_does_not_block_a_command() {
    let Some(pair) = idle_pair() else { return };
    let pid = pair.destination.qemu.pid();
    let name = format!("sterna-qemu-{pid}-{}", start_ticks(pid));
    let _taken = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    receiver.wait_for("listening on ");
}

#[test]
fn a_second_command_for_a_qemu_is_refused_also_from_another_network_namespace() {
    if !is_root() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let second = scratch.path().join("second.qmp");
    let words = ["-chardev".into(), format!("socket,id=second,path={},server=on,wait=off", second.display())];
    let words = [&words[..], &["-mon".into(), "chardev=second,mode=control".into()]].concat();
    let (source, destination) = idle(None, &words);
    let Some(pair) = Pair::start(&source, &destination) else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let mut receiver = Sterna::start("receive", command.arg("--insecure"));
    receiver.wait_for("listening on ");

    let other_state = scratch.path().join("other-state");
    let command = receive(&second, &other_state);
    let mut elsewhere = Command::new("unshare");
    elsewhere.arg("--net").arg(command.get_program()).args(command.get_args()).arg("--insecure");
    let refused = refusal(Sterna::start("second receive", &mut elsewhere));
    assert!(refused.contains("another sterna is at work on this QEMU"), "{refused}");
    assert!(receiver.poll().is_none());
}

#[test]
fn a_state_directory_that_others_can_change_is_refused_before_anything_is_done() {
    let Some(pair) = idle_pair() else { return };
    let open = directory(pair.scratch.path().join("open"));
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    let mut command = send(pair.source.qemu.qmp_path(), "127.0.0.1:1", &open, &pair.report());
    let refused = refusal(Sterna::start("send", command.arg("--insecure")));
    assert!(refused.contains("state directory") && refused.contains("others may write to it"), "{refused}");
    assert!(refused.contains("the guest was not touched") && pair.source.runs(), "{refused}");
    let mut command = receive(pair.destination.qemu.qmp_path(), &open);
    let refused = refusal(Sterna::start("receive", command.arg("--insecure")));
    assert!(refused.contains("others may write to it"), "{refused}");
    assert!(names(&open).is_empty());
}

#[test]
fn a_private_key_that_others_can_read_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    certificates(scratch.path());
    let key = scratch.path().join("client-key.pem");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let mut command = sterna();
    command.args(["send", "--to", "127.0.0.1:1", "--qmp", "missing.qmp", "--tls"]).arg(scratch.path());
    let (status, lines) = Sterna::start("send", &mut command).finish_with_lines();
    let line = lines.iter().find(|line| line.starts_with("sterna: ")).expect("an error");
    assert!(!status.success() && line.contains("client-key.pem is not private"), "{line}");
}

#[test]
fn the_sockets_of_a_receive_that_was_killed_early_are_removed_by_the_next_command() {
    let Some(pair) = idle_pair() else { return };
    let temporary = directory(pair.scratch.path().join("t"));
    let start = |hold: bool| {
        let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
        command.arg("--insecure").env("TMPDIR", &temporary);
        let hold = hold.then(|| Hold::at("destination.before-record-started", pair.scratch.path(), &mut command));
        (Sterna::start("receive", &mut command), hold)
    };
    let (mut killed, hold) = start(true);
    let mut command = send(pair.source.qemu.qmp_path(), &killed.address(), &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", command.arg("--insecure"));
    let held = hold.as_ref().unwrap().reached(&killed);
    assert_eq!(names(&temporary).len(), 1, "its directory is there");
    killed.kill();
    drop(held);
    assert_eq!(sender.finish().0.code(), UNREACHABLE);
    assert!(pair.source.runs());
    assert_eq!(names(&pair.destination_state()).iter().filter(|name| name.ends_with(".json")).count(), 0);
    assert_eq!(names(&temporary).len(), 1, "no process could remove it");

    let (next, _) = start(false);
    next.wait_for("listening on ");
    assert_eq!(names(&temporary), [] as [&str; 0]);
}

/// Moves the guest of `pair`, each side with these words and this directory for temporary files.
fn moves(pair: &Pair, temporary: &Path, words: &[String]) {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure").args(words).env("TMPDIR", temporary));
    let mut command = send(pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", command.arg("--insecure").args(words).env("TMPDIR", temporary));
    let (sent, received) = (sender.finish().0, receiver.finish().0);
    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
    assert_eq!(outcome(&pair.report()).as_deref(), Some("completed"));
    assert!(pair.destination.runs());
    pair.never_both().unwrap();
}

/// Returns whether a user of the host may run the unpacked QEMU.
fn may_run_qemu(user: u32) -> bool {
    let Some(tools) = skip_if_unavailable(Tools::locate()) else { return false };
    let program = tools.directory().join("qemu-10.0/usr/bin/qemu-system-x86_64");
    let user = user.to_string();
    let words = ["--reuid", &user, "--regid", &user, "--clear-groups", "test", "-x"];
    let may = Command::new("setpriv").args(words).arg(&program).status().is_ok_and(|status| status.success());
    if !may {
        eprintln!("skipped: user {user} may not run {}", program.display());
    }
    may
}

#[test]
fn root_moves_the_guest_of_a_qemu_that_runs_as_another_user() {
    let nobody = 65534;
    if !is_root() || !may_run_qemu(nobody) {
        return;
    }
    let (mut source, mut destination) = idle(None, &[]);
    (source.user, destination.user) = (Some(nobody), Some(nobody));
    let [from, to] = [source, destination].map(|options| Qemu::start(&options).unwrap());
    let scratch = tempfile::tempdir().unwrap();
    std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let temporary = directory(scratch.path().join("t"));
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o1777)).unwrap();
    let [from_state, to_state, json] = ["a", "b", "report.json"].map(|name| scratch.path().join(name));
    let mut command = receive(to.qmp_path(), &to_state);
    let hold = Hold::at("destination.before-cont", scratch.path(), &mut command);
    let receiver = Sterna::start("receive", command.arg("--insecure").env("TMPDIR", &temporary));
    let mut command = send(from.qmp_path(), &receiver.address(), &from_state, &json);
    let sender = Sterna::start("send", command.arg("--insecure").env("TMPDIR", &temporary));

    let held = hold.reached(&receiver);
    let owner_and_mode = |path: &Path| {
        let found = std::fs::symlink_metadata(path).unwrap();
        (found.uid(), found.permissions().mode() & 0o7777)
    };
    let mut found: Vec<_> = names(&temporary).iter().map(|name| owner_and_mode(&temporary.join(name))).collect();
    found.sort_unstable();
    assert_eq!(found, [(0, 0o711), (nobody, 0o700)], "the source's is root's, the destination's is QEMU's");
    drop(held);
    let (sent, received) = (sender.finish().0, receiver.finish().0);
    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
    assert_eq!(Qmp::connect(to.qmp_path()).unwrap().status().unwrap(), "running");
    assert!(names(&temporary).is_empty());
}

/// A directory, and another one with the same path in the mount namespace of each QEMU.
struct Apart {
    _scratch: tempfile::TempDir,
    hidden: PathBuf,
    shared: PathBuf,
    pair: Pair,
}

impl Apart {
    fn start() -> Option<Self> {
        if !is_root() {
            return None;
        }
        let scratch = tempfile::tempdir().unwrap();
        let [hidden, shared] = ["h", "s"].map(|name| directory(scratch.path().join(name)));
        let (source, destination) = idle(Some(hidden.clone()), &[]);
        let pair = Pair::start(&source, &destination)?;
        std::fs::write(hidden.join("here"), "").unwrap();
        for qemu in [&pair.source, &pair.destination] {
            assert!(names(&of_qemu(qemu, &hidden)).is_empty(), "QEMU has another directory there");
        }
        Some(Self { _scratch: scratch, hidden, shared, pair })
    }
}

/// Returns the directory that a QEMU sees at `path`.
fn of_qemu(qemu: &Watched, path: &Path) -> PathBuf {
    Path::new(&format!("/proc/{}/root", qemu.qemu.pid())).join(path.strip_prefix("/").unwrap())
}

#[test]
fn a_qemu_in_another_mount_namespace_connects_in_its_own_directory_for_temporary_files() {
    let Some(Apart { hidden, pair, _scratch, .. }) = Apart::start() else { return };
    moves(&pair, &hidden, &[]);
    assert_eq!(names(&hidden), ["here"], "nothing was made in this process's directory");
    assert!(names(&of_qemu(&pair.destination, &hidden)).is_empty(), "nothing is left in QEMU's directory");
}

#[test]
fn a_qemu_in_another_mount_namespace_connects_in_the_directory_of_the_options() {
    let Some(Apart { hidden, shared, pair, _scratch }) = Apart::start() else { return };
    moves(&pair, Path::new("/nowhere"), &["--socket-dir".into(), shared.display().to_string()]);
    assert!(names(&shared).is_empty() && names(&hidden) == ["here"]);
}

#[test]
fn two_paths_of_a_socket_directory_are_accepted_only_if_they_lead_to_the_same() {
    let Some(Apart { hidden, shared, pair, _scratch }) = Apart::start() else { return };
    let two =
        |here: &Path, there: &Path| ["--socket-dir".to_owned(), format!("{}={}", here.display(), there.display())];
    let wrong = [two(&shared, &hidden), two(&hidden, &shared), two(&shared, Path::new("/nowhere"))];
    for words in &wrong {
        let mut command = send(pair.source.qemu.qmp_path(), "127.0.0.1:1", &pair.source_state(), &pair.report());
        let refused = refusal(Sterna::start("send", command.arg("--insecure").args(words)));
        assert!(refused.contains("QEMU (process") && refused.contains("must lead to the same directory"), "{refused}");
        assert!(refused.contains("the guest was not touched") && pair.source.runs(), "{refused}");
        let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
        let refused = refusal(Sterna::start("receive", command.arg("--insecure").args(words)));
        assert!(refused.contains("must lead to the same directory"), "{refused}");
        assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"), "its QEMU is not touched");
    }
    let missing = ["--socket-dir", "/nowhere/sockets"];
    let mut command = send(pair.source.qemu.qmp_path(), "127.0.0.1:1", &pair.source_state(), &pair.report());
    let refused = refusal(Sterna::start("send", command.arg("--insecure").args(missing)));
    assert!(refused.contains("another mount namespace") && refused.contains("/nowhere/sockets"), "{refused}");

    // The source's QEMU is gone afterwards.
    let through_qemu = of_qemu(&pair.destination, &hidden);
    // The same directory for both QEMUs: only the one that is shared.
    moves(&pair, Path::new("/nowhere"), &two(&shared, &shared));
    assert!(names(&shared).is_empty() && names(&through_qemu).is_empty());
}

#[test]
fn the_tests_that_the_document_names_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let document = std::fs::read_to_string(root.join("docs/security.md")).unwrap();
    let named: Vec<_> = document.split('`').filter_map(|word| word.split_once(".rs::")).collect();
    assert!(named.len() > 40, "{}", named.len());
    for (file, name) in named {
        let text =
            std::fs::read_to_string(root.join(format!("{file}.rs"))).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(text.contains(&format!("fn {name}(")), "{file}.rs has no test {name}");
    }
}
