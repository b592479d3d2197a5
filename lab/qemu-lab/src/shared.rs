//! The directory in which a Linux guest works by virtiofs, as the host sees it: checks its files against the steps that the guest reports.

use std::path::{Path, PathBuf};

use sterna_guest::record::{File, RECORD_BYTES, SLOTS, record, slot};
use tempfile::TempDir;

use crate::Error;

/// How many steps a guest has completed with each of its files ([`sterna_guest::record::File`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilesDone {
    /// Records read from the file that the host wrote.
    pub given: u64,
    /// Records appended.
    pub journal: u64,
    /// Records written to their slots and read back.
    pub slots: u64,
    /// The same in the file that is deleted.
    pub deleted: u64,
    /// Files made and renamed.
    pub made: u64,
    /// Files with an error; the guest does not use these any more.
    pub bad: u64,
}

impl FilesDone {
    /// Returns whether at least `steps` more steps than in `before` were done with each file; with the deleted file only if there is one.
    #[must_use]
    pub fn is_beyond(&self, before: &FilesDone, steps: u64) -> bool {
        let deleted = (self.deleted, before.deleted);
        let others = [
            (self.given, before.given),
            (self.journal, before.journal),
            (self.slots, before.slots),
            (self.made, before.made),
        ];
        others.into_iter().chain((deleted != (0, 0)).then_some(deleted)).all(|(now, then)| now >= then + steps)
    }
}

/// Such a directory, with the guest's input. It is removed when this is dropped.
#[derive(Debug)]
pub struct SharedDirectory {
    directory: TempDir,
}

impl SharedDirectory {
    /// Makes a new one below `parent`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn new(parent: &Path) -> Result<SharedDirectory, Error> {
        let directory = tempfile::Builder::new()
            .prefix("sterna-shared-")
            .tempdir_in(parent)
            .map_err(Error::path("making a directory in", parent))?;
        let given: Vec<u8> = (0..SLOTS).flat_map(|number| record(File::Given, number)).collect();
        let path = directory.path().join(File::Given.name());
        std::fs::write(&path, given).map_err(Error::path("writing", &path))?;
        Ok(SharedDirectory { directory })
    }

    /// Makes `count` empty files with names of maximum length, all of which the guest looks up.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn fill_with_names(&self, count: usize) -> Result<(), Error> {
        const NAME: usize = 255;
        let directory = self.path().join(File::Names.name());
        std::fs::create_dir(&directory).map_err(Error::path("making", &directory))?;
        for number in 0..count {
            let path = directory.join(format!("{number:0>NAME$}"));
            std::fs::write(&path, "").map_err(Error::path("making", &path))?;
        }
        Ok(())
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Checks that the files contain exactly the guest's steps in `done`, once and in order.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, done: &FilesDone) -> Result<(), String> {
        let journal = self.records(Path::new(File::Journal.name()))?;
        if let Some(place) = (0..).zip(&journal).position(|(number, found)| *found != record(File::Journal, number)) {
            return Err(format!("the journal has another record at {place} of {}", journal.len()));
        }
        if journal.len() as u64 != done.journal {
            return Err(format!("the journal has {} records, the guest wrote {}", journal.len(), done.journal));
        }
        let slots = self.records(Path::new(File::Slots.name()))?;
        for number in done.slots.saturating_sub(SLOTS)..done.slots {
            if slots.get(slot(number) as usize) != Some(&record(File::Slots, number)) {
                return Err(format!("slot {} has not record {number}, of {}", slot(number), done.slots));
            }
        }
        let made = Path::new(File::Made.name());
        let names = std::fs::read_dir(self.path().join(made)).map_err(|error| error.to_string())?.count() as u64;
        if names != done.made {
            return Err(format!("{names} files are there, the guest made {}", done.made));
        }
        for number in 0..done.made {
            if self.records(&made.join(number.to_string()))? != [record(File::Made, number)] {
                return Err(format!("the file {number} that was made has other content"));
            }
        }
        if self.path().join(File::Deleted.name()).exists() {
            return Err("the deleted file is there".into());
        }
        Ok(())
    }

    fn records(&self, name: &Path) -> Result<Vec<[u8; RECORD_BYTES]>, String> {
        let path: PathBuf = self.path().join(name);
        let content = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let (records, rest) = content.as_chunks::<RECORD_BYTES>();
        if rest.is_empty() { Ok(records.to_vec()) } else { Err(format!("{} ends within a record", path.display())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a directory in which a guest did 300 steps with each file.
    fn worked() -> (SharedDirectory, FilesDone) {
        let shared = SharedDirectory::new(&std::env::temp_dir()).expect("a directory");
        let done = FilesDone { journal: 300, slots: 300, made: 3, ..FilesDone::default() };
        let mut slots = vec![[0; RECORD_BYTES]; SLOTS as usize];
        (0..300).for_each(|number| slots[slot(number) as usize] = record(File::Slots, number));
        write(&shared, "slots", &slots);
        write(&shared, "journal", &(0..300).map(|number| record(File::Journal, number)).collect::<Vec<_>>());
        std::fs::create_dir(shared.path().join("made")).expect("made");
        (0..3).for_each(|number| write(&shared, &format!("made/{number}"), &[record(File::Made, number)]));
        (shared, done)
    }

    fn write(shared: &SharedDirectory, name: &str, records: &[[u8; RECORD_BYTES]]) {
        std::fs::write(shared.path().join(name), records.concat()).expect("written");
    }

    #[test]
    fn only_steps_done_once_and_in_order_pass() {
        let (shared, done) = worked();
        shared.check(&done).expect("all is there");
        let whole = shared.records(Path::new("journal")).expect("records");
        let mut twice = whole.clone();
        twice.insert(200, whole[200]);
        let mut swapped = whole.clone();
        swapped.swap(7, 8);
        for (records, said) in [(twice, "at 201"), (swapped, "at 7"), (whole[..299].to_vec(), "299 records")] {
            write(&shared, "journal", &records);
            let error = shared.check(&done).expect_err(said);
            assert!(error.contains(said), "{error}");
        }
        write(&shared, "journal", &whole);
        std::fs::write(shared.path().join("made/new"), "").expect("written");
        shared.check(&done).expect_err("a file too many");
        std::fs::remove_file(shared.path().join("made/new")).expect("removed");
        let mut slots = shared.records(Path::new("slots")).expect("records");
        slots[slot(299) as usize] = record(File::Slots, 299 - SLOTS);
        write(&shared, "slots", &slots);
        shared.check(&done).expect_err("a stale slot");
    }
}
