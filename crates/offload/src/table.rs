//! What one submitter has under way, and its completion queue.
//!
//! A slot per request handed in. Three may come to a table at once: the submitter (inserts, harvests, takes what is done),
//! the backstop (harvests) and whoever drops or cancels a ticket. Every slot is delivered exactly once: as done, as cancelled,
//! or, if nobody wants it any more, back to where it came from.
//!
//! Nothing is allocated after [`Table::new`]. The payload is opaque here, so that loom can try every order of events.

use std::collections::VecDeque;

use crate::sync::{Mutex, MutexGuard, lock};
use crate::time::Bell;

/// A slot, and which of its successive users is meant.
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

/// What is behind the lock.
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
    /// Rung when something was done.
    pub(crate) bell: Bell,
}

/// What a harvest says about a request it has looked at.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Still under way.
    Going,
    /// No device has it any more.
    Done,
}

/// What became of a request that nobody wants any more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Detached<T> {
    /// It was done, or is given back: the caller of `detach` has to put it away.
    Mine(T),
    /// It is under way, and will be put away by whoever sees it done.
    Disowned,
    /// It was delivered before.
    Gone,
}

impl<T> Table<T> {
    /// A table of `capacity` requests.
    pub(crate) fn new(capacity: usize) -> Self {
        let slots = (0..capacity).map(|_| Slot { generation: 0, detached: false, payload: None }).collect();
        let vacant = (0..u32::try_from(capacity).expect("a table of a few thousand at most")).rev().collect();
        let (active, done) = (Vec::with_capacity(capacity), VecDeque::with_capacity(capacity));
        Self { slots: Mutex::new(Slots { slots, vacant, active, done, closed: false }), bell: Bell::default() }
    }

    /// Locks it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Slots<T>> {
        lock(&self.slots)
    }

    /// Locks it unless someone else has it locked: the backstop never waits for a submitter.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Slots<T>>> {
        match self.slots.try_lock() {
            Ok(slots) => Some(slots),
            Err(std::sync::TryLockError::Poisoned(slots)) => Some(slots.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}

impl<T> Slots<T> {
    /// Takes a request in, done already or to be harvested, or gives it back when the table is full.
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

    /// Whether another one fits.
    pub(crate) fn has_room(&self) -> bool {
        !self.vacant.is_empty()
    }

    /// Looks at all requests under way, in the order they came. What is done goes to the completion queue, or to `away` when
    /// nobody wants it. Says how many became done for the owner.
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

    /// The request that was done first of those not yet taken.
    pub(crate) fn take(&mut self) -> Option<(Id, T)> {
        let index = self.done.pop_front()?;
        let slot = &mut self.slots[index as usize];
        let id = Id { slot: index, generation: slot.generation };
        let payload = vacate(slot).expect("a done slot holds a request");
        self.vacant.push(index);
        Some((id, payload))
    }

    /// Nobody wants `id` any more. One that is under way is taken out at once if `back` allows it (no device has seen it).
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

    /// As [`Self::detach`], of everything: its owner is gone. Nothing is taken out of `active`; `away` gets what was done.
    pub(crate) fn close(&mut self, mut away: impl FnMut(T)) {
        self.closed = true;
        while let Some((_, payload)) = self.take() {
            away(payload);
        }
        for index in &self.active {
            self.slots[*index as usize].detached = true;
        }
    }

    /// Whether its owner is gone.
    pub(crate) fn closed(&self) -> bool {
        self.closed
    }

    /// Requests under way.
    pub(crate) fn active(&self) -> usize {
        self.active.len()
    }

    /// Requests done and not yet taken.
    pub(crate) fn done(&self) -> usize {
        self.done.len()
    }
}

fn vacate<T>(slot: &mut Slot<T>) -> Option<T> {
    slot.generation = slot.generation.wrapping_add(1);
    slot.payload.take()
}
