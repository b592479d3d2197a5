//! Zero pages that are sent as if they were not zero: for tests, and to measure the cost of a ratio of normal pages.

/// A ratio of the zero pages, spread evenly over them.
#[derive(Clone, Debug, Default)]
pub struct NormalPageRatio {
    percent: u8,
    owed: u8,
}

impl NormalPageRatio {
    /// Makes `percent` of the zero pages count as normal; more than 100 is 100, and 0 is none.
    pub fn new(percent: u8) -> Self {
        Self { percent: percent.min(100), owed: 0 }
    }

    /// Returns whether no zero page counts as normal.
    pub fn is_none(&self) -> bool {
        self.percent == 0
    }

    /// Returns whether the next zero page counts as normal.
    pub fn takes_next(&mut self) -> bool {
        self.owed += self.percent;
        let takes = self.owed >= 100;
        if takes {
            self.owed -= 100;
        }
        takes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_hundred_zero_pages_the_given_percentage_counts_as_normal() {
        for percent in [0, 1, 33, 50, 99, 100, 200] {
            let mut ratio = NormalPageRatio::new(percent);
            let taken = (0..100).filter(|_| ratio.takes_next()).count();
            assert_eq!(taken, usize::from(percent.min(100)));
            assert_eq!(ratio.is_none(), percent == 0);
        }
    }
}
