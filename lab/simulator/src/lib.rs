//! Many migrations and their accelerators in virtual time.
//!
//! No machine at hand has a hundred VMs and eight devices, so such runs are computed event by event. Decisions are made
//! by the product's own code: [`sterna_offload::share`] is linked, not imitated. Durations are figures with a source
//! ([`costs`]). A result is only as good as these figures, so it is called *simulated* wherever it is shown.
//!
//! * [`host`] is the machine: cores with a run queue, devices, memory bandwidth, a network, and the threads of migrations on
//!   them, in Sterna's structure or in the published one of QEMU;
//! * [`device`] is a device as a queue with engines;
//! * [`resources`] are the shared cores and pipes;
//! * [`path`] is one migration from memory to memory, for comparing choices of encodings;
//! * [`zero_page`] and [`many_vms`] are the scenarios of the benchmarks of these names.
//!
//! Three accounts are kept and never added silently ([`costs::Cpu`]): CPU time by measured figures, CPU time that is
//! charged for what the hardware would need, and device time.

pub mod costs;
pub mod device;
pub mod host;
pub mod ledger;
pub mod many_vms;
pub mod measured;
pub mod path;
pub mod resources;
pub mod scenario;
pub mod zero_page;

/// Nanoseconds of virtual time.
pub type Nanos = u64;
