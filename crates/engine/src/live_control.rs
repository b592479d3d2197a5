//! Controlling a migration while it runs, from any thread.
//!
//! A [`Control`] holds the requests and the migration's stage under one lock, so that each request is answered at once and the answer is
//! binding: the switchover and the decision look at the requests under the same lock as they begin. No method waits for the migration.
//!
//! | stage | begins | changed by |
//! |---|---|---|
//! | [`Stage::NotBegun`] | with the control, or anew where a migration has failed without having begun anything | [`Steering`] |
//! | [`Stage::Running`] | when both sides have agreed, where a paused guest runs on, and where the destination was lost before the pause | [`Control::agreed`], [`Control::stays_paused`], [`Control::rounds_go_on`] |
//! | [`Stage::Pausing`] | when the guest is about to be paused | [`Control::begin_ending`] |
//! | [`Stage::Paused`] | when it is certain that the guest stays paused; in post-copy before it is paused | [`Control::stays_paused`] |
//! | [`Stage::Decided`] | right before the decision is recorded | [`Control::decide`] |
//! | [`Stage::Ended`] | with the end of the migration | [`Steering`] |

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cancel::Cancel;
use crate::pacer::Pacer;
use crate::wakers::{Registration, Waker};

/// The outcome of a request to a [`Control`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "the request may have been refused"]
#[non_exhaustive]
pub enum RequestOutcome {
    /// The request is carried out, unless the migration fails before.
    Accepted,
    /// The two sides have not agreed on what the request needs, or not yet. Nothing was changed.
    NotAgreed,
    /// The migration is beyond the point up to which the request has an effect. Nothing was changed.
    TooLate,
}

/// How a request wants the rounds to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundsEnd {
    /// The guest is paused until all of its memory has arrived.
    SwitchOver,
    /// The guest goes on at the destination before all of its memory has arrived.
    PostCopy,
}

/// The requests so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// The limit in bytes per second, where one was requested; the inner `None` is no limit.
    pub bandwidth: Option<Option<u64>>,
    /// The target downtime, where one was requested.
    pub downtime: Option<Duration>,
    /// How the rounds end now, where that was requested.
    pub ending: Option<RoundsEnd>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    NotBegun,
    Running,
    Pausing,
    Paused,
    Decided,
    Ended,
}

/// The migration was cancelled, so that its guest stays at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WasCancelled;

/// A control was given to a second migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the control belongs to another migration: each migration needs its own")]
pub struct InUse;

struct State {
    stage: Stage,
    /// Whether a migration holds this control.
    held: bool,
    requests: Requests,
    /// Whether both sides have agreed on post-copy.
    post_copy: bool,
    /// Whether the guest goes on at the destination before all of its memory is there.
    post_copy_begun: bool,
    cancelled: bool,
    /// The pacer of the current channels.
    pacer: Option<Arc<Pacer>>,
    /// Wakes the migration's loop after a request.
    wake: Option<Waker>,
}

struct Shared {
    /// The number of accepted requests: what is looked at while pages are handed over.
    changes: AtomicU64,
    /// Interrupts what the migration blocks in.
    cancel: Cancel,
    state: Mutex<State>,
}

/// Controls one migration at its source while the migration runs, from any thread: [`Source::control`](crate::source::Source::control).
///
/// ```no_run
/// # use sterna_engine::{cancel::Cancel, live_control::{RequestOutcome, Control}, source::Source, transport::Security, vmm::SourceVmm};
/// # fn migrate(source: Source, vmm: &mut dyn SourceVmm) -> Result<(), Box<dyn std::error::Error>> {
/// let control = Control::new();
/// let mut source = source.control(&control);
/// std::thread::spawn(move || match control.switch_over() {
///     RequestOutcome::Accepted => println!("the guest is paused as soon as possible"),
///     answer => println!("not any more: {answer:?}"),
/// });
/// let report = source.run("destination:4920", &Security::Insecure, vmm, &Cancel::new(), &())?;
/// # Ok(())
/// # }
/// ```
/// Requests made before [`Source::run`](crate::source::Source::run) count from its beginning. All methods return at once. They may be
/// called from the monitor's own methods and from an observer, too.
#[derive(Clone)]
pub struct Control(Arc<Shared>);

