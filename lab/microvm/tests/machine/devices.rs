//! Devices with a state of their own: they pause and continue with the guest, and their state moves separately.

use sterna_microvm::migration::{devices_to_load, devices_to_save};
use sterna_microvm::{Config, Error, Machine};

use crate::support::{KINDS, LONG, PAGE, SerialOutput, busy, config, copy, filled, machine, move_state};

const BLOCKS: u64 = 64;

fn with_devices() -> Config {
    Config { devices: vec![BLOCKS * PAGE as u64, 2 * BLOCKS * PAGE as u64], ..config(KINDS[0], 2, busy()) }
}

fn written(machine: &Machine) -> Vec<u64> {
    machine.devices().iter().map(|device| device.written()).collect()
}

/// Waits until each device has written something since then.
fn writes_on(machine: &Machine, since: &[u64]) {
    machine.wait_until(LONG, |_| written(machine).iter().zip(since).all(|(now, then)| now > then)).unwrap();
}

fn all_right(machine: &Machine) {
    machine.devices().iter().for_each(|device| device.verify());
    assert!(machine.devices().iter().all(|device| device.verified().wrong == 0 && device.verified().blocks >= BLOCKS));
}

#[test]
fn devices_pause_with_the_guest_and_continue_in_another_machine() {
    let output = SerialOutput::default();
    let source = filled(&with_devices(), &output).unwrap();
    writes_on(&source, &[0, 0]);
    source.pause().unwrap();
    let (stopped, mut states) = (written(&source), Vec::new());
    for (id, mut device) in devices_to_save(&source) {
        let mut state = Vec::new();
        device.save(&mut state).unwrap();
        states.push((id, state));
    }
    assert_eq!(written(&source), stopped);
    all_right(&source);

    let destination = machine(&with_devices(), &output).unwrap();
    copy(&source, &destination, crate::support::all_pages(&source));
    move_state(&source, &destination);
    let lacking = destination.resume().unwrap_err();
    assert!(matches!(lacking, Error::Order(_)) && lacking.to_string().contains("devices"), "{lacking}");
    for ((id, mut device), (saved, state)) in devices_to_load(&destination).zip(&states) {
        assert_eq!(id, *saved);
        device.load(&mut state.as_slice()).unwrap();
    }
    assert_eq!(written(&destination), stopped);
    destination.resume().unwrap();
    writes_on(&destination, &stopped);
    destination.pause().unwrap();
    all_right(&destination);

    // And at the source, where nothing has changed since.
    assert_eq!(written(&source), stopped);
    source.resume().unwrap();
    writes_on(&source, &stopped);
    source.pause().unwrap();
    all_right(&source);
}

#[test]
fn devices_that_cannot_be_are_refused() {
    for bytes in [0, 100, PAGE as u64 + 1, u64::MAX - 4095] {
        let refused =
            Machine::new(&Config { devices: vec![bytes], ..with_devices() }, Box::new(SerialOutput::default()));
        let error = refused.map(drop).unwrap_err();
        assert!(matches!(error, Error::Config(_)) && error.to_string().contains("device 0"), "{error}");
    }
}
