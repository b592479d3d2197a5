//! The user's choice of a method and its level, as a type that is always valid.

use crate::method::LEFT_OUT;
use crate::{Adaptive, CodecError, Encoder, Engine, Engines, METHODS, Method};
use std::fmt;
use thiserror::Error;

/// A method at one of its levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MethodChoice {
    method: Method,
    /// Within the method's levels; 0 where it has none.
    level: i32,
}

/// Why a method and a level are no valid choice.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ChoiceError {
    /// There is no such method.
    #[error("there is no method '{given}'; there is {}", list_methods())]
    UnknownMethod {
        /// The value that was given.
        given: String,
    },
    /// The method is not in this build.
    #[error("method {given} is not in this build: it needs the feature `{given}`")]
    LeftOut {
        /// The value that was given, which is the feature's name too.
        given: String,
    },
    /// The method has no levels.
    #[error("method {method} has no levels, but level {level} was given; leave the level out")]
    NoLevels {
        /// The method.
        method: Method,
        /// The value that was given.
        level: String,
    },
    /// The method has other levels.
    #[error("method {method} has the levels {least} to {most}, not '{level}'")]
    Level {
        /// The method.
        method: Method,
        /// The value that was given.
        level: String,
        /// Its lowest level.
        least: i32,
        /// Its highest level.
        most: i32,
    },
}

/// No compression.
impl Default for MethodChoice {
    fn default() -> Self {
        Self { method: Method::from(&METHODS[0]), level: 0 }
    }
}

impl MethodChoice {
    /// Returns the method `auto`: for each batch the method that drains memory fastest.
    pub fn auto() -> Self {
        Self { method: Method::from_name("auto").expect("the table has it"), level: 0 }
    }

    /// Returns `method` at `level`, or at its default level.
    pub fn new(method: Method, level: Option<i32>) -> Result<Self, ChoiceError> {
        match (method.row().levels, level) {
            (None, None) => Ok(Self { method, level: 0 }),
            (None, Some(level)) => Err(ChoiceError::NoLevels { method, level: level.to_string() }),
            (Some(levels), None) => Ok(Self { method, level: levels.default }),
            (Some(levels), Some(level)) if (levels.least..=levels.most).contains(&level) => Ok(Self { method, level }),
            (Some(levels), Some(level)) => {
                Err(ChoiceError::Level { method, level: level.to_string(), least: levels.least, most: levels.most })
            }
        }
    }

    /// Parses the names of a method and, if given, of its level.
    pub fn parse(method: &str, level: Option<&str>) -> Result<Self, ChoiceError> {
        let given = method.to_owned();
        let method = match Method::from_name(method) {
            Some(method) => method,
            None if LEFT_OUT.contains(&method) => return Err(ChoiceError::LeftOut { given }),
            None => return Err(ChoiceError::UnknownMethod { given }),
        };
        let Some(given) = level else { return Self::new(method, None) };
        match (given.parse(), method.row().levels) {
            (Ok(level), _) => Self::new(method, Some(level)),
            (Err(_), None) => Err(ChoiceError::NoLevels { method, level: given.to_owned() }),
            (Err(_), Some(levels)) => {
                Err(ChoiceError::Level { method, level: given.to_owned(), least: levels.least, most: levels.most })
            }
        }
    }

    /// Returns the method.
    pub fn method(self) -> Method {
        self.method
    }

    /// As [`Self::encoder`], but the encoder tries every batch: for callers that decide themselves which batches to
    /// try.
    ///
    /// # Errors
    /// As [`MethodChoice::encoder`].
    pub fn untiring_encoder(self, engines: &Engines) -> Result<Box<dyn Encoder>, CodecError> {
        engines.encoder(self)
    }

    /// Returns whether the method is chosen for each batch, among [`MethodChoice::auto_candidates`].
    pub fn is_auto(self) -> bool {
        self.method.name() == "auto"
    }

