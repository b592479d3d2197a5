//! Refusals of direct mode, and disturbances during a move: each produces a clear line, and the guest continues to run.

use std::fs::{File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::support::pair::{Pair, eventually};
use crate::support::relay::{Still, still_relay};
use crate::support::settle::{Migration, Side};
use crate::support::{
    CANCELLED, FAILED, Hold, LONG, LOST, NOT_PERMITTED, PEER_REFUSED, REFUSED, Sterna, nothing_was_touched, receive,
    report, send_by,
};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use serde_json::{Value, json};
use sterna_attach::{Process, UserfaultOrigin, take_userfault};
use sterna_memory::PAGE_SIZE;
use sterna_memory::dirty::DirtyLog;
use sterna_memory::dirty::write_protect::{MappedBlock, MappedPart, WriteProtectLog};
use sterna_memory::place::TargetProcess;
use sterna_memory::userfault::Userfault;
use sterna_qemu_lab::ram::Ram;
use sterna_qemu_lab::{Backend, Guest, MemoryGroup, Qemu, QemuOptions, QemuVersion, skip_if_unavailable};
use sterna_wire::switchover::{RecordState, SourceState};

/// So slow that a migration takes seconds, and that the guest writes more meanwhile than fits its downtime.
const SLOW: &[&str] = &["--bandwidth", "20MB/s", "--method", "none", "--downtime", "2s"];

/// A downtime into which all of the guest's memory fits, also at the rate of [`LONG_ROUNDS`] and on a busy machine.
const LONG_STOP: &str = "10s";
/// So slow that a round takes seconds; the guest is paused after the first one, and that it is for seconds, too.
const LONG_ROUNDS: &[&str] = &["--bandwidth", "20MB/s", "--method", "none", "--downtime", LONG_STOP];

fn boot_sector() -> QemuOptions {
    QemuOptions::new(QemuVersion::V10_0, Guest::BootSector)
}

/// Returns a pair whose source runs a guest that works.
fn pair(source: &QemuOptions, destination: &QemuOptions) -> Option<Pair> {
    let pair = Pair::start(source, destination)?;
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    Some(pair)
}

/// Runs `send` in this mode to its end. Returns its exit code and lines.
fn sent(pair: &Pair, mode: &str, receiver: &Sterna) -> (Option<i32>, Vec<String>) {
    sent_with(pair, mode, receiver, &[])
}

/// As [`sent`], with these words more.
fn sent_with(pair: &Pair, mode: &str, receiver: &Sterna, words: &[&str]) -> (Option<i32>, Vec<String>) {
    let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
    let mut command = send_by(mode, qmp, &receiver.address(), &state, &json);
    let (status, lines) =
        Sterna::start("send", command.args(["--insecure", "--downtime", LONG_STOP]).args(words)).finish_with_lines();
    (status.code(), lines)
}

fn receiver(pair: &Pair, words: &[&str]) -> Sterna {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    Sterna::start("receive", command.arg("--insecure").args(words))
}

/// Checks that `send --mode direct` is refused in one line that contains `words`; the guest continues untouched, and
/// the destination can still receive one.
fn refused(pair: &Pair, words: &[&str]) {
    let receiver = receiver(pair, &[]);
    let (code, lines) = sent(pair, "direct", &receiver);
    assert!(nothing_was_touched(code), "{code:?}: {lines:?}");
    let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    for word in words {
        assert!(message.contains(word), "{word:?}: {message}");
    }
    assert!(pair.source.runs(), "the guest runs on");
    receiver.interrupt();
    receiver.finish();
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
}

/// Checks that `send --mode auto` uses QEMU's stream, explains that in one line that contains `word`, and moves the
/// guest.
fn falls_back(pair: Pair, receiver: Sterna, word: &str) {
    let (code, lines) = sent(&pair, "auto", &receiver);
    assert_eq!(code, Some(0), "{lines:?}");
    let message = lines.iter().find(|line| line.contains("mode: stream")).expect("a line says which way it takes");
    assert!(message.contains(word), "{message}");
    assert!(receiver.finish().0.success());
    assert_eq!(report(&pair.report())["mode"], "stream");
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

/// Checks that `send --mode direct` is refused in one line that contains `word`, and that `send --mode auto` moves the
/// guest by QEMU's stream.
fn refused_and_streamed(pair: &Pair, send: impl Fn(&str) -> (Option<i32>, Vec<String>), word: &str) {
    let (code, lines) = send("direct");
    assert!(nothing_was_touched(code), "{code:?}: {lines:?}");
    let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    assert!(message.contains(word) && message.contains("not touched"), "{message}");
    assert!(pair.source.runs());
    assert_eq!(pair.source.untouched(), Ok(()));
    let (code, lines) = send("auto");
    assert_eq!(code, Some(0), "{lines:?}");
    let message = lines.iter().find(|line| line.contains("mode: stream")).expect("a line says which way it takes");
    assert!(message.contains(word), "{message}");
}

/// Checks that `receive` succeeded, and that the guest is only at the destination.
fn settled(pair: Pair, receiver: Sterna) {
    assert!(receiver.finish().0.success());
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

/// A process that acts on a QEMU until this is dropped.
struct Busy(std::process::Child);

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_qemu_that_is_traced_already_is_refused_and_auto_uses_the_stream() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let pid = pair.source.qemu.pid();
    let Ok(tracer) =
        Command::new("strace").args(["-q", "-o", "/dev/null", "-e", "trace=none", "-p"]).arg(pid.to_string()).spawn()
    else {
        return eprintln!("skipped: there is no strace to trace QEMU with");
    };
    let tracer = Busy(tracer);
    let traced = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        !status.contains("TracerPid:\t0")
    };
    assert!(eventually(LONG, traced), "strace attaches");
    refused(&pair, &["traced by process", "strace", "not touched"]);
    let receiver = receiver(&pair, &[]);
    let (code, lines) = sent(&pair, "auto", &receiver);
    drop(tracer);
    assert_eq!(code, Some(0), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("mode: stream") && line.contains("traced")), "{lines:?}");
    assert!(receiver.finish().0.success());
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

#[test]
fn qemus_in_pid_namespaces_of_their_own_are_moved_directly() {
    let machine = QemuOptions { own_processes: true, ..boot_sector() };
    let Some(pair) = pair(&machine, &machine.incoming()) else { return };
    // By their own numbers they would be other processes of this host.
    let status = std::fs::read_to_string(format!("/proc/{}/status", pair.source.qemu.pid())).unwrap();
    assert!(status.lines().any(|line| line.starts_with("NSpid:") && line.ends_with("\t1")), "{status}");
    let receiver = receiver(&pair, &[]);
    let (code, lines) = sent(&pair, "direct", &receiver);
    assert_eq!(code, Some(0), "{lines:?}");
    settled(pair, receiver);
}

#[test]
fn a_qemu_7_2_is_refused_and_auto_uses_the_stream() {
    let options = QemuOptions::new(QemuVersion::V7_2, Guest::BootSector);
    let Some(pair) = pair(&options, &options.incoming()) else { return };
    refused(&pair, &["QEMU 7.2", "not touched"]);
    let receiver = receiver(&pair, &[]);
    falls_back(pair, receiver, "QEMU 7.2");
}

#[test]
fn a_receiver_that_places_in_the_stream_gets_the_stream() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let receiver = receiver(&pair, &["--placement", "in-stream"]);
    falls_back(pair, receiver, "destination");
}

