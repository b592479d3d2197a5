//! The records in which the source's gateway sends QEMU's own stream, on the device-state channel with index 0.
//!
//! | record | content |
//! |---|---|
//! | 1 start | JSON: everything of the main channel up to the end of the RAM setup section |
//! | 2 command | a command between RAM sections, verbatim |
//! | 3 device section | `section id u32, last u8`, then a piece of a device's own section, verbatim |
//! | 4 end of RAM | `generation u64`: the last generation; no later record is fed to QEMU before all channels have ended it |
//! | 5 opaque | bytes after the end of RAM, verbatim |
//! | 6 end | the source QEMU closed its main channel |
//!
//! Pages are not among the records: they travel on the RAM channels. The destination writes the sections around them anew.

use serde::{Deserialize, Serialize};

use crate::stream::{Command, CommandKind, Configuration, DevicePiece, RamStart, StreamError};

/// Kinds of stream records, the `subject` of their packets.
pub(super) mod record {
    pub(in super::super) const START: u16 = 1;
    pub(in super::super) const COMMAND: u16 = 2;
    pub(in super::super) const DEVICE_SECTION: u16 = 3;
    pub(in super::super) const RAM_END: u16 = 4;
    pub(in super::super) const OPAQUE: u16 = 5;
    pub(in super::super) const END: u16 = 6;
}

/// Maximum bytes of a start record: block lists are short.
pub(super) const MAX_START_BYTES: usize = 4 << 20;

/// A command or a device section that comes before RAM, as JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum PrologueItem {
    Command(Hex),
    DeviceSection { section_id: u32, last: bool, bytes: Hex },
}

/// The start record as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct StartRecord {
    configuration: Hex,
    prologue: Vec<PrologueItem>,
    ram_section_id: u32,
    ram_instance_id: u32,
    ram_version_id: u32,
    block_list: Hex,
    ram_channels: u16,
    multifd_channels: u8,
    uuid: Hex,
    flush_in_setup: bool,
}

/// What a destination needs to write the beginning of the stream.
#[derive(Debug)]
pub(super) struct Start {
    /// The configuration section.
    pub(super) configuration: Configuration,
    /// Commands and device sections before RAM, in order.
    pub(super) prologue: Vec<Prologue>,
    /// The RAM setup section.
    pub(super) ram: RamStart,
    /// How many RAM channels there are between the hosts.
    pub(super) ram_channels: u16,
    /// How many multifd channels the source QEMU opened; 0: multifd is off.
    pub(super) multifd_channels: u8,
    /// The guest's UUID, as the multifd channels carry it.
    pub(super) uuid: [u8; 16],
    /// Whether the RAM setup section had a FLUSH record.
    pub(super) flush_in_setup: bool,
}

impl Start {
    /// Returns whether the source QEMU opens the return path. It then ends the migration only after the last answer.
    pub(super) fn opens_return_path(&self) -> bool {
        let opens =
            |item: &Prologue| matches!(item, Prologue::Command(command) if command.kind == CommandKind::OpenReturnPath);
        self.prologue.iter().any(opens)
    }
}

/// A command or a device section that comes before RAM.
#[derive(Debug)]
pub(super) enum Prologue {
    /// A command.
    Command(Command),
    /// A piece of a device's own section.
    DeviceSection(DevicePiece),
}

/// Why a record was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum LayoutError {
    #[error("a stream record of kind {0} is unknown here")]
    Kind(u16),
    #[error("the start of the stream cannot be understood: {0}")]
    Start(String),
    #[error("a stream record of {0} bytes is too short or too long for its kind")]
    Length(usize),
    #[error("{0}")]
    Stream(#[from] StreamError),
}

impl Start {
    pub(super) fn encode(&self) -> Vec<u8> {
        let item = |item: &Prologue| match item {
            Prologue::Command(command) => PrologueItem::Command(Hex(command.bytes.clone())),
            Prologue::DeviceSection(piece) => PrologueItem::DeviceSection {
                section_id: piece.section_id,
                last: piece.last,
                bytes: Hex(piece.bytes.clone()),
            },
        };
        let record = StartRecord {
            configuration: Hex(self.configuration.bytes.clone()),
            prologue: self.prologue.iter().map(item).collect(),
            ram_section_id: self.ram.section_id,
            ram_instance_id: self.ram.instance_id,
            ram_version_id: self.ram.version_id,
            block_list: Hex(self.ram.payload.clone()),
            ram_channels: self.ram_channels,
            multifd_channels: self.multifd_channels,
            uuid: Hex(self.uuid.to_vec()),
            flush_in_setup: self.flush_in_setup,
        };
        serde_json::to_vec(&record).expect("the record has string keys only")
    }

    pub(super) fn decode(json: &[u8]) -> Result<Self, LayoutError> {
        if json.len() > MAX_START_BYTES {
            return Err(LayoutError::Length(json.len()));
        }
        let record: StartRecord =
            serde_json::from_slice(json).map_err(|error| LayoutError::Start(error.to_string()))?;
        let configuration = Configuration::parse(&record.configuration.0)?;
        let ram = RamStart::from_payload(
            record.ram_section_id,
            record.ram_instance_id,
            record.ram_version_id,
            &record.block_list.0,
            configuration.page_size(),
            configuration.ignores_shared(),
        )?;
        let item = |item: PrologueItem| {
            Ok::<_, StreamError>(match item {
                PrologueItem::Command(bytes) => Prologue::Command(Command::parse(&bytes.0)?),
                PrologueItem::DeviceSection { section_id, last, bytes } => {
                    Prologue::DeviceSection(DevicePiece { section_id, bytes: bytes.0, last })
                }
            })
        };
        let uuid = record.uuid.0.try_into().map_err(|_| LayoutError::Start("the UUID has not 16 bytes".into()))?;
        Ok(Self {
            configuration,
            prologue: record.prologue.into_iter().map(item).collect::<Result<_, _>>()?,
            ram,
            ram_channels: record.ram_channels,
            multifd_channels: record.multifd_channels,
            uuid,
            flush_in_setup: record.flush_in_setup,
        })
    }
}

