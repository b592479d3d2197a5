//! The socket by which a running `send` or `receive` is shown and controlled.
//!
//! One thread answers one connection at a time, each with one request. A request is bounded in bytes and in time, and nothing of the migration
//! waits for this thread: the control and the cancellation answer at once, and the observer only leaves its last figures here.

use std::fmt::Display;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use sterna_engine::cancel::Cancel;
use sterna_engine::directory::Directory;
use sterna_engine::live_control::{Control, RequestOutcome};
use sterna_engine::record_file::{self, Side};
use sterna_engine::report::{Observer, Progress, ReceiveProgress};
use sterna_engine::transport::peer_user;
use sterna_engine::transport::unix::{self, SocketFile};
use sterna_wire::switchover::{Moment, Step};

use super::message::{Answer, Command, MAX_REQUEST, Request, Running, VERSION};
use super::name_of;

/// How long a client may take for its request.
const REQUEST_TIME: Duration = Duration::from_secs(1);
/// What post-copy by request needs.
const POST_COPY_NEEDS: &str = "post-copy was not agreed on: it needs direct mode, `sterna send --on-no-convergence post-copy:ROUNDS`, and \
                               a destination that has been reached";

/// A side of a migration, as a control socket shows it.
pub(crate) struct Subject<'a> {
    pub(crate) side: Side,
    pub(crate) monitor: String,
    /// Where the source sends, or the destination listens.
    pub(crate) peer: String,
    /// The directory of the records, in which the socket is made.
    pub(crate) state_dir: &'a Path,
    /// The source's control.
    pub(crate) control: Option<Control>,
}

/// Calls `migrate`, whose migration can be shown and controlled meanwhile by a socket. Without the socket (a full disk, for instance) the
/// migration goes on without; the observer is told why.
pub(crate) fn with_socket<R>(
    subject: Subject<'_>,
    cancel: &Cancel,
    observer: &dyn Observer,
    migrate: impl FnOnce(&dyn Observer) -> R,
) -> R {
    let running = Running {
        id: None,
        side: if subject.side == Side::Source { "source" } else { "destination" }.to_owned(),
        process: std::process::id(),
        monitor: subject.monitor,
        peer: subject.peer,
        started_ms: record_file::now_ms(),
        progress: Value::Null,
    };
    let latest = Arc::new(Mutex::new(running));
    let serving = Serving {
        latest: Arc::clone(&latest),
        control: subject.control,
        cancel: cancel.clone(),
        state_dir: subject.state_dir.to_owned(),
        side: subject.side,
    };
    let server = Server::start(subject.state_dir, serving);
    if let Err(error) = &server {
        observer.note(&format!("`sterna show`, `set` and `cancel` do not reach this migration: {error}"));
    }
    migrate(&Shown { observer, latest })
}

/// Leaves the last figures for the socket's thread, and passes everything on.
struct Shown<'a> {
    observer: &'a dyn Observer,
    latest: Arc<Mutex<Running>>,
}

impl Shown<'_> {
    fn set(&self, change: impl FnOnce(&mut Running)) {
        // A value is replaced as a whole, so that a panic leaves none half-changed.
        change(&mut self.latest.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Observer for Shown<'_> {
    fn progress(&self, progress: &Progress) {
        let figures = serde_json::to_value(progress).unwrap_or_default();
        self.set(|running| running.progress = figures);
        self.observer.progress(progress);
    }

    fn received(&self, progress: &ReceiveProgress) {
        let figures = serde_json::to_value(progress).unwrap_or_default();
        self.set(|running| running.progress = figures);
        self.observer.received(progress);
    }

    fn note(&self, text: &str) {
        self.observer.note(text);
    }

    fn listening(&self, address: &str) {
        self.set(|running| running.peer = address.to_owned());
        self.observer.listening(address);
    }

    fn step(&self, moment: Moment, step: Step) {
        self.observer.step(moment, step);
    }
}

/// The thread that answers, until this is dropped.
struct Server {
    /// Closed to end the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    /// Removed after the thread has closed the socket.
    _file: SocketFile,
}

impl Server {
    fn start(state_dir: &Path, serving: Serving) -> io::Result<Self> {
        Directory::private(state_dir)?;
        let (listener, file) = unix::listen(&state_dir.join(name_of(std::process::id())))?;
        listener.set_nonblocking(true)?;
        let (stop, stopped) = UnixStream::pair()?;
        let thread = std::thread::Builder::new().name("control-socket".to_owned());
        let thread = thread.spawn(move || serving.run(&listener, &stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread), _file: file })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been printed.
            let _ = thread.join();
        }
    }
}

/// What the thread answers from.
struct Serving {
    latest: Arc<Mutex<Running>>,
    control: Option<Control>,
    cancel: Cancel,
    state_dir: std::path::PathBuf,
    side: Side,
}

impl Serving {
    fn run(&self, listener: &UnixListener, stopped: &UnixStream) {
        while ready(listener, stopped, None) {
            match listener.accept() {
                Ok((client, _)) => {
                    if let Err(error) = self.serve(&client, stopped) {
                        tracing::debug!(%error, "a client of the control socket");
                    }
                }
                // The client may have gone; where descriptors are missing, a failure to accept would repeat at once.
                Err(error) => {
                    tracing::debug!(%error, "accepting a client of the control socket");
                    ready(stopped, stopped, Some(REQUEST_TIME));
                }
            }
        }
    }

