//! DMA between the devices of a guest, by the header's rules about P2P.

use std::sync::{Arc, Mutex, PoisonError};

use super::super::device::State;

/// One step of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The device's number on the fabric.
    pub device: usize,
    /// The state before.
    pub from: State,
    /// The state after.
    pub to: State,
}

/// The devices of one guest, which may write to each other. Records every step of each in order, and every violation: a
/// device that may start DMA to others while one of them is stopped.
#[derive(Clone, Debug, Default)]
pub struct Fabric(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// The state of each device, and whether it has a guest's state.
    devices: Vec<(State, bool)>,
    steps: Vec<Step>,
    violations: Vec<String>,
}

impl Fabric {
    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns every step so far.
    pub fn steps(&self) -> Vec<Step> {
        self.inner().steps.clone()
    }

    /// Returns the occasions on which a device could have written to a stopped one.
    pub fn violations(&self) -> Vec<String> {
        self.inner().violations.clone()
    }

    /// Returns how many devices run with a guest's state.
    pub fn running(&self) -> usize {
        self.inner().devices.iter().filter(|(state, live)| *live && state.runs()).count()
    }

    pub(super) fn add(&self, live: bool) -> usize {
        let mut inner = self.inner();
        inner.devices.push((State::Running, live));
        inner.devices.len() - 1
    }

    /// Records a device's new state. `step`: whether the device reached the state in one step of its own.
    pub(super) fn moved(&self, device: usize, to: State, live: bool, step: bool) {
        let mut inner = self.inner();
        let from = std::mem::replace(&mut inner.devices[device], (to, live)).0;
        if !step {
            return;
        }
        inner.steps.push(Step { device, from, to });
        let stopped = |state: State| matches!(state, State::Stop | State::StopCopy | State::Resuming);
        let writes = |state: State| matches!(state, State::Running | State::PreCopy);
        let others = || inner.devices.iter().enumerate().filter(|(other, (_, live))| *other != device && *live);
        let victim = |(_, (state, _)): &(usize, &(State, bool))| stopped(*state);
        let writer = |(_, (state, _)): &(usize, &(State, bool))| writes(*state);
        let against = if live && stopped(to) && !stopped(from) {
            others().find(writer)
        } else if live && writes(to) && !writes(from) {
            others().find(victim)
        } else {
            None
        };
        if let Some((other, (state, _))) = against {
            let violation = format!("device {device} went from {from} to {to} while device {other} was in {state}");
            inner.violations.push(violation);
        }
    }
}
