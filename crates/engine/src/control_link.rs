//! The control channel at work: it receives and sends messages, sends heartbeats, and notices silence.
//!
//! The loss of the control channel is not a failure by itself: what it means depends on the phase of the switchover, which the driver
//! knows. So the link only reports the loss.
//!
//! A driver may be busy for seconds (QMP, the disk) while the peer sends on. Messages that have been read but not handled are bounded:
//! beyond 1 MiB the link stops reading, and TCP makes the peer wait.
//!
//! The peer may do the same, or be hostile. A driver never waits for that: messages that the network does not accept are queued, and the
//! link's second thread sends them.

#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::Builder;
use std::time::{Duration, Instant};

use sterna_wire::control::{ControlMessage, ControlReader};
use sterna_wire::limits::{HEARTBEAT_INTERVAL, MAX_CONTROL_MESSAGE, SILENCE_LIMIT};
use sterna_wire::reason::Reason;

use crate::cpu_time;
use crate::transport::{Closer, QueuedWriter, Reader, Writer};

/// Maximum bytes on the wire that the links of a driver read ahead of it: the largest message, or many small ones.
const MAX_AHEAD: usize = MAX_CONTROL_MESSAGE;
/// Maximum bytes on the wire that are queued for a peer that does not read, beyond the largest message.
const MAX_QUEUED: usize = MAX_CONTROL_MESSAGE;
/// Why a link is closed whose queue is full.
const QUEUE_FULL: &str = "the peer does not read: 1 MiB of control messages is queued for it";
/// Why a link is closed whose queue did not become empty in time.
const QUEUED_TOO_LONG: &str = "the peer does not read: control messages have been queued for it for 10 s";
/// How long a peer that does not read may take to receive the last messages of a migration that has ended.
pub const FAREWELL_TIME: Duration = Duration::from_secs(2);
/// Maximum number of links of one allowance at a time.
const MAX_LINKS: usize = 8;
/// Minimum bytes that a message counts: a short one takes more in memory than on the wire.
const MIN_COUNTED: usize = 1 << 10;

/// What the link reports to its driver.
#[derive(Debug)]
pub enum ControlEvent {
    /// The peer sent a message (heartbeats are not reported). When the driver has handled the message it drops the share of the
    /// link's memory, which lets the link read on.
    Message(ControlMessage, Share),
    /// The connection is lost, with the reason. No event follows.
    Lost(String),
}

/// One end of a control channel. Dropping it closes the connection at once; [`ControlLink::finish`] ends it in good order.
#[derive(Debug)]
pub struct ControlLink {
    outgoing: Arc<Outgoing>,
    /// Whether the link is ended in good order.
    finished: bool,
    #[expect(dead_code, reason = "dropping it releases the place")]
    place: Place,
}

/// What the links of one driver may read ahead, all together. Clones are the same allowance.
#[derive(Clone, Debug, Default)]
pub struct Allowance(Arc<Unhandled>);

/// Counts what has been read and not handled yet.
#[derive(Debug, Default)]
struct Unhandled {
    counts: Mutex<Counts>,
    changed: Condvar,
}

/// The reason of a lost control channel that the peer closed itself.
pub(crate) const CLOSED_BY_PEER: &str = "the peer closed the control channel";

#[derive(Debug, Default)]
struct Counts {
    bytes: usize,
    links: usize,
}

/// One message's share of what a link may read ahead. Dropping it releases the share.
#[derive(Debug)]
pub struct Share {
    unhandled: Arc<Unhandled>,
    bytes: usize,
}

/// A link's place among those of its allowance, released when dropped.
#[derive(Debug)]
struct Place(Arc<Unhandled>);

/// Closes a link.
#[derive(Debug)]
struct Closing {
    closer: Closer,
    unhandled: Arc<Unhandled>,
    /// Whether this side has closed the link.
    closed: AtomicBool,
}