    fn serve(&self, client: &UnixStream, stopped: &UnixStream) -> io::Result<()> {
        client.set_nonblocking(true)?;
        let allowed = may_control(peer_user(client)?, rustix::process::geteuid().as_raw());
        // Read in any case: a connection that is closed before that loses its answer.
        let answer = match read_line(client, stopped, Instant::now() + REQUEST_TIME) {
            _ if !allowed => Answer::refused("only root and the user that started this migration may control it"),
            Ok(line) => self.answer(&line),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Answer::refused(error.to_string()),
            Err(error) => return Err(error),
        };
        let mut line = serde_json::to_vec(&answer)?;
        line.push(b'\n');
        // Fits into the socket's buffer: a client that does not read is not waited for.
        (&*client).write_all(&line)
    }

    fn answer(&self, line: &[u8]) -> Answer {
        let unreadable = |error: &dyn Display| Answer::refused(format!("this is no request: {error}"));
        let request: Value = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(error) => return unreadable(&error),
        };
        match request["version"].as_u64() {
            Some(version) if version == u64::from(VERSION) => {}
            _ => return Answer::refused(format!("this process knows version {VERSION} of the messages")),
        }
        match serde_json::from_value::<Request>(request) {
            Ok(request) => self.carry_out(&request.command),
            Err(error) => unreadable(&error),
        }
    }

    fn carry_out(&self, command: &Command) -> Answer {
        match (command, &self.control) {
            (Command::Show, _) => {
                let mut running = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
                running.id = self.id();
                Answer { migration: Some(running), ..Answer::accepted() }
            }
            (Command::Cancel, Some(control)) => {
                let outcome = control.cancel();
                if outcome == RequestOutcome::Accepted {
                    self.cancel.cancel();
                }
                Answer::of(outcome, "")
            }
            (Command::Cancel, None) => {
                self.cancel.cancel();
                Answer::accepted()
            }
            (_, None) => {
                Answer::refused("this is the destination; the source carries this out: give the command on its host")
            }
            (Command::Set { bandwidth: None, downtime_ms: None }, _) => Answer::refused("nothing is to be set"),
            (Command::Set { bandwidth, downtime_ms }, Some(control)) => set(control, *bandwidth, *downtime_ms),
            (Command::SwitchOver, Some(control)) => Answer::of(control.switch_over(), ""),
            (Command::PostCopy, Some(control)) => Answer::of(control.post_copy(), POST_COPY_NEEDS),
        }
    }

    /// Returns the id in this process's record, which is written once both sides have agreed.
    fn id(&self) -> Option<String> {
        let records = record_file::all(&self.state_dir).ok()?;
        let own = records
            .into_iter()
            .filter(|record| record.pid == std::process::id() && Side::of(record.state) == self.side);
        own.max_by_key(|record| record.created_ms).map(|record| record.migration.to_string())
    }
}

/// Sets what is given. The target downtime is set first: it can be too late for it while a limit is still taken.
fn set(control: &Control, bandwidth: Option<u64>, downtime_ms: Option<u64>) -> Answer {
    let downtime = downtime_ms.map_or(RequestOutcome::Accepted, |ms| control.set_downtime(Duration::from_millis(ms)));
    if downtime != RequestOutcome::Accepted {
        return Answer::of(downtime, "");
    }
    Answer::of(bandwidth.map_or(RequestOutcome::Accepted, |limit| control.set_bandwidth(Some(limit))), "")
}

/// Returns whether a process of user `peer` may control one of user `own`.
fn may_control(peer: u32, own: u32) -> bool {
    peer == 0 || peer == own
}

/// Waits until `socket` can be read; false if `stopped` was closed, or the time is over.
fn ready(socket: &impl AsFd, stopped: &UnixStream, limit: Option<Duration>) -> bool {
    let deadline = limit.map(|limit| Instant::now() + limit);
    loop {
        let mut files = [PollFd::new(socket, PollFlags::IN), PollFd::new(stopped, PollFlags::IN)];
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut files, left.as_ref()) {
            Ok(0) => return false,
            Ok(_) if !files[1].revents().is_empty() => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Reads up to the end of the first line.
///
/// # Errors
/// `InvalidData`: the line is too long. `TimedOut`: it did not come by `deadline`, or the migration has ended.
fn read_line(client: &UnixStream, stopped: &UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut part = [0; 1024];
    loop {
        if !ready(client, stopped, Some(deadline.saturating_duration_since(Instant::now()))) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let count = (&*client).read(&mut part)?;
        let part = &part[..count];
        let end = part.iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&part[..end.unwrap_or(count)]);
        if line.len() > MAX_REQUEST {
            let text = format!("a request has at most {MAX_REQUEST} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        match (end, count) {
            (Some(_), _) => return Ok(line),
            (None, 0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            (None, _) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_same_user_may_control_and_no_other_user() {
        assert!(may_control(0, 1000) && may_control(1000, 1000) && may_control(0, 0));
        assert!(!may_control(1001, 1000) && !may_control(1000, 0));
    }
}
