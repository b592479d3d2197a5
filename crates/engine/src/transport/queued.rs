//! A sending half that never waits for the network: what the network does not accept at once is queued, in order.
//!
//! For the control channel, whose messages are sent by a thread that has time limits to keep.

use std::io;

use super::stream::{Room, Writer};

/// Bytes that have been sent and are still held, before they are released: a copy of what follows them for each such amount.
const MAX_SENT: usize = 64 << 10;

/// A [`Writer`] with a queue. The caller bounds the queue ([`QueuedWriter::queued`]) and has it sent on
/// ([`QueuedWriter::send_queued`]) when there is room again ([`QueuedWriter::room`]).
///
/// Dropping it ends the direction as dropping the writer does, but without TLS's `close_notify` where bytes are queued.
#[derive(Debug)]
pub struct QueuedWriter {
    writer: Writer,
    /// What is to be sent, as on the wire.
    bytes: Vec<u8>,
    /// How many of the bytes have been sent.
    sent: usize,
}

impl From<Writer> for QueuedWriter {
    fn from(writer: Writer) -> Self {
        Self { writer, bytes: Vec::new(), sent: 0 }
    }
}

impl QueuedWriter {
    /// Sends `bytes` behind those that are queued, and queues what there is no room for.
    ///
    /// # Errors
    /// Those of [`Writer::write_all_vectored`]. After an error this half is unusable.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        // The memory is that of the queue, also where it is never empty.
        if self.sent > MAX_SENT {
            self.bytes.drain(..std::mem::take(&mut self.sent));
        }
        self.writer.prepare(bytes, &mut self.bytes)?;
        self.send_queued()
    }

    /// Sends as many of the queued bytes as there is room for.
    ///
    /// # Errors
    /// As [`QueuedWriter::send`].
    pub fn send_queued(&mut self) -> io::Result<()> {
        while self.queued() > 0 {
            match self.writer.send_prepared(&self.bytes[self.sent..])? {
                0 => return Ok(()),
                sent => self.sent += sent,
            }
        }
        self.bytes.clear();
        self.sent = 0;
        Ok(())
    }

    /// Returns how many bytes are queued.
    pub fn queued(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Returns a handle to wait for room to send, without this writer.
    pub fn room(&self) -> Room {
        self.writer.room()
    }
}

impl Drop for QueuedWriter {
    fn drop(&mut self) {
        if self.queued() > 0 {
            self.writer.abandon();
        }
    }
}
