//! The state of devices outside the monitor: reading it from the device's owner at the source of a migration, and
//! loading it at the destination.
//!
//! A monitor that embeds the library uses [`migration`], which moves devices with the guest. Below it there is one
//! module per interface for device state. Such a module knows its interface, but no channels, packets or threads: its
//! caller decides when and on which thread to call it.
//!
//! | module | devices |
//! |---|---|
//! | [`vfio`] | the kernel's VFIO migration interface, version 2 |
//! | [`vfio_user`] | separate processes, by the vfio-user protocol: the same interface in messages |
//! | [`vhost_user`] | separate processes, by the vhost-user protocol |

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod migration;
pub mod vfio;
pub mod vfio_user;
pub mod vhost_user;

/// The examples of `docs/devices.md`, so that they compile.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/devices.md")]
mod documentation {}
