//! What happened, for people, scripts and exit codes.

use serde::Serialize;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;
use sterna::migration::{GuestState, MigrationError};
use sterna_microvm::{Machine, Report};

/// What the guest did over some time.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Work {
    /// Of its own time, which stands while it does.
    seconds: f64,
    /// Pages written again.
    written: u64,
    /// Pages verified.
    checked: u64,
    /// How often all of its memory was verified.
    passes: u64,
}

/// How far the guest is at a moment.
pub(crate) struct Mark {
    pub(crate) report: Report,
    clock: Duration,
}

impl Mark {
    /// Now.
    pub(crate) fn of(machine: &Machine) -> Self {
        Self { report: machine.report(), clock: machine.clock() }
    }

    /// What the guest has done since `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> Work {
        Work {
            seconds: self.clock.saturating_sub(earlier.clock).as_secs_f64(),
            written: self.report.written() - earlier.report.written(),
            checked: self.report.checked() - earlier.report.checked(),
            passes: self.report.passes_since(&earlier.report),
        }
    }
}

impl Work {
    /// In words.
    pub(crate) fn text(&self) -> String {
        let per_second = |pages: u64| pages as f64 / self.seconds.max(1e-6);
        let (written, checked) = (per_second(self.written), per_second(self.checked));
        format!("{written:.0} pages written and {checked:.0} verified per second, {} passes", self.passes)
    }
}

/// How the migration ended, if there was one.
pub(crate) enum Moved {
    /// It was not asked for.
    No,
    /// Well; with the library's report.
    Well(Value),
    /// Not well.
    Badly(Box<MigrationError>),
}

/// Everything.
pub(crate) struct Outcome {
    pub(crate) machine: String,
    pub(crate) moved: Moved,
    /// The guest before, during and after the migration, as far as it was here.
    pub(crate) before: Option<Work>,
    pub(crate) during: Option<Work>,
    pub(crate) after: Option<Work>,
    /// What the guest said at the end, unless nothing of it is here.
    pub(crate) guest: Option<Report>,
}

impl Outcome {
    /// See the help text of `options.rs`.
    pub(crate) fn exit(&self) -> ExitCode {
        if self.guest.as_ref().is_some_and(|guest| guest.faults() > 0) {
            return ExitCode::from(1);
        }
        match &self.moved {
            Moved::No | Moved::Well(_) => ExitCode::SUCCESS,
            Moved::Badly(error) => match error.guest {
                GuestState::Untouched | GuestState::RunsAtSource | GuestState::NotHere => ExitCode::from(3),
                _ => ExitCode::from(4),
            },
        }
    }

    /// For scripts.
    pub(crate) fn json(&self) -> Value {
        let (report, error) = match &self.moved {
            Moved::No => (Value::Null, Value::Null),
            Moved::Well(report) => (report.clone(), Value::Null),
            Moved::Badly(error) => (json!(error.report), told(error)),
        };
        json!({
            "machine": self.machine,
            "migration": report,
            "error": error,
            "before": self.before,
            "during": self.during,
            "after": self.after,
            "pages": self.guest.as_ref().map(Report::pages),
            "faults": self.guest.as_ref().map(Report::faults),
            "guest": self.guest.as_ref().map(Report::to_string),
        })
    }
}

fn told(error: &MigrationError) -> Value {
    json!({
        "side": format!("{:?}", error.side),
        "phase": error.phase.to_string(),
        "guest": format!("{:?}", error.guest),
        "cancelled": error.cancelled,
        "reason": error.reason,
    })
}
