//! Whether the rounds come to an end: the downtime predicted, the switchover when it fits, and what to do when it never will.
//!
//! A round sends what was dirty when it began; meanwhile the guest dirties more. Rounds shrink as long as pages leave
//! faster than the guest dirties them, and when what is left fits the downtime the guest is stopped for it. Where rounds do
//! not shrink, more of them are only network and CPU thrown away: so that is said early, with the figures, and acted upon.
//!
//! Arithmetic only: times and counts are passed in.

use std::time::Duration;

/// What commit and start take besides loading: two records made durable on each side, and starting vCPUs.
const COMMIT_ESTIMATE: Duration = Duration::from_millis(10);
/// Rates are measured over at least this long; rounds shorter than this are counted together.
const SHORTEST_MEASURE: Duration = Duration::from_millis(50);
/// Longer than any prediction.
const LONGEST: Duration = Duration::from_secs(u32::MAX as u64);
/// Where pages shrink to less than this part on the wire, it is not the network that bounds how fast they leave, and the
/// bytes per second on it say nothing about how fast a state would go, which does not shrink.
const MOST_SHRUNK: f64 = 1.0 / 16.0;
/// A round is progress when it brings the predicted downtime to this part of the best so far, or less.
const PROGRESS: f64 = 0.9;
/// Rounds without progress after which the migration counts as not converging.
const ROUNDS_WITHOUT_PROGRESS: u32 = 2;

/// What is done when rounds do not shrink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotConverging {
    /// Say so and go on, for as long as is allowed.
    #[default]
    GoOn,
    /// Slow the guest down, in steps, until it converges.
    Throttle(Throttle),
    /// Go on in post-copy.
    PostCopy,
    /// Go on in post-copy, after so many rounds at the latest, at least one.
    PostCopyAfter(u32),
    /// End the migration; the guest stays at the source.
    GiveUp,
}

/// How a guest is slowed down, in percent of the time in which its vCPUs are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle {
    /// At first.
    pub initial: u8,
    /// More with each further step.
    pub step: u8,
    /// At most, up to 99.
    pub most: u8,
}

impl Default for Throttle {
    /// As QEMU's: 20 %, then 10 % more each time, up to 99 %.
    fn default() -> Self {
        Self { initial: 20, step: 10, most: 99 }
    }
}

/// The state of things when a round has been handed to the channels and the log was collected.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measure {
    /// Since the migration began.
    pub(super) now: Duration,
    /// Bytes of pages that the guest has dirtied since the log was collected before.
    pub(super) dirtied: u64,
    /// Bytes of pages that have left so far, zero pages included.
    pub(super) left: u64,
    /// Bytes on the wire so far.
    pub(super) wire: u64,
    /// Bytes of pages that still have to leave: dirty, or waiting in queues.
    pub(super) remaining: u64,
    /// Bytes of state to be saved.
    pub(super) state: u64,
    /// Whether the channels had more to send than they could: then what left is all that can.
    pub(super) limited: bool,
    /// The path's, the shortest that was measured.
    pub(super) round_trip: Duration,
}

/// What to do after a round.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    /// Another round.
    Next,
    /// Stop the guest and send the rest.
    SwitchOver,
    /// Another round, with the guest slowed down so much.
    Throttle(u8),
    /// Stop the guest and let it go on at the destination.
    PostCopy,
    /// End the migration.
    GiveUp,
}

/// What the rounds have shown so far.
#[derive(Debug)]
pub(super) struct Convergence {
    downtime: Duration,
    answer: NotConverging,
    give_up_after: Option<Duration>,
    /// Where the measurement under way began.
    since: Measure,
    dirtied: u64,
    rates: Rates,
    /// The shortest downtime predicted so far.
    best: Duration,
    rounds: u32,
    without_progress: u32,
    throttle: u8,
    verdict: Option<String>,
}

/// Bytes per second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rates {
    /// That the guest dirties.
    pub(super) dirty: f64,
    /// Of pages that leave.
    pub(super) drain: f64,
    /// On the wire.
    pub(super) wire: f64,
}

impl Convergence {
    pub(super) fn new(downtime: Duration, answer: NotConverging, give_up_after: Option<Duration>) -> Self {
        Self {
            downtime,
            answer,
            give_up_after,
            since: Measure::default(),
            dirtied: 0,
            rates: Rates::default(),
            best: LONGEST,
            rounds: 0,
            without_progress: 0,
            throttle: 0,
            verdict: None,
        }
    }

