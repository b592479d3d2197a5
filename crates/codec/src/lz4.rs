//! Format `lz4`: one LZ4 block, as `doc/lz4_Block_format.md` of the LZ4 project describes it, without any header.
//!
//! The C library: its decoder is over a third faster than `lz4_flex`'s, with that crate's bounds-checked code or its
//! `unsafe` one, and its encoder is no slower (`examples/codec_throughput.rs` has the former beside it).
//! The 16 KiB of table that encoding needs live on the stack, so there is no context.

use crate::{CodecError, Decoder, Encoded, Encoder, check_len, worthwhile};
use std::ffi::c_int;
use sterna_memory::raw::RawPiece;

const NAME: &str = "lz4";

struct Lz4;

pub(crate) fn encoder(_level: i32) -> Result<Box<dyn Encoder>, CodecError> {
    Ok(Box::new(Lz4))
}

pub(crate) fn decoder() -> Result<Box<dyn Decoder>, CodecError> {
    Ok(Box::new(Lz4))
}

/// Returns a length of at most `MAX_CONTENT` for the C interface.
fn c_len(len: usize) -> c_int {
    c_int::try_from(len).expect("lengths were checked against MAX_CONTENT, which fits")
}

impl Encoder for Lz4 {
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError> {
        check_len(input.len())?;
        let room = worthwhile(input.len(), output.len());
        if room == 0 {
            return Ok(Encoded::Incompressible);
        }
        // SAFETY: the source is readable for its length and the target writable for `room` bytes, which is within
        // `output`; LZ4_compress_default stays inside both (lz4.h) and keeps no pointer.
        let len = unsafe {
            lz4_sys::LZ4_compress_default(
                input.as_ptr().cast(),
                output.as_mut_ptr().cast(),
                c_len(input.len()),
                c_len(room),
            )
        };
        // 0 means that it did not fit.
        Ok(if len > 0 { Encoded::Shrunk(len as usize) } else { Encoded::Incompressible })
    }
}

impl Decoder for Lz4 {
    fn decode_into(&mut self, input: &[u8], mut output: RawPiece<'_>) -> Result<(), CodecError> {
        check_len(output.len())?;
        let broken = |reason| Err(CodecError::Broken { format: NAME, len: input.len(), reason });
        // An encoder never writes more than it read; this also keeps the length within a C int.
        if input.len() > output.len() {
            return broken("it is longer than what it should decode to");
        }
        // SAFETY: the source is readable and the target writable for the lengths given; LZ4_decompress_safe reads and
        // writes nothing outside them whatever the source holds (lz4.h) and keeps no pointer.
        let len = unsafe {
            lz4_sys::LZ4_decompress_safe(
                input.as_ptr().cast(),
                output.as_ptr().cast(),
                c_len(input.len()),
                c_len(output.len()),
            )
        };
        match usize::try_from(len) {
            Err(_) => broken("it is no LZ4 block or decodes to more than the packet says"),
            Ok(got) if got != output.len() => Err(CodecError::Length { format: NAME, expected: output.len(), got }),
            Ok(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The format is the published one: an independent implementation reads and writes the same.
        #[test]
        fn an_independent_implementation_reads_ours_and_we_read_its(
            unit in proptest::collection::vec(any::<u8>(), 1..400),
            times in 5usize..500,
        ) {
            let content = unit.repeat(times);
            let mut ours = vec![0; content.len()];
            if let Encoded::Shrunk(len) = Lz4.encode(&content, &mut ours).unwrap() {
                prop_assert_eq!(&lz4_flex::block::decompress(&ours[..len], content.len()).unwrap(), &content);
            }
            let theirs = lz4_flex::block::compress(&content);
            if theirs.len() <= content.len() {
                let mut decoded = vec![0; content.len()];
                Lz4.decode(&theirs, &mut decoded).unwrap();
                prop_assert_eq!(decoded, content);
            }
        }
    }
}
