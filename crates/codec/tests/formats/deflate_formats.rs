//! `deflate` and `gzip` beside what other people's code makes of them, and members as QATzip and liars write them.

use std::io::{Read, Write};

use flate2::write::GzEncoder;
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, GzBuilder, Status};
use proptest::prelude::*;
use proptest::test_runner::contextualize_config;
use sterna_codec::{CodecError, Encoded, Engine, Format, MethodChoice};
use sterna_test_kit::content::noise;
use sterna_test_kit::inflate::inflate;

// An inflate by nobody's library, which refuses distances beyond the window that it is given.

fn format(name: &str) -> Format {
    Format::from_name(name).unwrap()
}

fn decode(name: &str, packet: &[u8], len: usize) -> Result<Vec<u8>, CodecError> {
    let mut content = vec![0xa5; len];
    format(name).decoder().unwrap().decode(packet, &mut content)?;
    Ok(content)
}

/// As the CPU writes it; none where it does not shrink.
fn encode(name: &str, level: i32, content: &[u8]) -> Option<Vec<u8>> {
    let mut packet = vec![0; content.len()];
    match (format(name).row().encoder)(level).unwrap().encode(content, &mut packet).unwrap() {
        Encoded::Shrunk(len) => {
            packet.truncate(len);
            Some(packet)
        }
        Encoded::Incompressible => None,
    }
}

