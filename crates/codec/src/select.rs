//! Which way drains pages fastest now.
//!
//! A channel's thread encodes a batch and writes it, one after the other. A byte on the wire has a **price**, in time of the thread. The
//! best way for a batch is the one whose encoding time and price together are least, so the price is all that has to be known of the link,
//! of the other channels and of the receiver. It rises while the thread waits for the network, and falls while the network has
//! nothing to do. Where it stays at what makes two ways equally good, both are used, which is better than either of them alone.
//!
//! How long a way takes and how small it makes a batch is learned for each *class* of content; a small sample by LZ4 tells the class.
//! There are no clocks here: times are passed in.

use crate::MethodChoice;

/// Upper bounds of the classes: what LZ4 makes of a sample, to its size.
const CLASSES: [f64; 8] = [0.03, 0.08, 0.16, 0.3, 0.45, 0.6, 0.8, 0.95];
/// How much an estimate follows its newest value, at least.
const SMOOTH: f64 = 1.0 / 16.0;
/// One batch of so many is encoded by a neighbour of the best way, so that its estimate stays true.
const EXPLORED: u32 = 64;
/// No neighbour is tried that is expected to take this many times as long as the best.
const TOO_DEAR: f64 = 2.0;
/// The price at first: of a link of some gigabits per second. Too high for a fast link, it falls within a few batches; too low for a
/// slow one, the first batches would fill its queue with what could have been small.
const FIRST_PRICE: f64 = 4.0;
/// The price changes by this power of e for a batch that did nothing but wait, or be waited for.
const GAIN: f64 = 0.3;
/// A byte costs no less than this part of its time on the wire once the thread waits most of the time.
const LEAST_PART: f64 = 0.1;
/// And no more than so many times its time on the wire: the time of a thread that always waits is worth little.
const MOST_PART: f64 = 100.0;
/// Nanoseconds for each byte: what no network is faster than, and what none is slower than that anybody would move a guest over.
const PRICES: (f64, f64) = (0.01, 10_000.0);

/// A class of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class(usize);

impl Class {
    /// Of content of which a sample of `size` bytes became so many by LZ4.
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
}

impl Estimate {
    fn cost(&self, price: f64) -> f64 {
        self.nanos + price * self.ratio
    }
}

/// What is known of a way, by class.
type Way = [Estimate; CLASSES.len() + 1];

/// The choice of one channel.
#[derive(Clone, Debug)]
pub struct Selection {
    ways: Vec<Way>,
    price: f64,
    chosen: u32,
    /// Nanoseconds from one byte on the wire to the next.
    pace: f64,
}

impl Selection {
    /// Among `ways`, the cheapest first; what is not measured yet is guessed. There is one at least.
    pub fn new(ways: impl IntoIterator<Item = MethodChoice>) -> Self {
        let way = |choice: MethodChoice| std::array::from_fn(|class| guess(choice, Class(class)));
        let ways: Vec<Way> = ways.into_iter().map(way).collect();
        assert!(!ways.is_empty(), "something has to be chosen");
        Self { ways, price: FIRST_PRICE, chosen: 0, pace: PRICES.0 }
    }

    /// Nanoseconds that a byte on the wire costs now.
    pub fn price(&self) -> f64 {
        self.price
    }

    /// Whether anything but the cheapest way could be best, whatever the content is: only then is it worth a sample.
    pub fn wants_sample(&self) -> bool {
        let least = |way: &Way| way.iter().map(|class| class.nanos).fold(f64::INFINITY, f64::min);
        self.ways.iter().skip(1).any(|way| least(way) < self.price)
    }

    /// The way for a batch of this class; without a sample, the cheapest.
    pub fn choose(&mut self, class: Option<Class>) -> usize {
        let Some(Class(class)) = class else { return 0 };
        let cost = |way: &Way| way[class].cost(self.price);
        let costs = self.ways.iter().map(cost).enumerate();
        let (best, least) = costs.min_by(|one, other| one.1.total_cmp(&other.1)).expect("there is one");
        self.chosen = self.chosen.wrapping_add(1);
        if !self.chosen.is_multiple_of(EXPLORED) {
            return best;
        }
        let neighbours = [best.checked_sub(1), Some(best + 1)].into_iter().flatten();
        let affordable = |at: &usize| self.ways.get(*at).is_some_and(|way| cost(way) < TOO_DEAR * least);
        neighbours.filter(affordable).min_by_key(|at| self.ways[*at][class].seen).unwrap_or(best)
    }

