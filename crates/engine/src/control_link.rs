//! The control channel at work: it receives and sends messages, sends heartbeats, and notices silence.
//!
//! The loss of the control channel is not a failure by itself: what it means depends on the phase of the switchover, which the driver
//! knows. So the link only reports the loss.
//!
//! A driver may be busy for seconds (QMP, the disk) while the peer sends on. Messages that have been read but not handled are bounded:
//! beyond 1 MiB the link stops reading, and TCP makes the peer wait.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::Builder;
use std::time::{Duration, Instant};

use sterna_wire::control::{ControlMessage, ControlReader};
use sterna_wire::limits::{HEARTBEAT_INTERVAL, MAX_CONTROL_MESSAGE, SILENCE_LIMIT};
use sterna_wire::text::cleaned;

use crate::cpu_time;
use crate::transport::{Closer, Reader, Writer};

/// Maximum bytes on the wire that the links of a driver read ahead of it: the largest message, or many small ones.
const MAX_AHEAD: usize = MAX_CONTROL_MESSAGE;
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
    writer: Arc<Mutex<Writer>>,
    /// None once the link is ended in good order.
    closer: Option<Closer>,
    heartbeat: Arc<Heartbeat>,
    open: Open,
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

/// A link's place among those of its allowance, released when dropped, and whether this side has closed the link.
#[derive(Debug)]
struct Open {
    unhandled: Arc<Unhandled>,
    closed: Arc<AtomicBool>,
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

    fn open(self: &Arc<Self>) -> io::Result<Open> {
        let mut counts = self.counts();
        if counts.links == MAX_LINKS {
            return Err(io::Error::other("too many control channels have connected that were not dealt with yet"));
        }
        counts.links += 1;
        Ok(Open { unhandled: Arc::clone(self), closed: Arc::default() })
    }
}

impl Open {
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // With the lock, so that no thread is between reading `closed` and waiting.
        drop(self.unhandled.counts());
        self.unhandled.changed.notify_all();
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.unhandled.counts().links -= 1;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.unhandled.counts().bytes -= self.bytes;
        self.unhandled.changed.notify_all();
    }
}

#[derive(Debug, Default)]
struct Heartbeat {
    phase: Mutex<HeartbeatPhase>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum HeartbeatPhase {
    #[default]
    Running,
    /// This side has ended in good order and waits for the peer to end.
    Finishing,
    /// The connection has ended.
    Over,
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
        mut reader: Reader,
        closer: Closer,
        mut messages: ControlReader,
        mut events: impl FnMut(ControlEvent) + Send + 'static,
    ) -> io::Result<Self> {
        let open = allowance.0.open()?;
        reader.set_timeout(Some(SILENCE_LIMIT))?;
        let writer = Arc::new(Mutex::new(writer));
        let heartbeat = Arc::new(Heartbeat::default());

        let (unhandled, closed) = (Arc::clone(&allowance.0), Arc::clone(&open.closed));
        let of_reader = Arc::clone(&heartbeat);
        cpu_time::spawn(Builder::new().name("control".into()), move || {
            let take = |bytes| unhandled.take(bytes, &closed);
            let reason = match read_messages(&mut reader, &mut messages, take, &mut events) {
                Ok(()) => CLOSED_BY_PEER.into(),
                Err(error) => error.to_string(),
            };
            of_reader.set(HeartbeatPhase::Over);
            events(ControlEvent::Lost(reason));
        })?;
        let (kept_writer, kept_heartbeat) = (Arc::clone(&writer), Arc::clone(&heartbeat));
        let kept_closer = closer.clone();
        cpu_time::spawn(Builder::new().name("heartbeat".into()), move || {
            kept_heartbeat.run(kept_writer, &kept_closer);
        })?;
        Ok(Self { writer, closer: Some(closer), heartbeat, open })
    }

    /// Returns a sender for another thread, which works as long as this link lives.
    pub fn sender(&self) -> ControlSender {
        ControlSender(Arc::clone(&self.writer))
    }

    /// Sends a message to the peer.
    pub fn send(&self, message: &ControlMessage) -> io::Result<()> {
        send(&self.writer, message)
    }

    /// Closes the connection; the reading thread reports the loss.
    pub fn close(&self) {
        if let Some(closer) = &self.closer {
            closer.close();
            self.open.close();
        }
    }

    /// Ends this side's direction after all that was sent, with TLS's closing alert, so that the peer sees an end and no loss. The peer has
    /// 10 s to end its own direction; then the connection is closed.
    pub fn finish(mut self) {
        // The last owner of the writer, this link or the heartbeat's thread, sends the closing alert when it drops the writer.
        self.closer = None;
        self.heartbeat.set(HeartbeatPhase::Finishing);
    }
}

