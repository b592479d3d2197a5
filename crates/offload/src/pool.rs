//! Idle requests. Every request returns here, and a new one is made only when the pool is empty.

use crate::sync::{Mutex, lock};

/// Idle objects, last in, first out: the memory of the last one used is still in a cache.
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
    /// Makes an empty pool with room for `capacity`, beyond which it allocates.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { rest: Mutex::new(Rest { free: Vec::with_capacity(capacity), made: 0 }) }
    }

    /// Takes an object from the pool, or makes one.
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

    /// Returns an object.
    pub(crate) fn put(&self, one: T) {
        lock(&self.rest).free.push(one);
    }

    /// Returns how many were made, and how many of them are here.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let rest = lock(&self.rest);
        (rest.made, rest.free.len())
    }
}
