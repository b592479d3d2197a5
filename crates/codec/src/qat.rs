//! The format `gzip` by QATzip: pieces of a batch go to worker threads that own the library's sessions, and the
//! resulting members follow each other in the packet.
//!
//! Content is copied once into pinned memory of the library and the result once out of it. A piece that was not done in
//! time, or failed, is done by the CPU where software is allowed; otherwise the batch is sent uncompressed. A migration
//! never fails for it.

mod account;
mod encoder;

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna_qatzip::{
    Choice, Failure, Library, NoHardware, OpenError, Options, Params, Pool, Reason, Software, StartError,
    may_have_hardware,
};
use thiserror::Error;

use self::account::Account;
use self::encoder::QatEncoder;
use crate::libdeflate::Compressor;
use crate::{CodecError, Encoder, EncoderSource, Encoding, Engine, Engines, MethodChoice};

/// The most content of one job: two requests of a device. A batch of the usual size keeps several workers busy, and
/// content that is not worth two requests is not split.
const PIECE: usize = 128 << 10;
/// Jobs that an encoder has in progress at a time, each with its buffers.
const JOBS: usize = 4;
/// Workers for each channel, and for all of them: a device has few instances, and each accepts several requests at once.
const WORKERS_PER_CHANNEL: usize = 2;
const MAX_WORKERS: usize = 8;
/// The default time limit of a device for a piece: a hundred times the expected time.
const PATIENCE: Duration = Duration::from_millis(100);
/// The least time limit with software, which cannot hang but may have to wait for a processor.
const PATIENCE_WITH_SOFTWARE: Duration = Duration::from_secs(10);

/// How the engine `qat` finds QATzip, and what may be done in software.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qatzip {
    /// The library's file or its directory; if none, the one that `STERNA_QATZIP` names, else the one that the loader
    /// finds.
    pub library: Option<PathBuf>,
    /// Whether software may do what no device does: the library's own, and the CPU with another (faster) deflate.
    pub software: Software,
    /// How long a device may take for a piece of a batch (128 KiB) before another encoder does it: a guest may be
    /// paused.
    pub patience: Duration,
}

/// Any library, the CPU where no device does it, and 100 ms.
impl Default for Qatzip {
    fn default() -> Self {
        Self { library: None, software: Software::default(), patience: PATIENCE }
    }
}

