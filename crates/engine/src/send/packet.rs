//! The last stage of a channel's sending thread: encodes a packet's content, enters the packet in the ledger, paces and writes it.
//!
//! Where `auto` chooses the method of each packet, this stage also measures how the thread spends its time: the choice follows from what
//! the packets wait for ([`super::coding`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_memory::PAGE_SIZE;
use sterna_memory::ram::RamBlock;
use sterna_offload::Producer;
use sterna_wire::checksum::crc32c;
use sterna_wire::packet::{DeviceLabel, MAX_TABLE, PacketHeader, PacketKind, Run};

use super::SendContext;
use super::coding::{Bottleneck, Coding, Costs, Kernel, Seen, Times};
use super::counters::PageCounts;
use super::error::SendError;
use super::ledger::{ChannelLedger, InFlight, Suspect};
use crate::cpu_allowance::CpuAllowance;
use crate::cpu_time;
use crate::in_place;
use crate::off_cpu::{OffCpu, thread_time};
use crate::pacer::Pacer;
use crate::receive::PacketRules;
use crate::transport::Writer;
use crate::window::{Carried, Window, WindowClosed};

/// What a packet's table lists.
#[derive(Clone, Copy, Debug)]
pub(super) enum Table<'a> {
    Empty,
    Pages(&'a [Run]),
    Device(&'a DeviceLabel<'a>),
}

impl Table<'_> {
    fn encode(&self, table: &mut Vec<u8>) {
        table.clear();
        match self {
            Self::Empty => {}
            Self::Pages(runs) => runs.iter().for_each(|run| table.extend_from_slice(&run.encode())),
            Self::Device(label) => table.extend_from_slice(&label.encode()),
        }
    }
}

/// A packet to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet<'a> {
    pub(super) kind: PacketKind,
    pub(super) subject: u16,
    pub(super) detail: u64,
    pub(super) table: Table<'a>,
    pub(super) content: &'a [u8],
    /// The content's CRC-32C, if it was computed already.
    pub(super) checksum: Option<u32>,
    /// Whether the content may be compressed.
    pub(super) compress: bool,
    /// Bytes of the window that the packet's acknowledgement releases.
    pub(super) in_window: u64,
    /// Pages that count as delivered with the packet's acknowledgement.
    pub(super) delivers: PageCounts,
    /// The device that has copied the content.
    pub(super) producer: Option<Producer>,
    /// For a piece of device state: the guest's device.
    pub(super) device: Option<u16>,
}

impl<'a> Packet<'a> {
    /// Makes a packet without pages.
    pub(super) fn new(kind: PacketKind, subject: u16, content: &'a [u8]) -> Self {
        Self {
            kind,
            subject,
            detail: 0,
            table: Table::Empty,
            content,
            checksum: None,
            compress: false,
            in_window: 0,
            delivers: PageCounts::default(),
            producer: None,
            device: None,
        }
    }

    /// Makes a packet with pages of `block`, whose normal ones have this `content`. The content may be compressed.
    pub(super) fn pages(block: u16, runs: &'a [Run], content: &'a [u8]) -> Self {
        let delivers = PageCounts::of(runs);
        let table = Table::Pages(runs);
        Self { table, compress: true, delivers, ..Self::new(PacketKind::Pages, block, content) }
    }

    /// Makes a packet with pages of `block` that were refused. They were counted when they were first sent.
    pub(super) fn retransmitted(block: u16, runs: &'a [Run], content: &'a [u8]) -> Self {
        Self { compress: false, delivers: PageCounts::default(), ..Self::pages(block, runs, content) }
    }
}

/// Writes the packets of one channel.
pub(super) struct PacketWriter {
    writer: Writer,
    ledger: Arc<ChannelLedger>,
    window: Arc<Window>,
    pacer: Arc<Pacer>,
    rules: PacketRules,
    coding: Coding,
    /// The limit of the sending threads' CPU time; none: no limit.
    max_cpus: Option<Arc<CpuAllowance>>,
    clock: Clock,
    /// Buffers for a packet's encoded content and for its table.
    encoded: Vec<u8>,
    table: Vec<u8>,
}

/// How the time since the last packet with an encoder was spent.
#[derive(Default)]
struct Clock {
    times: Times,
    /// Measures the waits for the network, where the choice of an encoder needs them. Made by the thread itself.
    waits: Option<OffCpu>,
    /// The kernel's figures of the connection at the last packet.
    kernel: Kernel,
    /// The limit of CPU time, with what this thread had run at its last packet.
    cpus: Option<(Arc<CpuAllowance>, Duration)>,
}

