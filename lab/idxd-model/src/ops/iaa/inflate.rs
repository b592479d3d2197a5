//! Decompress (3.3, 3.10.1): any deflate stream with a window of up to 4 KiB, resumable through the AECS.
//!
//! A token or a block header is consumed completely or not at all. So the state between two descriptors consists of the
//! unconsumed bits, the kind of block and the position in it, the codes of the block, the rest of a match that did not
//! fit, and the history.

use std::sync::OnceLock;

use super::{DISTANCES, LENGTHS, Report, crc32, halves, source, xor};
use crate::ops::Scratch;
use crate::ops::access::Access;
use crate::table::dsa::FLAGS;
use crate::table::iaa::{self, decompress_aecs as aecs, decompression, error};
use crate::table::status;

/// Why the decompression stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stopped {
    /// The input has no complete token left.
    Input,
    /// The output is full.
    Output,
    /// At an end of block at which the flags request a stop.
    End,
    Error(u8),
}

/// Bits of the accumulator, then bits of source 1.
struct Bits<'a> {
    held: &'a [u8],
    held_bits: usize,
    source: &'a [u8],
    end: usize,
    at: usize,
}

impl Bits<'_> {
    /// Returns the next bits, up to 16, with zeros behind the end.
    fn peek(&self) -> u32 {
        let mut value = 0;
        if self.at >= self.held_bits {
            let at = self.at - self.held_bits;
            for (index, byte) in self.source[(at / 8).min(self.source.len())..].iter().take(4).enumerate() {
                value |= u32::from(*byte) << (8 * index);
            }
            return value >> (at % 8) & 0xffff;
        }
        for bit in 0..16 {
            value |= self.bit(self.at + bit) << bit;
        }
        value
    }

    fn bit(&self, at: usize) -> u32 {
        let (bytes, at) = if at < self.held_bits { (self.held, at) } else { (self.source, at - self.held_bits) };
        bytes.get(at / 8).map_or(0, |byte| u32::from(byte >> (at % 8) & 1))
    }

    fn take(&mut self, bits: u32) -> Result<u32, Stopped> {
        if self.at + bits as usize > self.end {
            return Err(Stopped::Input);
        }
        let value = self.peek() & ((1 << bits) - 1);
        self.at += bits as usize;
        Ok(value)
    }

    fn symbol(&mut self, codes: &Codes, bad: u8) -> Result<u16, Stopped> {
        let entry = codes.lookup[self.peek() as usize & (LOOKUP - 1)];
        let (symbol, length) = (entry >> 4, usize::from(entry & 0xf));
        // Bits behind the end are zeros, which may look like a code or like none.
        if length == 0 {
            return Err(if self.at + 15 > self.end { Stopped::Input } else { Stopped::Error(bad) });
        }
        if self.at + length > self.end {
            return Err(Stopped::Input);
        }
        self.at += length;
        Ok(symbol)
    }
}

const LOOKUP: usize = 1 << 15;

/// A Huffman code, by the next 15 bits: symbol << 4 | length.
#[derive(Clone)]
struct Codes {
    lengths: Vec<u8>,
    lookup: Box<[u16]>,
}

impl Codes {
    fn new(lengths: &[u8], oversubscribed: u8) -> Result<Codes, Stopped> {
        let mut count = [0_u32; 16];
        for &length in lengths {
            count[usize::from(length)] += 1;
        }
        count[0] = 0;
        let mut next = [0_u32; 16];
        for length in 1..16 {
            next[length] = (next[length - 1] + count[length - 1]) << 1;
            if next[length] + count[length] > 1 << length {
                return Err(Stopped::Error(oversubscribed));
            }
        }
        let mut lookup = vec![0_u16; LOOKUP].into_boxed_slice();
        for (symbol, &length) in lengths.iter().enumerate() {
            if length == 0 {
                continue;
            }
            let length32 = u32::from(length);
            let code = next[usize::from(length)].reverse_bits() >> (32 - length32);
            next[usize::from(length)] += 1;
            for slot in (code as usize..LOOKUP).step_by(1 << length32) {
                lookup[slot] = (symbol as u16) << 4 | u16::from(length);
            }
        }
        Ok(Codes { lengths: lengths.to_vec(), lookup })
    }
}

