//! The destination until its migration begins: waits for a source, agrees with it, and makes the driver.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use sterna_wire::control::{Block, ControlMessage, Hello, Machine, Mode};
use sterna_wire::reason::Reason;
use sterna_wire::switchover::{DestinationState, DestinationSwitchover, RecordState};

use super::channels::PostCopyChannels;
use super::driver::{Devices, Driver, Event, StateSinks};
use super::monitor_calls::monitor_calls;
use super::target::{RamSink, Target};
use super::{Destination, Listening, ReadyDestination, ReadyMachine, Settings, post_copy};
use crate::abort::Abort;
use crate::cancel::Cancel;
use crate::control_link::{ControlEvent, ControlLink, send_message, with_heartbeats};
use crate::cpu_time::CpuTime;
use crate::device_state::load::LoadingDevices;
use crate::device_state::{self, DeviceChannels, DeviceId};
use crate::migration::{
    Cause, DELTA, ErrorKind, MigrationError, POST_COPY, RESUME, RETRANSMIT, difference, machine, size_difference,
};
use crate::monitor::{CaughtObserver, DestinationMonitor};
use crate::occupied::Occupied;
use crate::opening::{Opening, Prepared};
use crate::process;
use crate::receive::ChannelSink;
use crate::receive::placer::PageAgreement;
use crate::report::{Observer, ReceiveReport};
use crate::session::{
    AcceptedSource, ChannelAcceptor, ConnectionEvent, Features, Handshake, OPENING, OnConnectionEvent, Peer, Sinks,
    link_events,
};
use crate::switchover::{DestinationKernel, DestinationSetup, Events, Ledger, Receiving, cancelled, run_destination};
use crate::transport::{Address, Incoming, Stop, Writer};
use crate::vmm::DestinationVmm;

