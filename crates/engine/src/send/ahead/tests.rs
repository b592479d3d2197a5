//! Pieces in flight in an accelerator: their order, their content, and late devices.

use super::*;
use crate::accelerator::tests::{of_cpu, over, ram_of};
use sterna_memory::checksum::crc32c;
use sterna_offload::Offload;

const PAGES: usize = 32;

fn run(kind: RunKind, first: u64, count: u32) -> Run {
    Run { kind, first, count }
}

/// Every second page of the first block is zero, none of the second, all of the third.
fn ram() -> GuestRam {
    let bytes = |byte: fn(u8) -> u8| (0..PAGES as u8).map(byte).collect::<Vec<_>>();
    ram_of(&[&bytes(|page| page % 2 * page), &bytes(|page| 100 + page), &bytes(|_| 0)])
}

/// Queues all pages of these blocks, each as one piece, and returns their runs and content.
fn through(ahead: &mut Ahead, blocks: &[u16]) -> Vec<(u16, Vec<Run>, Vec<u8>)> {
    for &block in blocks {
        assert!(ahead.has_room());
        ahead.queue(block, &[run(RunKind::Normal, 0, PAGES as u32)]);
    }
    let mut out = Vec::new();
    while !ahead.is_empty() {
        let needs = ahead.window_needed();
        let (piece, ready) = ahead.take(None, |_| Ok::<_, ()>(true)).unwrap();
        let content = match ready {
            Ready::Copied(copy) => {
                assert_eq!(copy.checksum(), Some(crc32c(copy.bytes())));
                copy.bytes().to_vec()
            }
            Ready::Searched => Vec::new(),
            Ready::NotCopied | Ready::NotSearched => panic!("nobody refused anything"),
        };
        assert!(needs == piece.normal || needs == 0, "{needs} of {}", piece.normal);
        assert_eq!(content.len() as u64, piece.normal);
        out.push((piece.block, piece.runs.clone(), content));
        ahead.recycle(piece);
    }
    out
}

#[test]
fn pieces_come_out_in_order_with_their_runs_content_and_checksum() {
    let mut ahead = Ahead::new(of_cpu(&ram()), CopyMode::Checked, PAGES as u64, NormalPageRatio::default());
    let out = through(&mut ahead, &[0, 1, 2, 0]);
    let every_second: Vec<Run> = (0..PAGES as u64)
        .map(|page| run(if page % 2 == 0 { RunKind::Zero } else { RunKind::Normal }, page, 1))
        .collect();
    let pages = |bytes: Vec<u8>| bytes.into_iter().flat_map(|byte| [byte; PAGE_SIZE]).collect::<Vec<u8>>();
    let odd = pages((0..PAGES as u8).filter(|page| page % 2 == 1).collect());
    let first = (0, every_second, odd);
    let second =
        (1, vec![run(RunKind::Normal, 0, PAGES as u32)], pages((0..PAGES as u8).map(|page| 100 + page).collect()));
    let third = (2, vec![run(RunKind::Zero, 0, PAGES as u32)], Vec::new());
    assert_eq!(out, [first.clone(), second, third, first]);
}

#[test]
fn lists_of_runs_never_grow() {
    let mut ahead = Ahead::new(of_cpu(&ram()), CopyMode::Checked, PAGES as u64, NormalPageRatio::default());
    let places = |ahead: &Ahead| {
        let lists = ahead.spare.iter().flat_map(|piece| [&piece.runs, &piece.queued]);
        lists.map(|list| (list.as_ptr(), list.capacity())).collect::<std::collections::BTreeSet<_>>()
    };
    let before = places(&ahead);
    assert_eq!(before.len(), 2 * DEPTH);
    // The first block is the worst: every page is a run.
    through(&mut ahead, &[0, 1, 0, 0]);
    through(&mut ahead, &[0, 0, 0, 0]);
    assert_eq!(places(&ahead), before);
}

#[test]
fn no_piece_enters_the_window_before_an_older_one() {
    let accelerator = of_cpu(&ram());
    accelerator.region(1).unwrap().retire().unwrap();
    let mut ahead = Ahead::new(accelerator, CopyMode::Unchecked, PAGES as u64, NormalPageRatio::default());
    for block in [0, 1, 0, 0] {
        ahead.queue(block, &[run(RunKind::Normal, 0, PAGES as u32)]);
    }
    let mut entered = Vec::new();
    while !ahead.is_empty() {
        let needs = ahead.window_needed();
        // So that the composition of all pieces is known.
        while ahead.channel.in_flight() > 0 {
            ahead.collect();
        }
        let mut meanwhile = 0;
        let (piece, ready) = ahead
            .take(None, |bytes| {
                meanwhile += bytes;
                Ok::<_, ()>(true)
            })
            .unwrap();
        entered.push((piece.block, matches!(ready, Ready::NotSearched), needs, meanwhile));
        ahead.recycle(piece);
    }
    let half = (PAGES / 2 * PAGE_SIZE) as u64;
    // The second could not be asked about and has not entered, so the first takes none with it.
    assert_eq!(entered, [(0, false, half, 0), (1, true, 0, 0), (0, false, half, half), (0, false, 0, 0)]);
}

