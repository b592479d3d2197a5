//! IAA: compression with the codes of the AECS, decompression of every kind of deflate block, jobs of several descriptors, CRC64.

use std::sync::Arc;

use sterna_idxd_model::memory::{AddressSpace, PageState, TestMemory};
use sterna_idxd_model::{DeviceConfig, Model, ModelConfig, ModelQueue};

use crate::common::Raw;
use sterna_test_kit::inflate::inflate;

const RECORD: u64 = 0x1_0000;
const SOURCE: u64 = 0x10_0000;
const OUTPUT: u64 = 0x20_0000;
const AECS: u64 = 0x30_0000;
const COMPRESS_AECS: u32 = 1568;
const DECOMPRESS_AECS: u32 = 5376;

// Operation flags.
const READ: u32 = 1 << 16;
const WRITE: u32 = 1 << 18;
const WRITE_ON_OVERFLOW: u32 = 2 << 18;
const CRC_32C: u32 = 1 << 21;
const TOGGLE: u32 = 1 << 22;

/// Made by zlib (`wbits` -12): the first 1500 bytes of [`plain`], with a dynamic code.
const DYNAMIC: &str = "\
    7554517683300cfbf7297235e83c58e1c14661dd76fa6596033264fd488313cbb624d0a469d1dbbcbca48f4d374de24f2188\
    75f598a647dbacb73e35f99704fbf7a6d3f4da6ce39acfdffca6050551b1871d4253467c842a046a77f1cc1d2c22a849d5b0\
    5a185bcae5927b654ef3d62cdb16d441112d778708016c05fa8c8c3279ecfac0150e1309bebd0c3163c42fef24dfbc670184\
    607710e2a2c5b9329e2d1d9142346b64b7322556a9b801abe15257ce8da601ec1c2de064a23d21b05067fd7ce83e57e0ca9e\
    24450d0961c7aeccc255d49d0496030b178711a501a822ac90958a31a02dbf107fe53b1203d1608867d4f3181dff0319fe28\
    1eb41a890d39f9b773ab15d02dcc054ebe297ff242fffaba92cfcc973aabec5a8df20c49151c61417ae8d5a2731f4b4636a0\
    9cd9b28cadbc2e57017daacf687fefbc40097746669b94bf3a06de1f8e2e87d2927bece487246f6dbf52b703d91fe13b8d78\
    c62a0ced4df9b8bf";

/// Returns the text from which the stream above was made.
fn plain(bytes: usize) -> Vec<u8> {
    const WORDS: [&[u8]; 8] = [b"page ", b"fault ", b"queue ", b"batch ", b"e ", b"record ", b"aaaa ", b"\n"];
    let (mut state, mut out) = (12345_u64, Vec::new());
    while out.len() < bytes {
        state = (state * 1_103_515_245 + 12345) & 0x7fff_ffff;
        out.extend(WORDS[(state >> 16) as usize % 8]);
        if (state >> 20) % 5 == 0 {
            out.push(97 + ((state >> 8) % 26) as u8);
        }
    }
    out.truncate(bytes);
    out
}

fn dynamic() -> Vec<u8> {
    (0..DYNAMIC.len()).step_by(2).map(|at| u8::from_str_radix(&DYNAMIC[at..at + 2], 16).unwrap()).collect()
}

struct Bench {
    model: Arc<Model>,
    memory: Arc<TestMemory>,
    queue: ModelQueue,
}

#[derive(Debug)]
struct Seen {
    status: u8,
    error: u8,
    completed: u32,
    fault: u64,
    invalid: u32,
    output: u32,
    bits: u8,
    xor: u16,
    crc: u32,
    crc64: u64,
}

impl Bench {
    fn new() -> Bench {
        let memory = Arc::new(TestMemory::new());
        for (at, bytes) in [(RECORD, 0x1000), (SOURCE, 0x4_0000), (OUTPUT, 0x4_0000), (AECS, 0x1_0000)] {
            memory.set(at, bytes, PageState::Present);
        }
        let config = ModelConfig { devices: vec![DeviceConfig::iaa()], ..ModelConfig::default() };
        let model = Model::manual_on(config, memory.clone() as Arc<dyn AddressSpace>).unwrap();
        let queue = model.queues().remove(0);
        Bench { model, memory, queue }
    }

