//! How the content of a migration is compressed: always by one method, or by the one with which it leaves fastest now.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_codec::select::{Delays, SharedEstimates};
use sterna_codec::{Encoding, Engines};

use super::choices::Choices;
use super::counters::Sent;
use crate::cpu_allowance::CpuAllowance;

/// The compression of all channels of one migration. Clones share what they learn.
#[derive(Debug, Clone)]
pub struct Compression {
    encoding: Encoding,
    /// The engines besides the CPU.
    engines: Engines,
    auto: Option<Arc<Auto>>,
    /// The limit of the sending threads' CPU time; none: no limit.
    cpus: Option<Arc<CpuAllowance>>,
}

/// The state of `auto`, which chooses a method for each batch.
#[derive(Debug)]
pub(super) struct Auto {
    /// The methods to choose from.
    pub(super) methods: Vec<Encoding>,
    pub(super) estimates: Arc<SharedEstimates>,
    /// Which method was chosen when, and why.
    choices: Mutex<Choices>,
    network: Mutex<Network>,
    /// The limit of this side's CPU time; none: no limit.
    cpus: Option<Arc<CpuAllowance>>,
}

impl Compression {
    /// Compresses by `encoding`, with `engines` besides the CPU, on so many channels, whose threads use `max_cpus` cores at most;
    /// none: no limit.
    pub fn new(encoding: Encoding, engines: Engines, channels: u16, max_cpus: Option<f64>) -> Self {
        let cpus = max_cpus.map(|cores| Arc::new(CpuAllowance::new(cores)));
        let auto = encoding.is_auto().then(|| {
            let methods = Encoding::auto_candidates(&engines);
            let estimates = Arc::new(SharedEstimates::new(methods.iter().copied(), channels.into()));
            let cpus = cpus.clone();
            Arc::new(Auto { methods, estimates, choices: Mutex::default(), network: Mutex::default(), cpus })
        });
        Self { encoding, engines, auto, cpus }
    }

    /// Sets whether sending is urgent: it is while the guest is paused, and then the CPU time is not limited.
    pub fn set_urgent(&self, urgent: bool) {
        if let Some(cpus) = &self.cpus {
            cpus.set_limited(!urgent);
        }
    }

    /// Returns the limit of the sending threads' CPU time, if there is one.
    pub(super) fn cpus(&self) -> Option<&Arc<CpuAllowance>> {
        self.cpus.as_ref()
    }

    /// Sends content uncompressed.
    pub fn none() -> Self {
        Self::new(Encoding::default(), Engines::default(), 1, None)
    }

    pub(super) fn encoding(&self) -> Encoding {
        self.encoding
    }

    pub(super) fn engines(&self) -> &Engines {
        &self.engines
    }

    pub(super) fn auto(&self) -> Option<&Arc<Auto>> {
        self.auto.as_ref()
    }

    /// Describes the compression: the methods, with their part of the `sent` content where there are several, and the engines.
    pub fn words(&self, sent: &Sent) -> String {
        let all: u64 = sent.by_method.iter().sum();
        let by = |encoding| self.engines.account(encoding).map(|by| format!("{encoding}: {by}"));
        let Some(auto) = self.auto.as_ref().filter(|_| all > 0) else {
            return by(self.encoding).unwrap_or_else(|| self.encoding.to_string());
        };
        let used = auto.methods.iter().zip(sent.by_method).filter(|(_, bytes)| *bytes * 100 >= all);
        let words: Vec<_> =
            used.map(|(method, bytes)| format!("{method} {} %", (bytes * 100 + all / 2) / all)).collect();
        let accounts: String =
            auto.methods.iter().filter_map(|method| by(*method)).map(|by| format!("; {by}")).collect();
        format!("{}: {}{accounts}", self.encoding, words.join(", "))
    }

    /// Returns a line for each change of the method that `auto` chose, with the reason.
    pub fn choices(&self) -> Vec<String> {
        let lines = |auto: &Arc<Auto>| {
            let choices = auto.choices.lock().unwrap_or_else(PoisonError::into_inner);
            choices.lines(&auto.methods)
        };
        self.auto.as_ref().map(lines).unwrap_or_default()
    }
}

