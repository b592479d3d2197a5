//! Damaged and forged streams: refused with the reason, without a panic, and without reserving memory by their claims. Also runs the
//! fuzz targets' committed corpus.

#[path = "../../../../fuzz/entries/stream.rs"]
mod entries;

use crate::stream_support::*;
use sterna_qemu::stream::{MultifdPacket, MultifdReader, RamStart, StreamError};

#[test]
fn main_channel_cut_anywhere_before_the_end_of_ram_is_truncated() {
    let stream = whole_stream(true);
    let opaque_from = stream.len() - 11 - 256;
    for length in 0..opaque_from {
        match entries::main_channel(&stream[..length]) {
            Err(StreamError::Truncated { .. }) => {}
            other => panic!("cut at {length}: {other:?}"),
        }
    }
    for length in opaque_from..=stream.len() {
        assert_eq!(entries::main_channel(&stream[..length]).unwrap(), (5, (length - opaque_from) as u64));
    }
}

#[test]
fn multifd_channel_cut_anywhere_is_truncated_or_at_its_end() {
    let parts = [
        multifd_init([0; 16], 7),
        [multifd_header(1, 1, 1, "pc.ram", &[0, 4096]), vec![5; 4096]].concat(),
        [device_state_header("a/vfio", 0, 100), vec![6; 100]].concat(),
        multifd_header(1, 0, 0, "", &[]),
    ];
    let stream = parts.concat();
    let ends: Vec<usize> = parts
        .iter()
        .scan(0, |at, part| {
            *at += part.len();
            Some(*at)
        })
        .collect();
    for length in 0..=stream.len() {
        let result = entries::multifd_channel(&stream[..length]);
        match ends.iter().position(|&end| end == length) {
            Some(packets) => assert_eq!(result.unwrap(), packets as u64),
            None => assert!(matches!(result, Err(StreamError::Truncated { .. })), "cut at {length}: {result:?}"),
        }
    }
}

#[test]
fn return_path_cut_inside_a_message_is_truncated() {
    let stream = b"\x00\x02\x00\x04\x00\x00\x00\x01\x00\x07\x00\x00\x00\x01\x00\x04\x00\x00\x00\x00";
    for length in 0..=stream.len() {
        let result = entries::return_path(&stream[..length]);
        match [0, 8, 12, 20].iter().position(|&end| end == length) {
            Some(messages) => assert_eq!(result.unwrap().len(), messages),
            None => assert!(matches!(result, Err(StreamError::Truncated { .. })), "cut at {length}: {result:?}"),
        }
    }
}

#[test]
fn any_changed_byte_is_read_or_refused_without_panic() {
    let main = whole_stream(true);
    let multifd = [
        multifd_init([0; 16], 1),
        multifd_header(1, 1, 1, "pc.ram", &[0, 4096]),
        vec![5; 4096],
        multifd_header(1, 0, 0, "", &[]),
    ]
    .concat();
    let refused = |stream: &[u8], read: &dyn Fn(&[u8]) -> bool| {
        let mut count = 0;
        for at in 0..stream.len() {
            for change in [1, 0x80, 0xff] {
                let mut changed = stream.to_vec();
                changed[at] ^= change;
                count += usize::from(!read(&changed));
            }
        }
        count
    };
    // A change of content and statistics may go unnoticed, every other change is detected.
    assert!(refused(&main, &|bytes| entries::main_channel(bytes).is_ok()) > 300);
    assert!(refused(&multifd, &|bytes| entries::multifd_channel(bytes).is_ok()) > 100);
}

#[test]
fn random_bytes_behind_a_good_start_never_panic() {
    reads_random_bytes(Random::new(1));
}

mod soak {
    use super::{Random, reads_random_bytes};

    #[test]
    fn random_bytes_behind_a_good_start_never_panic() {
        reads_random_bytes(Random::announced());
    }
}

