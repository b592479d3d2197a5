//! Codes and headers, read by an inflater that was written from RFC 1951 alone, and by Python's zlib where Python is
//! installed.

use std::process::{Command, Stdio};

#[cfg(not(miri))]
use proptest::prelude::*;

use super::*;

/// Returns the output of a device for these tokens: header, tokens, end of block, padded to a byte.
fn block(codes: &Codes, tokens: &[Token]) -> Vec<u8> {
    let mut bytes = vec![0; 64 + tokens.len() * 8 + 400];
    let mut bits = Bits::new(&mut bytes);
    assert!(codes.write_header(true, &mut bits));
    for token in tokens {
        match *token {
            Token::Literal(byte) => put_symbol(codes, &mut bits, usize::from(byte)),
            Token::Match { length, distance } => {
                let (symbol, extra, extra_bits) = length_symbol(length);
                put_symbol(codes, &mut bits, symbol);
                bits.put(extra, extra_bits);
                let (symbol, extra, extra_bits) = distance_symbol(distance);
                assert!(codes.distance_bits(symbol) > 0);
                bits.put_code(codes.distance_code(symbol), codes.distance_bits(symbol));
                bits.put(extra, extra_bits);
            }
        }
    }
    put_symbol(codes, &mut bits, END_OF_BLOCK);
    assert!(bits.fits);
    let used = bits.used().div_ceil(8);
    bytes.truncate(used);
    bytes
}

fn put_symbol(codes: &Codes, bits: &mut Bits<'_>, symbol: usize) {
    assert!(codes.literal_bits(symbol) > 0);
    bits.put_code(codes.literal_code(symbol), codes.literal_bits(symbol));
}

#[derive(Clone, Copy, Debug)]
enum Token {
    Literal(u8),
    Match { length: u16, distance: u16 },
}

const LENGTH_BASE: [u16; 29] =
    [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
const LENGTH_EXTRA: [u32; 29] = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
const DISTANCE_BASE: [u16; 30] = [
    1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145,
    8193, 12289, 16385, 24577,
];
const DISTANCE_EXTRA: [u32; 30] =
    [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13];

fn length_symbol(length: u16) -> (usize, u32, u32) {
    let index = LENGTH_BASE.iter().rposition(|base| *base <= length).unwrap();
    (257 + index, u32::from(length - LENGTH_BASE[index]), LENGTH_EXTRA[index])
}

fn distance_symbol(distance: u16) -> (usize, u32, u32) {
    let index = DISTANCE_BASE.iter().rposition(|base| *base <= distance).unwrap();
    (index, u32::from(distance - DISTANCE_BASE[index]), DISTANCE_EXTRA[index])
}

/// Returns the tokens of a greedy search over three bytes, with the window of an IAA device.
fn tokens(data: &[u8]) -> Vec<Token> {
    let mut last = std::collections::HashMap::new();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < data.len() {
        let key = data.get(at..at + 3).map(|key| [key[0], key[1], key[2]]);
        let before = key.and_then(|key| last.insert(key, at)).filter(|before| at - before <= 4096);
        match before {
            Some(before) => {
                let length = (0..258.min(data.len() - at)).take_while(|i| data[before + i] == data[at + i]).count();
                tokens.push(Token::Match { length: length as u16, distance: (at - before) as u16 });
                at += length;
            }
            None => {
                tokens.push(Token::Literal(data[at]));
                at += 1;
            }
        }
    }
    tokens
}

fn counts(tokens: &[Token]) -> ([u32; 286], [u32; 30]) {
    let (mut literals, mut distances) = ([0; 286], [0; 30]);
    for token in tokens {
        match *token {
            Token::Literal(byte) => literals[usize::from(byte)] += 1,
            Token::Match { length, distance } => {
                literals[length_symbol(length).0] += 1;
                distances[distance_symbol(distance).0] += 1;
            }
        }
    }
    (literals, distances)
}

/// A strict inflater of one final block: codes must be complete, and no bits may be missing.
struct Inflater<'a> {
    bytes: &'a [u8],
    bit: usize,
}

