//! The store of generated content: a file for each kind, size and seed, and beside it a line with its origin.

use std::collections::HashSet;
use std::fs::{DirBuilder, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use sterna_guest::content::{PAGE_BYTES, Page};

use super::Pages;
use crate::Error;

/// Part of the directory's name: differently generated content must not be confused with this.
const VERSION: u32 = 1;
/// The file that cargo writes into its build directory.
const TAG: &str = "CACHEDIR.TAG";

/// Returns the directory: `STERNA_CORPORA`, else in this program's build directory, else in the one for temporary files.
#[must_use]
pub fn directory() -> PathBuf {
    if let Some(path) = std::env::var_os("STERNA_CORPORA") {
        return PathBuf::from(path);
    }
    let program = std::env::current_exe().unwrap_or_default();
    let name = format!("corpora-{VERSION}");
    match program.ancestors().find(|path| path.join(TAG).is_file()) {
        Some(build) => build.join(name),
        None => std::env::temp_dir().join(format!("sterna-{name}-{}", rustix::process::getuid().as_raw())),
    }
}

/// Returns the file of this name and its origin; `make` writes it if there is none yet.
pub(super) fn open(name: &str, make: impl FnOnce(&mut File) -> Result<String, Error>) -> Result<(File, String), Error> {
    let directory = directory();
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
    made.map_err(Error::path("making", &directory))?;
    // Checks a link itself: another user's link could lead anywhere.
    let about = std::fs::symlink_metadata(&directory).map_err(Error::path("looking at", &directory))?;
    if about.uid() != rustix::process::getuid().as_raw() {
        return Err(Error::Unavailable {
            what: "prepared content".into(),
            reason: format!(
                "{} belongs to someone else: name another directory by STERNA_CORPORA",
                directory.display()
            ),
        });
    }
    open_in(&directory, name, make)
}

fn open_in(
    directory: &Path,
    name: &str,
    make: impl FnOnce(&mut File) -> Result<String, Error>,
) -> Result<(File, String), Error> {
    let [pages, origin] = ["pages", "origin"].map(|what| directory.join(format!("{name}.{what}")));
    // The pages' file gets its name last, so if it exists, everything is complete.
    if let (Ok(file), Ok(origin)) = (File::open(&pages), std::fs::read_to_string(&origin)) {
        return Ok((file, origin));
    }
    // Several processes may generate it concurrently; each file is complete when it gets its name.
    let new = || tempfile::NamedTempFile::new_in(directory).map_err(Error::path("making a file in", directory));
    let (mut content, mut about) = (new()?, new()?);
    let text = make(content.as_file_mut())?;
    about.write_all(text.as_bytes()).map_err(Error::path("writing", &origin))?;
    about.persist(&origin).map_err(|error| Error::path("keeping", &origin)(error.error))?;
    match content.persist_noclobber(&pages) {
        Ok(file) => Ok((file, text)),
        // The first process wins: others may use its file already.
        Err(error) if error.error.kind() == ErrorKind::AlreadyExists => {
            Ok((File::open(&pages).map_err(Error::path("opening", &pages))?, text))
        }
        Err(error) => Err(Error::path("keeping", &pages)(error.error)),
    }
}

/// Writes `bytes` of `pages` that are not zero and, if `distinct`, differ from all earlier ones.
pub(super) fn write_pages(
    file: &mut File,
    pages: &mut dyn Pages,
    bytes: u64,
    distinct: bool,
    name: &str,
) -> Result<(), Error> {
    if pages.most() < bytes {
        return Err(too_little(name, pages.most(), bytes));
    }
    let failed = |error| Error::io(format!("writing content of kind {name}"))(error);
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut page: Page = [0; PAGE_BYTES];
    let mut before = Distinct::default();
    let mut written = 0;
    while written < bytes {
        if !pages.next(&mut page)? {
            return Err(too_little(name, written, bytes));
        }
        if before.is_new(&page) || !distinct {
            out.write_all(&page).map_err(failed)?;
            written += PAGE_BYTES as u64;
        }
    }
    out.flush().map_err(failed)
}

pub(super) fn too_little(name: &str, there: u64, wanted: u64) -> Error {
    Error::Unavailable {
        what: format!("{} MiB of content of kind {name}", wanted.div_ceil(1 << 20)),
        reason: format!("this machine has {} MiB of it, and none is used twice", there >> 20),
    }
}

/// Distinguishes new pages that are not zero from duplicates of earlier ones.
#[derive(Debug, Default)]
pub(super) struct Distinct {
    seen: HashSet<u64>,
}

impl Distinct {
    pub(super) fn is_new(&mut self, page: &Page) -> bool {
        let mut hasher = DefaultHasher::new();
        hasher.write(page);
        page.iter().any(|byte| *byte != 0) && self.seen.insert(hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of one byte each, as a list says.
    struct Listed(std::vec::IntoIter<u8>);

    impl Pages for Listed {
        fn next(&mut self, page: &mut Page) -> Result<bool, Error> {
            Ok(self.0.next().map(|byte| page.fill(byte)).is_some())
        }

        fn origin(&self) -> String {
            "a list".into()
        }
    }

    #[test]
    fn zero_pages_and_duplicates_are_left_out_and_too_few_pages_are_an_error_with_their_number() {
        let list = || Listed(vec![1, 0, 1, 2, 2, 3].into_iter());
        let mut file = tempfile::tempfile().unwrap();
        let page = PAGE_BYTES as u64;
        write_pages(&mut file, &mut list(), 3 * page, true, "lists").unwrap();
        assert_eq!(file.metadata().unwrap().len(), 3 * page);
        let error = write_pages(&mut file, &mut list(), 1 << 20, true, "lists").unwrap_err();
        assert!(error.is_absence());
        assert_eq!(
            error.to_string(),
            "1 MiB of content of kind lists: this machine has 0 MiB of it, and none is used twice"
        );
    }

    #[test]
    fn content_is_generated_once_and_a_failure_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let broken = open_in(directory.path(), "a", |_| Err(too_little("x", 0, 1)));
        assert!(broken.is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let made =
            |file: &mut File| file.write_all(b"content").map(|()| "made".to_owned()).map_err(Error::io("writing"));
        assert_eq!(open_in(directory.path(), "a", made).unwrap().1, "made");
        let (file, origin) = open_in(directory.path(), "a", |_| Err(too_little("x", 0, 1))).unwrap();
        assert_eq!((file.metadata().unwrap().len(), origin.as_str()), (7, "made"));
    }
}
