//! The encoding of a batch of pages.
//!
//! A **format** ([`FORMATS`]) is the form of a packet's payload: it has a number in packets, a name in the handshake,
//! and a decoder. A **method** ([`METHODS`]) is what a user selects, with an **engine** and a level ([`MethodChoice`]); each
//! engine that can encode a method on this side writes one format ([`Encoding`]). Everything else (options, negotiation,
//! contexts) follows from the two tables. The input is a snapshot, never racing guest memory. Every packet decodes alone.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod account;
mod adaptive;
mod choice;
mod deflate;
mod encoding;
mod engine;
mod engines;
mod format;
mod gzip;
mod iaa;
mod libdeflate;
mod lz4;
mod method;
mod none;
#[cfg(feature = "qatzip")]
mod qat;
mod rest;
pub mod sample;
pub mod select;
#[cfg(feature = "zstd")]
mod zstd;

pub use adaptive::Adaptive;
pub use choice::{ChoiceError, EngineChoice, MethodChoice};
pub use encoding::Encoding;
pub use engine::{EncoderSource, Engine, EngineMissing};
pub use engines::Engines;
pub use format::{FORMATS, Format, FormatRow};
pub use iaa::Iaa;
pub use method::{EncodingRow, Levels, METHODS, Method, MethodRow};
#[cfg(feature = "qatzip")]
pub use qat::{Qat, Qatzip, QatzipRefused};

/// Whether QATzip may do in software what no device does.
#[cfg(feature = "qatzip")]
pub use sterna_qatzip::Software as QatzipSoftware;

use sterna_memory::raw::RawPiece;
use sterna_offload::Producer;
use thiserror::Error;

/// The longest input of an encoder and the longest output of a decoder, in bytes: the largest possible packet.
pub const MAX_CONTENT: usize = 16 << 20;

/// The result of encoding a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// It was written to the start of the output, with this many bytes, fewer than the input.
    Shrunk(usize),
    /// Not worthwhile: send the input uncompressed. The content of the output is undefined.
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
        /// What is wrong, as reported by the library.
        reason: &'static str,
    },
    /// The encoded bytes decode to fewer bytes than the packet's header states.
    #[error("{format} content decodes to {got} bytes instead of the packet's {expected}")]
    Length {
        /// The format's name.
        format: &'static str,
        /// Bytes according to the packet.
        expected: usize,
        /// Bytes decoded.
        got: usize,
    },
    /// The compression library failed although the content is valid.
    #[error("{format} failed: {reason}")]
    Library {
        /// The format's name.
        format: &'static str,
        /// The library's error.
        reason: &'static str,
    },
}

/// Encodes batches in one format. Its memory is reserved once and used for every batch.
pub trait Encoder: Send {
    /// Encodes `input` into `output`.
    ///
    /// An output as long as the input is always enough, and longer is never used: content that does not fit, or saves
    /// less than 1/64, is [`Encoded::Incompressible`]. Returns an error if the input is longer than [`MAX_CONTENT`].
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError>;

    /// Returns the device that wrote the last output, if the output was not verified: the device to report if it turns
    /// out to be wrong.
    fn producer(&self) -> Option<Producer> {
        None
    }
}

/// Decodes the output of any encoder of the same format, in any order of packets. Its input is untrusted.
pub trait Decoder: Send {
    /// Decodes `input` so that it fills `output` exactly, which may be guest RAM. Anything else is an error: then the
    /// content of `output` is undefined, and the decoder can continue with the next packet. Decoders read back their
    /// own output: if other threads write there meanwhile, the result is wrong, and no memory besides `output` is
    /// touched.
    fn decode_into(&mut self, input: &[u8], output: RawPiece<'_>) -> Result<(), CodecError>;

    /// As [`Decoder::decode_into`], into the caller's own memory.
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), CodecError> {
        self.decode_into(input, output.into())
    }
}

/// Checks the length of content before any work.
fn check_len(len: usize) -> Result<(), CodecError> {
    if len > MAX_CONTENT { Err(CodecError::TooLong { len }) } else { Ok(()) }
}

/// Returns the most bytes of the encoded form of `input` bytes at which decoding is worthwhile, limited to the `output`
/// bytes of room.
fn worthwhile(input: usize, output: usize) -> usize {
    // Less than 1/64 saved on the wire does not pay for the decoder's pass over the content.
    (input - input.div_ceil(64)).min(output)
}

/// Feeds arbitrary bytes to the decoders, for a fuzzer: byte 0 selects the format, the lower 20 bits of bytes 1 to 3
/// (little-endian) are the length of the output in bytes, the rest is the input.
///
/// # Panics
/// If a decoder writes outside its output, the failure that is searched for; whether decoding succeeds does not matter.
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
