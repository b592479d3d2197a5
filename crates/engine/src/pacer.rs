//! The bandwidth limit, shared by all channels of a migration.
//!
//! The bytes of all channels form one line, and a point moves along the line at the limit's rate. A sending thread
//! reserves the next piece of the line and waits until the point reaches the start of the piece. So the sum keeps to
//! the limit for any number of channels, and channels that reserve equal pieces get equal shares, in the order of their
//! requests. The arithmetic (`Line`) receives the time as an argument, so its tests do not wait.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum delay that later sends make up for: it covers threads that wake late. These bytes add to those of a second,
/// so together with a piece they must stay below a twentieth of a second.
const CATCH_UP: Duration = Duration::from_millis(30);
/// Number of pieces into which the bytes of a second are divided.
const PIECES_PER_SECOND: u64 = 400;
/// Maximum bytes of a piece.
const MAX_PIECE: u64 = 256 << 10;
/// Minimum bytes of a piece: a system call is too expensive for fewer.
const MIN_PIECE: u64 = 4 << 10;

/// Limits all its callers together to a number of bytes per second. Shared by [`std::sync::Arc`].
#[derive(Debug)]
pub struct Pacer {
    started: Instant,
    line: Mutex<Line>,
    changed: Condvar,
}

impl Pacer {
    /// Makes a pacer with a limit in bytes per second; with `None` or 0 (as QEMU's `max-bandwidth`), no thread waits.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { started: Instant::now(), line: Mutex::new(Line::new(bytes_per_second)), changed: Condvar::new() }
    }

    /// Waits until `bytes` more may be sent. Returns how long that took.
    ///
    /// Call this before each write, in pieces of at most [`Pacer::piece`] bytes: a piece is sent at once, so the
    /// limit holds over times that are long against the time of one piece.
    pub fn pace(&self, bytes: usize) -> Duration {
        let mut line = self.lock();
        let begun = self.started.elapsed();
        let Some(place) = line.reserve(begun, bytes as u64) else {
            return Duration::ZERO;
        };
        loop {
            let now = self.started.elapsed();
            let wait = line.wait(now, place);
            if wait.is_zero() {
                return now.saturating_sub(begun);
            }
            line = self.changed.wait_timeout(line, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Counts `bytes` that are sent without waiting; other threads wait longer instead.
    pub fn charge(&self, bytes: usize) {
        // The position of these bytes does not matter.
        let _ = self.lock().reserve(self.started.elapsed(), bytes as u64);
    }

    /// Returns how long the network will be busy with the reserved bytes, plus the delay that can be made up for;
    /// `None` without a limit.
    pub fn left(&self) -> Option<Duration> {
        let line = self.lock();
        line.rate.map(|rate| line.left(self.started.elapsed(), rate))
    }

    /// Returns the total time for which no thread used the limit, beyond the delay that can be made up for.
    pub fn unused(&self) -> Duration {
        self.lock().unused
    }

    /// Changes the limit, also for waiting threads; with `None` or 0 no thread waits. Does nothing after [`Pacer::release`].
    pub fn set_limit(&self, bytes_per_second: Option<u64>) {
        let mut line = self.lock();
        if !line.released {
            line.set_rate(self.started.elapsed(), bytes_per_second);
        }
        drop(line);
        self.changed.notify_all();
    }

    /// Removes the limit for good, which ends all waits: the migration is being taken down, and its threads must not wait again, whatever
    /// limit is requested meanwhile.
    pub fn release(&self) {
        let mut line = self.lock();
        line.set_rate(self.started.elapsed(), None);
        line.released = true;
        drop(line);
        self.changed.notify_all();
    }

    /// Returns the limit, in bytes per second.
    pub fn limit(&self) -> Option<u64> {
        self.lock().rate
    }

    /// Returns how many bytes to send between two calls of [`Pacer::pace`]: those of 2.5 ms, between 4 KiB and 256 KiB.
    pub fn piece(&self) -> usize {
        self.lock().rate.map_or(MAX_PIECE, piece) as usize
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        // Every change of the line is complete before anything could panic.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The line: positions are bytes since the beginning, times are since the pacer's start.
#[derive(Debug)]
struct Line {
    rate: Option<u64>,
    /// The position of the point at `since`; from then on it has moved at `rate`.
    from: u64,
    since: Duration,
    /// The end of the last reserved piece.
    reserved: u64,
    /// The time of all parts of the line that no thread reserved in time.
    unused: Duration,
    /// Whether there is no limit any more, for good.
    released: bool,
}

impl Line {
    fn new(rate: Option<u64>) -> Self {
        Self {
            rate: rate.filter(|rate| *rate > 0),
            from: 0,
            since: Duration::ZERO,
            reserved: 0,
            unused: Duration::ZERO,
            released: false,
        }
    }

    /// Returns the position of the point.
    fn point(&self, now: Duration, rate: u64) -> u64 {
        self.from.saturating_add(bytes_in(now.saturating_sub(self.since), rate))
    }

    /// Reserves the next piece and returns where it begins; `None` if there is no limit.
    fn reserve(&mut self, now: Duration, bytes: u64) -> Option<u64> {
        let rate = self.rate?;
        let missed = self.point(now, rate).saturating_sub(bytes_in(CATCH_UP, rate));
        let place = self.reserved.max(missed);
        self.unused = self.unused.saturating_add(time_of(place - self.reserved, rate));
        self.reserved = place.saturating_add(bytes);
        Some(place)
    }

    /// Returns the time until the point reaches `place`.
    fn wait(&self, now: Duration, place: u64) -> Duration {
        let Some(rate) = self.rate else {
            return Duration::ZERO;
        };
        time_of(place.saturating_sub(self.point(now, rate)), rate)
    }

    /// Returns how long no thread needs to reserve anything before time is lost for good.
    fn left(&self, now: Duration, rate: u64) -> Duration {
        let until = self.reserved.saturating_add(bytes_in(CATCH_UP, rate));
        time_of(until.saturating_sub(self.point(now, rate)), rate)
    }

    fn set_rate(&mut self, now: Duration, rate: Option<u64>) {
        // Without a limit nothing was reserved, so the point starts at the end.
        self.from = self.rate.map_or(self.reserved, |rate| self.point(now, rate));
        self.since = now;
        self.rate = rate.filter(|rate| *rate > 0);
    }
}

fn piece(rate: u64) -> u64 {
    (rate / PIECES_PER_SECOND).clamp(MIN_PIECE, MAX_PIECE)
}

/// Returns the time of `bytes`, rounded up: otherwise a thread that waits for this time would wake a moment early.
fn time_of(bytes: u64, rate: u64) -> Duration {
    let nanoseconds = (u128::from(bytes) * 1_000_000_000).div_ceil(rate.into());
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
}

fn bytes_in(time: Duration, rate: u64) -> u64 {
    u64::try_from(time.as_nanos().saturating_mul(rate.into()) / 1_000_000_000).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Runs senders that always have more to send, and returns (time, sender, bytes) for each piece sent. `wakes`
    /// returns when a sender continues whose wait has ended.
    fn simulate(
        rate: u64,
        piece: u64,
        senders: usize,
        wakes: impl Fn(Duration) -> Duration,
        until: Duration,
    ) -> Vec<(Duration, usize, u64)> {
        let mut line = Line::new(Some(rate));
        let mut sent = Vec::new();
        // (the time at which a sender continues, sender); each reserves its next piece when the previous one has been
        // sent.
        let mut waiting: Vec<_> = (0..senders)
            .map(|sender| {
                let place = line.reserve(Duration::ZERO, piece).unwrap();
                (line.wait(Duration::ZERO, place), sender)
            })
            .collect();
        loop {
            let next = (0..senders).min_by_key(|at| waiting[*at]).unwrap();
            let (due, sender) = waiting[next];
            let now = wakes(due);
            if now > until {
                return sent;
            }
            sent.push((now, sender, piece));
            let place = line.reserve(now, piece).unwrap();
            waiting[next] = (now + line.wait(now, place), sender);
        }
    }

    fn sent_between(sent: &[(Duration, usize, u64)], from: Duration, to: Duration) -> u64 {
        sent.iter().filter(|(when, ..)| (from..to).contains(when)).map(|(.., bytes)| bytes).sum()
    }

    #[test]
    fn every_second_after_the_first_keeps_to_the_limit_within_five_percent() {
        for rate in [1 << 20, 100 << 20, 125_000_000, 3_000_000_000] {
            for senders in [1, 3, 8] {
                for late in [Duration::ZERO, Duration::from_micros(100), Duration::from_millis(3)] {
                    let piece = piece(rate);
                    // A single sender that wakes later than a piece lasts cannot keep up; it needs other senders.
                    if late.as_secs_f64() * rate as f64 > (piece * senders as u64) as f64 {
                        continue;
                    }
                    let sent = simulate(rate, piece, senders, |due| due + late, SECOND * 5);
                    for tenth in 10..40 {
                        let from = SECOND * tenth / 10;
                        let bytes = sent_between(&sent, from, from + SECOND) as f64;
                        let ratio = bytes / rate as f64;
                        assert!((0.95..=1.05).contains(&ratio), "{rate} B/s, {senders} senders, {late:?}: {ratio}");
                    }
                }
            }
        }
    }

    #[test]
    fn pauses_of_all_channels_are_made_up_for_within_five_percent_of_every_second() {
        let stall = CATCH_UP - Duration::from_millis(1);
        for rate in [1 << 20, 20_000_000, 500_000_000] {
            for senders in [1, 2, 4] {
                // No sender wakes in the first part of each tenth of a second.
                let wakes = |due: Duration| due.max(SECOND * (due.as_millis() / 100) as u32 / 10 + stall);
                let sent = simulate(rate, piece(rate), senders, wakes, SECOND * 6);
                for step in 200..900 {
                    let from = Duration::from_millis(5) * step;
                    let ratio = sent_between(&sent, from, from + SECOND) as f64 / rate as f64;
                    assert!((0.95..=1.05).contains(&ratio), "{rate} B/s, {senders} senders, from {from:?}: {ratio}");
                }
            }
        }
    }

    #[test]
    fn channels_get_equal_shares() {
        let sent = simulate(100 << 20, 256 << 10, 4, |due| due, SECOND * 2);
        let shares = (0..4).map(|who| sent.iter().filter(|(_, by, _)| *by == who).count());
        let (least, most) = (shares.clone().min().unwrap(), shares.max().unwrap());
        assert!(most - least <= 1 && least > 0, "{least}..{most} pieces");
    }

    #[test]
    fn idle_time_is_not_saved_up() {
        let mut line = Line::new(Some(1_000_000));
        line.reserve(Duration::ZERO, 1000);
        let after_an_hour = SECOND * 3600;
        let mut at_once = 0;
        loop {
            let place = line.reserve(after_an_hour, 1000).unwrap();
            if !line.wait(after_an_hour, place).is_zero() {
                break;
            }
            at_once += 1000;
        }
        assert!(at_once <= bytes_in(CATCH_UP, 1_000_000) + 1000, "{at_once}");
    }

    #[test]
    fn only_what_cannot_be_made_up_for_is_unused() {
        const RATE: u64 = 1_000_000;
        let mut line = Line::new(Some(RATE));
        let ms = Duration::from_millis;
        line.reserve(ms(0), 10_000);
        assert_eq!(line.left(ms(0), RATE), ms(10) + CATCH_UP);
        // Nothing is reserved for 20 ms, which is made up for, and then for 40 ms, of which 10 ms are lost.
        line.reserve(ms(30), 1000);
        assert_eq!((line.unused, line.left(ms(30), RATE)), (Duration::ZERO, ms(11)));
        line.reserve(ms(51), 10_000);
        assert_eq!(line.unused, ms(10));
        assert_eq!(line.left(ms(51), RATE), ms(10));
        assert_eq!(line.left(ms(100), RATE), Duration::ZERO);
        let mut unlimited = Line::new(None);
        unlimited.reserve(ms(100), 1);
        assert_eq!(unlimited.unused, Duration::ZERO);
    }

    #[test]
    fn a_new_limit_applies_to_waiting_senders() {
        let mut line = Line::new(Some(1000));
        line.reserve(Duration::ZERO, 10_000);
        let place = line.reserve(Duration::ZERO, 10_000).unwrap();
        assert_eq!(line.wait(Duration::ZERO, place), SECOND * 10);
        line.set_rate(SECOND, Some(9000));
        assert_eq!(line.wait(SECOND, place), SECOND);
        line.set_rate(SECOND, None);
        assert_eq!(line.wait(SECOND, place), Duration::ZERO);
        assert_eq!(line.reserve(SECOND, 1), None);
        line.set_rate(SECOND * 2, Some(1000));
        let place = line.reserve(SECOND * 2, 1).unwrap();
        assert_eq!(line.wait(SECOND * 2, place), Duration::ZERO, "nothing is owed from before");
    }

    #[test]
    fn every_second_keeps_to_the_limit_of_that_second() {
        // Three senders that always have more to send, with a limit that changes each second.
        let limits = [50_000_000, 2_000_000, 400_000_000, 10_000_000];
        let mut line = Line::new(Some(limits[0]));
        let mut places = [0, 1, 2].map(|_| line.reserve(Duration::ZERO, piece(limits[0])).unwrap());
        let mut sizes = [piece(limits[0]); 3];
        let (mut now, mut sent) = (Duration::ZERO, [0u64; 4]);
        while now < SECOND * 4 {
            let second = now.as_secs() as usize;
            if line.rate != Some(limits[second]) {
                line.set_rate(now, Some(limits[second]));
            }
            for (place, size) in places.iter_mut().zip(&mut sizes) {
                if line.wait(now, *place).is_zero() {
                    sent[second] += *size;
                    *size = piece(limits[second]);
                    *place = line.reserve(now, *size).unwrap();
                }
            }
            now += Duration::from_micros(200);
        }
        for (second, (sent, limit)) in sent.into_iter().zip(limits).enumerate() {
            let ratio = sent as f64 / limit as f64;
            assert!((0.9..=1.1).contains(&ratio), "second {second}: {ratio} of the limit");
        }
    }

    #[test]
    fn a_released_pacer_has_no_limit_any_more_whatever_is_set() {
        let pacer = Pacer::new(Some(1));
        pacer.release();
        pacer.set_limit(Some(1));
        assert_eq!((pacer.limit(), pacer.pace(usize::MAX)), (None, Duration::ZERO));
    }

    #[test]
    fn enormous_numbers_do_not_overflow() {
        let mut line = Line::new(Some(u64::MAX));
        assert!(line.reserve(Duration::MAX, u64::MAX).is_some());
        let place = line.reserve(Duration::MAX, u64::MAX).unwrap();
        line.wait(Duration::ZERO, place);
        let mut slow = Line::new(Some(1));
        slow.reserve(Duration::ZERO, u64::MAX);
        let place = slow.reserve(Duration::ZERO, 1).unwrap();
        assert!(slow.wait(Duration::ZERO, place) > SECOND);
    }

    #[test]
    fn without_a_limit_or_with_zero_no_thread_waits() {
        for limit in [None, Some(0)] {
            let pacer = Pacer::new(limit);
            pacer.pace(usize::MAX);
            pacer.pace(usize::MAX);
            assert_eq!(pacer.limit(), None);
        }
    }

    #[test]
    fn removing_the_limit_ends_all_waits() {
        let pacer = Pacer::new(Some(1));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                pacer.pace(1 << 40);
                pacer.pace(1);
            });
            pacer.set_limit(None);
            waiting.join().unwrap();
        });
    }
}
