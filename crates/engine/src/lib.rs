//! Live migration of virtual machines: the pipeline, its channels and transports, the switchover.
//!
//! ```text
//! source        entry ─> batch ─> channel: encode, packet, window ═══> channel: check, decode ─> sink   destination
//! ```
//! A batch enters as *owned bytes* (the gateway beside QEMU) or as *guest ranges* (a VMM that embeds this library) and
//! goes one way, from hand to hand. `ARCHITECTURE.md` has the whole plan.

pub mod abort;
pub mod batch;
pub mod cancel;
pub mod control_link;
pub mod destination;
pub mod entry;
mod ledger;
pub mod migration;
pub mod pacer;
pub mod process;
mod reading;
pub mod receive;
pub mod record_file;
pub mod report;
pub mod send;
pub mod session;
pub mod source;
mod state;
pub mod tls;
pub mod transport;
pub mod vmm;
pub mod window;
