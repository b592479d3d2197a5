//! Format `gzip`: one or more gzip members (RFC 1952), one after the other. QATzip writes a member for each piece that it gave to a
//! device; the CPU, by libdeflate, writes one for the whole batch.

use crate::libdeflate::{Compressor, Decompressor, Stopped};
use crate::{CodecError, Decoder, Encoded, Encoder, check_len, worthwhile};

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
    fn decode(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), CodecError> {
        check_len(output.len())?;
        let broken = |reason| Err(CodecError::Broken { format: NAME, len: input.len(), reason });
        let (mut read, mut written) = (0, 0);
        // Every member has at least its header, so this comes to an end.
        loop {
            match self.0.gzip(&input[read..], &mut output[written..]) {
                Err(Stopped::Malformed) => {
                    return broken("it is no gzip member, is cut short, or its checksum is wrong");
                }
                Err(Stopped::NoRoom) => return broken("it decodes to more than the packet says"),
                Ok(decoded) => {
                    read += decoded.read;
                    written += decoded.written;
                }
            }
            if read == input.len() {
                break;
            }
        }
        if written < output.len() {
            return Err(CodecError::Length { format: NAME, expected: output.len(), got: written });
        }
        Ok(())
    }
}
