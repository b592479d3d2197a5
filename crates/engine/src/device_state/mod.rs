//! The state of devices that have much of it, apart from the monitor's own: all devices save, travel and load at the same time.
//!
//! ```text
//! source                                                              destination
//! save-device-0 ─┐          ┌─> RAM channels (mixed) ────┐           ┌─> load-device-0
//! save-device-1 ─┼─ pieces ─┼─> channels of their own ───┼─ in order ┼─> load-device-1
//! save-device-2 ─┘          └─> the stream (serial) ─────┘           └─> load-device-2
//! ```
//! A monitor gives a [`SaveDevice`] for each such device to its [`Source`](crate::source::Source), and a [`LoadDevice`] of the same
//! [`DeviceId`] to the [`Destination`](crate::destination::Destination). Each is called on a thread of its own. What it writes is cut into
//! pieces that take any channel; the destination puts them in order, within a bound of memory
//! ([`Destination::device_queue`](crate::destination::Destination::device_queue)): who loads slowly holds up whoever saves, and no channel.
//!
//! The guest is not stopped before every device has taken what was first saved ahead, and not started before every device has loaded. Where
//! one fails, the migration fails and the guest runs on at the source.

mod buffer;
pub(crate) mod load;
pub(crate) mod save;
mod threads;

use std::fmt::{self, Display};
use std::io::{BufRead, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Deserialize, Serialize};
use sterna_wire::control::Machine;
pub use sterna_wire::control::{Device as DeviceId, DeviceChannels};
use sterna_wire::text::cleaned;

pub use self::buffer::DeviceBytes;
pub use self::save::SavingDevices;
pub(crate) use self::threads::Threads;
use crate::monitor::panic_text;
use crate::vmm::VmmError;

/// How many devices that are waited for are called by name.
const MAX_NAMED: usize = 3;

/// Where a device's state is, as the source sees it: what the migration waits for of this device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DevicePhase {
    /// The guest runs. The source's device saves what must be loaded before the guest is stopped.
    #[default]
    SavingAhead,
    /// The guest runs. The destination's device has not loaded what it must before the guest is stopped: what was saved first, and of what
    /// followed all but what it loads within the downtime that is wanted.
    LoadingAhead,
    /// Nothing is waited for of this device: it is others that keep the guest from being stopped or, where one device goes after the other
    /// ([`DeviceChannels::Serial`]), that come first.
    Ready,
    /// The guest stands. The source's device saves the rest.
    Saving,
    /// What the device has saved waits for a channel, or was sent and has not arrived.
    OnTheWay,
    /// The guest stands. The destination's device has not loaded what has come for it.
    Loading,
    /// The destination's device has loaded all of its state.
    Loaded,
}

impl DevicePhase {
    /// Whether the migration waits for a device in this phase.
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

/// The first few of these names, the others counted; none where there are none.
fn named(names: impl IntoIterator<Item = String>) -> Option<String> {
    let mut names = names.into_iter();
    let first: Vec<_> = names.by_ref().take(MAX_NAMED).collect();
    let first = (!first.is_empty()).then(|| first.join(", "))?;
    Some(match names.count() {
        0 => first,
        more => format!("{first} and {more} more"),
    })
}

/// The devices among these that are waited for, in words; none where there are none.
pub(crate) fn waiting_for(devices: impl IntoIterator<Item = (impl Display, DevicePhase)>) -> Option<String> {
    let waited_for = devices.into_iter().filter(|(_, phase)| phase.is_waited_for());
    named(waited_for.map(|(device, phase)| format!("{device} ({phase})")))
}

/// What becomes of a device while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// There is nothing more to be saved before the guest is stopped.
    Nothing,
    /// More may come: it is to be asked again.
    Later,
}

/// A device at the source. All is called on one thread, which is the device's own.
///
/// The monitor stops the device in [`SourceVmm::pause`](crate::vmm::SourceVmm::pause), and lets it go on in
/// [`SourceVmm::resume`](crate::vmm::SourceVmm::resume), so it usually keeps a handle to what this is made of. While the thread is in a
/// call, pausing and resuming wait for nothing here: `pause` may be called during [`SaveDevice::save_ahead`]; `resume` never during
/// [`SaveDevice::save`], which is waited for. So a call must come back, with an error if need be, in bounded time.
pub trait SaveDevice: Send {
    /// Writes what can be sent while the guest runs, as much as there is now. Called once at the beginning, and again and again if there is
    /// more. The guest is not stopped before the destination's device has read what the first call wrote. Writes nothing unless overridden;
    /// not called at all where state travels serially ([`DeviceChannels::Serial`]).
    ///
    /// # Errors
    /// The migration fails; the guest runs on.
    fn save_ahead(&mut self, _state: &mut dyn Write) -> Result<Ahead, VmmError> {
        Ok(Ahead::Nothing)
    }

