//! The stream's parsers and writers against bytes composed by hand from QEMU's format.

use crate::stream_support;

use crate::stream_support::*;
use sterna_qemu::stream::{
    ChannelSniff, CommandKind, Event, MainReader, MainWriter, MultifdInit, MultifdPacket, MultifdReader, MultifdWriter,
    PacketKind, PageBatch, RamStart, ReturnMessage, ReturnPathReader, SectionKind, StreamError, WireVariant,
};

fn next(reader: &mut MainReader<&[u8]>) -> Event {
    reader.next_event(&mut [0; 4096]).unwrap()
}

/// Reads the events up to the end of RAM, and the opaque bytes.
fn read_all(bytes: &[u8]) -> (Vec<Event>, Vec<u8>) {
    let mut reader = MainReader::new(bytes);
    let mut events = Vec::new();
    while events.last() != Some(&Event::RamEnd) {
        events.push(next(&mut reader));
    }
    let (mut opaque, mut buffer) = (Vec::new(), [0; 100]);
    loop {
        match reader.read_opaque(&mut buffer).unwrap() {
            0 => return (events, opaque),
            n => opaque.extend(&buffer[..n]),
        }
    }
}

fn refusal(bytes: &[u8]) -> StreamError {
    let mut reader = MainReader::new(bytes);
    loop {
        match reader.next_event(&mut [0; 4096]) {
            Ok(Event::RamEnd) => panic!("accepted"),
            Ok(_) => {}
            Err(error) => return error,
        }
    }
}

#[test]
fn first_four_bytes_name_the_channel() {
    assert_eq!(ChannelSniff::of(*b"QEVM"), ChannelSniff::Main);
    assert_eq!(ChannelSniff::of([0x11, 0x22, 0x33, 0x44]), ChannelSniff::Multifd);
    assert_eq!(ChannelSniff::of(*b"NBDM"), ChannelSniff::Other);
    assert_eq!(ChannelSniff::of([0x16, 0x03, 0x01, 0x02]), ChannelSniff::Other);
}

#[test]
fn machine_type_decides_the_variant() {
    use WireVariant::*;
    for (machine, variant) in [
        ("pc-i440fx-2.11", PerSectionSync),
        ("pc-q35-7.2", PerSectionSync),
        ("pc-i440fx-8.0", PerSectionSync),
        ("pc-i440fx-8.1", PerRoundSync),
        ("pc-q35-8.2", PerRoundSync),
        ("virt-9.0", ZeroPagesInPackets),
        ("pc-q35-9.2", ZeroPagesInPackets),
        ("pc-q35-10.0", SwitchoverStart),
        ("pc-q35-10.0.1", SwitchoverStart),
        ("pc", SwitchoverStart),
        ("q35", SwitchoverStart),
    ] {
        assert_eq!(WireVariant::for_machine(machine), Some(variant), "{machine}");
    }
    for unknown in ["pc-q35-rhel9.4.0", "pc-i440fx-jammy", "pc-q35-10", "", "none", "pc-q35-x.y"] {
        assert_eq!(WireVariant::for_machine(unknown), None, "{unknown}");
    }
    assert_eq!(WireVariant::from_setup(false), PerSectionSync);
    assert_eq!(WireVariant::from_setup(true), PerRoundSync);
}