/// Sends messages on a control channel that a driver owns.
#[derive(Clone, Debug)]
pub struct ControlSender(Arc<Mutex<Writer>>);

impl ControlSender {
    /// Sends a message to the peer.
    ///
    /// # Errors
    /// The connection is lost, which the link reports to its driver.
    pub fn send(&self, message: &ControlMessage) -> io::Result<()> {
        send(&self.0, message)
    }
}

impl Drop for ControlLink {
    fn drop(&mut self) {
        self.close();
        if self.closer.is_some() {
            self.heartbeat.set(HeartbeatPhase::Over);
        }
        // Both threads end by themselves now. They are not waited for, since their owner's events may be held back.
        self.close();
    }
}

impl Heartbeat {
    fn set(&self, phase: HeartbeatPhase) {
        let mut current = self.phase.lock().expect("the heartbeat does not panic");
        *current = phase.max(*current);
        drop(current);
        self.changed.notify_all();
    }

    /// Waits until `done`, for `time` at most. Returns the phase then.
    fn wait(&self, time: Duration, done: impl Fn(HeartbeatPhase) -> bool) -> HeartbeatPhase {
        let phase = self.phase.lock().expect("the heartbeat does not panic");
        let waited = self.changed.wait_timeout_while(phase, time, |phase| !done(*phase));
        *waited.expect("the heartbeat does not panic").0
    }

    fn run(&self, writer: Arc<Mutex<Writer>>, closer: &Closer) {
        let beat = || self.wait(HEARTBEAT_INTERVAL, |phase| phase > HeartbeatPhase::Running);
        while beat() == HeartbeatPhase::Running {
            if send(&writer, &ControlMessage::Heartbeat).is_err() {
                return; // The reading side reports the loss.
            }
        }
        // Sends the closing alert, where this is the last owner of the writer.
        drop(writer);
        if self.wait(SILENCE_LIMIT, |phase| phase == HeartbeatPhase::Over) == HeartbeatPhase::Finishing {
            closer.close();
        }
    }
}

fn send(writer: &Mutex<Writer>, message: &ControlMessage) -> io::Result<()> {
    writer.lock().expect("writers do not panic").write_all(&encoded(message))
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
    writer.write_all(&encoded(message))
}

