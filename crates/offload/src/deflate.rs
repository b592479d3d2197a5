//! Deflate (RFC 1951) with a window of 4 KiB, on the CPU: what IAA can read, and a reader for what IAA writes.
//!
//! Made for being there, not for being fast: the writer has the fixed codes and looks at one earlier place per position; the
//! reader decodes bit by bit along the canonical codes. Where compression is to pay on the CPU, there are lz4 and zstd.

use crate::request::Answer;

/// How far back a match may lie, for the sake of IAA.
const WINDOW: usize = 4096;
/// The longest distance a reader has to know.
const FARTHEST: usize = 32768;
const LONGEST_MATCH: usize = 258;
const SHORTEST_MATCH: usize = 3;
const END_OF_BLOCK: usize = 256;

/// Base and extra bits of the length symbols from 257 on.
const LENGTHS: [(u16, u8); 29] = [
    (3, 0),
    (4, 0),
    (5, 0),
    (6, 0),
    (7, 0),
    (8, 0),
    (9, 0),
    (10, 0),
    (11, 1),
    (13, 1),
    (15, 1),
    (17, 1),
    (19, 2),
    (23, 2),
    (27, 2),
    (31, 2),
    (35, 3),
    (43, 3),
    (51, 3),
    (59, 3),
    (67, 4),
    (83, 4),
    (99, 4),
    (115, 4),
    (131, 5),
    (163, 5),
    (195, 5),
    (227, 5),
    (258, 0),
];
/// Base and extra bits of the distance symbols.
const DISTANCES: [(u16, u8); 30] = [
    (1, 0),
    (2, 0),
    (3, 0),
    (4, 0),
    (5, 1),
    (7, 1),
    (9, 2),
    (13, 2),
    (17, 3),
    (25, 3),
    (33, 4),
    (49, 4),
    (65, 5),
    (97, 5),
    (129, 6),
    (193, 6),
    (257, 7),
    (385, 7),
    (513, 8),
    (769, 8),
    (1025, 9),
    (1537, 9),
    (2049, 10),
    (3073, 10),
    (4097, 11),
    (6145, 11),
    (8193, 12),
    (12289, 12),
    (16385, 13),
    (24577, 13),
];
/// The order in which the lengths of the code-length codes come.
const ORDER: [usize; 19] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// Bits going out, lowest first.
struct Writer<'a> {
    room: &'a mut [u8],
    written: usize,
    bits: u64,
    count: u32,
}

impl Writer<'_> {
    fn put(&mut self, value: u32, count: u32) -> Option<()> {
        self.bits |= u64::from(value) << self.count;
        self.count += count;
        while self.count >= 8 {
            self.byte()?;
        }
        Some(())
    }

    fn byte(&mut self) -> Option<()> {
        *self.room.get_mut(self.written)? = self.bits as u8;
        self.written += 1;
        self.bits >>= 8;
        self.count = self.count.saturating_sub(8);
        Some(())
    }

    /// A literal or length by the fixed code (section 3.2.6), whose bits go out highest first.
    fn symbol(&mut self, symbol: usize) -> Option<()> {
        let (code, bits) = match symbol {
            0..=143 => (0x30 + symbol, 8),
            144..=255 => (0x190 + symbol - 144, 9),
            256..=279 => (symbol - 256, 7),
            _ => (0xc0 + symbol - 280, 8),
        };
        self.put((code as u32).reverse_bits() >> (32 - bits), bits)
    }

    fn copy(&mut self, length: usize, distance: usize) -> Option<()> {
        let at = LENGTHS.iter().rposition(|(base, _)| usize::from(*base) <= length)?;
        self.symbol(END_OF_BLOCK + 1 + at)?;
        self.put((length - usize::from(LENGTHS[at].0)) as u32, LENGTHS[at].1.into())?;
        let at = DISTANCES.iter().rposition(|(base, _)| usize::from(*base) <= distance)?;
        self.put((at as u32).reverse_bits() >> 27, 5)?;
        self.put((distance - usize::from(DISTANCES[at].0)) as u32, DISTANCES[at].1.into())
    }
}

/// Writes `input` as one stream into `room`.
pub(crate) fn deflate(input: &[u8], room: &mut [u8]) -> Answer {
    let mut writer = Writer { room, written: 0, bits: 0, count: 0 };
    match compress(input, &mut writer) {
        Some(()) => Answer::Written(writer.written as u32),
        None => Answer::TooLong,
    }
}

