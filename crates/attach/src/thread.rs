//! A stopped thread as the caller has it, and the thread of this program that holds it.
//!
//! The kernel takes ptrace(2) requests from the very thread that attached. So each [`StoppedThread`] has a thread of its own here, which
//! does nothing else, and the caller may use it from where it likes. That thread's end is also the last resort: the kernel detaches
//! whatever a thread traced when it ends, also what has not come to a stop yet.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use libc::c_long;

use crate::system::{self, Tid};
use crate::tracee::{LIMIT, Tracee};
use crate::{AttachError, Process};

/// How long the tracing thread may take for one thing: several steps, each with its own limit.
const PATIENCE: Duration = LIMIT.saturating_mul(6);

/// The main thread of a process, stopped. Dropped: its registers are its own again, and it runs on.
#[derive(Debug)]
pub struct StoppedThread<'a> {
    process: &'a Process,
    calls: Option<Sender<Call>>,
    answers: Receiver<Answer>,
    tracer: Option<JoinHandle<Tid>>,
    /// Whether a system call has not returned, so that nothing more can be run.
    stuck: bool,
}

/// A system call to be run.
struct Call {
    number: c_long,
    arguments: [u64; 6],
}

/// What the tracing thread has done.
enum Answer {
    Stopped(Result<(), AttachError>),
    Returned(Result<u64, AttachError>),
    Released(Result<Duration, AttachError>),
}

impl Process {
    /// Stops the main thread of the process. All other threads run on.
    ///
    /// The thread is stopped for as long as the answer is held, but for moments within [`StoppedThread::system_call`]: a thread that was
    /// found in user code is let run on for up to 30 ms, until it stands in a system call of its own.
    ///
    /// # Errors
    /// Whatever keeps the thread from being stopped, within 2 s; the process runs on as before.
    pub fn stop(&self) -> Result<StoppedThread<'_>, AttachError> {
        let (calls, requests) = mpsc::channel();
        let (report, answers) = mpsc::channel();
        let process = self.clone();
        let tracer = std::thread::Builder::new()
            .name("attach".into())
            .spawn(move || {
                system::be_prompt();
                trace(&process, &requests, &report);
                system::this_thread()
            })
            .map_err(|source| AttachError::Io {
                pid: self.pid(),
                what: "start a thread that attaches to it",
                source,
            })?;
        let mut stopped =
            StoppedThread { process: self, calls: Some(calls), answers, tracer: Some(tracer), stuck: false };
        match stopped.answers.recv_timeout(PATIENCE) {
            Ok(Answer::Stopped(Ok(()))) => Ok(stopped),
            Ok(Answer::Stopped(Err(error))) => {
                stopped.calls = None;
                stopped.wait_until_untraced();
                Err(error)
            }
            _ => Err(stopped.silent("its main thread was stopped")),
        }
    }
}

impl StoppedThread<'_> {
    /// Runs a system call in the thread and returns its result. Pointers among the arguments are addresses in that process.
    ///
    /// Signals that come meanwhile are delivered to the thread, which comes to a stop again before it runs a handler. The thread's
    /// registers are its own again when this returns.
    ///
    /// # Errors
    /// [`AttachError::Refused`] with the call's errno; [`AttachError::Seccomp`] before anything is run;
    /// [`AttachError::Stuck`] where the call does not return within 4 s, after which nothing more can be run; [`AttachError::Ended`] and
    /// [`AttachError::Replaced`] where the thread was ended.
    pub fn system_call(&mut self, number: c_long, arguments: [u64; 6]) -> Result<u64, AttachError> {
        let during = "a system call ran in it";
        let sent =
            !self.stuck && self.calls.as_ref().is_some_and(|calls| calls.send(Call { number, arguments }).is_ok());
        if !sent {
            return Err(self.silent(during));
        }
        match self.answers.recv_timeout(PATIENCE) {
            Ok(Answer::Returned(result)) => {
                self.stuck = matches!(result, Err(AttachError::Stuck { .. }));
                result
            }
            _ => Err(self.silent(during)),
        }
    }

    /// Returns a copy of a descriptor of the process: [`Process::take_descriptor`].
    ///
    /// # Errors
    /// As that one.
    pub fn take_descriptor(&self, number: i32) -> Result<OwnedFd, AttachError> {
        self.process.take_descriptor(number)
    }

    /// Lets the thread run on, and returns how long it was stopped. What it ran between two stops does not count.
    ///
    /// # Errors
    /// [`AttachError::Ended`] and [`AttachError::Replaced`]: there is no such thread any more.
    pub fn resume(mut self) -> Result<Duration, AttachError> {
        self.release()
    }

    fn release(&mut self) -> Result<Duration, AttachError> {
        self.calls = None;
        let released = match self.answers.recv_timeout(if self.stuck { Duration::ZERO } else { PATIENCE }) {
            Ok(Answer::Released(result)) => result,
            // The tracing thread is waiting for a system call to return, and will release the thread then.
            _ => {
                self.tracer = None;
                return Err(self.silent("its main thread was released"));
            }
        };
        self.wait_until_untraced();
        released
    }

    /// Waits for the end of the tracing thread, and until the kernel has detached what it traced, which is a little later.
    fn wait_until_untraced(&mut self) {
        let Some(Ok(tid)) = self.tracer.take().map(JoinHandle::join) else { return };
        let deadline = Instant::now() + LIMIT;
        while self.process.tracer() == tid && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }

    /// The tracing thread has given up, or does not answer: it waits for a system call to return.
    fn silent(&self, during: &'static str) -> AttachError {
        let pid = self.process.pid();
        if self.process.has_ended() {
            AttachError::Ended { pid, during }
        } else {
            AttachError::Stuck { call: "an earlier system call".into(), pid, limit: PATIENCE }
        }
    }
}

impl Drop for StoppedThread<'_> {
    fn drop(&mut self) {
        if self.calls.is_some()
            && let Err(error) = self.release()
        {
            tracing::debug!(pid = self.process.pid(), %error, "the thread was not there to be released");
        }
    }
}

/// The tracing thread.
fn trace(process: &Process, calls: &Receiver<Call>, answers: &Sender<Answer>) {
    // Answers that nobody waits for any more are of no use; the thread is put back all the same.
    let mut tracee = match Tracee::attach(process) {
        Ok(tracee) => tracee,
        Err(error) => {
            let _ = answers.send(Answer::Stopped(Err(error)));
            return;
        }
    };
    let _ = answers.send(Answer::Stopped(Ok(())));
    for Call { number, arguments } in calls {
        let result = tracee.system_call(number, arguments);
        let _ = answers.send(Answer::Returned(result));
        if tracee.is_lent() {
            // Stuck: from here on it is only waited for the call's end.
            break;
        }
    }
    let _ = answers.send(Answer::Released(tracee.release()));
}
