//! Shared by all benchmarks: runs in turn, medians with their range, targets, the table and the JSON.
//!
//! A benchmark consists of cells. Each round runs every cell once, so that a drift of the machine affects all cells
//! alike, and two cells are compared by runs of the same time.

use std::fmt::Write as _;

use serde_json::{Value, json};
use sterna_engine::cancel::Cancel;

use super::machine::Machine;
use super::provenance::Provenance;
use crate::hosts::HostsError;

/// A figure that every cell of a benchmark has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    /// Its name in the JSON, with the unit: `total_ms`.
    pub(crate) name: &'static str,
    /// Its title in the table.
    pub(crate) title: &'static str,
    /// The divisor in the table: 1e6 shows bytes as megabytes.
    pub(crate) scale: f64,
    /// Decimal places in the table.
    pub(crate) places: usize,
}

/// One configuration that is measured.
pub(crate) struct Cell<'a> {
    pub(crate) name: String,
    /// Runs it once and returns a figure for each column.
    pub(crate) run: Box<dyn FnMut() -> Result<Vec<f64>, HostsError> + 'a>,
}

/// A measured cell.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// A remark in the table.
    pub(crate) detail: String,
    /// A line of figures for each round; empty if the cell is void.
    pub(crate) runs: Vec<Vec<f64>>,
    /// Why it is void, if it is.
    pub(crate) void: Option<String>,
}

/// Median, minimum and maximum of some runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Returns the spread of the values; none if there are none.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Self { median, min, max })
    }
}

/// A target.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) name: String,
    /// The largest permitted value.
    pub(crate) limit: f64,
    /// The measured value: the median, with minimum and maximum of single runs.
    pub(crate) value: Option<Spread>,
    pub(crate) unit: &'static str,
}

impl Target {
    /// Returns whether it is met; none if it was not measured.
    pub(crate) fn met(&self) -> Option<bool> {
        self.value.map(|value| value.median <= self.limit)
    }
}

/// The results of a benchmark.
pub(crate) struct Findings {
    pub(crate) name: &'static str,
    pub(crate) columns: &'static [Column],
    pub(crate) rows: Vec<Row>,
    pub(crate) targets: Vec<Target>,
    /// Notes for the reader of the figures.
    pub(crate) notes: Vec<String>,
}

