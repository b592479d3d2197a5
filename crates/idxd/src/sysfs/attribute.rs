//! Reads one attribute: a small text file that may be missing, unreadable, or have any content.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The longest attribute that is read: sysfs itself has no longer ones.
const MAX_BYTES: u64 = 4096;

/// An attribute with an invalid value on which the safe use of a queue depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Doubt(pub(super) &'static str);

/// An invalid value, which has been recorded.
struct Odd;

/// The attributes of one directory, and their invalid values.
pub(super) struct Attributes {
    directory: PathBuf,
    name: String,
    invalid_attributes: Vec<String>,
}

impl Attributes {
    pub(super) fn new(directory: &Path, name: &str) -> Self {
        Self { directory: directory.to_owned(), name: name.to_owned(), invalid_attributes: Vec::new() }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn into_oddities(self) -> Vec<String> {
        self.invalid_attributes
    }

    /// Returns the trimmed text; `None` if the attribute does not exist (older kernels and lesser devices lack some),
    /// is empty, or cannot be read, which is recorded.
    pub(super) fn text(&mut self, attribute: &str) -> Option<String> {
        self.read(attribute).ok().flatten().filter(|text| !text.is_empty())
    }

    /// As [`text`](Self::text), but returns an error if the attribute exists with an invalid value, for callers that
    /// must not guess.
    pub(super) fn text_or_doubt(&mut self, attribute: &'static str) -> Result<Option<String>, Doubt> {
        Ok(self.read(attribute).map_err(|Odd| Doubt(attribute))?.filter(|text| !text.is_empty()))
    }

    /// Returns 0 or 1 as a bool, and `None` only if the kernel lacks the attribute; any other value is an error.
    pub(super) fn switch_or_invalid(&mut self, attribute: &'static str) -> Result<Option<bool>, Doubt> {
        match self.read(attribute).map_err(|Odd| Doubt(attribute))?.as_deref() {
            None => Ok(None),
            Some("0") => Ok(Some(false)),
            Some("1") => Ok(Some(true)),
            Some(other) => {
                let shown = shorten(other);
                self.odd(format!("{} is {shown:?}, which is neither 0 nor 1", self.at(attribute)));
                Err(Doubt(attribute))
            }
        }
    }

    /// Returns the trimmed text, empty or not; `None` if there is no such attribute. An unreadable attribute is
    /// recorded as odd.
    fn read(&mut self, attribute: &str) -> Result<Option<String>, Odd> {
        let mut bytes = Vec::new();
        // Non-blocking: a directory given by the user may contain a pipe, which would wait for a writer.
        let path = self.directory.join(attribute);
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
        let read = file.and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes));
        match read {
            Ok(_) => {}
            // A dangling link exists.
            Err(error) if error.kind() == io::ErrorKind::NotFound && path.symlink_metadata().is_err() => {
                return Ok(None);
            }
            Err(error) => {
                self.odd(format!("{} cannot be read: {error}", self.at(attribute)));
                return Err(Odd);
            }
        }
        match std::str::from_utf8(&bytes) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(_) => {
                self.odd(format!("{} is not text", self.at(attribute)));
                Err(Odd)
            }
        }
    }

    /// Returns an unsigned number of at most `most`, decimal or with `0x`.
    pub(super) fn number(&mut self, attribute: &str, most: u64) -> Option<u64> {
        let text = self.text(attribute)?;
        match parse_unsigned(&text) {
            Some(value) if value <= most => Some(value),
            Some(value) => {
                self.odd(format!("{} is {value}, which is more than {most}: not believed", self.at(attribute)));
                None
            }
            None => {
                self.odd(format!("{} is {:?}, which is no number", self.at(attribute), shorten(&text)));
                None
            }
        }
    }

    /// [`number`](Self::number) that fits 32 bits.
    pub(super) fn number32(&mut self, attribute: &str, most: u32) -> Option<u32> {
        self.number(attribute, most.into()).map(|value| value as u32)
    }

    /// Returns a number that the kernel shows as -1 where there is none: NUMA node, group.
    pub(super) fn number_or_none(&mut self, attribute: &str, most: u32) -> Option<u32> {
        if self.text(attribute)? == "-1" { None } else { self.number32(attribute, most) }
    }

    /// Returns 0 or 1 as a bool.
    pub(super) fn switch(&mut self, attribute: &str) -> Option<bool> {
        self.number(attribute, 1).map(|value| value == 1)
    }

    /// Returns whether the text is `enabled`.
    pub(super) fn enabled(&mut self, attribute: &str) -> Option<bool> {
        Some(self.text(attribute)? == "enabled")
    }

    pub(super) fn odd(&mut self, what: String) {
        self.invalid_attributes.push(what);
    }

    fn at(&self, attribute: &str) -> String {
        format!("{}/{attribute}", self.name)
    }
}

pub(super) fn parse_unsigned(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        // `from_str_radix` accepts a sign, which no attribute has.
        Some(hex) if hex.bytes().all(|byte| byte.is_ascii_hexdigit()) => u64::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
        None => None,
    }
}

/// Shortens a text so that it is still recognisable.
fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}