    fn run(&self, raw: Raw) -> Seen {
        self.memory.put(RECORD, &[0; 64]);
        assert!(self.queue.enqcmd(&raw.0));
        self.model.settle();
        let record = self.memory.get(RECORD, 64);
        let word = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(record[at..at + 8].try_into().unwrap());
        Seen {
            status: record[0],
            error: record[1],
            completed: word(4),
            fault: long(8),
            invalid: word(16),
            output: word(24),
            bits: record[28],
            xor: (word(28) >> 16) as u16,
            crc: word(32),
            crc64: long(40),
        }
    }

    fn output(&self, seen: &Seen) -> Vec<u8> {
        self.memory.get(OUTPUT, seen.output as usize)
    }
}

fn compress(bytes: usize, room: u32, flags: u16) -> Raw {
    Raw::new(0x43, RECORD)
        .flags(READ)
        .u64(16, SOURCE)
        .u64(24, OUTPUT)
        .u32(32, bytes as u32)
        .u8(38, flags as u8)
        .u8(39, (flags >> 8) as u8)
        .u64(40, AECS)
        .u32(48, room)
        .u32(52, COMPRESS_AECS)
}

fn decompress(bytes: usize, room: u32, flags: u16) -> Raw {
    Raw::new(0x42, RECORD)
        .u64(16, SOURCE)
        .u64(24, OUTPUT)
        .u32(32, bytes as u32)
        .u8(38, flags as u8)
        .u8(39, (flags >> 8) as u8)
        .u32(48, room)
}

fn with_aecs(raw: Raw, flags: u32) -> Raw {
    raw.flags(flags).u64(40, AECS).u32(52, DECOMPRESS_AECS)
}

/// Enable, flush, stop at and check for the final end of block.
const WHOLE: u16 = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4;

/// The fixed codes and a header for one final block, as software writes them.
fn fixed_aecs() -> Vec<u8> {
    let mut aecs = vec![0; 1568];
    let mut put = |at: usize, value: u32| aecs[at..at + 4].copy_from_slice(&value.to_le_bytes());
    for symbol in 0..286_u32 {
        let (code, length) = match symbol {
            0..144 => (0x30 + symbol, 8),
            144..256 => (0x190 + symbol - 144, 9),
            256..280 => (symbol - 256, 7),
            _ => (0xc0 + symbol - 280, 8),
        };
        put(0x120 + 4 * symbol as usize, code | length << 15);
    }
    for symbol in 0..30_u32 {
        put(0x5a0 + 4 * symbol as usize, symbol | 5 << 15);
    }
    // bFinal 1, type 01: bits 1, 1, 0.
    put(0x1c, 3);
    put(0x20, 3);
    aecs
}

/// Flush, and an end of block.
const ONE_BLOCK: u16 = 1 << 1 | 1 << 2;

fn crc32(bytes: &[u8]) -> u32 {
    let mut value = !0_u32;
    for &byte in bytes {
        value ^= u32::from(byte);
        for _ in 0..8 {
            value = if value & 1 == 1 { value >> 1 ^ 0xedb8_8320 } else { value >> 1 };
        }
    }
    !value
}

#[test]
fn compress_writes_standard_deflate_with_the_codes_of_the_aecs() {
    let bench = Bench::new();
    bench.memory.put(AECS, &fixed_aecs());
    for bytes in [0, 1, 2, 3, 100, 4096, 16384, 65_536] {
        let data = plain(bytes);
        bench.memory.put(SOURCE, &data);
        let seen = bench.run(compress(bytes, 0x2_0000, ONE_BLOCK));
        assert_eq!((seen.status, seen.completed), (1, 0), "{bytes}: {seen:?}");
        assert_eq!(inflate(&bench.output(&seen), 4096).unwrap(), data, "{bytes}");
        assert_eq!(seen.crc, crc32(&data));
        if bytes > 1000 {
            assert!((seen.output as usize) < bytes / 2, "{} of {bytes}", seen.output);
        }
        let literals = bench.run(compress(bytes, 0x2_0000, ONE_BLOCK | 1 << 4));
        assert_eq!(inflate(&bench.output(&literals), 4096).unwrap(), data, "literals only");
        assert!(literals.output >= seen.output);
    }
}

