//! An NBD server for storage that fails, answers late, or does not answer until a test releases it. A test decides about each request by a
//! closure that sees the connection, the command, the offset and the written data. Several QEMUs can use one server at a time: each of their
//! connections has a number.
//!
//! It speaks the NBD protocol over a unix socket: the fixed newstyle handshake with `NBD_OPT_GO`, `NBD_OPT_INFO`, `NBD_OPT_EXPORT_NAME` and
//! `NBD_OPT_ABORT`, and simple replies. There is one export, whose name is empty. All numbers are from the protocol's document, `doc/proto.md`
//! of <https://github.com/NetworkBlockDevice/nbd>.

mod handshake;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use serde_json::{Value, json};
use tempfile::TempDir;

use self::handshake::{invalid, negotiate, u16_at, u32_at, u64_at};
use crate::Error;

/// Maximum bytes that a request reads or writes, which clients may assume without a negotiated size ("Block size constraints").
const MAX_PAYLOAD: u32 = 32 << 20;
/// Maximum number of connections at a time.
const MAX_CONNECTIONS: usize = 64;
/// Maximum number of requests that are held or delayed at a time.
const MAX_PENDING: usize = 1024;
/// Maximum bytes of written data in these requests.
const MAX_PENDING_BYTES: usize = 128 << 20;
/// How long a client may take to accept an answer, before its connection is closed.
const WRITE_TIME: Duration = Duration::from_secs(300);

/// A command of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NbdCommand {
    /// `NBD_CMD_READ`.
    Read,
    /// `NBD_CMD_WRITE`.
    Write,
    /// `NBD_CMD_FLUSH`.
    Flush,
    /// `NBD_CMD_TRIM`, which leaves the content as it is.
    Trim,
    /// `NBD_CMD_WRITE_ZEROES`.
    WriteZeroes,
}

impl NbdCommand {
    fn from_number(number: u16) -> Option<NbdCommand> {
        Some(match number {
            0 => NbdCommand::Read,
            1 => NbdCommand::Write,
            3 => NbdCommand::Flush,
            4 => NbdCommand::Trim,
            6 => NbdCommand::WriteZeroes,
            _ => return None,
        })
    }

    /// Returns whether the command changes the content: whether it is a write.
    #[must_use]
    pub fn writes(self) -> bool {
        matches!(self, NbdCommand::Write | NbdCommand::WriteZeroes)
    }
}

/// An error in an answer ("Error values").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the errors have the names and numbers of Linux's errno values")]
pub enum NbdError {
    Eperm = 1,
    Eio = 5,
    Enomem = 12,
    Einval = 22,
    Enospc = 28,
    Eoverflow = 75,
    Enotsup = 95,
    Eshutdown = 108,
}

/// A request, as the test's closure sees it. Its bytes lie within the export.
#[derive(Clone, Copy, Debug)]
pub struct NbdRequest<'a> {
    /// The connection's number: 1 for the first client of this server, and so on. A client that connects again gets another number.
    pub connection: u64,
    /// The command.
    pub command: NbdCommand,
    /// The first byte; 0 for a flush.
    pub offset: u64,
    /// The number of bytes; 0 for a flush.
    pub length: u32,
    /// The data of a [`NbdCommand::Write`]; empty for other commands.
    pub data: &'a [u8],
}

/// What the server does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdAnswer {
    /// Performs it, and answers at once.
    Serve,
    /// Does not perform it, and answers with this error at once.
    Fail(NbdError),
    /// Neither performs nor answers it before the test releases it.
    Hold,
    /// Performs and answers it this long after its arrival.
    Delay(Duration),
}

/// A request that is held or delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingRequest {
    /// The connection's number.
    pub connection: u64,
    /// The command.
    pub command: NbdCommand,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u32,
    /// The request's number.
    number: u64,
}