fn reads_random_bytes(mut random: Random) {
    let stream = whole_stream(true);
    for _ in 0..3000 {
        let keep = random.index(stream.len());
        let mut bytes = stream[..keep].to_vec();
        for _ in 0..random.index(400) {
            let byte = [0, 1, 2, 3, 4, 7, 8, 0x10, 0x7e, 0xff][random.index(10)];
            bytes.push(byte);
        }
        // Whether it is an error depends on the bytes; the checks are inside.
        let _ = entries::main_channel(&bytes);
        let _ = entries::multifd_channel(&[multifd_init([0; 16], 0), bytes.clone()].concat());
        let _ = entries::return_path(&bytes);
    }
}

#[test]
fn lying_lengths_in_the_configuration_are_over_the_limit() {
    for (section, what) in [
        (b"\x07\xff\xff\xff\xff".to_vec(), "machine name length"),
        (
            [configuration("pc"), subsection("configuration/capabilities", &[0x7f, 0xff, 0xff, 0xff])].concat(),
            "number of capabilities",
        ),
    ] {
        let error = entries::main_channel(&[HEADER, &section].concat()).unwrap_err();
        assert!(matches!(error, StreamError::OverLimit { what: w, .. } if w == what), "{error}");
    }
    let page = subsection("configuration/target-page-bits", &60u32.to_be_bytes());
    assert!(matches!(
        entries::main_channel(&[HEADER, &configuration("pc"), &page].concat()),
        Err(StreamError::Malformed(_))
    ));
}

#[test]
fn lying_block_lists_are_refused() {
    let read = |list: &[u8]| RamStart::from_payload(0, 0, 4, list, 4096, false);
    // Longer than any machine; a block longer than the total; not whole pages; no length; twice; no name.
    let lists = [
        record((1 << 53) | MEM_SIZE),
        [record(0x1000 | MEM_SIZE), counted("a"), record(0x2000)].concat(),
        [record(0x2000 | MEM_SIZE), counted("a"), record(0x1001)].concat(),
        [record(0x2000 | MEM_SIZE), counted("a"), record(0)].concat(),
        block_list(&[("a", 0x1000), ("a", 0x1000)]),
        block_list(&[("", 0x1000)]),
        block_list(&[("a\nb", 0x1000)]),
        [record(0x1000 | MEM_SIZE), counted("a"), record(0x1000), record(0x30_0000)].concat(),
        [block_list(&[("a", 0x1000)]), vec![9]].concat(),
        record(0x1000 | PAGE),
    ];
    for (index, list) in lists.iter().enumerate() {
        let error = read(list).unwrap_err();
        assert!(matches!(error, StreamError::Malformed(_) | StreamError::OverLimit { .. }), "{index}: {error}");
    }
    let mut many = record((0x1000 * 5000) | MEM_SIZE);
    for n in 0..5000 {
        many.extend(counted(&n.to_string()));
        many.extend(record(0x1000));
    }
    assert!(matches!(read(&many), Err(StreamError::OverLimit { what: "number of RAM blocks", .. })));
}

#[test]
fn pages_outside_the_guest_are_refused() {
    let start = [
        HEADER,
        &configuration("pc"),
        &section_start(1, 2, "ram", 4),
        &block_list(&[("pc.ram", 0x4000)]),
        &record(EOS),
        &footer(2),
        &section(2, 2),
    ]
    .concat();
    let read = |record: Vec<u8>| entries::main_channel(&[start.clone(), record, vec![0; 4096]].concat()).unwrap_err();
    for kind in [PAGE, ZERO] {
        let outside = read(named(0x4000 | kind, "pc.ram"));
        assert!(matches!(outside, StreamError::PageOutsideBlock { offset: 0x4000, used_length: 0x4000, .. }));
        let far = read(named(0xffff_ffff_ffff_f000 | kind, "pc.ram"));
        assert!(matches!(far, StreamError::PageOutsideBlock { .. }));
        assert!(matches!(read(named(kind, "pc.rom")), StreamError::UnknownBlock(name) if name == "pc.rom"));
        assert!(matches!(read(record(kind | CONTINUE)), StreamError::Malformed(_)));
        assert!(matches!(read(named(kind, "\x1b[2J")), StreamError::Malformed(text) if !text.contains('\x1b')));
    }
    for word in [0, 1, PAGE | ZERO, 0x400, 0x800 | PAGE, EOS | CONTINUE, EOS | 0x1000, FLUSH | EOS, MEM_SIZE | 0x4000] {
        assert!(matches!(read(record(word)), StreamError::Malformed(_)), "{word:#x}");
    }
}

