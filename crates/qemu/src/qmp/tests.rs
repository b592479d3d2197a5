//! The client against a server in this process that behaves like QEMU (texts from 7.2 and 10.0), and against servers
//! that do not.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::mpsc;

use super::*;

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2+dfsg-7"}, "capabilities": ["oob"]}}"#;

/// One client of the fake monitor.
struct Peer {
    lines: BufReader<UnixStream>,
    stream: UnixStream,
}

impl Peer {
    fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
        self.stream.write_all(b"\r\n").unwrap();
    }

    /// Returns the next command, and its id.
    fn command(&mut self) -> (Value, u64) {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        let command: Value = serde_json::from_str(&line).unwrap();
        let id = command["id"].as_u64().unwrap();
        (command, id)
    }

    fn greet(&mut self) {
        self.send(GREETING);
        let (command, id) = self.command();
        assert_eq!(command["execute"], "qmp_capabilities");
        self.send(&format!(r#"{{"return": {{}}, "id": {id}}}"#));
    }
}

/// Starts a monitor that accepts one client and serves it by `script`.
fn monitor(script: impl FnOnce(Peer) + Send + 'static) -> (tempfile::TempDir, PathBuf, JoinHandle<()>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        script(Peer { lines: BufReader::new(stream.try_clone().unwrap()), stream });
    });
    (directory, path, server)
}

/// A deadline that no correct test reaches.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(300)
}

#[test]
fn greeting_names_version_and_peer() {
    let (_directory, path, server) = monitor(|mut peer| peer.greet());
    let qmp = Qmp::connect(&path).unwrap();
    assert!(qmp.version().at_least(7, 2) && !qmp.version().at_least(8, 0));
    assert_eq!(qmp.version().to_string(), "7.2.22");
    assert_eq!(qmp.version().package, "Debian 1:7.2+dfsg-7");
    assert_eq!(qmp.peer_pid(), Some(std::process::id() as i32));
    server.join().unwrap();
}

