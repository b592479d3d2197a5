//! The format `deflate` by IAA devices, by way of `sterna-offload`, which has the CPU do what no device does.
//!
//! A device may still read a batch's input after it was given up, so the input must lie in memory that outlives the batch: each
//! encoder has a region of its own, and copies what it is given there. Beside what a device takes for it, that is little.

use crate::{CodecError, Encoded, Encoder, EncoderSource, check_len, deflate, worthwhile};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use sterna_offload::{Batch, Channel, Deflater, Guest, NEVER, Offload, Operation, Outcome, Region};

const PAGE: usize = 4096;

/// The IAA devices of an [`Offload`], for one guest.
#[derive(Clone, Debug)]
pub struct Iaa {
    offload: Arc<Offload>,
    guest: Arc<Guest>,
}

impl Iaa {
    /// Those of `offload` for one of its guests; none where it has no device that deflates.
    pub fn new(offload: &Arc<Offload>, guest: &Arc<Guest>) -> Option<Self> {
        offload.accelerates(Operation::Deflate).then(|| Self { offload: Arc::clone(offload), guest: Arc::clone(guest) })
    }
}

impl EncoderSource for Iaa {
    fn encoder(&self, _level: i32) -> Result<Box<dyn Encoder>, CodecError> {
        let memory = Memory::new(self.offload.batch_pages() * PAGE);
        let (start, bytes) = (memory.start, memory.layout.size());
        // SAFETY: mapped as long as its owner lives, which the region keeps; nobody refers to it.
        let region = unsafe { Region::new(start, bytes, Some(Arc::new(memory))) };
        // Nobody but the encoder writes it, and not while a batch that anybody waits for is under way.
        region.set_racing(false);
        let channel = self.offload.channel_for(&self.guest);
        Ok(Box::new(IaaEncoder { channel, region, cpu: Deflater::default() }))
    }

    fn is_hardware(&self) -> bool {
        true
    }
}

/// Memory that is given back when nobody uses it any more.
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: only the address is handed around; whoever uses it answers for that.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, PAGE).expect("a batch is far smaller than the address space");
        assert!(bytes > 0, "a batch has pages");
        // SAFETY: of a size that is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        Self { start: start.unwrap_or_else(|| handle_alloc_error(layout)), layout }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

struct IaaEncoder {
    channel: Channel,
    /// Room for one batch.
    region: Arc<Region>,
    /// For what is longer than a batch, and for when offload has shut down.
    cpu: Deflater,
}

impl fmt::Debug for IaaEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IaaEncoder({:?})", self.region)
    }
}

impl IaaEncoder {
    /// Hands `input` to offload and waits for it; none if it was not taken.
    fn offloaded(&self, input: &[u8]) -> Option<Batch> {
        let range = self.region.range(0, input.len()).ok()?;
        // SAFETY: the region is writable and at least as long as the input, as the range shows. What may still be looking at it is a
        // device that was given up, whose answer nobody reads.
        unsafe { self.region.start().as_ptr().copy_from_nonoverlapping(input.as_ptr(), input.len()) };
        let mut batch = self.channel.batch(Operation::Deflate);
        batch.push(&range).ok()?;
        let ticket = self.channel.submit(batch).ok()?;
        let done = self.channel.wait(NEVER);
        ticket.into_id();
        done.filter(|done| done.outcome == Outcome::Done).map(|done| done.batch)
    }
}

impl Encoder for IaaEncoder {
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError> {
        check_len(input.len())?;
        let room = worthwhile(input.len(), output.len());
        if room == 0 {
            return Ok(Encoded::Incompressible);
        }
        let Some(batch) = self.offloaded(input) else { return Ok(deflate::encode(&mut self.cpu, input, output)) };
        let Some(stream) = batch.deflated(0).filter(|stream| stream.len() <= room) else {
            return Ok(Encoded::Incompressible);
        };
        output[..stream.len()].copy_from_slice(stream);
        Ok(Encoded::Shrunk(stream.len()))
    }
}
