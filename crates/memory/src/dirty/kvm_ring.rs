//! KVM's dirty rings (Linux 5.11): each vCPU writes the pages it dirties into a ring that is shared with us. The cost
//! depends on the number of dirty pages, not on the size of the guest, and a vCPU that fills its ring between rounds
//! waits.
//!
//! An entry goes from empty to dirty (by KVM), to harvested (by this log), and back to empty by
//! `KVM_RESET_DIRTY_RINGS`, which protects the page again. So **harvest, reset, then read**: only after the reset is a
//! further write recorded. Both steps and the delivery of pages happen under one lock here, since a vCPU thread whose
//! ring is full must do the first two by itself at any time.
//!
//! Steps for an embedder:
//! 1. Call [`enable`] on the VM, before any vCPU is made. From then on the VM has no dirty bitmaps.
//! 2. Make the vCPUs, and one [`KvmRingLog`] for all of them.
//! 3. In each vCPU thread, on `KVM_EXIT_DIRTY_RING_FULL` (31): [`RingHarvester::harvest`], then run again.
//!
//! A vCPU in guest mode may delay its last entries (Intel's page modification log, flushed at each exit): they come
//! with the next `collect`. A vCPU that has left `KVM_RUN` delays nothing, so the last `collect` has all.
//!
//! Source: `Documentation/virt/kvm/api.rst` on `KVM_CAP_DIRTY_LOG_RING`, `struct kvm_dirty_gfn` in
//! `include/uapi/linux/kvm.h`, `virt/kvm/dirty_ring.c`.

use super::kvm::{self, KvmSlot, Vm};
use super::{DirtyLog, DirtyLogError, check_collect};
use crate::bitmap::PageBitmap;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Gives each vCPU of `vm` that is made from now on a dirty ring of `bytes`: a power of two, at least 4096 and on
/// processors with a page modification log 16384; 16 bytes are one page. KVM limits the size, usually to 1 MiB.
///
/// Call it before the first vCPU is made.
pub fn enable(vm: BorrowedFd<'_>, bytes: u32) -> Result<(), DirtyLogError> {
    // Processors with ordered stores have both, others only the second.
    for capability in [kvm::KVM_CAP_DIRTY_LOG_RING_ACQ_REL, kvm::KVM_CAP_DIRTY_LOG_RING] {
        let most = kvm::capability_of(&vm, capability)?;
        if most != 0 {
            return kvm::enable_on(&vm, capability, u64::from(bytes)).map_err(DirtyLogError::system(format!(
                "enable KVM dirty rings of {bytes} bytes (a power of two up to {most}, before any vCPU is made)"
            )));
        }
    }
    Err(DirtyLogError::Missing {
        what: "KVM's dirty ring",
        instead: "it needs Linux 5.11 or newer; use KVM's dirty log",
    })
}

/// The dirty log of a VM's vCPUs by rings. See the [module](self).
#[derive(Debug)]
pub struct KvmRingLog {
    shared: Arc<Shared>,
}

/// The interface for a vCPU thread whose ring is full; cheap to clone.
#[derive(Clone, Debug)]
pub struct RingHarvester {
    shared: Arc<Shared>,
}

impl RingHarvester {
    /// Empties the rings of all vCPUs, and keeps their entries for the log. Returns how many entries there were.
    ///
    /// May be called at any time, also while the log is not started.
    pub fn harvest(&self) -> Result<u64, DirtyLogError> {
        self.shared.lock().harvest(&self.shared.vm)
    }
}