#[test]
fn a_receiver_that_places_in_the_stream_refuses_a_source_that_must_be_direct() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let mut receiver = receiver(&pair, &["--placement", "in-stream"]);
    let (code, lines) = sent(&pair, "direct", &receiver);
    assert_eq!(code, PEER_REFUSED, "{lines:?}");
    assert!(pair.source.runs() && receiver.poll().is_none(), "{lines:?}");
    assert_eq!(pair.source.untouched(), Ok(()));
}

#[test]
fn another_machine_type_and_other_memory_are_refused_while_the_guest_runs() {
    let mut machine = boot_sector().incoming();
    machine.machine = "pc-q35-9.0".into();
    let mut memory = boot_sector().incoming();
    memory.memory = 192 << 20;
    for (destination, word) in [(machine, "pc-q35-9.0"), (memory, "pc.ram")] {
        let Some(pair) = pair(&boot_sector(), &destination) else { return };
        let receiver = receiver(&pair, &[]);
        let (code, lines) = sent(&pair, "direct", &receiver);
        assert_eq!(code, PEER_REFUSED, "{lines:?}");
        let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
        assert!(message.contains(word), "{message}");
        assert!(pair.source.runs());
        assert_eq!(pair.source.untouched(), Ok(()));
        assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"), "it can still take another guest");
        drop(receiver);
        pair.source.wait_progress().unwrap();
    }
}