/// Encodes a message. A reason may quote text from the peer or from QEMU: it is cut, so that the peer accepts it.
fn encoded(message: &ControlMessage) -> Vec<u8> {
    match message {
        ControlMessage::Refused { reason } => ControlMessage::Refused { reason: cleaned(reason) }.encode(),
        ControlMessage::Failed { reason } => ControlMessage::Failed { reason: cleaned(reason) }.encode(),
        other => other.encode(),
    }
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

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use sterna_wire::limits::MAX_TEXT;

    use super::*;
    use crate::transport::{Connection, Security};

    #[test]
    fn heartbeats_extend_the_wait_for_an_answer_and_only_up_to_the_latest_moment() {
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        let mut answer = Deadline { at: now, after_heartbeat: Some((minute, now + 10 * minute)) };
        answer.heartbeat();
        assert!(answer.at >= now + minute && answer.at < now + 10 * minute);
        let mut late = Deadline { at: now, after_heartbeat: Some((minute, now)) };
        let mut message = Deadline { at: now, after_heartbeat: None };
        late.heartbeat();
        message.heartbeat();
        assert_eq!((late.at, message.at), (now, now));
    }

    /// Long enough that a correct test never reaches it, short enough that a hanging one ends.
    const PATIENCE: Duration = Duration::from_secs(10);
    /// More than the kernel's buffers of both ends hold, in bytes.
    const FLOOD: usize = 64 << 20;

    /// Returns a link, the receiver of its events, which are unhandled until received, and its peer.
    fn link() -> (ControlLink, Receiver<ControlEvent>, TcpStream) {
        let (link, events, peer) = link_within(&Allowance::default());
        (link.unwrap(), events, peer)
    }

    fn link_within(allowance: &Allowance) -> (io::Result<ControlLink>, Receiver<ControlEvent>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let connection = Connection::accept(listener.accept().unwrap().0, &Security::Insecure).unwrap();
        let closer = connection.closer();
        let (writer, reader) = connection.split();
        let (sender, events) = channel();
        let send = move |event| drop(sender.send(event));
        let link = ControlLink::start_within(allowance, writer, reader, closer, ControlReader::default(), send);
        (link, events, peer)
    }

    fn message(length: usize) -> ControlMessage {
        ControlMessage::Ready { placement: vec!["x".repeat(length)], deltas: Vec::new() }
    }

    /// Writes as much of `flood` as the link and the kernel accept, and returns its length.
    fn pour(peer: &mut TcpStream, flood: &[u8]) -> usize {
        peer.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut written = 0;
        while written < flood.len() {
            match peer.write(&flood[written..]) {
                Ok(length) => written += length,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
                    break;
                }
            }
        }
        written
    }

    #[test]
    fn a_peer_that_floods_a_busy_driver_has_to_wait_and_nothing_is_lost() {
        for length in [100, 60_000, 1_000_000] {
            let (_link, events, mut peer) = link();
            let one = message(length).encode();
            let count = FLOOD / one.len() + 1;
            let flood = one.repeat(count);
            let written = pour(&mut peer, &flood);
            assert!(written < flood.len(), "{length}: all of the flood was accepted");
            let mut waiting = vec![events.recv_timeout(PATIENCE).unwrap()];
            waiting.extend(events.try_iter());
            assert!(waiting.len() <= MAX_AHEAD / one.len().max(MIN_COUNTED) + 1, "{length}: {}", waiting.len());

            let sending = std::thread::spawn(move || {
                peer.set_write_timeout(Some(PATIENCE)).unwrap();
                peer.write_all(&flood[written..]).unwrap();
                // Dropped, and so closed, only when all has been handled: unread heartbeats would reset the connection.
                peer
            });
            let mut handled = waiting.len();
            drop(waiting);
            while handled < count {
                match events.recv_timeout(PATIENCE).unwrap() {
                    ControlEvent::Message(received, _) => assert_eq!(received, message(length)),
                    ControlEvent::Lost(reason) => panic!("{length}: after {handled}: {reason}"),
                }
                handled += 1;
            }
            drop(sending.join().unwrap());
            let end = events.recv_timeout(PATIENCE).unwrap();
            assert!(matches!(end, ControlEvent::Lost(_)), "{length}: {end:?}");
        }
    }

    #[test]
    fn a_link_that_waits_for_its_driver_ends_when_it_is_closed_or_dropped() {
        for dropped in [false, true] {
            let (link, events, mut peer) = link();
            let flood = message(1_000_000).encode().repeat(FLOOD / 1_000_000);
            assert!(pour(&mut peer, &flood) < flood.len());
            // The share is kept, as by a driver that never handles the message.
            let ControlEvent::Message(_, _unhandled) = events.recv_timeout(PATIENCE).unwrap() else { panic!() };
            let kept = if dropped {
                drop(link);
                None
            } else {
                link.close();
                Some(link)
            };
            let ControlEvent::Lost(reason) = events.recv_timeout(PATIENCE).unwrap() else { panic!("a message") };
            assert!(reason.contains("closed on this side"), "{reason}");
            assert!(events.recv_timeout(PATIENCE).is_err(), "the reading thread has ended");
            drop(kept);
        }
    }

    #[test]
    fn links_of_one_allowance_share_it_and_are_few() {
        let allowance = Allowance::default();
        let long = message(1_000_000).encode();
        let (first, of_first, mut peer) = link_within(&allowance);
        peer.write_all(&long).unwrap();
        let ControlEvent::Message(_, share) = of_first.recv_timeout(PATIENCE).unwrap() else { panic!() };
        // What the first link has read still counts when the link is gone, and keeps the second from reading on.
        drop(first);
        let (second, of_second, mut peer) = link_within(&allowance);
        assert!(pour(&mut peer, &long.repeat(FLOOD / long.len())) < FLOOD / long.len() * long.len());
        assert!(of_second.try_recv().is_err());
        drop(share);
        assert!(matches!(of_second.recv_timeout(PATIENCE).unwrap(), ControlEvent::Message(..)));

        let mut links = vec![second.unwrap()];
        while links.len() < MAX_LINKS {
            links.push(link_within(&allowance).0.unwrap());
        }
        let refused = link_within(&allowance).0.unwrap_err();
        assert!(refused.to_string().contains("too many"), "{refused}");
        links.pop();
        assert!(link_within(&allowance).0.is_ok());
    }

    #[test]
    fn a_long_reason_is_cut_before_it_is_sent() {
        let (link, _events, mut peer) = link();
        let reason = "\u{1b}".repeat(2 * MAX_CONTROL_MESSAGE);
        for message in [ControlMessage::Failed { reason: reason.clone() }, ControlMessage::Refused { reason }] {
            link.send(&message).unwrap();
        }
        let mut received = ControlReader::default();
        let mut bytes = [0; 4096];
        let mut reasons = Vec::new();
        while reasons.len() < 2 {
            let length = peer.read(&mut bytes).unwrap();
            received.push(&bytes[..length]);
            match received.next_message().unwrap() {
                Some(ControlMessage::Failed { reason } | ControlMessage::Refused { reason }) => reasons.push(reason),
                Some(ControlMessage::Heartbeat) | None => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(reasons.iter().all(|reason| reason.len() <= MAX_TEXT && !reason.contains('\u{1b}')));
    }
}
