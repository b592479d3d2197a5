//! The rounds over a path in virtual time: channels that encode, a network with a bucket of tokens, a destination that places, a window,
//! and acknowledgements. Pages of each kind of coding take their own time of each of them, so that whatever is the limit changes from
//! round to round.

use std::collections::VecDeque;
use std::time::Duration;

use sterna_test_kit::Random;

use super::{Arrived, Convergence, Decision, Measure, NotConverging};

const PAGE: u64 = 4096;
const PACKET_PAGES: u64 = 128;
/// What waits in the queues of two channels before who hands over more has to wait.
const QUEUED_PAGES: u64 = 2 * 16 * 512;
/// Searching the log of a small guest.
const LOOK: f64 = 0.000_1;

/// What one page takes: bytes on the wire, and seconds of source and destination.
#[derive(Clone, Copy, Debug)]
struct Coding {
    name: &'static str,
    wire: f64,
    source: f64,
    destination: f64,
}

const fn coding(name: &'static str, wire: f64, source_us: f64, destination_us: f64) -> Coding {
    Coding { name, wire, source: source_us * 1e-6, destination: destination_us * 1e-6 }
}

const ZERO: Coding = coding("zero", 0.1, 0.2, 0.1);
const WHOLE: [Coding; 5] = [
    coding("none", 4096.0, 0.7, 0.8),
    coding("lz4", 2000.0, 4.0, 2.0),
    coding("zstd", 1700.0, 12.0, 6.0),
    coding("zlib", 1650.0, 90.0, 15.0),
    coding("deflate at a slow destination", 1650.0, 5.0, 90.0),
];
/// How pages go that were sent before, besides whole.
const AGAIN: [Coding; 3] =
    [coding("deltas", 40.0, 4.0, 3.0), coding("deltas, slow CPU", 40.0, 80.0, 3.0), coding("the same", 0.0, 3.0, 0.0)];

/// What the guest does until it does nothing any more.
#[derive(Clone, Copy, Debug)]
struct Guest {
    pages: u64,
    /// Of all pages, those that are zero and never written, one in so many is not.
    one_in: u64,
    /// Pages that it writes, at so many a second, until then.
    working_set: u64,
    rate: f64,
    until: f64,
    state: u64,
}

#[derive(Clone, Copy, Debug)]
struct Packet {
    /// When the channels take it, and when its acknowledgement is there.
    taken: f64,
    acknowledged: f64,
    pages: u64,
    zero: u64,
    wire: f64,
}

#[derive(Debug)]
struct Model {
    first: Coding,
    again: Coding,
    rate: f64,
    tokens: f64,
    filled: f64,
    round_trip: f64,
    window: f64,
    packets: VecDeque<Packet>,
    source_free: f64,
    network_free: f64,
    destination_free: f64,
    full: f64,
    handed_over: u64,
    first_arrived: Arrived,
    arrived: Arrived,
}

/// How it went.
#[derive(Debug)]
struct Went {
    decision: Decision,
    /// When the guest was stopped.
    at: f64,
    /// How long the last pages took then.
    sending: f64,
    /// When everything would have been there that was handed over before the guest became idle.
    drained: f64,
    verdict: Option<String>,
}

impl Model {
    fn new(first: Coding, again: Coding, rate: f64, round_trip: f64) -> Self {
        Self {
            first,
            again,
            rate,
            tokens: 262_144.0,
            filled: 0.0,
            round_trip,
            window: (rate * (round_trip + 0.05)).max((2 * PACKET_PAGES * PAGE) as f64),
            packets: VecDeque::new(),
            source_free: 0.0,
            network_free: 0.0,
            destination_free: 0.0,
            full: 0.0,
            handed_over: 0,
            first_arrived: Arrived::default(),
            arrived: Arrived::default(),
        }
    }

    fn hand_over(&mut self, now: f64, pages: u64, coding: Coding, zero: bool) {
        let mut left = pages;
        while left > 0 {
            let pages = left.min(PACKET_PAGES);
            left -= pages;
            let content = |packet: &Packet| ((packet.pages - packet.zero) * PAGE) as f64;
            let normal = if zero { 0.0 } else { (pages * PAGE) as f64 };
            let mut taken = self.source_free.max(now);
            let asked = taken;
            loop {
                let on_its_way = || self.packets.iter().filter(|packet| packet.acknowledged > taken);
                let sum: f64 = on_its_way().map(content).sum();
                if sum == 0.0 || sum + normal <= self.window {
                    break;
                }
                taken = on_its_way().map(|packet| packet.acknowledged).fold(f64::INFINITY, f64::min);
            }
            self.full += taken - asked;
            let count = pages as f64;
            let wire = count * coding.wire;
            self.source_free = taken + count * coding.source;
            // The bucket fills while the network is free.
            let begun = self.network_free.max(self.source_free);
            self.tokens = (self.tokens + (begun - self.filled) * self.rate).min(262_144.0);
            let wait = ((wire - self.tokens) / self.rate).max(0.0);
            self.tokens = (self.tokens - wire).max(0.0);
            self.network_free = begun + wait;
            self.filled = self.network_free;
            let there = self.network_free + self.round_trip / 2.0;
            self.destination_free = self.destination_free.max(there) + count * coding.destination;
            let acknowledged = self.destination_free + self.round_trip / 2.0;
            let zero = if zero { pages } else { 0 };
            self.packets.push_back(Packet { taken, acknowledged, pages, zero, wire });
            self.handed_over += pages;
        }
    }