/// Moves a guest and executes `commands` at its source meanwhile. Checks that the move ends for `reasons` before the guest is paused.
fn plugged_in(options: &QemuOptions, commands: &[(&str, Value)], reasons: [&str; 2]) {
    let Some(pair) = pair(options, &options.incoming()) else { return };
    let mut migration = Migration::start_by("direct", pair, LONG_ROUNDS, None, None);
    let sender = migration.sender.take().unwrap();
    sender.wait_for("placement: ");
    for (command, arguments) in commands {
        migration.pair.source.monitor.execute(command, arguments.clone()).unwrap();
    }
    assert_eq!(sender.finish().0.code(), FAILED);
    let message = report(&migration.pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reasons.iter().all(|words| message.contains(words)), "{message}");
    migration.receiver.take().unwrap().finish();
    assert_eq!(migration.pair.source.ran().len(), 1, "the guest was paused");
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn memory_that_is_plugged_in_during_the_move_ends_it_and_the_guest_runs_on() {
    let mut options = boot_sector();
    // QEMU merges this option with the one that sets the size.
    options.extra.extend(["-m".into(), "slots=2,maxmem=1G".into()]);
    let backend = json!({ "qom-type": "memory-backend-ram", "id": "plugged", "size": 256 << 20 });
    let module = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "plugged" });
    let commands = [("object-add", backend), ("device_add", module)];
    plugged_in(&options, &commands, ["was plugged in or out during the migration", "send again"]);
}

#[test]
fn a_guest_that_another_program_pauses_meanwhile_stays_at_the_source() {
    // Paused while its memory is sent.
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let mut migration = Migration::start_by("direct", pair, SLOW, None, None);
    let sender = migration.sender.take().unwrap();
    sender.wait_for("placement: ");
    migration.pair.source.monitor.execute("stop", json!({})).unwrap();
    assert_eq!(sender.finish().0.code(), FAILED);
    let reason = report(&migration.pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("only a running guest is moved"), "{reason}");
    migration.receiver.take().unwrap().finish();
    assert_eq!(migration.pair.source.status().as_deref(), Some("paused"), "another program paused the guest");
    migration.pair.source.monitor.execute("cont", json!({})).unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

/// Holds a direct migration at `point` of the source, calls `meanwhile`, and lets the migration continue.
fn held(point: &str, meanwhile: impl FnOnce(&Pair)) -> Option<(Migration, Option<i32>)> {
    held_of(&boot_sector(), point, meanwhile)
}

fn held_of(options: &QemuOptions, point: &str, meanwhile: impl FnOnce(&Pair)) -> Option<(Migration, Option<i32>)> {
    let pair = pair(options, &options.incoming())?;
    let receiver = receiver(&pair, &[]);
    let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
    let mut command = send_by("direct", qmp, &receiver.address(), &state, &json);
    command.args(["--insecure", "--downtime", LONG_STOP]);
    let hold = Hold::at(point, pair.scratch.path(), &mut command);
    let sender = Sterna::start("send", &mut command);
    let reached = hold.reached(&sender);
    meanwhile(&pair);
    drop(reached);
    let code = sender.finish().0.code();
    Some((Migration { pair, sender: None, receiver: Some(receiver) }, code))
}

#[test]
fn a_guest_that_another_program_resumes_before_the_decision_stays_at_the_source() {
    let resume = |pair: &Pair| drop(pair.source.monitor.execute("cont", json!({})).unwrap());
    let resume_and_pause = |pair: &Pair| {
        pair.source.monitor.execute("cont", json!({})).unwrap();
        pair.source.monitor.execute("stop", json!({})).unwrap();
    };
    let Some((mut migration, code)) = held("source.before-relay-shut", resume) else { return };
    assert_eq!(code, FAILED);
    let reason = report(&migration.pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("another program let the guest run"), "{reason}");
    migration.receiver.take().unwrap().finish();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));

    let (mut migration, code) = held("source.before-relay-shut", resume_and_pause).expect("there were tools before");
    assert_eq!(code, FAILED);
    migration.receiver.take().unwrap().finish();
    migration.pair.never_both().unwrap();
    assert_eq!(migration.pair.source.status().as_deref(), Some("paused"), "another program paused the guest");
    migration.pair.source.monitor.execute("cont", json!({})).unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

/// A guest whose QEMU does not end when the guest is reset.
fn resettable() -> QemuOptions {
    QemuOptions { extra: ["-action", "reboot=reset"].map(String::from).into(), ..boot_sector() }
}

