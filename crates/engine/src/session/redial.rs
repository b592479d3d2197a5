//! Reconnects to a destination that was lost: one attempt after the other, with exponential back-off between them.
//!
//! A destination, or something in front of it, may accept each connection and end it at once. So a pause follows every attempt that did
//! not lead to a lasting connection, not only a failed one.

use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use sterna_wire::control::ControlReader;
use sterna_wire::header::ChannelKind;

use super::peer::link_events;
use super::{ConnectionEvent, OnConnectionEvent, Session, SessionError};
use crate::control_link::{ControlLink, Gate, held_back};
use crate::cpu_time;
use crate::transport::{Address, Connection, Security, open_channel};

/// The pause before the second attempt in a row to reach a destination that was lost; the first is made at once.
pub const DIAL_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between two attempts. After a connection that has lasted for so long, the next attempt is made at once.
pub const MAX_DIAL_PAUSE: Duration = Duration::from_secs(5);

/// Exponential back-off: no pause before the first attempt, then pauses that double up to a longest one. Each is shortened at random by up
/// to half, so that sources that have lost the same destination do not all reconnect at the same moment.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    /// Attempts in a row.
    attempts: u32,
    /// When the connection was established, where the last attempt led to one.
    connected: Option<Instant>,
    random: u64,
}

impl Backoff {
    /// Makes a back-off whose first pause is `first`, and whose longest is [`MAX_DIAL_PAUSE`], or `first` where that is longer.
    pub fn new(first: Duration) -> Self {
        // A `RandomState` has random keys, different ones each time.
        Self::seeded(first, RandomState::new().hash_one(()))
    }

    /// Sets the longest pause.
    #[must_use]
    pub fn up_to(self, longest: Duration) -> Self {
        Self { longest: self.first.max(longest), ..self }
    }

    fn seeded(first: Duration, seed: u64) -> Self {
        Self { first, longest: first.max(MAX_DIAL_PAUSE), attempts: 0, connected: None, random: seed }
    }

    /// Returns the pause before the next attempt, which is counted.
    pub fn next_pause(&mut self, now: Instant) -> Duration {
        let lasted = self.connected.take().map(|since| now.saturating_duration_since(since));
        if lasted.is_some_and(|time| time >= self.longest) {
            self.attempts = 0;
        }
        let before = self.attempts.checked_sub(1);
        self.attempts = self.attempts.saturating_add(1);
        let Some(doublings) = before else { return Duration::ZERO };
        let pause = self.first.saturating_mul(2u32.saturating_pow(doublings)).min(self.longest);
        pause - (pause / 2).mul_f64(self.fraction())
    }

    /// Records that the attempt has led to a connection.
    pub fn connected(&mut self, now: Instant) {
        self.connected = Some(now);
    }

