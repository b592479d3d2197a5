//! The record of one side of a migration: on disk, or in memory where no directory was given.
//!
//! A record in memory is enough as long as the process lives. A source that dies takes its guest with it. Then only the record on its
//! disk can answer a prepared destination (`sterna recover`) whether the guest belongs to the destination.

use sterna_wire::control::Mode;
use sterna_wire::switchover::{ProcessIdentity, RECORD_VERSION, Record, RecordState, SourceAfter};

use crate::record_file::{RecordFile, RecordFileError, StateDir, now_ms};
use crate::report::Observer;
use crate::session::Session;

/// The record's entries about a monitor that is not this process, by which `sterna recover` finds it.
#[derive(Clone, Debug)]
pub struct MonitorRecord {
    /// How the monitor is driven.
    pub mode: Mode,
    /// The monitor's QMP socket; empty where it has none.
    pub qmp: String,
    /// The monitor's process; for a monitor that embeds the library none is needed.
    pub process: Option<ProcessIdentity>,
    /// What happens to the source's monitor when the guest runs at the destination.
    pub source_after: SourceAfter,
    /// The monitor's settings before the migration, which `sterna recover` restores where the guest runs here.
    pub settings_before: Option<serde_json::Value>,
}

impl Default for MonitorRecord {
    /// A monitor that embeds the library: this process.
    fn default() -> Self {
        Self {
            mode: Mode::Embedded,
            qmp: String::new(),
            process: None,
            source_after: SourceAfter::Keep,
            settings_before: None,
        }
    }
}

/// One side's record of one migration.
#[derive(Debug)]
pub struct Ledger {
    place: Place,
    /// Why the last attempt to write the record failed.
    unwritten: Option<String>,
}

#[derive(Debug)]
enum Place {
    Memory(Box<Record>),
    Disk(Box<RecordFile>),
}

impl From<RecordFile> for Ledger {
    /// Keeps the record on the disk.
    fn from(file: RecordFile) -> Self {
        Self { place: Place::Disk(Box::new(file)), unwritten: None }
    }
}

impl Ledger {
    /// Locks a new record in `dir`; without a directory, the record is kept in memory. `peer`: the destination's address.
    ///
    /// # Errors
    /// The directory cannot be used, or another process has the record's lock.
    pub(crate) fn new(
        dir: Option<&StateDir>,
        session: &Session,
        state: RecordState,
        peer: String,
        monitor: &MonitorRecord,
    ) -> Result<Self, RecordFileError> {
        let embedded = || dir.filter(|_| monitor.mode == Mode::Embedded)?.own_process();
        let record = Record {
            version: RECORD_VERSION,
            migration: session.id,
            state,
            fenced_peer: false,
            peer,
            mode: monitor.mode,
            monitor_socket: monitor.qmp.clone(),
            monitor_process: monitor.process.or_else(embedded),
            settings_before: monitor.settings_before.clone(),
            completion_permitted: false,
            pausing: false,
            disputed: None,
            does_not_run: None,
            source_after: monitor.source_after,
            key: session.key.clone(),
            pid: std::process::id(),
            created_ms: now_ms(),
            updated_ms: now_ms(),
        };
        match dir {
            Some(dir) => RecordFile::create(dir, record).map(Self::from),
            None => Ok(Self { place: Place::Memory(Box::new(record)), unwritten: None }),
        }
    }

    /// Returns the record as it was last written, or will be written first.
    pub fn record(&self) -> &Record {
        match &self.place {
            Place::Memory(record) => record,
            Place::Disk(file) => file.record(),
        }
    }

    /// Writes the record with a new state, durably where it is kept on the disk. Notes a failure. Returns whether it is written.
    pub fn write(&mut self, state: RecordState, observer: &dyn Observer) -> bool {
        let written = match &mut self.place {
            Place::Memory(record) => {
                **record = record.advanced(state, std::process::id(), now_ms());
                Ok(())
            }
            Place::Disk(file) => file.write(state),
        };
        self.unwritten = written.err().map(|error| error.to_string());
        self.unwritten.iter().for_each(|error| observer.note(error));
        self.unwritten.is_none()
    }

