//! The record of a migration on disk: the state that one side of the switchover needs after its process has died.
//!
//! Data only. The driver writes it durably, locks it and finds it again (see the module's contract).

use crate::identity::{MigrationId, MigrationKey};
use crate::mode::Mode;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Version of the record's format that this build reads and writes.
pub const RECORD_VERSION: u32 = 1;

/// The largest record, in bytes, that is parsed at all.
const MAX_RECORD: usize = 64 * 1024;

/// The progress of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceState {
    /// A migration was begun. Nothing is decided.
    Started,
    /// The decision: the guest belongs to the destination.
    Committed,
    /// The guest belongs to the source, which may not have resumed it yet.
    Aborted,
    /// As aborted, and the source's guest has been seen running since: QEMU is not touched any more.
    Resumed,
    /// The destination has confirmed that the guest runs there, and the source's monitor was ended or kept as
    /// requested.
    Finished,
    /// The source's monitor has ended without the destination's confirmation that the guest runs there: there is no
    /// guest here any more, and nothing to settle on this side.
    Gone,
}

/// What happens to the source's monitor once the destination has confirmed that the guest runs there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceAfter {
    /// It is ended.
    Quit,
    /// It is kept, with a paused copy of the guest that must never be resumed. The default for records without this
    /// field.
    #[default]
    Keep,
}

/// The progress of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DestinationState {
    /// A migration was begun; the guest is not completely loaded.
    Started,
    /// Loaded, complete and paused; waits for the decision.
    Prepared,
    /// Post-copy: as prepared, but part of the guest's memory is still at the source.
    PreparedIncomplete,
    /// Committed by the source, or by an operator who fenced the source.
    Committed,
    /// Post-copy: as committed, but part of the guest's memory is still at the source.
    CommittedIncomplete,
    /// Post-copy: the guest has been seen running here, and part of its memory is still at the source.
    RunningIncomplete,
    /// The guest has been seen running here, with all of its memory.
    Running,
    /// Discarded; the guest never ran here.
    Aborted,
}

impl DestinationState {
    /// Returns whether part of the guest's memory was still at the source when the record was written.
    pub fn lacks_memory(self) -> bool {
        matches!(self, Self::PreparedIncomplete | Self::CommittedIncomplete | Self::RunningIncomplete)
    }
}

/// The side that the record belongs to, and its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "side", content = "state", rename_all = "snake_case")]
pub enum RecordState {
    /// The record of a source.
    Source(SourceState),
    /// The record of a destination.
    Destination(DestinationState),
}

impl RecordState {
    /// Returns the name of the state, as in the record.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source(SourceState::Started) | Self::Destination(DestinationState::Started) => "started",
            Self::Source(SourceState::Committed) | Self::Destination(DestinationState::Committed) => "committed",
            Self::Source(SourceState::Aborted) | Self::Destination(DestinationState::Aborted) => "aborted",
            Self::Source(SourceState::Resumed) => "resumed",
            Self::Source(SourceState::Finished) => "finished",
            Self::Source(SourceState::Gone) => "gone",
            Self::Destination(DestinationState::Prepared) => "prepared",
            Self::Destination(DestinationState::PreparedIncomplete) => "prepared_incomplete",
            Self::Destination(DestinationState::CommittedIncomplete) => "committed_incomplete",
            Self::Destination(DestinationState::RunningIncomplete) => "running_incomplete",
            Self::Destination(DestinationState::Running) => "running",
        }
    }

    /// Returns whether `recover` would leave the monitor unchanged, so that a new migration may use the same monitor. An
    /// aborted destination is settled as soon as its monitor's process is gone, which the caller checks.
    pub fn settled(self) -> bool {
        matches!(
            self,
            Self::Source(SourceState::Resumed | SourceState::Finished | SourceState::Gone)
                | Self::Destination(DestinationState::Running)
        )
    }
}

/// Identifies a process, also after the reuse of process ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Process id. (Of a QEMU: as of `SO_PEERCRED` on its QMP socket.)
    pub pid: u32,
    /// Start time in clock ticks since boot, field 22 of `/proc/PID/stat` (proc(5)).
    pub start_ticks: u64,
}

