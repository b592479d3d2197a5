//! How long the two sides wait for each other once a migration is decided, or has ended. All of it in one place, because a limit of one
//! side has to outlast one of the other's.

use std::time::{Duration, Instant};

use sterna_wire::limits::SILENCE_LIMIT;
use sterna_wire::switchover::DestinationEnd;

use super::MAX_WAIT;

/// How long a source dials a lost destination to deliver the decision, by default. After that an operator has to settle the migration.
pub const DELIVERY_TIME: Duration = Duration::from_secs(60);
/// How long a destination beside QEMU that is connected may take to start the guest after the decision: its storage may answer late. A source
/// that gives up earlier does not learn an outcome that comes by itself.
pub const START_TIME: Duration = Duration::from_secs(600);
/// How long a source dials a lost destination to report an abort, by default. The destination presumes it anyway.
pub const ABORT_TIME: Duration = Duration::from_secs(5);
/// How long, by default, a destination that has ended can be reached by a source that depends on its answer: until that source has noticed
/// the loss of the connection and has dialled for [`DELIVERY_TIME`].
pub const LINGER: Duration = DELIVERY_TIME.saturating_add(SILENCE_LIMIT);
/// How long a source that does not depend on an answer may stay connected to a destination that has ended.
pub const CLOSING_TIME: Duration = SILENCE_LIMIT;
/// How long a source that is connected, and has been sent the outcome, may take to end its monitor and to close the connection: a loss of
/// the connection is noticed before.
const CONFIRMING_TIME: Duration = SILENCE_LIMIT.saturating_add(Duration::from_secs(12));

/// The source's control channel, once the migration has ended here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceLink {
    /// There is one.
    Connected,
    /// The source closed it.
    Closed,
    /// It broke, or this side closed it.
    Lost,
}

/// A migration that has ended at the destination, whose source may still need an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastAnswer {
    /// How it ended.
    pub end: DestinationEnd,
    /// When it ended.
    pub since: Instant,
    /// The source's control channel.
    pub link: SourceLink,
    /// When that last changed.
    pub changed: Instant,
    /// Whether the source may have decided without knowing the end: it stays paused until it is answered, or until an operator settles the
    /// migration.
    pub awaited: bool,
}

impl LastAnswer {
    /// Returns until when the source is answered. `linger`: how long a source that was lost is waited for.
    pub fn until(&self, linger: Duration) -> Instant {
        let connected = match self.awaited {
            true => linger.saturating_add(SILENCE_LIMIT).min(CONFIRMING_TIME),
            false => linger.min(CLOSING_TIME),
        };
        let after = |moment: Instant, time: Duration| moment + time.min(MAX_WAIT);
        match (self.link, self.awaited) {
            // However often it reconnects.
            (SourceLink::Connected, _) => {
                after(self.changed, connected).min(after(self.since, linger.saturating_add(connected)))
            }
            (SourceLink::Lost, true) => after(self.since, linger),
            // A source that was killed may be recovered at once, and one that has aborted reports it. One that needs nothing said so.
            (SourceLink::Closed, _) | (SourceLink::Lost, false) => {
                after(self.changed, linger.min(ABORT_TIME)).min(after(self.since, linger))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::{Backoff, DIAL_PAUSE, MAX_DIAL_PAUSE};

    fn ended(since: Instant, link: SourceLink, changed: Instant, awaited: bool) -> LastAnswer {
        LastAnswer { end: DestinationEnd::Running, since, link, changed, awaited }
    }

    /// In virtual time: the network is cut right after the decision has arrived, and restored after any time at which the source still
    /// dials. An attempt of the source then reaches the destination.
    #[test]
    fn a_source_that_is_cut_off_after_the_decision_reaches_the_destination_as_long_as_it_dials() {
        let decided = Instant::now();
        let noticed = [Duration::ZERO, SILENCE_LIMIT];
        for cut in 0..DELIVERY_TIME.as_secs() - MAX_DIAL_PAUSE.as_secs() {
            let restored = decided + Duration::from_secs(cut);
            for (at_source, at_destination) in noticed.iter().flat_map(|one| noticed.map(|other| (*one, other))) {
                // The destination has started the guest at once, which is the earliest end of its wait.
                let lost = ended(decided, SourceLink::Lost, decided + at_destination, true);
                let answers_until = lost.until(LINGER);
                let connected = ended(decided, SourceLink::Connected, decided, true);
                assert!(connected.until(LINGER) > decided + SILENCE_LIMIT, "it ends before it notices the loss");

                // The source's attempts, which fail at once until the network is back.
                let mut backoff = Backoff::new(DIAL_PAUSE);
                let mut now = decided + at_source;
                let answered = loop {
                    now += backoff.next_pause(now);
                    if now > decided + DELIVERY_TIME {
                        break false;
                    }
                    if now >= restored {
                        break now < answers_until;
                    }
                };
                assert!(answered, "cut for {cut} s, noticed after {at_source:?} and {at_destination:?}");
            }
        }
    }

    #[test]
    fn a_source_that_reconnects_gets_time_again_but_not_for_ever() {
        let since = Instant::now();
        let second = Duration::from_secs(1);
        let until = |link, changed: u32, awaited| ended(since, link, since + changed * second, awaited).until(LINGER);
        assert_eq!(until(SourceLink::Connected, 0, true), since + CONFIRMING_TIME);
        assert_eq!(until(SourceLink::Connected, 55, true), since + 55 * second + CONFIRMING_TIME);
        for late in [71, 1000, 100_000] {
            assert_eq!(until(SourceLink::Connected, late, true), since + LINGER + CONFIRMING_TIME);
            assert_eq!(until(SourceLink::Lost, late, true), since + LINGER);
        }
        // Nothing depends on these.
        assert_eq!(until(SourceLink::Connected, 0, false), since + CLOSING_TIME);
        assert_eq!(until(SourceLink::Lost, 0, false), since + ABORT_TIME);
        assert_eq!(until(SourceLink::Closed, 3, false), since + 3 * second + ABORT_TIME);
        assert_eq!(until(SourceLink::Closed, 1000, true), since + LINGER);
    }

    #[test]
    fn a_time_of_any_length_is_possible() {
        let now = Instant::now();
        for link in [SourceLink::Connected, SourceLink::Closed, SourceLink::Lost] {
            for awaited in [true, false] {
                assert!(ended(now, link, now, awaited).until(Duration::MAX) >= now);
                assert!(ended(now, link, now, awaited).until(Duration::ZERO) <= now + SILENCE_LIMIT);
            }
        }
    }
}
