//! The encoding of the sending side: a method by one engine of this host at one level.

use crate::choice::MethodChoice;
use crate::method::{AUTO, DEFLATE, EncodingRow, METHODS};
use crate::{Adaptive, CodecError, Encoder, Engine, Engines, Format, Method};
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
        MethodChoice::auto().by_cpu().expect("the table has it")
    }

    /// Returns all encodings by this engine, each at each of its levels.
    pub fn all_by(engine: Engine) -> impl Iterator<Item = Self> {
        let rows = Method::all().flat_map(|method| method.row().encodings.iter().map(move |row| (method, row)));
        rows.filter(move |(_, row)| row.engine == engine).flat_map(|(method, row)| {
            let levels = row.levels.map_or(0..=0, |levels| levels.min..=levels.max);
            levels.map(move |level| Self { method, row, level })
        })
    }

    /// Returns the encodings from which `auto` chooses, the cheapest first. According to the measurements, each is the best at some
    /// price.
    pub fn auto_candidates(engines: &Engines) -> Vec<Self> {
        // A build may leave methods and engines out.
        let by = |engine, text: &str| text.parse::<MethodChoice>().ok()?.encoding(engine);
        let accelerated = [Engine::Iaa, Engine::Qat].into_iter().filter(|engine| engines.has_hardware(*engine));
        let deflate = accelerated.filter_map(|engine| by(engine, DEFLATE));
        let by_cpu = |text: &&str| by(Engine::Cpu, text);
        let cheap = ["none", "lz4"].iter().filter_map(by_cpu);
        cheap.chain(deflate).chain(["zstd -1", "zstd 1", "zstd 3", "zstd 6"].iter().filter_map(by_cpu)).collect()
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

    /// Returns an encoder that skips most attempts while content does not shrink. The CPU's fails only for lack of memory.
    ///
    /// # Errors
    /// The engine is not among `engines`, or has no encoder.
    pub fn encoder(self, engines: &Engines) -> Result<Adaptive, CodecError> {
        Ok(Adaptive::new(engines.encoder(self)?))
    }

    /// As [`Self::encoder`], but the encoder tries every batch: for callers that decide themselves which batches to
    /// try.
    ///
    /// # Errors
    /// As [`Encoding::encoder`].
    pub fn non_adaptive_encoder(self, engines: &Engines) -> Result<Box<dyn Encoder>, CodecError> {
        engines.encoder(self)
    }

    pub(crate) fn cpu_encoder(self) -> Result<Box<dyn Encoder>, CodecError> {
        (self.row.format.encoder)(self.level)
    }
}

/// Pages as they are.
impl Default for Encoding {
    fn default() -> Self {
        Self { method: Method::named(METHODS[0].name), row: &METHODS[0].encodings[0], level: 0 }
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
