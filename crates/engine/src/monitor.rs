//! Calls the embedding monitor's code so that a panic in it becomes an error like any other.
//!
//! A panic that left `run` would lose what is known of the guest: whether it is paused, and which side owns it. So a panic is caught where
//! the monitor is called, and handled like an error of the same method: the guest is resumed if this side owns it, the peer receives the
//! failure, and the error that `run` returns names where the guest is.

use std::error::Error;
use std::fmt;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_wire::switchover::{Moment, Step};

use crate::cpu_time::CpuTime;
use crate::opening::{Opening, Prepared};
use crate::panics::caught;
use crate::report::{Observer, Progress, ReceiveProgress};
use crate::vmm::{AfterMove, DestinationVmm, GuestEnd, ResumeReason, SourceVmm, VmmError};

/// The most errors of the monitor that are kept.
const MAX_FAILURES: usize = 16;

/// An error of a method of the monitor, which the migration's error will name as its source.
#[derive(Clone, Debug)]
pub(crate) struct MonitorError(pub(crate) Arc<dyn Error + Send + Sync>);

impl From<VmmError> for MonitorError {
    fn from(error: VmmError) -> Self {
        Self(error.into())
    }
}

impl fmt::Display for MonitorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for MonitorError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// The monitor at one side. The CPU time of its methods does not count for the migration.
struct Monitor<'a, V: ?Sized> {
    vmm: &'a mut V,
    cpu: CpuTime,
    /// The errors that its methods have returned; each ends the migration or a part of it, so there are few.
    failures: Vec<MonitorError>,
}

impl<V: ?Sized> Monitor<'_, V> {
    fn call<R>(&mut self, method: &str, call: impl FnOnce(&mut V) -> R) -> Result<R, VmmError> {
        let vmm = &mut *self.vmm;
        let result = self.cpu.for_others(|| caught(|| call(vmm)));
        result.map_err(|text| self.failed(format!("the monitor panicked in {method}: {text}").into()))
    }

    /// As [`Monitor::call`], of a method that may fail.
    fn attempt<R>(&mut self, method: &str, call: impl FnOnce(&mut V) -> Result<R, VmmError>) -> Result<R, VmmError> {
        self.call(method, call)?.map_err(|error| self.failed(error))
    }

    /// Keeps the error.
    fn failed(&mut self, error: VmmError) -> VmmError {
        let error = MonitorError::from(error);
        // Throttling may fail again and again.
        if self.failures.len() < MAX_FAILURES {
            self.failures.push(error.clone());
        }
        error.into()
    }
}

/// The monitor at the source. The methods are those of [`SourceVmm`].
pub(crate) struct SourceMonitor<'a> {
    monitor: Monitor<'a, dyn SourceVmm + 'a>,
    name: String,
}

impl<'a> SourceMonitor<'a> {
    /// # Errors
    /// The monitor's `name` has panicked.
    pub(crate) fn new(vmm: &'a mut dyn SourceVmm, cpu: &CpuTime) -> Result<Self, VmmError> {
        let mut monitor = Monitor { vmm, cpu: cpu.clone(), failures: Vec::new() };
        let name = monitor.call("name", |vmm| vmm.name())?;
        Ok(Self { monitor, name })
    }

    pub(crate) fn name(&self) -> String {
        self.name.clone()
    }

    /// Returns the errors of its methods so far.
    pub(crate) fn failures(&self) -> &[MonitorError] {
        &self.monitor.failures
    }

    pub(crate) fn machine_type(&mut self) -> Result<String, VmmError> {
        self.monitor.call("machine_type", |vmm| vmm.machine_type())
    }

    pub(crate) fn check_migratable(&mut self) -> Result<(), VmmError> {
        self.monitor.attempt("check_migratable", |vmm| vmm.check_migratable())
    }

    pub(crate) fn settle_io(&mut self) -> Result<(), VmmError> {
        self.monitor.attempt("settle_io", |vmm| vmm.settle_io())
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        // A monitor that panics here counts as not ended.
        self.monitor.call("has_ended", |vmm| vmm.has_ended()).unwrap_or(false)
    }

