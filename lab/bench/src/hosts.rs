//! Two hosts on one machine, for the demo and the benchmarks: runs the `sterna` program as a child process on each side, optionally
//! in network namespaces and on fixed CPUs, and collects its output and its resource usage.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::net::{Link, Network, run_in};
use sterna_qemu_lab::usage::Usage;

/// How often a wait checks for cancellation.
const SLICE: Duration = Duration::from_millis(200);

/// Why the demo or a benchmark could not continue.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct HostsError(pub(crate) String);

impl From<sterna_qemu_lab::Error> for HostsError {
    fn from(error: sterna_qemu_lab::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<sterna_qemu::qmp::QmpError> for HostsError {
    fn from(error: sterna_qemu::qmp::QmpError) -> Self {
        Self(error.to_string())
    }
}

/// Prefixes an error with the action that failed.
pub(crate) fn doing<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> HostsError {
    move |error| HostsError(format!("{what}: {error}"))
}

/// Which of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The source.
    A,
    /// The destination.
    B,
}

/// Two hosts, and the network between them.
#[derive(Debug)]
pub(crate) struct Hosts {
    network: Option<Network>,
    /// How many CPUs each host has to itself, if they are fixed.
    cpus: Option<u16>,
}

impl Hosts {
    /// Returns two hosts joined by the loopback interface.
    pub(crate) fn loopback() -> Self {
        Self { network: None, cpus: None }
    }

    /// Makes two network namespaces with a virtual cable.
    ///
    /// # Errors
    /// This user may not make them.
    pub(crate) fn namespaces(link: Link) -> Result<Self, sterna_qemu_lab::Error> {
        Ok(Self { network: Some(Network::new(link)?), cpus: None })
    }

    /// Changes the cable between two namespaces, also while it is in use. Does nothing without namespaces.
    ///
    /// # Errors
    /// The kernel lacks a queueing discipline.
    pub(crate) fn set_link(&self, link: Link) -> Result<(), sterna_qemu_lab::Error> {
        self.network.as_ref().map_or(Ok(()), |network| network.set_link(link))
    }

    /// Puts all of A on the first `cpus` CPUs of the machine's first half, and all of B on those of its second half:
    /// neighbours are often two threads of one core, even if a virtual machine does not see that.
    pub(crate) fn pinned(self, cpus: u16) -> Self {
        Self { cpus: Some(cpus), ..self }
    }

    /// Returns the namespace of a host, if it has one.
    pub(crate) fn namespace(&self, side: Side) -> Option<String> {
        let network = self.network.as_ref()?;
        Some(match side {
            Side::A => network.a().to_owned(),
            Side::B => network.b().to_owned(),
        })
    }

    /// Returns the CPUs of a host, as `taskset -c` reads them, if they are fixed.
    pub(crate) fn cpus(&self, side: Side) -> Option<String> {
        self.cpus.map(|cpus| match side {
            Side::A => format!("0-{}", cpus - 1),
            Side::B => {
                let all = std::thread::available_parallelism().map_or(1, usize::from);
                let first = (all / 2).max(usize::from(cpus));
                format!("{first}-{}", first + usize::from(cpus) - 1)
            }
        })
    }

    /// Returns the address under which A reaches B.
    pub(crate) fn address_b(&self) -> IpAddr {
        match self.network {
            Some(_) => Network::ADDRESS_B.into(),
            None => Ipv4Addr::LOCALHOST.into(),
        }
    }

    /// Returns the bytes that A's interface has sent so far, including headers; none on the loopback interface, which others use, too.
    ///
    /// # Errors
    /// The namespace has lost its interface.
    pub(crate) fn wire_bytes(&self) -> Result<Option<f64>, HostsError> {
        let Some(namespace) = self.namespace(Side::A) else { return Ok(None) };
        // `/proc/net` is that of the reader's namespace.
        let output = run_in(&namespace, "cat").arg("/proc/net/dev").output().map_err(doing("reading /proc/net/dev"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // Eight fields of what was received, then bytes sent (proc_pid_net(5)).
        let line = text.lines().find_map(|line| line.trim_start().strip_prefix("eth0:"));
        let bytes = line.and_then(|line| line.split_whitespace().nth(8)?.parse().ok());
        bytes.map(Some).ok_or_else(|| HostsError(format!("/proc/net/dev of {namespace} has no eth0")))
    }

    /// Returns a command that runs `sterna` on one of the hosts; options follow. The process is the program itself, not a wrapper.
    ///
    /// # Errors
    /// The program has not been built.
    pub(crate) fn sterna(&self, side: Side) -> Result<Command, HostsError> {
        Ok(self.command(side, &program("sterna", "STERNA_PROGRAM", "sterna-cli")?))
    }

    /// Returns the same for this program.
    ///
    /// # Errors
    /// This program's own path is unknown.
    pub(crate) fn bench(&self, side: Side) -> Result<Command, HostsError> {
        Ok(self.command(side, &own_path()?))
    }

    /// Returns the same for another program.
    pub(crate) fn command(&self, side: Side, program: &Path) -> Command {
        let mut words: Vec<&OsStr> = Vec::new();
        let cpus = self.cpus(side);
        if let Some(cpus) = &cpus {
            words.extend(["taskset", "-c", cpus].map(OsStr::new));
        }
        words.push(program.as_os_str());
        let mut command = match self.namespace(side) {
            Some(namespace) => run_in(&namespace, words[0]),
            None => Command::new(words[0]),
        };
        command.args(&words[1..]);
        command
    }
}

/// Returns the path of a program that lies beside this one, or that the environment variable `variable` names.
///
/// # Errors
/// There is no such file; the text tells how to build it from the package `package`.
pub(crate) fn program(name: &str, variable: &str, package: &str) -> Result<PathBuf, HostsError> {
    let path = match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => own_path()?.with_file_name(name),
    };
    if path.is_file() {
        return Ok(path);
    }
    Err(HostsError(format!(
        "{} is not there: build it with `cargo build --release -p {package}`, or name it by {variable}",
        path.display()
    )))
}

fn own_path() -> Result<PathBuf, HostsError> {
    std::env::current_exe().map_err(doing("finding this program's own path"))
}

/// A line that a child wrote.
enum Line {
    Error(String),
    Output(String),
}

/// A sterna process, killed when this is dropped.
pub(crate) struct Sterna {
    name: String,
    child: Child,
    lines: Receiver<Line>,
    errors: Vec<String>,
    output: Vec<String>,
}

/// The results of a sterna process that has ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// Its report, line by line.
    pub(crate) output: Vec<String>,
    /// Its notes and errors.
    pub(crate) errors: Vec<String>,
    /// Its resource usage, from its start to its end.
    pub(crate) usage: Usage,
}

impl Sterna {
    /// Starts `command`. If `shown`, prints its notes and errors, each after `name`.
    ///
    /// # Errors
    /// The command cannot be started.
    pub(crate) fn start(name: &str, mut command: Command, shown: bool) -> Result<Self, HostsError> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(doing(format_args!("starting {name}")))?;
        let (sender, lines) = channel();
        if let (Some(errors), Some(output)) = (child.stderr.take(), child.stdout.take()) {
            // Shown at once, while the caller waits for other events.
            let name = shown.then(|| name.to_owned());
            read_lines(errors, sender.clone(), move |line| {
                if let Some(name) = &name {
                    // The reader of a pipe may have closed it.
                    let _ = writeln!(std::io::stdout(), "  {name}: {line}");
                }
                Line::Error(line)
            });
            read_lines(output, sender, Line::Output);
        }
        Ok(Self { name: name.to_owned(), child, lines, errors: Vec::new(), output: Vec::new() })
    }

