//! Whether the rounds converge: the predicted downtime, the switchover when it fits the target, and what to do when it never will.
//!
//! A round sends the pages that were dirty when it began; meanwhile the guest dirties more. Rounds shrink as long as pages leave
//! faster than the guest dirties them. When the rest fits the downtime, the guest is stopped. Where rounds do
//! not shrink, more rounds only waste network and CPU: so that is reported early, with the figures, and acted upon. Where they
//! shrink fast, a rest that fits is shrunk further, as long as that saves more downtime than it adds to the total time.
//!
//! [`prediction`] has the measurements and the downtime that follows from them; this file decides. Arithmetic only: times and counts are
//! passed in.

#[cfg(test)]
mod model;
mod prediction;

use std::time::Duration;

pub(super) use self::prediction::{Arrived, Measure, Rates};
use self::prediction::{MAX_DURATION, MIN_MEASURE, Prediction, SMALL_STATE, seconds};

/// Pause after a round that found next to nothing: without it the rounds of an idle guest that may not be stopped yet would keep a CPU
/// busy.
const IDLE_PAUSE: Duration = Duration::from_millis(10);
/// Minimum of that pause while the last pages are on their way.
const MIN_PAUSE: Duration = Duration::from_millis(2);
/// A round is progress when it reduces the predicted downtime to this part of the best so far, or less.
const PROGRESS: f64 = 0.9;
/// Time after which it shows whether the destination's devices have less to load: they report every few MiB.
const LOADING_SHOWS: Duration = Duration::from_secs(1);
/// Rounds without progress after which the migration counts as not converging.
const ROUNDS_WITHOUT_PROGRESS: u32 = 2;
/// A rest that is sent within this time is small beside the other parts of a switchover: no further round is made to shrink it.
const SHORT_REST: Duration = Duration::from_millis(5);
/// A further round, or waiting, pays where it leaves this part of the rest, or less: then it saves more downtime than
/// it adds to the total time.
const WORTH_WHILE: f64 = 0.5;
/// Where the guest dirties more than all but this part of what leaves, no time is estimated until the guest is moved.
const MIN_SHRINKING: f64 = 0.05;
/// A target downtime that is this many times the prediction ends the rounds: the prediction varies a little.
const MARGIN: f64 = 1.1;

/// What is done when rounds do not shrink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotConverging {
    /// Report it and go on, for as long as is allowed.
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
    /// Percent of the first step.
    pub initial: u8,
    /// Percent that each further step adds.
    pub step: u8,
    /// Maximum percent, up to 99.
    pub max: u8,
}

impl Default for Throttle {
    /// As QEMU's: 20 %, then 10 % more each time, up to 99 %.
    fn default() -> Self {
        Self { initial: 20, step: 10, max: 99 }
    }
}

/// The estimates within a round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimate {
    /// Bytes per second that the guest dirties.
    pub(super) dirty: f64,
    /// The downtime if the guest were stopped now.
    pub(super) predicted: Option<Duration>,
    /// The time until the guest runs at the destination.
    pub(super) time_left: Option<Duration>,
}

/// What to do after a round.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    /// Make another round.
    Next,
    /// Wait until more of the sent pages have arrived, before another round.
    Wait,
    /// Stop the guest and send the rest.
    SwitchOver,
    /// Make another round, with the guest slowed down so much, in percent.
    Throttle(u8),
    /// Stop the guest and let it go on at the destination.
    PostCopy,
    /// End the migration.
    GiveUp,
}

/// The measurements and decisions of the rounds so far.
#[derive(Clone, Debug)]
pub(super) struct Convergence {
    downtime: Duration,
    answer: NotConverging,
    give_up_after: Option<Duration>,
    prediction: Prediction,
    /// The shortest downtime predicted so far.
    best: Duration,
    /// When progress was judged last, and the bytes that had been handed over by then.
    judged: (Duration, u64),
    /// How long the destination's devices would have loaded, by then.
    loading: Duration,
    /// Whether the guest's pages keep it here, and not its state or devices.
    is_of_pages: bool,
    rounds: u32,
    /// Whether the last decision was to wait, so that no round was made since.
    waits: bool,
    /// How long the rest would have taken when a further round was made although it fitted.
    shrunk_from: Option<Duration>,
    without_progress: u32,
    throttle: u8,
    /// Whether the guest is slowed down as much as it may be, and that is not enough.
    throttled_in_vain: bool,
    verdict: Option<String>,
}

