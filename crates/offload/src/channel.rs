//! A channel is one submitter's interface: it submits batches and receives completions, each exactly once and in any
//! order.
//!
//! No other thread has to run for this: every call looks at the batches in progress (the submission of a batch harvests
//! the one before), and [`Channel::wait`] sleeps until the completion is predicted. The backstop thread looks only when
//! the submitter does not.

use std::fmt::{Debug, Formatter};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use thiserror::Error;

use crate::batch::Batch;
use crate::core::Core;
use crate::engine::Whose;
use crate::guest::Guest;
use crate::operation::Operation;
use crate::pool::Pool;
use crate::request::{Request, Shape};
use crate::state::State;
use crate::table::{Detached, Id, Table};
use crate::time::{NEVER, Nanos};

/// The pauses between two looks at an overdue batch: more than a system call's time, and negligible for a migration.
const SHORTEST_PAUSE: Nanos = 4_000;
const MAX_PAUSE: Nanos = 64_000;

/// Why a batch was not accepted. The batch was returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Reason {
    /// The batch has no items.
    #[error("the batch is empty")]
    Empty,
    /// The channel has as many batches in progress as allowed.
    #[error("as many batches are under way as one channel may have: collect completions first")]
    Full,
    /// The batch names memory of a retired region.
    #[error("the batch names memory that takes no new work: its region was retired")]
    Retired,
    /// The batch would write memory that a device out of service may still write.
    #[error("the batch would write memory that a device out of service may still write")]
    Leased,
    /// Offload is shutting down.
    #[error("offload is shutting down")]
    Closed,
}

/// How a batch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// All of it is done. The counters show by which engine.
    Done,
    /// None of it is done: it was cancelled before a device had seen it, at shutdown.
    Cancelled,
    /// The batch writes guest memory, and a device out of service may still write that memory, now or later. Its ranges
    /// are leased ([`Leases`](crate::Leases)) until that device is proved quiet; their content is undefined. The
    /// batch's inputs are undefined too: fill it again before submitting it again.
    Leased,
}

/// Identifies a submitted batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TicketId(pub(crate) Id);

/// A submitted batch. Dropping the ticket detaches the batch: its completion is not delivered, and what a device leaves
/// undone of it stays undone.
#[must_use = "dropping a ticket discards the batch's completion; `into_id` keeps it"]
pub struct Ticket {
    id: Id,
    channel: Arc<Shared>,
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
        match self.channel.detach(self.id) {
            Detached::Mine(request) => Cancelled::GivenBack(self.channel.core.open(request)),
            Detached::Disowned => Cancelled::Disowned,
            Detached::Gone => Cancelled::Delivered,
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.kept
            && let Detached::Mine(request) = self.channel.detach(self.id)
        {
            self.channel.core.put_away(request);
        }
    }
}

/// The result of cancelling a batch.
#[derive(Debug)]
pub enum Cancelled {
    /// No device has it: the batch, with its items and without results.
    GivenBack(Batch),
    /// A device has it; it will return to the pool by itself.
    Disowned,
    /// Its completion was taken before.
    Delivered,
}

/// A completion.
#[derive(Debug)]
#[must_use]
pub struct Done {
    /// Which batch completed.
    pub ticket: TicketId,
    /// The batch, with its results.
    pub batch: Batch,
    /// How it ended.
    pub outcome: Outcome,
    /// The device that did all or most of it; none if the CPU did.
    pub maker: Option<Producer>,
}

/// The device that did a batch, to be reported ([`Offload::report_wrong_result`](crate::Offload::report_wrong_result)) if its result turns
/// out to be wrong later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Producer {
    pub(crate) engine: usize,
    pub(crate) device: usize,
}

/// The state that a channel and the backstop share.
pub(crate) struct Shared {
    pub(crate) table: Table<Box<Request>>,
    /// When a batch is next worth looking at; [`NEVER`] when none is in progress.
    pub(crate) due: AtomicU64,
    /// When the last of them is.
    pub(crate) last_due: AtomicU64,
    /// The owner sleeps in `wait` and will look by itself.
    pub(crate) attended: AtomicBool,
    pub(crate) core: Arc<Core>,
    /// Number of completions that devices have made for this channel: after each, a waiting batch may be accepted.
    pub(crate) completions: AtomicU64,
    guest: Arc<Guest>,
    /// Unique in the process.
    number: u32,
}

impl Shared {
    pub(crate) fn new(core: Arc<Core>, guest: Arc<Guest>, number: u32) -> Arc<Self> {
        let (table, due, last_due) = (Table::new(core.settings.in_flight), AtomicU64::new(NEVER), AtomicU64::new(0));
        let (attended, completions) = (AtomicBool::new(false), AtomicU64::new(0));
        Arc::new(Self { table, due, last_due, attended, core, completions, guest, number })
    }

    /// Returns the submitter, as a device's share needs it.
    pub(crate) fn whose(&self) -> Whose {
        let Guest { number: vm, weight, .. } = *self.guest;
        Whose { vm, channel: self.number, weight, urgent: self.guest.is_urgent() }
    }

    fn detach(&self, id: Id) -> Detached<Box<Request>> {
        self.table.lock().detach(id, |request| request.state() == State::Queued)
    }
}

/// A submitter's channel. It may be sent to another thread, and is used by one thread at a time.
pub struct Channel {
    shared: Arc<Shared>,
    pools: Arc<Pools>,
    _one_thread: PhantomData<std::cell::Cell<()>>,
}