/// A clock that advances when a thread waits.
#[derive(Debug, Default)]
struct Waiting(std::sync::atomic::AtomicU64);

impl sterna_offload::Time for Waiting {
    fn now(&self) -> Nanos {
        self.0.load(std::sync::atomic::Ordering::SeqCst)
    }
    fn wait(&self, _: &sterna_offload::Bell, _: u64, until: Nanos) {
        self.0.fetch_max(until, std::sync::atomic::Ordering::SeqCst);
    }
}

#[test]
fn what_comes_too_late_is_done_by_the_cpu_and_the_device_is_left_alone_for_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.json");
    let queue = r#"{"name":"wq0.0","size":128,"max_batch_size":128}"#;
    // Batches; and compares with a pattern, which go one by one where the queue's trial of a batch was not answered in real time.
    let faults = r#"{"opcode":1,"what":"hang"},{"opcode":6,"what":"hang"}"#;
    let model = format!(r#"{{"devices":[{{"name":"dsa0","queues":[{queue}]}}],"faults":[{faults}]}}"#);
    std::fs::write(&file, model).unwrap();
    let time = std::sync::Arc::new(Waiting::default());
    let mut settings = sterna_offload::Settings::default();
    (settings.time, settings.threads) = (std::sync::Arc::clone(&time) as _, false);
    // It seems to be alive.
    settings.patience = std::time::Duration::from_secs(1000);
    let offload = Offload::start(&sterna_offload::Accelerators::model(file), &settings).unwrap();
    let mut ahead = Ahead::new(over(&offload, &ram()), CopyMode::Checked, PAGES as u64, NormalPageRatio::default());
    let mut through = || {
        let before = offload.now();
        ahead.queue(0, &[run(RunKind::Normal, 0, PAGES as u32)]);
        ahead.window_needed();
        let (piece, ready) = ahead.take(None, |_| Ok::<_, ()>(true)).unwrap();
        assert!(matches!(ready, Ready::NotSearched), "nothing came");
        ahead.recycle(piece);
        offload.now() - before >= offload.lateness()
    };
    for skipped in [MIN_SKIPPED, 2 * MIN_SKIPPED, 4 * MIN_SKIPPED] {
        assert!(through(), "it is waited for");
        assert!((0..skipped).all(|_| !through()), "{skipped} are not");
    }
    assert!(through());
}

