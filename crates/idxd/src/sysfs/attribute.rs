//! Reading one attribute: a small text file that may be missing, unreadable, or anything at all.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Longest attribute that is read: sysfs itself has no longer ones.
const MAX_BYTES: u64 = 4096;

/// The attributes of one directory, and what was odd about them.
pub(super) struct Attributes {
    directory: PathBuf,
    name: String,
    oddities: Vec<String>,
}

impl Attributes {
    pub(super) fn new(directory: &Path, name: &str) -> Self {
        Self { directory: directory.to_owned(), name: name.to_owned(), oddities: Vec::new() }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn into_oddities(self) -> Vec<String> {
        self.oddities
    }

    /// The trimmed text; `None` if the attribute does not exist (older kernels and lesser devices lack some), is empty, or
    /// cannot be read, which is an oddity.
    pub(super) fn text(&mut self, attribute: &str) -> Option<String> {
        let mut bytes = Vec::new();
        // Not blocking: whoever names another directory may have a pipe in it, which would wait for a writer.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(self.directory.join(attribute));
        let read = file.and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes));
        match read {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                self.odd(format!("{} cannot be read: {error}", self.at(attribute)));
                return None;
            }
        }
        match std::str::from_utf8(&bytes).map(str::trim) {
            Ok("") => None,
            Ok(text) => Some(text.to_owned()),
            Err(_) => {
                self.odd(format!("{} is not text", self.at(attribute)));
                None
            }
        }
    }

    /// An unsigned number of at most `most`, decimal or with `0x`.
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

    /// A number that the kernel shows as -1 where there is none: NUMA node, group.
    pub(super) fn number_or_none(&mut self, attribute: &str, most: u32) -> Option<u32> {
        if self.text(attribute)? == "-1" { None } else { self.number32(attribute, most) }
    }

    /// 0 or 1.
    pub(super) fn switch(&mut self, attribute: &str) -> Option<bool> {
        self.number(attribute, 1).map(|value| value == 1)
    }

    /// `enabled` or anything else.
    pub(super) fn enabled(&mut self, attribute: &str) -> Option<bool> {
        Some(self.text(attribute)? == "enabled")
    }

    pub(super) fn odd(&mut self, what: String) {
        self.oddities.push(what);
    }

    fn at(&self, attribute: &str) -> String {
        format!("{}/{attribute}", self.name)
    }
}

pub(super) fn parse_unsigned(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        // `from_str_radix` takes a sign, which no attribute has.
        Some(hex) if hex.bytes().all(|byte| byte.is_ascii_hexdigit()) => u64::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
        None => None,
    }
}

/// Enough of a text to recognise it.
fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}
