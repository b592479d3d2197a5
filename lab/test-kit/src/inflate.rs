//! An inflate of its own, bit by bit after RFC 1951, to hold deflate streams against.

/// Returns the content of a whole stream. No distance may be larger than `window`.
///
/// # Errors
/// What is wrong with the stream.
pub fn inflate(stream: &[u8], window: usize) -> Result<Vec<u8>, &'static str> {
    let mut bits = Bits { stream, at: 0 };
    let mut out = Vec::new();
    loop {
        let last = bits.take(1)?;
        match bits.take(2)? {
            0 => {
                bits.at = bits.at.next_multiple_of(8);
                let (length, inverse) = (bits.take(16)?, bits.take(16)?);
                if length ^ inverse != 0xffff {
                    return Err("stored length");
                }
                for _ in 0..length {
                    out.push(bits.take(8)? as u8);
                }
            }
            1 => {
                let literals: Vec<u8> = [vec![8; 144], vec![9; 112], vec![7; 24], vec![8; 8]].concat();
                block(&mut bits, &literals, &[5; 30], window, &mut out)?;
            }
            2 => {
                let (literals, distances) = lengths(&mut bits)?;
                block(&mut bits, &literals, &distances, window, &mut out)?;
            }
            _ => return Err("block type"),
        }
        if last == 1 {
            return Ok(out);
        }
    }
}

struct Bits<'a> {
    stream: &'a [u8],
    at: usize,
}

impl Bits<'_> {
    fn take(&mut self, count: usize) -> Result<usize, &'static str> {
        let mut value = 0;
        for bit in 0..count {
            let byte = self.stream.get(self.at / 8).ok_or("cut off")?;
            value |= usize::from(byte >> (self.at % 8) & 1) << bit;
            self.at += 1;
        }
        Ok(value)
    }

    /// By counting codes of each length.
    fn symbol(&mut self, lengths: &[u8]) -> Result<usize, &'static str> {
        let (mut code, mut first) = (0, 0);
        for length in 1..=15 {
            code = code << 1 | self.take(1)?;
            let of_length = || lengths.iter().enumerate().filter(|&(_, &other)| other == length);
            if code < first + of_length().count() {
                return Ok(of_length().nth(code - first).expect("it was counted").0);
            }
            first = (first + of_length().count()) << 1;
        }
        Err("no such code")
    }
}

fn lengths(bits: &mut Bits<'_>) -> Result<(Vec<u8>, Vec<u8>), &'static str> {
    let (literals, distances, codes) = (bits.take(5)? + 257, bits.take(5)? + 1, bits.take(4)? + 4);
    let mut code = [0; 19];
    for place in [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15].into_iter().take(codes) {
        code[place] = bits.take(3)? as u8;
    }
    let mut all = Vec::new();
    while all.len() < literals + distances {
        match bits.symbol(&code)? {
            16 => {
                let last = *all.last().ok_or("nothing to repeat")?;
                let count = 3 + bits.take(2)?;
                all.extend(vec![last; count]);
            }
            17 => all.extend(vec![0; 3 + bits.take(3)?]),
            18 => all.extend(vec![0; 11 + bits.take(7)?]),
            length => all.push(length as u8),
        }
    }
    let rest = all.split_off(literals);
    Ok((all, rest))
}

fn block(
    bits: &mut Bits<'_>,
    literals: &[u8],
    distances: &[u8],
    window: usize,
    out: &mut Vec<u8>,
) -> Result<(), &'static str> {
    loop {
        let symbol = bits.symbol(literals)?;
        if symbol < 256 {
            out.push(symbol as u8);
            continue;
        }
        if symbol == 256 {
            return Ok(());
        }
        // Groups of four lengths per extra bit; 285 stands alone.
        let index = symbol - 257;
        let length = match index {
            0..8 => index + 3,
            28 => 258,
            _ => {
                let extra = index / 4 - 1;
                3 + ((4 + index % 4) << extra) + bits.take(extra)?
            }
        };
        let index = bits.symbol(distances)?;
        let extra = (index / 2).saturating_sub(1);
        let distance = if index < 2 { index + 1 } else { 1 + ((2 + index % 2) << extra) + bits.take(extra)? };
        if distance > window || distance > out.len() {
            return Err("distance");
        }
        for _ in 0..length {
            out.push(out[out.len() - distance]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::inflate;
    use crate::content::code_like;

    #[test]
    fn it_reads_what_another_implementation_wrote_and_refuses_what_is_cut_off_or_too_far() {
        let plain = code_like(5, 40_000);
        for level in [0, 1, 9] {
            let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::new(level));
            encoder.write_all(&plain).unwrap();
            let stream = encoder.finish().unwrap();
            assert_eq!(inflate(&stream, 1 << 15).unwrap(), plain);
            assert!(inflate(&stream[..stream.len() - 1], 1 << 15).is_err());
            assert_eq!(inflate(&stream, 64).is_ok(), level == 0, "level {level}");
        }
    }
}
