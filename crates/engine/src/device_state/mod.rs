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

use std::io::{BufRead, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use sterna_wire::control::Machine;
pub use sterna_wire::control::{Device as DeviceId, DeviceChannels};
use sterna_wire::text::cleaned;

pub(crate) use self::save::{SavingDevices, SharedDevice};
pub(crate) use self::threads::Threads;
pub use crate::device_bytes::DeviceBytes;
use crate::panics::panic_text;
pub use crate::report::DevicePhase;
use crate::report::named;
pub(crate) use crate::report::waiting_for;
use crate::vmm::VmmError;

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
///
/// A migration that fails leaves the device in its [`Source`](crate::source::Source), whose next run saves it from the beginning.
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

    /// Writes the rest of the state. The guest is paused. Saving may write guest RAM, as
    /// [`SourceVmm::save`](crate::vmm::SourceVmm::save) may.
    ///
    /// # Errors
    /// The migration fails and the guest is resumed. The device returns an error of `state`: the migration is being taken down.
    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError>;

    /// Called once in each migration, as the last call: saving has ended, whether or not it is complete, and before the guest is resumed.
    /// Undoes what [`SaveDevice::save_ahead`] has begun while the guest runs, so that the device may run on, or be saved again from the
    /// beginning.
    fn saving_ended(&mut self);
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
    // Of a device, only `SaveDevice::saving_ended` is called after this, and another migration begins anew.
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