    /// A batch of `input` bytes was encoded in so many nanoseconds, into `output` bytes.
    pub fn encoded(&mut self, way: usize, class: Option<Class>, input: usize, output: usize, nanos: u64) {
        if let Some(Class(class)) = class
            && input > 0
        {
            let estimate = &mut self.ways[way][class];
            let follow = SMOOTH.max(1.0 / (f64::from(estimate.seen) + 2.0));
            estimate.nanos += (nanos as f64 / input as f64 - estimate.nanos) * follow;
            estimate.ratio += (output as f64 / input as f64 - estimate.ratio) * follow;
            estimate.seen = estimate.seen.saturating_add(1);
        }
    }

    /// For its last batch the thread was busy for so long and waited for the network for so long; meanwhile the network had nothing to
    /// do for so long. So many bytes were written. Times are in nanoseconds.
    pub fn sent(&mut self, busy: u64, waited: u64, idle: u64, written: usize) {
        let all = busy.saturating_add(waited);
        if all == 0 || written == 0 {
            return;
        }
        let pace = all as f64 / written as f64;
        self.pace = if self.pace == PRICES.0 { pace } else { self.pace + (pace - self.pace) * SMOOTH };
        let (waits, idles) = (waited as f64 / all as f64, idle.min(all) as f64 / all as f64);
        let price = self.price * f64::exp(GAIN * (waits - idles));
        let least = if waits > 0.5 { LEAST_PART * self.pace } else { 0.0 };
        self.price = price.max(least).min(MOST_PART * self.pace).clamp(PRICES.0, PRICES.1);
    }
}