/// Why the engine `qat`, which was named, cannot be used as requested.
#[derive(Debug, Error)]
pub enum QatzipRefused {
    /// There is no library.
    #[error("engine qat is not there: {0}")]
    Library(#[from] OpenError),
    /// There is no hardware, and QATzip's own software was not asked for.
    #[error("engine qat is not there: {0}")]
    Hardware(#[from] NoHardware),
    /// The library does not start.
    #[error("engine qat is not there: {0}")]
    Start(#[source] StartError),
}

impl Qatzip {
    /// Returns the engines on this side for encoding `choice` on this many channels, and a line of text about QATzip if the engine
    /// `qat` was named. Opens the library if `qat` was named, and where the engine is Sterna's choice if this host may have hardware.
    ///
    /// # Errors
    /// The engine `qat` was named, and there is no hardware or no library. Without hardware [`Software::Always`] has QATzip's own
    /// software in its place.
    pub fn engines(&self, choice: MethodChoice, channels: u16) -> Result<(Engines, Option<String>), QatzipRefused> {
        let (none, named) = (Engines::default(), choice.requires(Engine::Qat));
        if !(named || choice.permits(Engine::Qat) && may_have_hardware()) {
            return Ok((none, None));
        }
        // `auto` uses the default level.
        let level = choice.encoding(Engine::Qat).and_then(Encoding::level).unwrap_or(1);
        // Sessions without hardware are used only if the user names the engine.
        let software = match self.software {
            Software::Always if !named => Software::WhenBusy,
            software => software,
        };
        match self.start(level, software, channels) {
            Ok(qat) => {
                let line = named.then(|| format!("engine qat: {}", qat.what()));
                Ok((none.with_qat(Arc::new(qat)), line))
            }
            Err(refused) if named => Err(refused),
            Err(_) => Ok((none, None)),
        }
    }

    fn start(&self, level: i32, software: Software, channels: u16) -> Result<Qat, QatzipRefused> {
        let choice = self.library.clone().map_or_else(Choice::from_environment, Choice::Path);
        let library = Library::open(&choice)?;
        Qat::start(&library, level, software, channels, self.patience).map_err(|error| match error {
            StartError::NoHardware(none) => QatzipRefused::Hardware(none),
            other => QatzipRefused::Start(other),
        })
    }
}

/// Why QATzip did not do a piece.
#[derive(Clone, Copy, Debug, Error)]
enum Trouble {
    #[error("{0}")]
    Failed(#[from] Failure),
    #[error("{0}")]
    Refused(#[from] Reason),
    #[error("QATzip did not answer within {0:?}")]
    Late(Duration),
}

/// QATzip's workers, for one migration.
pub struct Qat {
    pool: Pool,
    library: Arc<Library>,
    level: i32,
    /// Time limit for a piece.
    patience: Duration,
    software: Software,
    account: Arc<Account>,
}

impl Qat {
    /// Starts workers for this many channels at a level of 1 to 9. `patience` is a device's time limit for a piece.
    ///
    /// # Errors
    /// As [`Pool::start`]: without hardware there are none, unless `software` is [`Software::Always`].
    pub fn start(
        library: &Arc<Library>,
        level: i32,
        software: Software,
        channels: u16,
        patience: Duration,
    ) -> Result<Self, StartError> {
        let channels = usize::from(channels.max(1));
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let on_hardware = library.hardware().is_ok();
        let most = if on_hardware { MAX_WORKERS } else { MAX_WORKERS.min(cores) };
        let workers = (WORKERS_PER_CHANNEL * channels).min(most);
        // The channel of the machine's own stream has an encoder too.
        let queue = (channels + 1) * JOBS;
        let number = |of: usize| NonZeroUsize::new(of).expect("at least one");
        let level_of_sessions = u32::try_from(level).unwrap_or(0);
        let params = Params { level: level_of_sessions, software, largest_job: PIECE, ..Params::default() };
        let pool = Pool::start(library, &Options { workers: number(workers), queue: number(queue), params })?;
        let patience = if on_hardware { patience } else { patience.max(PATIENCE_WITH_SOFTWARE) };
        let account = Arc::new(Account::default());
        Ok(Self { pool, library: Arc::clone(library), level, software, patience, account })
    }

    /// Returns a description of what does the work.
    fn what(&self) -> String {
        let by =
            if self.pool.on_hardware() { "QAT hardware" } else { "QATzip's own software, for there is no hardware" };
        format!("{by}, by {}", self.library.file().display())
    }
}

impl fmt::Debug for Qat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qat").field("pool", &self.pool).field("software", &self.software).finish_non_exhaustive()
    }
}

impl EncoderSource for Qat {
    fn encoder(&self, level: i32) -> Result<Box<dyn Encoder>, CodecError> {
        let failed = |reason| CodecError::Library { format: "gzip", reason };
        if level != self.level {
            return Err(failed("QATzip's workers were started for another level"));
        }
        let cpu = match self.software {
            Software::Forbidden => None,
            Software::WhenBusy | Software::Always => Some(Compressor::new(level).ok_or(failed("no memory"))?),
        };
        let mut buffers = Vec::with_capacity(JOBS);
        for _ in 0..JOBS {
            buffers.extend(self.pool.buffers().ok());
        }
        if buffers.is_empty() && cpu.is_none() {
            return Err(failed("QATzip has no pinned memory for a channel, and software is forbidden"));
        }
        let channel = self.pool.channel(NonZeroUsize::new(JOBS).expect("there are some"));
        Ok(Box::new(QatEncoder::new(channel, buffers, cpu, self.patience, Arc::clone(&self.account))))
    }

    fn is_hardware(&self) -> bool {
        self.pool.on_hardware()
    }

    fn account(&self) -> Option<String> {
        self.account.words()
    }
}
