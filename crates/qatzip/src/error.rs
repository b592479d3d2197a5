//! Errors, each defined once: what happened, to what, and what to do.

use std::path::PathBuf;

use crate::abi::meaning;

/// Why the library cannot be used in this process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The library, or one of its dependencies, is missing.
    #[error(
        "QATzip is not available: {why}; install libqatzip (Debian 13: libqatzip3), or name the file or its directory in \
         STERNA_QATZIP"
    )]
    NotFound {
        /// The loader's message.
        why: String,
    },
    /// Found, but it lacks a function that this crate calls.
    #[error("{library} has no {symbol}: QATzip 1.3 or a later one with the same soname is needed")]
    MissingFunction {
        /// What was loaded.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// Found, but it could not be verified that its structures are laid out as this crate assumes.
    #[error(
        "{library} cannot be proved to have the structures of qatzip.h 1.3 ({what}), so it is not called; use QATzip 1.3"
    )]
    UnprovenLayout {
        /// What was loaded.
        library: String,
        /// The failed verification.
        what: String,
    },
    /// This process has already loaded another one; its state is process-wide.
    #[error("this process already uses QATzip from {loaded}; it cannot use {wanted} as well")]
    Another {
        /// What is loaded.
        loaded: PathBuf,
        /// The requested library.
        wanted: PathBuf,
    },
    /// The process forked after the library was loaded.
    #[error(
        "QATzip was loaded before this process was forked and cannot be used in the child; load it in the child only"
    )]
    Forked,
}

/// No QAT hardware that this process can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "QATzip found no QAT hardware it can use (code {code}: {}); it needs a virtual function bound to vfio-pci, access to \
     /dev/vfio, and the qatmgr service (package qatlib-service); virtual functions are few, so many processes may not all get one",
    meaning(*code)
)]
pub struct NoHardware {
    /// What `qzInit` returned.
    pub code: i32,
}

/// Why a session, or a pool of them, cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A parameter is outside its range.
    #[error("{what} of {value} is not possible: {range}")]
    Parameter {
        /// The parameter.
        what: &'static str,
        /// Its value.
        value: u64,
        /// Its valid range.
        range: &'static str,
    },
    /// Hardware is required and there is none.
    #[error("{0}; allow QATzip's software (it is slow), or choose another compression")]
    NoHardware(#[from] NoHardware),
    /// This build of the library reaches its software path only by looking for hardware at every call.
    #[error(
        "QATzip has no hardware here, and this build of it looks for hardware at every call and uses up one of the process's \
         {keys} thread keys each time; it is not used without hardware"
    )]
    ProbesAtEveryCall {
        /// `PTHREAD_KEYS_MAX`.
        keys: u32,
    },
    /// The library returned an error.
    #[error("QATzip's {call} failed with code {code} ({})", meaning(*code))]
    Library {
        /// The function.
        call: &'static str,
        /// Its return code.
        code: i32,
    },
    /// No pinned memory.
    #[error(
        "QATzip has no {bytes} bytes of pinned memory for a worker; raise the limit of locked memory or of huge pages"
    )]
    Memory {
        /// The requested size.
        bytes: usize,
    },
    /// A thread could not be started.
    #[error("cannot start a QATzip worker thread: {0}")]
    Thread(#[source] std::io::Error),
    /// A worker did not report in time that it is ready.
    #[error("a QATzip worker did not become ready within {seconds} s; the device or its driver may hang")]
    NotReady {
        /// The waiting time.
        seconds: u64,
    },
    /// The process forked since the library was loaded.
    #[error("QATzip was loaded before this process was forked and cannot be used in the child")]
    Forked,
}

/// Why one job failed. The session stays usable unless stated otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The result is longer than the given room. For compression that means: send it uncompressed.
    #[error("the result is longer than the {room} bytes of room")]
    TooLong {
        /// The given room.
        room: usize,
    },
    /// The input, or the requested room, is larger than the session's limit.
    #[error("{bytes} bytes are more than the {limit} that this session was made for")]
    TooLarge {
        /// The actual bytes.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Software is forbidden, and the library does such small inputs in software.
    #[error("{bytes} bytes are too few for the hardware, and QATzip's software is forbidden")]
    TooSmall {
        /// The actual bytes.
        bytes: usize,
    },
    /// The library did it in software although that is forbidden; the result was discarded.
    #[error("QATzip did this in software, which is forbidden")]
    DoneInSoftware,
    /// The input is not a whole number of gzip members.
    #[error("the input is not whole gzip members: {0}")]
    BadInput(&'static str),
    /// Any other error of the library.
    #[error("QATzip's {call} failed with code {code} ({})", meaning(*code))]
    Library {
        /// The function.
        call: &'static str,
        /// Its return code.
        code: i32,
    },
    /// The library's result contradicts itself.
    #[error(
        "QATzip's {call} answered with lengths that cannot be: {consumed} of {input} bytes read, {produced} written"
    )]
    Inconsistent {
        /// The function.
        call: &'static str,
        /// Bytes of input.
        input: usize,
        /// Bytes read, according to the library.
        consumed: usize,
        /// Bytes written, according to the library.
        produced: usize,
    },
    /// A session could not be set up again after a failure; every further job fails.
    #[error("QATzip's session could not be set up again (code {code}: {})", meaning(*code))]
    Lost {
        /// The library's return code.
        code: i32,
    },
    /// The process forked since the library was loaded.
    #[error("QATzip was loaded before this process was forked and cannot be used in the child")]
    Forked,
    /// The worker that had the job ended before it was done.
    #[error("the QATzip worker that had this job ended before it was done")]
    WorkerLost,
    /// The pool was shut down before the job was begun.
    #[error("the QATzip pool was shut down before this job was begun")]
    ShutDown,
}
