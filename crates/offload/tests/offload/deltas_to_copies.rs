//! Deltas to what another batch has copied, which stays there while the memory that it was copied from goes on to change.

use std::sync::Arc;

use crate::support::{Clock, Fake, Memory, PAGE, Script};
use sterna_idxd::Kind as DeviceKind;
use sterna_offload::{
    Accelerators, Batch, Channel, Delta, Kind, NEVER, Offload, Operation, PushError, Region, Settings,
};

const PAGES: usize = 8;

fn done(channel: &Channel, batch: Batch) -> Batch {
    channel.submit(batch).unwrap().into_id();
    channel.wait(NEVER).unwrap().batch
}

/// Copies of `pages` one by one.
fn copies(channel: &Channel, region: &Arc<Region>, pages: std::ops::Range<usize>) -> Batch {
    let mut batch = channel.batch(Operation::CopyChecksum);
    for page in pages {
        batch.push(&region.range(page * PAGE, PAGE).unwrap()).unwrap();
    }
    done(channel, batch)
}

/// By the CPU, and by a device.
fn engines() -> Vec<(Arc<Offload>, Kind)> {
    let device = Fake::new("dsa0", DeviceKind::Dsa, &[(16, false)], 1, Script::default());
    let clock = Clock::new();
    let mut settings = Settings::default();
    (settings.threads, settings.time) = (false, clock.clone());
    vec![
        (Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap(), Kind::Cpu),
        (Offload::with_queues(device.open(&clock, 32), &settings).unwrap(), Kind::Dsa),
    ]
}

#[test]
fn they_lead_to_the_copy_whatever_becomes_of_what_was_copied() {
    for (offload, kind) in engines() {
        let (memory, old) = (Memory::new(PAGES), Memory::new(PAGES));
        let (region, kept) = (memory.region(), old.region());
        for page in 0..PAGES {
            // As many words as its number.
            (0..page).for_each(|word| memory.write(page * PAGE + 16 * word, &[1]));
        }
        let channel = offload.channel();
        let copies = copies(&channel, &region, 0..PAGES);
        memory.write(0, &[7; PAGES * PAGE]);
        let mut batch = channel.batch(Operation::CreateDelta);
        for page in 0..PAGES {
            let item = batch.push_delta_to_copy(&kept.range(page * PAGE, PAGE).unwrap(), &copies, page, 2040).unwrap();
            assert_eq!(item, page);
        }
        let deltas = done(&channel, batch);
        for page in 0..PAGES {
            let record: Vec<u8> = (0..page).flat_map(|word| [2 * word as u8, 0, 1, 0, 0, 0, 0, 0, 0, 0]).collect();
            let expected = if page == 0 { Delta::Equal } else { Delta::Record(&record) };
            assert_eq!(deltas.delta(page), expected, "{kind:?}, page {page}");
        }
        let report = offload.report();
        let of = report.operations.iter().find(|one| one.operation == Operation::CreateDelta).unwrap();
        assert_eq!((of.engines[0].engine, of.engines[0].items), (kind, PAGES as u64));
    }
}

#[test]
fn a_record_that_is_of_no_use_is_too_long_from_the_devices_shortest_room_on() {
    for (offload, kind) in engines() {
        let (memory, old) = (Memory::new(1), Memory::new(1));
        let channel = offload.channel();
        let kept = old.region().range(0, PAGE).unwrap();
        for (words, most, fits) in
            [(8, 0, true), (9, 0, false), (9, 89, false), (9, 90, true), (9, 99, true), (10, 99, false)]
        {
            memory.write(0, &[0; PAGE]);
            (0..words).for_each(|word| memory.write(8 * word, &[1]));
            let copies = copies(&channel, &memory.region(), 0..1);
            let mut batch = channel.batch(Operation::CreateDelta);
            batch.push_delta_to_copy(&kept, &copies, 0, most).unwrap();
            let deltas = done(&channel, batch);
            let is = matches!(deltas.delta(0), Delta::Record(record) if record.len() == 10 * words);
            assert_eq!(is, fits, "{kind:?}: {words} words, {most} bytes: {:?}", deltas.delta(0));
            assert_eq!(!is, deltas.delta(0) == Delta::TooLong);
        }
    }
}

#[test]
fn what_has_no_delta_is_refused() {
    let (offload, _) = engines().remove(0);
    let memory = Memory::new(2);
    let (region, channel) = (memory.region(), offload.channel());
    let copies = copies(&channel, &region, 0..1);
    let mut batch = channel.batch(Operation::CreateDelta);
    for (offset, bytes) in [(0, 2 * PAGE), (0, 8), (4, PAGE)] {
        let said = batch.push_delta_to_copy(&region.range(offset, bytes).unwrap(), &copies, 0, 100);
        assert!(matches!(said, Err(PushError::Shape { .. })), "{said:?}");
    }
    let mut other = channel.batch(Operation::Compare);
    let said = other.push_delta_to_copy(&region.range(0, PAGE).unwrap(), &copies, 0, 100);
    assert!(matches!(said, Err(PushError::Kind { .. })), "{said:?}");
}

/// The copies may be given back, and offload may go: what is under way keeps their memory.
#[test]
fn copies_that_are_given_back_too_soon_stay_memory() {
    for (offload, kind) in engines() {
        let (memory, old) = (Memory::new(1), Memory::new(1));
        let channel = offload.channel();
        let copies = copies(&channel, &memory.region(), 0..1);
        let mut batch = channel.batch(Operation::CreateDelta);
        batch.push_delta_to_copy(&old.region().range(0, PAGE).unwrap(), &copies, 0, 100).unwrap();
        drop(copies);
        assert_eq!(done(&channel, batch).delta(0), Delta::Equal, "{kind:?}: nobody has written there");
        let requests = offload.report().requests;
        assert_eq!(requests.quarantined, 0);
    }
}
