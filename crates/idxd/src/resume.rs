//! Computes the rest of an operation that did not complete in full.
//!
//! Pure arithmetic on a descriptor and its completion record, by the rules in the specification's description of each
//! operation (sections 8.3.2 to 8.3.13). The rest can be submitted again — a fault does not repair itself: touch the
//! address first — or be done by the CPU, which needs the same offsets.

use crate::descriptor::{DELTA_ENTRY_BYTES, Descriptor, MIN_DELTA_CAPACITY, offset};
use crate::flags::Operation;
use crate::record::Completion;
use crate::status::Status;

/// The rest of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rest {
    /// Nothing: it was done in full (the result may still differ from the expected one).
    Nothing,
    /// A descriptor that covers the undone part.
    Part {
        /// The continuation. Flags and completion record are the original's.
        descriptor: Descriptor,
        /// Bytes of the input before it: offsets in its record, and offsets in a delta record that it writes, count
        /// from there. 0 for *apply delta* and for a memmove that runs backwards. For a batch, members: without batch
        /// continuation a fence in the rest does not know which of those failed.
        skipped: u32,
    },
    /// *Create delta* only: the input from `skipped` on has not been compared, and the delta record has less space left
    /// than a device requires.
    NoRoom {
        /// Bytes of the input that were compared.
        skipped: u32,
    },
    /// For a batch whose list could not be read further: one descriptor is left, at this address, which most devices do
    /// not accept as a batch. Submit it by itself, without its fence if it has one: a fence is legal only inside a
    /// batch, and after a failed member it means that the descriptor must not be executed.
    One {
        /// Address of the descriptor in the list.
        descriptor: u64,
    },
    /// For a batch: the list was read, and members did not succeed. The first `processed` have their own records (where
    /// requested); the others were abandoned at a fence and did nothing.
    Members {
        /// Members that were processed.
        processed: u32,
    },
    /// It failed, and would fail again.
    Failed(Status),
    /// The record contradicts the descriptor: more was done than requested.
    Contradiction,
}

/// Returns the rest of `descriptor` after `completion`. `batch_continuation` is the device's capability of that name
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

/// Section 8.3.2: continues after the processed members, and states whether any of them failed.
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
        // An entry is applied or not; continuing within one would write its data as offsets.
        Operation::ApplyDelta if !done.is_multiple_of(DELTA_ENTRY_BYTES) => Rest::Contradiction,
        _ if left == 0 => Rest::Nothing,
        // It ran backwards (8.3.4): the first bytes are left.
        Operation::Memmove if completion.result & 1 == 1 => part(descriptor.moved(source, destination, left), 0),
        Operation::Memmove | Operation::Compare => part(descriptor.moved(further, beyond, left), done),
        Operation::ComparePattern => {
            // The pattern continues where it stopped, possibly not at its first byte. It lies in memory order: little
            // endian.
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
            // With nothing done the record's value is undefined and the old seed applies (8.3.12).
            let seed = if done == 0 { descriptor.get(offset::CRC_SEED) } else { completion.crc().to_le_bytes() };
            let beyond = if operation == Operation::Crc { destination } else { beyond };
            part(descriptor.moved(further, beyond, left).put(offset::CRC_SEED, seed), done)
        }
    }
}

/// Section 8.3.8: both sources move, and the record continues behind the written part. Offsets start at 0 again, so the
/// parts are applied to the destination and to the destination plus `skipped`.
fn rest_of_delta(descriptor: &Descriptor, completion: &Completion) -> Rest {
    let done = completion.bytes_completed;
    let written = completion.delta_size();
    let capacity = u32::from_le_bytes(descriptor.get(offset::DELTA_CAPACITY));
    let record = u64::from_le_bytes(descriptor.get(offset::DELTA_ADDRESS));
    // Each entry covers 8 compared bytes; a device that claims more must not lead us beyond the caller's buffers.
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
