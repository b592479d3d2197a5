//! The wait for a source.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use sterna_engine::cancel::Cancel;
use sterna_engine::wakers::Registration;
use sterna_wire::reason::ErrorKind;

use super::GatewayError;
use crate::qmp::Qmp;

/// How long QEMU's monitor is watched at a time. The watch outlives the wait by at most this, and notices a closed monitor at once.
const WATCH_TIME: Duration = Duration::from_secs(1);

/// The wait for a source: cancelled by the program's cancellation, when its time is over, and when a watched QEMU has closed its monitor.
pub(super) struct Waiting {
    /// Ends the wait.
    pub(super) cancel: Cancel,
    program: Cancel,
    limit: Option<Duration>,
    monitor_closed: Arc<AtomicBool>,
    _passing_on: Registration,
    /// The clock's thread ends when this is dropped.
    _over: Sender<()>,
}

impl Waiting {
    /// Begins the wait.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn start(limit: Option<Duration>, program: &Cancel) -> Result<Self, GatewayError> {
        let cancel = Cancel::new();
        let passed_on = cancel.clone();
        let passing_on = program.on_cancel(move || passed_on.cancel());
        let (over, is_over) = channel::<()>();
        if let Some(limit) = limit {
            let late = cancel.clone();
            let clock = move || {
                if let Err(RecvTimeoutError::Timeout) = is_over.recv_timeout(limit) {
                    late.cancel();
                }
            };
            let thread = Builder::new().name("wait".into()).spawn(clock);
            let failed = |error| GatewayError::untouched(format!("no thread for the time limit of the wait: {error}"));
            thread.map_err(failed)?;
        }
        let (program, monitor_closed) = (program.clone(), Arc::default());
        Ok(Self { cancel, program, limit, monitor_closed, _passing_on: passing_on, _over: over })
    }

    /// Has the wait end when QEMU closes its monitor.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn watch(&self, qmp: &Qmp) -> Result<(), GatewayError> {
        let (closed, qmp) = ((Arc::downgrade(&self.monitor_closed), self.cancel.clone()), qmp.clone());
        let watch = move || {
            // Until the wait is over.
            while let Some(monitor_closed) = closed.0.upgrade() {
                if qmp.wait_closed(Instant::now() + WATCH_TIME) {
                    monitor_closed.store(true, Ordering::Release);
                    return closed.1.cancel();
                }
            }
        };
        let thread = Builder::new().name("qemu-monitor".into()).spawn(watch);
        thread.map_err(|error| GatewayError::untouched(format!("no thread watches QEMU's monitor: {error}")))?;
        Ok(())
    }

    /// Returns whether the wait has ended because QEMU has closed its monitor.
    pub(super) fn monitor_closed(&self) -> bool {
        self.monitor_closed.load(Ordering::Acquire) && !self.program.is_cancelled()
    }

    /// Returns the error for a wait that was cancelled, or whose time is over; `untouched` says what was left as it was.
    pub(super) fn no_source(&self, untouched: &str) -> GatewayError {
        match self.limit {
            Some(limit) if !self.program.is_cancelled() => {
                let seconds = limit.as_secs_f64();
                let text = format!("no source has begun a migration within {seconds} s (--wait); {untouched}");
                GatewayError::of_kind(ErrorKind::Network, text)
            }
            _ => {
                let text = format!("cancelled before a migration began; {untouched}");
                GatewayError::of_kind(ErrorKind::Cancelled, text)
            }
        }
    }
}
