//! Migrations that run are shown and controlled by `sterna show`, `set`, `cancel`, `switch-over` and `post-copy`. The guest writes all of its
//! memory again and again over a slow network: nothing but a request ends the rounds.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Output;

use rustix::fs::Uid;
use serde_json::{Value, json};
use sterna_qemu_lab::QemuVersion;

use crate::support::pair::{Pair, eventually};
use crate::support::settle::{Migration, Side};
use crate::support::{CANCELLED, LONG, MODES, REFUSED, Sterna, report, sterna};

/// So slow that the guest writes more meanwhile than fits the target downtime.
const ENDLESS: [&str; 6] = ["--bandwidth", "20MB/s", "--method", "none", "--downtime", "60ms"];

/// A migration in its rounds, which do not end.
fn in_rounds(mode: &str, words: &[&str]) -> Option<Migration> {
    let pair = Pair::boot_sector(QemuVersion::V10_0)?;
    let migration = Migration::start_by(mode, pair, &[&ENDLESS, words].concat(), None, None);
    migration.sender.as_ref().unwrap().wait_for("sending memory, round ");
    Some(migration)
}

fn control(state: &Path, words: &[&str]) -> Output {
    sterna().args(words).arg("--state-dir").arg(state).output().unwrap()
}

/// Runs a command that must succeed, and returns its output.
#[track_caller]
fn accepted(state: &Path, words: &[&str]) -> String {
    let output = control(state, words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that must be refused, and returns the reason.
#[track_caller]
fn refused(state: &Path, words: &[&str]) -> String {
    let output = control(state, words);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), text.lines().count()), (REFUSED, 1), "{words:?}: {text}");
    text
}

fn shown(state: &Path) -> Value {
    serde_json::from_str(&accepted(state, &["show", "--json"])).unwrap()
}

/// Waits for both ends of a migration that completes, and checks its guest. Returns the report.
fn completes(mut migration: Migration) -> Value {
    let (sent, text) = migration.sender.take().unwrap().finish();
    let (received, _) = migration.receiver.take().unwrap().finish();
    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}: {text}");
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    for state in [migration.pair.source_state(), migration.pair.destination_state()] {
        assert_eq!(shown(&state), json!([]));
        assert!(sockets(&state).is_empty(), "the sockets end with their processes");
    }
    report(&migration.pair.report())
}

fn sockets(state: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(state).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|ending| ending == "control")).collect()
}

#[test]
fn a_migration_is_shown_its_limits_are_set_and_its_guest_is_paused_by_request() {
    for mode in MODES {
        println!("by {mode}");
        let Some(migration) = in_rounds(mode, &[]) else { return };
        let (sender, pair) = (migration.sender.as_ref().unwrap(), &migration.pair);
        let (state, id) = (pair.source_state(), sender.migration());
        for (state, side, process) in [
            (&state, "source", sender.pid()),
            (&pair.destination_state(), "destination", migration.receiver.as_ref().unwrap().pid()),
        ] {
            let shown = shown(state);
            let [row] = shown.as_array().unwrap().as_slice() else { panic!("{shown}") };
            assert_eq!(
                (&row["id"], &row["side"], &row["process"]),
                (&json!(id), &json!(side), &json!(process)),
                "{row}"
            );
        }
        assert_eq!(shown(&state)[0]["progress"]["phase"], "rounds");
        let listed: Value = serde_json::from_str(&accepted(&state, &["list", "--json"])).unwrap();
        assert_eq!(listed[0]["running"]["progress"]["phase"], "rounds", "{listed}");
        let text = accepted(&state, &["show", &id[..6]]);
        assert!(text.contains(&id) && text.contains("sending memory, round "), "{text}");

        // By the QMP socket; the destination has no limits.
        let qmp = pair.source.qmp_path.to_str().unwrap().to_owned();
        accepted(&state, &["set", &qmp, "--bandwidth", "30MB/s", "--downtime", "70ms"]);
        let text = refused(&pair.destination_state(), &["set", "--bandwidth", "none"]);
        assert!(text.contains("this is the destination"), "{text}");
        let text = refused(&state, &["post-copy"]);
        assert!(text.contains("post-copy was not agreed on"), "{text}");
        let text = refused(&state, &["cancel", "nothing"]);
        assert!(text.contains("no running migration is named 'nothing'"), "{text}");
        assert_eq!(sender.count("stopping the guest"), 0);

        accepted(&state, &["switch-over", &id]);
        completes(migration);
    }
}

#[test]
fn rounds_that_do_not_end_at_a_limit_end_once_it_is_lifted() {
    for mode in MODES {
        println!("by {mode}");
        let Some(migration) = in_rounds(mode, &[]) else { return };
        let state = migration.pair.source_state();
        accepted(&state, &["set", "--bandwidth", "none", "--downtime", "10s"]);
        completes(migration);
    }
}

