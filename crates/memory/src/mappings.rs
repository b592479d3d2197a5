//! The mappings of a process, as the kernel lists them: used to check a caller's description of guest RAM.
//!
//! A wrong backing of a RAM block is silent and loses memory: if a private file mapping is described as shared, its
//! written pages are not in the file, so a search of the file for data never finds them.

use std::fs;
use std::io;
use std::ops::Range;

/// A line of `/proc/PID/maps` (proc_pid_maps(5)): `start-end rwxp offset major:minor inode path`.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// Address of the first byte.
    pub start: usize,
    /// Address behind the last byte.
    pub end: usize,
    /// Whether the process may read and write it.
    pub writable: bool,
    /// Whether writing it copies the page.
    pub private: bool,
    /// Offset of `start` in the file, in bytes.
    pub offset: u64,
    /// Major and minor number.
    pub device: (u32, u32),
    /// 0 where there is no file.
    pub inode: u64,
    /// The path, to the end of the line; empty where there is none.
    pub path: &'a str,
    line: &'a str,
}

impl<'a> Mapping<'a> {
    /// Parses a line; none if it is not of this form.
    pub fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let permissions = fields.next()?.as_bytes();
        let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
        let (major, minor) = fields.next()?.split_once(':')?;
        Some(Self {
            start: usize::from_str_radix(start, 16).ok()?,
            end: usize::from_str_radix(end, 16).ok()?,
            writable: permissions.starts_with(b"rw"),
            private: permissions.get(3) == Some(&b'p'),
            offset,
            device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
            inode: fields.next()?.parse().ok()?,
            path: fields.next().unwrap_or_default().trim(),
            line: line.trim_end(),
        })
    }

    /// Returns whether it is private memory without a file, with ordinary, transparent huge or hugetlb pages.
    pub(crate) fn is_anonymous(&self) -> bool {
        self.private && (self.inode == 0 || self.is_anonymous_hugetlb())
    }

    /// Returns whether it was made by `MAP_HUGETLB` without a file: the kernel shows an internal file.
    pub(crate) fn is_anonymous_hugetlb(&self) -> bool {
        self.path.starts_with("/anon_hugepage")
    }

    /// Returns whether `address`, before which the mapping may begin, is byte `offset` of the file with this device and
    /// inode.
    pub(crate) fn is_of_file(&self, address: usize, (device, inode): ((u32, u32), u64), offset: u64) -> bool {
        let expected = offset.wrapping_add(self.start as u64).wrapping_sub(address as u64);
        (self.device, self.inode, self.offset) == (device, inode, expected)
    }
}

/// All mappings of a process, at one time.
#[derive(Debug)]
pub(crate) struct Mappings(String);

impl Mappings {
    /// Reads those of this process.
    pub(crate) fn own() -> io::Result<Self> {
        fs::read_to_string("/proc/self/maps").map(Self)
    }

    /// Reads those of the process that has the id `pid` now.
    pub(crate) fn of_process(pid: i32) -> io::Result<Self> {
        fs::read_to_string(format!("/proc/{pid}/maps")).map(Self)
    }

    /// Checks that all of `addresses` is mapped, and that `is` accepts every mapping in that range.
    ///
    /// # Errors
    /// The actual mapping, as text.
    pub(crate) fn check(
        &self,
        addresses: Range<usize>,
        mut is: impl FnMut(&Mapping<'_>) -> bool,
    ) -> Result<(), String> {
        let mut at = addresses.start;
        // Sorted by address.
        for mapping in self.0.lines().filter_map(Mapping::parse).skip_while(|mapping| mapping.end <= addresses.start) {
            if at >= addresses.end || mapping.start > at {
                break;
            }
            if !is(&mapping) {
                return Err(format!("mapped is {}", mapping.line));
            }
            at = at.max(mapping.end);
        }
        if at >= addresses.end { Ok(()) } else { Err(format!("nothing is mapped at {at:#x}")) }
    }
}

impl From<String> for Mappings {
    /// Takes the text of a `/proc/PID/maps`.
    fn from(lines: String) -> Self {
        Self(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mappings_are_understood() {
        let line = "7f00a0000000-7f00a0400000 rw-p 00200000 00:0f 1234                       /anon_hugepage (deleted)";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end), (0x7f00_a000_0000, 0x7f00_a040_0000));
        assert_eq!((mapping.private, mapping.offset, mapping.device, mapping.inode), (true, 0x20_0000, (0, 15), 1234));
        assert_eq!(mapping.path, "/anon_hugepage (deleted)");
        assert!(mapping.is_anonymous() && mapping.is_anonymous_hugetlb());
        let shared = Mapping::parse("1000-3000 rw-s 00000000 00:00 0 ").unwrap();
        assert_eq!((shared.private, shared.inode, shared.path, shared.is_anonymous()), (false, 0, "", false));
        assert!(Mapping::parse("1000-3000 rw-p 00000000 00:00 0 [heap]").unwrap().is_anonymous());
        assert!(Mapping::parse("not a line").is_none());
    }

    #[test]
    fn a_range_is_checked_mapping_by_mapping_and_for_gaps() {
        let lines =
            "1000-3000 rw-p 00000000 00:00 0 \n3000-4000 rw-p 00005000 00:01 7 /file\n6000-7000 rw-p 0 00:00 0 \n";
        let mappings = Mappings::from(lines.to_owned());
        let check = |range, is: fn(&Mapping<'_>) -> bool| mappings.check(range, is);
        assert_eq!(check(0x1000..0x3000, |mapping| mapping.is_anonymous()), Ok(()));
        assert_eq!(check(0x2000..0x3000, |mapping| mapping.is_anonymous()), Ok(()));
        assert_eq!(check(0x2000..0x4000, |_| true), Ok(()));
        let error = check(0x2000..0x4000, |mapping| mapping.is_anonymous()).unwrap_err();
        assert_eq!(error, "mapped is 3000-4000 rw-p 00005000 00:01 7 /file");
        assert_eq!(check(0x3000..0x5000, |_| true).unwrap_err(), "nothing is mapped at 0x4000");
        assert_eq!(check(0x800..0x2000, |_| true).unwrap_err(), "nothing is mapped at 0x800");
        assert_eq!(check(0x9000..0xa000, |_| true).unwrap_err(), "nothing is mapped at 0x9000");
        assert_eq!(check(0x3000..0x4000, |mapping| mapping.is_of_file(0x3000, ((0, 1), 7), 0x5000)), Ok(()));
        assert!(check(0x3000..0x4000, |mapping| mapping.is_of_file(0x3000, ((0, 1), 7), 0x6000)).is_err());
    }
}
