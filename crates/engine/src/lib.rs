//! Live migration of virtual machines: the pipeline, its channels and transports, the switchover; and the library that a
//! machine monitor embeds.
//!
//! ```text
//! source        entry ─> batch ─> channel: encode, packet, window ═══> channel: check, decode ─> sink   destination
//! ```
//! A batch enters as *owned bytes* (the gateway beside QEMU) or as *guest ranges* (a monitor that embeds this library) and
//! goes one way, from hand to hand. `ARCHITECTURE.md` has the whole plan, `docs/embedding.md` all that an embedder decides.
//!
//! # A monitor that migrates its guest
//!
//! The "guest" here is a thread that counts in its memory. Both monitors live in one process, on a network in memory, so
//! that this runs as it stands; between two hosts only the address differs.
//!
//! ```
//! use std::io::{Read, Write};
//! use std::ptr::NonNull;
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
//! use std::thread::JoinHandle;
//!
//! use sterna_engine::cancel::Cancel;
//! use sterna_engine::destination::Destination;
//! use sterna_engine::source::Source;
//! use sterna_engine::transport::{Security, simulated::Network};
//! use sterna_engine::vmm::{DestinationVmm, SourceVmm, VmmError};
//! use sterna_memory::dirty::reported::{DirtyMarker, ReportedLog};
//! use sterna_memory::ram::{Backing, GuestRam, RamBlock};
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
//!     /// A monitor with memory of its own, its guest not running; and the log of what its guest writes.
//!     fn new() -> (Self, GuestRam, ReportedLog) {
//!         // Two pages more than needed, so that whole pages fit in.
//!         let memory: &'static [AtomicU64] = Vec::leak((0..WORDS + 1024).map(|_| AtomicU64::new(0)).collect());
//!         let first = memory.as_ptr().align_offset(4096);
//!         let memory = &memory[first..first + WORDS];
//!         // SAFETY: leaked, so it is there for ever, and accessed by atomics only.
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
//!     fn resume(&mut self) -> Result<(), VmmError> { self.run(); Ok(()) }
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
//! assert!(counted(&there) >= counted(&here), "the guest has gone on counting over there");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod abort;
pub mod accelerator;
pub mod batch;
pub mod cancel;
pub mod control_link;
mod cpu_allowance;
mod cpu_time;
pub mod destination;
mod device_bytes;
pub mod device_state;
pub mod directory;
pub mod entry;
mod in_place;
pub mod item;
pub mod migration;
mod monitor;
mod occupied;
mod off_cpu;
pub mod pacer;
pub mod process;
mod reading;
pub mod receive;
pub mod record_file;
pub mod report;
pub mod send;
pub mod session;
pub mod source;
mod state;
pub mod switchover;
pub mod tls;
pub mod transport;
pub mod vmm;
pub mod wakers;
pub mod window;
