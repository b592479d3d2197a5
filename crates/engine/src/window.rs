//! The window: how much may be in flight, bounded in time.
//!
//! Bytes in flight when the guest stops are downtime, and a VMM whose stream is read must see the network's real speed rather
//! than the depth of our buffers. So the bytes between reading from the guest (or from QEMU's socket) and their
//! acknowledgement, of all channels together, are bounded by *rate × (round trip + queueing)*. The downtime decides how long
//! packets may queue, and the rate is measured from the acknowledgements.
//!
//! While the window holds the sender back, the measured rate is what the path carries within the window, and the
//! next window is larger by the queueing: it grows until packets queue for as long as they may, and no
//! further. An interval in which no thread waited does not show the path's rate and changes nothing.
//!
//! The round trip is first that of the handshake, which one late answer can make seconds too long. So it is measured
//! again all the time, and the shortest counts. A measurement is the time until as many bytes were acknowledged as were in
//! flight at its beginning: by then a byte that entered at its beginning or later was acknowledged, so the measurement is never
//! too short. (Too short would be worse than too long: a window below the path's round trip shrinks until nothing is
//! left of the rate.)

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Maximum time of queueing beyond the round trip, however long a downtime was permitted.
pub const MAX_ALLOWANCE: Duration = Duration::from_millis(50);
/// Queueing and round trip each count as at most this part of the downtime, so at least half of it stays for
/// the rest of the switchover.
const PART_OF_DOWNTIME: u32 = 4;
/// Maximum window, in bytes: how much one migration may hold in buffers and sockets.
pub const LARGEST_WINDOW: u64 = 256 << 20;
/// Length of the intervals over which the rate is measured.
const MEASURING_INTERVAL: Duration = Duration::from_millis(10);
/// Part of an earlier rate that is kept when a slower interval follows: one stutter must not halve the window.
const DECAY: f64 = 0.9;

/// Arithmetic of the window, with time passed in.
#[derive(Debug)]
struct Budget {
    round_trip: Duration,
    queueing: Duration,
    /// The measurement of the round trip under way: since when, and the bytes still to be acknowledged until its end.
    probe: Option<(Instant, u64)>,
    smallest: u64,
    bytes: u64,
    rate: f64,
    interval_start: Option<Instant>,
    interval_bytes: u64,
    interval_limited: bool,
}

impl Budget {
    fn new(round_trip: Duration, queueing: Duration, smallest: u64) -> Self {
        Self {
            round_trip,
            queueing,
            probe: None,
            smallest,
            bytes: smallest.max(4 << 20),
            rate: 0.0,
            interval_start: None,
            interval_bytes: 0,
            interval_limited: false,
        }
    }

    /// Records that bytes have entered, so that `in_flight` are now under way.
    fn entered(&mut self, in_flight: u64, now: impl FnOnce() -> Instant) {
        if self.probe.is_none() {
            self.probe = Some((now(), in_flight));
        }
    }

    fn acknowledged(&mut self, bytes: u64, now: Instant) {
        match &mut self.probe {
            Some((since, left)) if *left <= bytes => {
                self.round_trip = self.round_trip.min(now.saturating_duration_since(*since));
                self.probe = None;
            }
            Some((_, left)) => *left -= bytes,
            None => {}
        }
        let start = *self.interval_start.get_or_insert(now);
        self.interval_bytes += bytes;
        let elapsed = now.saturating_duration_since(start);
        if elapsed < MEASURING_INTERVAL {
            return;
        }
        let rate = self.interval_bytes as f64 / elapsed.as_secs_f64();
        if self.interval_limited {
            self.rate = rate.max(self.rate * DECAY);
            let wanted = self.rate * (self.round_trip + self.queueing).as_secs_f64();
            self.bytes = (wanted as u64).clamp(self.smallest, LARGEST_WINDOW.max(self.smallest));
        }
        self.interval_start = Some(now);
        self.interval_bytes = 0;
        self.interval_limited = false;
    }
}

