//! Which process is at the other end of a unix socket (unix(7), SO_PEERCRED).
//!
//! Asked of libc directly: the kernel says process 0 for a peer in a pid namespace that we cannot see, which the process id
//! types of safe wrappers cannot hold.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Returns the process that has connected `stream`, or listens at its other end; none where that process is in a process namespace that this
/// process does not see.
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
