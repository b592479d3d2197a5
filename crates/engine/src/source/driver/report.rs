//! The reports of the source's driver: progress while it runs, and at the end a report or an error.

use std::time::Instant;

use sterna_memory::PAGE_SIZE;
use sterna_wire::control::ControlMessage;
use sterna_wire::switchover::{SourceAfter, SourceEnd, SourceEvent, SourceGuest};

use super::{CANCELLED, Driver};
use crate::accelerator::Accelerator;
use crate::migration::{GuestState, MigrationError, Phase, Side};
use crate::report::{Outcome, PostCopyReport, Report, between};
use crate::send::Sent;
use crate::session::SourceOutcome;
use crate::transport::Security;

/// The warning where somebody has started the guest at the source although it belongs to the destination.
const RUNS_HERE: &str =
    "the guest was started here by somebody else although it belongs to the destination: stop one of the two at once";

impl Driver<'_> {
    /// Returns the figures of the data channels, those that are closed included.
    pub(super) fn sent(&self) -> Sent {
        let Some(moving) = &self.moving else { return self.sent_before };
        let of_state = moving.device_channels.iter().chain(moving.stream.as_deref());
        self.sent_before + Sent::over(moving.pipeline.channels.iter().chain(of_state))
    }

    pub(super) fn report_progress(&mut self) {
        let sent = self.sent();
        let elapsed_ms = self.started.elapsed().as_millis() as u64;
        let interval = (elapsed_ms - self.progress.elapsed_ms).max(1) as f64 / 1e3;
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / interval;
        self.progress.phase = self.phase.to_string();
        self.progress.content_rate = rate(sent.content_bytes, self.content_reported);
        self.progress.wire_rate = rate(sent.wire_bytes, self.progress.wire_bytes);
        self.progress.elapsed_ms = elapsed_ms;
        self.progress.normal_pages = sent.normal_pages;
        (self.progress.delta_pages, self.progress.same_pages) = (sent.delta_pages, sent.same_pages);
        self.progress.zero_pages = sent.zero_pages;
        self.progress.wire_bytes = sent.wire_bytes;
        self.progress.ratio = sent.ratio();
        self.progress.devices = self.devices.known.progress();
        self.content_reported = sent.content_bytes;
        let (_, delivered) = self.window.delivered();
        self.stats
            .lock()
            .expect("no thread panics with the lock held")
            .fill(&mut self.progress, delivered.carried.pages());
        if self.phase == Phase::PostCopy {
            self.progress.remaining_bytes = self.unsent.pages() * PAGE_SIZE as u64;
        }
        self.observer.progress(&self.progress);
    }

    pub(super) fn finish(mut self, outcome: SourceOutcome) -> Result<Report, MigrationError> {
        let (outcome, guest, reason) = self.verdict(outcome);
        self.lead.abort.finish();
        // A destination that does not receive it waits a little for this side to reconnect.
        self.lead.peer.send(&ControlMessage::Goodbye);
        self.lead.peer.hang_up();
        self.end_data_plane();
        if outcome == Outcome::Completed && self.post_copy.begun().is_some() {
            // Until now the monitor was needed for its guest's memory.
            if let SourceEvent::Guest(SourceGuest::Running) = self.end_guest() {
                self.left = Some(RUNS_HERE.to_owned());
            }
        }
        if let Some(Err(busy)) = self.accelerator.as_ref().map(Accelerator::retire) {
            self.observer.note(&format!("{busy}; an accelerator out of service may still read it"));
        }
        let report = self.report(outcome, reason.clone());
        match reason {
            None => Ok(report),
            Some(reason) => Err(MigrationError {
                side: Side::Source,
                phase: self.phase,
                guest,
                cancelled: outcome == Outcome::Cancelled,
                refused: false,
                dial: None,
                reason,
                report: Some(Box::new(report)),
                received: None,
            }),
        }
    }

    /// Returns the outcome, where the guest is, and the reason where the migration did not complete.
    fn verdict(&mut self, outcome: SourceOutcome) -> (Outcome, GuestState, Option<String>) {
        // The event of the cancellation may still be queued.
        let cancelled = self.cancel.is_cancelled() && self.lead.switchover.reason() == CANCELLED;
        let not_moved = if self.lead.cancelled || cancelled { Outcome::Cancelled } else { Outcome::Failed };
        let (outcome, guest, reason) = match outcome {
            SourceOutcome::Machine(SourceEnd::Finished) => {
                // That the migration is settled must be on the disk before it is reported.
                let Some(why) = self.unwritten.as_ref().filter(|_| !self.ledger.settled()) else {
                    return (Outcome::Completed, GuestState::BelongsToDestination, None);
                };
                let reason = format!(
                    "the destination has confirmed that the guest runs there, but the record could not be written: {why}"
                );
                (Outcome::Unconfirmed, GuestState::BelongsToDestination, reason)
            }
            SourceOutcome::Machine(SourceEnd::Aborted { reason }) => (not_moved, GuestState::RunsAtSource, reason),
            SourceOutcome::Machine(SourceEnd::NotStarted) => {
                let why = self.unwritten.as_deref().unwrap_or_default();
                (Outcome::Failed, GuestState::Untouched, format!("the migration's record could not be written: {why}"))
            }
            SourceOutcome::Machine(SourceEnd::GuestGone) => {
                (Outcome::Lost, GuestState::PausedAtSource, "the guest is gone".to_owned())
            }
            SourceOutcome::Machine(SourceEnd::DestinationLost { never_ran, reason }) => {
                let ran = if never_ran { "it never ran there" } else { "it may have run there" };
                let reason = format!("the destination has lost the guest that was given to it ({ran}): {reason}");
                (Outcome::Unconfirmed, GuestState::BelongsToDestination, reason)
            }
            SourceOutcome::Machine(SourceEnd::Stuck { reason }) => (Outcome::Stuck, GuestState::PausedAtSource, reason),
            SourceOutcome::Machine(SourceEnd::Conflict) => {
                let reason = "the destination runs the guest although it was not given to it".to_owned();
                (Outcome::Stuck, GuestState::RunsTwice, reason)
            }
            SourceOutcome::Undelivered if self.lead.switchover.decided() && self.post_copy.begun().is_some() => {
                let cancelled = || {
                    "the rest of the guest's memory was not sent: the destination was lost, and the migration cancelled"
                        .to_owned()
                };
                (Outcome::Lost, GuestState::LacksMemory, self.lead.undelivered.take().unwrap_or_else(cancelled))
            }
            SourceOutcome::Undelivered if self.lead.switchover.decided() => {
                let unreachable = || "the destination did not confirm it in time".to_owned();
                let reason = self.lead.undelivered.take().unwrap_or_else(unreachable);
                (Outcome::Unconfirmed, GuestState::BelongsToDestination, reason)
            }
            // The guest runs here; a destination that did not receive the abort presumes it.
            SourceOutcome::Undelivered => {
                (not_moved, GuestState::RunsAtSource, self.lead.switchover.reason().to_owned())
            }
        };
        (outcome, guest, Some(reason))
    }

    /// Returns what the operator must know or do now.
    fn warnings(&mut self, outcome: Outcome) -> Vec<String> {
        let mut warnings: Vec<_> = self.left.take().into_iter().collect();
        let unwritten = self.unwritten.as_ref().filter(|_| !self.ledger.settled()).zip(self.ledger.on_disk());
        if let (Outcome::Failed | Outcome::Cancelled, Some((why, state))) = (outcome, unwritten) {
            let (id, state) = (self.session.id, state.name());
            warnings.push(format!(
                "this end could not be written to the record, which still holds the state `{state}`: {why}. Put that right, then run \
                 `sterna recover {id}` here: until then this guest takes part in no other migration"
            ));
        }
        warnings
    }

    /// Returns lines about the work of accelerators, and about RAM that they could not reach.
    fn accelerators(&self) -> Vec<String> {
        let Some(offload) = &self.settings.offload else { return Vec::new() };
        let mut lines = offload.report().lines();
        let blocks = self.ram.blocks().iter().filter(|block| block.process().is_some());
        let names: Vec<_> = blocks.map(|block| block.name()).collect();
        if let Some((first, others)) = names.split_first().filter(|_| self.accelerator.is_some()) {
            let more = if others.is_empty() { String::new() } else { format!(" and {} more RAM blocks", others.len()) };
            lines.push(format!(
                "RAM block {first}{more} could not be mapped here, because the memory is not shared: no accelerator reaches it, and the \
                 CPU looked for zero pages and copied the others"
            ));
        }
        lines
    }

    /// Makes the report, once the data plane has ended.
    fn report(&mut self, outcome: Outcome, reason: Option<String>) -> Report {
        let sent = self.sent();
        let stats = self.stats.lock().expect("no thread panics with the lock held").clone();
        let all_there = self.post_copy.done().map(|(when, _)| when);
        let end = all_there.or(self.lead.moments.running).unwrap_or_else(Instant::now);
        let requested = self.settings.delta_cache.min(self.ram.bytes());
        let (delta_cache, no_deltas) = sent.delta_cache(requested, self.settings.channels);
        let total_ms = end.saturating_duration_since(self.started).as_secs_f64() * 1e3;
        Report {
            id: self.session.id.to_string(),
            outcome,
            reason,
            machine: self.vmm.name(),
            destination: self.to.to_string(),
            total_ms,
            downtime_ms: self.lead.moments.downtime_ms(),
            downtime: self.lead.moments.parts(),
            rounds: stats.round,
            convergence: match (stats.verdict, self.throttled) {
                (None, _) => {
                    let wanted = self.settings.downtime.as_secs_f64() * 1e3;
                    stats.out_of_reach.filter(|_| self.lead.moments.downtime_ms() > wanted)
                }
                (Some(verdict), 0) => Some(verdict),
                (Some(verdict), percent) => Some(format!("{verdict}; it was held for {percent} % of the time")),
            },
            post_copy: self.post_copy.begun().map(|begun| {
                let (done, figures) = begun.done.unzip();
                let figures = figures.unwrap_or_default();
                PostCopyReport {
                    ms: between(self.lead.moments.running, done),
                    requests: figures.requests,
                    latency_p50_ms: f64::from(figures.latency_p50_us) / 1e3,
                    latency_p99_ms: f64::from(figures.latency_p99_us) / 1e3,
                    reconnected: begun.reconnected,
                }
            }),
            wire_bytes: sent.wire_bytes,
            content_bytes: sent.content_bytes,
            normal_pages: sent.normal_pages,
            zero_pages: sent.zero_pages,
            ratio: sent.ratio(),
            throughput: sent.wire_bytes as f64 / (total_ms / 1e3).max(1e-3),
            method: self.compression.words(&sent),
            choices: self.compression.choices(),
            channels: self.settings.channels,
            encrypted: matches!(self.security, Security::Tls(_)),
            source_cpu_seconds: self.cpu.seconds(),
            destination_cpu_seconds: self.figures.cpu_seconds,
            destination_faults: self.figures.faults,
            placement: std::mem::take(&mut self.placement),
            accelerators: self.accelerators(),
            delta_pages: sent.delta_pages,
            same_pages: sent.same_pages,
            device_deltas: sent.device_deltas,
            delta_cache,
            no_deltas: no_deltas.map(str::to_owned),
            refused_packets: self.again.packets(),
            devices: self.devices.known.report(),
            source_after: self.ended.then_some(SourceAfter::Quit),
            warnings: self.warnings(outcome),
            mode: None,
            not_direct: None,
            tracking: None,
            injection_ms: None,
            longest_settling_ms: None,
        }
    }
}
