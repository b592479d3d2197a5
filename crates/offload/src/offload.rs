//! Offload of a process: started once, shared by all channels.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thiserror::Error;

use sterna_idxd::WorkQueue;

use crate::accelerators::Accelerators;
use crate::backstop::{Backstop, LATER};
use crate::channel::{Channel, Maker, Pools, Shared};
use crate::core::Core;
use crate::engine::device::{Closers, Common, Device};
use crate::engine::dsa::Dsa;
use crate::engine::iaa::Iaa;
use crate::engine::parts::Accelerator;
use crate::engine::{Engine, Kind};
use crate::guest::Guest;
use crate::lease::Leases;
use crate::region::{Region, RegionBusy};
use crate::report::OffloadReport;
use crate::request::Shape;
use crate::settings::Settings;
use crate::start::{self, Opened};
use crate::sync::lock_std;
use crate::time::Nanos;
use crate::trace::Trace;

/// Most pages of a batch: as many descriptors as a device takes in one.
const MOST_PAGES: usize = 1024;

/// How long a shutdown waits for devices out of service to be closed.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// Why offload could not be started. Nothing was touched.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting is out of its range.
    #[error("offload: {name} is {given}, which is not within {range}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What it was.
        given: usize,
        /// What it may be.
        range: &'static str,
    },
    /// What was asked for by name is not there or cannot be used.
    #[error("--accel {wish}: {why}")]
    Missing {
        /// The wish.
        wish: String,
        /// What is there, and what would help.
        why: String,
    },
    /// A thread could not be started.
    #[error("offload: no thread for the backstop: {0}")]
    Thread(std::io::Error),
}

/// Offload of a process.
#[derive(Debug)]
pub struct Offload {
    core: Arc<Core>,
    summary: String,
    backstop: Mutex<Option<Backstop>>,
    /// Channels of the blocking helpers, at rest.
    pub(crate) helpers: Mutex<Vec<Channel>>,
}

impl Offload {
    /// Opens what `choice` names.
    ///
    /// # Errors
    /// What was asked for by name is not there, or a setting is out of its range; nothing was touched.
    pub fn start(choice: &Accelerators, settings: &Settings) -> Result<Arc<Self>, StartError> {
        checked(settings)?;
        Self::running(start::open(choice, settings)?, settings)
    }

    /// Over queues that are open already: those of a model, or of an embedder that has its own idea of what to open.
    /// Nobody else may keep them: a device is proved quiet by closing its queues.
    ///
    /// # Errors
    /// A setting is out of its range.
    pub fn over(queues: Vec<Arc<WorkQueue>>, settings: &Settings) -> Result<Arc<Self>, StartError> {
        checked(settings)?;
        Self::running(Opened { queues, not_used: Vec::new() }, settings)
    }

