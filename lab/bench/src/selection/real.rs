//! The real cells: memory moved from process to process by the library, with `auto` and each fixed choice in turn.

use std::cell::RefCell;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::corpus::Corpus;
use sterna_qemu_lab::net::Link;

use super::super::BenchArgs;
use super::super::harness::{Cell, Row, Spread, interleaved};
use super::super::measured::Measured;
use super::super::ram::guest::{Content, Memory};
use super::super::ram::pair::{Rig, Shape, SideProcess};
use super::super::ram::side::Mover;
use super::plan::{Cpu, Network, Plan};
use super::{COLUMNS, Compared, MIB};
use crate::hosts::{Hosts, HostsError, Side};

const CHANNELS: u16 = 2;
/// The choices that are compared: a method and its level.
const CHOICES: [(&str, Option<&str>); 6] =
    [("auto", None), ("none", None), ("lz4", None), ("zstd", Some("-1")), ("zstd", Some("1")), ("zstd", Some("3"))];
/// When the network changes, in cells in which it does.
const CHANGE_AFTER: Duration = Duration::from_millis(1200);

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Real {
    pub(super) corpus: Corpus,
    network: Network,
    then: Option<Network>,
    /// MiB of content, usually and with `--quick`; 0 if `--quick` leaves the cell out.
    mib: (u64, u64),
}

const SLOW: Network = Network(100_000_000);
const GIGABIT: Network = Network(1_000_000_000);
const TWO: Network = Network(2_500_000_000);

/// Returns all real cells.
pub(super) fn named() -> [Real; 12] {
    use Corpus::{Binaries, Compressed, GuestRam, Images, Mixed, Text};
    let cell = |corpus, network, mib| Real { corpus, network, then: None, mib };
    [
        cell(Mixed, Network::UNLIMITED, (1024, 384)),
        cell(Binaries, Network::UNLIMITED, (384, 0)),
        cell(Images, Network::UNLIMITED, (1024, 0)),
        cell(Text, TWO, (256, 256)),
        cell(GuestRam, TWO, (512, 0)),
        cell(Mixed, TWO, (1024, 0)),
        cell(Binaries, GIGABIT, (384, 0)),
        cell(GuestRam, GIGABIT, (384, 256)),
        cell(Mixed, GIGABIT, (384, 256)),
        cell(Compressed, GIGABIT, (128, 0)),
        cell(Mixed, SLOW, (64, 32)),
        Real { then: Some(Network(250_000_000)), ..cell(Mixed, TWO, (512, 384)) },
    ]
}

impl Real {
    pub(super) fn name(&self) -> String {
        let then = self.then.map_or(String::new(), |then| format!(", then {}", then.name()));
        format!("real: {}, {}{then}", self.corpus.name(), self.network.name())
    }

    pub(super) fn is_quick(&self) -> bool {
        self.mib.1 > 0
    }

    /// Returns the same cell in virtual time.
    pub(super) fn plan(&self) -> Plan {
        let plan = Plan::new(self.corpus, self.network, CHANNELS.into());
        Plan { then: self.then, cpu: Cpu::OneCore, ..plan }
    }
}

fn link(network: Network) -> Link {
    Link { bits_per_second: Some(network.0).filter(|bits| *bits > 0), delay: None }
}

fn name(choice: (&str, Option<&str>)) -> String {
    choice.1.map_or(choice.0.to_owned(), |level| format!("{} {level}", choice.0))
}

/// Runs every choice in turn.
pub(super) fn measure(
    args: &BenchArgs,
    cell: &Real,
    computed: &Compared,
    cancel: &Cancel,
    progress: &dyn Fn(&str),
) -> Result<Row, HostsError> {
    let hosts = match cell.network {
        Network::UNLIMITED => Hosts::loopback(),
        network => Hosts::namespaces(link(network))?,
    };
    let rig = Rig { hosts, cpus: args.cpus, cancel };
    let filled = MIB * if args.quick && cell.is_quick() { cell.mib.1 } else { cell.mib.0 };
    let content = Content::Corpus { corpus: cell.corpus, bytes: filled };
    let shape = Shape { memory: Memory::Anonymous, bytes: Content::around_corpus(filled), content };
    progress(&format!("{}: {} MiB are put together", cell.name(), filled >> 20));
    let source = RefCell::new(rig.side(Side::A, shape)?);
    let mut cells: Vec<Cell<'_>> = Vec::new();
    for choice in CHOICES {
        let (source, rig) = (&source, &rig);
        let mut first = true;
        let run = move || {
            // The arrived memory is verified once for each choice.
            let verify = std::mem::take(&mut first);
            let by = Mover::Method { method: choice.0.into(), level: choice.1.map(str::to_owned), writes: None };
            let measured = migrate(cell, rig, source, shape, &by, verify)?;
            Ok(vec![measured.total_ms, measured.source_cpu / measured.total_ms * 1e3])
        };
        cells.push(Cell { name: format!("{}, {}", cell.name(), name(choice)), run: Box::new(run) });
    }
    let rows = interleaved(&mut cells, args.rounds(), cancel, progress)?;
    drop(cells);
    row(cell, &rows, computed)
}

