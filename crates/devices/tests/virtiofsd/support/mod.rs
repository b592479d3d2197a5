//! What stands around the device in these tests: the daemon, the machine with its memory and queues, the guest's file system.

mod daemon;
mod fuse;
mod handles;
mod machine;

use std::time::{Duration, Instant};

pub(crate) use daemon::{Daemon, program};
pub(crate) use fuse::{Fuse, ROOT};
pub(crate) use handles::may_open_by_handle;
pub(crate) use machine::{Device, Machine};

/// Far enough away to be none, and near enough that a hang ends the test.
pub(crate) fn ample() -> Instant {
    Instant::now() + Duration::from_secs(60)
}