    /// The rates as they were last measured.
    pub(super) fn rates(&self) -> Rates {
        self.rates
    }

    /// Why the rounds do not converge, in words, once that is known.
    pub(super) fn verdict(&self) -> Option<&str> {
        self.verdict.as_deref()
    }

    /// How much the guest is slowed down, in percent.
    pub(super) fn throttled(&self) -> u8 {
        self.throttle
    }

    /// The downtime if the guest were stopped now; none before anything was measured.
    pub(super) fn predicted(&self, at: &Measure) -> Option<Duration> {
        Some(self.sending(at)? + Self::fixed(at))
    }

    /// What every switchover takes: the last page's way there and its acknowledgement, prepare and prepared, commit.
    fn fixed(at: &Measure) -> Duration {
        at.round_trip * 5 / 2 + COMMIT_ESTIMATE
    }

    /// Whether the guest may be stopped. What no round can change is not waited for: at least part of the downtime is left
    /// for what they can.
    fn fits(&self, at: &Measure) -> bool {
        self.sending(at).is_some_and(|sending| sending <= self.budget(at))
    }

    /// The part of the downtime that sending what is left may take.
    fn budget(&self, at: &Measure) -> Duration {
        self.downtime.saturating_sub(Self::fixed(at)).max(self.downtime / 4)
    }

    /// Whether the guest, which has been stopped since, may stay stopped: what it dirtied until then is in `at`.
    pub(super) fn still_fits(&self, at: &Measure) -> bool {
        self.sending(at).is_some_and(|sending| sending <= self.budget(at) * 3 / 2)
    }

    /// How long what is left takes to be sent.
    fn sending(&self, at: &Measure) -> Option<Duration> {
        let pages = match at.remaining {
            0 => 0.0,
            remaining => {
                // Before the first measurement: the average so far.
                let average = at.left as f64 / at.now.as_secs_f64().max(1e-6);
                let drain = if self.rates.drain > 0.0 { self.rates.drain } else { average };
                if drain == 0.0 {
                    return None;
                }
                remaining as f64 / drain
            }
        };
        // State goes as it is; while nothing was sent its size says nothing about time.
        let wire = self.rates.wire.max(self.rates.drain * MOST_SHRUNK);
        let state = if wire > 0.0 { at.state as f64 / wire } else { 0.0 };
        Some(Duration::from_secs_f64((pages + state).min(1e9)))
    }

    /// Takes the state of things after a round; says what to do. `may_stop` is false while the destination holds the
    /// switchover.
    pub(super) fn after_round(&mut self, at: &Measure, may_stop: bool) -> Decision {
        self.dirtied += at.dirtied;
        let elapsed = at.now.saturating_sub(self.since.now);
        if elapsed >= SHORTEST_MEASURE {
            let per_second = |bytes: u64| bytes as f64 / elapsed.as_secs_f64();
            let left = at.left - self.since.left;
            // Channels that kept up have shown only that they can do as much.
            let at_least = |before: f64, now: f64| if at.limited { now } else { now.max(before) };
            self.rates = Rates {
                dirty: per_second(self.dirtied),
                drain: at_least(self.rates.drain, per_second(left)),
                wire: at_least(self.rates.wire, per_second(at.wire - self.since.wire)),
            };
            (self.since, self.dirtied) = (*at, 0);
        }
        let predicted = self.predicted(at);
        if may_stop && self.fits(at) {
            return Decision::SwitchOver;
        }
        self.rounds += 1;
        if let NotConverging::PostCopyAfter(most) = self.answer
            && self.rounds >= most
            && may_stop
        {
            return Decision::PostCopy;
        }
        if self.give_up_after.is_some_and(|limit| at.now >= limit) {
            self.verdict.get_or_insert_with(|| "it took longer than it was allowed to".into());
            return Decision::GiveUp;
        }
        if self.fits(at) {
            return Decision::Next;
        }
        if elapsed < SHORTEST_MEASURE {
            return Decision::Next;
        }
        let expected = predicted.unwrap_or(LONGEST);
        if expected <= self.best.mul_f64(PROGRESS) {
            (self.best, self.without_progress) = (expected, 0);
            return Decision::Next;
        }
        self.without_progress += 1;
        if self.without_progress < ROUNDS_WITHOUT_PROGRESS || !may_stop {
            return Decision::Next;
        }
        self.does_not_converge(at, predicted)
    }

