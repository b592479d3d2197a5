//! Which way drains pages fastest now.
//!
//! A channel's thread encodes a batch and writes it, one after the other. A byte on the wire has a **price**, in time of a thread. The
//! best way for a batch is the one whose encoding, writing and price together are least, so the price is nearly all that has to be known
//! of the link and of the receiver. It rises while threads wait for the network and have a CPU, and falls while the network has nothing to
//! do, while the receiver is what holds them up (what it is sent then, should be what it has the least work with), and while this side
//! takes more of the CPU than it may. Where it stays at what makes two ways equally good, both are used, which is better than either of
//! them alone.
//!
//! The price changes slowly, or every stretch of other content would. What lies before the network may be gone sooner: a way that takes
//! longer than that lasts costs the network's time as well.
//!
//! How long a way takes and how small it makes a batch is learned for each *class* of content, by all channels together; a small sample
//! tells the class. There are no clocks here: times are passed in. How good the choice is, `sterna-simulator` and its tests say, in virtual time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::MethodChoice;

/// Upper bounds of the classes: what can be made of a sample, to its size.
const CLASSES: [f64; 10] = [0.03, 0.08, 0.16, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.97];
/// How much an estimate follows its newest value, at least.
const SMOOTH: f64 = 1.0 / 16.0;
/// One batch of so many is encoded by another than the best way, so that what is known of it stays true.
const EXPLORED: u32 = 64;
/// And one of so many by a way that was never measured with such content, while there is any that could be best.
const TRIED: u32 = 4;
/// What it makes of content then may be so much smaller than guessed.
const HOPED: f64 = 0.6;
/// But not before so many packets were sent: until then the price is not what it will be, and what seems to be worth a try may not be.
const SETTLED: u32 = 8;
/// The price at first: of a link of some gigabits per second. Too high for a fast link, it falls within a few batches; too low for a
/// slow one, the first batches would fill its queue with what could have been small.
const FIRST_PRICE: f64 = 3.0;
/// The price changes by the factor e in such a time of nothing but waiting, or being waited for: at first in this part of the time since
/// the beginning, and within these bounds. Later some batches of other content are no reason to change it by much.
const CALMER: f64 = 0.3;
const CALM: (f64, f64) = (2e6, 60e6);
/// One packet may change it by this power of e.
const MOST_CHANGE: f64 = 2.0;
/// A network that idles is so many times worse than a thread that waits: what it did not carry is lost, and the thread would have made
/// little of its time.
const DEARER: f64 = 8.0;
/// And when it is to be expected, it counts as much as the price says, but so many times at most.
const MOST_DEAR: f64 = 32.0;
/// How far beyond the outermost prices that make a difference it goes: coming back from further away would only take longer.
const BEYOND: f64 = 2.0;
/// After so many samples in a row by which the cheapest way is best, only one batch of so many is looked at.
const PLAIN: u32 = 8;
/// What a way must save of each byte to be worth a thought.
const LEAST_SAVED: f64 = 0.002;
/// A byte costs no more than so many times its time on the wire: the time of a thread that always waits is worth little.
const MOST_PART: f64 = 100.0;
/// A receiver that is busy for this part of its time begins to be what holds its source up; for the other, it is alone in that.
const BUSY_RECEIVER: (f64, f64) = (0.85, 0.95);
/// Nanoseconds for each byte: what no network is faster than, and what none is slower than that anybody would move a guest over.
const PRICES: (f64, f64) = (0.01, 10_000.0);

/// A class of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class(usize);

impl Class {
    /// Of content of which a sample of `size` bytes can be made so small.
    pub fn of(size: usize, encoded: usize) -> Self {
        let ratio = encoded as f64 / size.max(1) as f64;
        Self(CLASSES.iter().position(|most| ratio <= *most).unwrap_or(CLASSES.len()))
    }

    /// What a sample of it became, to its size.
    fn ratio(self) -> f64 {
        CLASSES.get(self.0).map_or(1.0, |most| most * 0.8)
    }
}

/// What is known of a way in a class.
#[derive(Clone, Copy, Debug)]
struct Estimate {
    /// Nanoseconds for each byte that goes in.
    nanos: f64,
    /// Bytes that come out for each that goes in.
    ratio: f64,
    /// Batches that were measured.
    seen: u32,
    /// Whether somebody uses it now, or has: what it is like will soon be known.
    tried: bool,
}