/// The number of requests that were answered since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NbdCounts {
    /// Reads that were performed.
    pub reads: u64,
    /// Writes with data that were performed.
    pub writes: u64,
    /// Flushes that were performed.
    pub flushes: u64,
    /// Trims that were performed.
    pub trims: u64,
    /// Writes of zeros that were performed.
    pub zeroes: u64,
    /// Requests of all commands that were answered with an error.
    pub failed: u64,
}

impl NbdCounts {
    fn count(&mut self, command: NbdCommand) {
        *match command {
            NbdCommand::Read => &mut self.reads,
            NbdCommand::Write => &mut self.writes,
            NbdCommand::Flush => &mut self.flushes,
            NbdCommand::Trim => &mut self.trims,
            NbdCommand::WriteZeroes => &mut self.zeroes,
        } += 1;
    }
}

/// An NBD server. Clones share it. When the last clone is dropped, its connections are closed, without an answer to requests that are held
/// or delayed, and its socket is removed. A closure that [decides](NbdServer::decide) must not own a clone.
#[derive(Clone)]
pub struct NbdServer {
    served: Arc<Served>,
}

struct Served {
    server: Arc<Server>,
    stop: Arc<OwnedFd>,
    acceptor: Option<JoinHandle<()>>,
    delayer: Option<JoinHandle<()>>,
    directory: TempDir,
    socket: PathBuf,
}

impl NbdServer {
    /// Serves the file `image`, of the length that it has now. A flush does not wait for the host's disk.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be opened, or if there is no socket or thread.
    pub fn file(image: &Path) -> Result<NbdServer, Error> {
        let file =
            File::options().read(true).write(true).open(image).map_err(Error::path("opening the image", image))?;
        let size = file.metadata().map_err(Error::path("reading the size of", image))?.len();
        NbdServer::serve(Store::File { file, size })
    }

    /// Serves `content` from memory.
    ///
    /// # Errors
    /// [`Error::Io`] if there is no socket or thread.
    pub fn memory(content: Vec<u8>) -> Result<NbdServer, Error> {
        NbdServer::serve(Store::Memory { size: content.len() as u64, content: Mutex::new(content) })
    }

    fn serve(store: Store) -> Result<NbdServer, Error> {
        let directory = tempfile::Builder::new()
            .prefix("sterna-nbd-")
            .tempdir()
            .map_err(Error::io("making a directory for a socket of NBD"))?;
        let socket = directory.path().join("nbd.sock");
        let listener = UnixListener::bind(&socket).map_err(Error::path("listening on", &socket))?;
        listener.set_nonblocking(true).map_err(Error::path("listening on", &socket))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| Error::Io { action: "making an eventfd".into(), source: error.into() })?;
        let stop = Arc::new(stop);
        let server = Arc::new(Server {
            store,
            decide: Mutex::new(Box::new(|_| NbdAnswer::Serve)),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let acceptor = spawn("lab-nbd-accept", {
            let (server, stop) = (Arc::clone(&server), Arc::clone(&stop));
            move || server.accept(&listener, &stop)
        })?;
        // From here on, dropping this value ends the threads.
        let mut served = Served { server, stop, acceptor: Some(acceptor), delayer: None, directory, socket };
        served.delayer = Some(spawn("lab-nbd-delay", {
            let server = Arc::clone(&served.server);
            move || server.answer_delayed()
        })?);
        Ok(NbdServer { served: Arc::new(served) })
    }

    /// Returns the path of the socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.served.socket
    }

    /// Returns the arguments of QEMU's `blockdev-add`, or of its option `-blockdev`, for a node `name` on this server.
    #[must_use]
    pub fn blockdev(&self, name: &str) -> Value {
        let path = self.socket().to_str().expect("temporary directories have names in UTF-8");
        json!({ "driver": "nbd", "node-name": name, "server": { "type": "unix", "path": path } })
    }