fn compress(input: &[u8], writer: &mut Writer<'_>) -> Option<()> {
    const HASH_BITS: u32 = 11;
    // Where each hash was last seen, plus one.
    let mut last = [0u32; 1 << HASH_BITS];
    // Final block, fixed codes.
    writer.put(0b011, 3)?;
    let mut at = 0;
    while at < input.len() {
        let mut length = 0;
        if let Some(four) = input.get(at..at + 4) {
            let word = u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
            let hash = (word.wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS)) as usize;
            let before = std::mem::replace(&mut last[hash], at as u32 + 1) as usize;
            if before > 0 && at - (before - 1) <= WINDOW {
                let (from, most) = (before - 1, LONGEST_MATCH.min(input.len() - at));
                length = (0..most).take_while(|next| input[from + next] == input[at + next]).count();
                if length >= SHORTEST_MATCH {
                    writer.copy(length, at - from)?;
                }
            }
        }
        if length >= SHORTEST_MATCH {
            at += length;
        } else {
            writer.symbol(input[at].into())?;
            at += 1;
        }
    }
    writer.symbol(END_OF_BLOCK)?;
    if writer.count > 0 { writer.byte() } else { Some(()) }
}

/// Bits coming in, lowest first.
struct Reader<'a> {
    input: &'a [u8],
    at: usize,
    bits: u64,
    count: u32,
}

impl Reader<'_> {
    fn take(&mut self, count: u32) -> Option<u32> {
        while self.count < count {
            self.bits |= u64::from(*self.input.get(self.at)?) << self.count;
            self.at += 1;
            self.count += 8;
        }
        let value = self.bits & ((1 << count) - 1);
        self.bits >>= count;
        self.count -= count;
        Some(value as u32)
    }
}

/// A canonical code: how many codes of each length, and the symbols in their order.
struct Code {
    counts: [u16; 16],
    symbols: [u16; 288],
}

impl Code {
    /// The code of these lengths; none if there are more codes than there is room for. Incomplete ones are taken, as
    /// others do: what has no code is an error when it occurs.
    fn new(lengths: &[u8]) -> Option<Self> {
        let mut code = Self { counts: [0; 16], symbols: [0; 288] };
        lengths.iter().for_each(|length| code.counts[usize::from(*length)] += 1);
        code.counts[0] = 0;
        let mut left = 1i32;
        for length in 1..16 {
            left = 2 * left - i32::from(code.counts[length]);
            if left < 0 {
                return None;
            }
        }
        let mut next = [0u16; 16];
        for length in 1..15 {
            next[length + 1] = next[length] + code.counts[length];
        }
        for (symbol, length) in lengths.iter().enumerate().filter(|(_, length)| **length != 0) {
            let next = &mut next[usize::from(*length)];
            code.symbols[usize::from(*next)] = symbol as u16;
            *next += 1;
        }
        Some(code)
    }

    fn read(&self, reader: &mut Reader<'_>) -> Option<usize> {
        let (mut code, mut first, mut index) = (0i32, 0i32, 0i32);
        for length in 1..16 {
            code |= reader.take(1)? as i32;
            let count = i32::from(self.counts[length]);
            if code - count < first {
                return Some(self.symbols[(index + code - first) as usize].into());
            }
            index += count;
            first = (first + count) << 1;
            code <<= 1;
        }
        None
    }
}

/// What a reading ends with when it does not end well.
enum Broken {
    Malformed,
    TooLong,
}

/// Reads the stream `input` into `output`.
pub(crate) fn inflate(input: &[u8], output: &mut [u8]) -> Answer {
    match decompress(input, output) {
        Ok(bytes) => Answer::Written(bytes as u32),
        Err(Broken::Malformed) => Answer::Malformed,
        Err(Broken::TooLong) => Answer::TooLong,
    }
}

fn decompress(input: &[u8], output: &mut [u8]) -> Result<usize, Broken> {
    let mut reader = Reader { input, at: 0, bits: 0, count: 0 };
    let mut written = 0;
    loop {
        let last = reader.take(1).ok_or(Broken::Malformed)? == 1;
        match reader.take(2).ok_or(Broken::Malformed)? {
            0 => stored(&mut reader, output, &mut written)?,
            1 => {
                let mut lengths = [8; 288];
                lengths[144..256].fill(9);
                lengths[256..280].fill(7);
                let literals = Code::new(&lengths).ok_or(Broken::Malformed)?;
                let distances = Code::new(&[5; 30]).ok_or(Broken::Malformed)?;
                block(&mut reader, &literals, &distances, output, &mut written)?;
            }
            2 => {
                let (literals, distances) = codes(&mut reader).ok_or(Broken::Malformed)?;
                block(&mut reader, &literals, &distances, output, &mut written)?;
            }
            _ => return Err(Broken::Malformed),
        }
        if last {
            return Ok(written);
        }
    }
}

fn stored(reader: &mut Reader<'_>, output: &mut [u8], written: &mut usize) -> Result<(), Broken> {
    // The rest of the byte is skipped; whole bytes that were read ahead are not.
    let spare = reader.count % 8;
    reader.take(spare).ok_or(Broken::Malformed)?;
    let bytes = reader.take(16).ok_or(Broken::Malformed)?;
    let check = reader.take(16).ok_or(Broken::Malformed)?;
    if bytes != !check & 0xffff {
        return Err(Broken::Malformed);
    }
    for _ in 0..bytes {
        let byte = reader.take(8).ok_or(Broken::Malformed)?;
        *output.get_mut(*written).ok_or(Broken::TooLong)? = byte as u8;
        *written += 1;
    }
    Ok(())
}