#[test]
fn a_migration_that_is_cancelled_by_request_of_either_side_leaves_the_guest_at_the_source() {
    for mode in MODES {
        for side in [Side::Source, Side::Destination] {
            println!("by {mode}, {side:?}");
            let Some(mut migration) = in_rounds(mode, &[]) else { return };
            let state = match side {
                Side::Source => migration.pair.source_state(),
                Side::Destination => migration.pair.destination_state(),
            };
            let answer: Value = serde_json::from_str(&accepted(&state, &["cancel", "--json"])).unwrap();
            assert_eq!(answer, json!({ "version": 1, "outcome": "accepted" }));
            let codes =
                [migration.sender.take(), migration.receiver.take()].map(|side| side.unwrap().finish().0.code());
            let cancelled = if side == Side::Source { codes[0] } else { codes[1] };
            assert_eq!(cancelled, CANCELLED, "{codes:?}");
            assert_eq!(migration.exactly_one(), Ok(Side::Source));
        }
    }
}

#[test]
fn a_guest_goes_on_at_the_destination_by_request_where_post_copy_was_agreed_on() {
    let Some(migration) = in_rounds("direct", &["--on-no-convergence", "post-copy:1000000"]) else { return };
    accepted(&migration.pair.source_state(), &["post-copy"]);
    let report = completes(migration);
    assert!(!report["post_copy"].is_null(), "{report}");
}

/// Sends `line` to the socket, and returns the answer; none if the connection is closed without one.
fn raw(socket: &Path, line: &[u8]) -> Option<Value> {
    let stream = UnixStream::connect(socket).unwrap();
    // The process may close the connection before it has read all of it.
    let _ = (&stream).write_all(line).and_then(|()| (&stream).write_all(b"\n"));
    let mut answer = String::new();
    let _ = BufReader::new(&stream).read_line(&mut answer);
    serde_json::from_str(&answer).ok()
}

#[test]
fn garbage_long_lines_silence_and_other_users_do_not_disturb_a_migration() {
    let Some(migration) = in_rounds("direct", &[]) else { return };
    let state = migration.pair.source_state();
    let sockets = sockets(&state);
    let [socket] = sockets.as_slice() else { panic!("{sockets:?}") };
    for line in
        [&b"garbage"[..], b"", b"[]", b"{}", br#"{"version":1}"#, br#"{"version":1,"command":"format"}"#, &[0xff; 64]]
    {
        let answer = raw(socket, line).expect("an answer");
        assert_eq!(answer["outcome"], "refused", "{answer}");
    }
    let answer = raw(socket, br#"{"version":2,"command":"cancel"}"#).unwrap();
    assert!(answer["reason"].as_str().unwrap().contains("version 1"), "{answer}");
    // Of a line of 1 MiB only the first few KiB are read.
    raw(socket, &vec![b'x'; 1 << 20]);
    let silent: Vec<_> = (0..3).map(|_| UnixStream::connect(socket).unwrap()).collect();
    assert_eq!(shown(&state)[0]["progress"]["phase"], "rounds", "after silent clients have had their second");
    drop(silent);

    // No other user may connect; and where the file's mode is not in the way, the process refuses.
    assert_eq!(std::fs::metadata(socket).unwrap().permissions().mode() & 0o777, 0o600);
    if rustix::process::geteuid().is_root() {
        for (path, mode) in [(migration.pair.scratch.path(), 0o755), (&state, 0o755), (socket.as_path(), 0o666)] {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        }
        let nobody = Uid::from_raw(65534);
        let answer = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                // Of this thread only.
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
                raw(socket, br#"{"version":1,"command":"cancel"}"#)
            });
            other.join().unwrap()
        });
        let answer = answer.expect("an answer");
        assert!(answer["reason"].as_str().unwrap().contains("only root"), "{answer}");
    }
    assert_eq!(shown(&state)[0]["progress"]["phase"], "rounds");
    accepted(&state, &["switch-over"]);
    completes(migration);
}

#[test]
fn the_socket_of_a_process_that_was_killed_is_removed_and_one_that_is_in_use_is_not() {
    let Some(mut migration) = in_rounds("stream", &[]) else { return };
    let (state, destination) = (migration.pair.source_state(), migration.pair.destination_state());
    let mut killed: Sterna = migration.sender.take().unwrap();
    killed.kill();
    assert_eq!(sockets(&state).len(), 1);
    assert_eq!(shown(&state), json!([]));
    assert!(sockets(&state).is_empty());
    // A socket of another program: it does not answer, and stays.
    let other = state.join("1.control");
    let listener = UnixListener::bind(&other).unwrap();
    let closing = std::thread::spawn(move || drop(listener.accept()));
    assert_eq!(shown(&state), json!([]));
    closing.join().unwrap();
    assert!(eventually(LONG, || sockets(&destination).is_empty()), "the receiver ends without its source");
    migration.settle().unwrap();
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}
