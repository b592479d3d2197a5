//! Memory for pieces of device state, used again and again.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

/// Buffers that wait to be used again, at most.
const MOST_SPARE: usize = 4;

/// Buffers of one device. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl Buffers {
    /// An empty buffer, with room for `capacity` bytes.
    pub(super) fn take(&self, capacity: usize) -> DeviceBytes {
        let mut spare = self.0.lock().expect("nobody panics with it");
        // One that is much larger would take more memory than is counted.
        let fits = |buffer: &Vec<u8>| (capacity..=capacity.saturating_mul(2)).contains(&buffer.capacity());
        let found = spare.iter().position(fits).map(|at| spare.swap_remove(at));
        drop(spare);
        let mut bytes = found.unwrap_or_else(|| Vec::with_capacity(capacity));
        bytes.clear();
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
        let mut spare = self.home.0.lock().expect("nobody panics with it");
        if spare.len() < MOST_SPARE {
            spare.push(std::mem::take(&mut self.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_but_not_for_much_less() {
        let buffers = Buffers::default();
        let mut first = buffers.take(1000);
        assert_eq!((first.fill(&[1; 600], 1000), first.fill(&[2; 600], 1000)), (600, 400));
        let at = first.bytes.as_ptr();
        drop(first);
        assert_ne!(buffers.take(100).bytes.as_ptr(), at);
        let again = buffers.take(900);
        assert_eq!((again.bytes.as_ptr(), again.len()), (at, 0));
        let many: Vec<_> = (0..2 * MOST_SPARE).map(|_| buffers.take(10)).collect();
        drop(many);
        assert_eq!(buffers.0.lock().unwrap().len(), MOST_SPARE);
    }
}