#[test]
fn compress_keeps_to_the_window() {
    let bench = Bench::new();
    bench.memory.put(AECS, &fixed_aecs());
    // A sequence that does not repeat itself, then the same sequence at a distance of exactly a window, and one byte more.
    let noise = |seed: u32| {
        let mut state = seed;
        move |_: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        }
    };
    for (gap, repeats) in [(4096 - 64, true), (4096 - 63, false)] {
        let head: Vec<u8> = (0..64).map(noise(1)).collect();
        let data = [head.clone(), (0..gap).map(noise(2)).collect(), head].concat();
        bench.memory.put(SOURCE, &data);
        let seen = bench.run(compress(data.len(), 0x2_0000, ONE_BLOCK));
        let out = bench.output(&seen);
        assert_eq!(inflate(&out, 4096).unwrap(), data, "never further than 4 KiB");
        assert_eq!(inflate(&out, 4095).is_err(), repeats, "a distance of exactly 4096 is used");
    }
}

#[test]
fn compress_ends_a_stream_in_three_ways() {
    let bench = Bench::new();
    let data = plain(500);
    bench.memory.put(SOURCE, &data);
    let mut aecs = fixed_aecs();
    aecs[0x20] = 2;
    bench.memory.put(AECS, &aecs);
    let seen = bench.run(compress(500, 0x1000, 1 << 1 | 3 << 2));
    let out = bench.output(&seen);
    assert_eq!(inflate(&out, 4096).unwrap(), data, "the stored block is the final one");
    assert_eq!(out[out.len() - 4..], [0, 0, 0xff, 0xff]);
    let seen = bench.run(compress(500, 0x1000, 1 << 1 | 2 << 2));
    let out = bench.output(&seen);
    assert!(inflate(&out, 4096).is_err(), "not final");
    assert_eq!(out[out.len() - 4..], [0, 0, 0xff, 0xff]);
}

#[test]
fn compress_output_that_does_not_fit_is_not_recoverable() {
    let bench = Bench::new();
    bench.memory.put(AECS, &fixed_aecs());
    bench.memory.put(SOURCE, &plain(4096));
    let seen = bench.run(compress(4096, 100, ONE_BLOCK).flags(WRITE));
    assert_eq!((seen.status, seen.error), (0x0a, 0x19));
    assert_eq!(bench.memory.get(AECS + 1568, 64), [0; 64], "the AECS is not written");
    let exact = bench.run(compress(4096, 0x2000, ONE_BLOCK)).output;
    assert_eq!(bench.run(compress(4096, exact, ONE_BLOCK)).status, 1);
    assert_eq!(bench.run(compress(4096, exact - 1, ONE_BLOCK)).status, 0x0a);
}

#[test]
fn a_code_of_length_0_is_an_error() {
    let bench = Bench::new();
    let mut aecs = fixed_aecs();
    aecs[0x120 + 4 * 97..][..4].fill(0);
    bench.memory.put(AECS, &aecs);
    bench.memory.put(SOURCE, b"xyz");
    assert_eq!(bench.run(compress(3, 64, ONE_BLOCK)).status, 1);
    bench.memory.put(SOURCE, b"xya");
    let seen = bench.run(compress(3, 64, ONE_BLOCK));
    assert_eq!((seen.status, seen.error), (0x0a, 0x1e));
}

#[test]
fn a_job_of_several_compress_descriptors_goes_on_in_the_aecs() {
    let bench = Bench::new();
    let data = plain(10_000);
    bench.memory.put(AECS, &fixed_aecs());
    // Only 64 bytes are written back, so the tables have to be in both halves.
    bench.memory.put(AECS + 1568, &fixed_aecs());
    let mut out = Vec::new();
    let mut toggle = 0;
    for (index, part) in data.chunks(3001).enumerate() {
        bench.memory.put(SOURCE, part);
        let last = (index + 1) * 3001 >= data.len();
        let flags = if last { ONE_BLOCK } else { 0 };
        let seen = bench.run(compress(part.len(), 0x2000, flags).flags(WRITE | toggle));
        assert_eq!(seen.status, 1);
        out.extend(bench.output(&seen));
        assert!(last || seen.output.is_multiple_of(8), "whole words until the last");
        assert!(!last || seen.crc == crc32(&data), "the checksum goes on as well");
        toggle ^= TOGGLE;
    }
    assert_eq!(inflate(&out, 4096).unwrap(), data);
}

