//! Direct mode: a QEMU's guest is moved from outside, by the library's own source and destination. QEMU's migration of
//! RAM is not used.
//!
//! ```text
//!  QEMU (source)                        sterna send                   sterna receive                QEMU (destination)
//!  RAM ── process_vm_readv, mapping ──> Source ═══ RAM channels ═══> Destination ── mapping, /proc/PID/mem ──> RAM
//!  userfaultfd ── PAGEMAP_SCAN ───────> dirty log
//!  stop, xen-save-devices-state ──────> SourceVmm ═ stream channel ═> DestinationVmm ── a stream without pages ──> -incoming
//! ```
//! Writes are tracked by asynchronous write protection, with a userfaultfd that is made in QEMU's process and
//! duplicated into this one (`sterna-attach`). When this process ends, for whatever reason, the kernel closes the
//! descriptor and QEMU is as it was before.
//!
//! **Why no write is lost.** Each round is: scan for written pages and protect them again; wait until QEMU's block
//! layer has nothing in progress (`transaction` without actions, which drains); read the pages. A disk that reads into
//! guest RAM by `O_DIRECT` pins pages: its writes after the pages were protected again cause no page fault, and no
//! later scan finds them (see [`settle_io`](sterna_engine::vmm::SourceVmm::settle_io)). QEMU's `stop` drains as well,
//! and the devices are saved before the last scan, so that RAM written by the saving is sent too.
//!
//! **Post-copy** is the library's as well: `post_copy` makes a userfaultfd in the destination's QEMU, and frees stale
//! memory there.
//!
//! `eligible` checks whether a QEMU's guest can be moved in this mode, before anything is changed; `ram` finds the
//! memory and tracks its writes; `source` and `destination` implement the library's interfaces for the two QEMUs;
//! `stream` composes the stream that the destination's QEMU reads; `throttle` slows the guest down if the user chose
//! that. `libvirt` has what differs where the QEMUs belong to libvirt.

mod destination;
mod eligible;
mod libvirt;
mod post_copy;
mod ram;
mod source;
mod stream;
mod throttle;

use std::sync::Arc;
use std::time::Duration;

use sterna_engine::cancel::Cancel;
use sterna_engine::migration::MigrationError;
use sterna_engine::report::{Observer, Outcome, Report};
use sterna_engine::source::{MonitorRecord, Source, TimeLimits};
use sterna_engine::switchover::START_TIME;
use sterna_engine::transport::Address;
use sterna_memory::PAGE_SIZE;
use sterna_memory::dirty::write_protect::WriteProtectLog;
use sterna_memory::ram::GuestRam;
use sterna_offload::{Accelerators, LEDGERS, Offload, Settings, Shares, StartError};
use sterna_wire::control::{Hello, Mode};
use sterna_wire::reason::ErrorKind;
use sterna_wire::switchover::SourceAfter;

pub(super) use self::destination::{Ready as ReadyDestination, Refusal, prepare as prepare_destination, receive};
use self::libvirt::Offer;
pub(super) use self::libvirt::receive as receive_by_libvirt;
pub(super) use self::post_copy::{refusal as post_copy_refusal, waits_for_memory};
use self::ram::{DirectRam, Survey};
use self::source::QemuSource;
use super::fault::{self, WithFaultPoints};
use super::neighbours::Media;
use super::storage::Storage;
use super::{Monitor, SendOptions, qemu};
use crate::qmp::Qmp;

/// How long a step may take while the guest is paused. The destination may wait for half of that for its storage before it is prepared.
const STEP_TIME: Duration = Duration::from_secs(60);

/// A source QEMU whose guest can be moved in direct mode. Only the tracking of its writes has been prepared so far.
#[derive(Debug)]
pub(super) struct Ready {
    ram: DirectRam,
    media: Media,
    machine_type: String,
    /// The opening message; empty unless the QEMU belongs to libvirt.
    opening: Vec<u8>,
}

