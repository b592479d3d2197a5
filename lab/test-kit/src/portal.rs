//! A work queue whose device is a function of the test.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use sterna_idxd::{Descriptor, Portal, Submission, SubmitMethod};

/// A portal that hands each descriptor to a function, which answers it at once ([`complete`]), later, or never.
pub struct FakePortal<D> {
    method: SubmitMethod,
    device: D,
}

impl<D: Fn(&Descriptor) -> Submission + Send + Sync + 'static> FakePortal<D> {
    /// Returns a portal that descriptors reach by `method`. What `device` owns is dropped when the queue is closed.
    pub fn new(method: SubmitMethod, device: D) -> Arc<Self> {
        Arc::new(Self { method, device })
    }
}

impl<D> fmt::Debug for FakePortal<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FakePortal").field("method", &self.method).finish_non_exhaustive()
    }
}

impl<D: Fn(&Descriptor) -> Submission + Send + Sync> Portal for FakePortal<D> {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        (self.device)(descriptor)
    }

    fn submit_method(&self) -> SubmitMethod {
        self.method
    }
}

/// Writes a completion record as a device does, the status last: bytes 0 and 1 are status and result, `value` is at byte 16, where the
/// operations that return one have their CRC.
///
/// # Safety
/// `record` is the address of a completion record, mapped and aligned, that its submitter reads through atomics until it has a status.
pub unsafe fn complete(record: u64, status: u8, result: u8, value: u64) {
    let words = std::ptr::with_exposed_provenance::<AtomicU64>(record as usize);
    // SAFETY: the caller's promise; 24 bytes lie in a record of 32 or 64.
    unsafe {
        (*words.add(2)).store(value, Ordering::Relaxed);
        (*words).store(u64::from(status) | u64::from(result) << 8, Ordering::Release);
    }
}

/// A device in the test's hands: the no-op that proves a queue is answered at once, everything else when the test calls for it.
#[derive(Debug, Default)]
pub struct OnDemandDevice(Mutex<Vec<Descriptor>>);

impl OnDemandDevice {
    /// Returns the descriptors that were submitted and are no no-ops, in their order.
    ///
    /// # Panics
    /// A thread panicked while it submitted.
    #[must_use]
    pub fn submitted(&self) -> Vec<Descriptor> {
        self.0.lock().expect("no thread panics with it").clone()
    }

    /// Completes the descriptor that was submitted as number `index`, with success and `value`.
    ///
    /// # Panics
    /// There is none of this number, or it has no completion record.
    pub fn answer(&self, index: usize, value: u64) {
        let record = self.submitted()[index].record().expect("its submitter waits for a record");
        // SAFETY: the record belongs to a descriptor that was submitted and not answered yet.
        unsafe { complete(record, 1, 0, value) };
    }
}

impl Portal for OnDemandDevice {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        match (descriptor.operation_code(), descriptor.record()) {
            // SAFETY: a submitted descriptor's record, by the contract of submission.
            (0, Some(record)) => unsafe { complete(record, 1, 0, 0) },
            _ => self.0.lock().expect("no thread panics with it").push(*descriptor),
        }
        Submission::Accepted
    }

    fn submit_method(&self) -> SubmitMethod {
        SubmitMethod::Enqcmd
    }
}
