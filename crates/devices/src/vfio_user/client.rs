//! A client's end of a connection: one command at a time, each with a deadline.

use std::fmt;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, recv, sendmsg, socket_with,
};

use super::connection::{Command, Connection};

/// The version of the protocol, major and minor, of libvfio-user and QEMU.
const VERSION: (u16, u16) = (0, 1);
/// Maximum bytes of data in one message: the specification's default.
const MAX_DATA: usize = 1 << 20;
/// Maximum bytes that are read of a server's capabilities.
const MAX_TEXT: usize = 64 << 10;

/// Bytes of a message's header: identifier, command, size of the message, flags, error.
const HEADER: usize = 16;
const COMMAND: u32 = 0x0;
const REPLY: u32 = 0x1;
const TYPE: u32 = 0xf;
const NO_REPLY: u32 = 0x10;
const ERROR: u32 = 0x20;

/// A connection to a server, for a monitor without one: it negotiates the version, and carries one command after the
/// other.
///
/// For servers that map the guest's memory. Their own commands (`VFIO_USER_DMA_READ`, `VFIO_USER_DMA_WRITE`), for
/// memory that is not mapped, are answered with `ENOTSUP` while a command of the client's is in progress. File
/// descriptors that come with a reply are closed.
///
/// If a server does not answer in time, or violates the protocol, the connection is shut down, because a late answer
/// would be mistaken for the reply to another command. The guest's device is lost with the connection, so the time
/// limit should cover the slowest operation.
pub struct Client {
    end: Mutex<End>,
    max_data: usize,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("max_data", &self.max_data).finish_non_exhaustive()
    }
}

struct End {
    stream: UnixStream,
    /// Time limit of each command.
    patience: Duration,
    next_id: u16,
    /// Why the connection cannot be used any more.
    lost: Option<String>,
}

