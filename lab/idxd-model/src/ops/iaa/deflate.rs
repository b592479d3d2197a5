//! Compress (3.4, 3.10.2): matches within 4 KiB, written with the codes of the AECS.

use super::{DISTANCES, LENGTHS, Report, crc32, halves, source, xor};
use crate::ops::Scratch;
use crate::ops::access::Access;
use crate::table::dsa::FLAGS;
use crate::table::iaa::{self, compress_aecs as aecs, compression, error};
use crate::table::status;

const HASH_BITS: u32 = 12;
/// Maximum number of earlier positions that are tried for a match.
const MAX_TRIES: usize = 8;

/// A token of deflate.
#[derive(Clone, Copy, Debug)]
enum Token {
    Literal(u8),
    Match { length: u16, distance: u16 },
}

/// Finds tokens greedily, as a device does in one pass.
fn tokens(bytes: &[u8], literals_only: bool, mut each: impl FnMut(Token)) {
    let mut heads = vec![usize::MAX; 1 << HASH_BITS];
    let mut before = vec![usize::MAX; bytes.len()];
    let hash = |at: usize| {
        let word = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], 0]);
        (word.wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS)) as usize
    };
    let mut at = 0;
    while at < bytes.len() {
        let mut best = (0, 0);
        if !literals_only && at + 3 <= bytes.len() {
            let mut place = heads[hash(at)];
            for _ in 0..MAX_TRIES {
                if place == usize::MAX || at - place > iaa::WINDOW {
                    break;
                }
                let most = (bytes.len() - at).min(258);
                let same = bytes[place..].iter().zip(&bytes[at..at + most]).take_while(|(one, two)| one == two).count();
                if same > best.0 {
                    best = (same, at - place);
                }
                place = before[place];
            }
        }
        let step = if best.0 >= 3 {
            each(Token::Match { length: best.0 as u16, distance: best.1 as u16 });
            best.0
        } else {
            each(Token::Literal(bytes[at]));
            1
        };
        let hashed = at.min(before.len())..(at + step).min(bytes.len().saturating_sub(2)).max(at);
        for (seen, earlier) in hashed.clone().zip(&mut before[hashed]) {
            let slot = hash(seen);
            *earlier = heads[slot];
            heads[slot] = seen;
        }
        at += step;
    }
}

/// Returns the symbol whose base is the largest not above the value, with its extra bits.
fn symbol(table: &[(u16, u8)], value: u16) -> (usize, u8, u16) {
    let index = table.iter().rposition(|&(base, _)| base <= value).expect("every table begins below every value");
    (index, table[index].1, value - table[index].0)
}

/// Bits, least significant first.
struct Bits {
    bytes: Vec<u8>,
    count: usize,
}

impl Bits {
    fn put(&mut self, value: u32, bits: u32) {
        for bit in 0..bits {
            if self.count.is_multiple_of(8) {
                self.bytes.push(0);
            }
            if value >> bit & 1 == 1 {
                *self.bytes.last_mut().expect("one was just pushed") |= 1 << (self.count % 8);
            }
            self.count += 1;
        }
    }

    /// Writes a Huffman code, most significant bit first. Returns `false` if the table has no such code.
    fn code(&mut self, entry: u32) -> bool {
        let (code, length) = (entry & 0x7fff, entry >> 15 & 0xf);
        if length == 0 {
            return false;
        }
        self.put(code.reverse_bits() >> (32 - length), length);
        true
    }
}

pub(super) fn compress(descriptor: &[u8; 64], access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    if let Err(stop) = source(descriptor, access, &mut scratch.output) {
        return Report::fault(stop, 0);
    }
    let input = std::mem::take(&mut scratch.output);
    let report = compress_input(descriptor, access, &input);
    scratch.output = input;
    report
}

