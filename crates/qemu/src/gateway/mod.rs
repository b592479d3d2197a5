//! The gateway: a running guest moved between two unmodified QEMUs.
//!
//! ```text
//!  source host                                                        destination host
//!  QEMU ══ unix sockets ══> send ══════ TCP or TLS, N channels ══════> receive ══ RAM in place, or in-stream ══> QEMU
//!    └──────── QMP ──────────┘ ──────────── control channel ─────────── └─────────────── QMP ────────────────────┘
//! ```
//! [`send`] and [`receive`] own their QEMUs for the time of the migration: they set capabilities and parameters, drive
//! the migration, and answer for the switchover. [`proxy_send`] and [`proxy_receive`] serve those who drive QEMU
//! themselves, and claim nothing. [`recover`] settles what a crash in the commit window left open.

use std::path::PathBuf;
use std::time::Duration;

use sterna::record_file::Side;
use sterna::session::SessionError;
use sterna::source::{IaaVerify, NotConverging};
use sterna::transport::Security;
use sterna_codec::{MethodChoice, Qatzip};
use sterna_offload::Accelerators;
use sterna_wire::identity::MigrationId;
use sterna_wire::switchover::SourceAfter;

mod applied;
mod backlog;
mod claim;
mod destination;
mod direct;
mod fault;
mod features;
mod feeder;
mod layout;
mod plane;
mod proxy;
mod qemu;
mod recovery;
mod sockets;
mod source;
mod source_stream;

pub use destination::receive;
pub use proxy::{ProxyReport, ProxySide, ProxyStop, proxy_receive, proxy_send};
pub use recovery::recover;
pub use source::send;

/// Settings of [`send`].
#[derive(Debug)]
pub struct SendOptions {
    /// QMP socket of the source QEMU.
    pub qmp: PathBuf,
    /// `host:port` where `sterna receive` listens.
    pub to: String,
    /// TLS or not.
    pub security: Security,
    /// RAM channels, 1 … 64.
    pub channels: u16,
    /// How pages are compressed.
    pub method: MethodChoice,
    /// Where the method `qatzip` finds its library, and what software may do.
    pub qatzip: Qatzip,
    /// CPUs of this side that the sending threads may use together, where the method is `auto`; none: no limit.
    pub cpu: Option<f64>,
    /// Most bytes per second on the wire; none: no limit.
    pub bandwidth: Option<u64>,
    /// Longest downtime that is aimed at.
    pub downtime: Duration,
    /// Bytes of content in a packet.
    pub packet_size: usize,
    /// Most bytes of what was sent that are kept to make deltas against, all channels together; 0: none are made.
    pub delta_cache: u64,
    /// For tests and measurements: this share of the zero pages, in percent, is sent as if they were not zero. In direct mode pages that
    /// the guest never used are not looked at.
    pub normal_page_ratio: u8,
    /// How the guest's memory is taken.
    pub mode: SendMode,
    /// What only direct mode does.
    pub direct: DirectOptions,
    /// What becomes of the source QEMU when the destination has confirmed that the guest runs there.
    pub source_after: SourceAfter,
    /// What is waited for at most before the guest is stopped for its switchover.
    pub waits: WaitLimits,
    /// Where the records of migrations are kept.
    pub state_dir: PathBuf,
    /// Where the private sockets for QEMU are made.
    pub socket_dir: SocketDirectory,
}

/// Settings of [`send`] that need direct mode: QEMU's own stream has no place for them.
#[derive(Clone, Debug)]
pub struct DirectOptions {
    /// What looks for zero pages, copies and compresses beside the CPU.
    pub accelerators: Accelerators,
    /// How much of an accelerator this guest may have beside others ([`Source::accelerator_weight`](sterna::source::Source)).
    pub accelerator_weight: u32,
    /// When what an IAA device has compressed is read again.
    pub iaa_verify: IaaVerify,
    /// Whether the content of packets is checked from end to end.
    pub checksums: bool,
    /// What is done when the rounds do not converge.
    pub not_converging: NotConverging,
}

impl Default for DirectOptions {
    /// The CPU alone, a weight of 1, checksums; that rounds do not converge is only told.
    fn default() -> Self {
        Self {
            accelerators: Accelerators::cpu(),
            accelerator_weight: 1,
            iaa_verify: IaaVerify::default(),
            checksums: true,
            not_converging: NotConverging::default(),
        }
    }
}

impl DirectOptions {
    /// Those that were given and are for speed only: without them the same guest moves, and the same becomes of it.
    fn for_speed(&self) -> Vec<&'static str> {
        let default = Self::default();
        let given = [
            (self.accelerators != default.accelerators, "--accel"),
            (self.accelerator_weight != default.accelerator_weight, "--accel-weight"),
            (self.iaa_verify != default.iaa_verify, "--iaa-verify"),
            (self.checksums != default.checksums, "--checksums"),
        ];
        given.into_iter().filter(|(given, _)| *given).map(|(_, name)| name).collect()
    }

    /// The one that was given and decides what becomes of a guest that is not moved as it is.
    fn for_the_guest(&self) -> Option<&'static str> {
        (self.not_converging != NotConverging::default()).then_some("--on-no-convergence")
    }

    /// The first that was given of all of them.
    pub fn given(&self) -> Option<&'static str> {
        self.for_the_guest().or_else(|| self.for_speed().first().copied())
    }
}

