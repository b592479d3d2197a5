//! The state of devices that have much of it, sent separately from the monitor's own: all devices save, send and load at the same time.
//!
//! ```text
//! source                                                              destination
//! save-device-0 ─┐          ┌─> RAM channels (mixed) ────┐           ┌─> load-device-0
//! save-device-1 ─┼─ pieces ─┼─> channels of their own ───┼─ in order ┼─> load-device-1
//! save-device-2 ─┘          └─> the stream (serial) ─────┘           └─> load-device-2
//! ```
//! A monitor adds a [`SaveDevice`] for each such device to its [`Source`](crate::source::Source), and a [`LoadDevice`] of the same
//! [`DeviceId`] to the [`Destination`](crate::destination::Destination). Each is called on a thread of its own. The state that it writes is
//! cut into pieces that take any channel. The destination puts the pieces in order, within a bound of memory
//! ([`Destination::device_queue`](crate::destination::Destination::device_queue)): a device that loads slowly delays the device that saves,
//! and no channel.
//!
//! The guest is not stopped before every device has loaded what was first saved ahead, and not started before every device has loaded all.
//! Where a device fails, the migration fails and the guest runs on at the source.

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

pub(crate) use self::save::SavingDevices;
pub(crate) use self::threads::Threads;
pub use crate::device_bytes::DeviceBytes;
use crate::monitor::panic_text;
use crate::vmm::VmmError;

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
    /// ([`DeviceChannels::Serial`]), come first.
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

/// Lists the first few of these names and the number of the others; none without names.
fn named(names: impl IntoIterator<Item = String>) -> Option<String> {
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

/// Whether a device has more state to save while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// There is nothing more to be saved before the guest is stopped.
    Nothing,
    /// There may be more later: [`SaveDevice::save_ahead`] is called again.
    Later,
}

/// A device at the source. All methods are called on one thread, the device's own.
///
/// The monitor stops the device in [`SourceVmm::pause`](crate::vmm::SourceVmm::pause), and resumes it in
/// [`SourceVmm::resume`](crate::vmm::SourceVmm::resume), so it usually keeps a handle to the device. Pausing and resuming do not wait for
/// a call of this trait: `pause` may be called during [`SaveDevice::save_ahead`]. `resume` is never called during [`SaveDevice::save`],
/// which the migration waits for. So a call must return, with an error if need be, in bounded time.
pub trait SaveDevice: Send {
    /// Writes the state that can be sent while the guest runs, as much as there is now. Called once at the beginning, and again and again if
    /// there may be more. The guest is not stopped before the destination's device has read what the first call wrote. Writes nothing by
    /// default; not called where state is sent serially ([`DeviceChannels::Serial`]).
    ///
    /// # Errors
    /// The migration fails; the guest runs on.
    fn save_ahead(&mut self, _state: &mut dyn Write) -> Result<Ahead, VmmError> {
        Ok(Ahead::Nothing)
    }

    /// Returns about how many bytes [`SaveDevice::save`] would write if the guest were stopped now, for the prediction of the downtime.
    /// Called at the beginning and after each [`SaveDevice::save_ahead`].
    fn remaining(&mut self) -> u64 {
        0
    }

    /// Writes the rest of the state. The guest is paused.
    ///
    /// # Errors
    /// The migration fails and the guest is resumed. The device returns an error of `state`: the migration is being taken down.
    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError>;
}

/// A device at the destination.
pub trait LoadDevice: Send {
    /// Reads what [`SaveDevice::save_ahead`] wrote and then what [`SaveDevice::save`] wrote, as one stream, to its end. Called when the
    /// first bytes have arrived, on a thread of its own, while other devices load and RAM is incomplete; the monitor's own state may be
    /// loaded at the same time. `state` has the bytes that have arrived in its buffer ([`BufRead::fill_buf`]): a device that reads them
    /// there saves a copy. Reading on confirms that the device has loaded what it read before; so a device must not read ahead of
    /// what it loads, else the guest is stopped too early. The state comes from another host: it must not be trusted.
    ///
    /// # Errors
    /// The migration fails; the guest runs on at the source. The device returns an error of `state`.
    fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError>;
}

/// Calls a device. Returns a panic as an error: else the migration would wait for the device.
fn unless_it_panics(call: impl FnOnce() -> Result<(), VmmError>) -> Result<(), VmmError> {
    // The device is not used again.
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|panic| Err(format!("it panicked: {}", panic_text(panic)).into()))
}

/// Describes how the source's devices differ from the destination's; none where they are the same.
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
        let words = |phases: &[DevicePhase]| {
            waiting_for(
                phases.iter().enumerate().map(|(instance, phase)| (DeviceId::new("d", instance as u32), *phase)),
            )
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

    #[test]
    fn devices_that_one_side_lacks_are_named_and_their_order_does_not_count() {
        let devices = |names: &[&str]| names.iter().map(|name| DeviceId::new(*name, 0)).collect::<Vec<_>>();
        let words = |source: &[&str], destination: &[&str]| {
            let source = Machine { devices: devices(source), ..Machine::default() };
            difference(&source, &devices(destination))
        };
        assert_eq!(words(&["a", "b"], &["b", "a"]), None);
        assert_eq!(
            words(&["a", "b\u{1b}", "c"], &["a", "d"]).unwrap(),
            "the source sends the state of devices that the destination does not know: b /0, c/0"
        );
        assert_eq!(
            words(&["a"], &["a", "d"]).unwrap(),
            "the destination awaits the state of devices that the source does not send: d/0"
        );
    }
}