/// Runs all cells once in each round. A cell that fails is void from then on; the others continue.
///
/// # Errors
/// Cancelled.
pub(crate) fn interleaved(
    cells: &mut [Cell<'_>],
    rounds: usize,
    cancel: &Cancel,
    mut progress: impl FnMut(&str),
) -> Result<Vec<Row>, HostsError> {
    let mut rows: Vec<Row> = cells
        .iter()
        .map(|cell| Row { name: cell.name.clone(), detail: String::new(), runs: Vec::new(), void: None })
        .collect();
    for round in 1..=rounds {
        for (cell, row) in cells.iter_mut().zip(&mut rows) {
            if row.void.is_some() {
                continue;
            }
            let outcome = (cell.run)();
            if cancel.is_cancelled() {
                return Err(HostsError("cancelled".into()));
            }
            match outcome {
                Ok(figures) => {
                    progress(&format!("round {round}/{rounds}  {}: {:.0}", cell.name, figures[0]));
                    row.runs.push(figures);
                }
                Err(error) => {
                    progress(&format!("round {round}/{rounds}  {}: void: {error}", cell.name));
                    row.runs.clear();
                    row.void = Some(error.to_string());
                }
            }
        }
    }
    Ok(rows)
}

impl Findings {
    /// Findings with one row for each name, in which every figure is 1: what a test of the targets judges.
    #[cfg(test)]
    pub(crate) fn all_ones(
        name: &'static str,
        columns: &'static [Column],
        rows: impl IntoIterator<Item = String>,
    ) -> Findings {
        let row = |name| Row { name, detail: String::new(), runs: vec![vec![1.0; columns.len()]], void: None };
        let rows = rows.into_iter().map(row).collect();
        Findings { name, columns, rows, targets: Vec::new(), notes: Vec::new() }
    }

    /// Whether every target is about cells that were measured.
    #[cfg(test)]
    pub(crate) fn has_all_values(&self) -> bool {
        self.targets.iter().all(|target| target.value.is_some())
    }

    fn column(&self, name: &str) -> usize {
        self.columns.iter().position(|column| column.name == name).expect("a column of this benchmark")
    }

    /// Returns a row that is not void.
    fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name && row.void.is_none())
    }

    /// Returns a figure of a cell.
    pub(crate) fn spread(&self, row: &str, column: &str) -> Option<Spread> {
        let column = self.column(column);
        Spread::of(&self.row(row)?.runs.iter().map(|run| run[column]).collect::<Vec<_>>())
    }

    /// Returns the ratio of the same figure of two cells, the first divided by the second: of the medians, with the
    /// range of the rounds.
    pub(crate) fn ratio(&self, row: &str, other: &str, column: &str) -> Option<Spread> {
        let (above, below) = (self.spread(row, column)?, self.spread(other, column)?);
        let column = self.column(column);
        let rounds = self.row(row)?.runs.iter().zip(&self.row(other)?.runs);
        let range = Spread::of(&rounds.map(|(a, b)| a[column] / b[column]).collect::<Vec<_>>())?;
        Some(Spread { median: above.median / below.median, ..range })
    }

    /// Adds the target that a figure of `row` is at most `limit` times that of `other`.
    pub(crate) fn at_most(&mut self, name: &str, limit: f64, row: &str, other: &str, column: &str) {
        let value = self.ratio(row, other, column);
        self.targets.push(Target { name: name.to_owned(), limit, value, unit: "times" });
    }

    /// Returns the table and the targets, as Markdown.
    pub(crate) fn text(&self, machine: &Machine) -> String {
        let mut text = format!("# sterna-bench {}\n\n{}\n\n", self.name, machine.line());
        let mut lines = vec![vec!["cell".to_owned(), "runs".to_owned()]];
        lines[0].extend(self.columns.iter().map(|column| column.title.to_owned()));
        for row in &self.rows {
            let name = if row.detail.is_empty() { row.name.clone() } else { format!("{} ({})", row.name, row.detail) };
            let mut line = vec![name, row.runs.len().to_string()];
            for (index, column) in self.columns.iter().enumerate() {
                let values: Vec<f64> = row.runs.iter().map(|run| run[index] / column.scale).collect();
                line.push(Spread::of(&values).map_or("-".into(), |spread| shown(spread, column.places)));
            }
            lines.push(line);
        }
        table(&mut text, &lines);
        for row in &self.rows {
            if let Some(why) = &row.void {
                let _ = writeln!(text, "\nVoid: {}: {why}", row.name);
            }
        }
        if !self.targets.is_empty() {
            let mut lines = vec![["target", "limit", "figure", "", ""].map(str::to_owned).to_vec()];
            for target in &self.targets {
                lines.push(vec![
                    target.name.clone(),
                    format!("≤ {}", number(target.limit)),
                    target.value.map_or("-".into(), |value| shown(value, if target.limit < 10.0 { 2 } else { 0 })),
                    target.unit.to_owned(),
                    target.met().map_or("not measured", |met| if met { "met" } else { "MISSED" }).to_owned(),
                ]);
            }
            text.push('\n');
            table(&mut text, &lines);
        }
        for note in &self.notes {
            let _ = write!(text, "\n* {note}");
        }
        text
    }

    /// Returns the same as JSON, for programs and `sterna-bench report`.
    pub(crate) fn json(&self, machine: &Machine, provenance: &Provenance) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(|row| self.row_json(row)).collect();
        let targets: Vec<Value> = self
            .targets
            .iter()
            .map(|target| {
                json!({
                    "name": target.name,
                    "limit": target.limit,
                    "value": target.value.map(|value| value.median),
                    "min": target.value.map(|value| value.min),
                    "max": target.value.map(|value| value.max),
                    "unit": target.unit,
                    "met": target.met(),
                })
            })
            .collect();
        json!({
            "name": self.name,
            "command": provenance.command,
            "date": provenance.date,
            "commit": provenance.commit,
            "machine": machine,
            "rows": rows,
            "targets": targets,
            "notes": self.notes,
        })
    }

    fn row_json(&self, row: &Row) -> Value {
        let mut value = json!({ "name": row.name, "detail": row.detail, "runs": row.runs.len(), "void": row.void });
        for (index, column) in self.columns.iter().enumerate() {
            let values: Vec<f64> = row.runs.iter().map(|run| run[index]).collect();
            if let Some(Spread { median, min, max }) = Spread::of(&values) {
                value[column.name] = json!({ "median": median, "min": min, "max": max, "values": values });
            }
        }
        value
    }
}

fn shown(spread: Spread, places: usize) -> String {
    let Spread { median, min, max } = spread;
    if format!("{min:.places$}") == format!("{max:.places$}") {
        return format!("{median:.places$}");
    }
    format!("{median:.places$} ({min:.places$}–{max:.places$})")
}

fn number(value: f64) -> String {
    if value < 10.0 { format!("{value}") } else { format!("{value:.0}") }
}

