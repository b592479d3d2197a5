//! The costs of operations, and the source of each value.

use std::ops::AddAssign;

use serde::Serialize;

use crate::Nanos;

/// CPU time in two accounts, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cpu {
    /// Time by measured values, of this machine or of a published run.
    pub measured: f64,
    /// Estimated time: instructions and cache misses of hardware that is not available.
    pub charged: f64,
}

impl Cpu {
    /// Returns measured time only.
    pub fn measured(nanos: f64) -> Self {
        Self { measured: nanos, charged: 0.0 }
    }

    /// Returns charged time only.
    pub fn charged(nanos: f64) -> Self {
        Self { measured: 0.0, charged: nanos }
    }

    /// Returns the sum of both, as a duration.
    pub fn total(self) -> f64 {
        self.measured + self.charged
    }

    /// Returns `count` times this.
    #[must_use]
    pub fn times(self, count: f64) -> Self {
        Self { measured: self.measured * count, charged: self.charged * count }
    }

    /// Returns the sum with `other`.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl AddAssign for Cpu {
    fn add_assign(&mut self, other: Self) {
        self.measured += other.measured;
        self.charged += other.charged;
    }
}

/// All costs, in nanoseconds unless stated otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Costs {
    /// Finding a page that must be sent and putting it into a packet. QEMU's main thread, 50 % normal pages, CPU check.
    pub search_page: f64,
    /// Sending one normal page of 4 KiB over TCP. The rest of QEMU's sender threads in the same run.
    pub send_page: f64,
    /// One call that sends a packet's header. Charged: a `sendmsg` on TCP.
    pub send_packet: f64,
    /// Packets of only zero pages that share one call.
    pub zero_packets_shared: f64,
    /// Zero test of 4 KiB that is in no cache: 21 GB/s, measured (AVX2, Zen 4).
    pub scan_page: f64,
    /// Filling a descriptor and clearing its record. Measured where the simulator runs.
    pub fill_descriptor: f64,
    /// `Share::ask` and `Share::done` for a batch. Measured where the simulator runs.
    pub ask: f64,
    /// Logic of recycling a batch, without the cache misses. A fixed value: it is not measured where the simulator
    /// runs.
    pub harvest: f64,
    /// `ENQCMD`. Charged: between 140 and 610 (one core cannot fill a device with 4 KiB each, four can).
    pub enqcmd: f64,
    /// Reading a line that the device wrote, one after another. Charged: last-level cache, overlapping.
    pub record_line: f64,
    /// Reading the first of these lines alone. Charged.
    pub record_first: f64,
    /// Blocking and being woken, both sides. Charged.
    pub wake: f64,
    /// How late a timer is. Charged as time, not as CPU.
    pub timer_slack: f64,
    /// One poll of a thread that polls without sleeping. Charged.
    pub poll: f64,
    /// Memory bandwidth, GB/s: two sockets of eight channels DDR5-4800, the achieved part of 614.
    pub dram: f64,
    /// Memory traffic of sending a byte: read, written into the socket, read by the network card.
    pub send_traffic: f64,
    /// The network, GB/s: 100 Gbit/s.
    pub link: f64,
    /// How long a connection blocks its sender for each normal page beyond the sender's own CPU time, because of its
    /// receiver. 0 if unknown.
    pub connection_page: f64,
    /// Bytes that a connection holds before its sender blocks.
    pub socket_buffer: f64,
    /// How long a thread keeps its core while others wait for it.
    pub time_slice: f64,
}

/// The values of the published run to which the software's costs are fitted: seed Z, 50 % normal pages, CPU check.
pub mod fit {
    /// Pages of 100 GB, as the published figures per page count them.
    pub const PAGES: f64 = 25.6e6;
    /// Main thread, ms.
    pub const MAIN_MS: f64 = 5_658.0;
    /// All senders, ms.
    pub const SENDERS_MS: f64 = 41_922.0 - 5_658.0;
    /// From beginning to end, ms.
    pub const TOTAL_MS: f64 = 10_343.0;
}

impl Default for Costs {
    fn default() -> Self {
        let scan_page = 4096.0 / 21.0;
        let send_packet = 2_500.0;
        let wake = 2_000.0;
        let senders = fit::SENDERS_MS * 1e6 / fit::PAGES;
        Self {
            // Both threads sleep once for each packet of that run.
            search_page: fit::MAIN_MS * 1e6 / fit::PAGES - wake / 128.0,
            // The rest of the senders' time, divided by every second page.
            send_page: (senders - scan_page - (send_packet + wake) / 128.0) * 2.0,
            send_packet,
            zero_packets_shared: 8.0,
            scan_page,
            fill_descriptor: 8.0,
            ask: 150.0,
            harvest: 300.0,
            enqcmd: 350.0,
            record_line: 30.0,
            record_first: 100.0,
            wake,
            timer_slack: 1_500.0,
            poll: 100.0,
            dram: 350.0,
            send_traffic: 3.0,
            link: 12.5,
            connection_page: 0.0,
            socket_buffer: 4.0e6,
            time_slice: 3.0e6,
        }
    }
}

/// Returns how long the 8 connections of the fitted run blocked their senders for each normal page: time that was not
/// CPU time.
pub fn fitted_connection() -> f64 {
    let packets = fit::PAGES / 128.0;
    let cycle = fit::TOTAL_MS * 1e6 * 8.0 / packets;
    let cpu = fit::SENDERS_MS * 1e6 / packets;
    (cycle - cpu) / 64.0
}

/// Returns a time as a whole number, not before `now`.
pub(crate) fn after(now: Nanos, span: f64) -> Nanos {
    now + span.max(0.0).round() as Nanos
}
