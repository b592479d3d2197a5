//! One side of a benchmark of the library, as a process of its own: `sterna-bench side`, which only the benchmarks
//! start. It takes orders as lines of JSON on its input, one after another, and answers each on its output.
//!
//! CPU time and page faults are this process's own, from the beginning of a migration to its end here. The source,
//! which is reused, has filled its memory before.

use std::io::{BufRead, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sterna_codec::{ChoiceError, MethodChoice};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::GuestState;
use sterna_engine::source::{NotConverging, Source};
use sterna_engine::tls::TlsSettings;
use sterna_engine::transport::Security;
use sterna_qemu_lab::usage::Usage;

use super::super::measured::check_method;
use super::clock::{cpu_ns, now_ns};
use super::guest::{Content, Guest, Memory, Monitor};
use super::pin::pin;
use super::writer::{Writer, Writes};
use super::{delta_side, pipeline, plain, received};

/// The name in the certificate of the source.
pub(crate) const CLIENT: &str = "sterna-bench";

/// The mover of the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Mover {
    /// `Source` and `Destination`, with TLS if there is a directory of certificates.
    Sterna {
        checksums: bool,
        tls: Option<PathBuf>,
    },
    /// The same at a bandwidth limit, with a compression method and a guest that writes all of its memory for a time;
    /// the destination records the received bytes over time.
    Limited {
        bytes_per_second: u64,
        method: String,
        seconds: u64,
        tls: Option<PathBuf>,
    },
    /// `Source` and `Destination` with a compression method, and optionally a guest that writes.
    Method {
        method: String,
        level: Option<String>,
        writes: Option<Writes>,
    },
    Plain,
    /// Sterna's channels without rounds and switchover; the destination looks up zero pages in its received bitmap, or
    /// reads each.
    Channels {
        received_bitmap: bool,
    },
}

impl Mover {
    /// Returns whether the guest writes during the migration.
    pub(crate) fn writes(&self) -> bool {
        matches!(self, Self::Method { writes: Some(_), .. })
    }
}

/// A command to a side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Make guest RAM with this content, and run on these CPUs from then on.
    Prepare { memory: Memory, bytes: u64, content: Content, cpus: Vec<usize> },
    /// Listen at this address, report the port, receive one migration, and report the measurements.
    Receive { by: Mover, channels: u16, at: IpAddr },
    /// Send to that address.
    Send { by: Mover, to: String, channels: u16 },
    /// Read all of RAM, by two threads.
    ReadByTwo,
    /// Check that RAM holds this.
    Check { content: Content },
    /// Return the sum over the parts of RAM that this content fills.
    Sum { content: Content },
    /// A command of `sterna-bench delta`, with its own guest RAM.
    Delta(delta_side::Order),
}

/// An answer of a side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Listening { address: String },
    Took(Took),
    Sum(u64),
    Delta(delta_side::Found),
    Failed { reason: String },
}

/// The measurements of one operation at this side.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Took {
    pub(crate) begun_ns: u64,
    /// When the guest began to run (by the destination's monitor), or everything had arrived.
    pub(crate) ended_ns: u64,
    pub(crate) cpu_seconds: f64,
    pub(crate) faults: u64,
    pub(crate) wire_bytes: u64,
    /// Normal pages sent, in all rounds.
    pub(crate) pages: u64,
    pub(crate) downtime_ms: f64,
    /// The part of its set rate that the guest reached, if it writes.
    pub(crate) achieved: Option<f64>,
    /// Why the migration was abandoned, if that is a result.
    pub(crate) given_up: Option<String>,
    /// The process's peak of resident memory, minus guest RAM at the end.
    pub(crate) own_memory_bytes: u64,
    /// Pairs of times and bytes received by then, where recorded.
    pub(crate) received: Vec<(u64, u64)>,
}

/// Executes orders until the input ends.
pub(crate) fn run() -> Result<(), String> {
    let mut guest = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let order = serde_json::from_str(&line).map_err(|error| format!("no order: {line}: {error}"))?;
        let answer = execute(order, &mut guest).unwrap_or_else(|reason| Answer::Failed { reason });
        send_answer(&answer)?;
    }
    Ok(())
}

fn send_answer(answer: &Answer) -> Result<(), String> {
    let mut line = serde_json::to_string(answer).map_err(|error| error.to_string())?;
    line.push('\n');
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).map_err(|error| error.to_string())
}

