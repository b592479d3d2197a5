//! A source and a destination as processes of their own, and one migration between them, measured.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity};
use sterna_engine::cancel::Cancel;

use super::super::measured::Measured;
use super::guest::{Content, Memory};
use super::side::{Answer, Mover, Order, Took};
use super::warm::Warmth;
use crate::hosts::{Hosts, HostsError, Side, doing};

/// Time limit of each step, enough for a slow machine.
const LONG: Duration = Duration::from_secs(180);
/// How often a wait checks for cancellation.
const SLICE: Duration = Duration::from_millis(200);

/// Settings of both sides.
pub(crate) struct Rig<'a> {
    pub(crate) hosts: Hosts,
    /// CPUs for each side.
    pub(crate) cpus: u16,
    pub(crate) cancel: &'a Cancel,
}

/// Guest RAM of one side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) memory: Memory,
    pub(crate) bytes: u64,
    pub(crate) content: Content,
}

/// Returns the CPUs that this thread may run on, at least one.
fn allowed_cpus() -> Vec<usize> {
    let allowed = |set: CpuSet| (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect::<Vec<_>>();
    sched_getaffinity(None).map(allowed).ok().filter(|cpus| !cpus.is_empty()).unwrap_or_else(|| vec![0])
}

impl Rig<'_> {
    /// Returns the CPUs of a side. Neighbours are often two threads of one core, so the destination's are of the
    /// machine's second half.
    pub(crate) fn cpus(&self, side: Side) -> Vec<usize> {
        let own = usize::from(self.cpus);
        let all = allowed_cpus();
        let first = match side {
            Side::A => 0,
            Side::B => (all.len() / 2).max(own),
        };
        // On a machine with too few CPUs, both sides share them.
        (first..first + own).map(|cpu| all[cpu % all.len()]).collect()
    }

    /// Returns the CPUs of the thread that writes the guest's memory: those of neither side, like a guest's own; all if
    /// there are no others.
    pub(crate) fn guest_cpus(&self) -> Vec<usize> {
        let taken = [self.cpus(Side::A), self.cpus(Side::B)].concat();
        let all = allowed_cpus();
        let free: Vec<usize> = all.iter().copied().filter(|cpu| !taken.contains(cpu)).collect();
        if free.is_empty() { all } else { free }
    }

    /// Starts a side with guest RAM.
    pub(crate) fn side<'a>(&'a self, side: Side, shape: Shape) -> Result<SideProcess<'a>, HostsError> {
        let mut process = SideProcess::start(&self.hosts, side, self.cancel)?;
        let Shape { memory, bytes, content } = shape;
        match process.request(&Order::Prepare { memory, bytes, content, cpus: self.cpus(side) })? {
            Answer::Done => Ok(process),
            other => Err(unexpected(&other)),
        }
    }

    /// Moves the memory of `source` once, to a fresh destination with RAM of the same size; with `verify` the arrived
    /// memory is checked. `expected` is how many bytes of memory the destination will need.
    pub(crate) fn migrate(
        &self,
        source: &RefCell<SideProcess<'_>>,
        shape: Shape,
        expected: u64,
        by: &Mover,
        channels: u16,
        verify: bool,
    ) -> Result<Measured, HostsError> {
        let Shape { memory, bytes, content } = shape;
        let mut destination = self.side(Side::B, Shape { memory, bytes, content: Content::Untouched })?;
        destination.send(&Order::Receive { by: by.clone(), channels, at: self.hosts.address_b() })?;
        let to = match destination.receive_answer()? {
            Answer::Listening { address } => address,
            other => return Err(unexpected(&other)),
        };
        let mut source = source.borrow_mut();
        let _warmth = Warmth::hold(expected, &self.cpus(Side::B))?;
        let wire_before = self.hosts.wire_bytes()?;
        source.send(&Order::Send { by: by.clone(), to, channels })?;
        let sent = took(source.receive_answer()?)?;
        let received = took(destination.receive_answer()?)?;
        let wire = self.hosts.wire_bytes()?.zip(wire_before).map(|(after, before)| after - before);
        if verify && sent.given_up.is_none() {
            verify_arrived(&mut source, &mut destination, content, by)?;
        }
        // Samples that the destination records before the source begins have negative times.
        let since = |ns: u64| (ns as f64 - sent.begun_ns as f64) / 1e9;
        Ok(Measured {
            total_ms: (received.ended_ns.saturating_sub(sent.begun_ns)) as f64 / 1e6,
            wire_bytes: wire.unwrap_or(sent.wire_bytes as f64),
            pages: sent.pages as f64,
            rounds: 0.0,
            achieved: sent.achieved,
            given_up: sent.given_up,
            source_cpu: sent.cpu_seconds,
            destination_cpu: received.cpu_seconds,
            faults: received.faults as f64,
            source_memory: sent.own_memory_bytes as f64,
            destination_memory: received.own_memory_bytes as f64,
            downtime_ms: sent.downtime_ms,
            received: received.received.iter().map(|(ns, bytes)| (since(*ns), *bytes as f64)).collect(),
        })
    }
}