#[test]
fn statistics_count_the_tokens() {
    let bench = Bench::new();
    bench.memory.put(SOURCE, b"abcabcabcabc");
    let raw = Raw::new(0x43, RECORD).u64(16, SOURCE).u64(24, OUTPUT).u32(32, 12).u8(38, 1 | 1 << 2).u32(48, 0x1000);
    let seen = bench.run(raw);
    assert_eq!((seen.status, seen.output), (1, 1272));
    let out = bench.output(&seen);
    let count = |at: usize| u32::from_le_bytes(out[at..at + 4].try_into().unwrap());
    assert_eq!([97, 98, 99, 256].map(|symbol| count(4 * symbol)), [1, 1, 1, 1]);
    // The rest is one match of length 9 (symbol 263) at distance 3 (symbol 2).
    assert_eq!((count(4 * 263), count(1152 + 4 * 2)), (1, 1));
    assert_eq!((0..318).map(|word| count(4 * word)).sum::<u32>(), 6);
    assert_eq!(bench.run(raw.flags(READ).u64(40, AECS).u32(52, 1568)).status, 0x11, "statistics read no AECS");
}

#[test]
fn decompress_reads_dynamic_fixed_and_stored_blocks() {
    let bench = Bench::new();
    let stream = dynamic();
    bench.memory.put(SOURCE, &stream);
    let seen = bench.run(decompress(stream.len(), 0x1000, WHOLE));
    assert_eq!((seen.status, seen.output, seen.completed, seen.bits), (1, 1500, 0, 0), "{seen:?}");
    let out = bench.output(&seen);
    assert_eq!(out, plain(1500));
    assert_eq!(seen.crc, crc32(&out));
    let words = out.chunks(2).fold(0, |sum, word| sum ^ u16::from_le_bytes([word[0], word[1]]));
    assert_eq!(seen.xor, words);
    let rfc3720 = bench.run(decompress(stream.len(), 0x1000, WHOLE).flags(CRC_32C)).crc;
    assert_eq!(rfc3720, sterna_idxd_model::ops::crc::crc32c(0, &out));

    let stored = [&[1, 5, 0, 0xfa, 0xff][..], b"hello"].concat();
    bench.memory.put(SOURCE, &stored);
    let seen = bench.run(decompress(stored.len(), 0x1000, WHOLE));
    assert_eq!((seen.status, bench.output(&seen)), (1, b"hello".to_vec()));
}

#[test]
fn what_compress_writes_decompress_reads() {
    let bench = Bench::new();
    bench.memory.put(AECS, &fixed_aecs());
    for bytes in [1, 777, 65_536] {
        let data = plain(bytes);
        bench.memory.put(SOURCE, &data);
        let seen = bench.run(compress(bytes, 0x2_0000, ONE_BLOCK));
        let packed = bench.output(&seen);
        bench.memory.put(SOURCE, &packed);
        let back = bench.run(decompress(packed.len(), 0x2_0000, WHOLE));
        assert_eq!((back.status, back.crc), (1, seen.crc));
        assert_eq!(bench.output(&back), data);
        let verify = bench.run(decompress(packed.len(), 0, WHOLE | 1 << 9));
        assert_eq!((verify.status, verify.crc, verify.output), (1, seen.crc, 0), "output suppressed");
    }
}

/// Writes a stream bit by bit.
#[derive(Default)]
struct Bits(Vec<u8>, usize);

impl Bits {
    fn low_first(&mut self, value: u32, bits: u32) -> &mut Bits {
        for bit in 0..bits {
            if self.1.is_multiple_of(8) {
                self.0.push(0);
            }
            *self.0.last_mut().unwrap() |= ((value >> bit & 1) as u8) << (self.1 % 8);
            self.1 += 1;
        }
        self
    }

    fn code(&mut self, value: u32, bits: u32) -> &mut Bits {
        self.low_first(value.reverse_bits() >> (32 - bits), bits)
    }
}

