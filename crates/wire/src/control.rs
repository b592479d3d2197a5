//! The control channel: small messages in JSON, each preceded by its length, so that a trace of the channel is
//! readable.
//!
//! `length u32` (little-endian, at most [`MAX_CONTROL_MESSAGE`]), then that many bytes of JSON. A receiver ignores
//! fields that it does not know. An unknown message is an error, since the sender must not send it unless its
//! capability was chosen.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::description::Description;
use crate::limits::MAX_CONTROL_MESSAGE;
#[cfg(doc)]
use crate::limits::{MAX_DEVICE_CHANNELS, MAX_OPENING};
pub use crate::mode::Mode;
use crate::reason::Reason;
use crate::switchover::SwitchoverMessage;

/// The content of a session in mode `proxy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RelayContent {
    /// A migration stream that Sterna reads: RAM channels and the stream channel.
    Migration,
    /// A connection that is carried unchanged: opaque channel 0 to the destination, opaque channel 1 back.
    Connection,
}

/// What one side supports; see [`crate::handshake`] for how the two sides agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Names of the compression methods that it can decode.
    pub methods: Vec<String>,
    /// The largest packet content that it accepts, in bytes.
    pub packet_size: u32,
    /// Names of the features it offers.
    pub features: Vec<String>,
    /// Names of the features that it requires of the other side.
    pub required: Vec<String>,
}

/// The first message of a migration: from the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Name and version of the program, for logs.
    pub program: String,
    /// The migration's key, 64 hexadecimal digits.
    pub key: String,
    /// How the two virtual machine monitors are driven.
    pub mode: Mode,
    /// How many RAM channels will be opened.
    pub channels: u16,
    /// What the source supports.
    pub capabilities: Capabilities,
    /// The machine that will be moved.
    pub machine: Machine,
}

/// The source's description of the virtual machine, sent before anything moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The virtual machine monitor and its version, for instance `QEMU 10.0.2`.
    pub monitor: String,
    /// The machine type, for instance `pc-q35-7.2`; empty where it is not known yet (a proxy learns it from the stream).
    pub machine_type: String,
    /// Guest RAM in bytes, 0 where it is not known yet.
    pub ram: u64,
    /// The downtime that the source promises, in milliseconds, 0 if it promises none.
    pub downtime_ms: u64,
    /// With the capability `resume-1`: how long the source tries to reach a destination that it has lost before the decision, in milliseconds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retry_ms: u64,
    /// The RAM blocks, by number, where the two sides must agree on them before anything moves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<Block>,
    /// The devices whose state travels apart from the monitor's, by number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
    /// The channels for that state.
    #[serde(default, skip_serializing_if = "DeviceChannels::is_usual")]
    pub device_channels: DeviceChannels,
    /// With the capability `opening-1`: bytes of the source's monitor for the destination's, at most [`MAX_OPENING`].
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "hexadecimal")]
    pub opening: Vec<u8>,
}

fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

/// Bytes as a text of hexadecimal digits.
mod hexadecimal {
    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::Serializer;

    use crate::identity::to_hex;

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&to_hex(bytes))
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        let digit = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
        let byte = |pair: &[u8]| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?);
        let bytes: Option<_> = text.as_bytes().chunks(2).map(byte).collect();
        bytes.ok_or_else(|| D::Error::custom("no text of hexadecimal digits"))
    }
}

/// A RAM block, which must be the same on both sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Bytes in a page of its backing: the unit in which pages are missing in post-copy.
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
    /// This many channels of its own, 1 … [`MAX_DEVICE_CHANNELS`], and all devices save and load at the same time.
    Own(u16),
    /// The stream channel, one device after the other and nothing ahead: for peers that support nothing else.
    Serial,
}

impl DeviceChannels {
    /// Returns the number of separate channels.
    pub fn own(self) -> u16 {
        if let Self::Own(channels) = self { channels } else { 0 }
    }

    fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

/// The destination accepts the migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Name and version of the program, for logs.
    pub program: String,
    /// The capabilities that both sides will use: never more than was offered.
    pub chosen: Capabilities,
}

/// The totals by which the destination checks that it has everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// The last sequence number of each RAM channel at the end of RAM, by index.
    pub ram: Vec<u64>,
    /// Normal pages sent. For logs: the destination compares `ram` only.
    pub normal_pages: u64,
    /// Zero pages sent. For logs, too.
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

