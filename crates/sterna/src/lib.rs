//! Live migration of virtual machines, for machine monitors that embed it.
//!
//! A monitor supplies the RAM of its guest ([`GuestRam`]), a log of the pages that the guest writes ([`DirtyLog`]) and a few methods
//! ([`SourceVmm`], [`DestinationVmm`]). [`Source::run`] and [`Listening::run`] do the rest: rounds over the dirty pages, compression,
//! encryption, convergence, post-copy, a switchover that never leaves two guests running, and a report.
//!
//! ```text
//!  your monitor                                                                         your monitor
//!  RAM blocks ──┐                                                                ┌── RAM blocks
//!  dirty log  ──┤  Source::run ═══ control, RAM ×N, state (TCP, TLS, unix) ═══> Listening::run
//!  pause, save ─┘                                                                └─ load, resume
//! ```
//! `docs/embedding.md` describes the embedder's choices, and `examples/embedded` is a small monitor over rust-vmm's `vm-memory`.
//!
//! # A monitor that migrates its guest
//!
//! The "guest" here is a thread that counts in its memory. Both monitors live in one process, on a network in memory, so that the
//! example runs as it is. Between two hosts, only address and security differ.
//!
//! ```
//! use std::io::{Read, Write};
//! use std::ptr::NonNull;
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
//! use std::thread::JoinHandle;
//!
//! use sterna::simulated::Network;
//! use sterna::{
//!     Backing, Cancel, Destination, DestinationVmm, DirtyMarker, GuestRam, RamBlock, ReportedLog, ResumeReason, Security, Source, SourceVmm,
//!     VmmError,
//! };
//!
//! const PAGES: usize = 1024;
//! const WORDS: usize = PAGES * 512;
//!
//! struct Monitor {
//!     memory: &'static [AtomicU64],
//!     dirty: DirtyMarker,
//!     counted: Arc<AtomicU64>,
//!     stop: Arc<AtomicBool>,
//!     vcpu: Option<JoinHandle<()>>,
//! }
//!
//! impl Monitor {
//!     /// Makes a monitor with its own memory and a guest that does not run, and the log of the guest's writes.
//!     fn new() -> (Self, GuestRam, ReportedLog) {
//!         // Two pages more than needed, so that whole pages fit in.
//!         let memory: &'static [AtomicU64] = Vec::leak((0..WORDS + 1024).map(|_| AtomicU64::new(0)).collect());
//!         let first = memory.as_ptr().align_offset(4096);
//!         let memory = &memory[first..first + WORDS];
//!         // SAFETY: leaked, so mapped for ever, and accessed by atomics only.
//!         let block = unsafe { RamBlock::new("ram", NonNull::from(memory).cast(), PAGES * 4096, Backing::Other) };
//!         let log = ReportedLog::new(&[PAGES as u64]);
//!         let (dirty, counted, stop) = (log.marker(), Arc::default(), Arc::default());
//!         (Self { memory, dirty, counted, stop, vcpu: None }, GuestRam::new(vec![block]).unwrap(), log)
//!     }
//!
//!     fn run(&mut self) {
//!         let (memory, dirty) = (self.memory, self.dirty.clone());
//!         let (counted, stop) = (Arc::clone(&self.counted), Arc::clone(&self.stop));
//!         self.vcpu = Some(std::thread::spawn(move || {
//!             while !stop.load(Ordering::Relaxed) {
//!                 let number = counted.fetch_add(1, Ordering::Relaxed);
//!                 let word = (number as usize).wrapping_mul(4099) % WORDS;
//!                 memory[word].store(number, Ordering::Relaxed);
//!                 let page = word as u64 / 512;
//!                 dirty.mark(0, page..page + 1); // after the write, as a device model does
//!                 std::thread::yield_now();
//!             }
//!         }));
//!     }
//!
//!     fn stop(&mut self) {
//!         self.stop.store(true, Ordering::Relaxed);
//!         self.vcpu.take().map(JoinHandle::join);
//!         self.stop.store(false, Ordering::Relaxed);
//!     }
//! }
//!
//! impl SourceVmm for Monitor {
//!     fn name(&self) -> String { "example 1".into() }
//!     fn pause(&mut self) -> Result<(), VmmError> { self.stop(); Ok(()) }
//!     fn resume(&mut self, _: ResumeReason) -> Result<(), VmmError> { self.run(); Ok(()) }
//!     fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
//!         Ok(state.write_all(&self.counted.load(Ordering::Relaxed).to_le_bytes())?)
//!     }
//! }
//!
//! impl DestinationVmm for Monitor {
//!     fn name(&self) -> String { "example 1".into() }
//!     fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
//!         let mut counted = [0; 8];
//!         state.read_exact(&mut counted)?;
//!         self.counted.store(u64::from_le_bytes(counted), Ordering::Relaxed);
//!         Ok(())
//!     }
//!     fn resume(&mut self) -> Result<(), VmmError> { self.run(); Ok(()) }
//! }
//!
//! let network = Network::new(1);
//! let (mut there, ram, _) = Monitor::new();
//! let listening = Destination::new(ram).listen(&network.port("there"), &Security::Insecure)?;
//! let address = listening.address().clone();
//! let destination = std::thread::spawn(move || {
//!     let report = listening.run(&mut there, &Cancel::new(), &());
//!     there.stop();
//!     (report, there)
//! });
//!
//! let (mut here, ram, log) = Monitor::new();
//! here.run();
//! let report = Source::new(ram, Box::new(log)).run(address, &Security::Insecure, &mut here, &Cancel::new(), &())?;
//! println!("{}", report.text());
//!
//! let (received, there) = destination.join().unwrap();
//! received?;
//! let counted = |monitor: &Monitor| monitor.counted.load(Ordering::Relaxed);
//! assert!(counted(&there) >= counted(&here), "the guest continues to count at the destination");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//!
//! None is on by default: a plain build links neither TLS nor QATzip nor a driver of accelerators. Both sides need a feature,
//! unless the table has "source": then only the source does.
//!
//! | feature | adds |
//! |---|---|
//! | `tls` | mutual TLS 1.3 (rustls with aws-lc): [`Security::Tls`] can be made. Without it [`TlsSettings::client`] and [`TlsSettings::server`] return an error |
//! | `zstd` | the method `zstd`; `auto` may choose it |
//! | `qatzip` | source: the engine `qat` of the method `deflate`, by the library QATzip, found at run time |
//! | `accel` | source: Intel DSA searches for zero pages, copies with checksums and makes deltas; Intel IAA compresses |
//! | `model` | includes `accel`: these devices in software, for tests |
//! | `vm-memory` | either side: RAM blocks and a dirty log from rust-vmm's `vm-memory` |
//! | `full` | `tls`, `zstd`, `qatzip` and `accel` |
//!
//! Internals, and further interfaces of Sterna's own programs (guests in other processes, records on disk), are in `sterna-engine` and the
//! crates below it; they change without notice.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