#[test]
fn decompress_rejects_distances_beyond_the_window_or_before_the_start() {
    let bench = Bench::new();
    let run = |literals: usize, distance_symbol: u32, extra: u32, extra_bits: u32| {
        let mut bits = Bits::default();
        bits.low_first(3, 3);
        for _ in 0..literals {
            bits.code(0x30, 8);
        }
        // Length 3, a distance, end of block.
        bits.code(1, 7).code(distance_symbol, 5).low_first(extra, extra_bits).code(0, 7);
        bench.memory.put(SOURCE, &bits.0);
        let seen = bench.run(decompress(bits.0.len(), 0x1_0000, WHOLE));
        (seen.status, seen.error)
    };
    // Symbol 23 reaches 3073 to 4096, symbol 24 begins at 4097.
    assert_eq!(run(5000, 23, 1023, 10), (1, 0));
    assert_eq!(run(5000, 24, 0, 11), (0x0a, 0x11));
    assert_eq!(run(4095, 23, 1023, 10), (0x0a, 0x12));
    assert_eq!(run(4096, 23, 1023, 10), (1, 0));
}

#[test]
fn decompress_names_what_is_wrong_with_a_stream() {
    let bench = Bench::new();
    let run = |bytes: &[u8], flags: u16| {
        bench.memory.put(SOURCE, bytes);
        let seen = bench.run(decompress(bytes.len(), 0x1000, flags));
        (seen.status, seen.error)
    };
    assert_eq!(run(&[7], WHOLE), (0x0a, 0x0d), "block type 3");
    assert_eq!(run(&[1, 5, 0, 0xfb, 0xff, 0, 0, 0, 0, 0], WHOLE), (0x0a, 0x0e), "stored length");
    assert_eq!(run(&[1, 5, 0, 0xfa, 0xff, 1, 2], WHOLE), (0x0a, 0x0f), "cut off");
    assert_eq!(run(&[1, 5, 0, 0xfa, 0xff, 1, 2], 3).0, 1, "the check is not requested");
    // bFinal is checked for and missing.
    assert_eq!(run(&[0, 1, 0, 0xfe, 0xff, 9], WHOLE), (0x0a, 0x0f));
    assert_eq!(run(&[0, 1, 0, 0xfe, 0xff, 9], WHOLE & !(1 << 4)), (1, 0));
    // 287 literal codes.
    let mut many = Bits::default();
    many.low_first(5, 3).low_first(30, 5).low_first(0, 5).low_first(0, 4).low_first(0, 12);
    assert_eq!(run(&many.0, WHOLE), (0x0a, 0x23));
    // Four code length codes of one bit each.
    let mut lengths = Bits::default();
    lengths.low_first(5, 3).low_first(0, 5).low_first(0, 5).low_first(0, 4);
    lengths.low_first(1, 3).low_first(1, 3).low_first(1, 3).low_first(1, 3);
    assert_eq!(run(&lengths.0, WHOLE), (0x0a, 0x08));
    // A literal that the fixed code does not have: 286.
    let mut literal = Bits::default();
    literal.low_first(3, 3).code(0xc6, 8).low_first(0, 32);
    assert_eq!(run(&literal.0, WHOLE), (0x0a, 0x10));
    let seen = bench.run(decompress(0, 0x1000, WHOLE));
    assert_eq!((seen.status, seen.error), (0x0a, 0x0f), "nothing at all");
}

#[test]
fn an_overflowing_output_is_continued_through_the_aecs() {
    let bench = Bench::new();
    let stream = dynamic();
    for room in [1, 7, 100, 333, 1499] {
        bench.memory.put(AECS, &vec![0; 2 * DECOMPRESS_AECS as usize]);
        let (mut out, mut at, mut flags) = (Vec::new(), 0, WRITE_ON_OVERFLOW);
        loop {
            bench.memory.put(SOURCE, &stream[at..]);
            let seen = bench.run(with_aecs(decompress(stream.len() - at, room, WHOLE), flags));
            out.extend(bench.output(&seen));
            if seen.status == 1 {
                break;
            }
            assert_eq!((seen.status, seen.output), (0x0b, room), "{seen:?}");
            at += seen.completed as usize;
            // Each descriptor reads the state that the one before wrote.
            flags = WRITE_ON_OVERFLOW | READ | if flags & READ == 0 || flags & TOGGLE == 0 { TOGGLE } else { 0 };
        }
        assert_eq!(out, plain(1500), "{room} bytes at a time");
    }
}

