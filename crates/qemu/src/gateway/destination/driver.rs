//! What `sterna receive` does with its QEMU for each action of the switchover's state machine.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use serde_json::json;
use sterna_engine::cancel::Cancel;
use sterna_engine::migration::Phase;
use sterna_engine::process;
use sterna_engine::report::ReceiveReport;
use sterna_engine::switchover::{DestinationDriver, DestinationKernel, DestinationOutcome, Receiving};
use sterna_wire::control::{ControlMessage, DestinationFigures, Totals};
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{DestinationEnd, DestinationEvent, DestinationGuest, ProcessIdentity};

use super::return_path::read_return_path;
use crate::gateway::backlog::Backlog;
use crate::gateway::feeder::{Feeder, FeederEvent};
use crate::gateway::first_moment;
use crate::gateway::qemu::{self, QUIT_TIME, QemuEvent};
use crate::gateway::sockets::SocketDir;
use crate::gateway::storage::{Patience, Storage};
use crate::qmp::Qmp;
use crate::settings::Restore;
use crate::stream::ReturnMessage;

/// The events of the driver's own threads.
#[derive(Debug)]
pub(super) enum Event {
    Qemu(QemuEvent),
    Feeder(FeederEvent),
    ReturnPath(Result<ReturnMessage, String>),
}

pub(super) struct Driver<'a> {
    pub(super) kernel: DestinationKernel<'a, Event>,
    pub(super) receiving: Receiving,
    pub(super) qmp: Qmp,
    pub(super) cancel: &'a Cancel,
    pub(super) restore: Option<Restore>,
    pub(super) feeder: Arc<Feeder>,
    pub(super) sockets: SocketDir,
    pub(super) loading: Loading,
    /// QEMU's page faults before the migration.
    pub(super) faults_before: u64,
    pub(super) return_path: Option<JoinHandle<()>>,
    /// Events of QEMU that have not been handled; none once they never will be.
    pub(super) backlog: Option<Backlog>,
}

/// How far loading the guest is. The source's totals and QEMU's report arrive in any order.
#[derive(Debug, Default)]
pub(super) struct Loading {
    /// When all of RAM was placed.
    ram_placed: Option<Instant>,
    /// The number of packets that the source has sent, once it is known.
    totals: Option<Totals>,
    /// Whether QEMU has loaded everything and is paused.
    loaded: bool,
}

