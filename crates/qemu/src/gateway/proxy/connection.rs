//! A connection that is carried unchanged, in both directions, as if its two ends were connected directly.
//!
//! The directions are independent: each has a channel and an alarm of its own, so that one can end or break while the other still
//! delivers its bytes. The program at one end sees what the program at the other end does:
//!
//! | at one end | at the other end |
//! |---|---|
//! | shuts its writing half down | end of file on reading |
//! | shuts its reading half down, or closes the connection | writing fails (EPIPE) |
//! | (the network between the proxies, or the other proxy, fails) | both |

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use sterna_engine::abort::Abort;
use sterna_engine::item::Item;
use sterna_engine::pacer::Pacer;
use sterna_engine::receive::{ChannelSink, OpaqueSink, PacketRules, ReceiveCounters, SinkError, receive_packets};
use sterna_engine::send::{Compression, SendChannel, SendContext};
use sterna_engine::session::Opened;
use sterna_engine::window::Window;

use crate::gateway::GatewayError;
use sterna_wire::reason::Reason;

/// Bytes that one read takes from a connection.
const BUFFER: usize = 64 << 10;

/// The opaque channel from the source's end to the destination's.
pub(super) const TO_DESTINATION: u16 = 0;
/// The opaque channel from the destination's end to the source's.
pub(super) const TO_SOURCE: u16 = 1;

