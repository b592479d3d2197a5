//! The answers that Sterna reads, as types. A field that is missing or has another type is absent; unknown fields are ignored.

use std::fmt;

use serde_json::Value;
use sterna_wire::text::cleaned;

/// QEMU's version. Only the numbers count for comparisons.
#[derive(Debug, Clone, Default)]
pub struct Version {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Micro number.
    pub micro: u32,
    /// The packager's text, often empty.
    pub package: String,
}

impl Version {
    /// Parses the `version` member of the greeting (or the answer to `query-version`).
    pub(super) fn from_json(value: &Value) -> Option<Self> {
        let number = |key: &str| u32::try_from(value["qemu"][key].as_u64()?).ok();
        Some(Self {
            major: number("major")?,
            minor: number("minor")?,
            micro: number("micro")?,
            package: value["package"].as_str().unwrap_or_default().to_owned(),
        })
    }

    /// Returns whether this is version `major.minor` or a later one.
    pub fn at_least(&self, major: u32, minor: u32) -> bool {
        (self.major, self.minor) >= (major, minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// The answer to `query-migrate` about an outgoing or incoming migration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MigrationInfo {
    /// `none` if there was no migration yet, else for instance `setup`, `active`, `pre-switchover`, `device`, `completed`,
    /// `failed`, `cancelled`.
    pub status: String,
    /// Milliseconds since the start.
    pub total_time_ms: Option<u64>,
    /// Milliseconds of setup.
    pub setup_time_ms: Option<u64>,
    /// Downtime in milliseconds; after completion.
    pub downtime_ms: Option<u64>,
    /// Downtime in milliseconds if the guest stopped now, by QEMU's estimate.
    pub expected_downtime_ms: Option<u64>,
    /// Why it failed.
    pub error_desc: Option<String>,
    /// Why this guest cannot be migrated now; empty if it can.
    pub blocked_reasons: Vec<String>,
    /// Share of time that auto-converge takes from the vCPUs, percent.
    pub cpu_throttle_percentage: Option<u64>,
    /// Whether an incoming migration already listens somewhere.
    pub listening: bool,
    /// The counters of RAM; absent before it starts.
    pub ram: Option<RamInfo>,
}

/// `ram` of `query-migrate`. Bytes unless the name says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RamInfo {
    /// Sent so far.
    pub transferred: u64,
    /// Still to send.
    pub remaining: u64,
    /// Size of guest RAM.
    pub total: u64,
    /// Zero pages found.
    pub zero_pages: u64,
    /// Other pages sent.
    pub normal_pages: u64,
    /// Pages dirtied per second.
    pub dirty_pages_rate: u64,
    /// Rounds: how often the dirty log was read.
    pub dirty_sync_count: u64,
    /// Size of a page.
    pub page_size: u64,
    /// Throughput, megabits per second.
    pub mbps: f64,
    /// Sent on multifd channels.
    pub multifd_bytes: u64,
    /// Sent while the guest ran, on the main channel.
    pub precopy_bytes: u64,
    /// Sent while the guest was paused.
    pub downtime_bytes: u64,
}

impl MigrationInfo {
    pub(crate) fn from_json(value: &Value) -> Self {
        let text = |key: &str| value[key].as_str().map(str::to_owned);
        let number = |key: &str| value[key].as_u64();
        Self {
            status: text("status").unwrap_or_else(|| "none".into()),
            total_time_ms: number("total-time"),
            setup_time_ms: number("setup-time"),
            downtime_ms: number("downtime"),
            expected_downtime_ms: number("expected-downtime"),
            error_desc: text("error-desc").as_deref().map(cleaned),
            blocked_reasons: value["blocked-reasons"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|reason| reason.as_str().map(str::to_owned))
                .collect(),
            cpu_throttle_percentage: number("cpu-throttle-percentage"),
            listening: value["socket-address"].as_array().is_some_and(|addresses| !addresses.is_empty()),
            ram: value["ram"].is_object().then(|| RamInfo::from_json(&value["ram"])),
        }
    }

    /// Returns whether a migration is active, so that its settings can no longer be changed.
    pub fn is_active(&self) -> bool {
        !matches!(self.status.as_str(), "none" | "completed" | "failed" | "cancelled")
    }
}

impl RamInfo {
    fn from_json(value: &Value) -> Self {
        let number = |key: &str| value[key].as_u64().unwrap_or(0);
        Self {
            transferred: number("transferred"),
            remaining: number("remaining"),
            total: number("total"),
            zero_pages: number("duplicate"),
            normal_pages: number("normal"),
            dirty_pages_rate: number("dirty-pages-rate"),
            dirty_sync_count: number("dirty-sync-count"),
            page_size: number("page-size"),
            mbps: value["mbps"].as_f64().unwrap_or(0.0),
            multifd_bytes: number("multifd-bytes"),
            precopy_bytes: number("precopy-bytes"),
            downtime_bytes: number("downtime-bytes"),
        }
    }
}
