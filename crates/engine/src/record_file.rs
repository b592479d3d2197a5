//! The switchover's record on disk: written so that a crash at any moment leaves the old content or the new.
//!
//! `DIR/ID.source.json` and `DIR/ID.destination.json` (mode 0600: they hold the migration's key), each with a `.lock`
//! file beside it. The lock is held from before the record is read or created until the process ends, so that
//! `sterna recover` and a living `sterna send` never act for the same side at once.
//!
//! A user who can change a record decides which of two guests runs, and what `recover` connects to. So a directory is
//! used only where it belongs to this process's user and no other user may write to it, and no file in it is opened
//! through a symbolic link. All files are opened relative to the open directory, which the caller may have opened before:
//! then this process needs no path.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use sterna_wire::control::Mode;
use sterna_wire::identity::MigrationId;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{DestinationState, ProcessIdentity, Record, RecordError, RecordState};

use crate::directory::Directory;
use crate::name_lock::lock_name;
use crate::process;

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
    #[error(
        "there is no record of migration {id} in {dir}: it was settled and removed, it ran on another host, or its records are in another directory (--state-dir)"
    )]
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

/// The directory of migrations' records: a path, or a directory that is open already.
///
/// It is made from a path, or from the [`OwnedFd`] of a directory that was opened for reading, by a process that will not be
/// able to open paths: before that, since this looks at `/proc/self/stat` too. Clones use the same descriptor. Whether the
/// directory can be used is found out with its first use.
#[derive(Clone, Debug)]
pub struct StateDir(Place);

#[derive(Clone, Debug)]
enum Place {
    Path(PathBuf),
    Open {
        directory: Arc<Directory>,
        /// This process, which cannot be looked up without opening a file.
        process: Option<ProcessIdentity>,
    },
}

impl From<OwnedFd> for StateDir {
    fn from(directory: OwnedFd) -> Self {
        let directory = Arc::new(Directory::given(directory, "the given directory"));
        Self(Place::Open { directory, process: process::identity(std::process::id()) })
    }
}

impl From<PathBuf> for StateDir {
    fn from(path: PathBuf) -> Self {
        Self(Place::Path(path))
    }
}

impl From<&PathBuf> for StateDir {
    fn from(path: &PathBuf) -> Self {
        path.clone().into()
    }
}

impl From<&Path> for StateDir {
    fn from(path: &Path) -> Self {
        path.to_owned().into()
    }
}

impl From<String> for StateDir {
    fn from(path: String) -> Self {
        PathBuf::from(path).into()
    }
}

impl From<&str> for StateDir {
    fn from(path: &str) -> Self {
        PathBuf::from(path).into()
    }
}

impl From<&Self> for StateDir {
    fn from(dir: &Self) -> Self {
        dir.clone()
    }
}

impl std::fmt::Display for StateDir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.shown().display().fmt(f)
    }
}

impl StateDir {
    /// Returns whether using it opens a path.
    pub(crate) fn is_path(&self) -> bool {
        matches!(self.0, Place::Path(_))
    }

    /// Returns the identity of this process, if it is known.
    pub(crate) fn own_process(&self) -> Option<ProcessIdentity> {
        let own = std::process::id();
        match &self.0 {
            Place::Open { process: Some(process), .. } if process.pid == own => Some(*process),
            _ => process::identity(own),
        }
    }

    /// Returns its path, as far as it is known.
    fn shown(&self) -> PathBuf {
        match &self.0 {
            Place::Path(path) => path.clone(),
            Place::Open { directory, .. } => directory.path().to_owned(),
        }
    }

    /// Opens it, makes it if it is missing, and checks that no other user may change its content.
    fn make(&self) -> Result<Arc<Directory>, RecordFileError> {
        let Place::Path(path) = &self.0 else { return self.open() };
        Directory::private(path).map(Arc::new).map_err(|source| match path.is_dir() {
            true => RecordFileError::Untrusted { dir: path.clone(), why: source },
            false => self.failed("create the state directory", source),
        })
    }