/// Waits for a source, and runs its migration.
pub(super) fn run(
    listening: Listening,
    vmm: &mut dyn DestinationVmm,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, MigrationError> {
    let Listening { mut ready, address, incoming } = listening;
    // Ends the listening and all handshakes, however this function returns.
    let stopping = StopAtEnd(incoming.stop_handle());
    let observer = &CaughtObserver(observer);
    let cpu = CpuTime::new(ready.settings.sandboxed);
    let _counted = cpu.count();
    let mut vmm = DestinationMonitor::new(vmm, &cpu).map_err(MigrationError::not_accepted)?;
    observer.listening(&address.to_string());
    let monitor_refuses_post_copy = vmm.post_copy_refusal().map_err(MigrationError::not_accepted)?;
    let given = ready
        .given
        .as_ref()
        .map(|given| Checks::new(given, monitor_refuses_post_copy.clone(), ready.settings.sandboxed));
    // Where the monitor makes the machine for its source, the machine is compared then.
    let refusals = |hello: &Hello| {
        given
            .as_ref()
            .map_or_else(Vec::new, |given| given.refusals(&hello.machine, Destination::wants_post_copy(hello)))
    };
    let mut offered = Destination::FEATURES.offered.to_vec();
    offered.push(OPENING);
    offered.extend((!ready.settings.retry.is_zero()).then_some(RESUME));
    offered.extend(given.as_ref().is_none_or(|given| given.no_post_copy.is_none()).then_some(POST_COPY));
    let features = Features { offered: &offered, ..Destination::FEATURES };
    let handshake = Handshake { takes: &[(Mode::Embedded, features)], refusals: &refusals, describe: None };
    let (source, machine) = loop {
        let source = handshake.first(&incoming, cancel, |source| observer.note(&source.to_string()));
        let Some(mut source) = source else {
            let reason =
                if cancel.is_cancelled() { "cancelled before a source came" } else { "the listener has ended" };
            let kind = if cancel.is_cancelled() { ErrorKind::Cancelled } else { ErrorKind::Network };
            return Err(MigrationError::not_accepted(Cause::new(kind, reason)));
        };
        match prepare(&mut ready, &mut source, &mut vmm, monitor_refuses_post_copy.as_ref(), cancel) {
            Ok(machine) => break (source, machine),
            Err(reason) => {
                observer.note(&format!("refused: {}: {reason}", source.peer));
                refuse(&mut source.writer, reason);
            }
        }
    };
    let report = take(ready, machine, &address, source, incoming, vmm, cpu.clone(), cancel, observer);
    drop(stopping);
    report
}

/// What a source is compared with.
struct Checks {
    blocks: Vec<Block>,
    devices: Vec<DeviceId>,
    /// Why post-copy is not possible here, if it is not.
    no_post_copy: Option<String>,
}

impl Checks {
    /// `monitor_refuses`: why the monitor permits no post-copy.
    fn new(ready: &ReadyMachine, monitor_refuses: Option<String>, sandboxed: bool) -> Self {
        let ram = ready.target.ram();
        Self {
            blocks: machine(String::new(), ram, 0).blocks,
            devices: ready.devices.iter().map(|(id, _)| id.clone()).collect(),
            no_post_copy: monitor_refuses.or_else(|| post_copy::refusal(ram, sandboxed)),
        }
    }

    /// Returns why a source cannot be accepted whose machine is `machine`, and which wants post-copy or not.
    fn refusals(&self, machine: &Machine, post_copy: bool) -> Vec<String> {
        let post_copy = self.no_post_copy.as_ref().filter(|_| post_copy);
        let post_copy = post_copy.map(|reason| format!("post-copy is not possible at the destination: {reason}"));
        let blocks = difference(&machine.blocks, &self.blocks);
        [blocks, device_state::difference(machine, &self.devices), post_copy].into_iter().flatten().collect()
    }
}

/// Has the monitor prepare for a source, which gets heartbeats meanwhile. Returns the machine, or why the source is refused.
fn prepare(
    ready: &mut ReadyDestination,
    source: &mut AcceptedSource,
    vmm: &mut DestinationMonitor<'_>,
    monitor_refuses_post_copy: Option<&String>,
    cancel: &Cancel,
) -> Result<ReadyMachine, String> {
    let (machine, post_copy, sandboxed) = (&source.machine, source.session.has(POST_COPY), ready.settings.sandboxed);
    let mut opening = Opening::new(&source.peer, machine);
    if !source.session.has(OPENING) {
        opening.message.clear();
    }
    with_heartbeats(&mut source.writer, || match vmm.prepare(&opening).map_err(|error| error.to_string())? {
        Prepared::AsGiven => ready.given.take().ok_or_else(|| "the monitor has made no RAM for the guest".to_owned()),
        Prepared::Made { ram, devices } => {
            let made = ready.preparation.prepare(ram, devices, cancel).map_err(|error| error.reason)?;
            let checks = Checks::new(&made, monitor_refuses_post_copy.cloned(), sandboxed);
            checks.refusals(machine, post_copy).into_iter().next().map_or(Ok(made), Err)
        }
    })
}

/// Runs the migration of a source whose hello the caller has accepted already, to learn which RAM is needed.
pub(super) fn run_accepted(
    destination: Destination,
    address: &Address,
    mut source: AcceptedSource,
    incoming: Incoming,
    vmm: &mut dyn DestinationVmm,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, MigrationError> {
    let stopping = StopAtEnd(incoming.stop_handle());
    let observer = &CaughtObserver(observer);
    let cpu = CpuTime::new(destination.settings.sandboxed);
    let _counted = cpu.count();
    // Whatever fails from here on, the source receives the reason.
    let prepared = with_heartbeats(&mut source.writer, || destination.prepare(cancel));
    let mut ready = prepared.map_err(|error| inform(&mut source.writer, error))?;
    let vmm = DestinationMonitor::new(vmm, &cpu).map_err(MigrationError::not_accepted);
    let vmm = vmm.map_err(|error| inform(&mut source.writer, error))?;
    let Some(machine) = ready.given.take() else {
        return Err(refuse(&mut source.writer, "the destination has no RAM".to_owned()));
    };
    let ids: Vec<DeviceId> = machine.devices.iter().map(|(id, _)| id.clone()).collect();
    let differs = size_difference(&source.machine.blocks, machine.target.ram());
    if let Some(reason) = differs.or_else(|| device_state::difference(&source.machine, &ids)) {
        return Err(refuse(&mut source.writer, reason));
    }
    let report = take(ready, machine, address, source, incoming, vmm, cpu.clone(), cancel, observer);
    drop(stopping);
    report
}

/// Refuses a source with the reason, and returns the error.
fn refuse(writer: &mut Writer, reason: String) -> MigrationError {
    inform(writer, MigrationError::not_accepted(reason))
}

/// Refuses a source with the reason of `error`, and returns the error.
fn inform(writer: &mut Writer, error: MigrationError) -> MigrationError {
    // Fails where the peer is gone, which needs no answer.
    let _ = send_message(writer, &ControlMessage::Refused(Reason::new(error.kind, &error.reason)));
    error
}

#[allow(clippy::too_many_arguments)]
fn take(
    ready: ReadyDestination,
    machine: ReadyMachine,
    address: &Address,
    source: AcceptedSource,
    incoming: Incoming,
    mut vmm: DestinationMonitor<'_>,
    cpu: CpuTime,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, MigrationError> {
    let ReadyDestination { settings, fence, .. } = ready;
    let Settings { state_dir, sandboxed, linger, retry, stall, give_up_after, monitor } = settings;
    let ReadyMachine { target, devices, device_share } = machine;
    let AcceptedSource { session, mode: _, machine, peer, mut writer, reader, closer, messages, welcome } = source;
    observer.note(&format!("migration {} from {peer}", session.id));
    tracing::info!(id = %session.id, monitor = vmm.name(), peer, "accepted a migration");

    let state = RecordState::Destination(DestinationState::Started);
    let ledger = Ledger::new(state_dir.as_ref(), &session, state, address.to_string(), &monitor);
    let ledger = ledger.map_err(|error| refuse(&mut writer, error.to_string()))?;

    let (events, inbox) = Events::channel();
    let occupied = Occupied::default();
    let on_connection = on_connection(&events, &occupied);
    let link = ControlLink::start(writer, reader, closer, messages, link_events(&on_connection, 1));
    let link = link.map_err(MigrationError::not_accepted)?;
    let abort = Arc::new(Abort::default());
    let monitor_call = occupied.clone();
    let _cancelling = events.on_cancel(cancel, move || monitor_call.raise(cancelled()));
    let fenced = events.clone();
    let _fencing = fence.0.on_cancel(move || {
        fenced.send(Event::Fenced);
    });

    let devices = Devices::new(devices, &machine, device_share);
    let ending = devices.known();
    abort.on_end(move || ending.end());
    let state_sinks = StateSinks::new(events.clone());
    let loading = state_sinks.renew();
    // The state of devices cannot be loaded again.
    let resumes = session.has(RESUME) && machine.devices.is_empty();
    let retry = if resumes { retry.min(Duration::from_millis(machine.retry_ms)) } else { Duration::ZERO };
    let sinks = TargetSinks {
        target: Arc::clone(&target),
        agreement: PageAgreement { deltas: session.has(DELTA), retransmission: session.has(RETRANSMIT) },
        state: state_sinks.clone(),
        mixed: devices.on(DeviceChannels::Mixed),
        serial: devices.on(DeviceChannels::Serial),
        own: devices.on(DeviceChannels::Own(0)),
    };
    let rules = session.rules();
    let channels = PostCopyChannels::default();
    let extra_channels = channels.handler(&target, rules);
    let acceptor = ChannelAcceptor::new(session, Box::new(sinks), &abort, Some(extra_channels), on_connection);
    let receiving = Receiving::start(acceptor, incoming, welcome, machine.ram, stall, give_up_after);
    let mut receiving = receiving.map_err(MigrationError::not_accepted)?;
    receiving.placement = target.placement();

    let (machine, first) = DestinationSwitchover::begin();
    let kernel = DestinationKernel::new(DestinationSetup {
        machine,
        peer: Peer::new(link),
        ledger,
        events,
        abort,
        cancel,
        retry,
        observer,
    });
    let (calls, calls_in) = monitor_calls();
    let counted = cpu.clone();
    let mut driver = Driver {
        kernel,
        receiving,
        vmm: calls,
        cpu,
        channels,
        faults: None,
        devices,
        loading,
        state_sinks,
        target,
        occupied,
        faults_before: if sandboxed { 0 } else { process::faults(std::process::id()) },
        linger,
    };
    std::thread::scope(|scope| {
        let run = move || {
            let _counted = counted.count();
            let outcome = run_destination(&mut driver, &inbox, first);
            driver.finish(outcome, peer)
        };
        // The loop has a thread of its own: what starts the guest in post-copy may wait for memory that only the loop can have sent.
        let running = Builder::new().name("destination".into()).spawn_scoped(scope, run);
        let running = running.map_err(MigrationError::not_accepted)?;
        calls_in.serve(&mut vmm);
        running.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Returns a closure that passes on the events of the control channels, and ends a call of the monitor where the source is lost.
fn on_connection(events: &Events<Event>, occupied: &Occupied) -> OnConnectionEvent {
    let (pass_on, monitor_call) = (events.on_connection(), occupied.clone());
    Arc::new(move |news| {
        if let ConnectionEvent::Control(incarnation, ControlEvent::Lost(reason)) = &news {
            monitor_call.lost(*incarnation, format_args!("the source was lost: {reason}"));
        }
        pass_on(news);
    })
}

/// Ends the listening when it is dropped.
struct StopAtEnd(Stop);

impl Drop for StopAtEnd {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The sinks of this migration's channels.
struct TargetSinks {
    target: Arc<Target>,
    agreement: PageAgreement,
    state: StateSinks,
    /// The devices, where their state arrives on RAM channels.
    mixed: Option<Arc<LoadingDevices>>,
    /// The devices, where their state arrives on the stream channel.
    serial: Option<Arc<LoadingDevices>>,
    /// The devices, where their state arrives on channels of its own.
    own: Option<Arc<LoadingDevices>>,
}

impl Sinks for TargetSinks {
    fn ram(&self, index: u16) -> ChannelSink {
        let pages = RamSink::new(&self.target, index, self.agreement);
        ChannelSink::new().with_pages(pages).with_device_pieces(self.mixed.clone())
    }

    fn stream(&self) -> ChannelSink {
        ChannelSink::new().with_stream(self.state.take()).with_device_pieces(self.serial.clone())
    }

    fn devices(&self) -> Option<ChannelSink> {
        Some(ChannelSink::new().with_device_pieces(Some(self.own.clone()?)))
    }
}
