//! The files of `/proc` that describe this process's memory, opened ahead.
//!
//! A monitor that gives up opening files (seccomp, a jail without `/proc`) before it migrates its guest still reads
//! these: an open file of `/proc/self` stays readable, and shows the memory as it is when it is read.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::mappings::Mappings;

/// `/proc/self/maps` and `/proc/self/pagemap`, open.
#[derive(Debug)]
pub(crate) struct OwnFiles {
    /// The process that opened them: a child of it has other memory.
    pid: u32,
    maps: File,
    page_map: File,
}

impl OwnFiles {
    /// Opens the files of this process.
    pub(crate) fn open() -> io::Result<Self> {
        let (maps, page_map) = (File::open("/proc/self/maps")?, File::open("/proc/self/pagemap")?);
        Ok(Self { pid: std::process::id(), maps, page_map })
    }

    /// Returns whether they are of this process, and not of its parent.
    pub(crate) fn are_own(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Reads the present mappings.
    pub(crate) fn mappings(&self) -> io::Result<Mappings> {
        let (mut text, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            // Reading at an offset leaves the offset of the file alone, which other threads may use.
            match self.maps.read_at(&mut piece, text.len() as u64)? {
                0 => break,
                count => text.extend_from_slice(&piece[..count]),
            }
        }
        // A path may hold any bytes, and no path is compared beyond its ASCII beginning.
        Ok(Mappings::from(String::from_utf8_lossy(&text).into_owned()))
    }

    /// Returns another descriptor of the page map.
    pub(crate) fn page_map(&self) -> io::Result<File> {
        self.page_map.try_clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_SIZE;
    use crate::test_util::Area;

    #[test]
    fn files_that_were_opened_before_show_what_was_mapped_after() {
        let files = OwnFiles::open().unwrap();
        assert!(files.are_own());
        let area = Area::small_pages(4 * PAGE_SIZE);
        let start = area.ptr().addr();
        let addresses = start..start + 4 * PAGE_SIZE;
        let mapped = files.mappings().unwrap().check(addresses, |mapping| mapping.is_anonymous());
        assert_eq!(mapped, Ok(()));
    }
}
