//! The content of a delta packet: the changes of each of its pages, in the table's order.
//!
//! ```text
//!  0  record length u16, at most MAX_RECORD    4  CRC-32C of the page that results, u32
//!  2  reserved u16                             8  record
//! ```
//! A record is the output of Intel DSA's Create Delta Record (Intel DSA architecture specification, 8.3.8): ten bytes
//! for each word of eight that differs, its offset divided by 8 as a u16, then the word. It applies to the content of
//! the page that the receiver has acknowledged last.

use crate::packet::PacketError;

/// Bytes before each record.
pub const DELTA_HEADER_LENGTH: usize = 8;
/// The most bytes of a record. A longer one would cost more than half of a page: the whole page is sent instead.
pub const MAX_RECORD: usize = 2040;

/// The changes of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageDelta<'a> {
    /// CRC-32C of the resulting page.
    pub checksum: u32,
    /// The record.
    pub record: &'a [u8],
}

impl PageDelta<'_> {
    /// Returns the header of the record.
    pub fn header(&self) -> [u8; DELTA_HEADER_LENGTH] {
        debug_assert!(self.record.len() <= MAX_RECORD);
        let mut bytes = [0; DELTA_HEADER_LENGTH];
        bytes[0..2].copy_from_slice(&(self.record.len() as u16).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }
}

/// The deltas of a packet's content, in order. Malformed content yields one error; the iterator then ends.
#[derive(Clone, Debug)]
pub struct PageDeltas<'a> {
    rest: &'a [u8],
    pages: u64,
}

impl<'a> PageDeltas<'a> {
    /// Reads the content of a packet whose table lists this many pages.
    pub fn new(content: &'a [u8], pages: u64) -> Self {
        Self { rest: content, pages }
    }

    fn split(&self) -> Option<(PageDelta<'a>, &'a [u8])> {
        let (header, rest) = self.rest.split_first_chunk::<DELTA_HEADER_LENGTH>()?;
        let length = usize::from(u16::from_le_bytes([header[0], header[1]]));
        let (record, rest) = rest.split_at_checked(length)?;
        let checksum = u32::from_le_bytes(header[4..8].try_into().expect("four bytes"));
        (length <= MAX_RECORD).then_some((PageDelta { checksum, record }, rest))
    }
}

impl<'a> Iterator for PageDeltas<'a> {
    type Item = Result<PageDelta<'a>, PacketError>;

    fn next(&mut self) -> Option<Self::Item> {
        let wrong = match (self.pages, self.rest) {
            (0, []) => return None,
            (0, _) => "deltas of more pages than its table lists",
            _ => match self.split() {
                Some((delta, rest)) => {
                    self.rest = rest;
                    self.pages -= 1;
                    return Some(Ok(delta));
                }
                None => "a delta that is cut short or too long",
            },
        };
        (self.pages, self.rest) = (0, &[]);
        Some(Err(PacketError::Table(wrong)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn deltas_read_back_and_what_is_cut_or_too_much_is_an_error(
            deltas in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u8>(), 0..60)), 1..20),
            cut in 1usize..8,
        ) {
            let mut content = Vec::new();
            for (checksum, record) in &deltas {
                content.extend(PageDelta { checksum: *checksum, record }.header());
                content.extend(record);
            }
            let pages = deltas.len() as u64;
            let read: Result<Vec<_>, _> = PageDeltas::new(&content, pages).collect();
            let read: Vec<_> = read.unwrap().iter().map(|delta| (delta.checksum, delta.record.to_vec())).collect();
            prop_assert_eq!(&read, &deltas);
            let fails = |content: &[u8], pages| {
                let items: Vec<_> = PageDeltas::new(content, pages).collect();
                items.iter().filter(|item| item.is_err()).count() == 1 && items.last().is_some_and(Result::is_err)
            };
            prop_assert!(fails(&content[..content.len() - cut], pages));
            prop_assert!(fails(&content, pages - 1) && fails(&content, pages + 1));
        }

        #[test]
        fn any_content_ends(content: Vec<u8>, pages in 0u64..1000) {
            prop_assert!(PageDeltas::new(&content, pages).count() as u64 <= pages + 1);
        }
    }

    #[test]
    fn a_record_is_no_longer_than_it_may_be() {
        let mut content = vec![0; DELTA_HEADER_LENGTH + MAX_RECORD + 10];
        content[..2].copy_from_slice(&(MAX_RECORD as u16 + 10).to_le_bytes());
        assert!(PageDeltas::new(&content, 1).next().unwrap().is_err());
    }
}
