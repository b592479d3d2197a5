//! `sterna proxy`: carries migrations that somebody else drives, libvirt or KubeVirt for example.
//!
//! A pair of proxies serves any number of migrations and other connections, one after the other and at the same time, until the
//! proxies are told to stop. Everything that is carried has a session of its own between the two hosts, with its own control
//! channel and its own alarm: what breaks there breaks nothing else.
//!
//! ```text
//!  source host                                                               destination host
//!  QEMU ── main, multifd ──> endpoint ─> migration_out ═ session 1 ═> migration_in ──> QEMU's migration socket
//!  virsh, NBD client ──────> endpoint ─> connection    ═ session 2 ═> connection   ──> libvirt's socket, NBD server
//! ```
//! * `endpoint`: the sockets that are listened on, and what the connections on them are;
//! * `send`, `receive`: the two proxies; `migration_out`, `migration_in`: one migration at either;
//! * `connection`: the two directions of a connection that is carried unchanged;
//! * `under_way`: what is carried at the moment; `report`: what became of a migration.
//!
//! Sterna claims nothing about the switchover here: the programs that drive the two QEMUs decide which of them runs the guest.
//! So nothing is done for them: when a migration cannot be carried on, its sockets are closed, as if the network had failed.

mod connection;
mod endpoint;
mod migration_in;
mod migration_out;
mod receive;
mod report;
mod send;
mod under_way;

pub use receive::proxy_receive;
pub use report::{ProxyReport, ProxySide};
pub use send::proxy_send;

use sterna::cancel::Cancel;

/// How a proxy is told to end.
#[derive(Clone, Debug, Default)]
pub struct ProxyStop {
    /// Take nothing new; what is under way goes on to its end.
    pub drain: Cancel,
    /// Close what is under way, too. Has an effect after `drain` only.
    pub close: Cancel,
}
