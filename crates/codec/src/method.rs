//! The table of methods that a user can select, each with the engines that can encode it on this side. The other side decodes the
//! format that arrives with its own means.

use crate::Engine;
use crate::format::{self, Format, FormatRow};
use std::fmt;

/// All methods of this build, in the order in which they are listed to users.
pub static METHODS: &[MethodRow] = &[
    MethodRow {
        name: "none",
        summary: "pages as they are",
        encodings: &[EncodingRow { engine: Engine::Cpu, format: &format::NONE, levels: None }],
    },
    MethodRow {
        name: "lz4",
        summary: "LZ4 block: little CPU, moderate ratio",
        encodings: &[EncodingRow { engine: Engine::Cpu, format: &format::LZ4, levels: None }],
    },
    #[cfg(feature = "zstd")]
    MethodRow {
        name: "zstd",
        summary: "Zstandard frame: more CPU, better ratio; levels -5 to 9",
        encodings: &[EncodingRow {
            engine: Engine::Cpu,
            format: &format::ZSTD,
            levels: Some(Levels { min: -5, max: 9, default: 1 }),
        }],
    },
    MethodRow {
        name: DEFLATE,
        summary: "by the engine that --engine names: gzip by the CPU or QAT (levels 1 to 9), or a window of 4 KiB by IAA (no levels)",
        // The order of preference where the user leaves the engine to Sterna.
        encodings: &[
            EncodingRow { engine: Engine::Iaa, format: &format::DEFLATE, levels: None },
            #[cfg(feature = "qatzip")]
            EncodingRow { engine: Engine::Qat, format: &format::GZIP, levels: GZIP_LEVELS },
            EncodingRow { engine: Engine::Cpu, format: &format::GZIP, levels: GZIP_LEVELS },
        ],
    },
    MethodRow {
        name: AUTO,
        summary: "what drains memory fastest now, batch by batch: as it is, LZ4, zstd at some level, or deflate by an accelerator",
        encodings: &[EncodingRow { engine: Engine::Cpu, format: &format::AUTO, levels: None }],
    },
];

/// The method that chooses among the others.
pub(crate) const AUTO: &str = "auto";

/// The method that accelerators encode too.
pub(crate) const DEFLATE: &str = "deflate";

/// The methods that this build leaves out; each has the name of the feature that adds it.
pub(crate) const LEFT_OUT: &[&str] = &[
    #[cfg(not(feature = "zstd"))]
    "zstd",
];

const GZIP_LEVELS: Option<Levels> = Some(Levels { min: 1, max: 9, default: 1 });

/// The levels of an encoding; higher is smaller and slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// The fastest.
    pub min: i32,
    /// The smallest.
    pub max: i32,
    /// The default.
    pub default: i32,
}

impl Levels {
    pub(crate) fn contains(self, level: i32) -> bool {
        (self.min..=self.max).contains(&level)
    }
}

/// One method.
#[derive(Debug)]
pub struct MethodRow {
    /// Its name in options and reports.
    pub name: &'static str,
    /// A description in a few words.
    pub summary: &'static str,
    /// The engines that can encode it, the preferred one first.
    pub encodings: &'static [EncodingRow],
}

/// What one engine writes for a method.
#[derive(Debug)]
pub struct EncodingRow {
    /// The engine.
    pub engine: Engine,
    /// The format that it writes.
    pub format: &'static FormatRow,
    /// Its levels, if it has any.
    pub levels: Option<Levels>,
}

/// A method of the table.
#[derive(Clone, Copy)]
pub struct Method(&'static MethodRow);

impl Method {
    /// Returns all methods.
    pub fn all() -> impl Iterator<Item = Self> {
        METHODS.iter().map(Self)
    }

    /// Returns its row.
    pub fn row(self) -> &'static MethodRow {
        self.0
    }

    /// Returns its name.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Returns the formats that its engines write, the preferred engine's first.
    pub fn formats(self) -> impl Iterator<Item = Format> {
        self.0.encodings.iter().map(|row| row.format.into())
    }

    /// Returns the method of the first row: pages as they are.
    pub(crate) fn first() -> Self {
        Self(&METHODS[0])
    }

    /// Returns the method of this name; none where this build has no such method.
    pub(crate) fn find(name: &str) -> Option<Self> {
        Self::all().find(|method| method.0.name == name)
    }

    pub(crate) fn named(name: &str) -> Self {
        Self::find(name).expect("the table has this method")
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
            assert_eq!(method.name().parse(), Ok(method));
        }
        assert!("ZSTD".parse::<Method>().is_err());
    }

    #[test]
    fn every_format_has_a_method() {
        let written: HashSet<_> = Method::all().flat_map(Method::formats).map(Format::wire).collect();
        assert_eq!(written, FORMATS.iter().map(|row| row.wire).collect());
    }

    #[test]
    fn every_method_can_be_encoded_by_the_cpu_and_by_each_engine_once() {
        for row in METHODS {
            let engines: HashSet<_> = row.encodings.iter().map(|encoding| encoding.engine).collect();
            assert!(engines.contains(&Engine::Cpu) && engines.len() == row.encodings.len(), "{}", row.name);
        }
    }

    #[test]
    fn default_levels_lie_within_their_range() {
        for levels in METHODS.iter().flat_map(|row| row.encodings).filter_map(|row| row.levels) {
            assert!(levels.contains(levels.default), "{levels:?}");
        }
    }
}
