//! One stream of a batch that was deflated in pieces, each by a job of its own.
//!
//! All streams but the last end at a whole byte and not for good ([`Batch::push_continued`]), so they follow each other as they are. A
//! piece that did not shrink follows as stored blocks (RFC 1951, 3.2.4): one piece of noise does not spoil the batch.

use sterna_offload::Batch;

/// Bytes of a piece, at least (less would cost the device more to begin than to do) and at most.
const LEAST: usize = 16 << 10;
const MOST: usize = 64 << 10;
/// Pieces of a batch, where they may be that small: as many as offload has with a device at once.
const JOBS: usize = 8;

/// Most bytes of a stored block, and what it has besides them: a byte for its kind, the length, and its complement.
const STORED: usize = 0xffff;
const HEADER: usize = 5;

/// Bytes of each piece of a batch, but for the last, which may have less.
pub(super) fn piece(batch: usize) -> usize {
    batch.div_ceil(JOBS).next_multiple_of(4096).clamp(LEAST, MOST)
}

/// Writes the stream of `input`, of which `batch` has the pieces, to the start of `output`. Says how long it is; none if it does not fit.
pub(super) fn join(batch: &Batch, input: &[u8], output: &mut [u8]) -> Option<usize> {
    let pieces = input.chunks(piece(input.len()));
    let (count, mut at) = (pieces.len(), 0);
    for (number, piece) in pieces.enumerate() {
        let room = &mut output[at..];
        at += match batch.deflated(number).filter(|stream| stream.len() < stored_len(piece.len())) {
            Some(stream) => {
                room.get_mut(..stream.len())?.copy_from_slice(stream);
                stream.len()
            }
            None => store(piece, number + 1 == count, room)?,
        };
    }
    Some(at)
}

fn stored_len(bytes: usize) -> usize {
    bytes + bytes.div_ceil(STORED) * HEADER
}

/// Writes `content`, which is not empty, as stored blocks. The stream ends with it if it is the `last`.
fn store(content: &[u8], last: bool, output: &mut [u8]) -> Option<usize> {
    let blocks = content.chunks(STORED);
    let (count, mut at) = (blocks.len(), 0);
    for (number, block) in blocks.enumerate() {
        let to = output.get_mut(at..at + HEADER + block.len())?;
        let length = block.len() as u16;
        to[0] = u8::from(last && number + 1 == count);
        to[1..3].copy_from_slice(&length.to_le_bytes());
        to[3..HEADER].copy_from_slice(&(!length).to_le_bytes());
        to[HEADER..].copy_from_slice(block);
        at += to.len();
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libdeflate::Decompressor;

    #[test]
    fn a_batch_is_cut_into_pieces_that_keep_a_device_busy_and_are_worth_a_job() {
        for (batch, bytes) in [(1, 16), (64, 16), (128, 16), (130, 20), (256, 32), (512, 64), (4096, 64)] {
            assert_eq!(piece(batch << 10), bytes << 10, "{batch} KiB");
        }
    }

    #[test]
    fn stored_blocks_are_a_stream_of_the_length_that_was_said() {
        for bytes in [1, STORED - 1, STORED, STORED + 1, 2 * STORED, MOST] {
            let content: Vec<u8> = (0..bytes).map(|at| at as u8).collect();
            let mut stream = vec![0; stored_len(bytes)];
            assert_eq!(store(&content, true, &mut stream), Some(stream.len()));
            let mut decoded = vec![0; bytes];
            let read = Decompressor::new().unwrap().deflate(&stream, (&mut decoded[..]).into()).unwrap();
            assert_eq!((read.read, read.written), (stream.len(), bytes));
            assert!(decoded == content);
            assert_eq!(store(&content, true, &mut stream[1..]), None);
        }
    }
}
