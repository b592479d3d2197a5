//! `sterna-bench delta`: what deltas save: sending only the changed words of a page.
//!
//! Two parts, both over a virtual cable of 1 Gbit/s. *Pages*: every page of a guest changes in every round, each cell
//! with its kind of change; the figure is pages sent per second, by zstd with deltas and without ([`delta_side`](super::ram::delta_side)). *Rounds*:
//! a microvm writes one word of page after page of 1 GiB, 1000 MiB/s of pages; the figure is whether it can be moved.

use std::time::Duration;

use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::net::Link;

use super::BenchArgs;
use super::dirty_rate::attempt::{Guest, PAGE, Setting, Site};
use super::harness::{Cell, Column, Findings, Row, Spread, Target, interleaved};
use super::ram::CHANNELS;
use super::ram::delta_side::{Change, Content, Found, Job, Order};
use super::ram::pair::{Rig, SideProcess, unexpected};
use super::ram::side::{Answer, Order as SideOrder};
use crate::hosts::{Hosts, HostsError, Side};

const COLUMNS: &[Column] = &[
    Column { name: "pages_per_second", title: "1000 pages/s", scale: 1e3, places: 1 },
    Column { name: "page_us", title: "a page, µs", scale: 1.0, places: 2 },
    Column { name: "source_cpu_us", title: "source CPU, µs", scale: 1.0, places: 2 },
    Column { name: "wire_bytes", title: "wire, bytes", scale: 1.0, places: 0 },
    Column { name: "deltas", title: "deltas, %", scale: 0.01, places: 0 },
    Column { name: "rounds", title: "rounds", scale: 1.0, places: 0 },
    Column { name: "total_ms", title: "total, ms", scale: 1.0, places: 0 },
    Column { name: "downtime_ms", title: "downtime, ms", scale: 1.0, places: 0 },
    Column { name: "achieved", title: "guest's rate, %", scale: 0.01, places: 0 },
    Column { name: "failed", title: "not moved", scale: 1.0, places: 0 },
];

const GIGABIT: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;
/// Pages per second that the moved guest dirties: 1000 MiB.
const PAGES_PER_SECOND: f64 = 256_000.0;
/// How many times a run with a guest that is too slow is repeated.
const TOO_SLOW: usize = 2;
/// The ratio by which equal cells differ from run to run.
const NOISE: f64 = 1.03;

/// A kind of content and of change, and the target: the largest part of the time per page that deltas may take.
struct Kind {
    name: &'static str,
    content: Content,
    change: Change,
    limit: f64,
}

const KINDS: &[Kind] = &[
    Kind { name: "incompressible, small changes", content: Content::Random, change: Change::Small, limit: 0.2 },
    Kind { name: "guest RAM, small changes", content: Content::Corpus, change: Change::Small, limit: 0.55 },
    Kind { name: "guest RAM, mixed changes", content: Content::Corpus, change: Change::Mixed, limit: NOISE },
    Kind { name: "guest RAM, scattered", content: Content::Corpus, change: Change::Scattered, limit: NOISE },
    Kind { name: "guest RAM, rewritten", content: Content::Corpus, change: Change::Rewritten, limit: NOISE },
    Kind { name: "incompressible, rewritten", content: Content::Random, change: Change::Rewritten, limit: NOISE },
];
/// The two ways of sending: name, and whether with deltas.
const WAYS: [(&str, bool); 2] = [("zstd", false), ("zstd with deltas", true)];
/// The method of all cells.
const METHOD: &str = "zstd";
/// A guest that writes at a rate, and further options of its source beside the method.
const ROUNDS: [(&str, &str, bool); 2] = [
    ("1 GiB at 1000 MiB/s of one word per page, deltas", "--delta-cache 2048 --not-converging give-up", true),
    ("1 GiB at 1000 MiB/s of one word per page, zstd", "--not-converging give-up", false),
];