    /// Returns how many clients have connected since the start: the number of the latest connection.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.state().connections
    }

    /// Has `decide` called with each further request, one at a time, in the order of arrival within a connection. It replaces an earlier
    /// closure; requests that are held or delayed stay so. At first, all requests are served.
    ///
    /// Requests beyond the export's end, and unknown commands, fail without being shown to `decide`. A connection whose requests exceed
    /// 1024 that are pending, or 128 MiB of data in them, is closed.
    pub fn decide(&self, decide: impl FnMut(&NbdRequest<'_>) -> NbdAnswer + Send + 'static) {
        let earlier = std::mem::replace(&mut *lock(&self.served.server.decide), Box::new(decide));
        drop(earlier);
    }

    /// Serves all further requests. Those that are held or delayed stay so.
    pub fn serve_all(&self) {
        self.decide(|_| NbdAnswer::Serve);
    }

    /// Returns the requests that are held now, in the order of their arrival.
    #[must_use]
    pub fn held(&self) -> Vec<PendingRequest> {
        self.state().held.iter().map(|pending| pending.request).collect()
    }

    /// Returns the requests that are held or delayed now: first the held ones.
    #[must_use]
    pub fn in_flight(&self) -> Vec<PendingRequest> {
        let state = self.state();
        state.held.iter().chain(state.delayed.iter().map(|(_, pending)| pending)).map(|each| each.request).collect()
    }

    /// Returns how many requests were answered.
    #[must_use]
    pub fn counts(&self) -> NbdCounts {
        self.state().counts
    }

    /// Waits until at least `count` requests are held, and returns those that are.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `limit`, with the held requests.
    pub fn wait_held(&self, count: usize, limit: Duration) -> Result<Vec<PendingRequest>, Error> {
        let held = |state: &State| -> Vec<_> { state.held.iter().map(|pending| pending.request).collect() };
        self.wait(limit, |state| (state.held.len() >= count).then(|| held(state))).map_err(|state| {
            let last = format!("held: {:?}", held(&state));
            Error::Timeout { waiting_for: format!("{count} held requests"), limit, last }
        })
    }

    /// Waits until `accept` accepts the number of answered requests. `what` describes this.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `limit`, with these numbers.
    pub fn wait_counts(
        &self,
        what: &str,
        limit: Duration,
        accept: impl Fn(&NbdCounts) -> bool,
    ) -> Result<NbdCounts, Error> {
        self.wait(limit, |state| Some(state.counts).filter(&accept)).map_err(|state| {
            let last = format!("{:?}", state.counts);
            Error::Timeout { waiting_for: what.to_owned(), limit, last }
        })
    }

    fn wait<T>(&self, limit: Duration, pick: impl Fn(&State) -> Option<T>) -> Result<T, MutexGuard<'_, State>> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        loop {
            if let Some(picked) = pick(&state) {
                return Ok(picked);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(state);
            }
            let waited = self.served.server.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Performs and answers one held request. Returns whether it was still held.
    pub fn release(&self, request: PendingRequest) -> bool {
        self.end(request, None)
    }

    /// Answers one held request with an error, without performing it. Returns whether it was still held.
    pub fn fail(&self, request: PendingRequest, error: NbdError) -> bool {
        self.end(request, Some(error))
    }

    fn end(&self, request: PendingRequest, error: Option<NbdError>) -> bool {
        let mut state = self.state();
        let Some(position) = state.held.iter().position(|pending| pending.request == request) else { return false };
        let pending = state.held.remove(position).expect("it was found there");
        state.moved_out(&pending);
        drop(state);
        self.served.server.finish(&pending, error);
        true
    }

    /// Performs and answers all requests that are held or delayed now, in the order of [`NbdServer::in_flight`]. Returns their number.
    /// Further requests are held if the closure of [`NbdServer::decide`] still says so.
    pub fn release_all(&self) -> usize {
        let mut state = self.state();
        let mut all = std::mem::take(&mut state.held);
        all.extend(std::mem::take(&mut state.delayed).into_iter().map(|(_, pending)| pending));
        all.iter().for_each(|pending| state.moved_out(pending));
        drop(state);
        all.iter().for_each(|pending| self.served.server.finish(pending, None));
        all.len()
    }

    /// Returns the present content of these bytes.
    ///
    /// # Panics
    /// If they are not all within the export, or the file cannot be read.
    #[must_use]
    pub fn content(&self, bytes: Range<u64>) -> Vec<u8> {
        let length = bytes.end.checked_sub(bytes.start).expect("a range that ascends");
        self.served.server.store.read(bytes.start, length as usize).expect("bytes of the export")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.served.server.state()
    }
}

