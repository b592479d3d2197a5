//! Who is at the other end of a unix socket (unix(7), SO_PEERCRED).
//!
//! Asked of libc directly: the kernel says process 0 for a peer in a pid namespace that we cannot see, which the process id
//! types of safe wrappers cannot hold.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Process id of the peer; `None` where it cannot be seen from here.
pub(crate) fn process_id(stream: &UnixStream) -> Option<i32> {
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