/// The failure of a command.
enum Failure {
    /// The server reports an error.
    Refused(i32),
    /// The connection failed, or the protocol was violated.
    Lost(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

impl From<Errno> for Failure {
    fn from(error: Errno) -> Self {
        Self::Lost(error.into())
    }
}

fn violation(what: String) -> Failure {
    Failure::Lost(io::Error::new(io::ErrorKind::InvalidData, what))
}

impl Client {
    /// Connects to a server's socket. `patience` is the time limit of each command from its turn on.
    ///
    /// # Errors
    /// No server listens there, or it accepts no client now (`WouldBlock`), because a server has one client. Also those
    /// of [`new`](Self::new).
    pub fn connect(socket: &Path, patience: Duration) -> io::Result<Self> {
        let address = SocketAddrUnix::new(socket)?;
        // With a full listen queue, a blocking connect would wait for ever.
        let stream =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        match connect(&stream, &address) {
            Ok(()) => Self::new(stream.into(), patience),
            Err(Errno::AGAIN) => {
                let error = format!(
                    "the vfio-user server at {} accepts no client now: does it have one already?",
                    socket.display()
                );
                Err(io::Error::new(io::ErrorKind::WouldBlock, error))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Makes a client on a stream on which nothing has been sent yet.
    ///
    /// # Errors
    /// The server refuses, does not answer in time or violates the protocol, or has another major version.
    pub fn new(stream: UnixStream, patience: Duration) -> io::Result<Self> {
        let client = Self {
            end: Mutex::new(End { stream, patience, next_id: 0, lost: None }),
            // Until the server has sent its limit.
            max_data: MAX_DATA,
        };
        let max_data = client.negotiate()?;
        Ok(Self { max_data, ..client })
    }

    /// Negotiates the version. Returns the bytes of data that a message may carry.
    fn negotiate(&self) -> io::Result<usize> {
        let capabilities = format!("{{\"capabilities\":{{\"max_data_xfer_size\":{MAX_DATA}}}}}\0");
        let [major, minor] = [VERSION.0, VERSION.1].map(u16::to_ne_bytes);
        let version = [major, minor].concat();
        let (mut theirs, mut their_capabilities) = ([0; 4], vec![0; MAX_TEXT]);
        let request = [&version[..], capabilities.as_bytes()];
        let length = self.call_with(Command::VERSION, request, &[], [&mut theirs, &mut their_capabilities])?;
        let problem = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let [major, minor] = [&theirs[..2], &theirs[2..]].map(|bytes| u16::from_ne_bytes([bytes[0], bytes[1]]));
        if length < 4 || major != VERSION.0 || minor > VERSION.1 {
            let (ours, ours_minor) = VERSION;
            return Err(problem(format!(
                "the vfio-user server answers version {ours}.{ours_minor} with {major}.{minor} in {length} bytes"
            )));
        }
        let text = match their_capabilities[..length - 4].split_last() {
            None => return Ok(MAX_DATA),
            Some((0, text)) => text,
            Some(_) => return Err(problem("the vfio-user server's capabilities do not end in 0".into())),
        };
        let text: serde_json::Value = serde_json::from_slice(text)
            .map_err(|error| problem(format!("the vfio-user server's capabilities cannot be read: {error}")))?;
        match &text["capabilities"]["max_data_xfer_size"] {
            serde_json::Value::Null => Ok(MAX_DATA),
            size => match size.as_u64() {
                Some(size @ 1..) => Ok(usize::try_from(size).unwrap_or(MAX_DATA).min(MAX_DATA)),
                _ => Err(problem(format!("the vfio-user server takes {size} bytes of data in a message"))),
            },
        }
    }

    /// Calls the server as [`Connection::call`] does, and sends file descriptors with the command. A command that is
    /// too large for the socket's buffer, some 200 KiB, must not meet a server that is sending as much itself: then
    /// neither side reads until the time limit.
    ///
    /// # Errors
    /// Those of [`Connection::call`].
    pub fn call_with(
        &self,
        command: Command,
        request: [&[u8]; 2],
        descriptors: &[BorrowedFd<'_>],
        reply: [&mut [u8]; 2],
    ) -> io::Result<usize> {
        let mut end = self.end();
        if let Some(why) = &end.lost {
            let error = format!("the connection to the vfio-user server was shut down: {why}");
            return Err(io::Error::new(io::ErrorKind::NotConnected, error));
        }
        match end.exchange(command, request, descriptors, reply) {
            Ok(length) => Ok(length),
            Err(Failure::Refused(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Err(Failure::Lost(error)) => {
                end.lost = Some(error.to_string());
                // The connection may be lost already.
                let _ = end.stream.shutdown(std::net::Shutdown::Both);
                // Without an errno, which would be mistaken for the server's.
                let lost = format!("the vfio-user server is lost, with its device, by command {}: {error}", command.0);
                Err(io::Error::new(error.kind(), lost))
            }
        }
    }

    fn end(&self) -> MutexGuard<'_, End> {
        self.end.lock().unwrap_or_else(|poisoned| {
            let mut end = PoisonError::into_inner(poisoned);
            end.lost.get_or_insert_with(|| "a thread panicked amid a command".into());
            end
        })
    }
}

impl Connection for Client {
    fn max_data(&self) -> usize {
        self.max_data
    }

    fn call(&self, command: Command, request: [&[u8]; 2], reply: [&mut [u8]; 2]) -> io::Result<usize> {
        self.call_with(command, request, &[], reply)
    }
}

/// A message's header.
#[derive(Clone, Copy)]
struct Header {
    id: u16,
    command: u16,
    /// Size of the whole message, in bytes.
    size: u32,
    flags: u32,
    error: u32,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..2].copy_from_slice(&self.id.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.command.to_ne_bytes());
        for (place, number) in bytes[4..].chunks_exact_mut(4).zip([self.size, self.flags, self.error]) {
            place.copy_from_slice(&number.to_ne_bytes());
        }
        bytes
    }

    fn of(bytes: [u8; HEADER]) -> Self {
        let half = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let number = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self { id: half(0), command: half(2), size: number(4), flags: number(8), error: number(12) }
    }
}

impl End {
    fn exchange(
        &mut self,
        command: Command,
        request: [&[u8]; 2],
        descriptors: &[BorrowedFd<'_>],
        reply: [&mut [u8]; 2],
    ) -> Result<usize, Failure> {
        // A time beyond the clock's range is never reached.
        let deadline = Instant::now().checked_add(self.patience);
        self.next_id = self.next_id.wrapping_add(1);
        let id = self.next_id;
        let size = HEADER + request[0].len() + request[1].len();
        let size = u32::try_from(size).map_err(|_| Failure::Refused(libc::E2BIG))?;
        let header = Header { id, command: command.0, size, flags: 0, error: 0 };
        self.send([&header.to_bytes(), request[0], request[1]], descriptors, deadline)?;
        loop {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                // Also while the server keeps sending its own commands.
                return Err(self.too_late());
            }
            let mut bytes = [0; HEADER];
            self.receive(&mut bytes, deadline)?;
            let header = Header::of(bytes);
            let payload = (header.size as usize)
                .checked_sub(HEADER)
                .ok_or_else(|| violation(format!("a message of {} bytes is less than its header", header.size)))?;
            match header.flags & TYPE {
                REPLY => {}
                COMMAND => {
                    self.refuse(&header, payload, deadline)?;
                    continue;
                }
                other => return Err(violation(format!("a message is of the unknown type {other}"))),
            }
            if (header.id, header.command) != (id, command.0) {
                return Err(violation(format!(
                    "command {} number {id} is answered as command {} number {}",
                    command.0, header.command, header.id
                )));
            }
            if header.flags & ERROR != 0 {
                // There should be none; libvfio-user sends back the reply that it had prepared.
                self.skip(&header, payload, deadline)?;
                // The number is optional.
                let known = (1..4096).contains(&header.error);
                return Err(Failure::Refused(if known { header.error as i32 } else { libc::EIO }));
            }
            let [first, second] = reply;
            let room = first.len() + second.len();
            if payload > room {
                return Err(violation(format!(
                    "the reply to command {} has {payload} bytes where {room} were asked for",
                    command.0
                )));
            }
            let of_first = payload.min(first.len());
            self.receive(&mut first[..of_first], deadline)?;
            self.receive(&mut second[..payload - of_first], deadline)?;
            return Ok(payload);
        }
    }

    /// Answers a command of the server with `ENOTSUP`.
    fn refuse(&mut self, header: &Header, payload: usize, deadline: Option<Instant>) -> Result<(), Failure> {
        self.skip(header, payload, deadline)?;
        if header.flags & NO_REPLY != 0 {
            return Ok(());
        }
        let answer = Header { size: HEADER as u32, flags: REPLY | ERROR, error: libc::ENOTSUP as u32, ..*header };
        self.send([&answer.to_bytes(), &[], &[]], &[], deadline)
    }

    /// Reads and discards a payload.
    fn skip(&self, header: &Header, payload: usize, deadline: Option<Instant>) -> Result<(), Failure> {
        if payload > MAX_DATA + MAX_TEXT {
            let error = format!("command {} with flags {:#x} has {payload} bytes", header.command, header.flags);
            return Err(violation(error));
        }
        let mut left = payload;
        let mut unread = [0; 4096];
        while left > 0 {
            let piece = left.min(unread.len());
            self.receive(&mut unread[..piece], deadline)?;
            left -= piece;
        }
        Ok(())
    }

    fn send(
        &self,
        parts: [&[u8]; 3],
        descriptors: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<(), Failure> {
        let mut parts = parts.map(IoSlice::new);
        let mut left = &mut parts[..];
        let mut with = descriptors;
        // The length of the empty parts is 0 as well.
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !with.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(with)) {
                return Err(Failure::Refused(libc::E2BIG));
            }
            match sendmsg(&self.stream, left, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => {
                    // The descriptors were sent with the first bytes.
                    with = &[];
                    IoSlice::advance_slices(&mut left, sent);
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn receive(&self, bytes: &mut [u8], deadline: Option<Instant>) -> Result<(), Failure> {
        let mut left = bytes;
        while !left.is_empty() {
            // Unexpected descriptors: without room for them the kernel closes them.
            match recv(&self.stream, &mut *left, RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    let error = "it has closed the connection, in the middle of a command";
                    return Err(Failure::Lost(io::Error::new(io::ErrorKind::UnexpectedEof, error)));
                }
                Ok((read, _)) => left = &mut left[read..],
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn too_late(&self) -> Failure {
        let error = format!("it did not answer within {} s", self.patience.as_secs_f64());
        Failure::Lost(io::Error::new(io::ErrorKind::TimedOut, error))
    }

    fn wait(&self, ready: PollFlags, deadline: Option<Instant>) -> Result<(), Failure> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // A time beyond the kernel's range is no deadline either.
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::from_borrowed_fd(self.stream.as_fd(), ready)], timeout.as_ref()) {
            Ok(0) => Err(self.too_late()),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
