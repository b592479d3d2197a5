//! CRC generation, with and without a copy (8.3.12, 8.3.13, appendix A).

use super::access::Access;
use super::{CHUNK, Report, Scratch};
use crate::table::dsa::{self, record};

/// CRC-32C, bit reflected.
const REFLECTED: u32 = 0x82f6_3b78;
/// CRC-32C, in the appendix's form.
const POLYNOMIAL: u32 = 0x1edc_6f41;

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut value = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ REFLECTED } else { value >> 1 };
            bit += 1;
        }
        tables[0][byte] = value;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before: u32 = tables[table - 1][byte];
            tables[table][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

static TABLES: [[u32; 256]; 8] = tables();

/// Continues a CRC-32C whose result so far is `seed`; the first one has 0.
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    let mut value = !seed;
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let low = u32::from_le_bytes([word[0], word[1], word[2], word[3]]) ^ value;
        value = TABLES[7][(low & 0xff) as usize]
            ^ TABLES[6][(low >> 8 & 0xff) as usize]
            ^ TABLES[5][(low >> 16 & 0xff) as usize]
            ^ TABLES[4][(low >> 24) as usize]
            ^ TABLES[3][usize::from(word[4])]
            ^ TABLES[2][usize::from(word[5])]
            ^ TABLES[1][usize::from(word[6])]
            ^ TABLES[0][usize::from(word[7])];
    }
    for &byte in words.remainder() {
        value = value >> 8 ^ TABLES[0][((value ^ u32::from(byte)) & 0xff) as usize];
    }
    !value
}

/// Computes bit by bit, for the bypass flags: `inverted` is the normal treatment of seed and result, `reflected` that
/// of data.
fn general(seed: u32, bytes: &[u8], inverted: bool, reflected: bool) -> u32 {
    let mut register = if inverted { (!seed).reverse_bits() } else { seed };
    for &byte in bytes {
        let byte = if reflected { byte.reverse_bits() } else { byte };
        register ^= u32::from(byte) << 24;
        for _ in 0..8 {
            register = if register >> 31 == 1 { register << 1 ^ POLYNOMIAL } else { register << 1 };
        }
    }
    if inverted { !register.reverse_bits() } else { register }
}

/// Both operations.
pub(super) fn generate(descriptor: &[u8; 64], copy: bool, access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    let flags = dsa::FLAGS.get(descriptor) as u32;
    let (source, size) = (dsa::SOURCE.get(descriptor), dsa::SIZE.get(descriptor));
    let destination = dsa::DESTINATION.get(descriptor);
    let mut crc = dsa::CRC_SEED.get(descriptor) as u32;
    if flags & dsa::READ_SEED != 0 {
        let mut seed = [0; 4];
        if let Err(stop) = access.read(dsa::CRC_SEED_ADDRESS.get(descriptor), &mut seed) {
            return Report::fault(stop, 2, 0);
        }
        crc = u32::from_le_bytes(seed);
    }
    let (inverted, reflected) = (flags & dsa::BYPASS_INVERSION == 0, flags & dsa::BYPASS_REFLECTION == 0);
    let mut done = 0;
    while done < size {
        let part = CHUNK.min((size - done) as usize);
        let buffer = &mut scratch.first[..part];
        let read = access.read(source.wrapping_add(done), buffer);
        let valid = read.as_ref().map_or_else(|stop| stop.done, |()| part);
        let written = if copy { access.write(destination.wrapping_add(done), &buffer[..valid]) } else { Ok(()) };
        let counted = written.as_ref().map_or_else(|stop| stop.done, |()| valid);
        crc = if inverted && reflected {
            crc32c(crc, &buffer[..counted])
        } else {
            general(crc, &buffer[..counted], inverted, reflected)
        };
        done += counted as u64;
        let stopped = written.err().map(|stop| (stop, 3)).or(read.err().map(|stop| (stop, 1)));
        if let Some((stop, operand)) = stopped {
            let detail = Some((record::CRC, u64::from(crc)));
            return Report { detail, bytes: done, ..Report::fault(stop, operand, done) };
        }
    }
    Report { detail: Some((record::CRC, u64::from(crc))), bytes: size, ..Report::ok() }
}