/// The fixed codes (RFC 1951, 3.2.6).
fn fixed() -> &'static (Codes, Codes) {
    static FIXED: OnceLock<(Codes, Codes)> = OnceLock::new();
    FIXED.get_or_init(|| {
        let literals: Vec<u8> = (0..288)
            .map(|symbol| match symbol {
                0..144 => 8,
                144..256 => 9,
                256..280 => 7,
                _ => 8,
            })
            .collect();
        let codes = |lengths: &[u8]| Codes::new(lengths, 0).unwrap_or_else(|_| unreachable!("RFC 1951's own codes"));
        (codes(&literals), codes(&[5; 30]))
    })
}

#[derive(Clone)]
enum Block {
    Header,
    Stored(u16),
    Huffman(Codes, Codes),
    Ended,
}

struct Inflate {
    block: Block,
    last: bool,
    /// The rest of a match: bytes and distance.
    rest: (u16, u16),
    history: Vec<u8>,
    /// Whether the last token was an end of block to which the flags apply.
    at_end: bool,
}

impl Inflate {
    fn fresh() -> Inflate {
        Inflate { block: Block::Header, last: false, rest: (0, 0), history: Vec::new(), at_end: false }
    }

    /// Decompresses until the input or the room is used up. `history` grows by the output.
    fn run(&mut self, bits: &mut Bits<'_>, room: usize, flags: u16) -> Stopped {
        let start = self.history.len();
        loop {
            if self.rest.0 > 0 {
                let (length, distance) = (usize::from(self.rest.0), usize::from(self.rest.1));
                let fits = length.min(room - (self.history.len() - start));
                for _ in 0..fits {
                    self.history.push(self.history[self.history.len() - distance]);
                }
                self.rest.0 -= fits as u16;
                if self.rest.0 > 0 {
                    return Stopped::Output;
                }
            }
            let before = bits.at;
            let full = self.history.len() - start >= room;
            match self.token(bits, full, flags) {
                Ok(()) => {}
                Err(stopped) => {
                    if stopped != Stopped::End {
                        bits.at = before;
                    }
                    return stopped;
                }
            }
        }
    }

    /// Reads one token, or one block header.
    fn token(&mut self, bits: &mut Bits<'_>, full: bool, flags: u16) -> Result<(), Stopped> {
        match &mut self.block {
            Block::Ended => return Err(Stopped::End),
            Block::Header => return self.header(bits, flags),
            Block::Stored(left) => {
                if full && *left > 0 {
                    return if bits.at < bits.end { Err(Stopped::Output) } else { Err(Stopped::Input) };
                }
                if *left > 0 {
                    self.history.push(bits.take(8)? as u8);
                    *left -= 1;
                    self.at_end = false;
                }
                if *left == 0 {
                    return self.block_over(flags);
                }
            }
            Block::Huffman(literals, distances) => {
                let symbol = bits.symbol(literals, error::BAD_LL)?;
                if symbol == 256 {
                    return self.block_over(flags);
                }
                if full {
                    return Err(Stopped::Output);
                }
                if symbol < 256 {
                    self.history.push(symbol as u8);
                } else {
                    let &(base, extra) =
                        LENGTHS.get(usize::from(symbol) - 257).ok_or(Stopped::Error(error::BAD_LENGTH))?;
                    let length = base + bits.take(u32::from(extra))? as u16;
                    let symbol = bits.symbol(distances, error::BAD_D)?;
                    let (base, extra) = DISTANCES[usize::from(symbol)];
                    let distance = usize::from(base) + bits.take(u32::from(extra))? as usize;
                    if distance > iaa::WINDOW {
                        return Err(Stopped::Error(error::BAD_DISTANCE));
                    }
                    if distance > self.history.len() {
                        return Err(Stopped::Error(error::BEFORE_START));
                    }
                    self.rest = (length, distance as u16);
                }
                self.at_end = false;
            }
        }
        Ok(())
    }

    fn block_over(&mut self, flags: u16) -> Result<(), Stopped> {
        let counts = self.last || flags & decompression::FINAL == 0;
        self.at_end = counts;
        self.block = Block::Header;
        if flags & decompression::STOP != 0 && counts {
            self.block = Block::Ended;
            return Err(Stopped::End);
        }
        Ok(())
    }

