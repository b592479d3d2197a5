//! Parses what `/proc` shows of a process's memory (proc_pid_maps(5), proc_pid_mountinfo(5), proc_pid_status(5)).

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use sterna_memory::mappings;

use super::FileKind;

/// The mappings of a process, in the order of their addresses.
#[derive(Debug)]
pub(super) struct Maps(Vec<Mapping>);

#[derive(Debug, Clone, PartialEq)]
struct Mapping {
    start: u64,
    end: u64,
    writable: bool,
    shared: bool,
    offset: u64,
    device: (u32, u32),
    inode: u64,
    path: String,
}

/// A range with one backing: one or several neighbouring mappings of the same memory.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Area {
    pub(super) shared: bool,
    /// 0: anonymous.
    pub(super) inode: u64,
    /// Offset in the file of the range's first byte.
    pub(super) offset: u64,
    /// The bounds of the mapping that holds the first byte.
    pub(super) first_mapping: (u64, u64),
    device: (u32, u32),
    path: String,
}

impl Area {
    /// Returns the major and minor number of the file's device.
    pub(super) fn device(&self) -> (u32, u32) {
        self.device
    }

    /// Returns whether the file is on this device (`st_dev`).
    pub(super) fn is_device(&self, device: u64) -> bool {
        self.device == (rustix::fs::major(device), rustix::fs::minor(device))
    }
}

impl Maps {
    /// Parses the mappings. Lines that cannot be parsed are left out, so an area that needs one of them is not found.
    pub(super) fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(mapping).collect())
    }

    /// Returns the area of `size` bytes at `address`.
    ///
    /// # Errors
    /// Why the range is not an area: it is not mapped, not writable, or has several backings.
    pub(super) fn area(&self, address: u64, size: u64) -> Result<Area, String> {
        let end = address.checked_add(size).filter(|_| size > 0).ok_or("its address range is not possible")?;
        let at = self.0.partition_point(|mapping| mapping.end <= address);
        let first = self.0.get(at).filter(|mapping| mapping.start <= address);
        let first = first.ok_or("its address is not mapped in the QEMU process")?;
        let mut reached = first.start;
        for mapping in &self.0[at..] {
            if reached >= end {
                break;
            }
            if mapping.start != reached {
                return Err("it is not mapped as a whole in the QEMU process".into());
            }
            let same = mapping.shared == first.shared
                && mapping.inode == first.inode
                && mapping.device == first.device
                && (first.inode == 0 || mapping.offset == first.offset + (mapping.start - first.start));
            if !same {
                return Err("different things are mapped in it".into());
            }
            if !mapping.writable {
                return Err("it is mapped read-only in the QEMU process".into());
            }
            reached = mapping.end;
        }
        if reached < end {
            return Err("it is not mapped as a whole in the QEMU process".into());
        }
        Ok(Area {
            shared: first.shared,
            inode: first.inode,
            offset: first.offset + (address - first.start),
            first_mapping: (first.start, first.end),
            device: first.device,
            path: first.path.clone(),
        })
    }
}

/// Parses a line like `7fe8dffff000-7fe8effff000 rw-s 00000000 00:01 1050      /memfd:memory-backend-memfd (deleted)`.
fn mapping(line: &str) -> Option<Mapping> {
    let mapping = mappings::Mapping::parse(line)?;
    Some(Mapping {
        start: mapping.start as u64,
        end: mapping.end as u64,
        // Must be readable as well: write access is probed by reading.
        writable: mapping.writable,
        shared: !mapping.private,
        offset: mapping.offset,
        device: mapping.device,
        inode: mapping.inode,
        path: mapping.path.split_whitespace().next().unwrap_or_default().to_owned(),
    })
}

/// Returns the kind of an area's file.
pub(super) fn file_kind(file: &File, area: &Area, pid: i32) -> Result<FileKind, String> {
    // linux/magic.h
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
    let system = rustix::fs::fstatfs(file).map_err(|errno| format!("its file system cannot be told: {errno}"))?;
    Ok(match system.f_type as u64 {
        HUGETLBFS_MAGIC => FileKind::Hugetlb { page_size: system.f_bsize as u64 },
        TMPFS_MAGIC if area.path.starts_with("/memfd:") => FileKind::Memfd {
            huge: matches!(shmem_enabled().as_deref(), Some("always" | "within_size" | "advise" | "force")),
        },
        TMPFS_MAGIC => {
            let device = file.metadata().map_err(|error| error.to_string())?.dev();
            // The file is in QEMU's mount namespace.
            let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
            FileKind::Tmpfs {
                huge: match shmem_enabled().as_deref() {
                    Some("deny") => false,
                    Some("force") => true,
                    _ => mounted_huge(&mounts, rustix::fs::major(device), rustix::fs::minor(device)),
                },
            }
        }
        _ => FileKind::Disk,
    })
}

/// Returns the chosen word of `always within_size advise [never] deny force`, which applies to memfds and shared anonymous memory.
fn shmem_enabled() -> Option<String> {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").ok()?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// Returns whether a tmpfs was mounted with huge pages: `36 25 0:32 / /mnt rw shared:1 - tmpfs tmpfs rw,huge=always`
pub(super) fn mounted_huge(mountinfo: &str, major: u32, minor: u32) -> bool {
    let device = format!("{major}:{minor}");
    mountinfo
        .lines()
        .filter(|line| line.split(' ').nth(2) == Some(&device))
        .filter_map(|line| line.rsplit(' ').next())
        .any(|options| {
            options.split(',').any(|option| matches!(option, "huge=always" | "huge=within_size" | "huge=advise"))
        })
}

/// Returns whether memory of the process is locked (mlock, `-overcommit mem-lock=on`), from `/proc/PID/status`.
pub(super) fn has_locked_memory(status: &str) -> bool {
    status.lines().any(|line| line.starts_with("VmLck:") && line.split_whitespace().nth(1) != Some("0"))
}

/// Returns whether memory of the process is locked (mlock, VFIO) or pinned (vDPA, iommufd, io_uring), from `/proc/PID/status`.
pub(super) fn has_pinned_memory(status: &str) -> bool {
    status
        .lines()
        .filter(|line| line.starts_with("VmLck:") || line.starts_with("VmPin:"))
        .any(|line| line.split_whitespace().nth(1) != Some("0"))
}
