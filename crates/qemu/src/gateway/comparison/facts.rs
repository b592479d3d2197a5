//! Facts about a machine, by their names.

use std::collections::BTreeMap;

/// Facts, which become a description.
pub(super) type Facts = BTreeMap<String, String>;
