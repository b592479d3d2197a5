//! The destination's QEMU as the library drives it.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::MigrationError;
use sterna_engine::report::{Observer, ReceiveReport};
use sterna_engine::session::AcceptedSource;
use sterna_engine::source::MonitorRecord;
use sterna_engine::transport::{Address, Incoming};
use sterna_engine::vmm::{DestinationVmm, GuestEnd, VmmError};
use sterna_memory::ram::GuestRam;
use sterna_wire::control::{Machine, Mode};
use sterna_wire::switchover::{ProcessIdentity, SourceAfter};
use sterna_wire::text::cleaned;

use super::post_copy::QemuProcess;
use super::ram;
use super::stream::{self, BlockLength, PING_VALUE};
use crate::gateway::fault::WithFaultPoints;
use crate::gateway::qemu::{self, QUIT_TIME};
use crate::gateway::storage::{Patience, Storage, StorageError};
use crate::gateway::{GatewayError, Monitor, ReceiveOptions, first_moment};
use crate::qmp::{Qmp, QmpError};
use crate::settings::{RequiredSettings, Restore, Role, Settings};
use crate::stream::{ReturnMessage, ReturnPathReader, StreamError};

/// How long QEMU may take to read the beginning of its stream.
const OPENING_TIME: Duration = Duration::from_secs(10);
/// How long QEMU may take to load the devices.
const LOADING_TIME: Duration = Duration::from_secs(60);
/// How long a QEMU whose load was ended may take to answer. It may hang: then an operator ends it.
const ENDED_LOAD_TIME: Duration = Duration::from_secs(2);
/// QEMU's name for its end of the stream.
const DESCRIPTOR: &str = "sterna-incoming";

/// A destination QEMU that has read the opening of its stream, and its memory.
pub(in crate::gateway) struct Ready {
    vmm: QemuDestination<'static>,
    guest: GuestRam,
    process: Arc<QemuProcess>,
}

/// Why a destination QEMU cannot receive a guest, and whether it is still usable.
pub(in crate::gateway) enum Refusal {
    /// No stream was begun: the QEMU is unchanged, and can receive another guest.
    Untouched(String),
    /// The QEMU may have read the opening of a stream, and can receive no other one.
    Begun(String),
}

/// Makes QEMU begin to receive the guest of a source in direct mode.
///
/// # Errors
/// QEMU or its memory is unsuitable: the reason, and whether the QEMU is still usable.
pub(in crate::gateway) fn prepare(qmp: &Qmp, machine: &Machine) -> Result<Ready, Refusal> {
    // Before QEMU begins anything: most obstacles in its memory are found now.
    ram::of_destination(qmp, &machine.blocks).map_err(Refusal::Untouched)?;
    let vmm = QemuDestination::begin(qmp.clone(), machine)?;
    // Only now do the blocks have the source's lengths.
    let (guest, process) = ram::of_destination(qmp, &machine.blocks).map_err(Refusal::Begun)?;
    Ok(Ready { vmm, guest, process })
}

