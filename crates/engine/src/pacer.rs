//! The bandwidth limit, shared by all channels of a migration.
//!
//! The bytes of all channels lie one behind the other on a line, and a point moves along it with the limit's speed. Who
//! wants to send takes the next piece of the line and waits until the point reaches its start. So the sum keeps to the
//! limit however many channels there are, and channels that ask in equal pieces get equal shares, in the order in which
//! they ask. The arithmetic (`Line`) is told the time, so it is tested without waiting.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Sending that was not done in time is made up for if it is no more than this: it covers threads that wake late. What is
/// made up for comes on top of a second's bytes, so with a piece it must stay below a twentieth of a second.
const CATCH_UP: Duration = Duration::from_millis(30);
/// To so little of a second its bytes are exact.
const PIECES_PER_SECOND: u64 = 400;
/// Largest piece to ask for at once, in bytes.
const MAX_PIECE: u64 = 256 << 10;
/// Smallest piece worth a system call, in bytes.
const MIN_PIECE: u64 = 4 << 10;

/// Keeps all who ask it, together, to a number of bytes per second. Shared with [`std::sync::Arc`].
#[derive(Debug)]
pub struct Pacer {
    started: Instant,
    line: Mutex<Line>,
    changed: Condvar,
}

impl Pacer {
    /// A pacer with a limit; none, or 0 (as QEMU's `max-bandwidth`), means that nobody waits.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { started: Instant::now(), line: Mutex::new(Line::new(bytes_per_second)), changed: Condvar::new() }
    }

    /// Waits until `bytes` more may be put on the wire; says for how long.
    ///
    /// To be called before each write, in pieces of at most [`Pacer::piece`] bytes: a piece goes out at once, so the
    /// limit is kept over times that are long against the time of one piece.
    pub fn pace(&self, bytes: usize) -> Duration {
        let mut line = self.lock();
        let begun = self.started.elapsed();
        let Some(place) = line.take(begun, bytes as u64) else {
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

    /// Counts `bytes` that go on the wire without waiting: others wait for them.
    pub fn charge(&self, bytes: usize) {
        // Where they would have begun does not matter.
        let _ = self.lock().take(self.started.elapsed(), bytes as u64);
    }

    /// Changes the limit, also for those who wait; removing it lets all of them go (as a cancelled migration must).
    pub fn set_limit(&self, bytes_per_second: Option<u64>) {
        self.lock().set_rate(self.started.elapsed(), bytes_per_second);
        self.changed.notify_all();
    }

    /// The limit, in bytes per second.
    pub fn limit(&self) -> Option<u64> {
        self.lock().rate
    }

    /// How much to send between two calls of [`Pacer::pace`], in bytes: what goes out in 2.5 ms, within 4 KiB and 256 KiB.
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
    /// Where the point was at `since`, from when on it has moved with `rate`.
    from: u64,
    since: Duration,
    /// The end of what has been given out.
    taken: u64,
}

impl Line {
    fn new(rate: Option<u64>) -> Self {
        Self { rate: rate.filter(|rate| *rate > 0), from: 0, since: Duration::ZERO, taken: 0 }
    }

    /// Where the point is.
    fn point(&self, now: Duration, rate: u64) -> u64 {
        self.from.saturating_add(bytes_in(now.saturating_sub(self.since), rate))
    }

    /// Takes the next piece and says where it begins; `None` if there is no limit.
    fn take(&mut self, now: Duration, bytes: u64) -> Option<u64> {
        let rate = self.rate?;
        let missed = self.point(now, rate).saturating_sub(bytes_in(CATCH_UP, rate));
        let place = self.taken.max(missed);
        self.taken = place.saturating_add(bytes);
        Some(place)
    }

    /// How long until the point reaches `place`.
    fn wait(&self, now: Duration, place: u64) -> Duration {
        let Some(rate) = self.rate else {
            return Duration::ZERO;
        };
        let ahead = u128::from(place.saturating_sub(self.point(now, rate)));
        // Rounded up, or the waiter would wake a moment early and ask again.
        let nanoseconds = (ahead * 1_000_000_000).div_ceil(rate.into());
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    fn set_rate(&mut self, now: Duration, rate: Option<u64>) {
        // Without a limit nothing was counted, and nothing is owed.
        self.from = self.rate.map_or(self.taken, |rate| self.point(now, rate));
        self.since = now;
        self.rate = rate.filter(|rate| *rate > 0);
    }
}

fn piece(rate: u64) -> u64 {
    (rate / PIECES_PER_SECOND).clamp(MIN_PIECE, MAX_PIECE)
}

fn bytes_in(time: Duration, rate: u64) -> u64 {
    u64::try_from(time.as_nanos().saturating_mul(rate.into()) / 1_000_000_000).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Senders that always want more: (when, who, how much) for each piece sent. `wakes` says when one whose time has come
    /// goes on.
    fn simulate(
        rate: u64,
        piece: u64,
        senders: usize,
        wakes: impl Fn(Duration) -> Duration,
        until: Duration,
    ) -> Vec<(Duration, usize, u64)> {
        let mut line = Line::new(Some(rate));
        let mut sent = Vec::new();
        // (the time the sender goes on, who) for each; each takes its next piece when the one before has been sent.
        let mut waiting: Vec<_> = (0..senders)
            .map(|who| {
                let place = line.take(Duration::ZERO, piece).unwrap();
                (line.wait(Duration::ZERO, place), who)
            })
            .collect();
        loop {
            let next = (0..senders).min_by_key(|at| waiting[*at]).unwrap();
            let (due, who) = waiting[next];
            let now = wakes(due);
            if now > until {
                return sent;
            }
            sent.push((now, who, piece));
            let place = line.take(now, piece).unwrap();
            waiting[next] = (now + line.wait(now, place), who);
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
                    // Whoever wakes later than a piece lasts must have others at work; a lone one cannot keep up.
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
    fn standstills_of_all_channels_are_made_up_for_within_five_percent_of_every_second() {
        let stall = CATCH_UP - Duration::from_millis(1);
        for rate in [1 << 20, 20_000_000, 500_000_000] {
            for senders in [1, 2, 4] {
                // Nobody wakes in the first part of each tenth of a second.
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
        line.take(Duration::ZERO, 1000);
        let after_an_hour = SECOND * 3600;
        let mut at_once = 0;
        loop {
            let place = line.take(after_an_hour, 1000).unwrap();
            if !line.wait(after_an_hour, place).is_zero() {
                break;
            }
            at_once += 1000;
        }
        assert!(at_once <= bytes_in(CATCH_UP, 1_000_000) + 1000, "{at_once}");
    }

    #[test]
    fn a_new_limit_holds_for_those_who_wait() {
        let mut line = Line::new(Some(1000));
        line.take(Duration::ZERO, 10_000);
        let place = line.take(Duration::ZERO, 10_000).unwrap();
        assert_eq!(line.wait(Duration::ZERO, place), SECOND * 10);
        line.set_rate(SECOND, Some(9000));
        assert_eq!(line.wait(SECOND, place), SECOND);
        line.set_rate(SECOND, None);
        assert_eq!(line.wait(SECOND, place), Duration::ZERO);
        assert_eq!(line.take(SECOND, 1), None);
        line.set_rate(SECOND * 2, Some(1000));
        let place = line.take(SECOND * 2, 1).unwrap();
        assert_eq!(line.wait(SECOND * 2, place), Duration::ZERO, "nothing is owed from before");
    }

    #[test]
    fn enormous_numbers_do_not_overflow() {
        let mut line = Line::new(Some(u64::MAX));
        assert!(line.take(Duration::MAX, u64::MAX).is_some());
        let place = line.take(Duration::MAX, u64::MAX).unwrap();
        line.wait(Duration::ZERO, place);
        let mut slow = Line::new(Some(1));
        slow.take(Duration::ZERO, u64::MAX);
        let place = slow.take(Duration::ZERO, 1).unwrap();
        assert!(slow.wait(Duration::ZERO, place) > SECOND);
    }

    #[test]
    fn no_limit_and_zero_mean_that_nobody_waits() {
        for limit in [None, Some(0)] {
            let pacer = Pacer::new(limit);
            pacer.pace(usize::MAX);
            pacer.pace(usize::MAX);
            assert_eq!(pacer.limit(), None);
        }
    }

    #[test]
    fn removing_the_limit_lets_those_who_wait_go() {
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
