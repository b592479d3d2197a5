//! The state of one device in transit: in pieces that travel on any channel, reassembled in order where it is loaded,
//! within a limit.
//!
//! The destination grants credit ([`DeviceCredit`]): how much of a device's state may be in transit or queued at the
//! destination. The source sends no more. So a device that accepts nothing for a while delays only its own source: no
//! channel ever waits for it, and the piece that it needs next is never behind a piece that there is no room for.
//!
//! [`DeviceCredit`]: crate::control::ControlMessage::DeviceCredit

use std::collections::BTreeMap;

/// The cost of a piece beyond its content, in bytes: many small pieces take more memory than their content.
pub const PIECE_OVERHEAD: u64 = 4096;
/// The smallest first credit of a device, in bytes.
pub const MIN_CREDIT: u64 = 64 << 10;

/// Returns the cost of a piece with this many bytes of content.
pub const fn cost(content: usize) -> u64 {
    (content as u64).saturating_add(PIECE_OVERHEAD)
}

/// A piece of a device's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<B> {
    /// Some of its bytes.
    Bytes(B),
    /// The end of the state that is to be loaded before the guest is paused.
    Ahead,
    /// The end of the state.
    End,
}

/// An impossible message of the other side about a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// More arrived than was permitted.
    #[error("more of the device's state has come than was permitted: {received} bytes, of {permitted}")]
    BeyondCredit {
        /// Bytes so far, by cost.
        received: u64,
        /// Bytes permitted.
        permitted: u64,
    },
    /// Two pieces have the same position.
    #[error("piece {0} of the device's state has come twice")]
    Twice(u64),
    /// A piece behind the end.
    #[error("piece {0} of the device's state lies behind its end")]
    BehindEnd(u64),
    /// The first credit is too small to send anything.
    #[error("a credit of {0} bytes for a device is less than {MIN_CREDIT}")]
    Credit(u64),
}

/// The sending end: counts positions and credit.
#[derive(Clone, Debug, Default)]
pub struct DeviceSender {
    next: u64,
    spent: u64,
    up_to: u64,
    /// The first credit.
    at_once: u64,
}

impl DeviceSender {
    /// Records that the destination permits this many bytes in total.
    ///
    /// # Errors
    /// The first credit is below [`MIN_CREDIT`].
    pub fn credit(&mut self, up_to: u64) -> Result<(), DeviceError> {
        if self.at_once == 0 {
            if up_to < MIN_CREDIT {
                return Err(DeviceError::Credit(up_to));
            }
            self.at_once = up_to;
        }
        self.up_to = self.up_to.max(up_to);
        Ok(())
    }

    /// Returns the cost of the pieces that were sent and are not known to have been loaded.
    pub fn not_loaded(&self) -> u64 {
        self.spent.saturating_sub(self.loaded())
    }

    /// Returns the cost of the pieces that are known to have been loaded.
    pub fn loaded(&self) -> u64 {
        self.up_to - self.at_once
    }

    /// Returns the most content bytes of a piece if a packet has `packet`; none before the first credit. Several pieces
    /// fit into the credit, so that one can be sent while others are loaded.
    pub fn largest_piece(&self, packet: usize) -> Option<usize> {
        let most = (self.at_once / 4).checked_sub(PIECE_OVERHEAD)?;
        Some(packet.min(usize::try_from(most).unwrap_or(usize::MAX)))
    }

    /// Returns the position of a piece with this many bytes of content, if it may be sent now.
    pub fn send(&mut self, content: usize) -> Option<u64> {
        let spent = self.spent.checked_add(cost(content))?;
        if spent > self.up_to {
            return None;
        }
        self.spent = spent;
        self.next += 1;
        Some(self.next - 1)
    }
}

/// The receiving end: puts pieces in order, and determines when more may be sent. `B` holds the bytes.
#[derive(Clone, Debug)]
pub struct DeviceReceiver<B> {
    next: u64,
    waiting: BTreeMap<u64, Piece<B>>,
    received: u64,
    /// The cost of the pieces that were loaded.
    loaded: u64,
    permitted: u64,
    at_once: u64,
    /// The position of the end, once that has arrived.
    end: Option<u64>,
}

impl<B> DeviceReceiver<B> {
    /// Makes a receiver that permits `at_once` bytes at first: at least [`MIN_CREDIT`].
    pub fn new(at_once: u64) -> Self {
        debug_assert!(at_once >= MIN_CREDIT);
        Self { next: 0, waiting: BTreeMap::new(), received: 0, loaded: 0, permitted: at_once, at_once, end: None }
    }

    /// Returns the total cost that is permitted.
    pub fn permitted(&self) -> u64 {
        self.permitted
    }

