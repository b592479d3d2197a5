//! The control channel at work: messages in, messages out, heartbeats, and silence noticed.
//!
//! The loss of the control channel is not a failure by itself: what it means depends on where the switchover stands, and
//! that is for the driver to say. So the link only reports it.

use std::io::{self, Read, Write};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use sterna_wire::control::{ControlMessage, ControlReader};
use sterna_wire::limits::{HEARTBEAT_INTERVAL, SILENCE_LIMIT};

use crate::transport::{Closer, Reader, Writer};

/// What the link tells its driver.
#[derive(Debug)]
pub enum ControlEvent {
    /// The peer said something (heartbeats are kept back).
    Message(ControlMessage),
    /// The connection is gone, and why. Nothing follows.
    Lost(String),
}

/// One end of a control channel. Dropping it closes the connection.
#[derive(Debug)]
pub struct ControlLink {
    writer: Arc<Mutex<Writer>>,
    closer: Closer,
    beating: Arc<Beating>,
}

#[derive(Debug, Default)]
struct Beating {
    ended: Mutex<bool>,
    changed: Condvar,
}

impl ControlLink {
    /// Takes an accepted control channel into service. `events` is called on the link's own thread.
    pub fn start(
        writer: Writer,
        mut reader: Reader,
        closer: Closer,
        mut messages: ControlReader,
        mut events: impl FnMut(ControlEvent) + Send + 'static,
    ) -> io::Result<Self> {
        reader.set_timeout(Some(SILENCE_LIMIT))?;
        let writer = Arc::new(Mutex::new(writer));
        let beating = Arc::new(Beating::default());

        std::thread::Builder::new().name("control".into()).spawn(move || {
            let reason = match read_messages(&mut reader, &mut messages, &mut events) {
                Ok(()) => "the peer closed the control channel".into(),
                Err(error) => error.to_string(),
            };
            events(ControlEvent::Lost(reason));
        })?;
        let (kept_writer, kept_beating) = (Arc::clone(&writer), Arc::clone(&beating));
        std::thread::Builder::new().name("heartbeat".into()).spawn(move || kept_beating.run(&kept_writer))?;
        Ok(Self { writer, closer, beating })
    }

    /// Says something to the peer.
    pub fn send(&self, message: &ControlMessage) -> io::Result<()> {
        send(&self.writer, message)
    }

    /// Closes the connection; the reading thread reports the loss.
    pub fn close(&self) {
        self.closer.close();
    }
}

impl Drop for ControlLink {
    fn drop(&mut self) {
        *self.beating.ended.lock().expect("the heartbeat does not panic") = true;
        self.beating.changed.notify_all();
        // Both threads end by themselves now; they are not waited for, since their owner's events may be held back.
        self.closer.close();
    }
}

impl Beating {
    fn run(&self, writer: &Mutex<Writer>) {
        let mut ended = self.ended.lock().expect("the heartbeat does not panic");
        while !*ended {
            let timeout;
            (ended, timeout) =
                self.changed.wait_timeout(ended, HEARTBEAT_INTERVAL).expect("the heartbeat does not panic");
            if timeout.timed_out() && !*ended && send(writer, &ControlMessage::Heartbeat).is_err() {
                return; // The reading side reports the loss.
            }
        }
    }
}

fn send(writer: &Mutex<Writer>, message: &ControlMessage) -> io::Result<()> {
    writer.lock().expect("writers do not panic").write_all(&message.encode())
}

/// Keeps a link's events back while this lives.
#[derive(Debug)]
pub struct Gate(#[expect(dead_code, reason = "dropping it is what it is for")] Sender<()>);

/// Holds the events of a link back until the gate is dropped, so that its owner hears of a new link before it hears from
/// it.
pub fn held_back(
    mut events: impl FnMut(ControlEvent) + Send + 'static,
) -> (impl FnMut(ControlEvent) + Send + 'static, Gate) {
    let (gate, opened) = channel();
    let wait_and_tell = move |event| {
        // Ends with an error as soon as the gate has been dropped, now and every time after.
        let _ = opened.recv();
        events(event);
    };
    (wait_and_tell, Gate(gate))
}

/// Sends a message on a connection that has no link yet.
pub fn say(writer: &mut Writer, message: &ControlMessage) -> io::Result<()> {
    writer.write_all(&message.encode())
}

/// Reads the next message from a connection that has no link yet, until `deadline`, however the peer trickles.
pub fn hear(reader: &mut Reader, messages: &mut ControlReader, deadline: Instant) -> io::Result<ControlMessage> {
    next_message(reader, messages, Some(deadline))
}

/// The next message that is not a heartbeat.
fn next_message(
    reader: &mut Reader,
    messages: &mut ControlReader,
    deadline: Option<Instant>,
) -> io::Result<ControlMessage> {
    let mut bytes = [0; 4096];
    loop {
        match messages.next_message().map_err(invalid)? {
            Some(ControlMessage::Heartbeat) => continue,
            Some(message) => return Ok(message),
            None => {}
        }
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long to say what was due"));
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
    events: &mut impl FnMut(ControlEvent),
) -> io::Result<()> {
    loop {
        match next_message(reader, messages, None) {
            Ok(message) => events(ControlEvent::Message(message)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                let silence = format!("nothing was heard from the peer for {} s", SILENCE_LIMIT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, silence));
            }
            Err(error) => return Err(error),
        }
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
