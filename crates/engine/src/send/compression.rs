//! How the content of a migration is compressed: always one way, or by what drains it fastest now.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_codec::select::{HeldUp, Knowledge};
use sterna_codec::{Engines, MethodChoice};

use super::Sent;
use super::choices::Choices;
use crate::cpu_allowance::CpuAllowance;

/// What the channels of one migration have in common. Copies share what they learn.
#[derive(Debug, Clone)]
pub struct Compression {
    choice: MethodChoice,
    /// What there is to compress with besides the CPU.
    engines: Engines,
    auto: Option<Arc<Auto>>,
}

/// Where the way is chosen batch by batch.
#[derive(Debug)]
pub(super) struct Auto {
    /// What is chosen from.
    pub(super) ways: Vec<MethodChoice>,
    pub(super) knowledge: Arc<Knowledge>,
    /// What was chosen when, and why.
    choices: Mutex<Choices>,
    network: Mutex<Network>,
    /// How much of this side's CPUs that may take; none: as much as it likes.
    cpu: Option<CpuAllowance>,
}

impl Compression {
    /// By `choice`, with `engines` besides the CPU, on so many channels. Where it is `auto`, it uses `cpu` cores at most; none: as many as it likes.
    pub fn new(choice: MethodChoice, engines: Engines, channels: u16, cpu: Option<f64>) -> Self {
        let auto = choice.is_auto().then(|| {
            let ways = MethodChoice::ways_of_auto(&engines);
            let knowledge = Arc::new(Knowledge::new(ways.iter().copied(), channels.into()));
            Arc::new(Auto {
                ways,
                knowledge,
                choices: Mutex::default(),
                network: Mutex::default(),
                cpu: cpu.map(CpuAllowance::new),
            })
        });
        Self { choice, engines, auto }
    }

    /// Content goes as it is.
    pub fn none() -> Self {
        Self::new(MethodChoice::default(), Engines::default(), 1, None)
    }

    pub(super) fn choice(&self) -> MethodChoice {
        self.choice
    }

    pub(super) fn engines(&self) -> &Engines {
        &self.engines
    }

    pub(super) fn auto(&self) -> Option<&Arc<Auto>> {
        self.auto.as_ref()
    }

    /// What it was, in words: who encoded, and with how much of the content each way went that was `sent`, where there are several.
    pub fn words(&self, sent: &Sent) -> String {
        let all: u64 = sent.by_way.iter().sum();
        let by = |choice| self.engines.account(choice).map(|by| format!("{choice}: {by}"));
        let Some(auto) = self.auto.as_ref().filter(|_| all > 0) else {
            return by(self.choice).unwrap_or_else(|| self.choice.to_string());
        };
        let used = auto.ways.iter().zip(sent.by_way).filter(|(_, bytes)| *bytes * 100 >= all);
        let words: Vec<_> = used.map(|(way, bytes)| format!("{way} {} %", (bytes * 100 + all / 2) / all)).collect();
        let accounts: String = auto.ways.iter().filter_map(|way| by(*way)).map(|by| format!("; {by}")).collect();
        format!("{}: {}{accounts}", self.choice, words.join(", "))
    }

    /// What was chosen when and why, a line for each change, where it is chosen batch by batch.
    pub fn choices(&self) -> Vec<String> {
        let lines = |auto: &Arc<Auto>| {
            let choices = auto.choices.lock().unwrap_or_else(PoisonError::into_inner);
            choices.lines(&auto.ways)
        };
        self.auto.as_ref().map(lines).unwrap_or_default()
    }
}

/// Until when the network has something to do, by what the channels have said lies before it.
#[derive(Debug, Default)]
pub(super) struct Network {
    /// By channel, as it has said last: where the network has become faster, what it said before is not true any more.
    until: HashMap<u64, Instant>,
    /// How many channels there have been: after a loss they are made anew.
    channels: u64,
    /// What was idle before this is counted.
    counted: Option<Instant>,
    idle: Duration,
}

