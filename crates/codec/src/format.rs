//! The table of formats of a packet's payload. To add one, write its encoder and decoder and add its row.

#[cfg(feature = "zstd")]
use crate::zstd;
use crate::{CodecError, Decoder, Encoder, deflate, gzip, lz4, none};
use std::fmt;

/// All formats of this build, in the order of their numbers.
pub static FORMATS: &[FormatRow] = &[
    NONE,
    LZ4,
    #[cfg(feature = "zstd")]
    ZSTD,
    DEFLATE,
    GZIP,
];

/// The format of `auto` that is the most demanding for the other side.
#[cfg(not(feature = "zstd"))]
pub(crate) const AUTO: FormatRow = LZ4;
#[cfg(feature = "zstd")]
pub(crate) const AUTO: FormatRow = ZSTD;

pub(crate) const NONE: FormatRow =
    FormatRow { wire: 0, name: "none", description: "the content", encoder: none::encoder, decoder: none::decoder };

pub(crate) const LZ4: FormatRow = FormatRow {
    wire: 1,
    name: "lz4",
    description: "one LZ4 block, without a frame",
    encoder: lz4::encoder,
    decoder: lz4::decoder,
};

#[cfg(feature = "zstd")]
pub(crate) const ZSTD: FormatRow = FormatRow {
    wire: 2,
    name: "zstd",
    description: "one Zstandard frame (RFC 8878)",
    encoder: zstd::encoder,
    decoder: zstd::decoder,
};

pub(crate) const DEFLATE: FormatRow = FormatRow {
    wire: 3,
    name: "deflate",
    description: "one deflate stream (RFC 1951) without distances beyond 4096",
    encoder: deflate::encoder,
    decoder: deflate::decoder,
};

pub(crate) const GZIP: FormatRow = FormatRow {
    wire: 4,
    name: "gzip",
    description: "gzip members (RFC 1952), one or more, one after the other",
    encoder: gzip::encoder,
    decoder: gzip::decoder,
};

/// One format.
#[derive(Debug)]
pub struct FormatRow {
    /// Its number in packets; never reused for another format.
    pub wire: u8,
    /// Its name in the handshake.
    pub name: &'static str,
    /// A description of a packet's payload.
    pub description: &'static str,
    /// Makes an encoder that needs only the CPU, for a level of the requested method (any number where it has none).
    pub encoder: fn(level: i32) -> Result<Box<dyn Encoder>, CodecError>,
    /// Makes a decoder, which needs only the CPU too; it reads the output of any engine at any level.
    pub decoder: fn() -> Result<Box<dyn Decoder>, CodecError>,
}

/// A format of the table.
#[derive(Clone, Copy)]
pub struct Format(&'static FormatRow);

impl Format {
    /// Returns all formats.
    pub fn all() -> impl Iterator<Item = Self> {
        FORMATS.iter().map(Self)
    }

    /// Returns the format with this number on the wire, if there is one.
    pub fn from_wire(wire: u8) -> Option<Self> {
        Self::all().find(|format| format.0.wire == wire)
    }

    /// Returns the format with this name in the handshake, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|format| format.0.name == name)
    }

    /// Returns its row.
    pub fn row(self) -> &'static FormatRow {
        self.0
    }

    /// Returns its number on the wire.
    pub fn wire(self) -> u8 {
        self.0.wire
    }

    /// Returns its name in the handshake.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Makes a decoder for it, with all the memory it will need. Fails only for lack of memory.
    pub fn decoder(self) -> Result<Box<dyn Decoder>, CodecError> {
        (self.0.decoder)()
    }
}

impl From<&'static FormatRow> for Format {
    fn from(row: &'static FormatRow) -> Self {
        Self(row)
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        self.0.wire == other.0.wire
    }
}

impl Eq for Format {}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Format({})", self.0.name)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn numbers_and_names_are_those_of_protocol_version_1_and_lead_back_to_their_row() {
        let known: Vec<_> = FORMATS.iter().map(|row| (row.name, row.wire)).collect();
        assert_eq!(known, [("none", 0), ("lz4", 1), ("zstd", 2), ("deflate", 3), ("gzip", 4)]);
        for format in Format::all() {
            assert_eq!(Format::from_wire(format.wire()), Some(format));
            assert_eq!(Format::from_name(format.name()), Some(format));
        }
        assert_eq!(Format::from_wire(200), None);
        assert_eq!(Format::from_name("ZSTD"), None);
    }

    #[test]
    fn the_table_of_the_protocol_document_is_this_one() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/protocol.md");
        let document = std::fs::read_to_string(path).unwrap();
        let (_, table) = document.split_once("| format | number | payload |\n|---|---|---|\n").unwrap();
        let written: Vec<&str> = table.lines().take_while(|line| line.starts_with('|')).collect();
        let rows: Vec<_> =
            FORMATS.iter().map(|row| format!("| `{}` | {} | {} |", row.name, row.wire, row.description)).collect();
        assert_eq!(written, rows);
        let names: Vec<_> = FORMATS.iter().map(|row| format!("{:?}", row.name)).collect();
        assert!(document.contains(&format!("\"methods\": [{}]", names.join(", "))), "the hello offers all of them");
    }
}