    /// Opens it and checks that no other user may change its content.
    fn open(&self) -> Result<Arc<Directory>, RecordFileError> {
        let untrusted = |why| RecordFileError::Untrusted { dir: self.shown(), why };
        let directory = match &self.0 {
            Place::Path(path) => Directory::open(path).map(Arc::new).map_err(untrusted)?,
            Place::Open { directory, .. } => {
                directory.check_directory().map_err(|source| self.failed("use the state directory", source))?;
                Arc::clone(directory)
            }
        };
        directory.check_private().map_err(untrusted)?;
        Ok(directory)
    }

    /// Returns whether nothing is there.
    fn is_missing(&self) -> bool {
        matches!(&self.0, Place::Path(path) if !path.exists())
    }

    fn failed(&self, doing: &'static str, source: io::Error) -> RecordFileError {
        RecordFileError::Io { doing, path: self.shown(), source }
    }
}

/// One side's record of one migration, locked.
#[derive(Debug)]
pub struct RecordFile {
    dir: Arc<Directory>,
    name: String,
    record: Record,
    written: bool,
    _lock: File,
}

impl RecordFile {
    /// Locks the path of a new record in `dir`, which is made if it is missing. Nothing is written yet.
    pub fn create(dir: impl Into<StateDir>, record: Record) -> Result<Self, RecordFileError> {
        let dir = dir.into().make()?;
        remove_old(&dir, now_ms());
        let name = name_of(record.migration, Side::of(record.state));
        let lock = lock(&dir, &name)?;
        Ok(Self { dir, name, record, written: false, _lock: lock })
    }

    /// Locks and reads an existing record.
    pub fn open(dir: impl Into<StateDir>, id: MigrationId, side: Side) -> Result<Self, RecordFileError> {
        let place = dir.into();
        let missing = || RecordFileError::Missing { id, dir: place.shown() };
        if place.is_missing() {
            return Err(missing());
        }
        let dir = place.open()?;
        let name = name_of(id, side);
        let is_missing = || dir.identity_of(&name).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if is_missing() {
            return Err(missing());
        }
        let lock = lock(&dir, &name)?;
        // Its owner may have removed it, together with the lock, just before the lock was taken here.
        if is_missing() {
            let _ = dir.remove(beside(&name, "lock"));
            return Err(missing());
        }
        let record = read(&dir, &name)?;
        Ok(Self { dir, name, record, written: true, _lock: lock })
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
        let content = |source| RecordFileError::Content { path: self.dir.path().join(&self.name), source };
        replace(&self.dir, &self.name, &record.to_json().map_err(content)?)?;
        self.record = record;
        self.written = true;
        Ok(())
    }
}

/// Makes the state directory if it is missing, and checks that a record can be written there.
///
/// # Errors
/// The directory cannot be made or written to, or other users could change its content.
pub fn prepare(dir: impl Into<StateDir>) -> Result<(), RecordFileError> {
    let place = dir.into();
    let open = place.make()?;
    let probe = format!(".probe-{}", std::process::id());
    // A killed process with the same number may have left a probe.
    let _ = open.remove(&probe);
    let written =
        open.create_new(&probe, 0o600).and_then(|mut file| file.write_all(b"probe").and_then(|()| file.sync_all()));
    // If the probe could not be made, there is nothing to remove.
    let _ = open.remove(&probe);
    written.map_err(|source| place.failed("write to the state directory", source))
}

/// Returns the names of the files in `dir` with these endings.
fn names(dir: &Directory, endings: &[&str]) -> Vec<String> {
    let names = dir.names().unwrap_or_default().into_iter().filter_map(|name| name.into_string().ok());
    names.filter(|name| endings.iter().any(|ending| extension(name) == Some(ending))).collect()
}

fn extension(name: &str) -> Option<&str> {
    Path::new(name).extension()?.to_str()
}

/// Returns the name of the file beside a record's that has this ending.
fn beside(record: &str, ending: &str) -> String {
    Path::new(record).with_extension(ending).display().to_string()
}

/// Removes records that were settled long ago, and files that crashes have left. Before that time the other side may
/// still request the outcome.
fn remove_old(dir: &Directory, now_ms: u64) {
    for name in names(dir, &["json", "lock", "new"]) {
        let removable = match extension(&name) {
            Some("json") => is_old,
            _ => is_leftover,
        };
        // Asked again with the lock held: another process may have been at work on the record.
        if removable(dir, &name, now_ms)
            && let Ok(_lock) = lock(dir, &name)
            && removable(dir, &name, now_ms)
        {
            for ending in ["json", "new", "lock"] {
                // A leftover has no record, and few records have a temporary file.
                let _ = dir.remove(beside(&name, ending));
            }
        }
    }
}

