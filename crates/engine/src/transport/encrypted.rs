//! The memory that encrypted bytes arrive in and leave from.

// Without TLS nothing encrypted arrives or leaves.
#![cfg_attr(not(feature = "tls"), allow(dead_code))]

use sterna_memory::raw::RawPiece;

/// Plaintext encrypted under one holding of the lock and sent with one system call, in bytes.
pub(super) const ENCRYPT_AT_ONCE: usize = 128 << 10;
/// Encrypted bytes read with one system call, at most; more than the longest record and the longest handshake message.
pub(super) const READ_AT_ONCE: usize = 256 << 10;
/// The most plaintext in one record (RFC 8446, section 5.1).
pub(super) const RECORD: usize = 16 << 10;
/// What a record begins with: its type, a version, its length (RFC 8446, section 5.1).
pub(super) const RECORD_HEADER: usize = 5;
/// Header, inner type and tag of a record (RFC 8446, section 5.2).
pub(super) const RECORD_OVERHEAD: usize = RECORD_HEADER + 1 + 16;
/// Room for what TLS may have to say for itself before the data: an answer to a key update, a key update, an alert.
pub(super) const OWN_WORDS: usize = 1 << 10;

/// Bytes that have arrived: encrypted ones, and what a record had more than was asked for.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    pub(super) bytes: Vec<u8>,
    pub(super) start: usize,
    pub(super) end: usize,
    plain: Vec<u8>,
    plain_start: usize,
}

impl Arrived {
    pub(super) fn for_tls() -> Self {
        Self { bytes: vec![0; READ_AT_ONCE], plain: Vec::with_capacity(RECORD), ..Self::default() }
    }

    /// How many bytes wait here to be handed out.
    pub(super) fn waiting(&self) -> u64 {
        (self.end - self.start + self.plain.len() - self.plain_start) as u64
    }

    /// Where the next encrypted bytes go.
    pub(super) fn room(&mut self) -> &mut [u8] {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        &mut self.bytes[self.end..]
    }

    /// The first `count` bytes of the room have arrived.
    pub(super) fn came(&mut self, count: usize) -> &[u8] {
        self.end += count;
        &self.bytes[self.end - count..self.end]
    }

    /// Hands out plaintext that is left over.
    pub(super) fn take_plain(&mut self, mut into: RawPiece<'_>) -> usize {
        let left = &self.plain[self.plain_start..];
        let count = left.len().min(into.len());
        into.write(&left[..count]);
        self.plain_start += count;
        count
    }

    pub(super) fn keep_plain(&mut self, rest: &[u8]) {
        if self.plain_start == self.plain.len() {
            self.plain.clear();
            self.plain_start = 0;
        }
        self.plain.extend_from_slice(rest);
    }

    pub(super) fn has_whole_record(&self) -> bool {
        let bytes = &self.bytes[self.start..self.end];
        let header = bytes.first_chunk::<RECORD_HEADER>();
        header.is_some_and(|header| bytes.len() - RECORD_HEADER >= u16::from_be_bytes([header[3], header[4]]).into())
    }
}

/// Encrypted bytes on their way out, in memory that is used again and again.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    pub(super) bytes: Vec<u8>,
    pub(super) length: usize,
    /// Where a record's plaintext is put together if it comes from several pieces.
    pub(super) gathered: Vec<u8>,
}

impl Leaving {
    pub(super) fn for_tls() -> Self {
        // One record more, for a last one that is not full.
        let records = ENCRYPT_AT_ONCE / RECORD + 1;
        let bytes = vec![0; ENCRYPT_AT_ONCE + records * RECORD_OVERHEAD + OWN_WORDS];
        Self { bytes, length: 0, gathered: Vec::with_capacity(RECORD) }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}
