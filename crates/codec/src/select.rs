//! Selects the method that drains pages fastest at the time.
//!
//! A channel's thread encodes a batch and writes it, one after the other. A byte on the wire has a **price**, in time
//! of a thread. The best method for a batch is the one whose encoding, writing and price together are lowest, so the
//! price is nearly all that has to be known of the link and of the receiver. It rises while threads wait for the
//! network and have a CPU. It falls while the network is idle, while the receiver is the bottleneck (which should then
//! get the content that costs it least), and while this side uses more of the CPU than it may. If it stays where two
//! methods are equally good, both are used, which is better than either alone.
//!
//! The price changes slowly, or every stretch of different content would move it. The data queued before the network
//! may be sent sooner: a method that takes longer than that lasts costs the network's time as well.
//!
//! The time and the ratio of a method are learned for each *class* of content, by all channels together; a small sample
//! determines the class. This module has no clock: times are passed in. `sterna-simulator` and its tests measure the
//! quality of the choice, in virtual time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Encoding, Engine};

/// Upper bounds of the classes: a sample's compressed size divided by its size.
const CLASSES: [f64; 10] = [0.03, 0.08, 0.16, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.97];
/// The least weight of the newest value in an estimate.
const SMOOTH: f64 = 1.0 / 16.0;
/// One batch of this many is encoded by another than the best method, so that its estimates stay up to date.
const EXPLORED: u32 = 64;
/// One batch of this many uses a method that was never measured with such content, while one might be best.
const TRIED: u32 = 4;
/// How much smaller than guessed its output is assumed to be then.
const HOPED: f64 = 0.6;
/// No such attempt before this many packets were sent: until then the price has not settled, and attempts may be
/// misjudged.
const SETTLED: u32 = 8;
/// The first price: that of a link of some gigabits per second. If it is too high for a fast link, it falls within a
/// few batches; too low for a slow one, the first batches would fill its queue with compressible content.
const FIRST_PRICE: f64 = 3.0;
/// The price changes by the factor e in this time of constant waiting: at first in this part of the time since the
/// beginning, and within these bounds. Later a few batches of different content should not change it much.
const CALMER: f64 = 0.3;
const CALM: (f64, f64) = (2e6, 60e6);
/// One packet may change it by at most this power of e.
const MAX_CHANGE: f64 = 2.0;
/// How much worse an idle network is than a waiting thread: the network's lost capacity is gone, while the thread would
/// have achieved little.
const DEARER: f64 = 8.0;
/// Expected idleness counts as much as the price, but at most this many times.
const MAX_IDLE_WEIGHT: f64 = 32.0;
/// How far beyond the outermost significant prices it goes: returning from further away would only take longer.
const BEYOND: f64 = 2.0;
/// After this many consecutive samples for which the cheapest method is best, only one batch of this many is sampled.
const PLAIN: u32 = 8;
/// The least saving per byte that makes a method worthwhile.
const MIN_SAVED: f64 = 0.002;
/// The most that a byte costs, as a multiple of its time on the wire: the time of a thread that always waits is worth little.
const MAX_PART: f64 = 100.0;
/// A receiver that is busy for the first part of its time begins to be the bottleneck; from the second part on it is
/// the only one.
const BUSY_RECEIVER: (f64, f64) = (0.85, 0.95);
/// Nanoseconds for each byte: no network is faster than the first, and none that is used for migration is slower than
/// the second.
const PRICES: (f64, f64) = (0.01, 10_000.0);

/// A class of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class(usize);

impl Class {
    /// Returns the class of content, a sample of which has `size` bytes and can be compressed to `encoded` bytes.
    pub fn of(size: usize, encoded: usize) -> Self {
        let ratio = encoded as f64 / size.max(1) as f64;
        Self(CLASSES.iter().position(|most| ratio <= *most).unwrap_or(CLASSES.len()))
    }

    /// Returns the typical compression ratio of a sample of this class.
    fn ratio(self) -> f64 {
        CLASSES.get(self.0).map_or(1.0, |most| most * 0.8)
    }
}