    /// Returns the process's number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the process listens. Returns the address.
    ///
    /// # Errors
    /// The process ends first, or does not listen in time.
    pub(crate) fn address(&mut self, limit: Duration, cancel: &Cancel) -> Result<String, HostsError> {
        const PREFIX: &str = "listening on ";
        let deadline = Instant::now() + limit;
        loop {
            if let Some((_, address)) = self.errors.iter().find_map(|line| line.split_once(PREFIX)) {
                return Ok(address.to_owned());
            }
            if !self.receive(cancel)? {
                return Err(HostsError(format!("{} ended: {}", self.name, self.errors.join("; "))));
            }
            if Instant::now() >= deadline {
                return Err(HostsError(format!("{} does not listen after {} s", self.name, limit.as_secs())));
            }
        }
    }

    /// Waits for the end of the process. On cancellation it is sent SIGTERM, and still waited for: both sides must settle.
    ///
    /// # Errors
    /// The process does not end in time; it is then killed.
    pub(crate) fn finish(mut self, limit: Duration, cancel: &Cancel) -> Result<Ended, HostsError> {
        let deadline = Instant::now() + limit;
        let mut asked = false;
        loop {
            match self.receive(cancel) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) if asked => {}
                Err(_) => {
                    asked = true;
                    let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
                }
            }
            if Instant::now() >= deadline {
                return Err(HostsError(format!("{} has not ended after {} s", self.name, limit.as_secs())));
            }
        }
        // The usage of an ended process can be read until it is waited for.
        let pid = Pid::from_child(&self.child);
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
        {
        }
        let usage = Usage::of(self.child.id())?;
        let status = self.child.wait().map_err(doing(format_args!("waiting for {}", self.name)))?;
        if cancel.is_cancelled() {
            return Err(cancelled());
        }
        Ok(Ended { status, output: std::mem::take(&mut self.output), errors: std::mem::take(&mut self.errors), usage })
    }

    /// Receives one line, or waits for a while. Returns false once both streams have ended.
    fn receive(&mut self, cancel: &Cancel) -> Result<bool, HostsError> {
        match self.lines.recv_timeout(SLICE) {
            Ok(Line::Error(line)) => self.errors.push(line),
            Ok(Line::Output(line)) => self.output.push(line),
            Err(RecvTimeoutError::Timeout) if cancel.is_cancelled() => return Err(cancelled()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(false),
        }
        Ok(true)
    }
}

impl Drop for Sterna {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_lines(stream: impl Read + Send + 'static, lines: Sender<Line>, kind: impl Fn(String) -> Line + Send + 'static) {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if lines.send(kind(line)).is_err() {
                return;
            }
        }
    });
}

fn cancelled() -> HostsError {
    HostsError("cancelled".into())
}

/// Waits for an event of a guest, and checks for cancellation meanwhile: calls `wait` with short limits until it returns
/// something other than a timeout.
///
/// # Errors
/// The error of `wait`; its last timeout when `limit` has passed.
pub(crate) fn patiently<T>(
    limit: Duration,
    cancel: &Cancel,
    mut wait: impl FnMut(Duration) -> Result<T, sterna_qemu_lab::Error>,
) -> Result<T, HostsError> {
    let deadline = Instant::now() + limit;
    loop {
        match wait(SLICE) {
            Err(sterna_qemu_lab::Error::Timeout { .. }) if cancel.is_cancelled() => return Err(cancelled()),
            Err(sterna_qemu_lab::Error::Timeout { waiting_for, last, .. }) if Instant::now() >= deadline => {
                return Err(sterna_qemu_lab::Error::Timeout { waiting_for, limit, last }.into());
            }
            Err(sterna_qemu_lab::Error::Timeout { .. }) => {}
            answer => return Ok(answer?),
        }
    }
}