/// Resets a guest that is paused. QEMU carries that out, and leaves the guest stopped, in another state.
fn reset_paused(pair: &Pair) {
    pair.source.monitor.execute("system_reset", json!({})).unwrap();
    assert!(eventually(LONG, || pair.source.status().as_deref() == Some("prelaunch")), "{:?}", pair.source.status());
}

#[test]
fn a_guest_that_is_reset_while_it_is_paused_boots_at_the_source() {
    let Some((mut migration, code)) = held_of(&resettable(), "source.before-relay-shut", reset_paused) else { return };
    assert_eq!(code, FAILED);
    let reason = report(&migration.pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("was reset") && reason.contains("prelaunch"), "{reason}");
    migration.receiver.take().unwrap().finish();
    assert!(migration.pair.source.runs());
    migration.pair.never_both().unwrap();
}

#[test]
fn recover_lets_a_guest_boot_that_was_reset_while_it_was_paused() {
    let Some(pair) = pair(&resettable(), &resettable().incoming()) else { return };
    let mut migration = Migration::start_by("direct", pair, &[], Some("source.before-relay-shut:crash"), None);
    migration.wait_crash(Side::Source).unwrap();
    reset_paused(&migration.pair);
    let (ended, text) = Side::Source.recover(&migration.pair, &[], None).expect("there is a record").finish();
    assert!(ended.success() && text.contains("runs here"), "{text}");
    assert!(migration.pair.source.runs());
    migration.receiver.take().unwrap().finish();
    migration.pair.never_both().unwrap();
}

#[test]
fn recover_does_not_resume_a_guest_that_another_program_paused() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let fault = "source.after-record-aborted:crash";
    let mut migration = Migration::start_by("direct", pair, SLOW, Some(fault), None);
    migration.sender.as_ref().unwrap().wait_for("placement: ");
    migration.pair.source.monitor.execute("stop", json!({})).unwrap();
    migration.wait_crash(Side::Source).unwrap();
    migration.receiver.take().unwrap().finish();
    assert_eq!(Side::Source.state(&migration.pair), Some(RecordState::Source(SourceState::Aborted)));
    let (ended, text) = Side::Source.recover(&migration.pair, &[], None).expect("there is a record").finish();
    assert!(ended.success() && text.contains("does not run (QEMU: paused)"), "{text}");
    assert_eq!(migration.pair.source.status().as_deref(), Some("paused"));
    migration.pair.source.monitor.execute("cont", json!({})).unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn cancelling_at_either_side_by_either_signal_at_either_phase_leaves_the_guest_at_the_source() {
    // While the first pages are sent; and while the last ones are, when the destination already has the state of the
    // devices.
    let phases = [("placement: ", SLOW), ("stopping the guest", LONG_ROUNDS)];
    for (side, terminate) in
        [(Side::Source, false), (Side::Source, true), (Side::Destination, false), (Side::Destination, true)]
    {
        for (line, words) in phases {
            let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
            let before = pair.source.migration_settings();
            let mut migration = Migration::start_by("direct", pair, words, None, None);
            let (mut sender, mut receiver) = (migration.sender.take().unwrap(), migration.receiver.take().unwrap());
            sender.wait_for(line);
            let cancelled = if side == Side::Source { &sender } else { &receiver };
            if terminate {
                cancelled.terminate();
            } else {
                cancelled.interrupt();
            }
            assert!(eventually(LONG, || sender.poll().is_some() && receiver.poll().is_some()), "both sides end");
            let (sent, received) = (sender.finish().0.code(), receiver.finish().0.code());
            let expected = if side == Side::Source { (CANCELLED, FAILED) } else { (FAILED, CANCELLED) };
            assert_eq!((sent, received), expected, "{side:?}, terminate {terminate}, after {line:?}");
            assert_eq!(migration.pair.source.migration_settings(), before);
            migration.pair.destination.qemu.wait_exit(LONG).unwrap();
            assert_eq!(migration.exactly_one(), Ok(Side::Source));
        }
    }
}

#[test]
fn a_source_that_is_kept_causes_a_warning_and_any_other_is_ended() {
    for (after, status) in [("quit", None), ("keep", Some("paused"))] {
        let mut options = boot_sector();
        options.backend = Backend::Memfd;
        let Some(pair) = pair(&options, &boot_sector().incoming()) else { return };
        let settings = pair.destination.migration_settings();
        let mut migration = Migration::start_by("direct", pair, &["--source-after", after], None, None);
        let (sent, text) = migration.sender.take().unwrap().finish();
        assert!(sent.success() && migration.receiver.take().unwrap().finish().0.success(), "{sent}");
        let report = report(&migration.pair.report());
        assert_eq!((report["mode"].as_str(), report["source_after"].as_str()), (Some("direct"), Some(after)));
        assert_eq!(text.contains("never resume"), after == "keep", "{text}");
        assert_eq!(migration.pair.source.status().as_deref(), status);
        assert_eq!(migration.pair.destination.migration_settings(), settings);
        assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    }
}

