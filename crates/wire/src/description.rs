//! What a side's monitor reports about its virtual machine: named facts, which the source compares before anything moves.
//!
//! A later version describes more without another message. So a fact that a side lacks means something only within a family that this side
//! has looked at.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::limits::{MAX_FACT_NAME, MAX_FACT_VALUE, MAX_FACTS};

/// A description of a virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// The families of facts that this side has looked at. A fact's family is its name up to the first dot.
    pub families: BTreeSet<String>,
    /// The facts: name and value.
    pub facts: BTreeMap<String, String>,
}

/// A description that is beyond a limit.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DescriptionError {
    /// Too many facts or families.
    #[error("a description of a machine has {0} facts; up to {MAX_FACTS} are possible")]
    Count(usize),
    /// A name is empty or too long.
    #[error("a fact about a machine has a name of {0} bytes; between 1 and {MAX_FACT_NAME} are possible")]
    Name(usize),
    /// A value is too long.
    #[error("a fact about a machine has {0} bytes; up to {MAX_FACT_VALUE} are possible")]
    Value(usize),
}

impl Description {
    /// Checks a description against the limits, independently of the other side.
    ///
    /// # Errors
    /// The first limit that it is beyond.
    pub fn check(&self) -> Result<(), DescriptionError> {
        let count = self.facts.len().max(self.families.len());
        if count > MAX_FACTS {
            return Err(DescriptionError::Count(count));
        }
        let names = self.facts.keys().chain(&self.families).map(String::len);
        if let Some(length) = names.into_iter().find(|length| !(1..=MAX_FACT_NAME).contains(length)) {
            return Err(DescriptionError::Name(length));
        }
        match self.facts.values().map(String::len).find(|length| *length > MAX_FACT_VALUE) {
            Some(length) => Err(DescriptionError::Value(length)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(facts: impl IntoIterator<Item = (String, String)>) -> Description {
        Description { families: BTreeSet::new(), facts: facts.into_iter().collect() }
    }

    #[test]
    fn a_description_beyond_a_limit_is_refused() {
        let numbered = |count: usize| of((0..count).map(|number| (format!("device.{number}"), String::new())));
        assert_eq!(numbered(MAX_FACTS).check(), Ok(()));
        assert_eq!(numbered(MAX_FACTS + 1).check(), Err(DescriptionError::Count(MAX_FACTS + 1)));
        let one = |name: usize, value: usize| of([("n".repeat(name), "v".repeat(value))]).check();
        assert_eq!(one(MAX_FACT_NAME, MAX_FACT_VALUE), Ok(()));
        assert_eq!(one(0, 0), Err(DescriptionError::Name(0)));
        assert_eq!(one(MAX_FACT_NAME + 1, 0), Err(DescriptionError::Name(MAX_FACT_NAME + 1)));
        assert_eq!(one(1, MAX_FACT_VALUE + 1), Err(DescriptionError::Value(MAX_FACT_VALUE + 1)));
        let families = Description { families: ["f".repeat(MAX_FACT_NAME + 1)].into(), ..Description::default() };
        assert_eq!(families.check(), Err(DescriptionError::Name(MAX_FACT_NAME + 1)));
    }
}
