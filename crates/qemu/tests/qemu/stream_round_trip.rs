//! Writes random migrations and reads them back, in pieces of any length: the items are the same, in the same order.
//! `soak` has other seeds each time; each is printed, and `STERNA_TEST_SEED` repeats a run.

use crate::stream_support::*;
use sterna_qemu::stream::{
    Command, Configuration, Event, MainReader, MainWriter, MultifdInit, MultifdPacket, MultifdReader, MultifdWriter,
    PacketKind, PageBatch, RamStart, SectionKind, WireVariant,
};

const VARIANTS: [WireVariant; 4] = [
    WireVariant::PerSectionSync,
    WireVariant::PerRoundSync,
    WireVariant::ZeroPagesInPackets,
    WireVariant::SwitchoverStart,
];
const BLOCKS: [(&str, u64); 4] =
    [("pc.ram", 0x100_0000), ("/rom@etc/acpi/tables", 0x2_0000), ("pc.bios", 0x4_0000), ("b", 0x1_0000)];

/// An item of a main channel, with pages one by one.
#[derive(Debug, PartialEq, Eq)]
enum StreamItem {
    Page(usize, u64, Vec<u8>),
    Zero(usize, u64),
    SyncPoint,
    Command(Vec<u8>),
    End,
    Opaque(Vec<u8>),
}

fn configuration_with_page_bits(bits: u32) -> Configuration {
    let bytes =
        [configuration("pc-q35-9.9"), subsection("configuration/target-page-bits", &bits.to_be_bytes())].concat();
    Configuration::parse(&bytes).unwrap()
}

fn offsets(random: &mut Random, block: usize, page_size: usize, max: usize) -> Vec<u64> {
    let pages = usize::try_from(BLOCKS[block].1).unwrap() / page_size;
    (0..random.index(max + 1)).map(|_| (random.index(pages) * page_size) as u64).collect()
}

fn content(random: &mut Random, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = random.next_u64().to_be_bytes());
    bytes
}

/// Writes a random migration. Returns its bytes, its items and the number of its sync points.
fn write_main(
    random: &mut Random,
    variant: WireVariant,
    multifd: bool,
    page_bits: u32,
) -> (Vec<u8>, Vec<StreamItem>, u64) {
    let page_size = 1 << page_bits;
    let section = configuration_with_page_bits(page_bits);
    let start = RamStart::from_payload(random.index(99) as u32, 0, 4, &block_list(&BLOCKS), page_size, false).unwrap();
    let seed = random.next_u64();
    let longest = 1 + random.index(100_000);
    let mut writer = MainWriter::new(Pieces::new(Vec::new(), seed, longest), variant, multifd);
    let mut items = Vec::new();
    writer.header().unwrap();
    writer.configuration(&section).unwrap();
    writer.ram_start(&start, random.once_in(2)).unwrap();
    writer.end_setup().unwrap();
    items.extend(multifd.then_some(StreamItem::SyncPoint));
    let mut completing = false;
    for _ in 0..random.index(30) {
        match random.index(if completing { 3 } else { 6 }) {
            0 | 1 => {
                let block = random.index(BLOCKS.len());
                let offsets = offsets(random, block, page_size, 200);
                let data = content(random, offsets.len() * page_size);
                writer.pages(block, &offsets, &data).unwrap();
                let pages = offsets.iter().zip(data.chunks_exact(page_size));
                items.extend(pages.map(|(&offset, page)| StreamItem::Page(block, offset, page.to_vec())));
            }
            2 => {
                let block = random.index(BLOCKS.len());
                let offsets = offsets(random, block, page_size, 20_000);
                writer.zero_pages(block, &offsets).unwrap();
                items.extend(offsets.iter().map(|&offset| StreamItem::Zero(block, offset)));
            }
            3 => {
                writer.generation_boundary().unwrap();
                items.extend(multifd.then_some(StreamItem::SyncPoint));
            }
            4 => {
                let syncs = writer.sync_points();
                let ping = Command::parse(PING_1).unwrap();
                writer.command(&ping).unwrap();
                // Only the section it ended can have been a sync point.
                assert!(writer.sync_points() - syncs <= u64::from(multifd && variant.syncs_per_section()));
                items.extend((syncs..writer.sync_points()).map(|_| StreamItem::SyncPoint));
                items.push(StreamItem::Command(PING_1.to_vec()));
            }
            _ => {
                let syncs = writer.sync_points();
                writer.begin_complete().unwrap();
                items.extend((syncs..writer.sync_points()).map(|_| StreamItem::SyncPoint));
                completing = true;
            }
        }
    }
    if !completing {
        let syncs = writer.sync_points();
        writer.begin_complete().unwrap();
        items.extend((syncs..writer.sync_points()).map(|_| StreamItem::SyncPoint));
    }
    writer.end_complete().unwrap();
    items.extend(multifd.then_some(StreamItem::SyncPoint));
    items.push(StreamItem::End);
    let length = random.index(300_000) / 8 * 8;
    let opaque = content(random, length);
    for part in opaque.chunks(10_000) {
        writer.opaque(part).unwrap();
    }
    items.push(StreamItem::Opaque(opaque));
    let syncs = writer.sync_points();
    (writer.into_inner().inner, items, syncs)
}

