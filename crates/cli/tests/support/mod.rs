//! A migration between two real QEMUs by the real program, as the end-to-end tests need it.
#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;
use sterna_lab::{Guest, LinuxGuest, QemuOptions, QemuVersion};

/// No step of a test takes longer on a machine that is only slow.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// The program under test.
pub(crate) fn sterna() -> Command {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
}

/// A running sterna process; what it says is kept line by line, and printed. Killed when dropped.
pub(crate) struct Sterna {
    child: Child,
    said: Arc<Said>,
    listening: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Said {
    lines: Mutex<(Vec<String>, bool)>,
    more: Condvar,
}

impl Sterna {
    /// Starts `command`; `name` stands before its lines in the test's output.
    pub(crate) fn start(name: &'static str, command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let said = Arc::new(Said::default());
        let (lines, ear) = (BufReader::new(child.stderr.take().unwrap()).lines(), Arc::clone(&said));
        let listening = std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                eprintln!("{name}: {line}");
                ear.lines.lock().unwrap().0.push(line);
                ear.more.notify_all();
            }
            ear.lines.lock().unwrap().1 = true;
            ear.more.notify_all();
        });
        Self { child, said, listening: Some(listening) }
    }

    /// Waits for a line that contains `text`, and gives it.
    pub(crate) fn wait_for(&self, text: &str) -> String {
        let mut said = self.said.lines.lock().unwrap();
        loop {
            if let Some(line) = said.0.iter().find(|line| line.contains(text)) {
                return line.clone();
            }
            assert!(!said.1, "sterna ended without saying {text:?}");
            let timeout;
            (said, timeout) = self.said.more.wait_timeout(said, LONG).unwrap();
            assert!(!timeout.timed_out(), "sterna does not say {text:?}");
        }
    }

    /// The address that `sterna receive` listens on.
    pub(crate) fn address(&self) -> String {
        self.wait_for("listening on ").rsplit_once("listening on ").unwrap().1.to_owned()
    }

    /// Waits for its end; gives standard output.
    pub(crate) fn finish(mut self) -> (ExitStatus, String) {
        let mut output = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        let status = self.child.wait().unwrap();
        self.listening.take().unwrap().join().unwrap();
        eprintln!("{output}");
        (status, output)
    }

    /// Kills it as a crash would.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its process number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Sterna {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A Linux guest that dirties its memory all the while.
pub(crate) fn busy_guest(version: QemuVersion, machine: &str) -> QemuOptions {
    let linux = LinuxGuest { memory: Some(192 << 20), dirty_rate: 20 << 20, ..LinuxGuest::default() };
    let mut options = QemuOptions::new(version, Guest::Linux(linux));
    options.machine = machine.into();
    options
}

/// `sterna receive` for the QEMU at `qmp`.
pub(crate) fn receive(qmp: &Path, state: &Path) -> Command {
    let mut command = sterna();
    command.args(["receive", "--listen", "127.0.0.1:0", "--qmp"]).arg(qmp).arg("--state-dir").arg(state);
    command
}

/// `sterna send` for the QEMU at `qmp`, with its report in `json`.
pub(crate) fn send(qmp: &Path, to: &str, state: &Path, json: &Path) -> Command {
    let mut command = sterna();
    command.args(["send", "--to", to, "--qmp"]).arg(qmp).arg("--state-dir").arg(state).arg("--json").arg(json);
    command
}

/// The report that `sterna send --json` wrote.
pub(crate) fn report(json: &PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(json).expect("the report was written")).expect("the report is JSON")
}
