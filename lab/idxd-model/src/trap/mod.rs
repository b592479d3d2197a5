//! Executes the real submission instructions without a device, on every x86-64 processor.
//!
//! A processor that lacks `ENQCMD` and `MOVDIR64B` raises SIGILL. One that has them faults on the portal, because the
//! device files of [`Model::write_tree`](crate::Model::write_tree) are empty and a mapping has no memory behind the end
//! of its file (SIGBUS); or already on `ENQCMD`, because the process has no address space bound to a device (SIGSEGV).
//! The handler of these signals decodes the instruction, reads the 64 bytes from the source, finds the queue whose
//! device file is mapped at the destination, submits the bytes, sets the flags as the instruction does, and continues
//! behind the instruction. So tests cover the production code that submits: the order of the operands, alignment, the
//! meaning of ZF, the slot of the portal.

#[cfg(target_arch = "x86_64")]
mod decode;
#[cfg(target_arch = "x86_64")]
mod handler;

/// Why the instructions cannot be trapped.
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

/// Counters of trapped instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trapped {
    /// `ENQCMD`.
    pub enqcmd: u64,
    /// How many of these returned retry.
    pub retries: u64,
    /// `MOVDIR64B`.
    pub movdir64b: u64,
}

/// Sets the handlers, once for the process; they stay. Signals from other instructions, or from accesses outside a
/// portal, are forwarded to the previous handler.
///
/// # Errors
/// [`TrapError::Architecture`] if the architecture lacks the instructions; [`TrapError::Signal`] if the system refuses.
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

/// Returns how often the handler has executed each instruction.
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
