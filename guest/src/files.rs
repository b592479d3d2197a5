//! What the guest does with a directory that its host shares with it (virtiofs): writes and reads through files that stay open, and makes
//! new ones, each kind of request on a thread of its own, nearly as fast as they are answered. So mostly some are under way when the
//! machine is stopped. What an answer says was done counts; on the host's side exactly that must stand in the directory.

use std::fmt;
use std::fs::{self, File as Opened, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_guest::record::{File, RECORD_BYTES, SLOTS, record, slot};

use crate::system;

/// Where the directory is mounted.
const DIRECTORY: &str = "/shared";
/// Between two steps of a thread: a fast machine must not write more than can be read again in its memory.
const PAUSE: Duration = Duration::from_micros(200);
/// Between two new files: each is one more that the host's side has to remember.
const MAKING_PAUSE: Duration = Duration::from_millis(20);

/// The threads, and what they have done.
pub struct Files {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    done: [AtomicU64; File::Made as usize + 1],
    stop: AtomicBool,
    wrong: Mutex<Vec<String>>,
    wrong_count: AtomicU64,
}

impl Files {
    /// Mounts the directory, opens its files and begins; the modules are loaded. With `deleted` also in one that has no name any more.
    pub fn begin(tag: &str, deleted: bool) -> Result<Files> {
        system::mount_shared(tag, DIRECTORY)?;
        let mut files = Files { shared: Arc::default(), threads: Vec::new() };
        let directory = Path::new(DIRECTORY);
        // The kernel keeps what it reads with the names, and so virtiofsd what it has told.
        if let Ok(names) = fs::read_dir(directory.join(File::Names.name())) {
            for name in names {
                name?.metadata()?;
            }
        }
        files.work(File::Given, Given::open(directory)?);
        files.work(File::Journal, Journal::open(directory)?);
        files.work(File::Slots, Slots::open(directory, File::Slots)?);
        if deleted {
            let slots = Slots::open(directory, File::Deleted)?;
            fs::remove_file(directory.join(File::Deleted.name()))?;
            files.work(File::Deleted, slots);
        }
        fs::create_dir(directory.join(File::Made.name()))?;
        files.work(File::Made, Made);
        Ok(files)
    }

    fn work(&mut self, file: File, mut work: impl Work + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        self.threads.push(std::thread::spawn(move || {
            let mut number = 0;
            let ended = loop {
                if shared.stop.load(Ordering::Relaxed) {
                    break work.finish(number);
                }
                if let Err(error) = work.step(number) {
                    break Err(error);
                }
                number += 1;
                shared.done[file as usize].store(number, Ordering::Relaxed);
                std::thread::sleep(if file == File::Made { MAKING_PAUSE } else { PAUSE });
            };
            if let Err(error) = ended {
                shared.wrong_count.fetch_add(1, Ordering::Relaxed);
                let text = format!("{} {number}: {error}", file.name());
                shared.wrong.lock().expect("no thread panics with it").push(text);
            }
        }));
    }

    /// What went wrong since the last call. A thread that finds something wrong ends.
    pub fn wrong(&self) -> Vec<String> {
        std::mem::take(&mut *self.shared.wrong.lock().expect("no thread panics with it"))
    }

    /// Has each thread read again what it wrote, and ends it.
    pub fn close(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The program aborts where one panics.
            let _ = thread.join();
        }
    }
}

impl fmt::Display for Files {
    /// `given=N journal=N …`: how many steps were done.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in [File::Given, File::Journal, File::Slots, File::Deleted, File::Made] {
            write!(f, "{}={} ", file.name(), self.shared.done[file as usize].load(Ordering::Relaxed))?;
        }
        write!(f, "bad={}", self.shared.wrong_count.load(Ordering::Relaxed))
    }
}

/// What one thread does.
trait Work {
    fn step(&mut self, number: u64) -> Result<()>;

    /// Reads all of it again through the file that was open all the while; `done` steps were.
    fn finish(&mut self, done: u64) -> Result<()>;
}

