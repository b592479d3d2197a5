//! State of devices that are not in the monitor itself: how it is taken from whoever has it at the source of a migration, and given to
//! whoever goes on at its destination.
//!
//! A monitor that embeds the library uses [`migration`], which moves devices with the guest. Below it is one module per interface
//! that devices have for this; such a module knows its interface and nothing of channels, packets or threads: who calls decides when and
//! from where.
//!
//! | module | devices behind |
//! |---|---|
//! | [`vfio`] | the kernel's VFIO migration interface, version 2 |
//! | [`vfio_user`] | processes of their own, by the vfio-user protocol: the same interface in messages |
//! | [`vhost_user`] | processes of their own, by the vhost-user protocol |

pub mod migration;
pub mod vfio;
pub mod vfio_user;
pub mod vhost_user;

/// The examples of `docs/devices.md`, so that they compile.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/devices.md")]
mod documentation {}