    /// Checks whether a piece with this many bytes of content may arrive at `place`. Call it before reserving memory
    /// for the piece.
    ///
    /// # Errors
    /// The piece is not permitted, and why.
    pub fn check(&self, place: u64, content: usize) -> Result<(), DeviceError> {
        let received = self.received.saturating_add(cost(content));
        if received > self.permitted {
            return Err(DeviceError::BeyondCredit { received, permitted: self.permitted });
        }
        if place < self.next || self.waiting.contains_key(&place) {
            return Err(DeviceError::Twice(place));
        }
        if self.end.is_some_and(|end| place > end) {
            return Err(DeviceError::BehindEnd(place));
        }
        Ok(())
    }

    /// Adds a piece with this many bytes of content.
    ///
    /// # Errors
    /// As [`DeviceReceiver::check`].
    pub fn arrived(&mut self, place: u64, content: usize, piece: Piece<B>) -> Result<(), DeviceError> {
        self.check(place, content)?;
        if matches!(piece, Piece::End) {
            if let Some((last, _)) = self.waiting.last_key_value().filter(|(last, _)| **last > place) {
                return Err(DeviceError::BehindEnd(*last));
            }
            self.end = Some(place);
        }
        self.received += cost(content);
        self.waiting.insert(place, piece);
        Ok(())
    }

    /// Returns whether the next piece in order has arrived.
    pub fn has_next(&self) -> bool {
        self.waiting.contains_key(&self.next)
    }

    /// Returns the next piece in order, if it has arrived.
    pub fn next_piece(&mut self) -> Option<Piece<B>> {
        let piece = self.waiting.remove(&self.next)?;
        self.next += 1;
        Some(piece)
    }

    /// Records that a piece with this many bytes of content was loaded. Returns the total cost permitted now, if it
    /// should be sent: not for every piece, since it costs a message.
    pub fn done_with(&mut self, content: usize) -> Option<u64> {
        self.loaded += cost(content);
        self.permit(self.at_once / 8)
    }

    /// Returns the total cost permitted now, if the source was sent less. Called when nothing is left to be loaded, so
    /// that the source learns that everything was loaded.
    pub fn unsent_credit(&mut self) -> Option<u64> {
        self.permit(1)
    }

    /// Updates the permitted total, if it increases by at least `least`.
    fn permit(&mut self, least: u64) -> Option<u64> {
        let up_to = self.loaded.saturating_add(self.at_once);
        if up_to - self.permitted < least {
            return None;
        }
        self.permitted = up_to;
        Some(up_to)
    }

    /// Returns the most bytes in transit or queued here, by cost.
    pub fn at_once(&self) -> u64 {
        self.at_once
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sterna_test_kit::Random;

    use super::*;

    fn receiver() -> DeviceReceiver<Vec<u8>> {
        DeviceReceiver::new(MIN_CREDIT)
    }

    fn bytes(content: &[u8]) -> Piece<Vec<u8>> {
        Piece::Bytes(content.to_vec())
    }

    #[test]
    fn pieces_are_returned_in_order_whatever_their_order_of_arrival() {
        let mut receiver = receiver();
        receiver.arrived(2, 0, Piece::End).unwrap();
        receiver.arrived(1, 1, bytes(b"b")).unwrap();
        assert_eq!(receiver.next_piece(), None);
        receiver.arrived(0, 1, bytes(b"a")).unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| receiver.next_piece()).collect();
        assert_eq!(taken, [bytes(b"a"), bytes(b"b"), Piece::End]);
    }

    #[test]
    fn impossible_pieces_are_refused() {
        let mut receiver = receiver();
        receiver.arrived(0, 1, bytes(b"a")).unwrap();
        receiver.arrived(3, 1, bytes(b"d")).unwrap();
        assert_eq!(receiver.arrived(0, 1, bytes(b"a")), Err(DeviceError::Twice(0)));
        receiver.next_piece();
        assert_eq!(receiver.arrived(0, 1, bytes(b"a")), Err(DeviceError::Twice(0)));
        assert_eq!(receiver.arrived(2, 0, Piece::End), Err(DeviceError::BehindEnd(3)));
        receiver.arrived(4, 0, Piece::End).unwrap();
        assert_eq!(receiver.arrived(5, 1, bytes(b"f")), Err(DeviceError::BehindEnd(5)));
        let too_much = MIN_CREDIT as usize;
        assert!(matches!(receiver.check(1, too_much), Err(DeviceError::BeyondCredit { .. })));
        assert!(receiver.check(1, usize::MAX).is_err(), "and does not overflow");
    }

    #[test]
    fn empty_pieces_without_end_are_beyond_the_credit_too() {
        let mut receiver = receiver();
        let took = (0..).take_while(|place| receiver.arrived(place + 1, 0, bytes(b"")).is_ok()).count();
        assert_eq!(took as u64, MIN_CREDIT / PIECE_OVERHEAD);
    }

