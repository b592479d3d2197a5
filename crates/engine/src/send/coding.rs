//! How a channel's batches are encoded: by the way that was asked for, or by what drains them fastest now.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use sterna_codec::select::{Class, Selection};
use sterna_codec::{Adaptive, CodecError, Encoded, Encoder, Engines, MethodChoice};

/// Bytes of a sample, and the pieces that it is made of, from all over a batch: one page says nothing of its neighbours.
const SAMPLE: usize = 4096;
const PIECES: usize = 8;

/// A channel's encoders.
pub(super) enum Coding {
    /// One, and the number of its format.
    Fixed(Adaptive, u8),
    /// Several, of which one is chosen for each batch.
    Auto(Box<Auto>),
}

/// Where the time of a channel's thread went since its last packet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// It waited for the network: for room in the window, for the limit, for the socket.
    pub(super) waited: Duration,
    /// It had nothing to send.
    pub(super) starved: Duration,
}

pub(super) struct Auto {
    selection: Selection,
    /// The encoder of each way, and the number of its format.
    ways: Vec<(Box<dyn Encoder>, u8)>,
    sampler: Box<dyn Encoder>,
    sample: [u8; SAMPLE],
    encoded_sample: [u8; SAMPLE],
    /// Which was chosen last.
    way: usize,
    /// The end of the packet before.
    since: Instant,
    /// How long the network had had nothing to do by then.
    idle: Duration,
}

impl Coding {
    pub(super) fn new(choice: MethodChoice, engines: &Engines) -> Result<Self, CodecError> {
        if !choice.is_auto() {
            return Ok(Self::Fixed(choice.encoder(engines)?, choice.method().format().wire()));
        }
        let choices = MethodChoice::ways_of_auto(engines);
        let way = |choice: &MethodChoice| -> Result<(Box<dyn Encoder>, u8), CodecError> {
            // What is not worth a try, the selection says: by class, not by what the last few batches were.
            Ok((choice.untiring_encoder(engines)?, choice.method().format().wire()))
        };
        let ways = choices.iter().map(way).collect::<Result<_, _>>()?;
        let sampler = MethodChoice::parse("lz4", None).expect("there is LZ4");
        let sampler = sampler.untiring_encoder(&Engines::default())?;
        let selection = Selection::new(choices);
        let (sample, since, idle) = ([0; SAMPLE], Instant::now(), Duration::ZERO);
        let encoded_sample = sample;
        Ok(Self::Auto(Box::new(Auto { selection, ways, sampler, sample, encoded_sample, way: 0, since, idle })))
    }

    /// Whether nothing is ever encoded.
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::Fixed(_, 0))
    }

    /// Whether it wants to know where time goes.
    pub(super) fn is_auto(&self) -> bool {
        matches!(self, Self::Auto(_))
    }

    /// Encodes `content` into `output`: the number of the format, and how long it became. None: it goes as it is.
    pub(super) fn encode(&mut self, content: &[u8], output: &mut [u8]) -> Result<Option<(u8, usize)>, CodecError> {
        match self {
            Self::Fixed(_, 0) => Ok(None),
            Self::Fixed(encoder, format) => Ok(match encoder.encode(content, output)? {
                Encoded::Shrunk(length) => Some((*format, length)),
                Encoded::Incompressible => None,
            }),
            Self::Auto(auto) => auto.encode(content, output),
        }
    }

    /// A packet of so many bytes was written, whose content had entered it. The network has had nothing to do for `idle` so far.
    pub(super) fn sent(&mut self, times: Times, idle: Duration, written: usize) {
        if let Self::Auto(auto) = self {
            let elapsed = auto.since.elapsed();
            auto.since += elapsed;
            let idle_since = idle.saturating_sub(std::mem::replace(&mut auto.idle, idle)).saturating_sub(times.starved);
            let busy = elapsed.saturating_sub(times.waited).saturating_sub(times.starved);
            let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            auto.selection.sent(nanos(busy), nanos(times.waited), nanos(idle_since), written);
        }
    }

    /// Which of [`MethodChoice::ways_of_auto`] was chosen last.
    pub(super) fn way(&self) -> Option<usize> {
        match self {
            Self::Fixed(..) => None,
            Self::Auto(auto) => Some(auto.way),
        }
    }
}

impl Auto {
    fn encode(&mut self, content: &[u8], output: &mut [u8]) -> Result<Option<(u8, usize)>, CodecError> {
        let class = if self.selection.wants_sample() && content.len() >= SAMPLE {
            for (number, piece) in self.sample.chunks_exact_mut(SAMPLE / PIECES).enumerate() {
                let at = content.len() / PIECES * number;
                piece.copy_from_slice(&content[at..at + SAMPLE / PIECES]);
            }
            Some(match self.sampler.encode(&self.sample, &mut self.encoded_sample)? {
                Encoded::Shrunk(length) => Class::of(SAMPLE, length),
                Encoded::Incompressible => Class::of(SAMPLE, SAMPLE),
            })
        } else {
            None
        };
        let way = self.selection.choose(class);
        self.way = way;
        let begun = Instant::now();
        let (encoder, format) = &mut self.ways[way];
        let encoded = if *format == 0 { Encoded::Incompressible } else { encoder.encode(content, output)? };
        let length = match encoded {
            Encoded::Shrunk(length) => length,
            Encoded::Incompressible => content.len(),
        };
        let nanos = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.selection.encoded(way, class, content.len(), length, nanos);
        Ok(matches!(encoded, Encoded::Shrunk(_)).then_some((*format, length)))
    }
}

/// The time that this thread has been running on a CPU.
pub(super) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: usize = 64 << 10;

    #[test]
    fn what_shrinks_is_encoded_however_much_did_not_before_it() {
        let mut coding = Coding::new(MethodChoice::parse("auto", None).unwrap(), &Engines::default()).unwrap();
        let mut state = 1u64;
        let noise: Vec<u8> = (0..BATCH)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let text: Vec<u8> = (0..BATCH).map(|at| b"the quick brown fox "[at % 20]).collect();
        let mut output = vec![0; BATCH];
        for round in 0..20 {
            assert_eq!(coding.encode(&noise, &mut output).unwrap(), None, "round {round}");
        }
        // As it begins, a byte on the wire costs more than encoding it.
        let (_, length) = coding.encode(&text, &mut output).unwrap().expect("it shrinks");
        assert!(length < BATCH / 10, "{length}");
    }
}
