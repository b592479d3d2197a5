//! Deltas against a destination that takes them, and that refuses some.

use std::collections::HashMap;
use std::ops::Range;

use proptest::prelude::*;
use sterna_memory::delta::apply;
use sterna_wire::delta::PageDeltas;

use super::*;

const PACKET_PAGES: usize = 16;

/// A guest's page as it is now: what it began with and how it was changed.
fn content(memory: &HashMap<u64, Vec<u64>>, page: u64) -> Vec<u8> {
    memory[&page].iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// What is done to a page between two rounds.
#[derive(Clone, Copy, Debug)]
enum Change {
    Nothing,
    Word(usize, u64),
    All(u64),
    Zero,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        Just(Change::Nothing),
        (0usize..512, any::<u64>()).prop_map(|(at, word)| Change::Word(at, word)),
        any::<u64>().prop_map(Change::All),
        Just(Change::Zero),
    ]
}

/// Mostly such that deltas pay.
fn costs() -> impl Strategy<Value = Whole> {
    let price = prop_oneof![4 => Just(BYTES_DECIDE), 1 => Just(0.1), 1 => Just(0.0)];
    (price, 10.0..4096.0, 0.0..1000.0).prop_map(|(price, bytes, nanos)| Whole { nanos, bytes, price })
}

fn changed(page: &mut [u64], change: Change) {
    match change {
        Change::Nothing => {}
        Change::Word(at, word) => page[at] = word,
        Change::All(seed) => {
            page.iter_mut().enumerate().for_each(|(at, word)| *word = seed.wrapping_add(at as u64).wrapping_mul(3) | 1);
        }
        Change::Zero => page.fill(0),
    }
}

proptest! {
    /// Against a destination that places packets in order, answers late, and refuses some: whenever everything has been sent again
    /// and acknowledged it has what the source had.
    #[test]
    fn the_destination_has_what_was_sent_however_late_it_answers_and_whatever_it_refuses(
        rounds in prop::collection::vec(
            (prop::collection::vec((0u64..24, change()), 1..PACKET_PAGES), 0u64..4, prop::option::weighted(0.2, 0u64..3), costs()),
            1..40,
        ),
        places in 0usize..40,
    ) {
        // Refused pages, each with the packet that had it.
        let mut refused_pages: Vec<(u64, u64)> = Vec::new();
        let mut deltas = Deltas::new(places * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE);
        let mut memory: HashMap<u64, Vec<u64>> = (0..24).map(|page| (page, vec![page + 1; 512])).collect();
        let mut there: HashMap<u64, Vec<u8>> = (0..24).map(|page| (page, vec![0; PAGE_SIZE])).collect();
        let (mut sequence, mut acknowledged, mut made) = (0u64, 0u64, 0);
        let mut last = HashMap::new();
        for (changes, late, refuse, costs) in rounds {
            let mut pages: Vec<u64> = changes.iter().map(|(page, _)| *page).collect();
            changes.iter().for_each(|(page, change)| changed(memory.get_mut(page).unwrap(), *change));
            pages.sort_unstable();
            pages.dedup();
            // Refused pages are retransmitted whole, and the cache forgets them. Of later packets no refusal has been read yet.
            refused_pages.retain(|(packet, page)| {
                if *packet <= acknowledged {
                    sequence += 1;
                    deltas.forget(0, &Run { kind: RunKind::Normal, first: *page, count: 1 });
                    there.insert(*page, content(&memory, *page));
                    last.insert(*page, sequence);
                }
                *packet > acknowledged
            });
            let is_zero = |page: &u64| memory[page].iter().all(|word| *word == 0);
            let runs: Vec<Run> = pages.iter().map(|page| Run { kind: if is_zero(page) { RunKind::Zero } else { RunKind::Normal }, first: *page, count: 1 }).collect();
            let bytes: Vec<u8> = pages.iter().filter(|page| !is_zero(page)).flat_map(|page| content(&memory, *page)).collect();
            let split = deltas.split(0, &runs, NormalPages::of(&bytes), acknowledged, costs);
            let (delta_sequence, whole_sequence) = (sequence + 1, sequence + 1 + u64::from(split.deltas > 0));
            deltas.sent(0, &bytes, delta_sequence, whole_sequence);
            made += split.deltas;
            let refused = refuse.map(|which| sequence + 1 + which);
            let (delta_runs, records) = deltas.deltas();
            let touched: Vec<u64> = delta_runs.iter().flat_map(|run| run.first..run.end()).collect();
            prop_assert_eq!(touched.len() as u64, split.deltas);
            let mut damaged = refused == Some(delta_sequence);
            for (page, delta) in touched.iter().zip(PageDeltas::new(records, split.deltas)) {
                let (delta, page_there) = (delta.unwrap(), there.get_mut(page).unwrap());
                let mut result = page_there.clone();
                apply(delta.record, &mut result).unwrap();
                // A delta is only made against what is there.
                prop_assert_eq!(crc32c(&result), delta.checksum);
                if !damaged {
                    *page_there = result;
                }
                last.insert(*page, delta_sequence);
            }
            if damaged && split.deltas > 0 {
                refused_pages.extend(touched.iter().map(|page| (delta_sequence, *page)));
            }
            let (rest_runs, mut rest) = deltas.rest(&bytes);
            damaged = refused == Some(whole_sequence);
            for run in rest_runs {
                for page in run.first..run.end() {
                    last.insert(page, whole_sequence);
                    let page_there = there.get_mut(&page).unwrap();
                    if run.kind == RunKind::Zero {
                        page_there.fill(0);
                        continue;
                    }
                    let (now, later) = rest.split_at(PAGE_SIZE);
                    rest = later;
                    if damaged {
                        page_there.fill(0xdd);
                        refused_pages.push((whole_sequence, page));
                    } else {
                        page_there.copy_from_slice(now);
                    }
                }
            }
            sequence += u64::from(split.deltas > 0) + u64::from(!rest_runs.is_empty());
            acknowledged = acknowledged.max(sequence.saturating_sub(late));
        }
        // The guest is paused, and everything is acknowledged.
        refused_pages.into_iter().for_each(|(_, page)| drop(there.insert(page, content(&memory, page))));
        for page in 0..24 {
            prop_assert!(!last.contains_key(&page) || there[&page] == content(&memory, page), "page {page}");
        }
        prop_assert!(places > 0 || made == 0);
    }
}

