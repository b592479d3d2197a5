//! `docs/protocol.md` against the code: every example in it is what the code reads and writes, no message is missing, and
//! the limits are those of the code.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use sterna_wire::checksum::crc32c;
use sterna_wire::control::{ControlMessage, ControlReader};
use sterna_wire::delta::PageDelta;
use sterna_wire::device::{MIN_CREDIT, PIECE_OVERHEAD};
use sterna_wire::header::{ChannelHeader, ChannelKind, ChannelReply, MAGIC, PROTOCOL_VERSION};
use sterna_wire::identity::{MigrationId, MigrationKey, ProofSubject};
use sterna_wire::limits as limit;
use sterna_wire::packet::{Ack, DeviceLabel, PacketHeader, PacketKind, PageRequest, Refusal, Run, RunKind};
use sterna_wire::reason::ErrorKind;

fn document() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/protocol.md")).unwrap()
}

/// The contents of all code blocks whose first line is `kind`.
fn blocks(kind: &str) -> Vec<String> {
    let document = document();
    let start = format!("```{kind}\n");
    let after = document.split(&start).skip(1);
    after.map(|rest| rest.split_once("```").expect("the block ends").0.to_owned()).collect()
}

fn hex(name: &str) -> Vec<u8> {
    let found = blocks(&format!("hex {name}"));
    assert_eq!(found.len(), 1, "{name}");
    found[0].split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

/// Reads `json` as it would arrive.
fn read(json: &str) -> Result<ControlMessage, String> {
    let mut reader = ControlReader::default();
    reader.push(&(json.len() as u32).to_le_bytes());
    reader.push(json.as_bytes());
    reader.next_message().map(|message| message.expect("it is whole")).map_err(|error| error.to_string())
}

/// The names in serde's "expected one of `a`, `b`" for a message that does not exist.
fn known_names(unknown: &str) -> BTreeSet<String> {
    let error = read(unknown).unwrap_err();
    let (_, list) = error.split_once("expected").unwrap_or_else(|| panic!("{error}"));
    list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn name(value: &Value) -> String {
    match value {
        Value::String(name) => name.clone(),
        Value::Object(fields) if fields.len() == 1 => fields.keys().next().unwrap().clone(),
        other => panic!("not a message: {other}"),
    }
}

#[test]
fn every_control_example_is_a_message_and_is_written_the_same_way() {
    for example in blocks("json control") {
        let message = read(&example).unwrap_or_else(|error| panic!("{example}: {error}"));
        let written: Value = serde_json::from_slice(&message.encode()[4..]).unwrap();
        assert_eq!(written, serde_json::from_str::<Value>(&example).unwrap(), "a field is missing or too many");
    }
}

#[test]
fn every_control_message_has_an_example() {
    let mut shown: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for example in blocks("json control") {
        let value: Value = serde_json::from_str(&example).unwrap();
        let inner = shown.entry(name(&value)).or_default();
        if matches!(name(&value).as_str(), "switchover" | "return_path") {
            inner.insert(name(&value[name(&value)]));
        }
    }
    assert_eq!(shown.keys().cloned().collect::<BTreeSet<_>>(), known_names(r#"{"dance":1}"#));
    assert_eq!(shown["switchover"], known_names(r#"{"switchover":{"dance":1}}"#));
    assert_eq!(shown["return_path"], known_names(r#"{"return_path":{"dance":1}}"#));
    for mode in known_names(r#"{"hello":{"mode":"dance"}}"#) {
        assert!(document().contains(&format!("`{mode}`")), "{mode}");
    }
}

#[test]
fn the_channel_headers_and_their_proofs_are_those_of_the_document() {
    let id = MigrationId::from_bytes(std::array::from_fn(|at| at as u8));
    let key = MigrationKey::from_bytes(std::array::from_fn(|at| 0x20 + at as u8));
    for (name, exporter) in [("channel-header", &[][..]), ("channel-header-tls", &[0xee; 32])] {
        let subject = ProofSubject { id, kind: ChannelKind::Ram, index: 2, incarnation: 1, exporter };
        assert_eq!(ChannelHeader::new(&key, &subject).encode().to_vec(), hex(name), "{name}");
    }
    assert_eq!((&hex("channel-header")[..8], PROTOCOL_VERSION), (&MAGIC[..], 1));
    let hello = blocks("json control").into_iter().find(|example| example.contains("\"hello\"")).unwrap();
    assert!(hello.contains(&key.to_hex()), "one key throughout the document");
}

#[test]
fn replies_and_the_length_of_a_message_are_those_of_the_document() {
    assert_eq!(ChannelReply::Accepted.encode(), hex("reply-accepted"));
    assert_eq!(ChannelReply::Refused("no room".into()).encode(), hex("reply-refused"));
    assert_eq!(ControlMessage::Heartbeat.encode(), hex("heartbeat"));
}

#[test]
fn packets_and_acknowledgements_are_those_of_the_document() {
    let runs = [Run { kind: RunKind::Normal, first: 3, count: 1 }, Run { kind: RunKind::Zero, first: 4, count: 256 }];
    let table: Vec<u8> = runs.iter().flat_map(Run::encode).collect();
    let pages = PacketHeader {
        kind: PacketKind::Pages,
        method: 0,
        subject: 1,
        sequence: 7,
        table_length: table.len() as u32,
        payload_length: 4096,
        content_length: 4096,
        content_checksum: crc32c(&[0x5a; 4096]),
        detail: 0,
    };
    assert_eq!([&pages.encode(&table)[..], &table].concat(), hex("pages"));
    let end = PacketHeader {
        kind: PacketKind::GenerationEnd,
        subject: 0,
        sequence: 8,
        table_length: 0,
        payload_length: 0,
        content_length: 0,
        content_checksum: crc32c(&[]),
        detail: 2,
        ..pages
    };
    assert_eq!(end.encode(&[]).to_vec(), hex("generation-end"));
    assert_eq!(DeviceLabel { name: b"0000:00:02.0/vfio", instance: 1 }.encode(), hex("device-label"));
    let record = [2, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let delta = PageDelta { checksum: 0x1122_3344, record: &record };
    assert_eq!([&delta.header()[..], &record].concat(), hex("delta"));
    assert_eq!(Ack { sequence: 8, busy_us: 1500 }.encode().to_vec(), hex("ack"));
    let request = PageRequest { block: 0, first: 10, count: 2 };
    assert_eq!([Refusal { sequence: 8, requests: 1 }.encode(), request.encode()].concat(), hex("refusal"));
}

#[test]
fn numbers_in_the_tables_are_those_of_the_code() {
    let document = document();
    assert_eq!((PIECE_OVERHEAD, MIN_CREDIT), (4096, 65_536));
    let kinds = [
        ("pages", PacketKind::Pages),
        ("end of a generation", PacketKind::GenerationEnd),
        ("deltas", PacketKind::Deltas),
        ("device buffer", PacketKind::DeviceBuffer),
        ("device ahead", PacketKind::DeviceAhead),
        ("device end", PacketKind::DeviceEnd),
        ("stream", PacketKind::Stream),
        ("device state", PacketKind::DeviceState),
        ("opaque", PacketKind::Opaque),
        ("opaque end", PacketKind::OpaqueEnd),
    ];
    for (name, kind) in kinds {
        assert!(document.contains(&format!("\n| {name} | {} | ", kind as u8)), "{name}");
    }
    let channels = [
        ("control", ChannelKind::Control),
        ("RAM", ChannelKind::Ram),
        ("device state", ChannelKind::DeviceState),
        ("post-copy", ChannelKind::PostCopy),
        ("opaque", ChannelKind::Opaque),
    ];
    for (name, kind) in channels {
        assert!(document.contains(&format!("\n| {name} | {} | ", kind as u8)), "{name}");
    }
}

#[test]
fn the_limits_are_those_of_the_code() {
    let seconds = |time: std::time::Duration| format!("{} s", time.as_secs());
    let expected: BTreeMap<&str, String> = [
        ("MAX_RAM_CHANNELS", limit::MAX_RAM_CHANNELS.to_string()),
        ("MAX_DEVICE_CHANNELS", limit::MAX_DEVICE_CHANNELS.to_string()),
        ("MAX_DEVICES", limit::MAX_DEVICES.to_string()),
        ("MAX_OPENING", limit::MAX_OPENING.to_string()),
        ("MAX_FACTS", limit::MAX_FACTS.to_string()),
        ("MAX_FACT_NAME", limit::MAX_FACT_NAME.to_string()),
        ("MAX_FACT_VALUE", limit::MAX_FACT_VALUE.to_string()),
        ("MAX_OPAQUE_CHANNELS", limit::MAX_OPAQUE_CHANNELS.to_string()),
        ("MAX_CONTROL_MESSAGE", limit::MAX_CONTROL_MESSAGE.to_string()),
        ("MAX_RUNS", limit::MAX_RUNS.to_string()),
        ("MAX_CONTENT", limit::MAX_CONTENT.to_string()),
        ("MIN_PACKET_SIZE", limit::MIN_PACKET_SIZE.to_string()),
        ("DEFAULT_PACKET_SIZE", limit::DEFAULT_PACKET_SIZE.to_string()),
        ("MAX_BLOCKS", limit::MAX_BLOCKS.to_string()),
        ("MAX_NAME", limit::MAX_NAME.to_string()),
        ("MAX_TEXT", limit::MAX_TEXT.to_string()),
        ("MAX_BLOCK_LENGTH", limit::MAX_BLOCK_LENGTH.to_string()),
        ("HANDSHAKE_TIME", seconds(limit::HANDSHAKE_TIME)),
        ("PREPARATION_TIME", seconds(limit::PREPARATION_TIME)),
        ("HEARTBEAT_INTERVAL", seconds(limit::HEARTBEAT_INTERVAL)),
        ("SILENCE_LIMIT", seconds(limit::SILENCE_LIMIT)),
    ]
    .into();
    let document = document();
    let rows = document.lines().filter_map(|line| line.strip_prefix("| `")).filter_map(|line| line.split_once("` | "));
    let rows = rows.filter(|(name, _)| name.chars().all(|letter| letter.is_ascii_uppercase() || letter == '_'));
    let found: BTreeMap<&str, String> =
        rows.map(|(name, rest)| (name, rest.split(" |").next().unwrap().to_owned())).collect();
    assert_eq!(found, expected);
    // The code's own list, so that a limit added there is missed here.
    let source = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/limits.rs")).unwrap();
    assert_eq!(source.matches("pub const ").count(), expected.len());
}

#[test]
fn every_kind_of_a_reason_is_in_the_document() {
    let document = document();
    let kinds = document.split("Beside a reason, `kind`").nth(1).unwrap().split("\n\n").next().unwrap();
    for kind in ErrorKind::ALL {
        assert!(kinds.contains(&format!("`{}`", kind.name())), "{kind:?}");
    }
}
