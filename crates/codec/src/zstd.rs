//! Format `zstd`: one Zstandard frame (RFC 8878) without content size and checksum.
//!
//! The packet knows the length and has a checksum of its own. One context per channel, used for every batch: its
//! tables are reserved at the first batch and grow only if batches do. A packet is decoded in one call, straight into
//! its place: whatever window or size a frame claims, nothing is reserved for it.

use crate::{CodecError, Decoder, Encoded, Encoder, check_len, worthwhile};
use std::ptr::NonNull;
use sterna_memory::raw::RawPiece;
use zstd_safe::{CCtx, CParameter, ErrorCode, get_error_name, zstd_sys as ffi};

const NAME: &str = "zstd";

struct ZstdEncoder(CCtx<'static>);

/// Through the C functions: `zstd_safe` writes to memory of which it then makes slices, and the output may be guest
/// RAM.
struct ZstdDecoder(NonNull<ffi::ZSTD_DCtx>);

// SAFETY: the context belongs to nobody else, and zstd keeps nothing per thread.
unsafe impl Send for ZstdDecoder {}

impl Drop for ZstdDecoder {
    fn drop(&mut self) {
        // SAFETY: made by `ZSTD_createDCtx`, freed once.
        unsafe { ffi::ZSTD_freeDCtx(self.0.as_ptr()) };
    }
}

pub(crate) fn encoder(level: i32) -> Result<Box<dyn Encoder>, CodecError> {
    let mut context = CCtx::try_create().ok_or(CodecError::Library { format: NAME, reason: "no memory" })?;
    for parameter in
        [CParameter::CompressionLevel(level), CParameter::ContentSizeFlag(false), CParameter::ChecksumFlag(false)]
    {
        context.set_parameter(parameter).map_err(failed)?;
    }
    Ok(Box::new(ZstdEncoder(context)))
}

pub(crate) fn decoder() -> Result<Box<dyn Decoder>, CodecError> {
    // SAFETY: no conditions; null for want of memory.
    let context = NonNull::new(unsafe { ffi::ZSTD_createDCtx() });
    let context = context.ok_or(CodecError::Library { format: NAME, reason: "no memory" })?;
    Ok(Box::new(ZstdDecoder(context)))
}

fn failed(code: ErrorCode) -> CodecError {
    CodecError::Library { format: NAME, reason: get_error_name(code) }
}

impl Encoder for ZstdEncoder {
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError> {
        check_len(input.len())?;
        let room = worthwhile(input.len(), output.len());
        if room == 0 {
            return Ok(Encoded::Incompressible);
        }
        match self.0.compress2(&mut output[..room], input) {
            Ok(len) => Ok(Encoded::Shrunk(len)),
            Err(code) if code == DESTINATION_TOO_SMALL => Ok(Encoded::Incompressible),
            Err(code) => Err(failed(code)),
        }
    }
}

impl Decoder for ZstdDecoder {
    fn decode_into(&mut self, input: &[u8], mut output: RawPiece<'_>) -> Result<(), CodecError> {
        let expected = output.len();
        check_len(expected)?;
        // SAFETY: a context of ours; the input is readable and the output writable for the lengths given, and nothing outside them is
        // touched whatever the input holds (zstd.h). No pointer is kept.
        let got = unsafe {
            let (context, input_at) = (self.0.as_ptr(), input.as_ptr().cast());
            ffi::ZSTD_decompressDCtx(context, output.as_ptr().cast(), expected, input_at, input.len())
        };
        // SAFETY: of any number (zstd.h).
        if unsafe { ffi::ZSTD_isError(got) } != 0 {
            return Err(CodecError::Broken { format: NAME, len: input.len(), reason: get_error_name(got) });
        }
        if got == expected { Ok(()) } else { Err(CodecError::Length { format: NAME, expected, got }) }
    }
}

/// zstd's functions return errors as negated codes.
const DESTINATION_TOO_SMALL: ErrorCode =
    (zstd_safe::zstd_sys::ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall as ErrorCode).wrapping_neg();

#[cfg(test)]
mod tests {
    use super::*;

    fn text(len: usize) -> Vec<u8> {
        (0..len).map(|at| b"the quick brown fox "[at * at % 20]).collect()
    }

    #[test]
    fn after_the_first_batch_the_context_asks_for_no_more_memory() {
        for level in [-5, -1, 1, 5, 9] {
            let mut context = CCtx::create();
            context.set_parameter(CParameter::CompressionLevel(level)).unwrap();
            let mut encoder = ZstdEncoder(context);
            let (content, mut output) = (text(512 << 10), vec![0; 512 << 10]);
            encoder.encode(&content, &mut output).unwrap();
            let after_first = encoder.0.sizeof();
            for len in [4096, 512 << 10, 100_000, 512 << 10] {
                encoder.encode(&content[..len], &mut output).unwrap();
            }
            assert_eq!(encoder.0.sizeof(), after_first, "level {level}");
            // The budget of a channel is 8 MiB.
            assert!(after_first < 6 << 20, "level {level}: {after_first} bytes");
        }
    }
}
