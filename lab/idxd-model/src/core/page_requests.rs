//! How long page requests take.

use super::Nanos;
use super::random::Random;
use crate::config::PageRequests;

impl PageRequests {
    pub(crate) fn draw(&self, random: &mut Random) -> Nanos {
        let total: u64 = self.classes.iter().map(|class| u64::from(class.0)).sum();
        if total == 0 {
            return 0;
        }
        let mut at = random.below(total);
        for &(weight, least, most) in &self.classes {
            if at < u64::from(weight) {
                return least + random.below(most.saturating_sub(least) + 1);
            }
            at -= u64::from(weight);
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_requests_have_the_published_mean_and_maximum() {
        let (requests, mut random) = (PageRequests::default(), Random::new(1));
        let drawn: Vec<u64> = (0..200_000).map(|_| requests.draw(&mut random)).collect();
        let mean = drawn.iter().sum::<u64>() as f64 / drawn.len() as f64;
        assert!((8_500.0..9_500.0).contains(&mean), "mean {mean} ns");
        assert!(*drawn.iter().max().unwrap() <= 556_000);
        let slow = drawn.iter().filter(|&&ns| ns > 100_000).count() as f64 / drawn.len() as f64;
        assert!((slow - 395.0 / 25_965.0).abs() < 0.002, "share over 100 µs {slow}");
    }
}
