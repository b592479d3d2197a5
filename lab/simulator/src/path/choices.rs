//! The choices: one fixed encoding, the product's selection, and an oracle that knows the cost of every encoding.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_codec::select::{Class, Interval, Selection, SharedEstimates};
use sterna_codec::{Adaptive, CodecError, Encoder, Encoding};

use super::{Choice, Encoded, Path, Took, run};

/// A batch of content.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The class that a sample would find.
    pub class: Option<Class>,
    /// The result of each encoding of [`Trace::encodings`].
    pub encoded: Vec<Encoded>,
}

/// Measured content. After its last batch it begins again.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The encodings; the first leaves content as it is.
    pub encodings: Vec<Encoding>,
    /// The batches; at least one.
    pub batches: Vec<Batch>,
    /// Nanoseconds that a sample takes.
    pub sampling: f64,
}

impl Trace {
    fn batch(&self, number: usize) -> &Batch {
        &self.batches[number % self.batches.len()]
    }

    /// Returns the same trace without the encodings that are not `kept`.
    #[must_use]
    pub fn only(&self, kept: impl Fn(Encoding) -> bool) -> Self {
        let at: Vec<usize> = (0..self.encodings.len()).filter(|at| kept(self.encodings[*at])).collect();
        let batch = |batch: &Batch| Batch { encoded: at.iter().map(|at| batch.encoded[*at]).collect(), ..*batch };
        Self {
            encodings: at.iter().map(|at| self.encodings[*at]).collect(),
            batches: self.batches.iter().map(batch).collect(),
            sampling: self.sampling,
        }
    }

    /// Moves `batches` batches by the encoding with index `encoding`, which is skipped while content does not shrink, as
    /// the product does.
    pub fn fixed(&self, encoding: usize, path: &Path, batches: usize) -> Took {
        let mut choices: Vec<Fixed<'_>> = (0..path.channels).map(|_| Fixed::new(self, encoding)).collect();
        run(path, batches, &mut choices)
    }

    /// Moves `batches` batches by the product's selection. Also returns the price that it reached.
    pub fn selected(&self, path: &Path, batches: usize) -> (Took, f64) {
        let estimates = Arc::new(SharedEstimates::new(self.encodings.iter().copied(), path.channels));
        let mut choices: Vec<Auto<'_>> = (0..path.channels).map(|_| Auto::new(self, &estimates)).collect();
        let took = run(path, batches, &mut choices);
        (took, choices[0].selection.price())
    }

    /// Moves `batches` batches by an oracle that knows the cost of each encoding of each batch, at the price with the
    /// shortest time among the results that `fits` accepts. Returns none if it accepts no result.
    pub fn oracle(&self, path: &Path, batches: usize, fits: impl Fn(&Took) -> bool) -> Option<Took> {
        let at = |(step, spread): (i32, f64)| {
            let price = PRICES.0 * f64::powi(PRICES.2, step);
            let oracle = || Oracle { trace: self, price, spread, number: 0 };
            let mut choices: Vec<Oracle<'_>> = (0..path.channels).map(|_| oracle()).collect();
            run(path, batches, &mut choices)
        };
        let steps = ((PRICES.1 / PRICES.0).ln() / PRICES.2.ln()) as i32;
        let all = (0..=steps).flat_map(|step| [(step, 0.0), (step, SPREAD)]).map(at);
        all.filter(fits).min_by(|one, other| one.time.total_cmp(&other.time))
    }
}

/// Prices that are tried: from, to, and the factor between them.
const PRICES: (f64, f64, f64) = (0.02, 400.0, 1.25);
/// If all batches are alike, only varying prices lead to a mixture of encodings: by up to this power of e.
const SPREAD: f64 = 0.6;

/// Always the same encoding.
struct Fixed<'a> {
    trace: &'a Trace,
    encoding: usize,
    adaptive: Adaptive,
    probe: Arc<ProbeState>,
}

/// The result that a probe returns, and whether it was called.
#[derive(Default)]
struct ProbeState {
    shrinks: AtomicBool,
    called: AtomicBool,
}

/// An encoder that returns a given result: shows which batches [`Adaptive`] tries.
struct Probe(Arc<ProbeState>);

impl Encoder for Probe {
    fn encode(&mut self, _input: &[u8], _output: &mut [u8]) -> Result<sterna_codec::Encoded, CodecError> {
        self.0.called.store(true, Ordering::Relaxed);
        Ok(match self.0.shrinks.load(Ordering::Relaxed) {
            true => sterna_codec::Encoded::Shrunk(0),
            false => sterna_codec::Encoded::Incompressible,
        })
    }
}

impl<'a> Fixed<'a> {
    fn new(trace: &'a Trace, encoding: usize) -> Self {
        let probe = Arc::new(ProbeState::default());
        Self { trace, encoding, adaptive: Adaptive::new(Box::new(Probe(Arc::clone(&probe)))), probe }
    }
}

impl Choice for Fixed<'_> {
    fn encode(&mut self, batch: usize, _left: f64) -> Encoded {
        let encoded = self.trace.batch(batch).encoded[self.encoding];
        self.probe.shrinks.store(encoded.bytes < encoded.size, Ordering::Relaxed);
        self.probe.called.store(false, Ordering::Relaxed);
        self.adaptive.encode(&[], &mut []).expect("a probe does not fail");
        match self.probe.called.load(Ordering::Relaxed) {
            true => encoded,
            false => Encoded { size: encoded.size, bytes: encoded.size, ..Encoded::default() },
        }
    }
}

