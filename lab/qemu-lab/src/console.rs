//! The guest's serial console: keeps its lines, waits for further ones, and speaks the test guest's protocol.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Error, FilesDone};

/// Maximum number of lines that are kept; older ones are dropped.
const MAX_LINES: usize = 100_000;
/// A line is split at this length: the boot-sector guest writes letters without a line end.
const MAX_LINE_BYTES: usize = 4096;

#[derive(Default)]
struct Log {
    lines: VecDeque<String>,
    dropped: usize,
    /// The bytes after the last line end.
    partial: Vec<u8>,
    bytes: u64,
    closed: bool,
}

impl Log {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        for &byte in bytes {
            match byte {
                b'\n' => self.end_line(),
                b'\r' => {}
                _ => {
                    self.partial.push(byte);
                    if self.partial.len() == MAX_LINE_BYTES {
                        self.end_line();
                    }
                }
            }
        }
    }

    fn end_line(&mut self) {
        self.lines.push_back(String::from_utf8_lossy(&self.partial).into_owned());
        self.partial.clear();
        if self.lines.len() > MAX_LINES {
            self.lines.pop_front();
            self.dropped += 1;
        }
    }

    fn last_lines(&self) -> String {
        let mut text = String::new();
        for line in self.lines.iter().skip(self.lines.len().saturating_sub(8)) {
            let _ = write!(text, "\n  | {line}");
        }
        let partial = String::from_utf8_lossy(&self.partial[..self.partial.len().min(80)]);
        if !partial.is_empty() {
            let _ = write!(text, "\n  | {partial}");
        }
        if text.is_empty() { "nothing".into() } else { text }
    }
}

struct Shared {
    log: Mutex<Log>,
    changed: Condvar,
}

impl Shared {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A serial console.
pub struct Console {
    shared: Arc<Shared>,
    stream: UnixStream,
    reader: Option<JoinHandle<()>>,
}

impl Console {
    /// Creates a console at this end of `stream`. A thread of its own reads it until the other end closes.
    pub(crate) fn new(stream: UnixStream) -> Result<Console, Error> {
        let shared = Arc::new(Shared { log: Mutex::default(), changed: Condvar::new() });
        let mut input = stream.try_clone().map_err(Error::io("duplicating the console's descriptor"))?;
        let reading = Arc::clone(&shared);
        let reader = std::thread::Builder::new()
            .name("lab-console".into())
            .spawn(move || {
                let mut buffer = [0; 4096];
                loop {
                    let got = input.read(&mut buffer).unwrap_or(0);
                    let mut log = reading.log();
                    log.push(&buffer[..got]);
                    log.closed = got == 0;
                    drop(log);
                    reading.changed.notify_all();
                    if got == 0 {
                        return;
                    }
                }
            })
            .map_err(Error::io("starting the console's thread"))?;
        Ok(Console { shared, stream, reader: Some(reader) })
    }

    /// Returns the lines so far (at most the last 100 000).
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.shared.log().lines.iter().cloned().collect()
    }

    /// Returns how many lines there have been: a place from which to [wait](Console::wait_for).
    #[must_use]
    pub fn line_count(&self) -> usize {
        let log = self.shared.log();
        log.dropped + log.lines.len()
    }

    /// Returns how many bytes there have been.
    #[must_use]
    pub fn byte_count(&self) -> u64 {
        self.shared.log().bytes
    }

    /// Waits for the first line, counted from `from` (0: the very first), for which `pick` returns a value.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `limit`, [`Error::QemuEnded`] if the console is closed; both with the last lines.
    pub fn wait_for<T>(
        &self,
        what: &str,
        from: usize,
        limit: Duration,
        mut pick: impl FnMut(&str) -> Option<T>,
    ) -> Result<T, Error> {
        let mut next = from;
        self.wait(what, limit, |log| {
            while next < log.dropped + log.lines.len() {
                let line = &log.lines[next.max(log.dropped) - log.dropped];
                next = next.max(log.dropped) + 1;
                if let Some(value) = pick(line) {
                    return Some(value);
                }
            }
            None
        })
    }

