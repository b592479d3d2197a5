//! Complete migrations that send deltas of pages, of a guest that writes single words all the time.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Memory, Running, Workload, both_sides, faults_can_be_watched, log_of, monitors};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::report::Report;
use sterna_engine::source::{NotConverging, Source};
use sterna_engine::transport::Security;

const PAGES: [usize; 2] = [1500, 700];
/// So few pages that they fit the downtime in any case.
const WRITES: Workload = Workload { writers: 2, span: 60, seed: 3, burst: 40 };

/// Fills memory with content that differs from page to page, so that little of it is zero.
fn fill(memory: &Memory) {
    for block in 0..2 {
        for (at, word) in memory.words(block).iter().enumerate() {
            word.store((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Ordering::Relaxed);
        }
    }
}

/// Moves such a guest. The destination's monitor compares memory before it starts the guest.
fn migrate(workload: Workload, settings: impl FnOnce(Source) -> Source) -> Report {
    let (source, destination) = (Memory::new(PAGES[0], PAGES[1]), Memory::new(PAGES[0], PAGES[1]));
    fill(&source);
    let running = Running::default();
    let (mut from, log, mut to) = monitors([&source, &destination], &running, workload);
    // Also if the writers never run meanwhile: writes a word in each of as many pages that were sent before.
    from.last_writes = 120;
    from.start();
    let listening = Destination::new(destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let mut migration = settings(Source::new(source.ram(), log_of(&from, log)).method(MethodChoice::default()));
    let (sent, received) =
        both_sides(listening, &mut to, || migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()));
    let sent = sent.unwrap();
    received.unwrap();
    assert!(to.runs() && !from.runs() && !running.ever_twice());
    if let Some(behind) = to.behind.clone() {
        to.stop();
        assert_eq!((behind.wrong.load(Ordering::Relaxed), behind.differing_pages(&destination)), (0, 0));
    }
    sent
}

/// Limits the bandwidth so that there are rounds in which the guest writes pages that were sent before.
fn slow(source: Source) -> Source {
    source.bandwidth(Some(16 << 20)).downtime(Duration::from_millis(250))
}

#[test]
fn pages_that_changed_a_little_are_sent_as_deltas_by_every_method() {
    within_a_minute(|| {
        let mut deltas = 0;
        for (method, channels, checksums) in
            [("none", 1, true), ("none", 3, false), ("lz4", 2, true), ("zstd", 4, true)]
        {
            let choice = method.parse().unwrap();
            let sent = migrate(WRITES, |source| {
                let source = source.method(choice).channels(channels).checksums(checksums);
                slow(source).delta_cache(64 << 20)
            });
            println!("{method}: {} of {} as deltas, {} the same", sent.delta_pages, sent.normal_pages, sent.same_pages);
            deltas += sent.delta_pages;
        }
        // The number of rounds of one migration depends on timing.
        assert!(deltas > 0);
    });
}

#[test]
fn a_cache_for_a_part_of_memory_or_for_none_of_it_only_saves_less() {
    within_a_minute(|| {
        let parts = (0..4).map(|_| migrate(WRITES, |source| slow(source).delta_cache(512 << 10)));
        assert!(parts.map(|sent| sent.delta_pages + sent.same_pages).sum::<u64>() > 0);
        // All of the memory, and more than any machine has.
        migrate(WRITES, |source| source.delta_cache(u64::MAX));
        for bytes in [100, 0] {
            let sent = migrate(WRITES, |source| source.delta_cache(bytes));
            assert_eq!(sent.delta_pages + sent.same_pages, 0, "{bytes}: {sent:?}");
        }
    });
}

#[test]
fn post_copy_continues_without_deltas() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let busy = Workload { writers: 2, span: 1500, seed: 7, burst: 0 };
        let sent = migrate(busy, |source| {
            let source = source.bandwidth(Some(40 << 20)).downtime(Duration::from_millis(10)).delta_cache(64 << 20);
            source.when_not_converging(NotConverging::PostCopyAfter(3))
        });
        assert!(sent.post_copy.is_some(), "{sent:?}");
    });
}
