//! A back-end without behaviour of its own: the test reads each message and answers it, or not.
//!
//! It knows the protocol by the specification's numbers, not by the crate that the product uses.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Frontend, VhostUserFrontend};

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
pub(super) const SET_DEVICE_STATE_FD: u32 = 42;
pub(super) const CHECK_DEVICE_STATE: u32 = 43;

/// `VHOST_USER_F_PROTOCOL_FEATURES`.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VHOST_USER_PROTOCOL_F_DEVICE_STATE`.
pub(super) const FEATURE: u64 = 1 << 19;
/// In an answer to `SET_DEVICE_STATE_FD`: no channel comes with it.
pub(super) const NO_CHANNEL: u64 = 0x100;

/// Directions.
pub(super) const SAVE: u32 = 0;
pub(super) const LOAD: u32 = 1;

pub(super) struct Double {
    socket: UnixStream,
    /// The last request, to which an answer refers.
    request: u32,
}

/// Returns a front-end and a back-end that have negotiated those of the `offered` features that the front-end knows.
pub(super) fn connected(offered: u64) -> (Frontend, VhostUserProtocolFeatures, Double) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let shaking = std::thread::spawn(move || {
        let mut back_end = Double { socket: theirs, request: 0 };
        for (expected, answer) in [
            (GET_FEATURES, Some(PROTOCOL_FEATURES)),
            (SET_FEATURES, None),
            (GET_PROTOCOL_FEATURES, Some(offered)),
            (SET_PROTOCOL_FEATURES, None),
        ] {
            assert_eq!(back_end.next().expect("the handshake").0, expected);
            if let Some(answer) = answer {
                back_end.reply(answer, None);
            }
        }
        back_end
    });
    let mut frontend = Frontend::from_stream(ours, 2);
    let features = frontend.get_features().expect("GET_FEATURES");
    frontend.set_features(features).expect("SET_FEATURES");
    let protocol = frontend.get_protocol_features().expect("GET_PROTOCOL_FEATURES");
    frontend.set_protocol_features(protocol).expect("SET_PROTOCOL_FEATURES");
    (frontend, protocol, shaking.join().expect("the handshake"))
}

impl Double {
    /// Returns the next message: its request, payload and file descriptor; `None` if the front-end closed the
    /// connection.
    pub(super) fn next(&mut self) -> Option<(u32, Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0u8; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received =
            recvmsg(&self.socket, &mut [IoSliceMut::new(&mut header)], &mut ancillary, RecvFlags::WAITALL).ok()?;
        if received.bytes == 0 {
            return None;
        }
        assert_eq!(received.bytes, header.len());
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let mut payload = vec![0; word(8) as usize];
        self.socket.read_exact(&mut payload).ok()?;
        self.request = word(0);
        Some((self.request, payload, descriptor))
    }

    /// Checks that the next message is `SET_DEVICE_STATE_FD`, in the only phase, and returns the back-end's end of the
    /// pipe.
    pub(super) fn expect_state_fd(&mut self, direction: u32) -> File {
        let (request, payload, descriptor) = self.next().expect("a message");
        assert_eq!(request, SET_DEVICE_STATE_FD);
        assert_eq!(payload, [direction.to_ne_bytes(), 0u32.to_ne_bytes()].concat(), "direction, and phase stopped");
        descriptor.expect("a pipe's end").into()
    }

    pub(super) fn expect_check(&mut self) {
        let (request, payload, _) = self.next().expect("a message");
        assert_eq!((request, payload.len()), (CHECK_DEVICE_STATE, 0));
    }

    /// Answers the last message.
    pub(super) fn reply(&mut self, value: u64, channel: Option<BorrowedFd<'_>>) {
        self.reply_to(self.request, value, channel);
    }

    /// Answers as if the last message had been a different one.
    pub(super) fn reply_to(&mut self, request: u32, value: u64, channel: Option<BorrowedFd<'_>>) {
        const VERSION_AND_REPLY: u32 = 1 | 1 << 2;
        let mut message = Vec::new();
        for word in [request, VERSION_AND_REPLY, 8] {
            message.write_all(&word.to_ne_bytes()).expect("memory");
        }
        message.write_all(&value.to_ne_bytes()).expect("memory");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if let Some(channel) = &channel {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(channel))));
        }
        let sent = sendmsg(&self.socket, &[std::io::IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)
            .expect("sent");
        assert_eq!(sent, message.len());
    }
}
