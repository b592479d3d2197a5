//! The socket below a connection: a TCP or Unix socket of the kernel, or one end of a connection of a simulated
//! network. Its options, and reading with a time limit.
//!
//! A kernel's socket is used by plain system calls on its descriptor, without a lock or a copy in between.

use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use socket2::{SockRef, TcpKeepalive};
use sterna_memory::raw::{KernelPart, RawPiece};

use super::peer_process;
use super::simulated::End;
use super::tcp_info::SendTimes;

/// Maximum bytes of unsent data that the kernel accepts from a writer before the writer waits.
///
/// These bytes can be neither replaced by a newer page nor paced, so they should be few. But they must last until the
/// writer thread has encoded its next packets, or the link falls idle: at 10 Gbit/s they last 1.6 ms for each channel.
/// The window bounds the bytes of all channels together.
const NOT_SENT_LOW_WATER: u32 = 2 << 20;
/// Maximum bytes that are read and dropped before a connection is closed.
const TAKEN_UNREAD: usize = 4096;

/// A reader that waits for fewer bytes is woken for any.
const WORTH_WAITING_FOR: usize = 32 << 10;
/// Maximum bytes that a reader waits for at once: about as many as stay in a CPU's cache.
const WOKEN_FOR: usize = 512 << 10;

/// Maximum bytes of one read from a simulated network.
const SIMULATED_READ: usize = 64 << 10;

/// A connected socket, of the same kinds as [`Address`](super::Address).
#[derive(Debug)]
pub struct Socket {
    kind: Kind,
    /// Minimum number of bytes for which the kernel wakes a reader; 0 if unknown.
    low_water: AtomicUsize,
}

#[derive(Debug)]
enum Kind {
    Tcp(TcpStream),
    Unix(UnixStream),
    Simulated(Arc<End>),
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        Kind::Tcp(stream).into()
    }
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        Kind::Unix(stream).into()
    }
}

impl From<End> for Socket {
    fn from(end: End) -> Self {
        Kind::Simulated(Arc::new(end)).into()
    }
}

impl From<Kind> for Socket {
    fn from(kind: Kind) -> Self {
        Self { kind, low_water: AtomicUsize::new(0) }
    }
}

/// The host that a connection comes from, as far as hosts can be distinguished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Host {
    /// An IPv4 host, or an IPv6 network of 64 bits: a host with one address of the network may use all of them.
    Remote(IpAddr),
    /// This host.
    Local,
}

impl From<IpAddr> for Host {
    fn from(address: IpAddr) -> Self {
        Self::Remote(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
            v4 => v4,
        })
    }
}

/// How long one read may wait.
#[derive(Clone, Copy)]
pub(super) enum Wait {
    /// For the time of [`Socket::set_read_timeout`].
    Timeout,
    /// Without a limit.
    Forever,
    /// Until this moment.
    Until(Instant),
}

/// Whether sending may wait for room.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sending {
    Waits,
    /// Fails with `WouldBlock` instead of waiting, perhaps after sending a part.
    DoesNotWait,
}

