//! Format `deflate`: one deflate stream (RFC 1951) without header and trailer, in which no match reaches back more than 4096 bytes,
//! so that an IAA device can read it (`sterna-offload` writes it).
//!
//! The decoder does not check distances: a CPU can read larger ones too, and the content's checksum shows whether the
//! result is right. The limit is a guarantee to destinations that decode with a device.

use crate::libdeflate::{Decompressor, Stopped};
use crate::{CodecError, Decoder, Encoded, Encoder, check_len, worthwhile};
use sterna_memory::raw::RawPiece;
use sterna_offload::Deflater;

const NAME: &str = "deflate";

struct DeflateEncoder(Deflater);

struct DeflateDecoder(Decompressor);

pub(crate) fn encoder(_level: i32) -> Result<Box<dyn Encoder>, CodecError> {
    Ok(Box::new(DeflateEncoder(Deflater::default())))
}

pub(crate) fn decoder() -> Result<Box<dyn Decoder>, CodecError> {
    let context = Decompressor::new().ok_or(CodecError::Library { format: NAME, reason: "no memory" })?;
    Ok(Box::new(DeflateDecoder(context)))
}

/// Encodes with the CPU.
pub(crate) fn encode(deflater: &mut Deflater, input: &[u8], output: &mut [u8]) -> Encoded {
    let room = worthwhile(input.len(), output.len());
    deflater.deflate(input, &mut output[..room]).map_or(Encoded::Incompressible, Encoded::Shrunk)
}

impl Encoder for DeflateEncoder {
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError> {
        check_len(input.len())?;
        Ok(encode(&mut self.0, input, output))
    }
}

impl Decoder for DeflateDecoder {
    fn decode_into(&mut self, input: &[u8], output: RawPiece<'_>) -> Result<(), CodecError> {
        let expected = output.len();
        check_len(expected)?;
        let broken = |reason| Err(CodecError::Broken { format: NAME, len: input.len(), reason });
        match self.0.deflate(input, output) {
            Err(Stopped::Malformed) => broken("it is no deflate stream, or is cut short"),
            Err(Stopped::NoRoom) => broken("it decodes to more than the packet says"),
            Ok(decoded) if decoded.read < input.len() => broken("something follows the stream"),
            Ok(decoded) if decoded.written < expected => {
                Err(CodecError::Length { format: NAME, expected, got: decoded.written })
            }
            Ok(_) => Ok(()),
        }
    }
}
