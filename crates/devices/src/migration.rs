//! Devices that the library moves: passed by a monitor to its [`Source`](sterna_engine::source::Source) and
//! [`Destination`](sterna_engine::destination::Destination), and called by it when the guest is paused and resumed.
//!
//! | devices | at the source | at the destination |
//! |---|---|---|
//! | VFIO, vfio-user | [`VfioSource`] | [`VfioDestination`] |
//! | vhost-user | [`VhostUserSource`] | [`VhostUserDestination`] |
//!
//! The engine has a thread for each device, and the monitor stops all devices at once from another thread. So a VFIO
//! device is behind a lock that is held for one call on it, and never while the engine waits for the network.

mod vfio;
mod vhost_user;

pub use self::vfio::{VfioDestination, VfioSource};
pub use self::vhost_user::{VhostUserDestination, VhostUserSource};

/// Maximum bytes that are read from or written to a device at once.
const CHUNK: usize = 1 << 20;