impl Unhandled {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().expect("counting does not panic")
    }

    /// Waits until there is room for a message, and counts it. Fails when this side has closed the link meanwhile.
    ///
    /// Where nothing is unhandled there always is room, so the driver only has to go on handling.
    fn take(self: &Arc<Self>, bytes: usize, closed: &AtomicBool) -> io::Result<Share> {
        let full = |counts: &mut Counts| {
            !closed.load(Ordering::Acquire) && counts.bytes > 0 && counts.bytes + bytes > MAX_AHEAD
        };
        let mut counts = self.changed.wait_while(self.counts(), full).expect("counting does not panic");
        if closed.load(Ordering::Acquire) {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the connection was closed on this side"));
        }
        counts.bytes += bytes;
        Ok(Share { unhandled: Arc::clone(self), bytes })
    }

    fn place(self: &Arc<Self>) -> io::Result<Place> {
        let mut counts = self.counts();
        if counts.links == MAX_LINKS {
            return Err(io::Error::other("too many control channels have connected that were not dealt with yet"));
        }
        counts.links += 1;
        Ok(Place(Arc::clone(self)))
    }
}

impl Closing {
    fn close(&self) {
        self.closer.close();
        self.closed.store(true, Ordering::Release);
        // With the lock, so that no thread is between reading `closed` and waiting.
        drop(self.unhandled.counts());
        self.unhandled.changed.notify_all();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.counts().links -= 1;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.unhandled.counts().bytes -= self.bytes;
        self.unhandled.changed.notify_all();
    }
}

/// The sending side of a link, which the link, its senders and its two threads share.
///
/// A message is written by the thread that sends it, as far as there is room, so that messages leave in order and without a change of
/// threads. For the rest the link's own thread waits: no sender does, because a driver has time limits to keep while its peer may read
/// slowly, or not at all.
#[derive(Debug)]
struct Outgoing {
    state: Mutex<OutgoingState>,
    /// Signals that the state has changed.
    changed: Condvar,
    closing: Closing,
    /// How long messages may be queued without the queue becoming empty.
    limit: Duration,
}

#[derive(Debug)]
struct OutgoingState {
    /// None once nothing more can be sent, or will be.
    writer: Option<QueuedWriter>,
    /// Since when there are queued messages, if there are any.
    behind: Option<Instant>,
    phase: LinkPhase,
    /// Why this side has closed the link, where the peer is to blame.
    failure: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LinkPhase {
    Running,
    /// This side has ended in good order and waits for the peer to end.
    Finishing,
    /// The connection has ended.
    Over,
}

impl OutgoingState {
    /// Sends `bytes`, or else as many of the queued bytes as there is room for.
    fn write(&mut self, bytes: Option<&[u8]>) -> io::Result<()> {
        let Some(writer) = &mut self.writer else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let written = match bytes {
            Some(bytes) => writer.send(bytes),
            None => writer.send_queued(),
        };
        if written.is_ok() && writer.queued() > 0 {
            self.behind.get_or_insert_with(Instant::now);
        } else {
            self.behind = None;
        }
        if written.is_err() || (self.behind.is_none() && self.phase == LinkPhase::Finishing) {
            // Ends the direction. After an error, the reading side reports the loss.
            self.writer = None;
        }
        written
    }
}

impl Outgoing {
    fn state(&self) -> MutexGuard<'_, OutgoingState> {
        self.state.lock().expect("sending does not panic")
    }

    fn set(&self, phase: LinkPhase) {
        let mut state = self.state();
        state.phase = phase.max(state.phase);
        drop(state);
        self.changed.notify_all();
    }

    fn send(&self, message: &ControlMessage) -> io::Result<()> {
        let bytes = message.encode();
        let mut state = self.state();
        let queued = state.writer.as_ref().map_or(0, QueuedWriter::queued);
        if queued > 0 && queued + bytes.len() > MAX_QUEUED {
            return Err(self.give_up(state, QUEUE_FULL));
        }
        let sent = state.write(Some(&bytes));
        let thread_concerned = state.behind.is_some() || state.writer.is_none();
        drop(state);
        if thread_concerned {
            self.changed.notify_all();
        }
        sent
    }

