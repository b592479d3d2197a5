use std::alloc::{Layout, alloc_zeroed};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Barrier;
use std::sync::atomic::AtomicBool;

use sterna_memory::place::{FileWrite, OwnMemory, ZeroBy};
use sterna_test_kit::Random;
use sterna_wire::delta::PageDelta;

use super::*;

/// Three regions of 512 pages; the last one is not whole.
const PAGES: u64 = 1200;
const BYTES: u64 = PAGES * PAGE_SIZE as u64;
const REGION_PAGES: u64 = REGION / PAGE_SIZE as u64;
/// The index of the block with memory; block 0 has none.
const RAM: u16 = 1;
const AGREED: PageAgreement = PageAgreement { deltas: true, retransmission: true };

fn file() -> Box<dyn Place> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES).unwrap();
    Box::new(FileWrite::new(file, 0, BYTES, ZeroBy::Writing).unwrap())
}

fn own_memory() -> Box<dyn Place> {
    let layout = Layout::from_size_align(BYTES as usize, PAGE_SIZE).unwrap();
    // SAFETY: the size is not zero.
    let start = unsafe { alloc_zeroed(layout) };
    assert!(!start.is_null());
    // SAFETY: the memory is never freed, and no reference to it is made.
    Box::new(unsafe { OwnMemory::new(start, BYTES as usize) })
}

/// Both kinds of memory: written by system calls, several pages at once, and by this process.
const KINDS: [fn() -> Box<dyn Place>; 2] = [file, own_memory];

fn placer_of(place: Box<dyn Place>, on_complete: impl Fn() + Send + Sync + 'static) -> Arc<PagePlacer> {
    let shape = BlockShape { pages: PAGES, page_size: PAGE_SIZE as u32 };
    let block = |name: &str, memory| PlacedBlock { name: name.into(), shape, memory };
    let placer = PagePlacer::new(on_complete);
    assert!(placer.begin(vec![block("rom", None), block("ram", Some((place, ReceivedBitmap::new(PAGES))))]));
    Arc::new(placer)
}

fn placer() -> Arc<PagePlacer> {
    placer_of(file(), || {})
}

fn normal(first: u64, count: u32) -> Run {
    Run { kind: RunKind::Normal, first, count }
}

fn zero(first: u64, count: u32) -> Run {
    Run { kind: RunKind::Zero, first, count }
}

fn page(placer: &PagePlacer, number: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE_SIZE];
    placer.memory(RAM).unwrap().read_pages(&[number * PAGE_SIZE as u64], &mut page).unwrap();
    page
}

/// Returns all of the block's memory.
fn all(placer: &PagePlacer) -> Vec<u8> {
    let offsets: Vec<u64> = (0..PAGES).map(|number| number * PAGE_SIZE as u64).collect();
    let mut bytes = vec![0; BYTES as usize];
    placer.memory(RAM).unwrap().read_pages(&offsets, &mut bytes).unwrap();
    bytes
}

fn is_refused(outcome: Result<(), SinkError>, with: &str) {
    let error = outcome.expect_err("it is refused").to_string();
    assert!(error.contains(with), "{error}");
}

/// The delta that sets the word `word` of a page to `value`; `page` is what the page holds afterwards.
fn delta(page: &[u8], word: u16, value: u64) -> Vec<u8> {
    let mut record = word.to_le_bytes().to_vec();
    record.extend(value.to_ne_bytes());
    let header = PageDelta { checksum: crc32c(page), record: &record }.header();
    [&header[..], &record].concat()
}

fn with_word(mut page: Vec<u8>, word: u16, value: u64) -> Vec<u8> {
    page[usize::from(word) * 8..][..8].copy_from_slice(&value.to_ne_bytes());
    page
}

#[test]
fn no_page_is_accepted_before_the_blocks_are_announced() {
    let placer = Arc::new(PagePlacer::new(|| {}));
    let mut channel = ChannelPlacer::new(&placer, 0, AGREED);
    assert!(placer.shapes().is_err() && placer.memory(RAM).is_none());
    is_refused(channel.place(RAM, &[normal(0, 1)], &[1; PAGE_SIZE]), "before the announcement");
    // Pages that come too early do not keep the placer from closing.
    placer.close(Closed::Totals).unwrap();
}

