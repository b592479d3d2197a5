//! The return path: messages of the destination QEMU to the source, backwards on the main channel's socket.

use std::io::{IoSlice, Read, Write};
use sterna_wire::control::ReturnPath;

use super::StreamError;
use super::input::Input;
use super::output::write_all_vectored;

/// Type, length and at most one word.
const LONGEST: usize = 8;
/// A whole return path of precopy is some tens of bytes.
const CAPACITY: usize = 512;

const SHUT: u16 = 1;
const PONG: u16 = 2;
const SWITCHOVER_ACK: u16 = 7;

/// A message of the return path that belongs to precopy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReturnMessage {
    /// The destination has finished loading: 0 on success, else the source resumes its guest.
    Shut(u32),
    /// Answer to a PING of the same value.
    Pong(u32),
    /// All devices have what they need for the guest to stop at the source (QEMU from 8.1, capability `switchover-ack`).
    SwitchoverAck,
}

/// Between two gateways the same messages travel on the control channel.
impl From<ReturnMessage> for ReturnPath {
    fn from(message: ReturnMessage) -> Self {
        match message {
            ReturnMessage::Shut(status) => Self::Shut(status),
            ReturnMessage::Pong(value) => Self::Pong(value),
            ReturnMessage::SwitchoverAck => Self::SwitchoverAck,
        }
    }
}

impl From<ReturnPath> for ReturnMessage {
    fn from(message: ReturnPath) -> Self {
        match message {
            ReturnPath::Shut(status) => Self::Shut(status),
            ReturnPath::Pong(value) => Self::Pong(value),
            ReturnPath::SwitchoverAck => Self::SwitchoverAck,
        }
    }
}

impl ReturnMessage {
    /// Writes the message for a source QEMU, and flushes.
    ///
    /// # Errors
    /// [`StreamError::Io`].
    pub fn write<W: Write>(&self, mut writer: W) -> Result<(), StreamError> {
        const DOING: &str = "writing the return path to QEMU";
        let (kind, value) = match *self {
            Self::Shut(value) => (SHUT, Some(value)),
            Self::Pong(value) => (PONG, Some(value)),
            Self::SwitchoverAck => (SWITCHOVER_ACK, None),
        };
        let mut bytes = [0; LONGEST];
        bytes[..2].copy_from_slice(&kind.to_be_bytes());
        let length = match value {
            Some(value) => {
                bytes[2..4].copy_from_slice(&4u16.to_be_bytes());
                bytes[4..].copy_from_slice(&value.to_be_bytes());
                8
            }
            None => 4,
        };
        write_all_vectored(&mut writer, &mut [IoSlice::new(&bytes[..length])], DOING)?;
        writer.flush().map_err(|source| StreamError::Io { doing: DOING, source })
    }
}

/// Reader of a destination QEMU's return path.
#[derive(Debug)]
pub struct ReturnPathReader<R> {
    input: Input<R>,
}

impl<R: Read> ReturnPathReader<R> {
    /// Starts at the first byte.
    pub fn new(reader: R) -> Self {
        Self { input: Input::with_capacity(reader, CAPACITY) }
    }

    /// Returns the underlying reader, for example to shut its socket down.
    #[must_use]
    pub fn get_ref(&self) -> &R {
        self.input.get_ref()
    }

    /// Reads the next message; `None` if the destination has closed the path between messages.
    ///
    /// # Errors
    /// [`StreamError`]; requests that only post-copy makes are refused.
    pub fn next_message(&mut self) -> Result<Option<ReturnMessage>, StreamError> {
        const READING: &str = "return path message";
        if self.input.peek::<1>(READING)?.is_none() {
            return Ok(None);
        }
        let kind = self.input.be16(READING)?;
        let length = self.input.be16(READING)?;
        let message = match (kind, length) {
            (SHUT, 4) => ReturnMessage::Shut(self.input.be32(READING)?),
            (PONG, 4) => ReturnMessage::Pong(self.input.be32(READING)?),
            (SWITCHOVER_ACK, 0) => ReturnMessage::SwitchoverAck,
            (SHUT | PONG | SWITCHOVER_ACK, _) => {
                return Err(StreamError::Malformed(format!("return path message {kind} with {length} bytes of data")));
            }
            (other, _) => return Err(unsupported(other)),
        };
        Ok(Some(message))
    }
}

fn unsupported(kind: u16) -> StreamError {
    let name = match kind {
        3 => "REQ_PAGES_ID",
        4 => "REQ_PAGES",
        5 => "RECV_BITMAP",
        6 => "RESUME_ACK",
        _ => return StreamError::Malformed(format!("return path message of unknown type {kind}")),
    };
    StreamError::refused(format!("return path message {name}"), "turn the capability postcopy-ram off")
}
