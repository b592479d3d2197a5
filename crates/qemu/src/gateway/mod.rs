//! The gateway: moves a running guest between two unmodified QEMUs.
//!
//! ```text
//!  source host                                                        destination host
//!  QEMU ══ unix sockets ══> send ══════ TCP or TLS, N channels ══════> receive ══ RAM in place, or in-stream ══> QEMU
//!    └──────── QMP ──────────┘ ──────────── control channel ─────────── └─────────────── QMP ────────────────────┘
//! ```
//! [`send`] and [`receive`] own their QEMUs during the migration: they set capabilities and parameters, drive the
//! migration, and are responsible for the switchover. [`proxy_send`] and [`proxy_receive`] carry migrations that libvirt or another
//! manager drives, and lock no QEMU. [`recover`] settles a migration that a crash in the commit window left undecided.

use std::path::PathBuf;
use std::time::Duration;

use sterna_codec::{MethodChoice, Qatzip};
use sterna_engine::live_control::Control;
use sterna_engine::record_file::Side;
use sterna_engine::source::{IaaVerify, NotConverging};
use sterna_engine::transport::Security;
use sterna_offload::Accelerators;
use sterna_wire::identity::MigrationId;
use sterna_wire::switchover::SourceAfter;

mod backlog;
mod claim;
mod comparison;
mod destination;
mod direct;
mod dry_run;
mod earlier;
mod error;
mod fault;
mod faults;
mod features;
mod feeder;
mod first_moment;
mod layout;
mod monitor;
mod neighbours;
mod plane;
mod proxy;
mod qemu;
mod recovery;
mod sockets;
mod source;
mod source_stream;
mod storage;
mod waiting;

pub use comparison::AllowedDifferences;
pub use destination::{receive, receive_by_libvirt};
pub use dry_run::{DryRun, Estimate, Refusal, dry_run};
pub use error::GatewayError;
pub use monitor::Monitor;
pub use proxy::{ProxyReport, ProxySide, ProxyStop, proxy_receive, proxy_send};
pub use recovery::recover;
pub use source::send;

/// Settings of [`send`].
#[derive(Debug)]
pub struct SendOptions {
    /// The monitor of the source QEMU.
    pub monitor: Monitor,
    /// `host:port` where `sterna receive` listens.
    pub to: String,
    /// TLS with these credentials, or none.
    pub security: Security,
    /// RAM channels, 1 … 64.
    pub channels: u16,
    /// How pages are compressed.
    pub method: MethodChoice,
    /// Where the engine `qat` finds QATzip, and whether software may compress in its place.
    pub qatzip: Qatzip,
    /// CPUs that all sending threads together may use on this host while the guest runs; none: no limit.
    pub max_cpus: Option<f64>,
    /// Maximum bytes per second on the wire; none: no limit.
    pub bandwidth: Option<u64>,
    /// Target downtime.
    pub downtime: Duration,
    /// Bytes of content in a packet.
    pub packet_size: usize,
    /// Maximum bytes of sent pages that all channels together keep as the base of deltas; 0: no deltas.
    pub delta_cache: u64,
    /// For tests and measurements: this share of the zero pages, in percent, is sent as if they were not zero. Direct mode does not read
    /// pages that the guest never used, so they do not count.
    pub normal_page_ratio: u8,
    /// Differences between the two machines that do not keep the guest from being sent.
    pub allowed: AllowedDifferences,
    /// How the guest's memory is read.
    pub mode: SendMode,
    /// Settings that need direct mode.
    pub direct: DirectOptions,
    /// Whether the source QEMU ends or is kept, once the destination has confirmed that the guest runs there.
    pub source_after: SourceAfter,
    /// How long to wait for a destination that does not listen yet. Nothing of the guest is looked at before.
    pub patience: Duration,
    /// Time limits until the guest is stopped for its switchover.
    pub waits: WaitLimits,
    /// Controls the migration from other threads while it runs. `post_copy` is agreed on only in direct mode where it was chosen for rounds
    /// that do not converge ([`DirectOptions::not_converging`]).
    pub control: Control,
    /// The directory of the migrations' records.
    pub state_dir: PathBuf,
    /// Where the private sockets for QEMU are made.
    pub socket_dir: SocketDirectory,
}

/// Settings of [`send`] that need direct mode: QEMU's own stream cannot carry them out.
#[derive(Clone, Debug)]
pub struct DirectOptions {
    /// Devices that find zero pages, copy and compress besides the CPU.
    pub accelerators: Accelerators,
    /// This guest's share of an accelerator beside other guests ([`Source::accelerator_weight`](sterna_engine::source::Source)).
    pub accelerator_weight: u32,
    /// When the output of an IAA device is decompressed and compared.
    pub iaa_verify: IaaVerify,
    /// Whether the destination checks the content of packets against the source's checksums.
    pub checksums: bool,
    /// What to do when the rounds do not converge.
    pub not_converging: NotConverging,
}

impl Default for DirectOptions {
    /// The CPU alone, a weight of 1, checksums; rounds that do not converge are only reported.
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
    /// Returns the given options that only affect speed: the migration may ignore them and still move the guest correctly.
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

    /// Returns the given option that must not be ignored: it may slow the guest down or end the migration, or it names a device.
    fn required(&self) -> Option<String> {
        if self.not_converging != NotConverging::default() {
            return Some("--on-no-convergence".into());
        }
        let named = ![Accelerators::cpu(), Accelerators::auto()].contains(&self.accelerators);
        named.then(|| format!("--accel {}", self.accelerators))
    }

