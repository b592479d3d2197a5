//! Random runs in virtual time, one per seed: devices that fault, lie, are slow, full, halted or hung, and callers that drop,
//! cancel and shut down. Whatever happens, every batch is delivered once, every answer is right, and nothing leaks.
//!
//!     STERNA_SEED=N     runs that seed alone
//!     STERNA_SEEDS=N    runs so many seeds (1000 by default; scripts/soak runs 10 000)

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Clock, Fake, Memory, PAGE, Script, crc32c};
use sterna_idxd::Kind as DeviceKind;
use sterna_offload::share::{Fair, Share};
use sterna_offload::{
    Batch, Cancelled, Cause, Channel, Delta, Kind, Offload, Operation, Outcome, Reason, Recheck, Region, Settings,
    Shares, Ticket, TicketId,
};
use sterna_test_kit::Random;

/// Batches of a run.
const BATCHES: usize = 64;
/// Pages of source memory, of changed memory, and of memory that is written.
const PAGES: usize = 48;
/// Pages of a batch.
const BATCH_PAGES: usize = 16;

/// Virtual time in which everything must have ended.
const LONG: u64 = 3_600_000_000_000;

#[test]
fn whatever_devices_and_callers_do_every_batch_is_delivered_once_and_right() {
    if let Ok(seed) = std::env::var("STERNA_SEED") {
        let seen = Run::new(seed.parse().expect("STERNA_SEED is a number")).go();
        return println!("{seen:?}");
    }
    let seeds: u64 =
        std::env::var("STERNA_SEEDS").map_or(1000, |seeds| seeds.parse().expect("STERNA_SEEDS is a number"));
    let next = AtomicU64::new(1);
    let all = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed > seeds {
                            break;
                        }
                        let run = std::panic::catch_unwind(|| Run::new(seed).go());
                        match run {
                            Ok(seen) => {
                                let mut all = all.lock().unwrap();
                                seen.into_iter().for_each(|(what, times)| *all.entry(what).or_insert(0) += times);
                            }
                            Err(panic) => {
                                eprintln!("seed {seed} failed: STERNA_SEED={seed} runs it alone");
                                std::panic::resume_unwind(panic);
                            }
                        }
                    }
                })
            })
            .collect();
        for run in runs {
            if let Err(panic) = run.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    let all: Seen = all.into_inner().unwrap();
    println!("{seeds} seeds: {all:?}");
    // Were one of these zero, nothing would have been shown of it.
    let causes = Cause::ALL.into_iter().filter(|cause| *cause != Cause::Spilled).map(|cause| format!("{cause:?}"));
    let others = [
        "delivered",
        "by a device",
        "leased",
        "taken out",
        "kept for ever",
        "given back",
        "disowned",
        "retries",
        "lies",
    ];
    for what in causes.chain(others.map(String::from)) {
        assert!(seeds < 500 || all.get(&what).is_some_and(|times| *times > 0), "{what} never came");
    }
}

/// How often what happened.
type Seen = BTreeMap<String, u64>;

/// What a batch was made of, to know what has to come out.
#[derive(Clone, Debug)]
struct Expected {
    operation: Operation,
    /// Per item: offset in the source, offset in the other memory, length, and what was put in.
    items: Vec<(usize, usize, usize, Vec<u8>)>,
}

#[derive(Debug)]
enum Fate {
    Waiting(Ticket),
    Kept,
}

struct Run {
    seed: u64,
    random: Random,
    clock: Arc<Clock>,
    devices: Vec<Arc<Fake>>,
    offload: Arc<Offload>,
    source: Arc<Memory>,
    other: Arc<Memory>,
    written: Arc<Memory>,
    regions: [Arc<Region>; 3],
    /// What lies where nothing writes.
    first: Vec<u8>,
    second: Vec<u8>,
    fates: HashMap<(usize, TicketId), (Expected, Fate)>,
    /// Pages of written memory that a batch under way has.
    taken: Vec<bool>,
    seen: Seen,
    hung: bool,
}