/// How the guest's memory is taken from the source's QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SendMode {
    /// Directly where that is possible, else by QEMU's stream.
    #[default]
    Auto,
    /// Directly: read and tracked from outside. Where that is not possible, the migration is refused.
    Direct,
    /// By QEMU's own migration stream.
    Stream,
}

/// How long one side waits for the other before the switchover. After that the limits are fixed (docs/operating.md).
#[derive(Clone, Copy, Debug)]
pub struct WaitLimits {
    /// Time without a byte of the guest sent or taken, from the moment when both sides have agreed on the migration.
    pub stall: Duration,
    /// Time from that moment until the guest is stopped (source) or prepared (destination); none: no limit.
    pub total: Option<Duration>,
}

/// Settings of [`receive`].
#[derive(Debug)]
pub struct ReceiveOptions {
    /// QMP socket of the destination QEMU, which was started with `-incoming defer`.
    pub qmp: PathBuf,
    /// `address:port` to listen on.
    pub listen: String,
    /// TLS or not.
    pub security: Security,
    /// How pages reach guest RAM.
    pub placement: Placement,
    /// Whether all of guest RAM is populated before a source that moves its guest directly may begin.
    pub prefault: bool,
    /// How long a source is waited for; none: no limit.
    pub wait: Option<Duration>,
    /// What is waited for at most between a source's hello and the guest prepared.
    pub waits: WaitLimits,
    /// Where the records of migrations are kept.
    pub state_dir: PathBuf,
    /// Where the private sockets for QEMU are made.
    pub socket_dir: SocketDirectory,
}

/// Where the private sockets between Sterna and QEMU are made, in a directory of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SocketDirectory {
    /// Below the directory for temporary files (`TMPDIR`), as QEMU sees it.
    #[default]
    Temporary,
    /// Below the directory that QEMU means by this absolute path. Where QEMU has another root directory or mount namespace (a
    /// container), Sterna reaches it through `/proc/PID/root`.
    One(PathBuf),
    /// Below one directory that has two paths.
    Two {
        /// Its path for Sterna.
        here: PathBuf,
        /// Its absolute path for QEMU.
        for_qemu: PathBuf,
    },
}

/// How pages reach the destination's guest RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// The fastest way that each RAM block permits.
    #[default]
    Auto,
    /// All pages through QEMU's own migration sockets.
    InStream,
}

/// Settings of [`proxy_send`].
#[derive(Debug)]
pub struct ProxySendOptions {
    /// Unix sockets to listen on, which source QEMUs are told to migrate to, by the names that the other side knows them by.
    pub unix: Vec<(String, PathBuf)>,
    /// Further unix sockets whose connections are carried unchanged, by the name that the other side knows them by.
    pub opaque: Vec<(String, PathBuf)>,
    /// `host:port` where `sterna proxy receive` listens.
    pub to: String,
    /// TLS or not.
    pub security: Security,
    /// RAM channels of a migration without multifd, 1 … 64; with multifd there are as many as QEMU has.
    pub channels: u16,
    /// How pages are compressed.
    pub method: MethodChoice,
    /// Where the method `qatzip` finds its library, and what software may do.
    pub qatzip: Qatzip,
    /// CPUs of this side that the sending threads may use together, where the method is `auto`; none: no limit.
    pub cpu: Option<f64>,
    /// Most bytes per second on the wire; none: no limit.
    pub bandwidth: Option<u64>,
    /// The downtime that whoever drives QEMU aims at; bounds what is in flight.
    pub downtime: Duration,
    /// Bytes of content in a packet.
    pub packet_size: usize,
    /// How long a destination's proxy that does not listen yet is waited for.
    pub patience: Duration,
}

/// Settings of [`proxy_receive`].
#[derive(Debug)]
pub struct ProxyReceiveOptions {
    /// Unix sockets that destination QEMUs listen on, by name.
    pub unix: Vec<(String, PathBuf)>,
    /// Unix sockets that opaque connections are carried to, by name.
    pub opaque: Vec<(String, PathBuf)>,
    /// `address:port` to listen on.
    pub listen: String,
    /// TLS or not.
    pub security: Security,
    /// How long a local socket that nothing listens on yet is waited for.
    pub patience: Duration,
}

/// Settings of [`recover`].
#[derive(Debug)]
pub struct RecoverOptions {
    /// Which migration.
    pub id: MigrationId,
    /// Which side's record, where this host has both.
    pub side: Option<Side>,
    /// The operator asserts that the other host is gone for good and its guest cannot run.
    pub fenced_peer: bool,
    /// TLS or not; needed where the other host must be asked.
    pub security: Option<Security>,
    /// How long a prepared destination waits for its source to say what was decided; none: no limit.
    pub wait: Option<Duration>,
    /// Where the records of migrations are kept.
    pub state_dir: PathBuf,
}

/// Why a migration could not be begun, or what it ended in where there is no report. The guest's state is part of the
/// text.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GatewayError(pub String);

impl From<SessionError> for GatewayError {
    fn from(error: SessionError) -> Self {
        Self(error.to_string())
    }
}

impl GatewayError {
    fn new(what: impl std::fmt::Display) -> Self {
        Self(what.to_string())
    }

    /// An error that came before anything was done to the guest.
    fn untouched(what: impl std::fmt::Display) -> Self {
        Self(format!("{what} (the guest was not touched)"))
    }
}
