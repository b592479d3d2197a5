//! The switchover's record on disk: written so that a crash at any moment leaves the old content or the new.
//!
//! `DIR/ID.source.json` and `DIR/ID.destination.json` (mode 0600: they hold the migration's key), each with a `.lock`
//! file beside it. The lock is held from before the record is read or created until the process ends, so that
//! `sterna recover` and a living `sterna send` never act for the same side at once.
//!
//! A user who can change a record decides which of two guests runs, and what `recover` connects to. So a directory is
//! used only where it belongs to this process's user and no other user may write to it, and no file in it is opened
//! through a symbolic link.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};
use sterna_wire::identity::MigrationId;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{DestinationState, ProcessIdentity, Record, RecordError, RecordState};

use crate::directory::{Directory, open_without_link};

/// Maximum bytes of a record: a longer file is not a record.
const MAX_LENGTH: u64 = 64 << 10;

/// Time for which settled records are kept, in milliseconds: a week.
const RETENTION_MS: u64 = 7 * 24 * 3600 * 1000;

/// The side of a migration to which a record belongs. Both records may be in one directory when a guest moves within a
/// host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The source.
    Source,
    /// The destination.
    Destination,
}

impl Side {
    const fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }

    /// Returns the side to which a state belongs.
    pub const fn of(state: RecordState) -> Self {
        match state {
            RecordState::Source(_) => Self::Source,
            RecordState::Destination(_) => Self::Destination,
        }
    }
}

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordFileError {
    /// A file operation failed.
    #[error("cannot {doing} {path}: {source}")]
    Io {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Other users could read or change the records.
    #[error("the state directory {dir} cannot be trusted: {why}", dir = dir.display())]
    Untrusted {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with it, and what to do.
        why: io::Error,
    },
    /// Another process acts for this side of the migration.
    #[error("{path} is locked: another sterna process is at work on this side of the migration; let it end first")]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// There is no such record.
    #[error("there is no record of migration {id} in {dir}: it was settled and removed, or it ran on another host")]
    Missing {
        /// The migration.
        id: MigrationId,
        /// The directory that was searched.
        dir: PathBuf,
    },
    /// The file's content is not a record.
    #[error("{path}: {source}")]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: RecordError,
    },
}

impl RecordFileError {
    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { source, .. } => ErrorKind::of_io(source, ErrorKind::Record),
            _ => ErrorKind::Record,
        }
    }

    /// Returns the error as a reason.
    pub(crate) fn into_reason(self) -> Reason {
        Reason::new(self.kind(), self)
    }
}

/// One side's record of one migration, locked.
#[derive(Debug)]
pub struct RecordFile {
    path: PathBuf,
    record: Record,
    written: bool,
    _lock: File,
}

impl RecordFile {
    /// Locks the path of a new record in `dir`, which is made if it is missing. Nothing is written yet.
    pub fn create(dir: &Path, record: Record) -> Result<Self, RecordFileError> {
        make(dir)?;
        remove_old(dir, now_ms());
        let path = path_of(dir, record.migration, Side::of(record.state));
        let lock = lock(&path)?;
        Ok(Self { path, record, written: false, _lock: lock })
    }

    /// Locks and reads an existing record.
    pub fn open(dir: &Path, id: MigrationId, side: Side) -> Result<Self, RecordFileError> {
        let path = path_of(dir, id, side);
        if !path.exists() {
            return Err(RecordFileError::Missing { id, dir: dir.to_owned() });
        }
        trust(dir)?;
        let lock = lock(&path)?;
        let record = read(&path)?;
        Ok(Self { path, record, written: true, _lock: lock })
    }

    /// Returns the record as it was last written, or as it will be written first.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Returns whether the record has ever been written.
    pub fn written(&self) -> bool {
        self.written
    }

    /// Changes the record for the next write.
    pub fn amend(&mut self, change: impl FnOnce(&mut Record)) {
        change(&mut self.record);
    }

    /// Writes the record in a new state, durably: once this function has returned, a power cut does not undo the write.
    pub fn write(&mut self, state: RecordState) -> Result<(), RecordFileError> {
        let record = self.record.advanced(state, std::process::id(), now_ms());
        let content = |source| RecordFileError::Content { path: self.path.clone(), source };
        replace(&self.path, &record.to_json().map_err(content)?)?;
        self.record = record;
        self.written = true;
        Ok(())
    }
}

