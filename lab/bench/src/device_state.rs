//! `sterna-bench device-state`: four devices with 100 MiB of state each, one after the other and all at once.
//!
//! Three parts. *At a rate*: devices save and load their state at rates of hardware of the published table; the figure
//! is the downtime. *Unlimited*: they copy from and to memory, beside plain connections that do the same; the figure is
//! the engine's cost. *Stalled*: one device accepts nothing for a minute; the figure is memory.
//!
//! Both sides are in this process, each on CPUs of its own.

mod devices;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::device_state::DeviceChannels;
use sterna_engine::source::{Source, TimeLimits};
use sterna_engine::tls::TlsSettings;

use super::BenchArgs;
use super::harness::{Cell, Column, Findings, Spread, Target, interleaved};
use super::measured::check_method;
use super::memory::MemoryWatch;
use super::ram::clock::cpu_ns;
use super::ram::guest::{Content, Guest, Memory};
use super::ram::pair::Rig;
use super::ram::pin::pin;
use super::ram::side::{CLIENT, security};
use super::ram::{CHANNELS, certificates};
use crate::hosts::{Hosts, HostsError, Side};
use devices::{Idle, Memories, Pace};

const COLUMNS: &[Column] = &[
    Column { name: "downtime_ms", title: "downtime, ms", scale: 1.0, places: 0 },
    Column { name: "save_ms", title: "save, ms", scale: 1.0, places: 0 },
    Column { name: "transfer_ms", title: "transfer, ms", scale: 1.0, places: 0 },
    Column { name: "load_ms", title: "load, ms", scale: 1.0, places: 0 },
    Column { name: "cpu_seconds", title: "CPU, s", scale: 1.0, places: 2 },
    Column { name: "memory_bytes", title: "memory, MiB", scale: (1 << 20) as f64, places: 0 },
];

const MIB: u64 = 1 << 20;
const DEVICES: usize = 4;
/// MiB per second: at the first, four devices one after the other take as long as in the published table; at the
/// second, all at once, they reach what two CPUs can carry.
const RATES: [u64; 2] = [200, 800];
/// The limit of queued device state in the cell of a stalled device.
const STALLED_QUEUE: u64 = 64 * MIB;

/// Devices, channels and the guest's size.
#[derive(Clone, Copy, Debug)]
struct Setting {
    devices: usize,
    bytes: u64,
    channels: DeviceChannels,
    encrypted: bool,
    pace: Pace,
    queue: u64,
    /// How long the first device accepts nothing.
    stall: Duration,
}

const SERIAL: &str = "serial";
const MIXED: &str = "mixed";
const OWN: &str = "channels of their own";
const ALONE: &str = "one device alone";
const WAYS: [(&str, DeviceChannels); 3] =
    [(SERIAL, DeviceChannels::Serial), (MIXED, DeviceChannels::Mixed), (OWN, DeviceChannels::Own(DEVICES as u16))];
const PLAIN: &str = "unlimited, plain connections";
const STALLED: &str = "one device stalled";

fn at_rate(rate: u64, way: &str, encrypted: bool) -> String {
    format!("at {rate} MiB/s, {way}{}", if encrypted { ", TLS" } else { "" })
}

fn unlimited(way: &str, encrypted: bool) -> String {
    format!("unlimited, {way}{}", if encrypted { ", TLS" } else { "" })
}

/// How state is moved.
enum Mover {
    Engine(Setting),
    /// Four connections.
    Plain {
        bytes: u64,
    },
}

/// Returns each rate, without and with TLS.
fn rates() -> impl Iterator<Item = (u64, bool)> {
    RATES.into_iter().flat_map(|rate| [(rate, false), (rate, true)])
}

