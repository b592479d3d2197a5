//! Two watched QEMUs: each has a second monitor, whose events show when its guest ran.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use sterna_qemu::qmp::Qmp;
use sterna_qemu_lab::{Accel, Guest, Qemu, QemuOptions, QemuVersion, boot_sector, ram::Ram, skip_if_unavailable};
use tempfile::TempDir;

use super::LONG;

/// A QEMU with a second monitor besides sterna's, by which it can be watched all the time.
pub(crate) struct Watched {
    pub(crate) qemu: Qemu,
    pub(crate) monitor: Qmp,
    /// The socket by which sterna reaches its other monitor.
    pub(crate) qmp_path: PathBuf,
    /// When it was killed, in microseconds since 1970.
    killed: Option<u64>,
    /// Whether its guest ran from the start.
    source: bool,
    /// The events STOP (false) and RESUME (true) so far, in microseconds since 1970.
    turns: RefCell<Vec<(bool, u64)>>,
}

impl Watched {
    /// Starts a QEMU; its second monitor's socket is `name` in `directory`.
    pub(crate) fn start(options: &QemuOptions, directory: &Path, name: &str) -> Result<Self, sterna_qemu_lab::Error> {
        let socket = directory.join(format!("{name}.watch"));
        let mut options = options.clone();
        options.extra.extend([
            "-chardev".into(),
            format!("socket,id=watch,path={},server=on,wait=off", socket.display()),
            "-mon".into(),
            "chardev=watch,mode=control".into(),
        ]);
        let source = options.role == sterna_qemu_lab::Role::Source;
        let qemu = Qemu::start(&options)?;
        let monitor = Qmp::connect(&socket).expect("the second monitor answers");
        let qmp_path = qemu.qmp_path().to_owned();
        Ok(Self { qemu, monitor, qmp_path, killed: None, source, turns: RefCell::default() })
    }

    /// Returns its run state; none if the process has ended.
    pub(crate) fn status(&self) -> Option<String> {
        self.monitor.status().ok()
    }

    /// Returns its run state; of a process that has ended, how it ended and its last words.
    pub(crate) fn state(&self) -> String {
        match self.monitor.status() {
            Ok(status) => status,
            Err(error) => self.qemu.end().unwrap_or_else(|| error.to_string()),
        }
    }

    /// Returns the state of its migration; none if the process has ended.
    pub(crate) fn migration_status(&self) -> Option<String> {
        self.monitor.query_migrate().ok().map(|info| info.status)
    }

    /// Returns whether its guest runs now.
    pub(crate) fn runs(&self) -> bool {
        self.status().as_deref() == Some("running")
    }

    /// Kills it, as a crash would.
    pub(crate) fn kill(&mut self) {
        self.qemu.kill();
        self.killed.get_or_insert_with(now);
    }

    /// Returns when its guest ran, in microseconds since 1970, by QEMU's own events. QEMU sends STOP after its vCPUs have
    /// stopped and RESUME before they start, so the guest was certainly paused outside of these times.
    pub(crate) fn ran(&self) -> Vec<(u64, u64)> {
        let mut turns = self.turns.borrow_mut();
        while let Ok(Some(event)) = self.monitor.next_event(Instant::now()) {
            if let "RESUME" | "STOP" = event.name.as_str() {
                turns.push((event.name == "RESUME", event.time_us.expect("QEMU tells the time")));
            }
        }
        let mut ran = Vec::new();
        let mut since = self.source.then_some(0);
        for &(runs, time) in &*turns {
            if runs {
                since = since.or(Some(time));
            } else {
                ran.extend(since.take().map(|since| (since, time)));
            }
        }
        ran.extend(since.map(|since| (since, self.killed.unwrap_or_else(now))));
        ran
    }

    /// Returns the answers to `query-migrate-capabilities` and `query-migrate-parameters`.
    pub(crate) fn migration_settings(&self) -> [Value; 2] {
        ["query-migrate-capabilities", "query-migrate-parameters"]
            .map(|command| self.monitor.execute(command, json!({})).expect("QEMU answers"))
    }

    /// Fails if another process left something in this one: a tracer, a userfaultfd, or memory that a userfaultfd still protects.
    pub(crate) fn untouched(&self) -> Result<(), String> {
        let pid = self.qemu.pid();
        let read = |file: &str| {
            std::fs::read_to_string(format!("/proc/{pid}/{file}"))
                .map_err(|error| format!("/proc/{pid}/{file}: {error}"))
        };
        if let Some((thread, tracer)) = self.tracers().first() {
            return Err(format!("thread {tracer} traces thread {thread} of QEMU"));
        }
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(|error| error.to_string())?;
        for file in files.flatten() {
            // The descriptor may have been closed meanwhile.
            let Ok(target) = std::fs::read_link(file.path()) else { continue };
            if target.to_string_lossy().contains("[userfaultfd]") {
                return Err(format!("{} is left in QEMU: {}", file.path().display(), target.display()));
            }
        }
        // proc_pid_smaps(5): `um`, `uw` and `ui` mark memory registered with a userfaultfd, of any process.
        let protected = read("smaps")?
            .lines()
            .filter_map(|line| line.strip_prefix("VmFlags:"))
            .filter(|flags| flags.split_whitespace().any(|flag| matches!(flag, "um" | "uw" | "ui")))
            .count();
        if protected == 0 { Ok(()) } else { Err(format!("{protected} mappings of QEMU are still tracked")) }
    }

