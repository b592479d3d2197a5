//! The accelerators to use, as `--accel` selects them.

use std::fmt::{Display, Formatter};
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

use crate::kind::Kind;

/// One device selector of an `--accel` list.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceSelector {
    /// All queues that can be opened, possibly none.
    Auto,
    /// Every usable queue of this kind of accelerator; at least one.
    Kind(Kind),
    /// This queue, by its device file.
    Queue(Kind, PathBuf),
    /// The software model, described by this file.
    Model(PathBuf),
}

/// Which accelerators to use, in the form of `--accel`: a comma list of `auto`, `cpu`, `dsa`, `iaa`,
/// `dsa:/dev/dsa/wq0.0`, `iaa:/dev/iax/wq1.0`, `model:FILE.json`.
///
/// `auto` uses what is available. An accelerator that is requested by name and not available is an error, before
/// anything is changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accelerators {
    selectors: Vec<DeviceSelector>,
}

/// An `--accel` list that is not valid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{wrong}; it takes a comma list of auto, cpu, dsa, iaa, dsa:/dev/dsa/wqX.Y, iaa:/dev/iax/wqX.Y, model:FILE.json"
)]
pub struct AcceleratorsError {
    wrong: String,
}

impl Accelerators {
    /// Selects all accelerators that are available.
    pub fn auto() -> Self {
        Self { selectors: vec![DeviceSelector::Auto] }
    }

    /// Selects the CPU alone.
    pub fn cpu() -> Self {
        Self { selectors: vec![DeviceSelector::Kind(Kind::Cpu)] }
    }

    /// Selects the software model that `file` describes.
    pub fn model(file: impl Into<PathBuf>) -> Self {
        Self { selectors: vec![DeviceSelector::Model(file.into())] }
    }

    /// Returns the selectors, in order.
    pub fn selectors(&self) -> &[DeviceSelector] {
        &self.selectors
    }
}

impl Default for Accelerators {
    fn default() -> Self {
        Self::auto()
    }
}

impl FromStr for Accelerators {
    type Err = AcceleratorsError;

    fn from_str(given: &str) -> Result<Self, AcceleratorsError> {
        let wrong = |wrong: String| AcceleratorsError { wrong };
        let mut selectors = Vec::new();
        for selector in given.split(',').map(str::trim) {
            let selector = match selector.split_once(':') {
                None => match selector {
                    "auto" => DeviceSelector::Auto,
                    "cpu" => DeviceSelector::Kind(Kind::Cpu),
                    "dsa" => DeviceSelector::Kind(Kind::Dsa),
                    "iaa" => DeviceSelector::Kind(Kind::Iaa),
                    "" => return Err(wrong("an empty name".into())),
                    other => return Err(wrong(format!("there is no accelerator called {other}"))),
                },
                Some((kind @ ("dsa" | "iaa" | "model"), "")) => return Err(wrong(format!("{kind}: without a path"))),
                Some(("dsa", path)) => DeviceSelector::Queue(Kind::Dsa, path.into()),
                Some(("iaa", path)) => DeviceSelector::Queue(Kind::Iaa, path.into()),
                Some(("model", path)) => DeviceSelector::Model(path.into()),
                Some((other, _)) => return Err(wrong(format!("there is no accelerator called {other} with a path"))),
            };
            if selectors.contains(&selector) {
                return Err(wrong(format!("{selector} twice")));
            }
            selectors.push(selector);
        }
        let alone =
            selectors.iter().any(|selector| matches!(selector, DeviceSelector::Auto | DeviceSelector::Kind(Kind::Cpu)));
        if alone && selectors.len() > 1 {
            return Err(wrong("auto and cpu stand alone (the CPU always helps out)".into()));
        }
        Ok(Self { selectors })
    }
}

impl Display for DeviceSelector {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Kind(kind) => write!(f, "{}", kind.name()),
            Self::Queue(kind, path) => write!(f, "{}:{}", kind.name(), path.display()),
            Self::Model(path) => write!(f, "model:{}", path.display()),
        }
    }
}

impl Display for Accelerators {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        for (at, selector) in self.selectors.iter().enumerate() {
            write!(f, "{}{selector}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written_alike() {
        for list in
            ["auto", "cpu", "dsa", "iaa", "dsa,iaa", "dsa:/dev/dsa/wq0.0,iaa", "model:a b.json", "dsa:/x,dsa:/y"]
        {
            assert_eq!(list.parse::<Accelerators>().unwrap().to_string(), list);
        }
        assert_eq!(" dsa , iaa ".parse::<Accelerators>().unwrap().to_string(), "dsa,iaa");
    }

    #[test]
    fn an_invalid_list_is_refused_and_the_error_lists_what_is_valid() {
        for list in ["", "gpu", "dsa:", "model:", "cpu:/x", "dsa,,iaa", "dsa,dsa", "auto,dsa", "dsa,cpu"] {
            let error = list.parse::<Accelerators>().unwrap_err().to_string();
            assert!(error.contains("model:FILE.json"), "{error}");
            // The caller that prints it names the option and its value.
            assert!(!error.contains("--accel"), "{error}");
        }
    }
}
