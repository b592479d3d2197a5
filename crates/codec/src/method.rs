//! The table of methods that a user can select. A method is a format, its levels, and the preferred encoding engine on
//! this side; the other side decodes the format with its own means.

use crate::format::{self, Format, FormatRow};
use crate::{Engine, MethodChoice};
use std::fmt;

/// All methods of this build, in the order in which they are listed to users.
pub static METHODS: &[MethodRow] = &[
    MethodRow { name: "none", summary: "pages as they are", format: &format::NONE, levels: None, engine: Engine::Cpu },
    MethodRow {
        name: "lz4",
        summary: "LZ4 block: little CPU, moderate ratio",
        format: &format::LZ4,
        levels: None,
        engine: Engine::Cpu,
    },
    #[cfg(feature = "zstd")]
    MethodRow {
        name: "zstd",
        summary: "Zstandard frame: more CPU, better ratio",
        format: &format::ZSTD,
        levels: Some(Levels { least: -5, most: 9, default: 1 }),
        engine: Engine::Cpu,
    },
    MethodRow {
        name: "zlib",
        summary: "gzip, by the CPU: slower than zstd, about as small",
        format: &format::GZIP,
        levels: Some(Levels { least: 1, most: 9, default: 1 }),
        engine: Engine::Cpu,
    },
    MethodRow {
        name: "auto",
        summary: "what drains memory fastest now, batch by batch: as it is, LZ4, or zstd at some level",
        format: &format::AUTO,
        levels: None,
        engine: Engine::Cpu,
    },
    MethodRow {
        name: "iaa",
        summary: "deflate with a window of 4 KiB, by Intel IAA where there is one, else slowly by the CPU",
        format: &format::DEFLATE,
        levels: None,
        engine: Engine::Iaa,
    },
    #[cfg(feature = "qatzip")]
    MethodRow {
        name: "qatzip",
        summary: "gzip, by Intel QAT where there is one, else by the CPU as zlib",
        format: &format::GZIP,
        levels: Some(Levels { least: 1, most: 9, default: 1 }),
        engine: Engine::Qat,
    },
];

/// The methods that this build leaves out; each has the name of the feature that adds it.
pub(crate) const LEFT_OUT: &[&str] = &[
    #[cfg(not(feature = "zstd"))]
    "zstd",
    #[cfg(not(feature = "qatzip"))]
    "qatzip",
];

/// The levels of a method; higher is smaller and slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// The fastest.
    pub least: i32,
    /// The smallest.
    pub most: i32,
    /// The default.
    pub default: i32,
}

/// One method.
#[derive(Debug)]
pub struct MethodRow {
    /// Its name in options and reports.
    pub name: &'static str,
    /// A description in a few words.
    pub summary: &'static str,
    /// The format that it writes.
    pub format: &'static FormatRow,
    /// Its levels, if it has any.
    pub levels: Option<Levels>,
    /// The preferred encoder on this side, if it is available; else the CPU encodes.
    pub engine: Engine,
}

/// A method of the table.
#[derive(Clone, Copy)]
pub struct Method(&'static MethodRow);

impl Method {
    /// Returns all methods.
    pub fn all() -> impl Iterator<Item = Self> {
        METHODS.iter().map(Self)
    }

    /// Returns the method with this name, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|method| method.0.name == name)
    }

    /// Returns its row.
    pub fn row(self) -> &'static MethodRow {
        self.0
    }

    /// Returns its name.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Returns the format that it writes.
    pub fn format(self) -> Format {
        self.0.format.into()
    }

    /// Returns the method at each of its levels.
    pub fn choices(self) -> impl Iterator<Item = MethodChoice> {
        let levels = self.0.levels.map_or(0..=0, |levels| levels.least..=levels.most);
        levels.map(move |level| {
            MethodChoice::new(self, self.0.levels.map(|_| level)).expect("the table's own levels are within range")
        })
    }
}

impl From<&'static MethodRow> for Method {
    fn from(row: &'static MethodRow) -> Self {
        Self(row)
    }
}

impl PartialEq for Method {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
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
    use crate::FORMATS;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_lead_back_to_their_row() {
        let names: HashSet<_> = METHODS.iter().map(|row| row.name).collect();
        assert_eq!(names.len(), METHODS.len());
        for method in Method::all() {
            assert_eq!(Method::from_name(method.name()), Some(method));
        }
        assert_eq!(Method::from_name("ZSTD"), None);
    }

    #[test]
    fn every_format_has_a_method() {
        let written: HashSet<_> = Method::all().map(|method| method.format().wire()).collect();
        assert_eq!(written, FORMATS.iter().map(|row| row.wire).collect());
    }

    #[test]
    fn default_levels_lie_within_their_range() {
        for levels in METHODS.iter().filter_map(|row| row.levels) {
            assert!((levels.least..=levels.most).contains(&levels.default), "{levels:?}");
        }
    }
}
