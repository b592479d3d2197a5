//! The two halves of an established connection, used by two threads at the same time, and the TLS between them.
//!
//! rustls keeps both directions in one object ([`Session`]), so both halves share it under a lock. The lock is held
//! only while bytes are encrypted or decrypted in memory, never during a socket call: a writer that waits for the
//! network does not keep the reader from its acknowledgements. Only the writer writes to the socket, so records are
//! sent in the order in which they were encrypted; messages from the reader's side of TLS (an answer to a key update)
//! are sent with the next write.

use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use sterna_memory::raw::{KernelPart, RawPiece};

use super::encrypted::{Arrived, Leaving};
use super::session::{Session, failed};
use super::socket::{Sending, Socket, Wait};
use super::tcp_info::SendTimes;

/// Maximum number of parts for one system call; more are sent in several.
const PARTS_AT_ONCE: usize = 16;

/// The part of a connection that both halves share.
#[derive(Debug)]
pub(super) struct Link {
    socket: Socket,
    tls: Option<Mutex<Session>>,
    /// Whether a [`Closer`] ended the connection, so that the end is not attributed to the peer.
    closed: AtomicBool,
}

/// Makes the two halves of a connection whose TLS handshake, if any, is finished. `read` and `written`: bytes on the
/// wire so far.
pub(super) fn halves(
    socket: Socket,
    tls: Option<Session>,
    arrived: Arrived,
    silence: Duration,
    (read, written): (u64, u64),
) -> (Writer, Reader) {
    let leaving = if tls.is_some() { Leaving::for_tls() } else { Leaving::default() };
    let link = Arc::new(Link { socket, tls: tls.map(Mutex::new), closed: AtomicBool::new(false) });
    let writer = Writer { link: Arc::clone(&link), leaving, written, failed: false };
    let reader = Reader { link, arrived, read, silence };
    (writer, reader)
}

impl Link {
    /// Ignores poisoning: a panic of the other half inside rustls leaves at worst a broken stream, which TLS notices.
    fn lock(tls: &Mutex<Session>) -> MutexGuard<'_, Session> {
        tls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn explain(&self, error: io::Error) -> io::Error {
        if self.closed.load(Ordering::Acquire) { closed_here() } else { error }
    }
}

fn closed_here() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the connection was closed on this side")
}

/// The sending half. Dropping it sends TLS's `close_notify`, if that is possible without waiting, and ends the
/// direction.
#[derive(Debug)]
pub struct Writer {
    link: Arc<Link>,
    leaving: Leaving,
    written: u64,
    failed: bool,
}

impl Writer {
    /// Writes all of `parts`, one after the other, as if they were one piece.
    ///
    /// # Errors
    /// Those of the socket; `ConnectionAborted` after [`Closer::close`]. After an error this half is unusable.
    pub fn write_all_vectored(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        for group in parts.chunks(PARTS_AT_ONCE) {
            let mut slices = [IoSlice::new(&[]); PARTS_AT_ONCE];
            for (slice, part) in slices.iter_mut().zip(group) {
                *slice = IoSlice::new(part);
            }
            let slices = &mut slices[..group.len()];
            let link = Arc::clone(&self.link);
            let result = match &link.tls {
                None => {
                    self.written += group.iter().map(|part| part.len() as u64).sum::<u64>();
                    link.socket.send_all(slices, Sending::Waits)
                }
                Some(tls) => self.encrypt_and_send(tls, slices),
            };
            result.map_err(|error| {
                self.failed = true;
                link.explain(error)
            })?;
        }
        Ok(())
    }

    /// Keeps the connection open however long the peer reads nothing, as programs expect whose connection is carried.
    /// The caller must notice a lost peer by other means.
    ///
    /// # Errors
    /// The socket is closed.
    pub fn tolerate_closed_window(&self) -> io::Result<()> {
        self.link.socket.tolerate_closed_window()
    }

    /// Returns the kernel's figures of the time that sending took; `None` if the socket is not a TCP socket.
    pub fn send_times(&self) -> Option<SendTimes> {
        self.link.socket.send_times()
    }

    /// Returns whether bytes go to the kernel unchanged, so that no code of this process reads them.
    pub fn passes_on(&self) -> bool {
        self.link.tls.is_none() && self.link.socket.is_of_the_kernel()
    }