impl Default for Control {
    fn default() -> Self {
        let state = State {
            stage: Stage::NotBegun,
            held: false,
            requests: Requests::default(),
            post_copy: false,
            post_copy_begun: false,
            cancelled: false,
            pacer: None,
            wake: None,
        };
        Self(Arc::new(Shared { changes: AtomicU64::new(0), cancel: Cancel::new(), state: Mutex::new(state) }))
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Control")
            .field("stage", &state.stage)
            .field("requests", &state.requests)
            .finish_non_exhaustive()
    }
}

impl Control {
    /// Makes one for a migration that has not begun yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the maximum bytes per second on the wire, from now on; none or 0: no limit. Threads that wait for the earlier limit follow the
    /// new one. Afterwards the speed is measured again before the guest is paused.
    ///
    /// `TooLate`: the guest's memory has been sent. In post-copy a limit is accepted until the end.
    pub fn set_bandwidth(&self, bytes_per_second: Option<u64>) -> RequestOutcome {
        self.request(
            |state| match state.stage {
                Stage::Ended => RequestOutcome::TooLate,
                Stage::Decided if !state.post_copy_begun => RequestOutcome::TooLate,
                _ => RequestOutcome::Accepted,
            },
            |state| {
                let limit = bytes_per_second.filter(|limit| *limit > 0);
                state.requests.bandwidth = Some(limit);
                state.pacer.iter().for_each(|pacer| pacer.set_limit(limit));
            },
        )
    }

    /// Sets the target downtime with which predictions are compared from now on.
    ///
    /// `TooLate`: the guest is paused and stays paused, or post-copy has begun.
    pub fn set_downtime(&self, downtime: Duration) -> RequestOutcome {
        self.request(Self::while_it_may_run_on, |state| state.requests.downtime = Some(downtime))
    }

    /// Pauses the guest as soon as possible and sends the rest of its memory while it is paused, however much longer than the target
    /// downtime that takes. The guest is paused once its speed of sending is known (at most half a second after the first pages have
    /// arrived), and what was saved ahead has been loaded.
    ///
    /// `TooLate`: the guest is paused already and stays paused, or post-copy has begun.
    pub fn switch_over(&self) -> RequestOutcome {
        self.request(Self::while_it_may_run_on, |state| state.requests.ending = Some(RoundsEnd::SwitchOver))
    }

    /// Lets the guest go on at the destination as soon as possible; the rest of its memory follows.
    ///
    /// `NotAgreed`: post-copy was neither chosen nor [allowed](crate::source::Source::allow_post_copy), or the destination has not been
    /// reached yet. `TooLate`: the guest is being paused for another switchover, or post-copy has begun.
    pub fn post_copy(&self) -> RequestOutcome {
        self.request(
            |state| match state.stage {
                Stage::Ended => RequestOutcome::TooLate,
                _ if !state.post_copy => RequestOutcome::NotAgreed,
                Stage::Running => RequestOutcome::Accepted,
                _ => RequestOutcome::TooLate,
            },
            |state| state.requests.ending = Some(RoundsEnd::PostCopy),
        )
    }

    /// Cancels the migration: once accepted, the guest goes on at the source.
    ///
    /// `TooLate`: the guest belongs to the destination, or the migration has ended. A destination that is lost from now on is then waited for
    /// no longer than [`TimeLimits::delivery`](crate::source::TimeLimits::delivery), in post-copy too.
    pub fn cancel(&self) -> RequestOutcome {
        let answer = {
            let mut state = self.state();
            match state.stage {
                Stage::Ended => return RequestOutcome::TooLate,
                Stage::Decided => RequestOutcome::TooLate,
                _ => {
                    state.cancelled = true;
                    RequestOutcome::Accepted
                }
            }
        };
        // Without the lock: what this wakes may look at the control.
        self.0.cancel.cancel();
        answer
    }

    fn while_it_may_run_on(state: &State) -> RequestOutcome {
        match state.stage {
            Stage::NotBegun | Stage::Running | Stage::Pausing => RequestOutcome::Accepted,
            Stage::Paused | Stage::Decided | Stage::Ended => RequestOutcome::TooLate,
        }
    }

    fn request(
        &self,
        answer: impl FnOnce(&State) -> RequestOutcome,
        change: impl FnOnce(&mut State),
    ) -> RequestOutcome {
        let mut state = self.state();
        let answer = answer(&state);
        if answer == RequestOutcome::Accepted {
            change(&mut state);
            self.0.changes.fetch_add(1, Ordering::Release);
            state.wake.iter().for_each(|wake| wake());
        }
        answer
    }

