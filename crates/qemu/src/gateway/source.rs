//! `sterna send`: moves the guest of a source QEMU, in direct mode where possible, else by QEMU's own stream.
//!
//! This file agrees with QEMU and with the destination. `driver` then performs the actions of the switchover's state machine; other
//! threads move the bytes.

mod driver;
mod migration;
mod report;
mod requests;
mod rounds;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_codec::{Engine, EngineMissing};
use sterna_engine::cancel::Cancel;
use sterna_engine::live_control::Steering;
use sterna_engine::migration::DELTA;
use sterna_engine::record_file::RecordFile;
use sterna_engine::recovery::MAX_DIAL_PAUSE;
use sterna_engine::report::{Observer, Progress, Report};
use sterna_engine::send::{Compression, DeltaBlocks, Refusals};
use sterna_engine::session::{self, Backoff, DIAL_PAUSE, Offer, Peer, Redial};
use sterna_engine::switchover::{
    ABORT_TIME, DELIVERY_TIME, DeliveryLimits, Events, Reconnection, START_TIME, SourceKernel, SourceSetup, after,
    run_source,
};
use sterna_engine::transport::Address;
use sterna_engine::window::Window;
use sterna_offload::{Offload, Operation};
use sterna_wire::control::DestinationFigures;
use sterna_wire::reason::ErrorKind;
use sterna_wire::switchover::{RecordState, SourceState, SourceSwitchover};

use self::driver::{Driver, Event};
use self::migration::Stage;
use self::rounds::RoundsWatch;
use super::backlog::Backlog;
use super::claim::Claim;
use super::comparison::{self, Compared};
use super::fault::WithFaultPoints;
use super::faults;
use super::features::{FEATURES, WITH_DELTAS};
use super::neighbours::{self, Media};
use super::qemu;
use super::sockets::Listens;
use super::{GatewayError, SendMode, SendOptions, direct, earlier};
use crate::qmp::Qmp;
use crate::settings::{RequiredSettings, Role, Settings};

/// Why `--mode stream` is refused for a guest of libvirt.
pub(super) const LIBVIRTS_DIRECTLY: &str =
    "--libvirt moves guests in direct mode only; virsh migrate through `sterna proxy` moves them by QEMU's own stream";

/// Estimated time of commit and start besides loading: two records written durably on each side, and `cont`.
const COMMIT_ESTIMATE: Duration = Duration::from_millis(20);
/// QEMU never considers a smaller downtime limit as reached.
const MIN_DOWNTIME_LIMIT: Duration = Duration::from_millis(1);