/// The measurements of a method in a class.
#[derive(Clone, Copy, Debug)]
struct Estimate {
    /// Nanoseconds per input byte.
    nanos: f64,
    /// Output bytes per input byte.
    ratio: f64,
    /// Batches that were measured.
    seen: u32,
    /// Whether a channel uses it now, or has: its measurements will soon be known.
    tried: bool,
}

/// The time since a channel's packet before this one, by cause. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Interval {
    /// The thread was running, or waited for a CPU.
    pub busy: u64,
    /// The part of `busy` spent on writing.
    pub writing: u64,
    /// The thread waited until more could be sent.
    pub waited: u64,
    /// The network could have carried more than it was given, meanwhile.
    pub idle: u64,
    /// Time meanwhile in which all sent bytes had arrived, or the receiver's host accepted no more because its program
    /// did not read. 0 where that is not known.
    pub arrived: u64,
    /// Time that the receiver reports to have been busy meanwhile with earlier packets.
    pub placing: u64,
    /// Bytes that were written.
    pub written: usize,
    /// How far this side is beyond the CPU time that it may use: 0 not at all, 1 far.
    pub beyond: f64,
}

/// The measurements of a method, by class.
type MethodEstimates = [Estimate; CLASSES.len() + 1];

/// The measurements of the methods and of the network. The channels of a migration share them, so each measurement is
/// made once; and with a price per channel, one channel could send uncompressed what another compresses at great cost.
#[derive(Debug)]
pub struct SharedEstimates {
    methods: Mutex<Vec<MethodEstimates>>,
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

impl SharedEstimates {
    /// Starts with `methods`, the cheapest first, for this many channels; unmeasured values are guessed. There must be at
    /// least one.
    pub fn new(methods: impl IntoIterator<Item = Encoding>, channels: usize) -> Self {
        let method = |choice: Encoding| std::array::from_fn(|class| guess(choice, Class(class)));
        let methods: Vec<MethodEstimates> = methods.into_iter().map(method).collect();
        assert!(!methods.is_empty(), "something has to be chosen");
        let price = Price { value: FIRST_PRICE, age: 0.0 };
        Self { methods: Mutex::new(methods), price: Mutex::new(price), channels: channels.max(1) as f64 }
    }

