//! Requests at rest. They come back here from wherever they were last, and none is made as long as one is here.

use crate::sync::{Mutex, lock};

/// Things at rest, last in, first out: the last one used is the one whose memory is still in a cache.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    rest: Mutex<Rest<T>>,
}

#[derive(Debug)]
struct Rest<T> {
    free: Vec<T>,
    made: usize,
}

impl<T> Pool<T> {
    /// An empty pool with room for `capacity`, beyond which it allocates.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { rest: Mutex::new(Rest { free: Vec::with_capacity(capacity), made: 0 }) }
    }

    /// One from the pool, or a new one.
    pub(crate) fn take(&self, make: impl FnOnce() -> T) -> T {
        let mut rest = lock(&self.rest);
        match rest.free.pop() {
            Some(one) => one,
            None => {
                rest.made += 1;
                drop(rest);
                make()
            }
        }
    }

    /// Puts one back.
    pub(crate) fn put(&self, one: T) {
        lock(&self.rest).free.push(one);
    }

    /// How many were made, and how many of them are here.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let rest = lock(&self.rest);
        (rest.made, rest.free.len())
    }
}
