//! KVM's dirty bitmap: one bit per page of a memory slot, set by KVM when a vCPU writes.
//!
//! With `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` (Linux 5.2) reading the log does not change it, and `KVM_CLEAR_DIRTY_LOG`
//! clears and protects pages in pieces, so that vCPUs never wait for the whole guest at once. Without it,
//! `KVM_GET_DIRTY_LOG` reads, clears and protects in one step. See `Documentation/virt/kvm/api.rst` on all three.
//!
//! **Not seen**: writes of the monitor itself, of vhost or of a device. **Named without being written**: a page that a
//! vCPU reads while it is not mapped in KVM, because KVM maps it writable at once and records it (`make_spte` on x86).

use super::kvm::{self, KvmSlot, Vm};
use super::{DirtyLog, DirtyLogError, check_collect};
use crate::bitmap::{PageBitmap, words_for};
use std::os::fd::BorrowedFd;

/// The dirty log of a VM's vCPUs by bitmaps. See the [module](self).
#[derive(Debug)]
pub struct KvmLog {
    vm: Vm,
    clearing: Clearing,
    started: Option<Clearing>,
    /// Buffer for the log of the largest slot.
    words: Vec<u64>,
}

/// The step that clears the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clearing {
    /// `KVM_GET_DIRTY_LOG`.
    ByReading,
    /// `KVM_CLEAR_DIRTY_LOG`, piece by piece.
    ByUs,
}

impl KvmLog {
    /// Makes a log of the slots of `vm` that hold RAM blocks of `blocks` pages each. Blocks may have several slots, and
    /// parts without a slot. The VM's descriptor is duplicated.
    ///
    /// `start` enables manual protection for the whole VM where KVM supports it: slots that the monitor logs for its
    /// own purposes then need `KVM_CLEAR_DIRTY_LOG` too.
    ///
    /// # Safety
    /// While this log exists, each slot must be one that the VM has, with exactly these values: the log sets the slot's
    /// flags again, and would thereby create or move a slot with other values, and give its memory to the guest.
    pub unsafe fn new(vm: BorrowedFd<'_>, blocks: &[u64], slots: Vec<KvmSlot>) -> Result<Self, DirtyLogError> {
        let fd = vm.try_clone_to_owned().map_err(DirtyLogError::system("duplicate the VM's file descriptor"))?;
        // SAFETY: the caller's promise is the one needed.
        let vm = unsafe { Vm::new(fd, blocks, slots)? };
        let largest = vm.slots.iter().map(KvmSlot::pages).max().unwrap_or(0);
        Ok(Self { vm, clearing: Clearing::ByUs, started: None, words: vec![0; words_for(largest)] })
    }

    /// Makes reading clear and protect pages, the whole slot at once. For monitors that log slots for their own
    /// purposes and do not clear them: manual protection is then switched *off* for the whole VM at `start`.
    #[must_use]
    pub fn cleared_by_reading(mut self) -> Self {
        self.clearing = Clearing::ByReading;
        self
    }

    /// Reads the log of a slot into the beginning of `words`, and returns that part.
    fn read<'a>(vm: &Vm, slot: &KvmSlot, words: &'a mut [u64]) -> Result<&'a [u64], DirtyLogError> {
        let words = &mut words[..words_for(slot.pages())];
        let bitmap = words.as_mut_ptr().expose_provenance() as u64;
        let mut argument = kvm::GetDirtyLog { slot: slot.slot, padding: 0, dirty_bitmap: bitmap };
        // SAFETY: the operation reads one `kvm_dirty_log` and writes a bit per page of the slot, rounded up to 64 bits,
        // to the bitmap: `words` has as many.
        unsafe { vm.call(kvm::KVM_GET_DIRTY_LOG, (&raw mut argument).expose_provenance()) }
            .map_err(DirtyLogError::system(format!("read the dirty log of KVM memory slot {}", slot.slot)))?;
        Ok(words)
    }

    /// Clears and protects the pages set in `words`, which begins with page `first` of the slot, a multiple of 64.
    fn clear(vm: &Vm, slot: &KvmSlot, first: u64, words: &[u64]) -> Result<(), DirtyLogError> {
        let pages = (words.len() as u64 * 64).min(slot.pages() - first);
        let mut argument = kvm::ClearDirtyLog {
            slot: slot.slot,
            num_pages: pages as u32,
            first_page: first,
            dirty_bitmap: words.as_ptr().expose_provenance() as u64,
        };
        // SAFETY: the operation reads one `kvm_clear_dirty_log` and, from the bitmap, a bit per page, rounded up to 64
        // bits: `words` has as many.
        unsafe { vm.call(kvm::KVM_CLEAR_DIRTY_LOG, (&raw mut argument).expose_provenance()) }
            .map(|_| ())
            .map_err(DirtyLogError::system(format!("clear the dirty log of KVM memory slot {}", slot.slot)))
    }

    /// Clears all pages of all slots, whatever the log contains.
    fn clear_all(vm: &Vm) -> Result<(), DirtyLogError> {
        let ones = vec![u64::MAX; PIECE];
        for slot in &vm.slots {
            for first in (0..slot.pages()).step_by(PIECE * 64) {
                let words = words_for((slot.pages() - first).min(PIECE as u64 * 64));
                Self::clear(vm, slot, first, &ones[..words])?;
            }
        }
        Ok(())
    }
}