/// Reads a stream with a mixture of single events and batches.
fn read_main(random: &mut Random, bytes: &[u8], variant: WireVariant, multifd: bool) -> Vec<StreamItem> {
    let seed = random.next_u64();
    let longest = 1 + random.index(600_000);
    let mut reader = MainReader::new(Pieces::new(bytes, seed, longest));
    let mut buffer = vec![0; 64 * 65536];
    let mut batch = PageBatch::default();
    let mut items = Vec::new();
    loop {
        if random.once_in(2) {
            let room = reader.page_size() * (1 + random.index(60));
            let count = reader.next_pages(&mut buffer[..room], &mut batch).unwrap();
            let pages = batch.offsets[..count].iter().zip(buffer.chunks_exact(reader.page_size()));
            items.extend(pages.map(|(&offset, page)| StreamItem::Page(batch.block, offset, page.to_vec())));
        }
        match reader.next_event(&mut buffer).unwrap() {
            Event::Page { block, offset } => {
                items.push(StreamItem::Page(block, offset, buffer[..reader.page_size()].to_vec()));
            }
            Event::ZeroPage { block, offset } => items.push(StreamItem::Zero(block, offset)),
            Event::Flush => items.push(StreamItem::SyncPoint),
            Event::EndOfSection { .. } if multifd && variant.syncs_per_section() => items.push(StreamItem::SyncPoint),
            Event::EndOfSection { kind: SectionKind::Setup } => {
                assert_eq!(reader.setup_had_flush(), multifd && !variant.syncs_per_section());
            }
            Event::Command(command) => items.push(StreamItem::Command(command.bytes)),
            Event::RamEnd => break,
            Event::RamStart(start) => assert_eq!(start.blocks.len(), BLOCKS.len()),
            _ => {}
        }
    }
    items.push(StreamItem::End);
    let mut opaque = Vec::new();
    loop {
        match reader.read_opaque(&mut buffer[..70_000]).unwrap() {
            0 => break,
            n => opaque.extend(&buffer[..n]),
        }
    }
    items.push(StreamItem::Opaque(opaque));
    items
}

#[test]
fn main_channel_comes_out_as_it_went_in() {
    main_channel(Random::new(1));
}

#[test]
fn multifd_channel_comes_out_as_it_went_in() {
    multifd_channel(Random::new(2));
}

#[test]
fn one_sync_of_each_channel_belongs_to_each_sync_point() {
    sync_points(Random::new(3));
}

mod soak {
    use super::Random;

    #[test]
    fn main_channel_comes_out_as_it_went_in() {
        super::main_channel(Random::announced());
    }

    #[test]
    fn multifd_channel_comes_out_as_it_went_in() {
        super::multifd_channel(Random::announced());
    }

    #[test]
    fn one_sync_of_each_channel_belongs_to_each_sync_point() {
        super::sync_points(Random::announced());
    }
}

fn main_channel(mut random: Random) {
    for round in 0..24 {
        let variant = VARIANTS[round % 4];
        let multifd = random.once_in(2);
        let page_bits = [10, 12, 12, 14, 16][random.index(5)];
        let (bytes, mut written, syncs) = write_main(&mut random, variant, multifd, page_bits);
        let read = read_main(&mut random, &bytes, variant, multifd);
        assert_eq!(written.iter().filter(|s| **s == StreamItem::SyncPoint).count() as u64, syncs);
        if variant.syncs_per_section() && !multifd {
            written.retain(|s| *s != StreamItem::SyncPoint);
        }
        let differs = written.iter().zip(&read).position(|(w, r)| w != r);
        assert_eq!((differs, read.len()), (None, written.len()), "{variant:?} multifd {multifd} page 2^{page_bits}");
    }
}

