//! The report of a migration that a proxy has carried, for programs. Fields are only added. Times are in milliseconds, sizes in
//! bytes, rates in bytes per second.

use serde::Serialize;
use sterna_engine::report::Outcome;

/// Which proxy reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProxySide {
    /// `sterna proxy send`.
    Source,
    /// `sterna proxy receive`.
    Destination,
}

/// One migration as a proxy has seen it. Only the programs that drive the two QEMUs know whether and where the guest runs.
#[derive(Clone, Debug, Serialize)]
pub struct ProxyReport {
    /// Which proxy reports.
    pub side: ProxySide,
    /// The session's id, the same at both sides.
    pub id: String,
    /// `completed`: the destination QEMU has received everything that the source QEMU sent and, if it has a return path, has reported
    /// that it loaded the guest. Else `failed`, or `cancelled` if the proxy was stopped.
    pub outcome: Outcome,
    /// Why the migration did not complete.
    pub reason: Option<String>,
    /// The name of the socket; empty if it has none.
    pub socket: String,
    /// The other proxy.
    pub peer: String,
    /// The machine type; empty at the destination.
    pub machine: String,
    /// From the migration's first byte to its end, ms.
    pub total_ms: f64,
    /// From the end of the last round in which the guest could run until the destination QEMU reported that it has loaded the guest, ms:
    /// the part of the downtime that is visible between the QEMUs. The time in which the driving program starts the guest comes on top.
    /// None if the destination QEMU does not report it (capability `return-path` off), and at the destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime_seen_ms: Option<f64>,
    /// Multifd channels of the QEMUs; 0: all in one stream.
    pub multifd_channels: u16,
    /// Connections between the proxies that carried pages.
    pub channels: u16,
    /// Whether they were encrypted.
    pub encrypted: bool,
    /// Compression method and level; empty at the destination.
    pub method: String,
    /// Bytes on the network, headers and TLS included. This and the following figures are 0 at the destination.
    pub wire_bytes: u64,
    /// Bytes of page content before compression.
    pub content_bytes: u64,
    /// Normal pages.
    pub normal_pages: u64,
    /// Zero pages.
    pub zero_pages: u64,
    /// Content bytes / packet bytes; 1 if nothing was compressed.
    pub ratio: f64,
    /// Wire bytes per second of total time.
    pub throughput: f64,
}

impl ProxyReport {
    /// Returns the report as one line of text.
    pub fn text(&self) -> String {
        let Self { id, socket, total_ms, .. } = self;
        let of = if socket.is_empty() { String::new() } else { format!(" by {socket}") };
        let end = match (self.outcome, &self.reason) {
            (Outcome::Completed, _) => "carried".to_owned(),
            (Outcome::Cancelled, _) => "closed on request, as if the network had failed".to_owned(),
            (_, reason) => format!("broken off: {}", reason.as_deref().unwrap_or("no reason given")),
        };
        let mut text = format!("migration {id}{of}: {end}, after {total_ms:.0} ms");
        if self.side == ProxySide::Source {
            let seen = self.downtime_seen_ms.map_or(String::new(), |seen| format!(", downtime as seen {seen:.0} ms"));
            let wire = sterna_engine::report::bytes(self.wire_bytes as f64);
            text.push_str(&format!("{seen}; {wire} on the network, ratio {:.2}", self.ratio));
        }
        text
    }
}
