//! Settings that change while rounds are made, and the time left.

use super::*;

/// A guest that dirties a fifth of its link's rate, with a large working set.
fn converging() -> Simulation {
    Simulation::new(4096 * MIB, 20e6, 2048 * MIB, 100e6, NotConverging::GoOn)
}

/// A guest that misses 300 ms for ever, after enough rounds that this is known.
fn not_converging() -> Simulation {
    let mut simulation = Simulation::new(4096 * MIB, 500e6, 60 * MIB, 118e6, NotConverging::GoOn);
    while simulation.convergence.verdict().is_none() {
        assert_eq!(simulation.round(true), Decision::Next);
    }
    simulation
}

#[test]
fn a_longer_target_downtime_ends_rounds_that_would_go_on_for_ever() {
    let mut simulation = not_converging();
    simulation.convergence.set_downtime(Duration::from_secs(2));
    assert!(simulation.convergence.verdict().is_none(), "it was about another target");
    assert_eq!(simulation.round(true), Decision::SwitchOver);
}

#[test]
fn a_shorter_target_downtime_keeps_a_guest_that_would_have_been_stopped() {
    let at_once = |downtime: Duration| {
        let mut simulation = Simulation::new(100 * MIB, 30e6, 2048 * MIB, 40e6, NotConverging::GoOn);
        simulation.round(true);
        simulation.at.remaining = 8 * MIB;
        simulation.convergence.set_downtime(downtime);
        simulation.convergence.fits(&simulation.at)
    };
    assert_eq!((at_once(Duration::from_millis(300)), at_once(Duration::from_millis(100))), (true, false));
}

#[test]
fn after_another_bandwidth_limit_no_guest_is_stopped_before_the_speed_was_measured_again() {
    let mut simulation = converging();
    simulation.round(true);
    simulation.at.remaining = MIB;
    assert!(simulation.convergence.fits(&simulation.at));
    simulation.convergence.measure_anew(&simulation.at);
    assert!(!simulation.convergence.fits(&simulation.at) && simulation.convergence.predicted(&simulation.at).is_none());
    // A link of an eighth of the rate: with the old one 15 MiB would fit.
    simulation.link = 12.5e6;
    simulation.at.remaining = 15 * MIB;
    simulation.dirty_rate = 12e6;
    assert_eq!(simulation.round(true), Decision::Next);
    let drain = simulation.convergence.rates().drain;
    assert!((drain / 12.5e6 - 1.0).abs() < 0.05, "{drain}");
}

#[test]
fn the_time_left_is_about_what_the_rounds_then_take() {
    let mut simulation = converging();
    simulation.round(true);
    let (estimated, begun) = (simulation.convergence.time_left(&simulation.at).unwrap(), simulation.at.now);
    simulation.until_it_ends();
    let real = simulation.at.now - begun + simulation.convergence.predicted(&simulation.at).unwrap();
    let ratio = estimated.as_secs_f64() / real.as_secs_f64();
    assert!((0.7..=1.4).contains(&ratio), "{estimated:?} were estimated, {real:?} it took");
}

#[test]
fn a_guest_that_could_be_stopped_now_has_its_downtime_left() {
    let mut simulation = converging();
    simulation.until_it_ends();
    let at = simulation.at;
    assert_eq!(simulation.convergence.time_left(&at), simulation.convergence.predicted(&at));
}

#[test]
fn no_time_left_is_estimated_where_rounds_do_not_converge_or_nothing_was_measured() {
    let simulation = not_converging();
    assert_eq!(simulation.convergence.time_left(&simulation.at), None);
    let fresh = converging();
    assert_eq!(fresh.convergence.time_left(&fresh.at), None);
}
