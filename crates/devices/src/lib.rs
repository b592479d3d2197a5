//! State of devices that a guest has been given: how it is read at the source of a migration and loaded at its
//! destination.
//!
//! One module per interface that devices have for this. A module knows its interface and nothing of channels, packets or
//! threads: who calls decides when and from where.
//!
//! | module | devices behind |
//! |---|---|
//! | [`vfio`] | the kernel's VFIO migration interface, version 2 |

pub mod vfio;

/// The examples of `docs/devices.md`, so that they compile.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/devices.md")]
mod documentation {}
