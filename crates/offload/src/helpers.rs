//! Blocking calls: one batch, submitted and waited for.

use crate::batch::{Batch, PushError};
use crate::completion::{Done, Reason};
use crate::offload::Offload;
use crate::operation::Operation;
use crate::region::Range;
use crate::sync::lock_std;
use crate::time::NEVER;
use crate::work::Outcome;

use thiserror::Error;

/// Why a blocking call has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CallError {
    /// A range does not fit the operation.
    #[error(transparent)]
    Push(#[from] PushError),
    /// The batch was not accepted.
    #[error("{0}")]
    Refused(Reason),
    /// The batch was not done.
    #[error("the batch was not done: {0:?}")]
    NotDone(Outcome),
}

impl Offload {
    /// Submits one batch, filled by `fill`, and waits for it.
    pub fn call(
        &self,
        operation: Operation,
        fill: impl FnOnce(&mut Batch) -> Result<(), PushError>,
    ) -> Result<Batch, CallError> {
        let channel = lock_std(&self.helpers).pop().unwrap_or_else(|| self.channel());
        let mut batch = channel.batch(operation);
        fill(&mut batch)?;
        let ticket = channel.submit(batch).map_err(|(reason, _)| CallError::Refused(reason))?;
        let done = channel.wait(NEVER);
        drop(ticket);
        let Done { batch, outcome, .. } = done.expect("a batch under way is delivered");
        lock_std(&self.helpers).push(channel);
        if outcome == Outcome::Done { Ok(batch) } else { Err(CallError::NotDone(outcome)) }
    }

    /// Returns which pages of `ranges` (whole pages) are zero.
    pub fn is_zero(&self, ranges: &[Range]) -> Result<Vec<bool>, CallError> {
        let batch =
            self.call(Operation::ZeroMap, |batch| ranges.iter().try_for_each(|range| batch.push(range).map(drop)))?;
        Ok((0..batch.len()).map(|page| batch.is_zero(page)).collect())
    }

    /// Returns the offset at which two ranges of equal length first differ.
    pub fn compare(&self, first: &Range, second: &Range) -> Result<Option<usize>, CallError> {
        Ok(self.call(Operation::Compare, |batch| batch.push_pair(first, second).map(drop))?.difference(0))
    }

    /// Returns the CRC-32C of a range.
    pub fn checksum(&self, range: &Range) -> Result<u32, CallError> {
        Ok(self.call(Operation::Checksum, |batch| batch.push(range).map(drop))?.checksum(0))
    }

    /// Returns a copy of a range.
    pub fn copy(&self, range: &Range) -> Result<Vec<u8>, CallError> {
        Ok(self.call(Operation::Copy, |batch| batch.push(range).map(drop))?.copy(0).to_vec())
    }
}
