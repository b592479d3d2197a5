//! `sterna show`, `set`, `cancel`, `switch-over` and `post-copy`: ask the process of a running migration.

use std::path::Path;

use serde::Serialize;
use sterna_engine::migration::Side;
use sterna_engine::phase::Phase;
use sterna_engine::report;
use sterna_wire::text::printable;

use super::{Failure, state_dir};
use crate::args::{SetArgs, WhichArgs};
use crate::control::{self, AnswerKind, Command, Running};
use crate::exit::Exit;

/// `sterna show`.
pub(super) fn show(args: &WhichArgs) -> Result<Exit, Failure> {
    let dir = state_dir::choose(&args.state)?;
    let running = running(&dir)?;
    let chosen = match &args.which {
        Some(which) => chosen(&running, which)?,
        None => running.iter().collect(),
    };
    let text = match (args.json, chosen.is_empty()) {
        (true, _) => json(&chosen)?,
        (false, true) => format!("no migration runs whose records are in {}", dir.display()),
        (false, false) => chosen.iter().map(|running| text(running)).collect::<Vec<_>>().join("\n"),
    };
    print(&text)
}

/// `sterna set`.
pub(super) fn set(args: &SetArgs) -> Result<Exit, Failure> {
    let downtime_ms = args.downtime.map(|downtime| downtime.as_millis() as u64);
    ask(&args.which, Command::Set { bandwidth: args.bandwidth, downtime_ms }, "set, from now on")
}

/// `sterna cancel`.
pub(super) fn cancel(args: &WhichArgs) -> Result<Exit, Failure> {
    ask(args, Command::Cancel, "cancelling; unless the switchover is already decided, the guest goes on at the source")
}

/// `sterna switch-over`.
pub(super) fn switch_over(args: &WhichArgs) -> Result<Exit, Failure> {
    ask(
        args,
        Command::SwitchOver,
        "the guest is paused as soon as possible, however long the rest of its memory takes then",
    )
}

/// `sterna post-copy`.
pub(super) fn post_copy(args: &WhichArgs) -> Result<Exit, Failure> {
    ask(
        args,
        Command::PostCopy,
        "the guest goes on at the destination as soon as possible; the rest of its memory follows",
    )
}

/// Has the process of the chosen migration carry out `command`; `accepted` says what happens then.
fn ask(args: &WhichArgs, command: Command, accepted: &str) -> Result<Exit, Failure> {
    let dir = state_dir::choose(&args.state)?;
    let running = running(&dir)?;
    let which = match &args.which {
        Some(which) => chosen(&running, which)?,
        None => running.iter().collect(),
    };
    let migration = single(&which, &dir)?;
    let answer = control::ask(&dir, migration.process, command)
        .map_err(|error| Failure::refused(&format!("process {} does not answer: {error}", migration.process)))?;
    if answer.outcome != AnswerKind::Accepted {
        let reason = answer.reason.as_deref().unwrap_or("no reason was given");
        if args.json {
            print(&json(&answer)?)?;
        }
        return Err(Failure::refused(&format!("not done: {reason}")));
    }
    print(&if args.json { json(&answer)? } else { accepted.to_owned() })
}

fn running(dir: &Path) -> Result<Vec<Running>, Failure> {
    let failed = |error| Failure::refused(&format!("cannot look for running migrations in {}: {error}", dir.display()));
    control::running(dir).map_err(failed)
}

/// Returns those that `which` names.
fn chosen<'a>(running: &'a [Running], which: &str) -> Result<Vec<&'a Running>, Failure> {
    let path = std::path::absolute(which).ok();
    let named = |running: &&Running| {
        running.id.as_deref().is_some_and(|id| !which.is_empty() && id.starts_with(which))
            || running.monitor == which
            || path.as_deref() == Some(Path::new(&running.monitor))
    };
    let chosen: Vec<_> = running.iter().filter(named).collect();
    match chosen.is_empty() {
        true => Err(Failure::refused(&format!("no running migration is named '{which}'; `sterna show` lists them"))),
        false => Ok(chosen),
    }
}

/// Returns the only one; of both sides of one migration on this host, the source.
fn single<'a>(chosen: &[&'a Running], dir: &Path) -> Result<&'a Running, Failure> {
    let ended = || Failure::refused(&format!("no migration runs whose records are in {}", dir.display()));
    let first = chosen.first().ok_or_else(ended)?;
    let same = chosen.iter().all(|other| other.process == first.process || other.id.is_some() && other.id == first.id);
    match same {
        true => Ok(chosen.iter().find(|one| one.side == "source").unwrap_or(first)),
        false => {
            let names: Vec<_> = chosen.iter().map(|one| one.id.as_deref().unwrap_or(&one.monitor)).collect();
            Err(Failure::refused(&format!("several migrations are meant; name one: {}", printable(&names.join(", ")))))
        }
    }
}

fn json(content: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(content).map_err(|error| Failure::failed(&error))
}

fn print(text: &str) -> Result<Exit, Failure> {
    crate::stdout::print(text).map_err(|error| Failure::failed(&format!("cannot print the answer: {error}")))?;
    Ok(Exit::Completed)
}

/// Formats a migration for people.
fn text(running: &Running) -> String {
    let Running { id, side, process, monitor, peer, .. } = running;
    let to = if side == "source" { "to" } else { "listening on" };
    let id = id.as_deref().unwrap_or("(not agreed on yet)");
    // The process may pass on what the other side or QEMU wrote.
    let lines =
        [format!("{id}  {side}, process {process}: {}", figures(running)), format!("QEMU {monitor}, {to} {peer}")];
    lines.map(|line| printable(&line)).join("\n  ")
}

/// Formats the phase and the figures of this side.
pub(super) fn figures(running: &Running) -> String {
    let Running { side, progress, .. } = running;
    let view = if side == "source" { Side::Source } else { Side::Destination };
    let phase: Phase = serde_json::from_value(progress["phase"].clone()).unwrap_or_default();
    let number = |name: &str| progress[name].as_f64();
    let mut figures = vec![phase.words(view).to_owned()];
    let texts = [
        number("round").map(|round| format!("round {round}")),
        number("remaining_bytes").map(|bytes| format!("{} left", report::bytes(bytes))),
        number("wire_rate").map(|rate| format!("wire {}", report::rate(rate))),
        number("dirty_rate").map(|rate| format!("dirty {}", report::rate(rate))),
        number("placed_bytes").map(|bytes| format!("{} placed", report::bytes(bytes))),
        number("placed_rate").map(|rate| format!("at {}", report::rate(rate))),
    ];
    figures.extend(texts.into_iter().flatten());
    figures.join(", ")
}