    /// Changes the record that will be written next.
    pub fn amend(&mut self, change: impl FnOnce(&mut Record)) {
        match &mut self.place {
            Place::Memory(record) => change(record),
            Place::Disk(file) => file.amend(change),
        }
    }

    /// Writes a change of the record, in its present state.
    ///
    /// # Errors
    /// The file cannot be written. The driver reports this as a failure of its own step.
    pub fn write_amended(&mut self, change: impl FnOnce(&mut Record)) -> Result<(), RecordFileError> {
        self.amend(change);
        match &mut self.place {
            Place::Memory(_) => Ok(()),
            Place::Disk(file) => {
                let state = file.record().state;
                file.write(state)
            }
        }
    }

    /// Records at the source that this migration is about to pause the guest, or that the guest runs on.
    pub(crate) fn note_pausing(&mut self, pausing: bool) -> Result<(), RecordFileError> {
        if self.record().pausing == pausing {
            return Ok(());
        }
        self.write_amended(|record| record.pausing = pausing)
    }

    /// Returns whether nothing is left to settle. A record in memory ends with the process.
    pub fn settled(&self) -> bool {
        match &self.place {
            Place::Memory(_) => true,
            Place::Disk(file) => file.record().state.settled(),
        }
    }

    /// Returns why the last state could not be written, where the record is not settled without it.
    pub fn unsettled(&self) -> Option<&str> {
        self.unwritten.as_deref().filter(|_| !self.settled())
    }

    /// Returns why the last state could not be written.
    pub fn unwritten(&self) -> Option<&str> {
        self.unwritten.as_deref()
    }

    /// Returns the state that is on the disk, if any.
    pub fn on_disk(&self) -> Option<RecordState> {
        match &self.place {
            Place::Disk(file) if file.written() => Some(file.record().state),
            Place::Disk(_) | Place::Memory(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sterna_wire::identity::{MigrationId, MigrationKey};
    use sterna_wire::switchover::SourceState;

    use super::*;

    fn ledger(dir: Option<&std::path::Path>) -> Ledger {
        let session = Session {
            id: MigrationId::from_bytes([1; 16]),
            key: MigrationKey::from_bytes([2; 32]),
            incarnation: 1,
            channels: 1,
            device_channels: 0,
            packet_size: 4096,
            features: Vec::new(),
            round_trip: Duration::ZERO,
        };
        let state = RecordState::Source(SourceState::Started);
        let dir = dir.map(StateDir::from);
        Ledger::new(dir.as_ref(), &session, state, "there:1".into(), &MonitorRecord::default()).unwrap()
    }

    #[test]
    fn a_record_in_memory_has_its_state_and_leaves_nothing_to_settle() {
        let mut ledger = ledger(None);
        let committed = RecordState::Source(SourceState::Committed);
        assert!(ledger.write(committed, &()));
        assert_eq!((ledger.record().state, ledger.on_disk(), ledger.settled()), (committed, None, true));
    }

    #[test]
    fn a_state_that_could_not_be_written_is_unsettled_until_a_settled_one_is() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = ledger(Some(dir.path()));
        let (started, finished) =
            (RecordState::Source(SourceState::Started), RecordState::Source(SourceState::Finished));
        assert!(ledger.write(started, &()) && ledger.unsettled().is_none());

        // A directory in the place of the temporary file: no file can be written there, whoever tries.
        let record = std::fs::read_dir(dir.path())
            .unwrap()
            .flatten()
            .find(|file| file.path().extension().is_some_and(|end| end == "json"));
        let temporary = record.unwrap().path().with_extension("new");
        std::fs::create_dir(&temporary).unwrap();
        assert!(!ledger.write(finished, &()));
        assert_eq!((ledger.on_disk(), ledger.settled()), (Some(started), false));
        assert!(ledger.unsettled().is_some());

        std::fs::remove_dir(&temporary).unwrap();
        assert!(ledger.write(finished, &()));
        assert_eq!((ledger.on_disk(), ledger.unsettled()), (Some(finished), None));
    }
}
