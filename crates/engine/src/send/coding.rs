//! How a channel's batches are encoded: by the method that was set, or by the one with which they leave fastest now.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_codec::sample::Sampler;
use sterna_codec::select::{Interval, Selection};
use sterna_codec::{Adaptive, CodecError, Encoded, Encoder, Encoding, Engine};
use sterna_offload::Producer;

use super::compression::{self, Compression};
use crate::off_cpu::thread_time;
use crate::transport::{SendTimes, Writer};

/// Where the limit holds a thread back for more than this part of the time, the limit counts as the channel's network.
const LIMITED: f64 = 0.05;
/// Weight of the past in that part, for each packet.
const LIMIT_MEMORY: f64 = 0.9;

/// Weight of the newest value in a moving average.
const SMOOTH: f64 = 1.0 / 16.0;

/// A channel's encoders.
pub(super) enum Coding {
    /// One encoder, and the number of its format.
    Fixed(Adaptive, u8),
    /// Several encoders, of which one is chosen for each batch.
    Auto(Box<Auto>),
}

/// How a channel's thread has spent its time since its last packet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// Waiting for room in the window, for the limit, or for the socket.
    pub(super) waited: Duration,
    /// Waiting for something to send.
    pub(super) starved: Duration,
    /// Running, in calls that write.
    pub(super) writing: Duration,
    /// Bytes that were written, of all packets.
    pub(super) written: usize,
    /// Time during which the receiver was busy, by its acknowledgements.
    pub(super) placing: Duration,
    /// The kernel's figures of the connection, where it has any.
    pub(super) kernel: Option<ConnectionTimes>,
    /// Waiting for the bandwidth limit.
    pub(super) limited: Duration,
}

/// The kernel's figures of a channel's connection since the packet before.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionTimes {
    /// Time during which all written bytes had arrived.
    arrived: Duration,
    /// Time during which the receiver's program did not read, and its window was closed.
    window_closed: Duration,
    /// How long the network will take for the bytes that wait to be sent.
    left: Option<Duration>,
}

/// The kernel's figures at the last packet, and when that was.
#[derive(Debug)]
pub(super) struct Kernel(SendTimes, Instant);

impl Default for Kernel {
    fn default() -> Self {
        Self(SendTimes::default(), Instant::now())
    }
}

impl Kernel {
    /// Returns the figures since the packet before; none where the kernel has no figures.
    pub(super) fn since(&mut self, writer: &Writer) -> Option<ConnectionTimes> {
        let times = writer.send_times()?;
        let Self(before, at) = std::mem::replace(self, Self(times, Instant::now()));
        Some(ConnectionTimes {
            arrived: self.1.saturating_duration_since(at).saturating_sub(times.busy.saturating_sub(before.busy)),
            window_closed: times.window_closed.saturating_sub(before.window_closed),
            left: times.left,
        })
    }
}

/// The costs of pages that are sent whole, where `auto` chooses by costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// Nanoseconds to encode a byte of content, as a moving average.
    pub(super) encoding: f64,
    /// Nanoseconds to send a byte.
    pub(super) price: f64,
}

/// What the next packet waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bottleneck {
    /// The network, as the kernel knows it.
    Network,
    /// The bandwidth limit.
    Limit,
}

/// Figures of the window and of the limit, which all channels share, so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// How long the network has had nothing to do.
    pub(super) idle: Duration,
    /// How long the bandwidth limit was not used.
    pub(super) unused: Duration,
    /// How long the window was full while a thread waited.
    pub(super) full: Duration,
}

pub(super) struct Auto {
    shared: Arc<compression::Auto>,
    /// The channel's number in the network that all channels share.
    channel: u64,
    selection: Selection,
    encoders: Vec<EncoderChoice>,
    sampler: Sampler,
    /// Which encoder was chosen last.
    chosen: usize,
    /// Nanoseconds to encode a byte of content, as a moving average.
    encoding: f64,
    /// The end of the packet before.
    since: Instant,
    /// The window's figures at that time.
    seen: Seen,
    /// How long the network had been idle by then.
    idle: Duration,
    /// How long the limit held the thread back, and in how much time; older packets count less.
    limited: (f64, f64),
    /// By that, the limit is the network.
    is_limited: bool,
}