/// Returns a target downtime, in ms, that is long enough for the `predicted` one.
fn enough(predicted: Duration) -> u64 {
    ((predicted.mul_f64(MARGIN).as_millis() as u64) / 10 + 1) * 10
}

impl Convergence {
    pub(super) fn new(downtime: Duration, answer: NotConverging, give_up_after: Option<Duration>) -> Self {
        Self {
            downtime,
            answer,
            give_up_after,
            prediction: Prediction::new(),
            best: MAX_DURATION,
            judged: (Duration::ZERO, 0),
            loading: Duration::ZERO,
            is_of_pages: true,
            rounds: 0,
            waits: false,
            shrunk_from: None,
            without_progress: 0,
            throttle: 0,
            throttled_in_vain: false,
            verdict: None,
        }
    }

    /// Returns the rates of the last measurement.
    pub(super) fn rates(&self) -> Rates {
        self.prediction.rates()
    }

    /// Returns why the rounds do not converge, once that is known.
    pub(super) fn verdict(&self) -> Option<&str> {
        self.verdict.as_deref()
    }

    /// Describes what is done about rounds that do not converge.
    pub(super) fn consequence(&self) -> String {
        match (self.answer, self.give_up_after) {
            (NotConverging::GiveUp, _) => "the migration ends".into(),
            (NotConverging::PostCopy | NotConverging::PostCopyAfter(_), _) => "the guest goes on in post-copy".into(),
            (NotConverging::Throttle(_), _) if !self.throttled_in_vain && self.is_of_pages => {
                "the guest is slowed down".into()
            }
            (NotConverging::GoOn | NotConverging::Throttle(_), Some(limit)) => {
                format!("the rounds go on until that changes, for {} s in all at most", limit.as_secs())
            }
            (NotConverging::GoOn | NotConverging::Throttle(_), None) => {
                "the rounds go on until that changes or the migration is cancelled".into()
            }
        }
    }

    /// Goes on as if no throttling had been chosen: the monitor does not slow its guest down.
    pub(super) fn throttling_failed(&mut self) {
        (self.answer, self.throttle, self.throttled_in_vain) = (NotConverging::GoOn, 0, false);
        // From now on rounds are compared with those of a guest at full speed.
        (self.best, self.without_progress) = (MAX_DURATION, 0);
    }

    /// Returns whether the guest is slowed down as much as it may be, and that is not enough.
    pub(super) fn throttled_in_vain(&self) -> bool {
        self.throttled_in_vain
    }

    /// Returns the estimates within a round. Changes nothing, so the decision after the round does not depend on when this was called.
    pub(super) fn estimate(&self, at: &Measure) -> Estimate {
        let mut now = self.clone();
        now.prediction.measure(at);
        Estimate { dirty: now.rates().dirty, predicted: now.predicted(at), time_left: now.time_left(at) }
    }

    /// Compares predictions with another target downtime from now on. Rounds are judged anew.
    pub(super) fn set_downtime(&mut self, downtime: Duration) {
        self.downtime = downtime;
        self.judge_anew();
    }

    /// Forgets how fast pages leave: the limit of the bandwidth has changed. Rounds are judged anew.
    pub(super) fn measure_anew(&mut self, at: &Measure) {
        self.prediction.forget(at);
        self.judge_anew();
    }

    fn judge_anew(&mut self) {
        (self.best, self.without_progress, self.verdict) = (MAX_DURATION, 0, None);
        (self.shrunk_from, self.throttled_in_vain) = (None, false);
    }

    /// Estimates the time until the guest runs at the destination. None before anything was measured, and where the guest dirties memory
    /// about as fast as it leaves.
    pub(super) fn time_left(&self, at: &Measure) -> Option<Duration> {
        let (sending, predicted) = (self.prediction.sending(at)?, self.predicted(at)?);
        let Some(excess) = sending.checked_sub(self.budget(at)?) else { return Some(predicted) };
        let shrinks = 1.0 - self.rates().dirty / self.rates().drain;
        // Not a number without a rate.
        let converges = shrinks >= MIN_SHRINKING;
        converges.then(|| seconds(excess.as_secs_f64() / shrinks) + predicted.saturating_sub(excess))
    }

