//! QEMU's own multifd with the same memory: an idle machine without a guest program, whose RAM is filled from outside,
//! so that content and backing are the same as for the library.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_guest::content::PAGE_BYTES;
use sterna_qemu::qmp::Qmp;
use sterna_qemu_lab::ram::Ram;
use sterna_qemu_lab::usage::Usage;
use sterna_qemu_lab::{Backend, Guest, Qemu, QemuOptions, QemuVersion, Role};

use super::super::measured::Measured;
use super::guest::{self, Content, Memory, data};
use super::pair::{Rig, Shape};
use super::warm::Warmth;
use crate::hosts::{HostsError, Side, doing};

const LONG: Duration = Duration::from_secs(180);
const SLICE: Duration = Duration::from_millis(200);
/// The library's default.
const DOWNTIME_MS: u64 = 300;
/// The name in the destination's certificate.
const HOST: &str = "localhost";
const PAGE: u64 = PAGE_BYTES as u64;
/// Pages written to QEMU's memory at once.
const CHUNK: u64 = 1 << 20;
/// QEMU's name for the certificates.
const CREDENTIALS: &str = "tls0";

/// A source with a running machine.
pub(crate) struct Source<'a> {
    options: QemuOptions,
    shape: Shape,
    qemu: Qemu,
    monitor: Qmp,
    rig: &'a Rig<'a>,
    tls: Option<PathBuf>,
}

/// The settings of QEMU's migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Multifd {
    pub(crate) channels: u8,
    /// `none`, `zlib` or `zstd`, each at its level 1, which is QEMU's own default.
    pub(crate) compression: &'static str,
    pub(crate) encrypted: bool,
}

fn machine(version: QemuVersion, shape: Shape) -> Result<QemuOptions, HostsError> {
    let backend = match shape.memory {
        Memory::Anonymous => Backend::Anonymous,
        Memory::Memfd => Backend::Memfd,
        Memory::SmallPages => return Err(HostsError("QEMU always asks for huge pages".into())),
    };
    let mut options = QemuOptions::new(version, Guest::None);
    options.memory = shape.bytes;
    options.backend = backend;
    Ok(options)
}

fn credentials(dir: Option<&Path>, endpoint: &str) -> Vec<String> {
    let Some(dir) = dir else { return Vec::new() };
    // QEMU 10.0 checks certificates for RSA key exchange, which TLS 1.3 does not have.
    let object = format!(
        "tls-creds-x509,id={CREDENTIALS},dir={},endpoint={endpoint},verify-peer=on,sanity-check=off",
        dir.display().to_string().replace(',', ",,")
    );
    vec!["-object".into(), object]
}

impl<'a> Source<'a> {
    /// Starts it and fills its RAM. With a directory of certificates migrations can be encrypted.
    pub(crate) fn start(
        rig: &'a Rig<'a>,
        version: QemuVersion,
        shape: Shape,
        tls: Option<PathBuf>,
    ) -> Result<Self, HostsError> {
        let mut options = machine(version, shape)?;
        options.host_cpus = Some(list(&rig.cpus(Side::A)));
        options.namespace = rig.hosts.namespace(Side::A);
        let words = credentials(tls.as_deref(), "client");
        let qemu = Qemu::start(&QemuOptions { extra: words, ..options.clone() })?;
        let monitor = Qmp::connect(qemu.qmp_path())?;
        fill(qemu.pid(), shape)?;
        Ok(Self { options, shape, qemu, monitor, rig, tls })
    }

