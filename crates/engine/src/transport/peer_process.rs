//! Which process is at the other end of a unix socket (unix(7), SO_PEERCRED).
//!
//! This calls libc directly: for a peer in a pid namespace that this process cannot see, the kernel returns process 0,
//! which the process id types of safe wrappers cannot represent.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Returns the process that has connected `stream`, or that listens at its other end. Returns `None` if the process is
/// in a pid namespace that this process cannot see.
pub fn peer_process(stream: &UnixStream) -> Option<i32> {
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
    (result == 0 && peer.pid > 0).then_some(peer.pid)
}
