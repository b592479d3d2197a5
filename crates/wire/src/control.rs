//! The control channel: small messages in JSON, each behind its length, so that a trace of it can be read.
//!
//! `length u32` (little-endian, at most [`MAX_CONTROL_MESSAGE`]), then that many bytes of JSON. Fields that a version
//! does not know are ignored; a message that it does not know is an error, since the sender would not have sent it
//! without the capability having been chosen.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::limits::MAX_CONTROL_MESSAGE;
#[cfg(doc)]
use crate::limits::MAX_DEVICE_CHANNELS;
use crate::switchover::SwitchoverMessage;

/// How the virtual machine's own software is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Sterna drives both QEMUs, takes the guest from the source's own migration stream, and answers for the switchover.
    Owner,
    /// Sterna drives both QEMUs, reads guest RAM from outside, and answers for the switchover.
    Direct,
    /// Somebody else drives them; Sterna relays, and claims nothing about the switchover.
    Proxy,
    /// Sterna is part of the virtual machine monitors themselves.
    Embedded,
}

/// What a session in mode `proxy` carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RelayContent {
    /// A migration stream that Sterna reads: RAM channels and the stream channel.
    Migration,
    /// A connection that is carried unchanged: opaque channel 0 to the destination, opaque channel 1 back.
    Connection,
}

/// What one side can do; see [`crate::handshake`] for how two of them meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Names of the compression methods that it can decode.
    pub methods: Vec<String>,
    /// Largest packet content it takes, in bytes.
    pub packet_size: u32,
    /// Names of the features it offers.
    pub features: Vec<String>,
    /// Names of the features without which it will not go on.
    pub required: Vec<String>,
}

/// The first message of a migration: from the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Name and version of the program, for logs.
    pub program: String,
    /// The migration's key, 64 hexadecimal digits.
    pub key: String,
    /// How the two virtual machines are driven.
    pub mode: Mode,
    /// How many RAM channels will be opened.
    pub channels: u16,
    /// What the source can do.
    pub capabilities: Capabilities,
    /// The machine that will be moved.
    pub machine: Machine,
}

/// What the source says of the virtual machine before anything moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The virtual machine monitor and its version, for instance `QEMU 10.0.2`.
    pub monitor: String,
    /// The machine type, for instance `pc-q35-7.2`; empty where it is not known yet (a proxy learns it from the stream).
    pub machine_type: String,
    /// Guest RAM in bytes, 0 where it is not known yet.
    pub ram: u64,
    /// The downtime that the source promises, in milliseconds, 0 where nothing is promised.
    pub downtime_ms: u64,
    /// The RAM blocks, by number, where the two sides must agree on them before anything moves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<Block>,
    /// The devices whose state travels apart from the monitor's, by number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
    /// Which channels that state takes.
    #[serde(default, skip_serializing_if = "DeviceChannels::is_usual")]
    pub device_channels: DeviceChannels,
}

/// A RAM block, as both sides must have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Bytes in a page of its backing: what is missing in post-copy is missing in pages of this size.
    pub page_size: u64,
}

/// A device, as both sides know it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Which of several devices with this name.
    pub instance: u32,
}

impl Device {
    /// The `instance`th device with the name `name`.
    pub fn new(name: impl Into<String>, instance: u32) -> Self {
        Self { name: name.into(), instance }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.name, self.instance)
    }
}

/// The channels of device state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceChannels {
    /// Those of RAM, and all devices save and load at the same time.
    #[default]
    Mixed,
    /// So many of its own, 1 … [`MAX_DEVICE_CHANNELS`], and all devices save and load at the same time.
    Own(u16),
    /// The stream channel, one device after the other and nothing ahead: the way of those who know no other.
    Serial,
}

impl DeviceChannels {
    /// How many channels of their own.
    pub fn own(self) -> u16 {
        if let Self::Own(channels) = self { channels } else { 0 }
    }

    fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

/// The destination takes the migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Name and version of the program, for logs.
    pub program: String,
    /// What both sides will use: never more than was offered.
    pub chosen: Capabilities,
}

/// The totals against which the destination checks that it has everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// The last sequence number of each RAM channel at the end of RAM, by index.
    pub ram: Vec<u64>,
    /// Normal pages sent.
    pub normal_pages: u64,
    /// Zero pages sent.
    pub zero_pages: u64,
}

/// QEMU's return path, message by message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReturnPath {
    /// The answer to a ping.
    Pong(u32),
    /// The destination has loaded everything (0) or failed.
    Shut(u32),
    /// The destination permits the switchover.
    SwitchoverAck,
}

/// How placing went, for the source's report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DestinationFigures {
    /// CPU-seconds of the receiving process.
    pub cpu_seconds: f64,
    /// Page faults of the destination's virtual machine monitor.
    pub faults: u64,
    /// Milliseconds from the last byte of state to the guest loaded and paused.
    pub load_ms: f64,
    /// Milliseconds from the decision to the guest running.
    pub start_ms: f64,
}

/// How post-copy went at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostCopyFigures {
    /// Pages that somebody waited for and that were asked for.
    pub requests: u64,
    /// Microseconds from the fault to the page in place, of the middle request.
    pub latency_p50_us: u32,
    /// As before, of the request that 99 of 100 were faster than.
    pub latency_p99_us: u32,
}

