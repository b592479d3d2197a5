//! `--json FILE` and its like: what a command writes for machines, whole or not at all.
//!
//! The place is reserved before the guest is touched, so that a wrong path is an error and not a lost report; the name
//! appears by a rename when the report is complete. An existing file that is no regular one (`/dev/stdout`, a pipe) is
//! written to instead, never replaced.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::NamedTempFile;

/// A place for a report.
#[derive(Debug)]
pub(super) struct ReportFile {
    place: Place,
    named: Named,
}

/// How a file is called in errors: the option that names it, and what is in it.
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
    Regular {
        file: NamedTempFile,
        path: PathBuf,
    },
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
    /// Nobody reads it any more.
    pub(super) fn is_unread(&self) -> bool {
        self.source.kind() == io::ErrorKind::BrokenPipe
    }

    /// The reason, with what to do about it where that is known.
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

    /// Reserves `path` for something else.
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

    /// Writes `content`, and with it the file appears.
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

    /// Writes `text`, and with it the file appears.
    pub(super) fn write_bytes(self, text: &[u8]) -> Result<(), ReportFileError> {
        self.stream()?.write_all(text).map_err(|source| self.error(source))?;
        self.keep()
    }

    /// Where to write it piece by piece; [`keep`](Self::keep) ends it.
    pub(super) fn stream(&self) -> Result<Box<dyn Write + Send>, ReportFileError> {
        let stream = || -> io::Result<Box<dyn Write + Send>> {
            Ok(match &self.place {
                Place::Stdout => Box::new(io::stdout()),
                Place::Special(path) => Box::new(OpenOptions::new().write(true).open(path)?),
                Place::Regular { file, .. } => Box::new(file.as_file().try_clone()?),
            })
        };
        stream().map_err(|source| self.error(source))
    }

    /// All of it is written: the file appears.
    pub(super) fn keep(self) -> Result<(), ReportFileError> {
        let (named, path) = (self.named, self.path());
        self.place.keep().map_err(|source| ReportFileError { named, path, source })
    }

    /// Something of it could not be written.
    pub(super) fn error(&self, source: io::Error) -> ReportFileError {
        ReportFileError { named: self.named, path: self.path(), source }
    }

    fn path(&self) -> PathBuf {
        match &self.place {
            Place::Stdout => PathBuf::from("stdout"),
            Place::Special(path) | Place::Regular { path, .. } => path.clone(),
        }
    }
}

impl Place {
    fn reserve(path: &Path) -> io::Result<Self> {
        // Behind a symbolic link its target is to be replaced, not the link.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        match fs::metadata(&path) {
            Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if !found.is_file() => return Ok(Self::Special(path)),
            _ => {}
        }
        if path.file_name().is_none() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // As an ordinary file would be created; the umask takes its share.
        let file = tempfile::Builder::new()
            .prefix(".sterna-report-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory)
            // Without the random name of the temporary file, which means nothing to a person.
            .map_err(|error| io::Error::from(error.kind()))?;
        Ok(Self::Regular { file, path })
    }

    fn keep(self) -> io::Result<()> {
        match self {
            Self::Stdout => io::stdout().flush(),
            Self::Special(_) => Ok(()),
            Self::Regular { file, path } => {
                file.as_file().sync_all()?;
                file.persist(path).map(drop).map_err(|error| error.error)
            }
        }
    }
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
