//! The idle guest that the benchmarks of the library move: memory with known content in this process, and a monitor
//! that records when its guest began to run.

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use sterna_engine::vmm::{DestinationVmm, ResumeReason, SourceVmm, VmmError};
use sterna_guest::content::{PAGE_BYTES, Page, mix};
use sterna_guest::page::{Fill, Pages};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::reported::ReportedLog;
use sterna_memory::dirty::write_protect::WriteProtectLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_memory::holes::PageMap;
use sterna_memory::ram::{Backing, GuestRam, RamBlock};
use sterna_memory::snapshot::Snapshot;
use sterna_qemu_lab::corpus::Corpus;

use super::clock::now_ns;
use super::writer::{SEED, Writer};

/// Huge pages of anonymous memory are of this size, and begin at multiples of it.
const HUGE_PAGE: usize = 2 << 20;
/// Device state of a small machine.
const STATE_BYTES: usize = 64 << 10;
/// The generation of pages that were written once.
const GENERATION: u32 = 1;
/// Odd, so that multiplication modulo 2^64 loses no bit of a sum.
const FACTOR: u64 = 0x517c_c1b7_2722_0a95;

/// The kind of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Memory {
    /// Private, advised to have huge pages, as by QEMU.
    Anonymous,
    /// Private, of 4 KiB pages.
    SmallPages,
    /// A shared memfd.
    Memfd,
}

/// Where a corpus begins, and how much there is behind it: the firmware of a QEMU has its tables at both ends of low memory.
const CORPUS_AT: u64 = 64 << 20;
/// Bytes that are read from a corpus at once.
const CHUNK: usize = 1 << 20;

/// Serialises corpora by their names.
mod by_name {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use sterna_qemu_lab::corpus::Corpus;

    pub(super) fn serialize<S: Serializer>(corpus: &Corpus, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(corpus.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Corpus, D::Error> {
        let name = String::deserialize(from)?;
        Corpus::from_name(&name).ok_or_else(|| D::Error::custom(format!("no corpus is called {name}")))
    }
}

/// The content of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Content {
    /// Nothing was ever touched.
    Untouched,
    /// The upper half holds data, no page of it zero; the lower was never touched.
    HalfFilled,
    /// All of it was touched, and is zero.
    TouchedZero,
    /// 2 MiB of each GiB hold data, the rest was never touched.
    Sparse,
    /// This many bytes at the start hold data; the rest was touched and is zero.
    Used(u64),
    /// A corpus; the rest, before and behind it, was never touched.
    Corpus {
        #[serde(with = "by_name")]
        corpus: Corpus,
        bytes: u64,
    },
}

impl Content {
    /// Returns the parts that hold data, in bytes, and the part that is zero but was touched.
    fn parts(self, bytes: u64) -> (Vec<Range<u64>>, Range<u64>) {
        const GIB: usize = 1 << 30;
        let one = |part: Range<u64>| std::iter::once(part).collect();
        match self {
            Self::Untouched => (Vec::new(), 0..0),
            // Not the lower half: the firmware of a QEMU has its tables there.
            Self::HalfFilled => (one(bytes / 2..bytes), 0..0),
            Self::TouchedZero => (Vec::new(), 0..bytes),
            Self::Sparse => ((0..bytes).step_by(GIB).map(|at| at..at + HUGE_PAGE as u64).collect(), 0..0),
            Self::Used(used) => (one(0..used), used..bytes),
            Self::Corpus { bytes, .. } => (one(CORPUS_AT..CORPUS_AT + bytes), 0..0),
        }
    }

    /// Returns where a corpus lies, in bytes.
    pub(crate) fn corpus_at() -> u64 {
        CORPUS_AT
    }

    /// Returns the bytes of RAM for a corpus of this many bytes.
    pub(crate) fn around_corpus(bytes: u64) -> u64 {
        (bytes + 2 * CORPUS_AT).next_multiple_of(HUGE_PAGE as u64)
    }