/// All that is said on the control channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ControlMessage {
    /// Source: what will be moved and what the source can do.
    Hello(Box<Hello>),
    /// Destination: it will take it, and what was chosen.
    Welcome(Welcome),
    /// Either: the migration is not possible, and why. The connection is closed after it.
    Refused {
        /// The reason, for a person.
        reason: String,
    },
    /// Destination: the guest's RAM blocks are known and ready to be filled; pages may come. How each will be placed.
    Ready {
        /// One line for each RAM block.
        placement: Vec<String>,
        /// Where a gateway takes deltas: the numbers of the RAM blocks that it takes them of.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        deltas: Vec<u16>,
    },
    /// Source: all of RAM has been sent, and this is how much it was. Goes before the switchover's `Prepare`.
    Totals(Totals),
    /// Destination: what QEMU said on its return path.
    ReturnPath(ReturnPath),
    /// Either: a step of the switchover.
    Switchover(SwitchoverMessage),
    /// Source, in mode `proxy`, before anything else: what this session carries, and for which of the destination's sockets.
    Relay {
        /// What the session carries.
        content: RelayContent,
        /// The name that both sides were started with for the socket; empty: the socket that was given without a name.
        socket: String,
    },
    /// Destination: the answer to [`ControlMessage::Relay`].
    RelayAnswer {
        /// Why the destination does not carry it; none: the data channels may be opened.
        refusal: Option<String>,
    },
    /// Destination: what the source sent ahead is loaded, the guest may be paused.
    SwitchoverAck,
    /// Destination: how much of a device's state may be on its way or waiting for it. The first says how much at once; each further one
    /// permits more.
    DeviceCredit {
        /// The device's number.
        device: u16,
        /// All that may have been sent of it so far, in bytes as [`cost`](crate::device::cost) counts them.
        up_to: u64,
    },
    /// Destination: the device has taken what was saved ahead of the guest's stop.
    DeviceTaken {
        /// The device's number.
        device: u16,
    },
    /// Destination: the device has loaded all of its state.
    DeviceLoaded {
        /// The device's number.
        device: u16,
    },
    /// Source: the guest will go on before all of its RAM is there. Every page sent so far is placed.
    PostCopy,
    /// Destination: missing pages are watched, discards and the post-copy channel may come; after a lost connection: so may
    /// all data channels of this incarnation.
    PostCopyReady,
    /// Destination: no page is missing any more.
    PostCopyDone(PostCopyFigures),
    /// Destination: figures for the report.
    Figures(DestinationFigures),
    /// Either: something failed, and what. The guest's fate is in the switchover messages.
    Failed {
        /// What failed, for a person.
        reason: String,
    },
    /// Source: it knows how the migration ended and hangs up; nothing it should be told is missing.
    Goodbye,
    /// Either: nothing to say, still here.
    Heartbeat,
}

/// A control message that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Its length is beyond the limit.
    #[error("a control message of {0} bytes is beyond the limit of {MAX_CONTROL_MESSAGE}")]
    TooLong(usize),
    /// It is not JSON of the expected shape.
    #[error("a control message cannot be understood: {0}")]
    Malformed(String),
}

impl ControlMessage {
    /// The message as it travels, its length in front.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        serde_json::to_writer(&mut bytes, self).expect("control messages have string keys and finite numbers");
        let length = (bytes.len() - 4) as u32;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes
    }
}

/// Cuts the bytes of a control channel into messages.
#[derive(Debug, Default)]
pub struct ControlReader {
    pending: Vec<u8>,
}

impl ControlReader {
    /// Takes bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// The next whole message, if its last byte has arrived.
    pub fn next_message(&mut self) -> Result<Option<ControlMessage>, ControlError> {
        let Some((length, rest)) = self.pending.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_CONTROL_MESSAGE {
            return Err(ControlError::TooLong(length));
        }
        let Some(json) = rest.get(..length) else { return Ok(None) };
        let message = serde_json::from_slice(json)
            .map_err(|error| ControlError::Malformed(crate::text::cleaned(&error.to_string())))?;
        self.pending.drain(..4 + length);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_back_however_they_are_cut() {
        let messages = [
            ControlMessage::Heartbeat,
            ControlMessage::Totals(Totals { ram: vec![3, 4], ..Totals::default() }),
            ControlMessage::ReturnPath(ReturnPath::Shut(0)),
        ];
        let bytes: Vec<u8> = messages.iter().flat_map(ControlMessage::encode).collect();
        for piece in 1..bytes.len() {
            let mut reader = ControlReader::default();
            let mut found = Vec::new();
            for part in bytes.chunks(piece) {
                reader.push(part);
                while let Some(message) = reader.next_message().unwrap() {
                    found.push(message);
                }
            }
            assert_eq!(found, messages, "in pieces of {piece}");
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_bytes_are_awaited() {
        let mut reader = ControlReader::default();
        reader.push(&u32::MAX.to_le_bytes());
        assert!(matches!(reader.next_message(), Err(ControlError::TooLong(_))));
    }

    #[test]
    fn what_is_not_a_known_message_is_an_error() {
        for json in ["{\"dance\":1}", "nonsense", "{\"hello\":{}}"] {
            let mut reader = ControlReader::default();
            reader.push(&(json.len() as u32).to_le_bytes());
            reader.push(json.as_bytes());
            assert!(matches!(reader.next_message(), Err(ControlError::Malformed(_))), "{json}");
        }
    }
}
