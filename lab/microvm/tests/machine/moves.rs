//! Guests that continue in another machine.

use crate::support::{
    FILLS, KINDS, LONG, PATTERNS, SerialOutput, all_pages, busy, config, copy, filled, goes_on_well, machine,
    move_state,
};
use sterna_microvm::{Backing, BlockConfig, Config, Error, Execution, Tracking, Workload};
use sterna_test_kit::Random;

#[test]
fn a_guest_goes_on_in_a_second_machine_and_back_and_forth() {
    for (turn, kind) in KINDS.into_iter().enumerate() {
        for vcpus in [1, 2, 4] {
            let config = config(kind, vcpus, Workload { pattern: PATTERNS[turn % 3], ..busy() });
            let Some(mut source) = filled(&config, &SerialOutput::default()) else { continue };
            for hop in 0..6 {
                let what = format!("{}, hop {hop}", source.description());
                source.pause().unwrap();
                let (before, clock) = (source.report(), source.clock());
                let destination = machine(&config, &SerialOutput::default()).unwrap();
                move_state(&source, &destination);
                copy(&source, &destination, all_pages(&source));
                drop(source);
                assert_eq!((destination.report(), destination.clock()), (before.clone(), clock), "{what}");
                destination.resume().unwrap();
                let after = goes_on_well(&destination, &before, &what);
                assert!(after.written() > before.written(), "{what}: {after}");
                source = destination;
            }
        }
    }
}

#[test]
fn every_kind_of_content_and_every_pattern_moves() {
    for kind in [KINDS[0], KINDS[1]] {
        for (turn, fill) in FILLS.into_iter().enumerate() {
            let workload = Workload { fill, pattern: PATTERNS[turn % 3], whole: turn % 2 == 0, span: 40, ..busy() };
            let Some(source) = filled(&config(kind, 2, workload), &SerialOutput::default()) else { continue };
            source.wait_until(LONG, |now| now.written() > 2000).unwrap();
            source.pause().unwrap();
            let before = source.report();
            // What the guest does comes with its state.
            let destination = machine(&config(kind, 2, Workload::default()), &SerialOutput::default()).unwrap();
            copy(&source, &destination, all_pages(&source));
            move_state(&source, &destination);
            destination.resume().unwrap();
            goes_on_well(&destination, &before, &format!("{fill:?}"));
        }
    }
}

#[test]
fn lines_on_the_serial_port_go_on_where_they_were_cut_off() {
    for kind in KINDS {
        let (output, output_after) = (SerialOutput::default(), SerialOutput::default());
        let talkative = config(kind, 2, Workload { say_every: 1, ..busy() });
        let Some(source) = filled(&talkative, &output) else { continue };
        source.wait_until(LONG, |_| output.text().lines().count() > 20).unwrap();
        source.pause().unwrap();
        let destination = machine(&talkative, &output_after).unwrap();
        move_state(&source, &destination);
        copy(&source, &destination, all_pages(&source));
        drop(source);
        destination.resume().unwrap();
        destination.wait_until(LONG, |_| output_after.text().lines().count() > 20).unwrap();
        // Whole lines of both ends, without the ones that were cut; times go on.
        let milliseconds = |text: &str, vcpu: usize| -> Vec<u64> {
            let lines = text.lines().filter_map(|line| line.strip_prefix(&format!("vcpu {vcpu}: ms=")));
            lines.filter_map(|line| line.split_once(' ')?.0.parse().ok()).collect()
        };
        for vcpu in 0..2 {
            let mut times = milliseconds(&output.text(), vcpu);
            times.extend(milliseconds(&output_after.text(), vcpu));
            assert!(times.is_sorted(), "{times:?}");
        }
    }
}

