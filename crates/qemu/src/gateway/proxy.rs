//! `sterna proxy`: carries migrations that another program drives, for example libvirt or KubeVirt.
//!
//! A pair of proxies serves any number of migrations and other connections, concurrently or in sequence, until the proxies are
//! stopped. Each migration or connection has a session of its own between the two hosts, with its own control channel and its own
//! alarm: a failure in one session does not affect the others.
//!
//! ```text
//!  source host                                                               destination host
//!  QEMU ── main, multifd ──> endpoint ─> migration_out ═ session 1 ═> migration_in ──> QEMU's migration socket
//!  virsh, NBD client ──────> endpoint ─> connection    ═ session 2 ═> connection   ──> libvirt's socket, NBD server
//! ```
//! * `endpoint`: the listening sockets, and the classification of their connections;
//! * `send`, `receive`: the two proxies; `migration_out`, `migration_in`: one migration at the source's and the destination's proxy;
//! * `connection`: the two directions of a connection that is carried unchanged;
//! * `under_way`: the sessions in progress; `report`: the outcome of a migration.
//!
//! The proxies have no part in the switchover: the programs that drive the two QEMUs decide which of them runs the guest. When a
//! migration cannot continue, the proxies only close its sockets, as if the network had failed.

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

use sterna_engine::cancel::Cancel;

/// Stops a proxy.
#[derive(Clone, Debug, Default)]
pub struct ProxyStop {
    /// Accepts no new sessions; those in progress continue to their ends.
    pub drain: Cancel,
    /// Closes the sessions in progress, too. Has an effect after `drain` only.
    pub close: Cancel,
}