/// The pages of one packet, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Pages with content.
    pub normal_pages: u64,
    /// Zero pages.
    pub zero_pages: u64,
    /// Bytes of the packets, before TLS.
    pub bytes: u64,
}

impl Carried {
    /// Returns the pages of both kinds.
    pub fn pages(&self) -> u64 {
        self.normal_pages + self.zero_pages
    }
}

impl std::ops::AddAssign for Carried {
    fn add_assign(&mut self, more: Self) {
        self.normal_pages += more.normal_pages;
        self.zero_pages += more.zero_pages;
        self.bytes += more.bytes;
    }
}

/// What was acknowledged so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Pages, including those that were not sent because the destination has them already.
    pub carried: Carried,
    /// Packets with pages.
    pub packets: u64,
    /// When the last of them was acknowledged.
    pub last: Option<Instant>,
}

#[derive(Debug)]
struct State {
    budget: Budget,
    delivered: Delivered,
    /// What was delivered by the first acknowledgement of pages.
    first_delivered: Delivered,
    in_flight: u64,
    /// Bytes in flight that were handed to the network.
    on_wire: u64,
    /// How long the network has been idle.
    idle: Duration,
    /// Since when the network is idle.
    idle_since: Option<Instant>,
    /// How long a thread has waited to enter.
    full: Duration,
    /// Since when a thread waits to enter.
    full_since: Option<Instant>,
    closed: bool,
    /// Number of threads that wait to enter: waking costs a system call even where no thread waits.
    waiting: u32,
}

impl State {
    /// Updates the idle time after a change of `on_wire`. Nothing queues while no more is on the wire than fits the path's round trip.
    fn update_idle(&mut self, now: Instant) {
        let nothing_queues = self.on_wire as f64 <= self.budget.rate * self.budget.round_trip.as_secs_f64();
        match (nothing_queues, self.idle_since) {
            (true, None) => self.idle_since = Some(now),
            (false, Some(since)) => {
                self.idle += now.saturating_duration_since(since);
                self.idle_since = None;
            }
            _ => {}
        }
    }

    fn deliver(&mut self, carried: &Carried, packets: u64, now: Instant) {
        if carried.pages() > 0 {
            self.delivered.carried += *carried;
            self.delivered.packets += packets;
            self.delivered.last = Some(now);
            if self.first_delivered.last.is_none() {
                self.first_delivered = self.delivered;
            }
        }
    }

    fn add(&mut self, bytes: u64) {
        self.in_flight += bytes;
        self.budget.entered(self.in_flight, Instant::now);
    }
}

/// Returns how long packets may queue for this target downtime.
fn queueing(downtime: Duration) -> Duration {
    MAX_ALLOWANCE.min(downtime / PART_OF_DOWNTIME)
}

/// The window of one migration, shared by all its channels.
#[derive(Debug)]
pub struct Window {
    state: Mutex<State>,
    changed: Condvar,
    allowance: Duration,
}

/// The migration is being taken down: nothing more enters the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the migration is being taken down")]
pub struct WindowClosed;

impl Window {
    /// Makes a window for batches of at most `batch` bytes; it has room for at least two of them. `round_trip` is the
    /// path's as far as it is known, `downtime` the target downtime.
    pub fn new(batch: u64, round_trip: Duration, downtime: Duration) -> Self {
        let part = downtime / PART_OF_DOWNTIME;
        let queueing = queueing(downtime);
        let allowance = round_trip.min(part) + queueing;
        let budget = Budget::new(round_trip, queueing, 2 * batch);
        Self {
            state: Mutex::new(State {
                budget,
                delivered: Delivered::default(),
                first_delivered: Delivered::default(),
                in_flight: 0,
                on_wire: 0,
                idle: Duration::ZERO,
                idle_since: Some(Instant::now()),
                full: Duration::ZERO,
                full_since: None,
                closed: false,
                waiting: 0,
            }),
            changed: Condvar::new(),
            allowance,
        }
    }

