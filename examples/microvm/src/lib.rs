//! A small machine monitor that embeds Sterna: the shortest honest example of one, and the guest of Sterna's own tests.
//!
//! One to four vCPUs on KVM, RAM in blocks, a serial port. The guest is bare: its vCPUs fill, write and verify their memory
//! without an operating system (`guest/src/share.rs`), so it knows by itself whether a move lost anything. Where there is
//! no KVM, threads of this process do the same on the same memory.
//!
//! A file each for what a monitor has to bring along to have its guests moved:
//!
//! | what a migration asks for | where |
//! |---|---|
//! | RAM as blocks, with the file behind it | [`ram`] |
//! | a dirty log | [`Machine::take_dirty_log`] |
//! | pause, resume, throttle | `gate.rs` |
//! | state of vCPUs and devices, written and read again | `state.rs`, `kvm/state.rs` |
//! | devices with a large state of their own, saved ahead and loaded beside all else | [`scratch`] |
//! | a disk that is read into guest RAM past the dirty log, and the wait for its reads | [`disk`] |
//! | all of it handed to the library | [`migration`] |
//!
//! [`Machine`] puts them together; everything else is the guest's work and who tells it what to do.

mod clock;
mod config;
pub mod disk;
mod error;
mod gate;
#[cfg(has_kvm)]
mod kvm;
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
