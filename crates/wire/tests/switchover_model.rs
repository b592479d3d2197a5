//! Explores the switchover exhaustively: the production machines of both sides, driven as the gateway drives them in stream mode
//! as the library drives a QEMU from outside in direct mode, and in post-copy, between a model of two QEMUs, two disks, a network and an operator, with every crash, loss and failure at every step.
//!
//! The gate has what takes a minute in all; the module `soak` has the full size (`make soak`).
//!
//! What must hold is in `properties.rs`. That the check can fail at all is shown by `Mutant`: drivers that are wrong in one
//! plausible way each, every one of which must be caught.

#[path = "switchover_model/drivers.rs"]
mod drivers;
#[path = "switchover_model/possible.rs"]
mod possible;
#[path = "switchover_model/properties.rs"]
mod properties;
#[path = "switchover_model/state.rs"]
mod state;
#[path = "switchover_model/world.rs"]
mod world;

use properties::{DIRECT_MUTANTS, MUTANTS, Mutant, POST_COPY_MUTANTS, RESUMING_MUTANTS};
use state::{Budget, Mode, State};
use stateright::{Checker, HasDiscoveries, Model};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::time::Instant;
use sterna_wire::switchover::CrashPoint;
use world::{Happens, World};

/// Every kind of trouble.
const ANY: Budget = Budget {
    total: 3,
    crashes: 2,
    losses: 2,
    failures: 2,
    cancels: 1,
    qemu_failures: 1,
    qemu_deaths: 1,
    strangers: 1,
    hosts: 1,
    stale_recovers: 1,
    silent_devices: 1,
};

/// Only what `sterna` and the network do.
const CRASHES_AND_LOSSES: Budget = Budget {
    total: 5,
    failures: 0,
    cancels: 0,
    qemu_failures: 0,
    qemu_deaths: 0,
    strangers: 0,
    hosts: 0,
    silent_devices: 0,
    ..ANY
};

fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

/// Every step of `budget`'s worth of trouble; returns the crash points passed.
fn explore(name: &str, mode: Mode, budget: Budget) -> HashSet<CrashPoint> {
    explore_world(name, World::new(mode, budget, Mutant::None))
}

/// As [`explore`], where so many pages are missing when the guest is started.
fn explore_post_copy(name: &str, pages: u8, budget: Budget) -> HashSet<CrashPoint> {
    explore_world(name, World { pages, ..World::new(Mode::PostCopy, budget, Mutant::None) })
}

/// As [`explore`], directly, where a lost connection only interrupts the migration while the guest runs.
fn explore_resuming(name: &str, budget: Budget) {
    explore_world(name, World { resumes: true, ..World::new(Mode::Direct, budget, Mutant::None) });
}

fn explore_world(name: &str, world: World) -> HashSet<CrashPoint> {
    let begun = Instant::now();
    let checker = world.checker().threads(threads()).spawn_bfs().join();
    println!(
        "{name}: {} states, {} steps, longest history {}, {:.1} s",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        begun.elapsed().as_secs_f64()
    );
    checker.assert_properties();
    checker.model().passed()
}

#[test]
fn three_crashes_or_lost_connections() {
    explore("three crashes or lost connections", Mode::Stream, Budget { total: 3, ..CRASHES_AND_LOSSES });
}

#[test]
fn three_crashes_or_lost_connections_directly() {
    explore("three crashes or lost connections, directly", Mode::Direct, Budget { total: 3, ..CRASHES_AND_LOSSES });
}

#[test]
fn any_two_troubles() {
    let passed = explore("any two troubles", Mode::Stream, Budget { total: 2, ..ANY });
    for point in CrashPoint::ALL {
        assert!(passed.contains(point), "the model never comes past {point}");
    }
}

/// In direct mode. With somebody else who pauses and resumes the guest the states have no end: that is explored as far as the wrong
/// drivers are looked for (`wrong_drivers_are_caught`).
#[test]
fn any_two_troubles_directly() {
    explore("any two troubles, directly", Mode::Direct, Budget { total: 2, strangers: 0, ..ANY });
}

#[test]
fn three_crashes_or_lost_connections_with_resuming() {
    explore_resuming("three crashes or lost connections, with resuming", Budget { total: 3, ..CRASHES_AND_LOSSES });
}

#[test]
fn any_two_troubles_with_resuming() {
    explore_resuming("any two troubles, with resuming", Budget { total: 2, strangers: 0, ..ANY });
}

#[test]
fn any_two_troubles_in_post_copy() {
    let budget = Budget { total: 2, qemu_failures: 0, strangers: 0, silent_devices: 0, ..ANY };
    let passed = explore_post_copy("any two troubles, in post-copy", 1, budget);
    for point in CrashPoint::POST_COPY {
        assert!(passed.contains(point), "the model never comes past {point}");
    }
}

#[test]
fn crashes_and_lost_connections_in_post_copy() {
    explore_post_copy("two, with two pages, in post-copy", 2, Budget { total: 2, ..CRASHES_AND_LOSSES });
}