/// A packet on its way to a destination that refuses some.
struct Packet {
    number: u64,
    runs: Vec<Run>,
    deltas: bool,
    content: Vec<u8>,
}

/// A destination that takes packets in order and refuses those that `faults` says, by their numbers.
struct Peer {
    there: HashMap<u64, Vec<u8>>,
    faults: Vec<bool>,
    packets: std::collections::VecDeque<Packet>,
    refused: Vec<(u64, Range<u64>)>,
    acknowledged: u64,
}

impl Peer {
    /// Takes all but the last `late` packets.
    fn take(&mut self, late: usize) {
        while self.packets.len() > late {
            let Packet { number, runs, deltas, content } = self.packets.pop_front().unwrap();
            assert_eq!(number, self.acknowledged + 1);
            self.acknowledged = number;
            let fault = self.faults.get(number as usize).copied().unwrap_or(false);
            let mut records = PageDeltas::new(&content, content.len() as u64);
            let mut pages = content.chunks_exact(PAGE_SIZE);
            for run in &runs {
                if fault && run.kind == RunKind::Normal {
                    self.refused.push((number, run.first..run.end()));
                }
                for page in run.first..run.end() {
                    let there = self.there.get_mut(&page).unwrap();
                    if run.kind == RunKind::Zero {
                        there.fill(0);
                    } else if deltas {
                        let (delta, mut result) = (records.next().unwrap().unwrap(), there.clone());
                        apply(delta.record, &mut result).unwrap();
                        assert_eq!(crc32c(&result), delta.checksum, "page {page} is not what the source thinks");
                        if !fault {
                            *there = result;
                        }
                    } else if fault {
                        there.fill(0xdd);
                    } else {
                        there.copy_from_slice(pages.next().unwrap());
                    }
                }
            }
        }
    }