#[test]
fn nothing_is_written_after_the_totals_or_after_the_beginning_of_post_copy() {
    for (why, text) in [(Closed::Totals, "after the source's totals"), (Closed::PostCopy, "after post-copy was begun")]
    {
        let placer = placer();
        let mut channel = ChannelPlacer::new(&placer, 0, AGREED);
        channel.place(RAM, &[normal(3, 1)], &[7; PAGE_SIZE]).unwrap();
        assert!(!placer.is_closed(why));
        placer.close(why).unwrap();
        assert!(placer.is_closed(why));
        is_refused(channel.place(RAM, &[normal(3, 1)], &[8; PAGE_SIZE]), text);
        is_refused(channel.place(RAM, &[zero(3, 1)], &[]), text);
        is_refused(channel.begin_in_place(RAM, &[zero(3, 1)]).map(drop), text);
        let good = delta(&with_word(vec![7; PAGE_SIZE], 1, 1), 1, 1);
        is_refused(channel.apply(RAM, &[normal(3, 1)], PageDeltas::new(&good, 1)).map(drop), text);
        is_refused(channel.refuse(RAM, &[zero(3, 1)]).map(drop), text);
        is_refused(placer.permit().map(drop), text);
        assert_eq!((page(&placer, 3), placer.refused()), (vec![7; PAGE_SIZE], 0));
    }
}

#[test]
fn closing_fails_while_a_channel_writes_and_admits_no_other_channel() {
    let placer = placer();
    let (mut one, mut other) = (ChannelPlacer::new(&placer, 0, AGREED), ChannelPlacer::new(&placer, 1, AGREED));
    assert!(one.begin_in_place(RAM, &[normal(0, 1)]).unwrap());
    placer.close(Closed::Totals).unwrap_err();
    is_refused(other.place(RAM, &[normal(600, 1)], &[1; PAGE_SIZE]), "after the source's totals");
    one.end_in_place();
    one.end_in_place();
    placer.close(Closed::Totals).unwrap();
    // Neither does a channel that ended while it wrote.
    let placer = self::placer();
    let mut one = ChannelPlacer::new(&placer, 0, AGREED);
    assert!(one.begin_in_place(RAM, &[normal(0, 1)]).unwrap());
    drop(one);
    placer.close(Closed::PostCopy).unwrap();
}

#[test]
fn discards_are_permitted_from_the_beginning_of_post_copy_to_the_totals_which_wait_for_none() {
    let placer = placer();
    is_refused(placer.permit_discard().map(drop), "before post-copy was begun");
    placer.close(Closed::PostCopy).unwrap();
    let discarding = placer.permit_discard().unwrap();
    placer.close(Closed::Totals).unwrap_err();
    is_refused(placer.permit_discard().map(drop), "after the source's totals");
    drop(discarding);
    placer.close(Closed::Totals).unwrap();
}

#[test]
fn what_is_written_when_closing_has_succeeded_stays_as_it_is() {
    for round in 0..200u64 {
        let placer = placer_of(own_memory(), || {});
        let (begin, wrote) = (Barrier::new(4), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for number in 0..3u16 {
                let (placer, begin, wrote) = (&placer, &begin, &wrote);
                scope.spawn(move || {
                    let mut channel = ChannelPlacer::new(placer, number, AGREED);
                    begin.wait();
                    let first = u64::from(number) * REGION_PAGES;
                    for value in 1u64.. {
                        let content = vec![value as u8; 4 * PAGE_SIZE];
                        if channel.place(RAM, &[normal(first, 4)], &content).is_err() {
                            return;
                        }
                        wrote.store(true, Ordering::Relaxed);
                    }
                });
            }
            begin.wait();
            while !wrote.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            let closed = placer.close(Closed::Totals);
            let pages = || [0, 1, 2].map(|region| page(&placer, region * REGION_PAGES + 3));
            let then = pages();
            if closed.is_ok() {
                // The others end at their next attempt to write.
                while placer.gate.load(Ordering::Acquire) != Closed::Totals as u32 {
                    std::hint::spin_loop();
                }
                assert!(then == pages(), "round {round}");
            }
        });
    }
}

