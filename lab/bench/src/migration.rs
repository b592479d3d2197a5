//! One migration, measured: by QEMU alone or through Sterna, in the same way.
//!
//! The source is reused: after a migration its guest is paused there, complete, and resumes with `cont`. The
//! destination is a fresh QEMU each time. Both have a second monitor, because Sterna occupies the first. Time is
//! measured between QEMU's own events, from the source's `MIGRATION setup` to the destination's `RESUME`, which share
//! the machine's clock. A direct migration causes no event at the source: its time begins with the start of `sterna
//! send`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_qemu::qmp::Qmp;
use sterna_qemu_lab::usage::Usage;
use sterna_qemu_lab::{Backend, Qemu, QemuOptions, Role, Tick, WarmMemory};
use tempfile::TempDir;

use super::measured::{Measured, check_method};
use super::memory::MemoryWatch;
use super::ram::side::CLIENT;
use crate::hosts::{Hosts, HostsError, Side, Sterna, doing, patiently};

/// Time limit of each step, enough for a slow machine.
const LONG: Duration = Duration::from_secs(180);
/// The target downtime of all migrations.
const DOWNTIME_MS: u64 = 300;
/// How often a wait checks for cancellation.
const SLICE: Duration = Duration::from_millis(200);
/// What QEMU takes beside guest RAM.
const BESIDE_RAM: u64 = 128 << 20;
/// QEMU's name for its certificates, and the host name in the destination's.
const CREDENTIALS: &str = "tls0";
const TLS_NAME: &str = "localhost";
/// QEMU's method of its own that is no compression of multifd.
const XBZRLE: &str = "xbzrle";
/// QEMU's cache of sent pages for [`XBZRLE`]: larger than the rewritten memory of any guest here.
const XBZRLE_CACHE: u64 = 1 << 30;
const PAGE: f64 = 4096.0;
/// Ticks of the guest after which it writes at its new rate.
const SETTLED: u64 = 2;

/// The mode of a migration by `sterna send`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Direct,
    Stream,
}

/// The mover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// QEMU itself, over TCP: multifd, or one channel with `xbzrle`.
    Qemu {
        /// multifd channels.
        channels: u8,
        /// `none`, `zstd` (level 1) or `xbzrle`.
        compression: &'static str,
        encrypted: bool,
    },
    /// `sterna send` and `sterna receive`.
    Sterna {
        mode: Mode,
        /// The options `--method`, `--level` and further ones that belong to them.
        method: &'static [&'static str],
        channels: u16,
        encrypted: bool,
        /// Whether pages go through QEMU's stream even where direct mode is possible.
        in_stream: bool,
    },
}

/// The guest's writes during the migration, and the migration's limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions {
    /// Bytes per second that the guest writes, in whole pages or stamps as it was started.
    pub(crate) dirty_rate: u64,
    /// The bandwidth limit, in bytes per second.
    pub(crate) bandwidth: Option<u64>,
    /// The time after which the migration is abandoned, which then is a result.
    pub(crate) give_up_after: Option<Duration>,
}

impl Conditions {
    /// An idle guest, moved as fast as possible.
    pub(crate) const REST: Self = Self { dirty_rate: 0, bandwidth: None, give_up_after: None };
}

