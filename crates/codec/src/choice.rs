//! The user's choice of a method, its engine and its level, as a type that is always valid.

use crate::method::{AUTO, DEFLATE, LEFT_OUT};
use crate::{Encoding, Engine, METHODS, Method};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// A method, the engine that encodes it, and a level. The engine that `auto` selects depends on what this host has
/// ([`Engines::encoding`](crate::Engines::encoding)).
///
/// As text: the method, the level if one was chosen, and the engine if one was named: `lz4`, `zstd -5`, `deflate by iaa`,
/// `deflate 6 by qat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MethodChoice {
    method: Method,
    engine: EngineChoice,
    /// Within the levels of each engine that remains.
    level: Option<i32>,
}

/// Which engine encodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// An accelerator if there is one, else the CPU.
    #[default]
    Auto,
    /// This one, or the migration is refused.
    Only(Engine),
}

/// Why a method, an engine and a level are no valid choice.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ChoiceError {
    /// There is no such method.
    #[error("there is no method '{given}'; there is {}", list_methods())]
    UnknownMethod {
        /// The value that was given.
        given: String,
    },
    /// The method, or the engine that encodes it, is not in this build.
    #[error("{given} is not in this build: it needs the feature `{feature}`")]
    LeftOut {
        /// The method or the engine that was given, named as such.
        given: String,
        /// The feature that adds it.
        feature: &'static str,
    },
    /// It is the name of an engine, or of deflate by one of them.
    #[error("there is no method '{given}': it is the method deflate by the engine {engine}")]
    IsEngine {
        /// The value that was given.
        given: String,
        /// The engine.
        engine: Engine,
    },
    /// There is no such engine.
    #[error("there is no engine '{given}'; there is auto, cpu, qat, iaa")]
    UnknownEngine {
        /// The value that was given.
        given: String,
    },
    /// The engine does not encode the method.
    #[error("{}", no_engine(*method, *engine))]
    NoEngine {
        /// The method.
        method: Method,
        /// The engine.
        engine: Engine,
    },
    /// The method has no levels, or not by this engine.
    #[error("{}", no_levels(*method, *engine, level))]
    NoLevels {
        /// The method.
        method: Method,
        /// The engine.
        engine: EngineChoice,
        /// The value that was given.
        level: String,
    },
    /// The method has other levels.
    #[error("method {method} has the levels {min} to {max}, not '{level}'")]
    Level {
        /// The method.
        method: Method,
        /// The value that was given.
        level: String,
        /// Its lowest level.
        min: i32,
        /// Its highest level.
        max: i32,
    },
}

/// No compression.
impl Default for MethodChoice {
    fn default() -> Self {
        Self { method: Method::first(), engine: EngineChoice::Auto, level: None }
    }
}

impl MethodChoice {
    /// Returns the method `auto`: for each batch the method that drains memory fastest.
    pub fn auto() -> Self {
        Self { method: Method::named(AUTO), engine: EngineChoice::Auto, level: None }
    }

    /// Returns `method` by `engine` at `level`, or at the engine's default level.
    ///
    /// # Errors
    /// The engine does not encode the method, or has no such level.
    pub fn new(method: Method, engine: EngineChoice, level: Option<i32>) -> Result<Self, ChoiceError> {
        let mut possible = method.row().encodings.iter().filter(|row| engine.permits(row.engine)).peekable();
        if let (None, EngineChoice::Only(engine)) = (possible.peek(), engine) {
            if cfg!(not(feature = "qatzip")) && engine == Engine::Qat && method.name() == DEFLATE {
                return Err(ChoiceError::LeftOut { given: format!("engine {engine}"), feature: "qatzip" });
            }
            return Err(ChoiceError::NoEngine { method, engine });
        }
        if let Some(level) = level {
            let mut levels = possible.filter_map(|row| row.levels);
            let Some(first) = levels.next() else {
                return Err(ChoiceError::NoLevels { method, engine, level: level.to_string() });
            };
            if !first.contains(level) {
                let (min, max) = (first.min, first.max);
                return Err(ChoiceError::Level { method, level: level.to_string(), min, max });
            }
        }
        Ok(Self { method, engine, level })
    }

    /// Returns the method.
    pub fn method(self) -> Method {
        self.method
    }

    /// Returns the engine.
    pub fn engine(self) -> EngineChoice {
        self.engine
    }

    /// Returns the level, if one was chosen.
    pub fn level(self) -> Option<i32> {
        self.level
    }

