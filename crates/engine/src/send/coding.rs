//! How a channel's batches are encoded: by the way that was asked for, or by what drains them fastest now.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_codec::sample::Sampler;
use sterna_codec::select::{Interval, Selection};
use sterna_codec::{Adaptive, CodecError, Encoded, Encoder, Engine, MethodChoice};
use sterna_offload::Maker;

use super::compression::{self, Compression};
use crate::off_cpu::thread_time;
use crate::transport::{SendTimes, Writer};

/// For such a part of the time the limit holds a thread back that is what its network is. What was counts so much with each packet.
const LIMITED: f64 = 0.05;
const LIMIT_MEMORY: f64 = 0.9;

/// How much an average follows its newest value.
const SMOOTH: f64 = 1.0 / 16.0;

/// A channel's encoders.
pub(super) enum Coding {
    /// One, and the number of its format.
    Fixed(Adaptive, u8),
    /// Several, of which one is chosen for each batch.
    Auto(Box<Auto>),
}

/// Where the time went since a channel's last packet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// The thread waited for room in the window, for the limit, for the socket.
    pub(super) waited: Duration,
    /// It had nothing to send.
    pub(super) starved: Duration,
    /// It was running, and writing.
    pub(super) writing: Duration,
    /// Bytes that it wrote, of all packets.
    pub(super) written: usize,
    /// The receiver was busy, as far as it has said so.
    pub(super) placing: Duration,
    /// What the kernel says, where it does.
    pub(super) kernel: Option<Said>,
    /// The limit held the thread back.
    pub(super) limited: Duration,
    /// It was running.
    pub(super) running: Duration,
}

/// What the kernel says of a channel's connection since its packet before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Said {
    /// All that was written had arrived.
    arrived: Duration,
    /// The receiver's program did not read, and the connection took no more.
    window_closed: Duration,
    /// What lies before the network now will take it so long.
    left: Option<Duration>,
}

/// What the kernel has said by the last packet, and when.
#[derive(Debug)]
pub(super) struct Kernel(SendTimes, Instant);

impl Default for Kernel {
    fn default() -> Self {
        Self(SendTimes::default(), Instant::now())
    }
}

impl Kernel {
    /// None where the kernel does not say.
    pub(super) fn since(&mut self, writer: &Writer) -> Option<Said> {
        let times = writer.send_times()?;
        let Self(before, at) = std::mem::replace(self, Self(times, Instant::now()));
        Some(Said {
            arrived: self.1.saturating_duration_since(at).saturating_sub(times.busy.saturating_sub(before.busy)),
            window_closed: times.window_closed.saturating_sub(before.window_closed),
            left: times.left,
        })
    }
}

/// What pages cost that go whole, where the way is chosen by it: nanoseconds for each byte of content to be encoded, as of late, and for
/// each byte that is sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    pub(super) encoding: f64,
    pub(super) price: f64,
}

/// What packets wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// The network, as the kernel knows it.
    Network,
    /// The bandwidth limit.
    Limit,
}

/// What the window of all channels, and the limit, have seen so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// How long the network has had nothing to do.
    pub(super) idle: Duration,
    /// How long the bandwidth limit let more be sent than was there to send.
    pub(super) unused: Duration,
    /// How long somebody has waited to be let in.
    pub(super) full: Duration,
}

pub(super) struct Auto {
    shared: Arc<compression::Auto>,
    /// Its number for the network that all share.
    channel: u64,
    selection: Selection,
    ways: Vec<Way>,
    sampler: Sampler,
    /// Which was chosen last.
    way: usize,
    /// Nanoseconds to encode a byte of content, as of late.
    encoding: f64,
    /// The end of the packet before.
    since: Instant,
    /// What the window had seen by then, and how long the network had been idle.
    seen: Seen,
    idle: Duration,
    /// Of late, how long the limit held the thread back, and of how long.
    limited: (f64, f64),
    /// By that, the limit is the network.
    is_limited: bool,
}