    /// Writes `parts` as [`Writer::write_all_vectored`] does, without reading them in this process.
    ///
    /// # Errors
    /// Those of [`Writer::write_all_vectored`].
    ///
    /// # Panics
    /// Panics if the bytes are encrypted or kept ([`Writer::passes_on`]).
    pub fn pass_on(&mut self, parts: &mut [KernelPart<'_>]) -> io::Result<()> {
        assert!(self.passes_on(), "parts that are encrypted or kept must be read");
        self.written += parts.iter().map(|part| part.len() as u64).sum::<u64>();
        self.link.socket.pass_on(parts).map_err(|error| {
            self.failed = true;
            self.link.explain(error)
        })
    }

    fn encrypt_and_send(&mut self, tls: &Mutex<Session>, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut parts, 0);
        while !parts.is_empty() {
            let taken = Link::lock(tls).encrypt(parts, &mut self.leaving).map_err(failed);
            // The peer receives the alert of a failure of the other half, too.
            let taken = taken.inspect_err(|_| self.send_goodbye(tls))?;
            IoSlice::advance_slices(&mut parts, taken);
            self.written += self.leaving.bytes().len() as u64;
            self.link.socket.send_all(&mut [IoSlice::new(self.leaving.bytes())], Sending::Waits)?;
        }
        Ok(())
    }

    /// Appends `bytes` to `out` as they are to be sent: encrypted, where the connection has TLS.
    pub(super) fn prepare(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let before = out.len();
        let link = Arc::clone(&self.link);
        match &link.tls {
            None => out.extend_from_slice(bytes),
            Some(tls) => {
                let mut parts = &mut [IoSlice::new(bytes)][..];
                IoSlice::advance_slices(&mut parts, 0);
                while !parts.is_empty() {
                    let taken = Link::lock(tls).encrypt(parts, &mut self.leaving).map_err(failed);
                    let taken = taken.inspect_err(|_| self.failed = true)?;
                    IoSlice::advance_slices(&mut parts, taken);
                    out.extend_from_slice(self.leaving.bytes());
                }
            }
        }
        self.written += (out.len() - before) as u64;
        Ok(())
    }

    /// Sends as many of the prepared `bytes` as there is room for, without waiting, and returns how many; 0 without room.
    pub(super) fn send_prepared(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.link.socket.send_some(bytes).map_err(|error| {
            self.failed = true;
            self.link.explain(error)
        })
    }

    /// Returns a handle to wait for room to send.
    pub(super) fn room(&self) -> Room {
        Room(Arc::clone(&self.link))
    }

    /// Has nothing be sent at the end: it would be taken for a part of what was not sent completely.
    pub(super) fn abandon(&mut self) {
        self.failed = true;
    }

    fn send_goodbye(&mut self, tls: &Mutex<Session>) {
        Link::lock(tls).goodbye(&mut self.leaving);
        let goodbye = &mut [IoSlice::new(self.leaving.bytes())];
        // A failure needs no report: the peer notices a missing close_notify by itself.
        let _ = self.link.socket.send_all(goodbye, Sending::DoesNotWait);
    }

    /// Returns the bytes sent since the connection was made, including TLS's overhead, without TCP's.
    pub fn bytes_written(&self) -> u64 {
        self.written
    }
}

impl Write for Writer {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.write_all_vectored(&[buffer])?;
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let link = Arc::clone(&self.link);
        if let (Some(tls), false) = (&link.tls, self.failed) {
            self.send_goodbye(tls);
        }
        let _ = self.link.socket.shutdown(Shutdown::Write);
    }
}

/// Waits for room to send on a connection, while another thread has the [`Writer`].
#[derive(Debug)]
pub struct Room(Arc<Link>);

impl Room {
    /// Waits until there is room to send, or the connection is broken or closed; until `deadline` at most.
    pub fn wait(&self, deadline: Instant) {
        // An error shows when bytes are sent, and the caller looks at the time.
        let _ = self.0.socket.wait_writable(deadline);
    }
}

/// How much a read wants.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wants {
    /// Any bytes that have arrived.
    Some,
    /// All of the buffer, in several reads: the peer is certain to send so many bytes.
    All,
}

/// The receiving half.
#[derive(Debug)]
pub struct Reader {
    link: Arc<Link>,
    arrived: Arrived,
    read: u64,
    silence: Duration,
}

