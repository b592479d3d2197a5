//! Buffered input with look-ahead and verbatim capture, for formats in which only the next bytes show whether an item has ended.

use std::io::{self, Read};

use super::StreamError;

/// Eight times QEMU's own write buffer (32 KiB): small enough to stay in the cache, few system calls per page.
const CAPACITY: usize = 256 * 1024;

#[derive(Debug)]
pub(crate) struct Input<R> {
    reader: R,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes read since `begin_capture`, verbatim.
    capture: Option<Vec<u8>>,
}

impl<R: Read> Input<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self::with_capacity(reader, CAPACITY)
    }

    /// For short byte strings, which are never longer than a few names.
    pub(crate) fn with_capacity(reader: R, capacity: usize) -> Self {
        Self { reader, buffer: vec![0; capacity].into_boxed_slice(), start: 0, end: 0, capture: None }
    }

    pub(crate) fn begin_capture(&mut self) {
        self.capture = Some(Vec::new());
    }

    pub(crate) fn end_capture(&mut self) -> Vec<u8> {
        self.capture.take().unwrap_or_default()
    }

    /// Makes at least `length` bytes available, or as many as there are before the end of the stream.
    fn fill(&mut self, length: usize, reading: &'static str) -> Result<usize, StreamError> {
        debug_assert!(length <= self.buffer.len());
        while self.end - self.start < length {
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            if self.buffer.len() - self.start < length {
                self.buffer.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.start = 0;
            }
            match self.reader.read(&mut self.buffer[self.end..]) {
                Ok(0) => break,
                Ok(n) => self.end += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(StreamError::Io { doing: reading, source }),
            }
        }
        Ok(self.end - self.start)
    }

    /// Returns the next `N` bytes without consuming them; `None` if the stream ends before.
    pub(crate) fn peek<const N: usize>(&mut self, reading: &'static str) -> Result<Option<[u8; N]>, StreamError> {
        if self.fill(N, reading)? < N {
            return Ok(None);
        }
        Ok(self.buffer[self.start..].first_chunk::<N>().copied())
    }

    pub(crate) fn take(&mut self, into: &mut [u8], reading: &'static str) -> Result<(), StreamError> {
        let mut done = 0;
        while done < into.len() {
            // At most half the buffer is requested at once, so that a page never waits for bytes after it.
            let want = (into.len() - done).min(self.buffer.len() / 2);
            if self.fill(want, reading)? < want {
                return Err(StreamError::Truncated { reading });
            }
            into[done..done + want].copy_from_slice(&self.buffer[self.start..self.start + want]);
            self.start += want;
            done += want;
        }
        if let Some(capture) = &mut self.capture {
            capture.extend_from_slice(into);
        }
        Ok(())
    }

    pub(crate) fn array<const N: usize>(&mut self, reading: &'static str) -> Result<[u8; N], StreamError> {
        let mut bytes = [0; N];
        self.take(&mut bytes, reading)?;
        Ok(bytes)
    }

    pub(crate) fn u8(&mut self, reading: &'static str) -> Result<u8, StreamError> {
        Ok(u8::from_be_bytes(self.array(reading)?))
    }

    pub(crate) fn be16(&mut self, reading: &'static str) -> Result<u16, StreamError> {
        Ok(u16::from_be_bytes(self.array(reading)?))
    }

    pub(crate) fn be32(&mut self, reading: &'static str) -> Result<u32, StreamError> {
        Ok(u32::from_be_bytes(self.array(reading)?))
    }

    pub(crate) fn be64(&mut self, reading: &'static str) -> Result<u64, StreamError> {
        Ok(u64::from_be_bytes(self.array(reading)?))
    }

    /// A byte-counted string into `name`, which has room for the longest; returns its bytes.
    pub(crate) fn counted<'a>(
        &mut self,
        name: &'a mut [u8; 255],
        reading: &'static str,
    ) -> Result<&'a [u8], StreamError> {
        let length = usize::from(self.u8(reading)?);
        self.take(&mut name[..length], reading)?;
        Ok(&name[..length])
    }

    /// Reads the next bytes, at least one unless the stream has ended (0). Buffered bytes come first.
    pub(crate) fn read_some(&mut self, into: &mut [u8], doing: &'static str) -> Result<usize, StreamError> {
        let buffered = self.end - self.start;
        if buffered > 0 {
            let n = buffered.min(into.len());
            into[..n].copy_from_slice(&self.buffer[self.start..self.start + n]);
            self.start += n;
            return Ok(n);
        }
        loop {
            match self.reader.read(into) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(StreamError::Io { doing, source }),
                Ok(n) => return Ok(n),
            }
        }
    }

    pub(crate) fn get_ref(&self) -> &R {
        &self.reader
    }
}
