//! The opening of a migration: what a source offers, and what the destination's monitor prepares for it.

use std::fmt;

use sterna_memory::ram::GuestRam;
pub use sterna_wire::control::Block;
use sterna_wire::control::Machine;

use crate::device_state::{DeviceId, LoadDevice};

/// A source's offer, which has everything that a monitor needs to make RAM and devices for the guest. All of it comes from another host
/// and must not be trusted: texts may have any characters and lengths, and RAM blocks any size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Opening {
    /// The address of the source and, with TLS, its certificate's name.
    pub source: String,
    /// Name and version of the source's monitor ([`SourceVmm::name`](crate::vmm::SourceVmm::name)).
    pub monitor: String,
    /// The type of the machine ([`SourceVmm::machine_type`](crate::vmm::SourceVmm::machine_type)).
    pub machine_type: String,
    /// The source's opening message ([`Source::opening_message`](crate::source::Source::opening_message)), at most 64 KiB; empty where the
    /// source sends none.
    pub message: Vec<u8>,
    /// The RAM blocks. The destination needs the same ones, in this order.
    pub blocks: Vec<Block>,
    /// The devices whose state is sent separately. The destination needs the same ones, in any order.
    pub devices: Vec<DeviceId>,
}

impl Opening {
    /// Makes the opening of the source `source` whose description of its machine is `machine`.
    pub(crate) fn new(source: &str, machine: &Machine) -> Self {
        let Machine { monitor, machine_type, blocks, devices, opening, .. } = machine.clone();
        Self { source: source.to_owned(), monitor, machine_type, message: opening, blocks, devices }
    }
}

/// What a monitor at the destination has prepared for a guest.
#[derive(Default)]
#[non_exhaustive]
pub enum Prepared {
    /// Nothing: the guest gets the RAM and the devices with which the [`Destination`](crate::destination::Destination) was made.
    #[default]
    AsGiven,
    /// RAM and devices for this guest, in place of those with which the destination was made. The settings of the destination hold for them
    /// too. If they differ from the source's the source is refused, and they are dropped.
    Made {
        /// The RAM, as for [`Destination::new`](crate::destination::Destination::new).
        ram: GuestRam,
        /// The devices, as for [`Destination::device`](crate::destination::Destination::device).
        devices: Vec<(DeviceId, Box<dyn LoadDevice>)>,
    },
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AsGiven => f.write_str("AsGiven"),
            Self::Made { ram, devices } => {
                let devices: Vec<_> = devices.iter().map(|(id, _)| id).collect();
                f.debug_struct("Made").field("ram", ram).field("devices", &devices).finish()
            }
        }
    }
}
