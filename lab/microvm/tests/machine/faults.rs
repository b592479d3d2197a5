//! Guests notice memory that was damaged in a move. Without this, the other tests would prove nothing.

use crate::support::{
    FILLS, KINDS, LONG, PAGE, SerialOutput, all_pages, busy, config, copy, filled, machine, move_state, page, read,
    verifying, write,
};
use sterna_microvm::{Bad, Config, Error, Execution, Fault, Fill, Machine, Rate, Report, Tracking, Workload};

const BOTH: [(Execution, Tracking); 2] = [KINDS[0], KINDS[2]];

/// Pauses a guest that neither writes nor verifies a page just then: one that has been read in part would be found damaged in another way.
fn pause_between_steps(machine: &Machine) {
    machine.set_write_rate(Rate::PagesPerSecond(0));
    machine.set_check_rate(Rate::PagesPerSecond(0));
    // Orders given before the rates changed are done.
    let before = machine.report();
    machine.wait_until(LONG, |now| now.steps_since(&before) > 2).unwrap();
    machine.pause().unwrap();
}

/// Waits until the guest has verified all of its pages since it was paused.
fn after_a_pass(machine: &Machine) -> Report {
    let before = machine.report();
    machine.set_check_rate(Rate::Unlimited);
    machine.resume().unwrap();
    machine.wait_until(LONG, |now| now.passes_since(&before) >= 2).unwrap();
    // Read anew: in the report that ended the wait, a fault may be older than the pass.
    machine.report()
}

#[test]
fn a_lost_page_is_noticed_and_named() {
    for kind in BOTH {
        for fill in FILLS.into_iter().filter(|fill| ![Fill::Zeros, Fill::Mixed].contains(fill)) {
            let output = SerialOutput::default();
            let Some(machine) = filled(&config(kind, 2, verifying(fill)), &output) else { continue };
            pause_between_steps(&machine);
            let number = machine.report().pages() - 3;
            write(page(&machine, machine.place_of(number).unwrap()), &[0; PAGE / 8]);
            let report = after_a_pass(&machine);
            let expected = Bad { index: number, expected: 1, fault: Fault::Lost };
            assert_eq!(report.first_bad(), Some(expected), "{fill:?}: {report}");
            assert!(report.bad_pages() >= 1);
            let line = format!("vcpu 1: BAD page {number} expected generation 1 found lost: zeros");
            assert!(output.text().contains(&line), "{}", output.text());
        }
    }
}

#[test]
fn a_corrupt_page_is_noticed() {
    for kind in BOTH {
        for fill in FILLS {
            let Some(machine) = filled(&config(kind, 1, verifying(fill)), &SerialOutput::default()) else { continue };
            pause_between_steps(&machine);
            let place = page(&machine, machine.place_of(700).unwrap());
            let mut words = read(place);
            words[300] ^= 1 << 40;
            write(place, &words);
            let report = after_a_pass(&machine);
            let bad = report.first_bad().unwrap();
            assert!(bad.index == 700 && matches!(bad.fault, Fault::Corrupt { .. }), "{fill:?}: {report}");
        }
    }
}

#[test]
fn a_page_of_another_place_is_noticed() {
    for kind in BOTH {
        let Some(machine) = filled(&config(kind, 2, verifying(Fill::Random)), &SerialOutput::default()) else {
            continue;
        };
        pause_between_steps(&machine);
        // The first page of the first vCPU at the first of the second.
        let other = machine.report().pages() / 2;
        let place = |number| page(&machine, machine.place_of(number).unwrap());
        write(place(other), &read(place(0)));
        let expected = Bad { index: other, expected: 1, fault: Fault::Foreign { index: 0 } };
        assert_eq!(after_a_pass(&machine).first_bad(), Some(expected));
    }
}

#[test]
fn a_stale_page_is_noticed_in_every_kind_of_content() {
    for kind in BOTH {
        for fill in FILLS {
            let workload = Workload { fill, whole: false, ..busy() };
            let Some(machine) = filled(&config(kind, 1, workload), &SerialOutput::default()) else { continue };
            machine.wait_until(LONG, |now| now.written() > 3000).unwrap();
            pause_between_steps(&machine);
            let numbers = 0..machine.report().pages();
            let place = |number| page(&machine, machine.place_of(number).unwrap());
            let old: Vec<_> = numbers.clone().map(|number| read(place(number))).collect();
            machine.resume().unwrap();
            let written = machine.report().written();
            machine.set_write_rate(workload.write);
            machine.wait_until(LONG, |now| now.written() > written + 1000).unwrap();
            pause_between_steps(&machine);
            assert_eq!(machine.report().faults(), 0);
            // In zero pages, and pages of equal bytes, some generations look alike: those are no other pages.
            let stale = numbers.into_iter().find(|number| {
                let (was, is) = (old[*number as usize], read(place(*number)));
                was != is && was != [0; PAGE / 8]
            });
            let stale = stale.unwrap();
            write(place(stale), &old[stale as usize]);
            let report = after_a_pass(&machine);
            let bad = report.first_bad().unwrap();
            assert!(bad.index == stale && matches!(bad.fault, Fault::Stale { .. }), "{fill:?}: {report}");
        }
    }
}