#[test]
fn a_recovery_that_starts_the_guest_restores_the_destinations_settings() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let before = pair.destination.migration_settings();
    let fault = "destination.after-record-committed:crash";
    let mut migration = Migration::start_by("direct", pair, &[], None, Some(fault));
    migration.wait_crash(Side::Destination).unwrap();
    migration.settle().unwrap();
    assert_eq!(migration.pair.destination.migration_settings(), before);
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

#[test]
fn a_memory_backend_that_no_device_uses_does_not_prevent_direct_mode() {
    let mut options = boot_sector();
    options.extra.extend(["-object".into(), "memory-backend-ram,id=unused,size=16M".into()]);
    let Some(pair) = pair(&options, &boot_sector().incoming()) else { return };
    let receiver = receiver(&pair, &[]);
    let (code, lines) = sent(&pair, "direct", &receiver);
    assert_eq!(code, Some(0), "{lines:?}");
    assert!(receiver.finish().0.success());
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

/// Returns `command`, run by `setpriv` with these words.
fn by_setpriv(words: &[&str], command: &Command) -> Command {
    let mut other = Command::new("setpriv");
    other.args(words).arg(command.get_program()).args(command.get_args());
    other
}

/// Returns the words of `setpriv` that run a program without the right to trace; `None` if this user cannot.
fn without_tracing() -> Option<[&'static str; 4]> {
    let words = ["--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"];
    if !Command::new("setpriv").args(words).arg("true").status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: this user has no CAP_SYS_PTRACE to run without");
        return None;
    }
    Some(words)
}

#[test]
fn a_sterna_without_the_right_to_trace_is_refused_and_auto_uses_the_stream() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let Some(words) = without_tracing() else { return };
    let receiver = receiver(&pair, &[]);
    let send = |mode: &str| {
        let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
        let mut command = send_by(mode, qmp, &receiver.address(), &state, &json);
        command.args(["--insecure", "--downtime", LONG_STOP]);
        let (status, lines) = Sterna::start("send", &mut by_setpriv(&words, &command)).finish_with_lines();
        (status.code(), lines)
    };
    refused_and_streamed(&pair, send, "CAP_SYS_PTRACE");
    settled(pair, receiver);
}

#[test]
fn a_destination_that_cannot_access_its_qemus_memory_refuses_direct_mode_and_accepts_the_stream() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let Some(words) = without_tracing() else { return };
    let before = pair.destination.migration_settings();
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", &mut by_setpriv(&words, command.arg("--insecure")));
    let send = |mode: &str| sent(&pair, mode, &receiver);
    let (code, lines) = send("direct");
    assert_eq!(code, PEER_REFUSED, "{lines:?}");
    receiver.wait_for("refused: ");
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
    assert_eq!(pair.destination.migration_settings(), before);
    refused_and_streamed(&pair, send, "not permitted to write the memory");
    settled(pair, receiver);
}

