//! A small machine monitor that embeds Sterna: a short but complete example, and the guest of Sterna's own tests.
//!
//! It has one to four vCPUs on KVM, RAM in blocks, and a serial port. The guest is bare: its vCPUs fill, write and verify their memory
//! without an operating system (`guest/src/share.rs`), so the guest itself detects lost pages. Without KVM, threads of this process
//! do the same work on the same memory.
//!
//! Each thing that a monitor must provide for a migration has its own file:
//!
//! | what a migration needs | where |
//! |---|---|
//! | RAM as blocks, with the file behind it | [`ram`] |
//! | a dirty log | [`Machine::take_dirty_log`] |
//! | pause, resume, throttle | `gate.rs` |
//! | state of vCPUs and devices, written and read again | `state.rs`, `kvm_state.rs` |
//! | devices with a large state of their own, saved while the guest runs and loaded in parallel | [`scratch`] |
//! | a disk that is read into guest RAM past the dirty log, and the wait for its reads | [`disk`] |
//! | passing all of it to the library | [`migration`] |
//!
//! [`Machine`] puts them together; the other files have the guest's work and its control.

mod clock;
mod config;
pub mod disk;
mod error;
mod gate;
#[cfg(has_kvm)]
mod kvm;
#[cfg(has_kvm)]
mod kvm_state;
mod layout;
mod machine;
pub mod migration;
mod pace;
pub mod ram;
pub mod scratch;
mod serial;
mod state;
mod threads;
mod vcpu;

pub use config::{Backing, BlockConfig, Config, Execution, Rate, Tracking, Workload};
pub use error::Error;
pub use machine::{Machine, Report};
pub use sterna_guest::memory::{Bad, Pattern};
pub use sterna_guest::page::{Fault, Fill};
