//! The search for a boundary: the largest rate at which something still works, by bisection.
//!
//! Arithmetic only: the caller asks for the next rate and reports the outcome.

/// The largest ratio of the final bracket's ends: ±5 % around its middle.
pub(super) const WIDTH: f64 = 1.1;
/// The first step up or down until the rate is bracketed; later steps are larger.
const STRIDE: f64 = 1.3;
const MAX_STRIDE: f64 = 3.0;

/// The outcome of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It works.
    Works,
    /// It does not.
    Fails,
    /// The guest does not reach that rate.
    OutOfReach,
}

/// The state of a search.
#[derive(Clone, Debug)]
pub(super) struct Search {
    first: f64,
    works: Option<f64>,
    above: Option<(f64, Outcome)>,
    stride: f64,
    /// The smallest rate that is tried.
    least: f64,
}

impl Search {
    /// Makes a search that begins at `first`.
    pub(super) fn new(first: f64) -> Self {
        Self { first, works: None, above: None, stride: STRIDE, least: first / 100.0 }
    }

    /// Returns the next rate to try; none once the boundary is found, or if there is none.
    pub(super) fn next(&self) -> Option<f64> {
        match (self.works, self.above) {
            (None, None) => Some(self.first),
            (Some(works), None) => Some(works * self.stride),
            (None, Some((above, _))) => Some(above / self.stride).filter(|rate| *rate >= self.least),
            (Some(works), Some((above, _))) => (above / works > WIDTH).then(|| (works * above).sqrt()),
        }
    }

    /// Records the outcome of a rate.
    pub(super) fn tried(&mut self, rate: f64, outcome: Outcome) {
        if self.works.is_some() || self.above.is_some() {
            self.stride = self.stride.powi(2).min(MAX_STRIDE);
        }
        match outcome {
            Outcome::Works => self.works = Some(rate),
            _ => self.above = Some((rate, outcome)),
        }
    }

    /// Returns the largest rate that works.
    pub(super) fn works(&self) -> Option<f64> {
        self.works
    }

    /// Returns the smallest rate that does not work, and why.
    pub(super) fn above(&self) -> Option<(f64, Outcome)> {
        self.above
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(first: f64, boundary: f64, reach: f64) -> (Search, u32) {
        let mut search = Search::new(first);
        let mut tries = 0;
        while let Some(rate) = search.next() {
            tries += 1;
            search.tried(
                rate,
                match rate {
                    rate if rate > reach => Outcome::OutOfReach,
                    rate if rate > boundary => Outcome::Fails,
                    _ => Outcome::Works,
                },
            );
        }
        (search, tries)
    }

    #[test]
    fn a_boundary_is_found_to_five_percent_from_above_and_below() {
        for boundary in [30.0, 90.0, 100.0, 117.0, 400.0] {
            let (found, tries) = search(100.0, boundary, f64::INFINITY);
            let (works, (above, why)) = (found.works().unwrap(), found.above().unwrap());
            assert!(works <= boundary && above > boundary && above / works <= WIDTH, "{boundary}: {found:?}");
            assert_eq!(why, Outcome::Fails);
            assert!(tries < 12, "{boundary}: {tries}");
        }
    }

    #[test]
    fn a_guest_that_gets_no_further_bounds_the_search_and_one_that_gets_nowhere_ends_it() {
        let (found, _) = search(100.0, 1000.0, 250.0);
        assert!(found.works().unwrap() <= 250.0);
        assert_eq!(found.above().unwrap().1, Outcome::OutOfReach);
        assert_eq!(search(100.0, 0.1, 1e9).0.works(), None);
    }
}