fn cell(kind: &Kind, way: &str) -> String {
    format!("{}, {way}", kind.name)
}

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    let pages = KINDS.iter().flat_map(|kind| WAYS.iter().map(move |(way, _)| cell(kind, way)));
    pages.chain(ROUNDS.iter().map(|(name, ..)| (*name).to_owned())).collect()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let half = std::thread::available_parallelism().map_or(1, usize::from) / 2;
    let rig = Rig { hosts: Hosts::loopback(), cpus: args.cpus.max(half.clamp(1, 64) as u16), cancel };
    let hosts = Hosts::namespaces(Link { bits_per_second: Some(GIGABIT), delay: None })?.pinned(rig.cpus);
    let (bytes, seconds) = if args.quick { (256 * MIB, 2.0) } else { (512 * MIB, 5.0) };
    let mut cells = Vec::new();
    for kind in KINDS {
        for (way, deltas) in WAYS {
            let name = cell(kind, way);
            let (content, change, method) = (kind.content, kind.change, METHOD.to_owned());
            let job = Job { bytes, content, change, method, deltas, seconds, channels: CHANNELS };
            let (hosts, rig) = (&hosts, &rig);
            if args.wants(&name) {
                cells.push(Cell { name, run: Box::new(move || pages(hosts, rig, &job)) });
            }
        }
    }
    let rows = interleaved(&mut cells, args.rounds(), cancel, progress)?;
    drop(cells);
    let mut findings =
        Findings { name: "delta", columns: COLUMNS, rows, targets: Vec::new(), notes: notes(&rig, bytes) };
    let site = Site::on(hosts, cancel);
    for (name, how, always) in ROUNDS {
        let chosen = if args.only.is_empty() { always || !args.quick } else { args.wants(name) };
        if !chosen {
            continue;
        }
        let mut row = Row { name: name.to_owned(), detail: String::new(), runs: Vec::new(), void: None };
        let site = site.as_ref().map_err(|error| HostsError(error.to_string()));
        let runs = if args.quick { 1 } else { 3 };
        match site.and_then(|site| (0..runs).map(|_| rounds(site, how, args.quick)).collect::<Result<Vec<_>, _>>()) {
            Ok(runs) => row.runs = runs,
            Err(error) => row.void = Some(error.to_string()),
        }
        if cancel.is_cancelled() {
            return Err(HostsError("cancelled".into()));
        }
        progress(&format!("{name}: {}", row.void.as_deref().unwrap_or("measured")));
        findings.rows.push(row);
    }
    judge(&mut findings);
    Ok(findings)
}

/// One migration whose guest changes all of its pages in each round.
fn pages(hosts: &Hosts, rig: &Rig<'_>, job: &Job) -> Result<Vec<f64>, HostsError> {
    let mut destination = SideProcess::start(hosts, Side::B, rig.cancel)?;
    let at = format!("{}:0", hosts.address_b());
    let cpus = rig.cpus(Side::B);
    destination.send(&SideOrder::Delta(Order::Receive { at, bytes: job.bytes, cpus }))?;
    let to = match destination.receive_answer()? {
        Answer::Listening { address } => address,
        other => return Err(unexpected(&other)),
    };
    let mut source = SideProcess::start(hosts, Side::A, rig.cancel)?;
    let sent =
        found(source.request(&SideOrder::Delta(Order::Send { to, job: job.clone(), cpus: rig.cpus(Side::A) }))?)?;
    let received = found(destination.receive_answer()?)?;
    if sent.checksum != received.checksum {
        return Err(HostsError("the destination has other content than the source".into()));
    }
    let Found { counted, .. } = sent;
    if counted.pages == 0 || counted.seconds < job.seconds {
        return Err(HostsError("the migration ended while the guest was writing".into()));
    }
    let pages = counted.pages as f64;
    let later = (sent.pages as f64 - job.bytes as f64 / PAGE).max(1.0);
    Ok(vec![
        pages / counted.seconds,
        counted.seconds * 1e6 / pages,
        counted.cpu_seconds * 1e6 / pages,
        sent.wire_bytes as f64 / sent.pages.max(1) as f64,
        sent.delta_pages as f64 / later,
        counted.rounds as f64,
        sent.total_ms,
        0.0,
        1.0,
        0.0,
    ])
}

