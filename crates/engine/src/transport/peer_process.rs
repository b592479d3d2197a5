//! Which process and user are at the other end of a unix socket (unix(7), SO_PEERCRED).
//!
//! This calls libc directly: for a peer in a pid namespace that this process cannot see, the kernel returns process 0,
//! which the process id types of safe wrappers cannot represent.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Returns the process that has connected `stream`, or that listens at its other end. Returns `None` if the process is
/// in a pid namespace that this process cannot see.
pub fn peer_process(stream: &UnixStream) -> Option<i32> {
    credentials(stream).ok().map(|peer| peer.pid).filter(|pid| *pid > 0)
}

/// Returns the user number of the process that has connected `stream`, or that listens at its other end, at the time when it did so.
///
/// # Errors
/// Those of getsockopt(2).
pub fn peer_user(stream: &UnixStream) -> io::Result<u32> {
    credentials(stream).map(|peer| peer.uid)
}

fn credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, the size of `peer`; both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}
