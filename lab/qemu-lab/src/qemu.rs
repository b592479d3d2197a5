//! A running QEMU: started with its sockets already open, and killed when its value is dropped.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid};
use tempfile::TempDir;

use crate::tools::guest_program;
use crate::{
    Accel, Console, Error, Guest, GuestConsole, HeldDisk, QemuOptions, Role, Tools, boot_sector, initramfs, process,
};

/// How long QEMU may take to send its QMP greeting. Usually that takes a tenth of a second; preallocating memory takes longer, and so does
/// everything on a busy machine.
const GREETING: Duration = Duration::from_secs(180);

/// QEMU's error if the kernel refuses a ring for [`crate::Aio::IoUring`].
const NO_IO_URING: &str = "failed to init linux io_uring ring";
/// The error of `unshare` if namespaces may not be made.
const NO_PID_NAMESPACE: &str = "unshare: unshare failed";
/// How long a QEMU that has closed its monitor may take to end.
const END: Duration = Duration::from_secs(10);
/// How many lines of its standard error tell how a QEMU ended.
const LAST_WORDS: usize = 8;
/// How long a killed QEMU with held disk reads may take to end before these reads are answered.
const END_WITHOUT_READS: Duration = Duration::from_millis(500);

/// A QEMU process with its console. It is killed when this is dropped.
pub struct Qemu {
    /// QEMU, or the `unshare` that has started it in a namespace and ends with it.
    child: Child,
    pid: u32,
    pidfd: OwnedFd,
    console: Console,
    directory: TempDir,
    qmp_path: PathBuf,
    accel: Accel,
    memory: u64,
    held_disks: Vec<HeldDisk>,
}

impl Qemu {
    /// As [`Qemu::start`], by `accel`, which is KVM or TCG.
    pub(crate) fn start_by(options: &QemuOptions, accel: Accel) -> Result<Qemu, Error> {
        let tools = Tools::locate()?;
        let directory = tempfile::Builder::new()
            .prefix("sterna-qemu-")
            .tempdir()
            .map_err(Error::io("making a private directory for QEMU"))?;
        let qmp_path = options.qmp_path.clone().unwrap_or_else(|| directory.path().join("qmp.sock"));

        // QEMU inherits a listening QMP socket and a connected console, so no connection has to be retried.
        let listener = UnixListener::bind(&qmp_path).map_err(Error::path("listening on", &qmp_path))?;
        let (near, far) = UnixStream::pair().map_err(Error::io("making a socket pair for the console"))?;
        let mut inherited = vec![OwnedFd::from(listener), OwnedFd::from(far)];

        let mut words = Vec::new();
        if let Some(namespace) = &options.namespace {
            words.extend(["ip", "netns", "exec", namespace].map(str::to_owned));
        }
        if let Some(directory) = &options.own_directory {
            let script = "mount -t tmpfs -o mode=1777 sterna-qemu-lab \"$1\" && shift && exec \"$@\"";
            words.extend(["unshare", "--mount", "sh", "-c", script, "sh"].map(str::to_owned));
            words.push(directory.display().to_string());
        }
        if options.own_processes {
            words.extend(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"].map(str::to_owned));
        }
        if let Some(cpus) = &options.host_cpus {
            words.extend(["taskset", "-c", cpus].map(str::to_owned));
        }
        if let Some(user) = options.user {
            let user = user.to_string();
            words.extend(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"].map(str::to_owned));
        }
        let qemu = tools.qemu_words(options.version)?;
        words.extend(qemu.words);
        words.extend(machine_words(options, accel, &inherited));
        words.extend(options.disks.iter().enumerate().flat_map(|(number, disk)| disk.qemu_words(number)));
        words.extend(guest_words(options, &tools, directory.path(), &mut inherited)?);
        words.extend(options.extra.iter().cloned());

        let errors = directory.path().join("stderr");
        let errors_file = File::create(&errors).map_err(Error::path("creating", &errors))?;
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .envs(qemu.environment)
            .stdin(Stdio::null())
            .stdout(errors_file.try_clone().map_err(Error::path("duplicating", &errors))?)
            .stderr(errors_file);
        tracing::debug!(command = %words.join(" "), "starting QEMU");
        let console = Console::new(near)?;
        let child = process::spawn(command, inherited).map_err(Error::io(format!("starting {}", words[0])))?;
        let pidfd = pidfd_open(pid_of(&child), PidfdFlags::empty())
            .map_err(|error| Error::Io { action: "watching QEMU".into(), source: error.into() })?;
        let held_disks = options.disks.iter().filter_map(|disk| disk.held.clone()).collect();
        let (memory, pid) = (options.memory, child.id());
        let mut qemu = Qemu { child, pid, pidfd, console, directory, qmp_path, accel, memory, held_disks };
        match qemu.wait_greeting() {
            Ok(()) => {
                if options.own_processes {
                    qemu.pid = only_child(pid)?;
                }
                Ok(qemu)
            }
            Err(Error::QemuEnded { output, .. }) if output.contains(NO_PID_NAMESPACE) => {
                Err(Error::Unavailable { what: "a pid namespace".into(), reason: output })
            }
            Err(Error::QemuEnded { output, .. }) if output.contains(NO_IO_URING) => {
                Err(Error::Unavailable { what: "a disk by io_uring".into(), reason: output })
            }
            Err(error) => Err(error),
        }
    }

    /// Connects once and reads the greeting: QEMU has then accepted all its options. Afterwards the socket, which accepts one
    /// client at a time, is free again.
    fn wait_greeting(&self) -> Result<(), Error> {
        let ended = |reason: String| {
            // It closes its sockets a moment before it ends.
            let _ = self.poll_exit(END);
            let output = format!("{reason}{}", self.end().unwrap_or_else(|| self.standard_error()));
            Error::QemuEnded { waiting_for: "its QMP greeting".into(), output }
        };
        let stream = UnixStream::connect(&self.qmp_path).map_err(|error| ended(format!("{error}. ")))?;
        stream.set_read_timeout(Some(GREETING)).map_err(Error::io("setting a read timeout"))?;
        let mut greeting = String::new();
        match BufReader::new(stream).read_line(&mut greeting) {
            Ok(_) if greeting.contains("\"QMP\"") => Ok(()),
            Ok(_) => Err(ended(String::new())),
            Err(error) => Err(Error::QemuEnded {
                waiting_for: "its QMP greeting".into(),
                output: format!("{error}. {}", self.end().unwrap_or_else(|| self.standard_error())),
            }),
        }
    }

    /// Returns the process's number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the path of its QMP socket, which accepts one client at a time.
    #[must_use]
    pub fn qmp_path(&self) -> &Path {
        &self.qmp_path
    }

    /// Returns a private directory, for example for migration sockets. It is removed when this value is dropped.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns whether it runs on KVM or TCG.
    #[must_use]
    pub fn accel(&self) -> Accel {
        self.accel
    }

    /// Returns the size of guest RAM in bytes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.memory
    }

    /// Returns the guest's serial console.
    #[must_use]
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Returns the console with the test guest's commands and lines.
    #[must_use]
    pub fn guest(&self) -> GuestConsole<'_> {
        GuestConsole::new(&self.console)
    }

