//! Every method and level gives back every kind of content, from contexts that are used over and over.

use proptest::prelude::*;
use proptest::test_runner::contextualize_config;
use sterna_codec::{Adaptive, CodecError, Decoder, Encoded, Encoder, Encoding, Engine, FORMATS, Format, MAX_CONTENT};
use sterna_test_kit::Random;

/// A format at a level, as the CPU writes it.
#[derive(Clone, Copy, Debug)]
struct Written {
    format: Format,
    level: i32,
}

impl std::fmt::Display for Written {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.format, self.level)
    }
}

/// All that the CPU can write. `deflate` is IAA's format, and the CPU writes what IAA leaves undone.
fn choices() -> Vec<Written> {
    let deflate = Written { format: Format::from_name("deflate").unwrap(), level: 0 };
    let written = |encoding: Encoding| Written { format: encoding.format(), level: encoding.level().unwrap_or(0) };
    Encoding::all_by(Engine::Cpu).map(written).chain([deflate]).collect()
}

/// An encoder without any accelerator.
fn encoder(choice: Written) -> Adaptive {
    Adaptive::new((choice.format.row().encoder)(choice.level).unwrap())
}

/// Returns bytes that are the same on every run.
fn noise(seed: u64) -> impl Iterator<Item = u8> {
    let mut random = Random::new(seed);
    std::iter::repeat_with(move || random.next_u64().to_le_bytes()).flatten()
}

/// What guest memory looks like, by name.
fn kinds(len: usize) -> Vec<(&'static str, Vec<u8>)> {
    let words = ["dirty", "page", "round", "guest", "channel", "\n", " the ", "0x7f3a", "source"];
    let text = noise(3).flat_map(|byte| words[usize::from(byte) % words.len()].bytes()).take(len).collect();
    let pointers = noise(5).flat_map(|byte| (0x7f12_3456_0000u64 + u64::from(byte) * 16).to_le_bytes()).take(len);
    let numbers = (0u32..).flat_map(u32::to_le_bytes).take(len);
    let mostly_zero = noise(9).enumerate().map(|(at, byte)| if at % 61 == 0 { byte } else { 0 }).take(len);
    let half_noise = noise(11).enumerate().map(|(at, byte)| if at / 512 % 2 == 0 { byte } else { 7 }).take(len);
    vec![
        ("zeros", vec![0; len]),
        ("ones", vec![0xff; len]),
        ("numbers", numbers.collect()),
        ("text", text),
        ("pointers", pointers.collect()),
        ("mostly zero", mostly_zero.collect()),
        ("half noise", half_noise.collect()),
        ("noise", noise(13).take(len).collect()),
    ]
}

/// Encodes, checks the promises of `Encoder`, decodes, compares. Tells whether it shrank.
fn round_trip(
    encoder: &mut dyn Encoder,
    decoder: &mut dyn Decoder,
    content: &[u8],
) -> Result<Option<usize>, CodecError> {
    const GUARD: usize = 32;
    let mut encoded = vec![0x5a; content.len() + GUARD];
    let len = match encoder.encode(content, &mut encoded)? {
        Encoded::Incompressible => {
            assert!(encoded[content.len()..].iter().all(|byte| *byte == 0x5a), "more written than came in");
            return Ok(None);
        }
        Encoded::Shrunk(len) => len,
    };
    assert!(len > 0 && len < content.len());
    let mut decoded = vec![0xa5; content.len() + GUARD];
    decoder.decode(&encoded[..len], &mut decoded[..content.len()])?;
    assert_eq!(&decoded[..content.len()], content);
    assert!(decoded[content.len()..].iter().all(|byte| *byte == 0xa5), "written past the end");
    Ok(Some(len))
}

#[test]
fn every_method_level_and_kind_of_content_comes_back() {
    for choice in choices() {
        let (mut encoder, mut decoder) = (encoder(choice), choice.format.decoder().unwrap());
        for len in [4096, 524_288, 40_960] {
            for (kind, content) in kinds(len) {
                let shrunk = round_trip(&mut encoder, decoder.as_mut(), &content)
                    .unwrap_or_else(|error| panic!("{choice}, {kind}, {len} bytes: {error}"));
                let compressible = choice.format.name() != "none" && !["noise", "numbers"].contains(&kind);
                assert!(shrunk.is_some() || !compressible, "{choice}, {kind}, {len} bytes did not shrink");
                assert!(shrunk.is_none() || kind != "noise", "{choice} shrank noise");
            }
        }
    }
}