fn compress_input(descriptor: &[u8; 64], access: &mut Access<'_>, input: &[u8]) -> Report {
    let flags = iaa::OPERATION_FLAGS.get(descriptor) as u16;
    let literals = flags & compression::LITERALS != 0;
    if flags & compression::STATISTICS != 0 {
        return statistics(descriptor, access, input, literals);
    }
    let (read_at, write_at) = halves(descriptor);
    let mut state = vec![0; aecs::BYTES];
    if let Err(stop) = access.read(read_at, &mut state) {
        return Report::fault(stop, 0);
    }
    let held = aecs::BITS.get(&state);
    if held > aecs::ACCUMULATOR_BITS {
        return Report::error(error::AECS);
    }
    let mut out =
        Bits { bytes: state[aecs::ACCUMULATOR..][..(held as usize).div_ceil(8)].to_vec(), count: held as usize };
    if let Some(last) = out.bytes.last_mut()
        && !held.is_multiple_of(8)
    {
        *last &= (1 << (held % 8)) - 1;
    }
    let word = |at: usize| u32::from_le_bytes(state[at..at + 4].try_into().expect("four bytes"));
    let mut good = true;
    tokens(input, literals, |token| match token {
        Token::Literal(byte) => good &= out.code(word(aecs::LITERALS + 4 * usize::from(byte))),
        Token::Match { length, distance } => {
            let (index, extra, rest) = symbol(&LENGTHS, length);
            good &= out.code(word(aecs::LITERALS + 4 * (257 + index)));
            out.put(u32::from(rest), u32::from(extra));
            let (index, extra, rest) = symbol(&DISTANCES, distance);
            good &= out.code(word(aecs::DISTANCES + 4 * index));
            out.put(u32::from(rest), u32::from(extra));
        }
    });
    let end = flags & compression::END;
    if end != 0 {
        good &= out.code(word(aecs::LITERALS + 4 * 256));
    }
    if end >= 2 << 2 {
        out.put(u32::from(end == 3 << 2), 3);
        out.put(0, (8 - out.count as u32 % 8) % 8);
        out.put(0xffff_0000, 32);
    }
    if !good {
        return Report::error(error::INVALID_CODE);
    }
    let crc = crc32(descriptor, aecs::CRC.get(&state) as u32, input);
    let xor = xor(aecs::XOR.get(&state) as u16, input);
    finish(descriptor, access, Finished { out, state, write_at, crc, xor, input: input.len() as u64 })
}

struct Finished {
    out: Bits,
    state: Vec<u8>,
    write_at: u64,
    crc: u32,
    xor: u16,
    input: u64,
}

fn finish(descriptor: &[u8; 64], access: &mut Access<'_>, finished: Finished) -> Report {
    let Finished { out, mut state, write_at, crc, xor, input } = finished;
    let flush = iaa::OPERATION_FLAGS.get(descriptor) as u16 & compression::FLUSH != 0;
    // Without flush only whole words are written; the remaining bits stay in the accumulator.
    let written = if flush { out.bytes.len() } else { out.count / 64 * 8 };
    if written as u64 > iaa::DESTINATION_SIZE.get(descriptor) {
        // Table 4-8: not recoverable, and the AECS is not written (3.4.2).
        return Report { bytes: input, ..Report::error(error::UNRECOVERABLE_OVERFLOW) };
    }
    if let Err(stop) = access.write(iaa::DESTINATION.get(descriptor), &out.bytes[..written]) {
        return Report::fault(stop, stop.done as u64);
    }
    if FLAGS.get(descriptor) as u32 & iaa::WRITE_SOURCE2 == iaa::WRITE_AECS {
        let left = if flush { 0 } else { out.count - written * 8 };
        aecs::CRC.set(&mut state, u64::from(crc));
        aecs::XOR.set(&mut state, u64::from(xor));
        aecs::BITS.set(&mut state, left as u64);
        state[aecs::ACCUMULATOR..aecs::ACCUMULATOR + 256].fill(0);
        let rest = &out.bytes[written.min(out.bytes.len())..];
        state[aecs::ACCUMULATOR..aecs::ACCUMULATOR + rest.len()].copy_from_slice(rest);
        if let Err(stop) = access.write(write_at, &state[..aecs::WRITTEN]) {
            return Report::fault(stop, written as u64);
        }
    }
    let output_bits = if flush { (out.count % 8) as u8 } else { 0 };
    Report { status: status::SUCCESS, output: written as u64, output_bits, xor, crc, bytes: input, ..Report::default() }
}

/// Computes the histogram of the tokens (3.4.1).
fn statistics(descriptor: &[u8; 64], access: &mut Access<'_>, input: &[u8], literals: bool) -> Report {
    let mut counts = vec![0_u32; iaa::STATISTICS_WORDS];
    let mut count = |word: usize| counts[word] = (counts[word] + 1).min(iaa::MAX_STATISTICS_COUNT);
    tokens(input, literals, |token| match token {
        Token::Literal(byte) => count(usize::from(byte)),
        Token::Match { length, distance } => {
            count(257 + symbol(&LENGTHS, length).0);
            count(1152 / 4 + symbol(&DISTANCES, distance).0);
        }
    });
    if iaa::OPERATION_FLAGS.get(descriptor) as u16 & compression::END != 0 {
        count(256);
    }
    let bytes: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
    if bytes.len() as u64 > iaa::DESTINATION_SIZE.get(descriptor) {
        return Report { bytes: input.len() as u64, ..Report::error(error::UNRECOVERABLE_OVERFLOW) };
    }
    if let Err(stop) = access.write(iaa::DESTINATION.get(descriptor), &bytes) {
        return Report::fault(stop, stop.done as u64);
    }
    Report {
        status: status::SUCCESS,
        output: bytes.len() as u64,
        crc: crc32(descriptor, 0, input),
        xor: xor(0, input),
        bytes: input.len() as u64,
        ..Report::default()
    }
}