impl PacketWriter {
    pub(super) fn new(
        writer: Writer,
        ledger: Arc<ChannelLedger>,
        context: &SendContext,
    ) -> Result<Self, sterna_codec::CodecError> {
        Ok(Self {
            writer,
            ledger,
            window: Arc::clone(&context.window),
            pacer: Arc::clone(&context.pacer),
            rules: context.rules,
            coding: Coding::new(&context.compression)?,
            max_cpus: context.compression.cpus().cloned(),
            clock: Clock::default(),
            encoded: vec![0; context.rules.packet_size],
            table: Vec::with_capacity(MAX_TABLE),
        })
    }

    /// Begins to measure the time of the calling thread, if the choice of an encoder or a limit of CPU time needs it.
    pub(super) fn start_clock(&mut self) {
        self.clock.waits = self.coding.is_auto().then(|| OffCpu::new(cpu_time::may_open_files()));
        self.clock.cpus = self.max_cpus.as_ref().map(|cpus| (Arc::clone(cpus), thread_time()));
    }

    /// Records that the thread had nothing to send for so long.
    pub(super) fn starved(&mut self, time: Duration) {
        self.clock.times.starved += time;
    }

    /// Returns the window.
    pub(super) fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// Waits until `bytes` may be in flight.
    pub(super) fn wait_for_window(&mut self, bytes: u64) -> Result<(), WindowClosed> {
        let begun = OffCpu::begin();
        self.window.enter(bytes)?;
        if let Some(waits) = &mut self.clock.waits {
            waits.end(begun);
        }
        Ok(())
    }

    /// Counts so many normal pages as delivered that are not sent, because the destination has them, and releases their room in the window.
    pub(super) fn leave_out(&self, same: u64) {
        self.ledger.counters.same_pages.fetch_add(same, Ordering::Relaxed);
        self.window.release(same * PAGE_SIZE as u64);
        self.window.count_unsent(same);
    }

    /// Returns whether pages can be written directly from guest RAM. Not with a bandwidth limit: its small pieces are easier cut from a
    /// copy.
    pub(super) fn can_send_in_place(&self) -> bool {
        self.coding.is_none() && !self.rules.checksums && self.writer.passes_on() && self.pacer.limit().is_none()
    }

    /// Returns the costs of pages that are sent whole, where the encoder is chosen by them.
    pub(super) fn costs(&self) -> Option<Costs> {
        self.coding.costs()
    }

    /// Returns the number of the last packet.
    pub(super) fn last(&self) -> u64 {
        self.ledger.last_packet()
    }

    /// Writes one packet. Returns its length in bytes.
    pub(super) fn write(&mut self, packet: &Packet<'_>) -> Result<usize, SendError> {
        let content = packet.content;
        if content.len() > self.rules.packet_size {
            return Err(SendError::TooLarge { length: content.len(), limit: self.rules.packet_size });
        }
        packet.table.encode(&mut self.table);
        let coded = packet.compress && !content.is_empty() && !self.coding.is_none();
        let encoded = if coded { self.encode(content)? } else { None };
        let (method, payload, compressor) = match encoded {
            Some((format, length)) => (format, &self.encoded[..length], self.coding.producer()),
            None => (0, content, None),
        };
        let content_pages = match packet.kind {
            PacketKind::Pages => (content.len() / PAGE_SIZE) as u64,
            _ => packet.delivers.normal,
        };
        let PageCounts { normal, zero } = packet.delivers;
        let sequence = self.ledger.next_packet(InFlight {
            in_window: packet.in_window,
            delivers: Carried {
                normal_pages: normal,
                zero_pages: zero,
                bytes: (self.table.len() + payload.len()) as u64,
            },
            content_pages,
            suspect: compressor.map(Suspect::Compressed).or(packet.producer.map(Suspect::Copied)),
            device: packet.device.map(|device| (device, content.len() as u32)),
        });
        let header = PacketHeader {
            kind: packet.kind,
            method,
            subject: packet.subject,
            sequence,
            table_length: self.table.len() as u32,
            payload_length: payload.len() as u32,
            content_length: content.len() as u32,
            content_checksum: match packet.checksum {
                _ if !self.rules.checksums => 0,
                Some(checksum) => checksum,
                None => crc32c(content),
            },
            detail: packet.detail,
        };
        let header = header.encode(&self.table);
        let length = header.len() + self.table.len() + payload.len();
        // A limit is kept by small pieces: a whole packet at once would be many milliseconds of a slow link.
        let piece = self.pacer.limit().map_or(payload.len(), |_| self.pacer.piece());
        let begun = self.clock.waits.is_some().then(|| {
            self.window.on_wire(packet.in_window);
            self.coding.writes();
            OffCpu::begin()
        });
        let (first, rest) = payload.split_at(piece.min(payload.len()));
        self.clock.times.limited += self.pacer.pace(header.len() + self.table.len() + first.len());
        self.writer.write_all_vectored(&[&header, &self.table, first])?;
        for part in rest.chunks(piece.max(1)) {
            self.clock.times.limited += self.pacer.pace(part.len());
            self.writer.write_all_vectored(&[part])?;
        }
        if let (Some(waits), Some(begun)) = (&mut self.clock.waits, begun) {
            self.clock.times.writing += waits.end(begun);
            self.clock.times.written += length;
            // For other packets no encoder was chosen: their time and bytes count with the next packet that has one.
            if coded {
                let mut times = std::mem::take(&mut self.clock.times);
                times.waited = waits.take();
                times.placing = self.ledger.take_busy();
                times.kernel = self.clock.kernel.since(&self.writer);
                let unused = self.pacer.unused();
                let seen = Seen { idle: self.window.idle(), unused, full: self.window.full() };
                self.coding.sent(times, seen, content.len());
            }
        }
        self.count(content.len(), length);
        self.keep_to_cpus();
        Ok(length)
    }