    /// Returns whether the method is chosen for each batch, among [`Encoding::auto_candidates`].
    pub fn is_auto(self) -> bool {
        self.method.name() == AUTO
    }

    /// Returns whether `engine` was named, so that the migration is refused where it is missing.
    pub fn requires(self, engine: Engine) -> bool {
        self.engine == EngineChoice::Only(engine)
    }

    /// Returns whether `engine` may encode some of the content.
    pub fn permits(self, engine: Engine) -> bool {
        self.is_auto() || self.encoding(engine).is_some()
    }

    /// Returns what `engine` writes for this choice. None if the engine does not encode the method, if another engine was named, or if
    /// a level was chosen and the engine has none.
    pub fn encoding(self, engine: Engine) -> Option<Encoding> {
        let rows = self.method.row().encodings.iter();
        let row = rows.filter(|row| self.engine.permits(row.engine)).find(|row| row.engine == engine)?;
        Encoding::new(self.method, row, self.level)
    }

    /// Returns what the CPU writes for this choice; none if another engine was named.
    pub fn by_cpu(self) -> Option<Encoding> {
        self.encoding(Engine::Cpu)
    }

    /// Returns what each possible engine writes for this choice, the preferred engine's first.
    pub fn encodings(self) -> impl Iterator<Item = Encoding> {
        self.method.row().encodings.iter().filter_map(move |row| self.encoding(row.engine))
    }
}

impl EngineChoice {
    fn permits(self, engine: Engine) -> bool {
        self == Self::Auto || self == Self::Only(engine)
    }
}

impl FromStr for Method {
    type Err = ChoiceError;

    fn from_str(name: &str) -> Result<Self, ChoiceError> {
        let given = || name.to_owned();
        Self::find(name).ok_or_else(|| {
            if let Some(feature) = LEFT_OUT.iter().find(|left_out| **left_out == name) {
                return ChoiceError::LeftOut { given: format!("method {name}"), feature };
            }
            match engine_named(name) {
                Some(engine) => ChoiceError::IsEngine { given: given(), engine },
                None => ChoiceError::UnknownMethod { given: given() },
            }
        })
    }
}

impl FromStr for EngineChoice {
    type Err = ChoiceError;

    fn from_str(name: &str) -> Result<Self, ChoiceError> {
        match name {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Only(Engine::Cpu)),
            "qat" => Ok(Self::Only(Engine::Qat)),
            "iaa" => Ok(Self::Only(Engine::Iaa)),
            _ => Err(ChoiceError::UnknownEngine { given: name.to_owned() }),
        }
    }
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Only(engine) => engine.fmt(f),
        }
    }
}

impl FromStr for MethodChoice {
    type Err = ChoiceError;

    fn from_str(text: &str) -> Result<Self, ChoiceError> {
        let (rest, engine) = match text.split_once(" by ") {
            Some((rest, engine)) => (rest, engine.parse()?),
            None => (text, EngineChoice::Auto),
        };
        let Some((method, level)) = rest.split_once(' ') else { return Self::new(rest.parse()?, engine, None) };
        let method: Method = method.parse()?;
        match (level.parse(), method.row().encodings.iter().find_map(|row| row.levels)) {
            (Ok(level), _) => Self::new(method, engine, Some(level)),
            (Err(_), None) => Err(ChoiceError::NoLevels { method, engine, level: level.to_owned() }),
            (Err(_), Some(levels)) => {
                let (min, max) = (levels.min, levels.max);
                Err(ChoiceError::Level { method, level: level.to_owned(), min, max })
            }
        }
    }
}

impl fmt::Display for MethodChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.method)?;
        if let Some(level) = self.level {
            write!(f, " {level}")?;
        }
        match self.engine {
            EngineChoice::Auto => Ok(()),
            EngineChoice::Only(engine) => write!(f, " by {engine}"),
        }
    }
}

/// Returns the engine that `name` is the name of, or of whose gzip it is.
fn engine_named(name: &str) -> Option<Engine> {
    match name {
        "iaa" => Some(Engine::Iaa),
        "qat" | "qatzip" => Some(Engine::Qat),
        "zlib" | "gzip" => Some(Engine::Cpu),
        _ => None,
    }
}

fn no_engine(method: Method, engine: Engine) -> String {
    if method.name() == AUTO {
        return format!(
            "engine {engine} is for the method deflate; auto takes accelerators by itself where there are any"
        );
    }
    format!("method {method} is encoded by the CPU; engine {engine} is for the method deflate")
}