    /// Closes the link, because the peer does not read. The reading side reports the loss, with the reason.
    fn give_up(&self, mut state: MutexGuard<'_, OutgoingState>, failure: &'static str) -> io::Error {
        (state.writer, state.behind) = (None, None);
        state.failure.get_or_insert(failure);
        drop(state);
        self.closing.close();
        self.changed.notify_all();
        io::Error::new(io::ErrorKind::TimedOut, failure)
    }

    /// Waits until no message is queued, for `time` at most.
    fn flush(&self, time: Duration) {
        let behind = |state: &mut OutgoingState| state.behind.is_some() && state.phase != LinkPhase::Over;
        drop(self.changed.wait_timeout_while(self.state(), time, behind).expect("sending does not panic"));
    }

    /// Sends heartbeats and what is queued, until the link has ended.
    fn run(&self) {
        let mut beat = Instant::now() + HEARTBEAT_INTERVAL;
        let mut state = self.state();
        while let Some(writer) = &state.writer {
            if let Some(behind) = state.behind {
                let (deadline, room) = (behind + self.limit, writer.room());
                if deadline <= Instant::now() {
                    self.give_up(state, QUEUED_TOO_LONG);
                    return;
                }
                drop(state);
                room.wait(deadline);
                state = self.state();
                // The thread of a sender may have been faster. An error ends the loop.
                let _ = state.write(None);
                self.changed.notify_all();
                continue;
            }
            match state.phase {
                LinkPhase::Running if beat <= Instant::now() => {
                    beat = Instant::now() + HEARTBEAT_INTERVAL;
                    let _ = state.write(Some(&ControlMessage::Heartbeat.encode()));
                }
                LinkPhase::Running => {
                    let idle = |state: &mut OutgoingState| state.behind.is_none() && state.phase == LinkPhase::Running;
                    let left = beat.saturating_duration_since(Instant::now());
                    state = self.changed.wait_timeout_while(state, left, idle).expect("sending does not panic").0;
                }
                // All was sent.
                LinkPhase::Finishing => state.writer = None,
                LinkPhase::Over => return,
            }
        }
        let finishing = |state: &mut OutgoingState| state.phase == LinkPhase::Finishing;
        let waited = self.changed.wait_timeout_while(state, SILENCE_LIMIT, finishing).expect("sending does not panic");
        let unended = waited.1.timed_out();
        drop(waited);
        if unended {
            self.closing.close();
        }
    }
}

impl ControlLink {
    /// Starts the threads of an accepted control channel. Calls `events` on the link's own thread.
    pub fn start(
        writer: Writer,
        reader: Reader,
        closer: Closer,
        messages: ControlReader,
        events: impl FnMut(ControlEvent) + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_within(&Allowance::default(), writer, reader, closer, messages, events)
    }

    /// As [`ControlLink::start`], for one of several links of the same driver, such as those of a peer that reconnects again
    /// and again.
    ///
    /// # Errors
    /// There are 8 links of the allowance already, or a thread cannot be started.
    pub fn start_within(
        allowance: &Allowance,
        writer: Writer,
        reader: Reader,
        closer: Closer,
        messages: ControlReader,
        events: impl FnMut(ControlEvent) + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_limited(allowance, SILENCE_LIMIT, (writer, reader, closer), messages, events)
    }

    /// `limit`: how long messages may be queued.
    fn start_limited(
        allowance: &Allowance,
        limit: Duration,
        (writer, mut reader, closer): (Writer, Reader, Closer),
        mut messages: ControlReader,
        mut events: impl FnMut(ControlEvent) + Send + 'static,
    ) -> io::Result<Self> {
        let place = allowance.0.place()?;
        reader.set_timeout(Some(SILENCE_LIMIT))?;
        let state =
            OutgoingState { writer: Some(writer.into()), behind: None, phase: LinkPhase::Running, failure: None };
        let closing = Closing { closer, unhandled: Arc::clone(&allowance.0), closed: AtomicBool::new(false) };
        let outgoing = Arc::new(Outgoing { state: Mutex::new(state), changed: Condvar::new(), closing, limit });

        let of_reader = Arc::clone(&outgoing);
        cpu_time::spawn(Builder::new().name("control".into()), move || {
            let closing = &of_reader.closing;
            let take = |bytes| closing.unhandled.take(bytes, &closing.closed);
            let mut reason = match read_messages(&mut reader, &mut messages, take, &mut events) {
                Ok(()) => CLOSED_BY_PEER.into(),
                Err(error) => error.to_string(),
            };
            of_reader.set(LinkPhase::Over);
            if let Some(failure) = of_reader.state().failure {
                reason = failure.into();
            }
            events(ControlEvent::Lost(reason));
        })?;
        let of_sender = Arc::clone(&outgoing);
        let sender = cpu_time::spawn(Builder::new().name("heartbeat".into()), move || of_sender.run());
        // The other thread reads, and would keep the connection of a link that nobody has.
        sender.inspect_err(|_| outgoing.closing.close())?;
        Ok(Self { outgoing, finished: false, place })
    }

