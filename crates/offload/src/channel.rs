//! A submitter's door: batches go in, completions come out, each exactly once and in any order.
//!
//! Nobody else needs to run for that: every call looks at what is under way (the submitter of the next batch harvests the
//! one before), and [`Channel::wait`] sleeps until the completion is predicted. The backstop thread looks only when the
//! submitter does not.

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

/// Between two looks at what is overdue: a system call's time and more, and less than anybody minds.
const SHORTEST_PAUSE: Nanos = 4_000;
const LONGEST_PAUSE: Nanos = 64_000;

/// Why a batch was not taken. It was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Reason {
    /// There is nothing in it.
    #[error("the batch is empty")]
    Empty,
    /// The channel has as many under way as it may.
    #[error("as many batches are under way as one channel may have: collect completions first")]
    Full,
    /// It names memory of a region that was retired.
    #[error("the batch names memory that takes no new work: its region was retired")]
    Retired,
    /// It would write memory that a device out of service may still write.
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
    /// All of it is done; who did it is in the counters.
    Done,
    /// None of it is done: it was given back before a device had seen it, at shutdown.
    Cancelled,
    /// It writes guest memory, and a device that is out of service may still write it, now or later. Its ranges are leased
    /// ([`Leases`](crate::Leases)) until that device is proved quiet; what lies in them is undefined. So are the inputs of the batch: it
    /// must be filled anew before it is handed in again.
    Leased,
}

/// Names a batch that was handed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TicketId(pub(crate) Id);

/// A batch that was handed in. Dropped, it is detached: nobody will be told of its completion, and what a device leaves
/// undone of it stays undone.
#[must_use = "a dropped ticket means that nobody wants the batch any more; `into_id` keeps it"]
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
    /// What its completion will be called.
    pub fn id(&self) -> TicketId {
        TicketId(self.id)
    }

    /// The name alone: the completion is delivered, without a ticket to hold.
    pub fn into_id(mut self) -> TicketId {
        self.kept = true;
        TicketId(self.id)
    }

    /// Takes the batch back.
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

/// What a cancelled batch became.
#[derive(Debug)]
pub enum Cancelled {
    /// No device has it: here it is, with its items and without answers.
    GivenBack(Batch),
    /// A device has it; it will come back to the pool by itself.
    Disowned,
    /// Its completion was taken before.
    Delivered,
}

/// A completion.
#[derive(Debug)]
#[must_use]
pub struct Done {
    /// Which batch it is.
    pub ticket: TicketId,
    /// The batch, with its answers.
    pub batch: Batch,
    /// How it ended.
    pub outcome: Outcome,
    /// The device that did it, or most of it; none: the CPU did.
    pub maker: Option<Maker>,
}

/// A device that did a batch: to be told of ([`Offload::distrust`](crate::Offload::distrust)) should what came out turn out wrong later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maker {
    pub(crate) engine: usize,
    pub(crate) device: usize,
}

/// What a channel and its backstop share.
pub(crate) struct Shared {
    pub(crate) table: Table<Box<Request>>,
    /// When something is next worth looking at; [`NEVER`] when nothing is under way.
    pub(crate) due: AtomicU64,
    /// When the last of it is.
    pub(crate) last_due: AtomicU64,
    /// Its owner sleeps in `wait` and will look by itself.
    pub(crate) attended: AtomicBool,
    pub(crate) core: Arc<Core>,
    /// What devices have completed of it so far: each time there may be room for what waits.
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

    /// Who asks for a share of a device now.
    pub(crate) fn whose(&self) -> Whose {
        let Guest { number: vm, weight, .. } = *self.guest;
        Whose { vm, channel: self.number, weight, urgent: self.guest.is_urgent() }
    }

    fn detach(&self, id: Id) -> Detached<Box<Request>> {
        self.table.lock().detach(id, |request| request.state() == State::Queued)
    }
}

/// A submitter's channel. May be sent to another thread, and is used by one at a time.
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

    /// The same channel, whose batches have their memory on NUMA node `node`: best that of the pages they will name.
    #[must_use]
    pub fn near(mut self, node: u32) -> Self {
        self.pools = Arc::clone(self.shared.core.pools(Some(node)));
        self
    }

    /// An empty batch from the pool.
    pub fn batch(&self, operation: Operation) -> Batch {
        self.pools.batch(operation)
    }

    /// Hands a batch in. Its completion comes by [`Self::poll`] or [`Self::wait`] unless the ticket is dropped. What else is
    /// under way is looked at on the way.
    ///
    /// # Errors
    /// Why it was not taken, with the batch.
    pub fn submit(&self, batch: Batch) -> Result<Ticket, (Reason, Batch)> {
        let core = &self.shared.core;
        let id = core.submit(&self.shared, batch)?;
        Ok(Ticket { id, channel: Arc::clone(&self.shared), kept: false })
    }

    /// A completion, if there is one. Work that a device has left is finished here, on this thread.
    pub fn poll(&self) -> Option<Done> {
        let core = &self.shared.core;
        let taken = core.look(&self.shared, true);
        let (id, request) = taken?;
        Some(core.deliver(id, request))
    }

    /// The next completion, or none when there is none until `deadline` or nothing is under way.
    ///
    /// Where there is none yet it sleeps until half of what is under way is expected: to be woken costs more than to collect a
    /// completion, and the other half keeps the device busy meanwhile. Of one batch it sleeps until that is due.
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
            // What is overdue comes when it comes: it is looked at less and less often.
            let until = if due > now { due } else { now + pause };
            pause = if due > now { pause } else { (2 * pause).min(LONGEST_PAUSE) };
            shared.attended.store(true, Ordering::SeqCst);
            time.wait(&shared.table.bell, heard, until.min(deadline));
            shared.attended.store(false, Ordering::SeqCst);
            if time.now() >= deadline {
                self.unattended();
            }
        }
    }

    /// Nobody attends to what is under way now. The backstop may have passed it over because somebody did.
    fn unattended(&self) {
        self.shared.core.arm(self.shared.due.load(Ordering::SeqCst));
    }

    /// As [`Self::wait`], for so long from now.
    pub fn wait_for(&self, at_most: std::time::Duration) -> Option<Done> {
        let now = self.shared.core.settings.time.now();
        self.wait(now.saturating_add(u64::try_from(at_most.as_nanos()).unwrap_or(NEVER)))
    }

    /// Batches handed in and not yet collected.
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

    /// An empty batch.
    pub(crate) fn batch(self: &Arc<Self>, operation: Operation) -> Batch {
        let mut request = self.take(operation.has_buffer());
        request.reset(operation);
        Batch::new(request, Arc::clone(self))
    }

    /// A free request.
    pub(crate) fn take(&self, buffer: bool) -> Box<Request> {
        self.of(buffer).take(|| Box::new(Request::new(self.shape, buffer)))
    }

    /// Takes a free request back.
    pub(crate) fn put(&self, mut request: Box<Request>) {
        debug_assert_eq!(request.state(), State::Free);
        // Regions are not kept by requests at rest.
        request.reset(request.operation);
        self.of(request.buffer.is_some()).put(request);
    }

    /// How many were made, and how many are here.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let (plain, buffered) = (self.plain.counts(), self.buffered.counts());
        (plain.0 + buffered.0, plain.1 + buffered.1)
    }

    fn of(&self, buffer: bool) -> &Pool<Box<Request>> {
        if buffer { &self.buffered } else { &self.plain }
    }
}