/// Accepts the migration of a source in direct mode, and runs it.
///
/// # Errors
/// Only for errors before the migration was accepted; the report describes every other outcome.
pub(in crate::gateway) fn receive(
    ready: Ready,
    greeted: AcceptedSource,
    options: &ReceiveOptions,
    address: &Address,
    incoming: Incoming,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, GatewayError> {
    let Ready { vmm, guest, process } = ready;
    let mut vmm: QemuDestination<'_> = vmm;
    vmm.storage = Storage::of(&vmm.qmp, cancel, observer).ended_by(Arc::clone(&vmm.load_ended));
    let record = MonitorRecord {
        mode: Mode::Direct,
        qmp: Monitor::from(options.qmp.as_path()).name(),
        process: vmm.identity,
        source_after: SourceAfter::Keep,
        settings_before: vmm.settings_before.take(),
    };
    let taken = Destination::new(guest)
        .memory_before(sterna_engine::destination::Before::Written)
        .prefault(options.prefault)
        .monitor(record)
        .retry(options.waits.retry)
        .stall_limit(Some(options.waits.stall))
        .give_up_after(options.waits.total)
        .state_dir(&options.state_dir)
        .take(greeted, incoming, address, &mut vmm, cancel, &WithFaultPoints(observer));
    let freed = process.freed();
    if freed.ranges > 0 {
        observer.note(&format!(
            "post-copy: QEMU's main thread was stopped for {:.1} ms, of the downtime, to discard {} ranges of memory",
            freed.stopped.as_secs_f64() * 1e3,
            freed.ranges
        ));
    }
    match taken {
        Ok(report) => Ok(report),
        Err(MigrationError { received: Some(report), .. }) => Ok(*report),
        Err(error) => {
            // QEMU has begun to receive, and can receive no other guest.
            let left = match vmm.discard() {
                Ok(()) => "its QEMU was ended".to_owned(),
                Err(error) => format!("its QEMU could not be ended: {error}"),
            };
            Err(GatewayError::new(format_args!("this QEMU cannot take the guest: {} ({left})", error.reason))
                .of(error.kind))
        }
    }
}

/// A destination QEMU that waits for the state of its devices.
pub(super) struct QemuDestination<'a> {
    qmp: Qmp,
    /// The storage of its disks.
    storage: Storage<'a>,
    identity: Option<ProcessIdentity>,
    /// The settings before the migration, for the record and for this process.
    settings_before: Option<Value>,
    restore: Option<Restore>,
    stream: UnixStream,
    answers: ReturnPathReader<UnixStream>,
    /// Whether loading the devices was ended from outside.
    load_ended: Arc<AtomicBool>,
}

