//! The sending thread of a channel: takes items from the queue and passes each to its stage.
//!
//! ```text
//! guest ranges ─> PageReader ─┐
//! owned bytes ────────────────┴─> PageSender ─> PacketWriter ─> socket
//! device state, stream, marks ────────────────────┘
//! ```
//! Each stage is a struct in a file of its own ([`super::read`], [`super::pages`], [`super::packet`]). A stage gets plain values that borrow
//! from the stage before it, and has done with them when it returns: so the order of packets is that of the items.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use sterna_codec::CodecError;
use sterna_wire::device::Piece;
use sterna_wire::packet::{DeviceLabel, PacketKind};

use super::SendContext;
use super::error::SendError;
use super::ledger::ChannelLedger;
use super::packet::{Packet, PacketWriter, Table};
use super::pages::{PageSender, ReadPages};
use super::read::PageReader;
use crate::item::{Item, SendMode};
use crate::transport::Writer;

/// The stages of a sending thread.
pub(super) struct SendingThread {
    ledger: Arc<ChannelLedger>,
    reader: PageReader,
    pages: PageSender,
    /// Number of items that were taken from the queue, and how many of them the ledger has as written.
    taken: u64,
    reported: u64,
}

impl SendingThread {
    pub(super) fn new(writer: Writer, ledger: Arc<ChannelLedger>, context: &SendContext) -> Result<Self, CodecError> {
        let packets = PacketWriter::new(writer, Arc::clone(&ledger), context)?;
        let pages = PageSender::new(packets, Arc::clone(&ledger), context);
        Ok(Self { ledger, reader: PageReader::new(context), pages, taken: 0, reported: 0 })
    }

    /// Sends the items of the queue until it ends.
    pub(super) fn run(mut self, items: &Receiver<Item>) -> Result<(), SendError> {
        self.pages.packets().start_clock();
        loop {
            let item = match items.try_recv() {
                Ok(item) => item,
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {
                    self.flush()?;
                    let begun = Instant::now();
                    let Ok(item) = items.recv() else { break };
                    self.pages.packets().starved(begun.elapsed());
                    item
                }
            };
            self.taken += u64::from(item.is_of_round());
            self.send(&item)?;
            // Its batch returns to the pool.
            drop(item);
            self.report();
        }
        self.flush()?;
        // Before dropping the writing half closes it, so that the peer's closing in return does not count as a failure.
        self.ledger.finish();
        Ok(())
    }

    /// Sends all pages that are held.
    fn flush(&mut self) -> Result<(), SendError> {
        self.reader.flush(&mut self.pages)?;
        self.report();
        Ok(())
    }

    /// Reports the items that are written, unless pages are held.
    fn report(&mut self) {
        if self.reported < self.taken && !self.reader.holds_pages() {
            self.reported = self.taken;
            self.ledger.all_written(self.taken);
        }
    }

    fn send(&mut self, item: &Item) -> Result<(), SendError> {
        if let Item::Guest(wanted) = item {
            return self.reader.read(wanted, &mut self.pages);
        }
        // The pages before this item are sent first.
        self.reader.flush(&mut self.pages)?;
        let packet = match item {
            Item::Guest(..) => unreachable!("done above"),
            Item::Pages(batch) => return self.pages.send(&ReadPages::of(batch, SendMode::Usual)),
            Item::Retransmit => return self.pages.retransmit().map(drop),
            Item::Discard(batch) => {
                // Post-copy begins.
                self.pages.forget_destination();
                let table = Table::Pages(batch.runs());
                Packet { table, ..Packet::new(PacketKind::Discard, batch.block, &[]) }
            }
            Item::GenerationEnd(generation) => {
                Packet { detail: *generation, ..Packet::new(PacketKind::GenerationEnd, 0, &[]) }
            }
            Item::Stream { record, content } => Packet::new(PacketKind::Stream, *record, content),
            Item::Device { device, place, piece, in_window } => {
                // Not before: in the queue the piece would hold bytes of the window that the item before it waits for.
                if *in_window > 0 {
                    self.pages.packets().wait_for_window(*in_window)?;
                }
                let (kind, bytes) = match piece {
                    Piece::Bytes(bytes) => (PacketKind::DeviceBuffer, &**bytes),
                    Piece::Ahead => (PacketKind::DeviceAhead, &[][..]),
                    Piece::End => (PacketKind::DeviceEnd, &[][..]),
                };
                let (detail, device_number) = (*place, Some(*device));
                Packet { detail, in_window: *in_window, device: device_number, ..Packet::new(kind, *device, bytes) }
            }
            Item::DeviceState { name, instance, content } => {
                let label = DeviceLabel { name, instance: *instance };
                let packet = Packet::new(PacketKind::DeviceState, 0, content);
                return self.write(&Packet { table: Table::Device(&label), ..packet });
            }
            Item::Opaque(content) if content.is_empty() => Packet::new(PacketKind::OpaqueEnd, 0, &[]),
            Item::Opaque(content) => Packet::new(PacketKind::Opaque, 0, content),
        };
        self.write(&packet)
    }

    fn write(&mut self, packet: &Packet<'_>) -> Result<(), SendError> {
        self.pages.packets().write(packet).map(drop)
    }
}