impl KvmRingLog {
    /// Makes a log of the slots of `vm` that hold RAM blocks of `blocks` pages each, and of all `vcpus`, made after
    /// [`enable`] with `ring_bytes`. The VM's descriptor is duplicated.
    ///
    /// # Safety
    /// * While this log exists, each slot must be one that the VM has, with exactly these values: the log sets the
    ///   slot's flags again, and would thereby create or move a slot with other values, and give its memory to the
    ///   guest.
    /// * `vcpus` must be vCPUs of this VM, and `ring_bytes` the size that was enabled: beyond its end a ring cannot be
    ///   accessed.
    /// * No other code harvests these rings.
    pub unsafe fn new(
        vm: BorrowedFd<'_>,
        vcpus: &[BorrowedFd<'_>],
        ring_bytes: u32,
        blocks: &[u64],
        slots: Vec<KvmSlot>,
    ) -> Result<Self, DirtyLogError> {
        let fd = vm.try_clone_to_owned().map_err(DirtyLogError::system("duplicate the VM's file descriptor"))?;
        // SAFETY: the caller's promise is the one needed.
        let vm = unsafe { Vm::new(fd, blocks, slots)? };
        // Without a ring the VM refuses the reset, and mapping a ring would give memory that cannot be accessed.
        reset(&vm).map_err(|_| DirtyLogError::Missing {
            what: "a dirty ring in this VM",
            instead: "enable it before the first vCPU is made",
        })?;
        let rings = vcpus.iter().map(|vcpu| Ring::map(*vcpu, ring_bytes)).collect::<Result<_, _>>()?;
        let pending = blocks.iter().map(|pages| PageBitmap::new(*pages)).collect();
        let state = Mutex::new(State { rings, pending, started: false, overflowed: None });
        Ok(Self { shared: Arc::new(Shared { vm, state }) })
    }

    /// Returns the interface for the vCPU threads.
    pub fn harvester(&self) -> RingHarvester {
        RingHarvester { shared: Arc::clone(&self.shared) }
    }
}

impl DirtyLog for KvmRingLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        let vm = &self.shared.vm;
        let mut state = self.shared.lock();
        if state.started {
            return Err(DirtyLogError::AlreadyStarted);
        }
        // A VM with manual protection and INITIALLY_SET would protect nothing when logging starts, because there is no
        // bitmap here in which all pages could be set.
        if vm.capability(kvm::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)? != 0 {
            vm.enable(kvm::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, 0)
                .map_err(DirtyLogError::system("disable manual protection of the KVM dirty log"))?;
        }
        state.harvest(vm)?;
        state.forget();
        vm.start_logging()?;
        state.started = true;
        Ok(())
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        let vm = &self.shared.vm;
        let mut state = self.shared.lock();
        check_collect(state.started, &vm.blocks, block, dirty)?;
        state.harvest(vm)?;
        let pending = &mut state.pending[block];
        dirty.merge_words(0, pending.words());
        pending.clear(0..pending.pages());
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        let mut state = self.shared.lock();
        if !state.started {
            return Ok(());
        }
        state.started = false;
        let stopped = self.shared.vm.stop_logging();
        // The remaining entries are of no use, and an overflow does no harm any more.
        let harvested = match state.harvest(&self.shared.vm) {
            Err(DirtyLogError::RingOverflow { .. }) => Ok(()),
            harvested => harvested.map(|_| ()),
        };
        state.forget();
        stopped.and(harvested)
    }
}

impl Drop for KvmRingLog {
    fn drop(&mut self) {
        // Drop cannot return an error.
        let _ = self.stop();
    }
}

#[derive(Debug)]
struct Shared {
    vm: Vm,
    state: Mutex<State>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic leaves rings and pending pages valid.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct State {
    rings: Vec<Ring>,
    /// Harvested, protected again and not yet collected, by block.
    pending: Vec<PageBitmap>,
    started: bool,
    /// The vCPU whose ring was found full. KVM keeps reserve entries to prevent that, but a KVM that emulates many
    /// instructions in a row (kvm_pvm does) can use up the reserve before it checks.
    overflowed: Option<usize>,
}

impl State {
    /// Moves the entries of the rings into `pending` and protects those pages again.
    fn harvest(&mut self, vm: &Vm) -> Result<u64, DirtyLogError> {
        let mut harvested = 0;
        for (vcpu, ring) in self.rings.iter_mut().enumerate() {
            if ring.is_full() {
                self.overflowed.get_or_insert(vcpu);
            }
            if let Some(vcpu) = self.overflowed {
                return Err(DirtyLogError::RingOverflow { vcpu });
            }
            let mut taken = 0;
            while let Some((slot, offset)) = ring.take() {
                taken += 1;
                // The ring is full: KVM overwrites entries that it has not got back.
                if taken >= ring.count as u64 {
                    self.overflowed = Some(vcpu);
                    return Err(DirtyLogError::RingOverflow { vcpu });
                }
                harvested += 1;
                // Other slots are logged for another purpose, whose owner gave up bitmaps when rings were enabled.
                let Some(slot) = vm.slots.iter().find(|known| known.slot == slot) else { continue };
                if offset >= slot.pages() {
                    return Err(slot.error(format!("its dirty ring names page {offset} of {}", slot.pages())));
                }
                let page = slot.first_page + offset;
                self.pending[slot.block].set(page..page + 1);
            }
        }
        // A signal can end a reset early, with success (kvm_dirty_ring_reset, Linux 6.16): check the rings.
        while self.rings.iter().any(Ring::awaits_reset) {
            reset(vm).map_err(DirtyLogError::system("reset the KVM dirty rings"))?;
        }
        Ok(harvested)
    }