    fn running(opened: Opened, settings: &Settings) -> Result<Arc<Self>, StartError> {
        let mut summary = start::summary(&opened);
        if let Some(trace) = &settings.trace {
            opened.queues.iter().for_each(|queue| trace.queue(queue.info()));
        }
        let mut devices: Vec<Vec<Arc<WorkQueue>>> = Vec::new();
        for queue in opened.queues {
            let same = |device: &&mut Vec<Arc<WorkQueue>>| device[0].info().device.name == queue.info().device.name;
            match devices.iter_mut().find(same) {
                Some(device) => device.push(queue),
                None => devices.push(vec![queue]),
            }
        }
        let mut nodes: Vec<_> = devices.iter().map(|device| device[0].info().device.numa_node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        if nodes.is_empty() {
            nodes.push(None);
        }
        let shape = |node| Shape { pages: settings.batch_pages, device: !devices.is_empty(), node };
        let common = Common {
            settings: settings.clone(),
            statistics: Arc::default(),
            leases: Arc::default(),
            pools: nodes.into_iter().map(|node| Pools::new(shape(node))).collect(),
            closers: Closers::new(settings.threads),
        };
        let devices: Vec<_> = devices
            .into_iter()
            .enumerate()
            .map(|(number, queues)| Device::new(number as u64, queues, &common))
            .collect();
        for (device, shared) in devices.iter().map(|device| (&device.name, &device.shared)) {
            let _ = write!(summary, "; {device} is shared {}", shared.replace('\n', " "));
        }
        let of = |kind| -> Vec<_> { devices.iter().filter(|device| device.kind == kind).cloned().collect() };
        let mut engines: Vec<Arc<dyn Engine>> = Vec::new();
        let (dsa, iaa) = (of(Kind::Dsa), of(Kind::Iaa));
        if !dsa.is_empty() {
            engines.push(Arc::new(Accelerator::new(Dsa, dsa)));
        }
        if !iaa.is_empty() {
            engines.push(Arc::new(Accelerator::new(Iaa::new(), iaa)));
        }
        let threads = settings.threads && !engines.is_empty();
        let core = Core::new(common, engines);
        let backstop = match threads {
            true => Some(Backstop::start(Arc::clone(&core)).map_err(StartError::Thread)?),
            false => None,
        };
        Ok(Arc::new(Self { core, summary, backstop: Mutex::new(backstop), helpers: Mutex::new(Vec::new()) }))
    }

    #[cfg(test)]
    pub(crate) fn core(&self) -> Arc<Core> {
        Arc::clone(&self.core)
    }

    /// A channel for one submitter, of no guest's.
    pub fn channel(&self) -> Channel {
        self.channel_for(&Arc::new(Guest::new(0, 1)))
    }

    /// A guest that has `weight` (1 to [`MAX_WEIGHT`](crate::share::MAX_WEIGHT)) beside others while they share a device.
    pub fn guest(&self, weight: u32) -> Arc<Guest> {
        Arc::new(Guest::new(self.core.guests.fetch_add(1, Ordering::Relaxed).wrapping_add(1), weight))
    }

    /// A channel for one submitter of `guest`, which this made ([`Self::guest`]).
    pub fn channel_for(&self, guest: &Arc<Guest>) -> Channel {
        let number = self.core.channel_number.fetch_add(1, Ordering::Relaxed);
        let shared = Shared::new(Arc::clone(&self.core), Arc::clone(guest), number);
        lock_std(&self.core.channels).push(Arc::clone(&shared));
        Channel::new(shared, Arc::clone(self.core.pools(None)))
    }

    pub(crate) fn trace(&self) -> Option<&Trace> {
        self.core.settings.trace.as_deref()
    }

    /// What came from `maker` was wrong: it is taken out of service, for the reason `what`.
    pub fn distrust(&self, maker: Maker, what: &str) {
        self.core.distrust(maker, what);
    }

    /// How often a result was found wrong for which a device was taken out of service that makes zero maps. When it rises, zero maps
    /// and copies that were given out before, which are not all looked at, may be wrong too.
    pub fn refuted(&self) -> u64 {
        self.core.statistics.refuted.load(Ordering::Acquire)
    }

    /// What is used, why not the rest, and how each device is shared: one line.
    pub fn summary(&self) -> String {
        self.summary.clone()
    }

    /// Whether any accelerator can do `operation`: else it is all the CPU's.
    pub fn accelerates(&self, operation: crate::Operation) -> bool {
        self.core.engines.iter().any(|engine| engine.does(operation))
    }

    /// Most pages of a batch.
    pub fn batch_pages(&self) -> usize {
        self.core.settings.batch_pages
    }

    /// [`Settings::lateness`], as a span.
    pub fn lateness(&self) -> Nanos {
        u64::try_from(self.core.settings.lateness.as_nanos()).unwrap_or(Nanos::MAX)
    }

    /// Guest memory that a device out of service may still write.
    pub fn leases(&self) -> &Leases {
        &self.core.leases
    }

    /// Takes no new work on any of `regions`, and waits until `deadline` ([`Self::deadline`]) for what is under way on them. Somebody
    /// must be collecting completions meanwhile: other threads' channels, or the backstop. After success they may be unmapped.
    ///
    /// # Errors
    /// One of them is still with a device.
    pub fn retire(&self, regions: &[Arc<Region>], deadline: Nanos) -> Result<(), RegionBusy> {
        // All of them first: where one stays busy, the others take no new work either.
        for region in regions {
            let _ = region.retire();
        }
        loop {
            // Nobody else looks at these.
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

    /// What happened so far.
    pub fn report(&self) -> OffloadReport {
        let core = &self.core;
        core.statistics.report(self.summary(), core.requests(), core.leases.count())
    }

    /// Now, by the clock of [`Settings::time`]: what deadlines are counted from.
    pub fn now(&self) -> Nanos {
        self.core.settings.time.now()
    }

    /// `after` from now, as a deadline.
    pub fn deadline(&self, after: Duration) -> Nanos {
        self.now().saturating_add(u64::try_from(after.as_nanos()).unwrap_or(Nanos::MAX))
    }

    /// What the backstop thread does, where [`Settings::threads`] is off. Says when to come again.
    pub fn turn(&self) -> Nanos {
        self.core.turn()
    }

    /// Takes no more work; gives back what no device has seen ([`Outcome::Cancelled`](crate::Outcome)); waits until devices
    /// have given back the rest or are out of service. Completions can still be collected.
    pub fn shutdown(&self) {
        lock_std(&self.helpers).clear();
        self.core.closing.store(true, Ordering::Release);
        self.core.settle_all();
        self.core.bell.ring();
        if let Some(backstop) = lock_std(&self.backstop).take() {
            backstop.join();
        }
        if !self.core.closers.wait(LAST_WAIT) {
            tracing::warn!("an accelerator out of service has not closed: the memory it may write stays as it is");
        }
    }

    /// Where [`Settings::threads`] is off: drains and closes the devices that were taken out of service, which can take for
    /// ever where a device hangs.
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
    check("batch_pages", settings.batch_pages, 1, MOST_PAGES, "1 to 1024")?;
    check("in_flight", settings.in_flight, 1, 4096, "1 to 4096")
}

fn check(name: &'static str, given: usize, least: usize, most: usize, range: &'static str) -> Result<(), StartError> {
    if (least..=most).contains(&given) { Ok(()) } else { Err(StartError::Setting { name, given, range }) }
}