/// The kept content is the same except for one page; both of the two pieces in flight are requested.
#[test]
fn deltas_lead_from_what_is_kept_to_the_copies() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.json");
    let queue = r#"{"name":"wq0.0","size":16,"max_batch_size":32}"#;
    std::fs::write(&file, format!(r#"{{"devices":[{{"name":"dsa0","queues":[{queue}]}}]}}"#)).unwrap();
    let mut settings = sterna_offload::Settings::default();
    settings.lateness = std::time::Duration::from_secs(60);
    settings.patience = settings.lateness;
    let offload = Offload::start(&sterna_offload::Accelerators::model(file), &settings).unwrap();
    let ram = ram();
    let mut ahead = Ahead::new(over(&offload, &ram), CopyMode::Checked, PAGES as u64, NormalPageRatio::default());
    let mut deltas = Deltas::new(4 * PAGES * PAGE_SIZE, PAGES * PAGE_SIZE);
    let costs = deltas.whole(None);
    let all = [run(RunKind::Normal, 0, PAGES as u32)];
    let mut kept: Vec<u8> = (0..PAGES).flat_map(|page| [100 + page as u8; PAGE_SIZE]).collect();
    kept[5 * PAGE_SIZE + 4088] = 0;
    deltas.split(1, &all, super::super::delta::NormalPages::of(&kept), 0, costs);
    deltas.sent(0, &[], 1, 1);
    (0..2).for_each(|_| ahead.queue(1, &all));
    while !ahead.is_empty() {
        ahead.window_needed();
        let (piece, ready) = ahead.take(Some((&mut deltas, costs)), |_| Ok::<_, ()>(true)).unwrap();
        let Ready::Copied(copy) = ready else { panic!("nobody refused anything") };
        assert_eq!(piece.bases.len(), PAGES);
        for (item, base) in piece.bases.iter().enumerate() {
            let page = &copy.bytes()[item * PAGE_SIZE..][..PAGE_SIZE];
            assert_eq!((base.number, DeviceResults::checksum(&copy, item)), (item, Some(crc32c(page))));
            let delta = match item {
                5 => Delta::Record(&[255, 1, 105, 105, 105, 105, 105, 105, 105, 105]),
                _ => Delta::Equal,
            };
            assert_eq!(copy.delta(item), Some(delta), "page {item}");
        }
        assert!(copy.deltas_maker().is_some());
        assert_eq!(copy.checksum(), Some(crc32c(copy.bytes())));
        ahead.recycle(piece);
    }
}

/// A guest's memory as direct mode maps it: another process has filled the file, so that this process's page tables are empty.
#[test]
fn a_device_searches_and_copies_all_that_another_process_has_put_into_a_file() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.json");
    let queue = r#"{"name":"wq0.0","size":64,"max_batch_size":128}"#;
    std::fs::write(&model, format!(r#"{{"devices":[{{"name":"dsa0","queues":[{queue}]}}]}}"#)).unwrap();
    let mut settings = sterna_offload::Settings::default();
    settings.lateness = std::time::Duration::from_secs(60);
    (settings.patience, settings.retries) = (settings.lateness, u32::MAX);
    let offload = Offload::start(&sterna_offload::Accelerators::model(model), &settings).unwrap();

    // Every second page is zero, and of the second half there is none.
    let file = std::fs::File::from(rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len((2 * PAGES * PAGE_SIZE) as u64).unwrap();
    let content = |page: usize| [(page % 2 * page) as u8; PAGE_SIZE];
    (0..PAGES).for_each(|page| file.write_all_at(&content(page), (page * PAGE_SIZE) as u64).unwrap());
    let allocated = file.metadata().unwrap().blocks();
    let shared = std::sync::Arc::new(file.try_clone().unwrap());
    let block = sterna_memory::ram::RamBlock::of_file("ram", shared, 0, 2 * PAGES * PAGE_SIZE, PAGE_SIZE).unwrap();
    let ram = GuestRam::new(vec![block]).unwrap();
    let accelerator = over(&offload, &ram);
    let mut ahead = Ahead::new(accelerator.clone(), CopyMode::Checked, PAGES as u64, NormalPageRatio::default());

    let out = through(&mut ahead, &[0, 0]);
    let odd: Vec<u8> = (0..PAGES).filter(|page| page % 2 == 1).flat_map(content).collect();
    assert!(out.iter().all(|(_, runs, copied)| runs.len() == PAGES && *copied == odd));
    accelerator.make_present(0, &[run(RunKind::Normal, PAGES as u64, PAGES as u32)]);
    assert_eq!(file.metadata().unwrap().blocks(), allocated, "pages that the file does not have were allocated");
    for (operation, items) in [(Operation::ZeroMap, 2 * PAGES), (Operation::CopyChecksum, PAGES)] {
        let report = offload.report().operations.into_iter().find(|report| report.operation == operation).unwrap();
        let [engine] = &report.engines[..] else { panic!("the CPU did whole batches: {report:?}") };
        assert_eq!((engine.items, &engine.fallbacks[..]), (items as u64, &[][..]), "{report:?}");
    }
}

#[test]
fn after_a_shutdown_pieces_are_the_threads_own_and_still_in_order() {
    let accelerator = of_cpu(&ram());
    let mut ahead = Ahead::new(accelerator.clone(), CopyMode::Checked, PAGES as u64, NormalPageRatio::default());
    ahead.queue(0, &[run(RunKind::Normal, 0, PAGES as u32)]);
    ahead.queue(1, &[run(RunKind::Normal, 0, PAGES as u32)]);
    Offload::shutdown(accelerator.offload());
    ahead.queue(2, &[run(RunKind::Normal, 0, PAGES as u32)]);
    let mut out = Vec::new();
    while !ahead.is_empty() {
        ahead.window_needed();
        let (piece, ready) = ahead.take(None, |_| Ok::<_, ()>(true)).unwrap();
        out.push((piece.block, matches!(ready, Ready::NotSearched), matches!(ready, Ready::NotCopied)));
        ahead.recycle(piece);
    }
    // Pieces that were searched before are known; copies, and searches of other pieces, were refused.
    assert_eq!(out, [(0, false, true), (1, false, true), (2, true, false)]);
}