/// Compares what stands at `place` with record `number` of `file`.
fn check(opened: &Opened, place: u64, file: File, number: u64) -> Result<()> {
    let mut bytes = [0; RECORD_BYTES];
    opened.read_exact_at(&mut bytes, place * RECORD_BYTES as u64)?;
    if bytes == record(file, number) {
        return Ok(());
    }
    let found = u64::from_le_bytes(std::array::from_fn(|at| bytes[at]));
    Err(Error::new(ErrorKind::InvalidData, format!("expected record {number} at {place}, found {found}")))
}

struct Given(Opened);

impl Given {
    fn open(directory: &Path) -> Result<Self> {
        Ok(Given(Opened::open(directory.join(File::Given.name()))?))
    }
}

impl Work for Given {
    fn step(&mut self, number: u64) -> Result<()> {
        check(&self.0, slot(number), File::Given, slot(number))
    }

    fn finish(&mut self, _done: u64) -> Result<()> {
        (0..SLOTS).try_for_each(|place| check(&self.0, place, File::Given, place))
    }
}

/// A write that is done twice, or not at all, shifts all that follow.
struct Journal {
    append: Opened,
    read: Opened,
}

impl Journal {
    fn open(directory: &Path) -> Result<Self> {
        let path = directory.join(File::Journal.name());
        let append = OpenOptions::new().append(true).create_new(true).open(&path)?;
        Ok(Journal { append, read: Opened::open(&path)? })
    }
}

impl Work for Journal {
    fn step(&mut self, number: u64) -> Result<()> {
        let written = self.append.write(&record(File::Journal, number))?;
        if written == RECORD_BYTES { Ok(()) } else { Err(Error::other(format!("{written} bytes were written"))) }
    }

    fn finish(&mut self, done: u64) -> Result<()> {
        self.append.sync_all()?;
        let mut all = Vec::new();
        self.read.read_to_end(&mut all)?;
        if all.len() as u64 != done * RECORD_BYTES as u64 {
            return Err(Error::other(format!("{} bytes are there", all.len())));
        }
        let mut records = (0..).zip(all.chunks_exact(RECORD_BYTES));
        match records.find(|&(number, found)| found != record(File::Journal, number)) {
            Some((number, _)) => Err(Error::other(format!("another record is at {number}"))),
            None => Ok(()),
        }
    }
}

struct Slots {
    file: File,
    opened: Opened,
}

impl Slots {
    fn open(directory: &Path, file: File) -> Result<Self> {
        let path = directory.join(file.name());
        Ok(Slots { file, opened: OpenOptions::new().read(true).write(true).create_new(true).open(path)? })
    }
}

impl Work for Slots {
    fn step(&mut self, number: u64) -> Result<()> {
        self.opened.write_all_at(&record(self.file, number), slot(number) * RECORD_BYTES as u64)?;
        // One of those before it.
        let other = number - (number / 2) % SLOTS;
        check(&self.opened, slot(other), self.file, other)
    }

    fn finish(&mut self, done: u64) -> Result<()> {
        (done.saturating_sub(SLOTS)..done).try_for_each(|number| check(&self.opened, slot(number), self.file, number))
    }
}

/// Of making and renaming, what is done twice is refused.
struct Made;

impl Work for Made {
    fn step(&mut self, number: u64) -> Result<()> {
        let directory = Path::new(DIRECTORY).join(File::Made.name());
        let new = directory.join("new");
        OpenOptions::new().write(true).create_new(true).open(&new)?.write_all(&record(File::Made, number))?;
        fs::rename(&new, directory.join(number.to_string()))
    }

    fn finish(&mut self, done: u64) -> Result<()> {
        let directory = Path::new(DIRECTORY).join(File::Made.name());
        (0..done)
            .try_for_each(|number| check(&Opened::open(directory.join(number.to_string()))?, 0, File::Made, number))
    }
}
