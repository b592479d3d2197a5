// What the fuzz targets and the plain corpus test do with arbitrary bytes from a peer: read them as each part of the
// protocol. The parsers may refuse but not panic, must not reserve memory by what the bytes claim, and what they accept
// must be within its limits and must read back the same.
//
// Checksums would keep a fuzzer out of everything behind them, so each entry has a second form, `…_repaired`, that makes
// them right first.

use sterna_wire::checksum::{Crc32c, crc32c};
use sterna_wire::control::{ControlError, ControlMessage, ControlReader};
use sterna_wire::delta::{MAX_RECORD, PageDelta, PageDeltas};
use sterna_wire::header::{CHANNEL_HEADER_LENGTH, ChannelHeader, ChannelReply, REPLY_PREFIX_LENGTH};
use sterna_wire::limits::{MAX_CONTENT, MAX_RUNS, MAX_TEXT};
use sterna_wire::packet::{
    Ack, BlockShape, DeviceLabel, MAX_TABLE, PACKET_HEADER_LENGTH, PacketHeader, PacketKind, PageRequest, PageTable,
    Run, RunKind,
};
use sterna_wire::switchover::Record;

/// The guest that packets are checked against.
const BLOCKS: &[BlockShape] =
    &[BlockShape { pages: 1 << 18, page_size: 4096 }, BlockShape { pages: 64, page_size: 4096 }];

/// Reads `data` as a channel header and the answer to one behind it; whether the header is one.
pub(crate) fn channel_header(data: &[u8]) -> bool {
    let Some((bytes, rest)) = data.split_first_chunk::<CHANNEL_HEADER_LENGTH>() else { return false };
    reply(rest);
    let Ok(header) = ChannelHeader::decode(bytes) else { return false };
    assert!(header.incarnation >= 1 && header.index < header.kind.max_channels());
    assert_eq!(ChannelHeader::decode(&header.encode()), Ok(header));
    true
}

/// As [`channel_header`], its checksum made right.
pub(crate) fn channel_header_repaired(data: &[u8]) {
    let mut data = data.to_vec();
    if data.len() >= CHANNEL_HEADER_LENGTH {
        let checksum = crc32c(&data[..72]);
        data[72..76].copy_from_slice(&checksum.to_le_bytes());
        channel_header(&data);
    }
}

fn reply(data: &[u8]) {
    let Some((prefix, rest)) = data.split_first_chunk::<REPLY_PREFIX_LENGTH>() else { return };
    let Ok(length) = ChannelReply::reason_length(*prefix) else { return };
    assert!(length <= MAX_TEXT);
    let Some(reason) = rest.get(..length) else { return };
    if let ChannelReply::Refused(text) = ChannelReply::decode(*prefix, reason) {
        assert!(text.len() <= MAX_TEXT && !text.chars().any(char::is_control));
    }
}

/// Reads `data` as a packet's header and table, and then as an acknowledgement; whether the packet is one.
pub(crate) fn packet(data: &[u8]) -> bool {
    let Some((bytes, rest)) = data.split_first_chunk::<PACKET_HEADER_LENGTH>() else { return false };
    if let Some(ack) = rest.first_chunk()
        && let Ok(ack) = Ack::decode(ack)
    {
        assert_eq!(Ack::decode(&ack.encode()), Ok(ack));
    }
    if let Some(request) = rest.first_chunk()
        && let Ok(request) = PageRequest::decode(request, BLOCKS)
    {
        let pages = BLOCKS[usize::from(request.block)].pages;
        assert!(request.first + u64::from(request.count) <= pages);
        assert_eq!(PageRequest::decode(&request.encode(), BLOCKS), Ok(request));
    }
    let Ok(header) = PacketHeader::decode(bytes, MAX_CONTENT) else { return false };
    assert!(header.table_length as usize <= MAX_TABLE && header.content_length as usize <= MAX_CONTENT);
    assert!(header.payload_length <= header.content_length);
    let Some(table) = rest.get(..header.table_length as usize) else { return false };
    if PacketHeader::check_table(bytes, table).is_err() {
        return false;
    }
    match header.kind {
        PacketKind::Pages | PacketKind::Discard => pages(&header, table),
        PacketKind::DeviceState => match DeviceLabel::decode(table) {
            Ok(label) => {
                assert_eq!(label.encode(), table);
                true
            }
            Err(_) => false,
        },
        _ => true,
    }
}

