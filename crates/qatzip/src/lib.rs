//! Intel QATzip, the library that compresses on QAT devices, from safe Rust: found at run time, never linked.
//!
//! * [`Library::open`] finds it ([`Choice`]: the loader's, or the one that `STERNA_QATZIP` names) and verifies that it
//!   is the one this crate was written for. Without it there is an error of one sentence, [`OpenError`], and no crash.
//! * [`Session`] compresses and decompresses whole buffers. It belongs to the thread that made it, by its type.
//! * [`Pool`] has worker threads that own sessions: a bounded queue in, a completion queue per [`Channel`] out, and
//!   buffers passed in and returned. A worker that hangs in a device is abandoned at [`Pool::shutdown`], not waited
//!   for.
//!
//! # What it writes
//!
//! Gzip members (RFC 1952) with the extra field `QZ` (format `QZ_DEFLATE_GZIP_EXT`), which holds a member's plain and
//! compressed length. Hardware can decompress nothing without these lengths, since it must know where each request
//! ends; every other gzip reader skips the field. A device makes one member per [`Params::hardware_buffer`] of input,
//! so several per job; the library's software makes one per job. Any gzip members are read; those without the field in
//! software.
//!
//! # One copy each way
//!
//! A device behind QATzip reads and writes pinned memory of the library. A job in a pair of [`Buffer`]s
//! ([`Pool::buffers`]) is there already: filling the one and reading the other are the only copies. Content in ordinary
//! memory is copied by the worker, which has such a pair of its own. (Without pinned memory the library would copy in
//! the same way, piece by piece.)
//!
//! # Behaviour of QATzip 1.3.1, and how this crate handles it
//!
//! | behaviour | handling |
//! |---|---|
//! | It cannot be asked for its version: `qzGetSoftwareComponentVersionList` and `qzGetStatus` are empty on Linux | soname, functions, and a proof of the layouts: defaults at their places, nothing written behind a structure |
//! | Without hardware it looks for hardware **at every call**, whatever `wait_cnt_thrshold` says, prints a line each time, and keeps one of the process's 1 024 thread keys each time until none is left for anybody | one look per process; then its software path is called directly (exported, but not in the header) or, if that is missing, not at all |
//! | Software only, as a setting, is refused on Linux | as above |
//! | After corrupt or cut input a session goes on within the broken stream; a cut stream is no error | whole members are demanded; a session that failed is set up again |
//! | Software that runs out of output leaks its deflate state | it always gets the whole bound; room is compared afterwards |
//! | `qzMaxCompressedLength` counts one header for any number of members | a bound of our own |
//! | It reads 24 bytes of header however short the input is | zeroes follow short inputs |
//! | It trusts a member's lengths to find the next one | they are compared with the input first; what does not say them is not shown to hardware |
//! | Small inputs (below 1 024 bytes) go to software even where that is forbidden | refused there |
//! | Pinned memory that was freed stays in its table of pinned pages | only memory from it is ever shown to it |
//! | It has assertions that end the process | nothing can be done about that; none is reachable in its software path by input |
//!
//! # Limits
//!
//! **Never run on hardware.** Tests run the real library's software path; the differences with hardware are tested
//! against a simulated library that behaves as its sources describe. The library does not report what did a job:
//! [`By::Hardware`] means that its hardware path finished it, parts of which may have been done in software. QAT's
//! virtual functions are few, and many processes may not all get one. No function works in a child after `fork(2)`: it
//! is refused there. A child should end by `_exit` or `exec`: ordinary `exit` runs the library's own destructor.
//!
//! Software speed is that of zlib and no reason to use QATzip (`examples/measure.rs`): hence [`Software::WhenBusy`] by default.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod abi;
mod error;
mod library;
mod members;
mod memory;
mod pool;
mod presence;
mod session;

pub use error::{Failure, NoHardware, OpenError, StartError};
pub use library::{Choice, Library, VARIABLE};
pub use memory::{Buffer, Bytes};
pub use pool::{Channel, Completion, Job, Options, Pool, Reason, Refused, Statistics, StillBusy};
pub use presence::may_have_hardware;
pub use session::{By, Done, LARGEST_JOB, Params, Session, Software, Work};

/// The example of the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
