//! Vectored writing of all of several slices: the standard library's own is not stable yet.

use std::io::{self, IoSlice, Write};

use super::StreamError;

pub(crate) fn write_all_vectored<W: Write>(
    writer: &mut W,
    mut slices: &mut [IoSlice<'_>],
    doing: &'static str,
) -> Result<(), StreamError> {
    // Drops leading empty slices, so that a write of nothing is not mistaken for a closed socket.
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match writer.write_vectored(slices) {
            Ok(0) => return Err(StreamError::Io { doing, source: io::ErrorKind::WriteZero.into() }),
            Ok(n) => IoSlice::advance_slices(&mut slices, n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(StreamError::Io { doing, source }),
        }
    }
    Ok(())
}
