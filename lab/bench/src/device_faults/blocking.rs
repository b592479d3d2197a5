//! Queues of a model whose descriptors wait for page requests.
//!
//! The product never lets a descriptor block on a fault, because on a shared queue all submitters would wait. So this
//! portal sets that one bit in the product's descriptors and changes nothing else.

use std::sync::Arc;

use sterna_idxd::flags::flag::BLOCK_ON_FAULT;
use sterna_idxd::{Descriptor, Operation, Portal, Submission, SubmitMethod, WorkQueue};
use sterna_idxd_model::{Kind, Model, ModelQueue};

/// Opens all queues of `model`; their descriptors block on fault if `block` is true.
pub(super) fn queues(model: &Arc<Model>, block: bool) -> Result<Vec<Arc<WorkQueue>>, String> {
    let opened = sterna_offload::model::queues(model)?;
    if !block {
        return Ok(opened);
    }
    let blocking = opened.into_iter().map(|opened| {
        let queue = model.queue(&opened.info().name).ok_or("the model has lost a queue")?;
        let portal = Arc::new(Blocking { queue });
        WorkQueue::with_portal(opened.info().clone(), portal).map_err(|error| error.to_string())
    });
    blocking.collect()
}

#[derive(Debug)]
struct Blocking {
    queue: ModelQueue,
}

impl Portal for Blocking {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        let descriptor = match self.queue.device().kind {
            Kind::Iaa => on_iaa(descriptor),
            Kind::Dsa if descriptor.operation() == Some(Operation::Batch) => {
                let list: *mut Descriptor = std::ptr::with_exposed_provenance_mut(descriptor.source() as usize);
                for member in 0..descriptor.bytes() as usize {
                    // SAFETY: a batch's list is this many aligned descriptors in the submitter's own memory, which by
                    // the contract of this function lives until the batch is complete. No device reads it before
                    // `enqcmd`.
                    unsafe { list.add(member).write(list.add(member).read().blocking_on_fault()) };
                }
                *descriptor
            }
            Kind::Dsa => descriptor.blocking_on_fault(),
        };
        if self.queue.enqcmd(descriptor.as_bytes()) { Submission::Accepted } else { Submission::Retry }
    }

    fn submit_method(&self) -> SubmitMethod {
        SubmitMethod::Enqcmd
    }
}

/// Sets the bit in a descriptor of an IAA operation on data, which have codes from 0x40 on.
fn on_iaa(descriptor: &Descriptor) -> Descriptor {
    let mut bytes = *descriptor.as_bytes();
    if descriptor.operation_code() >= 0x40 {
        // The flags are bytes 4 to 6, little endian.
        bytes[4] |= BLOCK_ON_FAULT as u8;
    }
    Descriptor::from_bytes(bytes)
}
