//! `--json FILE` and similar options: files that a command writes for programs, complete or not at all.
//!
//! The place is reserved before the guest is touched, so that a wrong path is an error and not a lost report. The file gets its
//! name by a rename when the report is complete. An existing file that is not a regular one (`/dev/stdout`, a pipe) is
//! written to, and never replaced.
//!
//! The directory may belong to another user. It is opened once, and a symbolic link of another user in it is refused, because
//! it could make root replace any file of the host.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde::Serialize;
use sterna_engine::directory::Directory;

/// A place for a report.
#[derive(Debug)]
pub(super) struct ReportFile {
    place: Place,
    named: Named,
}

/// How error texts name a file: by the option that gives it, and by its content.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    pub(super) option: &'static str,
    pub(super) what: &'static str,
}

/// The report of a migration.
const REPORT: Named = Named { option: "--json", what: "report" };

#[derive(Debug)]
enum Place {
    Stdout,
    /// Written directly.
    Special(PathBuf),
    /// Renamed when complete.
    Regular(Temporary, PathBuf),
}

/// A file beside its place, removed unless it has been moved there.
#[derive(Debug)]
struct Temporary {
    file: File,
    directory: Directory,
    name: OsString,
    /// The name in its place.
    target: OsString,
}

impl Temporary {
    fn make(directory: Directory, target: OsString) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = OsString::from(format!(".sterna-report-{}-{number}", std::process::id()));
            // The usual mode of new files, reduced by the umask.
            match directory.create_new(&name, 0o666) {
                Ok(file) => return Ok(Self { file, directory, name, target }),
                // Left by a process that was killed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn put_in_place(self) -> io::Result<()> {
        self.file.sync_all()?;
        self.directory.rename(&self.name, &self.target)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Fails if the file has been moved to its place.
        let _ = self.directory.remove(&self.name);
    }
}

/// The report cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "{option}: cannot write the {what} to {path}: {why}",
    option = named.option, what = named.what, path = path.display(), why = self.why()
)]
pub(super) struct ReportFileError {
    named: Named,
    path: PathBuf,
    source: io::Error,
}

impl ReportFileError {
    /// Returns whether the reader of a pipe has closed it.
    pub(super) fn is_unread(&self) -> bool {
        self.source.kind() == io::ErrorKind::BrokenPipe
    }

    /// Returns the reason, and what to do about it if that is known.
    fn why(&self) -> String {
        match self.source.kind() {
            io::ErrorKind::NotFound => {
                let directory = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
                let directory = directory.unwrap_or(Path::new("."));
                format!("there is no directory {}; make it, or give another path", directory.display())
            }
            io::ErrorKind::NotADirectory => "a part of the path is no directory; give another path".to_owned(),
            io::ErrorKind::IsADirectory => "it is a directory; give the path of a file".to_owned(),
            io::ErrorKind::PermissionDenied => {
                "permission denied; give a path in a directory that you may write to".to_owned()
            }
            _ => self.source.to_string(),
        }
    }
}

impl ReportFile {
    /// Reserves `path` for a report; `-` is stdout.
    pub(super) fn reserve(path: &Path) -> Result<Self, ReportFileError> {
        Self::reserve_for(REPORT, path)
    }

    /// Reserves `path` for the content that `named` describes.
    pub(super) fn reserve_for(named: Named, path: &Path) -> Result<Self, ReportFileError> {
        if path == "-" {
            return match crate::stdout::check() {
                Ok(()) => Ok(Self { place: Place::Stdout, named }),
                Err(source) => Err(ReportFileError { named, path: "stdout".into(), source }),
            };
        }
        match Place::reserve(path) {
            Ok(place) => Ok(Self { place, named }),
            Err(source) => Err(ReportFileError { named, path: path.to_owned(), source }),
        }
    }

    pub(super) fn is_stdout(&self) -> bool {
        matches!(self.place, Place::Stdout)
    }

    /// Writes `content`; then the file appears.
    pub(super) fn write(self, content: &impl Serialize) -> Result<(), ReportFileError> {
        let text = serde_json::to_vec_pretty(content).map(|mut text| {
            text.push(b'\n');
            text
        });
        match text {
            Ok(text) => self.write_bytes(&text),
            Err(error) => Err(self.error(error.into())),
        }
    }

    /// Writes `text`; then the file appears.
    pub(super) fn write_bytes(self, text: &[u8]) -> Result<(), ReportFileError> {
        self.stream()?.write_all(text).map_err(|source| self.error(source))?;
        self.keep()
    }

    /// Returns a writer for the content; [`keep`](Self::keep) completes the file.
    pub(super) fn stream(&self) -> Result<Box<dyn Write + Send>, ReportFileError> {
        let stream = || -> io::Result<Box<dyn Write + Send>> {
            Ok(match &self.place {
                Place::Stdout => Box::new(io::stdout()),
                Place::Special(path) => {
                    let file = OpenOptions::new().write(true).open(path)?;
                    if file.metadata()?.is_file() {
                        return Err(io::Error::other("another file has taken its place meanwhile"));
                    }
                    Box::new(file)
                }
                Place::Regular(temporary, _) => Box::new(temporary.file.try_clone()?),
            })
        };
        stream().map_err(|source| self.error(source))
    }