#[test]
fn sections_out_of_place_are_refused() {
    let start = [HEADER, &configuration("pc")].concat();
    let ram = [section_start(1, 2, "ram", 4), block_list(&[("pc.ram", 0x4000)]), record(EOS), footer(2)].concat();
    for (rest, words) in [
        (section(2, 2), "never started"),
        (vec![0], "before the end of RAM"),
        (vec![0x42], "section type 0x42"),
        (section_start(1, 2, "ram", 5), "version 5"),
        ([ram.clone(), section_start(1, 3, "ram", 4)].concat(), "second RAM section"),
        ([ram.clone(), section_start(1, 2, "x/vfio", 1)].concat(), "starts twice"),
        ([&ram[..ram.len() - 1], &[9]].concat(), "section number in a footer"),
        ([&ram[..ram.len() - 5], &[2]].concat(), "without footer"),
        ([section_start(1, 5, "x/vfio", 1), record(7)].concat(), "VFIO device state record 0x7"),
        ([ram[..ram.len() - 13].to_vec(), named(PAGE, "pc.ram"), vec![0; 4096]].concat(), "in the RAM setup section"),
    ] {
        let error = entries::main_channel(&[&start[..], &rest].concat()).unwrap_err();
        assert!(error.to_string().contains(words), "{error} should say {words}");
    }
}

#[test]
fn lying_multifd_headers_are_refused() {
    let with = |at: usize, value: u32| {
        let mut header = multifd_header(0, 1, 1, "pc.ram", &[0, 4096]);
        header[at..at + 4].copy_from_slice(&value.to_be_bytes());
        header
    };
    let read = |header: &[u8]| {
        MultifdReader::new(header, 4096).unwrap().read_header(&mut MultifdPacket::default()).unwrap_err()
    };
    for (header, what) in [
        (with(0, 0x5145_564d), "multifd magic"),
        (with(4, 2), "multifd version"),
        (with(8, 1 << 7), "unknown flags"),
        (with(8, 3 << 1), "unknown"),
        (with(8, 64 | 1), "device state packet with flags"),
        (with(12, 129), "pages_alloc"),
        (with(12, u32::MAX), "pages_alloc"),
        (with(16, 129), "normal_pages"),
        (with(32, 128), "zero_pages"),
        (with(320, 1 << 16), "page offset"),
        (with(324, 7), "not a whole page"),
        (multifd_header(0, 1, 0, "", &[0]), "name in a multifd packet"),
        (multifd_header(0, 1, 0, &"x".repeat(256), &[0]), "has no end"),
        (device_state_header("a", 0, 0), "empty multifd device state"),
        (device_state_header("a", 0, u32::MAX), "device state length"),
    ] {
        let error = read(&header).to_string();
        assert!(error.contains(what), "{error} should name {what}");
    }
}

#[test]
fn committed_corpus_is_read_as_the_fuzz_targets_read_it() {
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/stream");
    for (target, read) in [
        ("main", (|data| entries::main_channel(data).is_ok()) as fn(&[u8]) -> bool),
        ("multifd", |data| entries::multifd_channel(data).is_ok()),
        ("return_path", |data| entries::return_path(data).is_ok()),
    ] {
        let mut files = 0;
        for entry in std::fs::read_dir(corpus.join(target)).unwrap() {
            let path = entry.unwrap().path();
            let good = path.file_name().unwrap().to_string_lossy().starts_with("good-");
            let data = std::fs::read(&path).unwrap();
            let ok = read(&data);
            // "good-…" must be read to the end, "bad-…" refused.
            assert_eq!(ok, good, "{}", path.display());
            files += 1;
        }
        assert!(files >= 2, "the corpus of {target} is missing");
    }
}