#[test]
fn whole_stream_gives_its_events_in_order() {
    let (events, opaque) = read_all(&whole_stream(true));
    let mut events = events.into_iter();
    assert_eq!(events.next(), Some(Event::Header));
    let Some(Event::Configuration(configuration)) = events.next() else { panic!() };
    assert_eq!((configuration.machine.as_str(), configuration.page_size()), ("pc-q35-7.2", 4096));
    assert_eq!(configuration.bytes, stream_support::configuration("pc-q35-7.2"));
    let Some(Event::Command(command)) = events.next() else { panic!() };
    assert_eq!((command.kind, command.bytes.as_slice()), (CommandKind::OpenReturnPath, OPEN_RETURN_PATH));
    let Some(Event::Command(command)) = events.next() else { panic!() };
    assert_eq!((command.kind, command.bytes.as_slice()), (CommandKind::Ping(1), PING_1));
    let Some(Event::RamStart(start)) = events.next() else { panic!() };
    assert_eq!((start.section_id, start.instance_id, start.version_id), (2, 0, 4));
    assert_eq!(start.payload, block_list(&[("pc.ram", 0x4000), ("pc.bios", 0x1000)]));
    assert_eq!(start.blocks[1].name, "pc.bios");
    assert_eq!(start.blocks[0].used_length, 0x4000);
    let rest: Vec<Event> = events.collect();
    assert_eq!(
        rest,
        [
            Event::Flush,
            Event::EndOfSection { kind: SectionKind::Setup },
            Event::Page { block: 0, offset: 0 },
            Event::Page { block: 0, offset: 0x1000 },
            Event::ZeroPage { block: 0, offset: 0x2000 },
            Event::EndOfSection { kind: SectionKind::Iterate },
            Event::Page { block: 0, offset: 0x3000 },
            Event::Page { block: 1, offset: 0 },
            Event::Flush,
            Event::EndOfSection { kind: SectionKind::Iterate },
            Event::Flush,
            Event::EndOfSection { kind: SectionKind::Complete },
            Event::RamEnd,
        ]
    );
    assert_eq!(&opaque[..11], b"\x04\x00\x00\x00\x00\x05timer".as_slice());
    assert_eq!(opaque.len(), 11 + 256);
}

#[test]
fn setup_shows_how_the_channels_are_synchronised() {
    for flush in [false, true] {
        let stream = whole_stream(flush);
        let mut reader = MainReader::new(stream.as_slice());
        while next(&mut reader) != (Event::EndOfSection { kind: SectionKind::Setup }) {}
        assert_eq!(reader.setup_had_flush(), flush);
    }
}

#[test]
fn end_of_section_is_reported_before_its_footer_has_arrived() {
    let stream = whole_stream(false);
    let setup_end = stream.windows(8).position(|w| w == EOS.to_be_bytes()).unwrap() + 8;
    let mut reader = MainReader::new(&stream[..setup_end]);
    while next(&mut reader) != (Event::EndOfSection { kind: SectionKind::Setup }) {}
    assert!(matches!(reader.next_event(&mut [0; 4096]), Err(StreamError::Truncated { reading: "section footer" })));
}

#[test]
fn batches_hold_pages_of_one_block_and_stop_before_other_records() {
    let stream = whole_stream(false);
    let mut reader = MainReader::new(stream.as_slice());
    let (mut buffer, mut batch) = (vec![0; 8 * 4096], PageBatch::default());
    while next(&mut reader) != (Event::EndOfSection { kind: SectionKind::Setup }) {}
    // Between sections there is no page yet: the section's header has to be read first.
    assert_eq!(reader.next_pages(&mut buffer, &mut batch).unwrap(), 0);
    assert_eq!(next(&mut reader), Event::Page { block: 0, offset: 0 });
    assert_eq!(reader.next_pages(&mut buffer, &mut batch).unwrap(), 1);
    assert_eq!((batch.block, batch.offsets.as_slice()), (0, [0x1000].as_slice()));
    assert_eq!(buffer[..4096], [0xa2; 4096]);
    assert_eq!(reader.next_pages(&mut buffer, &mut batch).unwrap(), 0);
    assert_eq!(next(&mut reader), Event::ZeroPage { block: 0, offset: 0x2000 });
}

#[test]
fn page_content_is_delivered() {
    let stream = whole_stream(false);
    let mut reader = MainReader::new(stream.as_slice());
    let mut page = [0; 4096];
    let mut first_bytes = Vec::new();
    loop {
        match reader.next_event(&mut page).unwrap() {
            Event::Page { .. } => first_bytes.push((page[0], page[4095])),
            Event::RamEnd => break,
            _ => {}
        }
    }
    assert_eq!(first_bytes, [(0xa1, 0xa1), (0xa2, 0xa2), (0xa3, 0xa3), (0xb1, 0xb1)]);
}

