//! Migrations between two real QEMUs by the real program, for the end-to-end tests.
#![allow(dead_code, reason = "each test file uses its own part of this")]

pub(crate) mod forwarder;
pub(crate) mod moving;
pub(crate) mod pair;
pub(crate) mod relay;
pub(crate) mod settle;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;
use sterna_qemu_lab::{Guest, LinuxGuest, QemuOptions, QemuVersion};

/// The exit codes of docs/operating.md that tests of several subjects expect.
pub(crate) const FAILED: Option<i32> = Some(1);
pub(crate) const CANCELLED: Option<i32> = Some(3);
pub(crate) const UNCONFIRMED: Option<i32> = Some(4);
pub(crate) const LOST: Option<i32> = Some(5);
pub(crate) const REFUSED: Option<i32> = Some(6);
pub(crate) const UNREACHABLE: Option<i32> = Some(7);
pub(crate) const PEER_REFUSED: Option<i32> = Some(8);
pub(crate) const NOT_PERMITTED: Option<i32> = Some(9);
pub(crate) const DOES_NOT_RUN: Option<i32> = Some(11);

/// Whether an exit code says that nothing was touched.
pub(crate) fn nothing_was_touched(code: Option<i32>) -> bool {
    [REFUSED, UNREACHABLE, PEER_REFUSED, NOT_PERMITTED].contains(&code)
}

/// Time limit of each step of a test, which no correct test reaches: not where ten times as many programs run as the machine has CPUs.
pub(crate) const LONG: Duration = Duration::from_secs(300);

/// An address at which no process listens: no system assigns this port to a socket that asks for any.
pub(crate) const NOWHERE: &str = "127.0.0.1:1";

/// The milliseconds for which `receive` watches a guest that it has started, in the environment.
pub(crate) const FIRST_MOMENT: &str = "STERNA_FIRST_MOMENT";

/// The program under test. It watches no guest for long: a guest that does not run is watched for as long as a test chooses.
pub(crate) fn sterna() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.env(FIRST_MOMENT, "10");
    command
}

/// A running sterna process. Its lines of standard error are kept and printed. It is killed when this is dropped.
pub(crate) struct Sterna {
    child: Child,
    errors: Arc<Lines>,
    reader: Option<JoinHandle<()>>,
    output: Option<JoinHandle<String>>,
}

/// The lines so far, and whether the process has ended.
#[derive(Default)]
struct Lines {
    lines: Mutex<(Vec<String>, bool)>,
    more: Condvar,
}

