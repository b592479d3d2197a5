//! The rules of each operation, and a device in a few lines that stops anywhere: whatever it stops at, doing the rest gives what
//! doing all at once gives.

#[cfg(not(miri))]
use proptest::prelude::*;

use super::*;
use crate::record::Fault;

fn fault(done: u32, result: u8, detail: u64) -> Completion {
    let fault = Some(Fault { address: 0, write: false, info: 0 });
    Completion { status: Status::PageFault, result, bytes_completed: done, fault, detail }
}

fn ended(status: Status, done: u32, result: u8) -> Completion {
    Completion { status, result, bytes_completed: done, fault: None, detail: 0 }
}

fn part(rest: Rest) -> (Descriptor, u32) {
    match rest {
        Rest::Part { descriptor, skipped } => (descriptor, skipped),
        other => panic!("{other:?}"),
    }
}

#[test]
fn memmove_goes_on_behind_or_keeps_its_start() {
    let all = Descriptor::memmove(0x1000, 0x8000, 0x3000).with_record(0x40);
    assert_eq!(
        part(rest(&all, &fault(0x1100, 0, 0), false)),
        (Descriptor::memmove(0x2100, 0x9100, 0x1f00).with_record(0x40), 0x1100)
    );
    // Result 1: it ran backwards, so the first bytes are what is left.
    assert_eq!(
        part(rest(&all, &fault(0x1100, 1, 0), false)),
        (Descriptor::memmove(0x1000, 0x8000, 0x1f00).with_record(0x40), 0)
    );
    assert_eq!(part(rest(&all, &fault(0, 0, 0), false)), (all, 0));
}

#[test]
fn crc_takes_the_partial_value_as_seed_but_only_if_something_was_done() {
    let all = Descriptor::crc(0x1000, 100, 7).with_record(0x40);
    let next = Descriptor::crc(0x1000 + 60, 40, 0xabcd_ef01).with_record(0x40);
    assert_eq!(part(rest(&all, &fault(60, 0, 0xabcd_ef01), false)), (next, 60));
    assert_eq!(part(rest(&all, &fault(0, 0, 0xabcd_ef01), false)), (all, 0));
    let copy = Descriptor::copy_crc(0x1000, 0x2000, 100, 7);
    assert_eq!(part(rest(&copy, &fault(60, 0, 5), false)), (Descriptor::copy_crc(0x1000 + 60, 0x2000 + 60, 40, 5), 60));
}

#[test]
fn create_delta_goes_on_in_both_sources_and_in_the_record() {
    let all = Descriptor::create_delta(0x1_0000, 0x2_0000, 4096, 0x3_0000, 400).expecting(0b11);
    let next = Descriptor::create_delta(0x1_0000 + 1024, 0x2_0000 + 1024, 3072, 0x3_0000 + 50, 350).expecting(0b11);
    assert_eq!(part(rest(&all, &fault(1024, 1, 50), false)), (next, 1024));
    assert_eq!(rest(&all, &fault(1024, 1, 330), false), Rest::NoRoom { skipped: 1024 });
    assert_eq!(rest(&all, &fault(1024, 1, 320), false), part_of(&all, 1024, 320, 80));
    // More record than was compared, more than there is room for, or half a delta: not believed.
    assert_eq!(rest(&all, &fault(8, 1, 20), false), Rest::Contradiction);
    assert_eq!(rest(&all, &fault(4088, 1, 410), false), Rest::Contradiction);
    assert_eq!(rest(&all, &fault(12, 1, 10), false), Rest::Contradiction);
    assert_eq!(rest(&all, &fault(64, 1, 15), false), Rest::Contradiction, "half an entry");
}

fn part_of(all: &Descriptor, done: u32, written: u32, room: u32) -> Rest {
    let record = u64::from_le_bytes(all.get(40)) + u64::from(written);
    let (first, second) = (all.source() + u64::from(done), all.destination() + u64::from(done));
    let next = Descriptor::create_delta(first, second, all.bytes() - done, record, room).expecting(0b11);
    Rest::Part { descriptor: next, skipped: done }
}

