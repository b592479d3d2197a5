//! A client of QEMU's machine protocol (QMP): JSON objects over a unix socket.
//!
//! This is own code on serde_json rather than generated bindings. The gateway supports every QEMU from 7.2 on, so it reads answers
//! tolerantly (ignores unknown fields, treats missing ones as absent) instead of by one release's schema.
//!
//! A reader thread reads messages from the socket and dispatches them: answers to their command (by `id`), events to a queue. So
//! [`Qmp`] is a handle that may be cloned and used from several threads, for instance to wait for an event in one thread while
//! another executes a command.
//!
//! Protocol: docs/interop/qmp-spec in QEMU's documentation.

mod answers;
mod first_moment;
mod guest_end;
mod input;
mod run_state;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use sterna_engine::process;
use sterna_engine::transport::peer_process;
use sterna_wire::text::cleaned;

pub use answers::{MigrationInfo, RamInfo, Version};
pub(crate) use first_moment::FirstMoment;
use first_moment::GuestStart;
pub use guest_end::GuestEnd;
use input::Message;
pub(crate) use input::Messages;
pub use run_state::{Meaning, RunState};

/// How long the greeting and each command may take by default.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the reader may take to read what QEMU sent before it closed the connection.
const READING_TIME: Duration = Duration::from_secs(5);

/// Maximum number of unread events in the queue; the oldest are dropped first. `MIGRATION_PASS` comes once a round, so a
/// migration never reaches this limit.
const MAX_EVENTS: usize = 4096;

/// Maximum bytes of an event; longer events are dropped. Together with [`MAX_EVENTS`] this bounds the queue's memory. The
/// events that Sterna needs have some hundred bytes.
const MAX_EVENT_BYTES: usize = 4 << 10;

/// Why a command, an event or the connection failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// The socket cannot be reached.
    #[error("cannot connect to the QMP socket {path}: {reason}")]
    Connect {
        /// Path of the socket.
        path: String,
        /// The kind of the system's error.
        kind: io::ErrorKind,
        /// The system's error, and what to do.
        reason: String,
    },
    /// libvirt, by way of which the monitor is reached, refused or failed.
    #[error("{reason}")]
    Libvirt {
        /// libvirt's reason, and what to do.
        reason: String,
    },
    /// No greeting came: QEMU serves one client per monitor.
    #[error(
        "QMP socket busy: another client is connected to {path}; give Sterna its own -qmp (no greeting within {})",
        seconds(*waited)
    )]
    Busy {
        /// Path of the socket.
        path: String,
        /// How long we waited.
        waited: Duration,
    },
    /// No greeting came from a process that is stopped.
    #[error(
        "the process that serves the QMP socket {path} (process {pid}) is stopped (by SIGSTOP, for instance), so that nothing answers \
         there; let it go on (kill -CONT {pid})"
    )]
    Stopped {
        /// Path of the socket.
        path: String,
        /// The process.
        pid: u32,
    },
    /// QEMU refused a command.
    #[error("QEMU refused {command}: {description}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's error class, for instance `GenericError` or `CommandNotFound`.
        class: String,
        /// QEMU's error text.
        description: String,
    },
    /// No answer in time. Whether QEMU executed the command is not known.
    #[error("QEMU did not answer {command} within {}: {}", seconds(*waited), silence(*stopped))]
    Timeout {
        /// The command.
        command: String,
        /// How long we waited.
        waited: Duration,
        /// The process that serves the socket, if it is stopped.
        stopped: Option<u32>,
    },
    /// The connection has ended or is unusable.
    #[error("the QMP connection is closed: {reason}")]
    Closed {
        /// Why.
        reason: String,
    },
    /// An answer lacks something that every QEMU sends.
    #[error("unexpected answer to {command}: {reason}")]
    Unexpected {
        /// The command.
        command: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// An asynchronous message from QEMU.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Name, for instance `MIGRATION` or `STOP`.
    pub name: String,
    /// The event's data; `Null` if it has none.
    pub data: Value,
    /// When QEMU sent it: microseconds since 1970 by the clock of QEMU's host; `None` if QEMU does not know the time.
    pub time_us: Option<u64>,
}

