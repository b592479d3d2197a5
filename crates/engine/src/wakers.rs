//! Closures that are to be called at one moment, each until its owner has no use for that any more.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};

/// What is called.
pub(crate) type Waker = Box<dyn Fn() + Send>;

/// The closures, each with its number, oldest first.
#[derive(Default)]
pub(crate) struct Wakers {
    next: u64,
    registered: Vec<(u64, Waker)>,
}

impl Wakers {
    /// Adds a closure and returns its number.
    pub(crate) fn add(&mut self, wake: impl Fn() + Send + 'static) -> u64 {
        let number = self.next;
        self.next += 1;
        self.registered.push((number, Box::new(wake)));
        number
    }

    /// Calls all of them.
    pub(crate) fn wake(&self) {
        self.registered.iter().for_each(|(_, wake)| wake());
    }

    /// Calls all of them for the last time, and returns them, so that the caller drops them where that is safe.
    pub(crate) fn wake_and_take(&mut self) -> Vec<(u64, Waker)> {
        self.wake();
        std::mem::take(&mut self.registered)
    }

    /// Moves the closure with this number out, if it is still there.
    fn remove(&mut self, number: u64) -> Option<Waker> {
        let place = self.registered.iter().position(|(registered, _)| *registered == number)?;
        Some(self.registered.remove(place).1)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.registered.len()
    }
}

/// What has [`Wakers`].
pub(crate) trait HasWakers: Send {
    fn wakers(&mut self) -> &mut Wakers;
}

/// Keeps a closure registered, with [`Cancel::on_cancel`](crate::cancel::Cancel::on_cancel) or
/// [`Abort::on_end_while_held`](crate::abort::Abort::on_end_while_held). Once this is dropped the closure is not called any more, and
/// what it had captured is dropped; a call that is under way is waited for.
#[must_use = "the closure is called only as long as this is held"]
pub struct Registration {
    among: Weak<Mutex<dyn HasWakers>>,
    number: u64,
}

impl Registration {
    pub(crate) fn new<T: HasWakers + 'static>(among: &Arc<Mutex<T>>, number: u64) -> Self {
        let among: Arc<Mutex<dyn HasWakers>> = Arc::clone(among) as _;
        Self { among: Arc::downgrade(&among), number }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registration").field(&self.number).finish()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(among) = self.among.upgrade() else { return };
        // Dropped without the lock: what it has captured may come back here when it is dropped.
        let _removed = among.lock().expect("wakers do not panic").wakers().remove(self.number);
    }
}