/// One of the encoders to choose from.
struct EncoderChoice {
    encoder: Box<dyn Encoder>,
    /// The number of its format.
    format: u8,
    /// Whether this thread encodes on its CPU. Then only its own CPU time counts for the encoder; a device's queue counts for the device.
    by_cpu: bool,
}

impl EncoderChoice {
    /// Reads the clock by which encoding is measured.
    fn clock(&self, begun: Instant) -> Duration {
        if self.by_cpu { thread_time() } else { begun.elapsed() }
    }
}

impl Coding {
    pub(super) fn new(compression: &Compression) -> Result<Self, CodecError> {
        let (encoding, engines) = (compression.encoding(), compression.engines());
        let Some(shared) = compression.auto() else {
            return Ok(Self::Fixed(encoding.encoder(engines)?, encoding.format().wire()));
        };
        let encoder = |encoding: &Encoding| -> Result<EncoderChoice, CodecError> {
            Ok(EncoderChoice {
                // The selection decides what is not worth a try: by class, not by the last few batches.
                encoder: encoding.non_adaptive_encoder(engines)?,
                format: encoding.format().wire(),
                by_cpu: encoding.engine() == Engine::Cpu,
            })
        };
        let encoders = shared.methods.iter().map(encoder).collect::<Result<_, _>>()?;
        Ok(Self::Auto(Box::new(Auto {
            shared: Arc::clone(shared),
            channel: shared.network().channel(),
            selection: Selection::new(Arc::clone(&shared.estimates)),
            encoders,
            sampler: Sampler::new()?,
            chosen: 0,
            encoding: 0.0,
            since: Instant::now(),
            seen: Seen::default(),
            idle: Duration::ZERO,
            limited: (0.0, 0.0),
            is_limited: false,
        })))
    }

