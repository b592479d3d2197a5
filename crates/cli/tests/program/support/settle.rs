//! Recovery after a crash, as an operator does it: runs `sterna recover` on each host whose sterna died.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use sterna_wire::switchover::{Record, RecordState};

use super::pair::{Pair, eventually};
use super::{LONG, Sterna, receive, recover, send_by};

/// How long a process may run before the other side is recovered as well, which does no harm where it was not needed.
const PATIENCE: Duration = Duration::from_secs(7);
/// How long the processes may then run before they are interrupted: longer than one with a partner needs, also on a busy machine.
const MUCH_PATIENCE: Duration = Duration::from_secs(60);
/// The exit code of a migration whose end is not confirmed.
const UNCONFIRMED: i32 = 4;

/// Which side of the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
}

impl Side {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }

    pub(crate) fn other(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }

    fn state_dir(self, pair: &Pair) -> PathBuf {
        match self {
            Self::Source => pair.source_state(),
            Self::Destination => pair.destination_state(),
        }
    }

    /// Returns this side's record, if there is one.
    pub(crate) fn record(self, pair: &Pair) -> Option<Record> {
        let end = format!(".{}.json", self.name());
        let files = std::fs::read_dir(self.state_dir(pair)).ok()?;
        let mut paths = files.flatten().map(|file| file.path());
        let path = paths.find(|path| path.to_string_lossy().ends_with(&end))?;
        Some(Record::from_json(&std::fs::read(path).unwrap()).expect("a record is whole whenever it is read"))
    }

    /// Returns the state in this side's record.
    pub(crate) fn state(self, pair: &Pair) -> Option<RecordState> {
        self.record(pair).map(|record| record.state)
    }

    /// Starts `sterna recover` on this side; none if it has no record.
    pub(crate) fn recover(self, pair: &Pair, words: &[&str], fault: Option<&str>) -> Option<Sterna> {
        let record = self.record(pair)?;
        let mut command = recover(&record.migration.to_string(), self.name(), &self.state_dir(pair));
        command.args(words);
        if let Some(fault) = fault {
            command.env("STERNA_FAULT", fault).args(["--log", "warn"]);
        }
        let name = match self {
            Self::Source => "recover source",
            Self::Destination => "recover destination",
        };
        Some(Sterna::start(name, &mut command))
    }
}

/// A process that settles its side.
struct Working {
    side: Side,
    recovery: bool,
    process: Sterna,
}

impl Working {
    /// Returns whether this process, which has ended, reports that its side is settled.
    fn settled(self) -> bool {
        let (status, _) = self.process.finish();
        // A migration may fail, but its outcome must be known.
        if self.recovery { status.success() } else { status.code().is_some_and(|code| code != UNCONFIRMED) }
    }
}

/// An active migration of the boot-sector guest.
pub(crate) struct Migration {
    pub(crate) pair: Pair,
    pub(crate) sender: Option<Sterna>,
    pub(crate) receiver: Option<Sterna>,
}

/// The target downtime, if the words have none: so long that the guest, which writes all its memory all the time, converges, however slow
/// this machine is at the moment.
const DOWNTIME: &str = "10s";

impl Migration {
    /// Starts `receive` and `send --mode stream`; `words` are more of send's options, each side may be given a fault.
    pub(crate) fn start(pair: Pair, words: &[&str], source: Option<&str>, destination: Option<&str>) -> Self {
        Self::start_by("stream", pair, words, source, destination)
    }

    /// Starts a migration as [`Migration::start`] does, with `send --mode MODE`.
    pub(crate) fn start_by(
        mode: &str,
        pair: Pair,
        words: &[&str],
        source: Option<&str>,
        destination: Option<&str>,
    ) -> Self {
        let mut command = receive(&pair.destination.qmp_path, &pair.destination_state());
        command.arg("--insecure");
        if let Some(fault) = destination {
            command.env("STERNA_FAULT", fault).args(["--log", "warn"]);
        }
        let receiver = Sterna::start("receive", &mut command);
        let address = receiver.address();
        let mut command = send_by(mode, &pair.source.qmp_path, &address, &pair.source_state(), &pair.report());
        command.arg("--insecure").args(words);
        if !words.contains(&"--downtime") {
            command.args(["--downtime", DOWNTIME]);
        }
        if let Some(fault) = source {
            command.env("STERNA_FAULT", fault).args(["--log", "warn"]);
        }
        let sender = Sterna::start("send", &mut command);
        Self { pair, sender: Some(sender), receiver: Some(receiver) }
    }

