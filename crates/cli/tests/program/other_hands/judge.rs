//! The judge: where the guest executes, whether its records are there, and whether what was reported is true.

use serde_json::{Value, json};
use sterna_qemu_lab::recorder;

use super::act::{Act, Done};
use super::expect::{Expected, expected};
use super::machine::{Machine, writes};
use super::{Cell, DOWNTIME};
use crate::support::pair::{Pair, Watched};
use crate::support::settle::Side;
use crate::support::{FAILED, LOST, REFUSED, Sterna, UNCONFIRMED, receive, send_by};

/// What the programs report about where the guest executes. A text may have none of these.
const CLAIMS: &[(&str, Side)] = &[
    ("the guest runs on at the source", Side::Source),
    ("the guest runs here, at the source", Side::Source),
    ("it goes on here", Side::Source),
    ("completed: the guest runs", Side::Destination),
    ("the guest runs at the destination", Side::Destination),
    ("the guest runs here, at the destination", Side::Destination),
];

/// What the programs report about where it does not execute.
const DENIALS: &[(&str, Side)] = &[
    ("and does not run", Side::Source),
    ("the guest is lost", Side::Source),
    ("nothing runs here", Side::Destination),
    ("the copy here was discarded", Side::Destination),
];

/// A move that was disturbed.
pub(super) struct Moved {
    pub(super) cell: Cell,
    pub(super) machine: Machine,
    pub(super) pair: Pair,
    pub(super) done: Done,
    pub(super) sender: Option<Sterna>,
    pub(super) receiver: Option<Sterna>,
    /// The act was undone.
    pub(super) undone: bool,
}