/// Returns whether `name` is a record that was settled long ago.
fn is_old(dir: &Directory, name: &str, now_ms: u64) -> bool {
    read(dir, name).is_ok_and(|record| is_over(&record) && record.updated_ms + RETENTION_MS < now_ms)
}

/// Returns whether the record is not needed any more. An aborted destination's record is needed while its monitor lives,
/// which must still be ended; a monitor that embeds the library has discarded its copy by itself, or ended. If another
/// process has the monitor's number by now, the record is merely kept longer.
fn is_over(record: &Record) -> bool {
    let gone = |monitor: ProcessIdentity| !Path::new("/proc").join(monitor.pid.to_string()).exists();
    let aborted = record.state == RecordState::Destination(DestinationState::Aborted);
    record.state.settled() || aborted && (record.mode == Mode::Embedded || record.monitor_process.is_some_and(gone))
}

/// Returns whether an auxiliary file belongs to a record that does not exist, and was made long ago.
fn is_leftover(dir: &Directory, name: &str, now_ms: u64) -> bool {
    let stem = Path::new(name).file_stem().and_then(|stem| stem.to_str()).and_then(|stem| stem.rsplit_once('.'));
    let ours = stem.is_some_and(|(id, side)| {
        id.parse::<MigrationId>().is_ok() && [Side::Source, Side::Destination].iter().any(|known| known.name() == side)
    });
    ours && dir.modified_ms(name).is_ok_and(|made_ms| made_ms + RETENTION_MS < now_ms)
        && dir.identity_of(beside(name, "json")).is_err()
}

/// Returns the records of `dir` that are not settled yet. Unreadable records are omitted: `recover` reports what is
/// wrong with them.
///
/// # Errors
/// The directory exists, and other users could change its content.
pub fn unsettled(dir: impl Into<StateDir>) -> Result<Vec<Record>, RecordFileError> {
    let mut records = all(dir)?;
    records.retain(|record| !record.state.settled());
    Ok(records)
}

/// Returns the records of `dir`, as [`unsettled`] does, with those that are settled.
///
/// # Errors
/// The directory exists, and other users could change its content.
pub fn all(dir: impl Into<StateDir>) -> Result<Vec<Record>, RecordFileError> {
    let place = dir.into();
    if place.is_missing() {
        return Ok(Vec::new());
    }
    let dir = place.open()?;
    Ok(names(&dir, &["json"]).into_iter().filter_map(|name| read(&dir, &name).ok()).collect())
}

/// Returns the milliseconds since 1970, for the record's time stamps.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn name_of(id: MigrationId, side: Side) -> String {
    format!("{id}.{}.json", side.name())
}

fn lock(dir: &Directory, record: &str) -> Result<File, RecordFileError> {
    let name = beside(record, "lock");
    match lock_name(dir, &name) {
        Ok(Some(file)) => Ok(file),
        Ok(None) => Err(RecordFileError::Locked { path: dir.path().join(name) }),
        Err(source) => Err(failed("open and lock the lock file", dir, &name, source)),
    }
}

fn read(dir: &Directory, name: &str) -> Result<Record, RecordFileError> {
    let mut content = Vec::new();
    dir.open_file(name)
        .and_then(|file| file.take(MAX_LENGTH + 1).read_to_end(&mut content))
        .map_err(|source| failed("read the record", dir, name, source))?;
    Record::from_json(&content).map_err(|source| RecordFileError::Content { path: dir.path().join(name), source })
}

/// Replaces a file durably: temporary file, `fsync`, rename, `fsync` of the directory.
fn replace(dir: &Directory, name: &str, content: &[u8]) -> Result<(), RecordFileError> {
    let temporary = beside(name, "new");
    dir.create_or_empty(&temporary)
        .and_then(|mut file| {
            file.write_all(content)?;
            file.sync_all()
        })
        .map_err(|source| failed("write the record", dir, &temporary, source))?;
    dir.rename(&temporary, name)
        .and_then(|()| dir.sync())
        .map_err(|source| failed("put the record in place", dir, name, source))
}

