//! The lengths that gzip members declare, read before anything is decoded.
//!
//! QATzip writes each member with the extra field "QZ" (RFC 1952, 2.3.1.1): plain and compressed length. Hardware
//! decodes by these numbers, so they are compared with the input before the library gets them.

use crate::error::Failure;

/// Gzip header of ten bytes, length of the extra field (12), its identifier and length, plain length, compressed length.
const HEADER: usize = 10 + 2 + 4 + 8;
/// CRC-32 and plain length.
const TRAILER: usize = 8;

/// Returns how many bytes all members together declare to decode to; `None` where one of them does not declare it.
pub(crate) fn declared(mut input: &[u8]) -> Result<Option<u64>, Failure> {
    if input.is_empty() {
        return Err(Failure::BadInput("it is empty"));
    }
    let mut total = 0u64;
    while !input.is_empty() {
        if !input.starts_with(&[0x1f, 0x8b, 8]) {
            return Err(Failure::BadInput("no gzip header where a member should begin"));
        }
        if input.len() < 10 + TRAILER {
            return Err(Failure::BadInput("it ends within a member"));
        }
        if input.len() < HEADER + TRAILER || input[3] != 4 || input[10..16] != [12, 0, b'Q', b'Z', 8, 0] {
            return Ok(None);
        }
        let number = |at: usize| u32::from_le_bytes(input[at..at + 4].try_into().expect("four bytes"));
        let (plain, compressed) = (number(16), number(20));
        let end = HEADER + TRAILER + compressed as usize;
        if end > input.len() {
            return Err(Failure::BadInput("a member says it is longer than what there is"));
        }
        // The trailer contains the same number.
        if number(end - 4) != plain {
            return Err(Failure::BadInput("a member's two lengths differ"));
        }
        total += u64::from(plain);
        input = &input[end..];
    }
    Ok(Some(total))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(plain: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 4, 255, 12, 0, b'Q', b'Z', 8, 0];
        bytes.extend(plain.to_le_bytes());
        bytes.extend(u32::try_from(body.len()).unwrap().to_le_bytes());
        bytes.extend(body);
        bytes.extend([0; 4]);
        bytes.extend(plain.to_le_bytes());
        bytes
    }

    #[test]
    fn members_that_say_their_lengths_are_summed_up() {
        let two = [member(7, &[1, 2, 3]), member(65_536, &[4; 90])].concat();
        assert_eq!(declared(&two), Ok(Some(65_543)));
    }

    #[test]
    fn a_member_without_the_extra_field_leaves_the_sum_open() {
        let plain = [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3][..], &[0; 20]].concat();
        assert_eq!(declared(&plain), Ok(None));
        assert_eq!(declared(&[member(7, &[1, 2]), plain].concat()), Ok(None));
    }

    #[test]
    fn lengths_that_contradict_the_input_are_refused() {
        let good = member(7, &[1, 2, 3]);
        let mut long = good.clone();
        long[20] += 1;
        assert!(declared(&long).is_err());
        let mut huge = good.clone();
        huge[20..24].fill(255);
        assert!(declared(&huge).is_err());
        let mut other = good.clone();
        other[16] += 1;
        assert!(declared(&other).is_err());
        assert!(declared(&good[..good.len() - 1]).is_err());
        assert!(declared(&[good, vec![0]].concat()).is_err());
        assert!(declared(&[]).is_err());
    }
}
