//! The table of methods. To add one, write its encoder and decoder and add its row.

use crate::{CodecError, Decoder, Encoder, lz4, none, zstd};
use std::fmt;

/// Every method there is, in the order in which they are listed to users.
pub static METHODS: &[MethodRow] = &[
    MethodRow {
        wire: 0,
        name: "none",
        summary: "pages as they are",
        levels: None,
        encoder: none::encoder,
        decoder: none::decoder,
    },
    MethodRow {
        wire: 1,
        name: "lz4",
        summary: "LZ4 block: little CPU, moderate ratio",
        levels: None,
        encoder: lz4::encoder,
        decoder: lz4::decoder,
    },
    MethodRow {
        wire: 2,
        name: "zstd",
        summary: "Zstandard frame: more CPU, better ratio",
        levels: Some(Levels { least: -5, most: 9, default: 1 }),
        encoder: zstd::encoder,
        decoder: zstd::decoder,
    },
];

/// The levels of a method; higher is smaller and slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// The fastest.
    pub least: i32,
    /// The smallest.
    pub most: i32,
    /// What is used when none is named.
    pub default: i32,
}

/// One method.
#[derive(Debug)]
pub struct MethodRow {
    /// Its number in packets and in the handshake; never reused for another format.
    pub wire: u8,
    /// Its name in options and reports.
    pub name: &'static str,
    /// What it is, in a few words.
    pub summary: &'static str,
    /// Its levels, if it has any.
    pub levels: Option<Levels>,
    /// Makes an encoder for a level within `levels` (any number where there are none).
    pub encoder: fn(level: i32) -> Result<Box<dyn Encoder>, CodecError>,
    /// Makes a decoder; it reads what was written at any level.
    pub decoder: fn() -> Result<Box<dyn Decoder>, CodecError>,
}

/// A method of the table.
#[derive(Clone, Copy)]
pub struct Method(&'static MethodRow);

impl Method {
    /// All methods.
    pub fn all() -> impl Iterator<Item = Self> {
        METHODS.iter().map(Self)
    }

    /// The method with this number on the wire, if there is one.
    pub fn from_wire(wire: u8) -> Option<Self> {
        Self::all().find(|method| method.0.wire == wire)
    }

    /// The method with this name, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|method| method.0.name == name)
    }

    /// Its row.
    pub fn row(self) -> &'static MethodRow {
        self.0
    }

    /// Its number on the wire.
    pub fn wire(self) -> u8 {
        self.0.wire
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// A decoder for it, with all the memory it will need. Fails only for want of memory.
    pub fn decoder(self) -> Result<Box<dyn Decoder>, CodecError> {
        (self.0.decoder)()
    }
}

impl From<&'static MethodRow> for Method {
    fn from(row: &'static MethodRow) -> Self {
        Self(row)
    }
}

impl PartialEq for Method {
    fn eq(&self, other: &Self) -> bool {
        self.0.wire == other.0.wire
    }
}

impl Eq for Method {}

impl fmt::Debug for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Method({})", self.0.name)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn numbers_and_names_are_unique_and_lead_back_to_their_row() {
        let numbers: HashSet<_> = METHODS.iter().map(|row| row.wire).collect();
        let names: HashSet<_> = METHODS.iter().map(|row| row.name).collect();
        assert_eq!((numbers.len(), names.len()), (METHODS.len(), METHODS.len()));
        for method in Method::all() {
            assert_eq!(Method::from_wire(method.wire()), Some(method));
            assert_eq!(Method::from_name(method.name()), Some(method));
        }
        assert_eq!(Method::from_wire(200), None);
        assert_eq!(Method::from_name("ZSTD"), None);
    }

    #[test]
    fn the_wire_numbers_are_those_of_protocol_version_1() {
        let numbers: Vec<_> = METHODS.iter().map(|row| (row.name, row.wire)).collect();
        assert_eq!(numbers[..3], [("none", 0), ("lz4", 1), ("zstd", 2)]);
    }

    #[test]
    fn default_levels_lie_within_their_range() {
        for levels in METHODS.iter().filter_map(|row| row.levels) {
            assert!((levels.least..=levels.most).contains(&levels.default), "{levels:?}");
        }
    }
}
