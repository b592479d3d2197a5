//! Executes the real instructions on processors that do not have them.
//!
//! `ENQCMD` and `MOVDIR64B` are illegal instructions there. The handler of that signal decodes the one it was raised by,
//! takes the 64 bytes from the source, finds the queue whose device file is mapped at the destination, hands the bytes in
//! and sets the flags as the instruction does, then goes on behind it. So the production code that submits is what is
//! tested: which operand is which, alignment, the meaning of ZF, which slot of the portal.
//!
//! On a processor that has the instructions nothing traps, and [`install`] says so; also on one that has `MOVDIR64B` while a hypervisor
//! hides it.

#[cfg(target_arch = "x86_64")]
mod decode;
#[cfg(target_arch = "x86_64")]
mod handler;

/// Why nothing can be trapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrapError {
    /// The instructions would be executed, not trapped.
    #[error("this processor has {0}: nothing traps, and the instruction would write to a file instead of a portal")]
    Present(&'static str),
    /// Another architecture.
    #[error("ENQCMD and MOVDIR64B are instructions of x86-64")]
    Architecture,
    /// The signal's handler cannot be set.
    #[error("the handler of SIGILL cannot be set: {0}")]
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

/// Sets the handler, once for the process; it stays. Illegal instructions that are neither, or that go nowhere near a
/// portal, are left to the handler that was there before.
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