/// The destination's figures of placing and loading, for the source's report.
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
    /// How the guest, which was started here, has ended by itself, if it has: for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_ended: Option<String>,
    /// Why the guest, which was started here, certainly does not run, where that was seen in its first moment: for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub does_not_run: Option<String>,
    /// Milliseconds for which the message that the guest runs was held back, to watch its first moment. No downtime: it runs meanwhile.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub watched_ms: f64,
}

/// The source's progress, for what the destination shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceProgress {
    /// Bytes of guest RAM that have not arrived, as far as the source knows.
    pub remaining_bytes: u64,
    /// Milliseconds until the guest runs at the destination, as the source estimates them; none where it cannot.
    pub time_left_ms: Option<u64>,
}

/// The destination's figures of post-copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostCopyFigures {
    /// Pages that a thread waited for and that were requested.
    pub requests: u64,
    /// Microseconds from the fault until the page is in place, median of the requests.
    pub latency_p50_us: u32,
    /// Microseconds from the fault until the page is in place, 99th percentile of the requests.
    pub latency_p99_us: u32,
}

/// All messages of the control channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ControlMessage {
    /// Source: the machine to be moved, and what the source supports.
    Hello(Box<Hello>),
    /// Destination: accepts the migration, with the chosen capabilities.
    Welcome(Welcome),
    /// Either: the migration is not possible, with the reason. The connection is closed after it.
    Refused(Reason),
    /// Destination, to a source that requires the capability `dry-run-1`: what a migration would be refused for, as far as that is
    /// known without beginning one. Nothing was begun, and the connection is closed after it.
    Checked {
        /// The reasons, for a person; none if the migration would be accepted.
        refusals: Vec<String>,
    },
    /// Destination, to a source that requires the capability `description-1`: its machine. Nothing was begun, and the connection is closed
    /// after it.
    Described(Description),
    /// Destination: the guest's RAM blocks are known and ready to be filled; pages may be sent. With the placement of
    /// each block.
    Ready {
        /// One line for each RAM block.
        placement: Vec<String>,
        /// From a gateway that accepts deltas: the numbers of the RAM blocks for which it accepts them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        deltas: Vec<u16>,
    },
    /// Source: all of RAM has been sent, with the totals. Sent before the switchover's `Prepare`.
    Totals(Totals),
    /// Destination: a message that QEMU sent on its return path.
    ReturnPath(ReturnPath),
    /// Either: a step of the switchover.
    Switchover(SwitchoverMessage),
    /// Source, in mode `proxy`, before any other message: the content of this session, and the destination's socket for
    /// it.
    Relay {
        /// What the session carries.
        content: RelayContent,
        /// The name given to the socket on both sides; empty for the socket without a name.
        socket: String,
    },
    /// Destination: the reply to [`ControlMessage::Relay`].
    RelayAnswer {
        /// Why the destination does not carry the session; none if the data channels may be opened.
        refusal: Option<String>,
    },
    /// Destination: the state that the source sent ahead is loaded, the guest may be paused.
    SwitchoverAck,
    /// Destination: how much of a device's state may be sent. The first message grants a credit; each further one
    /// increases it.
    DeviceCredit {
        /// The device's number.
        device: u16,
        /// The total that may have been sent so far, in bytes as [`cost`](crate::device::cost) counts them.
        up_to: u64,
    },
    /// Destination: the device has loaded the state that was saved before the guest's pause.
    DeviceTaken {
        /// The device's number.
        device: u16,
    },
    /// Destination: the device has loaded all of its state.
    DeviceLoaded {
        /// The device's number.
        device: u16,
    },
    /// Source, where both sides have the capability `progress-1`: progress, a few times a second before the guest runs at the destination.
    Progress(SourceProgress),
    /// Destination: figures of post-copy for the report, sent before [`SwitchoverMessage::Running`].
    PostCopyFigures(PostCopyFigures),
    /// Destination: figures for the report.
    Figures(DestinationFigures),
    /// Either: a failure, with the reason. The switchover messages determine the guest's fate.
    Failed(Reason),
    /// Either: a sign of life, sent when there is no other message.
    Heartbeat,
}

