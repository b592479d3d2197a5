//! Deflate (RFC 1951) by the CPU: written with a window of 4 KiB, so that an IAA device can read it; read with any
//! window, so that other programs' streams can be read too.
//!
//! The writer is zlib-rs because its window can be set; libdeflate, which is faster, always uses 32 KiB. The reader is
//! libdeflate, so each checks the other.

use libdeflater::{DecompressionError, Decompressor};
use zlib_rs::{DeflateFlush, Status};

use crate::request::Answer;

/// Base-2 logarithm of the window. zlib keeps its matches shorter than that by what it looks ahead: 3834 bytes at most.
const WINDOW_BITS: u8 = 12;

/// Writes deflate streams with a window of 4 KiB, without allocating after its creation.
pub struct Deflater {
    context: zlib_rs::Deflate,
    level: i32,
}

impl std::fmt::Debug for Deflater {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Deflater(level {})", self.level)
    }
}

/// The default level is the fastest. A user who selects this format wants an IAA device, and without one the CPU's work
/// should delay as little as possible; a user who compresses with the CPU by choice has faster formats that are also
/// smaller. On programs and text, level 2 writes 12 to 18 % less than level 1 and takes 1.8 to 2 times as long, level 6
/// 14 to 22 % and 2.5 to 2.8 times (`codec_throughput` in `sterna-codec` prints them all).
impl Default for Deflater {
    fn default() -> Self {
        Self::at(1)
    }
}

impl Deflater {
    /// Makes a writer with a level of zlib's, 1 (fastest) to 9.
    pub fn at(level: i32) -> Self {
        Self { context: zlib_rs::Deflate::new(level, false, WINDOW_BITS), level }
    }

    /// Writes `input` as one stream to the start of `room`. Returns its length; none if it does not fit: then the
    /// content of `room` is undefined.
    pub fn deflate(&mut self, input: &[u8], room: &mut [u8]) -> Option<usize> {
        self.write(input, room, DeflateFlush::Finish)
    }

    /// As [`Self::deflate`], but another stream can follow and continue this one: it ends at a byte boundary, without a
    /// final block.
    pub fn deflate_continued(&mut self, input: &[u8], room: &mut [u8]) -> Option<usize> {
        self.write(input, room, DeflateFlush::SyncFlush)
    }

    fn write(&mut self, input: &[u8], room: &mut [u8], end: DeflateFlush) -> Option<usize> {
        if room.is_empty() {
            return None;
        }
        let mut status = self.context.compress(input, room, end);
        let written = self.context.total_out();
        // A part of a stream that fills `room` to the last byte may lack its end.
        let cut = end != DeflateFlush::Finish && written as usize == room.len();
        // The rest of its output, some 70 KiB at most, must be drained: zlib-rs 0.6.8 keeps over a reset an open block
        // and the position in its buffer (`lm_init`, `Pending::reset_keep`), and a later stream would be wrong, or
        // overrun that buffer. The rest may also be empty: at level 1 zlib-rs takes a buffer that is filled to its last
        // byte for one that is too small.
        let mut discarded = [0; 4096];
        while matches!(status, Ok(Status::Ok)) {
            status = self.context.compress(&[], &mut discarded, DeflateFlush::Finish);
        }
        if !matches!(status, Ok(Status::StreamEnd)) {
            // No state of the failed stream may remain.
            *self = Self::at(self.level);
            return None;
        }
        // The drained output of a continued stream is discarded, so its length does not count.
        let fitted = if end == DeflateFlush::Finish { self.context.total_out() == written } else { !cut };
        self.context.reset();
        fitted.then_some(written as usize)
    }
}

/// Reads deflate streams of any window.
pub(crate) struct Inflater(Decompressor);

impl Default for Inflater {
    fn default() -> Self {
        Self(Decompressor::new())
    }
}