/// One of the ways that there are.
struct Way {
    encoder: Box<dyn Encoder>,
    /// The number of its format.
    format: u8,
    /// The thread's own CPU encodes. Who else has it meanwhile is not this way's doing; a device's queue is part of the way.
    by_cpu: bool,
}

impl Way {
    /// A clock for how long it takes.
    fn clock(&self, begun: Instant) -> Duration {
        if self.by_cpu { thread_time() } else { begun.elapsed() }
    }
}

impl Coding {
    pub(super) fn new(compression: &Compression) -> Result<Self, CodecError> {
        let (choice, engines) = (compression.choice(), compression.engines());
        let Some(shared) = compression.auto() else {
            return Ok(Self::Fixed(choice.encoder(engines)?, choice.method().format().wire()));
        };
        let way = |choice: &MethodChoice| -> Result<Way, CodecError> {
            Ok(Way {
                // What is not worth a try, the selection says: by class, not by what the last few batches were.
                encoder: choice.untiring_encoder(engines)?,
                format: choice.method().format().wire(),
                by_cpu: engines.of(*choice) == Engine::Cpu,
            })
        };
        let ways = shared.ways.iter().map(way).collect::<Result<_, _>>()?;
        Ok(Self::Auto(Box::new(Auto {
            shared: Arc::clone(shared),
            channel: shared.network().channel(),
            selection: Selection::new(Arc::clone(&shared.knowledge)),
            ways,
            sampler: Sampler::new()?,
            way: 0,
            encoding: 0.0,
            since: Instant::now(),
            seen: Seen::default(),
            idle: Duration::ZERO,
            limited: (0.0, 0.0),
            is_limited: false,
        })))
    }

    /// Whether nothing is ever encoded.
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::Fixed(_, 0))
    }

    /// Whether it wants to know where time goes.
    pub(super) fn is_auto(&self) -> bool {
        matches!(self, Self::Auto(_))
    }

    /// Encodes `content` into `output`: the number of the format, and how long it became. None: it goes as it is. The network, or the
    /// limit where that is the network, has something to do for as long as is `left`, where that is known.
    pub(super) fn encode(
        &mut self,
        content: &[u8],
        output: &mut [u8],
        left: impl FnOnce(Before) -> Option<Duration>,
    ) -> Result<Option<(u8, usize)>, CodecError> {
        match self {
            Self::Fixed(_, 0) => Ok(None),
            Self::Fixed(encoder, format) => Ok(match encoder.encode(content, output)? {
                Encoded::Shrunk(length) => Some((*format, length)),
                Encoded::Incompressible => None,
            }),
            Self::Auto(auto) => {
                let before = if auto.is_limited { Before::Limit } else { Before::Network };
                auto.encode(content, output, left(before))
            }
        }
    }

    /// A packet is about to be written.
    pub(super) fn writes(&self) {
        if let Self::Auto(auto) = self {
            auto.shared.network().is_given(Instant::now());
        }
    }

    /// A packet was written whose `content` went the way that was chosen last.
    pub(super) fn sent(&mut self, times: Times, seen: Seen, content: usize) {
        if let Self::Auto(auto) = self {
            let elapsed = auto.since.elapsed();
            auto.since += elapsed;
            let before = std::mem::replace(&mut auto.seen, seen);
            let busy = elapsed.saturating_sub(times.waited).saturating_sub(times.starved);
            // Where others read what is sent, it is they who wait for room, and this thread for them.
            let waited = times.waited + times.starved.min(seen.full.saturating_sub(before.full));
            let (limited, of) = &mut auto.limited;
            *limited = *limited * LIMIT_MEMORY + times.limited.as_secs_f64();
            *of = *of * LIMIT_MEMORY + elapsed.as_secs_f64();
            // The kernel knows of this channel alone, and not of what a limit holds back: it says where what is on its way lies. What the
            // network could have carried, the window of all channels says.
            let is_limited = *limited > LIMITED * *of;
            auto.is_limited = is_limited;
            let arrived = match times.kernel {
                Some(Said { arrived, window_closed, .. }) if !is_limited => arrived + window_closed,
                _ => Duration::ZERO,
            };
            // By when the network will have sent what lies before it. Under a limit the pieces of a packet leave the network idle in between,
            // which costs nothing: what counts is what the limit lets pass unused. Where somebody else decides, what is in the window.
            let idle = match times.kernel {
                _ if is_limited => seen.unused.saturating_sub(before.unused),
                Some(Said { left: Some(left), .. }) => {
                    let mut network = auto.shared.network();
                    network.has(auto.channel, Instant::now(), left);
                    let idle = network.idle();
                    idle.saturating_sub(std::mem::replace(&mut auto.idle, idle))
                }
                _ => seen.idle.saturating_sub(before.idle),
            };
            let beyond = auto.shared.beyond(times.running);
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
            auto.shared.sent(auto.way, content as u64, elapsed, held_up);
        }
    }

    /// The device that has written what was last encoded, if nobody has looked at it.
    pub(super) fn maker(&self) -> Option<Maker> {
        match self {
            Self::Fixed(encoder, _) => encoder.maker(),
            Self::Auto(auto) => auto.ways[auto.way].encoder.maker(),
        }
    }

    /// What pages cost that go whole; none where bytes decide.
    pub(super) fn costs(&self) -> Option<Costs> {
        match self {
            Self::Fixed(..) => None,
            Self::Auto(auto) => Some(Costs { encoding: auto.encoding, price: auto.selection.byte() }),
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
        self.way = self.selection.choose(class, content.len(), left.map(nanos));
        let (at, way) = (Instant::now(), &mut self.ways[self.way]);
        let begun = way.clock(at);
        let encoded = if way.format == 0 { Encoded::Incompressible } else { way.encoder.encode(content, output)? };
        let length = match encoded {
            Encoded::Shrunk(length) => length,
            Encoded::Incompressible => content.len(),
        };
        let taken = nanos(way.clock(at).saturating_sub(begun));
        let format = way.format;
        self.selection.encoded(self.way, class, content.len(), length, taken);
        self.encoding += (taken as f64 / content.len().max(1) as f64 - self.encoding) * SMOOTH;
        Ok(matches!(encoded, Encoded::Shrunk(_)).then_some((format, length)))
    }
}

