//! Pieces of guest RAM for writing, or for the kernel to read: addresses and lengths that stay valid, never slices.
//!
//! A slice promises the compiler that no other thread writes its bytes (or, if mutable, that none sees them). For guest
//! RAM that promise cannot be kept: vCPUs, devices and the monitor's threads access it too.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::copy::{crc32c_raw, store_raw};

/// Memory that is written through its address only. Other threads may access it meanwhile.
#[derive(Debug)]
pub struct RawPiece<'a> {
    start: NonNull<u8>,
    len: usize,
    of: PhantomData<&'a ()>,
}

impl<'a> RawPiece<'a> {
    /// Makes a piece of `len` bytes at `start`.
    ///
    /// # Safety
    /// They stay mapped, readable and writable for `'a`, and no reference to them exists meanwhile, except to atomics.
    pub unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Self { start, len, of: PhantomData }
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns its address, from which its length may be read and written by raw accesses.
    pub fn as_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Writes `bytes` to its beginning.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "{} bytes are not written into {}", bytes.len(), self.len);
        // SAFETY: by the contract of `new` there is room for them, and no slice of it, such as these bytes could be.
        unsafe { store_raw(bytes, self.start.as_ptr()) };
    }

    /// Removes its first `count` bytes.
    ///
    /// # Panics
    /// If it has fewer.
    pub fn advance(&mut self, count: usize) {
        self.len = self.len.checked_sub(count).expect("no more is left out than there is");
        // SAFETY: not beyond the end of the piece, as was seen.
        self.start = unsafe { self.start.add(count) };
    }

    /// Returns the same piece, while this one is not used.
    pub fn reborrow(&mut self) -> RawPiece<'_> {
        RawPiece { start: self.start, len: self.len, of: PhantomData }
    }

    /// Returns the CRC-32C of its bytes, as the continuation of `crc` (0 to begin with); each is loaded once.
    pub fn crc32c(&self, crc: u32) -> u32 {
        // SAFETY: readable by the contract of `new`.
        unsafe { crc32c_raw(self.start.as_ptr(), self.len, crc) }
    }
}

impl<'a> From<&'a mut [u8]> for RawPiece<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        // SAFETY: the slice is borrowed for `'a`, so nothing else accesses it.
        unsafe { Self::new(NonNull::from(&mut *bytes).cast(), bytes.len()) }
    }
}

/// Memory for the kernel to read, laid out as the `iovec` of writev(2) and sendmsg(2).
#[derive(Debug)]
#[repr(transparent)]
pub struct KernelPart<'a>(libc::iovec, PhantomData<&'a ()>);

impl<'a> KernelPart<'a> {
    /// Makes a part of `len` bytes at `start`.
    ///
    /// # Safety
    /// They stay mapped and readable for `'a`. They may change meanwhile.
    pub unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Self(libc::iovec { iov_base: start.as_ptr().cast(), iov_len: len }, PhantomData)
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes the first `bytes` bytes of `parts`, and parts that are empty then.
    ///
    /// # Panics
    /// If they have fewer.
    pub fn advance(parts: &mut &mut [Self], mut bytes: usize) {
        let mut whole = 0;
        for part in parts.iter() {
            if part.len() > bytes {
                break;
            }
            bytes -= part.len();
            whole += 1;
        }
        let rest = &mut std::mem::take(parts)[whole..];
        match rest.first_mut() {
            Some(Self(first, _)) => {
                first.iov_base = first.iov_base.cast::<u8>().wrapping_add(bytes).cast();
                first.iov_len -= bytes;
            }
            None => assert!(bytes == 0, "no more is left out than there is"),
        }
        *parts = rest;
    }

    /// Returns the parts in the form that the kernel takes.
    pub fn as_iovecs(parts: &mut [Self]) -> *mut libc::iovec {
        parts.as_mut_ptr().cast()
    }
}

impl<'a> From<&'a [u8]> for KernelPart<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: the slice is readable and borrowed for `'a`.
        unsafe { Self::new(NonNull::from(bytes).cast(), bytes.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::crc32c;

    #[test]
    fn a_piece_is_written_from_its_beginning_which_moves() {
        let mut bytes = [0; 100];
        let mut piece = RawPiece::from(&mut bytes[10..90]);
        piece.reborrow().write(&[1; 30]);
        piece.advance(30);
        piece.write(&[2; 50]);
        assert_eq!(
            (piece.len(), piece.is_empty(), piece.crc32c(7)),
            (50, false, {
                let mut expected = crate::checksum::Crc32c::after(7);
                expected.update(&[2; 50]);
                expected.finish()
            })
        );
        piece.advance(50);
        assert!(piece.is_empty() && piece.crc32c(0) == crc32c(&[]));
        let expected = [(10, 0), (30, 1), (50, 2), (10, 0)];
        assert!(bytes.iter().eq(expected.iter().flat_map(|(count, byte)| std::iter::repeat_n(byte, *count))));
    }

    #[test]
    #[should_panic(expected = "5 bytes are not written into 4")]
    fn nothing_is_written_behind_a_piece() {
        RawPiece::from(&mut [0; 4][..]).write(&[1; 5]);
    }

    #[test]
    fn parts_are_used_up_in_order_and_empty_ones_skipped() {
        let texts: [&[u8]; 4] = [b"", b"ab", b"", b"cde"];
        for used in 0..=5 {
            let mut parts = texts.map(KernelPart::from);
            let mut left = &mut parts[..];
            KernelPart::advance(&mut left, used);
            assert_eq!(left.iter().map(KernelPart::len).sum::<usize>(), 5 - used);
            assert!(left.first().is_none_or(|first| !first.is_empty()));
        }
    }
}
