//! The other side of a migration as a driver knows it: one control channel after another, of which only the last counts.

use std::sync::Arc;

use sterna_wire::control::ControlMessage;

use crate::control_link::{ControlEvent, ControlLink, ControlSender, Share};

/// What comes from the control channels of a migration.
#[derive(Debug)]
pub enum PeerNews {
    /// From the control channel of this incarnation.
    Control(u32, ControlEvent),
    /// A control channel of this incarnation has come about.
    Connected(u32, ControlLink),
    /// An attempt to come back to the destination has failed, and why.
    Unreachable(String),
}

/// Hands news to the driver.
pub type TellPeer = Arc<dyn Fn(PeerNews) + Send + Sync>;

/// The events of the control channel of `incarnation`, as news.
pub fn link_events(tell: &TellPeer, incarnation: u32) -> impl FnMut(ControlEvent) + Send + 'static {
    let tell = Arc::clone(tell);
    move |event| tell(PeerNews::Control(incarnation, event))
}

/// What news mean to a driver.
#[derive(Debug)]
pub enum Heard {
    /// The peer said something. Its share is to be dropped when that has been handled.
    Said(ControlMessage, Share),
    /// The control channel is gone, and why.
    Lost(String),
    /// There is a control channel again.
    Connected,
    /// There is none yet, and why.
    Unreachable(String),
}

/// The other side of a migration.
#[derive(Debug)]
pub struct Peer {
    link: Option<ControlLink>,
    incarnation: u32,
}

impl Peer {
    /// The peer at the other end of the first control channel.
    pub fn new(link: ControlLink) -> Self {
        Self { link: Some(link), incarnation: 1 }
    }

    /// A peer without a control channel; the next one that this side makes is of a later incarnation than `incarnation`.
    pub fn unconnected(incarnation: u32) -> Self {
        Self { link: None, incarnation }
    }

    /// Takes news; none if they are of a control channel that does not count any more.
    pub fn hear(&mut self, news: PeerNews) -> Option<Heard> {
        match news {
            PeerNews::Control(incarnation, event) if incarnation == self.incarnation => match event {
                ControlEvent::Message(message, share) => Some(Heard::Said(message, share)),
                ControlEvent::Lost(reason) => {
                    self.link = None;
                    Some(Heard::Lost(reason))
                }
            },
            PeerNews::Control(..) => None,
            PeerNews::Connected(incarnation, link) => {
                (self.incarnation, self.link) = (incarnation, Some(link));
                Some(Heard::Connected)
            }
            PeerNews::Unreachable(reason) => Some(Heard::Unreachable(reason)),
        }
    }

    /// Says something, if there is a control channel.
    pub fn say(&self, message: &ControlMessage) {
        let Some(link) = &self.link else { return };
        if let Err(error) = link.send(message) {
            // The link's reading side reports the loss.
            tracing::info!(%error, "the peer did not take a message");
        }
    }

    /// What another thread can say things with, on the control channel that there is now.
    pub fn sender(&self) -> Option<ControlSender> {
        self.link.as_ref().map(ControlLink::sender)
    }

    /// Whether there is a control channel.
    pub fn is_connected(&self) -> bool {
        self.link.is_some()
    }

    /// Of the control channel that counts.
    pub fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// Closes the control channel, if there is one; that it is lost will be heard.
    pub fn close(&self) {
        if let Some(link) = &self.link {
            link.close();
        }
    }

    /// Lets go of the control channel.
    pub fn hang_up(&mut self) {
        self.link = None;
    }

    /// Lets go of the control channel and hears nothing of it any more: the next will be of the incarnation that is given
    /// here. Each attempt has its own, since one that failed here may have been accepted there, and none is accepted twice.
    pub fn begin_anew(&mut self) -> u32 {
        self.link = None;
        self.incarnation += 1;
        self.incarnation
    }
}