#[test]
fn the_pages_of_a_region_are_written_by_one_channel_only() {
    let placer = placer();
    let (mut one, mut other) = (ChannelPlacer::new(&placer, 0, AGREED), ChannelPlacer::new(&placer, 1, AGREED));
    one.place(RAM, &[normal(510, 4)], &[1; 4 * PAGE_SIZE]).unwrap();
    let text = "pages of one region arrive on several channels";
    is_refused(other.place(RAM, &[normal(0, 1)], &[2; PAGE_SIZE]), text);
    is_refused(other.place(RAM, &[zero(1023, 2)], &[]), text);
    is_refused(other.begin_in_place(RAM, &[normal(511, 1)]).map(drop), text);
    is_refused(other.apply(RAM, &[normal(512, 1)], PageDeltas::new(&[], 0)).map(drop), text);
    is_refused(other.refuse(RAM, &[zero(512, 1)]).map(drop), text);
    other.place(RAM, &[normal(1024, 1)], &[2; PAGE_SIZE]).unwrap();
    assert_eq!([0, 511, 1024].map(|number| page(&placer, number)[0]), [0, 1, 2]);
}

#[test]
fn zero_pages_are_written_only_over_pages_that_may_hold_content() {
    let (place, received) = (file(), ReceivedBitmap::new(PAGES));
    for number in 0..6 {
        place.write(number * PAGE_SIZE as u64, &[9; PAGE_SIZE]).unwrap();
    }
    // The block's own record says which pages may hold content: page 5 shows that no other is written.
    received.mark(0..2);
    let shape = BlockShape { pages: PAGES, page_size: PAGE_SIZE as u32 };
    let placer = Arc::new(PagePlacer::new(|| {}));
    let block = |memory| PlacedBlock { name: "ram".into(), shape, memory };
    assert!(placer.begin(vec![block(None), block(Some((place, received)))]));
    assert!(!placer.begin(Vec::new()));
    let mut channel = ChannelPlacer::new(&placer, 0, AGREED);
    channel.place(RAM, &[normal(2, 1)], &[9; PAGE_SIZE]).unwrap();
    assert!(channel.begin_in_place(RAM, &[normal(3, 1)]).unwrap());
    let changed = delta(&with_word(vec![9; PAGE_SIZE], 0, 0), 0, 0);
    assert!(channel.apply(RAM, &[normal(4, 1)], PageDeltas::new(&changed, 1)).unwrap());
    channel.place(RAM, &[zero(0, 6)], &[]).unwrap();
    assert_eq!([0, 1, 2, 3, 4, 5].map(|number| page(&placer, number)[8]), [0, 0, 0, 0, 0, 9]);
}

#[test]
fn a_block_without_memory_accepts_no_pages_and_needs_a_permit_to_forward_them() {
    let placer = placer();
    let mut channel = ChannelPlacer::new(&placer, 0, AGREED);
    is_refused(channel.place(0, &[normal(0, 1)], &[1; PAGE_SIZE]), "rom");
    is_refused(channel.begin_in_place(0, &[normal(0, 1)]).map(drop), "rom");
    is_refused(channel.apply(0, &[], PageDeltas::new(&[], 0)).map(drop), "rom");
    assert!(!channel.refuse(0, &[normal(0, 1)]).unwrap());
    let permit = placer.permit().unwrap();
    placer.close(Closed::Totals).unwrap_err();
    drop(permit);
    placer.close(Closed::Totals).unwrap();
}

#[test]
fn deltas_and_refusals_need_an_agreement() {
    let placer = placer();
    let mut channel = ChannelPlacer::new(&placer, 0, PageAgreement::default());
    is_refused(channel.apply(RAM, &[], PageDeltas::new(&[], 0)).map(drop), "not accepted");
    assert!(!channel.refuse(RAM, &[normal(0, 1)]).unwrap());
    assert_eq!(placer.refused(), 0);
}