#[test]
fn a_stream_in_several_buffers_is_one_job() {
    let bench = Bench::new();
    let stream = dynamic();
    for size in [1, 5, 100, 300] {
        bench.memory.put(AECS, &vec![0; 2 * DECOMPRESS_AECS as usize]);
        let mut out = Vec::new();
        let mut flags = WRITE;
        let parts: Vec<&[u8]> = stream.chunks(size).collect();
        for (index, part) in parts.iter().enumerate() {
            let last = index + 1 == parts.len();
            bench.memory.put(SOURCE, part);
            let how = if last { WHOLE } else { 1 };
            let seen = bench.run(with_aecs(decompress(part.len(), 0x1000, how), flags));
            assert_eq!(seen.status, 1, "part {index} of {}: {seen:?}", parts.len());
            out.extend(bench.output(&seen));
            flags = READ | WRITE | if flags & READ == 0 || flags & TOGGLE == 0 { TOGGLE } else { 0 };
            assert!(last || seen.output.is_multiple_of(8), "a partial word is kept back");
            assert!(!last || seen.crc == crc32(&plain(1500)));
        }
        assert_eq!(out, plain(1500), "{size} bytes at a time");
    }
}

#[test]
fn a_partial_word_from_before_is_written_only_as_far_as_there_is_room() {
    let bench = Bench::new();
    let stream = dynamic();
    bench.memory.put(SOURCE, &stream);
    // Everything but the last 4 of 1500 bytes goes out, then 3 of these.
    let seen = bench.run(with_aecs(decompress(stream.len(), 0x1000, WHOLE & !2), WRITE));
    assert_eq!((seen.status, seen.output), (1, 1496), "{seen:?}");
    bench.memory.put(OUTPUT, &[0xee; 16]);
    let seen = bench.run(with_aecs(decompress(0, 3, WHOLE), READ | WRITE | TOGGLE));
    assert_eq!((seen.status, seen.output), (0x0b, 3), "{seen:?}");
    assert_eq!(bench.memory.get(OUTPUT, 4), [&plain(1500)[1496..1499], &[0xee]].concat(), "not beyond the room");
    let seen = bench.run(with_aecs(decompress(0, 8, WHOLE), READ));
    assert_eq!((seen.status, bench.output(&seen)), (1, plain(1500)[1499..].to_vec()));
}

#[test]
fn faults_are_not_partly_done() {
    let bench = Bench::new();
    bench.memory.put(AECS, &fixed_aecs());
    bench.memory.set(SOURCE + 0x3000, 1, PageState::Forbidden);
    let seen = bench.run(compress(0x4000, 0x8000, ONE_BLOCK));
    assert_eq!((seen.status, seen.completed, seen.fault), (0x03, 0, SOURCE + 0x3000));
    assert_eq!(bench.run(compress(0x4000, 0x8000, ONE_BLOCK).flags(2)).status, 0x04);
    bench.memory.set(SOURCE + 0x3000, 1, PageState::Absent);
    assert_eq!(bench.run(compress(0x4000, 0x8000, ONE_BLOCK).flags(2)).status, 1, "mapped by a page request");
    bench.memory.set(OUTPUT, 1, PageState::ReadOnly);
    assert_eq!(bench.run(compress(0x4000, 0x8000, ONE_BLOCK)).status, 0x83);
    bench.memory.set(AECS, 1, PageState::Forbidden);
    assert_eq!(bench.run(compress(0x1000, 0x8000, ONE_BLOCK)).status, 0x03);
}

#[test]
fn state_at_the_end_of_the_address_space_faults() {
    let bench = Bench::new();
    for toggle in [0, TOGGLE] {
        let raw = compress(100, 1000, 2).flags(READ | toggle).u64(40, !31).u32(52, COMPRESS_AECS);
        assert_eq!(bench.run(raw).status, 3);
    }
}