/// Runs one migration, changing the network meanwhile if the cell does.
fn migrate(
    cell: &Real,
    rig: &Rig<'_>,
    source: &RefCell<SideProcess<'_>>,
    shape: Shape,
    by: &Mover,
    verify: bool,
) -> Result<Measured, HostsError> {
    let expected = shape.content.filled(shape.bytes).iter().map(|part| part.end - part.start).sum::<u64>() + 128 * MIB;
    let Some(then) = cell.then else { return rig.migrate(source, shape, expected, by, CHANNELS, verify) };
    rig.hosts.set_link(link(cell.network))?;
    std::thread::scope(|scope| {
        let (ended, end) = channel::<()>();
        let hosts = &rig.hosts;
        let changing = scope.spawn(move || match end.recv_timeout(CHANGE_AFTER) {
            Err(RecvTimeoutError::Timeout) => hosts.set_link(link(then)),
            _ => Ok(()),
        });
        let measured = rig.migrate(source, shape, expected, by, CHANNELS, verify);
        drop(ended);
        changing.join().map_err(|_| HostsError("the thread that changes the network has panicked".into()))??;
        measured
    })
}

/// Returns all choices of a cell in one line: the rounds of `auto`, of the fixed choice with the best median, and of
/// none; `auto` is compared with medians.
fn row(cell: &Real, rows: &[Row], computed: &Compared) -> Result<Row, HostsError> {
    if let Some(broken) = rows.iter().find_map(|row| row.void.as_ref()) {
        return Err(HostsError(broken.clone()));
    }
    let times = |row: &Row| row.runs.iter().map(|run| run[0]).collect::<Vec<f64>>();
    let medians: Vec<f64> =
        rows.iter().map(|row| Spread::of(&times(row)).map_or(f64::INFINITY, |spread| spread.median)).collect();
    let fixed = 1..CHOICES.len();
    let best = fixed.clone().min_by(|a, b| medians[*a].total_cmp(&medians[*b])).expect("there are fixed choices");
    let gain = computed.oracle.time / computed.fixed[computed.best].1.time;
    let runs = rows[0].runs.iter().zip(&rows[1].runs).zip(&rows[best].runs).map(|((auto, none), fastest)| {
        let oracle = fastest[0] * gain;
        let to_best = auto[0] / medians[best];
        let figures = vec![auto[0], fastest[0], none[0], oracle, to_best, to_best / gain, auto[1], 0.0, 0.0];
        debug_assert_eq!(figures.len(), COLUMNS.len());
        figures
    });
    let runs = runs.collect();
    let each: Vec<String> = fixed.map(|at| format!("{} {:.0}", name(CHOICES[at]), medians[at])).collect();
    let detail = format!("{}; computed best: {}", each.join(", "), computed.fixed[computed.best].0);
    Ok(Row { name: cell.name(), detail, runs, void: None })
}

#[cfg(test)]
mod tests {
    use sterna_simulator::path::Took;

    use super::*;

    #[test]
    fn there_are_twelve_and_half_of_them_with_quick_one_of_them_changing() {
        let named = named();
        assert_eq!(named.iter().map(Real::name).collect::<std::collections::HashSet<_>>().len(), 12);
        let quick: Vec<&Real> = named.iter().filter(|real| real.is_quick()).collect();
        assert_eq!(quick.len(), 6);
        assert_eq!(quick.iter().filter(|real| real.then.is_some()).count(), 1);
        assert_eq!(named[11].name(), "real: mixed, 2.5 Gbit/s, then 250 Mbit/s");
    }

    #[test]
    fn a_line_compares_auto_with_the_fixed_choice_of_the_least_median() {
        let run = |name: &str, times: [f64; 3]| Row {
            name: name.into(),
            detail: String::new(),
            runs: times.iter().map(|time| vec![*time, 0.5]).collect(),
            void: None,
        };
        let mut rows: Vec<Row> = CHOICES.map(|choice| run(&name(choice), [300.0, 310.0, 290.0])).into();
        rows[0] = run("auto", [110.0, 100.0, 104.0]);
        rows[3] = run("zstd -1", [99.0, 500.0, 100.0]);
        let took = |time| Took { time, ..Took::default() };
        let computed = Compared { fixed: vec![("lz4".into(), took(10.0), true)], best: 0, oracle: took(9.0) };
        let cell = named()[0];
        let line = row(&cell, &rows, &computed).unwrap();
        assert_eq!(line.runs[0][..4], [110.0, 99.0, 300.0, 99.0 * 0.9]);
        // Relative to the median of 100 ms, whatever single rounds were.
        assert_eq!(line.runs.iter().map(|run| run[4]).collect::<Vec<_>>(), [1.1, 1.0, 1.04]);
        assert!((line.runs[1][5] - 1.0 / 0.9).abs() < 1e-9, "{:?}", line.runs);
        assert!(line.detail.contains("zstd -1 100") && line.detail.ends_with("computed best: lz4"), "{}", line.detail);
        rows[2].void = Some("broke".into());
        assert_eq!(row(&cell, &rows, &computed).unwrap_err().to_string(), "broke");
    }
}