/// A control message that cannot be parsed.
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
    /// Returns the message's name on the wire. It is what a message that may not be sent now is named by: its content is the peer's.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Welcome(_) => "welcome",
            Self::Refused(_) => "refused",
            Self::Checked { .. } => "checked",
            Self::Described(_) => "described",
            Self::Ready { .. } => "ready",
            Self::Totals(_) => "totals",
            Self::ReturnPath(_) => "return_path",
            Self::Switchover(_) => "switchover",
            Self::Relay { .. } => "relay",
            Self::RelayAnswer { .. } => "relay_answer",
            Self::SwitchoverAck => "switchover_ack",
            Self::DeviceCredit { .. } => "device_credit",
            Self::DeviceTaken { .. } => "device_taken",
            Self::DeviceLoaded { .. } => "device_loaded",
            Self::PostCopyFigures(_) => "post_copy_figures",
            Self::Figures(_) => "figures",
            Self::Failed(_) => "failed",
            Self::Progress(_) => "progress",
            Self::Heartbeat => "heartbeat",
        }
    }

    /// Encodes the message, with its length in front.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        serde_json::to_writer(&mut bytes, self).expect("control messages have string keys and finite numbers");
        let length = (bytes.len() - 4) as u32;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes
    }
}

/// Splits the bytes of a control channel into messages.
#[derive(Debug, Default)]
pub struct ControlReader {
    pending: Vec<u8>,
}

impl ControlReader {
    /// Adds bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Returns the next message, once its last byte has arrived.
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
    fn messages_read_back_however_they_are_split() {
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
    fn a_message_is_named_as_on_the_wire() {
        let messages = [
            ControlMessage::Welcome(Welcome {
                program: String::new(),
                chosen: Capabilities {
                    methods: Vec::new(),
                    packet_size: 0,
                    features: Vec::new(),
                    required: Vec::new(),
                },
            }),
            ControlMessage::Refused(Reason::other("no")),
            ControlMessage::Checked { refusals: Vec::new() },
            ControlMessage::Described(Description::default()),
            ControlMessage::Ready { placement: Vec::new(), deltas: Vec::new() },
            ControlMessage::Totals(Totals::default()),
            ControlMessage::ReturnPath(ReturnPath::Shut(0)),
            ControlMessage::Switchover(SwitchoverMessage::Prepare),
            ControlMessage::Relay { content: RelayContent::Migration, socket: String::new() },
            ControlMessage::RelayAnswer { refusal: None },
            ControlMessage::SwitchoverAck,
            ControlMessage::DeviceCredit { device: 0, up_to: 0 },
            ControlMessage::DeviceTaken { device: 0 },
            ControlMessage::DeviceLoaded { device: 0 },
            ControlMessage::PostCopyFigures(PostCopyFigures::default()),
            ControlMessage::Figures(DestinationFigures::default()),
            ControlMessage::Failed(Reason::other("it did")),
            ControlMessage::Progress(SourceProgress::default()),
            ControlMessage::Heartbeat,
        ];
        for message in messages {
            let json = message.encode().split_off(4);
            let name = format!("\"{}\"", message.kind());
            let begins = json.strip_prefix(b"{").unwrap_or(&json).starts_with(name.as_bytes());
            assert!(begins, "{}", String::from_utf8_lossy(&json));
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_bytes_are_awaited() {
        let mut reader = ControlReader::default();
        reader.push(&u32::MAX.to_le_bytes());
        assert!(matches!(reader.next_message(), Err(ControlError::TooLong(_))));
    }

    #[test]
    fn an_opening_message_is_hexadecimal_digits_and_nothing_else() {
        let machine = Machine { opening: (0..=255).collect(), ..Machine::default() };
        let json = serde_json::to_string(&machine).unwrap();
        assert!(json.contains(r#""opening":"000102"#) && json.contains(r#"feff""#), "{json}");
        assert_eq!(serde_json::from_str::<Machine>(&json).unwrap(), machine);
        let without = serde_json::to_string(&Machine::default()).unwrap();
        assert!(!without.contains("opening"));
        for wrong in [r#""0""#, r#""0g""#, r#""00 1""#, r#""é""#, "[1]", "null"] {
            let json = without.replacen('{', &format!(r#"{{"opening":{wrong},"#), 1);
            assert!(serde_json::from_str::<Machine>(&json).is_err(), "{json}");
        }
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
