//! Counters of what a channel has sent, and their sums over the channels of a migration: for progress and report.

use std::sync::atomic::{AtomicU64, Ordering};

use sterna_codec::Encoding;
use sterna_wire::packet::{Run, RunKind};

use super::SendChannel;

/// Maximum number of methods that `auto` chooses from.
pub(super) const MAX_AUTO_METHODS: usize = Encoding::MAX_AUTO_CANDIDATES;

/// Numbers of pages that were handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageCounts {
    /// Pages with content.
    pub(super) normal: u64,
    /// Zero pages.
    pub(super) zero: u64,
}

impl PageCounts {
    /// Returns how many pages `runs` have.
    pub(super) fn of(runs: &[Run]) -> Self {
        runs.iter().fold(Self::default(), |sum, run| match run.kind {
            RunKind::Normal => Self { normal: sum.normal + u64::from(run.count), ..sum },
            RunKind::Zero => Self { zero: sum.zero + u64::from(run.count), ..sum },
        })
    }
}

/// The counters of a channel.
#[derive(Debug, Default)]
pub struct SendCounters {
    /// Normal pages.
    pub normal_pages: AtomicU64,
    /// Zero pages.
    pub zero_pages: AtomicU64,
    /// Bytes of content, before compression.
    pub content_bytes: AtomicU64,
    /// Bytes of packets, before TLS.
    pub packet_bytes: AtomicU64,
    /// Bytes on the wire.
    pub wire_bytes: AtomicU64,
    /// Normal pages that were sent as deltas.
    pub delta_pages: AtomicU64,
    /// Normal pages that the destination had already, and that were not sent.
    pub same_pages: AtomicU64,
    /// Pages of both kinds whose changes an accelerator has found.
    pub device_deltas: AtomicU64,
    /// Whether there was no memory for deltas: 1 or 0.
    pub lacks_delta_cache: AtomicU64,
    /// Where `auto` chooses a method for each batch: bytes of content by method.
    pub by_method: [AtomicU64; MAX_AUTO_METHODS],
    /// Packets whose content did not shrink and was sent uncompressed.
    pub raw_packets: AtomicU64,
    /// Packets.
    pub packets: AtomicU64,
}

impl SendCounters {
    /// Counts pages that are sent, as deltas or whole, or that the destination has already.
    pub(super) fn count_pages(&self, pages: PageCounts) {
        self.normal_pages.fetch_add(pages.normal, Ordering::Relaxed);
        self.zero_pages.fetch_add(pages.zero, Ordering::Relaxed);
    }

    /// Records whether the channel lacks memory for deltas.
    pub(super) fn record_delta_cache(&self, lacks_memory: bool) {
        self.lacks_delta_cache.store(lacks_memory.into(), Ordering::Relaxed);
    }
}

/// The sums of the counters of several channels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    /// Normal pages.
    pub normal_pages: u64,
    /// Normal pages that were sent as deltas.
    pub delta_pages: u64,
    /// Normal pages that the destination had already.
    pub same_pages: u64,
    /// Pages of both kinds whose changes an accelerator has found.
    pub device_deltas: u64,
    /// Zero pages.
    pub zero_pages: u64,
    /// Bytes of content, before compression.
    pub content_bytes: u64,
    /// Bytes of packets, before TLS.
    pub packet_bytes: u64,
    /// Bytes on the wire.
    pub wire_bytes: u64,
    /// Channels that had no memory for deltas.
    pub lack_delta_cache: u64,
    /// Where `auto` chooses a method for each batch: bytes of content by method.
    pub by_method: [u64; MAX_AUTO_METHODS],
}

impl std::ops::Add for Sent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            normal_pages: self.normal_pages + other.normal_pages,
            delta_pages: self.delta_pages + other.delta_pages,
            same_pages: self.same_pages + other.same_pages,
            device_deltas: self.device_deltas + other.device_deltas,
            zero_pages: self.zero_pages + other.zero_pages,
            content_bytes: self.content_bytes + other.content_bytes,
            packet_bytes: self.packet_bytes + other.packet_bytes,
            wire_bytes: self.wire_bytes + other.wire_bytes,
            lack_delta_cache: self.lack_delta_cache + other.lack_delta_cache,
            by_method: std::array::from_fn(|method| self.by_method[method] + other.by_method[method]),
        }
    }
}

impl Sent {
    /// Returns the sums over `channels` so far.
    pub fn over<'a>(channels: impl IntoIterator<Item = &'a SendChannel>) -> Self {
        let mut sent = Self::default();
        for channel in channels {
            let counters = channel.counters();
            sent.normal_pages += counters.normal_pages.load(Ordering::Relaxed);
            sent.delta_pages += counters.delta_pages.load(Ordering::Relaxed);
            sent.same_pages += counters.same_pages.load(Ordering::Relaxed);
            sent.device_deltas += counters.device_deltas.load(Ordering::Relaxed);
            sent.zero_pages += counters.zero_pages.load(Ordering::Relaxed);
            sent.content_bytes += counters.content_bytes.load(Ordering::Relaxed);
            sent.packet_bytes += counters.packet_bytes.load(Ordering::Relaxed);
            sent.wire_bytes += counters.wire_bytes.load(Ordering::Relaxed);
            sent.lack_delta_cache += counters.lacks_delta_cache.load(Ordering::Relaxed);
            for (sum, bytes) in sent.by_method.iter_mut().zip(&counters.by_method) {
                *sum += bytes.load(Ordering::Relaxed);
            }
        }
        sent
    }

    /// Returns how many of the `requested` bytes for deltas `channels` channels keep, and the reason if a lack of memory has prevented
    /// deltas.
    pub fn delta_cache(&self, requested: u64, channels: u16) -> (u64, Option<&'static str>) {
        if self.lack_delta_cache == 0 {
            return (requested, None);
        }
        let channels = u64::from(channels.max(1));
        let had = requested / channels * channels.saturating_sub(self.lack_delta_cache);
        let none = had == 0 && self.delta_pages + self.same_pages == 0;
        (had, none.then_some("the source has no memory for what was sent"))
    }

    /// Returns content bytes / packet bytes; 1 before anything was sent.
    pub fn ratio(&self) -> f64 {
        if self.packet_bytes > 0 { self.content_bytes as f64 / self.packet_bytes as f64 } else { 1.0 }
    }
}