/// The data that one side keeps on disk about one migration. The file holds a key: mode 0600.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Format version, [`RECORD_VERSION`].
    pub version: u32,
    /// The migration's id, which also names the file.
    #[serde(with = "as_hex")]
    pub migration: MigrationId,
    /// The side that the record belongs to, and its state.
    #[serde(flatten)]
    pub state: RecordState,
    /// Whether an operator asserted at this side that the other host is gone for good.
    #[serde(default)]
    pub fenced_peer: bool,
    /// Source: the destination's address (`host:port`). Destination: its listening address.
    pub peer: String,
    /// How the virtual machine monitor is driven.
    #[serde(default = "owner")]
    pub mode: Mode,
    /// Path of the control socket of this side's monitor (VMM), such as QEMU's QMP socket; empty for a monitor that embeds
    /// the library.
    #[serde(alias = "qmp")]
    pub monitor_socket: String,
    /// The monitor's process when the migration began, if it could be determined.
    #[serde(default, alias = "qemu")]
    pub monitor_process: Option<ProcessIdentity>,
    /// The virtual machine monitor's settings before they were changed, to be restored on the host where the guest
    /// finally runs. Only the driver knows their form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings_before: Option<serde_json::Value>,
    /// Source, where the monitor runs a migration of its own: it was about to be permitted to complete that migration.
    /// Only then can it have completed: a guest moved away without it was moved by another program.
    #[serde(default)]
    pub completion_permitted: bool,
    /// Source, where Sterna pauses the guest itself: this migration was about to do so. Only then may a paused guest be
    /// resumed: otherwise another program paused it.
    #[serde(default)]
    pub pausing: bool,
    /// Source, committed in post-copy: the claim of the destination that this side knew to be wrong, for people. The destination is not believed
    /// any more: the paused guest here has memory that was never sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disputed: Option<String>,
    /// Settled, and the guest certainly does not run at the destination: why, for people. The source's monitor was kept, paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub does_not_run: Option<String>,
    /// Source: what happens to its monitor when the guest runs at the destination.
    #[serde(default)]
    pub source_after: SourceAfter,
    /// The migration's key, in 64 hexadecimal digits.
    #[serde(with = "key_as_hex")]
    pub key: MigrationKey,
    /// The process that wrote the record last, for messages ("process 4711 still works on it"); the lock decides.
    pub pid: u32,
    /// When the record was created, in milliseconds since 1970-01-01 UTC.
    pub created_ms: u64,
    /// When the record was last written, in milliseconds since 1970-01-01 UTC.
    pub updated_ms: u64,
}

/// Older records lack the field: they belong to QEMUs that migrate their own RAM.
fn owner() -> Mode {
    Mode::Owner
}

/// Why a record cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Larger than any record is.
    #[error("the record has {0} bytes, no record is that large; is this the right file?")]
    TooLarge(usize),
    /// Not the JSON of a record.
    #[error("the record is not readable: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Written by another version of Sterna.
    #[error("the record has format version {found}, this sterna knows {RECORD_VERSION}; use the sterna that wrote it")]
    Version {
        /// The version it names.
        found: u32,
    },
}

impl Record {
    /// Returns the record at a later state.
    #[must_use]
    pub fn advanced(&self, state: RecordState, pid: u32, now_ms: u64) -> Self {
        Self { state, pid, updated_ms: now_ms, ..self.clone() }
    }

    /// Returns the record as the file's content.
    ///
    /// # Errors
    /// None in practice; serialisation cannot fail for these types.
    pub fn to_json(&self) -> Result<Vec<u8>, RecordError> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        Ok(text)
    }

    /// Parses the content of a file.
    ///
    /// # Errors
    /// [`RecordError`] describes what is wrong with it. No state is ever guessed from a record that cannot be read.
    pub fn from_json(text: &[u8]) -> Result<Self, RecordError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        if text.len() > MAX_RECORD {
            return Err(RecordError::TooLarge(text.len()));
        }
        let Version { version } = serde_json::from_slice(text)?;
        if version != RECORD_VERSION {
            return Err(RecordError::Version { found: version });
        }
        Ok(serde_json::from_slice(text)?)
    }
}

