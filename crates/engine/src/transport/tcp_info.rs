//! The kernel's figures of a TCP connection's sending: how long there was something to send, for how much of that time
//! the peer's window was closed, and how long the queued bytes will take.

use std::mem::{MaybeUninit, size_of};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Times since the connection was made, and the present queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendTimes {
    /// Time during which there were bytes to send, or sent bytes that had not reached the peer's kernel.
    pub busy: Duration,
    /// The part of `busy` during which nothing could be sent because the peer's program did not read.
    pub window_closed: Duration,
    /// Time until the bytes that are queued or in transit now have reached the peer's kernel, at the kernel's recent
    /// delivery rate, without the path's latency; `None` before the rate is known.
    pub left: Option<Duration>,
}

impl SendTimes {
    /// Returns the figures; `None` if the kernel does not report them.
    pub(super) fn of(stream: &TcpStream) -> Option<Self> {
        let info = tcp_info(stream)?;
        let under_way = f64::from(info.tcpi_unacked) * f64::from(info.tcpi_snd_mss);
        // While a connection has nothing to send the kernel keeps the last rate, so the rate is the network's, not the
        // writer's.
        let left = (f64::from(info.tcpi_notsent_bytes) + under_way) / info.tcpi_delivery_rate as f64;
        let path = Duration::from_micros(info.tcpi_min_rtt.into());
        Some(Self {
            busy: Duration::from_micros(info.tcpi_busy_time),
            window_closed: Duration::from_micros(info.tcpi_rwnd_limited),
            left: Duration::try_from_secs_f64(left).ok().map(|left| left.saturating_sub(path)),
        })
    }
}

/// `TCP_INFO` of Linux 4.10 or newer (`tcpi_busy_time`, `tcpi_rwnd_limited`; linux/tcp.h).
fn tcp_info(stream: &TcpStream) -> Option<libc::tcp_info> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `info`, which is as large, and `stream` is open.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    let end = std::mem::offset_of!(libc::tcp_info, tcpi_rwnd_limited) + size_of::<u64>();
    // SAFETY: all fields are integers, zero where the kernel has written nothing.
    (result == 0 && length as usize >= end).then(|| unsafe { info.assume_init() })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_peer_that_does_not_read_closes_the_window_and_one_that_reads_opens_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut reader, _) = listener.accept().unwrap();
        assert_eq!(SendTimes::of(&writer), Some(SendTimes::default()));

        // Until the kernel accepts no more bytes, and has reported the peer as the reason for a while.
        writer.set_nonblocking(true).unwrap();
        let mut written = 0;
        let closed = loop {
            match writer.write(&[7; 1 << 16]) {
                Ok(length) => written += length,
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            let times = SendTimes::of(&writer).unwrap();
            assert!(times.window_closed <= times.busy, "{times:?}");
            if times.window_closed > Duration::from_millis(20) {
                break times.window_closed;
            }
            std::thread::yield_now();
        };
        // Bytes in the reader's kernel are not queued.
        assert_ne!(SendTimes::of(&writer).unwrap().left, Some(Duration::ZERO));
        let mut left = vec![0; written];
        reader.read_exact(&mut left).unwrap();
        assert!(SendTimes::of(&writer).unwrap().window_closed >= closed);
    }
}