#[test]
fn a_sterna_of_another_user_than_qemus_is_refused_in_either_mode() {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: another user's sterna takes root to start");
    }
    let home = tempfile::tempdir().unwrap();
    chown(home.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    // A copy that the user may run, whichever user built the program.
    let program = home.path().join("sterna");
    std::fs::copy(env!("CARGO_BIN_EXE_sterna"), &program).unwrap();
    let mut options = boot_sector();
    options.qmp_path = Some(home.path().join("qmp.sock"));
    let Some(pair) = pair(&options, &boot_sector().incoming()) else { return };
    std::fs::set_permissions(pair.source.qemu.qmp_path(), Permissions::from_mode(0o666)).unwrap();
    let receiver = receiver(&pair, &[]);
    let user = NOBODY.to_string();
    let words = ["--reuid", &user, "--regid", &user, "--clear-groups"];
    let send = |mode: &str| {
        let (state, json) = (home.path().join("state"), home.path().join(format!("{mode}.json")));
        let command = send_by(mode, pair.source.qemu.qmp_path(), &receiver.address(), &state, &json);
        let mut other = Command::new("setpriv");
        other.args(words).arg(&program).args(command.get_args()).args(["--insecure", "--downtime", LONG_STOP]);
        other.env("HOME", home.path()).env("TMPDIR", home.path()).current_dir(home.path());
        let (status, lines) = Sterna::start("send", &mut other).finish_with_lines();
        (status.code(), lines)
    };
    let (code, lines) = send("direct");
    assert_eq!(code, NOT_PERMITTED, "{lines:?}");
    let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    assert!(message.contains("run as root") && message.contains("not touched"), "{message}");
    // QEMU's stream needs sockets that QEMU can open.
    let (code, lines) = send("auto");
    assert_eq!(code, REFUSED, "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("mode: stream") && line.contains("run as root")), "{lines:?}");
    let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    assert!(message.contains("run this as root or as that user") && message.contains("not touched"), "{message}");
    assert_eq!(pair.source.untouched(), Ok(()));
    assert_eq!(pair.source.monitor.status().unwrap(), "running");
    drop(receiver);
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

/// Makes the kernel answer `PAGEMAP_SCAN` of `command` as one older than Linux 6.7 does, which lacks this operation.
fn on_an_older_kernel(command: &mut Command) {
    const PAGEMAP_SCAN: u32 = 0xc060_6610;
    // `struct seccomp_data`: the number of the call, and the lower half of its second argument.
    const NUMBER: u32 = 0;
    const OPERATION: u32 = 24;
    let statement = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |offset| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0);
    let unless = |value, skip| statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, 0, skip);
    let answer = |answer| statement(libc::BPF_RET | libc::BPF_K, answer, 0, 0);
    let filter = [
        load(NUMBER),
        unless(libc::SYS_ioctl as u32, 3),
        load(OPERATION),
        unless(PAGEMAP_SCAN, 1),
        answer(libc::SECCOMP_RET_ERRNO | libc::ENOTTY as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: only system calls, with a program that lives until the end; nothing is allocated between fork and
        // exec.
        let installed = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        };
        if installed { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: see there.
    unsafe { command.pre_exec(install) };
}

#[test]
fn a_kernel_that_is_too_old_is_named_and_auto_uses_the_stream() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let receiver = receiver(&pair, &[]);
    let send = |mode: &str| {
        let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
        let mut command = send_by(mode, qmp, &receiver.address(), &state, &json);
        on_an_older_kernel(command.args(["--insecure", "--downtime", LONG_STOP]));
        let (status, lines) = Sterna::start("send", &mut command).finish_with_lines();
        (status.code(), lines)
    };
    refused_and_streamed(&pair, send, "Linux 6.7");
    settled(pair, receiver);
}

/// Registers a QEMU's RAM with a userfaultfd that is not Sterna's, until the returned value is dropped.
fn watched_by_another(qemu: &Qemu) -> WriteProtectLog {
    let pid = qemu.pid() as i32;
    let taken = take_userfault(&Process::open(pid).unwrap(), UserfaultOrigin::SystemCall).unwrap();
    let userfault = Userfault::from_descriptor(taken.descriptor, WriteProtectLog::FEATURES).unwrap();
    let ram = Ram::open(qemu.pid(), qemu.memory()).unwrap();
    let addresses = ram.address() as usize..(ram.address() + ram.len()) as usize;
    let block =
        MappedBlock { pages: ram.len() / PAGE_SIZE as u64, parts: vec![MappedPart { addresses, first_page: 0 }] };
    let process = Arc::new(TargetProcess::open(pid).unwrap());
    let mut log = WriteProtectLog::of_process(process, userfault, vec![block]).unwrap();
    log.start().unwrap();
    log
}

#[test]
fn memory_that_another_userfaultfd_watches_is_refused_and_auto_uses_the_stream() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let other = watched_by_another(&pair.source.qemu);
    refused(&pair, &["another userfaultfd", "not touched"]);
    let receiver = receiver(&pair, &[]);
    falls_back(pair, receiver, "another userfaultfd");
    drop(other);
}

/// Returns a machine with a disk of its own in `image`, which its QEMU locks as long as the guest may write it.
fn with_disk(image: &tempfile::NamedTempFile) -> QemuOptions {
    image.as_file().set_len(1 << 20).unwrap();
    let drive = format!("file={},format=raw,if=none,id=own", image.path().display());
    let words = ["-drive", &drive, "-device", "virtio-blk-pci,drive=own"];
    QemuOptions { extra: words.map(str::to_owned).into(), ..boot_sector() }
}

