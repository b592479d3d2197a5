//! Where one side of an embedded migration keeps its record: on disk, or, where no directory was given, in memory.
//!
//! In memory it is enough as long as the process lives. A source that dies takes its guest with it; the record on its disk
//! is what a prepared destination can still ask (`sterna recover`) whether the guest was given to it.

use std::path::Path;

use sterna_wire::switchover::{RECORD_VERSION, Record, RecordState, SourceAfter};

use crate::process;
use crate::record_file::{RecordFile, RecordFileError, now_ms};
use crate::session::Session;

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
    ) -> Result<Self, RecordFileError> {
        let Some(dir) = dir else { return Ok(Self::Memory) };
        let record = Record {
            version: RECORD_VERSION,
            migration: session.id,
            state,
            fenced_peer: false,
            peer,
            qmp: String::new(),
            qemu: process::identity(std::process::id()),
            settings_before: None,
            completion_permitted: false,
            source_after: SourceAfter::Keep,
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
}