    /// Returns the parts that hold data, in bytes.
    pub(crate) fn filled(self, bytes: u64) -> Vec<Range<u64>> {
        self.parts(bytes).0
    }
}

/// Guest RAM of one block.
#[derive(Debug)]
pub(crate) struct Guest {
    start: NonNull<u8>,
    bytes: usize,
    ram: GuestRam,
}

// SAFETY: the pointer is kept for unmapping, and for words that are accessed as atomics.
unsafe impl Send for Guest {}
// SAFETY: as above.
unsafe impl Sync for Guest {}

impl Drop for Guest {
    fn drop(&mut self) {
        // SAFETY: the whole mapping made in `Guest::new`; the threads that move its pages have ended, because they
        // borrow the guest or were joined before.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl Guest {
    /// Makes RAM of this many bytes (whole huge pages) that was never touched.
    pub(crate) fn new(memory: Memory, bytes: u64) -> std::io::Result<Self> {
        let bytes = bytes as usize;
        assert!(bytes > 0 && bytes.is_multiple_of(HUGE_PAGE), "guest RAM of {bytes} bytes");
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // Room to begin at a huge page. Without NORESERVE a block larger than the machine would be refused.
        let room = bytes + HUGE_PAGE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let reserved = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, access, flags) }?;
        let start = reserved.wrapping_byte_add(reserved.addr().wrapping_neg() % HUGE_PAGE);
        let before = start.addr() - reserved.addr();
        // SAFETY: the parts of the mapping above before and behind the block, to which there is no reference yet.
        unsafe {
            if before > 0 {
                rustix::mm::munmap(reserved, before)?;
            }
            if before < HUGE_PAGE {
                rustix::mm::munmap(start.wrapping_byte_add(bytes), HUGE_PAGE - before)?;
            }
        }
        let backing = match memory {
            Memory::Anonymous | Memory::SmallPages => {
                let advice = if memory == Memory::Anonymous { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
                // SAFETY: advice on the block; it changes no content. A kernel without huge pages has small ones only.
                let _ = unsafe { rustix::mm::madvise(start, bytes, advice) };
                Backing::Anonymous
            }
            Memory::Memfd => {
                let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?;
                let file = File::from(file);
                file.set_len(bytes as u64)?;
                let flags = MapFlags::SHARED | MapFlags::FIXED;
                // SAFETY: replaces the block, to which there is no reference yet.
                unsafe { rustix::mm::mmap(start, bytes, access, flags, &file, 0) }?;
                Backing::Shared(Arc::new(file), 0)
            }
        };
        let start = NonNull::new(start.cast()).expect("a mapping is not at address zero");
        // SAFETY: the mapping lives as long as the guest, which outlives the users of its RAM; there is no other
        // reference to it.
        let block = unsafe { RamBlock::new("ram", start, bytes, backing) };
        let ram = GuestRam::new(vec![block]).map_err(std::io::Error::other)?;
        Ok(Self { start, bytes, ram })
    }

    /// Returns its RAM.
    pub(crate) fn ram(&self) -> GuestRam {
        self.ram.clone()
    }

    /// Returns a word of RAM, which a migration may be reading.
    pub(crate) fn word(&self, number: u64) -> &AtomicU64 {
        let at = number as usize * size_of::<u64>();
        assert!(at < self.bytes, "word {number} of {} bytes", self.bytes);
        // SAFETY: within the mapping, which lives as long as the guest, and aligned; the threads that move its pages
        // read them by volatile loads.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    fn block(&self) -> &RamBlock {
        &self.ram.blocks()[0]
    }

    /// Returns a sum over all parts that hold data.
    pub(crate) fn sum(&self, content: Content) -> u64 {
        let mut page: Page = [0; PAGE_BYTES];
        pages_of(&content.filled(self.bytes as u64)).into_iter().flatten().fold(0, |sum, number| {
            self.block().read_page(number, &mut page).expect("its own memory is read");
            let words = page.as_chunks::<8>().0.iter();
            words.fold(mix(sum), |sum, word| (sum.rotate_left(5) ^ u64::from_le_bytes(*word)).wrapping_mul(FACTOR))
        })
    }