#[test]
fn configuration_subsections_are_read_and_kept() {
    let bytes = [
        configuration("virt-9.0"),
        subsection("configuration/target-page-bits", &16u32.to_be_bytes()),
        subsection("configuration/capabilities", &[vec![0, 0, 0, 1], counted("x-ignore-shared")].concat()),
        subsection("configuration/uuid", &[7; 16]),
    ]
    .concat();
    let stream = [HEADER, &bytes, OPEN_RETURN_PATH].concat();
    let mut reader = MainReader::new(stream.as_slice());
    next(&mut reader);
    let Event::Configuration(section) = next(&mut reader) else { panic!() };
    assert_eq!(section.bytes, bytes);
    assert_eq!((section.page_size(), section.uuid), (65536, Some([7; 16])));
    assert!(section.ignores_shared());
    assert_eq!(reader.page_size(), 65536);
}

#[test]
fn page_sizes_in_the_block_list_are_recognised_and_can_be_left_out() {
    let list = [
        record(0x40_3000 | MEM_SIZE),
        counted("ram0"),
        record(0x20_0000),
        record(0x20_0000),
        counted("rom"),
        record(0x3000),
        counted("ram1"),
        record(0x20_0000),
        record(0x20_0000),
    ]
    .concat();
    let start = RamStart::from_payload(2, 0, 4, &list, 4096, false).unwrap();
    let sizes: Vec<_> = start.blocks.iter().map(|b| b.page_size).collect();
    assert_eq!(sizes, [Some(0x20_0000), None, Some(0x20_0000)]);
    let plain = block_list(&[("ram0", 0x20_0000), ("rom", 0x3000), ("ram1", 0x20_0000)]);
    assert_eq!(start.payload_without_page_sizes(), plain);
    // In a stream, the record after the last block must not be taken for a page size.
    for behind in [EOS, FLUSH] {
        let stream = [&list[..list.len() - 8], &record(behind), &record(EOS)].concat();
        let stream = [HEADER, &configuration("pc"), &section_start(1, 9, "ram", 4), &stream].concat();
        let mut reader = MainReader::new(stream.as_slice());
        let start = loop {
            if let Event::RamStart(start) = next(&mut reader) {
                break start;
            }
        };
        assert_eq!(start.blocks[2].page_size, None);
    }
}

#[test]
fn addresses_in_the_block_list_are_read_with_ignore_shared() {
    let list =
        [record(0x2000 | MEM_SIZE), counted("a"), record(0x1000), record(0), counted("b"), record(0x1000)].concat();
    let list = [list, record(0xfffc_0000)].concat();
    let start = RamStart::from_payload(2, 0, 4, &list, 4096, true).unwrap();
    let addresses: Vec<_> = start.blocks.iter().map(|b| b.mr_addr).collect();
    assert_eq!(addresses, [Some(0), Some(0xfffc_0000)]);
    assert_eq!(start.payload_without_page_sizes(), list);
}

#[test]
fn vfio_sections_pass_verbatim() {
    let flag = |n: u64| record(0xffff_ffff_ef10_0000 | n);
    let setup = [section_start(1, 5, "0000:00:03.0/vfio", 1), flag(3), flag(1), footer(5)].concat();
    let data = vec![0x5a; 200_000];
    let part = [section(2, 5), flag(4), record(200_000), data, flag(5), flag(1), footer(5)].concat();
    let whole = whole_stream(true);
    let at = whole.windows(6).position(|w| w == [0x7e, 0, 0, 0, 2, 2]).unwrap() + 5;
    let stream = [&whole[..at], &setup, &part, &whole[at..]].concat();
    let (events, _) = read_all(&stream);
    let pieces: Vec<u8> = events
        .iter()
        .filter_map(|e| if let Event::DeviceSection(p) = e { Some(p.bytes.clone()) } else { None })
        .flatten()
        .collect();
    assert_eq!(pieces, [setup, part].concat());
    let ends = events.iter().filter(|e| matches!(e, Event::DeviceSection(p) if p.last)).count();
    assert_eq!(ends, 2);
}