    #[test]
    fn a_receiver_without_a_bound_sends_no_further_credit() {
        let mut receiver = DeviceReceiver::new(u64::MAX);
        receiver.arrived(0, 1000, bytes(b"a")).unwrap();
        receiver.next_piece().unwrap();
        assert_eq!((receiver.done_with(1000), receiver.permitted()), (None, u64::MAX));
    }

    #[test]
    fn loaded_pieces_are_known_once_the_remaining_credit_is_sent() {
        let (mut sender, mut receiver) = (DeviceSender::default(), receiver());
        sender.credit(receiver.permitted()).unwrap();
        let place = sender.send(100).unwrap();
        receiver.arrived(place, 100, bytes(&[1; 100])).unwrap();
        receiver.next_piece().unwrap();
        assert_eq!((receiver.done_with(100), sender.not_loaded()), (None, cost(100)));
        sender.credit(receiver.unsent_credit().unwrap()).unwrap();
        assert_eq!((receiver.unsent_credit(), sender.not_loaded(), sender.loaded()), (None, 0, cost(100)));
    }

    #[test]
    fn a_first_credit_that_nothing_fits_into_is_refused() {
        let mut sender = DeviceSender::default();
        assert_eq!((sender.largest_piece(1 << 19), sender.send(0)), (None, None));
        assert_eq!(sender.credit(MIN_CREDIT - 1), Err(DeviceError::Credit(MIN_CREDIT - 1)));
        sender.credit(MIN_CREDIT).unwrap();
        assert_eq!(sender.largest_piece(1 << 19), Some(12 << 10));
        assert_eq!(sender.largest_piece(4096), Some(4096));
        // An older credit that arrives late does not reduce it.
        sender.credit(2 * MIN_CREDIT).unwrap();
        sender.credit(1).unwrap();
        assert!(sender.send(MIN_CREDIT as usize).is_some());
    }

    proptest! {
        /// Both ends: pieces arrive in any order, credits late. The state is the same, the limit is kept, and it always
        /// ends.
        #[test]
        fn a_state_arrives_whole_within_its_bound(
            lengths in prop::collection::vec(0usize..=100, 0..200),
            at_once in MIN_CREDIT..1 << 20,
            seed: u64,
        ) {
            let (mut sender, mut receiver) = (DeviceSender::default(), DeviceReceiver::new(at_once));
            sender.credit(receiver.permitted()).unwrap();
            let largest = sender.largest_piece(1 << 19).unwrap();
            let mut pieces = lengths.iter().map(|percent| percent * largest / 100).enumerate();
            let mut next = pieces.next();
            let (mut on_the_way, mut credits, mut taken, mut held) = (Vec::new(), Vec::new(), Vec::new(), 0);
            let (mut ended, mut said_end) = (false, false);
            let mut random = Random::new(seed);
            let mut choices = std::iter::repeat_with(|| random.index(usize::MAX));
            while !ended {
                let (mut moved, choice) = (false, choices.next().unwrap());
                match next {
                    Some((number, length)) if choice % 3 > 0 => if let Some(place) = sender.send(length) {
                        on_the_way.push((place, length, Piece::Bytes(number)));
                        held += cost(length);
                        next = pieces.next();
                        moved = true;
                    },
                    None if !said_end => if let Some(place) = sender.send(0) {
                        on_the_way.push((place, 0, Piece::End));
                        (said_end, moved) = (true, true);
                        held += cost(0);
                    },
                    _ => {}
                }
                prop_assert!(held <= at_once, "{held} of {at_once}");
                if choice % 2 == 0 && !on_the_way.is_empty() {
                    let (place, length, piece) = on_the_way.swap_remove(choice % on_the_way.len());
                    receiver.arrived(place, length, piece).unwrap();
                    moved = true;
                }
                if choice % 5 > 0 && let Some(piece) = receiver.next_piece() {
                    moved = true;
                    let length = match piece {
                        Piece::Bytes(number) => {
                            taken.push(number);
                            lengths[number] * largest / 100
                        }
                        Piece::Ahead => 0,
                        Piece::End => {
                            ended = true;
                            0
                        }
                    };
                    held -= cost(length);
                    credits.extend(receiver.done_with(length));
                }
                if choice % 7 > 2 || !moved {
                    for up_to in credits.drain(..) {
                        sender.credit(up_to).unwrap();
                    }
                }
                // Where no message is in transit, the sender is never blocked.
                if credits.is_empty() && on_the_way.is_empty() && receiver.waiting.is_empty() {
                    prop_assert!(ended || sender.clone().send(largest).is_some());
                }
            }
            prop_assert_eq!(taken, (0..lengths.len()).collect::<Vec<_>>());
        }
    }
}