/// The product's selection.
struct Auto<'a> {
    trace: &'a Trace,
    selection: Selection,
    class: Option<Class>,
    chosen: usize,
    /// The last batch.
    encoded: Encoded,
}

impl<'a> Auto<'a> {
    fn new(trace: &'a Trace, estimates: &Arc<SharedEstimates>) -> Self {
        let selection = Selection::new(Arc::clone(estimates));
        Self { trace, selection, class: None, chosen: 0, encoded: Encoded::default() }
    }
}

impl Choice for Auto<'_> {
    fn encode(&mut self, batch: usize, left: f64) -> Encoded {
        let batch = self.trace.batch(batch);
        let wants = self.selection.wants_sample();
        self.class = if wants { batch.class } else { None };
        self.chosen = self.selection.choose(self.class, batch.encoded[0].size, Some(left as u64));
        self.encoded = batch.encoded[self.chosen];
        let sampling = if wants { self.trace.sampling } else { 0.0 };
        Encoded { thread: self.encoded.thread + sampling, ..self.encoded }
    }

    fn encoded(&mut self, nanos: u64) {
        let sampling = if self.class.is_some() { self.trace.sampling as u64 } else { 0 };
        let Encoded { size, bytes, .. } = self.encoded;
        self.selection.encoded(self.chosen, self.class, size, bytes, nanos.saturating_sub(sampling));
    }

    fn sent(&mut self, interval: &Interval) {
        self.selection.sent(interval);
    }
}

/// The best encoding of each batch at one price of a byte.
struct Oracle<'a> {
    trace: &'a Trace,
    price: f64,
    spread: f64,
    number: u32,
}

impl Choice for Oracle<'_> {
    fn encode(&mut self, batch: usize, _left: f64) -> Encoded {
        // Evenly spread without repetition: the reversed bits of the batch's number (van der Corput).
        let even = f64::from(self.number.reverse_bits()) / f64::from(u32::MAX);
        self.number = self.number.wrapping_add(1);
        let price = self.price * f64::exp(self.spread * (2.0 * even - 1.0));
        let cost = |encoded: &Encoded| encoded.thread + encoded.engine + price * encoded.bytes as f64;
        let encoded = self.trace.batch(batch).encoded.iter();
        *encoded.min_by(|one, other| cost(one).total_cmp(&cost(other))).expect("at least one encoding")
    }
}

#[cfg(test)]
mod tests {
    use sterna_codec::MethodChoice;

    use super::*;

    const SIZE: usize = 512 << 10;

    /// Makes batches that shrink by half in 1 ns per byte, or not at all.
    fn trace(shrinks: &[bool]) -> Trace {
        let raw = Encoded { size: SIZE, bytes: SIZE, ..Encoded::default() };
        let batch = |shrinks: &bool| Batch {
            class: Some(Class::of(100, if *shrinks { 55 } else { 100 })),
            encoded: vec![raw, Encoded { thread: SIZE as f64, bytes: if *shrinks { SIZE / 2 } else { SIZE }, ..raw }],
        };
        let encodings = ["none", "zstd 1"].map(|text| text.parse::<MethodChoice>().unwrap().by_cpu().unwrap());
        Trace { encodings: encodings.into(), batches: shrinks.iter().map(batch).collect(), sampling: 5000.0 }
    }

    #[test]
    fn a_fixed_encoding_rarely_tries_what_does_not_shrink_and_the_oracle_never_does() {
        let trace = trace(&[false]);
        let path = Path::link(0.125);
        let tried = trace.fixed(1, &path, 1600).cpu - trace.fixed(0, &path, 1600).cpu;
        // Four attempts, then one of sixteen.
        assert!((100.0..=110.0).contains(&(tried / SIZE as f64)), "{}", tried / SIZE as f64);
        let oracle = trace.oracle(&path, 1600, |_| true).unwrap();
        assert_eq!(oracle.cpu, trace.fixed(0, &path, 1600).cpu);
    }

    #[test]
    fn the_oracle_is_never_slower_than_one_encoding_and_mixes_encodings_where_that_is_faster() {
        let mixed = trace(&[true, false]);
        // At these rates, sending half of the batches as they are and half encoded keeps both CPU and network busy.
        for rate in [0.05, 0.5, 0.9, 5.0] {
            let path = Path::link(rate);
            let best =
                [0, 1].map(|encoding| mixed.fixed(encoding, &path, 800).time).into_iter().fold(f64::INFINITY, f64::min);
            let oracle = mixed.oracle(&path, 800, |_| true).unwrap().time;
            assert!(oracle < 1.001 * best, "{rate}: {oracle} {best}");
        }
        let same = trace(&[true]);
        let path = Path::link(0.6);
        let best =
            [0, 1].map(|encoding| same.fixed(encoding, &path, 800).time).into_iter().fold(f64::INFINITY, f64::min);
        assert!(same.oracle(&path, 800, |_| true).unwrap().time < 0.95 * best);
        assert_eq!(same.oracle(&path, 800, |_| false), None);
    }

    #[test]
    fn excluded_encodings_are_not_chosen() {
        let trace = trace(&[true]).only(|encoding| encoding.method().name() == "none");
        assert_eq!((trace.encodings.len(), trace.batches[0].encoded.len()), (1, 1));
        assert_eq!(trace.selected(&Path::link(0.1), 100).0.bytes, 100 * SIZE);
    }
}
