//! One side of a benchmark of the library, as a process of its own: `sterna bench-side`, which the benchmarks start and no
//! person does. It takes orders as lines of JSON on its input, one after another, and answers each on its output.
//!
//! CPU time and page faults are this process's own, between the moment that a migration begins and the moment that it has
//! ended here; so the source, which is used again and again, has filled its memory before.

use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};
use sterna::cancel::Cancel;
use sterna::destination::Destination;
use sterna::source::Source;
use sterna::tls::TlsSettings;
use sterna::transport::Security;
use sterna_codec::MethodChoice;
use sterna_lab::usage::Usage;

use super::clock::{cpu_ns, now_ns};
use super::guest::{Content, Guest, Memory, Monitor};
use super::{pipeline, plain, received};

/// The name in the certificate of the source.
pub(crate) const CLIENT: &str = "sterna-bench";
const ANY_PORT: &str = "127.0.0.1:0";

/// Who moves the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Mover {
    /// `Source` and `Destination`, with TLS where there is a directory of certificates.
    Sterna {
        checksums: bool,
        tls: Option<PathBuf>,
    },
    /// The same at a bandwidth limit, with a compression method and a guest that writes all of its memory for so long; the
    /// destination notes what comes in when.
    Limited {
        bytes_per_second: u64,
        method: String,
        seconds: u64,
        tls: Option<PathBuf>,
    },
    Plain,
    /// Sterna's channels without rounds and switchover; the destination asks its received bitmap about zero pages, or looks
    /// at each.
    Channels {
        received_bitmap: bool,
    },
}

/// What a side is told to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Have guest RAM with this content; from then on run on these CPUs only.
    Prepare { memory: Memory, bytes: u64, content: Content, cpus: Vec<usize> },
    /// Say where you listen, take one migration, and say what it took.
    Receive { by: Mover, channels: u16 },
    /// Send to that address.
    Send { by: Mover, to: String, channels: u16 },
    /// Read all of RAM, by two threads.
    ReadByTwo,
    /// Check that RAM holds this.
    Check { content: Content },
}

/// What it answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Listening { address: String },
    Took(Took),
    Failed { reason: String },
}

/// What something took, at this side.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Took {
    pub(crate) begun_ns: u64,
    /// When the guest ran (the destination's monitor), or everything had arrived.
    pub(crate) ended_ns: u64,
    pub(crate) cpu_seconds: f64,
    pub(crate) faults: u64,
    pub(crate) wire_bytes: u64,
    /// The most that was resident at once in this process's life, without guest RAM as it is at the end.
    pub(crate) own_memory_bytes: u64,
    /// Times and the bytes that had come in by then, where they were noted.
    pub(crate) received: Vec<(u64, u64)>,
}

/// Does what is ordered until there are no more orders.
pub(crate) fn run() -> Result<(), String> {
    let mut guest = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let order = serde_json::from_str(&line).map_err(|error| format!("no order: {line}: {error}"))?;
        let answer = obey(order, &mut guest).unwrap_or_else(|reason| Answer::Failed { reason });
        say(&answer)?;
    }
    Ok(())
}

fn say(answer: &Answer) -> Result<(), String> {
    let mut line = serde_json::to_string(answer).map_err(|error| error.to_string())?;
    line.push('\n');
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).map_err(|error| error.to_string())
}

fn obey(order: Order, guest: &mut Option<Guest>) -> Result<Answer, String> {
    if let Order::Prepare { memory, bytes, content, cpus } = order {
        let new = Guest::new(memory, bytes).map_err(|error| format!("no memory of {bytes} bytes: {error}"))?;
        new.fill(content)?;
        pin(&cpus)?;
        *guest = Some(new);
        return Ok(Answer::Done);
    }
    let guest = guest.as_ref().ok_or("nothing was prepared")?;
    match order {
        Order::Prepare { .. } => unreachable!("done above"),
        Order::Receive { by, channels } => receive(guest, &by, channels).map(Answer::Took),
        Order::Send { by, to, channels } => send(guest, &by, &to, channels).map(Answer::Took),
        Order::ReadByTwo => measured(guest, || match guest.read_by_two() {
            true => Ok((0, None)),
            false => Err("the memory is not zero".into()),
        })
        .map(Answer::Took),
        Order::Check { content } => guest.check(content).map(|()| Answer::Done),
    }
}

/// This thread, and all that it starts from here on.
pub(super) fn pin(cpus: &[usize]) -> Result<(), String> {
    let mut set = CpuSet::new();
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set).map_err(|error| format!("cannot run on CPUs {cpus:?} only: {error}"))
}

