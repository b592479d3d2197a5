//! The differences between two pieces of memory, as a delta record of Intel DSA.
//!
//! A delta record (Intel DSA architecture specification, 8.3.8 Create Delta Record) is a list of deltas of ten bytes:
//! the offset of a word divided by 8, 16 bits little-endian, and the eight bytes of the second source where it differs
//! from the first. Offsets ascend. So a device and a CPU can make and apply each other's records, and the wire has one
//! format.
//!
//! Creating reads memory that may be changing, each word once: applied to the values read from the first source, the
//! record produces the values read from the second. Applying treats the record as hostile.

use std::ops::ControlFlow;

use thiserror::Error;

use crate::cpu::Implementation;

/// The bytes of one delta.
pub const DELTA_SIZE: usize = 10;

/// The longest memory that offsets of 16 bits can address, in bytes.
pub const MAX_LENGTH: usize = 8 << 16;

/// The result of [`create_raw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Created {
    /// Nothing was written: the sources are equal. (Result 0 of the device.)
    Same,
    /// A record of all differences, of this length. (Result 1.)
    Complete {
        /// The record's length in bytes.
        record: usize,
    },
    /// A record of the differences in a part of the sources, because the record has no room for the rest. (Result 2.)
    Overflow {
        /// The record's length in bytes.
        record: usize,
        /// How many bytes from the start of the sources it covers; the next word differs.
        compared: usize,
    },
}

/// Why there is no delta, or not all of it was applied.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// Memory that a record cannot describe.
    #[error(
        "{len:#x} bytes at {address:#x} cannot have a delta record: address and length must be multiples of 8, and the length at most {MAX_LENGTH:#x}"
    )]
    Shape {
        /// Its address.
        address: usize,
        /// Its length in bytes.
        len: usize,
    },
    /// The record ends within a delta.
    #[error("a delta record of {0} bytes is not whole deltas of {DELTA_SIZE} bytes")]
    RecordSize(usize),
    /// An offset is not larger than the one before. (Status 07 of the device.)
    #[error(
        "the delta at byte {applied} of the record is for offset {offset:#x}, which does not come after {previous:#x}"
    )]
    NotAscending {
        /// How many bytes of the record were applied before.
        applied: usize,
        /// The offset before, in bytes.
        previous: usize,
        /// The offset, in bytes.
        offset: usize,
    },
    /// An offset lies outside the memory. (Status 08.)
    #[error("the delta at byte {applied} of the record is for offset {offset:#x}, outside {len:#x} bytes")]
    OutOfBounds {
        /// How many bytes of the record were applied before.
        applied: usize,
        /// The offset, in bytes.
        offset: usize,
        /// The length of the memory, in bytes.
        len: usize,
    },
}

impl Implementation {
    /// As [`create_raw`], by this implementation.
    ///
    /// # Errors
    /// As [`create_raw`].
    ///
    /// # Safety
    /// As [`create_raw`], and `self` is one of [`Self::available`].
    pub unsafe fn create_delta_raw(
        self,
        first: *const u8,
        second: *const u8,
        len: usize,
        record: &mut [u8],
    ) -> Result<Created, DeltaError> {
        // SAFETY: passed on.
        unsafe { self.create(first, second, len, record, None) }
    }

    /// As [`Self::create_delta_raw`]; `ahead` as [`Self::differences`] has it.
    ///
    /// # Safety
    /// As [`Self::create_delta_raw`].
    unsafe fn create(
        self,
        first: *const u8,
        second: *const u8,
        len: usize,
        record: &mut [u8],
        ahead: Option<*const u8>,
    ) -> Result<Created, DeltaError> {
        check(first.addr(), len)?;
        check(second.addr(), len)?;
        let (deltas, _) = record.as_chunks_mut::<DELTA_SIZE>();
        let mut written = 0;
        let mut no_room_at = None;
        let write = |at: usize, mut differ: u32, _: &[u8], second: &[u8]| {
            let words = second.as_chunks::<8>().0;
            while differ != 0 {
                let number = differ.trailing_zeros() as usize;
                differ &= differ - 1;
                let place = at / 8 + number;
                let Some(delta) = deltas.get_mut(written) else {
                    no_room_at = Some(8 * place);
                    return ControlFlow::Break(());
                };
                let offset = u16::try_from(place).expect("the length was checked");
                delta[..2].copy_from_slice(&offset.to_le_bytes());
                delta[2..].copy_from_slice(&words[number]);
                written += 1;
            }
            ControlFlow::Continue(())
        };
        // SAFETY: passed on.
        unsafe { self.differences(first, second, len, ahead, write) };
        let record = written * DELTA_SIZE;
        Ok(match no_room_at {
            Some(compared) => Created::Overflow { record, compared },
            None if record == 0 => Created::Same,
            None => Created::Complete { record },
        })
    }
}

