//! Decoders facing a peer that lies: never a panic, never a byte outside the output, never "fine" for a wrong length,
//! and the next honest packet decodes.

use proptest::prelude::*;
use proptest::test_runner::contextualize_config;
use sterna_codec::{CodecError, Decoder, Encoded, FORMATS, FormatRow, fuzz_decode};

const LEN: usize = 8192;

/// Honest content and its encoded form.
fn honest(row: &FormatRow) -> (Vec<u8>, Vec<u8>) {
    let content: Vec<u8> = (0..LEN).map(|at| (at * at / 97) as u8 & 0x3f).collect();
    let mut output = vec![0; LEN];
    let encoded = (row.encoder)(1).unwrap().encode(&content, &mut output);
    let packet = match encoded.unwrap() {
        Encoded::Shrunk(len) => output[..len].to_vec(),
        Encoded::Incompressible => content.clone(),
    };
    (content, packet)
}

/// Decodes with guard bytes on both sides.
fn decode(decoder: &mut dyn Decoder, packet: &[u8], len: usize) -> Result<Vec<u8>, CodecError> {
    const GUARD: usize = 64;
    let mut area = vec![0xa5; len + 2 * GUARD];
    let outcome = decoder.decode(packet, &mut area[GUARD..GUARD + len]);
    assert!(area[..GUARD].iter().chain(&area[GUARD + len..]).all(|byte| *byte == 0xa5), "written outside the output");
    outcome.map(|()| area[GUARD..GUARD + len].to_vec())
}

#[test]
fn a_packet_cut_short_anywhere_is_an_error() {
    for row in FORMATS {
        let (content, packet) = honest(row);
        let mut decoder = (row.decoder)().unwrap();
        for cut in 0..packet.len() {
            assert!(decode(decoder.as_mut(), &packet[..cut], LEN).is_err(), "{} cut at {cut}", row.name);
        }
        assert_eq!(decode(decoder.as_mut(), &packet, LEN).unwrap(), content, "{}", row.name);
    }
}

#[test]
fn a_lie_about_the_length_is_an_error_in_both_directions() {
    for row in FORMATS {
        let (content, packet) = honest(row);
        let mut decoder = (row.decoder)().unwrap();
        for len in (0..LEN).step_by(251).chain([LEN - 1, LEN + 1, LEN + 4096, 1 << 20]) {
            let error = decode(decoder.as_mut(), &packet, len).unwrap_err().to_string();
            assert!(error.contains(row.name), "{error}");
        }
        assert_eq!(decode(decoder.as_mut(), &packet, LEN).unwrap(), content, "{}", row.name);
    }
}

#[test]
fn bytes_after_the_end_are_an_error() {
    for row in FORMATS {
        let (_, mut packet) = honest(row);
        packet.extend([1, 2, 3, 4, 5]);
        assert!(decode((row.decoder)().unwrap().as_mut(), &packet, LEN).is_err(), "{}", row.name);
    }
}

#[test]
fn an_empty_packet_is_an_error() {
    for row in FORMATS {
        let mut decoder = (row.decoder)().unwrap();
        assert!(decode(decoder.as_mut(), &[], 4096).is_err(), "{}", row.name);
    }
}

#[test]
fn a_bomb_is_stopped_at_the_length_of_the_packet() {
    for row in FORMATS.iter().filter(|row| row.name != "none") {
        let bomb_content = vec![0u8; 16 << 20];
        let mut output = vec![0; bomb_content.len()];
        let mut encoder = (row.encoder)(1).unwrap();
        let Ok(Encoded::Shrunk(len)) = encoder.encode(&bomb_content, &mut output) else {
            panic!("{} does not shrink zeros", row.name);
        };
        assert!(len < bomb_content.len() / 100, "{}: {len} bytes", row.name);
        assert!(decode((row.decoder)().unwrap().as_mut(), &output[..len], 4096).is_err(), "{}", row.name);
    }
}

#[test]
fn a_zstd_frame_that_claims_an_enormous_window_or_size_reserves_nothing() {
    let row = FORMATS.iter().find(|row| row.name == "zstd").unwrap();
    let mut decoder = (row.decoder)().unwrap();
    // RFC 8878: magic, descriptor, then window descriptor 0xff (3.75 TiB) or an 8-byte content size, and a raw block.
    let huge_window = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xff, 0x09, 0x00, 0x00, 0x42];
    let huge_size =
        [0x28, 0xb5, 0x2f, 0xfd, 0xe0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0x09, 0x00, 0x00, 0x42];
    for frame in [&huge_window[..], &huge_size[..]] {
        assert!(matches!(
            decode(decoder.as_mut(), frame, 4096),
            Err(CodecError::Broken { .. } | CodecError::Length { .. })
        ));
    }
}

proptest! {
    // A default, which PROPTEST_CASES replaces.
    #![proptest_config(contextualize_config(ProptestConfig::with_cases(2000)))]

    #[test]
    fn random_bytes_do_no_harm(data in proptest::collection::vec(any::<u8>(), 0..2000)) {
        fuzz_decode(&data);
    }

    #[test]
    fn a_packet_with_some_bytes_changed_does_no_harm(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        len in prop_oneof![Just(LEN), 0usize..3 * LEN],
    ) {
        for row in FORMATS {
            let (content, honest) = honest(row);
            let mut packet = honest.clone();
            for (place, value) in &changes {
                packet[place.index(honest.len())] = *value;
            }
            let mut decoder = (row.decoder)().unwrap();
            // It may decode to something, which the packet's checksum then catches; it may not do damage.
            let _ = decode(decoder.as_mut(), &packet, len);
            prop_assert_eq!(decode(decoder.as_mut(), &honest, LEN).unwrap(), content);
        }
    }
}
