//! The record of one side of an embedded migration: on disk, or in memory where no directory was given.
//!
//! A record in memory is enough as long as the process lives. A source that dies takes its guest with it. Then only the record on its
//! disk can answer a prepared destination (`sterna recover`) whether the guest belongs to the destination.

use std::path::Path;

use sterna_wire::control::Mode;
use sterna_wire::switchover::{ProcessIdentity, RECORD_VERSION, Record, RecordState, SourceAfter};

use crate::process;
use crate::record_file::{RecordFile, RecordFileError, now_ms};
use crate::session::Session;

/// The record's entries about a monitor that is not this process, by which `sterna recover` finds it.
#[derive(Clone, Debug)]
pub struct MonitorRecord {
    /// How the monitor is driven.
    pub mode: Mode,
    /// The monitor's QMP socket; empty where it has none.
    pub qmp: String,
    /// The monitor's process.
    pub process: Option<ProcessIdentity>,
    /// What happens to the source's monitor when the guest runs at the destination.
    pub source_after: SourceAfter,
    /// The monitor's settings before the migration, which `sterna recover` restores where the guest runs here.
    pub settings_before: Option<serde_json::Value>,
}

impl Default for MonitorRecord {
    /// A monitor that embeds the library: this process.
    fn default() -> Self {
        let process = process::identity(std::process::id());
        Self {
            mode: Mode::Embedded,
            qmp: String::new(),
            process,
            source_after: SourceAfter::Keep,
            settings_before: None,
        }
    }
}

/// One side's record.
#[derive(Debug)]
pub(crate) enum Ledger {
    Memory,
    Disk(Box<RecordFile>),
}

impl Ledger {
    /// Locks a new record in `dir`, if there is one. `peer`: the destination's address.
    pub(crate) fn new(
        dir: Option<&Path>,
        session: &Session,
        state: RecordState,
        peer: String,
        monitor: &MonitorRecord,
    ) -> Result<Self, RecordFileError> {
        let Some(dir) = dir else { return Ok(Self::Memory) };
        let record = Record {
            version: RECORD_VERSION,
            migration: session.id,
            state,
            fenced_peer: false,
            peer,
            mode: monitor.mode,
            monitor_socket: monitor.qmp.clone(),
            monitor_process: monitor.process,
            settings_before: monitor.settings_before.clone(),
            completion_permitted: false,
            pausing: false,
            source_after: monitor.source_after,
            key: session.key.clone(),
            pid: std::process::id(),
            created_ms: now_ms(),
            updated_ms: now_ms(),
        };
        RecordFile::create(dir, record).map(|file| Self::Disk(Box::new(file)))
    }

    /// Writes the record with a new state: to the disk, if it is kept there.
    pub(crate) fn write(&mut self, state: RecordState) -> Result<(), RecordFileError> {
        match self {
            Self::Memory => Ok(()),
            Self::Disk(file) => file.write(state),
        }
    }

    /// Returns whether nothing is left to settle. A record in memory ends with the process.
    pub(crate) fn settled(&self) -> bool {
        match self {
            Self::Memory => true,
            Self::Disk(file) => file.record().state.settled(),
        }
    }

    /// Returns the state that is on the disk, if any.
    pub(crate) fn on_disk(&self) -> Option<RecordState> {
        match self {
            Self::Disk(file) if file.written() => Some(file.record().state),
            Self::Disk(_) | Self::Memory => None,
        }
    }

    /// Records at the source that this migration is about to stop the guest, or that the guest runs on.
    pub(crate) fn note_pausing(&mut self, pausing: bool) -> Result<(), RecordFileError> {
        let Self::Disk(file) = self else { return Ok(()) };
        if file.record().pausing == pausing {
            return Ok(());
        }
        file.amend(|record| record.pausing = pausing);
        let state = file.record().state;
        file.write(state)
    }
}
