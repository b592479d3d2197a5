//! A process in a role, as the test sees it: started, controlled, and compared with its earlier state.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags};
use sterna_attach::{AttachError, Process, TakenUserfault, UserfaultOrigin, take_userfault};

/// How long each stop of a target's thread took, over all cases.
static STOPS: Mutex<Vec<Duration>> = Mutex::new(Vec::new());

/// Polls until `done` returns true, for what gives no event: files of /proc, and statistics. Returns false if that never happens.
pub(crate) fn eventually(mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(300);
    while !done() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    true
}

/// A process in a role. It is killed when this is dropped.
pub(crate) struct Target {
    child: Child,
    pidfd: OwnedFd,
    ended: Option<ExitStatus>,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    /// What the role printed when it was ready.
    pub(crate) ready: String,
}

impl Target {
    /// Starts a role and waits until it is ready.
    pub(crate) fn start(role: &[&str]) -> Target {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("--role").args(role);
        Target::start_command(command)
    }

    pub(crate) fn start_command(mut command: Command) -> Target {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let pid = Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let mut target = Target { child, pidfd, ended: None, stdin, stdout, ready: String::new() };
        let ready = target.line();
        target.ready = ready.strip_prefix("ready").unwrap_or_else(|| panic!("not ready: {ready}")).trim().to_owned();
        target
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn hold(&self) -> Process {
        Process::open(self.pid()).unwrap()
    }

    /// Returns the next line that the role prints; empty at its end.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Sends the role a line.
    pub(crate) fn tell(&mut self, line: &str) {
        self.stdin.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Sends the role a line, unless it has ended already.
    pub(crate) fn tell_if_it_lives(&mut self, line: &str) {
        let _ = writeln!(self.stdin.as_mut().unwrap(), "{line}");
    }

    /// Sends the role a line and returns its answer.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.line()
    }

    /// Waits until the main thread waits in this system call; 219, `restart_syscall`, counts as any call with a time limit.
    pub(crate) fn wait_for_call(&self, number: libc::c_long) {
        self.wait_until(|target| {
            let call = target.file("syscall");
            let call = call.split(' ').next().unwrap_or("");
            call == number.to_string() || call == libc::SYS_restart_syscall.to_string()
        });
    }

    /// Polls until the condition holds.
    pub(crate) fn wait_until(&self, so: impl Fn(&Target) -> bool) {
        assert!(eventually(|| so(self)), "waited too long: {} {}", self.file("status"), self.file("syscall"));
    }

    /// Returns a file of its directory in /proc.
    pub(crate) fn file(&self, name: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{name}", self.pid())).unwrap_or_default()
    }

    /// Returns a field of its status.
    pub(crate) fn status(&self, field: &str) -> String {
        let status = self.file("status");
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_default().trim().to_owned()
    }

    /// Returns its open descriptors, and the file of each.
    pub(crate) fn descriptors(&self) -> Vec<(String, String)> {
        let directory = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let mut found: Vec<_> = directory
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let link = std::fs::read_link(entry.path()).ok()?;
                Some((entry.file_name().into_string().unwrap(), link.to_string_lossy().into_owned()))
            })
            .collect();
        found.sort();
        found
    }

    /// Takes a userfaultfd of it `rounds` times, and checks each time that nothing is left in the process.
    pub(crate) fn take(&self, rounds: usize) {
        let process = self.hold();
        let before = self.descriptors();
        for round in 0..rounds {
            let taken = take_userfault(&process, UserfaultOrigin::SystemCall);
            self.note(&taken.unwrap_or_else(|error| panic!("round {round}: {error}")));
            assert_eq!(self.status("TracerPid"), "0");
            assert_eq!(self.descriptors(), before);
        }
    }

    /// Takes a userfaultfd of it, which must fail, and checks that nothing is left in the process.
    pub(crate) fn cannot_take(&self) -> AttachError {
        let before = self.descriptors();
        let error = take_userfault(&self.hold(), UserfaultOrigin::SystemCall).unwrap_err();
        println!("  {error}");
        assert_eq!(self.descriptors(), before);
        error
    }

    pub(crate) fn note(&self, taken: &TakenUserfault) {
        STOPS.lock().unwrap().push(taken.stopped);
    }

    pub(crate) fn signal(&self, signal: libc::c_int) {
        crate::roles::kill(self.pid(), signal);
    }

    /// Returns whether it has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.wait(libc::WNOHANG).is_some()
    }

    /// Ends the role, and returns its result. It must end by itself, successfully.
    pub(crate) fn finish(mut self) -> String {
        self.stdin = None;
        let result = self.line();
        let status = self.wait(0).unwrap();
        assert!(status.success(), "{status}: {result}");
        result.strip_prefix("result ").unwrap_or_else(|| panic!("no result: {result}")).to_owned()
    }

    /// Waits for its end, if it has not been waited for; returns none where it has not ended and `options` has `WNOHANG`. The end is first seen
    /// by the pidfd: before it, waitpid(2) would also take the reports of stops that another thread, which holds the process, waits for.
    fn wait(&mut self, options: libc::c_int) -> Option<ExitStatus> {
        if self.ended.is_none() {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let limit = (options & libc::WNOHANG != 0).then_some(&now);
            if poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], limit).unwrap() == 0 {
                return None;
            }
            let mut status = 0;
            // SAFETY: room for a status.
            let ended = unsafe { libc::waitpid(self.pid(), &mut status, 0) };
            assert_eq!(ended, self.pid(), "{}", std::io::Error::last_os_error());
            self.ended = Some(ExitStatus::from_raw(status));
        }
        self.ended
    }

    /// Kills it.
    pub(crate) fn kill(mut self) -> ExitStatus {
        if self.ended.is_none() {
            self.signal(libc::SIGKILL);
        }
        let status = self.wait(0).unwrap();
        assert!(status.signal().is_some());
        status
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Its number may be another process's once it has been waited for.
        if self.ended.is_none() {
            self.signal(libc::SIGKILL);
            self.wait(0);
        }
    }
}

/// Prints how long threads were stopped.
pub(crate) fn print_stops() {
    let mut stops = STOPS.lock().unwrap().clone();
    stops.sort();
    if let Some(longest) = stops.last() {
        let at = |part: usize| stops[(stops.len() - 1) * part / 100];
        println!("\nstops: {}, median {:?}, 99 % within {:?}, longest {longest:?}", stops.len(), at(50), at(99));
    }
}