    /// Returns QEMU's traced threads, each with its tracer. None if QEMU has ended.
    pub(crate) fn tracers(&self) -> Vec<(String, u32)> {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", self.qemu.pid())) else { return Vec::new() };
        let traced = |task: std::fs::DirEntry| {
            // A thread that has ended meanwhile is not traced.
            let status = std::fs::read_to_string(task.path().join("status")).ok()?;
            let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?.trim().parse().ok()?;
            Some((task.file_name().to_string_lossy().into_owned(), tracer)).filter(|(_, tracer)| *tracer != 0)
        };
        tasks.flatten().filter_map(traced).collect()
    }

    /// Stops the boot-sector guest and checks its memory. Returns the number of passes that it had begun.
    pub(crate) fn checked_passes(&self) -> Result<u32, String> {
        self.monitor.execute("stop", json!({})).map_err(|error| error.to_string())?;
        let ram = Ram::open(self.qemu.pid(), self.qemu.memory()).map_err(|error| error.to_string())?;
        boot_sector::check(&ram).map_err(|error| error.to_string())
    }

    /// Waits until the boot-sector guest has written another letter, which shows that it runs.
    pub(crate) fn wait_progress(&self) -> Result<(), String> {
        let before = self.qemu.console().byte_count();
        self.qemu.console().wait_for_bytes(before + 1, LONG).map_err(|error| error.to_string())
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros() as u64
}

/// A source whose guest runs, a destination that waits for it, and directories for the records of both.
pub(crate) struct Pair {
    pub(crate) source: Watched,
    pub(crate) destination: Watched,
    pub(crate) scratch: TempDir,
}

/// The boot-sector guest, emulated: the same CPUs on every host.
pub(crate) fn emulated(version: QemuVersion, words: &[&str]) -> QemuOptions {
    let mut options = QemuOptions::new(version, Guest::BootSector);
    options.accel = Accel::Tcg;
    options.extra = words.iter().map(|word| (*word).to_owned()).collect();
    options
}

impl Pair {
    /// Starts both, and waits until the boot-sector guest works; none if the tools are missing.
    pub(crate) fn boot_sector(version: QemuVersion) -> Option<Self> {
        let options = QemuOptions::new(version, Guest::BootSector);
        Self::start_boot_sector(&options, &options)
    }

    /// Starts both with these options, the destination waiting, and waits until the boot-sector guest works; none if the tools are missing.
    pub(crate) fn start_boot_sector(source: &QemuOptions, destination: &QemuOptions) -> Option<Self> {
        let pair = Self::start(source, &destination.incoming())?;
        // The firmware writes nothing to the serial line, so these bytes are the guest's, which is past its first passes.
        pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
        Some(pair)
    }

    /// Starts both; none if the tools are missing.
    pub(crate) fn start(source: &QemuOptions, destination: &QemuOptions) -> Option<Self> {
        let scratch = tempfile::tempdir().expect("a directory for the test");
        if source.user.or(destination.user).is_some() {
            // For the sockets of their monitors.
            let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o777);
            std::fs::set_permissions(scratch.path(), everyone).expect("it is ours");
        }
        let source = skip_if_unavailable(Watched::start(source, scratch.path(), "source"))?;
        let destination = Watched::start(destination, scratch.path(), "destination").expect("a second QEMU");
        Some(Self { source, destination, scratch })
    }

    /// Returns the pair of the next move: the destination becomes the source, and a new `destination` waits for its guest. The old source
    /// QEMU is killed if it has not ended.
    pub(crate) fn next(self, destination: &QemuOptions) -> Self {
        let scratch = tempfile::tempdir().expect("a directory for the test");
        let destination = Watched::start(destination, scratch.path(), "destination").expect("another QEMU");
        Self { source: self.destination, destination, scratch }
    }

    /// Returns the directory of the source's records.
    pub(crate) fn source_state(&self) -> PathBuf {
        self.scratch.path().join("source-state")
    }

    /// Returns the directory of the destination's records.
    pub(crate) fn destination_state(&self) -> PathBuf {
        self.scratch.path().join("destination-state")
    }

    /// Returns the path of the report of `send`.
    pub(crate) fn report(&self) -> PathBuf {
        self.scratch.path().join("report.json")
    }

    /// Returns the run states of both, or how they ended, for error texts.
    pub(crate) fn states(&self) -> [String; 2] {
        [self.source.state(), self.destination.state()]
    }

    /// Fails if both guests ever ran at the same time.
    pub(crate) fn never_both(&self) -> Result<(), String> {
        let (source, destination) = (self.source.ran(), self.destination.ran());
        for (start, end) in &source {
            for (other_start, other_end) in &destination {
                if start.max(other_start) < end.min(other_end) {
                    return Err(format!("BOTH RAN: source {source:?}, destination {destination:?}"));
                }
            }
        }
        Ok(())
    }
}

/// Polls until `done` returns true, for conditions without an event. Gives up after `limit`.
pub(crate) fn eventually(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
}