fn plan(quick: bool) -> Vec<(String, Mover)> {
    let rated = |pace, channels, encrypted| Setting {
        devices: DEVICES,
        bytes: 100 * MIB,
        channels,
        encrypted,
        pace,
        queue: 256 * MIB,
        stall: Duration::ZERO,
    };
    let free = |channels, encrypted| Setting { bytes: 256 * MIB, ..rated(Pace(None), channels, encrypted) };
    let mut plan = Vec::new();
    for (rate, encrypted) in rates() {
        let pace = Pace(Some(rate * MIB));
        let alone = Setting { devices: 1, ..rated(pace, DeviceChannels::Mixed, encrypted) };
        plan.push((at_rate(rate, ALONE, encrypted), Mover::Engine(alone)));
        let cell = |(way, channels)| (at_rate(rate, way, encrypted), Mover::Engine(rated(pace, channels, encrypted)));
        plan.extend(WAYS.map(cell));
    }
    plan.push((PLAIN.into(), Mover::Plain { bytes: 256 * MIB }));
    for encrypted in [false, true] {
        let cell = |(way, channels)| (unlimited(way, encrypted), Mover::Engine(free(channels, encrypted)));
        plan.extend(WAYS.map(cell));
    }
    let stall = Duration::from_secs(if quick { 10 } else { 60 });
    let stalled = Setting { queue: STALLED_QUEUE, stall, ..rated(Pace(None), DeviceChannels::Mixed, false) };
    plan.push((STALLED.into(), Mover::Engine(stalled)));
    plan
}

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    plan(false).into_iter().map(|(name, _)| name).collect()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let certificates = certificates()?;
    let rig = Rig { hosts: Hosts::loopback(), cpus: args.cpus, cancel };
    // Touched once, so that no cell's figures include populating memory.
    let memories = Memories::new(DEVICES, 256 * MIB);
    let ram = || Guest::new(Memory::SmallPages, 64 * MIB).map_err(|error| HostsError(error.to_string()));
    let guests = (ram()?, ram()?);
    guests.0.fill(Content::Used(16 * MIB)).map_err(HostsError)?;
    let bench = Bench { rig: &rig, memories: &memories, guests: &guests, certificates: certificates.path() };
    let (stalled, others): (Vec<_>, Vec<_>) =
        plan(args.quick).into_iter().filter(|(name, _)| args.wants(name)).partition(|(name, _)| name == STALLED);
    let run = |plan: Vec<(String, Mover)>, rounds| {
        let cell = |(name, mover): (String, Mover)| {
            let bench = &bench;
            Cell { name, run: Box::new(move || bench.run(&mover)) }
        };
        let mut cells: Vec<Cell<'_>> = plan.into_iter().map(cell).collect();
        interleaved(&mut cells, rounds, cancel, progress)
    };
    for (_, mover) in &stalled {
        // A first migration populates memory, above all the destination's RAM, which is not the memory of a device's
        // queue.
        if let Mover::Engine(setting) = mover {
            bench.migrate(&Setting { stall: Duration::ZERO, ..*setting }).map_err(HostsError)?;
        }
    }
    // Before the other cells, because this process keeps some of their memory; and once, because a minute of waiting
    // does not vary.
    let stalled = run(stalled, 1)?;
    let mut rows = run(others, args.rounds())?;
    rows.extend(stalled);
    let mut findings =
        Findings { name: "device-state", columns: COLUMNS, rows, targets: Vec::new(), notes: notes(&rig) };
    judge(&mut findings);
    findings.notes.extend(overheads(&findings));
    Ok(findings)
}

/// Shared by all cells.
struct Bench<'a> {
    rig: &'a Rig<'a>,
    memories: &'a Memories,
    guests: &'a (Guest, Guest),
    certificates: &'a Path,
}