impl DirtyLog for KvmLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        if self.started.is_some() {
            return Err(DirtyLogError::AlreadyStarted);
        }
        let wanted = match self.clearing {
            Clearing::ByUs => kvm::KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | kvm::KVM_DIRTY_LOG_INITIALLY_SET,
            Clearing::ByReading => 0,
        };
        let offered = self.vm.capability(kvm::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)?;
        let used = offered & wanted;
        if offered != 0 {
            self.vm
                .enable(kvm::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, used)
                .map_err(DirtyLogError::system("choose who clears the KVM dirty log"))?;
        }
        self.vm.start_logging()?;
        // With INITIALLY_SET nothing is protected when logging is switched on: all pages count as dirty, and are
        // protected when they are cleared. So they are all cleared here, in pieces; without it KVM would protect the
        // whole slot at once. From here on a write sets a bit, and earlier writes are sent in the first round.
        if used & kvm::KVM_DIRTY_LOG_INITIALLY_SET != 0
            && let Err(error) = Self::clear_all(&self.vm)
        {
            // The first error is the one to report.
            let _ = self.vm.stop_logging();
            return Err(error);
        }
        self.started = Some(if used == 0 { Clearing::ByReading } else { Clearing::ByUs });
        Ok(())
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        check_collect(self.started.is_some(), &self.vm.blocks, block, dirty)?;
        for slot in self.vm.slots.iter().filter(|slot| slot.block == block) {
            let words = Self::read(&self.vm, slot, &mut self.words)?;
            for (index, piece) in words.chunks(PIECE).enumerate() {
                let Some(from) = piece.iter().position(|word| *word != 0) else { continue };
                let to = piece.iter().rposition(|word| *word != 0).map_or(from, |last| last + 1);
                let first = (index * PIECE + from) as u64 * 64;
                let piece = &piece[from..to];
                add_words(dirty, slot.first_page + first, piece);
                if self.started == Some(Clearing::ByUs) {
                    Self::clear(&self.vm, slot, first, piece)?;
                }
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        match self.started.take() {
            Some(_) => self.vm.stop_logging(),
            None => Ok(()),
        }
    }
}

impl Drop for KvmLog {
    fn drop(&mut self) {
        // Drop cannot return an error.
        let _ = self.stop();
    }
}

/// Adds words whose first bit is page `first` of the bitmap, which need not be a multiple of 64.
fn add_words(dirty: &mut PageBitmap, first: u64, words: &[u64]) {
    for (index, word) in words.iter().enumerate() {
        let base = first + index as u64 * 64;
        let (mut bits, mut at) = (*word, 0);
        while bits != 0 {
            let start = at + u64::from(bits.trailing_zeros());
            bits >>= bits.trailing_zeros();
            let length = u64::from(bits.trailing_ones());
            dirty.set(base + start..base + start + length);
            at = start + length;
            bits = bits.checked_shr(length as u32).unwrap_or(0);
        }
    }
}

/// Words cleared by one call: 1 GiB of guest memory. KVM takes its MMU lock and flushes TLBs once per call; zero words
/// cost next to nothing.
const PIECE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_are_added_at_any_page(first in 0u64..200, words in proptest::collection::vec(
            prop_oneof![any::<u64>(), Just(u64::MAX), Just(0), Just(1 << 63)], 0..5)) {
            let mut dirty = PageBitmap::new(600);
            add_words(&mut dirty, first, &words);
            for page in 0u64..600 {
                let bit = page.checked_sub(first);
                let expected = bit.is_some_and(|bit| words.get((bit / 64) as usize).is_some_and(|w| w >> (bit % 64) & 1 == 1));
                prop_assert_eq!(dirty.contains(page), expected, "page {}", page);
            }
        }
    }
}
