//! One migration, measured: by QEMU alone or through Sterna, in the same way.
//!
//! The source is used again and again: after a migration its guest is stopped there, complete, and goes on with `cont`.
//! The destination is a fresh QEMU each time. Both have a second monitor, because Sterna occupies the first; time is that
//! of QEMU's own events, from the source's `MIGRATION setup` to the destination's `RESUME`, on the one clock of the
//! machine.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna::cancel::Cancel;
use sterna_codec::MethodChoice;
use sterna_lab::usage::Usage;
use sterna_lab::{Backend, Qemu, QemuOptions, Role, warm_memory};
use sterna_qemu::qmp::Qmp;
use tempfile::TempDir;

use super::measured::{Measured, check_method};
use super::memory::MemoryWatch;
use crate::hosts::{Hosts, HostsError, Side, Sterna, doing, patiently};

/// No step takes longer on a machine that is only slow.
const LONG: Duration = Duration::from_secs(180);
/// The downtime that all aim at.
const DOWNTIME_MS: u64 = 300;
/// How often a wait looks whether it was cancelled.
const SLICE: Duration = Duration::from_millis(200);
/// What QEMU takes beside guest RAM.
const BESIDE_RAM: u64 = 128 << 20;

/// By whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// QEMU's own multifd, over TCP.
    Qemu {
        /// multifd channels.
        channels: u8,
        /// `none` or `zstd` (level 1).
        compression: &'static str,
    },
    /// `sterna send` and `sterna receive`.
    Sterna {
        /// Words for both `--method` and `--level`.
        method: &'static [&'static str],
        channels: u16,
        /// Whether pages go through QEMU's sockets even where there is a faster way.
        in_stream: bool,
    },
}

/// A source with its guest running, and where its destinations are.
pub(crate) struct Bench {
    hosts: Hosts,
    options: QemuOptions,
    source: Qemu,
    source_monitor: Qmp,
    directory: TempDir,
    number: u32,
}

/// A QEMU that waits for the guest.
struct Destination {
    qemu: Qemu,
    monitor: Qmp,
    /// A memory file of its own, removed with it.
    file: Option<PathBuf>,
}