    /// Waits for a line that `predicate` accepts, from the first line on, and returns it.
    ///
    /// # Errors
    /// As [`Console::wait_for`].
    pub fn wait_for_line(&self, limit: Duration, predicate: impl Fn(&str) -> bool) -> Result<String, Error> {
        self.wait_for("such line", 0, limit, |line| predicate(line).then(|| line.to_owned()))
    }

    /// Waits until the guest has written at least `count` bytes in all.
    ///
    /// # Errors
    /// As [`Console::wait_for`].
    pub fn wait_for_bytes(&self, count: u64, limit: Duration) -> Result<(), Error> {
        self.wait(&format!("{count} bytes on the console"), limit, |log| (log.bytes >= count).then_some(()))
    }

    fn wait<T>(&self, what: &str, limit: Duration, mut pick: impl FnMut(&Log) -> Option<T>) -> Result<T, Error> {
        let deadline = Instant::now() + limit;
        let mut log = self.shared.log();
        loop {
            if let Some(value) = pick(&log) {
                return Ok(value);
            }
            if log.closed {
                return Err(Error::QemuEnded {
                    waiting_for: what.into(),
                    output: format!("console: {}", log.last_lines()),
                });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout { waiting_for: what.into(), limit, last: log.last_lines() });
            }
            log = self.shared.changed.wait_timeout(log, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// Types `text` and a line end.
    ///
    /// # Errors
    /// [`Error::Io`] if QEMU has closed the console.
    pub fn send(&self, text: &str) -> Result<(), Error> {
        (&self.stream).write_all(format!("{text}\n").as_bytes()).map_err(Error::io("writing to the guest's console"))
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        // Ends the reader if QEMU has not closed its end.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// The test guest's report that its memory is filled.
#[derive(Clone, Debug, PartialEq)]
pub struct Ready {
    /// Pages of 4096 bytes that it filled.
    pub pages: u64,
    /// How long filling took, by the guest's clock.
    pub seconds: f64,
}

/// One of the test guest's counter lines.
#[derive(Clone, Debug, PartialEq)]
pub struct Tick {
    /// Increases by one about every 200 ms.
    pub number: u64,
    /// Milliseconds since the guest was ready, by its own clock.
    pub milliseconds: u64,
    /// Bytes a second that it wrote since the tick before, in whole pages.
    pub dirty_rate: u64,
    /// Pages that it wrote since it was ready.
    pub dirtied: u64,
    /// Pages that it verified in the background.
    pub verified: u64,
    /// Wrong pages found since it was ready.
    pub bad: u64,
}

/// The answer to [`GuestConsole::verify`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Pages checked: all.
    pub pages: u64,
    /// Pages that are lost, stale, foreign or damaged.
    pub bad: u64,
    /// How often pages were written since the start, filling included.
    pub generation: u64,
    /// Whether the guest's own table of generations is intact.
    pub table_whole: bool,
}

/// What the test guest has done with its disks, in total.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DisksDone {
    /// Reads that ended and were checked.
    pub reads: u64,
    /// Writes that ended.
    pub writes: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Pages that were checked, each counted as often as it was.
    pub checked: u64,
    /// Threads that are in a read or a write.
    pub in_flight: u64,
    /// Wrong pages, and reads and writes that failed.
    pub bad: u64,
}

/// The answer to [`GuestConsole::check_disks`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedDisks {
    /// Buffers that were checked.
    pub buffers: u64,
    /// Buffers that were not checked, because a read or write was using them.
    pub busy: u64,
    /// Pages in the checked buffers.
    pub pages: u64,
    /// Wrong ones among these pages, without those that were found wrong before.
    pub bad: u64,
}

/// The lines and commands of the test guest (`guest/`).
pub struct GuestConsole<'a> {
    console: &'a Console,
}

impl<'a> GuestConsole<'a> {
    pub(crate) fn new(console: &'a Console) -> Self {
        GuestConsole { console }
    }