#[test]
fn the_largest_packet_comes_back_and_a_larger_one_is_refused() {
    let content: Vec<u8> = (0u32..).flat_map(|n| (n / 3).to_le_bytes()).take(MAX_CONTENT).collect();
    for format in Format::all() {
        let choice = Written { format, level: 1 };
        let (mut encoder, mut decoder) = (encoder(choice), format.decoder().unwrap());
        let shrunk = round_trip(&mut encoder, decoder.as_mut(), &content).unwrap();
        assert_eq!(shrunk.is_some(), format.name() != "none");
        let too_long = Err(CodecError::TooLong { len: MAX_CONTENT + 1 });
        let longer = vec![0; MAX_CONTENT + 1];
        assert_eq!(encoder.encode(&longer, &mut []), too_long.clone());
        assert_eq!(decoder.decode(&[0; 9], &mut longer.clone()), too_long.map(|_: Encoded| ()));
    }
}

#[test]
fn an_output_too_small_for_the_encoded_form_means_send_it_raw() {
    let content = &kinds(65_536)[3].1;
    for choice in choices() {
        let (mut encoder, mut decoder) = (encoder(choice), choice.format.decoder().unwrap());
        for room in [0, 1, 2, 100] {
            assert_eq!(encoder.encode(content, &mut vec![0; room]), Ok(Encoded::Incompressible), "{choice}");
        }
        // It did no harm to the context. (`Adaptive` may skip some first.)
        let shrunk = (0..20).any(|_| round_trip(&mut encoder, decoder.as_mut(), content).unwrap().is_some());
        assert_eq!(shrunk, choice.format.name() != "none", "{choice}");
    }
}

#[test]
fn nothing_at_all_is_incompressible() {
    for choice in choices() {
        assert_eq!(encoder(choice).encode(&[], &mut [0; 64]), Ok(Encoded::Incompressible));
    }
}

#[test]
fn packets_decode_in_any_order_and_by_any_decoder_of_the_format() {
    for row in FORMATS.iter().filter(|row| row.name != "none") {
        let mut encoder = (row.encoder)(1).unwrap();
        let contents: Vec<_> = kinds(32_768).into_iter().take(7).map(|(_, content)| content).collect();
        let packets: Vec<_> = contents
            .iter()
            .filter_map(|content| {
                let mut output = vec![0; content.len()];
                match encoder.encode(content, &mut output).unwrap() {
                    Encoded::Shrunk(len) => Some((content, output[..len].to_vec())),
                    Encoded::Incompressible => None,
                }
            })
            .collect();
        assert!(packets.len() >= 5, "{}", row.name);
        let mut one = (row.decoder)().unwrap();
        for (content, packet) in packets.iter().rev() {
            for decoder in [&mut one, &mut (row.decoder)().unwrap()] {
                let mut decoded = vec![0; content.len()];
                decoder.decode(packet, &mut decoded).unwrap();
                assert_eq!(&&decoded, content);
            }
        }
    }
}

proptest! {
    // A default, which PROPTEST_CASES replaces.
    #![proptest_config(contextualize_config(ProptestConfig::with_cases(150)))]
    #[test]
    fn content_made_of_random_pieces_comes_back(
        pieces in proptest::collection::vec((any::<u64>(), 1u64..40, 1usize..3000), 0..40),
    ) {
        // Each piece: some bytes of noise, repeated with a period.
        let content: Vec<u8> = pieces
            .iter()
            .flat_map(|(seed, period, len)| {
                let unit: Vec<u8> = noise(*seed).take(*period as usize).collect();
                unit.into_iter().cycle().take(*len).collect::<Vec<_>>()
            })
            .collect();
        for choice in choices() {
            let (mut encoder, mut decoder) = (encoder(choice), choice.format.decoder().unwrap());
            let outcome = round_trip(&mut encoder, decoder.as_mut(), &content);
            prop_assert!(outcome.is_ok(), "{}: {:?}", choice, outcome);
        }
    }
}