/// The local end of a carried connection.
#[derive(Debug)]
pub(super) struct LocalEnd {
    stream: UnixStream,
    packet_size: usize,
    outward: Arc<Abort>,
    inward: Arc<Abort>,
    /// The peer's end has sent its end of file.
    inward_ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl LocalEnd {
    /// Takes over `stream`, of which nothing has been read or written.
    pub(super) fn new(stream: UnixStream, packet_size: usize) -> io::Result<Self> {
        let (outward, inward) = (Arc::new(Abort::default()), Arc::new(Abort::default()));
        let (reading, writing) = (stream.try_clone()?, stream.try_clone()?);
        // Bytes read here no longer arrive, so the local program's writes must fail.
        outward.on_end(move || shut_down(&reading, Shutdown::Read));
        inward.on_end(move || shut_down(&writing, Shutdown::Write));
        Ok(Self { stream, packet_size, outward, inward, inward_ended: Arc::default(), threads: Vec::new() })
    }

    /// Carries the local program's bytes to the peer, on `channel`. Calls `ended` at the end.
    pub(super) fn carry_out(&mut self, channel: Opened, ended: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let Opened { writer, reader, closer, .. } = channel;
        writer.tolerate_closed_window()?;
        self.outward.on_end(move || closer.close());
        let channel = SendChannel::start("opaque", writer, reader, self.context())?;
        let local = self.stream.try_clone()?;
        let (inward, inward_ended) = (Arc::clone(&self.inward), Arc::clone(&self.inward_ended));
        let thread = std::thread::Builder::new().name("opaque-out".into()).spawn(move || {
            read_all(&local, &channel);
            wait_until_closed(&local);
            // A program that has closed its end reads nothing, so writes at the other end must fail.
            if !inward_ended.load(Ordering::Acquire) {
                inward.raise(Reason::other("the local end was closed"));
            }
            channel.join();
            ended();
        })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Carries the bytes of the peer's program from `channel` to the local program. Calls `ended` at the end.
    pub(super) fn carry_in(&mut self, channel: Opened, ended: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let Opened { mut writer, mut reader, closer, .. } = channel;
        self.inward.on_end(move || closer.close());
        let inward = Inward { local: self.stream.try_clone()?, ended: Arc::clone(&self.inward_ended) };
        let mut sink = ChannelSink::new().with_opaque(inward);
        let rules = PacketRules { packet_size: self.packet_size, checksums: true };
        let (inward, inward_ended) = (Arc::clone(&self.inward), Arc::clone(&self.inward_ended));
        let thread = std::thread::Builder::new().name("opaque-in".into()).spawn(move || {
            let counters = ReceiveCounters::default();
            let received = receive_packets(&mut reader, Some(&mut writer), &mut sink, rules, &counters);
            // Closes the channel, which shows the peer that this end reads no more.
            drop((reader, writer));
            if let Err(error) = received {
                tracing::debug!(%error, "one direction of a carried connection has ended early");
                inward.raise(Reason::other(error));
            } else if !inward_ended.load(Ordering::Acquire) {
                inward.raise(Reason::other("the channel has ended before the connection that it carries"));
            }
            ended();
        })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Ends both directions.
    pub(super) fn close(&self) {
        self.outward.raise(Reason::other("closed"));
        self.inward.raise(Reason::other("closed"));
    }

    /// Waits for both directions, which have ended or were closed.
    pub(super) fn join(self) {
        for thread in self.threads {
            // A panic in the thread has been printed.
            let _ = thread.join();
        }
    }

    fn context(&self) -> SendContext {
        SendContext::new(
            Arc::new(Window::new(self.packet_size as u64, Duration::ZERO, Duration::ZERO)),
            Arc::new(Pacer::new(None)),
            Arc::clone(&self.outward),
            Compression::none(),
            PacketRules { packet_size: self.packet_size, checksums: true },
        )
    }
}

/// How long the directions may take to end once the peer has ended the session. By then everything is delivered and only closing is left,
/// or the peer has failed and nothing more arrives.
const ENDING_TIME: Duration = Duration::from_secs(2);

/// Tracks the end of a carried connection.
#[derive(Debug, Default)]
pub(super) struct Ending {
    directions: u8,
    lost: Option<(Instant, String)>,
}

impl Ending {
    /// Records that one direction has ended.
    pub(super) fn direction_ended(&mut self) {
        self.directions += 1;
    }

    /// Records that the session's control channel has ended.
    pub(super) fn session_ended(&mut self, reason: String) {
        self.lost.get_or_insert((Instant::now(), reason));
    }

    /// Returns whether both directions have ended.
    pub(super) fn is_over(&self) -> bool {
        self.directions == 2
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// The session ended some time ago, and the directions did not.
    pub(super) fn next<E>(&self, events: &Receiver<E>) -> Result<E, GatewayError> {
        match &self.lost {
            None => Ok(events.recv().expect("the caller holds a sender")),
            Some((since, reason)) => events
                .recv_timeout(ENDING_TIME.saturating_sub(since.elapsed()))
                .map_err(|_| GatewayError::new(format!("the other proxy was lost: {reason}"))),
        }
    }
}

/// Sends all bytes of `local` and its end of file. Returns early if the channel fails.
fn read_all(mut local: &UnixStream, channel: &SendChannel) {
    let mut buffer = vec![0; BUFFER];
    loop {
        // A connection that was reset counts as ended.
        let length = local.read(&mut buffer).unwrap_or(0);
        if channel.send(Item::Opaque(buffer[..length].to_vec())).is_err() || length == 0 {
            return;
        }
    }
}

/// Waits until both directions of `local` have ended: the local program has closed it, or has shut one direction down and this process the
/// other (poll(2) then always returns POLLHUP for a unix socket).
fn wait_until_closed(local: &UnixStream) {
    let mut descriptors = [PollFd::new(local, PollFlags::empty())];
    while poll(&mut descriptors, None).is_err_and(|error| error == rustix::io::Errno::INTR) {}
}

fn shut_down(stream: &UnixStream, how: Shutdown) {
    // The local program may have closed it already.
    let _ = stream.shutdown(how);
}

/// Writes to the local program.
struct Inward {
    local: UnixStream,
    ended: Arc<AtomicBool>,
}

impl OpaqueSink for Inward {
    fn opaque(&mut self, content: &[u8]) -> Result<(), SinkError> {
        if content.is_empty() {
            self.ended.store(true, Ordering::Release);
            shut_down(&self.local, Shutdown::Write);
            return Ok(());
        }
        Ok(self.local.write_all(content)?)
    }
}