    /// Waits until the guest has filled its memory.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses its settings; else as [`Console::wait_for`].
    pub fn wait_ready(&self, limit: Duration) -> Result<Ready, Error> {
        self.console.wait_for("ready line of the guest", 0, limit, |line| {
            if let Some(error) = after_word(line, "error") {
                return Some(Err(Error::Guest(error.to_owned())));
            }
            let rest = after_word(line, "ready")?;
            Some(Ok(Ready { pages: field(rest, "pages")?, seconds: field(rest, "seconds")? }))
        })?
    }

    /// Returns the latest counter line.
    #[must_use]
    pub fn last_tick(&self) -> Option<Tick> {
        self.console.shared.log().lines.iter().rev().find_map(|line| tick(line))
    }

    /// Waits for a counter line with a number above `number`.
    ///
    /// # Errors
    /// As [`Console::wait_for`].
    pub fn wait_tick_after(&self, number: u64, limit: Duration) -> Result<Tick, Error> {
        self.console
            .wait_for(&format!("tick after {number}"), 0, limit, |line| tick(line).filter(|tick| tick.number > number))
    }

    /// Makes the guest verify all its memory.
    ///
    /// # Errors
    /// As [`Console::wait_for`].
    pub fn verify(&self, limit: Duration) -> Result<Verified, Error> {
        let from = self.console.line_count();
        self.console.send("verify")?;
        self.console.wait_for("answer to 'verify'", from, limit, |line| {
            let rest = after_word(line, "verified")?;
            Some(Verified {
                pages: field(rest, "pages")?,
                bad: field(rest, "bad")?,
                generation: field(rest, "generation")?,
                table_whole: field::<String>(rest, "table")? == "whole",
            })
        })
    }

    /// Returns the lines in which the guest reports a wrong page.
    #[must_use]
    pub fn bad_lines(&self) -> Vec<String> {
        self.console.lines().into_iter().filter(|line| after_word(line, "BAD").is_some()).collect()
    }

    /// Makes the guest stop writing pages.
    ///
    /// # Errors
    /// As [`Console::send`].
    pub fn stop_dirtying(&self) -> Result<(), Error> {
        self.console.send("stop")
    }

    /// Makes the guest continue to write pages.
    ///
    /// # Errors
    /// As [`Console::send`].
    pub fn go_on_dirtying(&self) -> Result<(), Error> {
        self.console.send("go")
    }

    /// Sets how many bytes a second the guest writes, in whole pages.
    ///
    /// # Errors
    /// As [`Console::send`].
    pub fn set_dirty_rate(&self, bytes_per_second: u64) -> Result<(), Error> {
        self.console.send(&format!("rate {bytes_per_second}"))
    }

    /// Returns how much the guest has done with its files, by its latest line about them.
    #[must_use]
    pub fn last_files(&self) -> Option<FilesDone> {
        self.console.shared.log().lines.iter().rev().find_map(|line| files(after_word(line, "files")?))
    }

    /// Waits until the guest has done `steps` more steps than in `before` with each of its files, or has found an error.
    ///
    /// # Errors
    /// As [`Console::wait_for`].
    pub fn wait_files(&self, before: &FilesDone, steps: u64, limit: Duration) -> Result<FilesDone, Error> {
        self.console.wait_for(&format!("{steps} steps with files after {before:?}"), 0, limit, |line| {
            files(after_word(line, "files")?).filter(|done| done.bad > before.bad || done.is_beyond(before, steps))
        })
    }

    /// Makes the guest stop working with its files, read all of them again, and close them.
    ///
    /// # Errors
    /// As [`Console::wait_for`].
    pub fn close_files(&self, limit: Duration) -> Result<FilesDone, Error> {
        let from = self.console.line_count();
        self.console.send("close")?;
        self.console.wait_for("answer to 'close'", from, limit, |line| files(after_word(line, "closed")?))
    }

    /// Returns what the guest has done with its disks, by its latest line about them.
    #[must_use]
    pub fn last_disks(&self) -> Option<DisksDone> {
        self.console.shared.log().lines.iter().rev().find_map(|line| disks(after_word(line, "disks")?))
    }