#[test]
fn a_refused_page_is_missing_until_it_arrives_undamaged_or_is_discarded() {
    let completed = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&completed);
    let placer = placer_of(file(), move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let mut channel = ChannelPlacer::new(&placer, 0, AGREED);
    channel.place(RAM, &[normal(50, 9)], &[5; 9 * PAGE_SIZE]).unwrap();
    // Zero pages of a damaged packet are placed from its table, and a page counts once.
    assert!(channel.refuse(RAM, &[normal(3, 4), zero(50, 9)]).unwrap());
    assert!(channel.refuse(RAM, &[normal(5, 4)]).unwrap());
    assert_eq!((placer.refused(), page(&placer, 58)), (6, vec![0; PAGE_SIZE]));
    // Meanwhile content is checked before it is written.
    assert!(!channel.begin_in_place(RAM, &[normal(20, 1)]).unwrap());
    channel.place(RAM, &[normal(20, 1)], &[1; PAGE_SIZE]).unwrap();
    assert_eq!(placer.refused(), 6);
    channel.place(RAM, &[zero(0, 5), normal(8, 1)], &[1; PAGE_SIZE]).unwrap();
    let changed = delta(&with_word(vec![0; PAGE_SIZE], 7, 7), 7, 7);
    assert!(channel.apply(RAM, &[normal(5, 1)], PageDeltas::new(&changed, 1)).unwrap());
    assert_eq!((placer.refused(), completed.load(Ordering::Relaxed)), (2, 0));
    placer.discard(0, &[zero(0, 100)]);
    placer.discard(RAM, &[zero(0, 100)]);
    assert_eq!((placer.refused(), completed.load(Ordering::Relaxed)), (0, 1));
    assert!(channel.begin_in_place(RAM, &[normal(20, 1)]).unwrap());
}

/// The first content of page `number`.
fn before(number: u64) -> Vec<u8> {
    (0..PAGE_SIZE as u64).map(|at| (at * 7 + number * 3) as u8).collect()
}

/// The content of page `number` after its delta: one word differs, at an offset that depends on the page.
fn after(number: u64) -> Vec<u8> {
    with_word(before(number), number as u16 % 512, 0xf7f7_f7f7_f7f7_f7f7)
}

fn delta_of(number: u64) -> Vec<u8> {
    delta(&after(number), number as u16 % 512, 0xf7f7_f7f7_f7f7_f7f7)
}

/// Returns a placer whose pages hold [`before`], and the channel that wrote them.
fn filled(place: Box<dyn Place>) -> (Arc<PagePlacer>, ChannelPlacer) {
    let placer = placer_of(place, || {});
    let mut channel = ChannelPlacer::new(&placer, 0, AGREED);
    (0..PAGES).for_each(|number| channel.place(RAM, &[normal(number, 1)], &before(number)).unwrap());
    (placer, channel)
}

/// Every second page, then more contiguous pages than are read at once.
fn runs() -> (Vec<Run>, Vec<u64>) {
    let mut runs: Vec<_> = (0..90).map(|at| normal(at * 2 + 1, 1)).collect();
    runs.extend([normal(200, 150), normal(PAGES - 1, 1)]);
    let pages = runs.iter().flat_map(|run| run.first..run.end()).collect();
    (runs, pages)
}

#[test]
fn deltas_change_their_pages_and_no_others() {
    for kind in KINDS {
        let (placer, mut channel) = filled(kind());
        let (runs, pages) = runs();
        let content: Vec<u8> = pages.iter().flat_map(|number| delta_of(*number)).collect();
        assert!(channel.apply(RAM, &runs, PageDeltas::new(&content, pages.len() as u64)).unwrap());
        for number in 0..PAGES {
            let expected = if pages.contains(&number) { after(number) } else { before(number) };
            assert!(page(&placer, number) == expected, "page {number}");
        }
    }
}

