//! Samples a batch to determine its class: the better of LZ4's and an entropy coder's ratio for a small part of it.
//!
//! LZ4 finds repetitions within a few hundred bytes. Pieces of text have hardly any, random letters none; but some
//! bytes are more frequent than others, which an entropy coder uses, and their entropy measures it.

use crate::select::Class;
use crate::{CodecError, Encoded, Encoder, Engines, MethodChoice};

/// Bytes of a sample, and its number of pieces, spread over the batch: one page is not representative of its
/// neighbours.
const SAMPLE: usize = 4096;
const PIECES: usize = 8;

/// Takes samples, reusing its memory.
pub struct Sampler {
    encoder: Box<dyn Encoder>,
    sample: [u8; SAMPLE],
    encoded: [u8; SAMPLE],
}

impl Sampler {
    /// Makes a sampler. Fails only for lack of memory.
    ///
    /// # Errors
    /// [`CodecError::Library`].
    pub fn new() -> Result<Self, CodecError> {
        let lz4 = "lz4".parse::<MethodChoice>().ok().and_then(MethodChoice::by_cpu).expect("there is LZ4");
        Ok(Self { encoder: lz4.non_adaptive_encoder(&Engines::default())?, sample: [0; SAMPLE], encoded: [0; SAMPLE] })
    }

    /// Returns the class of `content`; none if it is too small to sample.
    ///
    /// # Errors
    /// [`CodecError::Library`].
    pub fn class(&mut self, content: &[u8]) -> Result<Option<Class>, CodecError> {
        if content.len() < SAMPLE {
            return Ok(None);
        }
        for (number, piece) in self.sample.chunks_exact_mut(SAMPLE / PIECES).enumerate() {
            let at = content.len() / PIECES * number;
            piece.copy_from_slice(&content[at..at + SAMPLE / PIECES]);
        }
        let repeats = match self.encoder.encode(&self.sample, &mut self.encoded)? {
            Encoded::Shrunk(length) => length,
            Encoded::Incompressible => SAMPLE,
        };
        let coded = entropy(&self.sample) / 8.0 * SAMPLE as f64;
        Ok(Some(Class::of(SAMPLE, repeats.min(coded as usize))))
    }
}

/// Returns the bits of information per byte of `sample`, by the frequencies of bytes (Shannon, of order 0).
fn entropy(sample: &[u8]) -> f64 {
    let mut counts = [0u32; 256];
    sample.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    let all = sample.len().max(1) as f64;
    let bits = |count: u32| f64::from(count) * (all / f64::from(count)).log2();
    counts.into_iter().filter(|count| *count > 0).map(bits).sum::<f64>() / all
}

impl std::fmt::Debug for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sampler({SAMPLE} bytes in {PIECES} pieces)")
    }
}

#[cfg(test)]
mod tests {
    use sterna_test_kit::content::noise;

    use super::*;

    #[test]
    fn pieces_are_from_all_over_a_batch_and_what_is_too_small_has_no_class() {
        let mut sampler = Sampler::new().unwrap();
        let noise = noise(1, 64 << 10);
        let [text, mut half] = [vec![b'x'; 64 << 10], noise.clone()];
        half[..32 << 10].fill(b'x');
        let mut class = |content: &[u8]| sampler.class(content).unwrap();
        assert_eq!(class(&noise), Some(Class::of(100, 100)));
        assert_eq!(class(&text), Some(Class::of(100, 1)));
        assert_eq!(class(&half), Some(Class::of(100, 52)));
        assert_eq!(class(&text[..SAMPLE]), Some(Class::of(100, 1)));
        assert_eq!(class(&text[..SAMPLE - 1]), None);
        // LZ4 cannot compress random letters, but half of their bits are the same in all of them.
        let letters: Vec<u8> = noise.iter().map(|byte| b'a' + byte % 16).collect();
        assert_eq!(class(&letters), Some(Class::of(100, 49)));
    }

    #[test]
    fn entropy_is_of_what_is_there() {
        assert_eq!(entropy(&[]), 0.0);
        assert_eq!(entropy(&[7; 100]), 0.0);
        assert!((entropy(&[0, 1, 2, 3]) - 2.0).abs() < 1e-9);
    }
}