    /// Has the refused pages retransmitted. Returns whether there were any.
    fn retransmit(&mut self, deltas: &mut Deltas, last: &mut u64) -> bool {
        let refused = std::mem::take(&mut self.refused);
        for (number, pages) in &refused {
            deltas.collect_refused(0, pages.clone(), *number).expect("it is known until it is acknowledged");
            let (runs, content) = deltas.rest(&[]);
            if !runs.is_empty() {
                *last += 1;
                let (runs, content) = (runs.to_vec(), content.to_vec());
                self.packets.push_back(Packet { number: *last, runs, deltas: false, content });
                deltas.retransmitted(0, *last);
            }
        }
        !refused.is_empty()
    }
}

proptest! {
    /// Pages that cannot be read again, of regions that rest and in a cache that is too small.
    #[test]
    fn whatever_is_refused_can_be_sent_again_whether_it_is_kept_or_not(
        rounds in prop::collection::vec(
            (prop::collection::btree_map(0u64..48, change(), 1..PACKET_PAGES), 0usize..12, costs()), 1..60,
        ),
        faults in prop::collection::vec(prop::bool::weighted(0.3), 0..120),
        places in 0usize..40,
    ) {
        let mut deltas = Deltas::new(places * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE).keeping_unacknowledged();
        let mut memory: HashMap<u64, Vec<u64>> = (0..48).map(|page| (page, vec![0; 512])).collect();
        let there = (0..48).map(|page| (page, vec![0; PAGE_SIZE])).collect();
        let mut peer = Peer { there, faults, packets: Default::default(), refused: Vec::new(), acknowledged: 0 };
        let mut last = 0;
        for (changes, late, costs) in rounds {
            peer.retransmit(&mut deltas, &mut last);
            changes.iter().for_each(|(page, change)| changed(memory.get_mut(page).unwrap(), *change));
            let is_zero = |page: u64| memory[&page].iter().all(|word| *word == 0);
            let kind = |page| if is_zero(page) { RunKind::Zero } else { RunKind::Normal };
            let runs: Vec<Run> = changes.keys().map(|page| Run { kind: kind(*page), first: *page, count: 1 }).collect();
            let pages = changes.keys().filter(|page| !is_zero(**page));
            let bytes: Vec<u8> = pages.flat_map(|page| content(&memory, *page)).collect();
            let split = deltas.split(0, &runs, NormalPages::of(&bytes), peer.acknowledged, costs);
            deltas.sent(0, &bytes, last + 1, last + 1 + u64::from(split.deltas > 0));
            let sent = [(true, deltas.deltas()), (false, deltas.rest(&bytes))];
            for (deltas, (runs, content)) in sent.into_iter().filter(|(_, (runs, _))| !runs.is_empty()) {
                last += 1;
                peer.packets.push_back(Packet { number: last, runs: runs.to_vec(), deltas, content: content.to_vec() });
            }
            peer.take(late);
        }
        loop {
            peer.take(0);
            if !peer.retransmit(&mut deltas, &mut last) {
                break;
            }
        }
        (0..48).for_each(|page| assert!(peer.there[&page] == content(&memory, page), "page {page}"));
        deltas.split(0, &[], NormalPages::of(&[]), last, deltas.whole(None));
        prop_assert_eq!(deltas.underway.unwrap().bytes(), 0);
    }
}

#[test]
fn what_was_not_in_the_refused_packet_is_not_sent_again() {
    let mut deltas = Deltas::new(0, PACKET_PAGES * PAGE_SIZE).keeping_unacknowledged();
    whole(&mut deltas, 3, &[7; PAGE_SIZE], 1);
    whole(&mut deltas, 3, &[8; PAGE_SIZE], 2);
    assert_eq!(deltas.collect_refused(0, 3..4, 1), Ok(()));
    assert!(deltas.rest(&[]).0.is_empty(), "what is newer is on its way");
    assert_eq!(deltas.collect_refused(0, 3..5, 2), Err(4));
    assert_eq!(deltas.collect_refused(1, 3..4, 2), Err(3));
    assert_eq!(deltas.collect_refused(0, 3..4, 3), Err(3));
    assert_eq!(deltas.collect_refused(0, 3..4, 2), Ok(()));
    assert_eq!(deltas.rest(&[]).1, [8; PAGE_SIZE]);
}

