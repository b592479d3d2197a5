//! The requests of one submitter that are in progress, and its completion queue.
//!
//! There is one slot per submitted request. Three threads may use a table at once: the submitter (inserts, harvests,
//! takes completions), the backstop (harvests), and the thread that drops or cancels a ticket. Every slot is delivered
//! exactly once: as done, as cancelled, or, if its ticket was dropped, back to its pool.
//!
//! Nothing is allocated after [`Table::new`]. The payload is opaque here, so that loom can try every order of events.

use std::collections::VecDeque;

use crate::sync::{Mutex, MutexGuard, lock};
use crate::time::Bell;

/// A slot and its generation, which distinguishes successive requests in the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    detached: bool,
    payload: Option<T>,
}

/// The slots behind the lock.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Vec<Slot<T>>,
    vacant: Vec<u32>,
    active: Vec<u32>,
    done: VecDeque<u32>,
    closed: bool,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slots: Mutex<Slots<T>>,
    /// Rung when a request is done.
    pub(crate) bell: Bell,
}

/// The result of a look at a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Still in progress.
    Going,
    /// No device has the request any more.
    Done,
}

/// The result of detaching a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Detached<T> {
    /// The request is done or cancelled: the caller of `detach` returns it to its pool.
    Mine(T),
    /// The request is in progress; the thread that sees it done returns it to its pool.
    Disowned,
    /// The request was delivered before.
    Gone,
}

impl<T> Table<T> {
    /// Makes a table for `capacity` requests.
    pub(crate) fn new(capacity: usize) -> Self {
        let slots = (0..capacity).map(|_| Slot { generation: 0, detached: false, payload: None }).collect();
        let vacant = (0..u32::try_from(capacity).expect("a table of a few thousand at most")).rev().collect();
        let (active, done) = (Vec::with_capacity(capacity), VecDeque::with_capacity(capacity));
        Self { slots: Mutex::new(Slots { slots, vacant, active, done, closed: false }), bell: Bell::default() }
    }

    /// Locks the table.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Slots<T>> {
        lock(&self.slots)
    }

    /// Locks the table unless another thread has locked it: the backstop never waits for a submitter.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Slots<T>>> {
        match self.slots.try_lock() {
            Ok(slots) => Some(slots),
            Err(std::sync::TryLockError::Poisoned(slots)) => Some(slots.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}

impl<T> Slots<T> {
    /// Inserts a request, either done or to be harvested. Returns the request if the table is full.
    pub(crate) fn insert(&mut self, payload: T, step: &Step) -> Result<Id, T> {
        let Some(index) = self.vacant.pop() else { return Err(payload) };
        let slot = &mut self.slots[index as usize];
        (slot.detached, slot.payload) = (false, Some(payload));
        match step {
            Step::Going => self.active.push(index),
            Step::Done => self.done.push_back(index),
        }
        Ok(Id { slot: index, generation: slot.generation })
    }

    /// Returns whether another request fits.
    pub(crate) fn has_room(&self) -> bool {
        !self.vacant.is_empty()
    }

    /// Looks at all requests in progress, in the order of their submission. A request that is done goes to the
    /// completion queue, or to `away` if its ticket was dropped. Returns how many became done for the owner.
    pub(crate) fn harvest(&mut self, mut look: impl FnMut(&mut T) -> Step, mut away: impl FnMut(T)) -> usize {
        let mut delivered = 0;
        let Self { slots, vacant, active, done, .. } = self;
        active.retain(|index| {
            let slot = &mut slots[*index as usize];
            let payload = slot.payload.as_mut().expect("an active slot holds a request");
            match look(payload) {
                Step::Going => true,
                Step::Done if slot.detached => {
                    away(vacate(slot).expect("looked at above"));
                    vacant.push(*index);
                    false
                }
                Step::Done => {
                    done.push_back(*index);
                    delivered += 1;
                    false
                }
            }
        });
        delivered
    }

    /// Takes the oldest completion.
    pub(crate) fn take(&mut self) -> Option<(Id, T)> {
        let index = self.done.pop_front()?;
        let slot = &mut self.slots[index as usize];
        let id = Id { slot: index, generation: slot.generation };
        let payload = vacate(slot).expect("a done slot holds a request");
        self.vacant.push(index);
        Some((id, payload))
    }

    /// Drops the interest in `id`. A request in progress is removed at once if `back` allows it (no device has seen
    /// it).
    pub(crate) fn detach(&mut self, id: Id, back: impl FnOnce(&mut T) -> bool) -> Detached<T> {
        let slot = &mut self.slots[id.slot as usize];
        if slot.generation != id.generation || slot.detached {
            return Detached::Gone;
        }
        let Some(payload) = slot.payload.as_mut() else { return Detached::Gone };
        if let Some(at) = self.done.iter().position(|index| *index == id.slot) {
            self.done.remove(at);
        } else if back(payload) {
            self.active.retain(|index| *index != id.slot);
        } else {
            slot.detached = true;
            return Detached::Disowned;
        }
        let payload = vacate(slot).expect("looked at above");
        self.vacant.push(id.slot);
        Detached::Mine(payload)
    }

    /// Detaches all requests, because the owner is gone. Requests in progress stay; `away` gets those that are done.
    pub(crate) fn close(&mut self, mut away: impl FnMut(T)) {
        self.closed = true;
        while let Some((_, payload)) = self.take() {
            away(payload);
        }
        for index in &self.active {
            self.slots[*index as usize].detached = true;
        }
    }

    /// Returns whether the owner is gone.
    pub(crate) fn closed(&self) -> bool {
        self.closed
    }

    /// Returns the number of requests in progress.
    pub(crate) fn active(&self) -> usize {
        self.active.len()
    }

    /// Returns the number of requests that are done and not yet taken.
    pub(crate) fn done(&self) -> usize {
        self.done.len()
    }
}

fn vacate<T>(slot: &mut Slot<T>) -> Option<T> {
    slot.generation = slot.generation.wrapping_add(1);
    slot.payload.take()
}
