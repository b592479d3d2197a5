//! What a userfaultfd that was taken is good for: writes of the process are seen from outside.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use sterna_attach::{AttachError, UserfaultOrigin, take_userfault};

use crate::target::Target;

pub(crate) const CASES: &[(&str, fn())] = &[
    ("writes_to_anonymous_and_shared_memory_are_seen_from_outside_and_closing_ends_it", writes_are_seen),
    ("a_descriptor_made_by_the_device_tracks_as_well", device_tracks),
    ("a_number_that_is_not_the_devices_is_refused", wrong_device),
];

const PAGE: u64 = 4096;
const PAGES: u64 = 64;

fn writes_are_seen() {
    let mut target = Target::start(&["memory"]);
    let taken = take_userfault(&target.hold(), UserfaultOrigin::SystemCall).unwrap();
    target.note(&taken);
    tracks(&mut target, taken.descriptor);
    target.finish();
}

fn device_tracks() {
    let mut target = Target::start(&["memory"]);
    let number = target.ask("open-device");
    if number == "none" {
        println!("skipped: /dev/userfaultfd cannot be opened here");
        return;
    }
    let before = target.descriptors();
    let taken = take_userfault(&target.hold(), UserfaultOrigin::Device(number.parse().unwrap())).unwrap();
    assert_eq!(target.descriptors(), before);
    target.note(&taken);
    tracks(&mut target, taken.descriptor);
    target.finish();
}

fn wrong_device() {
    let target = Target::start(&["memory"]);
    for number in [0, 4711] {
        let error = take_userfault(&target.hold(), UserfaultOrigin::Device(number)).unwrap_err();
        println!("  {error}");
        match number {
            0 => assert!(matches!(error, AttachError::WrongDescriptor { number: 0, .. })),
            _ => assert!(
                matches!(error, AttachError::Refused { source, .. } if source.raw_os_error() == Some(libc::EBADF))
            ),
        }
    }
    target.finish();
}

/// Tracks both regions of the role from outside, write by write.
fn tracks(target: &mut Target, userfault: OwnedFd) {
    let regions: Vec<u64> = target.ready.split(' ').map(|word| u64::from_str_radix(word, 16).unwrap()).collect();
    let pagemap = File::open(format!("/proc/{}/pagemap", target.pid())).unwrap();
    let number = userfault.as_raw_fd();
    userfault::api(number).unwrap();
    for &region in &regions {
        userfault::register(number, region, PAGES * PAGE).unwrap();
    }
    // The protection begins with the first scan's: all pages count as written until then.
    for &region in &regions {
        userfault::scan(&pagemap, region, PAGES * PAGE).unwrap();
        assert_eq!(userfault::scan(&pagemap, region, PAGES * PAGE).unwrap(), []);
    }
    for (which, &region) in regions.iter().enumerate() {
        // Written by the program, and by the kernel for it.
        for (how, page) in [("write", 3), ("write", 40), ("read-into", 17)] {
            assert_eq!(target.ask(&format!("{how} {which} {page}")), "done");
            let written = userfault::scan(&pagemap, region, PAGES * PAGE).unwrap();
            assert_eq!(written, [(region + page * PAGE, region + (page + 1) * PAGE)], "{how} of region {which}");
        }
        assert_eq!(userfault::scan(&pagemap, region, PAGES * PAGE).unwrap(), []);
    }
    drop(userfault);
    let error = userfault::scan(&pagemap, regions[0], PAGES * PAGE).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM), "the range is not registered any more");
    for which in 0..regions.len() {
        assert_eq!(target.ask(&format!("write {which} 5")), "done");
    }
}

/// The few ioctls (`include/uapi/linux/userfaultfd.h`, `fs.h`).
mod userfault {
    use super::{File, RawFd, io};
    use std::os::fd::AsRawFd;

    const UFFDIO_API: u64 = 0xc018_aa3f;
    const UFFDIO_REGISTER: u64 = 0xc020_aa00;
    const PAGEMAP_SCAN: u64 = 0xc060_6610;
    /// `PAGEFAULT_FLAG_WP`, `WP_HUGETLBFS_SHMEM`, `WP_UNPOPULATED`, `WP_ASYNC`.
    const FEATURES: u64 = 1 | 1 << 12 | 1 << 13 | 1 << 15;

    fn call(descriptor: RawFd, request: u64, words: &mut [u64]) -> io::Result<i32> {
        // SAFETY: each request's structure is of as many 64-bit words as the caller passes; addresses in it are ours (scan) or ranges.
        let result = unsafe { libc::ioctl(descriptor, request as _, words.as_mut_ptr()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }

    pub(super) fn api(userfault: RawFd) -> io::Result<i32> {
        call(userfault, UFFDIO_API, &mut [0xaa, FEATURES, 0])
    }

    pub(super) fn register(userfault: RawFd, start: u64, length: u64) -> io::Result<i32> {
        const WRITE_PROTECT: u64 = 2;
        call(userfault, UFFDIO_REGISTER, &mut [start, length, WRITE_PROTECT, 0])
    }

    /// The ranges written since the last scan, which are protected again.
    pub(super) fn scan(pagemap: &File, start: u64, length: u64) -> io::Result<Vec<(u64, u64)>> {
        const PROTECT_AND_CHECK: u64 = 1 | 2;
        const WRITTEN: u64 = 2;
        let mut found = [[0_u64; 3]; 128];
        let end = start + length;
        let to = found.as_mut_ptr() as u64;
        let mut words = [96, PROTECT_AND_CHECK, start, end, 0, to, found.len() as u64, 0, 0, WRITTEN, 0, WRITTEN];
        let count = call(pagemap.as_raw_fd(), PAGEMAP_SCAN, &mut words)?;
        assert_eq!(words[4], end);
        Ok(found[..count as usize].iter().map(|&[start, end, _]| (start, end)).collect())
    }
}