/// How long the network is busy, by the channels' figures of bytes that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct Network {
    /// When the network will have sent each channel's bytes, by the channel's newest figure.
    until: HashMap<u64, Instant>,
    /// How many channels there have been: after a loss they are opened anew.
    channels: u64,
    /// Up to when idle time is counted.
    counted: Option<Instant>,
    idle: Duration,
}

impl Network {
    /// Adds a channel and returns its number.
    pub(super) fn channel(&mut self) -> u64 {
        self.channels += 1;
        self.channels
    }

    /// Counts the idle time until now: a packet is about to be written.
    pub(super) fn count_idle(&mut self, now: Instant) {
        let until = self.until.values().copied().max();
        if let Some(until) = until.max(self.counted).filter(|until| *until < now) {
            self.idle += now - until;
            self.counted = Some(now);
        }
    }

    /// Records how long the network will take for the channel's bytes that wait.
    pub(super) fn set_left(&mut self, channel: u64, now: Instant, left: Duration) {
        self.until.insert(channel, now + left);
    }

    /// Removes a channel that has ended, with its bytes.
    pub(super) fn ended(&mut self, channel: u64, now: Instant) {
        if let Some(until) = self.until.remove(&channel) {
            // Until then the network was busy.
            self.counted = self.counted.max(Some(until.min(now)));
        }
    }

    /// Returns how long the network has been idle so far.
    pub(super) fn idle(&self) -> Duration {
        self.idle
    }
}

impl Auto {
    pub(super) fn network(&self) -> MutexGuard<'_, Network> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how far all threads are beyond their limit of CPU time: 0 not at all, 1 far.
    pub(super) fn beyond(&self) -> f64 {
        self.cpus.as_ref().map_or(0.0, |cpus| cpus.beyond())
    }

    /// Records a packet with `bytes` of content that was encoded by method `method`, and the `time` since the packet before it on its channel.
    pub(super) fn sent(&self, method: usize, bytes: u64, time: Duration, held_up: Delays) {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner).sent(method, bytes, time, held_up);
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
        network.count_idle(begun);
        network.set_left(one, begun, 10 * MS);
        network.set_left(other, begun, 30 * MS);
        network.count_idle(begun + 20 * MS);
        assert_eq!(network.idle(), Duration::ZERO);
        network.count_idle(begun + 35 * MS);
        network.count_idle(begun + 40 * MS);
        assert_eq!(network.idle(), 10 * MS);
    }

    #[test]
    fn what_was_said_of_a_slower_network_is_soon_forgotten() {
        let (mut network, begun) = (Network::default(), Instant::now());
        let channel = network.channel();
        network.set_left(channel, begun, 60_000 * MS);
        network.set_left(channel, begun + MS, MS);
        network.count_idle(begun + 12 * MS);
        assert_eq!(network.idle(), 10 * MS);
    }

    #[test]
    fn what_a_channel_had_to_send_still_ends_with_it() {
        let (mut network, begun) = (Network::default(), Instant::now());
        let (lost, other) = (network.channel(), network.channel());
        network.set_left(lost, begun, 60_000 * MS);
        network.set_left(other, begun, 10 * MS);
        network.ended(lost, begun + 20 * MS);
        network.count_idle(begun + 25 * MS);
        assert_eq!(network.idle(), 5 * MS, "it was busy with the lost one's until that was lost");
        let anew = network.channel();
        assert!(anew != other);
        network.set_left(anew, begun + 25 * MS, MS);
        network.ended(anew, begun + 30 * MS);
        network.ended(anew, begun + 31 * MS);
        network.count_idle(begun + 36 * MS);
        assert_eq!(network.idle(), 15 * MS, "of one that was through before it ended nothing is kept");
    }

    #[test]
    fn channels_that_come_and_go_leave_nothing_behind() {
        let compression = Compression::new(Encoding::auto(), Engines::default(), 1, None);
        let auto = compression.auto().unwrap();
        for _ in 0..3 {
            let coding = Coding::new(&compression).unwrap();
            let channel = auto.network().channels;
            auto.network().set_left(channel, Instant::now(), 60_000 * MS);
            assert_eq!(auto.network().until.len(), 1);
            drop(coding);
        }
        assert!(auto.network().until.is_empty());
    }
}