impl Ready {
    /// Describes how writes are tracked, for notes.
    pub(super) fn tracking(&self) -> String {
        self.ram.tracking()
    }
}

/// Checks whether direct mode can move the guest of this QEMU, and opens its memory.
///
/// # Errors
/// Why it cannot, and what would make it possible. QEMU is unchanged.
pub(super) fn prepare(qmp: &Qmp, monitor: &Monitor) -> Result<Ready, String> {
    let opening = opening(monitor)?;
    eligible::check(qmp)?;
    let media = Media::of(qmp)?;
    let ram = DirectRam::of_source(qmp)?;
    let machine_type = qemu::machine(qmp, Duration::ZERO).machine_type;
    Ok(Ready { ram, media, machine_type, opening })
}

/// Returns the opening message for the guest of this monitor; empty unless libvirt drives the QEMU.
///
/// # Errors
/// Why libvirt's domain cannot be moved.
pub(super) fn opening(monitor: &Monitor) -> Result<Vec<u8>, String> {
    match monitor {
        Monitor::Socket(_) => Ok(Vec::new()),
        Monitor::Libvirt { uri, domain } => Offer::of(&crate::libvirt::find(uri.as_deref(), domain)?)?.encode(),
    }
}

/// Returns the kind of a refusal to move a guest directly: whether this process may read QEMU's memory at all.
pub(super) fn refusal_kind(qmp: &Qmp) -> ErrorKind {
    let memory = qmp.peer_pid().map(|pid| std::fs::File::open(format!("/proc/{pid}/mem")));
    let otherwise = ErrorKind::Settings;
    memory.and_then(Result::err).map_or(otherwise, |error| ErrorKind::of_io(&error, otherwise))
}

/// What a dry run finds out about direct mode. Nothing of QEMU is touched.
pub(super) struct Inspected {
    /// Why the guest cannot be moved directly; none if it can, as far as is known without touching QEMU's process.
    pub(super) obstacles: Vec<String>,
    /// The guest's RAM, where it was found.
    pub(super) ram: Option<GuestRam>,
    /// Bytes of RAM that are populated, where that is known.
    pub(super) populated: Option<u64>,
}

/// Finds out whether the guest of this QEMU can be moved directly, without touching its process.
pub(super) fn inspect(qmp: &Qmp) -> Inspected {
    let mut obstacles = eligible::obstacles(qmp);
    obstacles.extend(kernel_refusal());
    let survey = match Survey::of(qmp) {
        Ok(survey) => Some(survey),
        Err(reason) => {
            obstacles.push(reason);
            None
        }
    };
    let populated = survey.as_ref().and_then(|survey| survey.populated().ok());
    Inspected { obstacles, ram: survey.map(|survey| survey.guest().clone()), populated }
}

/// Returns why this kernel cannot track writes: tried with a page of this process.
fn kernel_refusal() -> Option<String> {
    let room = vec![1u8; 2 * PAGE_SIZE];
    let page = room.as_ptr().addr().next_multiple_of(PAGE_SIZE);
    let block = page..page + PAGE_SIZE;
    let log = WriteProtectLog::new(vec![block]);
    log.and_then(|log| log.check()).err().map(|error| error.to_string())
}

/// Returns why the destination's QEMU cannot take a guest directly, as far as is known before a stream is begun.
pub(super) fn destination_refusal(qmp: &Qmp, hello: &Hello) -> Option<String> {
    if hello.mode != Mode::Direct {
        return None;
    }
    ram::of_destination(qmp, &hello.machine.blocks).err()
}

