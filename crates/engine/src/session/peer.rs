//! The other side of a migration as a driver sees it: one control channel after another, of which only the newest counts.

use std::sync::Arc;

use sterna_wire::control::ControlMessage;

use crate::control_link::{ControlEvent, ControlLink, ControlSender, FAREWELL_TIME, Share};

/// An event about the control channels of a migration.
#[derive(Debug)]
pub enum ConnectionEvent {
    /// An event of the control channel of this incarnation.
    Control(u32, ControlEvent),
    /// A control channel of this incarnation was established.
    Connected(u32, ControlLink),
    /// An attempt to reconnect to the destination has failed, with the reason.
    Unreachable(String),
}

/// Passes events about the peer to the driver.
pub type OnConnectionEvent = Arc<dyn Fn(ConnectionEvent) + Send + Sync>;

/// Returns a closure that passes the events of the control channel of `incarnation` to the driver.
pub fn link_events(on_connection: &OnConnectionEvent, incarnation: u32) -> impl FnMut(ControlEvent) + Send + 'static {
    let on_connection = Arc::clone(on_connection);
    move |event| on_connection(ConnectionEvent::Control(incarnation, event))
}

/// An event about the peer that concerns the driver: none of an older control channel.
#[derive(Debug)]
pub enum PeerEvent {
    /// The peer sent a message. The driver drops the share when it has handled the message.
    Message(ControlMessage, Share),
    /// The control channel is lost, with the reason.
    Lost(String),
    /// There is a control channel again.
    Connected,
    /// There is no control channel yet, with the reason.
    Unreachable(String),
}

/// The other side of a migration.
#[derive(Debug)]
pub struct Peer {
    link: Option<ControlLink>,
    incarnation: u32,
}

impl Peer {
    /// Makes the peer at the other end of the first control channel.
    pub fn new(link: ControlLink) -> Self {
        Self { link: Some(link), incarnation: 1 }
    }

    /// Makes a peer without a control channel. The next control channel of this side has a later incarnation than `incarnation`.
    pub fn unconnected(incarnation: u32) -> Self {
        Self { link: None, incarnation }
    }

    /// Records an event. Returns what it means to the driver, or none if it is from an older control channel.
    pub fn handle(&mut self, news: ConnectionEvent) -> Option<PeerEvent> {
        match news {
            ConnectionEvent::Control(incarnation, event) if incarnation == self.incarnation => match event {
                ControlEvent::Message(message, share) => Some(PeerEvent::Message(message, share)),
                ControlEvent::Lost(reason) => {
                    self.link = None;
                    Some(PeerEvent::Lost(reason))
                }
            },
            ConnectionEvent::Control(..) => None,
            ConnectionEvent::Connected(incarnation, link) => {
                (self.incarnation, self.link) = (incarnation, Some(link));
                Some(PeerEvent::Connected)
            }
            ConnectionEvent::Unreachable(reason) => Some(PeerEvent::Unreachable(reason)),
        }
    }

    /// Sends a message, if there is a control channel. Never waits for the peer.
    pub fn send(&self, message: &ControlMessage) {
        let Some(link) = &self.link else { return };
        if let Err(error) = link.send(message) {
            // The link's reading side reports the loss.
            tracing::info!(%error, "a message could not be sent to the peer");
        }
    }

    /// Returns whether the peer reads too slowly, so that messages are queued for it.
    pub fn is_behind(&self) -> bool {
        self.link.as_ref().is_some_and(ControlLink::is_behind)
    }

    /// Waits until the peer was sent all messages, for [`FAREWELL_TIME`] at most. Only a peer that does not read is waited for.
    pub fn flush(&self) {
        if let Some(link) = &self.link {
            link.flush(FAREWELL_TIME);
        }
    }

    /// Returns a sender for another thread, on the current control channel.
    pub fn sender(&self) -> Option<ControlSender> {
        self.link.as_ref().map(ControlLink::sender)
    }

    /// Returns whether there is a control channel.
    pub fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// Returns the incarnation of the newest control channel.
    pub fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// Closes the control channel, if there is one. [`PeerEvent::Lost`] follows.
    pub fn close(&self) {
        if let Some(link) = &self.link {
            link.close();
        }
    }

    /// Drops the control channel.
    pub fn hang_up(&mut self) {
        self.link = None;
    }

    /// Drops the control channel and ignores its events from now on. Returns the incarnation of the next control channel. Each attempt to
    /// connect has its own: the destination accepts none twice, and may have accepted one that failed at this side.
    pub fn begin_anew(&mut self) -> u32 {
        self.link = None;
        self.incarnation += 1;
        self.incarnation
    }
}