/// A connection to one QEMU monitor. Clones share it; it closes when the last one is dropped.
#[derive(Debug, Clone)]
pub struct Qmp {
    connection: Arc<Connection>,
}

#[derive(Debug)]
struct Connection {
    writer: Mutex<UnixStream>,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
    timeout: Duration,
    peer_pid: Option<i32>,
    version: Version,
}

/// The state that the reader thread and the callers share.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    greeting: Option<Value>,
    next_id: u64,
    /// Commands in progress, each with its answer once that has arrived.
    pending: HashMap<u64, Option<Answer>>,
    events: VecDeque<Event>,
    /// Why the connection has ended.
    closed: Option<String>,
    /// All that QEMU sent was read.
    read: bool,
    /// How the guest has ended, by the events so far: kept for every caller, however many events follow.
    guest_end: Option<GuestEnd>,
    /// How often QEMU has let the guest run.
    resumes: u64,
    /// What is seen of the guest since it was last let run.
    start: GuestStart,
}

#[derive(Debug)]
enum Answer {
    Return(Value),
    Error { class: String, description: String },
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic with this lock held leaves the state consistent: each change is one insertion.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` returns a value. Returns none when the deadline passes.
    fn wait<T>(&self, deadline: Instant, mut ready: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(found) = ready(&mut state) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn close(&self, reason: &str) {
        let mut state = self.lock();
        state.closed.get_or_insert_with(|| reason.to_owned());
        drop(state);
        self.changed.notify_all();
    }
}

impl Qmp {
    /// Connects to the monitor at `path` with the default time limit.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, QmpError> {
        Self::connect_within(path, DEFAULT_TIMEOUT)
    }

    /// Connects; `timeout` bounds connecting, the greeting and every later command.
    pub fn connect_within(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, QmpError> {
        let path = path.as_ref();
        let started = Instant::now();
        let busy = || QmpError::Busy { path: path.display().to_string(), waited: timeout };
        let silent = |peer: Option<u32>| match peer {
            Some(pid) => QmpError::Stopped { path: path.display().to_string(), pid },
            None => busy(),
        };
        let stream = connect_stream(path, timeout).map_err(|error| match error.kind() {
            // The queue of connections that are not accepted yet is full: other clients wait for this monitor, too.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => busy(),
            kind => QmpError::Connect { path: path.display().to_string(), kind, reason: connect_reason(path, &error) },
        })?;
        let failed = |kind, reason| QmpError::Connect { path: path.display().to_string(), kind, reason };
        let connection = Self::start(stream, timeout).map_err(|error| failed(error.kind(), error.to_string()))?;
        let greeting = connection.greeting(started + timeout).ok_or_else(|| silent(connection.stopped()))??;
        let no_version = "the greeting names no QEMU version: this is not a QEMU monitor";
        Self::greeted(connection, &greeting)?.ok_or_else(|| failed(io::ErrorKind::InvalidData, no_version.into()))
    }

    /// Connects over `stream`, whose other end this program serves: it passes commands, answers and events on. `process` finds QEMU's process.
    ///
    /// # Errors
    /// The other end does not behave as a monitor.
    pub(crate) fn over(
        stream: UnixStream,
        timeout: Duration,
        process: impl FnOnce(&Self) -> Option<i32>,
    ) -> Result<Self, QmpError> {
        let unexpected = |reason: &str| QmpError::Unexpected { command: "query-version".into(), reason: reason.into() };
        let mut connection = Self::start(stream, timeout).map_err(|error| unexpected(&error.to_string()))?;
        // That of this program.
        connection.peer_pid = None;
        let greeting = connection.greeting(Instant::now() + timeout).ok_or_else(|| unexpected("no greeting"))??;
        let mut qmp = Self::greeted(connection, &greeting)?.ok_or_else(|| unexpected("no version"))?;
        let found = process(&qmp);
        Arc::get_mut(&mut qmp.connection).expect("there is no other handle yet").peer_pid = found;
        Ok(qmp)
    }

    /// Begins to use a connection that has received this greeting; none if the greeting names no version.
    fn greeted(mut connection: Connection, greeting: &Value) -> Result<Option<Self>, QmpError> {
        let Some(version) = Version::from_json(&greeting["version"]) else { return Ok(None) };
        connection.version = version;
        let qmp = Qmp { connection: Arc::new(connection) };
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(Some(qmp))
    }

    fn start(stream: UnixStream, timeout: Duration) -> io::Result<Connection> {
        let peer_pid = peer_process(&stream);
        let shared = Arc::new(Shared::default());
        let input = stream.try_clone()?;
        stream.set_write_timeout(Some(timeout))?;
        let for_reader = Arc::clone(&shared);
        let reader = std::thread::Builder::new().name("qmp-reader".into()).spawn(move || {
            let reason = read_messages(input, &for_reader);
            for_reader.lock().read = true;
            for_reader.close(&reason);
        })?;
        Ok(Connection {
            shared,
            reader: Some(reader),
            timeout,
            peer_pid,
            writer: Mutex::new(stream),
            version: Version::default(),
        })
    }

    /// Executes `command` with `arguments` (an object) and waits for its answer, within the connection's time limit.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, self.timeout_of(command))
    }

    /// Executes a command with a time limit of its own.
    pub fn execute_within(&self, command: &str, arguments: Value, timeout: Duration) -> Result<Value, QmpError> {
        self.execute_with(command, arguments, timeout, None)
    }

    /// Executes a command that passes a descriptor to QEMU (`add-fd`, `getfd`).
    pub fn execute_with_descriptor(
        &self,
        command: &str,
        arguments: Value,
        descriptor: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        self.execute_with(command, arguments, self.connection.timeout, Some(descriptor))
    }

    fn execute_with(
        &self,
        command: &str,
        arguments: Value,
        timeout: Duration,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Value, QmpError> {
        let begun = Instant::now();
        let answer = self.send(command, arguments, descriptor)?.wait(begun + timeout)?;
        answer.ok_or_else(|| self.no_answer(command, timeout))
    }

    fn no_answer(&self, command: &str, waited: Duration) -> QmpError {
        QmpError::Timeout { command: command.to_owned(), waited, stopped: self.connection.stopped() }
    }

    /// Waits for the answers of commands that were begun, within the connection's time limit.
    ///
    /// # Errors
    /// That of the first command that has failed, or was not answered in time.
    pub(crate) fn answers<const N: usize>(&self, commands: &mut [PendingCommand; N]) -> Result<[Value; N], QmpError> {
        let waited = self.connection.timeout;
        let deadline = Instant::now() + waited;
        let mut answers = [const { Value::Null }; N];
        for (command, answer) in commands.iter_mut().zip(&mut answers) {
            *answer = command.wait(deadline)?.ok_or_else(|| self.no_answer(&command.command, waited))?;
        }
        Ok(answers)
    }

    /// Sends a command and does not wait for its answer.
    pub fn begin(&self, command: &str, arguments: Value) -> Result<PendingCommand, QmpError> {
        self.send(command, arguments, None)
    }

    fn send(
        &self,
        command: &str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<PendingCommand, QmpError> {
        let shared = &self.connection.shared;
        let id = {
            let mut state = shared.lock();
            if let Some(reason) = &state.closed {
                return Err(QmpError::Closed { reason: reason.clone() });
            }
            state.next_id += 1;
            let id = state.next_id;
            state.pending.insert(id, None);
            id
        };
        let mut request = json!({ "execute": command, "id": id });
        if arguments.as_object().is_some_and(|object| !object.is_empty()) {
            request["arguments"] = arguments;
        }
        let mut line = request.to_string();
        line.push('\n');
        let sent = {
            let mut writer = self.connection.writer.lock().unwrap_or_else(PoisonError::into_inner);
            match descriptor {
                None => writer.write_all(line.as_bytes()),
                Some(descriptor) => write_with_descriptor(&mut writer, line.as_bytes(), descriptor),
            }
        };
        if let Err(error) = sent {
            // Part of the line may have been sent, so QEMU could not parse anything sent after it.
            shared.close(&format!("cannot write to QEMU: {error}"));
        }
        Ok(PendingCommand { shared: Arc::clone(shared), id, command: command.to_owned() })
    }

    /// Executes a command of the human monitor and returns its output.
    pub fn human(&self, command_line: &str) -> Result<String, QmpError> {
        let answer = self.execute("human-monitor-command", json!({ "command-line": command_line }))?;
        answer
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| QmpError::Unexpected { command: command_line.to_owned(), reason: "no text".into() })
    }

    /// Takes the oldest event from the queue, and waits for one until `deadline`. Returns `None` when the deadline passes.
    ///
    /// Each event goes to one caller only, also among clones of the handle.
    pub fn next_event(&self, deadline: Instant) -> Result<Option<Event>, QmpError> {
        self.take_event(deadline, |_| true)
    }

    /// Takes the oldest event called `name` whose data satisfies `wanted`, and waits for one until `deadline`. Returns `None`
    /// when the deadline passes. Other events stay in the queue; an event that came before the call is found, too.
    pub fn wait_event(
        &self,
        name: &str,
        mut wanted: impl FnMut(&Value) -> bool,
        deadline: Instant,
    ) -> Result<Option<Event>, QmpError> {
        self.take_event(deadline, |event| event.name == name && wanted(&event.data))
    }

    fn take_event(&self, deadline: Instant, mut wanted: impl FnMut(&Event) -> bool) -> Result<Option<Event>, QmpError> {
        self.connection
            .shared
            .wait(deadline, |state| {
                if let Some(at) = state.events.iter().position(&mut wanted) {
                    return state.events.remove(at).map(Ok);
                }
                let reason = state.closed.clone()?;
                Some(Err(QmpError::Closed { reason }))
            })
            .transpose()
    }

    /// Returns how long this command may take by default.
    pub(crate) fn timeout_of(&self, command: &str) -> Duration {
        shortened(command).unwrap_or(self.connection.timeout)
    }

    /// Takes the queued events that have one of these names, in their order. Other events stay in the queue.
    pub fn take_events(&self, names: &[&str]) -> Vec<Event> {
        let mut state = self.connection.shared.lock();
        let (taken, left): (VecDeque<_>, _) =
            state.events.drain(..).partition(|event| names.contains(&event.name.as_str()));
        state.events = left;
        Vec::from(taken)
    }

    /// Waits until the connection has ended. Returns false when the deadline passes before that.
    pub fn wait_closed(&self, deadline: Instant) -> bool {
        self.connection.shared.wait(deadline, |state| state.closed.is_some().then_some(())).is_some()
    }

    /// Returns how often QEMU has let the guest run since this connection was made (event RESUME), whoever takes the events.
    pub(crate) fn resumes(&self) -> u64 {
        self.connection.shared.lock().resumes
    }

    /// Waits until the guest's first moment has passed since QEMU has last let it run, as far as this connection has seen that, or until the guest
    /// executes no more.
    pub(crate) fn watch_first_moment(&self) -> FirstMoment {
        let shared = &self.connection.shared;
        let deadline = {
            let state = shared.lock();
            state.start.first_moment_ends(Instant::now())
        };
        let seen = shared.wait(deadline, |state| match state.start.failure() {
            Some(failure) => Some(FirstMoment::Failed(failure)),
            None if state.closed.is_some() => Some(FirstMoment::Closed),
            None => state.start.is_stopped().then_some(FirstMoment::Passed),
        });
        seen.unwrap_or(FirstMoment::Passed)
    }

    /// Returns the process that serves the socket, if it is stopped (SIGSTOP).
    pub(crate) fn stopped(&self) -> Option<u32> {
        self.connection.stopped()
    }

    /// Drops all queued events, so that a later wait sees only newer ones.
    pub fn clear_events(&self) {
        self.connection.shared.lock().events.clear();
    }

    /// Returns how the guest has ended since this connection was made, if it has, and was neither reset nor resumed since. Of a connection that
    /// QEMU has closed, everything is read first.
    pub fn guest_end(&self) -> Option<GuestEnd> {
        let shared = &self.connection.shared;
        // A command that could not be written may have closed the connection.
        let read =
            shared.wait(Instant::now() + READING_TIME, |state| (state.closed.is_none() || state.read).then_some(()));
        let mut state = shared.lock();
        // Of a QEMU that is stopped nothing more comes, and it is waited for once.
        state.read |= read.is_none();
        state.guest_end.clone()
    }

    /// Returns the process id of the peer (SO_PEERCRED): the process that last called `listen` on the socket. QEMU does so itself,
    /// also on a socket that it got from libvirt; a program that forwards QEMU's socket has a process of its own. `None` if it lives in a
    /// pid namespace that this process cannot see.
    pub fn peer_pid(&self) -> Option<i32> {
        self.connection.peer_pid
    }

    /// Returns QEMU's version, from its greeting.
    pub fn version(&self) -> &Version {
        &self.connection.version
    }

    /// Returns the run state, for instance `running`, `paused`, `inmigrate`, `postmigrate`.
    pub fn status(&self) -> Result<String, QmpError> {
        let answer = self.execute("query-status", json!({}))?;
        answer["status"]
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| QmpError::Unexpected { command: "query-status".into(), reason: "no status".into() })
    }

    /// Returns the run state, with what it means for the guest.
    pub fn run_state(&self) -> Result<RunState, QmpError> {
        self.status().map(|name| RunState::named(&name))
    }

    /// Returns state and counters of the migration, outgoing or incoming.
    pub fn query_migrate(&self) -> Result<MigrationInfo, QmpError> {
        Ok(MigrationInfo::from_json(&self.execute("query-migrate", json!({}))?))
    }
}

/// A command that was sent. QEMU executes it also if this is dropped; its answer is lost then.
#[derive(Debug)]
pub struct PendingCommand {
    shared: Arc<Shared>,
    id: u64,
    command: String,
}

impl PendingCommand {
    /// Returns whether [`PendingCommand::wait`] would return at once.
    pub(crate) fn is_answered(&self) -> bool {
        let state = self.shared.lock();
        state.closed.is_some() || matches!(state.pending.get(&self.id), Some(Some(_)))
    }

    /// Waits for the answer. Returns none when the deadline passes: the answer can be waited for again. An answer is returned once.
    pub fn wait(&mut self, deadline: Instant) -> Result<Option<Value>, QmpError> {
        let answer = self.shared.wait(deadline, |state| {
            if let Some(Some(_)) = state.pending.get(&self.id) {
                return state.pending.remove(&self.id).flatten().map(Ok);
            }
            let reason = state.closed.clone()?;
            Some(Err(QmpError::Closed { reason }))
        });
        match answer {
            Some(Ok(Answer::Return(value))) => Ok(Some(value)),
            Some(Ok(Answer::Error { class, description })) => {
                Err(QmpError::Refused { command: self.command.clone(), class, description })
            }
            Some(Err(closed)) => Err(closed),
            None => Ok(None),
        }
    }
}

impl Drop for PendingCommand {
    fn drop(&mut self) {
        // A late answer has no pending command and is dropped.
        self.shared.lock().pending.remove(&self.id);
    }
}

impl Connection {
    /// Waits for the greeting; none if the deadline passes.
    fn greeting(&self, deadline: Instant) -> Option<Result<Value, QmpError>> {
        self.shared.wait(deadline, |state| match (state.greeting.take(), &state.closed) {
            (Some(greeting), _) => Some(Ok(greeting)),
            (None, Some(reason)) => Some(Err(QmpError::Closed { reason: reason.clone() })),
            (None, None) => None,
        })
    }

    /// Returns the process that serves the socket, if it is stopped.
    fn stopped(&self) -> Option<u32> {
        self.peer_pid.and_then(|pid| u32::try_from(pid).ok()).filter(|pid| process::is_stopped(*pid))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let writer = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Wakes the reader, which then ends. A failure means that the peer has closed the connection, which also wakes the reader.
        let _ = writer.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Writes `bytes`, and passes `descriptor` with the first of them (SCM_RIGHTS, unix(7)).
fn write_with_descriptor(writer: &mut UnixStream, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("there is no room for one descriptor"));
    }
    let sent = sendmsg(&*writer, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    writer.write_all(&bytes[sent..])
}

/// Returns the time limit that a test has set for this command.
#[cfg(not(feature = "fault-points"))]
fn shortened(_: &str) -> Option<Duration> {
    None
}

/// `STERNA_COMMAND_TIME` is the time limit, in milliseconds, of the commands that wait for the storage of the guest's disks.
#[cfg(feature = "fault-points")]
fn shortened(command: &str) -> Option<Duration> {
    const WAIT_FOR_STORAGE: [&str; 4] = ["stop", "xen-save-devices-state", "blockdev-set-active", "cont"];
    let wanted = std::env::var("STERNA_COMMAND_TIME").ok().filter(|_| WAIT_FOR_STORAGE.contains(&command))?;
    Some(Duration::from_millis(wanted.parse().expect("STERNA_COMMAND_TIME is a number of milliseconds")))
}

/// Connects within `timeout`: on a unix socket the send time limit covers the wait for room in the queue.
fn connect_stream(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    sterna_engine::transport::unix::connect(path, timeout)
}

/// Returns why QEMU does not answer, `stopped` being the process that serves its socket, if it is stopped.
fn silence(stopped: Option<u32>) -> String {
    match stopped {
        Some(pid) => format!("process {pid} is stopped (by SIGSTOP, for instance); let it go on (kill -CONT {pid})"),
        None => "its main loop waits, most likely for the storage of the guest's disks".into(),
    }
}

/// Formats a time limit for error texts.
fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

fn connect_reason(path: &Path, error: &io::Error) -> String {
    const MAKES_A_SOCKET: &str = "start QEMU with -qmp unix:PATH,server=on,wait=off";
    let is_socket = || std::fs::metadata(path).is_ok_and(|file| file.file_type().is_socket());
    match error.kind() {
        io::ErrorKind::NotFound => format!("no such file; {MAKES_A_SOCKET}"),
        io::ErrorKind::ConnectionRefused if !is_socket() => format!("this is no socket; {MAKES_A_SOCKET}"),
        io::ErrorKind::ConnectionRefused => {
            "no process listens on it: this QEMU has ended, or has not started yet".into()
        }
        io::ErrorKind::PermissionDenied => "permission denied; run as the user that QEMU runs as".into(),
        _ => error.to_string(),
    }
}

/// Runs the reader thread: dispatches messages until the connection ends. Returns why it ended.
fn read_messages(input: UnixStream, shared: &Shared) -> String {
    let mut messages = Messages::new(input);
    loop {
        let Message { object, bytes } = match messages.next() {
            Ok(message) => message,
            Err(reason) => return reason,
        };
        if bytes > MAX_EVENT_BYTES && object["event"].is_string() {
            tracing::warn!(bytes, "an event of QEMU is too long and was dropped");
            continue;
        }
        shared.lock().dispatch(object);
        shared.changed.notify_all();
    }
}

impl State {
    fn dispatch(&mut self, mut message: Value) {
        if let Some(name) = message["event"].as_str() {
            let event = Event {
                name: name.to_owned(),
                time_us: event_time(&message["timestamp"]),
                data: message["data"].take(),
            };
            if let Some(end) = GuestEnd::of_event(&event.name, &event.data) {
                self.guest_end = Some(end);
            } else if GuestEnd::is_over_at(&event.name) {
                self.guest_end = None;
            }
            self.resumes += u64::from(event.name == "RESUME");
            self.start.note(&event.name, &event.data, Instant::now());
            if self.events.len() == MAX_EVENTS {
                self.events.pop_front();
            }
            self.events.push_back(event);
        } else if !message["QMP"].is_null() {
            self.greeting = Some(message["QMP"].take());
        } else {
            let answer = if message["error"].is_object() {
                let text = |key: &str| {
                    let text = message["error"][key].as_str();
                    cleaned(text.unwrap_or("(no text)"))
                };
                Answer::Error { class: text("class"), description: text("desc") }
            } else {
                Answer::Return(message["return"].take())
            };
            // An answer without a pending command is dropped: the command's time limit has passed. Of several answers to
            // one command the first counts.
            if let Some(waiting) = message["id"].as_u64().and_then(|id| self.pending.get_mut(&id)) {
                waiting.get_or_insert(answer);
            }
        }
    }
}

/// Parses an event's time. QEMU sends -1 for both parts when it does not know the time.
fn event_time(timestamp: &Value) -> Option<u64> {
    let seconds = timestamp["seconds"].as_u64()?;
    let microseconds = timestamp["microseconds"].as_u64()?;
    seconds.checked_mul(1_000_000)?.checked_add(microseconds)
}
