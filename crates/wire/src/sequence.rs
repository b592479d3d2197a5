//! Sequence numbers of one channel: which packets were sent, which have been placed, which are missing.
//!
//! Completeness is counted, never assumed: at the end the source sends the last number of each channel, and the
//! destination is complete only when each channel has placed exactly that one. A channel that is reopened in post-copy,
//! where the destination lists its missing pages, begins again at 1.

/// The sending end of a channel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SendSequence {
    last: u64,
    acknowledged: u64,
}

/// An acknowledgement that cannot be true.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the peer acknowledges packet {claimed}, but only {acknowledged}…{last} are outstanding")]
pub struct BadAcknowledgement {
    claimed: u64,
    acknowledged: u64,
    last: u64,
}

impl SendSequence {
    /// Returns the number for the next packet, from 1.
    pub fn advance(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Returns the last number used; 0 before the first.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Records the receiver's acknowledgement of everything up to `sequence`.
    pub fn acknowledge(&mut self, sequence: u64) -> Result<(), BadAcknowledgement> {
        if sequence <= self.acknowledged || sequence > self.last {
            let Self { last, acknowledged } = *self;
            return Err(BadAcknowledgement { claimed: sequence, acknowledged, last });
        }
        self.acknowledged = sequence;
        Ok(())
    }

    /// Returns how many packets were sent and not yet acknowledged.
    pub fn outstanding(&self) -> u64 {
        self.last - self.acknowledged
    }

    /// Returns the last packet acknowledged; 0 before the first.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }
}

/// The receiving end of a channel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReceiveSequence {
    placed: u64,
}

/// A packet out of its order.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("packet {found} arrived where {expected} was due")]
pub struct OutOfSequence {
    expected: u64,
    found: u64,
}

impl ReceiveSequence {
    /// Checks that `sequence` is the expected one.
    pub fn expect(&self, sequence: u64) -> Result<(), OutOfSequence> {
        let expected = self.placed + 1;
        if sequence == expected { Ok(()) } else { Err(OutOfSequence { expected, found: sequence }) }
    }

    /// Records that the expected packet has been placed.
    pub fn placed(&mut self) -> u64 {
        self.placed += 1;
        self.placed
    }

    /// Returns the last packet placed; 0 before the first.
    pub fn last(&self) -> u64 {
        self.placed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledgements_move_forward_and_never_beyond_what_was_sent() {
        let mut sent = SendSequence::default();
        assert_eq!((sent.advance(), sent.advance(), sent.advance()), (1, 2, 3));

        assert_eq!(sent.acknowledge(2), Ok(()));
        assert_eq!(sent.outstanding(), 1);
        assert!(sent.acknowledge(2).is_err());
        assert!(sent.acknowledge(4).is_err());
    }

    #[test]
    fn packets_are_placed_in_order_without_gaps_or_repetition() {
        let mut received = ReceiveSequence::default();
        assert_eq!(received.expect(1), Ok(()));
        assert_eq!(received.placed(), 1);
        assert_eq!(received.expect(1), Err(OutOfSequence { expected: 2, found: 1 }));
        assert_eq!(received.expect(3), Err(OutOfSequence { expected: 2, found: 3 }));
    }
}