impl Moved {
    /// Waits for the end of the move and checks everything. Returns what became of it.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn judge(mut self) -> Result<String, String> {
        let expected = expected(self.cell, &self.done);
        let text = self.outcome(expected);
        let context = format!("{}: {:?}, expected {expected:?}", self.cell, self.done);
        if let Done::Refused(reason) = &self.done {
            println!("{context}: QEMU refused: {reason}");
        }
        let text = text.map_err(|error| format!("{context}: {error}\n  guests {:?}", self.pair.states()))?;
        Ok(format!("{context}: {}", text.trim().lines().next().unwrap_or_default()))
    }

    fn outcome(&mut self, expected: Expected) -> Result<String, String> {
        let (sent, text) = self.sender.take().expect("it was started").finish();
        self.true_claims(&text)?;
        let code = sent.code();
        let right = match expected {
            Expected::Moves => code == Some(0),
            Expected::MovesOrStays => [Some(0), FAILED].contains(&code),
            Expected::MovesAtLast => [Some(0), UNCONFIRMED].contains(&code),
            // Where the guest runs that another program has migrated, `send` cannot tell.
            Expected::StaysStopped if self.cell.act == Act::MigrateFinished => [FAILED, UNCONFIRMED].contains(&code),
            Expected::StaysAndRuns | Expected::StaysStopped => code == FAILED,
            Expected::Ends | Expected::EndsPrepared => code == LOST,
            Expected::Contradiction => !sent.success(),
        };
        if !right {
            return Err(format!("send ended with {sent}: {text}"));
        }
        let expected = match expected {
            Expected::MovesOrStays | Expected::MovesAtLast if sent.success() => Expected::Moves,
            Expected::MovesOrStays => Expected::StaysAndRuns,
            Expected::StaysStopped if code == UNCONFIRMED => {
                self.decide_to_stay()?;
                Expected::StaysAndRuns
            }
            other => other,
        };
        if expected == Expected::MovesAtLast && !sent.success() {
            return self.move_at_last().map(|()| text);
        }
        let mut receiver = self.receiver.take().expect("it was started");
        if expected == Expected::EndsPrepared {
            // The destination asks its source for ever: an operator says that it is gone for good.
            receiver.kill();
        } else {
            self.true_claims(&receiver.finish().1)?;
        }
        for side in [Side::Source, Side::Destination] {
            let words: &[&str] = match (expected, side) {
                (Expected::EndsPrepared, Side::Destination) => &["--fenced-peer"],
                _ => &[],
            };
            if let Some(recovery) = side.recover(&self.pair, words, None) {
                let (status, text) = recovery.finish();
                self.true_claims(&text)?;
                println!("recover at the {}: {status}: {text}", side.name());
                if !status.success() && expected != Expected::Contradiction {
                    return Err(format!("recover at the {} ended with {status}: {text}", side.name()));
                }
            }
        }
        self.pair.never_both()?;
        match (expected, self.executing()?) {
            (Expected::Moves | Expected::EndsPrepared, Some(Side::Destination))
            | (Expected::StaysAndRuns, Some(Side::Source))
            | (Expected::StaysStopped | Expected::Ends, None)
            | (Expected::Contradiction, Some(_)) => {}
            (_, side) => return Err(format!("the guest executes at {side:?}: {text}")),
        }
        self.whole()?;
        if matches!(expected, Expected::StaysAndRuns | Expected::StaysStopped) {
            self.moves_then(expected)?;
        }
        Ok(text)
    }

    /// The guest is paused at the source, and nothing but an operator knows whether it runs elsewhere. This one lets it go on here.
    fn decide_to_stay(&mut self) -> Result<(), String> {
        if let Some(side) = self.executing()? {
            return Err(format!("the guest executes at {side:?}"));
        }
        let recover = |moved: &Self| {
            let (status, text) = Side::Source.recover(&moved.pair, &[], None).expect("there is a record").finish();
            moved.true_claims(&text).map(|()| (status, text))
        };
        let (status, text) = recover(self)?;
        if status.success() {
            return Err(format!("recover has settled what it cannot know: {text}"));
        }
        self.undo()?;
        let (status, text) = recover(self)?;
        if status.success() { Ok(()) } else { Err(format!("recover after the act was undone: {status}: {text}")) }
    }

    /// The guest belongs to the destination, which cannot start it: ends the source's QEMU, and recovers on both hosts.
    fn move_at_last(&mut self) -> Result<(), String> {
        let received = self.receiver.take().expect("it was started").finish().1;
        self.true_claims(&received)?;
        if let Some(side) = self.executing()? {
            return Err(format!("the guest executes at {side:?}"));
        }
        Act::Quit.perform(&self.machine, &self.pair.source);
        let recoveries = [Side::Source, Side::Destination].map(|side| side.recover(&self.pair, &[], None));
        for (status, text) in recoveries.into_iter().flatten().map(Sterna::finish) {
            if !status.success() {
                return Err(format!("recover ended with {status}: {text}"));
            }
            self.true_claims(&text)?;
        }
        self.pair.never_both()?;
        match self.executing()? {
            Some(Side::Destination) => self.whole().map(drop),
            side => Err(format!("the guest executes at {side:?}")),
        }
    }

    fn undo(&mut self) -> Result<(), String> {
        if std::mem::replace(&mut self.undone, true) {
            return Ok(());
        }
        self.cell.act.undo(&self.machine, &self.pair.source).map_err(|error| format!("undoing: {error}"))
    }

    fn side(&self, side: Side) -> &Watched {
        match side {
            Side::Source => &self.pair.source,
            Side::Destination => &self.pair.destination,
        }
    }

    /// Returns the one side at which the guest executes, as its records show; none if it executes at no side.
    fn executing(&self) -> Result<Option<Side>, String> {
        match [Side::Source, Side::Destination].map(|side| self.side(side).runs()) {
            [true, true] => Err("BOTH RUN".into()),
            [false, false] => Ok(None),
            [source, _] => {
                let side = if source { Side::Source } else { Side::Destination };
                writes(self.side(side), 3)?;
                Ok(Some(side))
            }
        }
    }

    /// Fails if `text` says that the guest executes where it does not, or that it does not where it does.
    fn true_claims(&self, text: &str) -> Result<(), String> {
        let claims = CLAIMS.iter().map(|claim| (claim, true)).chain(DENIALS.iter().map(|claim| (claim, false)));
        for ((claim, side), runs) in claims.filter(|((claim, _), _)| text.contains(claim)) {
            if self.side(*side).runs() != runs {
                return Err(format!("\"{claim}\" is false: {text}"));
            }
        }
        Ok(())
    }

    /// Checks that all records are there that the guest had acknowledged at either side, and that it read no older one.
    fn whole(&self) -> Result<u32, String> {
        let executing = [Side::Source, Side::Destination].into_iter().find(|side| self.side(*side).runs());
        let execute = |command: &str| {
            let monitor = executing.map(|side| &self.side(side).monitor);
            monitor
                .map_or(Ok(Value::Null), |monitor| monitor.execute(command, json!({})))
                .map_err(|error| error.to_string())
        };
        // QEMU writes its caches when it stops the guest.
        execute("stop")?;
        let lines = [Side::Source, Side::Destination].map(|side| self.side(side).qemu.console().lines());
        let lines: Vec<&str> = lines.iter().flatten().map(String::as_str).collect();
        // A snapshot that is loaded sets the numbers back.
        let set_back =
            (1..lines.len()).rev().find(|at| lines[*at] < lines[at - 1]).filter(|_| self.cell.act == Act::SnapshotLoad);
        let last = recorder::acknowledged(lines[set_back.unwrap_or(0)..].iter().copied())
            .map_err(|error| error.to_string())?;
        let greatest = self.machine.check_records(last)?;
        execute("cont")?;
        Ok(greatest)
    }

    /// Moves the guest that stayed, once what was done is undone.
    fn moves_then(&mut self, expected: Expected) -> Result<(), String> {
        let again = "second-destination";
        let destination = Watched::start(&self.machine.options().incoming(), self.pair.scratch.path(), again);
        self.pair.destination = destination.map_err(|error| error.to_string())?;
        Machine::permit_reset(&self.pair.destination);
        if expected == Expected::StaysStopped {
            let (status, text) = self.send()?;
            if status.code() != REFUSED {
                return Err(format!("a guest that does not run was not refused ({status}): {text}"));
            }
        }
        self.undo()?;
        let (status, text) = self.send()?;
        if !status.success() {
            return Err(format!("the next attempt ended with {status}: {text}"));
        }
        if self.executing()? != Some(Side::Destination) {
            return Err(format!("the next attempt did not move the guest: {text}"));
        }
        self.pair.never_both()?;
        self.whole().map(drop)
    }

    fn send(&self) -> Result<(std::process::ExitStatus, String), String> {
        let state = self.pair.scratch.path().join("second-state");
        let mut command = receive(self.pair.destination.qemu.qmp_path(), &state);
        let mut receiver = Sterna::start("receive", command.arg("--insecure"));
        let (to, report) = (receiver.address(), self.pair.report());
        let mut command =
            send_by(self.cell.mode, self.pair.source.qemu.qmp_path(), &to, &self.pair.source_state(), &report);
        let (status, text) = Sterna::start("send", command.args(["--insecure", "--downtime", DOWNTIME])).finish();
        if status.success() {
            receiver.finish();
        } else {
            receiver.kill();
        }
        Ok((status, text))
    }
}
