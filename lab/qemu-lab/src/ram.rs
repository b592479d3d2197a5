//! Reads and writes a QEMU's guest RAM from outside, through `/proc/PID/mem`, and compares the RAM of two QEMUs.
//!
//! For stopped machines: a page that a running guest is writing may be read half old and half new. Reading a page that was
//! never populated populates shared backings, so nothing that depends on holes may be measured afterwards.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::Error;

/// Bytes read at a time.
const CHUNK: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Threads that compare; more gain nothing where memory is the limit.
const THREADS: u64 = 2;

/// The pages of guest RAM that loading devices at a destination may change, even without Sterna: on q35, the page in which the
/// firmware shares data with devices (seen with PCI devices; the laboratory's bare machines change none). Every other page of a
/// stopped source and its loaded destination must be equal.
pub const CHANGED_BY_LOADING: [u64; 1] = [0xe_8000];

/// The guest RAM of one process.
#[derive(Debug)]
pub struct Ram {
    path: String,
    memory: File,
    start: u64,
    bytes: u64,
}

impl Ram {
    /// Finds the block of `bytes` in process `pid`: the only mapping of that size that is readable, writable and not executable,
    /// with any backing. For blocks of 64 MiB and more; smaller mappings may not be unique.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] if there is none or more than one, [`Error::Io`] without the right to read.
    pub fn open(pid: u32, bytes: u64) -> Result<Ram, Error> {
        let path = format!("/proc/{pid}/maps");
        let maps = std::fs::read_to_string(&path).map_err(Error::io(format!("reading {path}")))?;
        let starts = find(&maps, bytes);
        let [start] = starts[..] else {
            return Err(Error::NoSuchBlock { pid, bytes, found: starts.len() });
        };
        let path = format!("/proc/{pid}/mem");
        let memory = File::open(&path).map_err(Error::io(format!("opening {path}")))?;
        Ok(Ram { path, memory, start, bytes })
    }

    /// Returns the block's size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Returns whether the block has no bytes, which is never the case.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the address of the block in the process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start
    }

    /// Reads the bytes at `offset` in the block.
    ///
    /// # Errors
    /// [`Error::Io`] outside the block, or if the process has ended.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let inside = offset.checked_add(into.len() as u64).is_some_and(|end| end <= self.bytes);
        let answer = if inside {
            self.memory.read_exact_at(into, self.start + offset)
        } else {
            Err(std::io::ErrorKind::InvalidInput.into())
        };
        answer.map_err(Error::io(format!("reading guest RAM at {offset:#x}")))
    }

    /// Writes the bytes at `offset` in the block.
    ///
    /// # Errors
    /// As [`Ram::read`], and without the right to write.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let inside = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= self.bytes);
        let answer = if inside {
            let memory = File::options().write(true).open(&self.path);
            memory.and_then(|memory| memory.write_all_at(bytes, self.start + offset))
        } else {
            Err(std::io::ErrorKind::InvalidInput.into())
        };
        answer.map_err(Error::io(format!("writing guest RAM at {offset:#x}")))
    }
}

/// Returns the start addresses of the mappings (proc_pid_maps(5)) that can be a block of guest RAM of `bytes`.
fn find(maps: &str, bytes: u64) -> Vec<u64> {
    let mut found = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(range), Some(access)) = (words.next(), words.next()) else { continue };
        let Some((start, end)) = range.split_once('-') else { continue };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else { continue };
        // Translated code lies in executable mappings.
        if access.starts_with("rw-") && end - start == bytes {
            found.push(start);
        }
    }
    found
}

/// Compares the blocks of `bytes` of two processes whose machines are stopped. Returns the offsets of the 4 KiB pages
/// that differ, in order.
///
/// # Errors
/// As [`Ram::open`] and [`Ram::read`].
pub fn compare(pid_a: u32, pid_b: u32, bytes: u64) -> Result<Vec<u64>, Error> {
    let (a, b) = (Ram::open(pid_a, bytes)?, Ram::open(pid_b, bytes)?);
    let share = bytes.div_ceil(THREADS).next_multiple_of(CHUNK);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|worker| {
                let range = (worker * share).min(bytes)..((worker + 1) * share).min(bytes);
                let (a, b) = (&a, &b);
                scope.spawn(move || compare_range(a, b, range))
            })
            .collect();
        let mut differing = Vec::new();
        for worker in workers {
            differing.extend(worker.join().expect("comparing does not panic")?);
        }
        Ok(differing)
    })
}

fn compare_range(a: &Ram, b: &Ram, range: std::ops::Range<u64>) -> Result<Vec<u64>, Error> {
    let mut differing = Vec::new();
    let mut buffers = [vec![0; CHUNK as usize], vec![0; CHUNK as usize]];
    let mut offset = range.start;
    while offset < range.end {
        let length = CHUNK.min(range.end - offset) as usize;
        let [left, right] = &mut buffers;
        a.read(offset, &mut left[..length])?;
        b.read(offset, &mut right[..length])?;
        if left[..length] != right[..length] {
            let pages = left[..length].chunks(PAGE as usize).zip(right[..length].chunks(PAGE as usize));
            differing
                .extend(pages.enumerate().filter(|(_, (l, r))| l != r).map(|(page, _)| offset + page as u64 * PAGE));
        }
        offset += length as u64;
    }
    Ok(differing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_is_found_among_code_guards_and_other_sizes() {
        let maps = "\
7f0000000000-7f0004000000 rw-p 00000000 00:00 0 \n\
7f0010000000-7f0014000000 rwxp 00000000 00:00 0 \n\
7f0020000000-7f0024000000 ---p 00000000 00:00 0 \n\
7f0030000000-7f0034001000 rw-p 00000000 00:00 0 \n\
7f0040000000-7f0048000000 rw-s 00000000 00:01 1027    /memfd:memory-backend-memfd (deleted)\n";
        assert_eq!(find(maps, 0x400_0000), [0x7f00_0000_0000]);
        assert_eq!(find(maps, 0x800_0000), [0x7f00_4000_0000]);
        assert_eq!(find(maps, 0x200_0000), [0u64; 0]);
    }
}
