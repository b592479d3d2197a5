//! Machines that are not moved.

use crate::support::{KINDS, LONG, PAGE, SerialOutput, busy, config, filled, goes_on_well, machine, page, write};
use std::time::Duration;
use sterna_microvm::{Error, Execution, Fill, Rate, Tracking, Workload};

#[test]
fn guests_fill_write_and_verify_their_memory_with_any_number_of_vcpus() {
    for kind in KINDS {
        for vcpus in [1, 2, 3, 4] {
            let output = SerialOutput::default();
            let Some(machine) = filled(&config(kind, vcpus, busy()), &output) else { continue };
            let start = machine.report();
            let report = goes_on_well(&machine, &start, machine.description());
            assert!(report.written() > start.written() && report.steps() > start.steps());
            // 10 MiB without payload, page tables, stacks and tables.
            assert!((2200..2560).contains(&report.pages()), "{report}");
            assert_eq!(output.text(), "");
        }
    }
}

#[test]
fn guests_say_how_far_they_are_each_vcpu_in_lines_of_its_own() {
    for kind in KINDS {
        let output = SerialOutput::default();
        let workload = Workload { say_every: 1_000_000, ..busy() };
        let Some(machine) = filled(&config(kind, 3, workload), &output) else { continue };
        machine.wait_until(LONG, |_| output.text().lines().count() > 100).unwrap();
        drop(machine);
        let text = output.text();
        let last = text.lines().count() - 3;
        for line in text.lines().take(last) {
            let of_vcpu = (0..3).any(|vcpu| line.starts_with(&format!("vcpu {vcpu}: ms=")));
            assert!(of_vcpu && line.ends_with(" bad=0"), "{line}");
        }
    }
}

#[test]
fn a_guest_with_nothing_to_do_is_alive_and_rates_can_be_changed() {
    for kind in KINDS {
        let idle = Workload { write: Rate::PagesPerSecond(0), check: Rate::PagesPerSecond(0), ..busy() };
        let Some(machine) = filled(&config(kind, 2, idle), &SerialOutput::default()) else { continue };
        let start = machine.report();
        let report = machine.wait_until(LONG, |now| now.steps() > start.steps() + 20).unwrap();
        assert_eq!((report.written(), report.checked()), (0, 0));
        machine.set_write_rate(Rate::PagesPerSecond(3000));
        let report = machine.wait_until(LONG, |now| now.written() > 500).unwrap();
        assert_eq!(report.checked(), 0);
        machine.set_check_rate(Rate::Unlimited);
        goes_on_well(&machine, &report, machine.description());
    }
}

#[test]
fn a_rate_is_kept_in_the_guests_own_time() {
    for kind in [KINDS[0], KINDS[1]] {
        let slow = Workload { write: Rate::PagesPerSecond(2000), check: Rate::PagesPerSecond(0), ..busy() };
        let Some(machine) = filled(&config(kind, 2, slow), &SerialOutput::default()) else { continue };
        let (start, before) = (machine.clock(), machine.report().written());
        let report = machine.wait_until(LONG, |now| now.written() >= before + 2000).unwrap();
        let seconds = (machine.clock() - start).as_secs_f64();
        // Never more than was due is written; less is, if other processes use the processors. At the start, what was due in 200 ms may have been
        // ordered, and what was due in another 200 ms be owed.
        let most = 2000.0 * (seconds + 0.4) + 300.0;
        assert!(((report.written() - before) as f64) < most, "{} in {seconds} s", report.written() - before);
    }
}

