//! How a batch of pages is written down.
//!
//! A **format** ([`FORMATS`]) is what stands in a packet: it has a number there, a name in the handshake, and a decoder. A **method**
//! ([`METHODS`]) is what a user asks for: a format, at a level, by a preferred engine on this side. Everything else (options,
//! negotiation, contexts) follows from the two tables. What goes in is a snapshot, never racing guest memory. Every packet decodes
//! alone.

mod account;
mod adaptive;
mod choice;
mod deflate;
mod engine;
mod format;
mod gzip;
mod iaa;
mod libdeflate;
mod lz4;
mod method;
mod none;
mod qat;
mod rest;
pub mod sample;
pub mod select;
mod zstd;

pub use adaptive::Adaptive;
pub use choice::{ChoiceError, MethodChoice};
pub use engine::{EncoderSource, Engine, Engines};
pub use format::{FORMATS, Format, FormatRow};
pub use iaa::Iaa;
pub use method::{Levels, METHODS, Method, MethodRow};
pub use qat::{Qat, Qatzip, QatzipRefused};

/// Whether QATzip may do in software what no device does.
pub use sterna_qatzip::Software as QatzipSoftware;

use sterna_memory::raw::RawPiece;
use sterna_offload::Maker;
use thiserror::Error;

/// The longest input of an encoder and the longest output of a decoder, in bytes: the largest packet there can be.
pub const MAX_CONTENT: usize = 16 << 20;

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// It was written to the start of the output, this many bytes, fewer than came in.
    Shrunk(usize),
    /// Not worth it: send the input as it is. The output holds nothing of use.
    Incompressible,
}

/// Why encoding or decoding failed. Content that does not shrink is no failure.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CodecError {
    /// More than a packet can hold.
    #[error("{len} bytes are more than the {MAX_CONTENT} bytes a packet can hold; use a smaller packet size")]
    TooLong {
        /// Bytes of content.
        len: usize,
    },
    /// The encoded bytes are not of the format.
    #[error("{format} content of {len} bytes is broken: {reason}")]
    Broken {
        /// The format's name.
        format: &'static str,
        /// Encoded bytes.
        len: usize,
        /// What is wrong, in the words of the library.
        reason: &'static str,
    },
    /// The encoded bytes decode to fewer bytes than the packet says.
    #[error("{format} content decodes to {got} bytes, the packet says {expected}")]
    Length {
        /// The format's name.
        format: &'static str,
        /// Bytes the packet says.
        expected: usize,
        /// Bytes decoded.
        got: usize,
    },
    /// The compression library failed although nothing was wrong with the content.
    #[error("{format} failed: {reason}")]
    Library {
        /// The format's name.
        format: &'static str,
        /// The words of the library.
        reason: &'static str,
    },
}

/// Writes batches down in one format. Its memory is reserved once and used for every batch.
pub trait Encoder: Send {
    /// Encodes `input` into `output`.
    ///
    /// An output as long as the input is always enough, and longer is never used: what does not fit, or saves less than
    /// 1/64, is [`Encoded::Incompressible`]. Errors when the input is longer than [`MAX_CONTENT`].
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError>;

    /// The device that wrote what was last encoded, if nobody has looked at it: should it turn out wrong, it is to be told of.
    fn maker(&self) -> Option<Maker> {
        None
    }
}

/// Reads back what any encoder of the same format wrote, in any order of packets. Its input may come from anyone.
pub trait Decoder: Send {
    /// Decodes `input` so that it fills `output` exactly, which may be guest RAM; anything else is an error, after which `output` holds
    /// any bytes and the decoder can go on with the next packet. Decoders read back what they have written: where something else writes
    /// there meanwhile, the result is wrong, and nothing besides `output` is touched.
    fn decode_into(&mut self, input: &[u8], output: RawPiece<'_>) -> Result<(), CodecError>;

    /// As [`Decoder::decode_into`], into memory of the caller's own.
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), CodecError> {
        self.decode_into(input, output.into())
    }
}

/// Checks the length of content before any work.
fn check_len(len: usize) -> Result<(), CodecError> {
    if len > MAX_CONTENT { Err(CodecError::TooLong { len }) } else { Ok(()) }
}

/// Most bytes that the encoded form of `input` bytes may have so that decoding it pays, and no more than the `output`
/// bytes of room.
fn worthwhile(input: usize, output: usize) -> usize {
    // Less than 1/64 saved on the wire does not pay for the decoder's pass over the content.
    (input - input.div_ceil(64)).min(output)
}

/// Feeds arbitrary bytes to the decoders, for a fuzzer: byte 0 picks the format, the lower 20 bits of bytes 1 to 3
/// (little-endian) are the length of the output in bytes, the rest is what to decode.
///
/// # Panics
/// When a decoder writes outside its output, which is the failure looked for; decoding or not is all the same.
pub fn fuzz_decode(data: &[u8]) {
    const GUARD: usize = 64;
    let Some((&[format, a, b, c], encoded)) = data.split_first_chunk() else { return };
    let row = &FORMATS[usize::from(format) % FORMATS.len()];
    let len = usize::from(a) | usize::from(b) << 8 | usize::from(c & 0x0f) << 16;
    let mut decoder = (row.decoder)().expect("memory for one context");
    let mut output = vec![0xa5; len + 2 * GUARD];
    let _ = decoder.decode(encoded, &mut output[GUARD..GUARD + len]);
    let (before, rest) = output.split_at(GUARD);
    assert!(
        before.iter().chain(&rest[len..]).all(|byte| *byte == 0xa5),
        "the {} decoder wrote outside its output",
        row.name
    );
}