    /// Returns the next random number, from 0 to 1 (splitmix64).
    fn fraction(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A source's attempts to reconnect to its destination. At most one is under way; dropping this abandons it, also during its pause.
#[derive(Debug)]
pub struct Redial {
    backoff: Backoff,
    /// Dropping it abandons the attempt.
    attempt: Option<Sender<Infallible>>,
}

impl Redial {
    /// Starts without an attempt. `first` is the pause before the second attempt in a row.
    pub fn new(first: Duration) -> Self {
        Self::with(Backoff::new(first))
    }

    /// Starts without an attempt. The pauses are those of `backoff`.
    pub fn with(backoff: Backoff) -> Self {
        Self { backoff, attempt: None }
    }

    /// Starts a thread that makes an attempt after the pause that is due, and abandons the attempt under way. The attempt opens a control
    /// channel of `session.incarnation`, on which the destination sends the first message. `on_connection` receives the outcome before any message
    /// of the destination.
    pub fn dial(&mut self, to: Address, security: Security, session: Session, on_connection: OnConnectionEvent) {
        let pause = self.backoff.next_pause(Instant::now());
        let (keep, given_up) = channel();
        self.attempt = Some(keep);
        let attempt = Attempt { to, security, session, on_connection, given_up };
        let on_connection = Arc::clone(&attempt.on_connection);
        let thread = Builder::new().name("redial".into());
        if let Err(error) = cpu_time::spawn(thread, move || attempt.make(pause)) {
            // The driver dials again as soon as it receives this event, so the pause is made here; a short one, since it blocks the driver.
            std::thread::sleep(pause.min(DIAL_PAUSE));
            on_connection(ConnectionEvent::Unreachable(format!("no thread to dial on: {error}")));
        }
    }

    /// Records that the attempt has led to a control channel.
    pub fn connected(&mut self) {
        self.backoff.connected(Instant::now());
        self.attempt = None;
    }
}

/// One attempt, on its thread.
struct Attempt {
    to: Address,
    security: Security,
    session: Session,
    on_connection: OnConnectionEvent,
    /// Disconnected once the attempt is abandoned.
    given_up: Receiver<Infallible>,
}

impl Attempt {
    fn make(self, pause: Duration) {
        if !pause.is_zero() && self.given_up.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        let outcome = self.connect();
        if self.given_up.try_recv() == Err(TryRecvError::Disconnected) {
            return;
        }
        match outcome {
            Ok((link, gate)) => {
                (self.on_connection)(ConnectionEvent::Connected(self.session.incarnation, link));
                drop(gate);
            }
            Err(error) => (self.on_connection)(ConnectionEvent::Unreachable(error.to_string())),
        }
    }

    fn connect(&self) -> Result<(ControlLink, Gate), SessionError> {
        let Self { to, security, session, .. } = self;
        let connection = Connection::connect(to, security).map_err(SessionError::new)?;
        let closer = connection.closer();
        let opened = open_channel(connection, &session.key, session.id, ChannelKind::Control, 0, session.incarnation);
        let (writer, reader, _) = opened.map_err(SessionError::new)?;
        let (events, gate) = held_back(link_events(&self.on_connection, session.incarnation));
        let link = ControlLink::start(writer, reader, closer, ControlReader::default(), events);
        Ok((link.map_err(SessionError::new)?, gate))
    }
}

#[cfg(test)]
mod tests {
    use sterna_wire::identity::{MigrationId, MigrationKey};

    use super::*;
    use crate::transport::simulated::Network;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn pauses_double_to_the_longest_and_are_shortened_by_half_at_most() {
        let start = Instant::now();
        let pauses = |seed| {
            let mut backoff = Backoff::seeded(DIAL_PAUSE, seed);
            (0..12).map(|_| backoff.next_pause(start)).collect::<Vec<_>>()
        };
        for seed in 0..100 {
            let whole = [0, 100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000, 5000, 5000];
            for (number, (pause, whole)) in pauses(seed).into_iter().zip(whole).enumerate() {
                assert!(pause <= whole * MS && pause >= whole * MS / 2, "seed {seed}, pause {number}: {pause:?}");
            }
        }
        assert_ne!(pauses(1), pauses(2), "sources do not reconnect at the same moments");
    }

    #[test]
    fn only_a_connection_that_lasted_is_followed_by_an_attempt_without_a_pause() {
        let mut now = Instant::now();
        let mut backoff = Backoff::seeded(DIAL_PAUSE, 7);
        assert_eq!(backoff.next_pause(now), Duration::ZERO);
        // Each attempt is accepted, and ended just before it counts as lasting.
        for least in [50, 100, 200, 400] {
            backoff.connected(now);
            now += MAX_DIAL_PAUSE - MS;
            assert!(backoff.next_pause(now) >= least * MS, "{least} ms");
        }
        backoff.connected(now);
        now += MAX_DIAL_PAUSE;
        assert_eq!(backoff.next_pause(now), Duration::ZERO);
        assert!(backoff.next_pause(now) >= 50 * MS, "only one attempt is made without a pause");
    }

    #[test]
    fn a_first_pause_of_any_length_is_possible() {
        let now = Instant::now();
        for (first, longest) in [(Duration::ZERO, Duration::ZERO), (MS, MAX_DIAL_PAUSE), (Duration::MAX, Duration::MAX)]
        {
            let mut backoff = Backoff::seeded(first, 1);
            assert!((0..100).all(|_| backoff.next_pause(now) <= longest));
        }
    }

    #[test]
    fn an_attempt_that_waits_is_given_up_with_its_owner_and_never_made() {
        let network = Network::new(1);
        let port = network.port("there");
        let (sender, news) = channel();
        let on_connection: OnConnectionEvent = Arc::new(move |news| drop(sender.send(news)));
        let session = Session {
            id: MigrationId::from_bytes([1; 16]),
            key: MigrationKey::from_bytes([2; 32]),
            incarnation: 2,
            channels: 1,
            device_channels: 0,
            packet_size: 4096,
            features: Vec::new(),
            round_trip: Duration::ZERO,
        };
        let mut redial = Redial::new(Duration::from_secs(3600));
        // No process listens: the first attempt fails at once, the second waits.
        redial.dial((&port).into(), Security::Insecure, session.clone(), Arc::clone(&on_connection));
        assert!(matches!(news.recv(), Ok(ConnectionEvent::Unreachable(_))));
        redial.dial((&port).into(), Security::Insecure, session, on_connection);
        drop(redial);
        // The thread of the attempt has dropped its sender.
        assert!(news.recv().is_err(), "the attempt was made all the same");
    }
}
