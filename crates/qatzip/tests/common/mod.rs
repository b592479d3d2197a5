//! What the tests of the crate share.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]

mod place;

use std::io::{Read, Write};
use std::sync::Arc;

use sterna_qatzip::{Choice, Library, OpenError, Params, Software};

/// The library, or `None` with a line that says why the test was skipped. Where a library is named, not having it is a failure.
pub fn library() -> Option<Arc<Library>> {
    let choice = place::place().map_or(Choice::System, Choice::Path);
    match Library::open(&choice) {
        Ok(library) => Some(library),
        Err(error @ OpenError::NotFound { .. }) if choice == Choice::System => {
            place::may_skip(&error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Parameters that the library's software may serve.
pub fn software(largest_job: usize) -> Params {
    Params { software: Software::Always, largest_job, ..Params::default() }
}

/// Bytes that shrink about as machine code does: runs, repeats and noise.
pub fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes: Vec<u8> = Vec::with_capacity(len + 64);
    while bytes.len() < len {
        let run = (next() % 48 + 4) as usize;
        match next() % 4 {
            0 => bytes.extend(std::iter::repeat_n((next() % 8) as u8, run)),
            1 if bytes.len() > 4096 => {
                let from = bytes.len() - 1 - (next() % 4000) as usize - 52;
                bytes.extend_from_within(from..from + run);
            }
            2 => bytes.extend((0..run).map(|_| (next() % 12) as u8 + b'a')),
            _ => bytes.extend((0..run).map(|_| (next() >> 32) as u8)),
        }
    }
    bytes.truncate(len);
    bytes
}

/// Bytes that do not shrink.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Another implementation's reading of gzip members.
pub fn read_gzip(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    flate2::read::MultiGzDecoder::new(bytes).read_to_end(&mut plain).expect("gzip members");
    plain
}

/// Another implementation's member.
pub fn write_gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(6));
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}
