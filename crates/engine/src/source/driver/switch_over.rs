//! The source's part of the switchover: pausing the guest, its last pages and its state, or letting it run on; and slowing it down before.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_wire::reason::{ErrorKind, Reason};

use super::Driver;
use crate::live_control::RoundsEnd;
use crate::migration::Phase;
use crate::record_file::RecordFileError;
use crate::source::rounds::Order;
use crate::state::{Part, StateWriter};
use crate::switchover::{after, too_long};
use crate::vmm::{ResumeReason, VmmError};

/// The name of the monitor's state in reasons: the source waits for it while the guest is paused.
pub(super) const MONITORS_STATE: &str = "the monitor's state";
/// How many times the predicted downtime is added to the limit of a step where the guest was paused by request.
const FORCED_MARGIN: u32 = 3;

/// Returns a closure that makes the reason of an error of the monitor.
fn monitor(what: &str) -> impl Fn(VmmError) -> Reason {
    move |error| Reason::new(ErrorKind::Monitor, error).within(what)
}

impl Driver<'_> {
    pub(super) fn throttle(&mut self, percent: u8) {
        match self.vmm.throttle(percent) {
            Ok(()) => {
                self.throttled = percent;
                self.kernel.observer.note(&format!("the guest is held for {percent} % of the time"));
            }
            Err(error) => self.not_throttled(&error),
        }
    }

    /// Has the monitor go on slowing its guest down: a pause of the guest, or something on the host, may have ended it.
    fn keep_throttled(&mut self) {
        if self.throttled > 0
            && let Err(error) = self.vmm.throttle(self.throttled)
        {
            self.not_throttled(&error);
        }
    }

    fn not_throttled(&mut self, error: &VmmError) {
        self.throttled = 0;
        self.kernel.observer.note(&format!("the guest is not slowed down: {error}"));
        self.moving.iter().for_each(|moving| moving.order(Order::NotThrottled));
    }

    /// Has the monitor wait until the input and output under way has written guest RAM.
    pub(super) fn settle_io(&mut self) -> Result<(), Reason> {
        let inside = self.occupied.enter(&self.kernel.abort);
        let permitted = self.vmm.check_migratable();
        let settled = if permitted.is_ok() { self.vmm.settle_io() } else { Ok(()) };
        drop(inside);
        permitted.map_err(|error| Reason::new(ErrorKind::Monitor, error))?;
        // A cancellation, or the loss of the destination, ends the wait for the storage, and is the reason then.
        let failed = monitor("the guest's input and output does not settle");
        settled.map_err(|error| self.kernel.abort.reason().unwrap_or_else(|| failed(error)))?;
        // The time limit does not count the wait, in which no page could be sent.
        self.await_progress();
        self.moving.iter().for_each(|moving| moving.order(Order::Settled));
        self.keep_throttled();
        Ok(())
    }

    /// Stops the guest, has the last round sent, and sends the state meanwhile.
    pub(super) fn switch_over(&mut self) -> Result<(), Reason> {
        let Some(moving) = &self.moving else { return Ok(()) };
        if self.kernel.abort.is_over() {
            return Ok(());
        }
        self.vmm.may_pause().map_err(|error| Reason::new(ErrorKind::Monitor, error))?;
        // `sterna recover` resumes only a guest that was paused by its migration.
        self.kernel.ledger.note_pausing(true).map_err(RecordFileError::into_reason)?;
        self.phase = Phase::SwitchingOver;
        self.kernel.set_resumable(false);
        self.kernel.observer.note("stopping the guest");
        // Before the call: the guest may have stopped even where pausing fails.
        self.kernel.moments.pausing = Some(Instant::now());
        // In `pause` a monitor may wait for a device that is saved ahead, and that device for the destination.
        let inside = self.occupied.enter(&self.kernel.abort);
        let paused = self.vmm.pause();
        drop(inside);
        // A cancellation, or the loss of the destination, ends the wait for a monitor, and is the reason then.
        let failed = monitor("the monitor does not pause the guest");
        paused.map_err(|error| self.kernel.abort.reason().unwrap_or_else(|| failed(error)))?;
        self.kernel.moments.paused = Some(Instant::now());
        self.set_urgent(true);
        self.kernel.due = Some((after(self.step_time()), "sending the last pages and the state"));
        moving.order(Order::LastRound);
        Ok(())
    }

    /// Resumes the guest, because the downtime would be too long after all.
    pub(super) fn run_on(&mut self) -> Result<(), Reason> {
        self.kernel.observer.note("the guest had dirtied too much until it was paused: it runs on");
        self.resume_guest(ResumeReason::RoundsGoOn)?;
        self.keep_throttled();
        self.kernel.ledger.note_pausing(false).map_err(RecordFileError::into_reason)?;
        (self.phase, self.kernel.due) = (Phase::Rounds, self.rounds_due());
        self.kernel.set_resumable(self.resumable);
        Ok(())
    }

    pub(super) fn resume_guest(&mut self, reason: ResumeReason) -> Result<(), Reason> {
        self.vmm.resume(reason).map_err(monitor("the monitor does not resume the guest"))?;
        self.kernel.moments.runs_on();
        self.set_urgent(false);
        Ok(())
    }

    /// Makes the work of accelerators urgent while the guest is paused, and lifts the limit of CPU time.
    fn set_urgent(&self, urgent: bool) {
        self.compression.set_urgent(urgent);
        if let Some(accelerator) = &self.accelerator {
            accelerator.set_urgent(urgent);
        }
    }

    /// Has the state of the guest, which stays paused, saved and sent while its last pages are on their way.
    pub(super) fn send_state(&mut self) -> Result<(), Reason> {
        if self.moving.is_none() || self.kernel.abort.is_over() {
            return Ok(());
        }
        self.devices.known.save();
        // The destination reads nothing behind the monitor's state before it has all of RAM, so devices on the same channel go first.
        if self.devices.known.precede_monitor() { Ok(()) } else { self.save_monitor() }
    }

    /// Saves the monitor's own state, lets the rounds collect what that has written, and sends the state.
    pub(super) fn save_monitor(&mut self) -> Result<(), Reason> {
        let Some(moving) = self.moving.as_ref().filter(|_| !self.kernel.abort.is_over()) else { return Ok(()) };
        let stream = moving.stream.as_ref().ok_or_else(|| Reason::other("there is no stream channel"))?;
        let mut state = StateWriter::new(stream, Part::Final, self.kernel.session.packet_size);
        // The deadline ends the wait for a destination that does not read, on this thread.
        let deadline = self.kernel.due.map(|(deadline, step)| {
            let devices = Arc::clone(&self.devices.known);
            let lacks = move || [Some(MONITORS_STATE.to_owned()), devices.waiting_for()];
            let reason = move || too_long(step, Some(lacks().into_iter().flatten().collect::<Vec<_>>().join(", ")));
            (deadline, Box::new(reason) as _)
        });
        let inside = self.deadlines.enter(&self.kernel.abort, deadline);
        let saved = self.vmm.save(&mut state).map_err(monitor("saving the guest's state failed"));
        let finished = saved.and_then(|()| {
            moving.order(Order::Saved);
            state.finish().map_err(Reason::other)
        });
        drop(inside);
        let bytes = match finished {
            Ok(bytes) => bytes,
            // The reason is in an event that is queued already, or the destination will send it.
            Err(_) if self.kernel.abort.is_over() => return Ok(()),
            Err(error) => return Err(error),
        };
        self.kernel.moments.saved = Some(Instant::now());
        tracing::debug!(bytes, "the guest's state is handed over");
        Ok(())
    }

    /// Returns how long a step may take while the guest is paused: longer where the guest is paused by request, however much is left.
    pub(super) fn step_time(&self) -> Duration {
        let forced = self.kernel.requests().ending == Some(RoundsEnd::SwitchOver);
        let predicted = self.stats.lock().expect("no thread panics with the lock held").predicted;
        let longer = predicted.filter(|_| forced).unwrap_or_default().saturating_mul(FORCED_MARGIN);
        self.settings.limits.step.max(self.downtime().saturating_mul(10)).saturating_add(longer)
    }

    /// Returns the target downtime.
    pub(super) fn downtime(&self) -> Duration {
        self.kernel.requests().downtime.unwrap_or(self.settings.downtime)
    }
}