#[test]
fn apply_delta_keeps_destination_and_size() {
    let all = Descriptor::apply_delta(0x1000, 200, 0x8000, 4096);
    let next = Descriptor::apply_delta(0x1000 + 70, 130, 0x8000, 4096);
    assert_eq!(part(rest(&all, &fault(70, 0, 0), false)), (next, 0));
    assert_eq!(rest(&all, &fault(200, 0, 0), false), Rest::Nothing);
    assert_eq!(rest(&all, &fault(201, 0, 0), false), Rest::Contradiction);
    assert_eq!(rest(&all, &fault(75, 0, 0), false), Rest::Contradiction, "half an entry");
    assert_eq!(rest(&all, &ended(Status::DeltaOffsetOrder, 20, 0), false), Rest::Failed(Status::DeltaOffsetOrder));
}

#[test]
fn a_batch_list_goes_on_behind_what_was_processed() {
    let all = Descriptor::batch(0x1000, 10).with_record(0x40);
    let list_fault = |done, result| ended(Status::BatchListFault, done, result);
    let next = Descriptor::batch(0x1000 + 4 * 64, 6).with_record(0x40);
    assert_eq!(part(rest(&all, &list_fault(4, 0), true)), (next, 4));
    assert_eq!(part(rest(&all, &list_fault(4, 1), true)), (next.after_failure(), 4));
    assert_eq!(part(rest(&all, &list_fault(4, 1), false)), (next, 4), "the flag is reserved without the capability");
    assert_eq!(rest(&all, &list_fault(9, 0), true), Rest::One { descriptor: 0x1000 + 9 * 64 });
    assert_eq!(rest(&all, &list_fault(10, 0), true), Rest::Members { processed: 10 });
    assert_eq!(rest(&all, &list_fault(11, 0), true), Rest::Contradiction);
    assert_eq!(rest(&all, &ended(Status::BatchMemberFailed, 3, 1), true), Rest::Members { processed: 3 });
    assert_eq!(rest(&all, &ended(Status::BatchMemberFailed, 11, 1), true), Rest::Contradiction);
    assert_eq!(rest(&all, &ended(Status::Success, 10, 0), true), Rest::Nothing);
}

#[test]
fn done_is_done_and_failed_is_failed() {
    let compare = Descriptor::compare(0, 0, 64).expecting(0);
    assert_eq!(rest(&compare, &ended(Status::Success, 0, 0), false), Rest::Nothing);
    assert_eq!(rest(&compare, &ended(Status::FalsePredicate, 8, 1), false), Rest::Nothing);
    assert_eq!(rest(&compare, &ended(Status::BadFlags, 0, 0), false), Rest::Failed(Status::BadFlags));
    assert_eq!(rest(&compare, &fault(65, 0, 0), false), Rest::Contradiction);
    assert_eq!(rest(&Descriptor::noop(), &fault(0, 0, 0), false), Rest::Failed(Status::PageFault));
    let iaa = Descriptor::from_bytes([0x43; 64]);
    assert_eq!(rest(&iaa, &fault(1, 0, 0), false), Rest::Failed(Status::PageFault));
    let mut requested = fault(32, 0, 0);
    requested.status = Status::PageRequestFailed;
    assert_eq!(part(rest(&compare, &requested, false)).1, 32);
}

/// First offset at which `memory[source..][..bytes]` is not the repeated pattern.
fn first_difference(memory: &[u8], source: u64, bytes: u32, pattern: u64) -> Option<u32> {
    let data = &memory[source as usize..][..bytes as usize];
    let pattern = pattern.to_le_bytes();
    data.iter().enumerate().position(|(index, byte)| *byte != pattern[index % 8]).map(|at| at as u32)
}

