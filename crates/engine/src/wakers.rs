//! Closures that are called at one event, such as a cancellation, each until its owner unregisters it.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};

/// A registered closure.
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

    /// Calls all closures.
    pub(crate) fn wake(&self) {
        self.registered.iter().for_each(|(_, wake)| wake());
    }

    /// Calls all closures for the last time and returns them, so that the caller drops them where that is safe.
    pub(crate) fn wake_and_take(&mut self) -> Vec<(u64, Waker)> {
        self.wake();
        std::mem::take(&mut self.registered)
    }

    /// Removes the closure with this number, and returns it if it is still registered.
    fn remove(&mut self, number: u64) -> Option<Waker> {
        let place = self.registered.iter().position(|(registered, _)| *registered == number)?;
        Some(self.registered.remove(place).1)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.registered.len()
    }
}

/// An owner of [`Wakers`].
pub(crate) trait HasWakers: Send {
    fn wakers(&mut self) -> &mut Wakers;
}

/// Keeps a closure registered, with [`Cancel::on_cancel`](crate::cancel::Cancel::on_cancel) or
/// [`Abort::on_end_while_held`](crate::abort::Abort::on_end_while_held). Dropping this waits for a call that is under way, and drops the
/// closure: it is not called any more.
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
        // Dropped without the lock: dropping a capture may drop another registration.
        let _removed = among.lock().expect("wakers do not panic").wakers().remove(self.number);
    }
}