    /// Returns how much the guest is slowed down, in percent.
    pub(super) fn throttled(&self) -> u8 {
        self.throttle
    }

    /// Predicts the downtime if the guest were stopped now; none before anything was measured.
    pub(super) fn predicted(&self, at: &Measure) -> Option<Duration> {
        self.prediction.downtime(at)
    }

    /// Describes why the downtime will probably exceed its target although no pages are left, where that is so.
    pub(super) fn out_of_reach(&self, at: &Measure) -> Option<String> {
        let least = self.prediction.least(at);
        (least > self.downtime).then(|| {
            format!(
                "a downtime of more than {} ms was to be expected: a switchover takes about {} ms here, of them {} ms for the guest's state \
                 and the rest for round trips and for records on disk",
                self.downtime.as_millis(),
                least.as_millis(),
                self.prediction.state(at).as_millis()
            )
        })
    }

    /// Returns whether the rest fits the downtime, so that the guest may be stopped.
    pub(super) fn fits(&self, at: &Measure) -> bool {
        self.prediction.sending(at).is_some_and(|sending| self.budget(at).is_some_and(|budget| sending <= budget))
    }

    /// Returns the part of the downtime that sending the rest may take. Rounds do not wait for what they cannot change: at least a quarter
    /// of the downtime is left for the pages. None where the state is too large, which is known before the guest is stopped.
    fn budget(&self, at: &Measure) -> Option<Duration> {
        // State that is still being loaded becomes less by itself, so the rounds wait for it.
        let most = self.downtime.checked_sub(at.loading)?;
        let left = self.downtime.saturating_sub(self.prediction.least(at)).max(self.downtime / 4).min(most);
        match self.prediction.state(at) {
            small if small <= SMALL_STATE => Some(left),
            state => self.downtime.checked_sub(state).map(|most| left.min(most)),
        }
    }

    /// Returns whether the guest, which has been stopped since, may stay stopped. `at` has the pages that it dirtied until then.
    pub(super) fn still_fits(&self, at: &Measure) -> bool {
        self.prediction
            .sending(at)
            .is_some_and(|sending| self.budget(at).is_some_and(|budget| sending <= budget * 3 / 2))
    }

    /// Returns the pause before the next round, where the guest has written nothing: until the sent pages may have arrived.
    pub(super) fn pause(&self, at: &Measure) -> Duration {
        match at.on_the_way() {
            0 => IDLE_PAUSE,
            _ => self.prediction.sending(at).unwrap_or_default().clamp(MIN_PAUSE, IDLE_PAUSE),
        }
    }

    /// Records the measurements after a round and decides what to do. `may_stop` is false while the destination holds the
    /// switchover.
    pub(super) fn after_round(&mut self, at: &Measure, may_stop: bool) -> Decision {
        self.prediction.set_first_round(at.handed_over());
        self.prediction.measure(at);
        let is_late = self.give_up_after.is_some_and(|limit| at.now >= limit);
        if may_stop && self.fits(at) {
            // While the guest writes nothing, waiting for the sent pages costs no time, and makes the downtime shorter.
            let nothing_new = at.dirtied == 0 && at.remaining > 0 && !is_late;
            return match self.shrinking(at) {
                _ if nothing_new => Decision::Next,
                Some(decision) if !is_late => decision,
                _ => Decision::SwitchOver,
            };
        }
        let waited = std::mem::take(&mut self.waits);
        self.rounds += u32::from(!waited && (at.dirtied > 0 || self.rounds == 0));
        if let NotConverging::PostCopyAfter(most) = self.answer
            && self.rounds >= most
            && may_stop
        {
            return Decision::PostCopy;
        }
        if is_late {
            self.verdict.get_or_insert_with(|| "it took longer than it was allowed to".into());
            return Decision::GiveUp;
        }
        if self.waits_for_what_is_on_its_way(at) {
            self.waits = true;
            return Decision::Wait;
        }
        // A round is judged when all that it handed over has arrived.
        let (judged, handed_over) = self.judged;
        let loads_too_long = at.loading > self.downtime;
        let shows_after = if loads_too_long { LOADING_SHOWS } else { MIN_MEASURE };
        if self.fits(at) || at.now.saturating_sub(judged) < shows_after || at.arrived.pages < handed_over {
            return Decision::Next;
        }
        let Some(expected) = self.predicted(at) else { return Decision::Next };
        self.judged = (at.now, at.handed_over());
        let loading_before = std::mem::replace(&mut self.loading, at.loading);
        if loads_too_long && at.loading < loading_before {
            // The loading time becomes less by itself.
            return Decision::Next;
        }
        if expected <= self.best.mul_f64(PROGRESS) {
            (self.best, self.without_progress) = (expected, 0);
            return Decision::Next;
        }
        self.without_progress += 1;
        if self.without_progress < ROUNDS_WITHOUT_PROGRESS {
            return Decision::Next;
        }
        self.find_verdict(at, expected);
        // While the destination holds the switchover, that is only reported.
        if may_stop { self.act() } else { Decision::Next }
    }