fn whole(deltas: &mut Deltas, page: u64, bytes: &[u8], sequence: u64) -> Split {
    let costs = deltas.whole(None);
    let split = deltas.split(
        0,
        &[Run { kind: RunKind::Normal, first: page, count: 1 }],
        NormalPages::of(bytes),
        sequence - 1,
        costs,
    );
    deltas.sent(0, bytes, sequence, sequence);
    split
}

#[test]
fn a_word_that_changed_goes_as_a_delta_and_what_is_the_same_does_not_go() {
    let mut deltas = Deltas::new(64 * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE);
    let mut page = vec![7; PAGE_SIZE];
    assert_eq!(whole(&mut deltas, 3, &page, 1), Split { whole: 1, ..Split::default() });
    page[100] = 8;
    assert_eq!(whole(&mut deltas, 3, &page, 2), Split { deltas: 1, ..Split::default() });
    assert_eq!(deltas.deltas().1.len(), DELTA_HEADER_LENGTH + 10);
    assert_eq!(whole(&mut deltas, 3, &page, 3), Split { same: 1, ..Split::default() });
    // All of it: that does not pay. Then against that.
    page.fill(9);
    assert_eq!(whole(&mut deltas, 3, &page, 4), Split { whole: 1, ..Split::default() });
    page[0] = 1;
    assert_eq!(whole(&mut deltas, 3, &page, 5), Split { deltas: 1, ..Split::default() });
}

#[test]
fn where_pages_shrink_to_less_than_their_deltas_they_go_whole() {
    let mut deltas = Deltas::new(64 * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE);
    let mut page = vec![7; PAGE_SIZE];
    (0..200).for_each(|_| deltas.went_whole(128, 128 * 50));
    whole(&mut deltas, 3, &page, 1);
    // Three words are 38 bytes, five are 58.
    (0..3).for_each(|word| page[word * 800] += 1);
    assert_eq!(whole(&mut deltas, 3, &page, 2).deltas, 1);
    (0..5).for_each(|word| page[word * 800] += 1);
    assert_eq!(whole(&mut deltas, 3, &page, 3).whole, 1);
}

#[test]
fn a_place_that_is_given_away_within_a_batch_is_the_newcomers() {
    // One set: the last of the eight newcomers takes the place of the first page that is kept, which comes after it.
    let mut deltas = Deltas::new(8 * PAGE_SIZE, 32 * PAGE_SIZE);
    let of = |pages: Range<u64>| pages.flat_map(|page| [page as u8; PAGE_SIZE]).collect::<Vec<u8>>();
    let run = |first, count| Run { kind: RunKind::Normal, first, count };
    let mut split = |runs: &[Run], bytes: &[u8], sequence| {
        let costs = deltas.whole(None);
        let split = deltas.split(0, runs, NormalPages::of(bytes), sequence - 1, costs);
        deltas.sent(0, bytes, sequence, sequence);
        split.deltas
    };
    assert_eq!(split(&[run(100, 8)], &of(100..108), 1), 0);
    assert_eq!(split(&[run(0, 8), run(100, 1)], &[of(0..8), of(101..102)].concat(), 2), 0);
    let mut seventh = of(7..8);
    seventh[0] = 0;
    assert_eq!(split(&[run(7, 1)], &seventh, 3), 1);
}

