//! Commands for which QEMU waits for the storage of the guest's disks.
//!
//! `stop` ends and flushes what is in flight, saving the devices of a paused guest gives up the disks, `blockdev-set-active` and `cont` take
//! them: QEMU's main loop, and with it the monitor, waits until the storage has answered. QEMU executes a command also if its client does not
//! wait any more. A client that gives up early is therefore wrong about the guest a moment later; here the late answer is awaited.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_engine::cancel::Cancel;
use sterna_engine::report::Observer;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::text::cleaned;

use super::fault::{self, PausePoint};
use super::qemu::ended_by_itself;
use crate::qmp::{Qmp, QmpError, RunState};

/// How long the storage may take where a guest that is paused, or that has its main loop held, could go on elsewhere: enough for a slow
/// network store, but not for one that hangs.
const STORAGE_TIME: Duration = Duration::from_secs(30);
/// Pause between two looks at the cancellation while an answer is awaited.
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// Why a command that waits for storage was not carried out, as far as is known.
#[derive(Debug, thiserror::Error)]
pub(super) enum StorageError {
    /// QEMU has not answered in time. It carries the command out when the storage answers.
    #[error(
        "the storage of the guest's disks has not answered within {seconds:.1} s ({disks}): QEMU waits for it in `{command}`; see to the \
         storage",
        seconds = .waited.as_secs_f64()
    )]
    Silent {
        /// The command.
        command: String,
        /// The disks' files.
        disks: String,
        /// How long QEMU was waited for.
        waited: Duration,
    },
    /// The wait was cancelled. QEMU carries the command out when the storage answers.
    #[error("cancelled while QEMU waited in `{command}` for the storage of the guest's disks ({disks})")]
    Cancelled {
        /// The command.
        command: String,
        /// The disks' files.
        disks: String,
    },
    /// QEMU refused the command, or its monitor has ended.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

impl StorageError {
    /// Returns the reason of a failure, with `what` before its text.
    pub(super) fn into_reason(self, what: &str) -> Reason {
        let kind = if matches!(self, Self::Cancelled { .. }) { ErrorKind::Cancelled } else { ErrorKind::Monitor };
        Reason::new(kind, self).within(what)
    }
}

/// How long an answer is awaited.
#[derive(Clone, Copy, Debug)]
pub(super) enum Patience {
    /// For a limited time, or until the migration is cancelled: the guest can go on elsewhere.
    Until {
        /// When the step has begun.
        since: Instant,
        /// When its time is over.
        deadline: Instant,
    },
    /// Until QEMU has answered or ended: the guest goes on here or nowhere.
    Endless,
    /// Until QEMU has answered or ended, or until the wait is cancelled: the same can be tried again later.
    UntilCancelled,
}

impl Patience {
    /// Returns the patience for all commands of one step together.
    pub(super) fn of_a_step() -> Self {
        let since = Instant::now();
        Self::Until { since, deadline: since + fault::settling_time(STORAGE_TIME) }
    }
}

/// The storage of a guest's disks, and who hears of a wait for it.
pub(super) struct Storage<'a> {
    /// The disks' files.
    disks: String,
    context: Option<(&'a Cancel, &'a dyn Observer)>,
    /// Set when the step that waits is ended for another reason than a cancellation here.
    step_ended: Arc<AtomicBool>,
}

impl fmt::Debug for Storage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage").field("disks", &self.disks).finish_non_exhaustive()
    }
}

impl<'a> Storage<'a> {
    /// Returns the storage of this QEMU's disks. Made before the storage may hang, because QEMU does not answer any more then.
    pub(super) fn of(qmp: &Qmp, cancel: &'a Cancel, observer: &'a dyn Observer) -> Self {
        Self { disks: disk_files(qmp), context: Some((cancel, observer)), step_ended: Arc::default() }
    }

    /// Has every wait end once `step_ended` is set, as by a cancellation.
    pub(super) fn ended_by(self, step_ended: Arc<AtomicBool>) -> Self {
        Self { step_ended, ..self }
    }

    /// Returns the storage of disks that were not asked for yet.
    pub(super) fn not_asked_for() -> Self {
        Self { disks: "not asked for yet".into(), context: None, step_ended: Arc::default() }
    }