impl Bench<'_> {
    fn run(&self, mover: &Mover) -> Result<Vec<f64>, HostsError> {
        let before = MemoryWatch::of(std::process::id());
        let watch = MemoryWatch::start(&[std::process::id()]);
        let cpu_before = cpu_ns();
        let figures = match mover {
            Mover::Engine(setting) => self.migrate(setting),
            Mover::Plain { bytes } => self.plain(*bytes),
        };
        let cpu_seconds = (cpu_ns() - cpu_before) as f64 / 1e9;
        let memory = watch.peaks()[0].saturating_sub(before);
        let [downtime, save, transfer, load] = figures.map_err(HostsError)?;
        Ok(vec![downtime, save, transfer, load, cpu_seconds, memory as f64])
    }

    /// Runs both sides, each on its CPUs.
    fn beside<S: Send, D: Send>(
        &self,
        source: impl FnOnce() -> Result<S, String> + Send,
        destination: impl FnOnce() -> Result<D, String> + Send,
    ) -> Result<(S, D), String> {
        let on = |side| self.rig.cpus(side);
        std::thread::scope(|scope| {
            let destination = scope.spawn(move || pin(&on(Side::B)).and_then(|()| destination()));
            let source = scope.spawn(move || pin(&on(Side::A)).and_then(|()| source()));
            let panicked = || "a side panicked".to_owned();
            let (source, destination) = (source.join(), destination.join());
            Ok((source.map_err(|_| panicked())??, destination.map_err(|_| panicked())??))
        })
    }

    /// Returns the downtime, and of all devices the longest saving, transfer and loading, in ms.
    fn migrate(&self, setting: &Setting) -> Result<[f64; 4], String> {
        let tls = setting.encrypted.then_some(self.certificates);
        let (to, from) =
            (security(tls, |dir| TlsSettings::server(dir, &[CLIENT.to_owned()]))?, security(tls, TlsSettings::client)?);
        let mut destination = Destination::new(self.guests.1.ram()).device_queue(setting.queue);
        let method = MethodChoice::default();
        let mut source = Source::new(self.guests.0.ram(), self.guests.0.log())
            .channels(CHANNELS)
            .method(method)
            .device_channels(setting.channels)
            // So long that the guest is paused at once, whatever is predicted for the state.
            .downtime(Duration::from_secs(60))
            .time_limits(TimeLimits::default().step(Duration::from_secs(300)));
        for number in 0..setting.devices {
            let stall = if number == 0 { setting.stall } else { Duration::ZERO };
            source = source.device(devices::id(number), self.memories.giver(number, setting.bytes, setting.pace));
            let taker = self.memories.taker(number, setting.bytes, setting.pace, stall);
            destination = destination.device(devices::id(number), taker);
        }
        let listening = destination.listen("127.0.0.1:0", &to).map_err(|error| error.to_string())?;
        let address = listening.address().clone();
        let cancel = self.rig.cancel;
        let (report, _) = self.beside(
            || source.run(address, &from, &mut Idle, cancel, &()).map_err(|error| error.to_string()),
            || listening.run(&mut Idle, cancel, &()).map_err(|error| error.to_string()),
        )?;
        check_method(method, &report.method).map_err(|error| error.to_string())?;
        let longest = |figure: fn(&sterna_engine::report::DeviceReport) -> f64| {
            report.devices.iter().map(figure).fold(0.0, f64::max)
        };
        Ok([
            report.downtime_ms,
            longest(|device| device.save_ms),
            longest(|device| device.transfer_ms),
            longest(|device| device.load_ms),
        ])
    }

    /// Moves as many bytes over as many connections, by plain reads and writes.
    fn plain(&self, bytes: u64) -> Result<[f64; 4], String> {
        let text = |error: std::io::Error| error.to_string();
        let listener = TcpListener::bind("127.0.0.1:0").map_err(text)?;
        let to = listener.local_addr().map_err(text)?;
        let begun = Instant::now();
        let source = || {
            std::thread::scope(|scope| {
                let send = |number| {
                    scope.spawn(move || {
                        let mut stream = TcpStream::connect(to)?;
                        self.memories
                            .source(number, bytes)
                            .chunks(512 << 10)
                            .try_for_each(|chunk| stream.write_all(chunk))
                    })
                };
                let threads: Vec<_> = (0..DEVICES).map(send).collect();
                threads
                    .into_iter()
                    .try_for_each(|thread| thread.join().map_err(|_| "panicked".to_owned())?.map_err(text))
            })
        };
        let destination = || {
            std::thread::scope(|scope| {
                let take = |number| {
                    let (mut stream, _) = listener.accept()?;
                    Ok(scope.spawn(move || {
                        self.memories.with_destination(number, bytes, |memory| stream.read_exact(memory))
                    }))
                };
                let threads = (0..DEVICES).map(take).collect::<std::io::Result<Vec<_>>>().map_err(text)?;
                threads
                    .into_iter()
                    .try_for_each(|thread| thread.join().map_err(|_| "panicked".to_owned())?.map_err(text))
            })
        };
        self.beside(source, destination)?;
        Ok([begun.elapsed().as_secs_f64() * 1e3, 0.0, 0.0, 0.0])
    }
}

