//! The 64 bytes of a DSA descriptor, built field by field from the specification's chapter 8.
//!
//! Constructors set the operation code and the flags that the operation requires (*compare*, *compare pattern*, *create
//! delta*, *CRC* and *copy with CRC* must have a completion record: table 5-5). Every byte that the operation does not
//! use stays zero, because devices reject anything else (status 12, table 5-3). The builder methods add optional
//! features and omit a flag where the operation does not allow it, so no combination of calls makes a descriptor that a
//! device must refuse for its flags — except for those that depend on the queue: block-on-fault and cache control.
//! Traffic class selectors stay 0 throughout: a record is ordered behind its data only in the same class (section 3.9).

use std::fmt;

use crate::flags::{Operation, flag};

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 64;

/// The most bytes that one *create delta* or *apply delta* may cover: offsets are 16 bits of 8-byte units (section
/// 8.3.8).
pub const MAX_DELTA_TRANSFER: u32 = 0x8_0000;
/// The least capacity of a delta record: the space that one cache line can need (section 8.3.8).
pub const MIN_DELTA_CAPACITY: u32 = 80;
/// Bytes of one entry of a delta record: a 16-bit offset in units of 8 bytes and 8 bytes of data.
pub const DELTA_ENTRY_BYTES: u32 = 10;

/// A descriptor as the device reads it: 64 bytes, little endian, 64-byte aligned.
///
/// Plain data: making one is safe. Submitting it to a device is not ([`WorkQueue::submit`](crate::WorkQueue::submit)),
/// because the device then reads and writes the addresses in it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Descriptor {
    bytes: [u8; DESCRIPTOR_BYTES],
}

const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR_BYTES && align_of::<Descriptor>() == 64);

/// Offsets of the fields (section 8.1 and the figures of section 8.3).
pub mod offset {
    /// PASID and privilege: filled in by the CPU, 0 in software's descriptor.
    pub const TRUSTED: usize = 0;
    /// Flags, three bytes.
    pub const FLAGS: usize = 4;
    /// Operation code.
    pub const OPERATION: usize = 7;
    /// Completion record address.
    pub const RECORD: usize = 8;
    /// Source, source 1, descriptor list or (apply delta) delta record address.
    pub const SOURCE: usize = 16;
    /// Destination, source 2 or (compare pattern) the pattern.
    pub const DESTINATION: usize = 24;
    /// Transfer size, or the descriptor count of a batch.
    pub const SIZE: usize = 32;
    /// Completion interrupt handle.
    pub const INTERRUPT: usize = 36;
    /// Compare and compare pattern: the expected result.
    pub const EXPECTED_RESULT: usize = 40;
    /// Create delta: delta record address.
    pub const DELTA_ADDRESS: usize = 40;
    /// Create delta: capacity of the delta record.
    pub const DELTA_CAPACITY: usize = 48;
    /// Create delta: mask of expected results.
    pub const EXPECTED_MASK: usize = 56;
    /// Apply delta: bytes of the delta record.
    pub const DELTA_SIZE: usize = 40;
    /// CRC and copy with CRC: the seed.
    pub const CRC_SEED: usize = 40;
}

impl Descriptor {
    /// Makes a no-op. With a record it tests a queue; fenced in a batch it marks a point.
    pub fn noop() -> Self {
        Self::new(Operation::Noop, 0)
    }

    /// Makes a drain, which completes when everything that this process submitted to the same queue before has
    /// completed; not allowed in a batch. It must have a record ([`with_record`](Self::with_record)).
    pub fn drain() -> Self {
        Self::new(Operation::Drain, 0)
    }

    /// Copies `bytes` bytes. Overlap is legal only where the device's capabilities say so.
    pub fn memmove(source: u64, destination: u64, bytes: u32) -> Self {
        Self::new(Operation::Memmove, 0).addresses(source, destination).size(bytes)
    }

    /// Compares two buffers: result 0 equal, 1 different, with the offset of the first difference as bytes completed.
    pub fn compare(first: u64, second: u64, bytes: u32) -> Self {
        Self::new(Operation::Compare, RESULT_FLAGS).addresses(first, second).size(bytes)
    }

    /// Compares a buffer with 8 bytes repeated (0 finds zero pages): result 0 equal, 1 different; bytes completed is then at
    /// most the offset of the first difference, not exactly it.
    pub fn compare_pattern(source: u64, pattern: u64, bytes: u32) -> Self {
        Self::new(Operation::ComparePattern, RESULT_FLAGS).addresses(source, pattern).size(bytes)
    }