/// Makes the state directory if it is missing, and checks that a record can be written there.
///
/// # Errors
/// The directory cannot be made or written to, or other users could change its content.
pub fn prepare(dir: &Path) -> Result<(), RecordFileError> {
    let open = make(dir)?;
    let probe = format!(".probe-{}", std::process::id());
    // A killed process with the same number may have left a probe.
    let _ = open.remove(&probe);
    let written =
        open.create_new(&probe, 0o600).and_then(|mut file| file.write_all(b"probe").and_then(|()| file.sync_all()));
    // If the probe could not be made, there is nothing to remove.
    let _ = open.remove(&probe);
    written.map_err(|source| failed("write to the state directory", dir, source))
}

/// Makes the state directory if it is missing, and opens it.
fn make(dir: &Path) -> Result<Directory, RecordFileError> {
    Directory::private(dir).map_err(|source| match dir.is_dir() {
        true => RecordFileError::Untrusted { dir: dir.to_owned(), why: source },
        false => failed("create the state directory", dir, source),
    })
}

/// Checks a state directory that exists.
fn trust(dir: &Path) -> Result<(), RecordFileError> {
    let checked = Directory::open(dir).and_then(|open| open.check_private());
    checked.map_err(|why| RecordFileError::Untrusted { dir: dir.to_owned(), why })
}

/// Removes records that were settled long ago, and files that crashes have left. Before that time the other side may
/// still request the outcome.
fn remove_old(dir: &Path, now_ms: u64) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => {
                let old = |record: &Record| is_over(record) && record.updated_ms + RETENTION_MS < now_ms;
                if read(&path).is_ok_and(|record| old(&record)) {
                    // Fails if another process removes the file at the same time.
                    let _ = fs::remove_file(&path);
                    let _ = fs::remove_file(path.with_extension("lock"));
                }
            }
            Some("lock" | "new") if is_leftover(&path, now_ms) => {
                let _ = fs::remove_file(&path);
            }
            _ => {}
        }
    }
}

/// Returns whether the record is not needed any more. An aborted destination's record is needed while its QEMU lives,
/// which must still be ended. If another process has QEMU's number by now, the record is merely kept longer.
fn is_over(record: &Record) -> bool {
    let gone = |qemu: ProcessIdentity| !Path::new("/proc").join(qemu.pid.to_string()).exists();
    let aborted = record.state == RecordState::Destination(DestinationState::Aborted);
    record.state.settled() || aborted && record.monitor_process.is_some_and(gone)
}

/// Returns whether an auxiliary file belongs to a record that does not exist, was made long ago and is not in use.
fn is_leftover(path: &Path, now_ms: u64) -> bool {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| stem.rsplit_once('.'));
    let ours = stem.is_some_and(|(id, side)| {
        id.parse::<MigrationId>().is_ok() && [Side::Source, Side::Destination].iter().any(|known| known.name() == side)
    });
    let made = fs::metadata(path).and_then(|file| file.modified()).ok();
    let made_ms = made.and_then(|made| made.duration_since(UNIX_EPOCH).ok()).map(|since| since.as_millis() as u64);
    ours && made_ms.is_some_and(|made_ms| made_ms + RETENTION_MS < now_ms)
        && !path.with_extension("json").exists()
        && File::open(path).is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
}

/// Returns the records of `dir` that are not settled yet. Unreadable records are omitted: `recover` reports what is
/// wrong with them.
///
/// # Errors
/// The directory exists, and other users could change its content.
pub fn unsettled(dir: &Path) -> Result<Vec<Record>, RecordFileError> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(Vec::new()) };
    trust(dir)?;
    let records =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "json"));
    Ok(records.filter_map(|path| read(&path).ok()).filter(|record| !record.state.settled()).collect())
}

/// Returns the milliseconds since 1970, for the record's time stamps.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn path_of(dir: &Path, id: MigrationId, side: Side) -> PathBuf {
    dir.join(format!("{id}.{}.json", side.name()))
}

fn lock(record: &Path) -> Result<File, RecordFileError> {
    let path = record.with_extension("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)
        .map_err(|source| failed("open the lock file", &path, source))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(RecordFileError::Locked { path }),
        Err(errno) => Err(failed("lock", &path, errno.into())),
    }
}

fn read(path: &Path) -> Result<Record, RecordFileError> {
    let mut content = Vec::new();
    open_without_link(path)
        .and_then(|file| file.take(MAX_LENGTH + 1).read_to_end(&mut content))
        .map_err(|source| failed("read the record", path, source))?;
    Record::from_json(&content).map_err(|source| RecordFileError::Content { path: path.to_owned(), source })
}