/// Measures `work`, which gives the bytes that it wrote to the network, and when it had ended if that is not when it
/// returns.
fn measured(guest: &Guest, work: impl FnOnce() -> Result<(u64, Option<u64>), String>) -> Result<Took, String> {
    let usage = || Usage::of(std::process::id()).map_err(|error| error.to_string());
    let (before, cpu_before) = (usage()?, cpu_ns());
    let begun_ns = now_ns();
    let (wire_bytes, ended_ns) = work()?;
    let ended_ns = ended_ns.unwrap_or_else(now_ns);
    let cpu_seconds = (cpu_ns() - cpu_before) as f64 / 1e9;
    let after = usage()?;
    let used = after.since(&before);
    Ok(Took {
        begun_ns,
        ended_ns,
        cpu_seconds,
        faults: used.minor_faults + used.major_faults,
        wire_bytes,
        own_memory_bytes: after.max_resident_bytes.saturating_sub(guest.populated_bytes()?),
        received: Vec::new(),
    })
}

fn send(guest: &Guest, by: &Mover, to: &str, channels: u16) -> Result<Took, String> {
    match by {
        Mover::Sterna { checksums, tls } => send_whole(
            guest,
            Source::new(guest.ram(), guest.log()).method(MethodChoice::default()).checksums(*checksums),
            to,
            channels,
            tls.as_deref(),
        ),
        Mover::Limited { bytes_per_second, method, seconds, tls } => {
            let method = MethodChoice::parse(method, None).map_err(|error| error.to_string())?;
            let log = guest.all_dirty_for(Duration::from_secs(*seconds));
            let source = Source::new(guest.ram(), log).method(method).bandwidth(Some(*bytes_per_second));
            send_whole(guest, source, to, channels, tls.as_deref())
        }
        Mover::Plain => measured(guest, || {
            plain::send(&guest.ram(), to, channels).map(|bytes| (bytes, None)).map_err(|error| error.to_string())
        }),
        Mover::Channels { .. } => {
            measured(guest, || pipeline::send(&guest.ram(), to, channels).map(|bytes| (bytes, None)))
        }
    }
}

fn send_whole(guest: &Guest, source: Source, to: &str, channels: u16, tls: Option<&Path>) -> Result<Took, String> {
    let security = security(tls, TlsSettings::client)?;
    let source = source.channels(channels);
    measured(guest, || {
        let report = source.run(to, &security, &mut Monitor::default(), &Cancel::new(), &());
        report.map(|report| (report.wire_bytes, None)).map_err(|error| error.to_string())
    })
}

fn receive(guest: &Guest, by: &Mover, channels: u16) -> Result<Took, String> {
    let listening = |address: &dyn std::fmt::Display| say(&Answer::Listening { address: address.to_string() });
    match by {
        Mover::Sterna { tls, .. } | Mover::Limited { tls, .. } => {
            let security = security(tls.as_deref(), |dir| TlsSettings::server(dir, &[CLIENT.to_owned()]))?;
            let door = Destination::new(guest.ram()).listen(ANY_PORT, &security).map_err(|error| error.to_string())?;
            // By name, so that the certificate fits.
            listening(&door.address().to_string().replace("127.0.0.1", "localhost"))?;
            let receive = || {
                let mut monitor = Monitor::default();
                let report = door.run(&mut monitor, &Cancel::new(), &());
                report.map(|_| (0, monitor.resumed_ns)).map_err(|error| error.to_string())
            };
            if !matches!(by, Mover::Limited { .. }) {
                return measured(guest, receive);
            }
            let (took, received) = received::while_running(|| measured(guest, receive));
            Ok(Took { received, ..took? })
        }
        Mover::Plain => {
            let listener = TcpListener::bind(ANY_PORT).map_err(|error| error.to_string())?;
            listening(&listener.local_addr().map_err(|error| error.to_string())?)?;
            let receive = || plain::receive(&guest.ram(), &listener, channels);
            measured(guest, || receive().map(|()| (0, None)).map_err(|error| error.to_string()))
        }
        Mover::Channels { received_bitmap } => {
            let door = pipeline::Door::open(ANY_PORT)?;
            listening(&door.address())?;
            measured(guest, || door.receive(&guest.ram(), channels, *received_bitmap).map(|()| (0, None)))
        }
    }
}

fn security(
    tls: Option<&Path>,
    read: impl FnOnce(&Path) -> Result<TlsSettings, sterna::tls::TlsError>,
) -> Result<Security, String> {
    match tls {
        None => Ok(Security::Insecure),
        Some(dir) => read(dir).map(Security::Tls).map_err(|error| error.to_string()),
    }
}