    /// When no more wait than the queues take.
    fn queued_until(&self) -> f64 {
        let mut waiting = 0;
        for packet in self.packets.iter().rev() {
            waiting += packet.pages;
            if waiting > QUEUED_PAGES {
                return packet.taken;
            }
        }
        0.0
    }

    fn look(&mut self, now: f64, found: u64, logged: u64, state: u64) -> Measure {
        while let Some(packet) = self.packets.front().copied()
            && packet.acknowledged <= now
        {
            self.packets.pop_front();
            self.arrived.at = Duration::from_secs_f64(packet.acknowledged);
            self.arrived.pages += packet.pages * PAGE;
            self.arrived.normal += (packet.pages - packet.zero) * PAGE;
            self.arrived.wire += packet.wire as u64;
            self.arrived.packets += 1;
            if self.first_arrived.packets == 0 {
                self.first_arrived = self.arrived;
            }
        }
        Measure {
            now: Duration::from_secs_f64(now),
            dirtied: found * PAGE,
            logged: logged * PAGE,
            first: self.first_arrived,
            arrived: self.arrived,
            remaining: (found + self.handed_over) * PAGE - self.arrived.pages,
            state,
            state_rate: 0.0,
            loading: Duration::ZERO,
            // In the model those that wait are known before they do.
            full: Duration::from_secs_f64(self.full.min(now)),
            round_trip: Duration::from_secs_f64(self.round_trip),
        }
    }

    fn all_there(&self) -> f64 {
        self.packets.iter().map(|packet| packet.acknowledged).fold(0.0, f64::max)
    }

    /// Moves `guest`, as the rounds do.
    fn moves(&mut self, guest: &Guest, downtime: Duration, answer: NotConverging) -> Went {
        let mut convergence = Convergence::new(downtime, answer, Some(Duration::from_secs(3600)));
        let mut now = 0.003;
        let normal = guest.pages / guest.one_in;
        self.hand_over(now, guest.pages - normal, ZERO, true);
        self.hand_over(now, normal, self.first, false);
        let (mut since, mut drained, mut found) = (now, 0.0f64, 0);
        for _ in 0..1_000_000 {
            now = (now + LOOK).max(self.queued_until());
            let written = ((now.min(guest.until) - since).max(0.0) * guest.rate) as u64;
            let logged = written.min(guest.working_set);
            found = (found + logged).min(guest.working_set);
            if logged > 0 || since < guest.until {
                since = if logged > 0 || now >= guest.until { now } else { since };
            }
            if now < guest.until {
                drained = self.all_there();
            }
            let at = self.look(now, found, logged, guest.state);
            let decision = convergence.after_round(&at, true);
            match decision {
                Decision::Next | Decision::Throttle(_) if found > 0 => {
                    self.hand_over(now, found, self.again, false);
                    drained = drained.max(self.all_there());
                    found = 0;
                }
                Decision::Next | Decision::Wait | Decision::Throttle(_) => now += convergence.pause(&at).as_secs_f64(),
                _ => {
                    self.hand_over(now, found, self.again, false);
                    let verdict = convergence.verdict().map(str::to_owned);
                    let sending = (self.all_there() - now).max(0.0);
                    return Went { decision, at: now, sending, drained, verdict };
                }
            }
        }
        panic!("it never ends: {guest:?}, {self:?}");
    }
}

const LIMITS: [u64; 6] = [0, 1, 10, 50, 300, 2000];
const NETWORKS: [f64; 4] = [1.25e6, 12.5e6, 125e6, 3e9];
const ROUND_TRIPS: [f64; 4] = [0.000_1, 0.001, 0.02, 0.4];

fn again(random: &mut Random, first: Coding) -> Coding {
    random.one_of(&[first, AGAIN[0], AGAIN[1], AGAIN[2]])
}