#[test]
fn a_result_that_differs_from_the_sources_page_is_not_placed() {
    let (runs, pages) = runs();
    let good: Vec<u8> = pages.iter().flat_map(|number| delta_of(*number)).collect();
    let one = delta_of(1).len();
    let spoilt = |at: usize| {
        let mut content = good.clone();
        content[at] ^= 4;
        content
    };
    let wrong = 170;
    // A bit of a word, of an offset, of a checksum; a truncated record; below, one delta too many, and a page that has changed.
    let cases =
        [spoilt(wrong * one + 12), spoilt(wrong * one + 8), spoilt(wrong * one + 5), good[..good.len() - 1].to_vec()];
    for kind in KINDS {
        for content in &cases {
            let (placer, mut channel) = filled(kind());
            let deltas = PageDeltas::new(content, pages.len() as u64);
            assert!(!channel.apply(RAM, &runs, deltas).unwrap());
            for number in 0..PAGES {
                let now = page(&placer, number);
                assert!(now == before(number) || (pages.contains(&number) && now == after(number)), "page {number}");
            }
            let last = *pages.last().unwrap();
            assert!(page(&placer, last) == before(last), "no page after the damaged one is placed");
        }
        let too_many = [&good[..], &delta_of(0)].concat();
        let deltas = PageDeltas::new(&too_many, pages.len() as u64 + 1);
        assert!(!filled(kind()).1.apply(RAM, &runs, deltas).unwrap());
        let (_, mut channel) = filled(kind());
        let changed = with_word(before(pages[wrong]), 300, 5);
        channel.place(RAM, &[normal(pages[wrong], 1)], &changed).unwrap();
        assert!(!channel.apply(RAM, &runs, PageDeltas::new(&good, pages.len() as u64)).unwrap());
    }
}

/// What the pages of the block hold by the rules, and which are missing; pages that are not in the map are zero.
#[derive(Default)]
struct Model {
    content: BTreeMap<u64, Vec<u8>>,
    missing: BTreeSet<u64>,
    /// By region.
    channels: BTreeMap<u64, u16>,
    completed: u64,
}

impl Model {
    fn page(&self, number: u64) -> Vec<u8> {
        self.content.get(&number).cloned().unwrap_or_else(|| vec![0; PAGE_SIZE])
    }

    /// Returns whether the channel may write the pages, and has it claim their regions up to the first that it may not.
    fn claims(&mut self, runs: &[Run], channel: u16) -> bool {
        let regions = runs.iter().flat_map(|run| run.first / REGION_PAGES..run.end().div_ceil(REGION_PAGES));
        regions.into_iter().all(|region| *self.channels.entry(region).or_insert(channel) == channel)
    }

    fn set(&mut self, number: u64, content: Vec<u8>) {
        self.content.insert(number, content);
    }

    fn settle(&mut self, number: u64) {
        if self.missing.remove(&number) && self.missing.is_empty() {
            self.completed += 1;
        }
    }
}

/// Returns ascending runs, and the content of the normal ones.
fn packet(random: &mut Random, zeros: bool) -> (Vec<Run>, Vec<Vec<u8>>) {
    let (mut runs, mut content) = (Vec::new(), Vec::new());
    // Near one another, so that packets meet; across the border of a region now and then.
    let mut next = random.one_of(&[0, 500, REGION_PAGES, 1020, 1100]) + random.below(16);
    for _ in 0..1 + random.below(6) {
        let count = 1 + random.below(4) as u32;
        if next + u64::from(count) > PAGES {
            break;
        }
        if zeros && random.once_in(3) {
            runs.push(zero(next, count));
        } else {
            runs.push(normal(next, count));
            content.extend((0..count).map(|_| vec![1 + random.below(255) as u8; PAGE_SIZE]));
        }
        next += u64::from(count) + random.below(3);
    }
    (runs, content)
}

fn numbers(runs: &[Run], kind: RunKind) -> impl Iterator<Item = u64> {
    runs.iter().filter(move |run| run.kind == kind).flat_map(|run| run.first..run.end())
}

/// Compared with a model after every packet: what memory holds, which pages are missing, and who was told when.
#[test]
fn any_packets_leave_the_memory_that_the_rules_say() {
    let seed = sterna_test_kit::random::announced_seed();
    for (kind, memory) in KINDS.into_iter().enumerate() {
        let mut random = Random::new(seed.wrapping_add(kind as u64));
        for _ in 0..12 {
            any_packets(&mut random, memory());
        }
    }
}

