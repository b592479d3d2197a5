//! The encoding of the sending side: a method by one engine of this host at one level.

use crate::method::{AUTO, EncodingRow};
use crate::{CodecError, Encoder, Engine, Format, Method};
use std::fmt;

/// A method by one engine at one level.
///
/// As text, in reports: the method, the level where the engine has levels, and the engine where several encode the method: `lz4`,
/// `zstd -5`, `deflate by iaa`, `deflate 1 by cpu`.
#[derive(Clone, Copy)]
pub struct Encoding {
    method: Method,
    row: &'static EncodingRow,
    /// Within the engine's levels; 0 where it has none.
    level: i32,
}

impl Encoding {
    /// None if a level is given and the engine has none, or not this one.
    pub(crate) fn new(method: Method, row: &'static EncodingRow, level: Option<i32>) -> Option<Self> {
        let level = match (row.levels, level) {
            (None, None) => 0,
            (None, Some(_)) => return None,
            (Some(levels), None) => levels.default,
            (Some(levels), Some(level)) => Some(level).filter(|level| levels.contains(*level))?,
        };
        Some(Self { method, row, level })
    }

    /// Returns the method `auto`.
    pub fn auto() -> Self {
        let method = Method::named(AUTO);
        Self::new(method, &method.row().encodings[0], None).expect("no level was given")
    }

    /// Returns all encodings by this engine, each at each of its levels.
    pub fn all_by(engine: Engine) -> impl Iterator<Item = Self> {
        let rows = Method::all().flat_map(|method| method.row().encodings.iter().map(move |row| (method, row)));
        rows.filter(move |(_, row)| row.engine == engine).flat_map(|(method, row)| {
            let levels = row.levels.map_or(0..=0, |levels| levels.min..=levels.max);
            levels.map(move |level| Self { method, row, level })
        })
    }

    /// Returns the method.
    pub fn method(self) -> Method {
        self.method
    }

    /// Returns the engine.
    pub fn engine(self) -> Engine {
        self.row.engine
    }

    /// Returns the level, where the engine has levels.
    pub fn level(self) -> Option<i32> {
        self.row.levels.map(|_| self.level)
    }

    /// Returns the format that it writes.
    pub fn format(self) -> Format {
        self.row.format.into()
    }

    /// Returns whether the encoding is chosen for each batch, among [`Encoding::auto_candidates`].
    pub fn is_auto(self) -> bool {
        self.method.name() == AUTO
    }

    pub(crate) fn cpu_encoder(self) -> Result<Box<dyn Encoder>, CodecError> {
        (self.row.format.encoder)(self.level)
    }
}

/// Pages as they are.
impl Default for Encoding {
    fn default() -> Self {
        let method = Method::first();
        Self { method, row: &method.row().encodings[0], level: 0 }
    }
}

impl PartialEq for Encoding {
    fn eq(&self, other: &Self) -> bool {
        (self.method, self.row.engine, self.level) == (other.method, other.row.engine, other.level)
    }
}

impl Eq for Encoding {}

impl fmt::Debug for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Encoding({self})")
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.method)?;
        if let Some(level) = self.level() {
            write!(f, " {level}")?;
        }
        if self.method.row().encodings.len() > 1 {
            write!(f, " by {}", self.row.engine)?;
        }
        Ok(())
    }
}