    /// Decides how to shrink a rest that fits the downtime, where that saves more downtime than it adds to the total time: pages leave at
    /// least twice as fast as the guest dirties them. Where the last such round did not shrink the rest (the guest writes few pages often,
    /// or in bursts), no other is made: a guest that could be stopped is not kept for long.
    fn shrinking(&mut self, at: &Measure) -> Option<Decision> {
        let sending = self.prediction.sending(at)?;
        let Rates { dirty, drain, .. } = self.rates();
        if sending <= SHORT_REST || dirty > drain * WORTH_WHILE {
            return None;
        }
        if at.on_the_way() > at.dirtied {
            self.waits = true;
            return Some(Decision::Wait);
        }
        let shrinks = self.shrunk_from.is_none_or(|before| sending <= before.mul_f64(WORTH_WHILE));
        shrinks.then(|| {
            self.shrunk_from = Some(sending);
            Decision::Next
        })
    }

    /// Returns whether the guest could be stopped once the pages on their way have arrived. A round now would queue the dirty pages
    /// behind them, and after it as much would be on its way again, however few pages the guest writes.
    fn waits_for_what_is_on_its_way(&self, at: &Measure) -> bool {
        let without = Measure { remaining: at.dirtied, ..*at };
        at.on_the_way() > 0 && !self.fits(at) && self.fits(&without)
    }

    /// Sets the verdict: why the rounds do not converge, and what would end them.
    fn find_verdict(&mut self, at: &Measure, predicted: Duration) {
        let Rates { dirty, drain, .. } = self.rates();
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let loads_too_long = at.loading > self.downtime;
        self.is_of_pages = !loads_too_long && self.budget(at).is_some();
        self.verdict = Some(if loads_too_long {
            format!(
                "what was sent of devices' state takes {} ms to be loaded at the destination where a downtime of {} ms is wanted; devices \
                 that load faster or a longer downtime would end it",
                at.loading.as_millis(),
                self.downtime.as_millis()
            )
        } else if !self.is_of_pages {
            format!(
                "the guest's state of {:.0} MiB alone makes a downtime of {} ms where {} ms are wanted, which no round changes; more \
                 bandwidth or a target downtime of {} ms or more would end it",
                mib(at.state as f64),
                self.prediction.least(at).as_millis(),
                self.downtime.as_millis(),
                enough(self.prediction.least(at))
            )
        } else {
            format!(
                "the guest dirties {:.0} MiB/s and {:.0} MiB/s of pages leave; {:.0} MiB are left, which makes a downtime of {} ms where {} \
                 ms are wanted; a target downtime of {} ms or more, more bandwidth, compression, throttling or post-copy would end it",
                mib(dirty),
                mib(drain),
                mib(at.remaining as f64),
                predicted.as_millis(),
                self.downtime.as_millis(),
                enough(predicted)
            )
        });
    }