impl Reader {
    /// Sets how long a read (`io::Read`) waits without a byte before it fails with `TimedOut`; `None`: without a limit.
    ///
    /// A new connection uses the silence limit of its [`Limits`](super::Limits).
    ///
    /// # Errors
    /// The timeout is zero, or the socket is closed.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.link.socket.set_read_timeout(timeout)
    }

    /// Fills `buffer` with the start of the next packet. Returns `false` if the peer has ended the connection cleanly
    /// instead.
    ///
    /// Between packets the peer may be silent for as long as it likes. From the first byte on, the rest of `buffer`
    /// must arrive within the silence limit; the limit of later reads is that of [`Reader::set_timeout`].
    ///
    /// # Errors
    /// `TimedOut`; `UnexpectedEof` if the connection ends within `buffer` or, with TLS, without a `close_notify`;
    /// `ConnectionAborted` after [`Closer::close`]; those of the socket.
    pub fn read_packet_start(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        let have = self.read_waiting(buffer.into(), Wait::Forever, Wants::Some)?;
        if have == 0 {
            return Ok(buffer.is_empty());
        }
        if have < buffer.len() {
            self.read_exact_until(&mut buffer[have..], Instant::now() + self.silence)?;
        }
        Ok(true)
    }

    /// Fills `buffer` before `deadline`.
    pub(super) fn read_exact_until(&mut self, mut buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.read_waiting((&mut *buffer).into(), Wait::Until(deadline), Wants::All)? {
                0 => return Err(ended_early()),
                count => buffer = &mut buffer[count..],
            }
        }
        Ok(())
    }

    /// Returns about how many bytes can be read without waiting: with TLS, its overhead and an incomplete record are
    /// counted, too.
    pub fn arrived(&self) -> u64 {
        self.arrived.waiting() + self.link.socket.arrived()
    }

    /// Returns the bytes received since the connection was made, including TLS's overhead, without TCP's.
    pub fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Fills `piece`, as [`Read::read_exact`] fills a buffer.
    ///
    /// # Errors
    /// Those of [`Read::read_exact`].
    pub fn read_piece(&mut self, mut piece: RawPiece<'_>) -> io::Result<()> {
        while !piece.is_empty() {
            match self.read_waiting(piece.reborrow(), Wait::Timeout, Wants::All)? {
                0 => return Err(ended_early()),
                count => piece.advance(count),
            }
        }
        Ok(())
    }

    fn read_waiting(&mut self, mut buffer: RawPiece<'_>, wait: Wait, wants: Wants) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let wanted = if wants == Wants::All { buffer.len() } else { 1 };
        let link = Arc::clone(&self.link);
        let Some(tls) = &link.tls else {
            return self.receive(Some(buffer), wait, wanted);
        };
        loop {
            // Small pieces come from one record; all but the first need no lock.
            let left = self.arrived.take_plain(buffer.reborrow());
            if left > 0 {
                return Ok(left);
            }
            {
                let mut tls = Link::lock(tls);
                let count = tls.decrypt(&mut self.arrived, buffer.reborrow()).map_err(failed)?;
                if count > 0 || tls.has_ended() {
                    return Ok(count);
                }
            }
            // The bytes that have arrived are part of one record, and contain less plaintext than their length.
            let coming = wanted.saturating_sub(self.arrived.waiting() as usize);
            if self.receive(None, wait, coming)? == 0 {
                let text = "the connection ended without TLS's goodbye: the peer is gone, or data was cut off";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            }
        }
    }

    /// Reads once from the socket, which will deliver at least `coming` bytes, into `buffer` or, with TLS, behind the
    /// remaining encrypted bytes.
    fn receive(&mut self, buffer: Option<RawPiece<'_>>, wait: Wait, coming: usize) -> io::Result<usize> {
        let encrypted = buffer.is_none();
        let into = buffer.unwrap_or_else(|| self.arrived.room().into());
        let count = match self.link.socket.read(into, wait, coming) {
            Ok(0) if self.link.closed.load(Ordering::Acquire) => return Err(closed_here()),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(self.link.explain(io::Error::new(io::ErrorKind::TimedOut, "nothing arrived for too long")));
            }
            Err(error) => return Err(self.link.explain(error)),
        };
        self.read += count as u64;
        if encrypted {
            self.arrived.came(count);
        }
        Ok(count)
    }
}

fn ended_early() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended before all of it had arrived")
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_waiting(buffer.into(), Wait::Timeout, Wants::Some)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        self.read_piece(buffer.into())
    }
}

/// Ends a connection from another thread. A closer does not keep the connection alive.
#[derive(Clone, Debug)]
pub struct Closer {
    link: Weak<Link>,
}

impl Closer {
    pub(super) fn of(writer: &Writer) -> Self {
        Self { link: Arc::downgrade(&writer.link) }
    }

    /// Shuts both directions down: reads and writes that wait, and all later ones, fail with `ConnectionAborted`. The
    /// peer sees the end without a `close_notify`.
    pub fn close(&self) {
        if let Some(link) = self.link.upgrade() {
            link.closed.store(true, Ordering::Release);
            // Fails only if the connection is already down.
            let _ = link.socket.shutdown(Shutdown::Both);
        }
    }
}
