//! The process of a monitor is killed at the switchover, and another one settles the migration from the record. The guest never runs twice:
//! while it runs, its process holds the lock of a file, as if that were its disk.
//!
//! The test is its own monitor: it starts itself again for each side.

use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write, stdin};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use sterna::vm_memory::BitmapLog;
use sterna::{
    Cancel, Destination, DestinationVmm, GuestState, Observer, Progress, Recovery, Remains, ResumeReason, Security,
    Settled, Side, Source, SourceVmm, VmmError,
};
use sterna_embedded::Machine;
use sterna_wire::switchover::{CrashPoint, Moment, Step};

const ROLE: &str = "STERNA_TEST_ROLE";
const DIRECTORY: &str = "STERNA_TEST_DIRECTORY";
const TO: &str = "STERNA_TEST_TO";
const CRASH: &str = "STERNA_TEST_CRASH";

/// A machine whose guest holds its disk while it runs.
struct Monitor {
    machine: Machine,
    disk: File,
}

impl Monitor {
    fn new(directory: &Path) -> Self {
        Self { machine: Machine::new().unwrap(), disk: File::create(directory.join("disk")).unwrap() }
    }

    fn run(&mut self) {
        if self.disk.try_lock().is_err() {
            println!("two guests");
            std::process::abort();
        }
        self.machine.run();
    }
}

impl SourceVmm for Monitor {
    fn name(&self) -> String {
        SourceVmm::name(&self.machine)
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        self.machine.halt();
        Ok(self.disk.unlock()?)
    }

    fn resume(&mut self, _reason: ResumeReason) -> Result<(), VmmError> {
        self.run();
        Ok(())
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.machine.save(state)
    }
}

impl DestinationVmm for Monitor {
    fn name(&self) -> String {
        DestinationVmm::name(&self.machine)
    }

    fn load(&mut self, state: &mut dyn std::io::Read) -> Result<(), VmmError> {
        self.machine.load(state)
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        self.run();
        Ok(())
    }
}

/// Kills the process at the crash point that the test has chosen.
struct Crashes(Option<CrashPoint>);

impl Observer for Crashes {
    fn progress(&self, _: &Progress) {}

    fn note(&self, text: &str) {
        eprintln!("{text}");
    }

    fn step(&self, moment: Moment, step: Step) {
        if self.0 == Some(CrashPoint { moment, step }) {
            std::process::abort();
        }
    }
}

/// Runs one side, and then its guest, if it is here, until the test closes the input.
fn side(role: &str) {
    let directory = std::env::var(DIRECTORY).unwrap();
    let directory = Path::new(&directory);
    let crashes = Crashes(std::env::var(CRASH).ok().map(|name| name.parse().unwrap()));
    let mut monitor = Monitor::new(directory);
    let records = directory.join(role);
    if role == "destination" {
        let destination = Destination::new(monitor.machine.ram().unwrap()).state_dir(&records);
        let listening = destination.listen("127.0.0.1:0", &Security::Insecure).unwrap();
        println!("listening on {}", listening.address());
        match listening.run(&mut monitor, &Cancel::new(), &crashes) {
            Ok(_) => println!("the guest has arrived"),
            Err(error) => println!("nothing arrived: {error}"),
        }
    } else {
        monitor.run();
        monitor.machine.wait_for(1000);
        let log = BitmapLog::new(&monitor.machine.memory).unwrap();
        let source = Source::new(monitor.machine.ram().unwrap(), Box::new(log)).state_dir(&records);
        // So long that the guest is paused also on a busy machine.
        let mut source = source.downtime(Duration::from_secs(20));
        let to = std::env::var(TO).unwrap();
        match source.run(to, &Security::Insecure, &mut monitor, &Cancel::new(), &crashes) {
            Ok(_) => println!("the guest has moved"),
            Err(error) if error.guest == GuestState::BelongsToDestination => {
                println!("paused: {error}");
                // What the operator has found out.
                stdin().read_line(&mut String::new()).unwrap();
                let recovery = Recovery::unsettled(&records).unwrap().pop().unwrap().fenced_peer(true);
                let guest = Remains::Paused(&mut monitor as &mut dyn SourceVmm);
                let settled = recovery.settle_source(&Security::Insecure, guest, &Cancel::new(), &()).unwrap();
                println!("{settled:?}");
            }
            Err(error) => println!("the guest stays: {error}"),
        }
    }
    while stdin().read_line(&mut String::new()).unwrap() > 0 {}
    monitor.machine.halt();
    println!("{:?}", monitor.machine.verify());
}

