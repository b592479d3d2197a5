//! Selects a device's queue for a request: by the operations that it supports, and by whether it is reserved for urgent
//! work.
//!
//! An administrator reserves one queue for paused guests (`plan.rs`), so that their last pages do not wait behind the
//! pages of all running guests. It is recognised by its name, which contains *switchover*; if no name does, by its
//! priority, the highest of the device's. A queue is reserved only for operations that other queues support too: if
//! only queues of one kind support an operation, all of its work goes there.

use sterna_idxd::QueueInfo;

/// Occurs in the name of a queue that is reserved for urgent work; case is ignored.
const SWITCHOVER: &str = "switchover";

/// The queues that support an operation, as indices into the device's queues.
#[derive(Debug, Default)]
pub(crate) struct Takers {
    /// For all other work.
    bulk: Vec<usize>,
    /// For urgent work only.
    reserved: Vec<usize>,
}

impl Takers {
    /// Selects those of the device's queues that support the operation with this code.
    pub(crate) fn of<'a>(queues: impl Iterator<Item = &'a QueueInfo>, code: u8) -> Self {
        // Where the kernel does not list operations, the operation is tried.
        let able: Vec<_> = queues.enumerate().filter(|(_, queue)| queue.declares(code) != Some(false)).collect();
        let reserved = reserved(&able.iter().map(|(_, queue)| *queue).collect::<Vec<_>>());
        let mut takers = Self::default();
        for ((place, _), reserved) in able.into_iter().zip(reserved) {
            if reserved { takers.reserved.push(place) } else { takers.bulk.push(place) }
        }
        takers
    }

    /// Returns whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.bulk.is_empty()
    }

    /// Returns the queue for work that has been refused `refusals` times, in rotation by `turn`. Urgent work goes to a
    /// reserved queue first, and when that is full to the others too.
    pub(crate) fn choose(&self, urgent: bool, refusals: u32, turn: usize) -> Option<usize> {
        let queues =
            if urgent && !self.reserved.is_empty() && refusals.is_multiple_of(2) { &self.reserved } else { &self.bulk };
        queues.get(turn % queues.len().max(1)).copied()
    }
}

/// Returns which of these are reserved for urgent work: by name, else by priority where all priorities are known. Never all.
fn reserved(queues: &[&QueueInfo]) -> Vec<bool> {
    let named =
        |queue: &&QueueInfo| queue.label.as_ref().is_some_and(|label| label.to_ascii_lowercase().contains(SWITCHOVER));
    let named: Vec<bool> = queues.iter().map(named).collect();
    let priorities: Vec<u32> = queues.iter().filter_map(|queue| queue.priority).collect();
    let highest = priorities.iter().max().filter(|_| priorities.len() == queues.len());
    let preferred = queues.iter().map(|queue| queue.priority.as_ref() == highest && highest.is_some()).collect();
    let divides = |reserved: &Vec<bool>| reserved.contains(&true) && reserved.contains(&false);
    [named, preferred].into_iter().find(divides).unwrap_or_else(|| vec![false; queues.len()])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sterna_idxd::{Device, Kind, Mode, OperationSet};

    use super::*;

    fn queue(label: &str, priority: Option<u32>, codes: &[u8]) -> QueueInfo {
        let mut queue = QueueInfo::new("wq0.0", Arc::new(Device::new("dsa0", Kind::Dsa)), Mode::Shared, 16);
        (queue.label, queue.priority) = (Some(label.into()), priority);
        queue.operations = (!codes.is_empty()).then(|| OperationSet::of(codes.iter().copied()));
        queue
    }

    /// The queues for work that is not urgent, and those for urgent work: at first, and after a refusal.
    fn queues_for(queues: &[QueueInfo], code: u8) -> [Vec<usize>; 3] {
        let takers = Takers::of(queues.iter(), code);
        [(false, 0), (true, 0), (true, 1)].map(|(urgent, refusals)| {
            let mut chosen: Vec<_> = (0..6).filter_map(|turn| takers.choose(urgent, refusals, turn)).collect();
            chosen.sort_unstable();
            chosen.dedup();
            chosen
        })
    }

    #[test]
    fn a_queue_named_switchover_is_reserved_for_urgent_work_whatever_the_priorities_are() {
        let queues = [
            queue("sterna-bulk", Some(15), &[]),
            queue("my-Switchover-queue", Some(5), &[]),
            queue("other", Some(10), &[]),
        ];
        assert_eq!(queues_for(&queues, 6), [vec![0, 2], vec![1], vec![0, 2]]);
    }

    #[test]
    fn without_such_a_name_the_queues_of_the_highest_priority_are_reserved() {
        let queues = [queue("a", Some(15), &[]), queue("b", Some(5), &[]), queue("c", Some(15), &[])];
        assert_eq!(queues_for(&queues, 6), [vec![1], vec![0, 2], vec![1]]);
    }

    #[test]
    fn queues_without_a_difference_get_all_work_in_turn() {
        for queues in [
            vec![queue("a", Some(10), &[]), queue("b", Some(10), &[])],
            vec![queue("sterna-switchover", Some(15), &[]), queue("switchover too", Some(15), &[])],
            vec![queue("a", None, &[]), queue("b", None, &[])],
        ] {
            assert_eq!(queues_for(&queues, 6), [vec![0, 1], vec![0, 1], vec![0, 1]]);
        }
        assert_eq!(queues_for(&[queue("sterna-switchover", Some(15), &[])], 6), [vec![0], vec![0], vec![0]]);
    }

    #[test]
    fn an_operation_goes_to_queues_that_support_it_and_the_only_one_is_never_reserved() {
        let queues = [queue("bulk", Some(5), &[3, 6]), queue("switchover", Some(15), &[3]), queue("old", None, &[])];
        assert_eq!(queues_for(&queues, 3), [vec![0, 2], vec![1], vec![0, 2]]);
        // A queue of unknown priority counts as neither lower nor higher.
        assert_eq!(queues_for(&queues, 6), [vec![0, 2], vec![0, 2], vec![0, 2]]);
        assert_eq!(queues_for(&queues[..2], 6), [vec![0], vec![0], vec![0]]);
        assert_eq!(queues_for(&queues[1..2], 6), [const { Vec::<usize>::new() }; 3]);
        assert!(Takers::of(queues[1..2].iter(), 6).is_empty());
    }
}