#[test]
fn a_guest_that_was_always_idle_moves_at_once_and_is_never_said_not_to_converge() {
    for first in WHOLE {
        for network in NETWORKS {
            for round_trip in ROUND_TRIPS {
                for (pages, one_in) in [(0, 1), (3, 1), (4096, 1), (4096, 64), (65_536, 8)] {
                    for limit in LIMITS {
                        let about = format!("{} {network} {round_trip} {pages} {one_in} {limit}", first.name);
                        let guest = Guest {
                            pages,
                            one_in,
                            working_set: 0,
                            rate: 0.0,
                            until: 0.0,
                            state: (network / 100.0).min(65536.0) as u64,
                        };
                        let mut model = Model::new(first, first, network, round_trip);
                        let went = model.moves(&guest, Duration::from_millis(limit), NotConverging::GiveUp);
                        assert_eq!(
                            (went.decision.clone(), went.verdict.clone()),
                            (Decision::SwitchOver, None),
                            "{about}"
                        );
                        // All there, and looked for not much later than that.
                        assert!(went.sending == 0.0, "{about}: {went:?}");
                        let all_there = went.drained.max(model.arrived.at.as_secs_f64());
                        assert!(went.at <= all_there.max(0.003) + 0.011, "{about}: {went:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_guest_that_becomes_idle_moves_soon_after_whatever_its_pages_were_sent_as() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let first = random.one_of(&WHOLE);
        let coding = again(&mut random, first);
        let network = random.one_of(&NETWORKS);
        let pages = random.one_of(&[16, 1024, 4096, 16_384]);
        let guest = Guest {
            pages,
            one_in: random.one_of(&[1, 8, 512]),
            working_set: random.one_of(&[1, 25, pages / 2, pages]),
            rate: random.one_of(&[10.0, 2500.0, 25_000.0, 1e9]),
            until: random.one_of(&[0.02, 0.3, 2.0]),
            state: random.one_of(&[0, 64 << 10]).min((network / 100.0) as u64),
        };
        let limit = random.one_of(&LIMITS);
        let round_trip = random.one_of(&ROUND_TRIPS);
        let about = format!("seed {seed}: {} then {}, {network}, {guest:?}, limit {limit}", first.name, coding.name);
        let mut model = Model::new(first, coding, network, round_trip);
        let went = model.moves(&guest, Duration::from_millis(limit), NotConverging::GoOn);
        assert_eq!(went.decision, Decision::SwitchOver, "{about}: {went:?}");
        let late = went.at - guest.until.max(went.drained);
        assert!(late <= 0.025, "{about}: {late} s after the last page was there, {went:?}");
    }
}

#[test]
fn buffers_that_take_all_of_a_small_guest_at_once_are_not_taken_for_a_fast_network() {
    for first in WHOLE {
        for pages in [1024, 4096, 16_384] {
            for limit in [10, 50, 300] {
                // It writes what it is let, so that nobody waits for the last page.
                let rate = 0.2 * 12.5e6 / first.wire;
                let guest = Guest { pages, one_in: 1, working_set: pages, rate, until: f64::INFINITY, state: 64 << 10 };
                let mut model = Model::new(first, first, 12.5e6, 0.001);
                let went = model.moves(&guest, Duration::from_millis(limit), NotConverging::GoOn);
                assert_eq!(went.decision, Decision::SwitchOver);
                let limit = limit as f64 / 1e3;
                assert!(went.sending <= 1.1 * limit, "{}, {pages} pages, {limit}: {went:?}", first.name);
            }
        }
    }
}

/// Each look finds the pages again, and with each round they would be in the queues once more.
#[test]
fn a_few_pages_that_are_written_all_the_time_keep_nobody_from_moving() {
    for first in WHOLE {
        for network in [1.25e6, 12.5e6, 125e6] {
            for round_trip in [0.000_1, 0.02] {
                // A third of the target downtime for the pages alone.
                let page = (first.wire / network).max(first.source).max(first.destination);
                let working_set = (0.1 / page) as u64;
                let guest = Guest {
                    pages: 16 * working_set,
                    one_in: 1,
                    working_set,
                    rate: 1e9,
                    until: f64::INFINITY,
                    state: 0,
                };
                let mut model = Model::new(first, first, network, round_trip);
                let went = model.moves(&guest, Duration::from_millis(300), NotConverging::GiveUp);
                let about = format!("{} {network} {round_trip} {guest:?}", first.name);
                assert_eq!((went.decision.clone(), went.verdict.clone()), (Decision::SwitchOver, None), "{about}");
                assert!(went.sending <= 0.3, "{about}: {went:?}");
            }
        }
    }
}

#[test]
fn what_devices_have_yet_to_load_is_waited_for() {
    let decide = |loading| {
        let mut convergence = Convergence::new(Duration::from_millis(300), NotConverging::GoOn, None);
        let at = Measure { now: Duration::from_secs(1), loading: Duration::from_millis(loading), ..Measure::default() };
        convergence.after_round(&at, true)
    };
    assert_eq!([0, 100, 299].map(decide), [(); 3].map(|()| Decision::SwitchOver));
    assert_eq!([301, 5000].map(decide), [(); 2].map(|()| Decision::Next));
}
