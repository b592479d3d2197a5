//! A stopped thread as the caller sees it, and the thread of this program that traces it.
//!
//! The kernel accepts ptrace(2) requests only from the thread that attached. So each [`StoppedThread`] has a tracing thread of its own, and
//! the caller may use it from any thread. Ending the tracing thread is also the last resort: the kernel then detaches all threads that it
//! traced, including those that have not stopped yet.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use libc::c_long;

use crate::system::{self, Tid};
use crate::tracee::{LIMIT, Tracee};
use crate::{AttachError, Process};

/// How long the tracing thread may take for one request, which has several steps, each with its own limit.
const PATIENCE: Duration = LIMIT.saturating_mul(6);

/// The main thread of a process, stopped. When this is dropped, the thread's own registers are restored, and it runs on.
#[derive(Debug)]
pub struct StoppedThread<'a> {
    process: &'a Process,
    calls: Option<Sender<Call>>,
    answers: Receiver<Answer>,
    tracer: Option<JoinHandle<Tid>>,
    /// Whether a system call has not returned, so that nothing more can be run.
    stuck: bool,
}

/// A system call to run.
struct Call {
    number: c_long,
    arguments: [u64; 6],
}

/// The tracing thread's answers.
enum Answer {
    Stopped(Result<(), AttachError>),
    Returned(Result<u64, AttachError>),
    Released(Result<Duration, AttachError>),
}

impl Process {
    /// Stops the main thread of the process. All other threads run on.
    ///
    /// The thread is stopped as long as the returned value is held, except for moments within [`StoppedThread::system_call`]: a thread in
    /// user code runs on for up to 30 ms, until it is in a system call of its own.
    ///
    /// # Errors
    /// Why the thread could not be stopped within 2 s; the process runs on as before.
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
            _ => Err(stopped.no_answer("its main thread was stopped")),
        }
    }
}

impl StoppedThread<'_> {
    /// Runs a system call in the thread and returns its result. Pointers among the arguments are addresses in that process.
    ///
    /// Signals that come meanwhile are delivered to the thread, which stops again before it runs a handler. The thread's own
    /// registers are restored when this returns.
    ///
    /// # Errors
    /// [`AttachError::Refused`] with the call's errno; [`AttachError::Seccomp`] before anything is run;
    /// [`AttachError::Stuck`] if the call does not return within 4 s, after which no other call can be run; [`AttachError::Ended`] and
    /// [`AttachError::Replaced`] if the thread has ended.
    pub fn system_call(&mut self, number: c_long, arguments: [u64; 6]) -> Result<u64, AttachError> {
        let during = "a system call ran in it";
        let sent =
            !self.stuck && self.calls.as_ref().is_some_and(|calls| calls.send(Call { number, arguments }).is_ok());
        if !sent {
            return Err(self.no_answer(during));
        }
        match self.answers.recv_timeout(PATIENCE) {
            Ok(Answer::Returned(result)) => {
                self.stuck = matches!(result, Err(AttachError::Stuck { .. }));
                result
            }
            _ => Err(self.no_answer(during)),
        }
    }

    /// Returns a copy of a descriptor of the process, as [`Process::take_descriptor`] does.
    ///
    /// # Errors
    /// Those of [`Process::take_descriptor`].
    pub fn take_descriptor(&self, number: i32) -> Result<OwnedFd, AttachError> {
        self.process.take_descriptor(number)
    }

    /// Lets the thread run on, and returns how long it was stopped. Time in which it ran between two stops does not count.
    ///
    /// # Errors
    /// [`AttachError::Ended`] and [`AttachError::Replaced`]: the thread has ended.
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
                return Err(self.no_answer("its main thread was released"));
            }
        };
        self.wait_until_untraced();
        released
    }

    /// Waits until the tracing thread has ended and the kernel has detached the traced thread, which happens a little later.
    fn wait_until_untraced(&mut self) {
        let Some(Ok(tid)) = self.tracer.take().map(JoinHandle::join) else { return };
        let deadline = Instant::now() + LIMIT;
        while self.process.tracer() == tid && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }

    /// Returns the error for a tracing thread that has ended, or that does not answer because it waits for a system call to return.
    fn no_answer(&self, during: &'static str) -> AttachError {
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
            tracing::debug!(pid = self.process.pid(), %error, "the thread could not be released");
        }
    }
}

/// Runs the tracing thread.
fn trace(process: &Process, calls: &Receiver<Call>, answers: &Sender<Answer>) {
    // The caller may not wait for an answer any more; the thread's registers are restored all the same.
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
            // Stuck: from here on this thread only waits for the call's end.
            break;
        }
    }
    let _ = answers.send(Answer::Released(tracee.release()));
}
