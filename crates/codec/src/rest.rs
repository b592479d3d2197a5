//! Exponential back-off for an accelerator in trouble: requests to it would delay every batch.

/// The number of batches without a request after the first trouble; it doubles with each further trouble.
const FIRST: u32 = 8;
const LONGEST: u32 = 1024;

/// The back-off of an accelerator.
pub(crate) struct Rest {
    left: u32,
    next: u32,
}

impl Default for Rest {
    fn default() -> Self {
        Self { left: 0, next: FIRST }
    }
}

impl Rest {
    /// Starts the back-off after trouble.
    pub(crate) fn begin(&mut self) {
        self.left = self.next;
        self.next = (2 * self.next).min(LONGEST);
    }

    /// Returns whether the accelerator is not used for this batch.
    pub(crate) fn goes_on(&mut self) -> bool {
        let rests = self.left > 0;
        self.left = self.left.saturating_sub(1);
        rests
    }

    /// Ends the back-off after a batch without trouble.
    pub(crate) fn went_well(&mut self) {
        self.next = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_back_off_is_twice_as_long_until_a_batch_succeeds() {
        let mut rest = Rest::default();
        let batches = |rest: &mut Rest| {
            rest.begin();
            (0..).take_while(|_: &u32| rest.goes_on()).count()
        };
        let lengths: Vec<_> = (0..10).map(|_| batches(&mut rest)).collect();
        assert_eq!(lengths, [8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]);
        rest.went_well();
        assert!(!rest.goes_on());
        assert_eq!(batches(&mut rest), 8);
    }
}