#[cfg(test)]
mod tests {
    use sterna_codec::Engines;

    use super::*;

    const BATCH: usize = 64 << 10;

    #[test]
    fn what_shrinks_is_soon_encoded_however_much_did_not_before_it() {
        let mut coding =
            Coding::new(&Compression::new(MethodChoice::parse("auto", None).unwrap(), Engines::default(), 1, None))
                .unwrap();
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
            assert_eq!(coding.encode(&noise, &mut output, |_| None).unwrap(), None, "round {round}");
        }
        // As it begins, a byte on the wire costs more than encoding it. Not every batch is looked at any more.
        let encoded = (0..8).find_map(|_| coding.encode(&text, &mut output, |_| None).unwrap());
        let (_, length) = encoded.expect("it shrinks");
        assert!(length < BATCH / 10, "{length}");
    }

    #[test]
    fn what_it_takes_to_write_a_byte_is_of_all_bytes_that_were_written() {
        let compression = Compression::new(MethodChoice::parse("auto", None).unwrap(), Engines::default(), 1, None);
        let mut coding = Coding::new(&compression).unwrap();
        // A packet of 100 bytes after others of 900 bytes.
        let times = Times { writing: Duration::from_nanos(1600), written: 1000, ..Times::default() };
        for _ in 0..2 {
            let begun = Instant::now();
            // No more of a packet's time is writing than has passed.
            while begun.elapsed() <= times.writing {}
            coding.sent(times, Seen::default(), 100);
        }
        let Coding::Auto(auto) = &coding else { unreachable!("it was asked for") };
        let writing = auto.selection.byte() - auto.selection.price();
        // The first says nothing, and an average follows.
        assert!((writing - 1.6 * SMOOTH).abs() < 1e-9, "{writing}");
    }
}