    /// Has packets queue no longer than fits another target downtime, from now on. Does not change [`Window::allowance`].
    pub fn set_downtime(&self, downtime: Duration) {
        self.lock().budget.queueing = queueing(downtime);
    }

    /// Waits until `bytes` may be in flight, and counts them. An empty window has room for any number.
    pub fn enter(&self, bytes: u64) -> Result<(), WindowClosed> {
        let mut state = self.lock();
        while !state.closed && state.in_flight > 0 && state.in_flight + bytes > state.budget.bytes {
            state.budget.interval_limited = true;
            state.full_since.get_or_insert_with(Instant::now);
            state.waiting += 1;
            state = self.changed.wait(state).expect("no holder of the window panics");
            state.waiting -= 1;
            if state.waiting == 0 {
                let since = state.full_since.take();
                state.full += since.map_or(Duration::ZERO, |since| since.elapsed());
            }
        }
        if state.closed {
            return Err(WindowClosed);
        }
        state.add(bytes);
        Ok(())
    }

    /// As [`Window::enter`], but returns false instead of waiting.
    pub fn try_enter(&self, bytes: u64) -> Result<bool, WindowClosed> {
        let mut state = self.lock();
        if state.closed {
            return Err(WindowClosed);
        }
        if state.in_flight > 0 && state.in_flight + bytes > state.budget.bytes {
            state.budget.interval_limited = true;
            return Ok(false);
        }
        state.add(bytes);
        Ok(true)
    }

    /// Frees `bytes`, which were acknowledged with the pages `carried`, in `packets` packets that have pages.
    pub fn acknowledge(&self, bytes: u64, carried: &Carried, packets: u64) {
        let mut state = self.lock();
        let now = Instant::now();
        state.deliver(carried, packets, now);
        state.in_flight = state.in_flight.saturating_sub(bytes);
        state.on_wire = state.on_wire.saturating_sub(bytes);
        if bytes > 0 {
            state.budget.acknowledged(bytes, now);
            state.update_idle(now);
        }
        self.wake(state);
    }

    /// Records that `bytes` which have entered are handed to the network.
    pub fn on_wire(&self, bytes: u64) {
        let mut state = self.lock();
        state.on_wire += bytes;
        state.update_idle(Instant::now());
    }

