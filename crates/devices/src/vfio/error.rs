//! Errors of a device: what happened, to which device, what to do.

use std::io;

use super::device::{Flags, State};

/// Why a device was not saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VfioError {
    /// The device, or its driver, does not migrate.
    #[error("device {device} cannot be migrated: {source}{}", advice(source))]
    NoMigration {
        /// The device.
        device: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// Flags that this version of the interface does not have.
    #[error(
        "device {device} reports that it migrates, but not by STOP_COPY (flags {flags:?}): its driver is newer than \
         this program"
    )]
    Unsupported {
        /// The device.
        device: String,
        /// The flags that it reports.
        flags: Flags,
    },
    /// Another program uses the device.
    #[error("device {device} is in {state}, not in RUNNING: another program migrates it, or a reset is due")]
    Busy {
        /// The device.
        device: String,
        /// Its state.
        state: State,
    },
    /// Several devices are to be stopped, and one cannot suspend its writes to the others.
    #[error(
        "device {device} cannot hold back its DMA to other devices (no P2P state), so it cannot be stopped together \
         with them; migrate with it alone, or declare that the guest uses no DMA between devices"
    )]
    Peers {
        /// The device.
        device: String,
    },
    /// A change of state failed.
    #[error("device {device} cannot go {} {to}: {source} ({})", from_state(.from), whereabouts(.now))]
    Transition {
        /// The device.
        device: String,
        /// Its state before, if known.
        from: Option<State>,
        /// The target state.
        to: State,
        /// Its state now, if the kernel reports it.
        now: Option<State>,
        /// The kernel's error.
        source: io::Error,
    },
    /// A change of state succeeded without the stream that belongs to it, or with an unexpected one.
    #[error("the driver of device {device} made {problem} when going to {to}: it violates the interface")]
    Stream {
        /// The device.
        device: String,
        /// The new state.
        to: State,
        /// What is wrong.
        problem: &'static str,
    },
    /// The state could not be read.
    #[error("the state of device {device} cannot be read after {after} bytes: {source}")]
    Read {
        /// The device.
        device: String,
        /// Bytes read before.
        after: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// The state could not be loaded.
    #[error("device {device} accepts no more of its state after {after} bytes: {source}")]
    Write {
        /// The device.
        device: String,
        /// Bytes accepted before.
        after: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// The device is in ERROR.
    #[error("device {device} has failed and must be reset, which loses its state")]
    NeedsReset {
        /// The device.
        device: String,
    },
    /// The reset failed.
    #[error("device {device} cannot be reset: {source}; unbind it from its driver and bind it again")]
    Reset {
        /// The device.
        device: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The remaining length could not be queried.
    #[error("device {device} does not report how much of its state is left: {source}")]
    Size {
        /// The device.
        device: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// A call that does not fit the calls before.
    #[error("{call} on device {device} is out of order: it is {phase}")]
    Order {
        /// The device.
        device: String,
        /// What was called.
        call: &'static str,
        /// The phase, in which it is not allowed.
        phase: &'static str,
    },
}

/// Explains an error that means that the device does not support migration.
fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(_) => {
            " (the kernel needs a VFIO driver for this very device, such as mlx5_vfio_pci, for plain vfio-pci has no migration; a \
             vfio-user server needs VFIO_DEVICE_FEATURE_MIGRATION)"
        }
        None => "",
    }
}

fn from_state(state: &Option<State>) -> String {
    state.map_or_else(|| "to".to_owned(), |state| format!("from {state} to"))
}

fn whereabouts(state: &Option<State>) -> String {
    match state {
        Some(State::Error) => "it has failed and must be reset".to_owned(),
        Some(state) => format!("it is in {state} now"),
        None => "its state now is not known".to_owned(),
    }
}
