//! The events that wake a loop, from any thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::abort::Abort;
use crate::cancel::Cancel;
use crate::live_control::Control;
use crate::session::{ConnectionEvent, OnConnectionEvent};
use crate::wakers::Registration;

/// An event that wakes a loop.
#[derive(Debug)]
pub enum Event<E> {
    /// Of the control channels.
    Peer(ConnectionEvent),
    /// The data channels of this incarnation have failed.
    Broken(u32),
    /// The migration was cancelled on this side.
    Cancelled,
    /// A request was made of the migration's control.
    Requested,
    /// Of the driver's own threads.
    Own(E),
}

/// Sends events to a loop.
#[derive(Debug)]
pub struct Events<E>(Sender<Event<E>>);

impl<E> Clone for Events<E> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<E: Send + 'static> Events<E> {
    /// Makes the queue of one loop.
    pub fn channel() -> (Self, Receiver<Event<E>>) {
        let (sender, receiver) = channel();
        (Self(sender), receiver)
    }

    /// Sends an event of the driver's own. Returns false once the loop's queue is gone.
    pub fn send(&self, event: E) -> bool {
        self.0.send(Event::Own(event)).is_ok()
    }

    /// Returns a closure that passes on the events of the control channels.
    pub fn on_connection(&self) -> OnConnectionEvent {
        let events = self.0.clone();
        Arc::new(move |news| drop(events.send(Event::Peer(news))))
    }

    /// Reports when `abort`, the alarm of the data channels of this incarnation, is raised.
    pub fn watch(&self, abort: &Abort, incarnation: u32) {
        let events = self.0.clone();
        abort.on_end(move || drop(events.send(Event::Broken(incarnation))));
    }

    /// Reports each request that `control` accepts, until the migration has ended. A cancellation is reported by [`Events::on_cancel`].
    pub fn on_request(&self, control: &Control) {
        let events = self.0.clone();
        control.on_request(move || drop(events.send(Event::Requested)));
    }

    /// Reports a cancellation, as long as the returned value is held. `first` is called before, on the cancelling thread.
    pub fn on_cancel(&self, cancel: &Cancel, first: impl Fn() + Send + 'static) -> Registration {
        let events = self.0.clone();
        cancel.on_cancel(move || {
            first();
            drop(events.send(Event::Cancelled));
        })
    }
}
