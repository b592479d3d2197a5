//! Where one side of an embedded migration keeps its record: on disk, or, where no directory was given, in memory.
//!
//! In memory it is enough as long as the process lives. A source that dies takes its guest with it; the record on its disk
//! is what a prepared destination can still ask (`sterna recover`) whether the guest was given to it.

use std::path::Path;

use sterna_wire::control::Mode;
use sterna_wire::switchover::{ProcessIdentity, RECORD_VERSION, Record, RecordState, SourceAfter};

use crate::process;
use crate::record_file::{RecordFile, RecordFileError, now_ms};
use crate::session::Session;

/// What a record says of a monitor that is not this process, so that `sterna recover` finds it.
#[derive(Clone, Debug)]
pub struct MonitorRecord {
    /// How it is driven.
    pub mode: Mode,
    /// Its QMP socket; empty where it has none.
    pub qmp: String,
    /// Its process.
    pub process: Option<ProcessIdentity>,
    /// What becomes of the source's when its guest runs at the destination.
    pub source_after: SourceAfter,
    /// What its settings were before the migration, which `sterna recover` puts back where the guest runs here.
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
            qmp: monitor.qmp.clone(),
            qemu: monitor.process,
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

    /// Writes the record in a new state, as durably as it is kept.
    pub(crate) fn write(&mut self, state: RecordState) -> Result<(), RecordFileError> {
        match self {
            Self::Memory => Ok(()),
            Self::Disk(file) => file.write(state),
        }
    }

    /// Whether nothing is left to settle. What is kept in memory ends with the process.
    pub(crate) fn settled(&self) -> bool {
        match self {
            Self::Memory => true,
            Self::Disk(file) => file.record().state.settled(),
        }
    }

    /// The state that is on the disk; none where nothing is.
    pub(crate) fn on_disk(&self) -> Option<RecordState> {
        match self {
            Self::Disk(file) if file.written() => Some(file.record().state),
            Self::Disk(_) | Self::Memory => None,
        }
    }

    /// Writes to the record of a source that its guest is about to be stopped by this migration, or that it runs on.
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
