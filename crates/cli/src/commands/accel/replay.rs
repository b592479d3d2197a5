//! `sterna accel replay`: summarises a trace of `sterna accel capture`, and lists its deviations from the specification.

use std::fmt::Write as _;
use std::io::BufReader;

use sterna_idxd_model::Kind;
use sterna_idxd_model::judge::{OperationSummary, Verdict};
use sterna_offload::trace::{Replay, replay};

use super::{Failure, Out};
use crate::args::accel::ReplayArgs;
use crate::exit::Exit;

/// Maximum number of unanswered descriptors that are listed; the others are counted.
const MAX_LISTED: usize = 10;

pub(super) fn run(args: &ReplayArgs) -> Result<Exit, Failure> {
    let name = args.file.display();
    let failed = |what: &dyn std::fmt::Display| Failure::failed(&format!("{name}: {what}"));
    let file = std::fs::File::open(&args.file).map_err(|error| failed(&error))?;
    let Replay { verdict, truncated } = replay(BufReader::new(file)).map_err(|error| failed(&error))?;
    Out::Stdout.say(&summary(&verdict))?;
    if truncated {
        Out::Stdout.say("The trace breaks off within its last line, which was left out.")?;
    }
    for finding in &verdict.findings {
        Out::Stdout.say(&finding.to_string())?;
    }
    match verdict.found {
        0 => {
            Out::Stdout.say("Nothing in it contradicts the specification.")?;
            Ok(Exit::Completed)
        }
        found => {
            let more = found - verdict.findings.len() as u64;
            let rest = if more > 0 { format!(", {more} of them not shown") } else { String::new() };
            Err(failed(&format!("{found} findings{rest}; docs/accelerator-trace.md says what they mean")))
        }
    }
}

fn summary(verdict: &Verdict) -> String {
    let mut text = format!(
        "{:<38} {:>8} {:>10} {:>12} {:>34}  statuses\n{:<38} {:>8} {:>10} {:>12} {:>10} {:>11} {:>11}\n",
        "operation",
        "count",
        "unanswered",
        "mean size",
        "time until seen, ns",
        "",
        "",
        "",
        "",
        "least",
        "median",
        "most"
    );
    for row in &verdict.operations {
        line(&mut text, row);
    }
    for one in verdict.unanswered.iter().take(MAX_LISTED) {
        let _ = writeln!(
            text,
            "line {}, submission {}: {} on {} was never seen to complete",
            one.line, one.submission, one.operation, one.queue
        );
    }
    if verdict.unanswered.len() > MAX_LISTED {
        let _ = writeln!(text, "{} more were never seen to complete", verdict.unanswered.len() - MAX_LISTED);
    }
    text
}

fn line(text: &mut String, row: &OperationSummary) {
    let kind = if row.kind == Kind::Dsa { "DSA" } else { "IAA" };
    let name = format!("{kind} {}{}", row.operation, if row.in_batches { ", in batches" } else { "" });
    let statuses: Vec<String> = row.statuses.iter().map(|(code, count)| format!("{code:02x}: {count}")).collect();
    let size = row.size.checked_div(row.count).unwrap_or(0);
    let _ = write!(text, "{name:<38} {:>8} {:>10} {size:>12}", row.count, row.unanswered);
    let _ = match row.latency {
        Some(time) => write!(text, " {:>10} {:>11} {:>11}", time.min, time.median, time.max),
        None => write!(text, " {:>10} {:>11} {:>11}", "-", "-", "-"),
    };
    let _ = writeln!(text, "  {}", statuses.join(", "));
}