impl std::fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NbdServer").field("socket", &self.served.socket).finish_non_exhaustive()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // The eventfd is empty, so this neither waits nor fails.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.acceptor.take() {
            let _ = thread.join();
        }
        // No client is added from here on.
        let mut state = self.server.state();
        state.closing = true;
        let readers = std::mem::take(&mut state.readers);
        state.clients.values().for_each(|client| client.close());
        state.held.clear();
        state.delayed.clear();
        drop(state);
        self.server.changed.notify_all();
        for thread in readers.into_iter().chain(self.delayer.take()) {
            let _ = thread.join();
        }
        tracing::debug!(directory = %self.directory.path().display(), "an NBD server ends");
    }
}

/// The export's content.
enum Store {
    File { file: File, size: u64 },
    Memory { content: Mutex<Vec<u8>>, size: u64 },
}

impl Store {
    fn size(&self) -> u64 {
        match self {
            Store::File { size, .. } | Store::Memory { size, .. } => *size,
        }
    }

    /// Returns whether these bytes are all in the export.
    fn has(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.size())
    }

    fn read(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        if !self.has(offset, length as u64) {
            return Err(ErrorKind::InvalidInput.into());
        }
        Ok(match self {
            Store::File { file, .. } => {
                let mut data = vec![0; length];
                file.read_exact_at(&mut data, offset)?;
                data
            }
            Store::Memory { content, .. } => lock(content)[offset as usize..][..length].to_vec(),
        })
    }

    /// Writes `data`, which must fit.
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        match self {
            Store::File { file, .. } => file.write_all_at(data, offset)?,
            Store::Memory { content, .. } => lock(content)[offset as usize..][..data.len()].copy_from_slice(data),
        }
        Ok(())
    }

    /// Writes zeros, which must fit.
    fn zero(&self, offset: u64, length: u64) -> io::Result<()> {
        let zeros = vec![0; length.min(1 << 20) as usize];
        let mut done = 0;
        while done < length {
            let part = zeros.len().min((length - done) as usize);
            self.write(offset + done, &zeros[..part])?;
            done += part as u64;
        }
        Ok(())
    }
}

