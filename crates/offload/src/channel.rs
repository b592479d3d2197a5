//! A channel is one submitter's interface: it submits batches and receives completions, each exactly once and in any
//! order.
//!
//! No other thread has to run for this: every call looks at the batches in progress (the submission of a batch harvests
//! the one before), and [`Channel::wait`] sleeps until the completion is predicted. The backstop thread looks only when
//! the submitter does not.

use std::fmt::{Debug, Formatter};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::batch::Batch;
use crate::completion::{Done, Reason, TicketId};
use crate::core::Core;
use crate::operation::Operation;
use crate::pools::Pools;
use crate::submitter::Submitter;
use crate::table::{Detached, Id};
use crate::time::{NEVER, Nanos};

/// The pauses between two looks at an overdue batch: more than a system call's time, and negligible for a migration.
const SHORTEST_PAUSE: Nanos = 4_000;
const MAX_PAUSE: Nanos = 64_000;

/// A submitted batch. Dropping the ticket detaches the batch: its completion is not delivered, and what a device leaves
/// undone of it stays undone.
#[must_use = "dropping a ticket discards the batch's completion; `into_id` keeps it"]
pub struct Ticket {
    id: Id,
    submitter: Arc<Submitter>,
    kept: bool,
}

impl Debug for Ticket {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ticket({:?})", self.id)
    }
}

impl Ticket {
    /// Returns the identifier that its completion will have.
    pub fn id(&self) -> TicketId {
        TicketId(self.id)
    }

    /// Returns the identifier alone: the completion is delivered, without a ticket to hold.
    pub fn into_id(mut self) -> TicketId {
        self.kept = true;
        TicketId(self.id)
    }

    /// Cancels the batch.
    pub fn cancel(mut self) -> Cancelled {
        self.kept = true;
        match self.submitter.detach(self.id) {
            Detached::Mine(request) => Cancelled::Returned(Batch::reopened(request, &self.submitter.pools)),
            Detached::Disowned => Cancelled::Disowned,
            Detached::Gone => Cancelled::Delivered,
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.kept
            && let Detached::Mine(request) = self.submitter.detach(self.id)
        {
            self.submitter.pools.put_away(request);
        }
    }
}

/// The result of cancelling a batch.
#[derive(Debug)]
pub enum Cancelled {
    /// No device has it: the batch, with its items and without results.
    Returned(Batch),
    /// A device has it; it will return to the pool by itself.
    Disowned,
    /// Its completion was taken before.
    Delivered,
}

/// A submitter's channel. It may be sent to another thread, and is used by one thread at a time.
pub struct Channel {
    core: Arc<Core>,
    submitter: Arc<Submitter>,
    pools: Arc<Pools>,
    _one_thread: PhantomData<std::cell::Cell<()>>,
}

impl Debug for Channel {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Channel({} under way)", self.in_flight())
    }
}

impl Channel {
    pub(crate) fn new(core: Arc<Core>, submitter: Arc<Submitter>) -> Self {
        let pools = Arc::clone(core.pools.of(None));
        Self { core, submitter, pools, _one_thread: PhantomData }
    }

    /// Makes the channel's batches use memory of NUMA node `node`: best the node of the pages that they will name.
    #[must_use]
    pub fn near(mut self, node: u32) -> Self {
        self.pools = Arc::clone(self.core.pools.of(Some(node)));
        self
    }

    /// Returns an empty batch from the pool.
    pub fn batch(&self, operation: Operation) -> Batch {
        Batch::empty(operation, &self.pools)
    }

    /// Submits a batch. [`Self::poll`] or [`Self::wait`] return its completion unless the ticket is dropped. Also looks
    /// at the other batches in progress.
    ///
    /// # Errors
    /// Why the batch was not accepted, with the batch.
    pub fn submit(&self, batch: Batch) -> Result<Ticket, (Reason, Batch)> {
        let id = self.core.submit(&self.submitter, batch)?;
        Ok(Ticket { id, submitter: Arc::clone(&self.submitter), kept: false })
    }

    /// Returns a completion, if there is one. Work that a device has left undone is finished here, on this thread.
    pub fn poll(&self) -> Option<Done> {
        let (id, request) = self.core.look(&self.submitter, true)?;
        Some(self.core.deliver(id, request))
    }

    /// Returns the next completion; none if none comes until `deadline` or nothing is in progress.
    ///
    /// If there is no completion yet, it sleeps until half of the batches in progress are expected: waking costs more
    /// than collecting a completion, and the other half keeps the device busy meanwhile. With one batch it sleeps until
    /// that one is due.
    pub fn wait(&self, deadline: Nanos) -> Option<Done> {
        let submitter = &self.submitter;
        let time = &self.core.settings.time;
        let mut pause = SHORTEST_PAUSE;
        loop {
            let heard = submitter.table.bell.heard();
            if let Some(done) = self.poll() {
                self.unattended();
                return Some(done);
            }
            let first = submitter.due.load(Ordering::SeqCst);
            let due = first.saturating_add(submitter.last_due.load(Ordering::Relaxed).saturating_sub(first) / 2);
            let now = time.now();
            if now >= deadline || self.in_flight() == 0 {
                return None;
            }
            // An overdue batch cannot be predicted: look less and less often.
            let until = if due > now { due } else { now + pause };
            pause = if due > now { pause } else { (2 * pause).min(MAX_PAUSE) };
            submitter.attended.store(true, Ordering::SeqCst);
            time.wait(&submitter.table.bell, heard, until.min(deadline));
            submitter.attended.store(false, Ordering::SeqCst);
            if time.now() >= deadline {
                self.unattended();
            }
        }
    }

    /// The owner does not look from now on. The backstop may have skipped this channel because the owner did.
    fn unattended(&self) {
        self.core.arm(self.submitter.due.load(Ordering::SeqCst));
    }

    /// As [`Self::wait`], for `at_most` from now.
    pub fn wait_for(&self, at_most: std::time::Duration) -> Option<Done> {
        let now = self.core.settings.time.now();
        self.wait(now.saturating_add(u64::try_from(at_most.as_nanos()).unwrap_or(NEVER)))
    }

    /// Returns the number of batches submitted and not yet collected.
    pub fn in_flight(&self) -> usize {
        let slots = self.submitter.table.lock();
        slots.active() + slots.done()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let core = &self.core;
        let mut slots = self.submitter.table.lock();
        slots.close(|request| core.pools.put_away(request));
        if slots.active() == 0 {
            drop(slots);
            return core.forget(&self.submitter);
        }
        drop(slots);
        core.arm(self.submitter.due.load(Ordering::SeqCst));
    }
}
