//! One submitter of batches: its batches in progress, and when to look at them. The submitter's channel, its tickets and the backstop
//! share it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::engine::Whose;
use crate::guest::Guest;
use crate::pools::ByNode;
use crate::request::Request;
use crate::state::State;
use crate::table::{Detached, Id, Table};
use crate::time::NEVER;

/// One submitter. Its channel and the backstop share it.
pub(crate) struct Submitter {
    pub(crate) table: Table<Box<Request>>,
    /// When a batch is next worth looking at; [`NEVER`] when none is in progress.
    pub(crate) due: AtomicU64,
    /// When the last of them is.
    pub(crate) last_due: AtomicU64,
    /// The owner sleeps in `wait` and will look by itself.
    pub(crate) attended: AtomicBool,
    /// Where its requests return to.
    pub(crate) pools: ByNode,
    /// Number of completions that devices have made for this channel: after each, a waiting batch may be accepted.
    pub(crate) completions: AtomicU64,
    guest: Arc<Guest>,
    /// Unique in the process.
    number: u32,
}

impl Submitter {
    pub(crate) fn new(in_flight: usize, pools: ByNode, guest: Arc<Guest>, number: u32) -> Arc<Self> {
        let (table, due, last_due) = (Table::new(in_flight), AtomicU64::new(NEVER), AtomicU64::new(0));
        let (attended, completions) = (AtomicBool::new(false), AtomicU64::new(0));
        Arc::new(Self { table, due, last_due, attended, pools, completions, guest, number })
    }

    /// Returns the submitter, as a device's share needs it.
    pub(crate) fn whose(&self) -> Whose {
        let Guest { number: vm, weight, .. } = *self.guest;
        Whose { vm, channel: self.number, weight, urgent: self.guest.is_urgent() }
    }

    pub(crate) fn detach(&self, id: Id) -> Detached<Box<Request>> {
        self.table.lock().detach(id, |request| request.state() == State::Queued)
    }
}