fn member(level: u32, content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn raw(level: u32, window_bits: u8, content: &[u8]) -> Vec<u8> {
    let mut stream = vec![0; content.len() * 2 + 64];
    let mut compress = Compress::new_with_window_bits(Compression::new(level), false, window_bits);
    assert_eq!(compress.compress(content, &mut stream, FlushCompress::Finish).unwrap(), Status::StreamEnd);
    stream.truncate(compress.total_out() as usize);
    stream
}

/// Some bytes, repeated: what there is to be found lies at many distances.
fn contents() -> impl Strategy<Value = Vec<u8>> {
    let piece = (proptest::collection::vec(any::<u8>(), 1..6000), 1usize..5);
    proptest::collection::vec(piece, 1..12)
        .prop_map(|pieces| pieces.into_iter().flat_map(|(unit, times)| unit.repeat(times)).collect())
}

proptest! {
    // A default, which PROPTEST_CASES replaces.
    #![proptest_config(contextualize_config(ProptestConfig::with_cases(150)))]

    #[test]
    fn an_independent_implementation_reads_our_gzip_and_we_read_its(content in contents(), level in 1..=9i32, cut in any::<prop::sample::Index>()) {
        if let Some(packet) = encode("gzip", level, &content) {
            let mut read = Vec::new();
            flate2::read::MultiGzDecoder::new(&packet[..]).read_to_end(&mut read).unwrap();
            prop_assert_eq!(&read, &content);
        }
        let (one, two) = content.split_at(cut.index(content.len()));
        let members = [member(level as u32, one), member(0, two)].concat();
        prop_assert_eq!(decode("gzip", &members, content.len()), Ok(content));
    }

    #[test]
    fn an_independent_implementation_reads_our_deflate_and_we_read_its(content in contents(), level in 1..=9u32) {
        if let Some(packet) = encode("deflate", 0, &content) {
            let mut read = vec![0; content.len()];
            let end = Decompress::new(false).decompress(&packet, &mut read, FlushDecompress::Finish).unwrap();
            prop_assert_eq!(end, Status::StreamEnd);
            prop_assert_eq!(&read, &content);
            prop_assert_eq!(inflate(&packet, 4096), Ok(read));
        }
        // With the window of the format; and with the usual one, which a CPU reads just as well.
        for window_bits in [12, 15] {
            prop_assert_eq!(decode("deflate", &raw(level, window_bits, &content), content.len()), Ok(content.clone()));
        }
    }

    /// gzip has a checksum of its own: a flipped bit is noticed, or lies where nothing depends on it.
    #[test]
    fn a_flipped_bit_never_makes_other_content_of_gzip(content in contents(), bit in any::<prop::sample::Index>()) {
        let mut packet = [member(1, &content[..content.len() / 2]), member(6, &content[content.len() / 2..])].concat();
        let bit = bit.index(packet.len() * 8);
        packet[bit / 8] ^= 1 << (bit % 8);
        if let Ok(decoded) = decode("gzip", &packet, content.len()) {
            prop_assert_eq!(decoded, content);
        }
    }
}

/// The same noise again, so far apart that only a longer window would find it.
#[test]
fn deflate_keeps_to_the_window_of_iaa_and_gzip_does_not_have_to() {
    let content = noise(1, 5000).repeat(8);
    assert_eq!(encode("deflate", 0, &content), None);
    let with_usual_window = raw(9, 15, &content);
    assert_eq!(inflate(&with_usual_window, 4096), Err("distance"), "the reference looks at distances");
    assert!(encode("gzip", 1, &content).unwrap().len() < 6000);
    assert!(encode("deflate", 0, &noise(1, 3000).repeat(8)).unwrap().len() < 12_000);
}

#[test]
fn members_as_qatzip_writes_them_are_read() {
    let content: Vec<u8> = noise(1, 64 << 10).iter().map(|byte| byte & 0x1f).collect();
    // A member for each 16 KiB, with QATzip's extra field: 'QZ', 8 bytes, the lengths of content and stream.
    let pieces = content.chunks(16 << 10).flat_map(|piece| {
        let extra = [b"QZ\x08\x00".as_slice(), &(piece.len() as u32).to_le_bytes(), &[0; 4]].concat();
        let mut encoder = GzBuilder::new().extra(extra).write(Vec::new(), Compression::new(1));
        encoder.write_all(piece).unwrap();
        encoder.finish().unwrap()
    });
    let packet: Vec<u8> = pieces.collect();
    assert_eq!(decode("gzip", &packet, content.len()).unwrap(), content);
    let named = GzBuilder::new().filename("a").comment("b").mtime(7).write(Vec::new(), Compression::new(1)).finish();
    assert_eq!(decode("gzip", &[packet, named.unwrap()].concat(), content.len()).unwrap(), content);
}

#[test]
fn empty_members_are_members() {
    let (content, empty) = (noise(1, 100), member(1, &[]));
    let full = member(1, &content);
    for packet in [
        [&empty[..], &full].concat(),
        [&full[..], &empty].concat(),
        [&empty[..], &empty, &full, &empty].concat(),
        [&empty.repeat(5000)[..], &full].concat(),
    ] {
        assert_eq!(decode("gzip", &packet, 100).unwrap(), content);
    }
    assert_eq!(decode("gzip", &empty, 0), Ok(vec![]));
    assert!(matches!(decode("gzip", &empty.repeat(3), 1), Err(CodecError::Length { expected: 1, got: 0, .. })));
    assert!(matches!(decode("gzip", &[], 0), Err(CodecError::Broken { .. })));
    assert!(matches!(decode("deflate", &[], 0), Err(CodecError::Broken { .. })));
}

#[test]
fn what_is_cut_short_or_goes_on_is_an_error_that_names_the_format() {
    let content = noise(1, 300).repeat(10);
    let two = [member(6, &content[..1000]), member(1, &content[1000..])].concat();
    for (name, packet) in [("gzip", two), ("deflate", raw(6, 12, &content))] {
        for cut in 0..packet.len() {
            let error = decode(name, &packet[..cut], content.len()).unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
        // Padding too: there is nothing that needs it.
        for after in [&[0][..], &[0; 512], &packet[..9], b"\x1f\x8b\x08"] {
            assert!(decode(name, &[&packet, after].concat(), content.len()).is_err(), "{name} and {after:x?}");
        }
        assert_eq!(decode(name, &packet, content.len()).unwrap(), content);
    }
}

#[test]
fn bombs_of_one_or_many_members_stop_at_the_end_of_the_output() {
    let bomb = member(9, &vec![0; 16 << 20]);
    let small = member(9, &[0; 4096]);
    for (packet, len) in [(bomb.clone(), 4096), (bomb.repeat(20), 1 << 20), (small.repeat(1000), 999 * 4096)] {
        let Err(CodecError::Broken { reason, .. }) = decode("gzip", &packet, len) else {
            panic!("{len} bytes are enough")
        };
        assert_eq!(reason, "it decodes to more than the packet says");
    }
    assert_eq!(decode("gzip", &small.repeat(1000), 1000 * 4096).unwrap(), vec![0; 1000 * 4096]);
    let Err(CodecError::Broken { reason, .. }) = decode("deflate", &raw(9, 12, &vec![0; 16 << 20]), 4096) else {
        panic!("4096 bytes are enough")
    };
    assert_eq!(reason, "it decodes to more than the packet says");
}

/// The right answer for the wrong method would be read by the right decoder, so this must be told apart.
#[test]
fn one_format_is_not_read_as_the_other() {
    let content = noise(1, 300).repeat(10);
    for (written, read) in [("gzip", "deflate"), ("deflate", "gzip"), ("zstd", "gzip"), ("lz4", "deflate")] {
        let packet = encode(written, 1, &content).unwrap();
        assert!(decode(read, &packet, content.len()).is_err(), "{written} read as {read}");
    }
}

#[test]
fn each_engine_of_deflate_writes_its_format() {
    for (engine, written) in [(Engine::Cpu, "gzip"), (Engine::Qat, "gzip"), (Engine::Iaa, "deflate")] {
        let encoding = "deflate".parse::<MethodChoice>().unwrap().encoding(engine).unwrap();
        assert_eq!(encoding.format(), format(written));
        assert_eq!(encoding.level(), (written == "gzip").then_some(1));
    }
}