fn execute(order: Order, guest: &mut Option<Guest>) -> Result<Answer, String> {
    if let Order::Prepare { memory, bytes, content, cpus } = order {
        let new = Guest::new(memory, bytes).map_err(|error| format!("no memory of {bytes} bytes: {error}"))?;
        new.fill(content)?;
        pin(&cpus)?;
        *guest = Some(new);
        return Ok(Answer::Done);
    }
    if let Order::Delta(order) = order {
        let listening = |address| send_answer(&Answer::Listening { address });
        return delta_side::execute(order, listening).map(Answer::Delta);
    }
    let guest = guest.as_ref().ok_or("nothing was prepared")?;
    match order {
        Order::Prepare { .. } | Order::Delta(_) => unreachable!("done above"),
        Order::Receive { by, channels, at } => receive(guest, &by, channels, at).map(Answer::Took),
        Order::Send { by, to, channels } => send(guest, &by, &to, channels).map(Answer::Took),
        Order::ReadByTwo => measured(guest, || match guest.read_by_two() {
            true => Ok((0, None)),
            false => Err("the memory is not zero".into()),
        })
        .map(Answer::Took),
        Order::Check { content } => guest.check(content).map(|()| Answer::Done),
        Order::Sum { content } => Ok(Answer::Sum(guest.sum(content))),
    }
}

/// Measures `work`, which returns the bytes that it wrote to the network, and its end if that is not the time of its
/// return.
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
        ..Took::default()
    })
}

fn send(guest: &Guest, by: &Mover, to: &str, channels: u16) -> Result<Took, String> {
    match by {
        Mover::Sterna { checksums, tls } => {
            let source = Source::new(guest.ram(), guest.log()).checksums(*checksums);
            send_whole(guest, source, choice("none", None)?, to, channels, tls.as_deref())
        }
        Mover::Limited { bytes_per_second, method, seconds, tls } => {
            let log = guest.all_dirty_for(Duration::from_secs(*seconds));
            let source = Source::new(guest.ram(), log).bandwidth(Some(*bytes_per_second));
            send_whole(guest, source, choice(method, None)?, to, channels, tls.as_deref())
        }
        Mover::Method { method, level, writes } => {
            let method = choice(method, level.as_deref())?;
            match writes {
                None => send_whole(guest, Source::new(guest.ram(), guest.log()), method, to, channels, None),
                Some(writes) => send_written(guest, method, writes, to, channels),
            }
        }
        Mover::Plain => measured(guest, || {
            plain::send(&guest.ram(), to, channels).map(|bytes| (bytes, None)).map_err(|error| error.to_string())
        }),
        Mover::Channels { .. } => {
            measured(guest, || pipeline::send(&guest.ram(), to, channels).map(|bytes| (bytes, None)))
        }
    }
}

fn choice(method: &str, level: Option<&str>) -> Result<MethodChoice, String> {
    let text = level.map_or_else(|| method.to_owned(), |level| format!("{method} {level}"));
    text.parse().map_err(|error: ChoiceError| error.to_string())
}

fn send_whole(
    guest: &Guest,
    source: Source,
    method: MethodChoice,
    to: &str,
    channels: u16,
    tls: Option<&Path>,
) -> Result<Took, String> {
    let security = security(tls, TlsSettings::client)?;
    let mut source = source.method(method).channels(channels);
    let (mut pages, mut downtime_ms) = (0, 0.0);
    let took = measured(guest, || {
        let report = source.run(to, &security, &mut Monitor::default(), &Cancel::new(), &());
        let report = report.map_err(|error| error.to_string())?;
        check_method(method, &report.method).map_err(|error| error.to_string())?;
        (pages, downtime_ms) = (report.normal_pages, report.downtime_ms);
        Ok((report.wire_bytes, None))
    })?;
    Ok(Took { pages, downtime_ms, ..took })
}

/// Sends while the guest writes. Rounds that do not converge are a result. The CPU time of the writing itself is
/// excluded.
fn send_written(guest: &Guest, method: MethodChoice, writes: &Writes, to: &str, channels: u16) -> Result<Took, String> {
    let mut source = Source::new(guest.ram(), guest.write_log()?)
        .method(method)
        .channels(channels)
        .when_not_converging(NotConverging::GiveUp)
        .give_up_after(Some(Duration::from_secs(writes.give_up_after)));
    let mut report = None;
    let mut given_up = None;
    let mut monitor = Monitor { writer: Some(Writer::start(guest.ram(), writes)), ..Monitor::default() };
    let took = measured(guest, || {
        match source.run(to, &Security::Insecure, &mut monitor, &Cancel::new(), &()) {
            Ok(done) => report = Some(done),
            Err(error) if error.guest == GuestState::RunsAtSource && error.report.is_some() => {
                given_up = Some(error.reason);
                report = error.report.map(|report| *report);
            }
            Err(error) => return Err(error.to_string()),
        }
        Ok((report.as_ref().map_or(0, |report| report.wire_bytes), None))
    })?;
    if let Some(report) = &report {
        check_method(method, &report.method).map_err(|error| error.to_string())?;
    }
    let wrote = monitor.writer.take().map(Writer::finish).unwrap_or_default();
    let (pages, downtime_ms) = report.map_or((0, 0.0), |report| (report.normal_pages, report.downtime_ms));
    Ok(Took {
        pages,
        downtime_ms,
        given_up,
        achieved: Some(wrote.achieved),
        cpu_seconds: (took.cpu_seconds - wrote.cpu_seconds).max(0.0),
        ..took
    })
}