fn any_packets(random: &mut Random, memory: Box<dyn Place>) {
    let completed = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&completed);
    let placer = placer_of(memory, move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let mut channels = [0, 1].map(|number| ChannelPlacer::new(&placer, number, AGREED));
    let mut model = Model::default();
    for _ in 0..300 {
        let number = if random.percent(90) { 0 } else { 1 };
        let channel = &mut channels[number];
        let action = random.below(5);
        let (runs, content) = packet(random, action != 2);
        let bytes = content.concat();
        let may = action < 4 && model.claims(&runs, number as u16);
        let normals: Vec<u64> = numbers(&runs, RunKind::Normal).collect();
        match action {
            // Through the buffer.
            0 => {
                let outcome = channel.place(RAM, &runs, &bytes);
                assert_eq!(outcome.is_ok(), may);
                if may {
                    normals.iter().zip(content).for_each(|(at, content)| model.set(*at, content));
                    numbers(&runs, RunKind::Zero).for_each(|at| model.set(at, vec![0; PAGE_SIZE]));
                    runs.iter().flat_map(|run| run.first..run.end()).for_each(|at| model.settle(at));
                }
            }
            // Directly, and damaged now and then.
            1 => match channel.begin_in_place(RAM, &runs) {
                Err(_) => assert!(!may),
                Ok(false) => assert!(may && !model.missing.is_empty()),
                Ok(true) => {
                    assert!(may && model.missing.is_empty());
                    for (at, content) in normals.iter().zip(content) {
                        placer.memory(RAM).unwrap().write(at * PAGE_SIZE as u64, &content).unwrap();
                        model.set(*at, content);
                    }
                    numbers(&runs, RunKind::Zero).for_each(|at| model.set(at, vec![0; PAGE_SIZE]));
                    channel.end_in_place();
                    if random.once_in(4) {
                        assert!(channel.refuse(RAM, &runs).unwrap());
                        model.missing.extend(&normals);
                    }
                }
            },
            // Deltas, of which the last one is damaged now and then.
            2 => {
                let (word, value) = (random.below(512) as u16, random.next_u64());
                let results: Vec<_> = normals.iter().map(|at| with_word(model.page(*at), word, value)).collect();
                let damaged = random.once_in(4);
                let mut content: Vec<u8> = results.iter().flat_map(|page| delta(page, word, value)).collect();
                if damaged && let Some(last) = content.last_mut() {
                    *last ^= 1;
                }
                match channel.apply(RAM, &runs, PageDeltas::new(&content, normals.len() as u64)) {
                    Err(_) => assert!(!may),
                    Ok(right) => {
                        assert!(may && right != damaged);
                        for (at, result) in normals.iter().zip(results) {
                            let now = page(&placer, *at);
                            assert!(now == result || damaged && now == model.page(*at), "page {at}");
                            model.set(*at, now);
                            if right {
                                model.settle(*at);
                            }
                        }
                        if damaged {
                            assert!(channel.refuse(RAM, &runs).unwrap());
                            model.missing.extend(&normals);
                        }
                    }
                }
            }
            // Damaged in a way that shows before anything is written.
            3 => match channel.refuse(RAM, &runs) {
                Err(_) => assert!(!may),
                Ok(refuses) => {
                    assert!(may && refuses);
                    model.missing.extend(&normals);
                    for at in numbers(&runs, RunKind::Zero) {
                        model.set(at, vec![0; PAGE_SIZE]);
                        model.settle(at);
                    }
                }
            },
            // What is missing is retransmitted.
            _ => {
                for at in model.missing.clone() {
                    let owner = model.channels[&(at / REGION_PAGES)];
                    let content = vec![1 + random.below(255) as u8; PAGE_SIZE];
                    channels[usize::from(owner)].place(RAM, &[normal(at, 1)], &content).unwrap();
                    model.set(at, content);
                    model.settle(at);
                }
            }
        }
        for at in runs.iter().flat_map(|run| run.first..run.end()) {
            assert!(page(&placer, at) == model.page(at), "page {at} after action {action}");
        }
        assert_eq!(placer.refused(), model.missing.len() as u64);
        assert_eq!(completed.load(Ordering::Relaxed), model.completed);
    }
    placer.close(Closed::Totals).unwrap();
    let (runs, content) = packet(random, true);
    assert!(channels[0].place(RAM, &runs, &content.concat()).is_err());
    let expected: Vec<u8> = (0..PAGES).flat_map(|number| model.page(number)).collect();
    assert!(all(&placer) == expected);
}
