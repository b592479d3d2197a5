//! The environment of the device in these tests: the daemon, the machine with its memory and queues, the guest's file
//! system.

mod daemon;
mod fuse;
mod handles;
mod machine;

use std::time::{Duration, Instant};

pub(crate) use daemon::{Daemon, program};
pub(crate) use fuse::{Fuse, ROOT};
pub(crate) use handles::may_open_by_handle;
pub(crate) use machine::{Device, Machine};

/// Returns a deadline that no correct test reaches, but that ends a hanging one.
pub(crate) fn ample() -> Instant {
    Instant::now() + Duration::from_secs(300)
}