    /// Returns a dirty log of this process's writes.
    pub(crate) fn write_log(&self) -> Result<Box<WriteProtectLog>, String> {
        let log = WriteProtectLog::new(vec![self.block().addresses()]);
        log.map(Box::new).map_err(|error| error.to_string())
    }

    /// Returns a dirty log that stays empty, because the guest is idle.
    pub(crate) fn log(&self) -> Box<ReportedLog> {
        Box::new(ReportedLog::new(&[self.block().pages()]))
    }

    /// Returns a dirty log that reports all memory as written, until `time` after it was started.
    pub(crate) fn all_dirty_for(&self, time: Duration) -> Box<AllDirtyLog> {
        Box::new(AllDirtyLog { idle: ReportedLog::new(&[self.block().pages()]), time, until: None })
    }

    /// Fills the memory with `content`, by two threads.
    pub(crate) fn fill(&self, content: Content) -> Result<(), String> {
        let (filled, zero) = content.parts(self.bytes as u64);
        let block = self.block();
        if let Content::Corpus { corpus, bytes } = content {
            return chunks(corpus, bytes, |page, chunk| {
                block.write(page, chunk);
                Ok(())
            });
        }
        in_two(&pages_of(&filled), |page| {
            let mut bytes = [0; PAGE_BYTES];
            data().write(&mut bytes, page, GENERATION);
            block.write(page, &bytes);
            Ok(())
        })?;
        in_two(&[pages(&zero)], |page| {
            block.zero(page..page + 1);
            Ok(())
        })
    }

    /// Checks that the memory is as [`Guest::fill`] leaves it; what was never populated is zero.
    pub(crate) fn check(&self, content: Content) -> Result<(), String> {
        let block = self.block();
        let filled = content.filled(self.bytes as u64);
        if let Content::Corpus { corpus, bytes } = content {
            let mut copy = vec![0; CHUNK];
            chunks(corpus, bytes, |page, chunk| {
                let pages = copy.as_chunks_mut::<PAGE_BYTES>().0.iter_mut().zip(chunk.as_chunks::<PAGE_BYTES>().0);
                for ((copy, expected), page) in pages.zip(page..) {
                    block.read_page(page, copy).expect("its own memory is read");
                    if copy != expected {
                        return Err(format!("page {page} is not as it was"));
                    }
                }
                Ok(())
            })?;
            return self.nothing_outside(&filled);
        }
        in_two(&pages_of(&filled), |page| {
            let mut copy: Page = [0; PAGE_BYTES];
            let mut zero = [0];
            let mut snapshot = Snapshot::new(&mut copy, &mut zero);
            block.read(std::iter::once(page..page + 1), &mut snapshot).expect("its own memory is read");
            if snapshot.finish().normal == 0 {
                return Err(format!("page {page} was lost"));
            }
            data().check(&copy, page, GENERATION).map_err(|fault| format!("page {page} is {fault}"))
        })?;
        self.nothing_outside(&filled)
    }

    /// Checks that all other memory is zero.
    fn nothing_outside(&self, filled: &[Range<u64>]) -> Result<(), String> {
        let block = self.block();
        let inside: Vec<_> = filled.iter().map(pages).collect();
        let mut map = PageMap::own().map_err(|error| error.to_string())?;
        let mut wrong = None;
        let outside = |page: &u64| !inside.iter().any(|part| part.contains(page));
        block
            .populated(&mut map, |run| {
                wrong = wrong.or_else(|| run.filter(outside).find(|page| !block.is_zero(*page)));
            })
            .map_err(|error| error.to_string())?;
        wrong.map_or(Ok(()), |page| Err(format!("page {page} holds something and should be zero")))
    }

