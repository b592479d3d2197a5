//! Which of a device's queues takes what: the operations it has, and whether it is kept for urgent work.
//!
//! An administrator sets one queue aside for guests that stand (`plan.rs`), so that what they have left to send is not behind the
//! pages of all those that run. It is told from the others by its name, which has *switchover* in it; where the names say nothing,
//! by its priority, which is the highest of the device's. Only what urgent work can be sent to is set aside: of an operation
//! that one kind of queue alone has, all work goes there.

use sterna_idxd::QueueInfo;

/// In the name of a queue that is kept for urgent work, in capitals or not.
const SWITCHOVER: &str = "switchover";

/// The queues that have an operation, by their places among the device's.
#[derive(Debug, Default)]
pub(crate) struct Takers {
    /// For all other work.
    bulk: Vec<usize>,
    /// For urgent work only.
    kept: Vec<usize>,
}

impl Takers {
    /// Of the device's queues, those that have `operation` by its code.
    pub(crate) fn of<'a>(queues: impl Iterator<Item = &'a QueueInfo>, code: u8) -> Self {
        // Where the kernel says nothing it is tried.
        let able: Vec<_> = queues.enumerate().filter(|(_, queue)| queue.declares(code) != Some(false)).collect();
        let kept = kept(&able.iter().map(|(_, queue)| *queue).collect::<Vec<_>>());
        let mut takers = Self::default();
        for ((place, _), kept) in able.into_iter().zip(kept) {
            if kept { takers.kept.push(place) } else { takers.bulk.push(place) }
        }
        takers
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.bulk.is_empty()
    }

    /// The queue for work that has been refused so often; each in its `turn`. What is urgent goes to a queue that is kept for it
    /// first, and when that is full to the others too.
    pub(crate) fn choose(&self, urgent: bool, refusals: u32, turn: usize) -> Option<usize> {
        let queues =
            if urgent && !self.kept.is_empty() && refusals.is_multiple_of(2) { &self.kept } else { &self.bulk };
        queues.get(turn % queues.len().max(1)).copied()
    }
}

/// Which of these are kept for urgent work: by name, else by priority where all are known. Never all of them.
fn kept(queues: &[&QueueInfo]) -> Vec<bool> {
    let named =
        |queue: &&QueueInfo| queue.label.as_ref().is_some_and(|label| label.to_ascii_lowercase().contains(SWITCHOVER));
    let named: Vec<bool> = queues.iter().map(named).collect();
    let priorities: Vec<u32> = queues.iter().filter_map(|queue| queue.priority).collect();
    let highest = priorities.iter().max().filter(|_| priorities.len() == queues.len());
    let preferred = queues.iter().map(|queue| queue.priority.as_ref() == highest && highest.is_some()).collect();
    let divides = |kept: &Vec<bool>| kept.contains(&true) && kept.contains(&false);
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

    /// The queues for work that is not urgent, and those for work that is: what it is offered first, and after a refusal.
    fn taken(queues: &[QueueInfo], code: u8) -> [Vec<usize>; 3] {
        let takers = Takers::of(queues.iter(), code);
        [(false, 0), (true, 0), (true, 1)].map(|(urgent, refusals)| {
            let mut chosen: Vec<_> = (0..6).filter_map(|turn| takers.choose(urgent, refusals, turn)).collect();
            chosen.sort_unstable();
            chosen.dedup();
            chosen
        })
    }

    #[test]
    fn a_queue_by_the_name_of_switchover_is_kept_for_urgent_work_whatever_the_priorities_are() {
        let queues = [
            queue("sterna-bulk", Some(15), &[]),
            queue("my-Switchover-queue", Some(5), &[]),
            queue("other", Some(10), &[]),
        ];
        assert_eq!(taken(&queues, 6), [vec![0, 2], vec![1], vec![0, 2]]);
    }

    #[test]
    fn where_no_name_says_so_the_queues_of_the_highest_priority_are_kept() {
        let queues = [queue("a", Some(15), &[]), queue("b", Some(5), &[]), queue("c", Some(15), &[])];
        assert_eq!(taken(&queues, 6), [vec![1], vec![0, 2], vec![1]]);
    }

    #[test]
    fn queues_that_nothing_tells_apart_take_all_work_in_turn() {
        for queues in [
            vec![queue("a", Some(10), &[]), queue("b", Some(10), &[])],
            vec![queue("sterna-switchover", Some(15), &[]), queue("switchover too", Some(15), &[])],
            vec![queue("a", None, &[]), queue("b", None, &[])],
        ] {
            assert_eq!(taken(&queues, 6), [vec![0, 1], vec![0, 1], vec![0, 1]]);
        }
        assert_eq!(taken(&[queue("sterna-switchover", Some(15), &[])], 6), [vec![0], vec![0], vec![0]]);
    }

    #[test]
    fn an_operation_goes_to_queues_that_have_it_and_none_of_them_is_kept_that_is_the_only_one() {
        let queues = [queue("bulk", Some(5), &[3, 6]), queue("switchover", Some(15), &[3]), queue("old", None, &[])];
        assert_eq!(taken(&queues, 3), [vec![0, 2], vec![1], vec![0, 2]]);
        // One of unknown priority is not thought the lower, nor the higher.
        assert_eq!(taken(&queues, 6), [vec![0, 2], vec![0, 2], vec![0, 2]]);
        assert_eq!(taken(&queues[..2], 6), [vec![0], vec![0], vec![0]]);
        assert_eq!(taken(&queues[1..2], 6), [const { Vec::<usize>::new() }; 3]);
        assert!(Takers::of(queues[1..2].iter(), 6).is_empty());
    }
}