    pub(crate) fn guest_end(&mut self) -> Option<GuestEnd> {
        // A monitor that panics here does not know.
        self.monitor.call("guest_end", |vmm| vmm.guest_end()).unwrap_or(None)
    }

    pub(crate) fn guest_moved(&mut self) -> Result<AfterMove, VmmError> {
        self.monitor.attempt("guest_moved", |vmm| vmm.guest_moved())
    }

    pub(crate) fn guest_does_not_run(&mut self) -> Result<AfterMove, VmmError> {
        self.monitor.attempt("guest_does_not_run", |vmm| vmm.guest_does_not_run())
    }

    pub(crate) fn may_pause(&mut self) -> Result<(), VmmError> {
        self.monitor.attempt("may_pause", |vmm| vmm.may_pause())
    }

    pub(crate) fn confirm_paused(&mut self) -> Result<(), VmmError> {
        self.monitor.attempt("confirm_paused", |vmm| vmm.confirm_paused())
    }

    pub(crate) fn changed_by_others(&mut self) -> Option<VmmError> {
        let changed = self.monitor.call("changed_by_others", |vmm| vmm.changed_by_others());
        // A monitor that panics here does not know.
        changed.unwrap_or(None).map(|error| self.monitor.failed(error))
    }

    pub(crate) fn pause(&mut self) -> Result<(), VmmError> {
        self.monitor.attempt("pause", |vmm| vmm.pause())
    }

    pub(crate) fn resume(&mut self, reason: ResumeReason) -> Result<(), VmmError> {
        self.monitor.attempt("resume", |vmm| vmm.resume(reason))
    }

    pub(crate) fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.monitor.attempt("save", |vmm| vmm.save(state))
    }

    pub(crate) fn save_ahead(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.monitor.attempt("save_ahead", |vmm| vmm.save_ahead(state))
    }

    pub(crate) fn state_size(&mut self) -> Result<u64, VmmError> {
        self.monitor.call("state_size", |vmm| vmm.state_size())
    }

    pub(crate) fn throttle(&mut self, percent: u8) -> Result<(), VmmError> {
        self.monitor.attempt("throttle", |vmm| vmm.throttle(percent))
    }

    pub(crate) fn post_copy_refusal(&mut self) -> Result<Option<String>, VmmError> {
        self.monitor.call("post_copy_refusal", |vmm| vmm.post_copy_refusal())
    }
}

/// The monitor at the destination. The methods are those of [`DestinationVmm`].
pub(crate) struct DestinationMonitor<'a> {
    monitor: Monitor<'a, dyn DestinationVmm + 'a>,
    name: String,
}

impl<'a> DestinationMonitor<'a> {
    /// # Errors
    /// The monitor's `name` has panicked.
    pub(crate) fn new(vmm: &'a mut dyn DestinationVmm, cpu: &CpuTime) -> Result<Self, VmmError> {
        let mut monitor = Monitor { vmm, cpu: cpu.clone(), failures: Vec::new() };
        let name = monitor.call("name", |vmm| vmm.name())?;
        Ok(Self { monitor, name })
    }

    pub(crate) fn name(&self) -> String {
        self.name.clone()
    }

    /// Returns the errors of its methods so far.
    pub(crate) fn failures(&self) -> &[MonitorError] {
        &self.monitor.failures
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        // A monitor that panics here counts as not ended.
        self.monitor.call("has_ended", |vmm| vmm.has_ended()).unwrap_or(false)
    }

    pub(crate) fn guest_end(&mut self) -> Option<GuestEnd> {
        // A monitor that panics here does not know.
        self.monitor.call("guest_end", |vmm| vmm.guest_end()).unwrap_or(None)
    }

    pub(crate) fn why_not_running(&mut self) -> Option<String> {
        // A monitor that panics here does not know.
        self.monitor.call("why_not_running", |vmm| vmm.why_not_running()).unwrap_or(None)
    }