fn failed(doing: &'static str, dir: &Directory, name: &str, source: io::Error) -> RecordFileError {
    RecordFileError::Io { doing, path: dir.path().join(name), source }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use sterna_wire::identity::MigrationKey;
    use sterna_wire::switchover::{RECORD_VERSION, SourceAfter, SourceState};

    use super::*;

    fn path_of(dir: &Path, id: MigrationId, side: Side) -> PathBuf {
        dir.join(name_of(id, side))
    }

    fn remove_old(dir: &Path, now_ms: u64) {
        super::remove_old(&Directory::open(dir).unwrap(), now_ms);
    }

    impl RecordFile {
        fn path(&self) -> PathBuf {
            self.dir.path().join(&self.name)
        }
    }

    fn record(state: SourceState) -> Record {
        Record {
            version: RECORD_VERSION,
            migration: MigrationId::from_bytes([1; 16]),
            state: RecordState::Source(state),
            fenced_peer: false,
            peer: "dst:4920".into(),
            mode: Mode::Owner,
            monitor_socket: "src.qmp".into(),
            monitor_process: None,
            settings_before: None,
            completion_permitted: false,
            pausing: false,
            disputed: None,
            does_not_run: None,
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
        let mode = fs::metadata(file.path()).unwrap().permissions().mode();
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
        assert!(file.path().exists());

        file.write(RecordState::Source(SourceState::Finished)).unwrap();
        remove_old(dir.path(), now_ms());
        assert!(file.path().exists());
        remove_old(dir.path(), now_ms() + 2 * RETENTION_MS);
        assert!(file.path().exists() && file.path().with_extension("lock").exists(), "a process is at work on it");
        let path = file.path();
        drop(file);
        remove_old(dir.path(), now_ms() + 2 * RETENTION_MS);
        assert!(!path.exists() && !path.with_extension("lock").exists());
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
            assert!(file.path().exists(), "not settled");
            file.write(RecordState::Destination(DestinationState::Aborted)).unwrap();
            let path = file.path();
            drop(file);
            remove_old(dir.path(), now_ms());
            assert!(path.exists(), "not old");
            remove_old(dir.path(), now_ms() + 2 * RETENTION_MS);
            assert_eq!(path.exists(), kept, "{qemu:?}");
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
        assert!(used.path().with_extension("lock").exists(), "its record is about to be written");
    }

    #[test]
    fn a_state_directory_that_cannot_be_written_to_is_refused_beforehand() {
        let dir = tempfile::tempdir().unwrap();
        let made = dir.path().join("a/b");
        prepare(&made).unwrap();
        assert_eq!(fs::read_dir(&made).unwrap().count(), 0, "nothing is left in it");
        fs::write(dir.path().join("file"), "").unwrap();
        let error = prepare(dir.path().join("file/state")).unwrap_err();
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
    fn an_open_directory_serves_wherever_its_path_leads_by_now() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("state");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        let dir = StateDir::from(OwnedFd::from(File::open(&path).unwrap()));
        let moved = scratch.path().join("moved");
        fs::rename(&path, &moved).unwrap();

        prepare(&dir).unwrap();
        let mut file = RecordFile::create(&dir, record(SourceState::Started)).unwrap();
        file.write(RecordState::Source(SourceState::Committed)).unwrap();
        drop(file);
        let id = MigrationId::from_bytes([1; 16]);
        assert_eq!(unsettled(&dir).unwrap().len(), 1);
        assert!(path_of(&moved, id, Side::Source).exists() && !path.exists());
        assert!(RecordFile::open(&dir, id, Side::Source).is_ok());
        assert_eq!(dir.own_process(), process::identity(std::process::id()));

        fs::set_permissions(&moved, fs::Permissions::from_mode(0o770)).unwrap();
        let refused = RecordFile::open(&dir, id, Side::Source).unwrap_err();
        assert!(matches!(refused, RecordFileError::Untrusted { .. }), "{refused}");
        let file = StateDir::from(OwnedFd::from(tempfile::tempfile().unwrap()));
        let refused = prepare(&file).unwrap_err().to_string();
        assert!(refused.contains("cannot use the state directory"), "{refused}");
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