#[cfg(not(miri))]
proptest! {
    #[test]
    fn compare_pattern_after_any_fault_finds_the_same_difference(
        pattern: u64,
        bytes in 1..300_u32,
        wrong in prop::option::of(0..300_usize),
        cuts in prop::collection::vec(0..300_u32, 0..6),
    ) {
        let mut memory: Vec<u8> = (0..bytes as usize).map(|index| pattern.to_le_bytes()[index % 8]).collect();
        if let Some(at) = wrong.filter(|at| *at < memory.len()) {
            memory[at] ^= 0x40;
        }
        let whole = first_difference(&memory, 0, bytes, pattern);
        let (mut descriptor, mut base) = (Descriptor::compare_pattern(0, pattern, bytes), 0);
        for cut in cuts {
            // Faults before the difference: a difference found wins over a fault.
            let limit = first_difference(&memory, descriptor.source(), descriptor.bytes(), descriptor.destination());
            let done = cut.min(limit.unwrap_or(descriptor.bytes() - 1)).min(descriptor.bytes() - 1);
            let (next, skipped) = part(rest(&descriptor, &fault(done, 0, 0), false));
            (descriptor, base) = (next, base + skipped);
        }
        let found = first_difference(&memory, descriptor.source(), descriptor.bytes(), descriptor.destination());
        prop_assert_eq!(found.map(|at| at + base), whole);
    }

    #[test]
    fn a_move_in_any_parts_and_directions_moves_everything(
        length in 1..200_usize,
        shift in 0..100_usize,
        cuts in prop::collection::vec((0..200_u32, any::<bool>()), 0..8),
    ) {
        let (source, destination) = (100_u64, 400 + shift as u64);
        let mut memory: Vec<u8> = (0..1000).map(|index| (index * 7 % 251) as u8).collect();
        let expected = memory[100..100 + length].to_vec();
        let mut copy = |descriptor: &Descriptor, done: u32, backwards: bool| {
            let from = if backwards { descriptor.bytes() - done } else { 0 } as usize;
            let source = descriptor.source() as usize + from;
            memory.copy_within(source..source + done as usize, descriptor.destination() as usize + from);
        };
        let mut descriptor = Descriptor::memmove(source, destination, length as u32);
        for (cut, backwards) in cuts {
            let done = cut.min(descriptor.bytes() - 1);
            copy(&descriptor, done, backwards);
            descriptor = part(rest(&descriptor, &fault(done, backwards.into(), 0), false)).0;
        }
        copy(&descriptor, descriptor.bytes(), false);
        let at = destination as usize;
        prop_assert_eq!(&memory[at..at + length], &expected[..]);
    }

    #[test]
    fn no_completion_makes_a_rest_that_leaves_the_buffers(
        status in 0..0x40_u8, result: u8, done: u32, detail: u64, kind in 0..10_usize, continuation: bool,
    ) {
        let all = [
            Descriptor::noop(),
            Descriptor::batch(1 << 20, 100),
            Descriptor::drain(),
            Descriptor::memmove(1 << 20, 2 << 20, 4096),
            Descriptor::compare(1 << 20, 2 << 20, 4096),
            Descriptor::compare_pattern(1 << 20, 0, 4096),
            Descriptor::create_delta(1 << 20, 2 << 20, 4096, 3 << 20, 500),
            Descriptor::apply_delta(1 << 20, 500, 2 << 20, 4096),
            Descriptor::crc(1 << 20, 4096, 0),
            Descriptor::copy_crc(1 << 20, 2 << 20, 4096, 0),
        ][kind];
        let completion =
            Completion { status: Status::from_code(status), result, bytes_completed: done, fault: None, detail };
        if let Rest::Part { descriptor, skipped } = rest(&all, &completion, continuation) {
            let unit = if kind == 1 { 64 } else { 1 };
            let size = |of: &Descriptor| u64::from(if kind == 7 { delta_size(of) } else { of.bytes() }) * unit;
            prop_assert!(size(&descriptor) > 0);
            prop_assert!(descriptor.source() >= all.source());
            prop_assert!(descriptor.source() + size(&descriptor) <= all.source() + size(&all));
            prop_assert!(u64::from(skipped) * unit <= size(&all));
            if kind == 6 {
                let end = |of: &Descriptor| u64::from_le_bytes(of.get(40)) + u64::from(u32::from_le_bytes(of.get(48)));
                prop_assert_eq!(end(&descriptor), end(&all));
            }
        }
    }
}