impl Network {
    /// One more channel, whose number this is.
    pub(super) fn channel(&mut self) -> u64 {
        self.channels += 1;
        self.channels
    }

    /// Something is given to it.
    pub(super) fn is_given(&mut self, now: Instant) {
        let until = self.until.values().copied().max();
        if let Some(until) = until.max(self.counted).filter(|until| *until < now) {
            self.idle += now - until;
            self.counted = Some(now);
        }
    }

    /// A channel's part of it will take so long.
    pub(super) fn has(&mut self, channel: u64, now: Instant, left: Duration) {
        self.until.insert(channel, now + left);
    }

    /// A channel has ended, and what lay before the network of it with it.
    pub(super) fn ended(&mut self, channel: u64, now: Instant) {
        if let Some(until) = self.until.remove(&channel) {
            // So far it had something to do.
            self.counted = self.counted.max(Some(until.min(now)));
        }
    }

    /// How long it has had nothing to do so far.
    pub(super) fn idle(&self) -> Duration {
        self.idle
    }
}

impl Auto {
    pub(super) fn network(&self) -> MutexGuard<'_, Network> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread has run for `running` since it last said so; says how far all of them are beyond what they may use: 0 not at all, 1 far.
    pub(super) fn beyond(&self, running: Duration) -> f64 {
        self.cpu.as_ref().map_or(0.0, |cpu| cpu.used(running))
    }

    /// A packet with `bytes` of content went by `way`; since the one before it on its channel `time` had passed.
    pub(super) fn sent(&self, way: usize, bytes: u64, time: Duration, held_up: HeldUp) {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner).sent(way, bytes, time, held_up);
    }
}

#[cfg(test)]
mod tests {
    use super::super::coding::Coding;
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_network_is_idle_from_when_all_channels_parts_are_through() {
        let (mut network, begun) = (Network::default(), Instant::now());
        let (one, other) = (network.channel(), network.channel());
        network.is_given(begun);
        network.has(one, begun, 10 * MS);
        network.has(other, begun, 30 * MS);
        network.is_given(begun + 20 * MS);
        assert_eq!(network.idle(), Duration::ZERO);
        network.is_given(begun + 35 * MS);
        network.is_given(begun + 40 * MS);
        assert_eq!(network.idle(), 10 * MS);
    }

    #[test]
    fn what_was_said_of_a_slower_network_is_soon_forgotten() {
        let (mut network, begun) = (Network::default(), Instant::now());
        let channel = network.channel();
        network.has(channel, begun, 60_000 * MS);
        network.has(channel, begun + MS, MS);
        network.is_given(begun + 12 * MS);
        assert_eq!(network.idle(), 10 * MS);
    }

    #[test]
    fn what_a_channel_had_to_send_still_ends_with_it() {
        let (mut network, begun) = (Network::default(), Instant::now());
        let (lost, other) = (network.channel(), network.channel());
        network.has(lost, begun, 60_000 * MS);
        network.has(other, begun, 10 * MS);
        network.ended(lost, begun + 20 * MS);
        network.is_given(begun + 25 * MS);
        assert_eq!(network.idle(), 5 * MS, "it was busy with the lost one's until that was lost");
        let anew = network.channel();
        assert!(anew != other);
        network.has(anew, begun + 25 * MS, MS);
        network.ended(anew, begun + 30 * MS);
        network.ended(anew, begun + 31 * MS);
        network.is_given(begun + 36 * MS);
        assert_eq!(network.idle(), 15 * MS, "of one that was through before it ended nothing is kept");
    }

    #[test]
    fn channels_that_come_and_go_leave_nothing_behind() {
        let compression = Compression::new(MethodChoice::parse("auto", None).unwrap(), Engines::default(), 1, None);
        let auto = compression.auto().unwrap();
        for _ in 0..3 {
            let coding = Coding::new(&compression).unwrap();
            let channel = auto.network().channels;
            auto.network().has(channel, Instant::now(), 60_000 * MS);
            assert_eq!(auto.network().until.len(), 1);
            drop(coding);
        }
        assert!(auto.network().until.is_empty());
    }
}