    /// Executes a command and awaits its answer.
    ///
    /// # Errors
    /// QEMU refuses the command or has ended, or the patience is over.
    pub(super) fn execute(
        &self,
        qmp: &Qmp,
        command: &str,
        arguments: Value,
        patience: Patience,
    ) -> Result<Value, StorageError> {
        let begun = Instant::now();
        let mut awaited = qmp.begin(command, arguments)?;
        let note_at = begun + qmp.timeout_of(command);
        let mut noted = false;
        loop {
            let mut next_look = Instant::now() + LOOK_PAUSE;
            if !noted {
                next_look = next_look.min(note_at);
            }
            if let Patience::Until { deadline, .. } = patience {
                next_look = next_look.min(deadline);
            }
            if let Some(answer) = awaited.wait(next_look)? {
                if noted {
                    let seconds = begun.elapsed().as_secs_f64();
                    self.note(&format!("QEMU has answered `{command}`, {seconds:.1} s after it was asked"));
                }
                return Ok(answer);
            }
            let now = Instant::now();
            if let Patience::Until { since, deadline } = patience
                && now >= deadline
            {
                let waited = deadline - since;
                if let stopped @ Some(_) = qmp.stopped() {
                    return Err(QmpError::Timeout { command: command.into(), waited, stopped }.into());
                }
                return Err(StorageError::Silent { command: command.into(), disks: self.disks.clone(), waited });
            }
            if !matches!(patience, Patience::Endless) && self.is_cancelled() {
                return Err(StorageError::Cancelled { command: command.into(), disks: self.disks.clone() });
            }
            if !noted && now >= note_at {
                noted = true;
                let seconds = begun.elapsed().as_secs_f64();
                self.note(&match qmp.stopped() {
                    Some(pid) => format!(
                        "QEMU (process {pid}) has not answered `{command}` for {seconds:.1} s: it is stopped (by SIGSTOP, for instance); let it \
                         go on (kill -CONT {pid})"
                    ),
                    None => format!(
                        "waiting for the storage of the guest's disks ({}): QEMU has not answered `{command}` for {seconds:.1} s; it goes on by \
                         itself when the storage answers",
                        self.disks
                    ),
                });
            }
        }
    }

    /// Returns the run state, once QEMU answers.
    ///
    /// # Errors
    /// QEMU has ended, or the patience is over.
    pub(super) fn run_state(&self, qmp: &Qmp, patience: Patience) -> Result<RunState, StorageError> {
        let answer = self.execute(qmp, "query-status", json!({}), patience)?;
        Ok(RunState::named(answer["status"].as_str().unwrap_or_default()))
    }

    /// Lets the guest run (QMP `cont`), and confirms that it runs, or has run: its first instructions may switch it off, and another program
    /// may have stopped it right after.
    ///
    /// # Errors
    /// The guest does not run, as far as is known.
    pub(super) fn cont(&self, qmp: &Qmp, patience: Patience) -> Result<(), StorageError> {
        match self.cont_and_look(qmp, patience) {
            // QEMU exits with its guest, unless it was started with `-no-shutdown`.
            Err(_) if ended_by_itself(qmp).is_some() => Ok(()),
            looked => looked,
        }
    }

    fn cont_and_look(&self, qmp: &Qmp, patience: Patience) -> Result<(), StorageError> {
        let resumes = qmp.resumes();
        self.execute(qmp, "cont", json!({}), patience)?;
        // QEMU sends RESUME before the answer, if the guest did not run already.
        let resumed = qmp.resumes() > resumes;
        fault::at(PausePoint::Continued);
        let state = self.run_state(qmp, patience)?;
        if resumed && !state.has_executed() {
            self.note(&format!(
                "the guest was let run and does not run any more (QEMU: {state}): another program has stopped it"
            ));
        }
        if resumed || state.has_executed() {
            return Ok(());
        }
        Err(QmpError::Unexpected { command: "cont".into(), reason: format!("the guest is {state} after it") }.into())
    }

    fn is_cancelled(&self) -> bool {
        self.step_ended.load(Ordering::Acquire) || self.context.is_some_and(|(cancel, _)| cancel.is_cancelled())
    }

    fn note(&self, text: &str) {
        match self.context {
            Some((_, observer)) => observer.note(text),
            None => tracing::warn!("{text}"),
        }
    }
}

/// Returns the files of QEMU's disks as its monitor names them, for texts.
fn disk_files(qmp: &Qmp) -> String {
    let Ok(nodes) = qmp.execute("query-block", json!({})) else { return "not known".into() };
    let files = nodes.as_array().into_iter().flatten().filter_map(|disk| disk["inserted"]["file"].as_str());
    let files: Vec<String> = files.map(cleaned).collect();
    if files.is_empty() { "QEMU lists no disks".into() } else { files.join(", ") }
}
