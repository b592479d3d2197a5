//! What is left of an operation that did not complete in full.
//!
//! Pure arithmetic on a descriptor and what its record said, by the rules in the specification's description of each operation
//! (sections 8.3.2 to 8.3.13). The rest can be submitted again — a fault does not repair itself: touch the address first — or
//! be done by the CPU, which needs the same offsets.

use crate::descriptor::{DELTA_ENTRY_BYTES, Descriptor, MIN_DELTA_CAPACITY, offset};
use crate::flags::Operation;
use crate::record::Completion;
use crate::status::Status;

/// What is left of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rest {
    /// Nothing: it was done in full (the result may still be another than expected).
    Nothing,
    /// One more descriptor, which covers what was not done.
    Part {
        /// The continuation. Flags and completion record are the original's.
        descriptor: Descriptor,
        /// Bytes of the input that come before it: offsets that its record reports, and the offsets in a delta record it writes,
        /// count from there. 0 for *apply delta* and for a memmove that runs backwards. Of a batch, members: without batch
        /// continuation a fence in the rest does not know of those among them that failed.
        skipped: u32,
    },
    /// *Create delta* only: the input from `skipped` on has not been compared, and the delta record has less room left than a
    /// device asks for.
    NoRoom {
        /// Bytes of the input that were compared.
        skipped: u32,
    },
    /// Of a batch whose list could not be read further: one descriptor, which most devices do not take as a batch. It is at this
    /// address. Submit it by itself, without its fence if it has one: that is legal only inside a batch, and after a failed member
    /// it says that the descriptor is not to be executed.
    One {
        /// Address of the descriptor in the list.
        descriptor: u64,
    },
    /// Of a batch: the list was read, and members did not succeed. The first `processed` have their own records (where they asked
    /// for one); the others were abandoned at a fence and did nothing.
    Members {
        /// Members that were processed.
        processed: u32,
    },
    /// It failed, and sending it again would fail again.
    Failed(Status),
    /// The record contradicts the descriptor: more done than asked for.
    Contradiction,
}

/// What is left of `descriptor` after `completion`. `batch_continuation` is the device's capability of that name
/// ([`GeneralCapabilities::batch_continuation`](crate::GeneralCapabilities::batch_continuation)).
pub fn rest(descriptor: &Descriptor, completion: &Completion, batch_continuation: bool) -> Rest {
    let Some(operation) = descriptor.operation() else { return Rest::Failed(completion.status) };
    match (operation, completion.status) {
        (Operation::Batch, Status::BatchMemberFailed) => match completion.descriptors_completed() {
            processed if processed <= descriptor.bytes() => Rest::Members { processed },
            _ => Rest::Contradiction,
        },
        (Operation::Batch, Status::BatchListFault) => rest_of_batch(descriptor, completion, batch_continuation),
        (_, status) if status.is_done() => Rest::Nothing,
        (_, Status::PageFault | Status::PageRequestFailed) => rest_of_part(operation, descriptor, completion),
        (_, status) => Rest::Failed(status),
    }
}

/// Section 8.3.2: go on behind what was processed, and say whether any of that failed.
fn rest_of_batch(descriptor: &Descriptor, completion: &Completion, continuation: bool) -> Rest {
    let done = completion.descriptors_completed();
    let list = descriptor.source().wrapping_add(u64::from(done) * size_of::<Descriptor>() as u64);
    match descriptor.bytes().checked_sub(done) {
        None => Rest::Contradiction,
        Some(0) => Rest::Members { processed: done },
        Some(1) => Rest::One { descriptor: list },
        Some(left) => {
            let batch = descriptor.moved(list, 0, left);
            let batch = if continuation && completion.result & 1 == 1 { batch.after_failure() } else { batch };
            Rest::Part { descriptor: batch, skipped: done }
        }
    }
}

