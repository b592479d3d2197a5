//! What the rounds do about requests that other threads make of the migration's [`Control`].
//!
//! Requests are looked at after each round, and within a round after each 2 MiB that were handed over, which costs one load.

use super::super::convergence::{Decision, Measure};
use super::{RoundEvent, Rounds};
use crate::live_control::{Control, Requests, RoundsEnd};
use crate::report;

/// The requests, as far as the rounds know them.
pub(in crate::source) struct Controlled {
    pub(super) control: Control,
    seen: u64,
    known: Requests,
}

impl Controlled {
    pub(in crate::source) fn new(control: Control) -> Self {
        Self { control, seen: 0, known: Requests::default() }
    }

    /// Returns the requests that were known before and those that are known now, where there are new ones.
    fn look(&mut self) -> Option<(Requests, Requests)> {
        let now = self.control.changed(&mut self.seen)?;
        Some((std::mem::replace(&mut self.known, now), now))
    }
}

impl Rounds {
    /// Carries out new requests. `pending`: how many pages are pending.
    pub(super) fn obey(&mut self, pending: u64) {
        let Some((before, now)) = self.control.look() else { return };
        if let Some(downtime) = now.downtime.filter(|_| now.downtime != before.downtime) {
            self.convergence.set_downtime(downtime);
            self.devices.set_downtime(downtime);
            self.pipeline().window.set_downtime(downtime);
            self.note(format!("as requested, the target downtime is {} ms from now on", downtime.as_millis()));
        }
        if let Some(limit) = now.bandwidth.filter(|_| now.bandwidth != before.bandwidth) {
            let measure = self.measure(pending);
            self.convergence.measure_anew(&measure);
            self.note(match limit {
                Some(limit) => {
                    format!("as requested, the bandwidth limit is {} from now on", report::rate(limit as f64))
                }
                None => "as requested, there is no bandwidth limit from now on".into(),
            });
        }
        match now.ending.filter(|_| now.ending != before.ending) {
            Some(RoundsEnd::SwitchOver) => {
                self.note("as requested, the guest is paused whatever is left to be sent".into());
            }
            Some(RoundsEnd::PostCopy) => {
                self.note("as requested, the guest will go on in post-copy".into());
            }
            None => {}
        }
    }

    /// Returns whether the round under way ends before all of its pages are sent, because the rounds are to end now.
    pub(super) fn ends_early(&mut self) -> bool {
        if self.current.is_last() {
            return false;
        }
        self.obey(self.current.left);
        let Some(ending) = self.control.known.ending else { return false };
        while let Ok(order) = self.orders.try_recv() {
            self.heed(order);
        }
        self.may_end(ending, &self.measure(self.current.left))
    }

    /// Returns what to do after a round: what was requested if that is possible now, and otherwise what was `decided`.
    pub(super) fn as_requested(&self, decided: Decision, at: &Measure) -> Decision {
        let requested = self.control.known.ending.filter(|ending| self.may_end(*ending, at));
        let ending = match (requested, &decided) {
            (Some(ending), _) => ending,
            (None, Decision::SwitchOver) => RoundsEnd::SwitchOver,
            (None, Decision::PostCopy) => RoundsEnd::PostCopy,
            (None, _) => return decided,
        };
        match self.control.control.begin_ending(ending) {
            RoundsEnd::SwitchOver => Decision::SwitchOver,
            RoundsEnd::PostCopy => Decision::PostCopy,
        }
    }

    /// Returns whether the rounds may end in this way now. Without a measured speed, the limits of the steps that follow would be unknown.
    fn may_end(&self, ending: RoundsEnd, at: &Measure) -> bool {
        let measured = || self.convergence.estimate(at).predicted.is_some();
        self.may_stop && (ending == RoundsEnd::PostCopy || measured())
    }

    /// Returns whether the guest, which is paused, stays paused: if its rest `fits`, or by request.
    pub(super) fn stays_paused(&self, fits: bool) -> bool {
        self.control.control.stays_paused(fits)
    }

    fn note(&mut self, text: String) {
        (self.news)(RoundEvent::Note(text));
    }
}
