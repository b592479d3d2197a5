//! The system's own files as material, as in a guest's page cache: page by page from the beginning of each file, the last page padded with
//! zeros.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sterna_guest::content::{PAGE_BYTES, Page, mix};

use super::Pages;
use crate::Error;

/// The directory that is searched, and the part of it with files that were installed by hand.
const ROOT: &str = "/usr";
const NOT_THE_SYSTEMS: &str = "/usr/local";
/// Maximum bytes of one file, so that a few large files do not dominate.
const MAX_FILE_BYTES: u64 = 8 << 20;
/// One of this many files is reserved for the guest whose RAM is a corpus of its own, so that the two have nothing in common.
const FOR_GUESTS: u64 = 3;

/// The kind of a file, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Binary,
    Compressed,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Text => "texts",
            Self::Binary => "programs and libraries",
            Self::Compressed => "compressed files",
        }
    }

    /// Formats by their first bytes (magic(5)); text is what has no byte that text does not have.
    fn of(start: &[u8]) -> Option<Self> {
        const COMPRESSED: [&[u8]; 7] =
            [b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x89PNG", b"PK\x03\x04", b"\xff\xd8\xff", b"BZh"];
        if start.starts_with(b"\x7fELF") {
            return Some(Self::Binary);
        }
        if COMPRESSED.iter().any(|magic| start.starts_with(magic)) {
            return Some(Self::Compressed);
        }
        let text = |byte: &u8| *byte >= b' ' || matches!(byte, b'\n' | b'\t' | b'\r' | 0x0c | 0x1b);
        (!start.is_empty() && start.iter().all(text)).then_some(Self::Text)
    }
}

/// A file of the system.
#[derive(Clone, Debug)]
struct Found {
    path: PathBuf,
    bytes: u64,
    kind: Option<Kind>,
}

/// All files of at least a page, looked up once for each process, in the order of their paths.
fn all() -> &'static [Found] {
    static ALL: OnceLock<Vec<Found>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut found = Vec::new();
        walk(Path::new(ROOT), &mut HashSet::new(), &mut found);
        found.sort_by(|a, b| a.path.cmp(&b.path));
        found
    })
}

/// Adds the files below `directory`. Unreadable files and directories are skipped.
fn walk(directory: &Path, seen: &mut HashSet<(u64, u64)>, found: &mut Vec<Found>) {
    let mut entries: Vec<_> =
        fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    // If a file has several names, always the same one is used.
    entries.sort();
    for path in entries {
        let Ok(about) = fs::symlink_metadata(&path) else { continue };
        if about.is_dir() {
            if path != Path::new(NOT_THE_SYSTEMS) {
                walk(&path, seen, found);
            }
        } else if about.is_file() && about.len() >= PAGE_BYTES as u64 && seen.insert((about.dev(), about.ino())) {
            let mut start = [0; PAGE_BYTES];
            if File::open(&path).and_then(|mut file| file.read_exact(&mut start)).is_ok() {
                found.push(Found { path, bytes: about.len().min(MAX_FILE_BYTES), kind: Kind::of(&start) });
            }
        }
    }
}

/// Returns a number that depends only on the path and the seed, for orders and choices.
fn number(path: &Path, seed: u64) -> u64 {
    path.as_os_str().as_encoded_bytes().iter().fold(mix(seed), |sum, byte| mix(sum ^ u64::from(*byte)))
}

fn is_for_guests(path: &Path) -> bool {
    number(path, 0).is_multiple_of(FOR_GUESTS)
}

fn in_order(files: &mut [Found], seed: u64) {
    files.sort_by_cached_key(|file| number(&file.path, seed.wrapping_add(1)));
}

/// Returns files of any kind for a guest's page cache with approximately `bytes` bytes, and their total; less if there are fewer.
pub(super) fn for_guest(bytes: u64) -> (Vec<PathBuf>, u64) {
    let mut files: Vec<Found> = all().iter().filter(|file| is_for_guests(&file.path)).cloned().collect();
    in_order(&mut files, 0);
    let mut chosen = 0;
    // A guest gets whole files.
    files.retain(|file| {
        let wanted = chosen < bytes && file.bytes < MAX_FILE_BYTES;
        chosen += if wanted { file.bytes } else { 0 };
        wanted
    });
    (files.into_iter().map(|file| file.path).collect(), chosen)
}

/// All pages of files of one kind, in an order that the seed decides.
#[derive(Debug)]
pub(super) struct Files {
    kind: Kind,
    rest: std::vec::IntoIter<Found>,
    current: Option<(File, u64)>,
    files: u64,
    pages: u64,
}

impl Files {
    pub(super) fn new(kind: Kind, seed: u64) -> Result<Self, Error> {
        let ours = |file: &&Found| file.kind == Some(kind) && !is_for_guests(&file.path);
        let mut files: Vec<Found> = all().iter().filter(ours).cloned().collect();
        in_order(&mut files, seed);
        Ok(Self { kind, rest: files.into_iter(), current: None, files: 0, pages: 0 })
    }
}

impl Pages for Files {
    fn next(&mut self, page: &mut Page) -> Result<bool, Error> {
        loop {
            if let Some((file, left)) = self.current.as_mut().filter(|(_, left)| *left > 0) {
                let part = (*left).min(PAGE_BYTES as u64) as usize;
                // A file that was truncated or removed meanwhile counts as ended.
                if file.read_exact(&mut page[..part]).is_ok() {
                    page[part..].fill(0);
                    *left -= part as u64;
                    self.pages += 1;
                    return Ok(true);
                }
            }
            let Some(next) = self.rest.next() else { return Ok(false) };
            self.current = File::open(&next.path).ok().map(|file| (file, next.bytes));
            self.files += 1;
        }
    }

    fn most(&self) -> u64 {
        self.rest.as_slice().iter().map(|file| file.bytes.next_multiple_of(PAGE_BYTES as u64)).sum()
    }

    fn origin(&self) -> String {
        let mib = (self.pages * PAGE_BYTES as u64) >> 20;
        format!("{} {} of this system's {ROOT}, {mib} MiB", self.files, self.kind.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_classified_by_their_first_bytes() {
        assert_eq!(Kind::of(b"\x7fELF\x02\x01"), Some(Kind::Binary));
        assert_eq!(Kind::of(b"\x1f\x8b\x08"), Some(Kind::Compressed));
        assert_eq!(Kind::of("GNU GENERAL PUBLIC LICENSE\n\tVersion 3, é".as_bytes()), Some(Kind::Text));
        assert_eq!(Kind::of(b"text\0"), None);
        assert_eq!(Kind::of(b""), None);
    }

    #[test]
    fn a_guests_files_are_no_ones_else() {
        let (guests, bytes) = for_guest(4 << 20);
        let sum: u64 = guests.iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert_eq!(sum, bytes);
        assert!(guests.iter().all(|path| is_for_guests(path)));
        let others = Files::new(Kind::Text, 1).unwrap();
        assert!(others.rest.as_slice().iter().all(|file| !guests.contains(&file.path)));
    }
}
