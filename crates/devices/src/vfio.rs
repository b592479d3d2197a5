//! Devices passed through by the kernel's VFIO: saved, loaded and watched by its migration interface, version 2.
//!
//! Source of everything here: the comments in `include/uapi/linux/vfio.h` (Linux 6.12; "the header" below) on
//! `VFIO_DEVICE_FEATURE_MIGRATION`, `enum vfio_device_mig_state` and the DMA logging features.
//!
//! | module or type | purpose |
//! |---|---|
//! | [`Device`], [`Data`] | the kernel's calls, as two small traits |
//! | [`KernelDevice`] | the same on a device's file descriptor |
//! | [`model`] | the same in software, strict about what the header allows, with faults on demand |
//! | [`Saver`] | the source of one device's state |
//! | [`Loader`] | its destination |
//! | [`stop_together`], [`abort_together`], [`run_together`] | several devices that may write to each other |
//! | [`DmaLog`] | which guest pages a device wrote, as a [`DirtyLog`](sterna_memory::dirty::DirtyLog) |
//!
//! ```text
//! source        RUNNING ── begin ──> PRE_COPY ── quiesce ──> PRE_COPY_P2P ── stop ──> STOP_COPY ── finish ──> STOP
//!                  ^                (or RUNNING)             (or as before)           read to End              |
//!                  └──────────────────────────────── abort ────────────────────────────────────────────────────┘
//!
//! destination   RUNNING ── begin ──> RESUMING ── finish ──> STOP ── run_quiesced ──> RUNNING_P2P ── run ──> RUNNING
//!                  ^                 write                   |      (or as before)        |
//!                  └───────────────── abort (reset) ─────────┴────────────────────────────┘
//! ```
//!
//! This module does not decide to which host the guest belongs. A source's device in STOP can run again (`abort`) until
//! the migration is committed; a destination's device runs only after `run` is called, after the commit.

mod control;
mod destination;
mod device;
mod dma_log;
mod error;
mod group;
mod ioctl;
mod kernel;
pub mod model;
mod source;

pub use destination::Loader;
pub use device::{Data, Device, DmaRange, Flags, PrecopyInfo, State};
pub use dma_log::{DmaLog, DmaMapping};
pub use error::VfioError;
pub(crate) use group::check_peers;
pub use group::{Peers, abort_together, run_together, stop_together};
pub use kernel::{KernelData, KernelDevice};
pub use source::{Chunk, Remaining, Saver};