/// Returns the pages of the guest that are not content, as they were before it ran until `reached`. Omits its stack,
/// which may hold nothing that it needs again.
fn own_pages_before(
    source: &Machine,
    reached: impl FnMut(&Report) -> bool,
) -> impl Iterator<Item = ((usize, u64), [u64; PAGE / 8])> {
    let first_content = source.place_of(0).unwrap().1;
    let stack_end = first_content - source.report().pages().div_ceil(PAGE as u64 / 4);
    let own = (0..first_content).filter(|page| !(stack_end - 16..stack_end).contains(page)).map(|page| (0, page));
    source.pause().unwrap();
    let before: Vec<_> = own.map(|place| (place, read(page(source, place)))).collect();
    source.resume().unwrap();
    source.wait_until(LONG, reached).unwrap();
    source.pause().unwrap();
    before.into_iter().filter(|(place, old)| read(page(source, *place)) != *old)
}

/// Returns whether a guest that continues elsewhere, with one page as it was before, notices that.
fn notices(source: &Machine, config: &Config, place: (usize, u64), old: &[u64; PAGE / 8]) -> bool {
    let before = source.report();
    let destination = machine(config, &SerialOutput::default()).unwrap();
    move_state(source, &destination);
    copy(source, &destination, all_pages(source));
    write(page(&destination, place), old);
    destination.resume().unwrap();
    destination.set_check_rate(Rate::Unlimited);
    let seen = |now: &Report| now.faults() > before.faults() || now.passes_since(&before) >= 2;
    destination.wait_until(LONG, seen).unwrap().faults() > before.faults()
}

#[test]
fn a_stale_page_of_the_table_is_noticed() {
    for kind in BOTH {
        let config = config(kind, 1, Workload { whole: false, span: 50, ..busy() });
        let Some(source) = filled(&config, &SerialOutput::default()) else { continue };
        let written = source.report().written();
        let changed = own_pages_before(&source, |now| now.written() > written + 20_000);
        let first_content = source.place_of(0).unwrap().1;
        let tables = first_content - source.report().pages().div_ceil(PAGE as u64 / 4)..first_content;
        let changed: Vec<_> = changed.filter(|((_, page), _)| tables.contains(page)).collect();
        assert!(changed.len() > 1, "{}", changed.len());
        for (place, old) in changed {
            assert!(notices(&source, &config, place, &old), "page {place:?} of {}", source.description());
        }
    }
}

/// The monitor itself writes orders into the guest's memory. KVM's logs do not contain these writes, but the guest
/// notices stale orders.
#[test]
fn stale_orders_and_counters_are_noticed() {
    for kind in BOTH {
        // A guest with nothing to do is nearly always waiting for orders when it is paused.
        let idle = Workload { write: Rate::PagesPerSecond(0), check: Rate::PagesPerSecond(0), ..busy() };
        let config = config(kind, 1, idle);
        let Some(source) = filled(&config, &SerialOutput::default()) else { continue };
        let mut noticed = false;
        for _ in 0..100 {
            let steps = source.report().steps();
            let changed: Vec<_> = own_pages_before(&source, |now| now.steps() > steps + 1).collect();
            assert_eq!(changed.len(), 2, "{}", source.description());
            noticed = changed.iter().all(|(place, old)| notices(&source, &config, *place, old));
            if noticed {
                break;
            }
            source.resume().unwrap();
        }
        assert!(noticed, "{}", source.description());
    }
}

#[test]
fn a_payload_that_breaks_stops_the_machine_with_a_reason() {
    let Some(machine) = filled(&config(KINDS[1], 2, busy()), &SerialOutput::default()) else { return };
    machine.pause().unwrap();
    // Block 0 begins with the payload: replace it by undefined instructions (ud2).
    for number in 0..20 {
        write(page(&machine, (0, number)), &[0x0B0F_0B0F_0B0F_0B0F; PAGE / 8]);
    }
    machine.resume().unwrap();
    let error = machine.wait_until(LONG, |_| false).unwrap_err();
    assert!(matches!(error, Error::Vcpu { .. }), "{error}");
    assert!(matches!(machine.pause(), Err(Error::Vcpu { .. })));
    assert!(matches!(machine.resume(), Err(Error::Vcpu { .. })));
}
