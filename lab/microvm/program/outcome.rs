//! The outcome, as text, as JSON and as an exit code.

use crate::devices::Devices;
use serde::Serialize;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;
use sterna::{ErrorKind, GuestState, MigrationError};
use sterna_microvm::{Machine, Report};

/// The guest's work over some time.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Work {
    /// The guest's own time, which stops while the guest is paused.
    seconds: f64,
    /// Pages written again.
    written: u64,
    /// Pages verified.
    checked: u64,
    /// How often all of its memory was verified.
    passes: u64,
    /// Blocks that its devices wrote again.
    device_blocks: u64,
}

/// The guest's progress at a moment.
pub(crate) struct Snapshot {
    pub(crate) report: Report,
    clock: Duration,
    pub(crate) devices: Devices,
}

impl Snapshot {
    /// Returns the present progress.
    pub(crate) fn of(machine: &Machine) -> Self {
        Self { report: machine.report(), clock: machine.clock(), devices: Devices::of(machine) }
    }

    /// Returns the guest's work since `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> Work {
        Work {
            seconds: self.clock.saturating_sub(earlier.clock).as_secs_f64(),
            written: self.report.written() - earlier.report.written(),
            checked: self.report.checked() - earlier.report.checked(),
            passes: self.report.passes_since(&earlier.report),
            device_blocks: self.devices.written_since(&earlier.devices),
        }
    }
}

impl Work {
    /// Returns it as text.
    pub(crate) fn text(&self) -> String {
        let per_second = |pages: u64| pages as f64 / self.seconds.max(1e-6);
        let (written, checked) = (per_second(self.written), per_second(self.checked));
        format!("{written:.0} pages written and {checked:.0} verified per second, {} passes", self.passes)
    }
}

/// How the migration ended, if there was one.
pub(crate) enum Moved {
    /// There was none.
    NotAttempted,
    /// It completed; with the library's report.
    Completed(Value),
    /// It failed.
    Failed(Box<MigrationError>),
}

/// The outcome of the program.
pub(crate) struct Outcome {
    pub(crate) machine: String,
    pub(crate) moved: Moved,
    /// The guest's work before, during and after the migration, as far as it was here.
    pub(crate) before: Option<Work>,
    pub(crate) during: Option<Work>,
    pub(crate) after: Option<Work>,
    /// The guest's last report, unless nothing of it is here.
    pub(crate) guest: Option<Report>,
    /// The results of checking its devices, as far as they are here.
    pub(crate) devices: Devices,
}

impl Outcome {
    /// Returns the exit code, which the help text of `options.rs` explains.
    pub(crate) fn exit(&self) -> ExitCode {
        ExitCode::from(self.code())
    }

    fn code(&self) -> u8 {
        if self.guest.as_ref().is_some_and(|guest| guest.faults() > 0) || self.devices.wrong() > 0 {
            return 1;
        }
        match &self.moved {
            Moved::NotAttempted | Moved::Completed(_) => 0,
            Moved::Failed(error) => match error.guest {
                GuestState::Untouched | GuestState::RunsAtSource | GuestState::NotHere => 3,
                _ => 4,
            },
        }
    }

    /// Returns it as JSON.
    pub(crate) fn json(&self) -> Value {
        let (report, error) = match &self.moved {
            Moved::NotAttempted => (Value::Null, Value::Null),
            Moved::Completed(report) => (report.clone(), Value::Null),
            Moved::Failed(error) => (json!(error.report), error_json(error)),
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
            "devices": self.devices.json(),
        })
    }
}

fn error_json(error: &MigrationError) -> Value {
    json!({
        "side": format!("{:?}", error.side),
        "phase": error.phase.to_string(),
        "guest": format!("{:?}", error.guest),
        "cancelled": error.kind == ErrorKind::Cancelled,
        "reason": error.reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_microvm::Fault;
    use sterna_microvm::scratch::{Verified, WrongBlock};

    #[test]
    fn a_wrong_block_of_a_device_is_an_error_wherever_the_guest_is() {
        let error = || {
            let (side, phase) = (sterna::Side::Destination, sterna::Phase::Rounds);
            MigrationError::new(side, phase, GuestState::NotHere, ErrorKind::Other, "for a reason")
        };
        let first = Some(WrongBlock { block: 7, fault: Fault::Lost });
        let cases =
            [(Verified { blocks: 9, wrong: 0, first: None }, 0, 3), (Verified { blocks: 9, wrong: 2, first }, 1, 1)];
        for (verified, well, badly) in cases {
            let devices = Devices::with(verified);
            for (moved, code) in [(Moved::Completed(Value::Null), well), (Moved::Failed(Box::new(error())), badly)] {
                let (machine, devices) = (String::new(), devices.clone());
                let outcome = Outcome { machine, moved, before: None, during: None, after: None, guest: None, devices };
                assert_eq!(outcome.code(), code, "{}", outcome.json());
            }
        }
    }
}