    /// Waits for a line about disks, from the latest one on, that `accept` accepts, or that reports an error.
    ///
    /// # Errors
    /// As [`Console::wait_for`].
    pub fn wait_disks(
        &self,
        what: &str,
        limit: Duration,
        accept: impl Fn(&DisksDone) -> bool,
    ) -> Result<DisksDone, Error> {
        self.console.wait_for(what, self.console.line_count(), limit, |line| {
            disks(after_word(line, "disks")?).filter(|done| done.bad > 0 || accept(done))
        })
    }

    /// Makes the guest check everything from its disks that is still in its buffers.
    ///
    /// # Errors
    /// As [`Console::wait_for`].
    pub fn check_disks(&self, limit: Duration) -> Result<CheckedDisks, Error> {
        let from = self.console.line_count();
        self.console.send("check-disks")?;
        self.console.wait_for("answer to 'check-disks'", from, limit, |line| {
            let rest = after_word(line, "disks-checked")?;
            Some(CheckedDisks {
                buffers: field(rest, "buffers")?,
                busy: field(rest, "busy")?,
                pages: field(rest, "pages")?,
                bad: field(rest, "bad")?,
            })
        })
    }

    /// Makes the guest begin no further read or write of its disks. Those in flight end; then comes a line with
    /// [`DisksDone::in_flight`] 0.
    ///
    /// # Errors
    /// As [`Console::send`].
    pub fn pause_disks(&self) -> Result<(), Error> {
        self.console.send("pause-disks")
    }

    /// Makes the guest continue to use its disks.
    ///
    /// # Errors
    /// As [`Console::send`].
    pub fn resume_disks(&self) -> Result<(), Error> {
        self.console.send("resume-disks")
    }

    /// Makes the guest power its machine off.
    ///
    /// # Errors
    /// As [`Console::send`].
    pub fn power_off(&self) -> Result<(), Error> {
        self.console.send("quit")
    }
}

/// Returns what follows `sterna-guest WORD` in a line. The kernel may have written something before it.
fn after_word<'a>(line: &'a str, word: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once("sterna-guest ")?;
    rest.strip_prefix(word)?.strip_prefix(' ')
}