type Decide = dyn FnMut(&NbdRequest<'_>) -> NbdAnswer + Send;

struct Server {
    store: Store,
    decide: Mutex<Box<Decide>>,
    state: Mutex<State>,
    /// Something has been held or answered, or the server closes.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    connections: u64,
    requests: u64,
    clients: HashMap<u64, Arc<Client>>,
    readers: Vec<JoinHandle<()>>,
    held: VecDeque<Pending>,
    /// Delayed requests, each with the time of its answer.
    delayed: Vec<(Instant, Pending)>,
    /// Bytes of written data in the requests that are held or delayed.
    pending_bytes: usize,
    counts: NbdCounts,
    closing: bool,
}

impl State {
    fn moved_out(&mut self, pending: &Pending) {
        self.pending_bytes -= pending.data.len();
    }
}

/// A request that waits for its answer.
struct Pending {
    request: PendingRequest,
    cookie: u64,
    data: Vec<u8>,
    client: Arc<Client>,
}

/// A client's connection. Several threads answer it.
struct Client {
    stream: UnixStream,
    writing: Mutex<()>,
}

impl Client {
    fn reply(&self, cookie: u64, answer: &Result<Vec<u8>, NbdError>) -> io::Result<()> {
        let (error, data) = match answer {
            Ok(data) => (0, data.as_slice()),
            Err(error) => (*error as u32, &[][..]),
        };
        let mut bytes = Vec::with_capacity(16 + data.len());
        bytes.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        bytes.extend_from_slice(&error.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(data);
        let _writing = lock(&self.writing);
        (&self.stream).write_all(&bytes)
    }

    fn close(&self) {
        // It may be closed already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// Closes a connection and forgets it when its thread ends, also by a panic of the test's closure.
struct Connection<'a> {
    server: &'a Server,
    client: &'a Arc<Client>,
    number: u64,
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        self.client.close();
        let mut state = self.server.state();
        state.clients.remove(&self.number);
        let mut released = 0;
        let mut own = |pending: &Pending| {
            let own = pending.request.connection == self.number;
            released += if own { pending.data.len() } else { 0 };
            own
        };
        state.held.retain(|pending| !own(pending));
        state.delayed.retain(|(_, pending)| !own(pending));
        state.pending_bytes = state.pending_bytes.saturating_sub(released);
    }
}

// "Request message", "Simple reply message", "Request types".
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CMD_DISC: u16 = 2;
const REQUEST_HEADER: usize = 28;

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Accepts clients until `stop` is written to.
    fn accept(self: &Arc<Self>, listener: &UnixListener, stop: &OwnedFd) {
        loop {
            let mut events = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            match poll(&mut events, None) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return tracing::error!(%error, "an NBD server ends: its thread cannot wait"),
                Ok(_) if !events[1].revents().is_empty() => return,
                Ok(_) => {}
            }
            let added = listener.accept().and_then(|(stream, _)| self.add(stream));
            match added {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => tracing::warn!(%error, "an NBD server refuses a client"),
                Ok(()) => {}
            }
        }
    }

    /// Starts a thread for a client.
    fn add(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(WRITE_TIME))?;
        let client = Arc::new(Client { stream, writing: Mutex::default() });
        let mut state = self.state();
        if state.clients.len() >= MAX_CONNECTIONS {
            return Err(io::Error::other(format!("there are {MAX_CONNECTIONS} already")));
        }
        state.connections += 1;
        let number = state.connections;
        // The thread uses the state only after this function has released it.
        let thread = std::thread::Builder::new().name("lab-nbd".into()).spawn({
            let (server, client) = (Arc::clone(self), Arc::clone(&client));
            move || {
                let connection = Connection { server: &server, client: &client, number };
                if let Err(error) = server.serve(&connection) {
                    tracing::debug!(%error, number, "a connection of an NBD server ends");
                }
            }
        })?;
        state.clients.insert(number, client);
        state.readers.retain(|reader| !reader.is_finished());
        state.readers.push(thread);
        Ok(())
    }

    /// Serves a client until it disconnects.
    fn serve(&self, connection: &Connection<'_>) -> io::Result<()> {
        let mut stream = &connection.client.stream;
        if !negotiate(stream, self.store.size())? {
            return Ok(());
        }
        let mut header = [0; REQUEST_HEADER];
        loop {
            stream.read_exact(&mut header)?;
            let (kind, cookie) = (u16_at(&header, 6), u64_at(&header, 8));
            let (offset, length) = (u64_at(&header, 16), u32_at(&header, 24));
            if u32_at(&header, 0) != REQUEST_MAGIC {
                return Err(invalid("a request without its magic number"));
            }
            let command = NbdCommand::from_number(kind);
            let mut data = Vec::new();
            if command == Some(NbdCommand::Write) {
                if length > MAX_PAYLOAD {
                    return Err(invalid("a write that is too long"));
                }
                data.resize(length as usize, 0);
                stream.read_exact(&mut data)?;
            }
            if kind == CMD_DISC {
                return Ok(());
            }
            let fitting = match command {
                None => Err(NbdError::Einval),
                Some(NbdCommand::Flush) => Ok(NbdCommand::Flush),
                Some(NbdCommand::Read) if length > MAX_PAYLOAD => Err(NbdError::Eoverflow),
                Some(command) if self.store.has(offset, length.into()) => Ok(command),
                Some(command) => Err(if command.writes() { NbdError::Enospc } else { NbdError::Einval }),
            };
            match fitting {
                Ok(command) => self.request(connection, command, cookie, (offset, length), data)?,
                Err(error) => {
                    self.state().counts.failed += 1;
                    connection.client.reply(cookie, &Err(error))?;
                }
            }
        }
    }

    /// Does with a request what the test's closure decides.
    fn request(
        &self,
        connection: &Connection<'_>,
        command: NbdCommand,
        cookie: u64,
        (offset, length): (u64, u32),
        data: Vec<u8>,
    ) -> io::Result<()> {
        let number = connection.number;
        // Kept until the request is queued: after a new closure is in force, no request is held any more by the decision of the old one.
        let mut decide = lock(&self.decide);
        let answer = decide(&NbdRequest { connection: number, command, offset, length, data: &data });
        let mut state = self.state();
        state.requests += 1;
        let request = PendingRequest { connection: number, command, offset, length, number: state.requests };
        let pending = Pending { request, cookie, data, client: Arc::clone(connection.client) };
        let due = match answer {
            NbdAnswer::Serve | NbdAnswer::Fail(_) => {
                drop(state);
                drop(decide);
                let error = if let NbdAnswer::Fail(error) = answer { Some(error) } else { None };
                self.finish(&pending, error);
                return Ok(());
            }
            NbdAnswer::Hold => None,
            NbdAnswer::Delay(delay) => Some(Instant::now() + delay),
        };
        if state.held.len() + state.delayed.len() >= MAX_PENDING
            || state.pending_bytes + pending.data.len() > MAX_PENDING_BYTES
        {
            tracing::warn!("an NBD server has too many requests that are held or delayed");
            return Err(invalid("too many requests are held or delayed"));
        }
        state.pending_bytes += pending.data.len();
        match due {
            None => state.held.push_back(pending),
            Some(due) => state.delayed.push((due, pending)),
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Answers a request: with `error`, or after performing it.
    fn finish(&self, pending: &Pending, error: Option<NbdError>) {
        let PendingRequest { command, offset, length, .. } = pending.request;
        let answer = error.map_or_else(|| self.perform(command, offset, length, &pending.data), Err);
        // Counted before the client can go on.
        let mut state = self.state();
        match answer {
            Ok(_) => state.counts.count(command),
            Err(_) => state.counts.failed += 1,
        }
        drop(state);
        self.changed.notify_all();
        if let Err(error) = pending.client.reply(pending.cookie, &answer) {
            // An answer of which only a part was written cannot be followed by another one.
            tracing::debug!(%error, "an answer of an NBD server was not delivered");
            pending.client.close();
        }
    }

    fn perform(&self, command: NbdCommand, offset: u64, length: u32, data: &[u8]) -> Result<Vec<u8>, NbdError> {
        let done = match command {
            NbdCommand::Read => self.store.read(offset, length as usize),
            NbdCommand::Write => self.store.write(offset, data).map(|()| Vec::new()),
            NbdCommand::WriteZeroes => self.store.zero(offset, length.into()).map(|()| Vec::new()),
            NbdCommand::Flush | NbdCommand::Trim => Ok(Vec::new()),
        };
        done.map_err(|error| {
            tracing::error!(%error, ?command, offset, length, "the image of an NBD server fails");
            NbdError::Eio
        })
    }

    /// Answers delayed requests when their time has come, until the server closes.
    fn answer_delayed(&self) {
        let mut state = self.state();
        while !state.closing {
            let next = (0..state.delayed.len()).min_by_key(|&position| state.delayed[position].0);
            let Some(position) = next else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = state.delayed[position].0.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let (_, pending) = state.delayed.remove(position);
                state.moved_out(&pending);
                drop(state);
                self.finish(&pending, None);
                state = self.state();
            } else {
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    std::thread::Builder::new().name(name.into()).spawn(run).map_err(Error::io("starting a thread of an NBD server"))
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
