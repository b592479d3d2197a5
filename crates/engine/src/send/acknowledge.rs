//! The acknowledging thread of a channel: reads the destination's acknowledgements and refusals, and enters them in the ledger.

use std::sync::Arc;

use sterna_wire::packet::{ACK_LENGTH, ChannelAnswer, Refusal};

use super::error::AnswerError;
use super::ledger::ChannelLedger;
use super::retransmit::Refusals;
use crate::accelerator::Accelerator;
use crate::transport::Reader;

/// The state of an acknowledging thread.
pub(super) struct AcknowledgingThread {
    pub(super) reader: Reader,
    pub(super) ledger: Arc<ChannelLedger>,
    /// None where the destination may refuse nothing.
    pub(super) refusals: Option<Arc<Refusals>>,
    pub(super) accelerator: Option<Accelerator>,
}

impl AcknowledgingThread {
    /// Reads answers until the destination closes the channel.
    pub(super) fn run(&mut self) -> Result<(), AnswerError> {
        let mut bytes = [0; ACK_LENGTH];
        while self.reader.read_packet_start(&mut bytes)? {
            match ChannelAnswer::decode(&bytes)? {
                ChannelAnswer::Placed(ack) => self.ledger.acknowledge(&ack)?,
                ChannelAnswer::Refused(refusal) => self.refused(&refusal)?,
            }
        }
        if self.ledger.is_complete() { Ok(()) } else { Err(AnswerError::ClosedEarly) }
    }

    fn refused(&mut self, refusal: &Refusal) -> Result<(), AnswerError> {
        let packet = self.ledger.packet(refusal.sequence).ok_or(AnswerError::NotInFlight)?;
        let refusals = self.refusals.as_ref().ok_or(AnswerError::NotAgreed)?;
        refusals.read(&mut self.reader, refusal, &packet, &self.ledger)?;
        if let (Some(suspect), Some(accelerator)) = (packet.suspect, &self.accelerator) {
            let (producer, what) = suspect.charge();
            accelerator.offload().report_wrong_result(producer, what);
        }
        Ok(())
    }
}