    fn header(&mut self, bits: &mut Bits<'_>, flags: u16) -> Result<(), Stopped> {
        let last = bits.take(1)? == 1;
        let kind = bits.take(2)?;
        let block = match kind {
            0 => {
                // To the next byte of the stream; bits held back by an earlier descriptor count, too.
                let used = bits.at + (8 - bits.held_bits % 8) % 8;
                bits.take((8 - used as u32 % 8) % 8)?;
                let (length, inverse) = (bits.take(16)?, bits.take(16)?);
                if length != !inverse & 0xffff {
                    return Err(Stopped::Error(error::STORED_LENGTH));
                }
                Block::Stored(length as u16)
            }
            1 => Block::Huffman(fixed().0.clone(), fixed().1.clone()),
            2 => dynamic(bits)?,
            _ => return Err(Stopped::Error(error::BLOCK_TYPE)),
        };
        self.last = last;
        self.at_end = false;
        let empty = matches!(block, Block::Stored(0));
        self.block = block;
        if empty { self.block_over(flags) } else { Ok(()) }
    }
}

/// Reads a dynamic header (RFC 1951, 3.2.7).
fn dynamic(bits: &mut Bits<'_>) -> Result<Block, Stopped> {
    const ORDER: [usize; 19] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
    let literals = bits.take(5)? as usize + 257;
    let distances = bits.take(5)? as usize + 1;
    let lengths = bits.take(4)? as usize + 4;
    if literals > 286 {
        return Err(Stopped::Error(error::MANY_LL));
    }
    if distances > 30 {
        return Err(Stopped::Error(error::MANY_D));
    }
    let mut code_lengths = [0; 19];
    for &place in &ORDER[..lengths] {
        code_lengths[place] = bits.take(3)? as u8;
    }
    let codes = Codes::new(&code_lengths, error::CL_LENGTHS)?;
    let mut all: Vec<u8> = Vec::with_capacity(literals + distances);
    while all.len() < literals + distances {
        let symbol = bits.symbol(&codes, error::UNDEFINED_CL)?;
        let (value, count) = match symbol {
            0..16 => (symbol as u8, 1),
            16 => {
                let &last = all.last().ok_or(Stopped::Error(error::FIRST_REPEATS))?;
                (last, 3 + bits.take(2)?)
            }
            17 => (0, 3 + bits.take(3)?),
            _ => (0, 11 + bits.take(7)?),
        };
        all.extend((0..count).map(|_| value));
    }
    if all.len() > literals + distances {
        return Err(Stopped::Error(error::WRONG_NUMBER));
    }
    if all[..literals].iter().all(|&length| length == 0) {
        return Err(Stopped::Error(error::NO_LITERALS));
    }
    let literal_codes = Codes::new(&all[..literals], error::LL_LENGTHS)?;
    let distance_codes = Codes::new(&all[literals..], error::D_LENGTHS)?;
    Ok(Block::Huffman(literal_codes, distance_codes))
}

pub(super) fn decompress(descriptor: &[u8; 64], access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    if let Err(stop) = source(descriptor, access, &mut scratch.output) {
        return Report::fault(stop, 0);
    }
    let input = std::mem::take(&mut scratch.output);
    let report = decompress_input(descriptor, access, &input);
    scratch.output = input;
    report
}

