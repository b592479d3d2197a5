//! Who may choose: one method for everything, the product's selection, and one that knows what each way would take.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_codec::select::{Class, Interval, Knowledge, Selection};
use sterna_codec::{Adaptive, CodecError, Encoder, Encoding};

use super::{Choice, Encoded, Path, Took, run};

/// A batch of content.
#[derive(Clone, Debug)]
pub struct Batch {
    /// By a sample.
    pub class: Option<Class>,
    /// What each way makes of it.
    pub ways: Vec<Encoded>,
}

/// Content as it was measured; after its last batch it begins again.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The first leaves it as it is.
    pub ways: Vec<Encoding>,
    /// At least one.
    pub batches: Vec<Batch>,
    /// Nanoseconds that a sample takes.
    pub sampling: f64,
}

impl Trace {
    fn batch(&self, number: usize) -> &Batch {
        &self.batches[number % self.batches.len()]
    }

    /// The same without the ways that are not `kept`.
    #[must_use]
    pub fn only(&self, kept: impl Fn(Encoding) -> bool) -> Self {
        let at: Vec<usize> = (0..self.ways.len()).filter(|at| kept(self.ways[*at])).collect();
        let batch = |batch: &Batch| Batch { ways: at.iter().map(|at| batch.ways[*at]).collect(), ..*batch };
        Self {
            ways: at.iter().map(|at| self.ways[*at]).collect(),
            batches: self.batches.iter().map(batch).collect(),
            sampling: self.sampling,
        }
    }

    /// Moves `batches` of it by one way, which is given up while nothing shrinks as the product does.
    pub fn fixed(&self, way: usize, path: &Path, batches: usize) -> Took {
        let mut choices: Vec<Fixed<'_>> = (0..path.channels).map(|_| Fixed::new(self, way)).collect();
        run(path, batches, &mut choices)
    }

    /// By the product's selection; says the price that it came to as well.
    pub fn selected(&self, path: &Path, batches: usize) -> (Took, f64) {
        let knowledge = Arc::new(Knowledge::new(self.ways.iter().copied(), path.channels));
        let mut choices: Vec<Auto<'_>> = (0..path.channels).map(|_| Auto::new(self, &knowledge)).collect();
        let took = run(path, batches, &mut choices);
        (took, choices[0].selection.price())
    }

    /// By whoever knows what each way will take of each batch, at the best of all prices, among those that `fits`. None where no price does.
    pub fn known(&self, path: &Path, batches: usize, fits: impl Fn(&Took) -> bool) -> Option<Took> {
        let at = |(step, spread): (i32, f64)| {
            let price = PRICES.0 * f64::powi(PRICES.2, step);
            let know = || Known { trace: self, price, spread, number: 0 };
            let mut choices: Vec<Known<'_>> = (0..path.channels).map(|_| know()).collect();
            run(path, batches, &mut choices)
        };
        let steps = ((PRICES.1 / PRICES.0).ln() / PRICES.2.ln()) as i32;
        let all = (0..=steps).flat_map(|step| [(step, 0.0), (step, SPREAD)]).map(at);
        all.filter(fits).min_by(|one, other| one.time.total_cmp(&other.time))
    }
}

/// Prices that are tried: from, to, and the factor between them.
const PRICES: (f64, f64, f64) = (0.02, 400.0, 1.25);
/// Where all batches are alike, only several prices in turn make a mixture of ways: up to this power of e from the price.
const SPREAD: f64 = 0.6;

/// Always the same way.
struct Fixed<'a> {
    trace: &'a Trace,
    way: usize,
    adaptive: Adaptive,
    told: Arc<Told>,
}

/// What the encoder inside is told, and whether it was asked.
#[derive(Default)]
struct Told {
    shrinks: AtomicBool,
    asked: AtomicBool,
}

/// Says what it was told.
struct Teller(Arc<Told>);

impl Encoder for Teller {
    fn encode(&mut self, _input: &[u8], _output: &mut [u8]) -> Result<sterna_codec::Encoded, CodecError> {
        self.0.asked.store(true, Ordering::Relaxed);
        Ok(match self.0.shrinks.load(Ordering::Relaxed) {
            true => sterna_codec::Encoded::Shrunk(0),
            false => sterna_codec::Encoded::Incompressible,
        })
    }
}

impl<'a> Fixed<'a> {
    fn new(trace: &'a Trace, way: usize) -> Self {
        let told = Arc::new(Told::default());
        Self { trace, way, adaptive: Adaptive::new(Box::new(Teller(Arc::clone(&told)))), told }
    }
}

impl Choice for Fixed<'_> {
    fn encode(&mut self, batch: usize, _left: f64) -> Encoded {
        let encoded = self.trace.batch(batch).ways[self.way];
        self.told.shrinks.store(encoded.bytes < encoded.size, Ordering::Relaxed);
        self.told.asked.store(false, Ordering::Relaxed);
        self.adaptive.encode(&[], &mut []).expect("it says what it was told");
        match self.told.asked.load(Ordering::Relaxed) {
            true => encoded,
            false => Encoded { size: encoded.size, bytes: encoded.size, ..Encoded::default() },
        }
    }
}