    /// Returns the methods from which `auto` chooses, the cheapest first. According to the measurements, each is the
    /// best at some price.
    pub fn auto_candidates(engines: &Engines) -> Vec<Self> {
        // A build may leave methods out.
        let candidate = |name, level| Self::parse(name, level).ok();
        let iaa = candidate("iaa", None).filter(|iaa| engines.of(*iaa) == Engine::Iaa);
        let qatzip = candidate("qatzip", None).filter(|qatzip| engines.has_hardware(*qatzip));
        let zstd = ["-1", "1", "3", "6"].map(|level| candidate("zstd", Some(level)));
        [candidate("none", None), candidate("lz4", None), iaa, qatzip].into_iter().chain(zstd).flatten().collect()
    }

    /// Returns the level, where the method has levels.
    pub fn level(self) -> Option<i32> {
        self.method.row().levels.map(|_| self.level)
    }

    /// Returns an encoder that skips most attempts while content does not shrink: the method's own engine if it is
    /// among `engines`, else the CPU. The CPU's fails only for lack of memory.
    pub fn encoder(self, engines: &Engines) -> Result<Adaptive, CodecError> {
        Ok(Adaptive::new(engines.encoder(self)?))
    }
}

/// In the form of reports: the name, and the level where there is one: `lz4`, `zstd -5`.
impl fmt::Display for MethodChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.level() {
            None => write!(f, "{}", self.method),
            Some(level) => write!(f, "{} {level}", self.method),
        }
    }
}

/// Returns all methods with their levels, for error texts.
fn list_methods() -> String {
    let each: Vec<String> = METHODS
        .iter()
        .map(|row| match row.levels {
            None => row.name.to_owned(),
            Some(levels) => format!("{} (levels {} to {})", row.name, levels.least, levels.most),
        })
        .collect();
    each.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(method: &str, level: Option<&str>) -> String {
        MethodChoice::parse(method, level).unwrap_err().to_string()
    }

    #[test]
    fn every_method_and_level_of_the_table_can_be_chosen_and_is_shown() {
        for row in METHODS {
            let choice = MethodChoice::parse(row.name, None).unwrap();
            assert_eq!((choice.method().name(), choice.level()), (row.name, row.levels.map(|levels| levels.default)));
            for level in row.levels.iter().flat_map(|levels| levels.least..=levels.most) {
                let choice = MethodChoice::parse(row.name, Some(&level.to_string())).unwrap();
                assert_eq!(choice.to_string(), format!("{} {level}", row.name));
                assert_eq!(choice.level(), Some(level));
            }
        }
        assert_eq!(MethodChoice::parse("none", None), Ok(MethodChoice::default()));
        assert_eq!(MethodChoice::default().to_string(), "none");
        assert_eq!(MethodChoice::parse("zstd", None).unwrap().to_string(), "zstd 1");
    }

    #[test]
    fn an_unknown_method_or_level_is_refused_with_the_valid_ones() {
        assert_eq!(
            error("lzma", None),
            "there is no method 'lzma'; there is none, lz4, zstd (levels -5 to 9), zlib (levels 1 to 9), auto, iaa, qatzip (levels \
             1 to 9)"
        );
        assert_eq!(error("zstd", Some("10")), "method zstd has the levels -5 to 9, not '10'");
        assert_eq!(error("zstd", Some("-6")), "method zstd has the levels -5 to 9, not '-6'");
        assert_eq!(error("zstd", Some("fast")), "method zstd has the levels -5 to 9, not 'fast'");
        assert_eq!(error("zstd", Some("99999999999")), "method zstd has the levels -5 to 9, not '99999999999'");
        assert_eq!(error("zlib", Some("0")), "method zlib has the levels 1 to 9, not '0'");
        assert_eq!(error("lz4", Some("1")), "method lz4 has no levels, but level 1 was given; leave the level out");
        assert_eq!(error("lz4", Some("x")), "method lz4 has no levels, but level x was given; leave the level out");
    }
}