fn multifd_channel(mut random: Random) {
    for round in 0..60 {
        let variant = VARIANTS[round % 4];
        let page_size = [1024, 4096, 4096, 65536][random.index(4)];
        let init = MultifdInit { uuid: [random.index(256) as u8; 16], id: random.index(5) as u8 };
        let mut bytes = Vec::new();
        init.write(&mut bytes).unwrap();
        let (seed, longest) = (random.next_u64(), 1 + random.index(100_000));
        let mut writer = MultifdWriter::new(Pieces::new(bytes, seed, longest), variant, page_size).unwrap();
        let mut expected = Vec::new();
        for _ in 0..random.index(30) {
            match random.index(4) {
                0 | 1 => {
                    let block = random.index(BLOCKS.len());
                    let max = sterna_qemu::stream::pages_per_packet(page_size);
                    let mut normal = offsets(&mut random, block, page_size, max);
                    let mut zero = if variant.zero_pages_in_packets() {
                        offsets(&mut random, block, page_size, max - normal.len())
                    } else {
                        Vec::new()
                    };
                    if normal.is_empty() && zero.is_empty() {
                        normal.push(0);
                        zero.truncate(max - 1);
                    }
                    let data = content(&mut random, normal.len() * page_size);
                    let slices: Vec<&[u8]> = data.chunks(data.len() / 7 + 1).collect();
                    writer.pages(BLOCKS[block].0, &normal, &slices, &zero).unwrap();
                    expected.push((BLOCKS[block].0.to_owned(), false, normal, zero, data));
                }
                2 => {
                    writer.sync_to(writer.syncs() + 1).unwrap();
                    expected.push((String::new(), true, Vec::new(), Vec::new(), Vec::new()));
                }
                _ if variant.switchover_start() => {
                    let length = 8 + random.index(50_000) / 8 * 8;
                    let data = content(&mut random, length);
                    writer.device_state("0000:00:04.0/vfio", 2, &data).unwrap();
                    expected.push(("0000:00:04.0/vfio".into(), false, Vec::new(), Vec::new(), data));
                }
                _ => {}
            }
        }
        let bytes = writer.into_inner().inner;
        let mut input = Pieces::new(bytes.as_slice(), random.next_u64(), 1 + random.index(100_000));
        assert_eq!(MultifdInit::read(&mut input, 5).unwrap(), init);
        let mut reader = MultifdReader::new(input, page_size).unwrap();
        let mut packet = MultifdPacket::default();
        let mut read = Vec::new();
        while reader.read_header(&mut packet).unwrap() != PacketKind::End {
            let mut data = vec![0; packet.payload_len];
            let cut = random.index(data.len() + 1);
            reader.read_payload(&mut data[..cut]).unwrap();
            reader.read_payload(&mut data[cut..]).unwrap();
            read.push((packet.name.clone(), packet.sync, packet.normal.clone(), packet.zero.clone(), data));
        }
        assert!(read == expected, "{variant:?} page {page_size}: {} packets, {}", read.len(), expected.len());
    }
}

fn sync_points(mut random: Random) {
    for round in 0..40 {
        let variant = VARIANTS[round % 4];
        let section = configuration_with_page_bits(12);
        let start = RamStart::from_payload(2, 0, 4, &block_list(&BLOCKS), 4096, false).unwrap();
        let mut main = MainWriter::new(Vec::new(), variant, true);
        let mut channels: Vec<_> = (0..4).map(|_| MultifdWriter::new(Vec::new(), variant, 4096).unwrap()).collect();
        main.header().unwrap();
        main.configuration(&section).unwrap();
        main.ram_start(&start, false).unwrap();
        main.end_setup().unwrap();
        for generation in 0..random.index(6) {
            for channel in &mut channels {
                channel.sync_to(main.sync_points()).unwrap();
                channel.pages("pc.ram", &[generation as u64 * 4096], &[&[1; 4096]], &[]).unwrap();
            }
            main.zero_pages(1, &[0]).unwrap();
            main.generation_boundary().unwrap();
        }
        main.begin_complete().unwrap();
        main.end_complete().unwrap();
        for channel in &mut channels {
            channel.sync_to(main.sync_points()).unwrap();
        }

        // Counted as the destination does: a sync point is a FLUSH record or, on old machine types, a section's end.
        let bytes = main.into_inner();
        let mut reader = MainReader::new(bytes.as_slice());
        let (mut points, mut page) = (0, [0; 4096]);
        loop {
            match reader.next_event(&mut page).unwrap() {
                Event::Flush => points += 1,
                Event::EndOfSection { .. } if variant.syncs_per_section() => points += 1,
                Event::RamEnd => break,
                _ => {}
            }
        }
        for channel in channels {
            let bytes = channel.into_inner();
            let mut reader = MultifdReader::new(bytes.as_slice(), 4096).unwrap();
            let (mut packet, mut syncs) = (MultifdPacket::default(), 0);
            while reader.read_header(&mut packet).unwrap() != PacketKind::End {
                syncs += u64::from(packet.sync);
                let mut data = vec![0; packet.payload_len];
                reader.read_payload(&mut data).unwrap();
            }
            assert_eq!(syncs, points, "{variant:?}");
        }
    }
}