/// Writes to `record` how to turn `first` into `second`, both `len` bytes, in as many whole deltas as fit. The sources
/// may change meanwhile: each word is loaded once.
///
/// Unlike the device this also accepts a record of less than 80 bytes, and uses it to the last whole delta.
///
/// # Errors
/// An address or the length is not a multiple of 8, or the length above [`MAX_LENGTH`].
///
/// # Safety
/// Both sources must be readable for `len` bytes and not overlap `record`.
pub unsafe fn create_raw(
    first: *const u8,
    second: *const u8,
    len: usize,
    record: &mut [u8],
) -> Result<Created, DeltaError> {
    // SAFETY: passed on; `chosen` is one that this CPU can run.
    unsafe { Implementation::chosen().create_delta_raw(first, second, len, record) }
}

/// As [`create_raw`], for slices such as pages of a cache: `next`, which is compared after `first`, is prefetched.
///
/// # Errors
/// As [`create_raw`], also if the slices are not of the same length.
pub fn create(first: &[u8], second: &[u8], record: &mut [u8], next: Option<&[u8]>) -> Result<Created, DeltaError> {
    let len = first.len();
    if second.len() != len {
        return Err(DeltaError::Shape { address: second.as_ptr().addr(), len: second.len() });
    }
    // SAFETY: slices are readable over their whole length, which is the same, and one that is written overlaps none; `chosen`
    // is one that this CPU can run.
    unsafe {
        let next = next.map(<[u8]>::as_ptr);
        Implementation::chosen().create(first.as_ptr(), second.as_ptr(), len, record, next)
    }
}

/// Applies `record` to `target`, which becomes the second source if it was equal to the first.
///
/// An empty record changes nothing. At the first wrong delta it stops, as the device does: the deltas before have been
/// applied, and none outside.
///
/// # Errors
/// The record is not whole deltas, its offsets do not ascend or lie outside, or `target` cannot have a record.
pub fn apply(record: &[u8], target: &mut [u8]) -> Result<(), DeltaError> {
    // SAFETY: a slice is writable over its whole length.
    unsafe { apply_raw(record, target.as_mut_ptr(), target.len()) }
}

/// As [`apply`], for `len` bytes of memory that other threads may be reading: each word is stored atomically.
///
/// # Errors
/// As [`apply`].
///
/// # Safety
/// `target` must be writable for `len` bytes and not overlap `record`.
pub unsafe fn apply_raw(record: &[u8], target: *mut u8, len: usize) -> Result<(), DeltaError> {
    check(target.addr(), len)?;
    let (deltas, []) = record.as_chunks::<DELTA_SIZE>() else { return Err(DeltaError::RecordSize(record.len())) };
    let mut previous = None;
    for (number, delta) in deltas.iter().enumerate() {
        let [low, high, word @ ..] = *delta;
        let offset = 8 * usize::from(u16::from_le_bytes([low, high]));
        let applied = number * DELTA_SIZE;
        if let Some(previous) = previous.filter(|previous| offset <= *previous) {
            return Err(DeltaError::NotAscending { applied, previous, offset });
        }
        if offset >= len {
            return Err(DeltaError::OutOfBounds { applied, offset, len });
        }
        // SAFETY: the offset is below the length, and both are multiples of 8 as the target is, so the word is within
        // it and aligned; any bytes are a u64.
        unsafe { target.add(offset).cast::<u64>().write_volatile(u64::from_ne_bytes(word)) };
        previous = Some(offset);
    }
    Ok(())
}

/// Checks whether a record can describe `len` bytes at `address`.
fn check(address: usize, len: usize) -> Result<(), DeltaError> {
    if address.is_multiple_of(8) && len.is_multiple_of(8) && len <= MAX_LENGTH {
        Ok(())
    } else {
        Err(DeltaError::Shape { address, len })
    }
}

