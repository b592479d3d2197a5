//! Format `none`: the content unchanged.

use crate::{CodecError, Decoder, Encoded, Encoder, check_len};
use sterna_memory::raw::RawPiece;

struct Unchanged;

pub(crate) fn encoder(_level: i32) -> Result<Box<dyn Encoder>, CodecError> {
    Ok(Box::new(Unchanged))
}

pub(crate) fn decoder() -> Result<Box<dyn Decoder>, CodecError> {
    Ok(Box::new(Unchanged))
}

impl Encoder for Unchanged {
    fn encode(&mut self, input: &[u8], _output: &mut [u8]) -> Result<Encoded, CodecError> {
        check_len(input.len())?;
        Ok(Encoded::Incompressible)
    }
}

impl Decoder for Unchanged {
    fn decode_into(&mut self, input: &[u8], mut output: RawPiece<'_>) -> Result<(), CodecError> {
        check_len(output.len())?;
        if input.len() != output.len() {
            return Err(CodecError::Length { format: "none", expected: output.len(), got: input.len() });
        }
        output.write(input);
        Ok(())
    }
}
