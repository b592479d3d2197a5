//! A process, held so that its number cannot come to mean another process, and its files in `/proc`.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Access, AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::AttachError;
use crate::system::Tid;

/// A process, held by a pidfd (pidfd_open(2)) and by its directory in `/proc`, so that a later process with the same number is never
/// mistaken for it.
///
/// Holding does not affect the process.
#[derive(Debug, Clone)]
pub struct Process {
    held: Arc<Held>,
}

#[derive(Debug)]
struct Held {
    pid: i32,
    pidfd: OwnedFd,
    directory: OwnedFd,
}

impl Process {
    /// Holds the process of this number.
    ///
    /// # Errors
    /// [`AttachError::NoProcess`], [`AttachError::NotAProcess`] and [`AttachError::Myself`] for an unsuitable number;
    /// [`AttachError::Kernel`] before Linux 5.3; [`AttachError::Io`].
    pub fn open(pid: i32) -> Result<Process, AttachError> {
        let Some(number) = Some(pid).filter(|&pid| pid > 0).and_then(Pid::from_raw) else {
            return Err(AttachError::NoProcess { pid });
        };
        if number == rustix::process::getpid() {
            return Err(AttachError::Myself { pid });
        }
        let failed = |what| move |error: Errno| AttachError::Io { pid, what, source: error.into() };
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty()).map_err(|error| match error {
            Errno::SRCH => AttachError::NoProcess { pid },
            // EINVAL until Linux 6.8, ENOENT since.
            Errno::INVAL | Errno::NOENT => AttachError::NotAProcess { pid },
            Errno::NOSYS => AttachError::Kernel { call: "pidfd_open", since: "5.3" },
            error => failed("open a pidfd of it")(error),
        })?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory =
            rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty()).map_err(|error| match error {
                Errno::NOENT => AttachError::NoProcess { pid },
                error => failed("open its directory in /proc")(error),
            })?;
        let process = Process { held: Arc::new(Held { pid, pidfd, directory }) };
        // A living process keeps its number, so the directory is this process's.
        if process.has_ended() { Err(AttachError::NoProcess { pid }) } else { Ok(process) }
    }

    /// Returns the number of the process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.held.pid
    }

    /// Returns the pidfd; it becomes readable when the process has ended.
    #[must_use]
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.held.pidfd.as_fd()
    }

    /// Returns whether the process has ended. A zombie, for which its parent has not waited yet, has ended, too.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let mut ends = [PollFd::new(&self.held.pidfd, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut ends, Some(&now)), Ok(1..))
    }

    /// Returns a copy of the process's descriptor of this number, by pidfd_getfd(2): the same open file, close-on-exec here. The process
    /// need not be stopped for it.
    ///
    /// # Errors
    /// [`AttachError::Refused`] with `EBADF` if the number is not open there; [`AttachError::NotPermitted`] without the right to trace
    /// the process; [`AttachError::Ended`]; [`AttachError::Kernel`] before Linux 5.6.
    pub fn take_descriptor(&self, number: i32) -> Result<OwnedFd, AttachError> {
        let pid = self.held.pid;
        rustix::process::pidfd_getfd(&self.held.pidfd, number, PidfdGetfdFlags::empty()).map_err(|error| match error {
            Errno::NOSYS => AttachError::Kernel { call: "pidfd_getfd", since: "5.6" },
            Errno::SRCH => AttachError::Ended { pid, during: "a descriptor was taken from it" },
            Errno::PERM => AttachError::NotPermitted { pid, reason: self.why_not_permitted() },
            error => {
                AttachError::Refused { call: format!("pidfd_getfd of descriptor {number}"), pid, source: error.into() }
            }
        })
    }

    /// Reads a file of the process's directory in `/proc`.
    pub(crate) fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        self.open_file(name)?.read_to_end(&mut content)?;
        Ok(content)
    }

    /// Opens a file of the process's directory in `/proc` for reading.
    pub(crate) fn open_file(&self, name: &str) -> io::Result<File> {
        self.open_file_for(name, OFlags::RDONLY)
    }

    /// Opens a file of the process's directory in `/proc` for reading and writing.
    pub(crate) fn open_to_write(&self, name: &str) -> io::Result<File> {
        self.open_file_for(name, OFlags::RDWR)
    }

    fn open_file_for(&self, name: &str, access: OFlags) -> io::Result<File> {
        Ok(rustix::fs::openat(&self.held.directory, name, access | OFlags::CLOEXEC, Mode::empty())?.into())
    }

    /// Returns a field of the main thread's `status`; empty if there is none.
    pub(crate) fn status(&self, field: &str) -> String {
        self.status_of(self.held.pid, field)
    }

    /// Returns a field of a thread's `status`; empty if there is none.
    fn status_of(&self, tid: Tid, field: &str) -> String {
        field_of(&self.read(&format!("task/{tid}/status")).unwrap_or_default(), field)
    }

    /// Returns the tracer of the main thread, or 0.
    pub(crate) fn tracer(&self) -> i32 {
        self.tracer_of(self.held.pid)
    }

    /// Returns the tracer of a thread of the process, or 0.
    pub(crate) fn tracer_of(&self, tid: Tid) -> i32 {
        self.status_of(tid, "TracerPid").parse().unwrap_or(0)
    }

    /// Returns whether the main thread has ended, alone or with all other threads.
    pub(crate) fn main_thread_has_ended(&self) -> bool {
        self.thread_has_ended(self.held.pid)
    }

    /// Returns whether the process has no living thread of this number.
    pub(crate) fn thread_has_ended(&self, tid: Tid) -> bool {
        let state = self.status_of(tid, "State");
        state.is_empty() || state.starts_with(['Z', 'X'])
    }

    /// Returns whether `/proc` lists a thread of this number, which may have ended.
    pub(crate) fn has_thread(&self, tid: Tid) -> bool {
        rustix::fs::accessat(&self.held.directory, format!("task/{tid}"), Access::EXISTS, AtFlags::empty()).is_ok()
    }

    /// Returns why tracing the process is not permitted, as far as that is visible, and what to do (ptrace(2), "Ptrace access mode
    /// checking").
    pub(crate) fn why_not_permitted(&self) -> String {
        let own = std::fs::read("/proc/self/status").unwrap_or_default();
        // CAP_SYS_PTRACE is capability 19 (capability.h).
        let capable = u64::from_str_radix(&field_of(&own, "CapEff"), 16).is_ok_and(|set| set & 1 << 19 != 0);
        let mut reasons = Vec::new();
        let (mine, its) = (field_of(&own, "Uid"), self.status("Uid"));
        if !capable && first_word(&mine) != first_word(&its) {
            let (mine, its) = (first_word(&mine), first_word(&its));
            reasons.push(format!("this program runs as user {mine} without CAP_SYS_PTRACE, the process as user {its}: run as root, or as that user"));
        }
        if let Ok(scope) = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
            match scope.trim() {
                "1" if !capable => reasons.push(
                    "kernel.yama.ptrace_scope is 1 (a process may trace its own children only): run as root, give this program CAP_SYS_PTRACE, or set it to 0"
                        .into(),
                ),
                "2" if !capable => {
                    reasons.push("kernel.yama.ptrace_scope is 2 (administrators only): run as root, or give this program CAP_SYS_PTRACE".into());
                }
                "3" => reasons.push("kernel.yama.ptrace_scope is 3 (no process may trace any): only a restart of the host without that setting helps".into()),
                _ => {}
            }
        }
        let namespace = |path: &Path| std::fs::read_link(path).ok();
        let its_namespace = rustix::fs::readlinkat(&self.held.directory, "ns/user", Vec::new()).ok();
        if let (Some(mine), Ok(Some(its))) =
            (namespace(Path::new("/proc/self/ns/user")), its_namespace.map(std::ffi::CString::into_string).transpose())
            && mine.as_os_str() != its.as_str()
        {
            reasons.push(format!(
                "the process is in another user namespace ({its}): CAP_SYS_PTRACE is needed in that namespace or in one that it lies in"
            ));
        }
        if reasons.is_empty() {
            reasons.push(if capable {
                "this program has CAP_SYS_PTRACE: a security module (SELinux, AppArmor), a seccomp filter on this program, or another user namespace forbids it".into()
            } else {
                "this program lacks CAP_SYS_PTRACE, and the process changed its user, gained privileges or made itself not dumpable (prctl(2)), or a \
                 security module (SELinux, AppArmor) forbids it: run as root, or give this program CAP_SYS_PTRACE"
                    .into()
            });
        }
        reasons.join("; ")
    }
}

/// Reads exactly `bytes` of another process's memory, whose `/proc/PID/mem` is `memory`.
pub(crate) fn read_memory(memory: &File, at: u64, bytes: &mut [u8]) -> io::Result<()> {
    memory.read_exact_at(bytes, at)
}

fn first_word(text: &str) -> &str {
    text.split_whitespace().next().unwrap_or("")
}

/// Returns the value of `Field:` in a file like `/proc/PID/status`.
fn field_of(status: &[u8], field: &str) -> String {
    let status = String::from_utf8_lossy(status);
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap_or("").trim().to_owned()
}