#[test]
fn crc64_is_any_crc() {
    // Table 3-7, with the check values of the catalogue of CRCs for "123456789".
    let bench = Bench::new();
    bench.memory.put(SOURCE, b"123456789");
    let run = |polynomial: u64, reversed: bool, invert: bool| {
        let flags = u8::from(reversed) << 7 | u8::from(invert) << 6;
        let raw = Raw::new(0x44, RECORD).u64(16, SOURCE).u32(32, 9).u8(39, flags).u64(56, polynomial);
        let seen = bench.run(raw);
        assert_eq!(seen.status, 1);
        seen.crc64
    };
    assert_eq!(run(0x04c1_1db7_0000_0000, true, true), 0xcbf4_3926, "CRC32 (gzip)");
    assert_eq!(run(0x04c1_1db7_0000_0000, false, true), 0xfc89_1918_0000_0000, "CRC32 (wimax)");
    assert_eq!(run(0x1edc_6f41_0000_0000, true, true), 0xe306_9283, "CRC32 (iSCSI)");
    assert_eq!(run(0x8bb7_0000_0000_0000, false, false), 0xd0db_0000_0000_0000, "T10DIF");
    assert_eq!(run(0x1021_0000_0000_0000, true, true), 0x906e, "CRC-16-CCITT");
    assert_eq!(run(0x42f0_e1eb_a9ea_3693, false, false), 0x6c40_df5f_0b49_7347, "CRC-64/ECMA-182");
}

#[test]
fn descriptors_are_checked() {
    let bench = Bench::new();
    bench.memory.put(AECS, &fixed_aecs());
    let good = || compress(64, 0x1000, ONE_BLOCK);
    assert_eq!(bench.run(good()).status, 1);
    for (raw, status, what) in [
        (Raw::new(0x00, RECORD), 0x01, "no-op"),
        (Raw::new(0x02, RECORD), 0x01, "drain"),
        (Raw::new(0x01, RECORD), 0x10, "there are no batches"),
        (Raw::new(0x03, RECORD), 0x10, "nor a memory move"),
        (Raw::new(0x50, RECORD), 0x10, "scan is not modelled"),
        (good().flags(1), 0x11, "fence"),
        (good().flags(1 << 7), 0x11, "check result"),
        (good().flags(1 << 15), 0x11, "reserved"),
        (good().flags(1 << 23), 0x11, "reserved"),
        (good().without(8), 0x11, "a record is required"),
        (good().without(READ), 0x11, "compress needs its AECS"),
        (good().flags(WRITE_ON_OVERFLOW), 0x11, "only for decompress"),
        (good().flags(2 << 16), 0x11, "read source 2 = 3"),
        (good().u8(60, 1), 0x12, "reserved bytes"),
        (good().u8(36, 1), 0x12, "interrupt handle"),
        (good().u8(39, 2), 0x30, "reserved compression flag"),
        (good().u8(56, 1), 0x31, "compression 2 flags"),
        (decompress(64, 64, 0), 0x30, "decompression has to be enabled"),
        (decompress(64, 64, WHOLE).u64(40, AECS), 0x12, "source 2 without its flags"),
        (decompress(64, 64, WHOLE).flags(TOGGLE), 0x11, "toggle without AECS"),
        (decompress(0, 0, WHOLE), 0x13, "no sizes"),
        (good().u32(32, (2 << 20) + 1), 0x13, "larger than the queue permits"),
        (good().u64(40, AECS + 8), 0x1c, "the AECS is aligned to 32"),
        (good().u32(52, 1536), 0x13, "the AECS of compress has one size"),
        (good().u64(24, SOURCE + 32), 0x16, "overlap"),
        (good().u64(24, AECS + 1568 * 2 - 8), 0x16, "overlap with the AECS's second half"),
        (Raw::new(0x44, RECORD).u64(16, SOURCE), 0x13, "CRC64 of nothing"),
        (Raw::new(0x44, RECORD).u64(16, SOURCE).u32(32, 8).u8(24, 1), 0x12, "CRC64 has no destination"),
    ] {
        assert_eq!(bench.run(raw).status, status, "{what}");
    }
    assert_eq!(bench.run(good().flags(1)).invalid, 1, "the record names the flag");
    assert!(bench.queue.enqcmd(&Raw::new(0, RECORD + 32).0));
    bench.model.settle();
    assert_eq!(bench.model.take_software_error("iax1").unwrap().code, 0x1b, "records are aligned to 64");
    assert_eq!(bench.queue.write(&Raw::new(0, RECORD + 32).0), Err(libc::EINVAL));
}
