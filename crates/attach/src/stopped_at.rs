//! Where a stopped thread was: what throttling asks its caller about.

use std::ffi::c_long;

/// Where a thread was when it was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoppedAt {
    /// The address of its next instruction; in a system call, the one after `syscall`.
    pub instruction: u64,
    /// Number and arguments of the system call that the thread was in; `None` if it ran user code.
    pub system_call: Option<(c_long, [u64; 6])>,
}
