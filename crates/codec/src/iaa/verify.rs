//! Verifies a device's output by decompressing it: the check that IAA's vendor recommends after each compression. The
//! packet's checksum detects the same at the destination, for less work; this is for packets without a checksum, or
//! where retransmissions are unwanted.

use std::sync::Arc;
use std::time::Duration;

use sterna_offload::{Channel, Done, Offload, Operation, Outcome, Producer, Region};

use super::batch_memory;
use crate::CodecError;
use crate::libdeflate::Decompressor;

pub(super) struct Verifier {
    offload: Arc<Offload>,
    /// The output of devices.
    read: Arc<Region>,
    /// The final judge.
    cpu: Decompressor,
    /// The CPU's output; empty until it is needed.
    read_by_cpu: Vec<u8>,
}

/// The result of a device's decompression.
enum Read {
    /// It equals the content.
    Right,
    /// It differs, or the device has decompressed it wrongly.
    Doubtful(Option<Producer>),
    /// No device has decompressed it.
    Not,
}

impl Verifier {
    pub(super) fn new(offload: &Arc<Offload>) -> Result<Self, CodecError> {
        let cpu = Decompressor::new().ok_or(CodecError::Library { format: "deflate", reason: "no memory" })?;
        Ok(Self { offload: Arc::clone(offload), read: batch_memory(offload), cpu, read_by_cpu: Vec::new() })
    }

    /// Returns whether `stream`, which `producer` has written, decompresses to `content`. A device that has erred, in
    /// writing or in reading, is taken out of service. `channel` has nothing in progress, except discarded batches.
    pub(super) fn is_right(&mut self, channel: &Channel, stream: &[u8], content: &[u8], producer: Producer) -> bool {
        let reader = match self.by_device(channel, stream, content) {
            Read::Right => return true,
            Read::Doubtful(reader) => reader,
            Read::Not => None,
        };
        // If two devices disagree, the CPU determines which is wrong.
        let right = self.by_cpu(stream, content);
        if !right {
            self.offload.report_wrong_result(producer, "what it had compressed decompresses to something else");
        } else if let Some(reader) = reader {
            self.offload.report_wrong_result(
                reader,
                "it has decompressed to something else what the CPU reads as it should be",
            );
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
        let Some(Done { batch, outcome, producer, .. }) = channel.wait(self.offload.deadline(late)) else {
            // Dropped: the device may still write there for a while, so the memory is not read again.
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
        // SAFETY: the region is as long as the range, and no device writes it now: this batch is done, and after a batch that was not
        // done the region was replaced.
        let read = unsafe { std::slice::from_raw_parts(self.read.start().as_ptr(), content.len()) };
        if batch.placed(0) == Some(content.len()) && read == content { Read::Right } else { Read::Doubtful(producer) }
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
