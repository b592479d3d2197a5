//! Every operation, over and over, several batches under way, and what has to come out.

use std::sync::Arc;
use std::time::Duration;

use sterna_offload::{Channel, Delta, Offload, Operation, Outcome, Region};

use sterna_test_kit::Random;

use super::{Memory, PAGE, crc32c};

/// Pages of which half are zero, and the others have one byte that is not.
pub(crate) fn filled(pages: usize, seed: u64) -> (Arc<Memory>, Arc<Region>, Vec<u8>) {
    let memory = Memory::new(pages);
    let mut random = Random::new(seed);
    for page in 0..pages {
        if random.once_in(2) {
            memory.write(page * PAGE + random.below(PAGE as u64) as usize, &[1 + random.below(255) as u8]);
        }
    }
    let region = memory.region();
    let content = memory.read(0, pages * PAGE);
    (memory, region, content)
}

/// Does all operations `rounds` times, and checks what comes out.
pub(crate) fn all_operations(offload: &Offload, rounds: usize) {
    const PAGES: usize = 64;
    let (_source, region, content) = filled(PAGES, 7);
    let (written, target, _) = filled(PAGES, 8);
    let page = |page: usize| &content[page * PAGE..(page + 1) * PAGE];
    let of = |at: usize| region.range(at * PAGE, PAGE).unwrap();
    let channel: Channel = offload.channel();
    for _ in 0..rounds {
        let mut tickets = Vec::new();
        for operation in
            [Operation::ZeroMap, Operation::Checksum, Operation::Copy, Operation::CopyChecksum, Operation::Deflate]
        {
            let mut batch = channel.batch(operation);
            for at in 0..PAGES {
                batch.push(&of(at)).unwrap();
            }
            tickets.push(channel.submit(batch).unwrap());
        }
        let mut compare = channel.batch(Operation::Compare);
        let mut delta = channel.batch(Operation::CreateDelta);
        let mut place = channel.batch(Operation::Place);
        for at in 0..PAGES - 1 {
            compare.push_pair(&of(at), &of(at + 1)).unwrap();
            delta.push_pair(&of(at), &of(at + 1)).unwrap();
            place.push_input(PAGE, &target.range(at * PAGE, PAGE).unwrap()).unwrap().copy_from_slice(page(at));
        }
        tickets.extend([compare, delta, place].map(|batch| channel.submit(batch).unwrap()));
        let mut left = tickets.len();
        while left > 0 {
            let done = channel.wait(offload.deadline(Duration::from_secs(300))).expect("all of it is delivered");
            assert!(tickets.iter().any(|ticket| ticket.id() == done.ticket));
            assert_eq!(done.outcome, Outcome::Done);
            left -= 1;
            let batch = done.batch;
            for item in 0..batch.len() {
                match batch.operation() {
                    Operation::ZeroMap => assert_eq!(batch.is_zero(item), page(item).iter().all(|byte| *byte == 0)),
                    Operation::Checksum => assert_eq!(batch.checksum(item), crc32c(page(item))),
                    Operation::Copy => assert_eq!(batch.copy(item), page(item)),
                    Operation::CopyChecksum => {
                        assert_eq!((batch.copy(item), batch.checksum(item)), (page(item), crc32c(page(item))));
                    }
                    Operation::Compare => {
                        let differ = page(item).iter().zip(page(item + 1)).position(|(a, b)| a != b);
                        assert_eq!(batch.difference(item), differ);
                    }
                    Operation::Place => assert_eq!(written.read(item * PAGE, PAGE), page(item)),
                    Operation::Deflate => {
                        let stream = batch.deflated(item).expect("a page with one byte in it is short").to_vec();
                        let to = target.range((PAGES - 1) * PAGE, PAGE).unwrap();
                        let back = offload
                            .call(Operation::Inflate, |batch| {
                                batch.push_input(stream.len(), &to)?.copy_from_slice(&stream);
                                Ok(())
                            })
                            .unwrap();
                        assert_eq!(back.placed(0), Some(PAGE));
                        assert_eq!(written.read((PAGES - 1) * PAGE, PAGE), page(item));
                    }
                    _ => {
                        let Delta::Record(record) = batch.delta(item) else {
                            assert_eq!(page(item), page(item + 1));
                            continue;
                        };
                        let mut after = page(item).to_vec();
                        for entry in record.chunks(10) {
                            let at = usize::from(u16::from_le_bytes([entry[0], entry[1]])) * 8;
                            after[at..at + 8].copy_from_slice(&entry[2..]);
                        }
                        assert_eq!(after, page(item + 1));
                    }
                }
            }
        }
    }
}
