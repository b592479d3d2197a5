//! Direct mode with QEMUs that belong to libvirt.
//!
//! ```text
//! host A                                                           host B
//! libvirtd ── commands for QEMU's monitor ── sterna send           libvirtd ── restores a domain from a FIFO, paused ──> QEMU
//! QEMU ═ RAM, read and tracked from outside ═══╪════════════════> sterna receive ── image's header, opening, markers ──> FIFO
//!                                              │                       ├── pages ──> RAM of that QEMU, from outside
//! domain destroyed, after the decision         │                       └── devices' state ──> FIFO; restored: prepared; resumed
//! ```
//! **The source** differs in two ways from any other: its monitor is reached by way of libvirt (`crate::libvirt`), and its opening message
//! is the domain's description (`offer`).
//!
//! **The destination** has libvirt start a QEMU for the domain of the source: libvirt restores a *saved image*, which is a FIFO. After the
//! image's header QEMU reads the stream's opening, and waits. libvirt's start of the domain has not ended then, so that no command
//! reaches QEMU's monitor; so QEMU's process and its RAM are found without it (`markers`). When the restore returns, QEMU has loaded
//! everything, the guest is paused, and the destination is prepared (`destination`).

mod destination;
mod markers;
mod offer;

pub(in crate::gateway) use self::destination::receive;
pub(super) use self::offer::Offer;