    /// Returns the requests, if any was accepted since `seen`, which is updated. Costs one load where none was.
    pub(crate) fn changed(&self, seen: &mut u64) -> Option<Requests> {
        let changes = self.0.changes.load(Ordering::Acquire);
        (changes != *seen).then(|| {
            *seen = changes;
            self.requests()
        })
    }

    /// Returns the requests so far.
    pub(crate) fn requests(&self) -> Requests {
        self.state().requests
    }

    /// Returns whether the migration that held this control has ended, so that no other can.
    pub(crate) fn has_ended(&self) -> bool {
        self.state().stage == Stage::Ended
    }

    /// Records that both sides have agreed on the migration, and whether on post-copy.
    pub(crate) fn agreed(&self, post_copy: bool) {
        let mut state = self.state();
        (state.stage, state.post_copy) = (Stage::Running, post_copy);
    }

    /// Has `pacer`, that of the current channels, follow the requested limit from now on.
    pub(crate) fn pace_by(&self, pacer: &Arc<Pacer>) {
        let mut state = self.state();
        if let Some(limit) = state.requests.bandwidth {
            pacer.set_limit(limit);
        }
        state.pacer = Some(Arc::clone(pacer));
    }

    /// Ends the rounds, before the guest is paused. Returns how: as was requested, otherwise as `chosen`.
    pub(crate) fn begin_ending(&self, chosen: RoundsEnd) -> RoundsEnd {
        let mut state = self.state();
        let ending = state.requests.ending.unwrap_or(chosen);
        (state.stage, state.post_copy_begun) = match ending {
            RoundsEnd::SwitchOver => (Stage::Pausing, false),
            RoundsEnd::PostCopy => (Stage::Paused, true),
        };
        ending
    }

    /// Decides, once the guest is paused, whether it stays paused: if its rest `fits`, or if that was requested. Otherwise the rounds go on.
    pub(crate) fn stays_paused(&self, fits: bool) -> bool {
        let mut state = self.state();
        let stays = fits || state.requests.ending == Some(RoundsEnd::SwitchOver);
        state.stage = if stays { Stage::Paused } else { Stage::Running };
        stays
    }

    /// Records that the rounds go on although their end may have been [begun](Self::begin_ending): the destination was lost before the guest was
    /// paused.
    pub(crate) fn rounds_go_on(&self) {
        let mut state = self.state();
        if matches!(state.stage, Stage::Pausing | Stage::Paused) {
            (state.stage, state.post_copy_begun) = (Stage::Running, false);
        }
    }

    /// Makes the decision irrevocable: a cancellation comes too late from now on.
    ///
    /// # Errors
    /// The migration was cancelled before.
    pub(crate) fn decide(&self) -> Result<(), WasCancelled> {
        let mut state = self.state();
        if state.cancelled {
            return Err(WasCancelled);
        }
        state.stage = Stage::Decided;
        Ok(())
    }

    /// Calls `wake` after each accepted request but a cancellation, until the migration has ended. It must not block and must not call
    /// back.
    pub(crate) fn on_request(&self, wake: impl Fn() + Send + 'static) {
        self.state().wake = Some(Box::new(wake));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is complete before anything could panic.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A migration's hold on its [`Control`]: with it the stages begin and end.
#[derive(Debug)]
pub struct Steering {
    control: Control,
    cancel: Cancel,
    _cancelling: Registration,
}

impl Steering {
    /// Takes `control` for a migration that `cancel` cancels, too.
    ///
    /// # Errors
    /// Another migration has it, or has had it.
    pub fn begin(control: &Control, cancel: &Cancel) -> Result<Self, InUse> {
        {
            let mut state = control.state();
            if state.held || state.stage != Stage::NotBegun {
                return Err(InUse);
            }
            state.held = true;
        }
        let cancelled = control.clone();
        let cancelling = cancel.on_cancel(move || {
            let _ = cancelled.cancel();
        });
        Ok(Self { control: control.clone(), cancel: control.0.cancel.clone(), _cancelling: cancelling })
    }

    /// Returns the control.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Returns what cancels this migration: the control, and the [`Cancel`] that it was begun with.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }
}

impl Drop for Steering {
    fn drop(&mut self) {
        let mut state = self.control.state();
        state.held = false;
        let nothing_begun = state.stage == Stage::NotBegun && !state.cancelled;
        state.stage = if nothing_begun { Stage::NotBegun } else { Stage::Ended };
        let freed = (state.pacer.take(), state.wake.take());
        // Dropped without the lock: the closure may hold anything.
        drop(state);
        drop(freed);
    }
}

#[cfg(test)]
mod tests;
