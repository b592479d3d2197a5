//! One migration by QEMU's own stream, from the agreement with the source to the report.

use std::sync::Arc;
use std::time::Duration;

use sterna_engine::abort::Abort;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::{ControlLink, send_message, with_heartbeats};
use sterna_engine::migration::{DELTA, RETRANSMIT};
use sterna_engine::receive::placer::PageAgreement;
use sterna_engine::record_file::RecordFile;
use sterna_engine::report::{Observer, ReceiveReport};
use sterna_engine::session::{AcceptedSource, ChannelAcceptor, Peer, Session, link_events};
use sterna_engine::switchover::{DestinationKernel, DestinationSetup, Events, Receiving, run_destination};
use sterna_engine::transport::Incoming;
use sterna_wire::control::ControlMessage;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{DestinationState, DestinationSwitchover, RecordState};

use super::driver::{Driver, Event, Loading, faults};
use crate::discover::discover;
use crate::gateway::backlog::Backlog;
use crate::gateway::fault::WithFaultPoints;
use crate::gateway::feeder::{Feeder, FeederSinks};
use crate::gateway::sockets::{SocketDir, SocketPlace};
use crate::gateway::{GatewayError, Monitor, ReceiveOptions, qemu};
use crate::qmp::Qmp;
use crate::settings::{RequiredSettings, Restore, Role, Settings};

/// What a migration needs before its source is accepted.
struct Prepared {
    restore: Restore,
    record: RecordFile,
    sockets: SocketDir,
}

/// Sets QEMU up, and makes the record and the sockets.
///
/// # Errors
/// The reason, for the source.
fn prepare(session: &Session, options: &ReceiveOptions, address: &str, qmp: &Qmp) -> Result<Prepared, String> {
    let wanted = RequiredSettings {
        role: Role::Destination,
        channels: session.channels as u8,
        downtime_limit: None,
        pause_before_switchover: false,
    };
    let plan = Settings::plan(qmp, &wanted).map_err(|error| error.to_string())?;
    let state = RecordState::Destination(DestinationState::Started);
    let mut record = qemu::new_record(session, state, address.to_owned(), &Monitor::from(options.qmp.as_path()), qmp);
    record.settings_before = serde_json::to_value(plan.before()).ok();
    let restore = plan.carry_out().map_err(|error| error.to_string())?;
    let record = RecordFile::create(&options.state_dir, record).map_err(|error| error.to_string())?;
    let sockets = SocketPlace::find(&options.socket_dir, qmp.peer_pid())
        .and_then(|place| SocketDir::for_qemu(&place, session.id))
        .map_err(|error| format!("cannot make the private socket directory: {error}"))?;
    Ok(Prepared { restore, record, sockets })
}

/// Runs the migration of `source`. `address`: where `incoming` listens.
pub(super) fn run(
    source: AcceptedSource,
    options: &ReceiveOptions,
    address: &str,
    qmp: Qmp,
    incoming: Incoming,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, GatewayError> {
    let AcceptedSource { session, mode: _, machine, peer, mut writer, reader, closer, messages, welcome } = source;
    let prepared = with_heartbeats(&mut writer, || prepare(&session, options, address, &qmp));
    let Prepared { restore, record, sockets } = prepared.map_err(|reason| {
        // Fails where the peer is gone, which needs no answer.
        let _ = send_message(&mut writer, &ControlMessage::Refused(Reason::new(ErrorKind::Settings, &reason)));
        GatewayError::refused(reason)
    })?;

    let (events, inbox) = Events::channel();
    let on_connection = events.on_connection();
    let link = ControlLink::start(writer, reader, closer, messages, link_events(&on_connection, 1))
        .map_err(GatewayError::new)?;
    let abort = Arc::new(Abort::default());
    let _cancelling = events.on_cancel(cancel, || {});
    let backlog = Backlog::default();
    let of_qemu = events.clone();
    qemu::watch(&qmp, backlog.entry(), move |event| of_qemu.send(Event::Qemu(event))).map_err(GatewayError::new)?;

    let blocks_of = qmp.clone();
    let find_blocks = Box::new(move || discover(&blocks_of).map_err(|error| error.to_string()));
    let agreement = PageAgreement { deltas: session.has(DELTA), retransmission: session.has(RETRANSMIT) };
    let feeder = Feeder::new(&sockets.path(), Duration::ZERO, options.placement, find_blocks, agreement, &abort);
    let fed = events.clone();
    let sinks = FeederSinks::new(Arc::clone(&feeder), move |news| {
        fed.send(Event::Feeder(news));
    });
    let acceptor = ChannelAcceptor::new(session, Box::new(sinks), &abort, None, on_connection);
    let stop_listening = incoming.stop_handle();
    let (stall, total) = (Some(options.waits.stall), options.waits.total);
    let receiving = Receiving::start(acceptor, incoming, welcome, machine.ram, stall, total);

    let observer = &WithFaultPoints(observer);
    let (switchover, first) = DestinationSwitchover::begin();
    let kernel = DestinationKernel::new(DestinationSetup {
        // QEMU's own stream does not go on over another connection.
        retry: Duration::ZERO,
        machine: switchover,
        peer: Peer::new(link),
        ledger: record.into(),
        events,
        abort,
        cancel,
        observer,
    });
    let faults_before = faults(kernel.ledger.record().monitor_process);
    let mut driver = Driver {
        kernel,
        receiving: receiving.map_err(GatewayError::new)?,
        qmp,
        cancel,
        restore: Some(restore),
        feeder,
        sockets,
        loading: Loading::default(),
        faults_before,
        return_path: None,
        backlog: Some(backlog),
    };
    let outcome = run_destination(&mut driver, &inbox, first);
    let report = driver.finish(outcome, peer);
    // The accepting thread ends by itself; a handshake that is under way is not waited for.
    stop_listening.stop();
    Ok(report)
}