    /// Returns a sender for another thread, which works as long as this link lives.
    pub fn sender(&self) -> ControlSender {
        ControlSender(Arc::clone(&self.outgoing))
    }

    /// Sends a message to the peer, behind all that were sent before. Never waits: where the peer does not read, up to 1 MiB of messages is
    /// queued for up to 10 s; then the link is closed.
    ///
    /// # Errors
    /// The connection is lost, which the link reports to its driver.
    pub fn send(&self, message: &ControlMessage) -> io::Result<()> {
        self.outgoing.send(message)
    }

    /// Returns whether messages are queued: the peer reads too slowly. What can be left out should be.
    pub fn is_behind(&self) -> bool {
        self.outgoing.state().behind.is_some()
    }

    /// Waits until no message is queued any more, for `time` at most.
    pub fn flush(&self, time: Duration) {
        self.outgoing.flush(time);
    }

    /// Closes the connection; the reading thread reports the loss. What is queued is lost.
    pub fn close(&self) {
        self.outgoing.closing.close();
    }

    /// Ends this side's direction after all that was sent, with TLS's closing alert, so that the peer sees an end and no loss. The peer has
    /// 10 s to end its own direction; then the connection is closed.
    ///
    /// Waits for a peer that does not read, for [`FAREWELL_TIME`] at most: the process may end next, and with it the threads that send what
    /// is queued.
    pub fn finish(mut self) {
        self.finished = true;
        let mut state = self.outgoing.state();
        state.phase = state.phase.max(LinkPhase::Finishing);
        if state.behind.is_none() {
            state.writer = None;
        }
        drop(state);
        self.outgoing.changed.notify_all();
        self.flush(FAREWELL_TIME);
    }
}

/// Sends messages on a control channel that a driver owns.
#[derive(Clone, Debug)]
pub struct ControlSender(Arc<Outgoing>);

impl ControlSender {
    /// Sends a message to the peer, as [`ControlLink::send`] does.
    ///
    /// # Errors
    /// The connection is lost, which the link reports to its driver.
    pub fn send(&self, message: &ControlMessage) -> io::Result<()> {
        self.0.send(message)
    }
}

impl Drop for ControlLink {
    fn drop(&mut self) {
        if !self.finished {
            self.close();
            // Both threads end by themselves now. They are not waited for, since their owner's events may be held back.
            self.outgoing.set(LinkPhase::Over);
        }
    }
}

