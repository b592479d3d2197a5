//! Devices that other processes emulate, by vfio-user: VFIO's migration interface in messages over a socket.
//!
//! Source of everything here: "vfio-user Protocol Specification" (QEMU, `docs/interop/vfio-user.rst`; "the specification" below). The
//! states and flags are those of the kernel's header, so [`VfioUserDevice`] is a [`vfio::Device`](crate::vfio::Device) as the kernel's
//! are, and [`vfio`](crate::vfio) and [`migration`](crate::migration) do with it what they do with those.
//!
//! | module or type | what |
//! |---|---|
//! | [`VfioUserDevice`] | the device behind a connection |
//! | [`Connection`] | what is needed of a monitor's connection: one command and its reply |
//! | [`Client`] | a connection for those who have none of their own, on a unix socket |
//!
//! What vfio-user does not have: P2P states (several devices are stopped together only as
//! [`Peers::Separate`](crate::vfio::Peers::Separate)), and any word of how much state is left.

mod client;
mod connection;
mod device;

pub use client::Client;
pub use connection::{Command, Connection};
pub use device::{VfioUserData, VfioUserDevice};