#[test]
fn memory_of_every_backing_moves_into_every_other() {
    // Of the two machines at a time, and then some.
    let huge_pages = sterna_qemu_lab::huge::HugePages::reserve(32 << 20);
    if let Err(error) = &huge_pages {
        println!("skipped for hugetlb: {error}");
    }
    let backings = [Backing::Anonymous, Backing::AnonymousHuge, Backing::Memfd, Backing::HugeTlb];
    let with = |backing| Config {
        blocks: vec![BlockConfig { name: "ram".to_owned(), bytes: 8 << 20, backing }],
        ..config((Execution::Auto, Tracking::WriteProtect), 2, busy())
    };
    for (index, backing) in backings.into_iter().enumerate() {
        let made = |backing| {
            let to_be_had = backing != Backing::HugeTlb || huge_pages.is_ok();
            to_be_had.then(|| sterna_microvm::Machine::new(&with(backing), Box::new(SerialOutput::default())).unwrap())
        };
        let Some(source) = made(backing) else { continue };
        let Some(destination) = made(backings[(index + 1) % backings.len()]) else { continue };
        assert_eq!(source.blocks()[0].file().is_some(), matches!(backing, Backing::Memfd | Backing::HugeTlb));
        source.boot().unwrap();
        source.resume().unwrap();
        source.wait_until(LONG, |now| now.written() > 1000).unwrap();
        source.pause().unwrap();
        let before = source.report();
        move_state(&source, &destination);
        copy(&source, &destination, all_pages(&source));
        destination.resume().unwrap();
        goes_on_well(&destination, &before, &format!("{backing:?}"));
    }
}

#[test]
fn states_of_other_machines_are_refused_and_leave_the_machine_as_it_was() {
    for kind in [KINDS[0], KINDS[1]] {
        let config_2 = config(kind, 2, busy());
        let Some(source) = filled(&config_2, &SerialOutput::default()) else { continue };
        source.pause().unwrap();
        let mut state = Vec::new();
        source.save(&mut state).unwrap();
        let mut other_blocks = config_2.clone();
        other_blocks.blocks[1].name = "other".to_owned();
        let mut other_sizes = config_2.clone();
        other_sizes.blocks[1].bytes *= 2;
        for (other, words) in [
            (config(kind, 3, busy()), "it is of 2 vCPUs, this machine has 3"),
            (other_blocks, "it is of RAM blocks"),
            (other_sizes, "it is of RAM blocks"),
        ] {
            let destination = machine(&other, &SerialOutput::default()).unwrap();
            let error = destination.load(&mut state.as_slice()).unwrap_err();
            assert!(matches!(error, Error::State(_)) && error.to_string().contains(words), "{error}");
            destination.boot().unwrap();
        }
        let kinds = [KINDS[0], KINDS[1]];
        let other = kinds.into_iter().find(|other| other.0 != kind.0).unwrap();
        let Some(destination) = machine(&config(other, 2, busy()), &SerialOutput::default()) else { continue };
        let error = destination.load(&mut state.as_slice()).unwrap_err().to_string();
        assert!(error.contains("it is of a machine that runs"), "{error}");
    }
}

/// Changes each byte of a state: the machine accepts it, or refuses it with the reason, and is not damaged.
#[test]
fn damaged_states_are_accepted_or_refused() {
    for kind in [KINDS[0], KINDS[1]] {
        let config = config(kind, 1, busy());
        let Some(source) = filled(&config, &SerialOutput::default()) else { continue };
        source.pause().unwrap();
        let mut state = Vec::new();
        source.save(&mut state).unwrap();
        let seed = 0x5EED_0007;
        let mut random = Random::new(seed);
        for case in 0..200 {
            let mut damaged = state.clone();
            for _ in 0..1 + random.next_u64() % 3 {
                let at = random.next_u64() as usize % damaged.len();
                damaged[at] = b"0123456789[],{}\"x"[random.next_u64() as usize % 17];
            }
            damaged.truncate(if case % 10 == 0 { random.next_u64() as usize % damaged.len() } else { damaged.len() });
            let destination = machine(&config, &SerialOutput::default()).unwrap();
            if destination.load(&mut damaged.as_slice()).is_ok() {
                copy(&source, &destination, all_pages(&source));
                // Whatever the guest makes of it, the machine obeys.
                destination.resume().unwrap_or_else(|error| panic!("seed {seed:x}, case {case}: {error}"));
                let _ = destination.pause();
            }
        }
    }
}
