//! `sterna proxy`: the pipeline for those who drive QEMU themselves, such as libvirt and KubeVirt.
//!
//! The source's proxy listens where the source QEMU is told to migrate to; the destination's connects to where the
//! destination QEMU listens. Migration connections are understood and carried through the pipeline, pages in-stream. All
//! others (NBD, libvirt's control socket, a migration that QEMU encrypts itself) are *opaque*: their bytes are carried
//! unchanged, each direction on a channel of its own.
//!
//! Whoever drives QEMU decides about the switchover. The proxy relays what the two QEMUs say to each other, closes both
//! sides' sockets when anything fails, as a broken network would, and claims nothing more.

mod opaque;
mod receive;
mod send;

pub use receive::proxy_receive;
pub use send::proxy_send;