#[test]
fn answers_find_their_command_in_any_order_and_events_in_between_are_kept() {
    let (_directory, path, server) = monitor(|mut peer| {
        peer.greet();
        let (first, first_id) = peer.command();
        let (_, second_id) = peer.command();
        peer.send(r#"{"timestamp": {"seconds": 1700000000, "microseconds": 250}, "event": "MIGRATION", "data": {"status": "setup"}}"#);
        peer.send(&format!(r#"{{"id": {second_id}, "return": {{"n": {second_id}}}}}"#));
        peer.send(r#"{"timestamp": {"seconds": -1, "microseconds": -1}, "event": "STOP"}"#);
        // An answer without a command.
        peer.send(r#"{"id": 4711, "return": {}}"#);
        peer.send(&format!(r#"{{"id": {first_id}, "return": {{"n": {first_id}}}}}"#));
        peer.send(r#"{"timestamp": {"seconds": 1700000001, "microseconds": 0}, "event": "MIGRATION", "data": {"status": "active", "new": 1}}"#);
        // The same id twice must not confuse a later command.
        peer.send(&format!(r#"{{"id": {first_id}, "return": {{"n": 0}}}}"#));
        assert!(first["arguments"].is_null(), "empty arguments are not sent");
        let (third, third_id) = peer.command();
        assert_eq!(third["arguments"]["size"], 5);
        peer.send(&format!(r#"{{"id": {third_id}, "return": {{"n": {third_id}}}}}"#));
    });
    let qmp = Qmp::connect(&path).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let answer = qmp.execute("query-status", json!({})).unwrap();
                assert!([2, 3].contains(&answer["n"].as_u64().unwrap()));
            });
        }
    });
    let active = qmp.wait_event("MIGRATION", |data| data["status"] == "active", soon());
    assert_eq!(active.unwrap().unwrap().time_us, Some(1_700_000_001_000_000));
    assert_eq!(qmp.execute("set", json!({ "size": 5 })).unwrap()["n"], 4);
    let setup = qmp.next_event(soon()).unwrap().unwrap();
    assert_eq!(setup.data["status"], "setup");
    assert_eq!(setup.time_us, Some(1_700_000_000_000_250));
    let stop = qmp.next_event(soon()).unwrap().unwrap();
    assert_eq!((stop.name.as_str(), stop.data, stop.time_us), ("STOP", Value::Null, None));
    server.join().unwrap();
}

#[test]
fn one_thread_waits_for_an_event_while_another_executes() {
    let (_directory, path, server) = monitor(|mut peer| {
        peer.greet();
        let (_, id) = peer.command();
        peer.send(&format!(r#"{{"id": {id}, "return": {{}}}}"#));
        peer.send(r#"{"timestamp": {"seconds": 1, "microseconds": 0}, "event": "RESUME"}"#);
    });
    let qmp = Qmp::connect(&path).unwrap();
    let waiter = qmp.clone();
    let waiting = std::thread::spawn(move || waiter.wait_event("RESUME", |_| true, soon()));
    qmp.execute("cont", json!({})).unwrap();
    assert_eq!(waiting.join().unwrap().unwrap().unwrap().name, "RESUME");
    server.join().unwrap();
}

#[test]
fn passed_deadline_is_none_and_not_an_error() {
    let (done, wait) = mpsc::channel::<()>();
    let (_directory, path, server) = monitor(move |mut peer| {
        peer.greet();
        let _ = wait.recv();
    });
    let qmp = Qmp::connect(&path).unwrap();
    assert_eq!(qmp.next_event(Instant::now()).unwrap(), None);
    drop(done);
    server.join().unwrap();
}

#[test]
fn a_refusal_contains_qemus_text() {
    let (_directory, path, server) = monitor(|mut peer| {
        peer.greet();
        let (_, id) = peer.command();
        peer.send(&format!(
            r#"{{"id": {id}, "error": {{"class": "CommandNotFound", "desc": "The command foo has not been found"}}}}"#
        ));
    });
    let qmp = Qmp::connect(&path).unwrap();
    let error = qmp.execute("foo", json!({})).unwrap_err();
    assert_eq!(error.to_string(), "QEMU refused foo: The command foo has not been found");
    server.join().unwrap();
}

#[test]
fn no_answer_is_a_timeout_and_a_late_answer_is_dropped() {
    let (late, send_late) = mpsc::channel::<()>();
    let (_directory, path, server) = monitor(move |mut peer| {
        peer.greet();
        let (_, slow) = peer.command();
        send_late.recv().unwrap();
        peer.send(&format!(r#"{{"id": {slow}, "return": {{"late": true}}}}"#));
        let (_, id) = peer.command();
        peer.send(&format!(r#"{{"id": {id}, "return": {{"late": false}}}}"#));
    });
    let qmp = Qmp::connect(&path).unwrap();
    let error = qmp.execute_within("stop", json!({}), Duration::from_millis(20)).unwrap_err();
    assert!(matches!(&error, QmpError::Timeout { command, .. } if command == "stop"), "{error}");
    late.send(()).unwrap();
    assert_eq!(qmp.execute("cont", json!({})).unwrap()["late"], false);
    assert!(qmp.connection.shared.lock().pending.is_empty());
    server.join().unwrap();
}

#[test]
fn the_answer_to_a_command_is_waited_for_again_and_is_not_that_of_another_one() {
    let (late, send_late) = mpsc::channel::<()>();
    let (_directory, path, server) = monitor(move |mut peer| {
        peer.greet();
        let (_, slow) = peer.command();
        let (_, other) = peer.command();
        peer.send(&format!(r#"{{"id": {other}, "return": {{"n": 2}}}}"#));
        send_late.recv().unwrap();
        peer.send(r#"{"event": "STOP"}"#);
        peer.send(r#"{"event": "JOB_STATUS_CHANGE"}"#);
        peer.send(r#"{"event": "RESUME"}"#);
        peer.send(&format!(r#"{{"id": {slow}, "return": {{"n": 1}}}}"#));
        // One whose answer nobody waits for.
        let (_, dropped) = peer.command();
        peer.send(&format!(r#"{{"id": {dropped}, "return": {{"n": 3}}}}"#));
        let (_, last) = peer.command();
        peer.send(&format!(r#"{{"id": {last}, "return": {{"n": 4}}}}"#));
    });
    let qmp = Qmp::connect(&path).unwrap();
    let mut slow = qmp.begin("cont", json!({})).unwrap();
    assert_eq!(slow.wait(Instant::now()).unwrap(), None);
    assert_eq!(qmp.execute("query-status", json!({})).unwrap()["n"], 2);
    assert_eq!(slow.wait(Instant::now()).unwrap(), None);
    late.send(()).unwrap();
    assert_eq!(slow.wait(soon()).unwrap().unwrap()["n"], 1);
    let names = qmp.take_events(&["RESUME", "STOP"]).into_iter().map(|event| event.name);
    assert_eq!(names.collect::<Vec<_>>(), ["STOP", "RESUME"]);
    assert_eq!(qmp.next_event(soon()).unwrap().unwrap().name, "JOB_STATUS_CHANGE");
    drop(qmp.begin("quit", json!({})).unwrap());
    assert_eq!(qmp.execute("query-status", json!({})).unwrap()["n"], 4);
    drop(slow);
    assert!(qmp.connection.shared.lock().pending.is_empty());
    server.join().unwrap();
}

#[test]
fn monitor_with_another_client_is_named_busy() {
    // Like QEMU: the connection stays in the listener's queue and is not accepted.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = Qmp::connect_within(&path, Duration::from_millis(50)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("QMP socket busy: another client is connected") && text.contains("give Sterna its own -qmp"),
        "{text}"
    );
}

#[test]
fn full_queue_of_a_busy_monitor_does_not_hang() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _in_queue = UnixStream::connect(&path).unwrap();
    let error = Qmp::connect_within(&path, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, QmpError::Busy { .. }), "{error}");
}

#[test]
fn a_missing_socket_is_an_error_that_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let error = Qmp::connect(&missing).unwrap_err().to_string();
    assert!(error.contains("-qmp unix:PATH,server=on,wait=off"), "{error}");
    let left = directory.path().join("left-behind");
    drop(UnixListener::bind(&left).unwrap());
    let error = Qmp::connect(&left).unwrap_err().to_string();
    assert!(error.contains("no process listens"), "{error}");
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = Qmp::connect(&file).unwrap_err().to_string();
    assert!(error.contains("this is no socket") && !error.contains("has ended"), "{error}");
}

#[test]
fn a_peer_that_does_not_speak_qmp_is_refused() {
    let long = format!("\"{}", "x".repeat(input::MAX_MESSAGE));
    let cases: [(&str, &str); 7] = [
        ("SSH-2.0-OpenSSH_9.2", "not JSON"),
        ("[1, 2]", "other than an object"),
        (&long, "a message of more than 16777216 bytes"),
        ("{\"QMP\": {\"version\": 3}}", "no QEMU version"),
        ("{\"QMP\"", "in the middle of a message"),
        ("{\"QMP\"}", "not JSON"),
        ("", "QEMU closed it"),
    ];
    for (text, expected) in cases {
        let text = text.to_owned();
        let (_directory, path, server) = monitor(move |mut peer| {
            // The client may hang up before it has read all.
            let _ = peer.stream.write_all(text.as_bytes());
            let _ = peer.stream.write_all(b"\n");
        });
        let error = Qmp::connect(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        server.join().unwrap();
    }
}

#[test]
fn a_qemu_that_ends_fails_commands_and_waits_but_its_events_stay() {
    let (_directory, path, server) = monitor(|mut peer| {
        peer.greet();
        peer.command();
        peer.send(r#"{"timestamp": {"seconds": 1, "microseconds": 0}, "event": "SHUTDOWN"}"#);
        peer.stream.write_all(br#"{"return"#).unwrap();
    });
    let qmp = Qmp::connect(&path).unwrap();
    let error = qmp.execute("stop", json!({})).unwrap_err().to_string();
    assert!(error.contains("in the middle of a message"), "{error}");
    assert_eq!(qmp.next_event(soon()).unwrap().unwrap().name, "SHUTDOWN");
    assert!(matches!(qmp.next_event(soon()), Err(QmpError::Closed { .. })));
    assert!(matches!(qmp.execute("cont", json!({})), Err(QmpError::Closed { .. })));
    server.join().unwrap();
}

#[test]
fn an_event_that_is_too_long_is_dropped_and_the_next_is_kept() {
    let (_directory, path, server) = monitor(|mut peer| {
        peer.greet();
        peer.send(&format!(r#"{{"event": "MIGRATION", "data": {{"status": "{}"}}}}"#, "x".repeat(MAX_EVENT_BYTES)));
        peer.send(r#"{"event": "STOP"}"#);
        // Until the other side has read everything.
        let _ = peer.lines.read_line(&mut String::new());
    });
    let qmp = Qmp::connect(&path).unwrap();
    assert_eq!(qmp.next_event(soon()).unwrap().unwrap().name, "STOP");
    drop(qmp);
    server.join().unwrap();
}

#[test]
fn queue_of_unread_events_is_bounded_and_keeps_the_newest() {
    let mut state = State::default();
    for n in 0..MAX_EVENTS + 3 {
        state.dispatch(json!({ "event": "E", "data": n }));
    }
    assert_eq!(state.events.len(), MAX_EVENTS);
    assert_eq!(state.events.front().unwrap().data, 3);
}

#[test]
fn migration_info_reads_what_is_there() {
    let info = MigrationInfo::from_json(&json!({}));
    assert_eq!(info.status, "none");
    assert!(!info.is_active() && info.ram.is_none() && !info.listening);

    let info = MigrationInfo::from_json(&json!({
        "status": "active", "total-time": 12, "setup-time": 3, "expected-downtime": 300, "unknown": {"x": 1},
        "blocked-reasons": ["no way"],
        "ram": {"transferred": 1000, "remaining": 2000, "total": 4096, "dirty-pages-rate": 7, "dirty-sync-count": 2,
                "mbps": 268.5, "duplicate": 9, "normal": "not a number", "page-size": 4096}
    }));
    assert!(info.is_active());
    assert_eq!(info.expected_downtime_ms, Some(300));
    assert_eq!(info.blocked_reasons, ["no way"]);
    let ram = info.ram.unwrap();
    assert_eq!((ram.remaining, ram.dirty_pages_rate, ram.zero_pages, ram.normal_pages), (2000, 7, 9, 0));
}

#[test]
fn the_end_of_a_guest_is_kept_until_the_guest_goes_on_however_the_connection_ends_and_whoever_takes_the_events() {
    let (go_on, gone_on) = mpsc::channel();
    let (_directory, path, server) = monitor(move |mut peer| {
        peer.greet();
        let shutdown = r#"{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-shutdown"}}"#;
        for events in [[shutdown, r#"{"event": "STOP"}"#], [r#"{"event": "RESET"}"#, r#"{"event": "STOP"}"#]] {
            let (_, id) = peer.command();
            events.iter().for_each(|event| peer.send(event));
            peer.send(&format!(r#"{{"return": {{"status": "shutdown"}}, "id": {id}}}"#));
        }
        gone_on.recv().unwrap();
        peer.send(r#"{"event": "GUEST_PANICKED", "data": {"action": "poweroff"}}"#);
    });
    let qmp = Qmp::connect(&path).unwrap();
    for end in [Some(GuestEnd::ShutDown), None] {
        qmp.status().unwrap();
        while qmp.next_event(Instant::now()).unwrap().is_some() {}
        assert_eq!(qmp.guest_end(), end);
    }
    go_on.send(()).unwrap();
    server.join().unwrap();
    // The first command notices that the connection is closed, perhaps before the last event was read.
    assert!(matches!(qmp.status(), Err(QmpError::Closed { .. })));
    assert_eq!(qmp.guest_end(), Some(GuestEnd::Panicked));
}