/// Checks the arrived memory: against the content, or if a guest has written, against the source's memory.
fn verify_arrived(
    source: &mut SideProcess<'_>,
    destination: &mut SideProcess<'_>,
    content: Content,
    by: &Mover,
) -> Result<(), HostsError> {
    if !by.writes() {
        return match destination.request(&Order::Check { content })? {
            Answer::Done => Ok(()),
            other => Err(unexpected(&other)),
        };
    }
    match (source.request(&Order::Sum { content })?, destination.request(&Order::Sum { content })?) {
        (Answer::Sum(here), Answer::Sum(there)) if here == there => Ok(()),
        (Answer::Sum(_), Answer::Sum(_)) => Err(HostsError("the guest arrived with other memory than it had".into())),
        (other, _) => Err(unexpected(&other)),
    }
}

/// Returns the measurement in a side's answer.
pub(crate) fn took(answer: Answer) -> Result<Took, HostsError> {
    match answer {
        Answer::Took(took) => Ok(took),
        other => Err(unexpected(&other)),
    }
}

/// Makes the error for an unexpected answer of a side.
pub(crate) fn unexpected(answer: &Answer) -> HostsError {
    match answer {
        Answer::Failed { reason } => HostsError(reason.clone()),
        other => HostsError(format!("a side answered {other:?}")),
    }
}

/// The process of a side; it ends when this is dropped.
pub(crate) struct SideProcess<'a> {
    name: &'static str,
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    cancel: &'a Cancel,
}

impl<'a> SideProcess<'a> {
    /// Starts a side on a host.
    pub(crate) fn start(hosts: &Hosts, side: Side, cancel: &'a Cancel) -> Result<Self, HostsError> {
        let name = if side == Side::A { "the source" } else { "the destination" };
        let mut command = hosts.bench(side)?;
        command.arg("side").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(doing(format_args!("starting {name}")))?;
        let (Some(orders), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(HostsError(format!("{name} has no pipes")));
        };
        let (heard, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if heard.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { name, child, orders, answers, cancel })
    }

    /// Sends an order.
    pub(crate) fn send(&mut self, order: &Order) -> Result<(), HostsError> {
        let mut line = serde_json::to_string(order).map_err(doing("writing an order"))?;
        line.push('\n');
        self.orders.write_all(line.as_bytes()).map_err(doing(format_args!("giving an order to {}", self.name)))
    }

    /// Waits for an answer.
    pub(crate) fn receive_answer(&mut self) -> Result<Answer, HostsError> {
        let deadline = Instant::now() + LONG;
        loop {
            match self.answers.recv_timeout(SLICE) {
                Ok(line) => {
                    return serde_json::from_str(&line).map_err(doing(format_args!("{} answered {line}", self.name)));
                }
                Err(RecvTimeoutError::Timeout) if self.cancel.is_cancelled() => {
                    return Err(HostsError("cancelled".into()));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(HostsError(format!("{} does not answer after {} s", self.name, LONG.as_secs())));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(HostsError(format!("{} has ended", self.name))),
            }
        }
    }

    /// Sends an order and waits for the answer.
    pub(crate) fn request(&mut self, order: &Order) -> Result<Answer, HostsError> {
        self.send(order)?;
        self.receive_answer()
    }
}

impl Drop for SideProcess<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
