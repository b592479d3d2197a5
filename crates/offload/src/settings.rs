//! What can be set, with what it is by default.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna_idxd::{Directories, Opening};

use crate::share::ledger::LedgerFile;
use crate::share::{DelayBased, Fair, Ledger, Share};
use crate::time::{SystemTime, Time};
use crate::trace::Trace;

/// How many pages that a device called zero are read again by the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recheck {
    /// One in this many; 64 by default. At least 1.
    OneIn(u32),
    /// Every one.
    All,
    /// None.
    None,
}

/// Settings of an [`Offload`](crate::Offload).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// Most pages of a batch, and most items: 128 (512 KiB, a packet) by default, 1024 at most. A batch on a shared queue is
    /// everyone's waiting time.
    pub batch_pages: usize,
    /// Most batches that one channel has under way: 64 by default.
    pub in_flight: usize,
    /// How much of a device's zero pages is checked.
    pub recheck: Recheck,
    /// Whether a device's copies are summed up again by the CPU, while they are in the cache; they are by default. Without, a wrong
    /// one is found at the destination, and ends the migration.
    pub recheck_copies: bool,
    /// Least time before a device that says nothing is given up: 1 s by default, and not less in earnest.
    pub patience: Duration,
    /// How long whoever sends pages waits for what a device says of them, before the CPU does it and the device is left alone for a
    /// while: 10 ms by default, several times what one waits in a queue that many share. A device that is slower now and then
    /// lives and is not given up, but a guest may be standing. (The software model needs longer.)
    pub lateness: Duration,
    /// Retries of a submission that the queue refuses, before the CPU does the work. After that there are none, until the device takes
    /// something again.
    pub retries: u32,
    /// Whether threads run by themselves: the backstop, and the closing of devices out of service. Without, somebody calls
    /// [`Offload::turn`](crate::Offload::turn): tests, in virtual time.
    pub threads: bool,
    /// Where time comes from.
    pub time: Arc<dyn Time>,
    /// Who may put how much on a device: [`Shares::fair`] by default.
    pub shares: Shares,
    /// Where everything that goes to devices and comes back is written down, for `sterna accel capture`.
    pub trace: Option<Arc<Trace>>,
    /// Where devices are looked for.
    pub directories: Directories,
    /// How their queues are opened.
    pub opening: Opening,
}

/// Where the ledgers of a host lie: on tmpfs, made by whoever sets up the queues.
pub const LEDGERS: &str = "/run/sterna/accel";

/// Makes the share of a device, given its name, and says how the device is shared.
#[derive(Clone)]
pub struct Shares(Arc<MakeShare>);

type MakeShare = dyn Fn(&str) -> (Box<dyn Share>, String) + Send + Sync;

impl Shares {
    /// Shares that `make` makes, given the device's name (`dsa0`).
    pub fn new(make: impl Fn(&str) -> Box<dyn Share> + Send + Sync + 'static) -> Self {
        Self(Arc::new(move |device| (make(device), "as the program says".into())))
    }

    /// By weight among the guests of this process, exactly; who has a device to itself is not held back. Other processes are not known: between them the device is whose work comes
    /// first. Nothing goes to the CPU for having to wait.
    pub fn fair() -> Self {
        Self(Arc::new(|_| {
            (Box::new(Fair::default().free_alone()), "by weight among the guests of this process".into())
        }))
    }

    /// As processes of one host should share its devices: by the ledgers in `directory` ([`LEDGERS`] as a rule) with all others that
    /// keep them. Where there is no such directory, or a ledger cannot be used, a process goes by how long its work takes;
    /// [`Offload::summary`](crate::Offload::summary) says why. What would wait longer than the CPU takes goes to the CPU.
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

    /// The share of `device`, and how it is shared.
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
            trace: None,
            directories: Directories::default(),
            opening: Opening::default(),
        }
    }
}