fn pages(header: &PacketHeader, table: &[u8]) -> bool {
    let mut pages = PageTable::new();
    if pages.read(header, table, BLOCKS).is_err() {
        return false;
    }
    let block = BLOCKS[usize::from(header.subject)];
    let mut next = 0;
    let mut content = 0;
    assert!(pages.runs().len() <= MAX_RUNS);
    for run in pages.runs() {
        assert!(run.first >= next && run.end() <= block.pages);
        next = run.end();
        if run.kind == RunKind::Normal {
            content += u64::from(run.count) * u64::from(block.page_size);
        }
    }
    assert_eq!(content, u64::from(header.content_length));
    assert_eq!(pages.runs().iter().flat_map(Run::encode).collect::<Vec<u8>>(), table);
    true
}

/// As [`packet`], its checksum made right.
pub(crate) fn packet_repaired(data: &[u8]) {
    const AT: usize = 32;
    let mut data = data.to_vec();
    let Some(bytes) = data.first_chunk::<PACKET_HEADER_LENGTH>() else { return };
    let table = u32::from_le_bytes([bytes[16], bytes[17], bytes[18], bytes[19]]) as usize;
    if table > data.len() - PACKET_HEADER_LENGTH {
        return;
    }
    let mut checksum = Crc32c::new();
    checksum.update(&data[..AT]);
    checksum.update(&[0; 4]);
    checksum.update(&data[AT + 4..PACKET_HEADER_LENGTH + table]);
    data[AT..AT + 4].copy_from_slice(&checksum.finish().to_le_bytes());
    packet(&data);
}

/// Reads `data` as the content of a packet of deltas, for as many pages as its first byte says; whether it is one to its end.
pub(crate) fn deltas(data: &[u8]) -> bool {
    let Some((&pages, content)) = data.split_first() else { return false };
    let mut again = Vec::new();
    for delta in PageDeltas::new(content, pages.into()) {
        let Ok(PageDelta { checksum, record }) = delta else { return false };
        assert!(record.len() <= MAX_RECORD);
        again.extend(PageDelta { checksum, record }.header());
        again.extend(record);
    }
    // Two bytes of each header are reserved, and read as anything.
    assert_eq!(again.len(), content.len());
    true
}

/// Reads `data` as a control channel, at once and in pieces; whether it is whole messages to its end. Also as a
/// migration's record, which `sterna recover` reads from disk.
pub(crate) fn control(data: &[u8]) -> bool {
    let _ = Record::from_json(data);
    let whole = read_control(data, data.len().max(1));
    let pieces = read_control(data, 1 + usize::from(data.first().copied().unwrap_or(0)));
    match (&whole, &pieces) {
        (Ok(whole), Ok(pieces)) => assert_eq!(whole, pieces),
        (Err(_), Err(_)) => {}
        _ => panic!("cut in pieces it reads as {pieces:?}, at once as {whole:?}"),
    }
    let Ok((messages, left)) = whole else { return false };
    for message in &messages {
        let bytes = message.encode();
        let (again, left) = read_control(&bytes, bytes.len()).expect("what was read can be written and read");
        assert!(left == 0 && again.len() == 1);
        // JSON's decimal fractions may lose the last bit on their way.
        if !matches!(message, ControlMessage::Figures(_)) {
            assert_eq!(&again[0], message);
        }
    }
    left == 0
}

/// The messages, and how many bytes are left behind them.
fn read_control(data: &[u8], piece: usize) -> Result<(Vec<ControlMessage>, usize), ControlError> {
    let mut reader = ControlReader::default();
    let (mut messages, mut used) = (Vec::new(), 0);
    for part in data.chunks(piece) {
        reader.push(part);
        while let Some(message) = reader.next_message()? {
            let rest = &data[used..];
            used += 4 + u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
            messages.push(message);
        }
    }
    Ok((messages, data.len() - used))
}