impl Inflater<'_> {
    fn bits(&mut self, count: u32) -> u32 {
        (0..count).fold(0, |value, index| {
            let bit = self.bytes[self.bit / 8] >> (self.bit % 8) & 1;
            self.bit += 1;
            value | u32::from(bit) << index
        })
    }

    fn symbol(&mut self, lengths: &[u8]) -> usize {
        // Codes of each length in the order of their symbols, first bit highest: walk down bit by bit.
        let (mut code, mut first) = (0_i64, 0_i64);
        for length in 1..=15_u8 {
            code = code << 1 | i64::from(self.bits(1));
            let of_length: Vec<usize> = (0..lengths.len()).filter(|symbol| lengths[*symbol] == length).collect();
            if let Some(symbol) = of_length.get((code - first) as usize).filter(|_| code >= first) {
                return *symbol;
            }
            first = (first + of_length.len() as i64) << 1;
        }
        panic!("no such code");
    }

    fn codes(&mut self) -> (Vec<u8>, Vec<u8>) {
        let (literals, distances, shown) = (self.bits(5) + 257, self.bits(5) + 1, self.bits(4) + 4);
        assert!(literals <= 286 && distances <= 30);
        let order = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
        let mut of_lengths = vec![0; 19];
        for symbol in &order[..shown as usize] {
            of_lengths[*symbol] = self.bits(3) as u8;
        }
        assert_complete(&of_lengths);
        let mut lengths: Vec<u8> = Vec::new();
        let total = (literals + distances) as usize;
        while lengths.len() < total {
            // No run may extend from one alphabet into the other.
            let until = if lengths.len() < literals as usize { literals as usize } else { total };
            let (value, count) = match self.symbol(&of_lengths) {
                16 => (*lengths.last().unwrap(), 3 + self.bits(2)),
                17 => (0, 3 + self.bits(3)),
                18 => (0, 11 + self.bits(7)),
                length => (length as u8, 1),
            };
            lengths.extend(std::iter::repeat_n(value, count as usize));
            assert!(lengths.len() <= until);
        }
        let distances = lengths.split_off(literals as usize);
        assert_complete(&lengths);
        assert_complete(&distances);
        (lengths, distances)
    }
}

fn assert_complete(lengths: &[u8]) {
    let sum: u32 = lengths.iter().filter(|length| **length > 0).map(|length| 1 << (15 - length)).sum();
    assert_eq!(sum, 1 << 15, "the code is not complete");
}

fn inflate(bytes: &[u8]) -> Vec<u8> {
    let mut from = Inflater { bytes, bit: 0 };
    assert_eq!(from.bits(1), 1, "not the final block");
    let (literals, distances) = match from.bits(2) {
        1 => {
            let mut literals = vec![8; 144];
            literals.extend([9; 112]);
            literals.extend([7; 24]);
            literals.extend([8; 8]);
            (literals, vec![5; 32])
        }
        2 => from.codes(),
        other => panic!("block type {other}"),
    };
    let mut out = Vec::new();
    loop {
        match from.symbol(&literals) {
            256 => break,
            literal @ 0..=255 => out.push(literal as u8),
            length => {
                let length = LENGTH_BASE[length - 257] as usize + from.bits(LENGTH_EXTRA[length - 257]) as usize;
                let symbol = from.symbol(&distances);
                let distance = DISTANCE_BASE[symbol] as usize + from.bits(DISTANCE_EXTRA[symbol]) as usize;
                for _ in 0..length {
                    out.push(out[out.len() - distance]);
                }
            }
        }
    }
    assert_eq!(from.bit.div_ceil(8), bytes.len(), "bytes behind the end");
    out
}

