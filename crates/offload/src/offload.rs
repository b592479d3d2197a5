//! The offload of a process: started once, shared by all channels.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[cfg(feature = "accel")]
use sterna_idxd::WorkQueue;

use crate::accelerators::Accelerators;
use crate::backstop::Backstop;
use crate::channel::Channel;
use crate::common::{Closers, Common};
use crate::completion::Producer;
use crate::core::{Core, LATER};
use crate::guest::Guest;
use crate::lease::Leases;
use crate::pools::ByNode;
use crate::region::{Region, RegionBusy};
use crate::report::OffloadReport;
use crate::settings::Settings;
use crate::start::{self, Opened, StartError};
use crate::submitter::Submitter;
use crate::sync::lock_std;
use crate::time::Nanos;
#[cfg(feature = "accel")]
use crate::trace::Trace;
use crate::work::Shape;

/// The largest batch that can be set, in pages: the content of the largest packet (16 MiB).
const MAX_PAGES: usize = 4096;

/// How long a shutdown waits for devices out of service to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Offload of a process.
#[derive(Debug)]
pub struct Offload {
    core: Arc<Core>,
    summary: String,
    backstop: Mutex<Option<Backstop>>,
    /// Idle channels of the blocking helpers.
    pub(crate) helpers: Mutex<Vec<Channel>>,
}

impl Offload {
    /// Opens the accelerators that `choice` selects.
    ///
    /// # Errors
    /// An accelerator requested by name does not exist, or a setting is out of its range. Nothing was changed.
    pub fn start(choice: &Accelerators, settings: &Settings) -> Result<Arc<Self>, StartError> {
        checked(settings)?;
        Self::running(start::open(choice, settings)?, settings)
    }

    /// Starts over queues that are open already: those of a model, or of an embedder that opens queues itself. The
    /// caller must keep no reference to them: closing its queues is the proof that a device is quiet.
    ///
    /// # Errors
    /// A setting is out of its range.
    #[cfg(feature = "accel")]
    pub fn with_queues(queues: Vec<Arc<WorkQueue>>, settings: &Settings) -> Result<Arc<Self>, StartError> {
        checked(settings)?;
        Self::running(Opened { queues, not_used: Vec::new() }, settings)
    }

    fn running(opened: Opened, settings: &Settings) -> Result<Arc<Self>, StartError> {
        let mut summary = opened.summary();
        let nodes = opened.nodes();
        let device = !nodes.is_empty();
        let nodes = if device { nodes } else { vec![None] };
        let common = Common {
            settings: settings.clone(),
            statistics: Arc::default(),
            leases: Arc::default(),
            pools: ByNode::new(nodes.into_iter().map(|node| Shape { pages: settings.batch_pages, device, node })),
            closers: Closers::new(settings.threads),
        };
        let engines = opened.into_engines(&common, &mut summary);
        let threads = settings.threads && !engines.is_empty();
        let core = Core::new(common, engines);
        let backstop = match threads {
            true => Some(Backstop::start(Arc::clone(&core)).map_err(StartError::Thread)?),
            false => None,
        };
        Ok(Arc::new(Self { core, summary, backstop: Mutex::new(backstop), helpers: Mutex::new(Vec::new()) }))
    }

    #[cfg(all(test, feature = "accel"))]
    pub(crate) fn core(&self) -> Arc<Core> {
        Arc::clone(&self.core)
    }

    /// Returns a channel for one submitter that belongs to no guest.
    pub fn channel(&self) -> Channel {
        self.channel_for(&Arc::new(Guest::new(0, 1)))
    }

    /// Returns a guest whose share of a device has weight `weight` (1 to [`MAX_WEIGHT`](crate::share::MAX_WEIGHT)).
    pub fn guest(&self, weight: u32) -> Arc<Guest> {
        Arc::new(Guest::new(self.core.guests.fetch_add(1, Ordering::Relaxed).wrapping_add(1), weight))
    }

    /// Returns a channel for one submitter of `guest`, which [`Self::guest`] of this offload must have made.
    pub fn channel_for(&self, guest: &Arc<Guest>) -> Channel {
        let number = self.core.channel_number.fetch_add(1, Ordering::Relaxed);
        let in_flight = self.core.settings.in_flight;
        let submitter = Submitter::new(in_flight, self.core.pools.clone(), Arc::clone(guest), number);
        lock_std(&self.core.channels).push(Arc::clone(&submitter));
        Channel::new(Arc::clone(&self.core), submitter)
    }

    #[cfg(feature = "accel")]
    pub(crate) fn trace(&self) -> Option<&Trace> {
        self.core.settings.trace.as_deref()
    }