    /// Moves it once to a fresh destination, and resumes it here.
    pub(crate) fn migrate(&self, how: Multifd, expected: u64, verify: bool) -> Result<Measured, HostsError> {
        let options = QemuOptions {
            role: Role::Incoming,
            host_cpus: Some(list(&self.rig.cpus(Side::B))),
            namespace: self.rig.hosts.namespace(Side::B),
            extra: credentials(self.tls.as_deref(), "server"),
            ..self.options.incoming()
        };
        let destination = Qemu::start(&options)?;
        let monitor = Qmp::connect(destination.qmp_path())?;
        let measured = self.measure(&destination, &monitor, how, expected);
        if measured.is_ok() && verify {
            check(destination.pid(), self.shape)?;
        }
        drop(destination);
        if self.monitor.status()? != "running" {
            self.monitor.execute("cont", json!({}))?;
        }
        measured
    }

    fn measure(&self, destination: &Qemu, monitor: &Qmp, how: Multifd, expected: u64) -> Result<Measured, HostsError> {
        let Multifd { channels, compression, encrypted } = how;
        let capabilities: Vec<Value> = ["multifd", "return-path", "events"]
            .iter()
            .map(|name| json!({ "capability": name, "state": true }))
            .collect();
        let credentials = if encrypted { CREDENTIALS } else { "" };
        for side in [&self.monitor, monitor] {
            side.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
            let parameters = json!({
                "multifd-channels": channels,
                "multifd-compression": compression,
                "tls-creds": credentials,
            });
            side.execute("migrate-set-parameters", parameters)?;
        }
        let hostname = if encrypted { HOST } else { "" };
        let limits = json!({ "max-bandwidth": 0, "downtime-limit": DOWNTIME_MS, "tls-hostname": hostname });
        self.monitor.execute("migrate-set-parameters", limits)?;
        let address = self.rig.hosts.address_b();
        monitor.execute("migrate-incoming", json!({ "uri": format!("tcp:{address}:0") }))?;
        let listening = monitor.execute("query-migrate", json!({}))?;
        let Some(port) = listening["socket-address"][0]["port"].as_str() else {
            return Err(HostsError(format!("the destination QEMU does not say where it listens: {listening}")));
        };
        let _warmth = Warmth::hold(expected, &self.rig.cpus(Side::B))?;
        self.monitor.clear_events();
        let before = (Usage::of(self.qemu.pid())?, Usage::of(destination.pid())?);
        let wire_before = self.rig.hosts.wire_bytes()?;
        self.monitor.execute("migrate", json!({ "uri": format!("tcp:{address}:{port}") }))?;
        let resumed_us = self.resumed(monitor)?;
        let after = (Usage::of(self.qemu.pid())?, Usage::of(destination.pid())?);
        let wire = self.rig.hosts.wire_bytes()?.zip(wire_before).map(|(after, before)| after - before);
        let begun_us = self.at("setup")?;
        let stopped = self.monitor.wait_event("STOP", |_| true, Instant::now() + LONG)?;
        let stopped_us = stopped.and_then(|event| event.time_us).unwrap_or(resumed_us);
        self.at("completed")?;
        let status = self.monitor.execute("query-migrate", json!({}))?;
        let (source, received) = (after.0.since(&before.0), after.1.since(&before.1));
        Ok(Measured {
            total_ms: resumed_us.saturating_sub(begun_us) as f64 / 1e3,
            downtime_ms: resumed_us.saturating_sub(stopped_us) as f64 / 1e3,
            wire_bytes: wire.or_else(|| status["ram"]["transferred"].as_f64()).unwrap_or(0.0),
            pages: status["ram"]["normal"].as_f64().unwrap_or(0.0),
            ..Measured::using(&source, &received)
        })
    }

    /// Waits until the guest runs at the destination.
    fn resumed(&self, destination: &Qmp) -> Result<u64, HostsError> {
        let deadline = Instant::now() + LONG;
        loop {
            if let Some(event) = destination.wait_event("RESUME", |_| true, Instant::now() + SLICE)? {
                return event.time_us.ok_or_else(|| HostsError("QEMU cannot tell the time".into()));
            }
            let failed = |data: &Value| matches!(data["status"].as_str(), Some("failed" | "cancelled"));
            if self.monitor.wait_event("MIGRATION", failed, Instant::now())?.is_some() {
                let why = self.monitor.query_migrate()?.error_desc.unwrap_or_else(|| "no reason given".into());
                return Err(HostsError(format!("QEMU's migration failed: {why}")));
            }
            if self.rig.cancel.is_cancelled() {
                return Err(HostsError("cancelled".into()));
            }
            if Instant::now() >= deadline {
                return Err(HostsError(format!("QEMU's destination does not run after {} s", LONG.as_secs())));
            }
        }
    }