fn script(random: &mut Random) -> Script {
    // Most runs have one or two things wrong; some have everything.
    let mut script = Script { slowness: 1, ..Script::default() };
    let mut often = |chance: u64, most: u64| if random.once_in(chance) { 1 + random.below(most) } else { 0 };
    script.page_fault = often(2, 60);
    script.list_fault = often(4, 20);
    script.hardware_error = often(6, 400);
    script.lost = often(8, 100);
    script.full = often(3, 20);
    script.halt = often(8, 200);
    script.lie = often(8, 100);
    script.refuse = often(8, 100);
    script.slowness = [1, 10, 1_000, 1_000_000][random.below(4) as usize];
    script.coarse = random.once_in(2);
    script
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed.wrapping_mul(0x5851_f42d_4c95_7f2d));
        let clock = Clock::new();
        let mut devices = Vec::new();
        let mut queues = Vec::new();
        let max_batch = [1, 2, 5, 8, 32][random.below(5) as usize];
        let liars;
        {
            let kinds = [DeviceKind::Dsa, DeviceKind::Dsa, DeviceKind::Iaa];
            let mut scripts = Vec::new();
            for (number, kind) in kinds.into_iter().enumerate() {
                if random.once_in(4) {
                    continue;
                }
                let sizes: Vec<_> =
                    (0..=random.below(2)).map(|_| (1 + random.below(16) as u32, random.once_in(3))).collect();
                let prefix = if kind == DeviceKind::Dsa { "dsa" } else { "iax" };
                let script = script(&mut random);
                let device =
                    Fake::new(&format!("{prefix}{number}"), kind, &sizes, random.next_u64(), Script::default());
                // Half-failed start: this one does not open.
                if random.once_in(6) {
                    device.open_in_vain();
                    continue;
                }
                queues.extend(device.open(&clock, max_batch));
                device.set_script(script);
                scripts.push(script);
                devices.push(device);
            }
            liars = scripts.iter().any(|script| script.lie != 0);
        }
        let mut settings = Settings::default();
        settings.batch_pages = BATCH_PAGES;
        settings.in_flight = 1 + random.below(24) as usize;
        settings.threads = false;
        settings.time = clock.clone();
        settings.retries = random.below(20) as u32;
        // A wrong zero is caught for certain only where every one is looked at.
        settings.recheck = if liars { Recheck::All } else { Recheck::OneIn(1 + random.below(64) as u32) };
        if random.once_in(3) {
            settings.shares = Shares::new(|_| Box::new(Fair::default()) as Box<dyn Share>);
        }
        let offload = Offload::with_queues(queues, &settings).expect("settings are within their ranges");

        let memories = [Memory::new(PAGES), Memory::new(PAGES), Memory::new(PAGES)];
        let regions = [memories[0].region(), memories[1].region(), memories[2].region()];
        let [source, other, written] = memories;
        let zeros = 1 + random.below(4);
        for page in 0..PAGES {
            if !random.once_in(zeros) {
                let at = page * PAGE + random.below(PAGE as u64) as usize;
                source.write(at, &[1 + random.below(255) as u8]);
            }
            let copy = source.read(page * PAGE, PAGE);
            other.write(page * PAGE, &copy);
            for _ in 0..random.below(3) {
                other.write(page * PAGE + random.below(PAGE as u64) as usize, &[random.next_u64() as u8]);
            }
        }
        let (first, second) = (source.read(0, PAGES * PAGE), other.read(0, PAGES * PAGE));
        let hung = random.once_in(32);
        Self {
            seed,
            random,
            clock,
            devices,
            offload,
            source,
            other,
            written,
            regions,
            first,
            second,
            fates: HashMap::new(),
            taken: vec![false; PAGES],
            seen: Seen::new(),
            hung,
        }
    }

    fn go(mut self) -> Seen {
        let mut channels: Vec<Option<Channel>> = (0..1 + self.random.below(3))
            .map(|vm| Some(self.offload.channel_for(&self.offload.guest(1 + vm as u32))))
            .collect();
        let shutdown_at = if self.random.once_in(4) { self.random.below(BATCHES as u64) as usize } else { BATCHES };
        for batch in 0..BATCHES {
            if batch == shutdown_at {
                self.offload.shutdown();
            }
            let number = self.random.below(channels.len() as u64) as usize;
            if self.random.once_in(200) {
                self.drop_channel(number, &mut channels);
            }
            let Some(channel) = &channels[number] else { continue };
            self.submit(number, channel, batch >= shutdown_at);
            match self.random.below(8) {
                0 => self.clock.pass(20_000),
                1 => {
                    self.offload.run_backstop();
                }
                2 if !self.hung => self.offload.close_devices(),
                3 => self.drop_or_cancel(number, channel),
                4 | 5 => while self.collect(number, channel, false) {},
                6 => {
                    self.collect(number, channel, true);
                }
                _ => {}
            }
        }
        for (number, channel) in channels.iter().enumerate() {
            let Some(channel) = channel else { continue };
            while self.collect(number, channel, true) {}
            assert_eq!(channel.in_flight(), 0, "seed {}", self.seed);
        }
        assert!(
            self.fates.values().all(|(_, fate)| matches!(fate, Fate::Waiting(_) | Fate::Kept)) && self.fates.is_empty()
        );
        drop(channels);
        self.end()
    }

    fn end(mut self) -> Seen {
        // What was dropped may still be with a device.
        self.offload.shutdown();
        if !self.hung {
            self.offload.close_devices();
        }
        let report = self.offload.report();
        let requests = report.requests;
        assert_eq!(requests.made, requests.free + requests.quarantined, "requests leak: {report:?}");
        if !self.hung {
            assert_eq!((requests.quarantined, report.leases), (0, 0), "{report:?}");
            assert!(report.taken_out.iter().all(|out| out.quiet && out.quarantined_bytes == 0), "{report:?}");
            assert!(self.regions.iter().all(|region| region.retire().is_ok()));
        }
        for device in &self.devices {
            assert_eq!(device.overflows.load(Ordering::SeqCst), 0, "credits of {}", device.name);
        }
        assert_eq!(self.source.read(0, PAGES * PAGE), self.first, "nobody writes what is only read");
        assert_eq!(self.other.read(0, PAGES * PAGE), self.second, "nobody writes what is only read");
        assert!(
            self.clock.pass_so_far() < LONG,
            "it took {} virtual seconds",
            self.clock.pass_so_far() / 1_000_000_000
        );
        let mut note = |what: &str, times: u64| *self.seen.entry(what.to_owned()).or_default() += times;
        note("taken out", report.taken_out.len() as u64);
        note("kept for ever", requests.quarantined as u64);
        note("lies", self.devices.iter().map(|device| device.lies()).sum());
        for engine in report.operations.iter().flat_map(|operation| &operation.engines) {
            engine.fallbacks.iter().for_each(|(cause, items)| note(&format!("{cause:?}"), *items));
            note("retries", engine.retries);
            note("sampled", engine.sampled);
            note(if engine.engine == Kind::Cpu { "by the cpu" } else { "by a device" }, engine.batches);
        }
        self.seen
    }

    fn submit(&mut self, number: usize, channel: &Channel, closed: bool) {
        let operation = Operation::ALL[self.random.below(Operation::ALL.len() as u64) as usize];
        let mut batch = channel.batch(operation);
        let mut expected = Expected { operation, items: Vec::new() };
        for _ in 0..1 + self.random.below(BATCH_PAGES as u64) {
            if !self.push(&mut batch, &mut expected) {
                break;
            }
        }
        if batch.is_empty() {
            return;
        }
        match channel.submit(batch) {
            Ok(ticket) => {
                assert!(!closed, "a batch was taken after the shutdown");
                let id = ticket.id();
                let fate = if self.random.once_in(2) {
                    Fate::Waiting(ticket)
                } else {
                    assert_eq!(ticket.into_id(), id);
                    Fate::Kept
                };
                assert!(self.fates.insert((number, id), (expected, fate)).is_none(), "a ticket twice");
            }
            Err((reason, batch)) => {
                assert_eq!(batch.len(), expected.items.len());
                match reason {
                    Reason::Closed => assert!(closed),
                    Reason::Leased => assert!(operation.writes_guest() && self.offload.leases().count() > 0),
                    Reason::Full => {}
                    other => panic!("{other}"),
                }
                self.release(&expected);
            }
        }
    }

    fn push(&mut self, batch: &mut Batch, expected: &mut Expected) -> bool {
        let random = &mut self.random;
        let page = random.below(PAGES as u64) as usize;
        let at = page * PAGE;
        let [source, other, written] = &self.regions;
        match expected.operation {
            Operation::ZeroMap => {
                let pages = (1 + random.below(4) as usize).min(PAGES - page);
                if batch.push(&source.range(at, pages * PAGE).unwrap()).is_err() {
                    return false;
                }
                expected.items.extend((0..pages).map(|page| (at + page * PAGE, 0, PAGE, Vec::new())));
            }
            Operation::Compare | Operation::CreateDelta => {
                if batch.push_pair(&source.range(at, PAGE).unwrap(), &other.range(at, PAGE).unwrap()).is_err() {
                    return false;
                }
                expected.items.push((at, at, PAGE, Vec::new()));
            }
            Operation::Checksum | Operation::Copy | Operation::CopyChecksum | Operation::Deflate => {
                let (from, bytes) = match random.below(3) {
                    0 => (at + 8 * random.below(8) as usize, 8 + random.below(1000) as usize),
                    _ => (at, PAGE),
                };
                if batch.push(&source.range(from, bytes).unwrap()).is_err() {
                    return false;
                }
                expected.items.push((from, 0, bytes, Vec::new()));
            }
            Operation::Place | Operation::ApplyDelta | Operation::Inflate => {
                if self.taken[page] {
                    return true;
                }
                let range = written.range(at, PAGE).unwrap();
                if self.offload.leases().covers(&range) {
                    return true;
                }
                let input = input(expected.operation, random);
                match batch.push_input(input.len(), &range) {
                    Ok(room) => room.copy_from_slice(&input),
                    Err(_) => return false,
                }
                let before = self.written.read(at, PAGE);
                let wanted = match expected.operation {
                    Operation::ApplyDelta => apply(&input, before),
                    Operation::Place => Some(input),
                    // One of the two streams of `input`.
                    _ if input.len() == 1 => None,
                    _ => {
                        let mut after = before;
                        after[..input.len() - 5].copy_from_slice(&input[5..]);
                        Some(after)
                    }
                };
                self.taken[page] = true;
                // An input that is not of the format has no content to compare with.
                expected.items.push((0, at, usize::from(wanted.is_some()), wanted.unwrap_or_default()));
            }
            _ => unreachable!("all operations are here"),
        }
        true
    }

    fn note(&mut self, what: &str) {
        *self.seen.entry(what.to_owned()).or_default() += 1;
    }

    /// Pages that no batch has any more.
    fn release(&mut self, expected: &Expected) {
        if expected.operation.writes_guest() {
            for (_, at, ..) in &expected.items {
                self.taken[at / PAGE] = false;
            }
        }
    }

    fn collect(&mut self, number: usize, channel: &Channel, wait: bool) -> bool {
        let before = channel.in_flight();
        let done = if wait { channel.wait_for(Duration::from_secs(600)) } else { channel.poll() };
        let Some(done) = done else {
            assert!(!wait || before == 0 || channel.in_flight() == 0, "seed {}: nothing came for 600 s", self.seed);
            return false;
        };
        let (expected, _fate) = self.fates.remove(&(number, done.ticket)).expect("delivered once, and wanted");
        assert_eq!((done.batch.operation(), done.batch.len()), (expected.operation, expected.items.len()));
        self.note("delivered");
        match done.outcome {
            Outcome::Done => self.check(&done.batch, &expected),
            Outcome::Leased => {
                assert!(expected.operation.writes_guest());
                self.note("leased");
            }
            Outcome::Cancelled => self.note("cancelled"),
            other => panic!("{other:?}"),
        }
        self.release(&expected);
        true
    }

    fn check(&self, batch: &Batch, expected: &Expected) {
        for (item, (from, at, bytes, input)) in expected.items.iter().enumerate() {
            let source = &self.first[*from..*from + if input.is_empty() { *bytes } else { 0 }];
            let other = &self.second[*at..*at + if input.is_empty() { *bytes } else { 0 }];
            match expected.operation {
                Operation::ZeroMap => {
                    assert_eq!(
                        batch.is_zero(item),
                        source.iter().all(|byte| *byte == 0),
                        "seed {}, page {item}",
                        self.seed
                    );
                }
                Operation::Compare => {
                    assert_eq!(batch.difference(item), source.iter().zip(other).position(|(a, b)| a != b));
                }
                Operation::Checksum => assert_eq!(batch.checksum(item), crc32c(source)),
                Operation::Copy => assert_eq!(batch.copy(item), source),
                Operation::CopyChecksum => {
                    assert_eq!(batch.copy(item), source);
                    assert_eq!(batch.checksum(item), crc32c(source));
                }
                Operation::CreateDelta => {
                    let after = match batch.delta(item) {
                        Delta::Equal => source.to_vec(),
                        Delta::Record(record) => apply(record, source.to_vec()).expect("a record of its own applies"),
                        Delta::TooLong => panic!("a few bytes differ"),
                    };
                    assert_eq!(after, other);
                }
                Operation::Deflate => {
                    if let Some(stream) = batch.deflated(item) {
                        assert!(stream.len() <= bytes + 8 && !stream.is_empty());
                    }
                }
                _ if input.is_empty() => assert_eq!(batch.placed(item), None, "an input that is not of the format"),
                _ => {
                    assert!(batch.placed(item).is_some());
                    assert_eq!(&self.written.read(*at, PAGE), input, "seed {}, {:?}", self.seed, expected.operation);
                }
            }
        }
    }

    fn drop_or_cancel(&mut self, number: usize, channel: &Channel) {
        let mut mine: Vec<_> = self.fates.keys().filter(|(of, _)| *of == number).copied().collect();
        mine.sort_unstable();
        if mine.is_empty() {
            return;
        }
        let key = mine[self.random.below(mine.len() as u64) as usize];
        let (expected, fate) = self.fates.remove(&key).unwrap();
        match fate {
            Fate::Kept => {
                self.fates.insert(key, (expected, fate));
            }
            // What a device has of it may still be written: those pages are not looked at again.
            Fate::Waiting(ticket) if self.random.once_in(2) => drop(ticket),
            Fate::Waiting(ticket) => match ticket.cancel() {
                Cancelled::Returned(batch) => {
                    self.note("given back");
                    assert_eq!(batch.len(), expected.items.len());
                    self.release(&expected);
                    // It can be handed in again.
                    match channel.submit(batch) {
                        Ok(ticket) => {
                            if expected.operation.writes_guest() {
                                drop(ticket);
                                expected.items.iter().for_each(|(_, at, ..)| self.taken[at / PAGE] = true);
                            } else {
                                let id = ticket.into_id();
                                self.fates.insert((number, id), (expected, Fate::Kept));
                            }
                        }
                        Err((reason, _)) => {
                            assert!(matches!(reason, Reason::Closed | Reason::Leased | Reason::Full), "{reason}");
                        }
                    }
                }
                Cancelled::Disowned => self.note("disowned"),
                Cancelled::Delivered => panic!("it was not taken"),
            },
        }
    }

    fn drop_channel(&mut self, number: usize, channels: &mut [Option<Channel>]) {
        channels[number] = None;
        // Their completions will never come.
        self.fates.retain(|(of, _), _| *of != number);
    }
}

