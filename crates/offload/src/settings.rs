//! Settings, with their defaults.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "accel")]
use sterna_idxd::{Directories, Opening};

use crate::share::ledger::LedgerFile;
use crate::share::{DelayBased, Fair, Ledger, Share};
use crate::time::{SystemTime, Time};
#[cfg(feature = "accel")]
use crate::trace::Trace;

/// How many of the pages that a device reports as zero the CPU reads again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recheck {
    /// One of this many; 64 by default. At least 1.
    OneIn(u32),
    /// Every page.
    All,
    /// No page.
    None,
}

/// Settings of an [`Offload`](crate::Offload).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// The most pages, and the most items, of a batch: 128 (512 KiB, a packet) by default, at most 4096. With
    /// fewer than a packet has, a source makes smaller packets, and the CPU compresses packets that are larger. On a
    /// shared queue a larger batch lengthens every submitter's waiting time.
    pub batch_pages: usize,
    /// The most batches that one channel may have in progress: 64 by default.
    pub in_flight: usize,
    /// How many of a device's zero pages are checked.
    pub recheck: Recheck,
    /// Whether the CPU computes the checksum of a device's copies again, while they are in its cache; on by default. If
    /// off, a wrong copy is found at the destination, and ends the migration.
    pub recheck_copies: bool,
    /// The least time before a device that does not answer is given up: 1 s by default, and not less in production.
    pub patience: Duration,
    /// How long a sender of pages waits for a device's results before the CPU does the work and the device gets an
    /// exponential back-off: 10 ms by default, several times the waiting time in a queue that many guests share. A
    /// device that is slow at times is not given up, but a guest may be paused meanwhile. (The software model needs
    /// longer.)
    pub lateness: Duration,
    /// Retries of a submission that the queue refuses, before the CPU does the work. After that a submission is not
    /// retried until the device accepts one.
    pub retries: u32,
    /// Whether offload starts threads: the backstop, and the closing of devices out of service. If off, the caller
    /// calls [`Offload::run_backstop`](crate::Offload::run_backstop): tests do, in virtual time.
    pub threads: bool,
    /// The clock.
    pub time: Arc<dyn Time>,
    /// How guests share a device: [`Shares::fair`] by default.
    pub shares: Shares,
    /// Records everything that goes to devices and comes back, for `sterna accel capture`.
    #[cfg(feature = "accel")]
    pub trace: Option<Arc<Trace>>,
    /// The directories in which devices are looked for.
    #[cfg(feature = "accel")]
    pub directories: Directories,
    /// How queues are opened.
    #[cfg(feature = "accel")]
    pub opening: Opening,
}

/// Directory of a host's ledgers: on tmpfs, created by the operator who sets up the queues.
pub const LEDGERS: &str = "/run/sterna/accel";

/// Makes the share of a device, given its name, with a description of how the device is shared.
#[derive(Clone)]
pub struct Shares(Arc<MakeShare>);

type MakeShare = dyn Fn(&str) -> (Box<dyn Share>, String) + Send + Sync;

impl Shares {
    /// Makes shares by calling `make` with the device's name (`dsa0`).
    pub fn new(make: impl Fn(&str) -> Box<dyn Share> + Send + Sync + 'static) -> Self {
        Self(Arc::new(move |device| (make(device), "as the program says".into())))
    }

    /// Shares by weight among the guests of this process, exactly. A guest that has a device to itself is not limited.
    /// Other processes are not known: between processes a device works in the order of submission. No work goes to the
    /// CPU only because it has to wait.
    pub fn fair() -> Self {
        Self(Arc::new(|_| {
            (Box::new(Fair::default().free_alone()), "by weight among the guests of this process".into())
        }))
    }

    /// Shares devices between the processes of a host: by the ledgers in `directory` (normally [`LEDGERS`]), with all
    /// other processes that keep them. Where the directory does not exist, or a ledger cannot be used, a process limits
    /// itself by the measured delay of its work; [`Offload::summary`](crate::Offload::summary) says why. Work that
    /// would wait longer than the CPU needs goes to the CPU.
    pub fn of_host(directory: impl Into<PathBuf>) -> Self {
        let directory = directory.into();
        Self(Arc::new(move |device| match LedgerFile::open(&directory, device) {
            Ok(file) => {
                let how = format!("by weight among the processes that keep {}", file.path().display());
                (Box::new(Ledger::new(file).spilling()), how)
            }
            Err(error) => {
                (Box::new(DelayBased::default()), format!("by measured delay, as there is no ledger: {error}"))
            }
        }))
    }

    /// Returns the share of `device`, and how it is shared.
    pub(crate) fn of(&self, device: &str) -> (Box<dyn Share>, String) {
        (self.0)(device)
    }
}

impl std::fmt::Debug for Shares {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shares")
    }
}

impl Default for Shares {
    fn default() -> Self {
        Self::fair()
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            batch_pages: 128,
            in_flight: 64,
            recheck: Recheck::OneIn(64),
            recheck_copies: true,
            patience: Duration::from_secs(1),
            lateness: Duration::from_millis(10),
            retries: 16,
            threads: true,
            time: Arc::new(SystemTime),
            shares: Shares::default(),
            #[cfg(feature = "accel")]
            trace: None,
            #[cfg(feature = "accel")]
            directories: Directories::default(),
            #[cfg(feature = "accel")]
            opening: Opening::default(),
        }
    }
}
