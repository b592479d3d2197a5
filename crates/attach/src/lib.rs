//! System calls in a thread of another process, and a descriptor taken out of that process.
mod error;
mod process;
mod system;
mod thread;
#[cfg(target_arch = "x86_64")]
mod tracee;
#[cfg(not(target_arch = "x86_64"))]
#[path = "tracee_elsewhere.rs"]
mod tracee;
mod userfault;

pub use error::AttachError;
pub use process::Process;
pub use thread::StoppedThread;
pub use userfault::{TakenUserfault, UserfaultOrigin, take_userfault};