/// What a way may be like before it was ever measured: of the order of what `examples/codec_throughput` measures.
fn guess(choice: MethodChoice, class: Class) -> Estimate {
    let (nanos, factor) = match (choice.method().name(), choice.level().unwrap_or(0)) {
        ("none", _) => return Estimate { nanos: 0.0, ratio: 1.0, seen: 0 },
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
    Estimate { nanos: nanos * effort.min(1.2), ratio: if ratio >= 0.95 { 1.0 } else { ratio * factor }, seen: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: usize = 512 << 10;

    fn choices(names: &[(&str, Option<&str>)]) -> Vec<MethodChoice> {
        names.iter().map(|(name, level)| MethodChoice::parse(name, *level).unwrap()).collect()
    }

    fn ways() -> Vec<MethodChoice> {
        choices(&[
            ("none", None),
            ("lz4", None),
            ("zstd", Some("-1")),
            ("zstd", Some("1")),
            ("zstd", Some("3")),
            ("zstd", Some("6")),
        ])
    }

    /// What each way really does with a kind of content: nanoseconds and bytes for each byte.
    #[derive(Clone, Copy)]
    struct Content {
        sample: f64,
        ways: [(f64, f64); 6],
    }

    const TEXT: Content =
        Content { sample: 0.55, ways: [(0.0, 1.0), (1.4, 0.5), (1.6, 0.38), (2.0, 0.33), (3.2, 0.3), (9.0, 0.27)] };
    const CODE: Content =
        Content { sample: 0.65, ways: [(0.0, 1.0), (1.2, 0.6), (1.7, 0.52), (2.4, 0.46), (4.0, 0.43), (12.0, 0.4)] };
    const NOISE: Content =
        Content { sample: 1.0, ways: [(0.0, 1.0), (0.3, 1.0), (0.5, 1.0), (0.6, 1.0), (0.9, 1.0), (3.0, 1.0)] };

    /// One thread before a link of `rate` bytes per nanosecond with a send buffer; says how long `batches` of `content` take. `which` is
    /// asked for the way.
    fn run(
        batches: usize,
        rate: impl Fn(usize) -> f64,
        content: impl Fn(usize) -> Content,
        mut which: impl FnMut(usize, Content) -> usize,
        mut told: impl FnMut(usize, Content, usize, [u64; 4]),
    ) -> f64 {
        // Reading a batch from guest memory, and copying it into the kernel.
        const READ: f64 = 0.1;
        const WRITE: f64 = 0.2;
        let (mut now, mut queued) = (0.0, 0.0f64);
        for batch in 0..batches {
            let (rate, content) = (rate(batch), content(batch));
            let way = which(batch, content);
            let (nanos, ratio) = content.ways[way];
            let output = BATCH as f64 * ratio;
            let busy = BATCH as f64 * (READ + nanos) + output * WRITE;
            let idle = (busy - queued / rate).max(0.0);
            queued = (queued - busy * rate).max(0.0);
            // The window of the engine: 50 ms, two batches at least.
            let window = (rate * 50e6).max(2.0 * BATCH as f64);
            let waits = ((queued + output - window) / rate).max(0.0);
            queued = (queued - waits * rate).max(0.0) + output;
            now += busy + waits;
            told(way, content, output as usize, [busy, waits, idle, BATCH as f64 * nanos].map(|time| time as u64));
        }
        now + queued / rate(batches - 1)
    }

    fn selected(batches: usize, rate: impl Fn(usize) -> f64, content: impl Fn(usize) -> Content) -> (f64, Selection) {
        let selection = std::cell::RefCell::new(Selection::new(ways()));
        let class = |content: Content| Class::of(4096, (4096.0 * content.sample) as usize);
        let time = run(
            batches,
            rate,
            content,
            |_, content| {
                let mut selection = selection.borrow_mut();
                let sample = selection.wants_sample().then(|| class(content));
                selection.choose(sample)
            },
            |way, content, output, [busy, waited, idle, nanos]| {
                let mut selection = selection.borrow_mut();
                selection.encoded(way, Some(class(content)), BATCH, output, nanos);
                selection.sent(busy, waited, idle, output);
            },
        );
        (time, selection.into_inner())
    }

    fn best_fixed(batches: usize, rate: impl Fn(usize) -> f64, content: impl Fn(usize) -> Content) -> f64 {
        let fixed = |way: usize| run(batches, &rate, &content, |_, _| way, |_, _, _, _| {});
        (0..6).map(fixed).fold(f64::INFINITY, f64::min)
    }

    /// Links of 100 Mbit/s to 40 Gbit/s, in bytes per nanosecond.
    const LINKS: [f64; 6] = [0.0125, 0.125, 0.3, 0.6, 1.25, 5.0];

    #[test]
    fn it_is_as_good_as_the_best_fixed_way_on_every_link_and_content() {
        let mut product = 1.0;
        for rate in LINKS {
            for (name, content) in [("text", TEXT), ("code", CODE), ("noise", NOISE)] {
                let batches = (4e9 / BATCH as f64 * rate.min(1.0)) as usize + 2000;
                let (time, selection) = selected(batches, |_| rate, |_| content);
                let ratio = time / best_fixed(batches, |_| rate, |_| content);
                println!("{name} at {rate}: {ratio:.3}, price {:.2}", selection.price());
                assert!(ratio < 1.10, "{name} at {rate} bytes per ns: {ratio}, {selection:?}");
                product *= ratio;
            }
        }
        assert!(f64::powf(product, 1.0 / 18.0) < 1.05);
    }

    #[test]
    fn mixed_content_is_moved_faster_than_by_any_fixed_way() {
        let content = |batch: usize| [TEXT, NOISE, CODE][batch / 4 % 3];
        for rate in [0.125, 0.3, 0.6] {
            let (time, _) = selected(8000, |_| rate, content);
            let ratio = time / best_fixed(8000, |_| rate, content);
            println!("mixed at {rate}: {ratio:.3}");
            assert!(ratio < 1.0, "at {rate}: {ratio}");
        }
    }

    #[test]
    fn it_follows_a_link_that_changes_mid_way() {
        let rate = |batch: usize| if batch < 4000 { 5.0 } else { 0.125 };
        let (time, selection) = selected(8000, rate, |_| TEXT);
        let ideal = best_fixed(4000, |_| 5.0, |_| TEXT) + best_fixed(4000, |_| 0.125, |_| TEXT);
        assert!(time < 1.1 * ideal, "{} of {ideal}", time / ideal);
        // And back.
        let rate = |batch: usize| if batch < 4000 { 0.125 } else { 5.0 };
        let (back, _) = selected(8000, rate, |_| TEXT);
        assert!(back < 1.1 * ideal, "{}, {selection:?}", back / ideal);
    }

    #[test]
    fn where_the_network_does_not_bind_nothing_is_sampled_or_compressed() {
        let mut selection = Selection::new(ways());
        // What it begins with is given up soon.
        for _ in 0..50 {
            selection.sent(100_000, 0, 50_000, BATCH);
        }
        for _ in 0..1000 {
            assert!(!selection.wants_sample());
            assert_eq!(selection.choose(None), 0);
            selection.encoded(0, None, BATCH, BATCH, 0);
            selection.sent(100_000, 0, 50_000, BATCH);
        }
        // A wait now and then is no reason either.
        for _ in 0..1000 {
            selection.sent(99_000, 2_000, 20_000, BATCH);
        }
        assert!(!selection.wants_sample());
    }

    #[test]
    fn the_price_stays_finite_whatever_is_told() {
        let mut selection = Selection::new(ways());
        let extremes = [(0, 0, 0), (0, u64::MAX, 1), (u64::MAX, u64::MAX, 0), (0, 1, usize::MAX), (u64::MAX, 0, 1)];
        for (busy, waited, written) in extremes {
            for _ in 0..1000 {
                selection.sent(busy, waited, busy, written);
                assert!(selection.price() >= PRICES.0 && selection.price() <= PRICES.1);
            }
        }
        selection.encoded(1, Some(Class::of(0, 0)), 0, 0, 5);
        assert!(selection.choose(Some(Class::of(1, 2))) < 6);
    }
}
