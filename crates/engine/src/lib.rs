//! The pipeline of a live migration: its channels and transports, both ends of a migration, the switchover, records and reports.
//!
//! ```text
//! source        entry ─> batch ─> channel: encode, packet, window ═══> channel: check, decode ─> sink   destination
//! ```
//! A batch enters as *owned bytes* (the gateway beside QEMU) or as *guest ranges* (a monitor that embeds Sterna) and is owned by one stage
//! at a time. `ARCHITECTURE.md` has the whole plan.
//!
//! **To embed Sterna in a machine monitor, use the crate `sterna`**, which re-exports what an embedder needs. This crate is for Sterna's
//! own programs: its public items are what the gateway beside QEMU, the device crates and the benchmarks are made of, and they change
//! without notice.
//!
//! * both ends of an embedded migration: [`source`], [`destination`], the monitor's interface [`vmm`], how one fails [`migration`];
//! * the path of a page: [`entry`], [`batch`], [`send`], [`window`], [`pacer`], [`receive`];
//! * connections: [`transport`], [`tls`], [`control_link`], and how two sides meet and find each other again [`session`];
//! * the rest of the guest: [`device_state`];
//! * outcome: [`report`], [`record_file`]; after a crash: [`recovery`].

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod abort;
pub mod accelerator;
pub mod batch;
pub mod cancel;
pub mod control_link;
mod cpu_allowance;
mod cpu_time;
pub mod destination;
mod device_bytes;
pub mod device_state;
pub mod directory;
pub mod entry;
mod hand_over;
mod in_place;
pub mod item;
pub mod live_control;
pub mod migration;
mod monitor;
pub mod name_lock;
mod occupied;
mod off_cpu;
pub mod opening;
pub mod pacer;
mod panics;
pub mod phase;
pub mod process;
mod random;
mod reading;
pub mod receive;
pub mod record_file;
pub mod recovery;
pub mod report;
pub mod send;
pub mod session;
pub mod source;
mod state;
pub mod switchover;
pub mod tls;
pub mod transport;
pub mod vmm;
mod vmm_error;
pub mod wakers;
pub mod window;
