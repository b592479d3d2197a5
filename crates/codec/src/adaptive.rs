//! Skips most attempts while content does not shrink.
//!
//! Encrypted or already compressed guest memory comes in long stretches, and finding out that a batch does not shrink
//! costs nearly as much as shrinking it. So after a few consecutive failures only one batch in many is tried, until one
//! shrinks again.

use crate::{CodecError, Encoded, Encoder};
use sterna_offload::Producer;

/// The consecutive batches that must fail to shrink before attempts are skipped.
const FAILURES: u32 = 4;

/// One batch of this many is tried then.
const EVERY: u32 = 16;

/// An encoder that skips attempts while content does not shrink.
pub struct Adaptive {
    inner: Box<dyn Encoder>,
    failures: u32,
    skip: u32,
    skipped: u64,
}

impl Adaptive {
    /// Wraps an encoder.
    pub fn new(inner: Box<dyn Encoder>) -> Self {
        Self { inner, failures: 0, skip: 0, skipped: 0 }
    }

    /// Returns how many batches were treated as incompressible without an attempt.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }
}

impl Encoder for Adaptive {
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError> {
        if self.skip > 0 {
            crate::check_len(input.len())?;
            self.skip -= 1;
            self.skipped += 1;
            return Ok(Encoded::Incompressible);
        }
        let encoded = self.inner.encode(input, output)?;
        match encoded {
            Encoded::Shrunk(_) => self.failures = 0,
            Encoded::Incompressible => {
                self.failures = FAILURES.min(self.failures + 1);
                if self.failures == FAILURES {
                    self.skip = EVERY - 1;
                }
            }
        }
        Ok(encoded)
    }

    fn producer(&self) -> Option<Producer> {
        self.inner.producer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Shrinks content that begins with a zero, and counts its calls.
    struct Judge(Arc<AtomicU32>);

    impl Encoder for Judge {
        fn encode(&mut self, input: &[u8], _output: &mut [u8]) -> Result<Encoded, CodecError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(if input[0] == 0 { Encoded::Shrunk(1) } else { Encoded::Incompressible })
        }
    }

    fn tries(encoder: &mut Adaptive, count: &AtomicU32, content: u8, batches: u32) -> u32 {
        let before = count.load(Ordering::Relaxed);
        for _ in 0..batches {
            encoder.encode(&[content], &mut [0]).unwrap();
        }
        count.load(Ordering::Relaxed) - before
    }

    #[test]
    fn after_some_failures_one_batch_in_many_is_tried_until_one_shrinks() {
        let count = Arc::new(AtomicU32::new(0));
        let mut encoder = Adaptive::new(Box::new(Judge(Arc::clone(&count))));
        assert_eq!(tries(&mut encoder, &count, 0, 100), 100);
        assert_eq!(tries(&mut encoder, &count, 1, FAILURES), FAILURES);
        assert_eq!(tries(&mut encoder, &count, 1, 10 * EVERY), 10);
        assert_eq!(encoder.skipped(), u64::from(10 * (EVERY - 1)));
        // Compressible again: the next attempt shows it, and from then on every batch is tried.
        assert_eq!(tries(&mut encoder, &count, 0, EVERY), 1);
        assert_eq!(tries(&mut encoder, &count, 0, 100), 100);
        // One failure among successes changes nothing.
        assert_eq!(tries(&mut encoder, &count, 1, 1), 1);
        assert_eq!(tries(&mut encoder, &count, 0, 100), 100);
    }
}