/// What goes into a batch that writes.
fn input(operation: Operation, random: &mut Random) -> Vec<u8> {
    let salt = random.clone().next_u64();
    match operation {
        Operation::Place => (0..PAGE).map(|at| (at as u64 ^ salt) as u8).collect(),
        Operation::ApplyDelta => {
            let mut offsets: Vec<u16> = (0..random.below(20)).map(|_| random.below(512) as u16).collect();
            offsets.sort_unstable();
            offsets.dedup();
            if random.once_in(10) {
                // Beyond the page.
                offsets.push(600);
            }
            let entry = |offset: u16| [&offset.to_le_bytes()[..], &random.next_u64().to_le_bytes()].concat();
            offsets.into_iter().flat_map(entry).collect()
        }
        _ if random.once_in(8) => vec![0xff],
        _ => {
            let bytes = 1 + random.below(PAGE as u64) as u16;
            let mut stream = vec![1];
            stream.extend(bytes.to_le_bytes());
            stream.extend((!bytes).to_le_bytes());
            stream.extend((0..bytes).map(|at| (u64::from(at) ^ salt) as u8));
            stream
        }
    }
}

/// What a delta record makes of a page; none if it does not apply.
fn apply(record: &[u8], mut page: Vec<u8>) -> Option<Vec<u8>> {
    for entry in record.chunks(10) {
        let at = usize::from(u16::from_le_bytes([entry[0], entry[1]])) * 8;
        page.get_mut(at..at + 8)?.copy_from_slice(&entry[2..]);
    }
    Some(page)
}
