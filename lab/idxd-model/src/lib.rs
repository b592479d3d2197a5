//! Intel DSA and IAA devices in software, at the level of 64-byte descriptors, for testing drivers without a device.
//!
//! The model shares no code with the driver (`sterna-idxd`), not even a constant. It decodes with its own [`table`] of
//! the specification, so an error in the driver's definitions is noticed. Both tables are checked against the kernel's
//! header. `docs/accelerators-conformance.md` lists the test for each section.
//!
//! | module | contents |
//! |---|---|
//! | [`table`] | the specification as data, each row with its section |
//! | [`ops`] | one descriptor: checked, executed, turned into a completion record |
//! | [`core`] | a device: queues, groups, engines, batches, the schedule of events; no threads, no clock |
//! | [`judge`] | checks a trace of a real device against the table |
//! | [`memory`] | a device's view of memory: this process's page tables, or test doubles |
//! | [`config`] | the configuration of devices, as JSON |
//! | [`Model`] | devices with a thread per engine, or stepped by the caller; [`ModelQueue`] is a portal |
//! | [`trap`], [`Tree`] | the real instructions and a sysfs tree, on hosts without a device |
//!
//! There are three modes, with the same state machine:
//!
//! * [`Model::start`]: real time, engines are threads. Completions come as fast as they can or, `paced`, after the time
//!   that [`config::Timing`] gives.
//! * [`Model::manual`]: nothing happens except by [`Model::step`]; timing and seed determine the order. For randomised
//!   tests: about 10 ms for 64 batches of 16 pages.
//! * [`core::Device`] with [`core::Payload::Timed`]: virtual time without memory, for simulators.
//!
//! ```
//! use std::sync::atomic::{AtomicU8, Ordering};
//! use sterna_idxd_model::{Model, ModelConfig};
//!
//! #[repr(align(32))]
//! struct Record([AtomicU8; 32]);
//! let record = Record([const { AtomicU8::new(0) }; 32]);
//!
//! let model = Model::manual(ModelConfig::dsa())?;
//! let mut noop = [0; 64];
//! noop[4] = 0x0c; // record address valid, record requested
//! noop[8..16].copy_from_slice(&(record.0.as_ptr() as u64).to_le_bytes());
//! assert!(model.queue("wq0.0").unwrap().enqcmd(&noop));
//! model.settle();
//! assert_eq!(record.0[0].load(Ordering::Acquire), 1);
//! # Ok::<(), sterna_idxd_model::ConfigError>(())
//! ```

pub mod config;
pub mod core;
pub mod judge;
mod lenient;
pub mod memory;
mod model;
pub mod ops;
pub mod table;
pub mod trap;
mod tree;

pub use config::{ConfigError, DeviceConfig, Kind, Mode, ModelConfig, QueueConfig};
pub use memory::{AddressSpace, ProcessMemory};
pub use model::{Counters, Model, ModelQueue};
pub use tree::Tree;

/// The example of the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
