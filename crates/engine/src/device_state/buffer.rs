//! Memory for pieces of device state, used again and again.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

/// Buffers of one device. Clones are the same.
#[derive(Clone)]
pub(super) struct Buffers(Arc<Mutex<Pool>>);

struct Pool {
    spare: Vec<Vec<u8>>,
    /// Bytes of all buffers, spare or in use.
    held: usize,
    /// More of them are not kept only to be used again.
    most: usize,
}

impl Buffers {
    /// Of which so many bytes are held at most, unless more are in use.
    pub(super) fn new(most: usize) -> Self {
        Self(Arc::new(Mutex::new(Pool { spare: Vec::new(), held: 0, most })))
    }

    /// An empty buffer, with room for `capacity` bytes.
    pub(super) fn take(&self, capacity: usize) -> DeviceBytes {
        let mut pool = self.0.lock().expect("nobody panics with it");
        // One that is much larger would take more memory than is counted.
        let fits = |buffer: &Vec<u8>| (capacity..=capacity.saturating_mul(2)).contains(&buffer.capacity());
        if let Some(at) = pool.spare.iter().rposition(fits) {
            let mut bytes = pool.spare.swap_remove(at);
            bytes.clear();
            return DeviceBytes { bytes, home: self.clone() };
        }
        while pool.held.saturating_add(capacity) > pool.most
            && let Some(spare) = pool.spare.pop()
        {
            pool.held -= spare.capacity();
        }
        let bytes = Vec::with_capacity(capacity);
        pool.held += bytes.capacity();
        drop(pool);
        DeviceBytes { bytes, home: self.clone() }
    }
}

/// Bytes of a device's state.
pub struct DeviceBytes {
    bytes: Vec<u8>,
    home: Buffers,
}

impl DeviceBytes {
    /// Takes the beginning of `bytes`, until there are `most`; says how much of it.
    pub(super) fn fill(&mut self, bytes: &[u8], most: usize) -> usize {
        let taken = bytes.len().min(most.saturating_sub(self.bytes.len()));
        self.bytes.extend_from_slice(&bytes[..taken]);
        taken
    }
}

impl Deref for DeviceBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for DeviceBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of device state", self.bytes.len())
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut pool = self.home.0.lock().expect("nobody panics with it");
        if pool.held > pool.most {
            pool.held -= bytes.capacity();
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
        let at = first.bytes.as_ptr();
        drop(first);
        assert_ne!(buffers.take(100).bytes.as_ptr(), at);
        let again = buffers.take(900);
        assert_eq!((again.bytes.as_ptr(), again.len()), (at, 0));
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
    }
}
