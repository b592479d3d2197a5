//! Detects that QEMU's rounds do not converge, from the figures of the progress reports. QEMU decides when the guest may be stopped, and
//! sends rounds for ever if none fits the downtime limit. The user gets one note, with the options that would help.

use std::time::Duration;

/// Rounds without progress before the note. Near the end of a migration rounds are short, so as many reports are needed, too.
const MIN_ROUNDS: u64 = 8;
const MIN_REPORTS: u32 = 8;
/// A round makes progress if its predicted downtime is at most this part of the best so far.
const PROGRESS: f64 = 0.9;
/// Factor from the longest predicted downtime to the recommended target downtime, since predictions vary.
const MARGIN: f64 = 1.1;

/// Watches QEMU's rounds for progress.
#[derive(Debug)]
pub(super) struct RoundsWatch {
    target: Duration,
    round: u64,
    /// The longest downtime predicted since the last progress. Within a round the prediction shrinks; a new round makes it long again.
    longest_ms: f64,
    /// The longest downtime predicted in the current round, and the shortest of these over all earlier rounds.
    this_round_ms: f64,
    best_ms: f64,
    /// Rounds and reports since the last progress.
    rounds: u64,
    reports: u32,
    note: Option<String>,
}

impl RoundsWatch {
    pub(super) fn new(target: Duration) -> Self {
        let best_ms = f64::INFINITY;
        Self { target, round: 0, longest_ms: 0.0, this_round_ms: 0.0, best_ms, rounds: 0, reports: 0, note: None }
    }

    /// Returns why QEMU does not reach the switchover, once that is known.
    pub(super) fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Evaluates a report that QEMU made while it sends memory. Returns the note once: when it becomes known.
    pub(super) fn report(&mut self, round: u64, predicted_ms: f64) -> Option<&str> {
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
        if self.note.is_some() || self.rounds < MIN_ROUNDS || self.reports < MIN_REPORTS {
            return None;
        }
        let target = self.target.as_secs_f64() * 1e3;
        let enough = ((self.longest_ms.max(target) * MARGIN) as u64 / 10 + 1) * 10;
        self.note = Some(format!(
            "QEMU is in round {round}, and none of the last {} has brought it closer to the switchover: up to {:.0} ms of downtime are \
             predicted where {target:.0} ms are wanted; --downtime {enough}ms or more, more bandwidth, compression, --delta-cache or QEMU's \
             auto-converge would end it",
            self.rounds, self.longest_ms
        ));
        self.note()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch() -> RoundsWatch {
        RoundsWatch::new(Duration::from_millis(300))
    }

    #[test]
    fn rounds_that_just_miss_the_target_downtime_are_noted_once_with_a_downtime_that_would_end_them() {
        let mut watch = watch();
        let mut notes = Vec::new();
        for report in 0..2_700 {
            let round = 1 + report / 2;
            // Each round begins with as much memory as the one before. A second report comes when half is sent.
            let predicted = if report % 2 == 0 { 332.0 } else { 166.0 };
            notes.extend(watch.report(round, predicted).map(|note| (round, note.to_owned())));
        }
        let [(round, note)] = &notes[..] else { panic!("{notes:?}") };
        assert!(*round <= 12, "{round}");
        assert!(
            note.contains("up to 332 ms of downtime are predicted where 300 ms are wanted; --downtime 370ms or more")
        );
        assert_eq!(watch.note(), Some(note.as_str()));
    }

    #[test]
    fn rounds_that_shrink_are_not_noted_however_many_there_are() {
        let mut watch = watch();
        let mut predicted = 60_000.0;
        for round in 1..60 {
            for part in [1.0, 0.6, 0.1] {
                assert_eq!(watch.report(round, predicted * part), None);
            }
            predicted *= 0.85;
        }
    }

    #[test]
    fn one_long_round_or_many_rounds_between_two_reports_are_not_noted() {
        let mut watch = watch();
        for _ in 0..1000 {
            assert_eq!(watch.report(1, 40_000.0), None);
        }
        assert_eq!(watch.report(2, 330.0), None);
        assert_eq!(watch.report(50, 330.0), None);
        assert_eq!(watch.report(100, f64::INFINITY), None);
    }
}
