//! Convenience interfaces: blocking calls, and completions by call-back on the caller's thread.

use crate::batch::{Batch, PushError};
use crate::channel::{Channel, Ticket};
use crate::completion::{Done, Reason, TicketId};
use crate::offload::Offload;
use crate::operation::Operation;
use crate::region::Range;
use crate::sync::lock_std;
use crate::time::{NEVER, Nanos};
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

/// A channel whose completions call back, on the thread that polls it.
pub struct Callbacks<F> {
    channel: Channel,
    waiting: Vec<(TicketId, F)>,
}

impl<F> std::fmt::Debug for Callbacks<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Callbacks({} waiting)", self.waiting.len())
    }
}

impl<F: FnOnce(Batch, Outcome)> Callbacks<F> {
    /// Makes call-backs on `channel`. Completions of batches that are already in progress on it are discarded.
    pub fn new(channel: Channel) -> Self {
        Self { channel, waiting: Vec::new() }
    }

    /// Returns an empty batch from the pool.
    pub fn batch(&self, operation: Operation) -> Batch {
        self.channel.batch(operation)
    }

    /// Submits a batch, and calls `then` when it is done, from [`Self::poll`] or [`Self::wait`].
    ///
    /// # Errors
    /// Why the batch was not accepted, with the batch and the call-back.
    pub fn submit(&mut self, batch: Batch, then: F) -> Result<(), (Reason, Batch, F)> {
        match self.channel.submit(batch).map(Ticket::into_id) {
            Ok(id) => {
                self.waiting.push((id, then));
                Ok(())
            }
            Err((reason, batch)) => Err((reason, batch, then)),
        }
    }

    /// Calls back for every completion. Returns how many there were.
    pub fn poll(&mut self) -> usize {
        let mut called = 0;
        while let Some(done) = self.channel.poll() {
            called += self.call(done);
        }
        called
    }

    /// As [`Self::poll`], after waiting for one until `deadline`.
    pub fn wait(&mut self, deadline: Nanos) -> usize {
        match self.channel.wait(deadline) {
            None => 0,
            Some(done) => self.call(done) + self.poll(),
        }
    }

    fn call(&mut self, done: Done) -> usize {
        let Some(at) = self.waiting.iter().position(|(id, _)| *id == done.ticket) else { return 0 };
        let (_, then) = self.waiting.swap_remove(at);
        then(done.batch, done.outcome);
        1
    }
}
