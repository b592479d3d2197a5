//! Completion records: the memory to which a device writes its results.
//!
//! The device may write a record at any time between submission and completion, so a record is accessed only through
//! atomics: cleared before submission, then its status is read with *acquire* and, once it is not zero, the rest. The
//! status becomes visible last: the device writes a record in one piece, and where the kernel writes it on the device's
//! behalf (record faults with the event log on) it copies the status byte last.
//!
//! A record must stay in place, untouched, until its status has been seen: the device knows only its address. If a
//! record is dropped or reused early, memory is overwritten. That is why submission is `unsafe` and this file is not.
//! Moving a `Box` after its record's address was taken counts as too early, since a box claims to be the only path to
//! its contents: keep records in an arena, or behind an `Arc`.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::status::{CODE_BITS, Status, WRITE_BIT};

/// Offsets of the fields in a DSA record (section 8.2); offsets 0 to 15 are the same for IAA.
pub mod offset {
    /// Status.
    pub const STATUS: usize = 0;
    /// Result (DSA), error code (IAA).
    pub const RESULT: usize = 1;
    /// Fault info.
    pub const FAULT_INFO: usize = 2;
    /// Bytes completed, or descriptors completed.
    pub const BYTES_COMPLETED: usize = 4;
    /// Fault address.
    pub const FAULT_ADDRESS: usize = 8;
    /// Invalid flags, delta record size or CRC value.
    pub const DETAIL: usize = 16;
}

/// The 32 bytes a DSA device writes when a descriptor is complete.
#[derive(Debug)]
#[repr(C, align(32))]
pub struct CompletionRecord {
    words: [AtomicU64; 4],
}

const _: () = assert!(size_of::<CompletionRecord>() == 32 && align_of::<CompletionRecord>() == 32);

impl CompletionRecord {
    /// Makes a cleared record.
    pub const fn new() -> Self {
        Self { words: [const { AtomicU64::new(0) }; 4] }
    }

    /// Zeroes the record. Call it before each submission that names the record: hardware never writes status 0, so any
    /// other leftover would be taken for the result. The write also makes the page present for the device.
    pub fn clear(&self) {
        clear(&self.words);
    }

    /// Returns the address for [`Descriptor::with_record`](crate::Descriptor::with_record).
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }

    /// Returns the completion, once the device has written it.
    pub fn poll(&self) -> Option<Completion> {
        read(&self.words).as_ref().map(Completion::from_bytes)
    }
}

impl Default for CompletionRecord {
    fn default() -> Self {
        Self::new()
    }
}

pub(crate) fn clear(words: &[AtomicU64]) {
    // The status first: a concurrent poll then sees no result, rather than a status beside cleared fields.
    for word in words {
        word.store(0, Ordering::Release);
    }
}

/// Returns all bytes of a record of `N` words, or `None` while its status is zero.
pub(crate) fn read<const WORDS: usize, const BYTES: usize>(words: &[AtomicU64; WORDS]) -> Option<[u8; BYTES]> {
    const { assert!(BYTES == WORDS * 8) };
    if words[0].load(Ordering::Acquire).to_le_bytes()[offset::STATUS] == 0 {
        return None;
    }
    // Everything is read after the status was seen, the first word a second time.
    let mut bytes = [0; BYTES];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
        // A device writes little endian; on a big-endian host the atomic would have to be swapped, but there are none.
        chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
    Some(bytes)
}

/// The completion of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The status.
    pub status: Status,
    /// The operation's result: compare 0 equal, 1 different; create delta 0, 1 or 2; memmove 1 if it ran backwards;
    /// batch 1 if a member failed (devices with batch continuation). Without meaning for other operations.
    pub result: u8,
    /// Progress. Zero on full success, except: compare with result 1, where it is the offset of the first difference
    /// (compare pattern: at most that), create delta with result 2, and a batch, where it is the number of descriptors
    /// processed, successful or not.
    pub bytes_completed: u32,
    /// The access that faulted, if the status reports one.
    pub fault: Option<Fault>,
    /// Bytes 16 to 23, unparsed: see [`crc`](Self::crc), [`delta_size`](Self::delta_size) and
    /// [`invalid_flags`](Self::invalid_flags).
    pub detail: u64,
}

/// An access that met a page fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The faulting address. Its low 12 bits may read 0, and if the device masks addresses (see [`info`](Self::info))
    /// it is meaningless.
    pub address: u64,
    /// Whether the access was a write.
    pub write: bool,
    /// The fault info byte. Only devices with *completion record fault info* in their capabilities write it: bit 0 set,
    /// the address is masked; bits 3:1, the operand (table 8-13).
    pub info: u8,
}

