//! Random numbers that a seed repeats.

use std::hash::{BuildHasher, RandomState};

/// A generator of which the seed is all there is to know (SplitMix64: Steele, Lea, Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

/// Returns a new seed, or the one in the environment variable `STERNA_TEST_SEED`, and prints how to repeat the run.
///
/// # Panics
/// The variable is no number.
#[must_use]
pub fn announced_seed() -> u64 {
    let seed = match std::env::var("STERNA_TEST_SEED") {
        Ok(text) => text.parse().expect("STERNA_TEST_SEED is a number"),
        Err(_) => RandomState::new().hash_one(()),
    };
    println!("repeat with STERNA_TEST_SEED={seed}");
    seed
}

impl Random {
    /// Returns the sequence of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the sequence of a seed that is printed, see [`announced_seed`].
    #[must_use]
    pub fn announced() -> Self {
        Self(announced_seed())
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`; 0 if that is 0. The bias of the modulus does not matter here.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next_u64() % end.max(1)
    }

    /// Returns an index below `end`; 0 if that is 0.
    pub fn index(&mut self, end: usize) -> usize {
        self.below(end as u64) as usize
    }

    /// Returns true once in `n` times; never for 0, and then without taking a number.
    pub fn once_in(&mut self, n: u64) -> bool {
        n != 0 && self.below(n) == 0
    }

    /// Returns true in so many of 100 times.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Puts the list in another order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for index in (1..list.len()).rev() {
            list.swap(index, self.index(index + 1));
        }
    }

    /// Returns one of the choices.
    ///
    /// # Panics
    /// There are none.
    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn the_sequence_is_that_of_the_paper_s_reference() {
        let mut random = Random::new(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([(); 3].map(|()| random.next_u64()), expected);
    }

    #[test]
    fn numbers_stay_below_their_end_and_a_chance_of_none_takes_no_number() {
        let mut random = Random::new(7);
        assert!((0..1000).all(|_| random.below(3) < 3 && random.index(5) < 5 && !random.percent(0)));
        assert_eq!((random.below(0), random.one_of(&["a"])), (0, "a"));
        let mut other = random.clone();
        assert!(!random.once_in(0));
        assert_eq!(random.next_u64(), other.next_u64());
    }
}