fn field<T: std::str::FromStr>(text: &str, name: &str) -> Option<T> {
    text.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

fn files(text: &str) -> Option<FilesDone> {
    Some(FilesDone {
        given: field(text, "given")?,
        journal: field(text, "journal")?,
        slots: field(text, "slots")?,
        deleted: field(text, "deleted")?,
        made: field(text, "made")?,
        bad: field(text, "bad")?,
    })
}

fn disks(text: &str) -> Option<DisksDone> {
    Some(DisksDone {
        reads: field(text, "reads")?,
        writes: field(text, "writes")?,
        bytes: field(text, "bytes")?,
        checked: field(text, "checked")?,
        in_flight: field(text, "in-flight")?,
        bad: field(text, "bad")?,
    })
}

fn tick(line: &str) -> Option<Tick> {
    let rest = after_word(line, "tick")?;
    Some(Tick {
        number: rest.split_whitespace().next()?.parse().ok()?,
        milliseconds: field(rest, "ms")?,
        dirty_rate: field(rest, "rate")?,
        dirtied: field(rest, "dirtied")?,
        verified: field(rest, "verified")?,
        bad: field(rest, "bad")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(300);

    fn console() -> (Console, UnixStream) {
        let (near, far) = UnixStream::pair().expect("a socket pair");
        (Console::new(near).expect("a console"), far)
    }

    #[test]
    fn a_line_is_found_whether_it_came_before_or_comes_in_pieces() {
        let (console, mut far) = console();
        far.write_all(b"[    0.1] boot\r\nsterna-guest ready pages=12 mem").expect("written");
        assert_eq!(console.wait_for_line(LONG, |line| line.contains("boot")).expect("a line"), "[    0.1] boot");
        far.write_all(b"ory=49152 fill=text seconds=0.25\r\n").expect("written");
        let ready = GuestConsole::new(&console).wait_ready(LONG).expect("ready");
        assert_eq!(ready, Ready { pages: 12, seconds: 0.25 });
    }

    #[test]
    fn the_last_tick_and_the_next_are_read() {
        let (console, mut far) = console();
        let guest = GuestConsole::new(&console);
        for number in [1, 2, 3] {
            writeln!(far, "sterna-guest tick {number} ms=20{number} rate=4096 dirtied={number} verified=7 bad=0")
                .expect("written");
        }
        let expected = Tick { number: 3, milliseconds: 203, dirty_rate: 4096, dirtied: 3, verified: 7, bad: 0 };
        assert_eq!(guest.wait_tick_after(2, LONG).expect("a tick"), expected);
        assert_eq!(guest.last_tick(), Some(expected));
    }

    #[test]
    fn waiting_for_steps_with_files_ends_with_the_steps_or_with_an_error() {
        let (console, mut far) = console();
        let guest = GuestConsole::new(&console);
        let before = FilesDone { given: 90, journal: 5, slots: 5, deleted: 0, made: 2, bad: 0 };
        far.write_all(b"sterna-guest files given=99 journal=14 slots=15 deleted=0 made=12 bad=0\n").expect("written");
        far.write_all(b"sterna-guest files given=100 journal=15 slots=15 deleted=0 made=12 bad=0\n").expect("written");
        let expected = FilesDone { given: 100, journal: 15, slots: 15, deleted: 0, made: 12, bad: 0 };
        assert_eq!(guest.wait_files(&before, 10, LONG).expect("steps"), expected);
        assert_eq!(guest.last_files(), Some(expected));
        far.write_all(b"sterna-guest files given=100 journal=15 slots=15 deleted=0 made=12 bad=1\n").expect("written");
        assert_eq!(guest.wait_files(&before, 1000, LONG).expect("wrong").bad, 1);
    }

    #[test]
    fn a_closed_console_ends_waiting_with_the_last_lines() {
        let (console, mut far) = console();
        far.write_all(b"Kernel panic\n").expect("written");
        drop(far);
        let error = GuestConsole::new(&console).wait_ready(LONG).expect_err("closed");
        assert!(matches!(error, Error::QemuEnded { .. }) && error.to_string().contains("Kernel panic"), "{error}");
    }

    #[test]
    fn refused_settings_are_an_error_and_not_a_timeout() {
        let (console, mut far) = console();
        far.write_all(b"sterna-guest error sterna.fill=snow: expected one of zeros\n").expect("written");
        let error = GuestConsole::new(&console).wait_ready(LONG).expect_err("refused");
        assert!(matches!(&error, Error::Guest(text) if text.contains("snow")), "{error}");
    }

    #[test]
    fn verify_reads_the_answer_after_the_question_only() {
        let (console, mut far) = console();
        far.write_all(b"sterna-guest verified pages=1 bad=9 generation=1 table=whole ms=1\n").expect("written");
        console.wait_for_line(LONG, |line| line.contains("bad=9")).expect("the old answer");
        let other = std::thread::spawn(move || {
            let mut question = [0; 7];
            far.read_exact(&mut question).expect("a question");
            far.write_all(b"sterna-guest verified pages=5 bad=0 generation=8 table=broken ms=3\n").expect("written");
            (question, far)
        });
        let verified = GuestConsole::new(&console).verify(LONG).expect("an answer");
        assert_eq!(verified, Verified { pages: 5, bad: 0, generation: 8, table_whole: false });
        assert_eq!(&other.join().expect("joined").0, b"verify\n");
    }

    #[test]
    fn letters_without_a_line_end_are_counted_and_bounded() {
        let (console, mut far) = console();
        far.write_all(&[b'B'; 3 * MAX_LINE_BYTES]).expect("written");
        console.wait_for_bytes(3 * MAX_LINE_BYTES as u64, LONG).expect("bytes");
        assert_eq!(console.line_count(), 3);
    }
}
