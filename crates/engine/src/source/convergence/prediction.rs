//! How fast pages leave and the guest dirties them, and the downtime that follows from it.

use std::time::Duration;

/// Estimated time of commit and start besides loading: two records made durable on each side, and starting vCPUs.
const COMMIT_ESTIMATE: Duration = Duration::from_millis(10);
/// Minimum time over which rates are measured.
pub(super) const MIN_MEASURE: Duration = Duration::from_millis(50);
/// Minimum number of packets over which rates are measured: acknowledgements arrive for a packet, or one of each channel, at a time.
const MIN_PACKETS: u64 = 8;
/// Time after which fewer packets suffice.
const MAX_MEASURE: Duration = Duration::from_millis(500);
/// Longer than any prediction.
pub(super) const MAX_DURATION: Duration = Duration::from_secs(u32::MAX as u64);
/// Where pages shrink to less than this part on the wire, the network does not bound how fast they leave. Then the bytes per second on the
/// wire do not show how fast a state would be sent, which does not shrink.
const MIN_WIRE_RATIO: f64 = 1.0 / 16.0;
/// Channels with less to send than these bytes, or than these seconds take, may have been idle.
const MIN_BACKLOG: (u64, f64) = (256 << 10, 0.005);
/// Minimum seconds in which a few pages count as sent: shorter times come from the clock, or from a buffer.
const MIN_TRIP: f64 = 0.000_2;
/// A state that takes no longer than this does not keep a guest from being moved, whatever the downtime: no round makes it smaller.
pub(super) const SMALL_STATE: Duration = Duration::from_millis(50);

/// What has arrived by an acknowledgement. Bytes that were only written do not count: they fill buffers, at the buffers' speed.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::source) struct Arrived {
    /// When the acknowledgement came, since the migration began.
    pub(in crate::source) at: Duration,
    /// Bytes of pages so far, zero pages included.
    pub(in crate::source) pages: u64,
    /// Bytes of pages that were not zero.
    pub(in crate::source) normal: u64,
    /// Bytes of their packets.
    pub(in crate::source) wire: u64,
    /// Number of their packets.
    pub(in crate::source) packets: u64,
}

/// The measurements when a round has been handed to the channels and the log was collected.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::source) struct Measure {
    /// Time since the migration began.
    pub(in crate::source) now: Duration,
    /// Bytes of pages that are known to be dirty and not handed over yet.
    pub(in crate::source) dirtied: u64,
    /// Bytes of pages that the log has named since the round before.
    pub(in crate::source) logged: u64,
    /// What had arrived by the first acknowledgement.
    pub(in crate::source) first: Arrived,
    /// What has arrived by the last acknowledgement.
    pub(in crate::source) arrived: Arrived,
    /// Bytes of pages that have not arrived: dirty, queued, or on their way.
    pub(in crate::source) remaining: u64,
    /// Bytes of state to be saved.
    pub(in crate::source) state: u64,
    /// Bytes of state per second, where devices have measured it; 0 where they have not.
    pub(in crate::source) state_rate: f64,
    /// How long the destination will take to load the state that was sent already.
    pub(in crate::source) loading: Duration,
    /// How long the window has been full, all together.
    pub(in crate::source) full: Duration,
    /// The shortest round trip that was measured.
    pub(in crate::source) round_trip: Duration,
}

impl Measure {
    /// Returns the bytes of pages that were handed to the channels and have not arrived.
    pub(in crate::source) fn on_the_way(&self) -> u64 {
        self.remaining.saturating_sub(self.dirtied)
    }

    /// Returns the bytes of pages that were ever handed to the channels.
    pub(super) fn handed_over(&self) -> u64 {
        self.arrived.pages + self.on_the_way()
    }
}

/// Rates, in bytes per second.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::source) struct Rates {
    /// Bytes that the guest dirties.
    pub(in crate::source) dirty: f64,
    /// Bytes of pages that leave.
    pub(in crate::source) drain: f64,
    /// Bytes that the network has carried: less than it can where it was not the limit.
    pub(in crate::source) wire: f64,
}

/// The beginning of a measurement of how fast pages leave.
#[derive(Clone, Copy, Debug)]
struct Since {
    arrived: Arrived,
    now: Duration,
    full: Duration,
}

/// The rates measured so far.
#[derive(Clone, Debug)]
pub(super) struct Prediction {
    /// Bytes that were dirtied since `dirtied_since`.
    dirtied: u64,
    dirtied_since: Duration,
    since: Option<Since>,
    /// Whether the channels have had a backlog at every measurement since `since`.
    busy: bool,
    /// The last moment at which nothing was on its way, and what had arrived by then.
    free: (Duration, Arrived),
    /// Bytes, and bytes per second, of the last pages that arrived with nothing left on its way.
    kept_up: Option<(u64, f64)>,
    /// Bytes that were handed over in the first round. The speed of its zero pages does not show how fast written pages leave.
    first: Option<u64>,
    rates: Rates,
    /// Whether enough was ever sent that the network's rate shows how fast a state would be sent.
    wire_is_known: bool,
}

/// Returns whether the channels have a backlog: more than is on its way because of the path's length.
fn is_backlog(at: &Measure, drain: f64) -> bool {
    let (bytes, time) = MIN_BACKLOG;
    at.on_the_way() as f64 > (bytes as f64).max(drain * (at.round_trip.as_secs_f64() + time))
}

pub(super) fn seconds(time: f64) -> Duration {
    Duration::from_secs_f64(time.min(1e9))
}