impl Debug for Channel {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Channel({} under way)", self.under_way())
    }
}

impl Channel {
    pub(crate) fn new(shared: Arc<Shared>, pools: Arc<Pools>) -> Self {
        Self { shared, pools, _one_thread: PhantomData }
    }

    /// Makes the channel's batches use memory of NUMA node `node`: best the node of the pages that they will name.
    #[must_use]
    pub fn near(mut self, node: u32) -> Self {
        self.pools = Arc::clone(self.shared.core.pools(Some(node)));
        self
    }

    /// Returns an empty batch from the pool.
    pub fn batch(&self, operation: Operation) -> Batch {
        self.pools.batch(operation)
    }

    /// Submits a batch. [`Self::poll`] or [`Self::wait`] return its completion unless the ticket is dropped. Also looks
    /// at the other batches in progress.
    ///
    /// # Errors
    /// Why the batch was not accepted, with the batch.
    pub fn submit(&self, batch: Batch) -> Result<Ticket, (Reason, Batch)> {
        let core = &self.shared.core;
        let id = core.submit(&self.shared, batch)?;
        Ok(Ticket { id, channel: Arc::clone(&self.shared), kept: false })
    }

    /// Returns a completion, if there is one. Work that a device has left undone is finished here, on this thread.
    pub fn poll(&self) -> Option<Done> {
        let core = &self.shared.core;
        let taken = core.look(&self.shared, true);
        let (id, request) = taken?;
        Some(core.deliver(id, request))
    }

    /// Returns the next completion; none if none comes until `deadline` or nothing is in progress.
    ///
    /// If there is no completion yet, it sleeps until half of the batches in progress are expected: waking costs more
    /// than collecting a completion, and the other half keeps the device busy meanwhile. With one batch it sleeps until
    /// that one is due.
    pub fn wait(&self, deadline: Nanos) -> Option<Done> {
        let shared = &self.shared;
        let time = &shared.core.settings.time;
        let mut pause = SHORTEST_PAUSE;
        loop {
            let heard = shared.table.bell.heard();
            if let Some(done) = self.poll() {
                self.unattended();
                return Some(done);
            }
            let first = shared.due.load(Ordering::SeqCst);
            let due = first.saturating_add(shared.last_due.load(Ordering::Relaxed).saturating_sub(first) / 2);
            let now = time.now();
            if now >= deadline || self.under_way() == 0 {
                return None;
            }
            // An overdue batch cannot be predicted: look less and less often.
            let until = if due > now { due } else { now + pause };
            pause = if due > now { pause } else { (2 * pause).min(MAX_PAUSE) };
            shared.attended.store(true, Ordering::SeqCst);
            time.wait(&shared.table.bell, heard, until.min(deadline));
            shared.attended.store(false, Ordering::SeqCst);
            if time.now() >= deadline {
                self.unattended();
            }
        }
    }

    /// The owner does not look from now on. The backstop may have skipped this channel because the owner did.
    fn unattended(&self) {
        self.shared.core.arm(self.shared.due.load(Ordering::SeqCst));
    }

    /// As [`Self::wait`], for `at_most` from now.
    pub fn wait_for(&self, at_most: std::time::Duration) -> Option<Done> {
        let now = self.shared.core.settings.time.now();
        self.wait(now.saturating_add(u64::try_from(at_most.as_nanos()).unwrap_or(NEVER)))
    }

    /// Returns the number of batches submitted and not yet collected.
    pub fn under_way(&self) -> usize {
        let slots = self.shared.table.lock();
        slots.active() + slots.done()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let core = &self.shared.core;
        let mut slots = self.shared.table.lock();
        slots.close(|request| core.put_away(request));
        if slots.active() == 0 {
            drop(slots);
            return core.forget(&self.shared);
        }
        drop(slots);
        core.arm(self.shared.due.load(Ordering::SeqCst));
    }
}

/// The requests of one node: with and without a buffer of their own.
#[derive(Debug)]
pub(crate) struct Pools {
    shape: Shape,
    plain: Pool<Box<Request>>,
    buffered: Pool<Box<Request>>,
}

impl Pools {
    pub(crate) fn new(shape: Shape) -> Arc<Self> {
        Arc::new(Self { shape, plain: Pool::new(256), buffered: Pool::new(256) })
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns an empty batch.
    pub(crate) fn batch(self: &Arc<Self>, operation: Operation) -> Batch {
        let mut request = self.take(operation.has_buffer());
        request.reset(operation);
        Batch::new(request, Arc::clone(self))
    }

    /// Takes a free request.
    pub(crate) fn take(&self, buffer: bool) -> Box<Request> {
        self.of(buffer).take(|| Box::new(Request::new(self.shape, buffer)))
    }

    /// Returns a request to the pool.
    pub(crate) fn put(&self, mut request: Box<Request>) {
        debug_assert_eq!(request.state(), State::Free);
        // Idle requests keep no regions.
        request.reset(request.operation);
        self.of(request.buffer.is_some()).put(request);
    }

    /// Returns how many requests were made, and how many are free.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let (plain, buffered) = (self.plain.counts(), self.buffered.counts());
        (plain.0 + buffered.0, plain.1 + buffered.1)
    }

    fn of(&self, buffer: bool) -> &Pool<Box<Request>> {
        if buffer { &self.buffered } else { &self.plain }
    }
}