/// A source with a running guest, and the place of its destinations.
pub(crate) struct Bench {
    hosts: Hosts,
    certificates: PathBuf,
    conditions: Conditions,
    /// Warm memory of the host: all free memory, or as much as a destination will populate.
    warm: WarmMemory,
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
    /// Boots the source and waits until its guest has filled its memory, of which it populates at most `populated`
    /// bytes. That much of the host's memory is kept warm, or all free memory if `populated` is none. Encrypted
    /// migrations use `certificates`.
    pub(crate) fn start(
        hosts: Hosts,
        mut options: QemuOptions,
        populated: Option<u64>,
        certificates: &Path,
        cancel: &Cancel,
    ) -> Result<Self, HostsError> {
        let directory = tempfile::Builder::new().prefix("sterna-bench-").tempdir();
        let directory = directory.map_err(doing("making a directory for sockets and records"))?;
        options.namespace = hosts.namespace(Side::A);
        options.host_cpus = hosts.cpus(Side::A);
        let path = directory.path().join("source.sock");
        let extra = monitor_and_certificates(&path, certificates, "client");
        let source = Qemu::start(&QemuOptions { extra, ..options.clone() })?;
        let source_monitor = Qmp::connect(&path)?;
        patiently(LONG, cancel, |limit| source.guest().wait_ready(limit))?;
        let (certificates, conditions) = (certificates.to_owned(), Conditions::REST);
        let warm = WarmMemory::new(populated.map(|bytes| bytes + BESIDE_RAM));
        Ok(Self { hosts, certificates, conditions, warm, options, source, source_monitor, directory, number: 0 })
    }

