//! Which methods `auto` chose when, and what it waited for meanwhile: for the report.

use std::time::{Duration, Instant};

use super::counters::MAX_AUTO_METHODS;
use sterna_codec::Encoding;
use sterna_codec::select::Delays;

/// Minimum length of a period.
const MIN_PERIOD: Duration = Duration::from_millis(250);
/// Maximum number of periods. With more, two each become one.
const MAX_PERIODS: usize = 16;

/// A period in which one method carried more content than any other.
#[derive(Clone, Copy, Debug)]
struct Period {
    from: Duration,
    by_method: [u64; MAX_AUTO_METHODS],
    /// Sum over all channels.
    time: Duration,
    held_up: Delays,
}

impl Period {
    fn new(from: Duration) -> Self {
        Self { from, by_method: [0; MAX_AUTO_METHODS], time: Duration::ZERO, held_up: Delays::default() }
    }

    fn method(&self) -> usize {
        let methods = self.by_method.iter().enumerate();
        methods.max_by_key(|(_, bytes)| **bytes).map_or(0, |(method, _)| method)
    }

    /// Makes the following period part of this one.
    fn absorb(&mut self, next: &Self) {
        self.by_method.iter_mut().zip(next.by_method).for_each(|(sum, bytes)| *sum += bytes);
        let (time, more) = (self.time.as_secs_f64(), next.time.as_secs_f64());
        let mean = |one: f64, other: f64| (one * time + other * more) / (time + more).max(f64::MIN_POSITIVE);
        self.held_up = Delays {
            network: mean(self.held_up.network, next.held_up.network),
            receiver: mean(self.held_up.receiver, next.held_up.receiver),
        };
        self.time += next.time;
    }
}

/// The choices of all channels of a migration.
#[derive(Debug)]
pub(super) struct Choices {
    begun: Instant,
    shortest: Duration,
    /// The last one is still growing.
    periods: Vec<Period>,
}

impl Default for Choices {
    fn default() -> Self {
        let mut periods = Vec::with_capacity(MAX_PERIODS + 1);
        periods.push(Period::new(Duration::ZERO));
        Self { begun: Instant::now(), shortest: MIN_PERIOD, periods }
    }
}

impl Choices {
    /// Records a packet with `bytes` of content that was encoded by method `method`, and the `time` since the packet before it on its channel.
    pub(super) fn sent(&mut self, method: usize, bytes: u64, time: Duration, held_up: Delays) {
        self.sent_at(self.begun.elapsed(), method, bytes, time, held_up);
    }

    fn sent_at(&mut self, now: Duration, method: usize, bytes: u64, time: Duration, held_up: Delays) {
        let growing = self.periods.last().expect("there is one always");
        if now.saturating_sub(growing.from) >= self.shortest {
            self.close(now);
        }
        let growing = self.periods.last_mut().expect("there is one always");
        let mut packet = Period { time, held_up, ..Period::new(now) };
        packet.by_method[method] = bytes;
        growing.absorb(&packet);
    }

    /// Ends the last period and begins the next.
    fn close(&mut self, now: Duration) {
        self.merge();
        if self.periods.len() == MAX_PERIODS {
            self.shortest *= 2;
            let longer = self.periods.chunks(2).map(|pair| {
                let mut first = pair[0];
                pair[1..].iter().for_each(|second| first.absorb(second));
                first
            });
            let mut longer: Vec<_> = longer.collect();
            longer.reserve_exact(MAX_PERIODS + 1 - longer.len());
            self.periods = longer;
        }
        self.periods.push(Period::new(now));
    }

    /// Merges the last period with the one before it, if the same method prevails in both.
    fn merge(&mut self) {
        if let [.., before, last] = self.periods.as_mut_slice()
            && before.method() == last.method()
        {
            before.absorb(&last.clone());
            self.periods.pop();
        }
    }

    /// Returns a line for each period. `methods`: the methods that were chosen from.
    pub(super) fn lines(&self, methods: &[Encoding]) -> Vec<String> {
        let mut all = Self { begun: self.begun, shortest: self.shortest, periods: self.periods.clone() };
        all.merge();
        let sent = all.periods.iter().filter(|period| period.by_method.iter().any(|bytes| *bytes > 0));
        sent.map(|period| line(period, methods)).collect()
    }
}

fn line(period: &Period, methods: &[Encoding]) -> String {
    let percent = |part: f64| (part * 100.0).round();
    let bytes: u64 = period.by_method.iter().sum();
    let method = period.method();
    let most = percent(period.by_method[method] as f64 / bytes.max(1) as f64);
    let name = methods.get(method).map_or_else(|| "?".to_owned(), ToString::to_string);
    let Delays { network, receiver } = period.held_up;
    format!(
        "from {:.1} s: mostly {name} ({most} %); it waited for the network {} %, for the destination {} % of the time",
        period.from.as_secs_f64(),
        percent(network),
        percent(receiver)
    )
}

#[cfg(test)]
mod tests {
    use sterna_codec::MethodChoice;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn methods() -> Vec<Encoding> {
        ["none", "lz4", "zstd 3"].map(|text| text.parse::<MethodChoice>().unwrap().by_cpu().unwrap()).to_vec()
    }

    #[test]
    fn each_change_of_mind_is_a_line_with_its_reason() {
        let mut choices = Choices::default();
        for ms in 0..3000 {
            let (method, network) = if ms < 1000 { (0, 0.1) } else { (2, 0.5) };
            choices.sent_at(MS * ms, method, 1000, MS, Delays { network, receiver: 0.25 });
            // Trying another method now and then is no change.
            choices.sent_at(MS * ms, 1, 10, MS, Delays { network, receiver: 0.25 });
        }
        assert_eq!(
            choices.lines(&methods()),
            [
                "from 0.0 s: mostly none (99 %); it waited for the network 10 %, for the destination 25 % of the time",
                "from 1.0 s: mostly zstd 3 (99 %); it waited for the network 50 %, for the destination 25 % of the time",
            ]
        );
    }

    #[test]
    fn however_often_it_changes_the_lines_stay_few_and_nothing_is_lost() {
        let mut choices = Choices::default();
        for ms in 0..100_000u32 {
            choices.sent_at(MS * ms, (ms / 300 % 3) as usize, 1000, MS, Delays::default());
        }
        assert!(choices.periods.len() <= MAX_PERIODS, "{}", choices.periods.len());
        let bytes: u64 = choices.periods.iter().flat_map(|period| period.by_method).sum();
        assert_eq!(bytes, 100_000_000);
        assert_eq!(choices.lines(&methods())[0].split(':').next(), Some("from 0.0 s"));
    }

    #[test]
    fn a_migration_without_content_has_no_lines() {
        assert_eq!(Choices::default().lines(&methods()), [""; 0]);
    }
}
