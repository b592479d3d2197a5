//! Reading again what a device has written: the check that IAA's vendor recommends after each compression. The packet's checksum finds
//! the same at the destination, for less work; this is for where there is none, or where nothing is to be sent twice.

use std::sync::Arc;
use std::time::Duration;

use sterna_offload::{Channel, Done, Maker, Offload, Operation, Outcome, Region};

use super::batch_memory;
use crate::CodecError;
use crate::libdeflate::Decompressor;

pub(super) struct Verifier {
    offload: Arc<Offload>,
    /// Where devices write what a stream says.
    read: Arc<Region>,
    /// Who has the last word.
    cpu: Decompressor,
    /// Where it writes; empty until it has to.
    read_by_cpu: Vec<u8>,
}

/// What became of a stream that was to be read by a device.
enum Read {
    /// It is what it should be.
    Right,
    /// It is not, or the device has read it wrongly.
    Doubtful(Option<Maker>),
    /// Nobody has read it.
    Not,
}

impl Verifier {
    pub(super) fn new(offload: &Arc<Offload>) -> Result<Self, CodecError> {
        let cpu = Decompressor::new().ok_or(CodecError::Library { format: "deflate", reason: "no memory" })?;
        Ok(Self { offload: Arc::clone(offload), read: batch_memory(offload), cpu, read_by_cpu: Vec::new() })
    }

    /// Whether `stream`, which `maker` has written, is `content`. A device that has erred, in writing or in reading it, is taken out of
    /// service. Nothing is under way on `channel`, but for what nobody wants any more.
    pub(super) fn is_right(&mut self, channel: &Channel, stream: &[u8], content: &[u8], maker: Maker) -> bool {
        let reader = match self.by_device(channel, stream, content) {
            Read::Right => return true,
            Read::Doubtful(reader) => reader,
            Read::Not => None,
        };
        // Of two devices that do not agree, the CPU says which is wrong.
        let right = self.by_cpu(stream, content);
        if !right {
            self.offload.distrust(maker, "what it had compressed decompresses to something else");
        } else if let Some(reader) = reader {
            self.offload.distrust(reader, "it has decompressed to something else what the CPU reads as it should be");
        }
        right
    }

    fn by_device(&mut self, channel: &Channel, stream: &[u8], content: &[u8]) -> Read {
        let Ok(range) = self.read.range(0, content.len()) else { return Read::Not };
        let mut batch = channel.batch(Operation::Inflate);
        match batch.push_input(stream.len(), &range) {
            Ok(room) => room.copy_from_slice(stream),
            Err(_) => return Read::Not,
        }
        let Ok(ticket) = channel.submit(batch) else { return Read::Not };
        let late = Duration::from_nanos(self.offload.lateness());
        let Some(Done { batch, outcome, maker, .. }) = channel.wait(self.offload.deadline(late)) else {
            // Dropped: the device may write there for a while, so it is not looked at again.
            drop(ticket);
            self.read = batch_memory(&self.offload);
            return Read::Not;
        };
        ticket.into_id();
        if outcome != Outcome::Done {
            // A device out of service may write there until it is proved quiet.
            self.read = batch_memory(&self.offload);
            return Read::Not;
        }
        // SAFETY: of a region as long as the range, which nobody writes now: the batch was done, and where an earlier one was not, the
        // region was given up.
        let read = unsafe { std::slice::from_raw_parts(self.read.start().as_ptr(), content.len()) };
        if batch.placed(0) == Some(content.len()) && read == content { Read::Right } else { Read::Doubtful(maker) }
    }

    fn by_cpu(&mut self, stream: &[u8], content: &[u8]) -> bool {
        if self.read_by_cpu.len() < content.len() {
            self.read_by_cpu.resize(content.len(), 0);
        }
        let read = &mut self.read_by_cpu[..content.len()];
        let decoded = self.cpu.deflate(stream, read.into());
        decoded.is_ok_and(|decoded| decoded.read == stream.len() && decoded.written == content.len()) && read == content
    }
}
