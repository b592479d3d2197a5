//! Devices in reports: the phase, the progress and the figures of those whose state is sent separately from the monitor's.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

use super::bytes;

/// Maximum number of devices that a message names.
const MAX_NAMED: usize = 3;

/// The phase of a device's state, as the source sees it: which step of this device the migration waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DevicePhase {
    /// The guest runs. The source's device saves what must be loaded before the guest is stopped.
    #[default]
    SavingAhead,
    /// The guest runs. The destination's device must load more before the guest is stopped: what was saved first, and of the state that
    /// followed all but what it loads within the target downtime.
    LoadingAhead,
    /// The migration does not wait for this device: others keep the guest from being stopped or, where one device goes after the other
    /// ([`DeviceChannels::Serial`](crate::device_state::DeviceChannels::Serial)), come first.
    Ready,
    /// The guest is paused. The source's device saves the rest.
    Saving,
    /// State that the device has saved waits for a channel, or was sent and has not arrived.
    OnTheWay,
    /// The guest is paused. The destination's device has not loaded all state that has arrived for it.
    Loading,
    /// The destination's device has loaded all of its state.
    Loaded,
}

impl DevicePhase {
    /// Returns whether the migration waits for a device in this phase.
    pub fn is_waited_for(self) -> bool {
        !matches!(self, Self::Ready | Self::Loaded)
    }
}

impl Display for DevicePhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SavingAhead => "saving ahead at the source",
            Self::LoadingAhead => "loading ahead at the destination",
            Self::Ready => "ready",
            Self::Saving => "saving at the source",
            Self::OnTheWay => "on the way",
            Self::Loading => "loading at the destination",
            Self::Loaded => "loaded",
        })
    }
}

/// How far one device is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceProgress {
    /// Name and instance.
    pub device: String,
    /// Where its state is: what the migration waits for of this device.
    pub phase: DevicePhase,
    /// Bytes sent.
    pub bytes: u64,
    /// Those of them that have arrived.
    pub arrived_bytes: u64,
    /// Bytes that would have to be saved if the guest were stopped now.
    pub remaining_bytes: u64,
}

/// How the state of one device travelled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Name and instance.
    pub device: String,
    /// How far it had come at the end.
    #[serde(default)]
    pub phase: DevicePhase,
    /// Bytes of state, all together.
    pub bytes: u64,
    /// Those of them that were sent while the guest ran.
    pub ahead_bytes: u64,
    /// Time to save the rest, ms. It travels meanwhile.
    pub save_ms: f64,
    /// From there until the last of it had arrived, ms.
    pub transfer_ms: f64,
    /// From there until the destination's device had loaded it, ms.
    pub load_ms: f64,
    /// Of the downtime, how long this device took: from the begin of saving until it was loaded. Devices do that beside each other.
    pub downtime_ms: f64,
}

impl DeviceReport {
    pub(super) fn text(&self) -> String {
        let rest = bytes(self.bytes.saturating_sub(self.ahead_bytes) as f64);
        let ahead = match self.ahead_bytes {
            0 => String::new(),
            ahead => format!("{} while the guest ran, ", bytes(ahead as f64)),
        };
        let sent = format!("{}: {ahead}{rest} while it stood", self.device);
        // One that was not loaded has no times worth adding up.
        if self.downtime_ms == 0.0 {
            return format!("{sent}; {} at the end", self.phase);
        }
        let Self { downtime_ms, save_ms, transfer_ms, load_ms, .. } = self;
        format!("{sent}, in {downtime_ms:.0} ms = save {save_ms:.0} + transfer {transfer_ms:.0} + load {load_ms:.0}")
    }
}

/// Lists the first few of these names and the number of the others; none without names.
pub(crate) fn named(names: impl IntoIterator<Item = String>) -> Option<String> {
    let mut names = names.into_iter();
    let first: Vec<_> = names.by_ref().take(MAX_NAMED).collect();
    let first = (!first.is_empty()).then(|| first.join(", "))?;
    Some(match names.count() {
        0 => first,
        more => format!("{first} and {more} more"),
    })
}

/// Lists the devices among these that the migration waits for; none where there are none.
pub(crate) fn waiting_for(devices: impl IntoIterator<Item = (impl Display, DevicePhase)>) -> Option<String> {
    let waited_for = devices.into_iter().filter(|(_, phase)| phase.is_waited_for());
    named(waited_for.map(|(device, phase)| format!("{device} ({phase})")))
}

#[cfg(test)]
mod tests {
    use sterna_wire::control::Device;

    use super::*;

    #[test]
    fn of_the_devices_that_are_waited_for_three_are_named_and_the_others_counted() {
        use DevicePhase::{Loaded, Loading, LoadingAhead, OnTheWay, Ready, Saving, SavingAhead};
        let words = |phases: &[DevicePhase]| {
            waiting_for(phases.iter().enumerate().map(|(instance, phase)| (Device::new("d", instance as u32), *phase)))
        };
        assert_eq!(words(&[]), None);
        assert_eq!(words(&[Ready, Loaded]), None);
        assert_eq!(words(&[Loaded, Loading, Ready]).unwrap(), "d/1 (loading at the destination)");
        assert_eq!(
            words(&[SavingAhead, LoadingAhead, OnTheWay]).unwrap(),
            "d/0 (saving ahead at the source), d/1 (loading ahead at the destination), d/2 (on the way)"
        );
        assert_eq!(
            words(&[Saving, Ready, Saving, Loading, Loaded, Loading, OnTheWay]).unwrap(),
            "d/0 (saving at the source), d/2 (saving at the source), d/3 (loading at the destination) and 2 more"
        );
    }
}
