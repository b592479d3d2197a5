//! libvirt's client library from safe Rust, found at run time and never linked: a program that uses this crate starts where no libvirt
//! is installed.
//!
//! * [`Client::load`] finds `libvirt.so.0` and `libvirt-qemu.so.0` by the dynamic loader. Releases from [`OLDEST`] on are accepted: libvirt
//!   has kept the interface of both libraries since 0.2, and only adds to it.
//! * [`Connection`] and [`Domain`] have the calls that Sterna needs: finding a domain, its description, its state and job; suspend, resume,
//!   destroy, restore; commands for QEMU's monitor, with descriptors, and QEMU's events.
//! * [`Error`] names what was asked for, of which domain, libvirt's own reason, and what to do.
//! * [`SavedImage`] is the header of a domain's saved image, which `virDomainRestore` reads.
//!
//! # What differs between releases
//!
//! | call | since | without it |
//! |---|---|---|
//! | [`Domain::monitor_command_with_descriptors`] | 8.2, at both the client and the server | [`Error::Unsupported`] names the release |
//! | all others | 4.5 or older | – |
//!
//! # Threads
//!
//! Connections and domains may be used from any thread: libvirt locks them itself, and keeps its errors for each thread. A call blocks
//! until libvirt has answered, without a time limit. One thread, `libvirt-events`, delivers events and keeps connections alive. It starts with
//! [`Client::load`] and lasts as long as the process, because libvirt has one event loop, which cannot be ended.
//!
//! All `unsafe` code is in the module `raw`.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod connection;
mod domain;
mod error;
mod raw;
mod saved_image;
mod version;

pub use connection::{Client, Connection};
pub use domain::{Destroy, Domain, Job, MonitorEvent, MonitorEvents, State, Xml};
pub use error::{Code, Error, LoadError};
pub use saved_image::{HEADER_BYTES, MAX_XML_BYTES, SavedImage, SavedImageError};
pub use version::{OLDEST, Version};
