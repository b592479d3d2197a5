//! Intel DSA and IAA devices in software, at the level of 64-byte descriptors.
//!
//! Nothing here is shared with the driver (`sterna-idxd`): the model decodes from its own table of the specification,
//! so that an error in the driver's definitions meets a device that does not have it.

pub mod config;
pub mod core;
pub mod memory;
mod model;
pub mod ops;
pub mod table;
pub mod trap;
mod tree;

pub use config::{ConfigError, DeviceConfig, Kind, Mode, ModelConfig, QueueConfig};
pub use memory::{AddressSpace, ProcessMemory};
pub use model::{Counters, Model, ModelQueue};
pub use tree::Tree;