fn judge(findings: &mut Findings) {
    for (rate, encrypted) in rates() {
        let with = if encrypted { ", TLS" } else { "" };
        for way in [MIXED, OWN] {
            let name = format!("at {rate} MiB/s, {way}{with}, downtime");
            let [cell, serial, alone] = [way, SERIAL, ALONE].map(|way| at_rate(rate, way, encrypted));
            findings.at_most(&format!("{name} to serial"), 0.5, &cell, &serial, "downtime_ms");
            findings.at_most(&format!("{name} to one device alone"), 1.15, &cell, &alone, "downtime_ms");
        }
    }
    let memory = findings.spread(STALLED, "memory_bytes");
    let of_bound = |bytes: f64| bytes / STALLED_QUEUE as f64;
    let value = memory.map(|Spread { median, min, max }| Spread {
        median: of_bound(median),
        min: of_bound(min),
        max: of_bound(max),
    });
    // Plus the memory of the channels: 16 pieces in the queue of each, and a packet twice on each side.
    findings.targets.push(Target {
        name: "one device stalled, memory of both sides to the bound".into(),
        limit: 1.5,
        value,
        unit: "times",
    });
}

/// Returns the cost of the engine beyond plain connections; four devices of 256 MiB are 1 GiB.
fn overheads(findings: &Findings) -> Vec<String> {
    let excess =
        |cell: &str, column| Some(findings.spread(cell, column)?.median - findings.spread(PLAIN, column)?.median);
    let overhead = |(way, encrypted): (&str, bool)| {
        let cell = unlimited(way, encrypted);
        let (cpu, time) = (excess(&cell, "cpu_seconds")?, excess(&cell, "downtime_ms")?);
        Some(format!("{cell}: {cpu:.2} CPU-seconds and {time:.0} ms for 1 GiB more than plain connections (medians)."))
    };
    [false, true].into_iter().flat_map(|encrypted| WAYS.map(|(way, _)| (way, encrypted))).filter_map(overhead).collect()
}

fn notes(rig: &Rig<'_>) -> Vec<String> {
    vec![
        format!(
            "{DEVICES} devices of 100 MiB at a rate, of 256 MiB unlimited; an idle guest of 64 MiB; both sides in one process, the source on CPUs {:?}, the \
             destination on {:?}; {CHANNELS} RAM channels over the loopback interface. Save, transfer and load are those of the device \
             that took longest for each. CPU and memory are of both sides.",
            rig.cpus(Side::A),
            rig.cpus(Side::B)
        ),
        "Serial is pipelined: a device is saved while the one before it travels and is loaded. A rate is of one device, for saving and for \
         loading each; 200 MiB/s is what makes four devices of 100 MiB one after the other take what is published for them."
            .into(),
        "Published (QEMU, April 2024, 4 ConnectX-7 VFs with about 400 MiB, 15 channels, 100 Gbit/s), downtime one after the other -> over the \
         channels: 2100 -> 1100 ms, with TLS 2300 -> 1200 ms."
            .into(),
        "No device was near: these are threads that sleep.".into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_about_cells_that_there_are() {
        let mut findings = Findings::all_ones("device-state", COLUMNS, cells());
        judge(&mut findings);
        assert!(findings.targets.len() == 17 && findings.has_all_values());
    }
}
