//! An accelerator in trouble is left alone for a while, and longer each time: who asks it for every batch waits for every batch.

/// After trouble it is not asked for so many batches, and for twice as many each time that it is in trouble again.
const FIRST: u32 = 8;
const LONGEST: u32 = 1024;

/// How long an accelerator is left alone.
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
    /// There was trouble.
    pub(crate) fn begin(&mut self) {
        self.left = self.next;
        self.next = (2 * self.next).min(LONGEST);
    }

    /// Whether the batch is one of those that it is not asked for.
    pub(crate) fn goes_on(&mut self) -> bool {
        let rests = self.left > 0;
        self.left = self.left.saturating_sub(1);
        rests
    }

    /// A batch without trouble.
    pub(crate) fn went_well(&mut self) {
        self.next = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rest_is_twice_as_long_until_something_goes_well() {
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