fn rest_of_part(operation: Operation, descriptor: &Descriptor, completion: &Completion) -> Rest {
    let done = completion.bytes_completed;
    let (source, destination, bytes) = (descriptor.source(), descriptor.destination(), descriptor.bytes());
    let size = if operation == Operation::ApplyDelta { delta_size(descriptor) } else { bytes };
    let Some(left) = size.checked_sub(done) else { return Rest::Contradiction };
    let (further, beyond) = (source.wrapping_add(done.into()), destination.wrapping_add(done.into()));
    let part = |descriptor, skipped| Rest::Part { descriptor, skipped };
    match operation {
        // These have no partial completion.
        Operation::Noop | Operation::Drain | Operation::Batch => Rest::Failed(completion.status),
        // An entry is applied or it is not; going on within one would write its data as offsets.
        Operation::ApplyDelta if !done.is_multiple_of(DELTA_ENTRY_BYTES) => Rest::Contradiction,
        _ if left == 0 => Rest::Nothing,
        // Ran backwards (8.3.4): what is left are the first bytes.
        Operation::Memmove if completion.result & 1 == 1 => part(descriptor.moved(source, destination, left), 0),
        Operation::Memmove | Operation::Compare => part(descriptor.moved(further, beyond, left), done),
        Operation::ComparePattern => {
            // The pattern goes on where it was, which need not be at its first byte. It lies in memory order: little endian.
            let pattern = destination.rotate_right(8 * (done % 8));
            part(descriptor.moved(further, pattern, left), done)
        }
        Operation::CreateDelta => rest_of_delta(descriptor, completion),
        Operation::ApplyDelta => part(
            // Same destination and transfer size: the offsets count from there (8.3.9).
            descriptor.moved(further, destination, bytes).put(offset::DELTA_SIZE, left.to_le_bytes()),
            0,
        ),
        Operation::Crc | Operation::CopyCrc => {
            // With nothing done the record's value is undefined and the old seed stands (8.3.12).
            let seed = if done == 0 { descriptor.get(offset::CRC_SEED) } else { completion.crc().to_le_bytes() };
            let beyond = if operation == Operation::Crc { destination } else { beyond };
            part(descriptor.moved(further, beyond, left).put(offset::CRC_SEED, seed), done)
        }
    }
}

/// Section 8.3.8: both sources move, and the record goes on behind what was written. Offsets start at 0 again, so the parts are
/// applied to the destination and to the destination plus `skipped`.
fn rest_of_delta(descriptor: &Descriptor, completion: &Completion) -> Rest {
    let done = completion.bytes_completed;
    let written = completion.delta_size();
    let capacity = u32::from_le_bytes(descriptor.get(offset::DELTA_CAPACITY));
    let record = u64::from_le_bytes(descriptor.get(offset::DELTA_ADDRESS));
    // Each entry stands for 8 bytes compared; a device that says otherwise is not followed into the caller's buffers.
    let most = done / 8 * DELTA_ENTRY_BYTES;
    let whole = done.is_multiple_of(8) && written.is_multiple_of(DELTA_ENTRY_BYTES);
    let (Some(room), true) = (capacity.checked_sub(written), whole && written <= most) else {
        return Rest::Contradiction;
    };
    if room < MIN_DELTA_CAPACITY {
        return Rest::NoRoom { skipped: done };
    }
    let next = descriptor
        .moved(
            descriptor.source().wrapping_add(done.into()),
            descriptor.destination().wrapping_add(done.into()),
            descriptor.bytes() - done,
        )
        .put(offset::DELTA_ADDRESS, record.wrapping_add(written.into()).to_le_bytes())
        .put(offset::DELTA_CAPACITY, room.to_le_bytes());
    Rest::Part { descriptor: next, skipped: done }
}

fn delta_size(descriptor: &Descriptor) -> u32 {
    u32::from_le_bytes(descriptor.get(offset::DELTA_SIZE))
}

#[cfg(test)]
mod tests;