mod as_hex {
    use super::MigrationId;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(id: &MigrationId, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(id)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MigrationId, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

mod key_as_hex {
    use super::MigrationKey;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(key: &MigrationKey, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&key.to_hex())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MigrationKey, D::Error> {
        let text = String::deserialize(deserializer)?;
        MigrationKey::from_hex(&text).ok_or_else(|| D::Error::custom("the key is not 64 hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            version: RECORD_VERSION,
            migration: MigrationId::from_bytes([0x5a; 16]),
            state: RecordState::Source(SourceState::Started),
            fenced_peer: false,
            peer: "dst-host:4920".into(),
            mode: Mode::Owner,
            monitor_socket: "src.qmp".into(),
            monitor_process: Some(ProcessIdentity { pid: 7, start_ticks: 99 }),
            settings_before: None,
            completion_permitted: false,
            pausing: false,
            disputed: None,
            does_not_run: None,
            source_after: SourceAfter::Quit,
            key: MigrationKey::from_bytes([0xab; 32]),
            pid: 11,
            created_ms: 1,
            updated_ms: 1,
        }
    }

    #[test]
    fn every_state_survives_the_file() {
        use DestinationState as D;
        use SourceState as S;
        let source = [S::Started, S::Committed, S::Aborted, S::Resumed, S::Finished, S::Gone].map(RecordState::Source);
        let destination = [
            D::Started,
            D::Prepared,
            D::PreparedIncomplete,
            D::Committed,
            D::CommittedIncomplete,
            D::RunningIncomplete,
            D::Running,
            D::Aborted,
        ];
        for state in source.into_iter().chain(destination.map(RecordState::Destination)) {
            let record = record().advanced(state, 12, 5);
            let text = record.to_json().unwrap();
            assert_eq!(Record::from_json(&text).unwrap(), record);
            assert!(String::from_utf8(text).unwrap().contains(&format!("\"state\": \"{}\"", state.name())));
        }
    }

    #[test]
    fn a_destination_that_lacks_memory_is_not_settled() {
        use DestinationState as D;
        for state in [D::PreparedIncomplete, D::CommittedIncomplete, D::RunningIncomplete] {
            assert!(state.lacks_memory() && !RecordState::Destination(state).settled(), "{state:?}");
        }
        assert!(!D::Running.lacks_memory() && RecordState::Destination(D::Running).settled());
    }

    #[test]
    fn a_record_with_the_older_names_of_the_monitor_is_read() {
        let text = String::from_utf8(record().to_json().unwrap()).unwrap();
        let old = text.replace("monitor_socket", "qmp").replace("monitor_process", "qemu");
        assert!(old.contains(r#""qmp": "src.qmp""#) && old.contains(r#""qemu": {"#), "{old}");
        assert_eq!(Record::from_json(old.as_bytes()).unwrap(), record());
    }

    #[test]
    fn a_record_without_source_after_keeps_the_sources_monitor() {
        let text = String::from_utf8(record().to_json().unwrap()).unwrap();
        let line = "  \"source_after\": \"quit\",\n";
        assert!(text.contains(line), "{text}");
        let old = Record::from_json(text.replace(line, "").as_bytes()).unwrap();
        assert_eq!(old.source_after, SourceAfter::Keep);
    }

    #[test]
    fn the_file_reads_plainly() {
        let text = String::from_utf8(record().to_json().unwrap()).unwrap();
        assert!(text.contains(r#""side": "source""#) && text.contains(r#""state": "started""#), "{text}");
        assert!(text.contains(r#""migration": "5a5a5a5a"#), "{text}");
        assert!(!format!("{:?}", record()).contains("abab"), "the key does not show in logs");
    }

    #[test]
    fn a_disputed_claim_survives_the_file_and_other_records_do_not_name_any() {
        let disputed = Record { disputed: Some("it has all, it says".into()), ..record() };
        assert_eq!(Record::from_json(&disputed.to_json().unwrap()).unwrap(), disputed);
        assert!(!String::from_utf8(record().to_json().unwrap()).unwrap().contains("disputed"));
    }

    #[test]
    fn the_reason_why_a_guest_does_not_run_survives_the_file_and_other_records_have_none() {
        let stopped = Record { does_not_run: Some("the guest has panicked".into()), ..record() };
        assert_eq!(Record::from_json(&stopped.to_json().unwrap()).unwrap(), stopped);
        assert!(!String::from_utf8(record().to_json().unwrap()).unwrap().contains("does_not_run"));
    }

    #[test]
    fn a_file_that_is_no_record_is_refused() {
        let edit = |from: &str, to: &str| {
            let text = String::from_utf8(record().to_json().unwrap()).unwrap();
            assert!(text.contains(from));
            Record::from_json(text.replace(from, to).as_bytes()).unwrap_err()
        };
        assert!(matches!(edit(r#""version": 1"#, r#""version": 2"#), RecordError::Version { found: 2 }));
        assert!(matches!(edit("5a5a", "../5"), RecordError::Malformed(_)));
        assert!(matches!(edit("abab", "+bab"), RecordError::Malformed(_)));
        assert!(matches!(edit(r#""started""#, r#""prepared""#), RecordError::Malformed(_)));
        assert!(matches!(Record::from_json(b""), Err(RecordError::Malformed(_))));
        assert!(matches!(Record::from_json(&[b' '; MAX_RECORD + 1]), Err(RecordError::TooLarge(_))));
    }
}