    fn does_not_converge(&mut self, at: &Measure, predicted: Option<Duration>) -> Decision {
        let Rates { dirty, drain, .. } = self.rates;
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        self.verdict = Some(format!(
            "the guest dirties {:.0} MiB/s and {:.0} MiB/s of pages leave; {:.0} MiB are left, which makes a downtime of \
             {} where {} ms are wanted; more bandwidth, compression, throttling, post-copy or a longer downtime would end it",
            mib(dirty),
            mib(drain),
            mib(at.remaining as f64),
            predicted.map_or_else(|| "unknown length".into(), |time| format!("{} ms", time.as_millis())),
            self.downtime.as_millis()
        ));
        match self.answer {
            NotConverging::GoOn => Decision::Next,
            NotConverging::GiveUp => Decision::GiveUp,
            NotConverging::PostCopy | NotConverging::PostCopyAfter(_) => Decision::PostCopy,
            NotConverging::Throttle(throttle) => {
                let most = throttle.most.min(99);
                let wanted =
                    if self.throttle == 0 { throttle.initial } else { self.throttle.saturating_add(throttle.step) };
                // Each step is given its rounds to show what it does.
                (self.best, self.without_progress) = (LONGEST, 0);
                if self.throttle == most {
                    return Decision::Next;
                }
                self.throttle = wanted.clamp(1, most);
                Decision::Throttle(self.throttle)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A guest with a working set, a link, and the rounds between them, in steps of time that follow from the two.
    struct Simulation {
        convergence: Convergence,
        at: Measure,
        dirty_rate: f64,
        working_set: u64,
        link: f64,
        /// How many times smaller pages are on the wire.
        shrink: u64,
    }

    impl Simulation {
        fn new(ram: u64, dirty_rate: f64, working_set: u64, link: f64, answer: NotConverging) -> Self {
            let downtime = Duration::from_millis(300);
            let convergence = Convergence::new(downtime, answer, Some(Duration::from_secs(600)));
            let round_trip = Duration::from_millis(1);
            let at = Measure { remaining: ram, limited: true, round_trip, ..Measure::default() };
            Self { convergence, at, dirty_rate, working_set, link, shrink: 1 }
        }

        /// One round: everything that is left goes out, and the guest dirties meanwhile.
        fn round(&mut self, may_stop: bool) -> Decision {
            let slow = 1.0 - f64::from(self.convergence.throttled()) / 100.0;
            let seconds = (self.at.remaining as f64 / self.link).max(0.001);
            let dirtied = ((self.dirty_rate * slow * seconds) as u64).min(self.working_set);
            self.at.now += Duration::from_secs_f64(seconds);
            self.at.limited = self.at.remaining > 0;
            self.at.left += self.at.remaining;
            self.at.wire += self.at.remaining / self.shrink;
            self.at.dirtied = dirtied;
            self.at.remaining = dirtied;
            self.convergence.after_round(&self.at, may_stop)
        }

        fn until_it_ends(&mut self) -> (Decision, u32) {
            for round in 1..10_000 {
                match self.round(true) {
                    Decision::Next | Decision::Throttle(_) => {}
                    end => return (end, round),
                }
            }
            panic!("it neither ends nor gives up");
        }
    }

    #[test]
    fn a_guest_that_dirties_slower_than_pages_leave_is_switched_over_when_it_fits() {
        for rate in [0.0, 10e6, 60e6, 100e6] {
            let mut simulation = Simulation::new(4096 * MIB, rate, 2048 * MIB, 118e6, NotConverging::GoOn);
            let (end, rounds) = simulation.until_it_ends();
            assert_eq!(end, Decision::SwitchOver, "{rate}");
            let predicted = simulation.convergence.predicted(&simulation.at).unwrap();
            assert!(predicted <= Duration::from_millis(300) && rounds < 40, "{rate}: {predicted:?}, {rounds} rounds");
        }
    }

    #[test]
    fn a_guest_that_dirties_too_fast_is_told_of_after_few_rounds_with_the_figures() {
        let mut simulation = Simulation::new(4096 * MIB, 500e6, 1024 * MIB, 118e6, NotConverging::GiveUp);
        let (end, rounds) = simulation.until_it_ends();
        assert_eq!(end, Decision::GiveUp);
        assert!(rounds <= 4, "{rounds}");
        let verdict = simulation.convergence.verdict().unwrap();
        assert!(verdict.contains("1024 MiB are left") && verdict.contains("113 MiB/s of pages leave"), "{verdict}");
    }

    #[test]
    fn a_small_working_set_converges_however_fast_it_is_written() {
        let mut simulation = Simulation::new(4096 * MIB, 5e9, 20 * MIB, 118e6, NotConverging::GiveUp);
        assert_eq!(simulation.until_it_ends().0, Decision::SwitchOver);
    }

    #[test]
    fn throttling_goes_up_in_steps_until_the_guest_fits() {
        let throttle = NotConverging::Throttle(Throttle::default());
        let mut simulation = Simulation::new(4096 * MIB, 400e6, 1024 * MIB, 118e6, throttle);
        assert_eq!(simulation.until_it_ends().0, Decision::SwitchOver);
        let throttled = simulation.convergence.throttled();
        assert!((70..=99).contains(&throttled), "{throttled}");
    }

    #[test]
    fn post_copy_is_chosen_only_where_it_was_asked_for() {
        let mut asked = Simulation::new(4096 * MIB, 500e6, 1024 * MIB, 118e6, NotConverging::PostCopy);
        assert_eq!(asked.until_it_ends().0, Decision::PostCopy);
        let mut not_asked = Simulation::new(4096 * MIB, 500e6, 1024 * MIB, 118e6, NotConverging::GoOn);
        assert_eq!(not_asked.until_it_ends().0, Decision::GiveUp, "when its time is over");
        assert!(not_asked.at.now >= Duration::from_secs(600));
        for rounds in [1, 2] {
            let mut early = Simulation::new(4096 * MIB, 50e6, 1024 * MIB, 118e6, NotConverging::PostCopyAfter(rounds));
            assert_eq!(early.until_it_ends(), (Decision::PostCopy, rounds));
        }
    }

    #[test]
    fn a_destination_that_holds_the_switchover_is_waited_for() {
        let mut simulation = Simulation::new(64 * MIB, 0.0, 0, 118e6, NotConverging::GiveUp);
        for _ in 0..50 {
            assert_eq!(simulation.round(false), Decision::Next);
        }
        assert_eq!(simulation.round(true), Decision::SwitchOver);
    }

    #[test]
    fn pages_that_shrink_to_next_to_nothing_do_not_make_the_state_seem_slow() {
        let mut simulation = Simulation::new(4096 * MIB, 300e6, 1024 * MIB, 1e9, NotConverging::GiveUp);
        simulation.at.state = 100 << 10;
        simulation.shrink = 4000;
        assert_eq!(simulation.until_it_ends().0, Decision::SwitchOver);
    }

    #[test]
    fn a_path_too_long_for_the_downtime_does_not_keep_an_idle_guest_from_moving() {
        let mut simulation = Simulation::new(64 * MIB, 1e6, 64 * MIB, 118e6, NotConverging::GiveUp);
        simulation.at.round_trip = Duration::from_millis(400);
        assert_eq!(simulation.until_it_ends().0, Decision::SwitchOver);
        assert!(simulation.convergence.predicted(&simulation.at).unwrap() > Duration::from_secs(1), "said as it is");
    }

    #[test]
    fn channels_that_keep_up_are_not_taken_for_slow_ones() {
        let mut simulation = Simulation::new(4096 * MIB, 50e6, 64 * MIB, 1e9, NotConverging::GiveUp);
        assert_eq!(simulation.round(false), Decision::Next);
        let fast = simulation.convergence.rates().drain;
        // Small rounds with pauses between them, and nothing left in the queues.
        for _ in 0..20 {
            simulation.at.now += Duration::from_millis(60);
            simulation.at.left += MIB;
            simulation.at.limited = false;
            simulation.convergence.after_round(&simulation.at, false);
        }
        assert_eq!(simulation.convergence.rates().drain, fast);
    }

    #[test]
    fn a_large_state_is_part_of_the_prediction() {
        let mut simulation = Simulation::new(4096 * MIB, 0.0, 0, 118e6, NotConverging::GiveUp);
        simulation.at.state = 200 * MIB;
        assert_eq!(simulation.round(true), Decision::Next);
        let predicted = simulation.convergence.predicted(&simulation.at).unwrap();
        assert!(predicted > Duration::from_millis(1500), "{predicted:?}");
        assert_eq!(simulation.until_it_ends().0, Decision::GiveUp);
    }
}