    /// Returns whether nothing is ever encoded.
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::Fixed(_, 0))
    }

    /// Returns whether the encoder is chosen for each batch, by how the thread spends its time.
    pub(super) fn is_auto(&self) -> bool {
        matches!(self, Self::Auto(_))
    }

    /// Encodes `content` into `output`. Returns the number of the format and the encoded length; none where the content is sent as it is.
    /// `left`: how long the network, or the limit where that is the bottleneck, is still busy, where that is known.
    pub(super) fn encode(
        &mut self,
        content: &[u8],
        output: &mut [u8],
        left: impl FnOnce(Bottleneck) -> Option<Duration>,
    ) -> Result<Option<(u8, usize)>, CodecError> {
        match self {
            Self::Fixed(_, 0) => Ok(None),
            Self::Fixed(encoder, format) => Ok(match encoder.encode(content, output)? {
                Encoded::Shrunk(length) => Some((*format, length)),
                Encoded::Incompressible => None,
            }),
            Self::Auto(auto) => {
                let bottleneck = if auto.is_limited { Bottleneck::Limit } else { Bottleneck::Network };
                auto.encode(content, output, left(bottleneck))
            }
        }
    }

    /// Records that a packet is about to be written.
    pub(super) fn writes(&self) {
        if let Self::Auto(auto) = self {
            auto.shared.network().count_idle(Instant::now());
        }
    }

    /// Records a packet that was written, whose `content` bytes were encoded by the encoder chosen last.
    pub(super) fn sent(&mut self, times: Times, seen: Seen, content: usize) {
        if let Self::Auto(auto) = self {
            let elapsed = auto.since.elapsed();
            auto.since += elapsed;
            let before = std::mem::replace(&mut auto.seen, seen);
            let busy = elapsed.saturating_sub(times.waited).saturating_sub(times.starved);
            // Where other threads produce what is sent, they wait for room in the window, and this thread for them.
            let waited = times.waited + times.starved.min(seen.full.saturating_sub(before.full));
            let (limited, of) = &mut auto.limited;
            *limited = *limited * LIMIT_MEMORY + times.limited.as_secs_f64();
            *of = *of * LIMIT_MEMORY + elapsed.as_secs_f64();
            // The kernel's figures cover this channel alone, without what a limit holds back: they show where its bytes are. How much
            // the network could have carried is in the figures of the window, which all channels share.
            let is_limited = *limited > LIMITED * *of;
            auto.is_limited = is_limited;
            let arrived = match times.kernel {
                Some(ConnectionTimes { arrived, window_closed, .. }) if !is_limited => arrived + window_closed,
                _ => Duration::ZERO,
            };
            // The network's idle time follows from when it will have sent the bytes that wait. Under a limit the network idles between the
            // pieces of a packet, which costs nothing: what counts is how much of the limit was not used. Where the kernel has no figures, the
            // window has.
            let idle = match times.kernel {
                _ if is_limited => seen.unused.saturating_sub(before.unused),
                Some(ConnectionTimes { left: Some(left), .. }) => {
                    let mut network = auto.shared.network();
                    network.set_left(auto.channel, Instant::now(), left);
                    let idle = network.idle();
                    idle.saturating_sub(std::mem::replace(&mut auto.idle, idle))
                }
                _ => seen.idle.saturating_sub(before.idle),
            };
            let beyond = auto.shared.beyond();
            let held_up = auto.selection.sent(&Interval {
                busy: nanos(busy),
                writing: nanos(times.writing),
                waited: nanos(waited),
                idle: nanos(idle.saturating_sub(times.starved)),
                arrived: nanos(arrived),
                placing: nanos(times.placing),
                written: times.written,
                beyond,
            });
            auto.shared.sent(auto.chosen, content as u64, elapsed, held_up);
        }
    }

    /// Returns the device that made the last encoded content, if its output was not verified.
    pub(super) fn producer(&self) -> Option<Producer> {
        match self {
            Self::Fixed(encoder, _) => encoder.producer(),
            Self::Auto(auto) => auto.encoders[auto.chosen].encoder.producer(),
        }
    }

    /// Returns the costs of pages that are sent whole; none where bytes alone decide.
    pub(super) fn costs(&self) -> Option<Costs> {
        match self {
            Self::Fixed(..) => None,
            Self::Auto(auto) => Some(Costs { encoding: auto.encoding, price: auto.selection.byte() }),
        }
    }

    /// Returns which of [`Encoding::auto_candidates`] was chosen last.
    pub(super) fn chosen(&self) -> Option<usize> {
        match self {
            Self::Fixed(..) => None,
            Self::Auto(auto) => Some(auto.chosen),
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Drop for Auto {
    fn drop(&mut self) {
        self.shared.network().ended(self.channel, Instant::now());
    }
}

impl Auto {
    fn encode(
        &mut self,
        content: &[u8],
        output: &mut [u8],
        left: Option<Duration>,
    ) -> Result<Option<(u8, usize)>, CodecError> {
        let class = if self.selection.wants_sample() { self.sampler.class(content)? } else { None };
        self.chosen = self.selection.choose(class, content.len(), left.map(nanos));
        let (at, choice) = (Instant::now(), &mut self.encoders[self.chosen]);
        let begun = choice.clock(at);
        let encoded =
            if choice.format == 0 { Encoded::Incompressible } else { choice.encoder.encode(content, output)? };
        let length = match encoded {
            Encoded::Shrunk(length) => length,
            Encoded::Incompressible => content.len(),
        };
        let time = nanos(choice.clock(at).saturating_sub(begun));
        let format = choice.format;
        self.selection.encoded(self.chosen, class, content.len(), length, time);
        self.encoding += (time as f64 / content.len().max(1) as f64 - self.encoding) * SMOOTH;
        Ok(matches!(encoded, Encoded::Shrunk(_)).then_some((format, length)))
    }
}

#[cfg(test)]
mod tests {
    use sterna_codec::Engines;
    use sterna_test_kit::content::noise;

    use super::*;

    const BATCH: usize = 64 << 10;

    #[test]
    fn what_shrinks_is_soon_encoded_however_much_did_not_before_it() {
        let mut coding = Coding::new(&Compression::new(Encoding::auto(), Engines::default(), 1, None)).unwrap();
        let noise = noise(1, BATCH);
        let text: Vec<u8> = (0..BATCH).map(|at| b"the quick brown fox "[at % 20]).collect();
        let mut output = vec![0; BATCH];
        for round in 0..20 {
            assert_eq!(coding.encode(&noise, &mut output, |_| None).unwrap(), None, "round {round}");
        }
        // At the beginning a byte on the wire costs more than encoding it. Not every batch is sampled any more.
        let encoded = (0..8).find_map(|_| coding.encode(&text, &mut output, |_| None).unwrap());
        let (_, length) = encoded.expect("it shrinks");
        assert!(length < BATCH / 10, "{length}");
    }

    #[test]
    fn what_it_takes_to_write_a_byte_is_of_all_bytes_that_were_written() {
        let compression = Compression::new(Encoding::auto(), Engines::default(), 1, None);
        let mut coding = Coding::new(&compression).unwrap();
        // A packet of 100 bytes after others of 900 bytes.
        let times = Times { writing: Duration::from_nanos(1600), written: 1000, ..Times::default() };
        for _ in 0..2 {
            let begun = Instant::now();
            // No more of a packet's time is writing than has passed.
            while begun.elapsed() <= times.writing {}
            coding.sent(times, Seen::default(), 100);
        }
        let Coding::Auto(auto) = &coding else { unreachable!("`auto` was set") };
        let writing = auto.selection.byte() - auto.selection.price();
        // The first packet does not count, and a moving average follows slowly.
        assert!((writing - 1.6 * SMOOTH).abs() < 1e-9, "{writing}");
    }

    /// Returns the price of a byte before and after packets that waited half of their time for the limit, of which `unused` passed unused.
    /// By the kernel and the window the network was idle all the while.
    fn prices_under_a_limit(unused: Duration) -> (f64, f64) {
        const TIME: Duration = Duration::from_millis(1);
        let compression = Compression::new(Encoding::auto(), Engines::default(), 1, None);
        let mut coding = Coding::new(&compression).unwrap();
        let kernel = ConnectionTimes { arrived: TIME, window_closed: Duration::ZERO, left: Some(Duration::ZERO) };
        let times =
            Times { waited: TIME / 2, limited: TIME / 2, written: 1000, kernel: Some(kernel), ..Times::default() };
        let mut seen = Seen::default();
        let first = coding.costs().expect("`auto` was set").price;
        for _ in 0..50 {
            (seen.idle, seen.unused) = (seen.idle + TIME, seen.unused + unused);
            let Coding::Auto(auto) = &mut coding else { unreachable!("`auto` was set") };
            auto.since = Instant::now() - TIME;
            coding.sent(times, seen, 1000);
        }
        let mut asked = None;
        let left = |bottleneck| {
            asked = Some(bottleneck);
            None
        };
        coding.encode(&[0; BATCH], &mut vec![0; BATCH], left).unwrap();
        assert_eq!(asked, Some(Bottleneck::Limit));
        (first, coding.costs().expect("`auto` was set").price)
    }

    #[test]
    fn under_a_limit_the_price_rises_until_some_of_the_limit_is_not_used() {
        let (first, all_used) = prices_under_a_limit(Duration::ZERO);
        assert!(all_used > first, "{first} → {all_used}");
        let (first, half_used) = prices_under_a_limit(Duration::from_micros(500));
        assert!(half_used < first, "{first} → {half_used}");
    }
}