fn decompress_input(descriptor: &[u8; 64], access: &mut Access<'_>, input: &[u8]) -> Report {
    let flags = iaa::OPERATION_FLAGS.get(descriptor) as u16;
    let operation_flags = FLAGS.get(descriptor) as u32;
    let (read_at, write_at) = halves(descriptor);
    let size = (iaa::SOURCE2_SIZE.get(descriptor) as usize).min(aecs::BYTES);
    let mut state = vec![0; aecs::BYTES];
    let mut inflate = Inflate::fresh();
    if operation_flags & iaa::READ_SOURCE2 == iaa::READ_AECS {
        if let Err(stop) = access.read(read_at, &mut state[..size]) {
            return Report::fault(stop, 0);
        }
        match load(&state) {
            Some(loaded) => inflate = loaded,
            None => return Report::error(error::AECS),
        }
    }
    let pending_bytes = usize::from(aecs::OUTPUT_BITS.get(&state) as u8 / 8);
    let pending = state[aecs::OUTPUT..aecs::OUTPUT + pending_bytes].to_vec();
    let held_bits: usize = state[aecs::INPUT_SIZES..aecs::INPUT_SIZES + 32].iter().map(|&bits| usize::from(bits)).sum();
    let ignored = usize::from((flags & decompression::IGNORE) >> 6);
    let held = state[aecs::INPUT..aecs::INPUT + 256].to_vec();
    let end = (held_bits + 8 * input.len()).saturating_sub(ignored);
    let mut bits = Bits { held: &held, held_bits, source: input, end, at: 0 };
    let start = inflate.history.len();
    let suppress = flags & decompression::SUPPRESS != 0;
    let room = iaa::DESTINATION_SIZE.get(descriptor) as usize;
    let limit = if suppress { usize::MAX } else { room.saturating_sub(pending.len()) };
    let stopped = inflate.run(&mut bits, limit, flags);
    let output = &inflate.history[start..];
    if let Stopped::Error(code) = stopped {
        return Report { bytes: output.len() as u64, ..Report::error(code) };
    }
    if flags & decompression::CHECK != 0 && stopped == Stopped::Input && !inflate.at_end {
        return Report { bytes: output.len() as u64, ..Report::error(error::BAD_END) };
    }
    let crc = crc32(descriptor, aecs::CRC.get(&state) as u32, output);
    let xor = xor(aecs::XOR.get(&state) as u16, output);
    let flush = flags & decompression::FLUSH != 0;
    // Table 6-8, Flush Output: a partial word that would overflow the output is kept. It does not count against this
    // descriptor's room.
    let overflow = stopped == Stopped::Output || (flush && pending.len() > room);
    let mut written = pending;
    if !suppress {
        written.extend_from_slice(output);
    }
    let whole = if flush || overflow { written.len().min(room) } else { written.len() / 8 * 8 };
    let bytes = (output.len() as u64).max(input.len() as u64);
    let rest = written.split_off(whole);
    if let Err(stop) = access.write(iaa::DESTINATION.get(descriptor), &written) {
        return Report::fault(stop, stop.done as u64);
    }
    let writes = operation_flags & iaa::WRITE_SOURCE2;
    let save = writes == iaa::WRITE_AECS || (writes == iaa::WRITE_ON_OVERFLOW && overflow);
    let mut consumed = input.len();
    if save {
        // The next descriptor contains the unconsumed part of source 1 again, from the byte in which that part begins.
        let source_bits = bits.at.saturating_sub(held_bits);
        let whole_bits = held_bits + source_bits.next_multiple_of(8);
        let keep = match stopped {
            Stopped::Output => whole_bits.min(end),
            Stopped::End => bits.at,
            _ => end,
        };
        if keep - bits.at > 2048 {
            return Report { bytes, ..Report::error(error::HEADER_TOO_LARGE) };
        }
        consumed = keep.saturating_sub(held_bits).div_ceil(8).min(input.len());
        store(&mut state, &inflate, &bits, keep);
        aecs::CRC.set(&mut state, u64::from(crc));
        aecs::XOR.set(&mut state, u64::from(xor));
        aecs::OUTPUT_BITS.set(&mut state, 8 * rest.len() as u64);
        state[aecs::OUTPUT..aecs::OUTPUT + rest.len()].copy_from_slice(&rest);
        if let Err(stop) = access.write(write_at, &state[..size]) {
            return Report::fault(stop, whole as u64);
        }
    } else if overflow {
        consumed = bits.at.saturating_sub(held_bits).div_ceil(8);
    }
    Report {
        status: if overflow { status::OUTPUT_OVERFLOW } else { status::SUCCESS },
        completed: if overflow { consumed as u64 } else { 0 },
        output: written.len() as u64,
        xor,
        crc,
        bytes,
        ..Report::default()
    }
}

