//! Locks that other programs hold on a file. rustix has no F_OFD_GETLK, and its F_GETLK takes the owner of an open file description's lock
//! for a process. All `unsafe` of this crate is here.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Returns whether a lock on this byte keeps others from locking it.
pub(super) fn is_locked(file: impl AsFd, byte: u64) -> io::Result<bool> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: libc::off_t::try_from(byte).map_err(io::Error::other)?,
        l_len: 1,
        // As fcntl(2) demands of F_OFD_GETLK.
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and F_OFD_GETLK reads and writes one flock, which lives in this function.
    if unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}
