//! The TCP socket below a connection: its options, and waiting on it with a time limit.

use std::io::{self, IoSlice, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use socket2::{SockRef, TcpKeepalive};

/// How much not yet sent data the kernel takes from a writer before the writer waits, in bytes.
///
/// What lies here can no longer be replaced by a newer page nor be paced, so it should be little; but it must outlast
/// the time until the writer thread runs again, or the link falls idle.
const NOT_SENT_LOW_WATER: u32 = 512 << 10;

/// Sets what every connection needs: no delay of small packets, and a dead peer is noticed.
///
/// Buffer sizes are left to the kernel's autotuning, which a fixed size would switch off.
pub(super) fn configure(tcp: &TcpStream, silence: Duration) -> io::Result<()> {
    let socket = SockRef::from(tcp);
    socket.set_read_timeout(Some(silence))?;
    socket.set_tcp_nodelay(true)?;
    let keepalive =
        TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5)).with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    // Counts data that is not acknowledged, and data that is not sent because the peer's window is closed (tcp(7)). So it
    // ends the channel of a peer that is gone, and also of one that lives but has read nothing for so long, such as a
    // receiver whose QEMU is stopped: one that is slow reads something and is left alone. Twice the limit, since a lost
    // peer is noticed earlier by the silence on its control channel, which says more.
    socket.set_tcp_user_timeout(Some(silence * 2))?;
    socket.set_tcp_notsent_lowat(NOT_SENT_LOW_WATER)
}

/// Waits until `tcp` has something to read (or has ended); without a deadline, for as long as it takes.
pub(super) fn wait_readable(tcp: &TcpStream, deadline: Option<Instant>) -> io::Result<()> {
    loop {
        let timeout = match deadline {
            None => None,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
            }
        };
        let mut waited = [PollFd::new(tcp, PollFlags::IN)];
        match poll(&mut waited, timeout.as_ref()) {
            Ok(0) => {}
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Reads what there is, waiting at most until `deadline`.
pub(super) fn read_until(mut tcp: &TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
    wait_readable(tcp, Some(deadline))?;
    loop {
        match tcp.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Writes all of `parts` (which are used up on the way). Never raises SIGPIPE, whatever program this library is in.
pub(super) fn send_all(tcp: &TcpStream, mut parts: &mut [IoSlice<'_>], flags: SendFlags) -> io::Result<()> {
    IoSlice::advance_slices(&mut parts, 0); // skips empty ones
    while !parts.is_empty() {
        match sendmsg(tcp, parts, &mut SendAncillaryBuffer::default(), flags | SendFlags::NOSIGNAL) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
