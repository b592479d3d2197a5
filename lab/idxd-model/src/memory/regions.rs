//! Properties of mappings that page tables do not contain: whether a mapping is shared, and whether it is registered
//! with userfaultfd.

use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// One mapping.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: u64,
    end: u64,
    shared: bool,
    userfault: bool,
}

/// This process's mappings.
#[derive(Debug)]
pub(super) struct Regions {
    maps: File,
    /// Whether the kernel is older than 6.11 and has no `PROCMAP_QUERY`.
    no_query: AtomicBool,
    parsed: Mutex<CachedMappings>,
    details: Mutex<CachedMappings>,
}

/// Cached mappings: reading all of them costs more than the accesses that need them.
#[derive(Debug, Default)]
struct CachedMappings {
    regions: Vec<Region>,
    until: Option<Instant>,
}

impl Regions {
    pub(super) fn new() -> io::Result<Regions> {
        Ok(Regions {
            maps: File::open("/proc/self/maps")?,
            no_query: AtomicBool::new(false),
            parsed: Mutex::default(),
            details: Mutex::default(),
        })
    }

    /// Returns the mapping at this address, and whether it is shared.
    pub(super) fn shared(&self, address: u64) -> Option<(Range<u64>, bool)> {
        if !self.no_query.load(Ordering::Relaxed) {
            match query(&self.maps, address) {
                Ok(found) => return found,
                Err(_) => self.no_query.store(true, Ordering::Relaxed),
            }
        }
        let region = look(&self.parsed, "/proc/self/maps", address)?;
        Some((region.start..region.end, region.shared))
    }

    /// Returns whether the mapping at this address is registered with userfaultfd.
    pub(super) fn userfault(&self, address: u64) -> bool {
        uses_userfaultfd() && look(&self.details, "/proc/self/smaps", address).is_some_and(|region| region.userfault)
    }
}

/// `struct procmap_query` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    vma_flags: u64,
    rest: [u64; 7],
}

/// Reads one mapping with one system call (`PROCMAP_QUERY`).
fn query(maps: &File, address: u64) -> io::Result<Option<(Range<u64>, bool)>> {
    const PROCMAP_QUERY: libc::c_ulong = 0xc068_6611;
    const SHARED: u64 = 8;
    let mut query = Query { size: size_of::<Query>() as u64, address, ..Query::default() };
    // SAFETY: the structure has the size in the request's number; names and build ids are not requested.
    if unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) } == 0 {
        return Ok(Some((query.start..query.end, query.vma_flags & SHARED != 0)));
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENOENT) { Ok(None) } else { Err(error) }
}

/// Returns whether this process has a userfaultfd. Only then is `smaps` read, which walks every page table.
fn uses_userfaultfd() -> bool {
    let Ok(files) = fs::read_dir("/proc/self/fd") else { return true };
    files.flatten().any(|file| {
        fs::read_link(file.path()).is_ok_and(|target| target.as_os_str().as_encoded_bytes().ends_with(b"[userfaultfd]"))
    })
}

fn look(known: &Mutex<CachedMappings>, path: &str, address: u64) -> Option<Region> {
    let mut known = known.lock().unwrap();
    let find = |known: &CachedMappings| {
        known.regions.iter().find(|region| (region.start..region.end).contains(&address)).copied()
    };
    let started = Instant::now();
    if known.until.is_some_and(|until| started < until)
        && let Some(region) = find(&known)
    {
        return Some(region);
    }
    known.regions = read(path).unwrap_or_default();
    // Valid for as long as the reading took, so that reading takes at most half of the time.
    known.until = Some(Instant::now() + started.elapsed().min(Duration::from_millis(2)));
    find(&known)
}

fn read(path: &str) -> io::Result<Vec<Region>> {
    let mut text = String::new();
    File::open(path)?.read_to_string(&mut text)?;
    Ok(parse(&text))
}

/// Parses `maps` and `smaps` (proc_pid_maps(5), proc_pid_smaps(5)); `um`, `uw` and `ui` are userfaultfd's modes.
fn parse(text: &str) -> Vec<Region> {
    let mut regions: Vec<Region> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if first == "VmFlags:" {
            if let Some(region) = regions.last_mut() {
                region.userfault = words.any(|word| matches!(word, "um" | "uw" | "ui"));
            }
            continue;
        }
        let Some((start, end)) = first.split_once('-') else { continue };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else { continue };
        let shared = words.next().is_some_and(|permissions| permissions.ends_with('s'));
        regions.push(Region { start, end, shared, userfault: false });
    }
    regions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_and_the_file_agree() {
        let regions = Regions::new().unwrap();
        let on_stack = [0_u8; 8];
        let address = on_stack.as_ptr() as u64;
        let (range, shared) = regions.shared(address).unwrap();
        assert!(range.contains(&address) && !shared);
        regions.no_query.store(true, Ordering::Relaxed);
        assert_eq!(regions.shared(address), Some((range, shared)));
        assert_eq!(regions.shared(0x1000), None);
    }

    #[test]
    fn both_files_are_parsed() {
        let text = "7f00-8000 rw-s 00000000 00:01 1024  /memfd:ram (deleted)\nSize: 4 kB\nVmFlags: rd wr mr mw um sd\n\
                    8000-9000 r--p 00000000 00:00 0\nVmFlags: rd mr mw me\n";
        let regions = parse(text);
        assert_eq!(regions.len(), 2);
        assert!(regions[0].shared && regions[0].userfault && regions[0].start == 0x7f00 && regions[0].end == 0x8000);
        assert!(!regions[1].shared && !regions[1].userfault);
    }
}