/// What became of the time since a channel's packet before this one. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Interval {
    /// The thread was running, or waited for a CPU.
    pub busy: u64,
    /// What of that was writing.
    pub writing: u64,
    /// The thread waited until more could be sent.
    pub waited: u64,
    /// Meanwhile the network could have carried more than it was given.
    pub idle: u64,
    /// Meanwhile all that was sent had arrived, or the receiver's host took no more because its program did not read. 0 where that is
    /// not known.
    pub arrived: u64,
    /// Meanwhile the receiver has said that it was busy for so long with what had come before.
    pub placing: u64,
    /// Bytes that were written.
    pub written: usize,
    /// How far this side is beyond the CPU time that it may use: 0 not at all, 1 far.
    pub beyond: f64,
}

/// What is known of a way, by class.
type Way = [Estimate; CLASSES.len() + 1];

/// What is known of the ways and of the network. The channels of a migration share it: what one has found out, no other has to; and
/// where each had a price of its own, one could go on sending what another takes great pains to make small.
#[derive(Debug)]
pub struct Knowledge {
    ways: Mutex<Vec<Way>>,
    price: Mutex<Price>,
    channels: f64,
}

#[derive(Clone, Copy, Debug)]
struct Price {
    /// Nanoseconds of a thread for each byte on the wire.
    value: f64,
    /// Nanoseconds since the first packet, of all channels together.
    age: f64,
}

impl Knowledge {
    /// Of `ways`, the cheapest first, for so many channels; what is not measured yet is guessed. There is one at least.
    pub fn new(ways: impl IntoIterator<Item = MethodChoice>, channels: usize) -> Self {
        let way = |choice: MethodChoice| std::array::from_fn(|class| guess(choice, Class(class)));
        let ways: Vec<Way> = ways.into_iter().map(way).collect();
        assert!(!ways.is_empty(), "something has to be chosen");
        let price = Price { value: FIRST_PRICE, age: 0.0 };
        Self { ways: Mutex::new(ways), price: Mutex::new(price), channels: channels.max(1) as f64 }
    }