/// Opens the accelerators that the user chose; `None` if the user chose none.
///
/// # Errors
/// An accelerator is missing, or cannot be used.
pub(super) fn offload(options: &SendOptions) -> Result<Option<Arc<Offload>>, StartError> {
    let accelerators = &options.direct.accelerators;
    if *accelerators == Accelerators::cpu() {
        return Ok(None);
    }
    // Settings may gain fields.
    let mut settings = Settings::default();
    settings.shares = Shares::of_host(LEDGERS);
    // A packet is searched, copied and compressed as one batch.
    settings.batch_pages = settings.batch_pages.max(options.packet_size / PAGE_SIZE);
    Offload::start(accelerators, &fault::with_devices(settings)).map(Some)
}

/// Moves the guest.
///
/// # Errors
/// Only for errors before the guest is touched; the report describes every other outcome.
pub(super) fn send(
    ready: Ready,
    qmp: &Qmp,
    options: &SendOptions,
    offload: Option<Arc<Offload>>,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Report, MigrationError> {
    let Ready { ram, media, machine_type, opening } = ready;
    let tracking = ram.tracking();
    let stopped = ram.stopped();
    let record = MonitorRecord {
        mode: Mode::Direct,
        qmp: options.monitor.name(),
        process: qemu::identity(qmp),
        source_after: options.source_after,
        settings_before: None,
    };
    let (guest, log, watched) = ram.into_parts();
    let storage = Storage::of(qmp, cancel, observer);
    let mut vmm = QemuSource::new(qmp.clone(), machine_type, guest.clone(), watched, media, storage, record.clone());
    let direct = &options.direct;
    let mut source = Source::new(guest, log)
        .monitor(record.clone())
        .channels(options.channels)
        .method(options.method)
        .qatzip(options.qatzip.clone())
        .max_cpus(options.max_cpus)
        .bandwidth(options.bandwidth)
        .downtime(options.downtime)
        .packet_size(options.packet_size)
        .delta_cache(options.delta_cache)
        .normal_page_ratio(options.normal_page_ratio)
        .accelerator_weight(direct.accelerator_weight)
        .iaa_verify(direct.iaa_verify)
        .checksums(direct.checksums)
        .when_not_converging(direct.not_converging)
        .give_up_after(options.waits.total)
        .control(&options.control)
        .time_limits(
            TimeLimits::default()
                .stall(Some(options.waits.stall))
                .retry(options.waits.retry)
                .step(STEP_TIME)
                .start(Some(START_TIME)),
        )
        .state_dir(&options.state_dir)
        .opening_message(opening);
    if let Some(offload) = offload {
        source = source.offload(offload);
    }
    let to = Address::from(&options.to);
    let moved = source.run(to, &options.security, &mut vmm, cancel, &WithFaultPoints(observer));
    let mut report = match moved {
        Ok(report) => report,
        Err(MigrationError { report: Some(report), .. }) => *report,
        Err(error) => return Err(error),
    };
    settle_source(&mut report, &record);
    report.stopped = qemu::stopped_guest(qmp, report.outcome);
    report.mode = Some("direct".into());
    report.tracking = Some(tracking);
    report.injection_ms = Some(stopped.as_secs_f64() * 1e3);
    report.longest_settling_ms = Some(vmm.longest_settling().as_secs_f64() * 1e3);
    Ok(report)
}

/// Settles the source's QEMU after the migration. Returns the outcome, and notes for the user.
fn settle_source(report: &mut Report, record: &MonitorRecord) {
    let lives = record.process.is_none_or(sterna_engine::process::lives);
    match report.outcome {
        Outcome::Completed => {
            let ended = report.source_after == Some(SourceAfter::Quit);
            report.source_after = Some(if ended { SourceAfter::Quit } else { SourceAfter::Keep });
            if lives && !ended {
                report.warnings.push(qemu::kept_warning(record.process, record.source_after, None));
            }
        }
        Outcome::DoesNotRun => {
            report.source_after = Some(SourceAfter::Keep);
            if lives {
                report.warnings.push(qemu::does_not_run_warning(record.process));
            }
        }
        Outcome::Unconfirmed if lives => report.warnings.push(qemu::unconfirmed_warning()),
        _ => {}
    }
}