/// Splits a piece of a device's section into contents of records of at most `max_bytes` bytes; an empty piece is one record.
pub(super) fn encode_device_section(piece: &DevicePiece, max_bytes: usize) -> Vec<Vec<u8>> {
    const PREFIX: usize = 5;
    let mut rest = &piece.bytes[..];
    let mut records = Vec::new();
    loop {
        let (part, after) = rest.split_at(rest.len().min(max_bytes - PREFIX));
        let mut content = piece.section_id.to_le_bytes().to_vec();
        content.push(u8::from(piece.last && after.is_empty()));
        content.extend_from_slice(part);
        records.push(content);
        if after.is_empty() {
            return records;
        }
        rest = after;
    }
}

/// Decodes one record of [`encode_device_section`].
pub(super) fn decode_device_section(content: &[u8]) -> Result<DevicePiece, LayoutError> {
    let length = LayoutError::Length(content.len());
    let Some((section_id, rest)) = content.split_first_chunk() else { return Err(length) };
    let Some((last, bytes)) = rest.split_first() else { return Err(length) };
    Ok(DevicePiece { section_id: u32::from_le_bytes(*section_id), bytes: bytes.to_vec(), last: *last != 0 })
}

/// Reads the generation of an end-of-RAM record.
pub(super) fn decode_ram_end(content: &[u8]) -> Result<u64, LayoutError> {
    let bytes = content.try_into().map_err(|_| LayoutError::Length(content.len()))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Bytes as hexadecimal text, which is readable in a trace, and half as long as JSON's list of numbers.
#[derive(Debug)]
struct Hex(Vec<u8>);

impl Serialize for Hex {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let text = String::deserialize(deserializer)?;
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let pair = |pair: &[u8]| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?);
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(pair).collect();
        bytes.map(Self).ok_or_else(|| D::Error::custom("not hexadecimal"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> Start {
        // From qemu.md 2.1 and 2.2: type, length, name; then MEM_SIZE|total and one block.
        let machine = b"pc-q35-7.2";
        let mut configuration = vec![7, 0, 0, 0, machine.len() as u8];
        configuration.extend_from_slice(machine);
        let mut blocks = (0x10000u64 | 4).to_be_bytes().to_vec();
        blocks.extend_from_slice(b"\x04ram0");
        blocks.extend_from_slice(&0x10000u64.to_be_bytes());
        Start {
            configuration: Configuration::parse(&configuration).unwrap(),
            prologue: vec![Prologue::Command(Command::parse(&[8, 0, 2, 0, 4, 0, 0, 0, 1]).unwrap())],
            ram: RamStart::from_payload(2, 0, 4, &blocks, 4096, false).unwrap(),
            ram_channels: 2,
            multifd_channels: 2,
            uuid: [7; 16],
            flush_in_setup: false,
        }
    }

    #[test]
    fn a_start_record_reads_back() {
        let start = start();
        let read = Start::decode(&start.encode()).unwrap();
        assert_eq!(read.configuration, start.configuration);
        assert_eq!(read.ram, start.ram);
        assert_eq!(read.uuid, start.uuid);
        assert!(matches!(&read.prologue[..], [Prologue::Command(command)] if command.bytes.len() == 9));
    }

    #[test]
    fn damaged_start_records_are_refused() {
        let good = String::from_utf8(start().encode()).unwrap();
        assert!(Start::decode(good.replace("07070707", "0707070").as_bytes()).is_err());
        assert!(Start::decode(good.replace("07070707", "zz070707").as_bytes()).is_err());
        assert!(Start::decode(&good.as_bytes()[..good.len() - 1]).is_err());
        assert!(Start::decode(&vec![b' '; MAX_START_BYTES + 1]).is_err());
    }

    #[test]
    fn device_sections_read_back_and_short_ones_are_refused() {
        let piece = DevicePiece { section_id: 9, bytes: vec![1, 2, 3], last: true };
        let parts = encode_device_section(&piece, 7);
        let read: Vec<_> = parts.iter().map(|part| decode_device_section(part).unwrap()).collect();
        assert_eq!(read.iter().map(|part| part.last).collect::<Vec<_>>(), [false, true]);
        assert_eq!(read.iter().flat_map(|part| part.bytes.clone()).collect::<Vec<_>>(), piece.bytes);
        let empty = encode_device_section(&DevicePiece { bytes: Vec::new(), ..piece }, 7);
        let read: Vec<_> = empty.iter().map(|part| decode_device_section(part).unwrap()).collect();
        assert!(matches!(&read[..], [one] if one.last && one.section_id == 9 && one.bytes.is_empty()));
        assert!(decode_device_section(&[1, 0, 0, 0]).is_err());
        assert!(decode_ram_end(&[0; 7]).is_err());
    }
}