/// Moves the guest of the QEMU behind `options.monitor` to `options.to`.
///
/// # Errors
/// Only for failures before the guest is touched; the report describes every other end.
pub fn send(options: &SendOptions, cancel: &Cancel, observer: &dyn Observer) -> Result<Report, GatewayError> {
    let qmp = options.monitor.connect().map_err(GatewayError::untouched)?;
    // Held to the end: keeps every other sterna from this QEMU.
    let _claim = Claim::of(&qmp).map_err(GatewayError::untouched)?;
    comparison::await_destination(&qmp, options, cancel, observer)?;
    let settings = Settings::read(&qmp).map_err(GatewayError::untouched)?;
    // First: the records know more about a guest that does not run than QEMU does.
    earlier::refuse_if_claimed(&options.state_dir, &qmp, &options.monitor)?;
    let refusals = settings.refusals(Role::Source);
    if !refusals.is_empty() {
        return Err(GatewayError::untouched(format_args!("this guest cannot be moved: {}", refusals.join("; "))));
    }
    earlier::refuse_source(&options.state_dir, &qmp, &options.monitor, &settings.status)?;
    qemu::check_state_directory(&options.state_dir).map_err(GatewayError::untouched)?;
    neighbours::check_jobs(&qmp).map_err(GatewayError::untouched)?;
    let machine = qemu::machine(&qmp, options.downtime);
    let offload = open_devices(options)?;
    // No QEMU exists at the destination that could be compared: libvirt makes it from this one's description.
    let mut compared = match options.monitor.is_libvirts() {
        true => Compared::without_destination(),
        false => Compared::begin(&qmp, options, cancel, observer)?,
    };
    let not_direct = match try_direct(&qmp, options, offload, &mut compared, cancel, observer)? {
        Direct::Done(mut report) => {
            report.warnings.extend(compared.warnings);
            return Ok(*report);
        }
        Direct::Not(why) => why,
    };
    let faults = faults::of_stream(&qmp);
    faults.iter().for_each(|fault| observer.note(&format!("warning: {fault}")));
    compared.warnings.extend(faults.into_iter().map(str::to_owned));
    // Before the destination is contacted: a `migrate` that QEMU refuses would end the destination's QEMU. Direct mode needs no migration of
    // QEMU's.
    qemu::wait_cleaned_up(&qmp).map_err(GatewayError::untouched)?;
    qemu::check_sockets(&options.socket_dir, Listens::Sterna, &qmp).map_err(GatewayError::untouched)?;
    let steering =
        Steering::begin(&options.control, cancel).map_err(|error| GatewayError::untouched(error.to_string()))?;
    let (control, cancel) = (steering.control(), steering.cancel());
    observer.note(&format!("source: {} ({})", machine.monitor, machine.machine_type));
    qemu::unknown_process_note(&qmp).iter().for_each(|note| observer.note(note));
    let media = Media::of(&qmp).map_err(GatewayError::untouched)?;
    let engines = options.qatzip.engines(options.method, options.channels);
    let (engines, line) = engines.map_err(GatewayError::untouched)?;
    line.iter().for_each(|line| observer.note(line));
    let encoding = engines.encoding(options.method).map_err(GatewayError::untouched)?;

    if cancel.is_cancelled() {
        return Err(GatewayError::untouched("cancelled").of(ErrorKind::Cancelled));
    }
    compared.confirm()?;
    let (events, inbox) = Events::channel();
    let offer = Offer {
        to: &Address::from(&options.to),
        security: &options.security,
        channels: options.channels,
        packet_size: options.packet_size,
        machine: machine.clone(),
        mode: sterna_wire::control::Mode::Owner,
        features: if options.delta_cache > 0 { WITH_DELTAS } else { FEATURES },
        encoding,
        patience: Duration::ZERO,
    };
    let on_connection = events.on_connection();
    let (link, session) = session::dial(&offer, cancel, &on_connection).map_err(GatewayError::untouched)?;
    observer.note(&format!("migration {}: {} accepted it", session.id, options.to));
    if cancel.is_cancelled() {
        return Err(GatewayError::untouched("cancelled").of(ErrorKind::Cancelled));
    }

    let state = RecordState::Source(SourceState::Started);
    let mut record = qemu::new_record(&session, state, options.to.clone(), &options.monitor, &qmp);
    record.source_after = options.source_after;
    let mut record = RecordFile::create(&options.state_dir, record).map_err(GatewayError::untouched)?;

    let window = Arc::new(Window::new(session.packet_size as u64, session.round_trip, options.downtime));
    let ours = window.allowance() + COMMIT_ESTIMATE;
    let limit = options.downtime.saturating_sub(ours).max(MIN_DOWNTIME_LIMIT);
    let plan = Settings::plan(&qmp, &wanted(options, limit)).map_err(GatewayError::untouched)?;
    record.amend(|record| record.settings_before = serde_json::to_value(plan.before()).ok());
    observer.note(&format!(
        "QEMU's downtime-limit is {} ms: {} ms less what draining, loading and committing take",
        limit.as_millis(),
        options.downtime.as_millis()
    ));
    let _cancelling = events.on_cancel(cancel, || {});
    let backlog = Backlog::default();
    let of_qemu = events.clone();
    qemu::watch(&qmp, backlog.entry(), move |event| of_qemu.send(Event::Qemu(event)))
        .map_err(GatewayError::untouched)?;

    let deltas: Option<Arc<DeltaBlocks>> = (options.delta_cache > 0 && session.has(DELTA)).then(Arc::default);
    let refusals = deltas.clone().map(|blocks| Arc::new(Refusals::of_kept_pages(blocks)));
    let redial = Redial::with(Backoff::new(DIAL_PAUSE).up_to(MAX_DIAL_PAUSE));
    let observer = &WithFaultPoints(observer);
    let (switchover, first) = SourceSwitchover::begin();
    let kernel = SourceKernel::new(SourceSetup {
        machine: switchover,
        peer: Peer::new(link),
        reconnection: Reconnection { to: Address::from(&options.to), security: Ok(options.security.clone()), redial },
        on_connection,
        session,
        ledger: record.into(),
        events,
        limits: DeliveryLimits {
            // QEMU's own stream does not go on over another connection.
            retry: Duration::ZERO,
            decision: DELIVERY_TIME,
            start: Some(START_TIME),
            abort: ABORT_TIME,
        },
        cancel,
        control: control.clone(),
        observer,
    });
    kernel.await_requests();
    let mut driver = Driver {
        kernel,
        options,
        compression: Compression::new(encoding, engines, options.channels, options.max_cpus),
        qmp,
        stage: Stage::Planned(plan),
        window,
        started: Instant::now(),
        figures: DestinationFigures::default(),
        placement: Vec::new(),
        ready: false,
        progress: Progress::default(),
        watch: RoundsWatch::new(options.downtime),
        limit,
        content_reported: 0,
        deltas,
        refusals,
        delta_cache: 0,
        no_deltas: None,
        rounds: 0,
        until: options.waits.total.map(after),
        moved: (0, 0),
        machine_name: format!("{} {}", machine.monitor, machine.machine_type),
        not_direct,
        media,
        backlog,
    };
    let end = run_source(&mut driver, &inbox, first);
    let mut report = driver.finish(end);
    report.warnings.extend(compared.warnings);
    Ok(report)
}