fn codes(reader: &mut Reader<'_>) -> Option<(Code, Code)> {
    let literals = reader.take(5)? as usize + 257;
    let distances = reader.take(5)? as usize + 1;
    let given = reader.take(4)? as usize + 4;
    if literals > 286 || distances > 30 {
        return None;
    }
    let mut lengths = [0u8; 320];
    for place in &ORDER[..given] {
        lengths[*place] = reader.take(3)? as u8;
    }
    let code = Code::new(&lengths[..19])?;
    lengths = [0; 320];
    let mut at = 0;
    while at < literals + distances {
        let (length, times) = match code.read(reader)? {
            symbol @ 0..=15 => (symbol as u8, 1),
            16 => (*lengths.get(at.checked_sub(1)?)?, 3 + reader.take(2)? as usize),
            17 => (0, 3 + reader.take(3)? as usize),
            _ => (0, 11 + reader.take(7)? as usize),
        };
        if at + times > literals + distances {
            return None;
        }
        lengths[at..at + times].fill(length);
        at += times;
    }
    if lengths[END_OF_BLOCK] == 0 {
        return None;
    }
    Some((Code::new(&lengths[..literals])?, Code::new(&lengths[literals..literals + distances])?))
}

fn block(
    reader: &mut Reader<'_>,
    literals: &Code,
    distances: &Code,
    output: &mut [u8],
    written: &mut usize,
) -> Result<(), Broken> {
    loop {
        match literals.read(reader).ok_or(Broken::Malformed)? {
            END_OF_BLOCK => return Ok(()),
            literal @ 0..END_OF_BLOCK => {
                *output.get_mut(*written).ok_or(Broken::TooLong)? = literal as u8;
                *written += 1;
            }
            symbol => {
                let (base, extra) = *LENGTHS.get(symbol - END_OF_BLOCK - 1).ok_or(Broken::Malformed)?;
                let length = usize::from(base) + reader.take(extra.into()).ok_or(Broken::Malformed)? as usize;
                let symbol = distances.read(reader).ok_or(Broken::Malformed)?;
                let (base, extra) = *DISTANCES.get(symbol).ok_or(Broken::Malformed)?;
                let distance = usize::from(base) + reader.take(extra.into()).ok_or(Broken::Malformed)? as usize;
                if distance > *written || distance > FARTHEST {
                    return Err(Broken::Malformed);
                }
                if output.len() - *written < length {
                    return Err(Broken::TooLong);
                }
                for _ in 0..length {
                    output[*written] = output[*written - distance];
                    *written += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn through(input: &[u8]) -> Vec<u8> {
        let mut stream = vec![0; input.len() * 2 + 16];
        let Answer::Written(bytes) = deflate(input, &mut stream) else { panic!("there is room") };
        let mut output = vec![0; input.len()];
        assert_eq!(inflate(&stream[..bytes as usize], &mut output), Answer::Written(input.len() as u32));
        output
    }

    const STORED: &[u8] = include_bytes!("../tests/streams/zlib-stored.deflate");
    const DYNAMIC: &[u8] = include_bytes!("../tests/streams/zlib-dynamic.deflate");

    /// Streams made by zlib 1.2 with windows of 4 KiB (`zlib.compressobj(level, zlib.DEFLATED, -12)`).
    #[test]
    fn streams_of_zlib_are_read() {
        let text: Vec<u8> =
            (0..300u32).flat_map(|at| format!("line {} of many, {};", at, at * at % 97).into_bytes()).collect();
        for (stream, level) in [(DYNAMIC, 9), (STORED, 0)] {
            let mut output = vec![0; text.len()];
            assert_eq!(inflate(stream, &mut output), Answer::Written(text.len() as u32), "level {level}");
            assert_eq!(output, text);
            // One byte less room, and one byte less stream.
            assert_eq!(inflate(stream, &mut output[1..]), Answer::TooLong);
            assert_eq!(inflate(&stream[..stream.len() - 1], &mut output), Answer::Malformed);
        }
    }

    #[test]
    fn a_zero_page_becomes_short_and_noise_is_too_long() {
        let mut room = vec![0; 4096 + 8];
        let Answer::Written(bytes) = deflate(&[0; 4096], &mut room) else { panic!() };
        assert!(bytes < 64);
        let mut state = 1u64;
        let noise: Vec<u8> = (0..4096)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        assert_eq!(deflate(&noise, &mut room), Answer::TooLong);
    }

    proptest! {
        #[test]
        fn what_was_deflated_is_inflated(input in proptest::collection::vec(prop_oneof![Just(0u8), Just(7), any::<u8>()], 0..9000)) {
            prop_assert_eq!(through(&input), input);
        }

        #[test]
        fn no_stream_makes_the_reader_panic(input in proptest::collection::vec(any::<u8>(), 0..300), room in 0usize..5000) {
            let mut output = vec![0; room];
            let _ = inflate(&input, &mut output);
        }
    }
}