fn no_levels(method: Method, engine: EngineChoice, level: &str) -> String {
    let what = match engine {
        EngineChoice::Only(engine) if method.row().encodings.len() > 1 => format!("method {method} by engine {engine}"),
        _ => format!("method {method}"),
    };
    format!("{what} has no levels, but level {level} was given; leave the level out")
}

fn list_methods() -> String {
    METHODS.iter().map(|row| row.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<MethodChoice>().unwrap_err().to_string()
    }

    #[test]
    fn every_method_engine_and_level_of_the_table_can_be_chosen_and_reads_back() {
        for method in Method::all() {
            let of_each = |row: &crate::EncodingRow| {
                let levels = row.levels.into_iter().flat_map(|levels| levels.min..=levels.max);
                let engines = [EngineChoice::Auto, EngineChoice::Only(row.engine)];
                let levels: Vec<_> = levels.map(Some).chain([None]).collect();
                engines.into_iter().flat_map(move |engine| levels.clone().into_iter().map(move |level| (engine, level)))
            };
            for (engine, level) in method.row().encodings.iter().flat_map(of_each) {
                let choice = MethodChoice::new(method, engine, level).unwrap();
                assert_eq!((choice.method(), choice.engine(), choice.level()), (method, engine, level));
                assert_eq!(choice.to_string().parse(), Ok(choice), "{choice}");
            }
        }
        assert_eq!("none".parse(), Ok(MethodChoice::default()));
        assert_eq!("deflate 6 by qat".parse::<MethodChoice>().unwrap().to_string(), "deflate 6 by qat");
    }

    #[test]
    fn a_choice_has_an_encoding_by_each_engine_that_it_leaves() {
        let encodings = |text: &str| -> Vec<String> {
            text.parse::<MethodChoice>().unwrap().encodings().map(|encoding| encoding.to_string()).collect()
        };
        assert_eq!(encodings("zstd"), ["zstd 1"]);
        assert_eq!(encodings("deflate"), ["deflate by iaa", "deflate 1 by qat", "deflate 1 by cpu"]);
        assert_eq!(encodings("deflate 6"), ["deflate 6 by qat", "deflate 6 by cpu"], "iaa has no levels");
        assert_eq!(encodings("deflate by iaa"), ["deflate by iaa"]);
    }

    #[test]
    fn an_unknown_method_engine_or_level_is_refused_with_the_valid_ones() {
        assert_eq!(error("lzma"), "there is no method 'lzma'; there is none, lz4, zstd, deflate, auto");
        assert_eq!(error("deflate by gpu"), "there is no engine 'gpu'; there is auto, cpu, qat, iaa");
        assert_eq!(error("zstd 10"), "method zstd has the levels -5 to 9, not '10'");
        assert_eq!(error("zstd -6"), "method zstd has the levels -5 to 9, not '-6'");
        assert_eq!(error("zstd fast"), "method zstd has the levels -5 to 9, not 'fast'");
        assert_eq!(error("zstd 99999999999"), "method zstd has the levels -5 to 9, not '99999999999'");
        assert_eq!(error("deflate 0"), "method deflate has the levels 1 to 9, not '0'");
        assert_eq!(error("lz4 1"), "method lz4 has no levels, but level 1 was given; leave the level out");
        assert_eq!(error("lz4 x"), "method lz4 has no levels, but level x was given; leave the level out");
        assert_eq!(
            error("deflate 3 by iaa"),
            "method deflate by engine iaa has no levels, but level 3 was given; leave the level out"
        );
    }

    #[test]
    fn the_name_of_an_engine_is_no_method_and_leads_to_deflate() {
        for (name, engine) in [("iaa", "iaa"), ("qatzip", "qat"), ("zlib", "cpu")] {
            assert_eq!(
                error(name),
                format!("there is no method '{name}': it is the method deflate by the engine {engine}")
            );
        }
    }

    #[test]
    fn an_engine_is_refused_for_a_method_that_it_does_not_encode() {
        assert_eq!(error("zstd by iaa"), "method zstd is encoded by the CPU; engine iaa is for the method deflate");
        assert!(error("auto by qat").starts_with("engine qat is for the method deflate; auto takes accelerators"));
        assert!("zstd by cpu".parse::<MethodChoice>().is_ok());
    }
}