    /// Moves the guest once to a destination with `backend`, and resumes the source's guest. With `verify` the guest
    /// that arrived verifies all its memory.
    pub(crate) fn migrate(
        &mut self,
        way: &Way,
        backend: &Backend,
        conditions: Conditions,
        verify: bool,
        cancel: &Cancel,
    ) -> Result<Measured, HostsError> {
        self.number += 1;
        let destination = self.destination(backend)?;
        self.set(conditions, cancel)?;
        let before = self.source.guest().last_tick();
        let result = match way {
            Way::Qemu { .. } => self.by_qemu(&destination, way, cancel),
            Way::Sterna { .. } => self.through_sterna(&destination, way, cancel),
        };
        let result = result.map(|mut measured| {
            measured.achieved = achieved(before, self.source.guest().last_tick(), conditions.dirty_rate);
            measured
        });
        if result.as_ref().is_ok_and(|measured| measured.given_up.is_none()) {
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
        self.resume_source()?;
        result
    }

    /// Sets the guest's rate, and waits until the guest writes at it.
    fn set(&mut self, conditions: Conditions, cancel: &Cancel) -> Result<(), HostsError> {
        if self.conditions.dirty_rate != conditions.dirty_rate {
            let guest = self.source.guest();
            guest.set_dirty_rate(conditions.dirty_rate)?;
            let last = guest.last_tick().map_or(0, |tick| tick.number);
            patiently(LONG, cancel, |limit| guest.wait_tick_after(last + SETTLED, limit))?;
        }
        self.conditions = conditions;
        Ok(())
    }

    fn destination(&self, backend: &Backend) -> Result<Destination, HostsError> {
        let name = format!("destination-{}", self.number);
        let path = self.directory.path().join(format!("{name}.sock"));
        let (backend, file) = match backend {
            // Each destination has its own file, in the given directory.
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
            extra: monitor_and_certificates(&path, &self.certificates, "server"),
            ..self.options.incoming()
        };
        let qemu = Qemu::start(&options)?;
        Ok(Destination { monitor: Qmp::connect(&path)?, qemu, file })
    }

    /// Resumes the source's guest after it was moved away.
    fn resume_source(&self) -> Result<(), HostsError> {
        if self.source_monitor.status()? != "running" {
            self.source_monitor.execute("cont", json!({}))?;
        }
        Ok(())
    }

    fn by_qemu(&self, destination: &Destination, way: &Way, cancel: &Cancel) -> Result<Measured, HostsError> {
        let &Way::Qemu { channels, compression, encrypted } = way else { unreachable!("another way") };
        let xbzrle = compression == XBZRLE;
        let credentials = if encrypted { CREDENTIALS } else { "" };
        for monitor in [&self.source_monitor, &destination.monitor] {
            let wanted = [("multifd", !xbzrle), (XBZRLE, xbzrle), ("return-path", true), ("events", true)];
            capabilities(monitor, &wanted)?;
            let compression = if xbzrle { "none" } else { compression };
            let settings = json!({
                "multifd-channels": channels,
                "multifd-compression": compression,
                "xbzrle-cache-size": XBZRLE_CACHE,
                "tls-creds": credentials,
            });
            parameters(monitor, &settings)?;
        }
        let limits = json!({
            "max-bandwidth": self.conditions.bandwidth.unwrap_or(0),
            "downtime-limit": DOWNTIME_MS,
            "tls-hostname": if encrypted { TLS_NAME } else { "" },
        });
        parameters(&self.source_monitor, &limits)?;
        let uri = format!("tcp:{}:0", self.hosts.address_b());
        destination.monitor.execute("migrate-incoming", json!({ "uri": uri }))?;
        let listening = destination.monitor.execute("query-migrate", json!({}))?;
        let address = &listening["socket-address"][0];
        let (Some(host), Some(port)) = (address["host"].as_str(), address["port"].as_str()) else {
            return Err(HostsError(format!("the destination QEMU does not say where it listens: {listening}")));
        };
        let before = self.before(destination)?;
        let begun = Instant::now();
        self.source_monitor.execute("migrate", json!({ "uri": format!("tcp:{host}:{port}") }))?;
        let limit = self.conditions.give_up_after;
        let Some(resumed) = self.resumed(destination, limit.unwrap_or(LONG), cancel, &AtomicBool::new(false))? else {
            return match limit {
                Some(_) => self.abandon_qemu(begun, &before, destination),
                None => Err(too_long()),
            };
        };
        let mut measured = self.measured(destination, &before, &resumed, None)?;
        measured.wire_bytes = self.hosts.wire_bytes()?.unwrap_or(0.0) - before.wire_bytes;
        let info = self.source_monitor.execute("query-migrate", json!({}))?;
        measured.rounds = info["ram"]["dirty-sync-count"].as_f64().unwrap_or(0.0);
        Ok(measured)
    }

    /// Ends QEMU's migration, which has taken too long.
    fn abandon_qemu(&self, begun: Instant, before: &Before, destination: &Destination) -> Result<Measured, HostsError> {
        self.source_monitor.execute("migrate_cancel", json!({}))?;
        let ended = |data: &Value| matches!(data["status"].as_str(), Some("failed" | "cancelled" | "completed"));
        if self.source_monitor.wait_event("MIGRATION", ended, Instant::now() + LONG)?.is_none() {
            return Err(HostsError("QEMU does not give its migration up".into()));
        }
        let source = Usage::of(self.source.pid())?.since(&before.source);
        let used = Usage::of(destination.qemu.pid())?.since(&before.destination);
        Ok(Measured {
            total_ms: begun.elapsed().as_secs_f64() * 1e3,
            given_up: Some("it took longer than it was allowed to".into()),
            ..Measured::using(&source, &used)
        })
    }

    fn through_sterna(&self, destination: &Destination, way: &Way, cancel: &Cancel) -> Result<Measured, HostsError> {
        let &Way::Sterna { mode, method, channels, encrypted, in_stream } = way else { unreachable!("another way") };
        capabilities(&self.source_monitor, &[("events", true), (XBZRLE, false)])?;
        parameters(
            &self.source_monitor,
            &json!({ "multifd-compression": "none", "tls-creds": "", "tls-hostname": "" }),
        )?;
        let state = |side: &str| self.directory.path().join(format!("state-{side}-{}", self.number));
        let json_path = self.directory.path().join(format!("report-{}.json", self.number));
        let mut command = self.hosts.sterna(Side::B)?;
        command.args(["receive", "--listen", &format!("{}:0", self.hosts.address_b()), "--qmp"]);
        command.arg(destination.qemu.qmp_path()).arg("--state-dir").arg(state("b"));
        self.secure(&mut command, encrypted);
        if encrypted {
            command.args(["--allow", CLIENT]);
        }
        if in_stream {
            command.args(["--placement", "in-stream"]);
        }
        let mut receiver = Sterna::start("sterna receive", command, false)?;
        let address = receiver.address(LONG, cancel)?;
        let before = self.before(destination)?;

        let mut command = self.hosts.sterna(Side::A)?;
        command.args(["send", "--to", &address, "--downtime", &format!("{DOWNTIME_MS}ms")]);
        command.args(["--channels", &channels.to_string()]).args(method);
        command.args(["--mode", if mode == Mode::Direct { "direct" } else { "stream" }]);
        self.secure(&mut command, encrypted);
        if let Some(bandwidth) = self.conditions.bandwidth {
            command.arg(format!("--bandwidth={bandwidth}B/s"));
        }
        if let Some(limit) = self.conditions.give_up_after {
            command.arg(format!("--time-limit={}s", limit.as_secs()));
        }
        // The source must survive, because its guest moves again.
        command.args(["--source-after", "keep"]);
        command
            .arg("--qmp")
            .arg(self.source.qmp_path())
            .arg("--state-dir")
            .arg(state("a"))
            .arg("--json")
            .arg(&json_path);
        let started = SystemTime::now();
        let sender = Sterna::start("sterna send", command, false)?;
        let memory = MemoryWatch::start(&[sender.pid(), receiver.pid()]);
        let given_up = AtomicBool::new(false);
        let (resumed, sent) = std::thread::scope(|scope| {
            let resumed = scope.spawn(|| self.resumed(destination, LONG, cancel, &given_up));
            let sent = sender.finish(LONG, cancel);
            if !sent.as_ref().is_ok_and(|ended| ended.status.success()) {
                given_up.store(true, Ordering::Relaxed);
            }
            (resumed.join().unwrap_or_else(|_| Err(HostsError("the watching thread panicked".into()))), sent)
        });
        let sent = sent?;
        let report = || -> Result<Value, HostsError> {
            let text = std::fs::read(&json_path).map_err(doing("reading the report of sterna send"))?;
            serde_json::from_slice(&text).map_err(doing("reading the report of sterna send"))
        };
        if !sent.status.success() {
            // The report, or without one the last message.
            let reason = sent.output.first().or(sent.errors.last()).map_or("nothing", String::as_str);
            let late =
                started.elapsed().ok().zip(self.conditions.give_up_after).filter(|(spent, limit)| spent >= limit);
            return match late {
                Some((spent, _)) if self.source_monitor.status()? == "running" => Ok(Measured {
                    total_ms: spent.as_secs_f64() * 1e3,
                    given_up: Some(reason.to_owned()),
                    ..Measured::default()
                }),
                _ => Err(HostsError(format!("sterna send: {}: {reason}", sent.status))),
            };
        }
        let resumed = resumed?.ok_or_else(too_long)?;
        let received = receiver.finish(LONG, cancel)?;
        let peaks = memory.peaks();

        let directly = (mode == Mode::Direct).then_some(started);
        let mut measured = self.measured(destination, &before, &resumed, directly)?;
        measured.wire_bytes = self.hosts.wire_bytes()?.unwrap_or(0.0) - before.wire_bytes;
        let report = report()?;
        let chosen = |option| method.iter().skip_while(|word| **word != option).nth(1).copied();
        let words: Vec<_> = [chosen("--method"), chosen("--level")].into_iter().flatten().collect();
        let asked = words.join(" ").parse::<MethodChoice>();
        check_method(asked.map_err(doing("choosing a method"))?, report["method"].as_str().unwrap_or_default())?;
        // Sterna's own time begins before QEMU's: it opens its channels first.
        measured.total_ms = measured.total_ms.max(report["total_ms"].as_f64().unwrap_or(0.0));
        measured.rounds = report["rounds"].as_f64().unwrap_or(0.0);
        if self.hosts.namespace(Side::A).is_none() {
            measured.wire_bytes = report["wire_bytes"].as_f64().unwrap_or(0.0);
        }
        measured.source_cpu += sent.usage.cpu_seconds();
        measured.destination_cpu += received.usage.cpu_seconds();
        measured.faults += (received.usage.minor_faults + received.usage.major_faults) as f64;
        [measured.source_memory, measured.destination_memory] = [peaks[0] as f64, peaks[1] as f64];
        Ok(measured)
    }

    /// Adds the options of TLS to `command`.
    fn secure(&self, command: &mut Command, encrypted: bool) {
        match encrypted {
            true => command.arg("--tls").arg(&self.certificates),
            false => command.arg("--insecure"),
        };
    }

    /// Records the resource usage so far. The host's memory is kept warm until the migration is over.
    fn before(&self, destination: &Destination) -> Result<Before, HostsError> {
        self.warm.fill()?;
        self.source_monitor.clear_events();
        destination.monitor.clear_events();
        Ok(Before {
            source: Usage::of(self.source.pid())?,
            destination: Usage::of(destination.qemu.pid())?,
            wire_bytes: self.hosts.wire_bytes()?.unwrap_or(0.0),
        })
    }

    /// Waits until the guest runs at the destination, and records at once the resource usage until then. Returns none
    /// if the guest does not run within `limit`.
    fn resumed(
        &self,
        destination: &Destination,
        limit: Duration,
        cancel: &Cancel,
        given_up: &AtomicBool,
    ) -> Result<Option<Resumed>, HostsError> {
        let deadline = Instant::now() + limit;
        loop {
            let event = destination.monitor.wait_event("RESUME", |_| true, deadline.min(Instant::now() + SLICE))?;
            if let Some(event) = event {
                let time_us = event.time_us.ok_or_else(|| HostsError("QEMU cannot tell the time".into()))?;
                return Ok(Some(Resumed {
                    time_us,
                    source: Usage::of(self.source.pid())?,
                    destination: Usage::of(destination.qemu.pid())?,
                }));
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
                return Ok(None);
            }
        }
    }

    /// `directly` is the start time of the process that moved the guest without QEMU's migration.
    fn measured(
        &self,
        destination: &Destination,
        before: &Before,
        resumed: &Resumed,
        directly: Option<SystemTime>,
    ) -> Result<Measured, HostsError> {
        // QEMU's source reports its completion a little after the destination runs.
        let completed = |data: &Value| data["status"] == "completed";
        let deadline = Instant::now() + LONG;
        let at = |name: &str, wanted: &dyn Fn(&Value) -> bool| -> Result<u64, HostsError> {
            let event = self.source_monitor.wait_event(name, wanted, deadline)?;
            let time = event.and_then(|event| event.time_us);
            time.ok_or_else(|| HostsError(format!("the source QEMU sent no event {name}")))
        };
        let stopped = at("STOP", &|_| true)?;
        let setup = match directly {
            Some(started) => started.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64),
            None => at("MIGRATION", &|data| data["status"] == "setup")?,
        };
        if directly.is_none() {
            at("MIGRATION", &completed)?;
        }
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

/// Returns QEMU's arguments for a second monitor and the certificates of an endpoint.
fn monitor_and_certificates(monitor: &Path, certificates: &Path, endpoint: &str) -> Vec<String> {
    // QEMU 10.0 checks certificates for RSA key exchange, which TLS 1.3 does not have.
    let credentials = format!(
        "tls-creds-x509,id={CREDENTIALS},dir={},endpoint={endpoint},verify-peer=on,sanity-check=off",
        certificates.display().to_string().replace(',', ",,")
    );
    let monitor = format!("unix:{},server=on,wait=off", monitor.display());
    vec!["-qmp".into(), monitor, "-object".into(), credentials]
}

fn too_long() -> HostsError {
    HostsError(format!("the guest does not run at the destination after {} s", LONG.as_secs()))
}

/// Returns the part of its rate that the guest reached between two of its ticks, by its own clock; 1 if its rate is 0.
fn achieved(before: Option<Tick>, after: Option<Tick>, rate: u64) -> Option<f64> {
    if rate == 0 {
        return Some(1.0);
    }
    let (before, after) = before.zip(after)?;
    let seconds = after.milliseconds.checked_sub(before.milliseconds).filter(|&ms| ms > 0)? as f64 / 1e3;
    Some((after.dirtied - before.dirtied) as f64 * PAGE / seconds / rate as f64)
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
