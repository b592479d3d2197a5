//! Reads the JSON that the benchmarks wrote.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::machine::Machine;
use crate::provenance::Provenance;

/// All files of results, by the name of their benchmark.
pub(super) struct Set(BTreeMap<String, Results>);

/// The results of one benchmark.
#[derive(Debug, Deserialize)]
pub(super) struct Results {
    name: String,
    pub(super) machine: Machine,
    #[serde(flatten)]
    pub(super) provenance: Provenance,
    rows: Vec<Row>,
}

/// A measured cell.
#[derive(Debug, Deserialize)]
pub(super) struct Row {
    pub(super) name: String,
    /// Why the cell does not count, if it does not.
    pub(super) void: Option<String>,
    /// The figures of each column, as `{"values": […]}`, and the row's other fields.
    #[serde(flatten)]
    columns: BTreeMap<String, Value>,
}

impl Set {
    /// Reads each `*.json` of the directory.
    ///
    /// # Errors
    /// A file cannot be read, or is not what a benchmark writes; two files are of the same benchmark.
    pub(super) fn read(directory: &Path) -> Result<Self, String> {
        let failed = |path: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let mut set = BTreeMap::new();
        for entry in std::fs::read_dir(directory).map_err(|error| failed(directory, &error))? {
            let path = entry.map_err(|error| failed(directory, &error))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let text = std::fs::read(&path).map_err(|error| failed(&path, &error))?;
            let results: Results = serde_json::from_slice(&text).map_err(|error| failed(&path, &error))?;
            if let Some(other) = set.insert(results.name.clone(), results) {
                return Err(format!("{}: another file is of '{}', too", path.display(), other.name));
            }
        }
        Ok(Self(set))
    }

    /// Returns the results of a benchmark, if there are any.
    pub(super) fn of(&self, benchmark: &str) -> Option<&Results> {
        self.0.get(benchmark)
    }
}

impl Results {
    /// Returns a cell that was run.
    pub(super) fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Returns a line with the command, the machine and the date.
    pub(super) fn origin(&self) -> String {
        let Provenance { command, date, commit } = &self.provenance;
        format!("`{command}` · {} · commit {commit}, {date}", self.machine.line())
    }
}

impl Row {
    /// Returns the figures of a column, one for each round; none if the cell was not run or has no such column.
    pub(super) fn values(&self, column: &str) -> Option<Vec<f64>> {
        let values: Vec<f64> = serde_json::from_value(self.columns.get(column)?.get("values")?.clone()).ok()?;
        (!values.is_empty()).then_some(values)
    }
}