    /// Returns QEMU's standard error and output so far.
    #[must_use]
    pub fn standard_error(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("stderr")).unwrap_or_default().trim().to_owned()
    }

    /// Returns how the process ended, with its last lines, if it has ended by itself and was not waited for.
    #[must_use]
    pub fn end(&self) -> Option<String> {
        // It stays a zombie, so that `wait_exit` gets its status.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(self.pidfd.as_fd()), options).ok()??;
        let how = match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "an unknown status".into(),
        };
        let words = self.standard_error();
        let lines: Vec<&str> = words.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST_WORDS)..].join("\n");
        let last = if last.is_empty() { "it said nothing" } else { last.as_str() };
        Some(format!("QEMU (process {}) ended with {how}: {last}", self.pid()))
    }

    /// Returns whether the process still runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !matches!(self.poll_exit(Duration::ZERO), Ok(true))
    }

    /// Waits until the process ends by itself, as after `quit` on QMP.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `limit`.
    pub fn wait_exit(&mut self, limit: Duration) -> Result<ExitStatus, Error> {
        if !self.poll_exit(limit)? {
            let last = self.standard_error();
            return Err(Error::Timeout { waiting_for: "end of QEMU".into(), limit, last });
        }
        self.child.wait().map_err(Error::io("waiting for QEMU"))
    }

    fn poll_exit(&self, limit: Duration) -> Result<bool, Error> {
        let limit =
            rustix::time::Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
        let mut events = [PollFd::new(&self.pidfd, PollFlags::IN)];
        loop {
            match poll(&mut events, Some(&limit)) {
                Err(rustix::io::Errno::INTR) => {}
                answer => {
                    let count =
                        answer.map_err(|error| Error::Io { action: "watching QEMU".into(), source: error.into() })?;
                    return Ok(count > 0);
                }
            }
        }
    }

    /// Kills the process at once, as a power failure of its host would, and waits for its end. If the process does not end because a
    /// [`HeldDisk`] holds reads of it, these are answered: the kernel ends no process before its direct reads have ended.
    pub fn kill(&mut self) {
        // The process has not been reaped yet, so the group is still its own.
        if let Ok(None) = self.child.try_wait() {
            let _ = kill_process_group(pid_of(&self.child), Signal::KILL);
            while !self.held_disks.is_empty() && matches!(self.poll_exit(END_WITHOUT_READS), Ok(false)) {
                for disk in &self.held_disks {
                    disk.release_all();
                }
            }
            let _ = self.child.wait();
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // The test that fails may have noticed only that its QEMU does not answer.
        if std::thread::panicking()
            && let Some(end) = self.end()
        {
            eprintln!("{end}");
        }
        self.kill();
        if self.qmp_path.parent() != Some(self.directory.path()) {
            let _ = std::fs::remove_file(&self.qmp_path);
        }
    }
}

