//! The model's stream of state. It is opaque to its readers and writers, like every driver's; the model itself detects
//! a missing or repeated byte.
//!
//! ```text
//! header   0x01, bytes of state (u64)
//! piece    0x02, where (u64), how many (u32), bytes; a later one replaces an earlier one
//! trailer  0x03, sum over the whole state (u64)
//! ```

use std::collections::BTreeSet;

/// Bytes of state per piece.
pub(super) const PIECE: usize = 512;
const HEADER: u64 = 1 + 8;
const PIECE_HEADER: u64 = 1 + 8 + 4;

fn sum(state: &[u8]) -> u64 {
    state.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn piece_of(state: &[u8], piece: usize) -> &[u8] {
    let from = (piece * PIECE).min(state.len());
    &state[from..(from + PIECE).min(state.len())]
}

/// The stream of a device in the saving group.
#[derive(Debug)]
pub(super) struct Saving {
    /// The next record, to be read from `at` on.
    ready: Vec<u8>,
    at: usize,
    /// Whether `ready` belongs to the first pass.
    ready_is_initial: bool,
    header_sent: bool,
    /// The next piece of the first pass.
    next: usize,
    pieces: usize,
    changed: BTreeSet<usize>,
    trailer_sent: bool,
}

impl Saving {
    pub(super) fn new(state: &[u8]) -> Self {
        Self {
            ready: Vec::new(),
            at: 0,
            ready_is_initial: true,
            header_sent: false,
            next: 0,
            pieces: state.len().div_ceil(PIECE),
            changed: BTreeSet::new(),
            trailer_sent: false,
        }
    }

    /// Records that a byte of the state has changed.
    pub(super) fn changed(&mut self, at: usize) {
        let piece = at / PIECE;
        if piece < self.next {
            self.changed.insert(piece);
        }
    }

    /// Makes `ready` the next record if it is used up. Returns `false` if there is none.
    fn prepare(&mut self, state: &[u8], stopped: bool) -> bool {
        if self.at < self.ready.len() {
            return true;
        }
        self.ready.clear();
        self.at = 0;
        self.ready_is_initial = self.next < self.pieces || !self.header_sent;
        if !self.header_sent {
            self.header_sent = true;
            self.ready.push(1);
            self.ready.extend((state.len() as u64).to_le_bytes());
        } else if self.next < self.pieces {
            self.push_piece(state, self.next);
            self.next += 1;
        } else if let Some(piece) = self.changed.pop_first() {
            self.push_piece(state, piece);
        } else if stopped && !self.trailer_sent {
            self.trailer_sent = true;
            self.ready.push(3);
            self.ready.extend(sum(state).to_le_bytes());
        }
        !self.ready.is_empty()
    }

    fn push_piece(&mut self, state: &[u8], piece: usize) {
        let bytes = piece_of(state, piece);
        self.ready.push(2);
        self.ready.extend(((piece * PIECE) as u64).to_le_bytes());
        self.ready.extend((bytes.len() as u32).to_le_bytes());
        self.ready.extend(bytes);
    }

    /// Reads at most `most` bytes into `buffer`. Returns 0 if there is nothing more, now or ever.
    pub(super) fn read(&mut self, state: &[u8], stopped: bool, most: usize, buffer: &mut [u8]) -> usize {
        let mut read = 0;
        let most = most.min(buffer.len());
        while read < most && self.prepare(state, stopped) {
            let bytes = (most - read).min(self.ready.len() - self.at);
            buffer[read..read + bytes].copy_from_slice(&self.ready[self.at..self.at + bytes]);
            self.at += bytes;
            read += bytes;
        }
        read
    }

    fn left_in_ready(&self, initial: bool) -> u64 {
        if self.ready_is_initial == initial { (self.ready.len() - self.at) as u64 } else { 0 }
    }

    /// Returns the remaining bytes of the first pass.
    pub(super) fn initial_bytes(&self, state: &[u8]) -> u64 {
        let pieces = (self.next..self.pieces).map(|piece| PIECE_HEADER + piece_of(state, piece).len() as u64);
        let header = if self.header_sent { 0 } else { HEADER };
        self.left_in_ready(true) + header + pieces.sum::<u64>()
    }

    /// Returns the bytes that changed after they were read.
    pub(super) fn dirty_bytes(&self, state: &[u8]) -> u64 {
        let pieces = self.changed.iter().map(|piece| PIECE_HEADER + piece_of(state, *piece).len() as u64);
        self.left_in_ready(false) + pieces.sum::<u64>()
    }

    /// Returns the bytes to the end of the stream, if the device were stopped now.
    pub(super) fn left(&self, state: &[u8]) -> u64 {
        let trailer = if self.trailer_sent { 0 } else { 1 + 8 };
        self.initial_bytes(state) + self.dirty_bytes(state) + trailer
    }
}

/// Parses a complete stream of a device with `size` bytes of state. Returns the state, or `None` if the stream is
/// invalid.
pub(super) fn parse(mut stream: &[u8], size: usize) -> Option<Vec<u8>> {
    fn take<const N: usize>(stream: &mut &[u8]) -> Option<[u8; N]> {
        let (taken, rest) = stream.split_first_chunk::<N>()?;
        *stream = rest;
        Some(*taken)
    }
    if take::<1>(&mut stream)? != [1] || u64::from_le_bytes(take(&mut stream)?) != size as u64 {
        return None;
    }
    let mut state = vec![0; size];
    let mut got = BTreeSet::new();
    loop {
        match take::<1>(&mut stream)? {
            [2] => {
                let at = usize::try_from(u64::from_le_bytes(take(&mut stream)?)).ok()?;
                let length = u32::from_le_bytes(take(&mut stream)?) as usize;
                let bytes = stream.split_off(..length)?;
                state.get_mut(at..at.checked_add(bytes.len())?)?.copy_from_slice(bytes);
                got.insert(at / PIECE);
            }
            [3] => {
                let right = u64::from_le_bytes(take(&mut stream)?) == sum(&state);
                return (right && stream.is_empty() && got.len() == size.div_ceil(PIECE)).then_some(state);
            }
            _ => return None,
        }
    }
}