#[cfg(feature = "vm-memory")]
pub mod vm_memory;

// Both ends.
pub use sterna_engine::cancel::Cancel;
pub use sterna_engine::destination::{Before, Destination, Fence, Listening};
pub use sterna_engine::live_control::{Control, RequestOutcome};
pub use sterna_engine::migration::{ErrorKind, GuestState, MigrationError, Phase, Side};
pub use sterna_engine::opening::{Block, Opening, Prepared};
pub use sterna_engine::record_file::{RecordFileError as RecordError, StateDir};
pub use sterna_engine::recovery::{Recovery, Remains, Settled};
pub use sterna_engine::source::{NotConverging, Source, Throttle, TimeLimits};
pub use sterna_engine::vmm::{AfterMove, DestinationVmm, GuestEnd, ResumeReason, SourceVmm, VmmError};
pub use sterna_engine::wakers::Registration;

// What a migration reports.
pub use sterna_engine::report::{
    DeviceProgress, DeviceReport, DowntimeParts, Observer, Outcome, PostCopyReport, Progress, ReceiveProgress,
    ReceiveReport, Report, bytes as format_bytes, rate as format_rate,
};

// Devices whose state is sent separately from the monitor's.
pub use sterna_engine::device_state::{Ahead, DeviceChannels, DeviceId, DevicePhase, LoadDevice, SaveDevice};

// Connections.
pub use sterna_engine::tls::{TlsError, TlsPem, TlsSettings};
pub use sterna_engine::transport::{Address, Security, SocketQueue};

/// A network in memory with planned faults, for an embedder's own tests.
pub mod simulated {
    pub use sterna_engine::transport::simulated::{After, DEFAULT_CAPACITY, Direction, Faults, Network, Port, Which};
}

// Guest RAM.
pub use sterna_memory::PAGE_SIZE;
pub use sterna_memory::bitmap::PageBitmap;
pub use sterna_memory::ram::{Backing, GuestRam, RamBlock, RamError};

// Dirty logs.
pub use sterna_memory::dirty::kvm_log::KvmLog;
pub use sterna_memory::dirty::kvm_ring::{KvmRingLog, RingHarvester, enable as enable_kvm_ring};
pub use sterna_memory::dirty::punched::{PunchedLog, SharedFile};
pub use sterna_memory::dirty::reported::{DirtyMarker, ReportedLog};
pub use sterna_memory::dirty::union::UnionLog;
pub use sterna_memory::dirty::write_protect::WriteProtectLog;
pub use sterna_memory::dirty::{DirtyLog, DirtyLogError, KvmSlot};

// Compression.
pub use sterna_codec::{ChoiceError, Engine, EngineChoice, EngineMissing, Method, MethodChoice};
#[cfg(feature = "qatzip")]
pub use sterna_codec::{Qatzip, QatzipSoftware};

// Accelerators.
#[cfg(feature = "accel")]
pub use sterna_engine::source::IaaVerify;
#[cfg(feature = "accel")]
pub use sterna_offload::{
    Accelerators, AcceleratorsError, LEDGERS, Offload, Settings as OffloadSettings, Shares,
    StartError as OffloadStartError,
};