impl Drop for Destination {
    fn drop(&mut self) {
        self.qemu.kill();
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

impl Bench {
    /// Boots the source and waits until its guest has filled its memory.
    pub(crate) fn start(hosts: Hosts, mut options: QemuOptions, cancel: &Cancel) -> Result<Self, HostsError> {
        let directory = tempfile::Builder::new().prefix("sterna-bench-").tempdir();
        let directory = directory.map_err(doing("making a directory for sockets and records"))?;
        options.namespace = hosts.namespace(Side::A);
        options.host_cpus = hosts.cpus(Side::A);
        let path = directory.path().join("source.sock");
        let source = Qemu::start(&QemuOptions { extra: monitor_words(&path), ..options.clone() })?;
        let source_monitor = Qmp::connect(&path)?;
        patiently(LONG, cancel, |limit| source.guest().wait_ready(limit))?;
        Ok(Self { hosts, options, source, source_monitor, directory, number: 0 })
    }

    /// Moves the guest once to a destination with `backend`, and has the source's guest go on. With `verify` the guest
    /// that arrived looks at all its memory.
    pub(crate) fn migrate(
        &mut self,
        way: &Way,
        backend: &Backend,
        verify: bool,
        cancel: &Cancel,
    ) -> Result<Measured, HostsError> {
        self.number += 1;
        let destination = self.destination(backend)?;
        let result = match way {
            Way::Qemu { channels, compression } => self.by_qemu(&destination, *channels, compression, cancel),
            Way::Sterna { method, channels, in_stream } => {
                self.through_sterna(&destination, method, *channels, *in_stream, cancel)
            }
        };
        if result.is_ok() {
            let arrived = destination.qemu.guest();
            patiently(LONG, cancel, |limit| arrived.wait_tick_after(0, limit))?;
            if verify {
                let verified = arrived.verify(LONG)?;
                if verified.bad > 0 || !verified.table_whole {
                    return Err(HostsError(format!("the guest arrived with wrong memory: {verified:?}")));
                }
            }
        }
        drop(destination);
        self.go_on()?;
        result
    }

    fn destination(&self, backend: &Backend) -> Result<Destination, HostsError> {
        warm_memory((self.options.memory + BESIDE_RAM) as usize)?;
        let name = format!("destination-{}", self.number);
        let path = self.directory.path().join(format!("{name}.sock"));
        let (backend, file) = match backend {
            // A file of its own for each, in the directory that was given.
            Backend::File { path } => {
                let file = path.join(&name);
                (Backend::File { path: file.clone() }, Some(file))
            }
            other => (other.clone(), None),
        };
        let options = QemuOptions {
            role: Role::Incoming,
            backend,
            namespace: self.hosts.namespace(Side::B),
            host_cpus: self.hosts.cpus(Side::B),
            extra: monitor_words(&path),
            ..self.options.incoming()
        };
        let qemu = Qemu::start(&options)?;
        Ok(Destination { monitor: Qmp::connect(&path)?, qemu, file })
    }

    /// The source's guest goes on after it was moved away.
    fn go_on(&self) -> Result<(), HostsError> {
        if self.source_monitor.status()? != "running" {
            self.source_monitor.execute("cont", json!({}))?;
        }
        Ok(())
    }

    fn by_qemu(
        &self,
        destination: &Destination,
        channels: u8,
        compression: &str,
        cancel: &Cancel,
    ) -> Result<Measured, HostsError> {
        for monitor in [&self.source_monitor, &destination.monitor] {
            capabilities(monitor, &[("multifd", true), ("return-path", true), ("events", true)])?;
            parameters(monitor, &json!({ "multifd-channels": channels, "multifd-compression": compression }))?;
        }
        parameters(&self.source_monitor, &json!({ "max-bandwidth": 0, "downtime-limit": DOWNTIME_MS }))?;
        let uri = format!("tcp:{}:0", self.hosts.address_b());
        destination.monitor.execute("migrate-incoming", json!({ "uri": uri }))?;
        let listening = destination.monitor.execute("query-migrate", json!({}))?;
        let address = &listening["socket-address"][0];
        let (Some(host), Some(port)) = (address["host"].as_str(), address["port"].as_str()) else {
            return Err(HostsError(format!("the destination QEMU does not say where it listens: {listening}")));
        };
        let before = self.before(destination)?;
        self.source_monitor.execute("migrate", json!({ "uri": format!("tcp:{host}:{port}") }))?;
        let resumed = self.resumed(destination, cancel, &AtomicBool::new(false))?;
        let mut measured = self.measured(destination, &before, &resumed)?;
        measured.wire_bytes = self.hosts.wire_bytes()?.unwrap_or(0.0) - before.wire_bytes;
        Ok(measured)
    }

    fn through_sterna(
        &self,
        destination: &Destination,
        method: &[&str],
        channels: u16,
        in_stream: bool,
        cancel: &Cancel,
    ) -> Result<Measured, HostsError> {
        parameters(&self.source_monitor, &json!({ "multifd-compression": "none" }))?;
        capabilities(&self.source_monitor, &[("events", true)])?;
        let state = |side: &str| self.directory.path().join(format!("state-{side}-{}", self.number));
        let json_path = self.directory.path().join(format!("report-{}.json", self.number));
        let mut command = self.hosts.sterna(Side::B)?;
        command.args(["receive", "--insecure", "--listen", &format!("{}:0", self.hosts.address_b()), "--qmp"]);
        command.arg(destination.qemu.qmp_path()).arg("--state-dir").arg(state("b"));
        if in_stream {
            command.args(["--placement", "in-stream"]);
        }
        let mut receiver = Sterna::start("sterna receive", command, false)?;
        let address = receiver.address(LONG, cancel)?;
        let before = self.before(destination)?;

        let mut command = self.hosts.sterna(Side::A)?;
        command.args(["send", "--insecure", "--to", &address, "--downtime", &format!("{DOWNTIME_MS}ms")]);
        command.args(["--channels", &channels.to_string()]).args(method);
        // It is looked at afterwards, and its guest moves again.
        command.args(["--source-after", "keep"]);
        command
            .arg("--qmp")
            .arg(self.source.qmp_path())
            .arg("--state-dir")
            .arg(state("a"))
            .arg("--json")
            .arg(&json_path);
        let sender = Sterna::start("sterna send", command, false)?;
        let memory = MemoryWatch::start(&[sender.pid(), receiver.pid()]);
        let given_up = AtomicBool::new(false);
        let (resumed, sent) = std::thread::scope(|scope| {
            let resumed = scope.spawn(|| self.resumed(destination, cancel, &given_up));
            let sent = sender.finish(LONG, cancel);
            if !sent.as_ref().is_ok_and(|ended| ended.status.success()) {
                given_up.store(true, Ordering::Relaxed);
            }
            (resumed.join().unwrap_or_else(|_| Err(HostsError("the watching thread panicked".into()))), sent)
        });
        let sent = sent?;
        if !sent.status.success() {
            // A report where there is one, else the message at the end.
            let said = sent.output.first().or(sent.errors.last()).map_or("nothing", String::as_str);
            return Err(HostsError(format!("sterna send: {}: {said}", sent.status)));
        }
        let resumed = resumed?;
        let received = receiver.finish(LONG, cancel)?;
        let peaks = memory.peaks();

        let mut measured = self.measured(destination, &before, &resumed)?;
        measured.wire_bytes = self.hosts.wire_bytes()?.unwrap_or(0.0) - before.wire_bytes;
        let report: Value = std::fs::read(&json_path)
            .map_err(doing("reading the report of sterna send"))
            .and_then(|text| serde_json::from_slice(&text).map_err(doing("reading the report of sterna send")))?;
        let chosen = |option| method.iter().skip_while(|word| **word != option).nth(1).copied();
        let asked = MethodChoice::parse(chosen("--method").unwrap_or_default(), chosen("--level"));
        check_method(asked.map_err(doing("choosing a method"))?, report["method"].as_str().unwrap_or_default())?;
        // Sterna's own time begins before QEMU's: it opens its channels first.
        measured.total_ms = measured.total_ms.max(report["total_ms"].as_f64().unwrap_or(0.0));
        if self.hosts.namespace(Side::A).is_none() {
            measured.wire_bytes = report["wire_bytes"].as_f64().unwrap_or(0.0);
        }
        measured.source_cpu += sent.usage.cpu_seconds();
        measured.destination_cpu += received.usage.cpu_seconds();
        measured.faults += (received.usage.minor_faults + received.usage.major_faults) as f64;
        [measured.source_memory, measured.destination_memory] = [peaks[0] as f64, peaks[1] as f64];
        Ok(measured)
    }

    fn before(&self, destination: &Destination) -> Result<Before, HostsError> {
        self.source_monitor.clear_events();
        destination.monitor.clear_events();
        Ok(Before {
            source: Usage::of(self.source.pid())?,
            destination: Usage::of(destination.qemu.pid())?,
            wire_bytes: self.hosts.wire_bytes()?.unwrap_or(0.0),
        })
    }

    /// Waits until the guest runs at the destination, and looks at once what was used until then.
    fn resumed(
        &self,
        destination: &Destination,
        cancel: &Cancel,
        given_up: &AtomicBool,
    ) -> Result<Resumed, HostsError> {
        let deadline = Instant::now() + LONG;
        loop {
            let event = destination.monitor.wait_event("RESUME", |_| true, Instant::now() + SLICE)?;
            if let Some(event) = event {
                let time_us = event.time_us.ok_or_else(|| HostsError("QEMU cannot tell the time".into()))?;
                return Ok(Resumed {
                    time_us,
                    source: Usage::of(self.source.pid())?,
                    destination: Usage::of(destination.qemu.pid())?,
                });
            }
            let failed = |data: &Value| matches!(data["status"].as_str(), Some("failed" | "cancelled"));
            if self.source_monitor.wait_event("MIGRATION", failed, Instant::now())?.is_some() {
                let why = self.source_monitor.query_migrate()?.error_desc.unwrap_or_else(|| "no reason given".into());
                return Err(HostsError(format!("the migration failed: {why}")));
            }
            if cancel.is_cancelled() || given_up.load(Ordering::Relaxed) {
                return Err(HostsError("cancelled".into()));
            }
            if Instant::now() >= deadline {
                return Err(HostsError(format!(
                    "the guest does not run at the destination after {} s",
                    LONG.as_secs()
                )));
            }
        }
    }

    fn measured(&self, destination: &Destination, before: &Before, resumed: &Resumed) -> Result<Measured, HostsError> {
        // QEMU's source says that it has completed a little after the destination runs.
        let completed = |data: &Value| data["status"] == "completed";
        let deadline = Instant::now() + LONG;
        let at = |name: &str, wanted: &dyn Fn(&Value) -> bool| -> Result<u64, HostsError> {
            let event = self.source_monitor.wait_event(name, wanted, deadline)?;
            let time = event.and_then(|event| event.time_us);
            time.ok_or_else(|| HostsError(format!("the source QEMU sent no event {name}")))
        };
        let setup = at("MIGRATION", &|data| data["status"] == "setup")?;
        let stopped = at("STOP", &|_| true)?;
        at("MIGRATION", &completed)?;
        let milliseconds = |from: u64| (resumed.time_us.saturating_sub(from)) as f64 / 1e3;
        let source = resumed.source.since(&before.source);
        let used = resumed.destination.since(&before.destination);
        debug_assert!(destination.qemu.is_running());
        Ok(Measured {
            total_ms: milliseconds(setup),
            downtime_ms: milliseconds(stopped),
            ..Measured::using(&source, &used)
        })
    }
}

struct Before {
    source: Usage,
    destination: Usage,
    wire_bytes: f64,
}

struct Resumed {
    time_us: u64,
    source: Usage,
    destination: Usage,
}

fn monitor_words(path: &std::path::Path) -> Vec<String> {
    vec!["-qmp".into(), format!("unix:{},server=on,wait=off", path.display())]
}

fn capabilities(monitor: &Qmp, wanted: &[(&str, bool)]) -> Result<(), HostsError> {
    let list: Vec<Value> = wanted.iter().map(|(name, on)| json!({ "capability": name, "state": on })).collect();
    monitor.execute("migrate-set-capabilities", json!({ "capabilities": list }))?;
    Ok(())
}

fn parameters(monitor: &Qmp, values: &Value) -> Result<(), HostsError> {
    monitor.execute("migrate-set-parameters", values.clone())?;
    Ok(())
}