/// Without further trouble every history ends: no step that is not trouble lies on a circle. Together with the property
/// of the states in which nothing is left to do this says: in the end exactly one guest runs.
#[test]
fn every_history_ends() {
    let resuming =
        World { resumes: true, ..World::new(Mode::Direct, Budget { total: 2, ..CRASHES_AND_LOSSES }, Mutant::None) };
    assert!(without_circles(&resuming) > 1000);
    every_history_ends_with(&[
        (Mode::Stream, &[Budget { total: 3, ..CRASHES_AND_LOSSES }, Budget { total: 2, ..ANY }]),
        (Mode::Direct, &[Budget { total: 2, ..CRASHES_AND_LOSSES }, Budget { total: 1, strangers: 0, ..ANY }]),
        (Mode::PostCopy, &[Budget { total: 2, ..CRASHES_AND_LOSSES }, Budget { total: 1, strangers: 0, ..ANY }]),
    ]);
}

fn every_history_ends_with(modes: &[(Mode, &[Budget])]) {
    for (mode, budgets) in modes.iter().copied() {
        for only in budgets {
            let states = without_circles(&World::new(mode, only.clone(), Mutant::None));
            println!("{mode:?}: {states} states and no circle: {only:?}");
            assert!(states > 1000);
        }
    }
}

/// Depth first along ordinary steps, from the beginning and from every state that trouble leads to. Panics at a state
/// that lies on the path to itself.
fn without_circles(world: &World) -> usize {
    let hasher = RandomState::new();
    // Whether a state is still on the path.
    let mut on_path: HashMap<u64, bool> = HashMap::new();
    let mut roots = world.init_states();
    let mut path: Vec<(u64, Vec<State>)> = Vec::new();
    loop {
        let state = match path.last_mut() {
            Some((key, next)) => match next.pop() {
                Some(state) => state,
                None => {
                    on_path.insert(*key, false);
                    path.pop();
                    continue;
                }
            },
            None => match roots.pop() {
                Some(state) => state,
                None => return on_path.len(),
            },
        };
        let key = hasher.hash_one(&state);
        match on_path.get(&key) {
            Some(true) => panic!("a circle of ordinary steps through {state:?}"),
            Some(false) => continue,
            None => on_path.insert(key, true),
        };
        let mut actions = Vec::new();
        world.actions(&state, &mut actions);
        let (trouble, ordinary): (Vec<_>, Vec<_>) = actions.into_iter().partition(Happens::trouble);
        roots.extend(trouble.into_iter().filter_map(|action| world.next_state(&state, action)));
        path.push((key, ordinary.into_iter().filter_map(|action| world.next_state(&state, action)).collect()));
    }
}

#[test]
fn wrong_drivers_are_caught() {
    let budget = Budget { total: 2, crashes: 1, qemu_deaths: 0, hosts: 0, cancels: 0, stale_recovers: 0, ..ANY };
    let of_mode = |mode, resumes, mutants: &'static [_]| mutants.iter().map(move |mutant| (mode, resumes, mutant));
    let stream = of_mode(Mode::Stream, false, MUTANTS).chain(of_mode(Mode::Direct, false, DIRECT_MUTANTS));
    let others = of_mode(Mode::Direct, true, RESUMING_MUTANTS).chain(of_mode(Mode::PostCopy, false, POST_COPY_MUTANTS));
    for (mode, resumes, &(mutant, property)) in stream.chain(others) {
        let begun = Instant::now();
        let caught = HasDiscoveries::AnyOf(BTreeSet::from([property]));
        let total = match mode {
            // Without a lock nothing else need go wrong, and there is much more to explore.
            _ if mutant == Mutant::NoLock => 0,
            Mode::PostCopy => 1,
            Mode::Stream | Mode::Direct => budget.total,
        };
        let checker = World { resumes, ..World::new(mode, Budget { total, ..budget.clone() }, mutant) }
            .checker()
            .threads(threads())
            .finish_when(caught)
            .spawn_bfs()
            .join();
        let path =
            checker.discovery(property).unwrap_or_else(|| panic!("{mutant:?} is not caught ({mode:?}): {property}"));
        let steps = path.into_actions();
        let seconds = begun.elapsed().as_secs_f64();
        println!(
            "{mode:?}, {mutant:?}: broken after {} steps, found in {seconds:.1} s: {property}\n    {steps:?}",
            steps.len()
        );
    }
}

/// What takes minutes.
mod soak {
    use super::*;

    #[test]
    fn any_three_troubles() {
        explore("any three troubles", Mode::Stream, ANY);
    }

    #[test]
    fn two_crashes_and_two_lost_connections() {
        explore("two crashes, two lost connections, a recover too many", Mode::Stream, CRASHES_AND_LOSSES);
    }

    #[test]
    fn four_troubles() {
        explore(
            "four troubles",
            Mode::Stream,
            Budget { total: 4, hosts: 0, stale_recovers: 0, cancels: 0, qemu_failures: 0, silent_devices: 0, ..ANY },
        );
    }

    #[test]
    fn three_crashes_or_lost_connections_in_post_copy() {
        explore_post_copy("three, with one page, in post-copy", 1, Budget { total: 3, ..CRASHES_AND_LOSSES });
    }

    #[test]
    fn every_longer_history_ends() {
        every_history_ends_with(&[
            (Mode::Stream, &[CRASHES_AND_LOSSES]),
            (Mode::Direct, &[Budget { total: 3, ..CRASHES_AND_LOSSES }]),
        ]);
    }
}
