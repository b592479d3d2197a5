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

use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use sterna_wire::control::Machine;
pub use sterna_wire::control::{Device as DeviceId, DeviceChannels};
use sterna_wire::text::cleaned;

pub use self::buffer::DeviceBytes;
pub use self::save::SavingDevices;
use crate::vmm::VmmError;

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
    /// loaded at the same time. Whoever reads on says that it has taken what it read before: a reader that reads ahead of itself takes the meaning from
    /// "loaded before the guest is stopped". The state comes from another host: it is not to be trusted.
    ///
    /// # Errors
    /// The migration fails; the guest runs on at the source. An error of `state` is to be passed on.
    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError>;
}

/// Calls a device. One that panics fails like one that says why: else the migration would wait for it.
fn unless_it_panics(call: impl FnOnce() -> Result<(), VmmError>) -> Result<(), VmmError> {
    // The device is not used again.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err("it panicked".into()))
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
