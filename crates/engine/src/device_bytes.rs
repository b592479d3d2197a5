//! A pool of buffers for pieces of device state.

use std::fmt;
use std::ops::{Deref, RangeInclusive};
use std::sync::{Arc, Mutex, MutexGuard};

/// The buffers of one device. Clones share the pool.
#[derive(Clone)]
pub(crate) struct Buffers(Arc<Mutex<Pool>>);

struct Pool {
    /// Free buffers. The length of each is its capacity, so that it is filled without growing.
    spare: Vec<Vec<u8>>,
    /// Bytes of all buffers, free or in use.
    held: usize,
    /// Maximum of `held` up to which buffers are kept for reuse.
    max: usize,
}

impl Pool {
    /// Returns a free buffer whose length is in `fits`, or else a new one of `capacity` bytes.
    fn take(&mut self, capacity: usize, fits: RangeInclusive<usize>) -> Vec<u8> {
        if let Some(at) = self.spare.iter().rposition(|spare| fits.contains(&spare.len())) {
            return self.spare.swap_remove(at);
        }
        while self.held.saturating_add(capacity) > self.max
            && let Some(spare) = self.spare.pop()
        {
            self.held -= spare.len();
        }
        self.held += capacity;
        vec![0; capacity]
    }
}

impl Buffers {
    /// Makes a pool that holds at most `max` bytes, unless more are in use.
    pub(crate) fn new(max: usize) -> Self {
        Self(Arc::new(Mutex::new(Pool { spare: Vec::new(), held: 0, max })))
    }

    /// Returns an empty buffer with room for `capacity` bytes.
    pub(crate) fn take(&self, capacity: usize) -> DeviceBytes {
        // Not a much larger buffer, which would take more memory than is counted.
        let bytes = self.pool().take(capacity, capacity..=capacity.saturating_mul(2));
        DeviceBytes { bytes, length: 0, home: self.clone() }
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.0.lock().expect("no thread panics with the lock held")
    }

    /// Moves the first `length` bytes of `buffer` out, with the buffer itself, and replaces it by another of its length. Copies the bytes
    /// where the buffer is larger than what is counted for them.
    pub(crate) fn receive(&self, buffer: &mut Vec<u8>, length: usize) -> DeviceBytes {
        if length < buffer.len() - buffer.len() / 8 {
            let mut bytes = self.take(length);
            bytes.fill(&buffer[..length], length);
            return bytes;
        }
        // The pool gets a buffer from the channel and gives it one of the same length.
        let other = self.pool().take(buffer.len(), buffer.len()..=buffer.len());
        DeviceBytes { bytes: std::mem::replace(buffer, other), length, home: self.clone() }
    }
}

/// Bytes of a device's state.
pub struct DeviceBytes {
    bytes: Vec<u8>,
    /// How many bytes of the buffer are state.
    length: usize,
    home: Buffers,
}

impl DeviceBytes {
    /// Appends the beginning of `bytes`, up to a length of `max`. Returns how many bytes were appended.
    pub(crate) fn fill(&mut self, bytes: &[u8], max: usize) -> usize {
        let appended = bytes.len().min(max.saturating_sub(self.length));
        self.bytes[self.length..self.length + appended].copy_from_slice(&bytes[..appended]);
        self.length += appended;
        appended
    }
}

impl Deref for DeviceBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl fmt::Debug for DeviceBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of device state", self.length)
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut pool = self.home.pool();
        if pool.held > pool.max {
            pool.held -= bytes.len();
        } else {
            pool.spare.push(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_but_not_for_much_less() {
        let buffers = Buffers::new(1 << 20);
        let mut first = buffers.take(1000);
        assert_eq!((first.fill(&[1; 600], 1000), first.fill(&[2; 600], 1000)), (600, 400));
        assert_eq!((first.len(), first[599], first[600]), (1000, 1, 2));
        let at = first.bytes.as_ptr();
        drop(first);
        assert_ne!(buffers.take(100).bytes.as_ptr(), at);
        let again = buffers.take(900);
        assert_eq!((again.bytes.as_ptr(), again.len()), (at, 0));
    }

    #[test]
    fn what_has_come_is_taken_with_its_buffer_and_copied_where_that_would_be_a_waste() {
        let buffers = Buffers::new(1 << 20);
        let mut channel = vec![7; 1000];
        for (length, with_it) in [(1000, true), (875, true), (874, false), (0, false)] {
            let at = channel.as_ptr();
            let taken = buffers.receive(&mut channel, length);
            assert_eq!((taken.len(), channel.len()), (length, 1000));
            assert!(taken.iter().all(|byte| *byte == 7));
            assert_eq!((taken.bytes.as_ptr() == at, channel.as_ptr() != at), (with_it, with_it), "{length}");
            channel.fill(7);
        }
        // What was given back is what a channel gets for the next.
        let first = buffers.receive(&mut channel, 900);
        let at = first.bytes.as_ptr();
        drop(first);
        drop(buffers.receive(&mut channel, 900));
        assert_eq!(channel.as_ptr(), at);
    }

    #[test]
    fn what_is_held_stays_within_the_bound_whatever_the_sizes() {
        let buffers = Buffers::new(10_000);
        let held = || buffers.0.lock().unwrap().held;
        for size in [10, 100, 500, 1000, 2000, 5000, 300, 9000, 50] {
            let many: Vec<_> = (0..10_000 / size).map(|_| buffers.take(size)).collect();
            assert!(held() <= 10_000, "{} with buffers of {size}", held());
            drop(many);
            assert!(held() <= 10_000);
        }
        // More may be in use, but is not kept.
        let large = buffers.take(20_000);
        drop(large);
        assert_eq!(held(), 0);
        let mut channel = vec![0; 3000];
        for _ in 0..3 {
            let come: Vec<_> = (0..3).map(|_| buffers.receive(&mut channel, 3000)).collect();
            assert_eq!(held(), 9000);
            drop(come);
            assert_eq!(held(), 9000);
        }
        // Spare ones of another size make room for them.
        let buffers = Buffers::new(10_000);
        drop((0..10).map(|_| buffers.take(1000)).collect::<Vec<_>>());
        let come: Vec<_> = (0..3).map(|_| buffers.receive(&mut channel, 3000)).collect();
        let held = buffers.0.lock().unwrap().held;
        assert!(held <= 10_000, "{held} with {come:?}");
    }
}