    /// Returns what the monitor has prepared for the guest of `opening`. An error refuses one source and is no failure of a migration.
    pub(crate) fn prepare(&mut self, opening: &Opening) -> Result<Prepared, VmmError> {
        self.monitor.call("prepare", |vmm| vmm.prepare(opening))?
    }

    pub(crate) fn load_canceller(&mut self) -> Result<Option<Box<dyn Fn() + Send>>, VmmError> {
        self.monitor.call("load_canceller", |vmm| vmm.load_canceller())
    }

    pub(crate) fn guest_started(&mut self) -> Result<(), VmmError> {
        self.monitor.call("guest_started", |vmm| vmm.guest_started())
    }

    pub(crate) fn discard(&mut self) -> Result<(), VmmError> {
        self.monitor.attempt("discard", |vmm| vmm.discard())
    }

    pub(crate) fn load_ahead(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        self.monitor.attempt("load_ahead", |vmm| vmm.load_ahead(state))
    }

    pub(crate) fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        self.monitor.attempt("load", |vmm| vmm.load(state))
    }

    pub(crate) fn resume(&mut self) -> Result<(), VmmError> {
        self.monitor.attempt("resume", |vmm| vmm.resume())
    }

    pub(crate) fn post_copy_refusal(&mut self) -> Result<Option<String>, VmmError> {
        self.monitor.call("post_copy_refusal", |vmm| vmm.post_copy_refusal())
    }
}

/// A dirty log that the monitor has given. Clones are the same log: it outlives the migrations that use it, one after the other.
#[derive(Clone)]
pub(crate) struct CaughtLog(Arc<Mutex<GivenLog>>);

/// The log, until it is dropped.
struct GivenLog(Option<Box<dyn DirtyLog>>);

impl CaughtLog {
    pub(crate) fn new(log: Box<dyn DirtyLog>) -> Self {
        Self(Arc::new(Mutex::new(GivenLog(Some(log)))))
    }

    fn call(
        &mut self,
        method: &'static str,
        call: impl FnOnce(&mut dyn DirtyLog) -> Result<(), DirtyLogError>,
    ) -> Result<(), DirtyLogError> {
        // Panics are caught within the lock.
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let log = log.0.as_mut().expect("taken only by `drop`");
        caught(|| call(&mut **log)).unwrap_or_else(|said| Err(DirtyLogError::Panicked { method, said }))
    }
}

impl DirtyLog for CaughtLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.call("start", |log| log.start())
    }

    fn found_populated(&mut self, block: usize, populated: &PageBitmap) -> Result<(), DirtyLogError> {
        self.call("found_populated", |log| log.found_populated(block, populated))
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        self.call("collect", |log| log.collect(block, dirty))
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.call("stop", |log| log.stop())
    }
}

impl Drop for GivenLog {
    fn drop(&mut self) {
        let log = self.0.take();
        if let Err(said) = caught(|| drop(log)) {
            tracing::warn!(said, "the dirty log panicked when it was dropped");
        }
    }
}

/// The monitor's observer. A report during which it panics is lost.
pub(crate) struct CaughtObserver<'a>(pub(crate) &'a dyn Observer);

impl Observer for CaughtObserver<'_> {
    fn progress(&self, progress: &Progress) {
        if let Err(said) = caught(|| self.0.progress(progress)) {
            tracing::warn!(said, "the observer panicked in progress");
        }
    }

    fn received(&self, progress: &ReceiveProgress) {
        if let Err(said) = caught(|| self.0.received(progress)) {
            tracing::warn!(said, "the observer panicked in received");
        }
    }

    fn step(&self, moment: Moment, step: Step) {
        if let Err(said) = caught(|| self.0.step(moment, step)) {
            tracing::warn!(said, "the observer panicked in step");
        }
    }

    fn listening(&self, address: &str) {
        if let Err(said) = caught(|| self.0.listening(address)) {
            tracing::warn!(said, "the observer panicked in listening");
        }
    }

    fn note(&self, text: &str) {
        if let Err(said) = caught(|| self.0.note(text)) {
            tracing::warn!(said, note = text, "the observer panicked in note");
        }
    }
}
