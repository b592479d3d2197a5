//! Devices as the library moves them: what a monitor gives to its [`Source`](sterna::source::Source) and
//! [`Destination`](sterna::destination::Destination), and what it calls when the guest is stopped and let run.
//!
//! | devices behind | at the source | at the destination |
//! |---|---|---|
//! | VFIO, vfio-user | [`VfioSource`] | [`VfioDestination`] |
//! | vhost-user | [`VhostUserSource`] | [`VhostUserDestination`] |
//!
//! The engine has a thread for each device, and the monitor stops all devices at once from another. So a VFIO device is behind a lock
//! that is held for one call on it, and never while the engine waits for the network.

mod vfio;
mod vhost_user;

pub use self::vfio::{VfioDestination, VfioSource};
pub use self::vhost_user::{VhostUserDestination, VhostUserSource};

/// Bytes that are read from a device or given to it at once, at most.
const CHUNK: usize = 1 << 20;
