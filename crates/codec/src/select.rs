//! Which way drains pages fastest now.
//!
//! A channel's thread encodes a batch and writes it, one after the other. A byte on the wire has a **price**, in time of the thread. The
//! best way for a batch is the one whose encoding, writing and price together are least, so the price is all that has to be known of the
//! link, of the other channels and of the receiver. It rises while the thread waits for the network, and falls while the network has
//! nothing to do, while the receiver is what holds it up (what it is sent then, should be what it has the least work with), and while
//! this side takes more of the CPU than it may. Where it stays at what makes two ways equally good, both are used, which is better than
//! either of them alone.
//!
//! How long a way takes and how small it makes a batch is learned for each *class* of content, by all channels together; a small sample
//! tells the class. There are no clocks here: times are passed in. How good the choice is, `sterna-simulator` and its tests say, in virtual time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::MethodChoice;

/// Upper bounds of the classes: what can be made of a sample, to its size.
const CLASSES: [f64; 10] = [0.03, 0.08, 0.16, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.97];
/// How much an estimate follows its newest value, at least.
const SMOOTH: f64 = 1.0 / 16.0;
/// A packet that took longer than others counts for more, but for so many at most.
const MOST_WEIGHT: f64 = 4.0;
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
/// The price changes by this power of e for a batch that did nothing but wait, or be waited for; and by more with each further batch
/// that says the same: by this factor, up to this power.
const GAIN: f64 = 0.15;
const FASTER: (f64, f64) = (1.2, 0.5);
/// A network that idles is so many times worse than a thread that waits: what it did not carry is lost, and the thread would have made
/// little of its time.
const DEARER: f64 = 4.0;
/// How far beyond the outermost prices that make a difference it goes: coming back from further away would only take longer.
const BEYOND: f64 = 2.0;
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

impl Estimate {
    fn cost(&self, byte: f64) -> f64 {
        self.nanos + byte * self.ratio
    }
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

/// What is known of the ways. The channels of a migration share it: what one has found out, no other has to.
#[derive(Debug)]
pub struct Knowledge(Mutex<Vec<Way>>);

impl Knowledge {
    /// Of `ways`, the cheapest first; what is not measured yet is guessed. There is one at least.
    pub fn new(ways: impl IntoIterator<Item = MethodChoice>) -> Self {
        let way = |choice: MethodChoice| std::array::from_fn(|class| guess(choice, Class(class)));
        let ways: Vec<Way> = ways.into_iter().map(way).collect();
        assert!(!ways.is_empty(), "something has to be chosen");
        Self(Mutex::new(ways))
    }

    fn ways(&self) -> MutexGuard<'_, Vec<Way>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
#[derive(Clone, Debug)]
pub struct Selection {
    knowledge: Arc<Knowledge>,
    price: f64,
    chosen: u32,
    /// By how much it changes now, and whether it rises.
    gain: (f64, bool),
    /// Packets with content that were written.
    sent: u32,
    /// Nanoseconds from one byte on the wire to the next.
    pace: f64,
    /// Nanoseconds from one packet to the next.
    typical: f64,
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
            price: FIRST_PRICE,
            chosen: 0,
            gain: (GAIN, true),
            sent: 0,
            pace: PRICES.0,
            typical: 0.0,
            writing: 0.0,
            placing: (0.0, 0.0),
        }
    }

    /// Nanoseconds that a byte on the wire costs now.
    pub fn price(&self) -> f64 {
        self.price
    }

    /// Whether anything but the cheapest way could be best, whatever the content is: only then is it worth a sample.
    pub fn wants_sample(&self) -> bool {
        let least = |way: &Way| way.iter().map(|class| class.nanos).fold(f64::INFINITY, f64::min);
        self.knowledge.ways().iter().skip(1).any(|way| least(way) < self.byte())
    }

    /// The way for a batch of this class; without a sample, the cheapest.
    pub fn choose(&mut self, class: Option<Class>) -> usize {
        let Some(Class(class)) = class else { return 0 };
        let byte = self.byte();
        let mut ways = self.knowledge.ways();
        let cost = |way: &Way| way[class].cost(byte);
        let costs = ways.iter().map(cost).enumerate();
        let (best, least) = costs.min_by(|one, other| one.1.total_cmp(&other.1)).expect("there is one");
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
            (self.pace, self.typical) = (time / bytes, time);
            return HeldUp { network: waited as f64 / time, receiver: 0.0 };
        }
        follow(&mut self.typical, time);
        follow(&mut self.pace, time / bytes);
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
        // What has nothing to do, nobody waits for: while one does, the network is less idle than it may seem from what is in flight.
        let idles = idle.min(all) as f64 / time * (1.0 - waits);
        let pressure = waits * (1.0 - beyond) - (DEARER * idles).min(1.0).max(receiver).max(beyond);
        let (gain, rises) = &mut self.gain;
        *gain = if *rises == (pressure > 0.0) { (*gain * FASTER.0).min(FASTER.1) } else { GAIN };
        *rises = pressure > 0.0;
        // A limit lets several go at once and then none for long: what counts is time, not packets.
        let weight = (time / self.typical).min(MOST_WEIGHT);
        let price = self.price * f64::exp(*gain * pressure * weight);
        let (least, most) = self.telling_prices();
        self.price = price.clamp(least / BEYOND, most * BEYOND).min(MOST_PART * self.pace).clamp(PRICES.0, PRICES.1);
        HeldUp { network: waits, receiver: waited as f64 / time - waits }
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

    /// Nanoseconds that a byte costs which is sent: its price, and what writing it takes.
    pub fn byte(&self) -> f64 {
        self.price + self.writing
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
        Selection::new(Arc::new(Knowledge::new(ways)))
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
            assert_eq!(selection.choose(None), 0);
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
        let settled = |price: f64| Selection { price, sent: SETTLED, ..selection() };
        let mut selection = settled(1000.0);
        let mut chosen = [0; 6];
        for _ in 0..60 {
            let way = selection.choose(class);
            chosen[way] += 1;
            let output = if way >= 3 { BATCH * 2 / 3 } else { BATCH };
            selection.encoded(way, class, BATCH, output, (BATCH * way) as u64);
        }
        assert!(chosen[3] > 40 && chosen.iter().all(|times| *times > 0), "{chosen:?}");
        selection = settled(0.1);
        assert!((0..60).all(|_| selection.choose(class) == 0));
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
        assert!(selection.choose(Some(Class::of(1, 2))) < 6);
    }
}