/// A side in a process of its own. Killed when dropped.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(role: &str, directory: &Path, to: &str, crash: Option<CrashPoint>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_sides_of_a_migration", "--nocapture"]);
        command.env(ROLE, role).env(DIRECTORY, directory).env(TO, to);
        command.envs(crash.map(|point| (CRASH, point.to_string())));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        Self { child, input, lines: BufReader::new(output).lines() }
    }

    /// Waits for a line with `text`, and returns the rest of that line.
    #[track_caller]
    fn wait_for(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        for line in self.lines.by_ref().map(Result::unwrap) {
            if let Some((_, rest)) = line.split_once(text) {
                return rest.to_owned();
            }
            seen.push(line);
        }
        panic!("no \"{text}\" in {seen:#?}");
    }

    /// Waits for its death.
    #[track_caller]
    fn crashes(&mut self) {
        let ended = self.child.wait().unwrap();
        assert!(
            ended.signal().is_some() && !self.lines.by_ref().any(|line| line.unwrap().contains("two guests")),
            "{ended}"
        );
    }

    /// Has the guest stopped and its memory verified.
    #[track_caller]
    fn verifies(mut self) {
        drop(self.input.take());
        self.wait_for("Ok(20480)");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Both sides, of which one has been killed at a crash point.
struct Crashed {
    directory: tempfile::TempDir,
    source: Process,
    destination: Process,
}

impl Crashed {
    fn at(point: &str) -> Self {
        println!("{point}");
        let directory = tempfile::tempdir().unwrap();
        let (at_source, point) = (point.starts_with("source"), Some(point.parse().unwrap()));
        let crash = |here: bool| point.filter(|_| here);
        let mut destination = Process::start("destination", directory.path(), "", crash(!at_source));
        let to = destination.wait_for("listening on ");
        let mut source = Process::start("source", directory.path(), &to, crash(at_source));
        if at_source {
            source.crashes();
        } else {
            destination.crashes();
        }
        Self { directory, source, destination }
    }

    /// Settles what the killed process has left: nothing of its guest.
    fn recover(&self, side: Side) -> Result<Settled, sterna::MigrationError> {
        let role = if side == Side::Source { "source" } else { "destination" };
        let mut all = Recovery::unsettled(self.directory.path().join(role)).unwrap();
        let (recovery, cancel) = (all.pop().expect("it is unsettled"), Cancel::new());
        assert!(all.is_empty() && recovery.side() == side);
        match side {
            Side::Source => recovery.settle_source(&Security::Insecure, Remains::Nothing, &cancel, &()),
            Side::Destination => recovery.settle_destination(&Security::Insecure, Remains::Nothing, &cancel, &()),
        }
    }

    /// Returns whether a guest runs anywhere.
    fn runs(&self) -> bool {
        let disk = File::open(self.directory.path().join("disk")).unwrap();
        disk.try_lock().is_err()
    }
}

/// Not a test: what [`Process::start`] runs.
#[test]
fn the_sides_of_a_migration() {
    if let Ok(role) = std::env::var(ROLE) {
        side(&role);
    }
}

#[test]
fn a_source_killed_before_the_decision_leaves_the_destination_waiting() {
    let crashed = Crashed::at("source.before-record-committed");
    assert_eq!(crashed.recover(Side::Source).unwrap(), Settled::NothingHere);
    assert!(!crashed.runs(), "only an operator may start the destination's guest");
}

#[test]
fn a_source_killed_after_the_decision_is_settled_from_its_record_and_the_guest_runs_at_the_destination() {
    for point in ["source.after-record-committed", "source.after-send-commit", "source.before-record-finished"] {
        let mut crashed = Crashed::at(point);
        assert_eq!(crashed.recover(Side::Source).unwrap(), Settled::RunsAtDestination);
        crashed.destination.wait_for("the guest has arrived");
        assert!(crashed.runs());
        assert!(Recovery::unsettled(crashed.directory.path().join("source")).unwrap().is_empty());
        crashed.destination.verifies();
    }
}

#[test]
fn a_destination_killed_before_it_was_prepared_leaves_the_guest_at_the_source() {
    let mut crashed = Crashed::at("destination.before-record-prepared");
    crashed.source.wait_for("the guest stays");
    assert_eq!(crashed.recover(Side::Destination).unwrap(), Settled::NothingHere);
    assert!(crashed.runs());
    crashed.source.verifies();
}

#[test]
fn a_destination_killed_after_the_decision_lets_the_source_resume_when_told_so() {
    for (point, lost) in [("destination.before-record-committed", false), ("destination.after-cont", true)] {
        let mut crashed = Crashed::at(point);
        match crashed.recover(Side::Destination) {
            Ok(settled) => assert!(settled == Settled::NothingHere && !lost, "{settled:?}"),
            Err(error) => assert!(error.guest == GuestState::NotHere && lost, "{error}"),
        }
        crashed.source.wait_for("paused: ");
        assert!(!crashed.runs());
        crashed.source.input.as_mut().unwrap().write_all(b"the destination is gone\n").unwrap();
        crashed.source.wait_for("RunsAtSource");
        assert!(crashed.runs());
        crashed.source.verifies();
    }
}