#[test]
fn unsupported_things_are_refused_by_name() {
    let start = [HEADER, &configuration("pc-q35-7.2")].concat();
    let ram = [
        start.clone(),
        section_start(1, 2, "ram", 4),
        block_list(&[("pc.ram", 0x4000)]),
        record(EOS),
        footer(2),
        section(2, 2),
    ]
    .concat();
    for (stream, words) in [
        ([&start[..], b"\x08\x00\x04\x00\x00"].concat(), "POSTCOPY_LISTEN"),
        ([&start[..], b"\x08\x00\x05\x00\x00"].concat(), "POSTCOPY_RUN"),
        ([&start[..], b"\x08\x00\x07\x00\x04\xff\xff\xff\xff"].concat(), "PACKAGED"),
        ([&start[..], b"\x08\x00\x08\x00\x00"].concat(), "ENABLE_COLO"),
        ([&start[..], b"\x08\x00\x0a\x00\x00"].concat(), "RECV_BITMAP"),
        ([&start[..], b"\x08\x00\x63\x00\x00"].concat(), "command 99"),
        ([&start[..], &section_start(1, 3, "block", 1)].concat(), "\"block\""),
        ([&start[..], &section_start(1, 3, "dirty-bitmap", 1)].concat(), "dirty-bitmaps off"),
        ([&start[..], &section_start(4, 3, "virtio-mem-device-early", 1)].concat(), "virtio-mem-device-early"),
        ([&ram[..], &named(0x40, "pc.ram")].concat(), "XBZRLE"),
        ([&ram[..], &record(0x80)].concat(), "RDMA"),
        ([&ram[..], &record(0x100)].concat(), "compressed"),
        ([&ram[..], &named(ZERO, "pc.ram"), &[0xff]].concat(), "0xff"),
        ([HEADER, b"\x01\x00\x00\x00\x02"].concat(), "configuration"),
    ] {
        let error = refusal(&stream);
        assert!(matches!(error, StreamError::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error} should name {words}");
    }
    let mapped = subsection("configuration/capabilities", &[vec![0, 0, 0, 1], counted("mapped-ram")].concat());
    assert!(refusal(&[start, mapped, OPEN_RETURN_PATH.to_vec()].concat()).to_string().contains("mapped-ram"));
}

#[test]
fn writer_gives_the_bytes_of_each_variant() {
    let source = whole_stream(true);
    let (events, opaque) = read_all(&source);
    for variant in [WireVariant::PerSectionSync, WireVariant::PerRoundSync, WireVariant::SwitchoverStart] {
        let mut writer = MainWriter::new(Vec::new(), variant, true);
        writer.header().unwrap();
        for event in &events {
            match event {
                Event::Configuration(section) => writer.configuration(section).unwrap(),
                Event::Command(command) => writer.command(command).unwrap(),
                Event::RamStart(start) => writer.ram_start(start, false).unwrap(),
                _ => {}
            }
        }
        writer.end_setup().unwrap();
        assert_eq!(writer.sync_points(), 1);
        let data = [[0xa1; 4096], [0xa2; 4096]].concat();
        writer.pages(0, &[0, 0x1000], &data).unwrap();
        writer.zero_pages(0, &[0x2000]).unwrap();
        writer.generation_boundary().unwrap();
        assert_eq!(writer.sync_points(), 2);
        writer.pages(0, &[0x3000], &[0xa3; 4096]).unwrap();
        writer.pages(1, &[0], &[0xb1; 4096]).unwrap();
        writer.generation_boundary().unwrap();
        writer.begin_complete().unwrap();
        writer.end_complete().unwrap();
        assert_eq!(writer.sync_points(), 4);
        writer.opaque(&opaque).unwrap();
        let written = writer.into_inner();
        if variant.syncs_per_section() {
            assert_eq!(written, whole_stream(false));
        } else {
            // As the source's, but for the section that the first generation did not end.
            let flush = record(FLUSH);
            let cut = [record(EOS), footer(2), section(2, 2), record(0x3000 | PAGE | CONTINUE)].concat();
            let at = source.windows(cut.len()).position(|w| w == cut).unwrap();
            let rest = at + 8 + 5 + 5;
            let second = [record(FLUSH), record(EOS), footer(2), section(3, 2), flush.clone()].concat();
            let expected = [&source[..at], &flush, &source[rest..]].concat();
            assert!(expected.windows(second.len()).any(|w| w == second));
            assert_eq!(written, expected);
        }
    }
}

#[test]
fn advise_is_flagged_and_never_written() {
    let stream = [HEADER, &configuration("pc"), ADVISE].concat();
    let mut reader = MainReader::new(stream.as_slice());
    let mut writer = MainWriter::new(Vec::new(), WireVariant::NEWEST, false);
    next(&mut reader);
    writer.header().unwrap();
    let Event::Configuration(section) = next(&mut reader) else { panic!() };
    writer.configuration(&section).unwrap();
    let Event::Command(command) = next(&mut reader) else { panic!() };
    assert!(command.to_be_stripped());
    assert_eq!(command.bytes, ADVISE);
    assert!(matches!(writer.command(&command), Err(StreamError::Misuse(_))));
}

#[test]
fn switchover_start_goes_only_where_it_is_known() {
    let section = sterna_qemu::stream::Configuration::parse(&configuration("pc")).unwrap();
    let command = sterna_qemu::stream::Command::parse(SWITCHOVER_START).unwrap();
    for (variant, known) in [(WireVariant::ZeroPagesInPackets, false), (WireVariant::SwitchoverStart, true)] {
        let mut writer = MainWriter::new(Vec::new(), variant, false);
        writer.header().unwrap();
        writer.configuration(&section).unwrap();
        assert_eq!(writer.command(&command).is_ok(), known);
    }
}

#[test]
fn multifd_init_packet_is_read_and_written() {
    let bytes = multifd_init([9; 16], 3);
    let init = MultifdInit::read(bytes.as_slice(), 4).unwrap();
    assert_eq!(init, MultifdInit { uuid: [9; 16], id: 3 });
    let mut written = Vec::new();
    init.write(&mut written).unwrap();
    assert_eq!(written, bytes);
    // QEMU's own check lets this one through.
    assert!(matches!(MultifdInit::read(bytes.as_slice(), 3), Err(StreamError::OverLimit { value: 3, limit: 2, .. })));
}

#[test]
fn sync_in_a_packet_with_pages_is_reported_with_them() {
    let bytes = [multifd_header(1, 2, 0, "pc.ram", &[0x5000, 0x1000]), vec![1; 4096], vec![2; 4096]].concat();
    let mut reader = MultifdReader::new(bytes.as_slice(), 4096).unwrap();
    let mut packet = MultifdPacket::default();
    assert_eq!(reader.read_header(&mut packet).unwrap(), PacketKind::Ram);
    assert!(packet.sync);
    assert_eq!((packet.name.as_str(), packet.packet_num, packet.payload_len), ("pc.ram", 7, 8192));
    assert_eq!((packet.normal.as_slice(), packet.zero.as_slice()), ([0x5000, 0x1000].as_slice(), [].as_slice()));
    let mut content = [0; 8192];
    assert!(matches!(reader.read_header(&mut packet.clone()), Err(StreamError::Misuse(_))));
    reader.read_payload(&mut content[..4096]).unwrap();
    reader.read_payload(&mut content[4096..]).unwrap();
    assert_eq!((content[0], content[8191]), (1, 2));
    assert_eq!(reader.read_header(&mut packet).unwrap(), PacketKind::End);
}

#[test]
fn zero_pages_follow_normal_ones() {
    let bytes = [multifd_header(0, 1, 2, "pc.ram", &[0x5000, 0x6000, 0]), vec![1; 4096]].concat();
    let mut reader = MultifdReader::new(bytes.as_slice(), 4096).unwrap();
    let mut packet = MultifdPacket::default();
    reader.read_header(&mut packet).unwrap();
    assert_eq!((packet.normal.as_slice(), packet.zero.as_slice()), ([0x5000].as_slice(), [0x6000, 0].as_slice()));
    assert_eq!(packet.payload_len, 4096);
}

#[test]
fn device_state_packets_are_read_and_written() {
    let state = vec![3; 5000];
    let sync = multifd_header(1, 0, 0, "", &[]);
    let bytes = [device_state_header("0000:00:03.0/vfio", 1, 5000), state.clone(), sync].concat();
    let mut reader = MultifdReader::new(bytes.as_slice(), 4096).unwrap();
    let (mut packet, mut content) = (MultifdPacket::default(), vec![0; 5000]);
    assert_eq!(reader.read_header(&mut packet).unwrap(), PacketKind::DeviceState);
    assert_eq!((packet.name.as_str(), packet.instance_id, packet.payload_len), ("0000:00:03.0/vfio", 1, 5000));
    reader.read_payload(&mut content).unwrap();
    assert_eq!(content, state);
    assert_eq!(reader.read_header(&mut packet).unwrap(), PacketKind::Ram);
    assert!(packet.sync && packet.name.is_empty());
    let mut writer = MultifdWriter::new(Vec::new(), WireVariant::SwitchoverStart, 4096).unwrap();
    writer.device_state("0000:00:03.0/vfio", 1, &state).unwrap();
    assert_eq!(writer.into_inner(), bytes[..5276]);
    let mut old = MultifdWriter::new(Vec::new(), WireVariant::ZeroPagesInPackets, 4096).unwrap();
    assert!(matches!(old.device_state("a/vfio", 1, &state), Err(StreamError::Misuse(_))));
}

#[test]
fn multifd_writer_gives_the_bytes() {
    let mut writer = MultifdWriter::new(Vec::new(), WireVariant::ZeroPagesInPackets, 4096).unwrap();
    let content = [vec![1; 4096], vec![2; 4096]].concat();
    writer.pages("pc.ram", &[0x5000, 0x1000], &[&content[..100], &content[100..]], &[0x2000]).unwrap();
    writer.sync_to(1).unwrap();
    writer.sync_to(1).unwrap();
    assert_eq!(writer.syncs(), 1);
    assert!(matches!(writer.sync_to(0), Err(StreamError::Misuse(_))));
    let mut first = multifd_header(0, 2, 1, "pc.ram", &[0x5000, 0x1000, 0x2000]);
    first[24..32].fill(0);
    let written = writer.into_inner();
    assert_eq!(written[..1344], first);
    assert_eq!(written[1344..1344 + 8192], content);
    let sync = &written[1344 + 8192..];
    assert_eq!(sync.len(), 1344);
    assert_eq!(
        sync[..36],
        multifd_header(1, 0, 0, "", &[])[..31].iter().copied().chain([1, 0, 0, 0, 0]).collect::<Vec<_>>()
    );
}

#[test]
fn zero_pages_are_kept_from_destinations_that_ignore_them() {
    for variant in [WireVariant::PerSectionSync, WireVariant::PerRoundSync] {
        let mut writer = MultifdWriter::new(Vec::new(), variant, 4096).unwrap();
        assert!(matches!(writer.pages("pc.ram", &[], &[], &[0]), Err(StreamError::Misuse(_))));
        assert!(writer.into_inner().is_empty());
    }
}

#[test]
fn multifd_compression_is_refused_by_name() {
    for (bits, method) in [(1, "zlib"), (2, "zstd"), (4, "qpl"), (8, "uadk"), (16, "qatzip")] {
        let bytes = multifd_header(bits << 1, 1, 0, "pc.ram", &[0]);
        let error = MultifdReader::new(bytes.as_slice(), 4096).unwrap().read_header(&mut MultifdPacket::default());
        assert!(error.unwrap_err().to_string().contains(method));
    }
}

#[test]
fn return_path_of_a_precopy_is_read_and_written() {
    let bytes = b"\x00\x02\x00\x04\x00\x00\x00\x01\x00\x07\x00\x00\x00\x01\x00\x04\x00\x00\x00\x00";
    let messages = [ReturnMessage::Pong(1), ReturnMessage::SwitchoverAck, ReturnMessage::Shut(0)];
    let mut reader = ReturnPathReader::new(bytes.as_slice());
    let mut written = Vec::new();
    for message in messages {
        assert_eq!(reader.next_message().unwrap(), Some(message));
        message.write(&mut written).unwrap();
    }
    assert_eq!(reader.next_message().unwrap(), None);
    assert_eq!(written, bytes);
}

#[test]
fn post_copy_requests_on_the_return_path_are_refused_by_name() {
    for (kind, name) in [(3, "REQ_PAGES_ID"), (4, "REQ_PAGES"), (5, "RECV_BITMAP"), (6, "RESUME_ACK")] {
        let bytes = [0, kind, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let error = ReturnPathReader::new(bytes.as_slice()).next_message().unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
    assert!(ReturnPathReader::new([0, 8, 0, 0].as_slice()).next_message().is_err());
    assert!(ReturnPathReader::new([0, 1, 0, 2, 0, 0].as_slice()).next_message().is_err());
}
