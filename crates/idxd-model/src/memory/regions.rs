//! What the page tables alone do not say: whether a mapping is shared, and whether userfaultfd watches it.

use std::fs;
use std::io::{self, Read};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// One mapping.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: u64,
    end: u64,
    shared: bool,
    userfault: bool,
}

/// Mappings as they were a moment ago: reading them costs more than the accesses that ask.
#[derive(Debug, Default)]
pub(super) struct Regions {
    maps: Mutex<Known>,
    details: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    regions: Vec<Region>,
    until: Option<Instant>,
}

impl Regions {
    /// Whether the mapping at this address is a shared one.
    pub(super) fn shared(&self, address: u64) -> bool {
        look(&self.maps, "/proc/self/maps", address).is_some_and(|region| region.shared)
    }

    /// Whether the mapping at this address is registered with userfaultfd.
    pub(super) fn userfault(&self, address: u64) -> bool {
        uses_userfaultfd() && look(&self.details, "/proc/self/smaps", address).is_some_and(|region| region.userfault)
    }
}

/// `smaps` walks every page table, so it is read only where somebody in this process has a userfaultfd at all.
fn uses_userfaultfd() -> bool {
    let Ok(files) = fs::read_dir("/proc/self/fd") else { return true };
    files.flatten().any(|file| {
        fs::read_link(file.path()).is_ok_and(|target| target.as_os_str().as_encoded_bytes().ends_with(b"[userfaultfd]"))
    })
}

fn look(known: &Mutex<Known>, path: &str, address: u64) -> Option<Region> {
    let mut known = known.lock().unwrap();
    let find =
        |known: &Known| known.regions.iter().find(|region| (region.start..region.end).contains(&address)).copied();
    let started = Instant::now();
    if known.until.is_some_and(|until| started < until)
        && let Some(region) = find(&known)
    {
        return Some(region);
    }
    known.regions = read(path).unwrap_or_default();
    // Valid for as long as it took to read it, so that half of the time at most is spent with this.
    known.until = Some(Instant::now() + started.elapsed().min(Duration::from_millis(2)));
    find(&known)
}

fn read(path: &str) -> io::Result<Vec<Region>> {
    let mut text = String::new();
    fs::File::open(path)?.read_to_string(&mut text)?;
    Ok(parse(&text))
}

/// `maps` and `smaps` alike (proc_pid_maps(5), proc_pid_smaps(5)); `um`, `uw` and `ui` are userfaultfd's modes.
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
    use super::parse;

    #[test]
    fn both_files_are_understood() {
        let text = "7f00-8000 rw-s 00000000 00:01 1024  /memfd:ram (deleted)\nSize: 4 kB\nVmFlags: rd wr mr mw um sd\n\
                    8000-9000 r--p 00000000 00:00 0\nVmFlags: rd mr mw me\n";
        let regions = parse(text);
        assert_eq!(regions.len(), 2);
        assert!(regions[0].shared && regions[0].userfault && regions[0].start == 0x7f00 && regions[0].end == 0x8000);
        assert!(!regions[1].shared && !regions[1].userfault);
    }
}