fn samples() -> Vec<Vec<u8>> {
    let text: Vec<u8> =
        b"a page of a guest is often like the page beside it, ".iter().copied().cycle().take(9000).collect();
    let numbers: Vec<u8> = (0..4096_u32).flat_map(|value| (value / 3).to_le_bytes()).collect();
    let noise: Vec<u8> = (0..5000_u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    vec![Vec::new(), vec![0], vec![0; 4096], vec![7; 65536], text, numbers, noise, (0..=255).collect()]
}

#[test]
#[cfg(not(miri))]
fn output_with_fixed_and_dynamic_codes_inflates_to_the_input() {
    for data in samples() {
        let tokens = tokens(&data);
        let (literals, distances) = counts(&tokens);
        let fixed = block(&Codes::fixed(), &tokens);
        let dynamic = block(&Codes::for_counts(&literals, &distances), &tokens);
        assert_eq!(inflate(&fixed), data);
        assert_eq!(inflate(&dynamic), data);
    }
}

#[test]
#[cfg(not(miri))]
fn codes_made_for_the_data_are_shorter() {
    let data = &samples()[5];
    let tokens = tokens(data);
    let (literals, distances) = counts(&tokens);
    let fixed = block(&Codes::fixed(), &tokens).len();
    let dynamic = block(&Codes::for_counts(&literals, &distances), &tokens).len();
    assert!(dynamic * 10 < fixed * 9, "{dynamic} {fixed}");
}

/// Checks the output with the most widely used inflater, where Python is installed.
#[test]
#[cfg(not(miri))]
fn zlib_inflates_it_with_a_window_of_4_kib() {
    let script = "import sys,zlib;d=zlib.decompressobj(-12);o=d.decompress(sys.stdin.buffer.read())+d.flush();\
                  assert d.eof and not d.unused_data;sys.stdout.buffer.write(o)";
    for data in samples() {
        let tokens = tokens(&data);
        let (literals, distances) = counts(&tokens);
        for codes in [Codes::fixed(), Codes::for_counts(&literals, &distances)] {
            let child =
                Command::new("python3").args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
            let Ok(mut child) = child else {
                println!("skipped: there is no python3");
                return;
            };
            std::io::Write::write_all(&mut child.stdin.take().unwrap(), &block(&codes, &tokens)).unwrap();
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success());
            assert_eq!(output.stdout, data);
        }
    }
}

#[cfg(not(miri))]
proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_data_inflates_to_itself(data in prop::collection::vec(prop_oneof![3 => 0..4_u8, 1 => any::<u8>()], 0..3000)) {
        let tokens = tokens(&data);
        let (literals, distances) = counts(&tokens);
        prop_assert_eq!(inflate(&block(&Codes::fixed(), &tokens)), &data[..]);
        prop_assert_eq!(inflate(&block(&Codes::for_counts(&literals, &distances), &tokens)), &data[..]);
    }

    /// The accumulator of an AECS has 2048 bits: the header of any codes fits.
    #[test]
    fn any_header_fits_the_accumulator(
        literals in prop::collection::vec(prop_oneof![1 => Just(0_u32), 2 => 0..20_u32, 2 => 0..0x7_ffff_u32], 286),
        distances in prop::collection::vec(prop_oneof![1 => Just(0_u32), 2 => 0..20_u32, 2 => 0..0x7_ffff_u32], 30),
    ) {
        let codes = Codes::for_counts(&literals.try_into().unwrap(), &distances.try_into().unwrap());
        let mut bytes = [0; 256];
        let mut bits = Bits::new(&mut bytes);
        prop_assert!(codes.write_header(true, &mut bits));
        let used = bits.used();
        let mut from = Inflater { bytes: &bytes, bit: 3 };
        let (literal_lengths, distance_lengths) = from.codes();
        prop_assert_eq!(from.bit, used);
        for (symbol, length) in literal_lengths.iter().enumerate() {
            prop_assert_eq!(*length, codes.literal_bits(symbol));
        }
        for (symbol, length) in distance_lengths.iter().enumerate() {
            prop_assert_eq!(*length, codes.distance_bits(symbol));
        }
    }
}

#[test]
fn a_header_that_does_not_fit_is_an_error() {
    let mut bytes = [0; 20];
    let mut bits = Bits::new(&mut bytes);
    let codes = Codes::for_counts(&std::array::from_fn(|symbol| symbol as u32), &[1; 30]);
    assert!(!codes.write_header(true, &mut bits));
}
