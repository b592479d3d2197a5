//! Operations on pages: zero map, compare, delta, checksum, copy and deflate. An accelerator does them where there is
//! one, the CPU otherwise; the caller's code is the same.
//!
//! ```text
//! caller ─> batch ─> channel ─> table of operations ─> dsa, iaa ─┐   completion records, read by
//!    ^                                              └> cpu       │   the next submit, poll or wait, or the backstop
//!    └────── completion queue <── the CPU finishes what is left <┘
//! ```
//! ```
//! use std::ptr::NonNull;
//! use sterna_offload::{Accelerators, Offload, Operation, Region, Settings};
//!
//! let offload = Offload::start(&Accelerators::cpu(), &Settings::default())?;
//! let memory: &'static mut [[u64; 512]] = vec![[0; 512]; 9].leak();
//! let start = NonNull::from(memory).cast::<u8>();
//! let aligned = start.align_offset(4096);
//! // SAFETY: leaked, so it stays mapped, and nothing refers to it any more.
//! let region = unsafe { Region::new(start.add(aligned), 8 * 4096, None) };
//!
//! let channel = offload.channel();
//! let mut batch = channel.batch(Operation::ZeroMap);
//! batch.push(&region.range(0, 8 * 4096)?)?;
//! let ticket = channel.submit(batch).map_err(|(reason, _)| reason)?;
//! let done = channel.wait(offload.deadline(std::time::Duration::from_secs(5))).expect("done by then");
//! assert_eq!((done.ticket, done.batch.zero_map()), (ticket.id(), &[0xff][..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
// Without drivers of accelerators no request reaches a device: those paths are unreachable then, not wrong.
#![cfg_attr(not(feature = "accel"), allow(dead_code))]

mod accelerators;
mod arena;
mod backstop;
mod batch;
mod channel;
mod common;
mod completion;
mod core;
mod deflate;
mod delta;
mod engine;
mod guest;
mod helpers;
mod kind;
mod lease;
#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(feature = "model")]
pub mod model;
mod offload;
mod operation;
#[cfg(feature = "accel")]
pub mod plan;
mod pool;
mod pools;
mod region;
mod report;
mod request;
mod settings;
pub mod share;
mod start;
mod state;
mod submitter;
mod sync;
mod table;
mod time;
#[cfg(feature = "accel")]
pub mod trace;
#[cfg(feature = "accel")]
mod trial;
mod work;

pub use accelerators::{Accelerators, AcceleratorsError, DeviceSelector};
pub use batch::{Batch, Delta, PushError};
pub use channel::{Cancelled, Channel, Ticket};
pub use completion::{Done, Producer, Reason, TicketId};
pub use deflate::Deflater;
pub use guest::Guest;
pub use helpers::CallError;
pub use kind::{Cause, Kind};
pub use lease::Leases;
pub use offload::Offload;
pub use operation::Operation;
pub use region::{OutOfRegion, Range, Region, RegionBusy};
pub use report::{EngineReport, OffloadReport, OperationReport, Requests, TakenOut};
pub use settings::{LEDGERS, Recheck, Settings, Shares};
pub use start::StartError;
pub use state::State;
pub use time::{Bell, NEVER, Nanos, SystemTime, Time};
#[cfg(feature = "accel")]
pub use trial::{QueueTrial, Trial, Trials, try_all};
pub use work::Outcome;
