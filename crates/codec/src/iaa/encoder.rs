//! A channel's encoder: a batch goes to a device in pieces, all of them at once, and their streams come back as one.
//!
//! A device may still read a batch's input after it was given up, so the input must lie in memory that outlives the
//! batch: each encoder has its own region, into which it copies its input. That costs little compared with a device's
//! time.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sterna_offload::{Batch, Channel, Deflater, Offload, Operation, Outcome, Producer, Region};

use super::account::{Account, Trouble};
use super::batch_memory;
use super::join::{join, piece};
use super::verify::Verifier;
use crate::rest::Rest;
use crate::{CodecError, Encoded, Encoder, check_len, deflate, worthwhile};

pub(super) struct IaaEncoder {
    offload: Arc<Offload>,
    channel: Channel,
    /// Memory for one batch.
    region: Arc<Region>,
    verifier: Option<Verifier>,
    /// For input longer than a batch, and for when no device does it.
    cpu: Deflater,
    rest: Rest,
    account: Arc<Account>,
    /// The device that wrote the last stream, if the stream was not verified.
    producer: Option<Producer>,
}

impl fmt::Debug for IaaEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IaaEncoder({:?})", self.region)
    }
}

impl IaaEncoder {
    pub(super) fn new(
        offload: Arc<Offload>,
        channel: Channel,
        verifier: Option<Verifier>,
        account: Arc<Account>,
    ) -> Self {
        let (region, cpu) = (batch_memory(&offload), Deflater::default());
        Self { offload, channel, region, verifier, cpu, rest: Rest::default(), account, producer: None }
    }

    /// Submits `input` to offload and waits for the result; none if it was not accepted, or takes too long.
    fn offloaded(&mut self, input: &[u8]) -> Option<(Batch, Option<Producer>)> {
        self.region.range(0, input.len()).ok()?;
        if self.rest.goes_on() {
            return None;
        }
        // SAFETY: the region is writable and at least as long as the input, as the range shows. What may still be looking at it is a
        // device that was late or given up, whose answer nobody reads.
        unsafe { self.region.start().as_ptr().copy_from_nonoverlapping(input.as_ptr(), input.len()) };
        let mut batch = self.channel.batch(Operation::Deflate);
        let (size, mut at) = (piece(input.len()), 0);
        while at < input.len() {
            let range = self.region.range(at, size.min(input.len() - at)).ok()?;
            at += range.len();
            if at < input.len() { batch.push_continued(&range) } else { batch.push(&range) }.ok()?;
        }
        let ticket = self.channel.submit(batch).ok()?;
        let late = Duration::from_nanos(self.offload.lateness());
        let Some(done) = self.channel.wait(self.offload.deadline(late)) else {
            // Dropped with its ticket: later work of a device on it does not matter any more.
            self.trouble(Trouble::Late(late));
            return None;
        };
        ticket.into_id();
        (done.outcome == Outcome::Done).then_some((done.batch, done.producer))
    }

    fn trouble(&mut self, trouble: Trouble) {
        self.account.trouble(trouble);
        self.rest.begin();
    }

    fn by_cpu(&mut self, input: &[u8], output: &mut [u8]) -> Encoded {
        self.account.by_cpu(input.len());
        deflate::encode(&mut self.cpu, input, output)
    }
}

impl Encoder for IaaEncoder {
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError> {
        check_len(input.len())?;
        self.producer = None;
        let room = worthwhile(input.len(), output.len());
        if room == 0 {
            return Ok(Encoded::Incompressible);
        }
        let Some((batch, producer)) = self.offloaded(input) else { return Ok(self.by_cpu(input, output)) };
        let Some(length) = join(&batch, input, &mut output[..room]) else { return Ok(Encoded::Incompressible) };
        drop(batch);
        let Some(producer) = producer else {
            self.account.by_cpu(input.len());
            return Ok(Encoded::Shrunk(length));
        };
        let verified = self.verifier.as_mut().map(|it| it.is_right(&self.channel, &output[..length], input, producer));
        match verified {
            Some(true) => {}
            Some(false) => {
                // The device is out of service, and another may do better: no back-off for this.
                self.account.trouble(Trouble::Wrong);
                return Ok(self.by_cpu(input, output));
            }
            None => self.producer = Some(producer),
        }
        self.rest.went_well();
        self.account.by_device(input.len(), verified.is_some());
        Ok(Encoded::Shrunk(length))
    }

    fn producer(&self) -> Option<Producer> {
        self.producer
    }
}