    /// About how many bytes [`SaveDevice::save`] would write if the guest were stopped now, for the prediction of the downtime. Asked at the
    /// beginning and after each [`SaveDevice::save_ahead`].
    fn remaining(&mut self) -> u64 {
        0
    }

    /// Writes the rest of the state. The guest is paused.
    ///
    /// # Errors
    /// The migration fails and the guest is resumed. An error of `state` is to be passed on: the migration is being taken down.
    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError>;
}

/// A device at the destination.
pub trait LoadDevice: Send {
    /// Reads what [`SaveDevice::save_ahead`] wrote and then what [`SaveDevice::save`] wrote, as one stream, to its end. Called when its
    /// first bytes have come, on a thread of its own, while other devices load and RAM is incomplete; the monitor's own state may be being
    /// loaded at the same time. `state` has what has come in its buffer ([`BufRead::fill_buf`]): a device that takes it from there saves a
    /// copy. Whoever reads on says that it has taken what it read before: a reader that reads ahead of itself takes the meaning from
    /// "loaded before the guest is stopped". The state comes from another host: it is not to be trusted.
    ///
    /// # Errors
    /// The migration fails; the guest runs on at the source. An error of `state` is to be passed on.
    fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError>;
}

/// Calls a device. One that panics fails like one that says why: else the migration would wait for it.
fn unless_it_panics(call: impl FnOnce() -> Result<(), VmmError>) -> Result<(), VmmError> {
    // The device is not used again.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(format!("it panicked: {}", panic_text(panic)).into()))
}

/// What of the source's devices differs from the destination's, in words; none where they are the same.
pub(crate) fn difference(source: &Machine, destination: &[DeviceId]) -> Option<String> {
    let lacks = |some: &[DeviceId], others: &[DeviceId]| {
        let missing = others.iter().filter(|device| !some.contains(device)).map(|device| cleaned(&device.to_string()));
        let missing: Vec<_> = missing.collect();
        (!missing.is_empty()).then(|| missing.join(", "))
    };
    let unknown = lacks(destination, &source.devices)
        .map(|devices| format!("the source sends the state of devices that the destination does not know: {devices}"));
    unknown.or_else(|| {
        let devices = lacks(&source.devices, destination)?;
        Some(format!("the destination awaits the state of devices that the source does not send: {devices}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_devices_that_are_waited_for_three_are_named_and_the_others_counted() {
        use DevicePhase::{Loaded, Loading, LoadingAhead, OnTheWay, Ready, Saving, SavingAhead};
        let said = |phases: &[DevicePhase]| {
            waiting_for(
                phases.iter().enumerate().map(|(instance, phase)| (DeviceId::new("d", instance as u32), *phase)),
            )
        };
        assert_eq!(said(&[]), None);
        assert_eq!(said(&[Ready, Loaded]), None);
        assert_eq!(said(&[Loaded, Loading, Ready]).unwrap(), "d/1 (loading at the destination)");
        assert_eq!(
            said(&[SavingAhead, LoadingAhead, OnTheWay]).unwrap(),
            "d/0 (saving ahead at the source), d/1 (loading ahead at the destination), d/2 (on the way)"
        );
        assert_eq!(
            said(&[Saving, Ready, Saving, Loading, Loaded, Loading, OnTheWay]).unwrap(),
            "d/0 (saving at the source), d/2 (saving at the source), d/3 (loading at the destination) and 2 more"
        );
    }

    #[test]
    fn devices_that_one_side_lacks_are_named_and_their_order_does_not_count() {
        let devices = |names: &[&str]| names.iter().map(|name| DeviceId::new(*name, 0)).collect::<Vec<_>>();
        let said = |source: &[&str], destination: &[&str]| {
            let source = Machine { devices: devices(source), ..Machine::default() };
            difference(&source, &devices(destination))
        };
        assert_eq!(said(&["a", "b"], &["b", "a"]), None);
        assert_eq!(
            said(&["a", "b\u{1b}", "c"], &["a", "d"]).unwrap(),
            "the source sends the state of devices that the destination does not know: b /0, c/0"
        );
        assert_eq!(
            said(&["a"], &["a", "d"]).unwrap(),
            "the destination awaits the state of devices that the source does not send: d/0"
        );
    }
}