#[test]
fn a_paused_guest_changes_nothing_and_goes_on_when_resumed() {
    for kind in KINDS {
        let Some(machine) = filled(&config(kind, 4, busy()), &SerialOutput::default()) else { continue };
        for _ in 0..100 {
            machine.pause().unwrap();
            let (report, clock) = (machine.report(), machine.clock());
            let states = [(); 2].map(|()| {
                let mut state = Vec::new();
                machine.save(&mut state).unwrap();
                let mut state: serde_json::Value = serde_json::from_slice(&state[16..]).unwrap();
                // Among the model specific registers is the time stamp, which runs on.
                for vcpu in state["vcpus"].as_array_mut().unwrap() {
                    vcpu.get_mut("Kvm").map(|kvm| kvm["msrs"].take());
                }
                state
            });
            assert!(states[0] == states[1], "the state of a paused guest changes");
            assert_eq!((machine.report(), machine.clock()), (report.clone(), clock));
            machine.resume().unwrap();
            machine.wait_until(LONG, |now| now.steps() > report.steps() + 1).unwrap();
        }
        let since = machine.report();
        goes_on_well(&machine, &since, machine.description());
    }
}

#[test]
fn a_guest_that_never_leaves_by_itself_is_paused_and_throttled_all_the_same() {
    let Some(machine) = filled(&config(KINDS[1], 4, busy()), &SerialOutput::default()) else { return };
    machine.pause().unwrap();
    // Instead of the payload, which block 0 begins with: nothing (nop), and a jump to itself at the end of each page.
    let mut code = [0x9090_9090_9090_9090; PAGE / 8];
    code[PAGE / 8 - 1] = 0xFEEB_9090_9090_9090;
    for number in 0..20 {
        write(page(&machine, (0, number)), &code);
    }
    let steps = machine.report().steps();
    for turn in 0..100u64 {
        machine.throttle(if turn % 4 == 3 { 60 } else { 0 });
        machine.resume().unwrap();
        // Some are paused at once, some after a while; nothing else shows how long they have run.
        let end = machine.clock() + Duration::from_micros(turn * 50);
        while machine.clock() < end {
            std::hint::spin_loop();
        }
        machine.pause().unwrap();
    }
    assert_eq!(machine.report().steps(), steps);
}

#[test]
fn throttled_guests_go_on_and_can_be_paused() {
    for kind in [KINDS[0], KINDS[1], KINDS[3]] {
        let Some(machine) = filled(&config(kind, 1, busy()), &SerialOutput::default()) else { continue };
        for percent in [95, 99, 0] {
            machine.throttle(percent);
            let written = machine.report().written();
            machine.wait_until(LONG, |now| now.written() > written + 1000).unwrap();
            machine.pause().unwrap();
            machine.resume().unwrap();
        }
        let since = machine.report();
        goes_on_well(&machine, &since, machine.description());
    }
}

#[test]
fn without_kvm_threads_do_the_work_and_the_machine_says_so() {
    let machine = machine(&config(KINDS[0], 2, busy()), &SerialOutput::default()).unwrap();
    assert!(!machine.is_on_kvm());
    assert!(machine.description().contains("no KVM"), "{}", machine.description());
    assert!(!machine.description().contains('\n'));
    let error = sterna_microvm::Machine::new(
        &config((Execution::Threads, Tracking::Log), 1, busy()),
        Box::new(SerialOutput::default()),
    );
    assert!(matches!(error.map(drop), Err(Error::Config(_))));
}

#[test]
fn operations_in_the_wrong_order_are_refused_with_the_reason() {
    for kind in [KINDS[0], KINDS[1]] {
        let Some(machine) =
            machine(&config(kind, 1, Workload { fill: Fill::Ones, ..busy() }), &SerialOutput::default())
        else {
            continue;
        };
        assert!(matches!(machine.resume(), Err(Error::Order(_))));
        assert!(matches!(machine.save(&mut Vec::new()), Err(Error::Order(_))));
        machine.pause().unwrap();
        machine.boot().unwrap();
        assert!(matches!(machine.boot(), Err(Error::Order(_))));
        machine.resume().unwrap();
        assert!(matches!(machine.save(&mut Vec::new()), Err(Error::Order(_))));
        assert!(matches!(machine.load(&mut [].as_slice()), Err(Error::Order(_))));
        assert!(machine.take_dirty_log().is_some());
        assert!(machine.take_dirty_log().is_none());
        let late = machine.wait_until(Duration::from_millis(1), |_| false).unwrap_err();
        assert!(late.to_string().contains("pages filled"), "{late}");
    }
}
