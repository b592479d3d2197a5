//! `--json FILE`: the report for machines, whole or not at all.
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
pub(super) enum ReportFile {
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
#[error("--json: cannot write the report to {path}: {why}", path = path.display(), why = self.why())]
pub(super) struct ReportFileError {
    path: PathBuf,
    source: io::Error,
}

impl ReportFileError {
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
    /// Reserves `path`; `-` is stdout.
    pub(super) fn reserve(path: &Path) -> Result<Self, ReportFileError> {
        if path == "-" {
            return Ok(Self::Stdout);
        }
        Self::reserve_file(path).map_err(|source| ReportFileError { path: path.to_owned(), source })
    }

    fn reserve_file(path: &Path) -> io::Result<Self> {
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

    pub(super) fn is_stdout(&self) -> bool {
        matches!(self, Self::Stdout)
    }

    /// Writes `content`, and with it the file appears.
    pub(super) fn write(self, content: &impl Serialize) -> Result<(), ReportFileError> {
        let path = match &self {
            Self::Stdout => PathBuf::from("stdout"),
            Self::Special(path) | Self::Regular { path, .. } => path.clone(),
        };
        self.try_write(content).map_err(|source| ReportFileError { path, source })
    }

    fn try_write(self, content: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(content)?;
        text.push(b'\n');
        match self {
            Self::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(&text)?;
                out.flush()
            }
            Self::Special(path) => OpenOptions::new().write(true).open(path)?.write_all(&text),
            Self::Regular { mut file, path } => {
                file.write_all(&text)?;
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
        assert!(matches!(null, ReportFile::Special(_)));
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
        assert!(matches!(ReportFile::reserve(Path::new("-")), Ok(ReportFile::Stdout)));
    }
}
