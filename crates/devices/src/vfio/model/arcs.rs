//! The state machine of the header: its single steps as a table, and the paths composed of them.

use super::super::device::{Flags, State};
use State::{PreCopy, PreCopyP2p, Resuming, Running, RunningP2p, Stop, StopCopy};

/// The features that a device must have for a step to exist.
#[derive(Clone, Copy, PartialEq, Eq)]
enum If {
    Always,
    /// P2P splits the step between RUNNING and STOP in two.
    NoP2p,
    P2p,
    PreCopy,
    PreCopyNoP2p,
    PreCopyP2p,
}

/// The steps that a driver implements. Each is an entry of the header's list; a step with `NoP2p` stands for two
/// entries whose intermediate state is not offered ("behave as though the device was fully running").
const STEPS: [(State, State, If); 18] = [
    (Stop, StopCopy, If::Always),
    (StopCopy, Stop, If::Always),
    (Stop, Resuming, If::Always),
    (Resuming, Stop, If::Always),
    (Running, Stop, If::NoP2p),
    (Stop, Running, If::NoP2p),
    (Running, RunningP2p, If::P2p),
    (RunningP2p, Running, If::P2p),
    (RunningP2p, Stop, If::P2p),
    (Stop, RunningP2p, If::P2p),
    (Running, PreCopy, If::PreCopy),
    (PreCopy, Running, If::PreCopy),
    (PreCopy, StopCopy, If::PreCopyNoP2p),
    (RunningP2p, PreCopyP2p, If::PreCopyP2p),
    (PreCopyP2p, RunningP2p, If::PreCopyP2p),
    (PreCopy, PreCopyP2p, If::PreCopyP2p),
    (PreCopyP2p, PreCopy, If::PreCopyP2p),
    (PreCopyP2p, StopCopy, If::PreCopyP2p),
];

fn holds(condition: If, flags: Flags) -> bool {
    let (p2p, pre_copy) = (flags.p2p(), flags.pre_copy());
    match condition {
        If::Always => true,
        If::NoP2p => !p2p,
        If::P2p => p2p,
        If::PreCopy => pre_copy,
        If::PreCopyNoP2p => pre_copy && !p2p,
        If::PreCopyP2p => pre_copy && p2p,
    }
}

/// Returns whether a driver with these flags implements this step.
pub fn is_step(flags: Flags, from: State, to: State) -> bool {
    STEPS.iter().any(|(a, b, condition)| (*a, *b) == (from, to) && holds(*condition, flags))
}

/// Returns whether a state is in the "saving group", whose states share a stream.
pub fn saves(state: State) -> bool {
    matches!(state, PreCopy | PreCopyP2p | StopCopy)
}

/// Returns whether the step begins a stream.
pub fn begins_stream(from: State, to: State) -> bool {
    (saves(to) && !saves(from)) || to == Resuming
}

/// Returns whether the step ends a stream.
pub fn ends_stream(from: State, to: State) -> bool {
    (saves(from) && !saves(to)) || from == Resuming
}

/// Returns the path from one state to another, without the first: empty if both are the same. `None`: the kernel
/// refuses with `EINVAL`.
///
/// This is the shortest path on which a state of the saving group is only between states of the saving group: otherwise
/// a stream would begin and end unnoticed. No path leads from STOP_COPY to PRE_COPY or PRE_COPY_P2P, none leads to
/// ERROR, and none leads out of ERROR. Never request the two transitions from STOP_COPY of a kernel: Linux 6.12 has
/// them in its table, as the header requires, but `vfio_mig_get_next_state` then steps from ERROR to ERROR for ever, in
/// the kernel.
pub fn path(flags: Flags, from: State, to: State) -> Option<Vec<State>> {
    let refused = [from, to].iter().any(|state| *state == State::Error || !state.offered(flags));
    if refused || (from == StopCopy && matches!(to, PreCopy | PreCopyP2p)) {
        return None;
    }
    let inside = |state: State| state == to || !saves(state) || (saves(from) && saves(to));
    let mut ways = vec![vec![from]];
    let mut seen = vec![from];
    while !ways.is_empty() {
        if let Some(found) = ways.iter().find(|way| way.last() == Some(&to)) {
            return Some(found[1..].to_vec());
        }
        let mut longer = Vec::new();
        for way in &ways {
            let last = way[way.len() - 1];
            let next = State::ALL.into_iter().filter(|next| is_step(flags, last, *next) && inside(*next));
            for next in next.filter(|next| !seen.contains(next)) {
                let mut way = way.clone();
                way.push(next);
                longer.push(way);
            }
        }
        seen.extend(longer.iter().map(|way| way[way.len() - 1]));
        ways = longer;
    }
    None
}