/// Returns the settings that QEMU's own migration needs.
pub(super) fn wanted(options: &SendOptions, downtime_limit: Duration) -> RequiredSettings {
    RequiredSettings {
        role: Role::Source,
        channels: options.channels as u8,
        downtime_limit: Some(downtime_limit),
        pause_before_switchover: false,
    }
}

/// The outcome of [`try_direct`].
enum Direct {
    /// The migration ran in direct mode.
    Done(Box<Report>),
    /// The guest was not touched, and QEMU's stream is used instead, for this reason.
    Not(String),
}

/// Opens the devices that direct mode may use, before anything is done to QEMU or the destination is contacted.
///
/// # Errors
/// A device that the options name is missing.
fn open_devices(options: &SendOptions) -> Result<Option<Arc<Offload>>, GatewayError> {
    if options.mode == SendMode::Stream {
        return Ok(None);
    }
    let offload = direct::offload(options).map_err(GatewayError::untouched)?;
    let compresses = offload.as_ref().is_some_and(|offload| offload.accelerates(Operation::Deflate));
    if options.method.requires(Engine::Iaa) && !compresses {
        let missing = EngineMissing { engine: Engine::Iaa };
        return Err(GatewayError::untouched(format_args!(
            "{missing}; name one by --accel (`sterna accel list` says what is here)"
        )));
    }
    Ok(offload)
}

/// Moves the guest in direct mode if that is possible and allowed by the options.
fn try_direct(
    qmp: &Qmp,
    options: &SendOptions,
    offload: Option<Arc<Offload>>,
    compared: &mut Compared,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Direct, GatewayError> {
    let stream = |why: String| {
        if options.method.requires(Engine::Iaa) {
            return Err(GatewayError::untouched(format_args!(
                "--engine iaa needs direct mode, and the guest cannot be moved directly: {why}"
            )));
        }
        if let Some(option) = options.direct.required() {
            return Err(GatewayError::untouched(format_args!(
                "{option} needs direct mode, and the guest cannot be moved directly: {why}"
            )));
        }
        let unused = options.direct.for_speed();
        if !unused.is_empty() {
            observer.note(&format!("{}: not used, because it needs direct mode", unused.join(", ")));
        }
        observer.note(&format!("mode: stream, by QEMU's own migration; not direct: {why}"));
        Ok(Direct::Not(why))
    };
    if options.mode == SendMode::Stream {
        if options.monitor.is_libvirts() {
            return Err(GatewayError::untouched(LIBVIRTS_DIRECTLY));
        }
        return stream("--mode stream was given".into());
    }
    let libvirts = options.monitor.is_libvirts();
    let must = options.mode == SendMode::Direct || libvirts;
    let ready = match direct::prepare(qmp, &options.monitor) {
        Ok(ready) => ready,
        Err(why) if must => {
            let instead = if libvirts {
                "by libvirt; virsh migrate through `sterna proxy` moves it by QEMU's own stream"
            } else {
                "--mode direct"
            };
            return Err(GatewayError::untouched(format_args!("the guest cannot be moved directly ({instead}): {why}"))
                .of(direct::refusal_kind(qmp)));
        }
        Err(why) => return stream(why),
    };
    observer.note(&format!("mode: direct, by {}", ready.tracking()));
    if let Some(offload) = &offload {
        observer.note(&offload.summary().to_string());
    }
    if cancel.is_cancelled() {
        return Err(GatewayError::untouched("cancelled").of(ErrorKind::Cancelled));
    }
    compared.confirm()?;
    match direct::send(ready, qmp, options, offload, cancel, observer) {
        Ok(report) => Ok(Direct::Done(Box::new(report))),
        // Only the destination could know this reason. The guest was not touched.
        Err(error) if error.kind == ErrorKind::Refused && !must => stream(error.to_string()),
        Err(error) => Err(GatewayError::refused(error)),
    }
}
