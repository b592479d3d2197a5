//! Dirty logs of running guests, as a migration uses them: the pages that they name, copied round by round, are all
//! written pages.

use crate::support::{
    KINDS, LONG, PAGE, SerialOutput, all_pages, busy, config, copy, filled, goes_on_well, machine, move_state, page,
    read,
};
use sterna::{DirtyLog, PageBitmap};
use sterna_microvm::{Execution, Machine, Pattern, Tracking, Workload};

/// Copies the pages written since the last call, and returns their number.
fn round(log: &mut dyn DirtyLog, from: &Machine, to: &Machine) -> u64 {
    let mut copied = 0;
    for (block, ram) in from.blocks().iter().enumerate() {
        let mut dirty = PageBitmap::new(ram.bytes() / PAGE as u64);
        log.collect(block, &mut dirty).unwrap();
        dirty.for_each_run(|run| copy(from, to, run.map(|page| (block, page))));
        copied += dirty.count();
    }
    copied
}

/// Moves a running guest.
fn live_move(source: &Machine, destination: &Machine, rounds: u64) {
    let what = source.description();
    let mut log = source.take_dirty_log().unwrap();
    log.start().unwrap();
    copy(source, destination, all_pages(source));
    for _ in 0..rounds {
        let written = source.report().written();
        source.wait_until(LONG, |now| now.written() > written + 200).unwrap();
        assert!(round(&mut *log, source, destination) > 0, "{what}");
    }
    source.throttle(90);
    round(&mut *log, source, destination);
    source.pause().unwrap();
    round(&mut *log, source, destination);
    assert_eq!(round(&mut *log, source, destination), 0, "{what}: named although the guest is paused");
    log.stop().unwrap();
    let differ = |place: &(usize, u64)| read(page(source, *place)) != read(page(destination, *place));
    let differing: Vec<_> = all_pages(source).filter(differ).collect();
    assert!(differing.is_empty(), "{what}: written and not named: {differing:?}");
    move_state(source, destination);
}

#[test]
fn no_write_of_a_running_guest_is_missed_and_the_guest_agrees() {
    for kind in KINDS {
        for vcpus in [1, 2, 4] {
            let config = config(kind, vcpus, Workload { pattern: Pattern::Hot, ..busy() });
            let Some(mut source) = filled(&config, &SerialOutput::default()) else { continue };
            // Twice, so that a machine that received a guest also sends it.
            for _ in 0..2 {
                let destination = machine(&config, &SerialOutput::default()).unwrap();
                live_move(&source, &destination, 20);
                let before = source.report();
                drop(source);
                destination.resume().unwrap();
                goes_on_well(&destination, &before, destination.description());
                source = destination;
            }
        }
    }
}

#[test]
fn only_what_is_written_is_named() {
    for kind in KINDS {
        let workload = Workload { span: 10, ..busy() };
        let Some(machine) = filled(&config(kind, 1, workload), &SerialOutput::default()) else { continue };
        let mut log = machine.take_dirty_log().unwrap();
        log.start().unwrap();
        let written = machine.report().written();
        machine.wait_until(LONG, |now| now.written() > written + 5000).unwrap();
        machine.pause().unwrap();
        let mut named = 0;
        for (block, ram) in machine.blocks().iter().enumerate() {
            let mut dirty = PageBitmap::new(ram.bytes() / PAGE as u64);
            log.collect(block, &mut dirty).unwrap();
            named += dirty.count();
        }
        // A tenth of 10 MiB is 256 pages; the guest uses the rest for itself, and (on KVM) reads it for the first time.
        assert!((200..1000).contains(&named), "{named}: {}", machine.description());
    }
}

#[test]
fn a_log_outlives_its_machine() {
    for kind in KINDS {
        let Some(machine) = filled(&config(kind, 2, busy()), &SerialOutput::default()) else { continue };
        let pages = machine.blocks()[0].bytes() / PAGE as u64;
        let mut log = machine.take_dirty_log().unwrap();
        log.start().unwrap();
        drop(machine);
        log.collect(0, &mut PageBitmap::new(pages)).unwrap();
        log.stop().unwrap();
    }
}

/// A failed migration: the guest stays, and can be moved later.
#[test]
fn a_guest_whose_move_failed_continues_and_moves_later() {
    for kind in KINDS.into_iter().chain([(Execution::Auto, Tracking::WriteProtect)]) {
        let config = config(kind, 2, busy());
        let Some(source) = filled(&config, &SerialOutput::default()) else { continue };
        let mut log = source.take_dirty_log().unwrap();
        for _ in 0..3 {
            let destination = machine(&config, &SerialOutput::default()).unwrap();
            log.start().unwrap();
            copy(&source, &destination, all_pages(&source));
            round(&mut *log, &source, &destination);
            source.pause().unwrap();
            move_state(&source, &destination);
            drop(destination);
            log.stop().unwrap();
            let before = source.report();
            source.resume().unwrap();
            goes_on_well(&source, &before, source.description());
        }
    }
}