impl<'a> DestinationDriver<'a> for Driver<'a> {
    type Event = Event;

    fn kernel(&mut self) -> &mut DestinationKernel<'a, Event> {
        &mut self.kernel
    }

    fn receiving(&mut self) -> Option<&mut Receiving> {
        Some(&mut self.receiving)
    }

    /// Has QEMU listen, and stay paused when it has loaded the guest.
    fn clear_autostart(&mut self) -> Result<(), Reason> {
        let uri = format!("unix:{}", self.sockets.path_for_qemu().display());
        let failed = qemu::failed("QEMU does not take the migration");
        qemu::migrate_incoming(&self.qmp, &uri).map_err(&failed)?;
        // Accepted while `inmigrate`: it clears the autostart flag and changes nothing else.
        self.qmp.execute("stop", json!({})).map_err(&failed)?;
        match self.qmp.status().map_err(failed)?.as_str() {
            "inmigrate" => Ok(()),
            status => {
                let text = format_args!("QEMU is {status} where it should wait for the migration");
                Err(Reason::new(ErrorKind::Monitor, text))
            }
        }
    }

    fn accept_stream(&mut self) -> Result<(), Reason> {
        Ok(())
    }

    fn start_guest(&mut self) -> Result<Option<DestinationGuest>, Reason> {
        let storage = Storage::of(&self.qmp, self.cancel, self.kernel.observer);
        match storage.cont(&self.qmp, Patience::Endless) {
            Ok(()) => Ok(Some(DestinationGuest::Running)),
            Err(_) if qemu::monitor_has_ended(&self.qmp, self.kernel.ledger.record().monitor_process) => {
                Ok(Some(DestinationGuest::Gone))
            }
            Err(error) => Err(qemu::failed("QEMU does not start the guest")(error)),
        }
    }

    fn guest_started(&mut self) {
        qemu::announce(&self.qmp);
    }

    fn why_not_running(&mut self) -> Option<String> {
        first_moment::why_not_running(&self.qmp, self.kernel.ledger.record().monitor_process)
    }

    fn discard(&mut self) -> Result<(), Reason> {
        let quit = qemu::quit(&self.qmp, self.kernel.ledger.record().monitor_process, QUIT_TIME);
        quit.map_err(|text| Reason::new(ErrorKind::Monitor, text))
    }

    fn ended(&mut self, end: &DestinationEnd) {
        match end {
            // QEMU is left as it was found, as the source's is where the guest stays there.
            DestinationEnd::Running if self.guest_goes_on() => self.restore_settings(),
            DestinationEnd::Running => self.restore.take().into_iter().for_each(Restore::keep),
            // The source waits for nothing that could still come.
            DestinationEnd::Stuck { .. } | DestinationEnd::Conflict => self.kernel.stop_lingering(),
            DestinationEnd::Discarded { .. } | DestinationEnd::Lost { .. } | DestinationEnd::MemoryLost { .. } => {}
        }
    }

    fn receive(&mut self, message: ControlMessage) -> Option<DestinationEvent> {
        match message {
            ControlMessage::Totals(totals) if self.loading.totals.is_none() => {
                self.kernel.phase = Phase::SwitchingOver;
                if let Err(error) = self.feeder.seal() {
                    return Some(self.kernel.fail(Reason::other(error)));
                }
                self.loading.totals = Some(totals);
                let missing = self.feeder.missing();
                if missing > 0 {
                    let text = format_args!("{missing} pages arrived damaged, and the source has not sent them again");
                    return Some(self.kernel.fail(Reason::other(text)));
                }
                self.if_complete()
            }
            unexpected => self.kernel.out_of_phase(&unexpected),
        }
    }

    fn handle(&mut self, event: Event) -> Option<DestinationEvent> {
        if let (Event::Qemu(_) | Event::ReturnPath(_), Some(backlog)) = (&event, &self.backlog) {
            backlog.handled();
        }
        match event {
            Event::Qemu(event) => self.handle_qemu(event),
            Event::Feeder(news) => {
                self.handle_feeder(news);
                None
            }
            Event::ReturnPath(Ok(message)) => self.handle_return_path(message),
            Event::ReturnPath(Err(text)) => {
                self.kernel.abort.raise(Reason::new(ErrorKind::Monitor, text));
                None
            }
        }
    }

    /// A channel that cannot write to QEMU has failed because QEMU has.
    fn explained(&mut self, reason: Reason) -> Reason {
        match qemu::load_failure(&self.qmp) {
            Some(why) => Reason { text: format!("{}; {why}", reason.text), ..reason },
            None => reason,
        }
    }

    fn count_figures(&mut self, figures: &mut DestinationFigures) {
        figures.cpu_seconds = process::own_cpu_seconds();
        figures.faults = faults(self.kernel.ledger.record().monitor_process).saturating_sub(self.faults_before);
        figures.guest_ended = qemu::ended_by_itself(&self.qmp);
    }
}

