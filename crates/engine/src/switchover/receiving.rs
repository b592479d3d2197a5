//! The channels of a migration that arrives: admitting them, comparing what has arrived with the source's totals, and the time limits until
//! the guest is prepared.

use std::io;
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use sterna_wire::control::{DestinationFigures, SourceProgress, Totals, Welcome};
use sterna_wire::reason::{ErrorKind, Reason};

use super::placing::Placing;
use super::{Interruptions, after, passed};
use crate::cpu_time;
use crate::migration::{DEVICE_STATE, Phase};
use crate::report::Observer;
use crate::session::ChannelAcceptor;
use crate::transport::Incoming;

/// The channels of one migration, and the figures about them.
pub struct Receiving {
    /// Admits the channels.
    pub acceptor: Arc<ChannelAcceptor>,
    /// The figures that the source receives when the guest runs here.
    pub figures: DestinationFigures,
    /// How often and for how long the migration was interrupted.
    pub(super) interruptions: Interruptions,
    /// How each RAM block is placed, and why.
    pub placement: Vec<String>,
    /// The answer to the source's hello, until it is sent.
    welcome: Option<Welcome>,
    progress: Placing,
    /// When the guest must be prepared.
    until: Option<Instant>,
    /// Maximum time without an arrival.
    stall: Option<Duration>,
    /// When a packet must have arrived.
    stalled_at: Option<Instant>,
    /// How many packets had arrived when `stalled_at` was set.
    received: u64,
}

impl Receiving {
    /// Starts to admit the connections of `incoming`, on a thread that ends with the listening. `ram_bytes`: the
    /// guest's RAM, for progress. `stall`: maximum time without an arrival until the guest is prepared. `total`: maximum time until then.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start(
        acceptor: ChannelAcceptor,
        incoming: Incoming,
        welcome: Welcome,
        ram_bytes: u64,
        stall: Option<Duration>,
        total: Option<Duration>,
    ) -> io::Result<Self> {
        let acceptor = Arc::new(acceptor);
        let admitting = Arc::clone(&acceptor);
        let admit = move || {
            while let Some((connection, header)) = incoming.next() {
                admitting.admit(connection, &header);
            }
        };
        cpu_time::spawn(Builder::new().name("admit".into()), admit)?;
        Ok(Self {
            acceptor,
            figures: DestinationFigures::default(),
            interruptions: Interruptions::default(),
            placement: Vec::new(),
            welcome: Some(welcome),
            progress: Placing::new(ram_bytes),
            until: total.map(after),
            stall,
            stalled_at: stall.map(after),
            received: 0,
        })
    }

    /// Compares the source's totals with what each channel has placed: both must be the same, packet by packet, where the channels
    /// carry pages only.
    ///
    /// # Errors
    /// Pages are missing, or the source sent more than its totals say.
    pub fn check(&self, totals: &Totals) -> Result<(), Reason> {
        let placed = self.acceptor.placed();
        if placed == totals.ram {
            return Ok(());
        }
        let more = placed.iter().zip(&totals.ram).any(|(placed, last)| placed > last);
        let less =
            placed.len() != totals.ram.len() || placed.iter().zip(&totals.ram).any(|(placed, last)| placed < last);
        let session = self.acceptor.session();
        if !less && session.has(DEVICE_STATE) && session.device_channels == 0 {
            // The state of devices goes on over the channels of RAM.
            return Ok(());
        }
        Err(Reason::other(match more {
            true => "the source sent more packets than its totals say",
            false => "pages are missing: the totals of the source are not what was placed",
        }))
    }

    /// Admits data channels from now on. Returns the answer to the source's hello, the first time.
    pub(super) fn open(&mut self) -> Option<Welcome> {
        self.acceptor.open();
        self.welcome.take()
    }

    /// Returns the time until progress is to be reported.
    pub(super) fn time_left(&self) -> Duration {
        self.progress.left()
    }

    /// Reports progress, when it is time to.
    pub(super) fn report_progress(&mut self, observer: &dyn Observer, phase: Phase, missing_bytes: u64) {
        if self.progress.is_due() {
            self.progress.report(observer, phase, self.acceptor.pages_placed(), missing_bytes, self.interruptions);
        }
    }

    /// Records the source's progress, for this side's.
    pub(super) fn source_reports(&mut self, progress: SourceProgress) {
        self.progress.source_reports(progress);
    }

    /// Returns the time limit that has passed, if one has. Nothing arrives while the migration is `interrupted`.
    pub(super) fn overdue(&mut self, interrupted: bool) -> Option<Reason> {
        let late = |text| Reason::new(ErrorKind::TimeLimit, text);
        let received = self.acceptor.received();
        if received != self.received || interrupted {
            (self.received, self.stalled_at) = (received, self.stall.map(after));
        }
        if self.until.is_some_and(passed) {
            return Some(late("the guest was not here in time (the destination's time limit)"));
        }
        let stalled = self.stalled_at.is_some_and(passed);
        stalled.then(|| late("nothing of the guest arrived for too long (the destination's stall limit)"))
    }
}
