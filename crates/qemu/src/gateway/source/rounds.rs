//! Whether QEMU's rounds come to an end, by the figures that progress has anyway. QEMU decides when the guest may be stopped, and goes on
//! for ever where no round fits; that is worth a note, with what would end it.

use std::time::Duration;

/// Rounds without progress after which it is noted. Near the end of a migration rounds are short, so it must also be that many reports.
const ROUNDS: u64 = 8;
const REPORTS: u32 = 8;
/// Progress is a predicted downtime of at most this part of the best so far.
const PROGRESS: f64 = 0.9;
/// How much longer than what is predicted a target downtime is to be, as predictions go up and down.
const MARGIN: f64 = 1.1;

/// What QEMU's rounds have shown.
#[derive(Debug)]
pub(super) struct RoundsWatch {
    target: Duration,
    round: u64,
    /// The longest downtime predicted since the last progress: within a round the prediction shrinks, and a new round makes it long again.
    longest_ms: f64,
    /// The longest that was predicted in the round so far, and the best of these of all rounds.
    this_round_ms: f64,
    best_ms: f64,
    rounds: u64,
    reports: u32,
    verdict: Option<String>,
}

impl RoundsWatch {
    pub(super) fn new(target: Duration) -> Self {
        let best_ms = f64::INFINITY;
        Self { target, round: 0, longest_ms: 0.0, this_round_ms: 0.0, best_ms, rounds: 0, reports: 0, verdict: None }
    }

    /// Why QEMU does not come to the switchover, once that is known.
    pub(super) fn verdict(&self) -> Option<&str> {
        self.verdict.as_deref()
    }

    /// Takes a report of QEMU while it sends memory; gives what is to be noted, once.
    pub(super) fn look(&mut self, round: u64, predicted_ms: f64) -> Option<&str> {
        if !predicted_ms.is_finite() {
            return None;
        }
        if round > self.round {
            let progress = self.round == 0 || self.this_round_ms <= self.best_ms * PROGRESS;
            if progress {
                self.best_ms = if self.round == 0 { f64::INFINITY } else { self.this_round_ms };
                (self.rounds, self.reports, self.longest_ms) = (0, 0, 0.0);
            } else {
                self.rounds += round - self.round;
            }
            (self.round, self.this_round_ms) = (round, 0.0);
        }
        self.reports += 1;
        self.this_round_ms = self.this_round_ms.max(predicted_ms);
        self.longest_ms = self.longest_ms.max(predicted_ms);
        if self.verdict.is_some() || self.rounds < ROUNDS || self.reports < REPORTS {
            return None;
        }
        let target = self.target.as_secs_f64() * 1e3;
        let enough = ((self.longest_ms.max(target) * MARGIN) as u64 / 10 + 1) * 10;
        self.verdict = Some(format!(
            "QEMU is in round {round}, and none of the last {} has brought it closer to the switchover: up to {:.0} ms of downtime are \
             predicted where {target:.0} ms are wanted; --downtime {enough}ms or more, more bandwidth, compression, --delta-cache or QEMU's \
             auto-converge would end it",
            self.rounds, self.longest_ms
        ));
        self.verdict()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch() -> RoundsWatch {
        RoundsWatch::new(Duration::from_millis(300))
    }

    #[test]
    fn rounds_that_miss_the_downtime_by_a_hair_are_noted_once_with_a_downtime_that_ends_them() {
        let mut watch = watch();
        let mut notes = Vec::new();
        for report in 0..2_700 {
            let round = 1 + report / 2;
            // Each round begins with as much as the one before, and is reported again when it is half done.
            let predicted = if report % 2 == 0 { 332.0 } else { 166.0 };
            notes.extend(watch.look(round, predicted).map(|note| (round, note.to_owned())));
        }
        let [(round, note)] = &notes[..] else { panic!("{notes:?}") };
        assert!(*round <= 12, "{round}");
        assert!(
            note.contains("up to 332 ms of downtime are predicted where 300 ms are wanted; --downtime 370ms or more")
        );
        assert_eq!(watch.verdict(), Some(note.as_str()));
    }

    #[test]
    fn rounds_that_shrink_are_not_noted_however_many_there_are() {
        let mut watch = watch();
        let mut predicted = 60_000.0;
        for round in 1..60 {
            for part in [1.0, 0.6, 0.1] {
                assert_eq!(watch.look(round, predicted * part), None);
            }
            predicted *= 0.85;
        }
    }

    #[test]
    fn a_long_round_and_many_rounds_between_two_reports_are_not_enough() {
        let mut watch = watch();
        for _ in 0..1000 {
            assert_eq!(watch.look(1, 40_000.0), None);
        }
        assert_eq!(watch.look(2, 330.0), None);
        assert_eq!(watch.look(50, 330.0), None);
        assert_eq!(watch.look(100, f64::INFINITY), None);
    }
}
