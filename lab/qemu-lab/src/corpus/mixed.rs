//! All kinds of material in runs of random length, like the files and heaps in a guest's memory.

use sterna_guest::content::{Page, Random};

use super::{Corpus, Pages};
use crate::Error;

/// Its parts, in percent.
const PARTS: [(Corpus, u64); 5] = [
    (Corpus::GuestRam, 35),
    (Corpus::Binaries, 25),
    (Corpus::Text, 20),
    (Corpus::Images, 10),
    (Corpus::Compressed, 10),
];
/// Minimum and maximum number of consecutive pages of one kind.
const RUN: (u64, u64) = (32, 512);

/// Pages of all kinds.
pub(super) struct Mixed {
    parts: Vec<(Box<dyn Pages>, u64)>,
    random: Random,
    current: usize,
    left: u64,
}

impl Mixed {
    pub(super) fn new(bytes: u64, seed: u64) -> Result<Self, Error> {
        let part = |(corpus, percent): (Corpus, u64)| Ok((corpus.pages(bytes / 100 * percent, seed)?, percent));
        let parts = PARTS.into_iter().map(part).collect::<Result<_, Error>>()?;
        Ok(Self { parts, random: Random::new(seed), current: 0, left: 0 })
    }
}

impl Pages for Mixed {
    fn next(&mut self, page: &mut Page) -> Result<bool, Error> {
        if self.left == 0 {
            let mut at = self.random.next() % 100;
            let found = self.parts.iter().position(|(_, percent)| {
                let here = at < *percent;
                at = at.saturating_sub(*percent);
                here
            });
            self.current = found.unwrap_or(0);
            self.left = RUN.0 + self.random.next() % (RUN.1 - RUN.0);
        }
        self.left -= 1;
        self.parts[self.current].0.next(page)
    }

    fn origin(&self) -> String {
        let part = |(pages, percent): &(Box<dyn Pages>, u64)| format!("{percent} % {}", pages.origin());
        self.parts.iter().map(part).collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_a_whole() {
        assert_eq!(PARTS.iter().map(|(_, percent)| percent).sum::<u64>(), 100);
    }
}