// Offsets in the part of the AECS that is private to this model.
const LAST: usize = aecs::STATE;
const REST_LENGTH: usize = aecs::STATE + 2;
const REST_DISTANCE: usize = aecs::STATE + 4;
const AT_END: usize = aecs::STATE + 6;
const IN_HUFFMAN: usize = aecs::STATE + 7;
const LITERAL_LENGTHS: usize = aecs::STATE + 8;
const DISTANCE_LENGTHS: usize = LITERAL_LENGTHS + 144;
const HALF: usize = 32;

/// Reads the state that [`store`] has written. `None` if `store` cannot have written it.
fn load(state: &[u8]) -> Option<Inflate> {
    let sizes = &state[aecs::INPUT_SIZES..aecs::INPUT_SIZES + HALF];
    let output_bits = aecs::OUTPUT_BITS.get(state);
    if sizes.iter().any(|&bits| bits > 64) || !output_bits.is_multiple_of(8) || output_bits > 56 {
        return None;
    }
    let pair = |at: usize| u16::from_le_bytes([state[at], state[at + 1]]);
    let length = aecs::HISTORY_POINTER.get(state) as usize;
    let history = state[aecs::HISTORY..].get(..length.min(iaa::WINDOW))?.to_vec();
    let nibbles = |at: usize, count: usize| -> Vec<u8> {
        (0..count).map(|index| state[at + index / 2] >> (4 * (index % 2)) & 0xf).collect()
    };
    let parser = aecs::PARSER.get(state);
    let stored = aecs::STORED.get(state) as u16;
    let block = if parser & 8 != 0 {
        Block::Ended
    } else if parser & 2 != 0 {
        if stored == 0 {
            return None;
        }
        Block::Stored(stored)
    } else if state[IN_HUFFMAN] != 0 {
        let literals = Codes::new(&nibbles(LITERAL_LENGTHS, 288), 0).ok()?;
        Block::Huffman(literals, Codes::new(&nibbles(DISTANCE_LENGTHS, 30), 0).ok()?)
    } else {
        Block::Header
    };
    let rest = (pair(REST_LENGTH), pair(REST_DISTANCE));
    if rest.0 > 258 || (rest.0 > 0 && (rest.1 == 0 || usize::from(rest.1) > history.len())) {
        return None;
    }
    Some(Inflate { block, last: state[LAST] != 0, rest, history, at_end: state[AT_END] != 0 })
}

fn store(state: &mut [u8], inflate: &Inflate, bits: &Bits<'_>, keep: usize) {
    state[aecs::INPUT..aecs::INPUT + 256].fill(0);
    state[aecs::INPUT_SIZES..aecs::INPUT_SIZES + HALF].fill(0);
    for (index, at) in (bits.at..keep).enumerate() {
        state[aecs::INPUT + index / 8] |= (bits.bit(at) as u8) << (index % 8);
        state[aecs::INPUT_SIZES + index / 64] += 1;
    }
    let tail = &inflate.history[inflate.history.len().saturating_sub(iaa::WINDOW)..];
    aecs::HISTORY_POINTER.set(state, tail.len() as u64);
    state[aecs::HISTORY..aecs::HISTORY + tail.len()].copy_from_slice(tail);
    state[LAST] = u8::from(inflate.last);
    state[AT_END] = u8::from(inflate.at_end);
    state[REST_LENGTH..REST_LENGTH + 2].copy_from_slice(&inflate.rest.0.to_le_bytes());
    state[REST_DISTANCE..REST_DISTANCE + 2].copy_from_slice(&inflate.rest.1.to_le_bytes());
    state[IN_HUFFMAN] = 0;
    state[LITERAL_LENGTHS..DISTANCE_LENGTHS + 16].fill(0);
    let last = if inflate.last { 4 } else { 0 };
    let (parser, stored) = match &inflate.block {
        Block::Header => (1 | last, 0),
        Block::Ended => (8 | last, 0),
        Block::Stored(left) => (2 | last, *left),
        Block::Huffman(literals, distances) => {
            state[IN_HUFFMAN] = 1;
            for (at, codes) in [(LITERAL_LENGTHS, literals), (DISTANCE_LENGTHS, distances)] {
                for (index, length) in codes.lengths.iter().enumerate() {
                    state[at + index / 2] |= length << (4 * (index % 2));
                }
            }
            (last, 0)
        }
    };
    aecs::PARSER.set(state, parser);
    aecs::STORED.set(state, u64::from(stored));
}