/// The product's.
struct Auto<'a> {
    trace: &'a Trace,
    selection: Selection,
    class: Option<Class>,
    way: usize,
    /// The last batch.
    encoded: Encoded,
}

impl<'a> Auto<'a> {
    fn new(trace: &'a Trace, knowledge: &Arc<Knowledge>) -> Self {
        let selection = Selection::new(Arc::clone(knowledge));
        Self { trace, selection, class: None, way: 0, encoded: Encoded::default() }
    }
}

impl Choice for Auto<'_> {
    fn encode(&mut self, batch: usize, left: f64) -> Encoded {
        let batch = self.trace.batch(batch);
        let wants = self.selection.wants_sample();
        self.class = if wants { batch.class } else { None };
        self.way = self.selection.choose(self.class, batch.ways[0].size, Some(left as u64));
        self.encoded = batch.ways[self.way];
        let sampling = if wants { self.trace.sampling } else { 0.0 };
        Encoded { thread: self.encoded.thread + sampling, ..self.encoded }
    }

    fn encoded(&mut self, nanos: u64) {
        let sampling = if self.class.is_some() { self.trace.sampling as u64 } else { 0 };
        let Encoded { size, bytes, .. } = self.encoded;
        self.selection.encoded(self.way, self.class, size, bytes, nanos.saturating_sub(sampling));
    }

    fn sent(&mut self, interval: &Interval) {
        self.selection.sent(interval);
    }
}

/// The best way for each batch at one price of a byte.
struct Known<'a> {
    trace: &'a Trace,
    price: f64,
    spread: f64,
    number: u32,
}

impl Choice for Known<'_> {
    fn encode(&mut self, batch: usize, _left: f64) -> Encoded {
        // Evenly spread, and never twice the same: the digits of its number in reverse (van der Corput).
        let even = f64::from(self.number.reverse_bits()) / f64::from(u32::MAX);
        self.number = self.number.wrapping_add(1);
        let price = self.price * f64::exp(self.spread * (2.0 * even - 1.0));
        let cost = |encoded: &Encoded| encoded.thread + encoded.engine + price * encoded.bytes as f64;
        let ways = self.trace.batch(batch).ways.iter();
        *ways.min_by(|one, other| cost(one).total_cmp(&cost(other))).expect("there is one")
    }
}

#[cfg(test)]
mod tests {
    use sterna_codec::MethodChoice;

    use super::*;

    const SIZE: usize = 512 << 10;

    /// Batches that shrink by half in 1 ns for each byte, or do not at all.
    fn trace(shrinks: &[bool]) -> Trace {
        let raw = Encoded { size: SIZE, bytes: SIZE, ..Encoded::default() };
        let batch = |shrinks: &bool| Batch {
            class: Some(Class::of(100, if *shrinks { 55 } else { 100 })),
            ways: vec![raw, Encoded { thread: SIZE as f64, bytes: if *shrinks { SIZE / 2 } else { SIZE }, ..raw }],
        };
        let ways = ["none", "zstd 1"].map(|text| text.parse::<MethodChoice>().unwrap().by_cpu().unwrap());
        Trace { ways: ways.into(), batches: shrinks.iter().map(batch).collect(), sampling: 5000.0 }
    }

    #[test]
    fn a_fixed_way_hardly_tries_what_does_not_shrink_and_who_knows_never_does() {
        let trace = trace(&[false]);
        let path = Path::link(0.125);
        let tried = trace.fixed(1, &path, 1600).cpu - trace.fixed(0, &path, 1600).cpu;
        // Four, and then one of sixteen.
        assert!((100.0..=110.0).contains(&(tried / SIZE as f64)), "{}", tried / SIZE as f64);
        let known = trace.known(&path, 1600, |_| true).unwrap();
        assert_eq!(known.cpu, trace.fixed(0, &path, 1600).cpu);
    }

    #[test]
    fn who_knows_is_never_slower_than_one_way_and_mixes_ways_where_that_is_faster() {
        let mixed = trace(&[true, false]);
        // As fast as encoding and half of it take together: half of the batches as they are, half encoded, keep both busy.
        for rate in [0.05, 0.5, 0.9, 5.0] {
            let path = Path::link(rate);
            let best = [0, 1].map(|way| mixed.fixed(way, &path, 800).time).into_iter().fold(f64::INFINITY, f64::min);
            let known = mixed.known(&path, 800, |_| true).unwrap().time;
            assert!(known < 1.001 * best, "{rate}: {known} {best}");
        }
        let same = trace(&[true]);
        let path = Path::link(0.6);
        let best = [0, 1].map(|way| same.fixed(way, &path, 800).time).into_iter().fold(f64::INFINITY, f64::min);
        assert!(same.known(&path, 800, |_| true).unwrap().time < 0.95 * best);
        assert_eq!(same.known(&path, 800, |_| false), None);
    }

    #[test]
    fn ways_that_are_left_out_are_not_chosen() {
        let trace = trace(&[true]).only(|way| way.method().name() == "none");
        assert_eq!((trace.ways.len(), trace.batches[0].ways.len()), (1, 1));
        assert_eq!(trace.selected(&Path::link(0.1), 100).0.bytes, 100 * SIZE);
    }
}
