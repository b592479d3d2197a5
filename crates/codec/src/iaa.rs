//! The format `deflate` by IAA devices, through `sterna-offload`, whose CPU engine does what no device does.

mod account;
mod encoder;
mod join;
mod verify;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

use sterna_offload::{Guest, Offload, Operation, Region};

use crate::{CodecError, Encoder, EncoderSource};
use account::Account;
use encoder::IaaEncoder;
use verify::Verifier;

const PAGE: usize = 4096;

/// The IAA devices of an [`Offload`], for one guest.
#[derive(Clone, Debug)]
pub struct Iaa {
    offload: Arc<Offload>,
    guest: Arc<Guest>,
    verifies: bool,
    account: Arc<Account>,
}

impl Iaa {
    /// Returns the IAA devices of `offload` for one of its guests; none if `offload` has no device that deflates.
    pub fn new(offload: &Arc<Offload>, guest: &Arc<Guest>) -> Option<Self> {
        offload.accelerates(Operation::Deflate).then(|| Self {
            offload: Arc::clone(offload),
            guest: Arc::clone(guest),
            verifies: false,
            account: Arc::default(),
        })
    }

    /// Sets whether each stream that a device writes is verified: decompressed, by a device if one can, and compared
    /// with the input. A device whose stream is wrong is taken out of service, and the CPU does that batch. Off by
    /// default.
    #[must_use]
    pub fn verifying(self, verifies: bool) -> Self {
        Self { verifies, ..self }
    }
}

impl EncoderSource for Iaa {
    fn encoder(&self, _level: i32) -> Result<Box<dyn Encoder>, CodecError> {
        let channel = self.offload.channel_for(&self.guest);
        let verifier = if self.verifies { Some(Verifier::new(&self.offload)?) } else { None };
        Ok(Box::new(IaaEncoder::new(Arc::clone(&self.offload), channel, verifier, Arc::clone(&self.account))))
    }

    fn is_hardware(&self) -> bool {
        true
    }

    fn account(&self) -> Option<String> {
        self.account.words()
    }
}

/// Allocates memory for one batch that a device may read. The memory lives as long as a request in flight names it, even
/// after its owner was dropped.
fn batch_memory(offload: &Offload) -> Arc<Region> {
    let memory = Memory::new(offload.batch_pages() * PAGE);
    let (start, bytes) = (memory.start, memory.layout.size());
    // SAFETY: mapped as long as its owner lives, which the region keeps; no reference to it exists.
    let region = unsafe { Region::new(start, bytes, Some(Arc::new(memory))) };
    // Only the encoder writes it, and not while a batch whose result is wanted is in progress.
    region.set_racing(false);
    region
}

/// Memory that is freed when its last user drops it.
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: only the address moves between threads; each use of the address has its own SAFETY reason.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, PAGE).expect("a batch is far smaller than the address space");
        assert!(bytes > 0, "a batch has pages");
        // SAFETY: of a size that is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        Self { start: start.unwrap_or_else(|| handle_alloc_error(layout)), layout }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
