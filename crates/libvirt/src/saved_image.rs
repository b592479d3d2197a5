//! The header of a saved image of libvirt's QEMU driver (`virsh save`), which is followed by QEMU's migration stream.
//!
//! ```text
//! offset  bytes
//!      0     16   LibvirtQemudSave; LibvirtQemudPart while the image is incomplete
//!     16      4   version of the format: 2
//!     20      4   bytes from the end of the header to the stream: the description, its zero byte, and what follows it
//!     24      4   1 if the guest ran when it was saved
//!     28      4   how the stream is compressed: 0 for not at all
//!     32      4   offset, from the end of the header, of libvirt's cookie; 0 if there is none
//!     36     56   zeros
//!     92          the domain's description (XML), a zero byte, then the cookie
//! ```
//! Numbers have the byte order of the host that wrote them; libvirt accepts both orders. Sources: libvirt's `src/qemu/qemu_saveimage.h` and
//! `qemu_saveimage.c` (in `qemu_driver.c` before 6.9). Version 2 is the oldest that the releases in question read, and the one that they write
//! unless the image is sparse, which libvirt 11.2 has introduced with version 3.

use std::io::{self, Read};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 92;
/// Maximum bytes of a description, with its zero byte. Descriptions of large domains have some hundred kilobytes; libvirt's own limit of a
/// text that it passes between hosts is 32 MiB.
pub const MAX_XML_BYTES: usize = 32 << 20;

const MAGIC: &[u8; 16] = b"LibvirtQemudSave";
const INCOMPLETE: &[u8; 16] = b"LibvirtQemudPart";
const VERSION: u32 = 2;

/// What precedes the stream in a saved image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedImage {
    /// The domain's description.
    pub xml: String,
    /// Whether the guest ran when it was saved. libvirt starts it after a restore unless it was asked to leave it paused.
    pub was_running: bool,
}