/// Returns a pair of which each side has a disk of its own, with the images of both.
fn pair_with_disks() -> Option<(Pair, [tempfile::NamedTempFile; 2])> {
    let images = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
    Some((pair(&with_disk(&images[0]), &with_disk(&images[1]).incoming())?, images))
}

/// Lets a guest move to another disk.
const OTHER_DISK: [&str; 2] = ["--allow-difference", "disk"];

/// Makes this process use an image, until the returned value is dropped.
fn in_use(image: &tempfile::NamedTempFile) -> File {
    let image = image.reopen().unwrap();
    // QEMU locks single bytes of the file (raw_check_lock_bytes in block/file-posix.c); this lock covers all of it.
    fcntl_lock(&image, FlockOperation::NonBlockingLockShared).unwrap();
    image
}

#[test]
fn a_disk_that_the_destinations_qemu_cannot_lock_leaves_the_guest_at_the_source() {
    let Some((pair, [_other, image])) = pair_with_disks() else { return };
    let used = in_use(&image);
    let receiver = receiver(&pair, &[]);
    let (code, lines) = sent_with(&pair, "direct", &receiver, &OTHER_DISK);
    assert_eq!(code, FAILED, "{lines:?}");
    let reason = report(&pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("cannot use the disks") && reason.contains("lock"), "{reason}");
    assert_eq!(receiver.finish().0.code(), FAILED);
    drop(used);
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_source_waits_for_a_disk_that_another_process_has_locked_meanwhile() {
    let Some((pair, [image, _other])) = pair_with_disks() else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let hold = Hold::at("destination.before-record-prepared", pair.scratch.path(), command.arg("--insecure"));
    let receiver = Sterna::start("receive", &mut command);
    let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
    let mut command = send_by("direct", qmp, &receiver.address(), &state, &json);
    command.args(["--insecure", "--downtime", LONG_STOP, "--log", "warn"]).args(OTHER_DISK);
    let sender = Sterna::start("send", &mut command);
    let reached = hold.reached(&receiver);
    // The state of the devices has arrived, so the source has released the disk.
    let used = in_use(&image);
    sender.interrupt();
    sender.wait_for("another process uses a disk of the guest");
    assert!(!pair.source.runs());
    drop(used);
    assert_eq!(sender.finish().0.code(), CANCELLED);
    drop(reached);
    receiver.finish();
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn devices_whose_state_does_not_load_leave_the_guest_at_the_source() {
    let rng = |words: &str| ["-device".to_owned(), format!("virtio-rng-pci{words}")];
    let cases = [
        ("one device fewer", vec![rng(",id=one"), rng(",id=two")], vec![rng(",id=one")]),
        ("another number of interrupts", vec![rng(",vectors=2")], vec![rng(",vectors=3")]),
    ];
    for (what, at_source, at_destination) in cases {
        println!("{what}");
        let (mut source, mut destination) = (boot_sector(), boot_sector().incoming());
        source.extra.extend(at_source.into_iter().flatten());
        destination.extra.extend(at_destination.into_iter().flatten());
        let Some(mut pair) = pair(&source, &destination) else { return };
        let receiver = receiver(&pair, &[]);
        // Else the difference would be found before anything is begun.
        let (code, lines) = sent_with(&pair, "direct", &receiver, &["--allow-difference", "device"]);
        assert_eq!(code, FAILED, "{what}: {lines:?}");
        let reason = report(&pair.report())["reason"].as_str().unwrap().to_owned();
        // QEMU ends at once; its monitor may be seen to end before it is seen to have failed.
        let more = ["output", "its monitor does not answer"].iter().any(|words| reason.contains(words));
        assert!(reason.contains("load") && more, "{what}: {reason}");
        assert_eq!(receiver.finish().0.code(), FAILED, "{what}");
        pair.destination.qemu.wait_exit(LONG).unwrap();
        let migration = Migration { pair, sender: None, receiver: None };
        assert_eq!(migration.exactly_one(), Ok(Side::Source), "{what}");
    }
}

#[test]
fn a_device_that_is_plugged_in_during_the_move_ends_it_and_the_guest_runs_on() {
    let mut options = boot_sector();
    options.extra.extend(["-device".into(), "pcie-root-port,id=root".into()]);
    let device = json!({ "driver": "virtio-rng-pci", "id": "plugged", "bus": "root" });
    plugged_in(
        &options,
        &[("device_add", device)],
        ["a device was plugged in or out", "plugged, child<virtio-rng-pci>"],
    );
}

#[test]
fn a_qemu_that_ends_while_its_memory_is_tracked_ends_the_move_with_the_reason() {
    for victim in [Side::Source, Side::Destination] {
        let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
        let mut migration = Migration::start_by("direct", pair, SLOW, None, None);
        let (sender, receiver) = (migration.sender.take().unwrap(), migration.receiver.take().unwrap());
        sender.wait_for("placement: ");
        match victim {
            Side::Source => migration.pair.source.kill(),
            Side::Destination => migration.pair.destination.kill(),
        }
        let sent = sender.finish().0.code();
        receiver.finish();
        let report = report(&migration.pair.report());
        let reason = report["reason"].as_str().unwrap();
        println!("{victim:?}: {reason}");
        assert!(reason.contains("ended") || reason.contains("gone"), "{reason}");
        match victim {
            Side::Source => {
                assert_eq!((sent, report["outcome"].as_str()), (LOST, Some("lost")), "{reason}");
                assert!(!migration.pair.destination.runs(), "not all of the guest is there");
            }
            Side::Destination => {
                assert_eq!(sent, FAILED, "{reason}");
                assert_eq!(migration.exactly_one(), Ok(Side::Source));
            }
        }
    }
}

#[test]
fn a_destination_with_too_little_memory_in_its_control_group_leaves_the_guest_at_the_source() {
    let Some(mut pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    // The guest writes 100 MiB.
    let Some(group) = skip_if_unavailable(MemoryGroup::new(32 << 20)) else { return };
    group.add(pair.destination.qemu.pid()).unwrap();
    let receiver = receiver(&pair, &[]);
    let (code, lines) = sent(&pair, "direct", &receiver);
    assert_eq!(code, FAILED, "{lines:?}");
    let reason = report(&pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("the destination failed") && reason.contains("has ended"), "{reason}");
    assert_eq!(receiver.finish().0.code(), FAILED);
    pair.destination.qemu.wait_exit(LONG).unwrap();
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_destinations_qemu_that_could_not_begin_is_left_untouched() {
    let Some(pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
    let before = pair.destination.migration_settings();
    let waiting = receiver(&pair, &[]);
    waiting.address();
    // QEMU cannot receive the descriptor of its stream; its open ones are below the limit.
    let qemu = Pid::from_raw(pair.destination.qemu.pid() as i32);
    let open = format!("/proc/{}/fd", pair.destination.qemu.pid());
    let free = (0..).find(|number: &u64| !Path::new(&open).join(number.to_string()).is_symlink());
    let none = Rlimit { current: free, ..getrlimit(Resource::Nofile) };
    let limit = prlimit(qemu, Resource::Nofile, none).unwrap();
    let (code, lines) = sent(&pair, "direct", &waiting);
    assert_eq!(code, PEER_REFUSED, "{lines:?}");
    let message = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    assert!(message.contains("descriptor"), "{message}");
    waiting.wait_for("this QEMU was not touched");
    prlimit(qemu, Resource::Nofile, limit).unwrap();
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
    assert_eq!(pair.destination.migration_settings(), before);

    let (code, lines) = sent(&pair, "direct", &waiting);
    assert_eq!(code, Some(0), "{lines:?}");
    settled(pair, waiting);
}

#[test]
fn a_stalled_network_ends_a_direct_move_by_the_stall_limit() {
    for still in [Still::Data, Still::All] {
        println!("{still:?}");
        let Some(mut pair) = pair(&boot_sector(), &boot_sector().incoming()) else { return };
        // Less than the 10 s after which a silent connection ends the move for another reason.
        let receiver = receiver(&pair, &["--stall-limit", "5s"]);
        let (address, stands) = still_relay(&receiver.address(), still);
        let mut command =
            send_by("direct", pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
        command.args(["--insecure", "--stall-limit", "5s"]).args(SLOW);
        let sender = Sterna::start("send", &mut command);
        sender.wait_for("placement: ");
        stands.store(true, Ordering::Release);
        assert_eq!(sender.finish().0.code(), FAILED);
        let reason = report(&pair.report())["reason"].as_str().unwrap().to_owned();
        assert!(reason.contains("stall limit"), "{still:?}: {reason}");
        let (received, text) = receiver.finish();
        assert_eq!(received.code(), FAILED, "{still:?}: {text}");
        assert!(text.contains("stall limit"), "{still:?}: {text}");
        pair.destination.qemu.wait_exit(LONG).unwrap();
        let migration = Migration { pair, sender: None, receiver: None };
        assert_eq!(migration.exactly_one(), Ok(Side::Source), "{still:?}");
    }
}
