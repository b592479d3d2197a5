//! Guest RAM: named blocks, mapped in this process (as in a monitor that embeds the library) or located in another
//! process.
//!
//! The monitor describes each block. The kind of backing determines how unpopulated memory is found, how pages are
//! freed, and what a page fault costs. The page size of a block is that of its backing (4 KiB, 2 MiB, 1 GiB), while
//! dirty logs, bitmaps and packets count pages of 4 KiB everywhere.
//!
//! `block` has one block; this file has all blocks of a guest, and the process that runs it.

mod block;
mod error;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use self::block::{Backing, RamBlock};
pub use self::error::RamError;
use crate::discard::{DiscardError, Discardable};
use crate::guest_process::{GuestProcess, HugePageAdvice};
use crate::holes::{HoleError, PageMap};
use crate::mappings::Mappings;
use crate::own_files::OwnFiles;
pub use crate::process_memory::ProcessReadError;
use crate::userfault::{Faults, Userfault, UserfaultError};

/// All RAM blocks of a guest. A block's number is its index in the list.
#[derive(Clone, Debug)]
pub struct GuestRam {
    blocks: Arc<[RamBlock]>,
    /// The process that runs the guest, where that is another process.
    guest: Option<Arc<dyn GuestProcess>>,
    /// Whether the kernel makes no huge pages of shared memory by itself.
    shared_stays_small: bool,
    post_copy: Option<Arc<GivenUserfault>>,
}

/// A userfaultfd of this process, and what else post-copy would read from files.
#[derive(Debug)]
struct GivenUserfault {
    userfault: Arc<Userfault>,
    huge_pages: HugePageAdvice,
}

impl GuestRam {
    /// Makes guest RAM of `blocks`, which are mapped already. Compares each block's backing with the mappings of the
    /// process that it lies in (`/proc/PID/maps`).
    ///
    /// Opens what a migration needs of `/proc/self` later. A process that will not be able to open files makes its
    /// guest RAM before, and keeps it: a clone serves each migration.
    ///
    /// # Errors
    /// A block is not whole pages of its page size, two blocks have the same name, or a block's backing does not match
    /// its mapping.
    pub fn new(mut blocks: Vec<RamBlock>) -> Result<Self, RamError> {
        let mut names = std::collections::HashSet::new();
        for block in &blocks {
            block.check()?;
            if !names.insert(block.name()) {
                return Err(RamError::Name(block.name().to_owned()));
            }
        }
        let mut seen: Vec<(Option<i32>, Mappings)> = Vec::new();
        for block in &blocks {
            let pid = block.process().map(|process| process.pid());
            if !seen.iter().any(|(of, _)| *of == pid) {
                let mappings = match block.process() {
                    None => Mappings::own(),
                    // Valid only for the process that was identified before.
                    Some(process) => Mappings::of_process(process.pid())
                        .and_then(|mappings| process.check_alive().map(|()| mappings).map_err(io::Error::other)),
                };
                let not_seen = |source| RamError::NotSeen {
                    name: block.name().to_owned(),
                    what: "reading /proc/PID/maps",
                    source,
                };
                seen.push((pid, mappings.map_err(not_seen)?));
            }
            let (_, mappings) = seen.iter().find(|(of, _)| *of == pid).expect("just put there");
            block.check_backing(mappings)?;
        }
        let own_files = OwnFiles::open().ok().map(Arc::new);
        blocks.iter_mut().for_each(|block| block.own_files = own_files.clone());
        Ok(Self { blocks: blocks.into(), guest: None, shared_stays_small: shared_stays_small(), post_copy: None })
    }

    /// Returns the same RAM with a userfaultfd of this process, by which post-copy at the destination watches missing
    /// pages. Otherwise post-copy opens one when it begins. What post-copy reads from files is read now.
    ///
    /// The descriptor delivers all faults: it was opened by `/dev/userfaultfd` or by userfaultfd(2), without
    /// `UFFD_USER_MODE_ONLY`. Its handshake is made here, unless it was made before with the features that the blocks
    /// need. It serves any number of migrations, one after the other.
    ///
    /// # Errors
    /// [`UserfaultError::Given`] if the descriptor is no userfaultfd, its handshake was made with other features, or
    /// `/proc/self/smaps` cannot be read; [`UserfaultError::Features`] if the kernel is too old.
    pub fn with_userfault(self, userfault: impl Into<OwnedFd>) -> Result<Self, UserfaultError> {
        let of = |block: &RamBlock| Some(block.discardable().ok()??.userfault_features());
        let features = self.blocks.iter().filter_map(of).fold(0, |all, features| all | features);
        let userfault = Arc::new(Userfault::from_descriptor(userfault.into(), features)?);
        let huge_pages = HugePageAdvice::of(None);
        let huge_pages =
            huge_pages.map_err(|error| UserfaultError::Given(format!("the mappings of guest RAM: {error}")))?;
        Ok(Self { post_copy: Some(Arc::new(GivenUserfault { userfault, huge_pages })), ..self })
    }

