//! Memory for pieces of device state, used again and again.

use std::fmt;
use std::ops::{Deref, RangeInclusive};
use std::sync::{Arc, Mutex, MutexGuard};

/// Buffers of one device. Clones are the same.
#[derive(Clone)]
pub(super) struct Buffers(Arc<Mutex<Pool>>);

struct Pool {
    /// Of as many bytes as they have room for, so that whoever fills them needs no more than their length.
    spare: Vec<Vec<u8>>,
    /// Bytes of all buffers, spare or in use.
    held: usize,
    /// More of them are not kept only to be used again.
    most: usize,
}

impl Pool {
    /// A buffer of as many bytes as `fits` says, or else a new one of `capacity`.
    fn take(&mut self, capacity: usize, fits: RangeInclusive<usize>) -> Vec<u8> {
        if let Some(at) = self.spare.iter().rposition(|spare| fits.contains(&spare.len())) {
            return self.spare.swap_remove(at);
        }
        while self.held.saturating_add(capacity) > self.most
            && let Some(spare) = self.spare.pop()
        {
            self.held -= spare.len();
        }
        self.held += capacity;
        vec![0; capacity]
    }
}

impl Buffers {
    /// Of which so many bytes are held at most, unless more are in use.
    pub(super) fn new(most: usize) -> Self {
        Self(Arc::new(Mutex::new(Pool { spare: Vec::new(), held: 0, most })))
    }

    /// An empty buffer, with room for `capacity` bytes.
    pub(super) fn take(&self, capacity: usize) -> DeviceBytes {
        // One that is much larger would take more memory than is counted.
        let bytes = self.pool().take(capacity, capacity..=capacity.saturating_mul(2));
        DeviceBytes { bytes, length: 0, home: self.clone() }
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.0.lock().expect("no thread panics with the lock held")
    }

    /// What is in the first `length` bytes of `buffer`: with the buffer itself, in the place of which there is another of its length then.
    /// Where that would be more memory than is counted for so many bytes, a copy.
    pub(super) fn receive(&self, buffer: &mut Vec<u8>, length: usize) -> DeviceBytes {
        if length < buffer.len() - buffer.len() / 8 {
            let mut bytes = self.take(length);
            bytes.fill(&buffer[..length], length);
            return bytes;
        }
        // What leaves the pool for the channel is as much as comes into it.
        let other = self.pool().take(buffer.len(), buffer.len()..=buffer.len());
        DeviceBytes { bytes: std::mem::replace(buffer, other), length, home: self.clone() }
    }
}

/// Bytes of a device's state.
pub struct DeviceBytes {
    bytes: Vec<u8>,
    /// How many of them are state.
    length: usize,
    home: Buffers,
}

impl DeviceBytes {
    /// Takes the beginning of `bytes`, until there are `most`; says how much of it.
    pub(super) fn fill(&mut self, bytes: &[u8], most: usize) -> usize {
        let taken = bytes.len().min(most.saturating_sub(self.length));
        self.bytes[self.length..self.length + taken].copy_from_slice(&bytes[..taken]);
        self.length += taken;
        taken
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
        if pool.held > pool.most {
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
