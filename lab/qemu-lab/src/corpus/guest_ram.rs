//! The RAM of a Linux guest that was booted for this purpose: its kernel, its tables of pages, inodes and directories, and a root file
//! system in memory with files of this machine. All of it is read once, from outside, and kept; the seed determines the order of its
//! pieces.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sterna_guest::content::{PAGE_BYTES, Page, mix};

use super::store::Distinct;
use super::{Pages, files, store};
use crate::ram::Ram;
use crate::{Error, Fill, Guest, LinuxGuest, Qemu, QemuOptions, QemuVersion};

/// Files of this many bytes at least, and at most: the firmware puts them below 2 GiB, once as an archive and once as files.
const FILES: std::ops::RangeInclusive<u64> = 128 << 20..=768 << 20;
/// The kernel and what it needs to unpack them.
const BESIDE_FILES: u64 = 512 << 20;
/// Bytes that the guest's own program fills, with zeros.
const FILLED: u64 = 8 << 20;
/// Time limit of booting: an emulated guest unpacks some 100 MB each second, less on a busy machine.
const BOOT: Duration = Duration::from_secs(180);
/// Pages that stay together.
const PIECE: u64 = 128;
/// Bytes of one read.
const CHUNK: usize = 1 << 20;

/// Pieces of the RAM of a guest.
#[derive(Debug)]
pub(super) struct GuestRam {
    file: File,
    origin: String,
    /// The first page of each piece that is left, the next one last.
    pieces: Vec<u64>,
    next: u64,
    end: u64,
    pages: u64,
}

impl GuestRam {
    /// Opens the RAM of a guest large enough for `bytes`.
    pub(super) fn new(bytes: u64, seed: u64) -> Result<Self, Error> {
        // One of few sizes, so that one guest serves many corpora.
        let wanted = (bytes + bytes / 8).next_power_of_two().clamp(*FILES.start(), *FILES.end());
        // One guest serves all concurrent callers.
        static BOOTING: Mutex<()> = Mutex::new(());
        let _booting = BOOTING.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, origin) = store::open(&format!("guest-{wanted}"), |file| take(wanted, file))?;
        let about = file.metadata().map_err(Error::io("looking at a guest's kept RAM"))?;
        let pages = about.len() / PAGE_BYTES as u64;
        let mut pieces: Vec<u64> = (0..pages).step_by(PIECE as usize).collect();
        pieces.sort_by_cached_key(|piece| mix(mix(seed) ^ *piece));
        Ok(Self { file, origin, pieces, next: 0, end: 0, pages })
    }
}

impl Pages for GuestRam {
    fn next(&mut self, page: &mut Page) -> Result<bool, Error> {
        if self.next == self.end {
            let Some(first) = self.pieces.pop() else { return Ok(false) };
            (self.next, self.end) = (first, (first + PIECE).min(self.pages));
        }
        let read = self.file.read_exact_at(page, self.next * PAGE_BYTES as u64);
        read.map_err(Error::io("reading a guest's kept RAM"))?;
        self.next += 1;
        Ok(true)
    }

    fn most(&self) -> u64 {
        self.pages * PAGE_BYTES as u64
    }

    fn origin(&self) -> String {
        self.origin.clone()
    }
}

/// Boots a guest with `files` bytes of files and writes each distinct page of its RAM that is not zero.
fn take(files: u64, into: &mut File) -> Result<String, Error> {
    let (paths, bytes) = files::for_guest(files);
    let memory = (2 * bytes + BESIDE_FILES).next_multiple_of(64 << 20);
    let guest =
        LinuxGuest { fill: Fill::Zeros, memory: Some(FILLED), verify_rate: 0, files: paths, ..LinuxGuest::default() };
    let count = guest.files.len();
    let options = QemuOptions { memory, ..QemuOptions::new(QemuVersion::V10_0, Guest::Linux(guest)) };
    let qemu = Qemu::start(&options)?;
    qemu.guest().wait_ready(BOOT)?;
    let ram = Ram::open(qemu.pid(), memory)?;
    let failed = |error| Error::io("keeping a guest's RAM")(error);
    let mut out = BufWriter::with_capacity(CHUNK, into);
    let (mut chunk, mut seen, mut pages) = (vec![0; CHUNK], Distinct::default(), 0u64);
    for offset in (0..memory).step_by(CHUNK) {
        ram.read(offset, &mut chunk)?;
        for page in chunk.as_chunks::<PAGE_BYTES>().0 {
            if seen.is_new(page) {
                out.write_all(page).map_err(failed)?;
                pages += 1;
            }
        }
    }
    out.flush().map_err(failed)?;
    let mib = |bytes: u64| bytes >> 20;
    Ok(format!(
        "RAM of a Linux guest of {} MiB after its boot, {} MiB of it in distinct pages that are not zero; {count} files of this system's \
         /usr with {} MiB lie in its root file system",
        mib(memory),
        mib(pages * PAGE_BYTES as u64),
        mib(bytes)
    ))
}