/// Writes a table with columns as wide as needed; the first line is the heading.
fn table(text: &mut String, lines: &[Vec<String>]) {
    let columns = lines.first().map_or(0, Vec::len);
    let widths: Vec<usize> =
        (0..columns).map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0)).collect();
    for (index, line) in lines.iter().enumerate() {
        for (cell, width) in line.iter().zip(&widths) {
            let _ = write!(text, "| {cell:<width$} ");
        }
        text.push_str("|\n");
        if index == 0 {
            for width in &widths {
                let _ = write!(text, "|{:-<1$}", "", width + 2);
            }
            text.push_str("|\n");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[Column { name: "total_ms", title: "total, ms", scale: 1.0, places: 0 }];

    fn findings(rows: &[(&str, &[f64])]) -> Findings {
        let row = |&(name, runs): &(&str, &[f64])| Row {
            name: name.into(),
            detail: String::new(),
            runs: runs.iter().map(|&run| vec![run]).collect(),
            void: None,
        };
        Findings {
            name: "test",
            columns: COLUMNS,
            rows: rows.iter().map(row).collect(),
            targets: Vec::new(),
            notes: Vec::new(),
        }
    }

    #[test]
    fn the_median_is_the_middle_one_or_between_the_two() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of(&[4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn a_target_is_met_at_its_limit_and_missed_above_it_and_neither_where_it_was_not_measured() {
        let mut findings =
            findings(&[("ours", &[160.0, 150.0, 170.0]), ("theirs", &[100.0, 100.0, 100.0]), ("none", &[])]);
        findings.at_most("at", 1.6, "ours", "theirs", "total_ms");
        findings.at_most("above", 1.59, "ours", "theirs", "total_ms");
        findings.at_most("unmeasured", 9.0, "ours", "none", "total_ms");
        findings.at_most("unknown", 9.0, "ours", "other", "total_ms");
        let met: Vec<_> = findings.targets.iter().map(Target::met).collect();
        assert_eq!(met, [Some(true), Some(false), None, None]);
        assert_eq!(findings.targets[0].value, Some(Spread { median: 1.6, min: 1.5, max: 1.7 }));
    }

    #[test]
    fn cells_run_in_turn_and_one_that_fails_is_void_without_ending_the_others() {
        let order = std::cell::RefCell::new(Vec::new());
        let cell = |name: &'static str, fails: usize| {
            let (order, mut runs) = (&order, 0);
            Cell {
                name: name.into(),
                run: Box::new(move || {
                    order.borrow_mut().push(name);
                    runs += 1;
                    if runs == fails { Err(HostsError("broke".into())) } else { Ok(vec![runs as f64]) }
                }),
            }
        };
        let mut cells = [cell("a", 0), cell("b", 2), cell("c", 0)];
        let rows = interleaved(&mut cells, 3, &Cancel::new(), |_| {}).unwrap();
        drop(cells);
        assert_eq!(order.into_inner(), ["a", "b", "c", "a", "b", "c", "a", "c"]);
        assert_eq!((rows[0].runs.len(), rows[1].runs.len(), rows[2].runs.len()), (3, 0, 3));
        assert_eq!(rows[1].void.as_deref(), Some("broke"));
    }

    #[test]
    fn the_table_and_the_json_agree() {
        let mut findings = findings(&[("ours", &[1500.0, 1400.0, 1600.0]), ("theirs", &[1000.0])]);
        findings.at_most("fast", 1.6, "ours", "theirs", "total_ms");
        findings.at_most("slow", 1.4, "ours", "theirs", "total_ms");
        findings.at_most("left out", 1.6, "ours", "nobody", "total_ms");
        let machine = Machine::describe();
        let text = findings.text(&machine);
        assert!(text.contains("| ours   | 3    | 1500 (1400–1600) |"), "{text}");
        for words in
            [["fast", "≤ 1.6", "| met "], ["slow", "≤ 1.4", "| MISSED "], ["left out", "≤ 1.6", "| not measured |"]]
        {
            let shows = |line: &str| words.iter().all(|word| line.contains(word));
            assert!(text.lines().any(shows), "{words:?}: {text}");
        }
        let json = findings.json(&machine, &Provenance::of_this_run());
        assert_eq!(json["rows"][0]["total_ms"]["median"], 1500.0);
        let met: Vec<_> = (0..3).map(|target| json["targets"][target]["met"].as_bool()).collect();
        assert_eq!(met, [Some(true), Some(false), None]);
        assert!(json["machine"]["cpus"].as_u64() > Some(0));
    }
}