    /// Takes the device of `producer` out of service because a result of it was wrong. `what` is the reason that is
    /// reported.
    pub fn report_wrong_result(&self, producer: Producer, what: &str) {
        self.core.report_wrong_result(producer, what);
    }

    /// Returns how often a device that makes zero maps was taken out of service for a wrong result. When this rises,
    /// zero maps and copies delivered earlier may be wrong too, because only a sample of them is checked.
    pub fn wrong_results(&self) -> u64 {
        self.core.statistics.wrong_results.load(Ordering::Acquire)
    }

    /// Returns one line: the accelerators in use, why others are not used, and how each device is shared.
    pub fn summary(&self) -> String {
        self.summary.clone()
    }

    /// Returns whether any accelerator can do `operation`; otherwise the CPU does all of it.
    pub fn accelerates(&self, operation: crate::Operation) -> bool {
        self.core.engines.iter().any(|engine| engine.does(operation))
    }

    /// Returns the most pages that a batch may have.
    pub fn batch_pages(&self) -> usize {
        self.core.settings.batch_pages
    }

    /// Returns [`Settings::lateness`] in nanoseconds.
    pub fn lateness(&self) -> Nanos {
        u64::try_from(self.core.settings.lateness.as_nanos()).unwrap_or(Nanos::MAX)
    }

    /// Returns the ranges of guest memory that a device out of service may still write.
    pub fn leases(&self) -> &Leases {
        &self.core.leases
    }

    /// Accepts no new work on any of `regions`, and waits until `deadline` ([`Self::deadline`]) for the work in
    /// progress on them. Another thread must collect completions meanwhile: another channel's, or the backstop. After
    /// success the regions may be unmapped.
    ///
    /// # Errors
    /// A device still has work on one of them.
    pub fn retire(&self, regions: &[Arc<Region>], deadline: Nanos) -> Result<(), RegionBusy> {
        // Retires all of them first: where one stays busy, the others accept no new work either.
        for region in regions {
            let _ = region.retire();
        }
        loop {
            // Only this poll makes progress on second looks.
            let under_way = self.core.second_looks();
            let Some(busy) = regions.iter().find(|region| region.retire().is_err()) else { return Ok(()) };
            let now = self.now();
            let until = if under_way { deadline.min(now.saturating_add(LATER)) } else { deadline };
            match busy.retire_by(until, &*self.core.settings.time) {
                Err(busy) if now >= deadline => return Err(busy),
                _ => {}
            }
        }
    }

    /// Returns the counters since the start.
    pub fn report(&self) -> OffloadReport {
        let core = &self.core;
        core.statistics.report(self.summary(), core.requests(), core.leases.count())
    }

    /// Returns the current time of the clock in [`Settings::time`], from which deadlines are counted.
    pub fn now(&self) -> Nanos {
        self.core.settings.time.now()
    }

    /// Returns the deadline that lies `after` from now.
    pub fn deadline(&self, after: Duration) -> Nanos {
        self.now().saturating_add(u64::try_from(after.as_nanos()).unwrap_or(Nanos::MAX))
    }

    /// Does one turn of the backstop thread, where [`Settings::threads`] is off. Returns when the next turn is due.
    pub fn run_backstop(&self) -> Nanos {
        self.core.turn()
    }

    /// Accepts no more work, cancels batches that no device has seen ([`Outcome::Cancelled`](crate::Outcome)), and
    /// waits until devices have finished the others or are out of service. Completions can still be collected.
    pub fn shutdown(&self) {
        lock_std(&self.helpers).clear();
        self.core.closing.store(true, Ordering::Release);
        self.core.settle_all();
        self.core.bell.ring();
        if let Some(backstop) = lock_std(&self.backstop).take() {
            backstop.join();
        }
        if !self.core.closers.wait(CLOSE_TIMEOUT) {
            tracing::warn!("an accelerator out of service has not closed: the memory it may write stays as it is");
        }
    }

    /// Drains and closes the devices that were taken out of service, where [`Settings::threads`] is off. If a device
    /// hangs this may never return.
    pub fn close_devices(&self) {
        self.core.closers.run_waiting();
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn checked(settings: &Settings) -> Result<(), StartError> {
    check("batch_pages", settings.batch_pages, 1, MAX_PAGES, "1 to 4096")?;
    check("in_flight", settings.in_flight, 1, 4096, "1 to 4096")
}

fn check(name: &'static str, given: usize, min: usize, max: usize, range: &'static str) -> Result<(), StartError> {
    if (min..=max).contains(&given) { Ok(()) } else { Err(StartError::Setting { name, given, range }) }
}
