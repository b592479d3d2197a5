//! What became of a migration that a proxy has carried, for machines. Fields are only added. Times are in milliseconds, sizes in
//! bytes, rates in bytes per second.

use serde::Serialize;
use sterna::report::Outcome;

/// Which proxy reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProxySide {
    /// `sterna proxy send`.
    Source,
    /// `sterna proxy receive`.
    Destination,
}

/// One migration as a proxy has seen it. Whether the guest runs, and where, only the programs that drive the two QEMUs know.
#[derive(Clone, Debug, Serialize)]
pub struct ProxyReport {
    /// Who reports.
    pub side: ProxySide,
    /// The session's id, the same at both sides.
    pub id: String,
    /// `completed`: all that the source QEMU sent was taken by the destination QEMU, which has said that it loaded the guest where
    /// it says so. Else `failed`, or `cancelled` where the proxy was told to close its connections.
    pub outcome: Outcome,
    /// Why, where it did not complete.
    pub reason: Option<String>,
    /// The name of the socket; empty where it has none.
    pub socket: String,
    /// The other proxy.
    pub peer: String,
    /// The machine type; empty at the destination.
    pub machine: String,
    /// From the migration's first byte to its end, ms.
    pub total_ms: f64,
    /// From the end of the last round while the guest could run to the destination QEMU's word that it has loaded the guest, ms: the
    /// downtime as far as it can be seen from between the QEMUs. What the program that drives them takes to start the guest comes on
    /// top. None where the destination QEMU does not say (capability `return-path` off), and at the destination.
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
    /// Bytes on the network, headers and TLS included. 0 at the destination, as are those that follow.
    pub wire_bytes: u64,
    /// Bytes of page content before compression.
    pub content_bytes: u64,
    /// Normal pages.
    pub normal_pages: u64,
    /// Zero pages.
    pub zero_pages: u64,
    /// Content bytes / packet bytes; 1 where nothing was compressed.
    pub ratio: f64,
    /// Wire bytes per second of total time.
    pub throughput: f64,
}

impl ProxyReport {
    /// One line for a person.
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
            let wire = sterna::report::bytes(self.wire_bytes as f64);
            text.push_str(&format!("{seen}; {wire} on the network, ratio {:.2}", self.ratio));
        }
        text
    }
}