impl Completion {
    /// Parses the 32 bytes of a DSA record whose status is not zero.
    pub fn from_bytes(record: &[u8; 32]) -> Completion {
        let status = Status::from_code(record[offset::STATUS] & CODE_BITS);
        Completion {
            status,
            result: record[offset::RESULT],
            bytes_completed: u32::from_le_bytes(take(record, offset::BYTES_COMPLETED)),
            fault: Fault::of(status, record),
            detail: u64::from_le_bytes(take(record, offset::DETAIL)),
        }
    }

    /// Returns the CRC-32C of the whole input or (after a fault, and if anything was done) of the part done.
    pub fn crc(&self) -> u32 {
        self.detail as u32
    }

    /// Returns how many bytes of the delta record were written.
    pub fn delta_size(&self) -> u32 {
        self.detail as u32
    }

    /// Returns, with [`Status::BadFlags`], at least one of the wrong flags, by position in the descriptor.
    pub fn invalid_flags(&self) -> u32 {
        self.detail as u32 & 0x00ff_ffff
    }

    /// Returns, for a batch, the members processed, successfully or not. The others were abandoned, their records are
    /// untouched.
    pub fn descriptors_completed(&self) -> u32 {
        self.bytes_completed
    }
}

impl Fault {
    pub(crate) fn of(status: Status, record: &[u8]) -> Option<Fault> {
        status.has_fault_address().then(|| Fault {
            address: u64::from_le_bytes(take(record, offset::FAULT_ADDRESS)),
            write: record[offset::STATUS] & WRITE_BIT != 0,
            info: record[offset::FAULT_INFO],
        })
    }
}

pub(crate) fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[at..at + N]);
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Section 8.2's figure: status, result, fault info, unused, bytes completed, fault address, operation-specific.
    fn record(status: u8, result: u8, done: u32, address: u64, detail: u64) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[0] = status;
        bytes[1] = result;
        bytes[2] = 0x0a;
        bytes[3] = 0xee;
        bytes[4..8].copy_from_slice(&done.to_le_bytes());
        bytes[8..16].copy_from_slice(&address.to_le_bytes());
        bytes[16..24].copy_from_slice(&detail.to_le_bytes());
        bytes[24..].fill(0xee);
        bytes
    }

    #[test]
    fn a_record_has_no_completion_until_its_status_is_written() {
        let record = CompletionRecord::new();
        assert_eq!(record.poll(), None);
        record.words[3].store(u64::MAX, Ordering::Relaxed);
        record.words[0].store(0xffff_ffff_ffff_ff00, Ordering::Relaxed);
        assert_eq!(record.poll(), None, "only the status byte counts");
        record.words[0].store(0x1234_5678_0000_0101, Ordering::Release);
        let completion = record.poll().unwrap();
        assert_eq!((completion.status, completion.result), (Status::Success, 1));
        assert_eq!(completion.bytes_completed, 0x1234_5678);
        record.clear();
        assert_eq!(record.poll(), None);
        assert!(record.words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn fields_are_at_the_offsets_of_the_specification() {
        let completion = Completion::from_bytes(&record(0x05, 1, 77, 0xdead_b000, 0x0123_4567_89ab_cdef));
        assert_eq!(completion.status, Status::BatchMemberFailed);
        assert_eq!((completion.result, completion.descriptors_completed()), (1, 77));
        assert_eq!(completion.fault, None, "05 has no fault address");
        assert_eq!(completion.detail, 0x0123_4567_89ab_cdef);
        assert_eq!((completion.crc(), completion.delta_size()), (0x89ab_cdef, 0x89ab_cdef));
        assert_eq!(completion.invalid_flags(), 0x00ab_cdef);
    }

    #[test]
    fn bit_seven_says_write_and_bit_six_says_nothing() {
        for (status, write) in [(0x03, false), (0x83, true), (0x43, false), (0xc3, true)] {
            let completion = Completion::from_bytes(&record(status, 0, 4096, 0x7000, 0));
            assert_eq!(completion.status, Status::PageFault);
            assert_eq!(completion.fault, Some(Fault { address: 0x7000, write, info: 0x0a }));
        }
        // Where the status is no translation fault, bit 7 has no meaning.
        assert_eq!(Completion::from_bytes(&record(0x81, 0, 0, 0, 0)).status, Status::Success);
        assert_eq!(Completion::from_bytes(&record(0x81, 0, 0, 0, 0)).fault, None);
    }

    #[test]
    fn only_translation_faults_carry_an_address() {
        for code in 1..=0x3f_u8 {
            let completion = Completion::from_bytes(&record(code, 0, 0, 1, 0));
            assert_eq!(completion.fault.is_some(), matches!(code, 0x03 | 0x04 | 0x06 | 0x1a | 0x1f), "{code:#x}");
        }
    }
}
