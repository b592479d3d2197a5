//! Devices that other processes emulate, by vfio-user: VFIO's migration interface in messages over a socket.
//!
//! Source of everything here: "vfio-user Protocol Specification" (QEMU, `docs/interop/vfio-user.rst`; "the
//! specification" below). The states and flags are those of the kernel's header, so [`VfioUserDevice`] is a
//! [`vfio::Device`](crate::vfio::Device) like the kernel's devices, and [`vfio`](crate::vfio) and
//! [`migration`](crate::migration) use it in the same way.
//!
//! | module or type | purpose |
//! |---|---|
//! | [`VfioUserDevice`] | the device behind a connection |
//! | [`Connection`] | the interface to a monitor's connection: one command and its reply |
//! | [`Client`] | a connection on a unix socket, for callers without one |
//!
//! vfio-user lacks P2P states (several devices are stopped together only as
//! [`Peers::Separate`](crate::vfio::Peers::Separate)) and an estimate of the remaining state.

mod client;
mod connection;
mod device;

pub use client::Client;
pub use connection::{Command, Connection};
pub use device::{VfioUserData, VfioUserDevice};