/// The body of the fuzz target: takes a record and its target from `bytes`. The result must be the same as applying the
/// record's valid beginning word by word, and the bytes around the target must not change.
#[doc(hidden)]
pub fn fuzz_apply(bytes: &[u8]) {
    const AROUND: usize = 64;
    let [low, high, record @ ..] = bytes else { return };
    // A few words more than a page at most, so that both ends are tested.
    let len = 8 * (usize::from(u16::from_le_bytes([*low, *high])) % 520);
    let mut words = vec![0x5a5a_5a5a_5a5a_5a5au64; (len + 2 * AROUND) / 8];
    let mut expected = words.clone();
    let mut next = 0;
    let (deltas, rest) = record.as_chunks::<DELTA_SIZE>();
    let mut valid = 0;
    for delta in deltas.iter().filter(|_| rest.is_empty()) {
        let place = usize::from(u16::from_le_bytes([delta[0], delta[1]]));
        if place < next || 8 * place >= len {
            break;
        }
        expected[AROUND / 8 + place] = u64::from_ne_bytes(delta[2..].try_into().expect("eight bytes"));
        next = place + 1;
        valid += 1;
    }
    // SAFETY: the middle of the words is that long.
    let applied = unsafe { apply_raw(record, words.as_mut_ptr().cast::<u8>().add(AROUND), len) };
    assert_eq!(words, expected, "{applied:?}");
    match applied {
        Ok(()) => assert!(rest.is_empty() && valid == deltas.len()),
        Err(DeltaError::RecordSize(size)) => assert!(size == record.len() && !rest.is_empty()),
        Err(DeltaError::NotAscending { applied, .. } | DeltaError::OutOfBounds { applied, .. }) => {
            assert!(applied == valid * DELTA_SIZE && valid < deltas.len());
        }
        Err(error @ DeltaError::Shape { .. }) => panic!("{error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    fn create(
        implementation: Implementation,
        first: &[u64],
        second: &[u64],
        record: &mut [u8],
    ) -> Result<Created, DeltaError> {
        assert_eq!(first.len(), second.len());
        // SAFETY: both are readable over their length; callers take the implementation from `available`.
        unsafe {
            implementation.create_delta_raw(first.as_ptr().cast(), second.as_ptr().cast(), 8 * first.len(), record)
        }
    }

    fn bytes(words: &mut [u64]) -> &mut [u8] {
        // SAFETY: words are bytes.
        unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 8 * words.len()) }
    }

    #[test]
    fn the_layout_is_that_of_the_specification() {
        let first = [0x1111_1111_1111_1111u64; 65536];
        let mut second = first;
        second[1] = u64::from_le_bytes(*b"abcdefgh");
        second[0xffff] = u64::from_le_bytes(*b"ABCDEFGH");
        for &implementation in Implementation::available() {
            let mut record = [0; 80];
            let created = create(implementation, &first, &second, &mut record);
            assert_eq!(created, Ok(Created::Complete { record: 20 }));
            assert_eq!(&record[..20], b"\x01\x00abcdefgh\xff\xffABCDEFGH");
        }
    }

    #[test]
    fn memory_that_a_record_cannot_describe_is_refused() {
        let words = vec![0u64; 65537];
        let at = words.as_ptr().cast::<u8>();
        for (first, second, len) in [(1, 0, 8), (0, 4, 8), (0, 0, 12), (0, 0, MAX_LENGTH + 8)] {
            // SAFETY: within the words, if anything is read at all.
            let created = unsafe { create_raw(at.add(first), at.add(second), len, &mut []) };
            assert!(matches!(created, Err(DeltaError::Shape { .. })), "{created:?}");
        }
        let mut target = vec![0u64; 3];
        assert!(matches!(apply(&[], &mut bytes(&mut target)[4..20]), Err(DeltaError::Shape { .. })));
        assert_eq!(apply(&[], bytes(&mut target)), Ok(()));
        assert_eq!(apply(&[0; 19], bytes(&mut target)), Err(DeltaError::RecordSize(19)));
    }

    #[test]
    fn a_wrong_offset_ends_it_there_and_nothing_is_written_outside() {
        let record = |offsets: &[u16]| -> Vec<u8> {
            offsets.iter().flat_map(|offset| offset.to_le_bytes().into_iter().chain([7; 8])).collect()
        };
        let cases: [(&[u16], DeltaError, [bool; 3]); 4] = [
            (&[0, 0], DeltaError::NotAscending { applied: 10, previous: 0, offset: 0 }, [true, false, false]),
            (&[2, 1], DeltaError::NotAscending { applied: 10, previous: 16, offset: 8 }, [false, false, true]),
            (&[3], DeltaError::OutOfBounds { applied: 0, offset: 24, len: 24 }, [false; 3]),
            (&[1, 0xffff], DeltaError::OutOfBounds { applied: 10, offset: 0x7fff8, len: 24 }, [false, true, false]),
        ];
        for (offsets, error, changed) in cases {
            let mut around = [0u64; 5];
            assert_eq!(apply(&record(offsets), &mut bytes(&mut around)[8..32]), Err(error));
            let expected = changed.map(|changed| if changed { u64::from_ne_bytes([7; 8]) } else { 0 });
            assert_eq!((around[0], &around[1..4], around[4]), (0, &expected[..], 0));
        }
    }

    #[test]
    fn while_both_sources_are_written_a_record_holds_whole_words_and_those_that_differ() {
        const WORDS: usize = 4096;
        let sources: [Vec<AtomicU64>; 2] = std::array::from_fn(|_| (0..WORDS).map(|_| AtomicU64::new(0)).collect());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    // A value that was loaded in two pieces from two writes would not have this form.
                    let value = (number & 0xffff_ffff) * 0x1_0000_0001;
                    let word = (number as usize).wrapping_mul(521) % WORDS;
                    sources[number as usize % 2][word].store(value, Ordering::Relaxed);
                }
            });
            let mut record = vec![0; DELTA_SIZE * WORDS];
            for _ in 0..300 {
                for &implementation in Implementation::available() {
                    let [first, second] = &sources;
                    let (first, second) = (first.as_ptr().cast(), second.as_ptr().cast());
                    // SAFETY: both are that long and outlive the call.
                    let created = unsafe { implementation.create_delta_raw(first, second, 8 * WORDS, &mut record) };
                    let length = match created.unwrap() {
                        Created::Same => 0,
                        Created::Complete { record } => record,
                        overflow @ Created::Overflow { .. } => panic!("{overflow:?}"),
                    };
                    for delta in record[..length].as_chunks::<DELTA_SIZE>().0 {
                        let value = u64::from_ne_bytes(delta[2..].try_into().unwrap());
                        assert_eq!(value >> 32, value & 0xffff_ffff);
                    }
                    assert_eq!(apply(&record[..length], bytes(&mut vec![0; WORDS])), Ok(()));
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    proptest! {
        #[test]
        fn a_record_makes_the_first_into_the_second_and_says_how_far_it_goes(
            first in proptest::collection::vec(0u64..3, 0..600),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0u64..3), 0..40),
            room in 0usize..500,
        ) {
            let mut second = first.clone();
            for (place, value) in &changes {
                if !second.is_empty() {
                    let at = place.index(second.len());
                    second[at] = *value;
                }
            }
            let differing: Vec<usize> = (0..first.len()).filter(|i| first[*i] != second[*i]).collect();
            let fitting = room / DELTA_SIZE;
            for &implementation in Implementation::available() {
                let mut record = vec![0xaa; room];
                let created = create(implementation, &first, &second, &mut record).unwrap();
                let (length, covered) = match created {
                    Created::Same => (0, first.len()),
                    Created::Complete { record } => (record, first.len()),
                    Created::Overflow { record, compared } => (record, compared / 8),
                };
                let expected = match differing.len() {
                    0 => Created::Same,
                    n if n <= fitting => Created::Complete { record: DELTA_SIZE * n },
                    _ => Created::Overflow { record: DELTA_SIZE * fitting, compared: 8 * differing[fitting] },
                };
                prop_assert_eq!(created, expected, "{:?}", implementation);
                prop_assert!(record[length..].iter().all(|byte| *byte == 0xaa));
                let mut target = first.clone();
                prop_assert_eq!(apply(&record[..length], bytes(&mut target)), Ok(()));
                prop_assert_eq!(&target[..covered], &second[..covered]);
                prop_assert_eq!(&target[covered..], &first[covered..]);
            }
        }

        #[test]
        fn any_bytes_as_a_record_change_nothing_outside_and_what_the_format_says_inside(
            head: u16,
            deltas in proptest::collection::vec((prop_oneof![0u16..20, 500u16..530, any::<u16>()], any::<[u8; 8]>()), 0..30),
            sorted: bool,
            extra in prop_oneof![9 => Just(0usize), 1 => 1usize..10],
        ) {
            let mut deltas = deltas;
            if sorted {
                deltas.sort_unstable();
            }
            let mut bytes = head.to_le_bytes().to_vec();
            deltas.iter().for_each(|(offset, word)| {
                bytes.extend_from_slice(&offset.to_le_bytes());
                bytes.extend_from_slice(word);
            });
            bytes.extend(std::iter::repeat_n(0, extra));
            fuzz_apply(&bytes);
        }
    }
}