/// Returns the only child of a process with one thread (proc_tid_children(5)).
fn only_child(pid: u32) -> Result<u32, Error> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let children = std::fs::read_to_string(&path).map_err(Error::io(format!("reading {path}")))?;
    children.trim().parse().map_err(|_| Error::Io {
        action: format!("looking for the child of process {pid}"),
        source: std::io::Error::other(format!("its children: {children:?}")),
    })
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

fn machine_words(options: &QemuOptions, accel: Accel, inherited: &[OwnedFd]) -> Vec<String> {
    let [qmp, console] = inherited else { unreachable!("the two sockets made above") };
    let mut words: Vec<String> =
        ["-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"].map(str::to_owned).to_vec();
    words.extend(options.memory_words());
    let mut pair = |name: &str, value: String| words.extend([name.to_owned(), value]);
    pair("-accel", accel.name().to_owned());
    pair("-smp", options.cpus.to_string());
    pair("-chardev", format!("socket,id=qmp,fd={},server=on,wait=off", qmp.as_raw_fd()));
    pair("-mon", "chardev=qmp,mode=control".to_owned());
    pair("-chardev", format!("socket,id=console,fd={}", console.as_raw_fd()));
    pair("-serial", "chardev:console".to_owned());
    if let Some(uuid) = &options.uuid {
        pair("-uuid", uuid.clone());
    }
    if options.role == Role::Incoming {
        pair("-incoming", "defer".to_owned());
    }
    words
}

/// The words that give the machine its guest. A destination gets the same: its firmware blocks must be of the same sizes.
fn guest_words(
    options: &QemuOptions,
    tools: &Tools,
    directory: &Path,
    inherited: &mut Vec<OwnedFd>,
) -> Result<Vec<String>, Error> {
    match &options.guest {
        Guest::None => Ok(Vec::new()),
        Guest::BootSector => {
            let disk = boot_sector::disk().map_err(Error::io("making a disk with a boot sector"))?;
            // Not locked, as a test may run both guests. An IDE disk cannot be read-only.
            let drive = format!("file=/proc/self/fd/{},format=raw,if=ide,file.locking=off", disk.as_raw_fd());
            inherited.push(disk);
            Ok(vec!["-drive".into(), drive])
        }
        Guest::Linux(settings) => {
            let program = guest_program()?;
            let init = std::fs::read(&program).map_err(Error::path("reading", &program))?;
            let needed = settings.share.is_some() || settings.disk_load.is_some() || settings.balloon;
            let modules = if needed { tools.modules()? } else { Vec::new() };
            for (needed, module) in [(settings.disk_load.is_some(), "virtio_blk"), (settings.balloon, "virtio_balloon")]
            {
                let is_it = |path: &PathBuf| path.to_string_lossy().ends_with(&format!("{module}.ko"));
                if needed && !modules.iter().any(is_it) {
                    return Err(Error::missing(format!("the guests' module {module}"), &modules));
                }
            }
            let named = |path: &PathBuf| format!("modules/{}", path.file_name().unwrap_or_default().display());
            let files = settings.files.iter().enumerate().map(|(number, path)| (format!("file-{number}"), path));
            let files = files.chain(modules.iter().map(|path| (named(path), path)));
            let files =
                files.map(|(name, path)| Ok((name, std::fs::read(path).map_err(Error::path("reading", path))?)));
            let files = files.collect::<Result<Vec<_>, Error>>()?;
            let archive = directory.join("initramfs");
            std::fs::write(&archive, initramfs::with_init(&init, &files)).map_err(Error::path("writing", &archive))?;
            Ok(vec![
                "-kernel".into(),
                tools.kernel()?.display().to_string(),
                "-initrd".into(),
                archive.display().to_string(),
                "-append".into(),
                settings.command_line(options.disks.len()),
            ])
        }
    }
}
