//! The ledger's table, shared by simulated processes; one of them may die, another may publish false values.

use std::sync::{Arc, Mutex};

use sterna_offload::share::ledger::{Slot, Table};

#[derive(Debug, Default)]
struct Shared {
    slots: Vec<Slot>,
    dead: Vec<bool>,
}

/// The file of one queue.
#[derive(Clone, Debug, Default)]
pub struct Sheet(Arc<Mutex<Shared>>);

impl Sheet {
    /// Takes a slot for another process. The slot of a process that lies always shows nothing in flight and nothing
    /// wanted.
    pub fn slot(&self, lies: bool) -> SimulatedTable {
        let mut shared = self.0.lock().expect("never poisoned");
        shared.slots.push(Slot::default());
        shared.dead.push(false);
        SimulatedTable { sheet: self.clone(), own: shared.slots.len() - 1, lies }
    }

    /// Marks the owner of a slot as dead; the slot's content stays.
    pub fn kill(&self, slot: usize) {
        if let Some(dead) = self.0.lock().expect("never poisoned").dead.get_mut(slot) {
            *dead = true;
        }
    }
}

/// The table as one process sees it.
#[derive(Debug)]
pub struct SimulatedTable {
    sheet: Sheet,
    own: usize,
    lies: bool,
}

/// As many slots as the real file has.
const SLOTS: usize = sterna_offload::share::ledger::file::SLOTS;

impl Table for SimulatedTable {
    fn slots(&self) -> usize {
        SLOTS
    }

    fn own(&self) -> usize {
        self.own
    }

    fn read(&self, slots: &mut [Slot]) {
        let shared = self.sheet.0.lock().expect("never poisoned");
        for (index, slot) in slots.iter_mut().enumerate() {
            *slot = shared.slots.get(index).copied().unwrap_or_default();
        }
    }

    fn write(&self, slot: &Slot) {
        let mut shared = self.sheet.0.lock().expect("never poisoned");
        if !shared.dead[self.own] {
            shared.slots[self.own] = if self.lies { Slot { in_flight: 0, wants: 0, ..*slot } } else { *slot };
        }
    }

    fn alive(&self, index: usize) -> bool {
        let mut shared = self.sheet.0.lock().expect("never poisoned");
        let dead = shared.dead.get(index).copied().unwrap_or(false);
        if dead {
            shared.slots[index] = Slot::default();
        }
        !dead
    }
}