/// Holds back the events of a link until it is dropped.
#[derive(Debug)]
pub struct Gate(#[expect(dead_code, reason = "dropping it releases the events")] Sender<()>);

/// Holds back the events of a link until the gate is dropped, so that the link's owner learns of the link before the link's first event.
pub fn held_back(
    mut events: impl FnMut(ControlEvent) + Send + 'static,
) -> (impl FnMut(ControlEvent) + Send + 'static, Gate) {
    let (gate, opened) = channel();
    let wait_and_tell = move |event| {
        // Returns an error once the gate has been dropped.
        let _ = opened.recv();
        events(event);
    };
    (wait_and_tell, Gate(gate))
}

/// Sends a message on a connection that has no link yet.
pub fn send_message(writer: &mut Writer, message: &ControlMessage) -> io::Result<()> {
    writer.write_all(&message.encode())
}

/// Returns the reason of a failure by a message that `sender` may not send now. It is named, and its content is not quoted: that may be as
/// long as a message and is the peer's.
pub fn out_of_phase(sender: &str, message: &ControlMessage) -> Reason {
    Reason::other(format_args!("{sender} sent `{}`, which may not be sent now", message.kind()))
}

/// Reads the next message from a connection that has no link yet. Fails at `deadline`, however slowly bytes trickle in.
pub fn receive_message(
    reader: &mut Reader,
    messages: &mut ControlReader,
    deadline: Instant,
) -> io::Result<ControlMessage> {
    next_message(reader, messages, Some(Deadline { at: deadline, after_heartbeat: None }))
}

/// As [`receive_message`], from a peer that may work on the message for long and sends heartbeats meanwhile: waits for `silence` after each
/// heartbeat, and for `longest` in all.
///
/// # Errors
/// As [`receive_message`].
pub fn receive_answer(
    reader: &mut Reader,
    messages: &mut ControlReader,
    silence: Duration,
    longest: Duration,
) -> io::Result<ControlMessage> {
    let now = Instant::now();
    next_message(
        reader,
        messages,
        Some(Deadline { at: now + silence, after_heartbeat: Some((silence, now + longest)) }),
    )
}

/// Does `work` before a message is answered, and sends heartbeats meanwhile to the peer, which waits for the answer.
pub fn with_heartbeats<R>(writer: &mut Writer, work: impl FnOnce() -> R) -> R {
    std::thread::scope(|scope| {
        let (working, at_work) = channel::<()>();
        let heartbeats = move || {
            while at_work.recv_timeout(HEARTBEAT_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                // Fails where the peer is gone, which shows when it gets its answer.
                let _ = send_message(writer, &ControlMessage::Heartbeat);
            }
        };
        if let Err(error) = Builder::new().name("heartbeat".into()).spawn_scoped(scope, heartbeats) {
            tracing::warn!(%error, "no thread for heartbeats: the peer may close the connection while this host prepares");
        }
        let done = work();
        drop(working);
        done
    })
}

/// By when a message must arrive.
struct Deadline {
    at: Instant,
    /// How much later, from a heartbeat on, and the latest of all.
    after_heartbeat: Option<(Duration, Instant)>,
}

impl Deadline {
    fn heartbeat(&mut self) {
        if let Some((silence, latest)) = self.after_heartbeat {
            self.at = (Instant::now() + silence).min(latest);
        }
    }
}

/// Reads the next message that is not a heartbeat.
fn next_message(
    reader: &mut Reader,
    messages: &mut ControlReader,
    mut deadline: Option<Deadline>,
) -> io::Result<ControlMessage> {
    let mut bytes = [0; 4096];
    loop {
        match messages.next_message().map_err(invalid)? {
            Some(ControlMessage::Heartbeat) => {
                deadline.iter_mut().for_each(Deadline::heartbeat);
                continue;
            }
            Some(message) => return Ok(message),
            None => {}
        }
        if let Some(deadline) = &deadline {
            let left = deadline.at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the message that was due did not arrive in time"));
            }
            reader.set_timeout(Some(left))?;
        }
        match reader.read(&mut bytes)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => messages.push(&bytes[..length]),
        }
    }
}

fn read_messages(
    reader: &mut Reader,
    messages: &mut ControlReader,
    take: impl Fn(usize) -> io::Result<Share>,
    events: &mut impl FnMut(ControlEvent),
) -> io::Result<()> {
    let mut counted = reader.bytes_read();
    loop {
        match next_message(reader, messages, None) {
            Ok(message) => {
                // Bytes that arrived behind the message are counted with it, and not again.
                let arrived = usize::try_from(reader.bytes_read() - counted).unwrap_or(MAX_AHEAD);
                counted = reader.bytes_read();
                let share = take(arrived.clamp(MIN_COUNTED, MAX_AHEAD))?;
                events(ControlEvent::Message(message, share));
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                let silence = format!("the peer sent nothing for {} s", SILENCE_LIMIT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, silence));
            }
            Err(error) => return Err(error),
        }
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