impl Driver<'_> {
    fn handle_qemu(&mut self, event: QemuEvent) -> Option<DestinationEvent> {
        match event {
            QemuEvent::Gone if qemu::has_ended(self.kernel.ledger.record().monitor_process) => {
                Some(DestinationEvent::Guest(DestinationGuest::Gone))
            }
            QemuEvent::Gone => {
                let reason = Reason::new(ErrorKind::Monitor, "QEMU closed its QMP socket");
                Some(DestinationEvent::Failed { reason })
            }
            QemuEvent::Resumed => Some(DestinationEvent::Guest(DestinationGuest::Running)),
            QemuEvent::Migration(status) if status == "failed" => {
                let reason = self.load_failure();
                Some(self.kernel.fail(reason))
            }
            QemuEvent::Stopped | QemuEvent::Ends | QemuEvent::Migration(_) => None,
        }
    }

    fn handle_feeder(&mut self, news: FeederEvent) {
        match news {
            FeederEvent::Ready { placement, deltas, return_path } => {
                placement.iter().for_each(|line| self.kernel.observer.note(&format!("placement: {line}")));
                self.receiving.placement.clone_from(&placement);
                self.kernel.peer.send(&ControlMessage::Ready { placement, deltas });
                let events = self.kernel.events.clone();
                if let Some(entry) = self.backlog.as_ref().map(Backlog::entry) {
                    let read = move || read_return_path(return_path, &entry, &events);
                    match Builder::new().name("return-path".into()).spawn(read) {
                        Ok(thread) => self.return_path = Some(thread),
                        Err(error) => {
                            let text = format_args!("no thread for QEMU's return path: {error}");
                            self.kernel.abort.raise(Reason::other(text));
                        }
                    }
                }
            }
            FeederEvent::RamPlaced => self.loading.ram_placed = Some(Instant::now()),
            FeederEvent::Ended => {}
        }
    }

    fn handle_return_path(&mut self, message: ReturnMessage) -> Option<DestinationEvent> {
        // The source's QEMU fails at it, and the source learns why before.
        let failed = matches!(message, ReturnMessage::Shut(status) if status != 0).then(|| {
            let reason = self.load_failure();
            self.kernel.fail(reason)
        });
        self.kernel.peer.send(&ControlMessage::ReturnPath(message.into()));
        match message {
            ReturnMessage::Shut(0) => {
                let since = self.loading.ram_placed;
                self.receiving.figures.load_ms = since.map_or(0.0, |since| since.elapsed().as_secs_f64() * 1e3);
                if let Err(text) = qemu::wait_paused(&self.qmp) {
                    return Some(self.kernel.fail(Reason::new(ErrorKind::Monitor, text)));
                }
                self.loading.loaded = true;
                self.if_complete()
            }
            // Of any other number.
            ReturnMessage::Shut(_) => failed,
            _ => None,
        }
    }

    /// Returns why QEMU could not load the guest, as far as it reports that.
    fn load_failure(&self) -> Reason {
        let text = qemu::load_failure(&self.qmp);
        Reason::new(ErrorKind::Monitor, text.as_deref().unwrap_or("QEMU could not load the guest: see its output"))
    }

    /// Returns the event that QEMU has loaded everything and every channel has placed what the source sent on it, once both are known.
    fn if_complete(&mut self) -> Option<DestinationEvent> {
        let totals = self.loading.totals.as_ref().filter(|_| self.loading.loaded)?;
        Some(match self.receiving.check(totals) {
            Ok(()) => DestinationEvent::AllPlacedAndLoaded,
            Err(reason) => DestinationEvent::Failed { reason },
        })
    }

    fn guest_goes_on(&self) -> bool {
        self.receiving.figures.guest_ended.is_none() && self.kernel.ledger.record().does_not_run.is_none()
    }

    fn restore_settings(&mut self) {
        if let Some(Err(error)) = self.restore.take().map(Restore::restore) {
            self.kernel.observer.note(&format!("QEMU's migration settings could not be restored: {error}"));
        }
    }

    pub(super) fn finish(mut self, outcome: DestinationOutcome, source: String) -> ReceiveReport {
        let ending = self.kernel.ending(outcome);
        // A QEMU that holds part of a guest, or has exited, needs nothing restored.
        if self.kernel.ledger.on_disk().is_some()
            && let Some(restore) = self.restore.take()
        {
            restore.keep();
        }
        // A thread that reads from QEMU may wait for an event to be handled.
        self.backlog = None;
        self.kernel.hang_up();
        self.receiving.acceptor.join();
        if let Some(thread) = self.return_path.take() {
            // A panic of the thread has been printed.
            let _ = thread.join();
        }
        ending.received(&self.receiving, source)
    }
}

/// Returns QEMU's page faults so far; 0 if its process is not known.
pub(super) fn faults(qemu: Option<ProcessIdentity>) -> u64 {
    qemu.map_or(0, |qemu| process::faults(qemu.pid))
}