impl QemuDestination<'_> {
    /// Makes QEMU read the opening of its stream: the machine type and the RAM blocks.
    ///
    /// # Errors
    /// QEMU refuses: the reason, and whether a stream was begun.
    fn begin(qmp: Qmp, machine: &Machine) -> Result<Self, Refusal> {
        let untouched = |error: &dyn std::fmt::Display| Refusal::Untouched(error.to_string());
        let blocks: Vec<_> =
            machine.blocks.iter().map(|block| BlockLength { name: &block.name, used: block.bytes }).collect();
        let opening = stream::opening(&machine.machine_type, &blocks).map_err(Refusal::Untouched)?;
        let (ours, theirs) =
            UnixStream::pair().map_err(|error| untouched(&format_args!("no socket pair for QEMU: {error}")))?;
        let broken = |error: std::io::Error| Refusal::Untouched(format!("QEMU's migration socket: {error}"));
        let answers = ours.try_clone().map_err(broken)?;
        answers.set_read_timeout(Some(OPENING_TIME)).map_err(broken)?;
        ours.set_write_timeout(Some(LOADING_TIME)).map_err(broken)?;
        let wanted = RequiredSettings {
            role: Role::Destination,
            channels: 0,
            downtime_limit: None,
            pause_before_switchover: false,
        };
        let plan = Settings::plan(&qmp, &wanted).map_err(|error| untouched(&error))?;
        let settings_before = serde_json::to_value(plan.before()).ok();
        // Dropping this restores the settings, until QEMU has begun.
        let restore = plan.carry_out().map_err(|error| untouched(&error))?;
        let failed = |error: QmpError| format!("QEMU does not take the migration: {error}");
        qmp.execute_with_descriptor("getfd", json!({ "fdname": DESCRIPTOR }), theirs.as_fd())
            .map_err(|error| Refusal::Untouched(failed(error)))?;
        drop(theirs);
        if let Err(error) = qemu::migrate_incoming(&qmp, &format!("fd:{DESCRIPTOR}")) {
            // QEMU may have executed a command that it did not answer.
            if !matches!(error, QmpError::Refused { .. }) {
                return Err(Refusal::Begun(failed(error)));
            }
            if let Err(error) = qmp.execute("closefd", json!({ "fdname": DESCRIPTOR })) {
                tracing::debug!(%error, "closefd");
            }
            return Err(Refusal::Untouched(failed(error)));
        }
        // Accepted while `inmigrate`: it clears the autostart flag and changes nothing else.
        let stopped = qmp.execute("stop", json!({})).and_then(|_| qmp.status());
        match stopped.map_err(|error| Refusal::Begun(failed(error)))?.as_str() {
            "inmigrate" => {}
            status => {
                return Err(Refusal::Begun(format!("QEMU is {status} where it should wait for the migration")));
            }
        }
        let mut this = Self {
            identity: qemu::identity(&qmp),
            qmp,
            storage: Storage::not_asked_for(),
            settings_before,
            restore: Some(restore),
            stream: ours,
            answers: ReturnPathReader::new(answers),
            load_ended: Arc::default(),
        };
        let written = this.stream.write_all(&opening);
        match this.answers.next_message() {
            Ok(Some(ReturnMessage::Pong(PING_VALUE))) if written.is_ok() => Ok(this),
            answer => {
                let answer = seen(&answer);
                let seen = format!("it does not take the machine and its RAM blocks: {answer}");
                Err(Refusal::Begun(this.failure(&seen)))
            }
        }
    }

    /// Returns QEMU's reason for a failed load: what QEMU says while it lives, and `seen`, what was seen from outside, where it says nothing.
    fn failure(&self, seen: &str) -> String {
        match self.qmp.query_migrate() {
            Ok(info) => {
                let why = info.error_desc.as_deref().map_or_else(|| seen.to_owned(), cleaned);
                format!("QEMU could not load the guest: {why} (its output says more)")
            }
            // A QEMU that fails to load exits: its stream may break before its process is gone, and its monitor with it.
            Err(QmpError::Closed { .. }) => "QEMU has ended while it loaded the guest (its output says why)".into(),
            Err(error) => format!("QEMU could not load the guest: {seen}; its monitor does not answer: {error}"),
        }
    }

    /// Checks, while the guest can still continue at its source, whether QEMU can lock the disks: QEMU locks images
    /// only when its guest starts, which is after the decision. The disks are released again, so that the source can
    /// use them.
    fn try_disks(&self) -> Result<(), VmmError> {
        let patience = Patience::of_a_step();
        match self.set_active(true, patience) {
            Ok(_) => {}
            // QEMU 9.2 and older have no command for this before the start.
            Err(StorageError::Qmp(QmpError::Refused { class, .. })) if class == "CommandNotFound" => return Ok(()),
            Err(StorageError::Qmp(QmpError::Refused { description, .. })) => {
                self.keep_no_disks(patience)?;
                return Err(format!(
                    "the destination's QEMU cannot use the disks: {description}; end what uses the image there, and send again"
                )
                .into());
            }
            Err(error) => return Err(error.into()),
        }
        self.keep_no_disks(patience)
    }

    /// Releases the disks, which the source may need.
    fn keep_no_disks(&self, patience: Patience) -> Result<(), VmmError> {
        match self.set_active(false, patience) {
            Ok(_) => Ok(()),
            Err(StorageError::Qmp(error @ QmpError::Refused { .. })) => {
                // Then this QEMU keeps the disks until it is ended or starts the guest.
                tracing::warn!(%error, "the destination's QEMU keeps disks that it should not have yet");
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn set_active(&self, active: bool, patience: Patience) -> Result<Value, StorageError> {
        self.storage.execute(&self.qmp, "blockdev-set-active", json!({ "active": active }), patience)
    }
}

/// Returns a closure that ends the load of a QEMU that reads from the other end of `stream`, and sets `ended`.
fn load_canceller(stream: UnixStream, ended: Arc<AtomicBool>) -> Box<dyn Fn() + Send> {
    Box::new(move || {
        ended.store(true, Ordering::Release);
        // Wakes the thread that writes to QEMU, or waits for its answer. It fails only where QEMU has closed its end.
        let _ = stream.shutdown(Shutdown::Both);
    })
}

/// Returns what QEMU answered where another answer was expected, for people.
fn seen(answer: &Result<Option<ReturnMessage>, StreamError>) -> String {
    match answer {
        Ok(None) => "QEMU closed the stream without an answer".into(),
        Ok(Some(ReturnMessage::Shut(status))) => format!("QEMU ended the stream with the status {status}"),
        Ok(Some(ReturnMessage::Pong(value))) => format!("QEMU answered a ping with the value {value}"),
        Ok(Some(ReturnMessage::SwitchoverAck)) => "QEMU reported that it is ready for the switchover".into(),
        Err(error) => error.to_string(),
    }
}

impl DestinationVmm for QemuDestination<'_> {
    fn name(&self) -> String {
        format!("QEMU {}", self.qmp.version())
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        self.answers.get_ref().set_read_timeout(Some(LOADING_TIME))?;
        let sent = stream::close(state, &self.stream);
        let answer = if sent.is_ok() { self.answers.next_message() } else { Ok(None) };
        match (sent, answer) {
            (Ok(()), Ok(Some(ReturnMessage::Shut(0)))) => {
                qemu::wait_paused(&self.qmp)?;
                self.try_disks()
            }
            // QEMU may hang, and not answer to its monitor either.
            _ if self.load_ended.load(Ordering::Acquire) => {
                Err("it was ended before QEMU had loaded the devices".into())
            }
            (sent, answer) => {
                let seen = sent.err().map_or_else(|| seen(&answer), |error| error.to_string());
                Err(self.failure(&seen).into())
            }
        }
    }

    fn load_canceller(&self) -> Option<Box<dyn Fn() + Send>> {
        let stream = self.stream.try_clone().ok()?;
        Some(load_canceller(stream, Arc::clone(&self.load_ended)))
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        Ok(self.storage.cont(&self.qmp, Patience::Endless)?)
    }

    fn has_ended(&mut self) -> bool {
        qemu::monitor_has_ended(&self.qmp, self.identity)
    }

    fn guest_end(&mut self) -> Option<GuestEnd> {
        qemu::guest_end(&self.qmp).filter(|end| end.by_itself)
    }

    fn why_not_running(&mut self) -> Option<String> {
        first_moment::why_not_running(&self.qmp, self.identity)
    }

    fn guest_started(&mut self) {
        if qemu::ended_by_itself(&self.qmp).is_some() {
            self.restore.take().into_iter().for_each(Restore::keep);
            return;
        }
        qemu::announce(&self.qmp);
        if let Some(Err(error)) = self.restore.take().map(Restore::restore) {
            tracing::warn!(%error, "QEMU's migration settings could not be put back");
        }
    }

    fn discard(&mut self) -> Result<(), VmmError> {
        // The settings of a QEMU that has exited, or has a part of a guest, need not be restored.
        self.restore.take().into_iter().for_each(Restore::keep);
        let hangs = self.load_ended.load(Ordering::Acquire);
        let ended = match hangs {
            true => qemu::quit_if_it_answers(&self.qmp, self.identity, ENDED_LOAD_TIME, QUIT_TIME),
            false => qemu::quit(&self.qmp, self.identity, QUIT_TIME),
        };
        Ok(ended?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_whose_answer_does_not_come_is_ended_from_another_thread() {
        let (ours, _qemu) = UnixStream::pair().unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let cancel = load_canceller(ours.try_clone().unwrap(), Arc::clone(&ended));
        let mut answers = ReturnPathReader::new(ours);
        let waits = std::thread::spawn(move || answers.next_message().map(|message| message.is_none()));
        cancel();
        // Without the canceller this would wait for ever.
        assert!(waits.join().unwrap().unwrap() && ended.load(Ordering::Acquire));
    }

    #[test]
    fn what_qemu_answered_is_told_in_words() {
        let timed_out = std::io::Error::from(std::io::ErrorKind::TimedOut);
        let error = StreamError::Io { doing: "reading the return path", source: timed_out };
        let answers = [
            (Ok(None), "QEMU closed the stream without an answer"),
            (Ok(Some(ReturnMessage::Shut(1))), "QEMU ended the stream with the status 1"),
            (Ok(Some(ReturnMessage::Pong(7))), "QEMU answered a ping with the value 7"),
            (Ok(Some(ReturnMessage::SwitchoverAck)), "QEMU reported that it is ready for the switchover"),
            (Err(error), "reading the return path failed: timed out"),
        ];
        for (answer, text) in answers {
            assert_eq!(seen(&answer), text);
        }
    }
}
