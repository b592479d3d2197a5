//! Executes the real instructions in a device's place, on every x86-64 processor.
//!
//! A processor that lacks `ENQCMD` and `MOVDIR64B` raises SIGILL. One that has them faults on the portal, because the device files of
//! [`Model::write_tree`](crate::Model::write_tree) are empty and a mapping has no memory behind the end of its file (SIGBUS); or already
//! on `ENQCMD`, because the process has no address space bound to a device (SIGSEGV). The handler of these signals decodes the instruction,
//! takes the 64 bytes from the source, finds the queue whose device file is mapped at the destination, hands the bytes in
//! and sets the flags as the instruction does, then goes on behind it. So the production code that submits is what is
//! tested: which operand is which, alignment, the meaning of ZF, which slot of the portal.

#[cfg(target_arch = "x86_64")]
mod decode;
#[cfg(target_arch = "x86_64")]
mod handler;

/// Why nothing can be trapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrapError {
    /// Another architecture.
    #[error("ENQCMD and MOVDIR64B are instructions of x86-64")]
    Architecture,
    /// A signal's handler cannot be set.
    #[error("the handlers of SIGILL, SIGBUS and SIGSEGV cannot be set: {0}")]
    Signal(std::io::Error),
}

/// What has been trapped so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trapped {
    /// `ENQCMD`.
    pub enqcmd: u64,
    /// Of these, told to retry.
    pub retries: u64,
    /// `MOVDIR64B`.
    pub movdir64b: u64,
}

/// Sets the handlers, once for the process; they stay. Every other instruction that raises one of the signals, and every access that is
/// not to a portal, is left to the handler that was there before.
///
/// # Errors
/// [`TrapError::Architecture`] where there are no such instructions; [`TrapError::Signal`] where the system refuses.
pub fn install() -> Result<(), TrapError> {
    #[cfg(target_arch = "x86_64")]
    {
        handler::install()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        Err(TrapError::Architecture)
    }
}

/// How often the handler has executed an instruction.
pub fn trapped() -> Trapped {
    #[cfg(target_arch = "x86_64")]
    {
        handler::trapped()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        Trapped::default()
    }
}
