//! The duration of operations, as parameters. The defaults are fitted to published values, which are named.
//!
//! An engine is occupied by a descriptor for [`Timing::descriptor_ns`], the translations it misses, and its bytes at
//! the engine's rate; the bytes of all engines of a device share the device's rate in the order in which they are
//! taken. The record follows [`Timing::latency_ns`] later, while the engine works on.

use serde::{Deserialize, Serialize};

use super::Kind;

/// A device's speed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timing {
    /// Engine time of every descriptor, ns.
    pub descriptor_ns: u64,
    /// Time from the end of the work until the record is visible, ns; it does not occupy an engine.
    pub latency_ns: u64,
    /// Rate of the whole device, picoseconds per byte, for operations that write.
    pub byte_ps: u64,
    /// Rate of the whole device, picoseconds per byte, for operations that only read.
    pub read_byte_ps: u64,
    /// Rate of one engine, picoseconds per byte, for operations that write.
    pub engine_byte_ps: u64,
    /// Rate of one engine, picoseconds per byte, for operations that only read.
    pub engine_read_byte_ps: u64,
    /// Reading a batch's list: fixed part, ns.
    pub batch_ns: u64,
    /// Reading a batch's list: per descriptor, ns.
    pub batch_descriptor_ns: u64,
    /// A page whose translation is not cached, ns.
    pub translation_miss_ns: u64,
    /// The kernel copying a completion record out of the event log, ns.
    pub event_log_ns: u64,
    /// Page requests.
    pub page_requests: PageRequests,
    /// The cost of `ENQCMD` to its core, ns. For simulators of submitters; the device does not use this.
    pub enqcmd_ns: u64,
    /// The cost of `MOVDIR64B` to its core, ns: likewise.
    pub movdir64b_ns: u64,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing::dsa()
    }
}

impl Timing {
    /// Returns the timing of a DSA of the first generation.
    ///
    /// * 1 MiB moved at depth 1: 20.1 GB/s (DML benchmark guide): 49 ps/B of the engine, 0.15 µs and 0.6 µs beside it.
    /// * The same with several in flight: 22.0 to 23.2 GB/s: 44 ps/B of the device.
    /// * Operations that only read: at least 27 GB/s (zero pages found by one device, published for QEMU), about 30
    ///   GB/s remembered from a paper: 33 ps/B.
    /// * One core cannot keep a device busy with 4 KiB by `ENQCMD`, four can (dsa-perf-micros): between 0.14 and 0.61
    ///   µs.
    pub fn dsa() -> Timing {
        Timing {
            descriptor_ns: 150,
            latency_ns: 600,
            byte_ps: 44,
            read_byte_ps: 33,
            engine_byte_ps: 49,
            engine_read_byte_ps: 37,
            batch_ns: 300,
            batch_descriptor_ns: 5,
            translation_miss_ns: 120,
            event_log_ns: 20_000,
            page_requests: PageRequests::default(),
            enqcmd_ns: 400,
            movdir64b_ns: 60,
        }
    }

    /// Returns the timing of an IAA: fixed deflate at depth 1 takes 1.2 µs + 0.495 ns/B (QPL quick start: 4 KiB 3.25
    /// µs, 16 KiB 9.4 µs). Nothing is published for the whole device; eight engines count as eight times one.
    pub fn iaa() -> Timing {
        Timing {
            descriptor_ns: 400,
            latency_ns: 800,
            byte_ps: 62,
            read_byte_ps: 62,
            engine_byte_ps: 495,
            engine_read_byte_ps: 495,
            translation_miss_ns: 0,
            ..Timing::dsa()
        }
    }

    /// Returns the timing of a kind of device.
    pub fn of(kind: Kind) -> Timing {
        match kind {
            Kind::Dsa => Timing::dsa(),
            Kind::Iaa => Timing::iaa(),
        }
    }

    /// Returns the timing of a single server whose service takes only `byte_ps` per byte, for checks against queueing
    /// theory.
    pub fn server(byte_ps: u64) -> Timing {
        Timing {
            descriptor_ns: 0,
            latency_ns: 0,
            byte_ps,
            read_byte_ps: byte_ps,
            engine_byte_ps: 0,
            engine_read_byte_ps: 0,
            batch_ns: 0,
            batch_descriptor_ns: 0,
            translation_miss_ns: 0,
            ..Timing::dsa()
        }
    }
}

/// The duration of page requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PageRequests {
    /// (weight, minimum ns, maximum ns); times are uniformly distributed in between.
    pub classes: Vec<(u32, u64, u64)>,
}

impl Default for PageRequests {
    /// QEMU's document on QPL compression: mean 9 µs, at most 556 µs; 25 206, 364 and 395 requests in the classes of 1
    /// to 10, 10 to 100 and 100 to 1000 µs. The limits within the classes are chosen so that mean and maximum agree.
    fn default() -> PageRequests {
        PageRequests { classes: vec![(25_206, 1_000, 5_900), (364, 10_000, 100_000), (395, 100_000, 556_000)] }
    }
}