    /// Returns whether post-copy has a userfaultfd already, and opens no file.
    pub fn has_userfault(&self) -> bool {
        self.post_copy.is_some()
    }

    /// Returns the page map of this process.
    ///
    /// # Errors
    /// `/proc/self/pagemap` cannot be opened.
    pub fn page_map(&self) -> Result<PageMap, HoleError> {
        let opened = self.blocks.iter().find_map(|block| block.own_files.as_ref()).filter(|files| files.are_own());
        match opened.map(|files| files.page_map()) {
            Some(Ok(file)) => Ok(PageMap::of_file(file)),
            Some(Err(_)) | None => PageMap::own(),
        }
    }

    /// Returns whether shared memory of ordinary pages stays so: the kernel makes no huge pages of it by itself.
    pub fn shared_stays_small(&self) -> bool {
        self.shared_stays_small
    }

    /// Returns the present advice about huge pages where the guest runs; with a userfaultfd that was given, the advice
    /// of that time.
    ///
    /// # Errors
    /// The mappings of that process cannot be read.
    pub fn huge_page_advice(&self) -> io::Result<HugePageAdvice> {
        match &self.post_copy {
            Some(given) if self.guest.is_none() => Ok(given.huge_pages.clone()),
            _ => HugePageAdvice::of(self.guest.as_ref().map(|guest| &**guest.process())),
        }
    }

    /// Returns the same RAM with the process that runs its guest: this makes post-copy possible.
    #[must_use]
    pub fn run_by(self, guest: Arc<dyn GuestProcess>) -> Self {
        Self { guest: Some(guest), ..self }
    }

    /// Returns the process that runs the guest, where that is another process.
    pub fn guest(&self) -> Option<&Arc<dyn GuestProcess>> {
        self.guest.as_ref()
    }

    /// Returns `block` of this RAM as memory whose missing pages can be watched in the guest's process, and whose pages
    /// can be freed; none where its backing is of another kind.
    ///
    /// # Errors
    /// The backing does not match the mapping.
    pub fn discardable(&self, block: &RamBlock) -> Result<Option<Discardable>, DiscardError> {
        match &self.guest {
            None => block.discardable(),
            Some(guest) => block.discardable_in(guest),
        }
    }

    /// Opens a userfaultfd for missing pages in the process that runs the guest, for all faults, with `features`; or
    /// returns the one that [was given](Self::with_userfault).
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open_userfault(&self, features: u64) -> Result<Arc<Userfault>, UserfaultError> {
        match (&self.guest, &self.post_copy) {
            (None, Some(given)) => Ok(Arc::clone(&given.userfault)),
            (None, None) => Userfault::open(Faults::All, features).map(Arc::new),
            (Some(guest), _) => {
                let descriptor = guest.open_userfault().map_err(UserfaultError::NotMade)?;
                Userfault::from_descriptor(descriptor, features).map(Arc::new)
            }
        }
    }

    /// Returns the blocks, by number.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// Returns the total bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(RamBlock::bytes).sum()
    }
}