/// Replaces a file durably: temporary file, `fsync`, rename, `fsync` of the directory.
fn replace(path: &Path, content: &[u8]) -> Result<(), RecordFileError> {
    let temporary = path.with_extension("new");
    let mut options = OpenOptions::new();
    options.create(true).truncate(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options
        .open(&temporary)
        .and_then(|mut file| {
            file.write_all(content)?;
            file.sync_all()
        })
        .map_err(|source| failed("write the record", &temporary, source))?;
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::rename(&temporary, path)
        .and_then(|()| File::open(dir)?.sync_all())
        .map_err(|source| failed("put the record in place", path, source))
}

fn failed(doing: &'static str, path: &Path, source: io::Error) -> RecordFileError {
    RecordFileError::Io { doing, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use sterna_wire::identity::MigrationKey;
    use sterna_wire::switchover::{RECORD_VERSION, SourceAfter, SourceState};

    use super::*;

    fn record(state: SourceState) -> Record {
        Record {
            version: RECORD_VERSION,
            migration: MigrationId::from_bytes([1; 16]),
            state: RecordState::Source(state),
            fenced_peer: false,
            peer: "dst:4920".into(),
            mode: sterna_wire::control::Mode::Owner,
            monitor_socket: "src.qmp".into(),
            monitor_process: None,
            settings_before: None,
            completion_permitted: false,
            pausing: false,
            source_after: SourceAfter::Keep,
            key: MigrationKey::from_bytes([2; 32]),
            pid: 0,
            created_ms: now_ms(),
            updated_ms: now_ms(),
        }
    }

    #[test]
    fn a_record_written_is_read_back_and_only_its_owner_may_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = RecordState::Source(SourceState::Committed);
        let mut file = RecordFile::create(dir.path(), record(SourceState::Started)).unwrap();
        file.write(state).unwrap();
        let mode = fs::metadata(&file.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(file);

        let file = RecordFile::open(dir.path(), MigrationId::from_bytes([1; 16]), Side::Source).unwrap();
        assert_eq!(file.record().state, state);
        assert_eq!(file.record().pid, std::process::id());
    }

    #[test]
    fn a_second_process_is_kept_out_while_the_first_lives() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = RecordFile::create(dir.path(), record(SourceState::Started)).unwrap();
        first.write(RecordState::Source(SourceState::Started)).unwrap();
        let id = MigrationId::from_bytes([1; 16]);

        assert!(matches!(RecordFile::open(dir.path(), id, Side::Source), Err(RecordFileError::Locked { .. })));
        drop(first);
        assert!(RecordFile::open(dir.path(), id, Side::Source).is_ok());
    }

    #[test]
    fn a_missing_or_damaged_record_is_an_error_and_a_leftover_is_not_read_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let id = MigrationId::from_bytes([1; 16]);
        assert!(matches!(RecordFile::open(dir.path(), id, Side::Source), Err(RecordFileError::Missing { .. })));

        let path = path_of(dir.path(), id, Side::Source);
        fs::write(path.with_extension("new"), "half a rec").unwrap();
        assert!(matches!(RecordFile::open(dir.path(), id, Side::Source), Err(RecordFileError::Missing { .. })));
        fs::write(&path, "half a rec").unwrap();
        assert!(matches!(RecordFile::open(dir.path(), id, Side::Source), Err(RecordFileError::Content { .. })));
    }

    #[test]
    fn records_settled_long_ago_are_removed_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = RecordFile::create(dir.path(), record(SourceState::Started)).unwrap();
        file.write(RecordState::Source(SourceState::Committed)).unwrap();
        remove_old(dir.path(), now_ms() + 2 * RETENTION_MS);
        assert!(file.path.exists());

        file.write(RecordState::Source(SourceState::Finished)).unwrap();
        remove_old(dir.path(), now_ms());
        assert!(file.path.exists());
        remove_old(dir.path(), now_ms() + 2 * RETENTION_MS);
        assert!(!file.path.exists());
    }

    #[test]
    fn an_aborted_destination_is_forgotten_once_its_qemu_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let qemu = |pid| Some(ProcessIdentity { pid, start_ticks: 1 });
        for (qemu, kept) in [(qemu(child.id()), false), (qemu(std::process::id()), true), (None, true)] {
            let record = Record { monitor_process: qemu, ..record(SourceState::Started) };
            let started = Record { state: RecordState::Destination(DestinationState::Started), ..record };
            let mut file = RecordFile::create(dir.path(), started).unwrap();
            file.write(RecordState::Destination(DestinationState::Prepared)).unwrap();
            remove_old(dir.path(), now_ms() + 2 * RETENTION_MS);
            assert!(file.path.exists(), "not settled");
            file.write(RecordState::Destination(DestinationState::Aborted)).unwrap();
            remove_old(dir.path(), now_ms());
            assert!(file.path.exists(), "not old");
            remove_old(dir.path(), now_ms() + 2 * RETENTION_MS);
            assert_eq!(file.path.exists(), kept, "{qemu:?}");
        }
    }

    #[test]
    fn leftovers_of_crashes_are_removed_and_files_in_use_or_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let later = now_ms() + 2 * RETENTION_MS;
        let name = |end: &str| dir.path().join(format!("{}{end}", MigrationId::from_bytes([9; 16])));
        let left = [name(".source.lock"), name(".destination.lock"), name(".source.new")];
        let not_ours = [dir.path().join("my.lock"), name(".other.lock"), dir.path().join("notes.new")];
        for path in left.iter().chain(&not_ours) {
            fs::write(path, "").unwrap();
        }
        let used = RecordFile::create(dir.path(), record(SourceState::Started)).unwrap();
        remove_old(dir.path(), now_ms());
        assert!(left.iter().all(|path| path.exists()), "not old");
        remove_old(dir.path(), later);
        assert!(!left.iter().any(|path| path.exists()));
        assert!(not_ours.iter().all(|path| path.exists()));
        assert!(used.path.with_extension("lock").exists(), "its record is about to be written");
    }

    #[test]
    fn a_state_directory_that_cannot_be_written_to_is_refused_beforehand() {
        let dir = tempfile::tempdir().unwrap();
        let made = dir.path().join("a/b");
        prepare(&made).unwrap();
        assert_eq!(fs::read_dir(&made).unwrap().count(), 0, "nothing is left in it");
        fs::write(dir.path().join("file"), "").unwrap();
        let error = prepare(&dir.path().join("file/state")).unwrap_err();
        assert!(error.to_string().contains("state directory"), "{error}");
    }

    #[test]
    fn a_state_directory_that_others_can_change_is_refused_for_every_use() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = RecordFile::create(dir.path(), record(SourceState::Started)).unwrap();
        file.write(RecordState::Source(SourceState::Committed)).unwrap();
        drop(file);
        let id = MigrationId::from_bytes([1; 16]);
        let uses: [(&str, &dyn Fn() -> Option<RecordFileError>); 4] = [
            ("prepare", &|| prepare(dir.path()).err()),
            ("create", &|| RecordFile::create(dir.path(), record(SourceState::Started)).err()),
            ("open", &|| RecordFile::open(dir.path(), id, Side::Source).err()),
            ("unsettled", &|| unsettled(dir.path()).err()),
        ];
        for mode in [0o777, 0o1777, 0o770, 0o702] {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            for (name, refused) in uses {
                let refused = refused().unwrap_or_else(|| panic!("{name} took a directory of mode {mode:o}"));
                assert!(matches!(refused, RecordFileError::Untrusted { .. }), "{name}: {refused}");
                assert!(refused.to_string().contains("others may write"), "{name}: {refused}");
            }
        }
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for (name, refused) in uses {
            assert!(refused().is_none(), "{name}");
        }
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: a directory of another user, which only root can make");
            return;
        }
        std::os::unix::fs::chown(dir.path(), Some(65534), None).unwrap();
        for (name, refused) in uses {
            let refused = refused().unwrap_or_else(|| panic!("{name} took a directory of another user"));
            assert!(refused.to_string().contains("belongs to user 65534"), "{name}: {refused}");
        }
    }

    #[test]
    fn a_probe_or_record_that_is_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = tempfile::NamedTempFile::new().unwrap();
        fs::write(victim.path(), "precious").unwrap();
        let id = MigrationId::from_bytes([1; 16]);
        let path = path_of(dir.path(), id, Side::Source);
        let links = [
            dir.path().join(format!(".probe-{}", std::process::id())),
            path.with_extension("lock"),
            path.with_extension("new"),
        ];
        for link in &links {
            std::os::unix::fs::symlink(victim.path(), link).unwrap();
        }
        prepare(dir.path()).unwrap();
        RecordFile::create(dir.path(), record(SourceState::Started)).unwrap_err();
        fs::remove_file(&links[1]).unwrap();
        let mut file = RecordFile::create(dir.path(), record(SourceState::Started)).unwrap();
        file.write(RecordState::Source(SourceState::Committed)).unwrap_err();
        assert_eq!(fs::read_to_string(victim.path()).unwrap(), "precious");

        fs::remove_file(&links[2]).unwrap();
        file.write(RecordState::Source(SourceState::Committed)).unwrap();
        drop(file);
        fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
        RecordFile::open(dir.path(), id, Side::Source).unwrap_err();
    }

    #[test]
    fn only_unsettled_records_are_listed() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = RecordFile::create(dir.path(), record(SourceState::Started)).unwrap();
        assert!(unsettled(dir.path()).unwrap().is_empty());
        file.write(RecordState::Source(SourceState::Committed)).unwrap();
        assert_eq!(unsettled(dir.path()).unwrap().len(), 1);
        file.write(RecordState::Source(SourceState::Finished)).unwrap();
        assert!(unsettled(dir.path()).unwrap().is_empty());
    }
}