fn found(answer: Answer) -> Result<Found, HostsError> {
    match answer {
        Answer::Delta(found) => Ok(found),
        other => Err(unexpected(&other)),
    }
}

/// One migration of a microvm that writes a word of page after page.
fn rounds(site: &Site<'_>, how: &'static str, quick: bool) -> Result<Vec<f64>, HostsError> {
    let setting = Setting {
        bandwidth: None,
        memory: 1024,
        fill: "random",
        guest: Guest::Kvm,
        method: METHOD,
        how,
        throttles: false,
        downtime: Duration::from_millis(300),
        give_up_after: Duration::from_secs(if quick { 30 } else { 60 }),
    };
    let mut slow = 0;
    loop {
        let attempt = site.attempt(&setting, PAGES_PER_SECOND)?;
        if attempt.counts() {
            let pages = attempt.achieved * PAGES_PER_SECOND;
            let sent = attempt.normal_pages.max(1.0);
            return Ok(vec![
                pages,
                1e6 / pages,
                attempt.source_cpu * 1e6 / sent,
                attempt.wire_bytes / sent,
                attempt.delta_pages / (sent - setting.memory as f64 * MIB as f64 / PAGE).max(1.0),
                attempt.rounds,
                attempt.total_ms,
                attempt.downtime_ms,
                attempt.achieved,
                f64::from(u8::from(!attempt.moved)),
            ]);
        }
        slow += 1;
        if slow > TOO_SLOW {
            let achieved = attempt.achieved * 100.0;
            return Err(HostsError(format!("the guest achieved only {achieved:.0} % of its rate")));
        }
    }
}

fn judge(findings: &mut Findings) {
    for kind in KINDS {
        let [zstd, deltas] = WAYS.map(|(way, _)| cell(kind, way));
        let name = match kind.limit {
            NOISE => format!("{}, time of a page with deltas to that without", kind.name),
            limit => {
                format!("{}, time of a page with deltas to that without ({:.1} × as many)", kind.name, 1.0 / limit)
            }
        };
        findings.at_most(&name, kind.limit, &deltas, &zstd, "page_us");
    }
    let (name, ..) = ROUNDS[0];
    let value = findings.spread(name, "failed").map(|spread| Spread { median: spread.max, ..spread });
    findings.targets.push(Target { name: format!("{name}: not moved"), limit: 0.0, value, unit: "of 1" });
}

fn notes(rig: &Rig<'_>, bytes: u64) -> Vec<String> {
    vec![
        format!(
            "Over a virtual cable of 1 Gbit/s (token bucket); the source on CPUs {:?}, the destination on {:?}; {CHANNELS} channels, not \
             encrypted, zstd at its default level.",
            rig.cpus(Side::A),
            rig.cpus(Side::B)
        ),
        format!(
            "Pages: {} MiB, all of which change between one round and the next: small: 1–4 words next to each other; mixed: 1–8 words in \
             seven pages of ten, 32 in two, all of one; scattered: 300 of the 512 words; rewritten: all. Counted are the rounds after \
             the first, without the time in which the guest writes; wire bytes are those of the whole migration, per page sent. At the \
             end the destination's memory was compared with the source's.",
            bytes / MIB
        ),
        "Rounds: a microvm (lab/microvm, KVM with its dirty log) of 1 GiB that nothing shrinks; the destination checks its memory. \
         Not moved: 1 if the migration was abandoned or paused the guest for longer than 330 ms. The source's CPU includes the guest's."
            .into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_about_cells_that_are_measured() {
        let mut findings = Findings::all_ones("delta", COLUMNS, cells());
        judge(&mut findings);
        assert_eq!(findings.targets.len(), KINDS.len() + 1);
        assert!(findings.has_all_values());
        // All figures are equal and nothing moved: only targets that allow for noise are met.
        assert_eq!(findings.targets.iter().filter(|target| target.met() == Some(true)).count(), 4);
    }
}
