//! Uses of a taken userfaultfd: writes of the process are tracked from outside.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use std::time::Duration;

use sterna_attach::{AttachError, Process, UserfaultOrigin, advise, share_userfault, take_userfault};

use crate::target::Target;

pub(crate) const CASES: &[(&str, fn())] = &[
    ("writes_to_anonymous_and_shared_memory_are_seen_from_outside_and_closing_ends_it", writes_are_seen),
    ("a_descriptor_made_by_the_device_tracks_as_well", device_tracks),
    ("a_number_that_is_not_the_devices_is_refused", wrong_device),
    ("a_copy_that_stays_in_the_process_is_closed_later_and_nothing_else_is", copy_stays),
    ("pages_are_given_back_in_the_process_few_and_many_at_once", given_back),
    ("advice_that_the_kernel_refuses_or_that_takes_too_long_is_told", advice_refused),
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

const LIMIT: Duration = Duration::from_secs(300);

fn regions(target: &Target) -> Vec<u64> {
    target.ready.split(' ').map(|word| u64::from_str_radix(word, 16).unwrap()).collect()
}

fn copy_stays() {
    let mut target = Target::start(&["memory"]);
    let before = target.descriptors();
    let shared = share_userfault(&target.hold(), UserfaultOrigin::PrivilegedSystemCall);
    let shared = match shared {
        Err(AttachError::Refused { source, .. }) => {
            return println!("skipped: userfaultfd for all faults is not available here: {source}");
        }
        shared => shared.unwrap(),
    };
    let added: Vec<_> = target.descriptors().into_iter().filter(|one| !before.contains(one)).collect();
    assert!(matches!(&added[..], [(_, name)] if name == "anon_inode:[userfaultfd]"), "{added:?}");
    let number = shared.descriptor.as_raw_fd();
    userfault::api(number).unwrap();
    userfault::register(number, regions(&target)[0], PAGES * PAGE).unwrap();
    let registered = |target: &Target| target.file("smaps").contains(" uw ");
    // The registration ends with the last descriptor, which is the copy.
    drop(shared.descriptor);
    assert!(registered(&target));
    shared.copy.close().unwrap();
    assert!(!registered(&target));
    assert_eq!(target.descriptors(), before);
    // The file that has its number by now is not touched.
    let other = target.ask("open-device");
    if other == added[0].0 {
        let error = shared.copy.close().unwrap_err();
        assert!(matches!(error, AttachError::WrongDescriptor { .. }), "{error}");
        assert!(target.descriptors().iter().any(|(number, _)| *number == other));
    }
    target.finish();
}

/// Returns the present pages of the anonymous region, by `/proc/PID/pagemap`.
fn present(target: &Target) -> Vec<u64> {
    use std::os::unix::fs::FileExt;
    let pagemap = File::open(format!("/proc/{}/pagemap", target.pid())).unwrap();
    let is_present = |page: &u64| {
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, (regions(target)[0] / PAGE + page) * 8).unwrap();
        u64::from_ne_bytes(entry) >> 63 != 0
    };
    (0..PAGES).filter(is_present).collect()
}

fn page_range(target: &Target, page: u64) -> std::ops::Range<u64> {
    let start = regions(target)[0] + page * PAGE;
    start..start + PAGE
}

fn given_back() {
    let mut target = Target::start(&["memory"]);
    let (descriptors, mappings) = (target.descriptors(), target.file("maps").lines().count());
    // One by one, and by a vector.
    for pages in [vec![3, 5], (0..PAGES).filter(|page| page % 3 != 0).collect::<Vec<_>>()] {
        for page in 0..PAGES {
            assert_eq!(target.ask(&format!("write 0 {page}")), "done");
        }
        let ranges: Vec<_> = pages.iter().map(|&page| page_range(&target, page)).collect();
        let advised = advise(&target.hold(), &ranges, libc::MADV_DONTNEED, LIMIT).unwrap();
        println!("  {} ranges: {advised:?}", ranges.len());
        let left: Vec<_> = (0..PAGES).filter(|page| !pages.contains(page)).collect();
        assert_eq!(present(&target), left);
        for page in pages {
            assert_eq!(target.ask(&format!("read 0 {page}")), "0");
        }
        assert_eq!(target.status("TracerPid"), "0");
        assert_eq!(target.descriptors(), descriptors);
        assert_eq!(target.file("maps").lines().count(), mappings);
    }
    assert_eq!(advise(&target.hold(), &[], libc::MADV_DONTNEED, LIMIT).unwrap().calls, 0);
    target.finish();
}

fn advice_refused() {
    let mut target = Target::start(&["memory"]);
    let process: Process = target.hold();
    for page in 0..20 {
        assert_eq!(target.ask(&format!("write 0 {page}")), "done");
    }
    let ranges: Vec<_> = (0..20).map(|page| page_range(&target, page)).collect();
    for few in [1, 20] {
        let error = advise(&process, &ranges[..few], libc::MADV_DONTNEED, Duration::ZERO).unwrap_err();
        println!("  {error}");
        assert!(matches!(error, AttachError::Slow { done: 0, of, .. } if of == few), "{error}");
    }
    assert_eq!(present(&target).len(), 20);
    // Nothing is mapped there. Earlier ranges are still given back.
    for before in [1, 20] {
        let some: Vec<_> = ranges[..before].iter().cloned().chain(std::iter::once(PAGE..2 * PAGE)).collect();
        let error = advise(&process, &some, libc::MADV_DONTNEED, LIMIT).unwrap_err();
        println!("  {error}");
        let AttachError::Refused { source, .. } = error else { panic!("{error}") };
        assert_eq!(source.raw_os_error(), Some(libc::ENOMEM));
        assert_eq!(present(&target).len(), 20 - before);
    }
    assert_eq!(target.status("TracerPid"), "0");
    target.finish();
}

/// Tracks both regions of the role from outside, write by write.
fn tracks(target: &mut Target, userfault: OwnedFd) {
    let regions = regions(target);
    let pagemap = File::open(format!("/proc/{}/pagemap", target.pid())).unwrap();
    let number = userfault.as_raw_fd();
    userfault::api(number).unwrap();
    for &region in &regions {
        userfault::register(number, region, PAGES * PAGE).unwrap();
    }
    // The protection begins with the first scan; until then all pages count as written.
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