    fn forget(&mut self) {
        for pending in &mut self.pending {
            pending.clear(0..pending.pages());
        }
    }
}

fn reset(vm: &Vm) -> std::io::Result<()> {
    loop {
        // SAFETY: the operation takes no argument. It changes entries that were marked as harvested, and protection.
        match unsafe { vm.call(kvm::KVM_RESET_DIRTY_RINGS, 0) } {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            result => return result.map(|_| ()),
        }
    }
}

/// The mapped ring of one vCPU.
#[derive(Debug)]
struct Ring {
    entries: *mut Entry,
    count: usize,
    /// Index of the entry that becomes dirty next. Unknown at first, as an earlier log may have used the ring.
    next: Option<usize>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and `Ring` owns it.
unsafe impl Send for Ring {}

impl Ring {
    fn map(vcpu: BorrowedFd<'_>, bytes: u32) -> Result<Self, DirtyLogError> {
        let count = bytes as usize / size_of::<Entry>();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let entries =
            unsafe { mmap(std::ptr::null_mut(), bytes as usize, protection, flags, vcpu, KVM_DIRTY_LOG_PAGE_OFFSET) };
        let entries = entries.map_err(|errno| {
            let what = format!("map the dirty ring of the vCPU with file descriptor {}", vcpu.as_raw_fd());
            DirtyLogError::System { what, source: errno.into() }
        })?;
        Ok(Self { entries: entries.cast(), count, next: None })
    }

    /// # Panics
    /// Never: the index is taken modulo the number of entries.
    fn entry(&self, index: usize) -> &Entry {
        // SAFETY: within the mapping, which lives as long as `self`. All fields are atomics: KVM writes beside us.
        unsafe { &*self.entries.add(index % self.count) }
    }

    /// Harvests the next dirty entry: its slot, and the page within the slot.
    fn take(&mut self) -> Option<(u32, u64)> {
        let next = self.next.or_else(|| self.find_first())?;
        self.next = Some(next);
        let entry = self.entry(next);
        // Acquire: KVM wrote the other fields before it set this.
        if entry.flags.load(Ordering::Acquire) & (DIRTY | RESET) != DIRTY {
            return None;
        }
        let page = (entry.slot.load(Ordering::Relaxed), entry.offset.load(Ordering::Relaxed));
        // Release: KVM may use the entry again only after we have read it.
        entry.flags.store(RESET, Ordering::Release);
        self.next = Some((next + 1) % self.count);
        Some(page)
    }

    /// Finds the first of the dirty entries. They are one run that grows only at its end, so a dirty entry whose
    /// predecessor is still clean after it was read is the first. A full ring has been detected before, see
    /// `State::overflowed`.
    fn find_first(&self) -> Option<usize> {
        let is_dirty = |index: usize| self.entry(index).flags.load(Ordering::Acquire) & DIRTY != 0;
        (0..self.count).find(|index| is_dirty(*index) && !is_dirty(index + self.count - 1))
    }