    /// Returns the bytes of RAM that are populated.
    pub(crate) fn populated_bytes(&self) -> Result<u64, String> {
        let mut map = PageMap::own().map_err(|error| error.to_string())?;
        let mut populated = 0;
        let counted = self.block().populated(&mut map, |run| populated += run.end - run.start);
        counted.map_err(|error| error.to_string())?;
        Ok(populated * PAGE_BYTES as u64)
    }

    /// Returns whether all of it is zero, as two threads find that read all of it: about the lower bound for any
    /// reader.
    pub(crate) fn read_by_two(&self) -> bool {
        let (block, half) = (self.block(), self.block().pages() / 2);
        let zero = |part: Range<u64>| part.into_iter().all(|page| block.is_zero(page));
        std::thread::scope(|scope| {
            let other = scope.spawn(move || zero(half..block.pages()));
            zero(0..half) & other.join().expect("reading does not panic")
        })
    }
}

/// Returns the generator of page contents, here and in a QEMU: like programs' memory, no page zero.
pub(crate) fn data() -> Pages {
    Pages::new(Fill::Corpus)
}

fn pages(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE_BYTES as u64..bytes.end / PAGE_BYTES as u64
}

fn pages_of(parts: &[Range<u64>]) -> Vec<Range<u64>> {
    parts.iter().map(pages).collect()
}

/// Calls `work` with each part of a corpus and the page at which it begins.
pub(crate) fn chunks(
    corpus: Corpus,
    bytes: u64,
    mut work: impl FnMut(u64, &[u8]) -> Result<(), String>,
) -> Result<(), String> {
    let content = corpus.open(bytes, SEED).map_err(|error| error.to_string())?;
    let mut chunk = vec![0; CHUNK];
    for offset in (0..bytes).step_by(CHUNK) {
        let part = &mut chunk[..(bytes - offset).min(CHUNK as u64) as usize];
        content.read(offset, part).map_err(|error| error.to_string())?;
        work((CORPUS_AT + offset) / PAGE_BYTES as u64, part)?;
    }
    Ok(())
}

/// Calls `work` for every page of `parts`, by two threads.
fn in_two(parts: &[Range<u64>], work: impl Fn(u64) -> Result<(), String> + Sync) -> Result<(), String> {
    let half = |which: u64| {
        let work = &work;
        move || {
            parts.iter().try_for_each(|part| {
                let middle = part.start + (part.end - part.start) / 2;
                let mut own = if which == 0 { part.start..middle } else { middle..part.end };
                own.try_for_each(work)
            })
        }
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(half(1));
        half(0)().and(other.join().expect("the work does not panic"))
    })
}

/// The dirty log of a guest that writes all of its memory. The log only pretends this, so it takes no CPU.
#[derive(Debug)]
pub(crate) struct AllDirtyLog {
    idle: ReportedLog,
    time: Duration,
    until: Option<Instant>,
}

impl DirtyLog for AllDirtyLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.until = Some(Instant::now() + self.time);
        self.idle.start()
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        self.idle.collect(block, dirty)?;
        if self.until.is_some_and(|until| Instant::now() < until) {
            dirty.set(0..dirty.pages());
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.idle.stop()
    }
}

/// The monitor of a guest, at either side.
#[derive(Debug, Default)]
pub(crate) struct Monitor {
    /// When its guest began to run.
    pub(crate) resumed_ns: Option<u64>,
    /// The thread that writes the guest's memory while the guest runs.
    pub(crate) writer: Option<Writer>,
}

impl SourceVmm for Monitor {
    fn name(&self) -> String {
        "benchmark 1".into()
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        self.writer.as_mut().map_or(Ok(()), |writer| writer.pause().map_err(Into::into))
    }

    fn resume(&mut self, _: ResumeReason) -> Result<(), VmmError> {
        self.writer.as_mut().map_or(Ok(()), |writer| writer.resume().map_err(Into::into))
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        Ok(state.write_all(&[0x5a; STATE_BYTES])?)
    }