/// The implementation of a socket.
enum Backend<'a> {
    Kernel(BorrowedFd<'a>),
    Simulated(&'a End),
}

impl Socket {
    fn backend(&self) -> Backend<'_> {
        match &self.kind {
            Kind::Tcp(stream) => Backend::Kernel(stream.as_fd()),
            Kind::Unix(stream) => Backend::Kernel(stream.as_fd()),
            Kind::Simulated(end) => Backend::Simulated(end),
        }
    }

    /// Returns a second handle of the socket, which stays connected until both have been dropped.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        let kind = match &self.kind {
            Kind::Tcp(stream) => Kind::Tcp(stream.try_clone()?),
            Kind::Unix(stream) => Kind::Unix(stream.try_clone()?),
            Kind::Simulated(end) => Kind::Simulated(Arc::clone(end)),
        };
        Ok(kind.into())
    }

    /// Sets the options of every connection: a silent peer is noticed, and TCP does not delay small packets.
    ///
    /// Buffer sizes are left to the kernel's autotuning, which a fixed size would switch off.
    pub(super) fn configure(&self, silence: Duration) -> io::Result<()> {
        // Twice the limit, because the silence on the control channel reveals a lost peer earlier, with a better error.
        let unheard = silence * 2;
        match &self.kind {
            Kind::Tcp(stream) => configure_tcp(stream, silence, unheard),
            Kind::Unix(stream) => {
                stream.set_read_timeout(Some(silence))?;
                stream.set_write_timeout(Some(unheard))
            }
            Kind::Simulated(end) => {
                end.set_timeouts(Some(silence), Some(unheard));
                Ok(())
            }
        }
    }

    /// Sets how long a read waits with [`Wait::Timeout`]; `None`: without a limit.
    pub(super) fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match &self.kind {
            Kind::Tcp(stream) => stream.set_read_timeout(timeout),
            Kind::Unix(stream) => stream.set_read_timeout(timeout),
            Kind::Simulated(_) if timeout == Some(Duration::ZERO) => Err(io::ErrorKind::InvalidInput.into()),
            Kind::Simulated(end) => {
                end.set_read_timeout(timeout);
                Ok(())
            }
        }
    }

    /// Returns how many bytes have arrived and wait to be read; 0 if unknown.
    pub(super) fn arrived(&self) -> u64 {
        match self.backend() {
            Backend::Kernel(fd) => rustix::io::ioctl_fionread(fd).unwrap_or(0),
            Backend::Simulated(end) => end.arrived(),
        }
    }

    /// Keeps the connection open however long the peer reads nothing: its program may read whenever it likes.
    pub(super) fn tolerate_closed_window(&self) -> io::Result<()> {
        match &self.kind {
            Kind::Tcp(stream) => SockRef::from(stream).set_tcp_user_timeout(None),
            Kind::Unix(_) | Kind::Simulated(_) => Ok(()),
        }
    }

    /// Returns the kernel's figures of the time that sending took; `None` for sockets without a network.
    pub(super) fn send_times(&self) -> Option<SendTimes> {
        match &self.kind {
            Kind::Tcp(stream) => SendTimes::of(stream),
            Kind::Unix(_) | Kind::Simulated(_) => None,
        }
    }

    /// Makes the kernel wake the reader of a TCP socket when `bytes` bytes have arrived, instead of for each segment.
    /// The kernel's other reasons to wake a reader (a receive window that closes, the end of the connection) stay in
    /// force (`tcp_data_ready` in the kernel's `net/ipv4/tcp_input.c`).
    fn wake_at(&self, bytes: usize) {
        let Kind::Tcp(stream) = &self.kind else { return };
        if self.low_water.swap(bytes, Ordering::Relaxed) == bytes {
            return;
        }
        let value = bytes as libc::c_int;
        // SAFETY: the option takes one int, which is there for the call.
        let set = unsafe {
            let value = (&raw const value).cast();
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                value,
                size_of::<libc::c_int>() as _,
            )
        };
        // The kernel refuses no value for a TCP socket, and a broken socket fails when it is read.
        debug_assert_eq!(set, 0, "{}", io::Error::last_os_error());
    }

    /// Reads the bytes that have arrived. Fails with `TimedOut` or `WouldBlock` after waiting for too long. `coming`:
    /// at least so many bytes are certain to follow. With [`Wait::Timeout`] the reader sleeps until many of them have
    /// arrived; otherwise it would be woken for nearly every segment, which costs both sides CPU time, most on virtual
    /// CPUs.
    pub(super) fn read(&self, mut into: RawPiece<'_>, wait: Wait, coming: usize) -> io::Result<usize> {
        let fd = match self.backend() {
            Backend::Kernel(fd) => fd,
            Backend::Simulated(end) => {
                // A network in memory is for tests; its speed does not matter.
                let mut bytes = vec![0; into.len().min(SIMULATED_READ)];
                let count = match wait {
                    Wait::Timeout => end.read_with_timeout(&mut bytes),
                    Wait::Forever => end.read(&mut bytes, None),
                    Wait::Until(deadline) => end.read(&mut bytes, Some(deadline)),
                }?;
                into.write(&bytes[..count]);
                return Ok(count);
            }
        };
        match (wait, &self.kind) {
            (Wait::Timeout, Kind::Tcp(stream)) if coming >= WORTH_WAITING_FOR => {
                // A blocking read would wait for so many bytes beyond those that it has read already.
                let mut take = || match receive(fd, into.reborrow(), libc::MSG_DONTWAIT) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                    read => Some(read),
                };
                if let Some(read) = take() {
                    return read;
                }
                self.wake_at(coming.min(WOKEN_FOR));
                let deadline = stream.read_timeout()?.map(|timeout| Instant::now() + timeout);
                while wait_readable(fd, deadline).is_ok() {
                    if let Some(read) = take() {
                        return read;
                    }
                }
                // Fewer bytes may have arrived: then the peer is slow, not silent.
                return take().unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()));
            }
            (Wait::Timeout, _) => self.wake_at(1),
            (Wait::Forever, _) => {
                self.wake_at(1);
                wait_readable(fd, None)?;
            }
            (Wait::Until(deadline), _) => {
                self.wake_at(1);
                wait_readable(fd, Some(deadline))?;
            }
        }
        receive(fd, into, 0)
    }

    /// Writes all of `parts` (and consumes them). Never raises SIGPIPE, whichever program embeds this library.
    pub(super) fn send_all(&self, mut parts: &mut [IoSlice<'_>], sending: Sending) -> io::Result<()> {
        let fd = match self.backend() {
            Backend::Kernel(fd) => fd,
            Backend::Simulated(end) => return end.write_all(parts, sending == Sending::Waits),
        };
        let flags = match sending {
            Sending::Waits => SendFlags::NOSIGNAL,
            Sending::DoesNotWait => SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        };
        IoSlice::advance_slices(&mut parts, 0); // skips empty ones
        while !parts.is_empty() {
            match sendmsg(fd, parts, &mut SendAncillaryBuffer::default(), flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
                Err(rustix::io::Errno::INTR) => {}
                // The write timeout of a Unix socket has passed; TCP uses `TCP_USER_TIMEOUT` instead.
                Err(rustix::io::Errno::AGAIN) if sending == Sending::Waits => {
                    return Err(took_nothing());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends as many of `bytes` as there is room for, without waiting, and returns how many; 0 without room.
    pub(super) fn send_some(&self, bytes: &[u8]) -> io::Result<usize> {
        let fd = match self.backend() {
            Backend::Kernel(fd) => fd,
            Backend::Simulated(end) => return end.write_some(bytes),
        };
        loop {
            // The system call that all other sending uses, so that a sandbox need permit no other (docs/embedding.md).
            let (bytes, flags) = ([IoSlice::new(bytes)], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            match sendmsg(fd, &bytes, &mut SendAncillaryBuffer::default(), flags) {
                Ok(sent) => return Ok(sent),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(0),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until [`Socket::send_some`] sends or fails.
    ///
    /// # Errors
    /// `TimedOut` at `deadline`.
    pub(super) fn wait_writable(&self, deadline: Instant) -> io::Result<()> {
        match self.backend() {
            Backend::Kernel(fd) => wait_for(fd, PollFlags::OUT, Some(deadline)),
            Backend::Simulated(end) => end.wait_writable(deadline),
        }
    }

    /// Sends memory that this process does not read to a kernel socket, otherwise as [`Socket::send_all`] does.
    ///
    /// # Errors
    /// Those of [`Socket::send_all`], and `Unsupported` if this is not a kernel socket.
    pub(super) fn pass_on(&self, mut parts: &mut [KernelPart<'_>]) -> io::Result<()> {
        let Backend::Kernel(fd) = self.backend() else { return Err(io::ErrorKind::Unsupported.into()) };
        KernelPart::advance(&mut parts, 0);
        while !parts.is_empty() {
            // SAFETY: all zeros are a valid, empty header.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = KernelPart::as_iovecs(parts);
            // The type differs between C libraries.
            message.msg_iovlen = parts.len() as _;
            // SAFETY: the header names only these parts, whose memory stays readable while they are borrowed.
            let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
            match usize::try_from(sent) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => KernelPart::advance(&mut parts, sent),
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error if error.kind() == io::ErrorKind::WouldBlock => return Err(took_nothing()),
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Returns whether this is a kernel socket.
    pub(super) fn is_of_the_kernel(&self) -> bool {
        matches!(self.backend(), Backend::Kernel(_))
    }

    /// Ends one direction, or both.
    pub(super) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match &self.kind {
            Kind::Tcp(stream) => stream.shutdown(how),
            Kind::Unix(stream) => stream.shutdown(how),
            Kind::Simulated(end) => {
                end.shutdown(how);
                Ok(())
            }
        }
    }

    /// Reads and drops the bytes that have arrived, up to 4 KiB, without waiting: closing with unread bytes resets the
    /// connection.
    pub(super) fn take_unread(&self) {
        match self.backend() {
            // No bytes, or no peer: both are fine.
            Backend::Kernel(fd) => drop(recv(fd, &mut [0; TAKEN_UNREAD], RecvFlags::DONTWAIT)),
            Backend::Simulated(end) => end.forget_unread(),
        }
    }

    /// Returns a description of the peer for messages; `unknown` if the peer is gone.
    pub(super) fn peer(&self) -> String {
        let known = match &self.kind {
            Kind::Tcp(stream) => stream.peer_addr().ok().map(|address| address.to_string()),
            Kind::Unix(stream) => unix_peer(stream),
            Kind::Simulated(end) => Some(end.name()),
        };
        known.unwrap_or_else(|| "unknown".to_owned())
    }

    /// Returns the host that the connection comes from.
    pub(super) fn host(&self) -> Host {
        match &self.kind {
            Kind::Tcp(stream) => stream.peer_addr().map_or(Host::Local, |address| address.ip().into()),
            Kind::Unix(_) | Kind::Simulated(_) => Host::Local,
        }
    }
}

/// Returns the error of a send that has waited until its time limit.
fn took_nothing() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the peer has taken nothing for too long")
}

/// Describes the process at the other end, with the path of the end that has one.
fn unix_peer(stream: &UnixStream) -> Option<String> {
    let mut paths = [stream.peer_addr(), stream.local_addr()].into_iter().flatten();
    let path = paths.find_map(|address| Some(format!("unix:{}", address.as_pathname()?.display())))?;
    Some(match peer_process(stream) {
        Some(process) => format!("{path} (process {process})"),
        None => path,
    })
}

fn configure_tcp(stream: &TcpStream, silence: Duration, unheard: Duration) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_read_timeout(Some(silence))?;
    socket.set_tcp_nodelay(true)?;
    let keepalive =
        TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5)).with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    // The timeout covers data that is not acknowledged, and data that is not sent because the peer's window is closed
    // (tcp(7)). So it ends the channel of a peer that is gone, and also of a peer that has read nothing for so long,
    // such as a receiver whose QEMU is stopped. A peer that reads slowly is not safe from it: its kernel opens the window
    // again only when enough room has collected, so a small receive buffer may look closed to this side for all of the
    // time although the peer reads steadily.
    socket.set_tcp_user_timeout(Some(unheard))?;
    socket.set_tcp_notsent_lowat(NOT_SENT_LOW_WATER)
}

/// Calls recv(2) until a call is not interrupted.
fn receive(fd: BorrowedFd<'_>, mut into: RawPiece<'_>, flags: libc::c_int) -> io::Result<usize> {
    loop {
        // SAFETY: the kernel writes at most the length of the piece, which may be written while it is borrowed.
        let read = unsafe { libc::recv(fd.as_raw_fd(), into.as_ptr().cast(), into.len(), flags) };
        match usize::try_from(read) {
            Ok(count) => return Ok(count),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}

/// Waits until there are bytes to read, or the end; without a deadline, with no limit.
fn wait_readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<()> {
    wait_for(fd, PollFlags::IN, deadline)
}

/// Waits until the socket is ready for `what`, or broken.
fn wait_for(fd: BorrowedFd<'_>, what: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
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
        let mut waited = [PollFd::from_borrowed_fd(fd, what)];
        match poll(&mut waited, timeout.as_ref()) {
            Ok(0) => {}
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
