// What the fuzz targets and the plain corpus test do with arbitrary bytes: read them to the end as each kind of channel.
// The parsers may refuse but not panic, must not reserve memory by what the bytes claim, and what they hand out verbatim
// must read back the same.

use sterna_qemu::stream::{
    Command, Configuration, Event, MainReader, MultifdInit, MultifdPacket, MultifdReader, PacketKind, PageBatch,
    RamStart, ReturnMessage, ReturnPathReader, StreamError,
};

/// Reads `data` as a main channel; the number of pages and of opaque bytes when it is one to the end of RAM.
pub(crate) fn main_channel(data: &[u8]) -> Result<(u64, u64), StreamError> {
    let mut reader = MainReader::new(data);
    let mut pages = vec![0; 4 * 65536];
    let mut batch = PageBatch::default();
    let (mut page_count, mut ignores_shared) = (0, false);
    loop {
        let gathered = reader.next_pages(&mut pages, &mut batch)?;
        assert_eq!(gathered, batch.offsets.len());
        page_count += gathered as u64;
        match reader.next_event(&mut pages)? {
            Event::Configuration(section) => {
                ignores_shared = section.ignores_shared();
                assert_eq!(Configuration::parse(&section.bytes).unwrap(), section);
            }
            Event::Command(command) => assert_eq!(Command::parse(&command.bytes).unwrap(), command),
            Event::RamStart(start) => {
                let size = reader.page_size();
                let again = RamStart::from_payload(
                    start.section_id,
                    start.instance_id,
                    start.version_id,
                    &start.payload,
                    size,
                    ignores_shared,
                );
                assert_eq!(again.unwrap(), start);
            }
            Event::Page { .. } | Event::ZeroPage { .. } => page_count += 1,
            Event::RamEnd => break,
            _ => {}
        }
    }
    let mut opaque = 0;
    loop {
        match reader.read_opaque(&mut pages)? {
            0 => return Ok((page_count, opaque)),
            n => opaque += n as u64,
        }
    }
}

/// Reads `data` as a multifd channel of a guest with 4 KiB pages; the number of packets when it is one to its end.
pub(crate) fn multifd_channel(mut data: &[u8]) -> Result<u64, StreamError> {
    MultifdInit::read(&mut data, 8)?;
    let mut reader = MultifdReader::new(data, 4096)?;
    let mut packet = MultifdPacket::default();
    let mut content = vec![0; 64 * 1024];
    let mut packets = 0;
    while reader.read_header(&mut packet)? != PacketKind::End {
        packets += 1;
        assert!(packet.normal.len() + packet.zero.len() <= 128);
        assert_eq!(reader.payload_left(), packet.payload_len);
        while reader.payload_left() > 0 {
            let n = reader.payload_left().min(content.len());
            reader.read_payload(&mut content[..n])?;
        }
    }
    Ok(packets)
}

/// Reads `data` as a return path; what it says when it is one to its end.
pub(crate) fn return_path(data: &[u8]) -> Result<Vec<ReturnMessage>, StreamError> {
    let mut reader = ReturnPathReader::new(data);
    let mut messages = Vec::new();
    while let Some(message) = reader.next_message()? {
        messages.push(message);
    }
    let mut again = Vec::new();
    for message in &messages {
        message.write(&mut again)?;
    }
    assert_eq!(again, data);
    Ok(messages)
}
