//! The used part of libdeflate: writing gzip members, reading deflate streams and gzip members.

use libdeflate_sys as ffi;
use std::ptr::NonNull;
use sterna_memory::raw::RawPiece;

/// A compressor. Its memory is reserved when it is made; nothing is reserved later.
pub(crate) struct Compressor(NonNull<ffi::libdeflate_compressor>);

// SAFETY: the context belongs to nobody else, and libdeflate keeps nothing per thread.
unsafe impl Send for Compressor {}

impl Compressor {
    /// Makes a compressor with a level of libdeflate's, 0 (stored) to 12; none for lack of memory.
    pub(crate) fn new(level: i32) -> Option<Self> {
        // SAFETY: no conditions; null for a level that does not exist, or for want of memory.
        NonNull::new(unsafe { ffi::libdeflate_alloc_compressor(level) }).map(Self)
    }

    /// Writes `input` as one member to the start of `output`; none if it does not fit.
    pub(crate) fn gzip(&mut self, input: &[u8], output: &mut [u8]) -> Option<usize> {
        // SAFETY: a context of ours; the input is readable and the output writable for the lengths given, and nothing outside
        // them is touched (libdeflate.h). No pointer is kept.
        let len = unsafe {
            ffi::libdeflate_gzip_compress(
                self.0.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                output.as_mut_ptr().cast(),
                output.len(),
            )
        };
        (len > 0).then_some(len)
    }
}

impl Drop for Compressor {
    fn drop(&mut self) {
        // SAFETY: made by `libdeflate_alloc_compressor`, freed once.
        unsafe { ffi::libdeflate_free_compressor(self.0.as_ptr()) };
    }
}

/// A decompressor. Its memory is reserved when it is made; nothing is reserved later.
pub(crate) struct Decompressor(NonNull<ffi::libdeflate_decompressor>);

// SAFETY: the context belongs to nobody else, and libdeflate keeps nothing per thread.
unsafe impl Send for Decompressor {}

/// The lengths of a stream or member that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decoded {
    /// Its length in the input, in bytes.
    pub(crate) read: usize,
    /// Its decompressed length, in bytes.
    pub(crate) written: usize,
}

/// Why it could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// It is not of the format, ends too early, or its checksum is wrong.
    Malformed,
    /// It decompresses to more bytes than there is room for.
    NoRoom,
}

type Decompress = unsafe extern "C" fn(
    *mut ffi::libdeflate_decompressor,
    *const std::ffi::c_void,
    usize,
    *mut std::ffi::c_void,
    usize,
    *mut usize,
    *mut usize,
) -> ffi::libdeflate_result;

impl Decompressor {
    /// Makes a decompressor; none for lack of memory.
    pub(crate) fn new() -> Option<Self> {
        // SAFETY: no conditions.
        NonNull::new(unsafe { ffi::libdeflate_alloc_decompressor() }).map(Self)
    }

    /// Reads the stream at the start of `input` to the start of `output`.
    pub(crate) fn deflate(&mut self, input: &[u8], output: RawPiece<'_>) -> Result<Decoded, Stopped> {
        self.run(ffi::libdeflate_deflate_decompress_ex, input, output)
    }

    /// Reads the member at the start of `input` to the start of `output`, and checks its checksum and length.
    pub(crate) fn gzip(&mut self, input: &[u8], output: RawPiece<'_>) -> Result<Decoded, Stopped> {
        self.run(ffi::libdeflate_gzip_decompress_ex, input, output)
    }

    fn run(&mut self, decompress: Decompress, input: &[u8], mut output: RawPiece<'_>) -> Result<Decoded, Stopped> {
        let mut decoded = Decoded { read: 0, written: 0 };
        // SAFETY: `decompress` is one of the two above, and the context ours; the input is readable and the output writable for
        // the lengths given, and nothing outside them is touched whatever the input holds (libdeflate.h). No pointer is kept.
        let result = unsafe {
            decompress(
                self.0.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                output.as_ptr().cast(),
                output.len(),
                &raw mut decoded.read,
                &raw mut decoded.written,
            )
        };
        match result {
            ffi::libdeflate_result_LIBDEFLATE_SUCCESS => Ok(decoded),
            ffi::libdeflate_result_LIBDEFLATE_INSUFFICIENT_SPACE => Err(Stopped::NoRoom),
            _ => Err(Stopped::Malformed),
        }
    }
}

impl Drop for Decompressor {
    fn drop(&mut self) {
        // SAFETY: made by `libdeflate_alloc_decompressor`, freed once.
        unsafe { ffi::libdeflate_free_decompressor(self.0.as_ptr()) };
    }
}