    /// Writes into `record` how to turn `first` into `second`. Both addresses and `bytes` are multiples of 8, `bytes`
    /// is at most [`MAX_DELTA_TRANSFER`] and `record_capacity` at least [`MIN_DELTA_CAPACITY`], best a multiple of
    /// [`DELTA_ENTRY_BYTES`]. Result 0 equal, 1 complete record, 2 record too small.
    pub fn create_delta(first: u64, second: u64, bytes: u32, record: u64, record_capacity: u32) -> Self {
        Self::new(Operation::CreateDelta, RESULT_FLAGS)
            .addresses(first, second)
            .size(bytes)
            .put(offset::DELTA_ADDRESS, record.to_le_bytes())
            .put(offset::DELTA_CAPACITY, record_capacity.to_le_bytes())
    }

    /// Applies `record_bytes` bytes of a delta record to `destination`; `bytes` is the transfer size of its creation.
    pub fn apply_delta(record: u64, record_bytes: u32, destination: u64, bytes: u32) -> Self {
        Self::new(Operation::ApplyDelta, 0)
            .addresses(record, destination)
            .size(bytes)
            .put(offset::DELTA_SIZE, record_bytes.to_le_bytes())
    }

    /// CRC-32C (Castagnoli, as iSCSI uses it) of a buffer. `seed` is 0, or the value of the part before.
    pub fn crc(source: u64, bytes: u32, seed: u32) -> Self {
        Self::new(Operation::Crc, RESULT_FLAGS)
            .addresses(source, 0)
            .size(bytes)
            .put(offset::CRC_SEED, seed.to_le_bytes())
    }

    /// Copies and computes the CRC-32C of exactly the bytes that were copied; the buffers must not overlap.
    pub fn copy_crc(source: u64, destination: u64, bytes: u32, seed: u32) -> Self {
        Self::new(Operation::CopyCrc, RESULT_FLAGS)
            .addresses(source, destination)
            .size(bytes)
            .put(offset::CRC_SEED, seed.to_le_bytes())
    }

    /// Runs the `count` descriptors at `list` (64-byte aligned). `count` is at least 2, unless the device accepts
    /// batches of one, and at most the queue's maximum.
    pub fn batch(list: u64, count: u32) -> Self {
        Self::new(Operation::Batch, 0).addresses(list, 0).size(count)
    }

    /// Makes the device write the completion record to `address` (32-byte aligned) in any case.
    #[must_use]
    pub fn with_record(self, address: u64) -> Self {
        self.record_at(address).with_flags(flag::RECORD_ADDRESS_VALID | flag::REQUEST_RECORD)
    }

    /// Makes the device write the completion record to `address` only if the operation does not succeed (status other
    /// than 01, 02, 05): for members of a batch whose own record reports overall success. If the operation requires a
    /// record it is requested in any case.
    #[must_use]
    pub fn with_record_on_failure(self, address: u64) -> Self {
        self.record_at(address).with_flags(flag::RECORD_ADDRESS_VALID)
    }

    /// Makes the device check the result: status 01 if it is the expected one, 02 if not. For *compare* and *compare
    /// pattern* the expected result is 0 or 1; for *create delta* it is a **mask**, bit N set where result N is
    /// expected. Elsewhere the flag is reserved, and the descriptor is returned unchanged.
    #[must_use]
    pub fn expecting(self, result: u8) -> Self {
        match self.operation() {
            Some(Operation::Compare | Operation::ComparePattern) => {
                self.put(offset::EXPECTED_RESULT, [result]).with_flags(flag::CHECK_RESULT)
            }
            Some(Operation::CreateDelta) => self.put(offset::EXPECTED_MASK, [result]).with_flags(flag::CHECK_RESULT),
            _ => self,
        }
    }

    /// Waits for all earlier members of the batch, and is abandoned with all later ones if any of them did not succeed. Legal
    /// only inside a batch.
    #[must_use]
    pub fn fenced(self) -> Self {
        if self.operation().is_some_and(Operation::allowed_in_batch) { self.with_flags(flag::FENCE) } else { self }
    }

    /// Waits for page faults to be resolved instead of completing in part. Legal only on queues with block-on-fault enabled;
    /// no-op, batch and drain are returned unchanged.
    #[must_use]
    pub fn blocking_on_fault(self) -> Self {
        self.with_flags_if(Operation::allows_block_on_fault, flag::BLOCK_ON_FAULT)
    }

    /// Hints that the output should go to the cache instead of to memory. Legal only where the device's capabilities
    /// have cache control; operations that write no memory are returned unchanged.
    #[must_use]
    pub fn to_cache(self) -> Self {
        self.with_flags_if(Operation::allows_cache_control, flag::CACHE_CONTROL_1)
    }