impl Inflater {
    /// Reads the stream at the start of `input` into `output`.
    pub(crate) fn inflate(&mut self, input: &[u8], output: &mut [u8]) -> Answer {
        match self.0.deflate_decompress(input, output) {
            Ok(bytes) => Answer::Written(bytes as u32),
            Err(DecompressionError::BadData) => Answer::Malformed,
            Err(DecompressionError::InsufficientSpace) => Answer::TooLong,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    // It refuses distances beyond its given window.
    use sterna_test_kit::content::noise;
    use sterna_test_kit::inflate::inflate;

    const WINDOW: usize = 4096;

    fn deflated(level: i32, input: &[u8]) -> Vec<u8> {
        let mut stream = vec![0; input.len() * 2 + 16];
        let bytes = Deflater::at(level).deflate(input, &mut stream).expect("there is room");
        stream.truncate(bytes);
        stream
    }

    const STORED: &[u8] = include_bytes!("../tests/streams/zlib-stored.deflate");
    const DYNAMIC: &[u8] = include_bytes!("../tests/streams/zlib-dynamic.deflate");

    /// Streams made by zlib 1.2 with windows of 4 KiB (`zlib.compressobj(level, zlib.DEFLATED, -12)`).
    #[test]
    fn streams_of_zlib_are_read() {
        let text: Vec<u8> =
            (0..300u32).flat_map(|at| format!("line {} of many, {};", at, at * at % 97).into_bytes()).collect();
        let mut inflater = Inflater::default();
        for (stream, level) in [(DYNAMIC, 9), (STORED, 0)] {
            let mut output = vec![0; text.len()];
            assert_eq!(inflater.inflate(stream, &mut output), Answer::Written(text.len() as u32), "level {level}");
            assert_eq!(output, text);
            // One byte less of output, and one byte less of the stream.
            assert_eq!(inflater.inflate(stream, &mut output[1..]), Answer::TooLong);
            // A missing end may appear as an output that is too long.
            let cut = inflater.inflate(&stream[..stream.len() - 1], &mut output);
            assert!(matches!(cut, Answer::Malformed | Answer::TooLong), "level {level}: {cut:?}");
        }
    }

    #[test]
    fn a_zero_page_becomes_short_and_noise_is_too_long() {
        let (mut deflater, mut room) = (Deflater::default(), vec![0; 4096 + 8]);
        assert!(deflater.deflate(&[0; 4096], &mut room).unwrap() < 64);
        // A stream that did not fit does not affect the next.
        assert_eq!(deflater.deflate(&noise(1, 8192), &mut room), None);
        let again = deflater.deflate(&[0; 4096], &mut room).unwrap();
        assert_eq!(inflate(&room[..again], WINDOW).unwrap(), [0; 4096]);
    }

    /// Streams that do not fit, for every possible length, each followed by one that does.
    #[test]
    fn a_stream_that_does_not_fit_is_none_and_the_next_stream_is_whole() {
        let long = noise(1, 300 << 10);
        let content: Vec<u8> = noise(1, 3000).iter().map(|byte| byte & 0x0f).collect();
        for level in 1..=9 {
            let whole = deflated(level, &content);
            let (mut deflater, mut room) = (Deflater::at(level), vec![0; 300 << 10]);
            for less in (0..whole.len()).chain((0..100).map(|turn| turn * 2999)) {
                let too_long = if less < whole.len() { &content } else { &long };
                assert_eq!(deflater.deflate(too_long, &mut room[..less]), None, "level {level}, {less} bytes");
                let written = deflater.deflate(&content, &mut room[..whole.len()]);
                assert_eq!(written, Some(whole.len()), "level {level}, after {less} bytes");
                assert!(room[..whole.len()] == whole, "level {level}, after {less} bytes");
            }
        }
    }

    /// The same noise repeated at various distances: a match only for a longer window.
    #[test]
    fn no_level_reaches_back_further_than_an_iaa_device_can() {
        for (level, apart) in (1..=9).flat_map(|level| [3000, 3834, 3835, 4096, 4097, 9000].map(|apart| (level, apart)))
        {
            let content = noise(1, apart).repeat(4);
            let stream = deflated(level, &content);
            let read = inflate(&stream, WINDOW);
            assert!(read.is_ok_and(|read| read == content), "level {level}, {apart} bytes apart");
            // With a sufficient window the match is found.
            assert_eq!(stream.len() < content.len() / 2, apart <= 3834, "level {level}, {apart} bytes apart");
        }
    }

    /// Parts of one stream, some of which do not fit at first, written by one context.
    #[test]
    fn continued_streams_and_a_last_one_are_one_stream() {
        let contents =
            [vec![0; 70_000], noise(1, 9000), noise(1, 20_000).iter().map(|byte| byte & 7).collect(), vec![1]];
        for level in 1..=9 {
            let mut deflater = Deflater::at(level);
            let (mut stream, mut room) = (Vec::new(), vec![0; 80_000]);
            for content in &contents {
                assert_eq!(deflater.deflate_continued(content, &mut room[..1]), None, "level {level}");
                let whole = deflater.deflate_continued(content, &mut room).unwrap();
                let again = room[..whole].to_vec();
                assert_eq!(deflater.deflate_continued(content, &mut room[..whole - 1]), None, "level {level}");
                assert_eq!(deflater.deflate_continued(content, &mut room), Some(whole), "level {level}");
                assert!(room[..whole] == again, "level {level}");
                stream.extend_from_slice(&again);
            }
            let last = deflater.deflate(b"the end", &mut room).unwrap();
            stream.extend_from_slice(&room[..last]);
            let content = [contents.concat(), b"the end".to_vec()].concat();
            assert!(inflate(&stream, WINDOW).unwrap() == content, "level {level}");
            let mut output = vec![0; content.len()];
            let all = Answer::Written(content.len() as u32);
            assert_eq!(Inflater::default().inflate(&stream, &mut output), all, "level {level}");
        }
    }

    proptest! {
        #[test]
        fn what_was_deflated_is_inflated(
            input in proptest::collection::vec(prop_oneof![Just(0u8), Just(7), any::<u8>()], 0..9000),
            level in 1..=9,
        ) {
            let stream = deflated(level, &input);
            let mut output = vec![0; input.len()];
            prop_assert_eq!(Inflater::default().inflate(&stream, &mut output), Answer::Written(input.len() as u32));
            prop_assert_eq!(&output, &input);
            prop_assert_eq!(inflate(&stream, WINDOW), Ok(input));
        }

        #[test]
        fn no_stream_makes_the_reader_panic_or_say_more_than_there_is_room_for(
            input in proptest::collection::vec(any::<u8>(), 0..300),
            room in 0usize..5000,
        ) {
            let answer = Inflater::default().inflate(&input, &mut vec![0; room]);
            prop_assert!(!matches!(answer, Answer::Written(bytes) if bytes as usize > room));
        }
    }
}