/// Why bytes are no header of a saved image that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SavedImageError {
    /// The description cannot be written.
    #[error("a domain's description cannot have {0}")]
    Unwritable(&'static str),
    /// The bytes begin otherwise.
    #[error("this is no saved image of libvirt")]
    NotAnImage,
    /// libvirt has not finished the image.
    #[error("this saved image is incomplete: libvirt was interrupted while it wrote it")]
    Incomplete,
    /// The format is another one.
    #[error("this saved image has {what} {value}, which is not supported")]
    Unsupported {
        /// What is unsupported.
        what: &'static str,
        /// Its value.
        value: u32,
    },
    /// The lengths contradict each other, or the description is no text.
    #[error("the header of this saved image is damaged: {0}")]
    Damaged(&'static str),
    /// The bytes cannot be read.
    #[error("the saved image cannot be read: {0}")]
    Io(#[from] io::Error),
}

impl SavedImage {
    /// Returns the bytes that precede QEMU's stream, which is not compressed. There is no cookie: it is libvirt's own note about the CPU and
    /// the disks' slirp helpers, and an image without it is restored by the description alone.
    ///
    /// # Errors
    /// The description is empty, too long, or has a zero byte in it.
    pub fn encode(&self) -> Result<Vec<u8>, SavedImageError> {
        let Self { xml, was_running } = self;
        if xml.is_empty() {
            return Err(SavedImageError::Unwritable("no bytes"));
        }
        if xml.bytes().any(|byte| byte == 0) {
            return Err(SavedImageError::Unwritable("a zero byte in it"));
        }
        if xml.len() >= MAX_XML_BYTES {
            return Err(SavedImageError::Unwritable("more than 32 MiB"));
        }
        let mut bytes = Vec::with_capacity(HEADER_BYTES + xml.len() + 1);
        bytes.extend(MAGIC);
        let length = xml.len() as u32 + 1;
        for number in [VERSION, length, u32::from(*was_running), 0, 0] {
            bytes.extend(number.to_ne_bytes());
        }
        bytes.resize(HEADER_BYTES, 0);
        bytes.extend(xml.bytes());
        bytes.push(0);
        Ok(bytes)
    }

    /// Reads what precedes the stream, and leaves `image` at the stream's first byte. Memory is reserved only for bytes that were read.
    ///
    /// # Errors
    /// The bytes are no such header, or its stream is compressed.
    pub fn read(mut image: impl Read) -> Result<Self, SavedImageError> {
        let mut header = [0; HEADER_BYTES];
        image.read_exact(&mut header)?;
        let (magic, numbers) = header.split_at(MAGIC.len());
        match magic {
            magic if magic == MAGIC => {}
            magic if magic == INCOMPLETE => return Err(SavedImageError::Incomplete),
            _ => return Err(SavedImageError::NotAnImage),
        }
        let swapped = number(numbers, 0, false) != VERSION && number(numbers, 0, true) == VERSION;
        let [version, length, was_running, compressed, cookie] = [0, 1, 2, 3, 4].map(|at| number(numbers, at, swapped));
        if version != VERSION {
            return Err(SavedImageError::Unsupported { what: "format", value: version });
        }
        if compressed != 0 {
            return Err(SavedImageError::Unsupported { what: "compression", value: compressed });
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_XML_BYTES {
            return Err(SavedImageError::Damaged("its description is longer than 32 MiB"));
        }
        let mut data = Vec::new();
        (&mut image).take(length as u64).read_to_end(&mut data)?;
        if data.len() < length {
            return Err(SavedImageError::Damaged("it ends within the description"));
        }
        if cookie as usize > length {
            return Err(SavedImageError::Damaged("its cookie is beyond its end"));
        }
        let end = if cookie == 0 { length } else { cookie as usize };
        let text = data.get(..end).and_then(|data| data.split(|byte| *byte == 0).next()).unwrap_or_default();
        if text.len() == end {
            return Err(SavedImageError::Damaged("its description has no end"));
        }
        let xml =
            String::from_utf8(text.to_vec()).map_err(|_| SavedImageError::Damaged("its description is no text"))?;
        Ok(Self { xml, was_running: was_running != 0 })
    }
}

/// Returns the number at this position of the header, after the magic.
fn number(numbers: &[u8], at: usize, swapped: bool) -> u32 {
    let bytes = numbers.get(4 * at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or_default();
    let number = u32::from_ne_bytes(bytes);
    if swapped { number.swap_bytes() } else { number }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn image(xml: &str, was_running: bool) -> SavedImage {
        SavedImage { xml: xml.to_owned(), was_running }
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn the_header_has_the_bytes_that_libvirt_writes() {
        let bytes = image("<domain/>", true).encode().unwrap();
        let mut expected = b"LibvirtQemudSave\x02\0\0\0\x0a\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0".to_vec();
        expected.resize(HEADER_BYTES, 0);
        expected.extend(b"<domain/>\0");
        assert_eq!(bytes, expected);
    }

    #[test]
    fn a_description_that_the_format_cannot_hold_is_refused() {
        let long = "x".repeat(MAX_XML_BYTES);
        for (xml, why) in [("", "no bytes"), ("<domain>\0</domain>", "a zero byte"), (&long, "more than 32 MiB")] {
            let error = image(xml, true).encode().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn what_is_no_usable_image_is_refused_with_the_reason() {
        let good = image("<domain/>", true).encode().unwrap();
        let with = |at: usize, bytes: &[u8]| {
            let mut changed = good.clone();
            changed[at..at + bytes.len()].copy_from_slice(bytes);
            changed
        };
        let three = 3u32.to_ne_bytes();
        let huge = u32::MAX.to_ne_bytes();
        let cases: [(Vec<u8>, &str); 9] = [
            (with(0, b"X"), "no saved image"),
            (with(0, INCOMPLETE), "incomplete"),
            (with(16, &three), "format 3"),
            (with(28, &three), "compression 3"),
            (with(20, &huge), "longer than 32 MiB"),
            (with(32, &11u32.to_ne_bytes()), "beyond its end"),
            (with(101, b"x"), "has no end"),
            (with(93, b"\xff"), "is no text"),
            (good[..good.len() - 1].to_vec(), "ends within"),
        ];
        for (bytes, why) in cases {
            let error = SavedImage::read(&bytes[..]).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
        assert!(matches!(SavedImage::read(&good[..HEADER_BYTES - 1]), Err(SavedImageError::Io(_))));
    }

    #[test]
    fn a_cookie_is_passed_over_and_the_stream_is_left_to_the_caller() {
        let mut bytes = image("<domain/>", false).encode().unwrap();
        bytes.extend(b"<cookie/>\0QEVM");
        bytes[20..24].copy_from_slice(&20u32.to_ne_bytes());
        bytes[32..36].copy_from_slice(&10u32.to_ne_bytes());
        let mut rest = &bytes[..];
        assert_eq!(SavedImage::read(&mut rest).unwrap(), image("<domain/>", false));
        assert_eq!(rest, b"QEVM");
    }

    #[test]
    fn an_image_of_a_host_with_the_other_byte_order_is_read() {
        let mut bytes = image("<domain/>", true).encode().unwrap();
        bytes[16..36].chunks_exact_mut(4).for_each(<[u8]>::reverse);
        assert_eq!(SavedImage::read(&bytes[..]).unwrap(), image("<domain/>", true));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(xml in "[^\0]{1,400}", was_running: bool, stream: Vec<u8>) {
            let image = SavedImage { xml, was_running };
            let mut bytes = image.encode().unwrap();
            bytes.extend(&stream);
            let mut rest = &bytes[..];
            prop_assert_eq!(SavedImage::read(&mut rest).unwrap(), image);
            prop_assert_eq!(rest, &stream[..]);
        }

        #[test]
        fn no_bytes_make_the_reader_panic(mut bytes: Vec<u8>, begins: bool, lengths: [u32; 5]) {
            if begins {
                let mut header = MAGIC.to_vec();
                lengths.iter().for_each(|number| header.extend(number.to_ne_bytes()));
                header.resize(HEADER_BYTES, 0);
                header[16..20].copy_from_slice(&VERSION.to_ne_bytes());
                header.append(&mut bytes);
                bytes = header;
            }
            drop(SavedImage::read(&bytes[..]));
        }
    }
}