fn receive(guest: &Guest, by: &Mover, channels: u16, at: IpAddr) -> Result<Took, String> {
    let any_port = SocketAddr::from((at, 0));
    let listening = |address: &dyn std::fmt::Display| send_answer(&Answer::Listening { address: address.to_string() });
    match by {
        Mover::Sterna { .. } | Mover::Limited { .. } | Mover::Method { .. } => {
            let tls = match by {
                Mover::Sterna { tls, .. } | Mover::Limited { tls, .. } => tls,
                _ => &None,
            };
            let security = security(tls.as_deref(), |dir| TlsSettings::server(dir, &[CLIENT.to_owned()]))?;
            let destination = Destination::new(guest.ram())
                .listen(any_port.to_string(), &security)
                .map_err(|error| error.to_string())?;
            // By name, to match the certificate.
            listening(&destination.address().to_string().replace("127.0.0.1", "localhost"))?;
            let receive = || {
                let mut monitor = Monitor::default();
                match destination.run(&mut monitor, &Cancel::new(), &()) {
                    Ok(_) => Ok((0, monitor.resumed_ns)),
                    // The source reports the outcome.
                    Err(_) if by.writes() => Ok((0, None)),
                    Err(error) => Err(error.to_string()),
                }
            };
            if !matches!(by, Mover::Limited { .. }) {
                return measured(guest, receive);
            }
            let (took, received) = received::while_running(|| measured(guest, receive));
            Ok(Took { received, ..took? })
        }
        Mover::Plain => {
            let listener = TcpListener::bind(any_port).map_err(|error| error.to_string())?;
            listening(&listener.local_addr().map_err(|error| error.to_string())?)?;
            let receive = || plain::receive(&guest.ram(), &listener, channels);
            measured(guest, || receive().map(|()| (0, None)).map_err(|error| error.to_string()))
        }
        Mover::Channels { received_bitmap } => {
            let destination = pipeline::Listening::open(&any_port.to_string())?;
            listening(&destination.address())?;
            measured(guest, || destination.receive(&guest.ram(), channels, *received_bitmap).map(|()| (0, None)))
        }
    }
}

pub(crate) fn security(
    tls: Option<&Path>,
    read: impl FnOnce(&Path) -> Result<TlsSettings, sterna_engine::tls::TlsError>,
) -> Result<Security, String> {
    match tls {
        None => Ok(Security::Insecure),
        Some(dir) => read(dir).map(Security::Tls).map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use sterna_memory::dirty::DirtyLog;

    use super::super::writer::Pattern;
    use super::*;

    #[test]
    fn memory_that_is_written_meanwhile_arrives_as_it_was_when_the_guest_was_paused() {
        let content = Content::Used(4 << 20);
        let [source, destination] = [(); 2].map(|()| Guest::new(Memory::SmallPages, 8 << 20).unwrap());
        if let Err(error) = source.write_log().unwrap().start() {
            eprintln!("skipped: {error}");
            return;
        }
        source.fill(content).unwrap();
        for pattern in [Pattern::Sequence, Pattern::Memcached] {
            let writes = Writes { pattern, rate: 4 << 20, from: 0, bytes: 4 << 20, cpus: vec![0], give_up_after: 60 };
            let listening = Destination::new(destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
            let to = listening.address().to_string();
            let took = std::thread::scope(|scope| {
                let arriving = scope.spawn(|| listening.run(&mut Monitor::default(), &Cancel::new(), &()).map(drop));
                let took = send_written(&source, choice("none", None).unwrap(), &writes, &to, 2).unwrap();
                arriving.join().unwrap().unwrap();
                took
            });
            assert_eq!((took.given_up, took.achieved.is_some()), (None, true));
            assert!(took.pages >= (4 << 20) / 4096 && took.wire_bytes > took.pages * 4096, "{pattern:?}");
            assert_eq!(source.sum(content), destination.sum(content), "{pattern:?}");
        }
    }
}
