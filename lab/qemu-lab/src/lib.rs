//! The laboratory: starts and ends real QEMUs, guests and networks for tests, demo and benchmarks, and runs administrators' tools on
//! simulated hosts.
//!
//! ```no_run
//! use std::time::Duration;
//! use sterna_qemu_lab::{Guest, LinuxGuest, Qemu, QemuOptions, QemuVersion};
//!
//! # fn main() -> Result<(), sterna_qemu_lab::Error> {
//! let options = QemuOptions::new(QemuVersion::V7_2, Guest::Linux(LinuxGuest { dirty_rate: 20 << 20, ..LinuxGuest::default() }));
//! let source = Qemu::start(&options)?;
//! let destination = Qemu::start(&options.incoming())?;
//! source.guest().wait_ready(Duration::from_secs(60))?;
//! // … move it from source.qmp_path() to destination.qmp_path() …
//! let verified = destination.guest().verify(Duration::from_secs(60))?;
//! assert_eq!(verified.bad, 0);
//! # Ok(()) }
//! ```
//!
//! Everything started here is ended when its value is dropped, and by the kernel if this process dies first.

mod accel;
mod accel_config;
pub mod boot_sector;
mod console;
pub mod corpus;
pub mod disk;
mod error;
mod held_disk;
pub mod huge;
mod image;
mod initramfs;
mod kernel;
pub mod kvm;
pub mod libvirt;
mod memory_group;
mod nbd;
pub mod net;
mod options;
mod process;
mod qemu;
pub mod ram;
pub mod recorder;
mod shared;
mod skip;
mod tools;
pub mod usage;
mod virtiofsd;
mod warm;

pub use accel::Accel;
pub use accel_config::{AccelConfig, Configured};
pub use console::{CheckedDisks, Console, DisksDone, GuestConsole, Ready, Tick, Verified};
pub use error::Error;
pub use held_disk::{HeldDisk, HeldRead};
pub use image::{Aio, Cache, Disk, DiskImage};
pub use memory_group::MemoryGroup;
pub use nbd::{NbdAnswer, NbdCommand, NbdCounts, NbdError, NbdRequest, NbdServer, PendingRequest};
pub use options::{Backend, Dirty, DiskLoad, Fill, Guest, LinuxGuest, Pattern, QemuOptions, Role, Share};
pub use qemu::Qemu;
pub use shared::{FilesDone, SharedDirectory};
pub use skip::skip_if_unavailable;
pub use tools::{QemuVersion, Tools, guest_program};
pub use virtiofsd::Virtiofsd;
pub use warm::WarmMemory;