    fn ways(&self) -> MutexGuard<'_, Vec<Way>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn price(&self) -> MutexGuard<'_, Price> {
        self.price.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What held a channel up, each as a part of its time; for the rest it was busy itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeldUp {
    /// It waited for the network.
    pub network: f64,
    /// It waited for the receiver.
    pub receiver: f64,
}

/// The choice of one channel.
#[derive(Debug)]
pub struct Selection {
    knowledge: Arc<Knowledge>,
    chosen: u32,
    /// How often it was asked for a sample, and how many of the last ones said that the cheapest way is best.
    asked: u32,
    plain: u32,
    /// The last choice would have been another, had the network had more to do meanwhile.
    hurried: bool,
    /// Of late, how long nothing of this channel was in the network, and how long nothing of any.
    empty: (f64, f64),
    /// Packets with content that were written.
    sent: u32,
    /// Nanoseconds from one byte on the wire to the next, while the network has something to do.
    pace: f64,
    /// Nanoseconds that a byte takes to be written.
    writing: f64,
    /// Of late: how long the receiver was busy, of how long.
    placing: (f64, f64),
}

impl Selection {
    /// Among the ways that `knowledge` is of.
    pub fn new(knowledge: Arc<Knowledge>) -> Self {
        Self {
            knowledge,
            chosen: 0,
            hurried: false,
            asked: 0,
            plain: 0,
            empty: (0.0, 0.0),
            sent: 0,
            pace: PRICES.0,
            writing: 0.0,
            placing: (0.0, 0.0),
        }
    }

    /// Nanoseconds that a byte on the wire costs now.
    pub fn price(&self) -> f64 {
        self.knowledge.price().value
    }

    /// Whether anything but the cheapest way could be best, whatever the content is: only then is it worth a sample.
    pub fn wants_sample(&mut self) -> bool {
        // Where content has been of no use to encode for a while, only now and then whether it still is.
        self.asked = self.asked.wrapping_add(1);
        if self.plain >= PLAIN && !self.asked.is_multiple_of(PLAIN) {
            return false;
        }
        let byte = self.byte();
        let least = |way: &Way| way.iter().map(|class| class.nanos).fold(f64::INFINITY, f64::min);
        self.knowledge.ways().iter().skip(1).any(|way| least(way) < byte)
    }

    /// The way for a batch of this class and of so many bytes, where the network has something to do for so many nanoseconds still, if that
    /// is known; without a sample, the cheapest.
    pub fn choose(&mut self, class: Option<Class>, size: usize, left: Option<u64>) -> usize {
        let Some(Class(class)) = class else { return 0 };
        let byte = self.byte();
        // For each byte of the batch; after it the network's time is lost, at what that is worth in the thread's.
        let left = left.map_or(f64::INFINITY, |left| left as f64 / size.max(1) as f64);
        let idle_costs = (self.price() / self.pace).min(MOST_DEAR) * self.alone();
        let mut ways = self.knowledge.ways();
        let cheapest = |idle_costs: f64| {
            let cost = |way: &Way| {
                let Estimate { nanos, ratio, .. } = way[class];
                nanos + byte * ratio + idle_costs * (nanos - left).max(0.0)
            };
            let costs = ways.iter().map(cost).enumerate();
            costs.min_by(|one, other| one.1.total_cmp(&other.1)).expect("there is one")
        };
        let (best, least) = cheapest(idle_costs);
        self.hurried = cheapest(0.0).0 != best;
        self.plain = if best == 0 { self.plain.saturating_add(1) } else { 0 };
        self.chosen = self.chosen.wrapping_add(1);
        if self.sent >= SETTLED && self.chosen.is_multiple_of(TRIED) {
            // It could be if it makes things a good deal smaller than is guessed.
            let at_best = |estimate: Estimate| estimate.nanos + byte * estimate.ratio * HOPED;
            let could = |way: &Way| !way[class].tried && at_best(way[class]) < least;
            if let Some(untried) = ways.iter().skip(1).position(could) {
                ways[untried + 1][class].tried = true;
                return untried + 1;
            }
        }
        ways[best][class].tried = true;
        if !self.chosen.is_multiple_of(EXPLORED) {
            return best;
        }
        // A try takes no longer than what the batch costs at best; whether it makes up for that is what is to be learned.
        let affordable = |at: &usize| *at != best && ways[*at][class].nanos < least;
        (0..ways.len()).filter(affordable).min_by_key(|at| ways[*at][class].seen).unwrap_or(best)
    }

    /// A batch of `input` bytes was encoded in so many nanoseconds, into `output` bytes. A CPU's time is best, where it is one that
    /// encodes: when others have the CPU meanwhile, that is not the way's doing.
    pub fn encoded(&mut self, way: usize, class: Option<Class>, input: usize, output: usize, nanos: u64) {
        if let Some(Class(class)) = class
            && input > 0
        {
            let estimate = &mut self.knowledge.ways()[way][class];
            // How long it took may have been the neighbours' doing, so a guess counts for something beside the first; how small it became,
            // was not.
            let follow = |values: u32| SMOOTH.max(1.0 / f64::from(values));
            let times = estimate.seen.saturating_add(2);
            estimate.nanos += (nanos as f64 / input as f64 - estimate.nanos) * follow(times);
            estimate.ratio += (output as f64 / input as f64 - estimate.ratio) * follow(times - 1);
            estimate.seen = estimate.seen.saturating_add(1);
        }
    }

    /// A packet with content was written. Says what held it up.
    pub fn sent(&mut self, interval: &Interval) -> HeldUp {
        let &Interval { busy, writing, waited, idle, arrived, placing, written, beyond } = interval;
        let all = busy.saturating_add(waited);
        if all == 0 || written == 0 {
            return HeldUp::default();
        }
        let (time, bytes) = (all as f64, written as f64);
        let follow = |value: &mut f64, newest: f64| *value += (newest - *value) * SMOOTH;
        self.sent = self.sent.saturating_add(1);
        if self.sent == 1 {
            // Until there is something to send, every network has nothing to do.
            self.pace = time / bytes;
            return HeldUp { network: waited as f64 / time, receiver: 0.0 };
        }
        follow(&mut self.pace, ((time - idle.min(all) as f64) / bytes).max(PRICES.0));
        follow(&mut self.empty.0, arrived.min(all) as f64);
        follow(&mut self.empty.1, idle.min(all) as f64);
        follow(&mut self.writing, writing.min(busy) as f64 / bytes);
        let (busy_receiver, of) = &mut self.placing;
        // An acknowledgement stands for several packets, so only the sums can be compared.
        (*busy_receiver, *of) = (*busy_receiver * (1.0 - SMOOTH) + placing as f64, *of * (1.0 - SMOOTH) + time);
        let (from, to) = BUSY_RECEIVER;
        // Where CPUs are short its thread is busy for long with little, and only where nothing is left in the network is it what others
        // wait for. Nor is that enough: before a relay that takes no more there may be a slow network.
        let alone = ((*busy_receiver / *of - from) / (to - from)).clamp(0.0, 1.0);
        let receiver = alone * arrived.min(all) as f64 / time;
        let waits = waited as f64 / time * (1.0 - receiver);
        let held_up = HeldUp { network: waits, receiver: waited as f64 / time * receiver };
        // What has nothing to do, nobody waits for: while one does, the network is less idle than it may seem from what is in flight.
        let idles = idle.min(all) as f64 / time * (1.0 - waits);
        let pressure = waits * (1.0 - beyond) - (DEARER * idles).min(1.0).max(receiver).max(beyond);
        // A price that asks for more than there is time for need not rise.
        let pressure = if self.hurried { pressure.min(0.0) } else { pressure };
        let (least, most) = self.telling_prices();
        let mut price = self.knowledge.price();
        let time = time / self.knowledge.channels;
        price.age += time;
        let calm = (price.age * CALMER).clamp(CALM.0, CALM.1);
        let changed = price.value * f64::exp(pressure * (time / calm).min(MOST_CHANGE));
        price.value = changed.clamp(least / BEYOND, most * BEYOND).min(MOST_PART * self.pace).clamp(PRICES.0, PRICES.1);
        held_up
    }

    /// The least price at which anything but the cheapest way is best for some content, and the highest at which the way changes for any.
    fn telling_prices(&self) -> (f64, f64) {
        let (mut least, mut most) = (PRICES.1, PRICES.0);
        let ways = self.knowledge.ways();
        for (at, way) in ways.iter().enumerate() {
            for other in &ways[at + 1..] {
                for (one, other) in way.iter().zip(other) {
                    let (nanos, saved) = (other.nanos - one.nanos, one.ratio - other.ratio);
                    if saved > LEAST_SAVED {
                        let even = (nanos / saved - self.writing).max(PRICES.0);
                        (least, most) = (least.min(even), most.max(even));
                    }
                }
            }
        }
        (least, most.max(least))
    }

    /// In which part of the time in which this channel has nothing in the network, no other has.
    fn alone(&self) -> f64 {
        let (this, all) = self.empty;
        if this > all { all / this } else { 1.0 }
    }

    /// Nanoseconds that a byte costs which is sent: its price, and what writing it takes.
    pub fn byte(&self) -> f64 {
        self.price() + self.writing
    }
}

/// What a way may be like before it was ever measured: of the order of what `examples/codec_throughput` measures.
fn guess(choice: MethodChoice, class: Class) -> Estimate {
    let (nanos, factor) = match (choice.method().name(), choice.level().unwrap_or(0)) {
        ("none", _) => return Estimate { nanos: 0.0, ratio: 1.0, seen: 0, tried: true },
        ("lz4", _) => (1.3, 0.9),
        ("zstd", ..=-3) => (1.5, 0.9),
        ("zstd", ..=0) => (1.8, 0.8),
        ("zstd", 1..=2) => (2.2, 0.7),
        ("zstd", 3..=4) => (3.5, 0.66),
        ("zstd", 5..=6) => (9.0, 0.62),
        ("zstd", _) => (18.0, 0.6),
        ("iaa" | "qatzip", _) => (2.0, 0.8),
        _ => (5.0, 0.7),
    };
    let ratio = class.ratio();
    // What hardly shrinks is given up early, and what shrinks much is soon done.
    let effort = if ratio >= 0.95 { 0.3 } else { 0.4 + 0.6 * ratio.min(1.0) / 0.5 };
    Estimate {
        nanos: nanos * effort.min(1.2),
        ratio: if ratio >= 0.95 { 1.0 } else { ratio * factor },
        seen: 0,
        tried: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: usize = 512 << 10;

    fn choices(names: &[(&str, Option<&str>)]) -> Vec<MethodChoice> {
        names.iter().map(|(name, level)| MethodChoice::parse(name, *level).unwrap()).collect()
    }

    fn selection() -> Selection {
        let ways = choices(&[
            ("none", None),
            ("lz4", None),
            ("zstd", Some("-1")),
            ("zstd", Some("1")),
            ("zstd", Some("3")),
            ("zstd", Some("6")),
        ]);
        Selection::new(Arc::new(Knowledge::new(ways, 1)))
    }

    #[test]
    fn where_the_network_does_not_bind_nothing_is_sampled_or_compressed() {
        let mut selection = selection();
        let free = Interval { busy: 100_000, idle: 50_000, written: BATCH, ..Interval::default() };
        // What it begins with is given up soon.
        for _ in 0..50 {
            selection.sent(&free);
        }
        for _ in 0..1000 {
            assert!(!selection.wants_sample());
            assert_eq!(selection.choose(None, BATCH, None), 0);
            selection.encoded(0, None, BATCH, BATCH, 0);
            selection.sent(&free);
        }
        // A wait now and then is no reason either.
        for _ in 0..1000 {
            selection.sent(&Interval { busy: 99_000, waited: 2_000, idle: 20_000, ..free });
        }
        assert!(!selection.wants_sample());
    }

    #[test]
    fn what_was_never_measured_is_tried_where_it_could_be_best_and_nowhere_else() {
        // LZ4, and so the sample and the guesses, see nothing in it.
        let class = Some(Class::of(100, 100));
        let settled = |price: f64| {
            let selection = Selection { sent: SETTLED, ..selection() };
            selection.knowledge.price().value = price;
            selection
        };
        let mut selection = settled(1000.0);
        let mut chosen = [0; 6];
        for _ in 0..60 {
            let way = selection.choose(class, BATCH, None);
            chosen[way] += 1;
            let output = if way >= 3 { BATCH * 2 / 3 } else { BATCH };
            selection.encoded(way, class, BATCH, output, (BATCH * way) as u64);
        }
        assert!(chosen[3] > 40 && chosen.iter().all(|times| *times > 0), "{chosen:?}");
        selection = settled(0.1);
        assert!((0..60).all(|_| selection.choose(class, BATCH, None) == 0));
    }

    #[test]
    fn what_held_a_channel_up_is_a_part_of_its_own_time_however_many_there_are() {
        for channels in [1, 2, 64] {
            let ways = choices(&[("none", None), ("zstd", Some("1"))]);
            let mut selection = Selection::new(Arc::new(Knowledge::new(ways, channels)));
            let network = Interval { busy: 100_000, waited: 300_000, written: BATCH, ..Interval::default() };
            for _ in 0..100 {
                assert_eq!(selection.sent(&network), HeldUp { network: 0.75, receiver: 0.0 });
            }
            // All that was sent has arrived, and the receiver is busy with it.
            let receiver = Interval { arrived: 400_000, placing: 400_000, ..network };
            let held_up = (0..100).map(|_| selection.sent(&receiver)).last();
            assert_eq!(held_up, Some(HeldUp { network: 0.0, receiver: 0.75 }), "{channels} channels");
        }
    }

    #[test]
    fn the_price_stays_finite_whatever_is_told() {
        let mut selection = selection();
        let extremes = [(0, 0, 0), (0, u64::MAX, 1), (u64::MAX, u64::MAX, 0), (0, 1, usize::MAX), (u64::MAX, 0, 1)];
        for (busy, waited, written) in extremes {
            for _ in 0..1000 {
                let (idle, writing, placing) = (busy, waited, waited);
                let arrived = waited;
                selection.sent(&Interval { busy, writing, waited, idle, arrived, placing, written, beyond: 1.0 });
                assert!(selection.price() >= PRICES.0 && selection.price() <= PRICES.1);
            }
        }
        selection.encoded(1, Some(Class::of(0, 0)), 0, 0, 5);
        assert!(selection.choose(Some(Class::of(1, 2)), BATCH, Some(0)) < 6);
    }
}
