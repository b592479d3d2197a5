//! The specification as data. The device decodes only with these rows. Each row names its section of the *Intel Data
//! Streaming Accelerator Architecture Specification* (341204-006US) or, marked IAA, of the *Intel In-Memory Analytics
//! Accelerator Architecture Specification*.

pub mod conformance;
pub mod dsa;
pub mod iaa;
pub mod status;

/// A field of a descriptor or of a completion record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// As the specification calls it.
    pub name: &'static str,
    /// First byte.
    pub offset: usize,
    /// Bytes.
    pub bytes: usize,
    /// Where it says so.
    pub section: &'static str,
}

impl Field {
    /// Reads the field, little endian.
    pub fn get(&self, from: &[u8]) -> u64 {
        let mut value = [0; 8];
        value[..self.bytes].copy_from_slice(&from[self.offset..self.offset + self.bytes]);
        u64::from_le_bytes(value)
    }

    /// Writes the field, little endian; excess bits are cut off.
    pub fn set(&self, into: &mut [u8], value: u64) {
        into[self.offset..self.offset + self.bytes].copy_from_slice(&value.to_le_bytes()[..self.bytes]);
    }
}

/// One operation of a device.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// The operation code.
    pub code: u8,
    /// As the specification calls it.
    pub name: &'static str,
    /// Where it is described.
    pub section: &'static str,
    /// Flags that may be set, without those that any operation may have.
    pub flags: u32,
    /// Flags that must be set.
    pub required: u32,
    /// Bytes that must be zero: first and last.
    pub reserved: &'static [(usize, usize)],
    /// Whether it writes to a destination.
    pub writes: bool,
    /// Whether *Transfer Size* is a size that must not be 0.
    pub sized: bool,
}

/// A flag of the descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    /// As the specification calls it.
    pub name: &'static str,
    /// The flag's bit.
    pub mask: u32,
    /// Where it says so.
    pub section: &'static str,
}

/// Defines a constant for each row of a table, so that code names the row that it uses.
macro_rules! fields {
    ($($(#[$doc:meta])* $constant:ident = $name:literal, $offset:literal, $bytes:literal, $section:literal;)*) => {
        $($(#[$doc])* pub const $constant: Field =
            Field { name: $name, offset: $offset, bytes: $bytes, section: $section };)*
        /// All rows.
        pub const FIELDS: &[Field] = &[$($constant),*];
    };
}
pub(crate) use fields;
