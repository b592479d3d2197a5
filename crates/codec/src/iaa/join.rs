//! Joins the stream of a batch that was deflated in pieces, each by its own job.
//!
//! All streams but the last end at a byte boundary without a final block ([`Batch::push_continued`]), so they can be
//! concatenated. A piece that did not shrink follows as stored blocks (RFC 1951, 3.2.4): one incompressible piece does
//! not affect the others.

use sterna_offload::Batch;

/// The least bytes of a piece (a smaller one would cost the device more to begin than to do), and the most.
const MIN_PIECE: usize = 16 << 10;
const MAX_PIECE: usize = 64 << 10;
/// Pieces of a batch, if it is large enough: as many as offload has in a device at once.
const JOBS: usize = 8;

/// The most bytes of a stored block, and its overhead: a byte for its kind, the length, and its complement.
const STORED: usize = 0xffff;
const HEADER: usize = 5;

/// Returns the bytes of each piece of a batch, except the last, which may have fewer.
pub(super) fn piece(batch: usize) -> usize {
    batch.div_ceil(JOBS).next_multiple_of(4096).clamp(MIN_PIECE, MAX_PIECE)
}

/// Writes the stream of `input`, the pieces of which are in `batch`, to the start of `output`. Returns its length; none
/// if it does not fit.
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
    fn a_batch_is_split_into_pieces_that_keep_a_device_busy_and_are_worth_a_job() {
        for (batch, bytes) in [(1, 16), (64, 16), (128, 16), (130, 20), (256, 32), (512, 64), (4096, 64)] {
            assert_eq!(piece(batch << 10), bytes << 10, "{batch} KiB");
        }
    }

    #[test]
    fn stored_blocks_are_a_stream_of_the_predicted_length() {
        for bytes in [1, STORED - 1, STORED, STORED + 1, 2 * STORED, MAX_PIECE] {
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