    /// Whether there is no empty entry. Asked when none waits for its reset.
    fn is_full(&self) -> bool {
        let is_dirty = |index: usize| self.entry(index).flags.load(Ordering::Acquire) & DIRTY != 0;
        match self.next {
            // Dirty entries are one run from `next` on.
            Some(next) => is_dirty(next + self.count - 1),
            None => (0..self.count).all(is_dirty),
        }
    }

    /// Whether the entry harvested last is not yet reset. Entries are reset in order.
    fn awaits_reset(&self) -> bool {
        self.next.is_some_and(|next| self.entry(next + self.count - 1).flags.load(Ordering::Acquire) & RESET != 0)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mapped with this length in `map`; no reference outlives `self`. Unmapping what is mapped cannot fail.
        let _ = unsafe { munmap(self.entries.cast(), self.count * size_of::<Entry>()) };
    }
}

/// `struct kvm_dirty_gfn`.
#[derive(Debug)]
#[repr(C)]
struct Entry {
    flags: AtomicU32,
    /// Address space in the upper 16 bits.
    slot: AtomicU32,
    offset: AtomicU64,
}
const _: () = assert!(size_of::<Entry>() == 16);

/// `KVM_DIRTY_GFN_F_DIRTY`.
const DIRTY: u32 = 1 << 0;
/// `KVM_DIRTY_GFN_F_RESET`.
const RESET: u32 = 1 << 1;

/// Where a vCPU's ring is mapped, in bytes: page 64 on x86 (`arch/x86/include/uapi/asm/kvm.h`) and on arm64.
const KVM_DIRTY_LOG_PAGE_OFFSET: u64 = 64 * crate::PAGE_SIZE as u64;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::fd::AsFd;

    const COUNT: usize = 256;

    /// A file in place of the vCPU, and KVM's side of its ring.
    struct Model {
        ring: Ring,
        dirty: usize,
        reset: usize,
    }

    impl Model {
        fn new(used_before: usize) -> Self {
            let file = std::fs::File::from(rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            file.set_len(KVM_DIRTY_LOG_PAGE_OFFSET + 4096).unwrap();
            Self { ring: Ring::map(file.as_fd(), 4096).unwrap(), dirty: used_before, reset: used_before }
        }

        fn push(&mut self) {
            let entry = self.ring.entry(self.dirty);
            entry.slot.store(3, Ordering::Relaxed);
            entry.offset.store(self.dirty as u64, Ordering::Relaxed);
            entry.flags.store(DIRTY, Ordering::Release);
            self.dirty += 1;
        }

        /// As `KVM_RESET_DIRTY_RINGS`, at most so many entries, as when a signal comes.
        fn reset(&mut self, most: usize) {
            for _ in 0..most {
                let entry = self.ring.entry(self.reset);
                if entry.flags.load(Ordering::Acquire) & RESET == 0 {
                    return;
                }
                entry.flags.store(0, Ordering::Release);
                self.reset += 1;
            }
        }
    }

    proptest! {
        #[test]
        fn entries_come_once_and_in_order_wherever_the_ring_stands(
            used_before in 0usize..1000,
            steps in proptest::collection::vec((0usize..COUNT, 1usize..COUNT), 1..40),
        ) {
            let mut model = Model::new(used_before);
            let mut next = used_before as u64;
            for (pushes, reset) in steps {
                (0..pushes).for_each(|_| model.push());
                prop_assert!(!model.ring.is_full());
                while let Some((slot, offset)) = model.ring.take() {
                    prop_assert_eq!((slot, offset), (3, next));
                    next += 1;
                }
                prop_assert_eq!(next as usize, model.dirty);
                while model.ring.awaits_reset() {
                    model.reset(reset);
                }
                prop_assert_eq!(model.reset, model.dirty);
            }
        }
    }

    #[test]
    fn a_full_ring_is_noticed_before_and_after_its_position_is_known() {
        let mut model = Model::new(77);
        (0..COUNT).for_each(|_| model.push());
        assert!(model.ring.is_full());

        let mut model = Model::new(77);
        model.push();
        model.ring.take().unwrap();
        model.reset(1);
        (0..COUNT - 1).for_each(|_| model.push());
        assert!(!model.ring.is_full());
        model.push();
        assert!(model.ring.is_full());
    }
}
