//! Memory from the library, which a device can reach: what a device reads and writes lies there, whoever filled it.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi;
use crate::error::StartError;
use crate::library::Library;

/// The library looks at input in steps of a header's length however short it is (1.3.1), so zeroes follow what is shorter than this.
const PADDED: usize = 64;

/// One at a time: two first calls at once would each clear the library's table of pinned pages, and with it what the other has just
/// entered (1.3.1).
static ALLOCATING: Mutex<()> = Mutex::new(());

/// A job's input or result in pinned memory: neither is copied on its way to the device and back.
///
/// It may be made, filled and dropped on any thread: the library keeps one table for all of them. The bytes that are in it are what it
/// derefs to.
pub struct Buffer {
    start: NonNull<u8>,
    capacity: usize,
    filled: usize,
    library: Arc<Library>,
}

// SAFETY: the memory belongs to this alone, and the library's functions for it may be called on any thread.
unsafe impl Send for Buffer {}
// SAFETY: nothing is changed through a shared reference.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// At least so many bytes, cleared; hardware was asked for before, so this does not begin to look for it.
    pub(crate) fn new(library: &Arc<Library>, capacity: usize) -> Result<Buffer, StartError> {
        if library.forked() {
            return Err(StartError::Forked);
        }
        let capacity = capacity.max(PADDED);
        let malloc = library.functions().malloc;
        let _alone = ALLOCATING.lock().unwrap_or_else(PoisonError::into_inner);
        // Some machines do not say on which node a processor is; node 0 is always there.
        for node in [abi::NODE_OF_THIS_CPU, 0] {
            // SAFETY: no requirements.
            let memory = unsafe { malloc(capacity, node, abi::PINNED) };
            if let Some(start) = NonNull::new(memory.cast::<u8>()) {
                // SAFETY: the library gave `capacity` bytes, nobody else knows of them.
                unsafe { start.write_bytes(0, capacity) };
                return Ok(Buffer { start, capacity, filled: 0, library: Arc::clone(library) });
            }
        }
        Err(StartError::Memory { bytes: capacity })
    }

    /// The most bytes it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Holds a copy of `content`, and nothing else.
    ///
    /// # Panics
    /// Where that is more than its capacity.
    pub fn fill(&mut self, content: &[u8]) {
        let room = self.room();
        room[..content.len()].copy_from_slice(content);
        let padded = room.len().min(content.len().max(PADDED));
        room[content.len()..padded].fill(0);
        self.filled = content.len();
    }

    /// Holds nothing.
    pub fn clear(&mut self) {
        self.filled = 0;
    }

    /// The library has written so many bytes to its start.
    pub(crate) fn written(&mut self, bytes: usize) {
        assert!(bytes <= self.capacity, "lengths are compared before they are believed");
        self.filled = bytes;
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn room(&mut self) -> &mut [u8] {
        // SAFETY: `capacity` initialised bytes; the library and a device use them only during calls that borrow this.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.capacity) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: no more than `capacity` initialised bytes; written only during calls that borrow this exclusively.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.filled) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("capacity", &self.capacity).field("filled", &self.filled).finish_non_exhaustive()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // In a child after a fork it belongs to the parent: leaked on purpose.
        if !self.library.forked() {
            let _alone = ALLOCATING.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: from `qzMalloc`, freed once; no call that uses it is running, since it is owned here.
            unsafe { (self.library.functions().free)(self.start.as_ptr().cast()) };
        }
    }
}

/// A job's input or output: ordinary memory, from which and to which the worker copies, or the library's.
#[derive(Debug)]
pub enum Bytes {
    /// Ordinary memory.
    Heap(Vec<u8>),
    /// The library's.
    Pinned(Buffer),
}

impl Bytes {
    /// Leaves nothing in it.
    pub fn clear(&mut self) {
        match self {
            Bytes::Heap(bytes) => bytes.clear(),
            Bytes::Pinned(buffer) => buffer.clear(),
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Heap(bytes) => bytes,
            Bytes::Pinned(buffer) => buffer,
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes::Heap(bytes)
    }
}

impl From<Buffer> for Bytes {
    fn from(buffer: Buffer) -> Bytes {
        Bytes::Pinned(buffer)
    }
}