    /// Returns how long, all together, the network could have carried more.
    pub fn idle(&self) -> Duration {
        let state = self.lock();
        state.idle + state.idle_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns how long, all together, a thread has waited to enter: in that time a channel without work could have had some.
    pub fn full(&self) -> Duration {
        let state = self.lock();
        state.full + state.full_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Counts pages with content as delivered that were not sent, because the destination has them already.
    pub fn count_unsent(&self, normal_pages: u64) {
        let carried = Carried { normal_pages, ..Carried::default() };
        self.lock().deliver(&carried, 0, Instant::now());
    }

    /// Returns what was delivered by the first acknowledgement, and so far.
    pub fn delivered(&self) -> (Delivered, Delivered) {
        let state = self.lock();
        (state.first_delivered, state.delivered)
    }

    /// Releases `bytes` that have entered and were not needed. They do not count as delivered.
    pub fn release(&self, bytes: u64) {
        let mut state = self.lock();
        state.in_flight = state.in_flight.saturating_sub(bytes);
        self.wake(state);
    }

    /// Closes the window: waiting and later calls fail.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Opens a closed window for a new connection with this `round_trip`. Nothing is in flight; what was delivered stays counted.
    pub fn reopen(&self, round_trip: Duration) {
        let mut state = self.lock();
        let Budget { queueing, smallest, .. } = state.budget;
        state.budget = Budget::new(round_trip, queueing, smallest);
        (state.in_flight, state.on_wire, state.closed) = (0, 0, false);
        state.update_idle(Instant::now());
    }

    /// Returns the bytes in flight.
    pub fn in_flight(&self) -> u64 {
        self.lock().in_flight
    }

    /// Returns how many bytes may be in flight now.
    pub fn size(&self) -> u64 {
        self.lock().budget.bytes
    }

    /// Returns how much of the downtime to reserve for bytes in flight, never more than half of it. Of the round trip
    /// that the handshake measured at most a quarter of the downtime counts, because a single late answer must not take the
    /// whole downtime. Where the path really is that slow, the rest exceeds the downtime, whatever is reserved.
    pub fn allowance(&self) -> Duration {
        self.allowance
    }

    /// Returns the shortest round trip that was measured, in the handshake or since.
    pub fn round_trip(&self) -> Duration {
        self.lock().budget.round_trip
    }

    fn wake(&self, state: MutexGuard<'_, State>) {
        let waiting = state.waiting;
        drop(state);
        if waiting > 0 {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of the window panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(round_trip_ms: u64) -> Budget {
        Budget {
            round_trip: Duration::from_millis(round_trip_ms),
            queueing: Duration::from_millis(50),
            probe: None,
            smallest: 1 << 20,
            bytes: 1 << 20,
            rate: 0.0,
            interval_start: None,
            interval_bytes: 0,
            interval_limited: false,
        }
    }

    /// A path that delivers `rate` bytes per second after `delay`: what the window becomes when always full.
    fn settled(budget: &mut Budget, rate: f64, delay: Duration) -> u64 {
        let mut now = Instant::now();
        for _ in 0..2000 {
            // A full window is acknowledged after the longer of the path's delay and its transmission time.
            let time = delay.as_secs_f64().max(budget.bytes as f64 / rate);
            let bytes = budget.bytes;
            budget.entered(bytes, || now);
            now += Duration::from_secs_f64(time);
            budget.interval_limited = true;
            budget.acknowledged(bytes, now);
        }
        budget.bytes
    }

    #[test]
    fn a_full_window_settles_at_rate_times_allowance() {
        for (rate, delay) in [(100e6, 1), (3e9, 1), (1e9, 20)] {
            let mut budget = budget(delay);
            let size = settled(&mut budget, rate, Duration::from_millis(delay)) as f64;
            let wanted = rate * (delay as f64 + 50.0) / 1e3;
            assert!((size / wanted - 1.0).abs() < 0.05, "rate {rate}, delay {delay}: {size} for {wanted}");
        }
    }

    #[test]
    fn a_late_answer_in_the_handshake_is_corrected_by_the_first_acknowledgements() {
        let mut budget = budget(3000);
        let size = settled(&mut budget, 1e9, Duration::from_millis(2)) as f64;
        assert_eq!(budget.round_trip, Duration::from_millis(2));
        assert!((size / (1e9 * 0.052) - 1.0).abs() < 0.05, "{size}");
    }

    #[test]
    fn a_path_whose_round_trip_is_longer_than_the_downtime_bears_keeps_its_rate() {
        let mut budget = budget(400);
        let size = settled(&mut budget, 100e6, Duration::from_millis(400)) as f64;
        assert!((size / (100e6 * 0.45) - 1.0).abs() < 0.05, "{size}");
    }

    #[test]
    fn a_round_trip_is_over_when_as_much_was_acknowledged_as_was_in_flight_at_its_beginning() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut budget = budget(3000);
        budget.entered(10, || at(0));
        budget.entered(30, || at(5));
        budget.acknowledged(4, at(8));
        assert_eq!(budget.round_trip, Duration::from_secs(3), "6 bytes are still to come");
        budget.acknowledged(20, at(12));
        assert_eq!(budget.round_trip, Duration::from_millis(12));
        // A longer one that follows changes nothing.
        budget.entered(40, || at(20));
        budget.acknowledged(40, at(90));
        assert_eq!(budget.round_trip, Duration::from_millis(12));
    }

    #[test]
    fn an_interval_in_which_nobody_waited_changes_nothing() {
        let mut budget = budget(1);
        settled(&mut budget, 1e9, Duration::from_millis(1));
        let before = budget.bytes;
        let mut now = Instant::now() + Duration::from_secs(1000);
        for _ in 0..100 {
            now += Duration::from_millis(20);
            budget.acknowledged(100, now);
        }
        assert_eq!(budget.bytes, before);
    }

    #[test]
    fn the_window_never_shrinks_below_two_batches() {
        let mut budget = budget(1);
        assert_eq!(settled(&mut budget, 1000.0, Duration::from_millis(1)), 1 << 20);
    }

    #[test]
    fn a_late_answer_in_the_handshake_takes_no_more_than_a_quarter_of_the_downtime() {
        let ms = Duration::from_millis;
        for (round_trip, downtime, allowance) in
            [(1, 300, 51), (75, 300, 125), (3000, 300, 125), (3000, 1000, 300), (3000, 40, 20), (1, 0, 0)]
        {
            let window = Window::new(1 << 20, ms(round_trip), ms(downtime));
            assert_eq!(window.allowance(), ms(allowance), "round trip {round_trip} ms, downtime {downtime} ms");
        }
    }

    #[test]
    fn two_batches_enter_and_a_third_waits_until_one_leaves() {
        let window = Window::new(4 << 20, Duration::ZERO, Duration::ZERO);
        window.enter(4 << 20).unwrap();
        window.enter(4 << 20).unwrap();
        std::thread::scope(|scope| {
            let third = scope.spawn(|| window.enter(4 << 20));
            window.acknowledge(4 << 20, &Carried::default(), 1);
            assert_eq!(third.join().unwrap(), Ok(()));
        });
        assert_eq!(window.in_flight(), 8 << 20);
    }

    #[test]
    fn pages_are_delivered_when_they_are_acknowledged_and_zero_pages_without_bytes_too() {
        let window = Window::new(1 << 20, Duration::ZERO, Duration::ZERO);
        window.enter(8192).unwrap();
        assert_eq!(window.delivered(), <(Delivered, Delivered)>::default());
        let carried = Carried { normal_pages: 2, zero_pages: 0, bytes: 8300 };
        window.acknowledge(8192, &carried, 1);
        let (first, so_far) = window.delivered();
        assert_eq!((first.carried, first.packets, so_far), (carried, 1, first));
        window.acknowledge(0, &Carried { normal_pages: 0, zero_pages: 7, bytes: 90 }, 1);
        window.count_unsent(3);
        // A packet without pages says nothing of how fast pages go.
        window.acknowledge(0, &Carried { bytes: 90, ..Carried::default() }, 0);
        let (still_first, all) = window.delivered();
        assert_eq!(still_first, first);
        assert_eq!((all.carried, all.packets), (Carried { normal_pages: 5, zero_pages: 7, bytes: 8390 }, 2));
        assert!(all.carried.pages() == 12 && all.last >= first.last && first.last.is_some());
    }

    #[test]
    fn a_window_that_is_opened_again_is_empty_and_keeps_what_was_delivered() {
        let window = Window::new(1 << 20, Duration::ZERO, Duration::ZERO);
        window.enter(5 << 20).unwrap();
        let carried = Carried { normal_pages: 3, ..Carried::default() };
        window.acknowledge(1 << 20, &carried, 1);
        window.close();
        assert_eq!(window.enter(1), Err(WindowClosed));

        window.reopen(Duration::ZERO);

        assert_eq!((window.in_flight(), window.delivered().1.carried), (0, carried));
        window.enter(3 << 20).unwrap();
        assert_eq!(window.try_enter(2 << 20), Ok(false), "it has its first size");
    }

    #[test]
    fn closing_wakes_who_waits() {
        let window = Window::new(1 << 20, Duration::ZERO, Duration::ZERO);
        window.enter(8 << 20).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| window.enter(1 << 20));
            window.close();
            assert_eq!(waiting.join().unwrap(), Err(WindowClosed));
        });
    }
}