    fn methods(&self) -> MutexGuard<'_, Vec<MethodEstimates>> {
        self.methods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn price(&self) -> MutexGuard<'_, Price> {
        self.price.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What delayed a channel, as parts of its time; for the rest it was busy itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Delays {
    /// It waited for the network.
    pub network: f64,
    /// It waited for the receiver.
    pub receiver: f64,
}

/// The choice of one channel.
#[derive(Debug)]
pub struct Selection {
    estimates: Arc<SharedEstimates>,
    chosen: u32,
    /// How often a sample was considered, and for how many of the last ones the cheapest method was best.
    asked: u32,
    plain: u32,
    /// The last choice would have been different if the network had had more to send meanwhile.
    hurried: bool,
    /// Recently, how long this channel had nothing in the network, and how long no channel had.
    empty: (f64, f64),
    /// Packets with content that were written.
    sent: u32,
    /// Nanoseconds from one byte on the wire to the next, while the network has data to send.
    pace: f64,
    /// Nanoseconds that a byte takes to be written.
    writing: f64,
    /// Recently: how long the receiver was busy, of how long.
    placing: (f64, f64),
}

impl Selection {
    /// Makes a selection among the methods of `estimates`.
    pub fn new(estimates: Arc<SharedEstimates>) -> Self {
        Self {
            estimates,
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

    /// Returns the present cost of a byte on the wire, in nanoseconds.
    pub fn price(&self) -> f64 {
        self.estimates.price().value
    }

    /// Returns whether any method but the cheapest could be best, whatever the content: only then is a sample
    /// worthwhile.
    pub fn wants_sample(&mut self) -> bool {
        // If encoding has been of no use for a while, only an occasional sample.
        self.asked = self.asked.wrapping_add(1);
        if self.plain >= PLAIN && !self.asked.is_multiple_of(PLAIN) {
            return false;
        }
        let byte = self.byte();
        let least = |method: &MethodEstimates| method.iter().map(|class| class.nanos).fold(f64::INFINITY, f64::min);
        self.estimates.methods().iter().skip(1).any(|method| least(method) < byte)
    }

    /// Returns the index of the method for a batch of this class and of `size` bytes. `left` is how many nanoseconds
    /// the network still has data to send, if known. Without a class it is the cheapest.
    pub fn choose(&mut self, class: Option<Class>, size: usize, left: Option<u64>) -> usize {
        let Some(Class(class)) = class else { return 0 };
        let byte = self.byte();
        // Per byte of the batch; after that the network's time is lost, valued in the thread's time.
        let left = left.map_or(f64::INFINITY, |left| left as f64 / size.max(1) as f64);
        let idle_costs = (self.price() / self.pace).min(MAX_IDLE_WEIGHT) * self.alone();
        let mut methods = self.estimates.methods();
        let cheapest = |idle_costs: f64| {
            let cost = |method: &MethodEstimates| {
                let Estimate { nanos, ratio, .. } = method[class];
                nanos + byte * ratio + idle_costs * (nanos - left).max(0.0)
            };
            let costs = methods.iter().map(cost).enumerate();
            costs.min_by(|one, other| one.1.total_cmp(&other.1)).expect("there is one")
        };
        let (best, least) = cheapest(idle_costs);
        self.hurried = cheapest(0.0).0 != best;
        self.plain = if best == 0 { self.plain.saturating_add(1) } else { 0 };
        self.chosen = self.chosen.wrapping_add(1);
        if self.sent >= SETTLED && self.chosen.is_multiple_of(TRIED) {
            // It could be best if its output is considerably smaller than guessed.
            let at_best = |estimate: Estimate| estimate.nanos + byte * estimate.ratio * HOPED;
            let could = |method: &MethodEstimates| !method[class].tried && at_best(method[class]) < least;
            if let Some(untried) = methods.iter().skip(1).position(could) {
                methods[untried + 1][class].tried = true;
                return untried + 1;
            }
        }
        methods[best][class].tried = true;
        if !self.chosen.is_multiple_of(EXPLORED) {
            return best;
        }
        // An attempt takes no longer than the batch costs with the best method; whether it pays is what is to be
        // learned.
        let affordable = |at: &usize| *at != best && methods[*at][class].nanos < least;
        (0..methods.len()).filter(affordable).min_by_key(|at| methods[*at][class].seen).unwrap_or(best)
    }

    /// Records that a batch of `input` bytes was encoded in `nanos` nanoseconds, into `output` bytes. Pass CPU time
    /// where a CPU encodes: time when other threads have the CPU is not the method's.
    pub fn encoded(&mut self, method: usize, class: Option<Class>, input: usize, output: usize, nanos: u64) {
        if let Some(Class(class)) = class
            && input > 0
        {
            let estimate = &mut self.estimates.methods()[method][class];
            // Its time may include other threads' work, so the guess has a weight beside the first measurement; its
            // size does not.
            let follow = |values: u32| SMOOTH.max(1.0 / f64::from(values));
            let times = estimate.seen.saturating_add(2);
            estimate.nanos += (nanos as f64 / input as f64 - estimate.nanos) * follow(times);
            estimate.ratio += (output as f64 / input as f64 - estimate.ratio) * follow(times - 1);
            estimate.seen = estimate.seen.saturating_add(1);
        }
    }

    /// Records that a packet with content was written. Returns what delayed it.
    pub fn sent(&mut self, interval: &Interval) -> Delays {
        let &Interval { busy, writing, waited, idle, arrived, placing, written, beyond } = interval;
        let all = busy.saturating_add(waited);
        if all == 0 || written == 0 {
            return Delays::default();
        }
        let (time, bytes) = (all as f64, written as f64);
        let follow = |value: &mut f64, newest: f64| *value += (newest - *value) * SMOOTH;
        self.sent = self.sent.saturating_add(1);
        if self.sent == 1 {
            // Before the first data every network is idle.
            self.pace = time / bytes;
            return Delays { network: waited as f64 / time, receiver: 0.0 };
        }
        follow(&mut self.pace, ((time - idle.min(all) as f64) / bytes).max(PRICES.0));
        follow(&mut self.empty.0, arrived.min(all) as f64);
        follow(&mut self.empty.1, idle.min(all) as f64);
        follow(&mut self.writing, writing.min(busy) as f64 / bytes);
        let (busy_receiver, of) = &mut self.placing;
        // An acknowledgement stands for several packets, so only the sums can be compared.
        (*busy_receiver, *of) = (*busy_receiver * (1.0 - SMOOTH) + placing as f64, *of * (1.0 - SMOOTH) + time);
        let (from, to) = BUSY_RECEIVER;
        // Where CPUs are scarce its thread is busy for long with little work, and other threads wait for it only if
        // nothing is left in the network. Nor is that sufficient: a slow network may lie behind a relay that accepts no
        // more.
        let alone = ((*busy_receiver / *of - from) / (to - from)).clamp(0.0, 1.0);
        let receiver = alone * arrived.min(all) as f64 / time;
        let waits = waited as f64 / time * (1.0 - receiver);
        let held_up = Delays { network: waits, receiver: waited as f64 / time * receiver };
        // No thread waits for an idle network: while one does, the network is less idle than the bytes in flight
        // suggest.
        let idles = idle.min(all) as f64 / time * (1.0 - waits);
        let pressure = waits * (1.0 - beyond) - (DEARER * idles).min(1.0).max(receiver).max(beyond);
        // A price that demands more than there is time for need not rise.
        let pressure = if self.hurried { pressure.min(0.0) } else { pressure };
        let (least, most) = self.telling_prices();
        let mut price = self.estimates.price();
        let time = time / self.estimates.channels;
        price.age += time;
        let calm = (price.age * CALMER).clamp(CALM.0, CALM.1);
        let changed = price.value * f64::exp(pressure * (time / calm).min(MAX_CHANGE));
        price.value = changed.clamp(least / BEYOND, most * BEYOND).min(MAX_PART * self.pace).clamp(PRICES.0, PRICES.1);
        held_up
    }

    /// Returns the lowest price at which any but the cheapest method is best for some content, and the highest at which
    /// the best method changes for any.
    fn telling_prices(&self) -> (f64, f64) {
        let (mut least, mut most) = (PRICES.1, PRICES.0);
        let methods = self.estimates.methods();
        for (at, method) in methods.iter().enumerate() {
            for other in &methods[at + 1..] {
                for (one, other) in method.iter().zip(other) {
                    let (nanos, saved) = (other.nanos - one.nanos, one.ratio - other.ratio);
                    if saved > MIN_SAVED {
                        let even = (nanos / saved - self.writing).max(PRICES.0);
                        (least, most) = (least.min(even), most.max(even));
                    }
                }
            }
        }
        (least, most.max(least))
    }

    /// Returns in which part of the time in which this channel has nothing in the network, no other channel has either.
    fn alone(&self) -> f64 {
        let (this, all) = self.empty;
        if this > all { all / this } else { 1.0 }
    }

    /// Returns the cost of a byte that is sent, in nanoseconds: its price, and the time of writing it.
    pub fn byte(&self) -> f64 {
        self.price() + self.writing
    }
}

/// Returns an estimate of a method before it was measured: of the order of the results of `examples/codec_throughput`.
fn guess(encoding: Encoding, class: Class) -> Estimate {
    let (nanos, factor) = match (encoding.method().name(), encoding.level().unwrap_or(0)) {
        _ if encoding.engine() != Engine::Cpu => (2.0, 0.8),
        ("none", _) => return Estimate { nanos: 0.0, ratio: 1.0, seen: 0, tried: true },
        ("lz4", _) => (1.3, 0.9),
        ("zstd", ..=-3) => (1.5, 0.9),
        ("zstd", ..=0) => (1.8, 0.8),
        ("zstd", 1..=2) => (2.2, 0.7),
        ("zstd", 3..=4) => (3.5, 0.66),
        ("zstd", 5..=6) => (9.0, 0.62),
        ("zstd", _) => (18.0, 0.6),
        _ => (5.0, 0.7),
    };
    let ratio = class.ratio();
    // Content that hardly shrinks is abandoned early, and content that shrinks much is soon done.
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
    use crate::MethodChoice;

    const BATCH: usize = 512 << 10;

    fn encodings(names: &[&str]) -> Vec<Encoding> {
        names.iter().map(|name| name.parse::<MethodChoice>().unwrap().by_cpu().unwrap()).collect()
    }

    fn selection() -> Selection {
        let methods = encodings(&["none", "lz4", "zstd -1", "zstd 1", "zstd 3", "zstd 6"]);
        Selection::new(Arc::new(SharedEstimates::new(methods, 1)))
    }

    #[test]
    fn while_the_network_is_no_bottleneck_nothing_is_sampled_or_compressed() {
        let mut selection = selection();
        let free = Interval { busy: 100_000, idle: 50_000, written: BATCH, ..Interval::default() };
        // The first choice is soon abandoned.
        for _ in 0..50 {
            selection.sent(&free);
        }
        for _ in 0..1000 {
            assert!(!selection.wants_sample());
            assert_eq!(selection.choose(None, BATCH, None), 0);
            selection.encoded(0, None, BATCH, BATCH, 0);
            selection.sent(&free);
        }
        // An occasional wait does not change that.
        for _ in 0..1000 {
            selection.sent(&Interval { busy: 99_000, waited: 2_000, idle: 20_000, ..free });
        }
        assert!(!selection.wants_sample());
    }

    #[test]
    fn an_unmeasured_method_is_tried_where_it_could_be_best_and_nowhere_else() {
        // LZ4, and so the sample and the guesses, find nothing to compress in it.
        let class = Some(Class::of(100, 100));
        let settled = |price: f64| {
            let selection = Selection { sent: SETTLED, ..selection() };
            selection.estimates.price().value = price;
            selection
        };
        let mut selection = settled(1000.0);
        let mut chosen = [0; 6];
        for _ in 0..60 {
            let method = selection.choose(class, BATCH, None);
            chosen[method] += 1;
            let output = if method >= 3 { BATCH * 2 / 3 } else { BATCH };
            selection.encoded(method, class, BATCH, output, (BATCH * method) as u64);
        }
        assert!(chosen[3] > 40 && chosen.iter().all(|times| *times > 0), "{chosen:?}");
        selection = settled(0.1);
        assert!((0..60).all(|_| selection.choose(class, BATCH, None) == 0));
    }

    #[test]
    fn the_causes_of_delay_are_parts_of_a_channels_own_time_for_any_number_of_channels() {
        for channels in [1, 2, 64] {
            let methods = encodings(&["none", "zstd 1"]);
            let mut selection = Selection::new(Arc::new(SharedEstimates::new(methods, channels)));
            let network = Interval { busy: 100_000, waited: 300_000, written: BATCH, ..Interval::default() };
            for _ in 0..100 {
                assert_eq!(selection.sent(&network), Delays { network: 0.75, receiver: 0.0 });
            }
            // All sent bytes have arrived, and the receiver is busy with them.
            let receiver = Interval { arrived: 400_000, placing: 400_000, ..network };
            let held_up = (0..100).map(|_| selection.sent(&receiver)).last();
            assert_eq!(held_up, Some(Delays { network: 0.0, receiver: 0.75 }), "{channels} channels");
        }
    }

    #[test]
    fn the_price_stays_finite_for_any_input() {
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