impl Sterna {
    /// Starts `command`. `name` precedes its lines in the test's output.
    pub(crate) fn start(name: &'static str, command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let errors = Arc::new(Lines::default());
        let (lines, received) = (BufReader::new(child.stderr.take().unwrap()).lines(), Arc::clone(&errors));
        let reader = std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                eprintln!("{name}: {line}");
                received.lines.lock().unwrap().0.push(line);
                received.more.notify_all();
            }
            received.lines.lock().unwrap().1 = true;
            received.more.notify_all();
        });
        let stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        let output = std::thread::spawn(move || {
            let mut output = String::new();
            for line in stdout.map_while(Result::ok) {
                eprintln!("{name}: {line}");
                output.push_str(&line);
                output.push('\n');
            }
            output
        });
        Self { child, errors, reader: Some(reader), output: Some(output) }
    }

    /// Waits for a line that contains `text`, and returns it.
    pub(crate) fn wait_for(&self, text: &str) -> String {
        self.wait_until(text, |lines| lines.iter().find(|line| line.contains(text)).cloned())
    }

    /// Waits until `find` returns a value for the lines so far, and returns it. `what` describes the value.
    pub(crate) fn wait_until<T>(&self, what: &str, find: impl Fn(&[String]) -> Option<T>) -> T {
        let mut lines = self.errors.lines.lock().unwrap();
        loop {
            if let Some(found) = find(&lines.0) {
                return found;
            }
            assert!(!lines.1, "sterna ended without printing {what:?}");
            let timeout;
            (lines, timeout) = self.errors.more.wait_timeout(lines, LONG).unwrap();
            assert!(!timeout.timed_out(), "sterna does not print {what:?}");
        }
    }

    /// Returns how many lines so far contain `text`.
    pub(crate) fn count(&self, text: &str) -> usize {
        self.errors.lines.lock().unwrap().0.iter().filter(|line| line.contains(text)).count()
    }

    /// Returns the address on which `sterna receive` listens.
    pub(crate) fn address(&self) -> String {
        self.wait_for("listening on ").rsplit_once("listening on ").unwrap().1.to_owned()
    }

    /// Waits for its end, and returns its standard output.
    pub(crate) fn finish(mut self) -> (ExitStatus, String) {
        // A test whose program does not end is named by this, and not by the limit of the test.
        assert!(pair::eventually(LONG, || self.poll().is_some()), "sterna does not end");
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        (status, self.output.take().unwrap().join().unwrap())
    }

    /// Waits for its end, and returns the lines of standard error.
    pub(crate) fn finish_with_lines(self) -> (ExitStatus, Vec<String>) {
        let errors = Arc::clone(&self.errors);
        let (status, _) = self.finish();
        let lines = errors.lines.lock().unwrap().0.clone();
        (status, lines)
    }

    /// Kills it, as a crash would.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Cancels it, as Ctrl-C does.
    pub(crate) fn interrupt(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        // It may have ended just now.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
    }

    /// Ends it, as systemd does.
    pub(crate) fn terminate(&self) {
        // It may have ended just now.
        let _ =
            rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), rustix::process::Signal::TERM);
    }

    /// Returns its exit status if it has ended.
    pub(crate) fn poll(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Returns the migration's id, which `sterna send` and `sterna receive` print.
    pub(crate) fn migration(&self) -> String {
        let line = self.wait_for("migration ");
        let rest = line.split_once("migration ").unwrap().1;
        rest.split([' ', ':']).next().unwrap().to_owned()
    }

    /// Returns its process number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Sterna {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns options for a Linux guest that dirties its memory all the time.
pub(crate) fn busy_guest(version: QemuVersion, machine: &str) -> QemuOptions {
    let linux = LinuxGuest { memory: Some(96 << 20), dirty_rate: 20 << 20, ..LinuxGuest::default() };
    let mut options = QemuOptions::new(version, Guest::Linux(linux));
    options.machine = machine.into();
    options
}

/// Returns the command `sterna receive` for the QEMU at `qmp`. A source that is lost before its decision is not waited for.
pub(crate) fn receive(qmp: &Path, state: &Path) -> Command {
    receive_waiting("0s", qmp, state)
}

/// Returns the command `sterna receive` for the QEMU at `qmp`, which waits so long for a source that is lost before its decision.
pub(crate) fn receive_waiting(retry: &str, qmp: &Path, state: &Path) -> Command {
    let mut command = sterna();
    command.args(["receive", "--listen", "127.0.0.1:0", "--retry", retry, "--qmp"]).arg(qmp);
    command.arg("--state-dir").arg(state);
    command
}

/// Both values of `--mode` that choose how a guest is moved.
pub(crate) const MODES: [&str; 2] = ["stream", "direct"];

/// Returns the command `sterna send` for the QEMU at `qmp`, by QEMU's migration stream, with its report in `json`.
pub(crate) fn send(qmp: &Path, to: &str, state: &Path, json: &Path) -> Command {
    send_by("stream", qmp, to, state, json)
}

/// Returns the command `sterna send --mode MODE` for the QEMU at `qmp`, with its report in `json`. A destination that is lost before the
/// decision is not dialled again.
pub(crate) fn send_by(mode: &str, qmp: &Path, to: &str, state: &Path, json: &Path) -> Command {
    send_retrying("0s", mode, qmp, to, state, json)
}

/// As [`send_by`], but a destination that is lost before the decision is dialled for so long.
pub(crate) fn send_retrying(retry: &str, mode: &str, qmp: &Path, to: &str, state: &Path, json: &Path) -> Command {
    let mut command = sterna();
    command
        .args(["send", "--mode", mode, "--to", to, "--retry", retry, "--qmp"])
        .arg(qmp)
        .arg("--state-dir")
        .arg(state)
        .arg("--json")
        .arg(json);
    command
}

/// Reads the report of `sterna send --json`.
pub(crate) fn report(json: &PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(json).expect("the report was written")).expect("the report is JSON")
}

/// Returns a value if the lines of `send` report the round of this number, or a later one.
pub(crate) fn in_round(lines: &[String], number: u64) -> Option<()> {
    let round = |line: &String| line.split_once(", round ")?.1.split(',').next()?.parse::<u64>().ok();
    lines.iter().filter_map(round).any(|round| round >= number).then_some(())
}

/// Returns the command `sterna recover` of one side.
pub(crate) fn recover(id: &str, side: &str, state: &Path) -> Command {
    let mut command = sterna();
    command.args(["recover", id, "--side", side, "--insecure", "--state-dir"]).arg(state);
    command
}

/// A fault point at which a sterna is held until the test releases it.
pub(crate) struct Hold {
    point: String,
    opened: std::sync::mpsc::Receiver<File>,
    path: PathBuf,
}

impl Hold {
    /// Makes `command` hold at `point`, by a FIFO in `scratch`.
    pub(crate) fn at(point: &str, scratch: &Path, command: &mut Command) -> Self {
        let path = scratch.join(format!("{point}.fifo"));
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        command.env("STERNA_FAULT", format!("{point}:hold:{}", path.display())).args(["--log", "warn"]);
        let (open, opened) = std::sync::mpsc::channel();
        let fifo = path.clone();
        // Opening blocks until the other end is opened.
        std::thread::spawn(move || open.send(File::open(fifo).unwrap()));
        Self { point: point.to_owned(), opened, path }
    }

    /// Waits until `sterna` has reached the point. It continues when the returned file is dropped.
    pub(crate) fn reached(&self, sterna: &Sterna) -> File {
        sterna.wait_for(&format!("holding at {}", self.point));
        self.opened.recv_timeout(LONG).expect("it opens the FIFO")
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Ends the thread that waits for the other end, if the point was not reached.
        let _ = File::options().write(true).read(true).open(&self.path);
    }
}

/// Certificates for 127.0.0.1, made by `sterna cert` in `directory`.
pub(crate) fn certificates(directory: &Path) {
    let made = sterna().args(["cert", "--host", "127.0.0.1", "--dir"]).arg(directory).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}
