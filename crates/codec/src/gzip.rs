//! Format `gzip`: one or more gzip members (RFC 1952), one after the other. QATzip writes a member for each piece that
//! it passed to a device; the CPU, with libdeflate, writes one for the whole batch.

use crate::libdeflate::{Compressor, Decompressor, Stopped};
use crate::{CodecError, Decoder, Encoded, Encoder, check_len, worthwhile};
use sterna_memory::raw::RawPiece;

const NAME: &str = "gzip";

struct GzipEncoder(Compressor);

struct GzipDecoder(Decompressor);

const NO_MEMORY: CodecError = CodecError::Library { format: NAME, reason: "no memory" };

pub(crate) fn encoder(level: i32) -> Result<Box<dyn Encoder>, CodecError> {
    Ok(Box::new(GzipEncoder(Compressor::new(level).ok_or(NO_MEMORY)?)))
}

pub(crate) fn decoder() -> Result<Box<dyn Decoder>, CodecError> {
    Ok(Box::new(GzipDecoder(Decompressor::new().ok_or(NO_MEMORY)?)))
}

impl Encoder for GzipEncoder {
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError> {
        check_len(input.len())?;
        let room = worthwhile(input.len(), output.len());
        Ok(self.0.gzip(input, &mut output[..room]).map_or(Encoded::Incompressible, Encoded::Shrunk))
    }
}

impl Decoder for GzipDecoder {
    fn decode_into(&mut self, input: &[u8], mut output: RawPiece<'_>) -> Result<(), CodecError> {
        check_len(output.len())?;
        let broken = |reason| Err(CodecError::Broken { format: NAME, len: input.len(), reason });
        let (mut read, expected) = (0, output.len());
        // Every member has at least its header, so the loop ends.
        loop {
            match self.0.gzip(&input[read..], output.reborrow()) {
                Err(Stopped::Malformed) => {
                    return broken("it is no gzip member, is cut short, or its checksum is wrong");
                }
                Err(Stopped::NoRoom) => return broken("it decodes to more than the packet says"),
                Ok(decoded) => {
                    read += decoded.read;
                    output.advance(decoded.written);
                }
            }
            if read == input.len() {
                break;
            }
        }
        if !output.is_empty() {
            return Err(CodecError::Length { format: NAME, expected, got: expected - output.len() });
        }
        Ok(())
    }
}