    /// Completes the file, which then appears.
    pub(super) fn keep(self) -> Result<(), ReportFileError> {
        let (named, path) = (self.named, self.path());
        self.place.keep().map_err(|source| ReportFileError { named, path, source })
    }

    /// Returns the error for content that could not be written.
    pub(super) fn error(&self, source: io::Error) -> ReportFileError {
        ReportFileError { named: self.named, path: self.path(), source }
    }

    fn path(&self) -> PathBuf {
        match &self.place {
            Place::Stdout => PathBuf::from("stdout"),
            Place::Special(path) | Place::Regular(_, path) => path.clone(),
        }
    }
}

impl Place {
    fn reserve(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if !found.is_file() => return Ok(Self::Special(path.to_owned())),
            _ => {}
        }
        let (directory, name) = behind_links(path)?;
        let path = directory.path().join(&name);
        Ok(Self::Regular(Temporary::make(directory, name)?, path))
    }

    fn keep(self) -> io::Result<()> {
        match self {
            Self::Stdout => io::stdout().flush(),
            Self::Special(_) => Ok(()),
            Self::Regular(temporary, _) => temporary.put_in_place(),
        }
    }
}

/// Returns the directory and name of a file. Symbolic links are followed, so that the target is replaced and not the link.
fn behind_links(path: &Path) -> io::Result<(Directory, OsString)> {
    const MAX_LINKS: usize = 40; // as path_resolution(7)
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let (directory, name) = Directory::parent_of(&path)?;
        match directory.link(&name)? {
            None => return Ok((directory, name)),
            Some((_, owner)) if ![0, rustix::process::geteuid().as_raw()].contains(&owner) => {
                let refused =
                    format!("it is a symbolic link of user {owner}, which is not followed; give another path");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, refused));
            }
            Some((target, _)) => path = directory.path().join(target),
        }
    }
    Err(io::Error::other("too many symbolic links"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_file_appears_with_its_content_and_nothing_else_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.json");
        let file = ReportFile::reserve(&path).unwrap();
        assert!(!path.exists());

        file.write(&[1, 2]).unwrap();

        assert_eq!(serde_json::from_slice::<Vec<i32>>(&fs::read(&path).unwrap()).unwrap(), [1, 2]);
        assert_eq!(names(directory.path()), ["report.json"]);
    }

    #[test]
    fn an_old_report_stays_until_the_new_one_is_complete() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.json");
        fs::write(&path, "old").unwrap();

        drop(ReportFile::reserve(&path).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(directory.path()), ["report.json"]);

        ReportFile::reserve(&path).unwrap().write(&"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "\"new\"\n");
    }

    #[test]
    fn a_link_keeps_pointing_to_its_file_and_a_device_stays_a_device() {
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("target"), directory.path().join("link"));
        fs::write(&target, "old").unwrap();
        symlink(&target, &link).unwrap();

        ReportFile::reserve(&link).unwrap().write(&"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&target).unwrap(), "\"new\"\n");

        let null = ReportFile::reserve(Path::new("/dev/null")).unwrap();
        assert!(matches!(null.place, Place::Special(_)));
        null.write(&"gone").unwrap();
    }

    #[test]
    fn a_link_that_another_user_has_put_there_is_not_followed() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can make a link of another user");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("target"), directory.path().join("link"));
        fs::write(&target, "precious").unwrap();
        symlink(&target, &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();

        let refused = ReportFile::reserve(&link).unwrap_err().to_string();

        assert!(refused.contains("symbolic link of user 65534"), "{refused}");
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        assert_eq!(names(directory.path()), ["link", "target"]);
    }

    #[test]
    fn a_directory_that_is_exchanged_on_the_way_does_not_lead_the_report_elsewhere() {
        let directory = tempfile::tempdir().unwrap();
        let (given, moved, other) = (["given", "moved", "other"]).map(|name| directory.path().join(name)).into();
        fs::create_dir(&given).unwrap();
        fs::create_dir(&other).unwrap();
        fs::write(other.join("report.json"), "precious").unwrap();
        let file = ReportFile::reserve(&given.join("report.json")).unwrap();
        fs::rename(&given, &moved).unwrap();
        symlink(&other, &given).unwrap();

        file.write(&1).unwrap();

        assert_eq!(fs::read_to_string(other.join("report.json")).unwrap(), "precious");
        assert_eq!(names(&other), ["report.json"]);
        assert_eq!(names(&moved), ["report.json"]);
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error_before_anything_begins() {
        let directory = tempfile::tempdir().unwrap();
        for path in [directory.path().to_owned(), directory.path().join("missing/report.json"), "/".into(), "..".into()]
        {
            let error = ReportFile::reserve(&path).unwrap_err().to_string();
            assert!(error.starts_with("--json: cannot write the report to ") && !error.contains('\n'), "{error}");
        }
        assert!(ReportFile::reserve(Path::new("-")).unwrap().is_stdout());
    }
}