    fn state_size(&self) -> u64 {
        STATE_BYTES as u64
    }
}

impl DestinationVmm for Monitor {
    fn name(&self) -> String {
        "benchmark 1".into()
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        let read = std::io::copy(state, &mut std::io::sink())?;
        if read == STATE_BYTES as u64 { Ok(()) } else { Err(format!("{read} bytes of state").into()) }
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        self.resumed_ns = Some(now_ns());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_where_it_is_said_to_be_and_the_rest_is_not_there() {
        let bytes = 2 * HUGE_PAGE as u64;
        for memory in [Memory::SmallPages, Memory::Memfd] {
            for (content, populated) in [
                (Content::Untouched, 0),
                (Content::HalfFilled, bytes / 2),
                (Content::TouchedZero, bytes),
                (Content::Sparse, HUGE_PAGE as u64),
                (Content::Used(4096), bytes),
            ] {
                let guest = Guest::new(memory, bytes).unwrap();
                guest.fill(content).unwrap();
                assert_eq!(guest.populated_bytes(), Ok(populated), "{memory:?} {content:?}");
                assert_eq!(guest.check(content), Ok(()), "{memory:?} {content:?}");
                assert_eq!(guest.read_by_two(), content.filled(bytes).is_empty());
            }
        }
    }

    #[test]
    fn a_corpus_lies_where_a_qemus_firmware_does_not_and_a_page_that_is_damaged_is_found() {
        let content = Content::Corpus { corpus: Corpus::Sequence, bytes: 2 << 20 };
        let guest = Guest::new(Memory::SmallPages, Content::around_corpus(2 << 20)).unwrap();
        guest.fill(content).unwrap();
        assert_eq!(guest.populated_bytes(), Ok(2 << 20));
        assert_eq!(guest.check(content), Ok(()));
        let sum = guest.sum(content);
        let page = Content::corpus_at() / PAGE_BYTES as u64 + 7;
        guest.block().write(page, &[1; PAGE_BYTES]);
        assert_eq!(guest.check(content), Err(format!("page {page} is not as it was")));
        assert_ne!(guest.sum(content), sum);
    }

    #[test]
    fn sides_tell_each_other_of_every_corpus() {
        for corpus in Corpus::ALL {
            let content = Content::Corpus { corpus, bytes: 4096 };
            let json = serde_json::to_string(&content).unwrap();
            assert_eq!(serde_json::from_str::<Content>(&json).unwrap(), content);
        }
        assert!(serde_json::from_str::<Content>(r#"{"Corpus":{"corpus":"zeros","bytes":1}}"#).is_err());
    }

    #[test]
    fn a_guest_that_writes_everything_does_so_until_its_time_is_over() {
        let guest = Guest::new(Memory::SmallPages, 2 * HUGE_PAGE as u64).unwrap();
        let pages = guest.block().pages();
        for (time, dirty) in [(Duration::from_secs(3600), pages), (Duration::ZERO, 0)] {
            let mut log = guest.all_dirty_for(time);
            log.start().unwrap();
            for _ in 0..2 {
                let mut found = PageBitmap::new(pages);
                log.collect(0, &mut found).unwrap();
                assert_eq!(found.count(), dirty);
            }
            log.stop().unwrap();
        }
    }

    #[test]
    fn a_page_that_is_lost_and_one_that_is_too_much_are_found() {
        let guest = Guest::new(Memory::SmallPages, 2 * HUGE_PAGE as u64).unwrap();
        guest.fill(Content::HalfFilled).unwrap();
        let first = guest.block().pages() / 2;
        guest.block().zero(first + 7..first + 8);
        assert!(guest.check(Content::HalfFilled).unwrap_err().contains("lost"));
        guest.fill(Content::HalfFilled).unwrap();
        guest.block().write(3, &[1; PAGE_BYTES]);
        assert_eq!(guest.check(Content::HalfFilled), Err("page 3 holds something and should be zero".into()));
    }
}