/// Reads the system's setting for huge pages of shared memory.
fn shared_stays_small() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        .is_ok_and(|modes| modes.contains("[never]") || modes.contains("[deny]"))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::ptr::NonNull;

    use rustix::mm::{MapFlags, ProtFlags};

    use super::*;
    use crate::PAGE_SIZE;
    use crate::test_util::Area;

    fn block(area: &Area, bytes: usize) -> RamBlock {
        // SAFETY: the area outlives the block in every test, and is accessed through raw pointers only.
        unsafe { RamBlock::new("ram", NonNull::new(area.ptr()).unwrap(), bytes, Backing::Anonymous) }
    }

    #[test]
    fn blocks_that_are_not_whole_pages_or_share_a_name_are_refused() {
        let area = Area::small_pages(4 * PAGE_SIZE);
        let good = block(&area, 4 * PAGE_SIZE);
        assert!(matches!(block(&area, 100).check(), Err(RamError::Shape { .. })));
        assert!(matches!(good.clone().with_page_size(2 << 20).check(), Err(RamError::Shape { .. })));
        assert!(matches!(GuestRam::new(vec![good.clone(), good.clone()]), Err(RamError::Name(_))));
        assert_eq!(GuestRam::new(vec![good]).unwrap().bytes(), 4 * PAGE_SIZE as u64);
    }

    /// Maps a file in memory with pages of 1, from its second page, with `flags`.
    fn mapping_of_file(pages: usize, flags: MapFlags) -> (Arc<File>, NonNull<u8>) {
        let file = File::from(rustix::fs::memfd_create("snapshot", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(&vec![1; (pages + 1) * PAGE_SIZE], 0).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses. It is never unmapped.
        let at = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), pages * PAGE_SIZE, access, flags, &file, PAGE_SIZE as u64).unwrap()
        };
        (Arc::new(file), NonNull::new(at.cast()).unwrap())
    }

    fn given_as(at: NonNull<u8>, pages: usize, backing: Backing) -> Result<GuestRam, RamError> {
        // SAFETY: the mappings of these tests stay, and are accessed through raw pointers only.
        GuestRam::new(vec![unsafe { RamBlock::new("ram", at, pages * PAGE_SIZE, backing) }])
    }

    #[test]
    fn a_private_file_mapping_is_not_accepted_as_shared_or_anonymous() {
        let (file, at) = mapping_of_file(4, MapFlags::PRIVATE);
        for backing in [Backing::Shared(Arc::clone(&file), PAGE_SIZE as u64), Backing::Anonymous] {
            let error = given_as(at, 4, backing).unwrap_err().to_string();
            assert!(error.contains("mapped is") && error.contains("as Backing::Other"), "{error}");
        }
        // With the right backing, no page is left out.
        let ram = given_as(at, 4, Backing::Other).unwrap();
        ram.blocks()[0].write(2, &[7; PAGE_SIZE]);
        let mut found = Vec::new();
        ram.blocks()[0].populated(&mut PageMap::own().unwrap(), |run| found.extend(run)).unwrap();
        assert_eq!(found, [0, 1, 2, 3]);
        let mut in_file = [0];
        file.read_exact_at(&mut in_file, 3 * PAGE_SIZE as u64).unwrap();
        assert_eq!(in_file, [1]);
    }

    #[test]
    fn a_shared_mapping_is_accepted_only_with_its_own_file_and_offset() {
        let (file, at) = mapping_of_file(4, MapFlags::SHARED);
        let (other, _) = mapping_of_file(4, MapFlags::SHARED);
        let offset = PAGE_SIZE as u64;
        given_as(at, 4, Backing::Shared(Arc::clone(&file), offset)).unwrap();
        // A part of the mapping begins further into the file.
        let part = NonNull::new(at.as_ptr().wrapping_add(PAGE_SIZE)).unwrap();
        given_as(part, 3, Backing::Shared(Arc::clone(&file), 2 * offset)).unwrap();
        let wrong = [Backing::Shared(Arc::clone(&file), 0), Backing::Shared(other, offset), Backing::Anonymous];
        for backing in wrong {
            assert!(matches!(given_as(at, 4, backing), Err(RamError::Backing { .. })));
        }
    }

    #[test]
    fn memory_that_is_not_mapped_to_its_end_is_refused_with_every_backing() {
        let area = Area::small_pages(4 * PAGE_SIZE);
        let end = NonNull::new(area.ptr().wrapping_add(3 * PAGE_SIZE)).unwrap();
        // SAFETY: the last page of the area, which nothing uses any more; a mapping of nothing takes its place, so that no
        // other test's memory comes there.
        unsafe {
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            rustix::mm::mmap_anonymous(end.as_ptr().cast(), PAGE_SIZE, ProtFlags::empty(), flags).unwrap();
        }
        let error = given_as(NonNull::new(area.ptr()).unwrap(), 4, Backing::Anonymous).unwrap_err().to_string();
        assert!(error.contains("private anonymous memory, but mapped is"), "{error}");
        let nowhere = NonNull::new(std::ptr::without_provenance_mut(PAGE_SIZE)).unwrap();
        let error = given_as(nowhere, 1, Backing::Other).unwrap_err().to_string();
        assert!(error.contains("nothing is mapped at 0x1000"), "{error}");
    }
}