    /// Returns when the source reported this status of its migration.
    fn at(&self, status: &str) -> Result<u64, HostsError> {
        let event = self.monitor.wait_event("MIGRATION", |data| data["status"] == status, Instant::now() + LONG)?;
        let time = event.and_then(|event| event.time_us);
        time.ok_or_else(|| HostsError(format!("the source QEMU did not say that its migration is {status}")))
    }
}

/// Returns CPUs as `taskset -c` reads them.
fn list(cpus: &[usize]) -> String {
    cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Returns the chunks of the parts that hold data, in bytes.
fn chunks(shape: Shape) -> impl Iterator<Item = std::ops::Range<u64>> {
    let parts = shape.content.filled(shape.bytes).into_iter();
    parts.flat_map(|part| part.clone().step_by(CHUNK as usize).map(move |at| at..(at + CHUNK).min(part.end)))
}

/// Writes the content to the RAM of a running QEMU, to parts that its firmware does not use.
fn fill(pid: u32, shape: Shape) -> Result<(), HostsError> {
    if !matches!(shape.content, Content::Untouched | Content::HalfFilled | Content::Corpus { .. }) {
        return Err(HostsError(format!("content {:?} would overwrite the firmware", shape.content)));
    }
    let address = Ram::open(pid, shape.bytes)?.address();
    let path = format!("/proc/{pid}/mem");
    let memory = OpenOptions::new().write(true).open(&path).map_err(doing(format_args!("opening {path}")))?;
    if let Content::Corpus { corpus, bytes } = shape.content {
        let written = guest::chunks(corpus, bytes, |page, chunk| {
            memory.write_all_at(chunk, address + page * PAGE).map_err(|error| error.to_string())
        });
        return written.map_err(doing("writing QEMU's guest RAM"));
    }
    let mut bytes = vec![0; CHUNK as usize];
    for chunk in chunks(shape) {
        for (page, at) in bytes.as_chunks_mut::<PAGE_BYTES>().0.iter_mut().zip(chunk.clone().step_by(PAGE_BYTES)) {
            data().write(page, at / PAGE, 1);
        }
        let length = (chunk.end - chunk.start) as usize;
        memory.write_all_at(&bytes[..length], address + chunk.start).map_err(doing("writing QEMU's guest RAM"))?;
    }
    Ok(())
}

/// Checks that the content arrived.
fn check(pid: u32, shape: Shape) -> Result<(), HostsError> {
    let ram = Ram::open(pid, shape.bytes)?;
    let mut bytes = vec![0; CHUNK as usize];
    if let Content::Corpus { corpus, bytes: all } = shape.content {
        let same = guest::chunks(corpus, all, |page, chunk| {
            let found = &mut bytes[..chunk.len()];
            ram.read(page * PAGE, found).map_err(|error| error.to_string())?;
            if found == chunk { Ok(()) } else { Err(format!("the pages from {page} on are not as they were")) }
        });
        return same.map_err(doing("looking at QEMU's destination"));
    }
    for chunk in chunks(shape) {
        let length = (chunk.end - chunk.start) as usize;
        ram.read(chunk.start, &mut bytes[..length])?;
        for (page, at) in bytes[..length].as_chunks::<PAGE_BYTES>().0.iter().zip(chunk.step_by(PAGE_BYTES)) {
            let found = data().check(page, at / PAGE, 1);
            found.map_err(doing(format_args!("page {} at QEMU's destination", at / PAGE)))?;
        }
    }
    Ok(())
}
