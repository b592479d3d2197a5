//! The CONFIGURATION section: machine type, page size, capabilities that both sides must share, and the guest's UUID.

use std::io::Read;

use super::StreamError;
use super::error::{printable, within};
use super::input::Input;

pub(crate) const TYPE: u8 = 0x07;
const SUBSECTION: u8 = 0x05;
/// Machine type names are some tens of bytes; QEMU itself has no limit.
const MACHINE_NAME_LIMIT: u64 = 255;
/// QEMU has some twenty capabilities, of which it sends two.
const CAPABILITIES_LIMIT: u64 = 64;

/// The configuration section of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    /// The whole section as it was read, from the type byte to the last subsection.
    pub bytes: Vec<u8>,
    /// Full name of the machine type, such as `pc-q35-7.2`.
    pub machine: String,
    /// log2 of the guest's page size in bytes, 10 to 16. When the stream does not say it the page is 4 KiB, which is
    /// right for x86 and for every architecture that does not send the subsection.
    pub page_bits: u32,
    /// Migration capabilities that the destination must have set in the same way.
    pub capabilities: Vec<String>,
    /// The guest's UUID, where QEMU is set to validate it.
    pub uuid: Option<[u8; 16]>,
}

impl Configuration {
    /// Guest page size, bytes.
    #[must_use]
    pub fn page_size(&self) -> usize {
        1 << self.page_bits
    }

    /// Returns whether RAM blocks that both sides share are left out of the stream.
    #[must_use]
    pub fn ignores_shared(&self) -> bool {
        self.capabilities.iter().any(|c| c == "x-ignore-shared")
    }

    /// Reads a section back from its own [`bytes`](Self::bytes).
    ///
    /// # Errors
    /// [`StreamError`] for invalid bytes, and for bytes after the section.
    pub fn parse(bytes: &[u8]) -> Result<Self, StreamError> {
        let mut input = Input::with_capacity(bytes, 1024);
        let section = Self::read(&mut input)?;
        match input.peek::<1>("configuration")? {
            None => Ok(section),
            Some(_) => Err(StreamError::Malformed("bytes after the configuration section".into())),
        }
    }

    pub(crate) fn read<R: Read>(input: &mut Input<R>) -> Result<Self, StreamError> {
        input.begin_capture();
        let kind = input.u8("configuration")?;
        if kind != TYPE {
            return Err(StreamError::refused(
                "a stream without configuration section",
                "the machine type is older than 2.4 or send-configuration was turned off",
            ));
        }
        let length = within("machine name length", input.be32("machine name")?.into(), MACHINE_NAME_LIMIT)?;
        let mut name = [0; 255];
        let name = &mut name[..usize::try_from(length).unwrap_or(0)];
        input.take(name, "machine name")?;
        let mut section = Self {
            bytes: Vec::new(),
            machine: printable("machine name", name)?.to_owned(),
            page_bits: 12,
            capabilities: Vec::new(),
            uuid: None,
        };
        // The subsections have no count: they continue while the next byte begins one.
        while input.peek::<1>("configuration")? == Some([SUBSECTION]) {
            section.subsection(input)?;
        }
        section.bytes = input.end_capture();
        if section.capabilities.iter().any(|c| c == "mapped-ram") {
            return Err(StreamError::refused("mapped-ram", "turn the capability mapped-ram off: it is for files only"));
        }
        Ok(section)
    }

    fn subsection<R: Read>(&mut self, input: &mut Input<R>) -> Result<(), StreamError> {
        const READING: &str = "configuration subsection";
        input.u8(READING)?;
        let mut name = [0; 255];
        let name = printable("configuration subsection name", input.counted(&mut name, READING)?)?;
        let version = input.be32(READING)?;
        if version != 1 {
            return Err(StreamError::Malformed(format!("configuration subsection \"{name}\" has version {version}")));
        }
        match name {
            "configuration/target-page-bits" => {
                let bits = input.be32(READING)?;
                if !(10..=16).contains(&bits) {
                    return Err(StreamError::Malformed(format!("guest page of 2^{bits} bytes")));
                }
                self.page_bits = bits;
            }
            "configuration/capabilities" => {
                let count = within("number of capabilities", input.be32(READING)?.into(), CAPABILITIES_LIMIT)?;
                for _ in 0..count {
                    let mut name = [0; 255];
                    let name = input.counted(&mut name, "capability name")?;
                    self.capabilities.push(printable("capability name", name)?.to_owned());
                }
            }
            "configuration/uuid" => self.uuid = Some(input.array(READING)?),
            other => {
                return Err(StreamError::refused(
                    format!("configuration subsection \"{other}\""),
                    "it comes from a QEMU newer than the ones known here",
                ));
            }
        }
        Ok(())
    }
}