impl Prediction {
    pub(super) fn new() -> Self {
        Self {
            dirtied: 0,
            dirtied_since: Duration::ZERO,
            since: None,
            busy: true,
            free: (Duration::ZERO, Arrived::default()),
            kept_up: None,
            first: None,
            rates: Rates::default(),
            wire_is_known: false,
        }
    }

    /// Returns the rates of the last measurement.
    pub(super) fn rates(&self) -> Rates {
        self.rates
    }

    /// Records that so many bytes were handed over in the first round; later calls change nothing.
    pub(super) fn set_first_round(&mut self, bytes: u64) {
        self.first.get_or_insert(bytes);
    }

    /// Forgets how fast pages leave.
    pub(super) fn forget(&mut self, at: &Measure) {
        self.since = (at.arrived.packets > 0).then_some(Since { arrived: at.arrived, now: at.now, full: at.full });
        (self.busy, self.free, self.kept_up) = (true, (at.now, at.arrived), None);
        (self.rates.drain, self.rates.wire, self.wire_is_known) = (0.0, 0.0, false);
    }

    /// Predicts the downtime if the guest were stopped now; none before anything was measured.
    pub(super) fn downtime(&self, at: &Measure) -> Option<Duration> {
        Some(self.sending(at)? + self.least(at))
    }

    /// Returns the time of a switchover besides sending pages: the last page's round trip, prepare and prepared, commit, and the state.
    pub(super) fn least(&self, at: &Measure) -> Duration {
        at.round_trip * 5 / 2 + COMMIT_ESTIMATE + self.state(at) + at.loading
    }

    /// Returns how long the state takes, which is sent uncompressed. While little was sent, or pages shrink a lot, the rate on the wire
    /// does not show that.
    pub(super) fn state(&self, at: &Measure) -> Duration {
        let wire = self.rates.wire.max(self.rates.drain * MIN_WIRE_RATIO);
        let (rate, most) = match (self.wire_is_known, at.state_rate > 0.0) {
            (true, _) => (wire.max(at.state_rate), MAX_DURATION),
            (false, true) => (at.state_rate, MAX_DURATION),
            (false, false) => (wire, SMALL_STATE),
        };
        if rate > 0.0 { seconds(at.state as f64 / rate).min(most) } else { Duration::ZERO }
    }

    /// Returns how long sending the remaining pages takes; none before anything was measured.
    pub(super) fn sending(&self, at: &Measure) -> Option<Duration> {
        if at.remaining == 0 {
            return Some(Duration::ZERO);
        }
        // A few pages leave at least as fast as a few have before.
        let few = self.kept_up.filter(|(bytes, _)| at.remaining <= 2 * bytes).map_or(0.0, |(_, rate)| rate);
        let drain = self.rates.drain.max(few);
        (drain > 0.0).then(|| seconds(at.remaining as f64 / drain))
    }

    /// Returns the bytes of pages between `from` and `to` by which the rate of written pages is measured.
    fn rated_bytes(&self, from: &Arrived, to: &Arrived) -> u64 {
        if from.pages < self.first.unwrap_or(0) { to.normal - from.normal } else { to.pages - from.pages }
    }

    /// Measures how fast pages leave and the guest dirties them.
    pub(super) fn measure(&mut self, at: &Measure) {
        self.dirtied += at.logged;
        let elapsed = at.now.saturating_sub(self.dirtied_since);
        if elapsed >= MIN_MEASURE {
            self.rates.dirty = self.dirtied as f64 / elapsed.as_secs_f64();
            (self.dirtied, self.dirtied_since) = (0, at.now);
        }
        if at.on_the_way() == 0 {
            let (begun, before) = self.free;
            let (bytes, time) =
                (self.rated_bytes(&before, &at.arrived), at.arrived.at.saturating_sub(begun).as_secs_f64());
            if bytes > 0 {
                self.kept_up = Some((bytes, bytes as f64 / time.max(MIN_TRIP)));
            }
            self.free = (at.now, at.arrived);
        }
        // `busy` is for the following measurements: until the last acknowledgement the channels were busy if they had a backlog before it.
        let busy = self.busy;
        self.busy &= is_backlog(at, self.rates.drain);
        if at.arrived.packets == 0 {
            return;
        }
        // From acknowledgement to acknowledgement: the time before the first belongs to the handshake, and after the last only part of a
        // packet has arrived.
        let first = Since { arrived: at.first, now: at.first.at, full: Duration::ZERO };
        let since = *self.since.get_or_insert(first);
        let (time, packets) = (at.arrived.at - since.arrived.at, at.arrived.packets - since.arrived.packets);
        let enough = if time < MAX_MEASURE { MIN_PACKETS } else { 1 };
        if time < MIN_MEASURE || packets < enough {
            return;
        }
        let per_second = |bytes: u64| bytes as f64 / time.as_secs_f64();
        let drain = per_second(self.rated_bytes(&since.arrived, &at.arrived));
        if drain > 0.0 {
            // Channels that kept up have shown only a lower bound of their rate; and so has a network that had to wait.
            let bytes = at.arrived.wire - since.arrived.wire;
            let wire = per_second(bytes);
            let full = at.full.saturating_sub(since.full) * 2 > at.now - since.now;
            let says = busy && bytes > MIN_BACKLOG.0 && wire > drain * MIN_WIRE_RATIO;
            self.wire_is_known |= says;
            self.rates.drain = if busy { drain } else { drain.max(self.rates.drain) };
            self.rates.wire = if says && full { wire } else { wire.max(self.rates.wire) };
        }
        self.busy = is_backlog(at, self.rates.drain);
        self.since = Some(Since { arrived: at.arrived, now: at.now, full: at.full });
    }
}