    /// Marks a batch as the continuation of one in which members had failed already. Legal only where the device's
    /// capabilities have batch continuation; anything but a batch is returned unchanged.
    #[must_use]
    pub fn after_failure(self) -> Self {
        self.with_flags_if(|operation| operation == Operation::Batch, flag::BATCH_ERROR)
    }

    /// Returns the 64 bytes.
    pub fn as_bytes(&self) -> &[u8; DESCRIPTOR_BYTES] {
        &self.bytes
    }

    /// Makes a descriptor of any other kind, byte for byte: IAA's, or a captured one.
    pub fn from_bytes(bytes: [u8; DESCRIPTOR_BYTES]) -> Self {
        Self { bytes }
    }

    /// Returns the operation, if it is one of this crate's. The codes from 0x40 on are IAA's and not in this table.
    pub fn operation(&self) -> Option<Operation> {
        Operation::from_code(self.operation_code())
    }

    /// Returns the operation code.
    pub fn operation_code(&self) -> u8 {
        self.bytes[offset::OPERATION]
    }

    /// Returns the 24 flag bits.
    pub fn flags(&self) -> u32 {
        u32::from_le_bytes(self.get(offset::FLAGS)) & 0x00ff_ffff
    }

    /// Returns bytes 16 to 23: source, source 1, descriptor list, or the delta record of *apply delta*.
    pub fn source(&self) -> u64 {
        u64::from_le_bytes(self.get(offset::SOURCE))
    }

    /// Returns bytes 24 to 31: destination, source 2, or the pattern.
    pub fn destination(&self) -> u64 {
        u64::from_le_bytes(self.get(offset::DESTINATION))
    }

    /// Returns bytes 32 to 35: transfer size, or the count of a batch.
    pub fn bytes(&self) -> u32 {
        u32::from_le_bytes(self.get(offset::SIZE))
    }

    /// Returns the completion record's address, if there is one.
    pub fn record(&self) -> Option<u64> {
        (self.flags() & flag::RECORD_ADDRESS_VALID != 0).then(|| u64::from_le_bytes(self.get(offset::RECORD)))
    }

    fn new(operation: Operation, flags: u32) -> Self {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[offset::OPERATION] = operation as u8;
        Self { bytes }.with_flags(flags)
    }

    fn addresses(self, source: u64, destination: u64) -> Self {
        self.put(offset::SOURCE, source.to_le_bytes()).put(offset::DESTINATION, destination.to_le_bytes())
    }

    fn size(self, bytes: u32) -> Self {
        self.put(offset::SIZE, bytes.to_le_bytes())
    }

    fn record_at(self, address: u64) -> Self {
        self.put(offset::RECORD, address.to_le_bytes())
    }

    fn with_flags_if(self, allowed: impl FnOnce(Operation) -> bool, flags: u32) -> Self {
        if self.operation().is_some_and(allowed) { self.with_flags(flags) } else { self }
    }

    pub(crate) fn with_flags(self, flags: u32) -> Self {
        let [a, b, c, _] = (self.flags() | flags).to_le_bytes();
        self.put(offset::FLAGS, [a, b, c])
    }

    /// Sets bytes 16 to 35 for a continuation of the same operation; see [`resume`](crate::resume).
    pub(crate) fn moved(self, source: u64, destination: u64, bytes: u32) -> Self {
        self.addresses(source, destination).size(bytes)
    }

    pub(crate) fn put<const N: usize>(mut self, at: usize, value: [u8; N]) -> Self {
        self.bytes[at..at + N].copy_from_slice(&value);
        self
    }

    pub(crate) fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut value = [0; N];
        value.copy_from_slice(&self.bytes[at..at + N]);
        value
    }
}

/// *Completion record address valid* and *request completion record*: required of operations with a result (table 5-5).
const RESULT_FLAGS: u32 = flag::RECORD_ADDRESS_VALID | flag::REQUEST_RECORD;

impl AsRef<Descriptor> for Descriptor {
    fn as_ref(&self) -> &Descriptor {
        self
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Descriptor");
        match self.operation() {
            Some(operation) => fields.field("operation", &operation),
            None => fields.field("operation", &format_args!("{:#04x}", self.operation_code())),
        };
        fields
            .field("flags", &format_args!("{:#x}", self.flags()))
            .field("source", &format_args!("{:#x}", self.source()))
            .field("destination", &format_args!("{:#x}", self.destination()))
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