    /// Decides as was chosen for rounds that do not converge.
    fn act(&mut self) -> Decision {
        match self.answer {
            NotConverging::GoOn => Decision::Next,
            NotConverging::GiveUp => Decision::GiveUp,
            NotConverging::PostCopy | NotConverging::PostCopyAfter(_) => Decision::PostCopy,
            // A slower guest would not help: its pages do not keep it here.
            NotConverging::Throttle(_) if !self.is_of_pages => Decision::Next,
            NotConverging::Throttle(throttle) => {
                let max = throttle.max.min(99);
                let wanted =
                    if self.throttle == 0 { throttle.initial } else { self.throttle.saturating_add(throttle.step) };
                // Each step gets its own rounds to show its effect.
                (self.best, self.without_progress) = (MAX_DURATION, 0);
                if self.throttle == max {
                    self.throttled_in_vain = true;
                    return Decision::Next;
                }
                self.throttle = wanted.clamp(1, max);
                Decision::Throttle(self.throttle)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    mod requested;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A guest with a working set, a link, and the rounds between them, in steps of time that follow from the two.
    struct Simulation {
        convergence: Convergence,
        at: Measure,
        dirty_rate: f64,
        working_set: u64,
        link: f64,
        /// Factor by which pages are smaller on the wire.
        shrink: u64,
    }

    impl Simulation {
        fn new(ram: u64, dirty_rate: f64, working_set: u64, link: f64, answer: NotConverging) -> Self {
            let downtime = Duration::from_millis(300);
            let convergence = Convergence::new(downtime, answer, Some(Duration::from_secs(600)));
            let round_trip = Duration::from_millis(1);
            let at = Measure { remaining: ram, round_trip, ..Measure::default() };
            Self { convergence, at, dirty_rate, working_set, link, shrink: 1 }
        }

        /// Makes one round: all remaining pages arrive, and the guest dirties pages meanwhile.
        fn round(&mut self, may_stop: bool) -> Decision {
            let slow = 1.0 - f64::from(self.convergence.throttled()) / 100.0;
            let seconds = (self.at.remaining as f64 / self.link).max(0.001);
            let dirtied = ((self.dirty_rate * slow * seconds) as u64).min(self.working_set);
            if self.at.first.packets == 0 {
                self.at.first = Arrived { packets: 1, ..Arrived::default() };
            }
            self.at.now += Duration::from_secs_f64(seconds);
            self.arrives(self.at.remaining);
            (self.at.dirtied, self.at.logged) = (dirtied, dirtied);
            self.at.remaining = dirtied;
            self.convergence.after_round(&self.at, may_stop)
        }

        /// Acknowledges `bytes` of pages now.
        fn arrives(&mut self, bytes: u64) {
            let arrived = &mut self.at.arrived;
            arrived.pages += bytes;
            arrived.normal += bytes;
            arrived.wire += bytes / self.shrink;
            arrived.packets += bytes.div_ceil(512 << 10);
            arrived.at = self.at.now;
        }

        fn until_it_ends(&mut self) -> (Decision, u32) {
            for round in 1..10_000 {
                match self.round(true) {
                    Decision::Next | Decision::Wait | Decision::Throttle(_) => {}
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
    fn a_rest_that_fits_is_shrunk_while_pages_leave_much_faster_than_the_guest_dirties_them() {
        let mut simulation = Simulation::new(4096 * MIB, 50e6, 2048 * MIB, 2e9, NotConverging::GoOn);
        // After the first round 53 ms are left, and after the second 1 ms.
        assert_eq!(simulation.until_it_ends(), (Decision::SwitchOver, 2));
        let left = simulation.convergence.prediction.sending(&simulation.at).unwrap();
        assert!(left <= SHORT_REST, "{left:?}");
    }

    #[test]
    fn a_guest_that_dirties_more_than_half_as_fast_as_pages_leave_is_stopped_as_soon_as_it_fits() {
        let mut simulation = Simulation::new(400 * MIB, 80e6, 2048 * MIB, 118e6, NotConverging::GoOn);
        while simulation.round(true) == Decision::Next {
            assert!(!simulation.convergence.fits(&simulation.at), "{:?}", simulation.at);
        }
        assert!(simulation.convergence.shrunk_from.is_none());
    }

    #[test]
    fn pages_that_are_written_again_and_again_keep_a_guest_that_could_be_stopped_for_one_round_only() {
        let mut simulation = Simulation::new(4096 * MIB, 5e9, 20 * MIB, 118e6, NotConverging::GiveUp);
        assert_eq!(simulation.until_it_ends(), (Decision::SwitchOver, 2));
    }

    #[test]
    fn what_is_on_its_way_is_waited_for_before_a_rest_that_fits_is_shrunk() {
        let mut simulation = Simulation::new(4096 * MIB, 50e6, 2048 * MIB, 2e9, NotConverging::GoOn);
        assert_eq!(simulation.round(true), Decision::Next);
        let at = Measure { dirtied: MIB, logged: MIB, remaining: 60 * MIB, ..simulation.at };
        assert!(simulation.convergence.fits(&at));
        assert_eq!(simulation.convergence.after_round(&at, true), Decision::Wait);
        // But not by a migration that has gone on for as long as it may.
        let late = Measure { now: Duration::from_secs(601), logged: 0, ..at };
        assert_eq!(simulation.convergence.after_round(&late, true), Decision::SwitchOver);
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
            simulation.arrives(MIB);
            simulation.convergence.after_round(&simulation.at, false);
        }
        assert_eq!(simulation.convergence.rates().drain, fast);
    }

    #[test]
    fn devices_that_load_for_longer_than_the_downtime_are_what_does_not_converge() {
        let mut simulation = Simulation::new(4096 * MIB, 0.0, 0, 118e6, NotConverging::GiveUp);
        simulation.at.loading = Duration::from_millis(301);
        assert_eq!(simulation.until_it_ends().0, Decision::GiveUp);
        let verdict = simulation.convergence.verdict().unwrap();
        assert!(verdict.contains("takes 301 ms to be loaded at the destination"), "{verdict}");
    }

    #[test]
    fn devices_that_load_what_they_have_are_waited_for() {
        let mut simulation = Simulation::new(4096 * MIB, 0.0, 0, 118e6, NotConverging::GiveUp);
        simulation.at.loading = Duration::from_secs(60);
        let end = loop {
            match simulation.round(true) {
                Decision::Next => {}
                end => break end,
            }
            // Reported every 300 ms.
            let left = 60_000u64.saturating_sub(simulation.at.now.as_millis() as u64 / 300 * 300);
            simulation.at.loading = Duration::from_millis(left);
        };
        assert_eq!(end, Decision::SwitchOver);
        assert!(simulation.convergence.verdict().is_none());
    }

    #[test]
    fn a_guest_is_not_slowed_down_for_what_it_does_not_write() {
        let throttle = NotConverging::Throttle(Throttle::default());
        let (mut loads, mut large) = (
            Simulation::new(64 * MIB, 1e6, 64 * MIB, 118e6, throttle),
            Simulation::new(64 * MIB, 1e6, 64 * MIB, 118e6, throttle),
        );
        loads.at.loading = Duration::from_secs(5);
        large.at.state = 200 * MIB;
        for (mut simulation, words) in [(loads, "to be loaded"), (large, "state of 200 MiB alone")] {
            for _ in 0..10_000 {
                assert_eq!(simulation.round(true), Decision::Next);
            }
            assert_eq!(simulation.convergence.throttled(), 0);
            let verdict = simulation.convergence.verdict().unwrap();
            assert!(verdict.contains(words), "{verdict}");
        }
    }

    /// Misses the downtime by a hair, and for ever: 332 ms where 300 ms are wanted.
    fn by_a_hair(answer: NotConverging) -> Simulation {
        Simulation::new(4096 * MIB, 5e9, 36 * MIB, 118e6, answer)
    }

    #[test]
    fn rounds_that_miss_the_downtime_by_a_hair_are_reported_after_a_few_with_a_downtime_that_ends_them() {
        let mut simulation = by_a_hair(NotConverging::GoOn);
        let first = (1..10_000).find(|_| {
            assert_eq!(simulation.round(true), Decision::Next);
            simulation.convergence.verdict().is_some()
        });
        assert!(first.is_some_and(|rounds| rounds <= 6), "{first:?}");
        let verdict = simulation.convergence.verdict().unwrap().to_owned();
        assert!(verdict.contains("makes a downtime of 332 ms where 300 ms are wanted"), "{verdict}");
        assert!(verdict.contains("a target downtime of 370 ms or more, more bandwidth"), "{verdict}");
        let consequence = simulation.convergence.consequence();
        assert!(consequence.contains("go on until that changes, for 600 s in all"), "{consequence}");
        // The advice is right.
        let mut longer = by_a_hair(NotConverging::GiveUp);
        longer.convergence.downtime = Duration::from_millis(370);
        assert_eq!(longer.until_it_ends().0, Decision::SwitchOver);
    }

    #[test]
    fn rounds_that_miss_the_downtime_by_a_hair_end_as_was_chosen() {
        for (answer, end) in [
            (NotConverging::GiveUp, Decision::GiveUp),
            (NotConverging::PostCopy, Decision::PostCopy),
            (NotConverging::PostCopyAfter(1000), Decision::PostCopy),
        ] {
            let (decision, rounds) = by_a_hair(answer).until_it_ends();
            assert_eq!(decision, end);
            assert!(rounds <= 6, "{answer:?}: {rounds} rounds");
        }
    }

    #[test]
    fn that_rounds_do_not_converge_is_reported_while_the_destination_holds_the_switchover() {
        let mut simulation = by_a_hair(NotConverging::GiveUp);
        for _ in 0..10 {
            assert_eq!(simulation.round(false), Decision::Next);
        }
        assert!(simulation.convergence.verdict().is_some());
        assert_eq!(simulation.round(true), Decision::GiveUp);
    }

    #[test]
    fn a_guest_that_cannot_be_slowed_down_enough_is_reported() {
        let throttle = NotConverging::Throttle(Throttle { initial: 20, step: 10, max: 40 });
        let mut simulation = by_a_hair(throttle);
        // A guest that no throttling slows down enough.
        simulation.dirty_rate = 1e12;
        for _ in 0..100 {
            assert_ne!(simulation.round(true), Decision::SwitchOver);
        }
        assert!(simulation.convergence.throttled_in_vain());
        assert_eq!(simulation.convergence.throttled(), 40);
        let consequence = simulation.convergence.consequence();
        assert!(consequence.contains("go on until that changes"), "{consequence}");
    }

    #[test]
    fn a_guest_that_cannot_be_slowed_down_is_not_said_to_be_and_its_rounds_go_on() {
        let mut simulation = by_a_hair(NotConverging::Throttle(Throttle::default()));
        simulation.dirty_rate = 1e12;
        let first = (0..100).find(|_| matches!(simulation.round(true), Decision::Throttle(_)));
        assert!(first.is_some());
        simulation.convergence.throttling_failed();
        for _ in 0..100 {
            assert_eq!(simulation.round(true), Decision::Next);
        }
        assert_eq!(simulation.convergence.throttled(), 0);
        assert!(!simulation.convergence.throttled_in_vain());
        let consequence = simulation.convergence.consequence();
        assert!(consequence.contains("go on until that changes"), "{consequence}");
    }

    #[test]
    fn an_estimate_within_a_round_measures_and_changes_nothing() {
        let mut simulation = Simulation::new(4096 * MIB, 50e6, 1024 * MIB, 118e6, NotConverging::GiveUp);
        // The first round is under way: a quarter of it has arrived in a quarter of its time.
        simulation.at.first = Arrived { packets: 1, ..Arrived::default() };
        simulation.at.now = Duration::from_secs_f64(1024.0 * MIB as f64 / 118e6);
        simulation.arrives(1024 * MIB);
        simulation.at.remaining -= 1024 * MIB;
        (simulation.at.dirtied, simulation.at.logged) = (simulation.at.remaining, 400 * MIB);
        let before = format!("{:?}", simulation.convergence);

        let Estimate { dirty, predicted, .. } = simulation.convergence.estimate(&simulation.at);

        let expected = simulation.at.remaining as f64 / 118e6;
        let predicted = predicted.unwrap().as_secs_f64();
        assert!((predicted - expected).abs() < 0.05, "{predicted} s, not {expected} s");
        assert!((dirty - 400.0 * MIB as f64 / simulation.at.now.as_secs_f64()).abs() < 1e3, "{dirty}");
        assert_eq!(format!("{:?}", simulation.convergence), before);
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
