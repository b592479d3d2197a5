//! Discarding pages with the real kernel: refusals, huge pages, and pages that the kernel keeps.

use crate::missing_support::{HUGE, Kind, Memory, content, open, stamp};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::AsFd;
use sterna_memory::PAGE_SIZE;
use sterna_memory::discard::{DiscardError, Discardable};
use sterna_memory::missing::MissingPages;

#[test]
fn memory_that_differs_from_its_declaration_is_refused() {
    let Some(anonymous) = Memory::new(Kind::Anonymous, 16) else { return };
    let Some(memfd) = Memory::new(Kind::Memfd, 16) else { return };
    let other = File::from(memfd_create("other", MemfdFlags::CLOEXEC).unwrap());
    let disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = memfd.file.as_ref().unwrap().as_fd();
    // SAFETY: the test's memory; the call is refused and does nothing.
    let refused = unsafe {
        [
            Discardable::anonymous(memfd.addresses(), PAGE_SIZE),
            Discardable::anonymous(anonymous.addresses(), HUGE),
            Discardable::anonymous(anonymous.addresses().start + 1..anonymous.addresses().end, PAGE_SIZE),
            Discardable::anonymous(0..0, PAGE_SIZE),
            Discardable::anonymous(0x1000..0x3000, PAGE_SIZE),
            Discardable::file(anonymous.addresses(), file, 0),
            Discardable::file(memfd.addresses(), other.as_fd(), 0),
            Discardable::file(memfd.addresses(), file, PAGE_SIZE as u64),
            Discardable::file(memfd.addresses(), file, u64::MAX),
        ]
    };
    for (index, refused) in refused.into_iter().enumerate() {
        assert!(matches!(refused, Err(DiscardError::Different { .. })), "{index}: {refused:?}");
    }
    // SAFETY: as above.
    let error = unsafe { Discardable::file(memfd.addresses(), disk.as_fd(), 0) }.unwrap_err();
    assert!(matches!(error, DiscardError::FileSystem { .. }), "{error}");
    // A part of a mapping is accepted.
    let part = memfd.address(4)..memfd.address(8);
    // SAFETY: the test's memory.
    let part = unsafe { Discardable::file(part, file, 4 * PAGE_SIZE as u64) }.unwrap();
    (0..16).for_each(|page| memfd.fill(page, 0));
    part.discard(1..2).unwrap();
    assert_eq!((memfd.stamp(4), memfd.stamp(5), memfd.stamp(6)), (stamp(4, 0), 0, stamp(6, 0)));
}

#[test]
fn locked_memory_is_not_discarded_silently() {
    let Some(memory) = Memory::new(Kind::Anonymous, 16) else { return };
    (0..16).for_each(|page| memory.fill(page, 0));
    // SAFETY: our own mapping.
    if unsafe { libc::mlock(memory.word(0, 0).as_ptr().cast(), 16 * PAGE_SIZE) } != 0 {
        return println!("skipped: mlock: {}", std::io::Error::last_os_error());
    }
    let error = memory.backing().discard(3..4).unwrap_err().to_string();
    assert!(error.contains("unlock guest RAM before post-copy"), "{error}");
    assert_eq!(memory.stamp(3), stamp(3, 0));
}

/// Makes huge pages of a range now, as khugepaged does later (Linux 6.1).
fn collapse(memory: &Memory) -> std::io::Result<()> {
    memory.advise(0..memory.pages(), 25)
}

/// Returns whether a discarded page is still missing, without touching it.
fn is_missing(memory: &Memory, page: u64) -> bool {
    let mut resident = 1_u8;
    // SAFETY: within our mapping; the call writes one byte.
    let result = unsafe { libc::mincore(memory.word(page, 0).as_ptr().cast(), PAGE_SIZE, &raw mut resident) };
    assert_eq!(result, 0);
    resident & 1 == 0
}

#[test]
fn holes_in_huge_pages_stay_holes_because_huge_pages_are_forbidden_first() {
    for kind in [Kind::TransparentHuge, Kind::MemfdTransparentHuge] {
        let pages = 2 * (HUGE / PAGE_SIZE) as u64;
        let Some(memory) = Memory::new(kind, pages) else { continue };
        (0..pages).for_each(|page| memory.fill(page, 0));
        let backing = memory.backing();
        backing.discard(700..701).unwrap();
        assert!(is_missing(&memory, 700));
        // The danger, if this kernel has it.
        match collapse(&memory) {
            Ok(()) => assert!(!is_missing(&memory, 700), "{kind:?}: a huge page has no holes"),
            Err(error) => println!("{kind:?}: no huge page was made again: {error}"),
        }
        // The remedy.
        backing.forbid_huge_pages().unwrap();
        backing.discard(700..701).unwrap();
        assert!(collapse(&memory).is_err(), "{kind:?}");
        assert!(is_missing(&memory, 700));
        backing.allow_huge_pages().unwrap();
        assert!((0..pages).all(|page| memory.stamp(page) == if page == 700 { 0 } else { stamp(page, 0) }));

        // A set of missing pages does all of this.
        memory.fill(700, 0);
        let _ = collapse(&memory);
        let Some(userfault) = open(&memory) else { return };
        assert!(!memory.has_huge_pages_forbidden());
        let missing = MissingPages::new(memory.backing(), userfault).unwrap();
        assert!(memory.has_huge_pages_forbidden());
        missing.declare_stale(700..702).unwrap();
        assert!(collapse(&memory).is_err() && is_missing(&memory, 700) && is_missing(&memory, 701));
        assert_eq!(missing.place(700, &content(700..702, 1)).unwrap(), 2);
        missing.finish().unwrap();
        let version = |page| u64::from(page == 700 || page == 701);
        assert!((0..pages).all(|page| memory.stamp(page) == stamp(page, version(page))));
    }
}

#[test]
fn a_page_that_the_kernel_keeps_of_a_pinned_huge_page_is_named() {
    let pages = 2 * (HUGE / PAGE_SIZE) as u64;
    let Some(memory) = Memory::new(Kind::MemfdTransparentHuge, pages) else { return };
    (0..pages).for_each(|page| memory.fill(page, 0));
    if let Err(error) = collapse(&memory) {
        return println!("skipped: no huge page of shared memory is available: {error}");
    }
    // Pages in a pipe are pinned.
    let (_out, into) = rustix::pipe::pipe().unwrap();
    let pinned = libc::iovec { iov_base: memory.word(600, 0).as_ptr().cast(), iov_len: PAGE_SIZE };
    // SAFETY: one page of our own mapping, which lives longer than the pipe is read.
    let spliced = unsafe { libc::vmsplice(std::os::fd::AsRawFd::as_raw_fd(&into), &raw const pinned, 1, 0) };
    assert_eq!(spliced, PAGE_SIZE as isize);
    let backing = memory.backing();
    backing.forbid_huge_pages().unwrap();
    match backing.discard(700..710) {
        Err(error) => {
            assert!(matches!(error, DiscardError::StillThere { page: 700 }), "{error}");
            assert!(!is_missing(&memory, 700));
            // Once it is not pinned any more, the page is discarded.
            drop((_out, into));
            backing.discard(700..710).unwrap();
        }
        Ok(()) => println!("skipped: this kernel splits pinned huge pages"),
    }
    assert!((700..710).all(|page| is_missing(&memory, page)));
    assert_eq!((memory.stamp(699), memory.stamp(710)), (stamp(699, 0), stamp(710, 0)));
}