/// What a table has room for, most of it taken by zero pages that lie apart.
#[test]
fn pages_that_are_taken_out_of_a_run_leave_no_more_runs_than_a_table_has_room_for() {
    const PAGES: usize = 64;
    let run = |kind, first, count| Run { kind, first, count };
    let mut page = vec![7; PAGES * PAGE_SIZE];
    for zero in [0, MAX_RUNS - PAGES, MAX_RUNS - 10, MAX_RUNS - 1] {
        let mut deltas = Deltas::new(1024 * PAGE_SIZE, PAGES * PAGE_SIZE);
        let mut send = |runs: &[Run], bytes: &[u8], sequence| {
            let costs = deltas.whole(None);
            let split = deltas.split(0, runs, NormalPages::of(bytes), sequence - 1, costs);
            deltas.sent(0, bytes, sequence, sequence);
            let (rest, _) = deltas.rest(bytes);
            assert!(rest.len() <= MAX_RUNS, "{} runs after {zero}", rest.len());
            let whole = rest.iter().filter(|run| run.kind == RunKind::Normal).map(|run| u64::from(run.count));
            assert_eq!(whole.sum::<u64>(), split.whole);
            split.deltas
        };
        let normal = run(RunKind::Normal, 10_000, PAGES as u32);
        page.fill(7);
        assert_eq!(send(&[normal], &page, 1), 0);
        // Every second page is rewritten.
        for (number, page) in page.chunks_exact_mut(PAGE_SIZE).enumerate() {
            if number % 2 == 0 { page[8] = 1 } else { page.fill(9) }
        }
        let mut runs: Vec<_> = (0..zero as u64).map(|at| run(RunKind::Zero, 2 * at, 1)).collect();
        runs.push(normal);
        // The first page, before which nothing goes whole, and then one for each run that there is room for besides.
        assert_eq!(send(&runs, &page, 2), (MAX_RUNS - zero).min(PAGES / 2) as u64, "after {zero}");
    }
}

/// A guest that writes twice as much memory as the cache holds, round by round in the same order.
#[test]
fn what_does_not_fit_leaves_what_does() {
    let pages = 64;
    let mut deltas = Deltas::new(pages / 2 * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE);
    let mut sequence = 0;
    let mut hits = Vec::new();
    for round in 0..10u8 {
        let mut made = 0;
        for page in 0..pages as u64 {
            let mut bytes = vec![7; PAGE_SIZE];
            bytes[8 * page as usize] = round;
            sequence += 1;
            made += whole(&mut deltas, page, &bytes, sequence).deltas;
        }
        hits.push(made);
    }
    assert!(hits[5..].iter().all(|made| *made >= pages as u64 / 5), "{hits:?}");
}

#[test]
fn a_region_rests_while_it_is_rewritten_but_for_the_few_pages_that_pay_and_comes_back_when_it_ceases() {
    const PAGES: u64 = 32;
    let costs = Whole { nanos: 0.0, bytes: PAGE_SIZE as f64, price: 0.8 };
    let mut deltas = Deltas::new(64 * PAGE_SIZE, PAGES as usize * PAGE_SIZE);
    let mut memory = vec![0u64; PAGES as usize * PAGE_SIZE / 8];
    let mut sequence = 0;
    let mut round = |deltas: &mut Deltas, rewritten: &dyn Fn(u64) -> bool| {
        sequence += 2;
        for (page, words) in memory.chunks_exact_mut(PAGE_SIZE / 8).enumerate() {
            words[sequence as usize % 512] = sequence + 1;
            if rewritten(page as u64) {
                words.iter_mut().for_each(|word| *word = word.wrapping_mul(3).wrapping_add(sequence));
            }
        }
        let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_le_bytes()).collect();
        deltas.history.set_pass(400.0);
        let all = [Run { kind: RunKind::Normal, first: 0, count: PAGES as u32 }];
        let split = deltas.split(0, &all, NormalPages::of(&bytes), sequence - 1, costs);
        assert_eq!(deltas.rest(&bytes).1.len(), split.whole as usize * PAGE_SIZE);
        deltas.sent(0, &bytes, sequence, sequence + 1);
        split
    };
    let counters = |page: u64| page % 16 == 5;
    for _ in 0..3 {
        round(&mut deltas, &|_| false);
    }
    assert_eq!(round(&mut deltas, &|_| false).deltas, PAGES);
    for _ in 0..300 {
        round(&mut deltas, &|page| !counters(page));
    }
    for _ in 0..50 {
        assert_eq!(round(&mut deltas, &|page| !counters(page)), Split { deltas: 2, whole: 30, ..Split::default() });
        assert!(deltas.kept() < 10, "{}", deltas.kept());
    }
    for _ in 0..200 {
        round(&mut deltas, &|_| false);
    }
    assert_eq!(round(&mut deltas, &|_| false).deltas, PAGES);
}