    /// Pauses while the sending threads are beyond their limit of CPU time.
    fn keep_to_cpus(&mut self) {
        let Some((cpus, before)) = &mut self.clock.cpus else { return };
        let now = thread_time();
        let running = now.saturating_sub(std::mem::replace(before, now));
        let pause = cpus.use_up(running);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }

    /// Encodes `content` into the buffer. Returns the number of the format and the encoded length; none where the content did not shrink.
    fn encode(&mut self, content: &[u8]) -> Result<Option<(u8, usize)>, SendError> {
        let left = |bottleneck| match bottleneck {
            Bottleneck::Network => self.writer.send_times()?.left,
            Bottleneck::Limit => self.pacer.left(),
        };
        let encoded = self.coding.encode(content, &mut self.encoded, left)?;
        let counters = &self.ledger.counters;
        if let Some(chosen) = self.coding.chosen() {
            counters.by_method[chosen].fetch_add(content.len() as u64, Ordering::Relaxed);
        }
        if encoded.is_none() {
            counters.raw_packets.fetch_add(1, Ordering::Relaxed);
        }
        Ok(encoded)
    }

    /// Writes one packet with pages of `block`, the number `subject`, whose content is written directly from guest RAM.
    pub(super) fn write_in_place(&mut self, subject: u16, block: &RamBlock, runs: &[Run]) -> Result<(), SendError> {
        Table::Pages(runs).encode(&mut self.table);
        let PageCounts { normal, zero } = PageCounts::of(runs);
        let bytes = normal * PAGE_SIZE as u64;
        let sequence = self.ledger.next_packet(InFlight {
            in_window: bytes,
            delivers: Carried { normal_pages: normal, zero_pages: zero, bytes: self.table.len() as u64 + bytes },
            content_pages: normal,
            suspect: None,
            device: None,
        });
        let header = PacketHeader {
            kind: PacketKind::Pages,
            method: 0,
            subject,
            sequence,
            table_length: self.table.len() as u32,
            payload_length: bytes as u32,
            content_length: bytes as u32,
            content_checksum: 0,
            detail: 0,
        };
        let header = header.encode(&self.table);
        in_place::write(&mut self.writer, &header, &self.table, block, runs)?;
        self.count(bytes as usize, header.len() + self.table.len() + bytes as usize);
        self.keep_to_cpus();
        Ok(())
    }

    /// Counts a packet that was written.
    fn count(&self, content: usize, packet: usize) {
        let counters = &self.ledger.counters;
        counters.packets.fetch_add(1, Ordering::Relaxed);
        counters.content_bytes.fetch_add(content as u64, Ordering::Relaxed);
        counters.packet_bytes.fetch_add(packet as u64, Ordering::Relaxed);
        counters.wire_bytes.store(self.writer.bytes_written(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