    /// Returns the first option that was given.
    pub fn given(&self) -> Option<&'static str> {
        let not_converging = self.not_converging != NotConverging::default();
        not_converging.then_some("--on-no-convergence").or_else(|| self.for_speed().first().copied())
    }
}

/// How the guest's memory is read from the source QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SendMode {
    /// Direct mode where it is possible, else QEMU's migration stream.
    #[default]
    Auto,
    /// Direct mode: the memory is read and tracked from outside. Where that is not possible, the migration is refused.
    Direct,
    /// By QEMU's own migration stream.
    Stream,
}

/// How long one side waits for the other before the switchover. During the switchover the limits are fixed (docs/operating.md).
#[derive(Clone, Copy, Debug)]
pub struct WaitLimits {
    /// Maximum time without a byte of the guest sent or received, once both sides have agreed on the migration.
    pub stall: Duration,
    /// Maximum time from that agreement until the guest is stopped (source) or prepared (destination); none: no limit.
    pub total: Option<Duration>,
    /// How long, in direct mode, a connection that was lost while the guest's memory is sent is dialled again (source) or waited for
    /// (destination), so that the migration goes on; zero: the migration ends.
    pub retry: Duration,
}

/// Settings of [`receive`].
#[derive(Debug)]
pub struct ReceiveOptions {
    /// QMP socket of the destination QEMU, which was started with `-incoming defer`.
    pub qmp: PathBuf,
    /// `address:port` to listen on.
    pub listen: String,
    /// TLS with these credentials, or none.
    pub security: Security,
    /// How pages reach guest RAM.
    pub placement: Placement,
    /// Whether all of guest RAM is populated before a source in direct mode may begin.
    pub prefault: bool,
    /// How long to wait for a source; none: no limit.
    pub wait: Option<Duration>,
    /// Time limits from a source's hello until the guest is prepared.
    pub waits: WaitLimits,
    /// The directory of the migrations' records.
    pub state_dir: PathBuf,
    /// Where the private sockets for QEMU are made.
    pub socket_dir: SocketDirectory,
}

/// Settings of [`receive_by_libvirt`].
#[derive(Debug)]
pub struct LibvirtReceiveOptions {
    /// The URI of libvirt; none: the one that libvirt chooses.
    pub uri: Option<String>,
    /// The description by which libvirt starts the domain here, in place of the source's; libvirt refuses one whose guest would notice that.
    pub xml: Option<String>,
    /// `address:port` to listen on.
    pub listen: String,
    /// TLS with these credentials, or none.
    pub security: Security,
    /// Whether all of guest RAM is populated before a source may begin.
    pub prefault: bool,
    /// How long to wait for a source; none: no limit.
    pub wait: Option<Duration>,
    /// Time limits from a source's hello until the guest is prepared.
    pub waits: WaitLimits,
    /// The directory of the migrations' records.
    pub state_dir: PathBuf,
}

/// Where Sterna makes the directory with the private sockets between it and QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SocketDirectory {
    /// Below the directory for temporary files (`TMPDIR`), as QEMU sees it.
    #[default]
    Temporary,
    /// Below the directory to which this absolute path leads for QEMU. If QEMU has another root directory or mount namespace (a
    /// container), Sterna reaches the directory through `/proc/PID/root`.
    One(PathBuf),
    /// Below one directory that has one path for Sterna and another for QEMU.
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
    /// The fastest method that each RAM block permits.
    #[default]
    Auto,
    /// All pages through QEMU's own migration sockets.
    InStream,
}

/// Settings of [`proxy_send`].
#[derive(Debug)]
pub struct ProxySendOptions {
    /// Unix sockets to listen on, to which source QEMUs migrate, each with the name under which the other proxy has its counterpart.
    pub unix: Vec<(String, PathBuf)>,
    /// Further unix sockets, named likewise, whose connections are carried unchanged.
    pub opaque: Vec<(String, PathBuf)>,
    /// `host:port` where `sterna proxy receive` listens.
    pub to: String,
    /// TLS with these credentials, or none.
    pub security: Security,
    /// RAM channels of a migration without multifd, 1 … 64; with multifd there are as many as QEMU has.
    pub channels: u16,
    /// How pages are compressed.
    pub method: MethodChoice,
    /// Where the engine `qat` finds QATzip, and whether software may compress in its place.
    pub qatzip: Qatzip,
    /// CPUs that all sending threads together may use on this host while the guest runs; none: no limit.
    pub max_cpus: Option<f64>,
    /// Maximum bytes per second on the wire; none: no limit.
    pub bandwidth: Option<u64>,
    /// Target downtime of the manager that drives QEMU; bounds the bytes in flight.
    pub downtime: Duration,
    /// Bytes of content in a packet.
    pub packet_size: usize,
    /// How long to wait for a destination proxy that does not listen yet.
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
    /// TLS with these credentials, or none.
    pub security: Security,
    /// How long to wait until something listens on a local socket.
    pub patience: Duration,
}

/// Settings of [`recover`].
#[derive(Debug)]
pub struct RecoverOptions {
    /// Which migration.
    pub id: MigrationId,
    /// Which side's record, if this host has both.
    pub side: Option<Side>,
    /// The operator asserts that the other host is gone for good and its guest cannot run.
    pub fenced_peer: bool,
    /// TLS with these credentials, or none; required if the other host must be asked.
    pub security: Option<Security>,
    /// How long a prepared destination waits for its source's decision; none: no limit.
    pub wait: Option<Duration>,
    /// The directory of the migrations' records.
    pub state_dir: PathBuf,
}