    /// Waits until the process of `side` has ended, which must be by SIGKILL.
    pub(crate) fn wait_crash(&mut self, side: Side) -> Result<(), String> {
        let process = match side {
            Side::Source => &mut self.sender,
            Side::Destination => &mut self.receiver,
        };
        let (status, _) = process.take().expect("it was started").finish();
        killed(status)
    }

    /// Recovers each side whose process has ended, and waits for the others to end. If a side still waits for one that
    /// has ended or is not settled, recovers that one, too, as the documents describe.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        let mut working = Vec::new();
        for (side, process) in [(Side::Source, self.sender.take()), (Side::Destination, self.receiver.take())] {
            let recovery = process.is_none();
            let process = process.or_else(|| side.recover(&self.pair, &[], None));
            working.extend(process.map(|process| Working { side, recovery, process }));
        }
        let mut not_settled = Vec::new();
        let mut recovered = Vec::new();
        loop {
            eventually(PATIENCE, || working.iter_mut().all(|work| work.process.poll().is_some()));
            for mut work in std::mem::take(&mut working) {
                let side = work.side;
                if work.process.poll().is_none() {
                    working.push(work);
                } else if !work.settled() {
                    not_settled.push(side);
                }
            }
            // Each side gets one more `recover`.
            let waited_for = working.first().filter(|_| working.len() == 1).map(|work| work.side.other());
            let again: Vec<Side> = waited_for.into_iter().chain(not_settled.iter().copied()).collect();
            let again: Vec<Side> = again.into_iter().filter(|side| !recovered.contains(side)).collect();
            if again.is_empty() {
                // A `receive` whose source was killed before it connected waits for another source. All others end by themselves.
                eventually(MUCH_PATIENCE, || {
                    let unreached = Side::Destination.record(&self.pair).is_none();
                    let mut others =
                        working.iter_mut().filter(|work| work.recovery || work.side == Side::Source || !unreached);
                    others.all(|work| work.process.poll().is_some())
                });
                working.iter().for_each(|work| work.process.interrupt());
            }
            for side in again {
                recovered.push(side);
                not_settled.retain(|other| *other != side);
                let process = side.recover(&self.pair, &[], None);
                working.extend(process.map(|process| Working { side, recovery: true, process }));
            }
            if working.is_empty() {
                break;
            }
        }
        if not_settled.is_empty() {
            return Ok(());
        }
        let (status, guests, records) = (self.pair.source.migration_status(), self.pair.states(), self.records());
        Err(format!("not settled: {not_settled:?}, records {records:?}, guests {guests:?}, migration {status:?}"))
    }

    /// Fails unless exactly one of the two guests runs, has continued and is intact.
    pub(crate) fn exactly_one(&self) -> Result<Side, String> {
        let Pair { source, destination, .. } = &self.pair;
        // `recover` may end before its QEMU has carried out its command.
        eventually(LONG / 8, || source.runs() != destination.runs());
        let side = match (source.runs(), destination.runs()) {
            (true, false) => Side::Source,
            (false, true) => Side::Destination,
            (both, _) => {
                let word = if both { "BOTH RUN" } else { "NEITHER RUNS" };
                return Err(format!("{word}: {:?}, records {:?}", self.pair.states(), self.records()));
            }
        };
        self.pair.never_both()?;
        let runs = if side == Side::Source { source } else { destination };
        runs.untouched()?;
        runs.wait_progress()?;
        let passes = runs.checked_passes().map_err(|error| format!("CORRUPTED at the {}: {error}", side.name()))?;
        if passes == 0 { Err("the guest has lost its passes".into()) } else { Ok(side) }
    }

    /// Returns the states in the two records.
    pub(crate) fn records(&self) -> [Option<RecordState>; 2] {
        [Side::Source, Side::Destination].map(|side| side.state(&self.pair))
    }
}

/// Returns whether a process ended by SIGKILL.
pub(crate) fn killed(status: std::process::ExitStatus) -> Result<(), String> {
    use std::os::unix::process::ExitStatusExt;
    match status.signal() {
        Some(9) => Ok(()),
        _ => Err(format!("it ended with {status} and never came to the crash point")),
    }
}

/// Returns the outcome in a report file, if there is one.
pub(crate) fn outcome(report: &Path) -> Option<String> {
    let report: Value = serde_json::from_slice(&std::fs::read(report).ok()?).ok()?;
    report["outcome"].as_str().map(str::to_owned)
}
