//! The reports of the source's driver: progress while it runs, and the report at its end.

use std::time::Instant;

use sterna_engine::process::own_cpu_seconds;
use sterna_engine::report::{Outcome, Progress, Report};
use sterna_engine::send::Sent;
use sterna_engine::session::SourceOutcome;
use sterna_engine::transport::Security;
use sterna_wire::switchover::{SourceAfter, SourceEnd};

use super::{COMMIT_ESTIMATE, Driver};
use crate::gateway::qemu::{self, PAGE_SIZE};
use crate::gateway::recovery::source_end;

impl Driver<'_> {
    pub(super) fn sent(&self) -> Sent {
        self.moving.as_ref().map(|moving| moving.plane.sent()).unwrap_or_default()
    }

    /// Queries QEMU's figures and reports the progress.
    pub(super) fn report_progress(&mut self) {
        if !self.migrating || self.lead.abort.is_over() {
            return;
        }
        let Ok(info) = self.qmp.query_migrate() else { return };
        let sent = self.sent();
        let ram = info.ram.unwrap_or_default();
        let elapsed_ms = self.started.elapsed().as_millis() as u64;
        let interval = (elapsed_ms - self.progress.elapsed_ms).max(1) as f64 / 1e3;
        // Counted in pages: the few bytes of a delta do not show how fast the remaining pages will drain.
        let content_bytes = sent.normal_pages * PAGE_SIZE as u64;
        let content_rate = content_bytes.saturating_sub(self.content_reported) as f64 / interval;
        self.content_reported = content_bytes;
        let wire_rate = sent.wire_bytes.saturating_sub(self.progress.wire_bytes) as f64 / interval;
        let drain = (ram.remaining + self.window.in_flight()) as f64 / content_rate.max(1.0) * 1e3;
        self.progress = Progress {
            phase: info.status,
            elapsed_ms,
            round: ram.dirty_sync_count,
            total_bytes: self.progress.total_bytes.max(ram.total),
            remaining_bytes: ram.remaining,
            normal_pages: sent.normal_pages,
            delta_pages: sent.delta_pages,
            same_pages: sent.same_pages,
            zero_pages: sent.zero_pages,
            content_rate,
            wire_bytes: sent.wire_bytes,
            wire_rate,
            ratio: sent.ratio(),
            dirty_rate: (ram.dirty_pages_rate * ram.page_size.max(1)) as f64,
            predicted_downtime_ms: drain + COMMIT_ESTIMATE.as_secs_f64() * 1e3,
            devices: Vec::new(),
        };
        self.observer.progress(&self.progress);
        // Before the first pages are sent there is no rate to predict from; after the stop the rounds are over.
        if self.progress.phase == "active"
            && content_rate > 0.0
            && let Some(note) = self.watch.report(self.progress.round, self.progress.predicted_downtime_ms)
        {
            self.observer.note(note);
        }
    }

    /// Returns the outcome when the guest runs at the destination. It is only `Completed` if the record on the disk is settled.
    fn finished(&self) -> (Outcome, Option<String>) {
        let Some(why) = self.unwritten.as_ref().filter(|_| !self.settled()) else { return (Outcome::Completed, None) };
        let reason = format!(
            "the destination has confirmed that the guest runs there, but the record could not be written: {why}"
        );
        (Outcome::Unconfirmed, Some(reason))
    }

    fn settled(&self) -> bool {
        self.record.record().state.settled()
    }

    /// Returns whether the source QEMU was ended or kept.
    fn source_after(&self) -> SourceAfter {
        match self.source_left {
            Some(_) => SourceAfter::Keep,
            None => self.record.record().source_after,
        }
    }

    /// Returns what the operator must know or do now.
    fn warnings(&self, outcome: Outcome) -> Vec<String> {
        let record = self.record.record();
        let mut warnings = Vec::new();
        let left = record.qemu.is_none_or(sterna_engine::process::lives);
        if outcome == Outcome::Completed && left && self.source_after() == SourceAfter::Keep {
            warnings.push(qemu::kept_warning(record.qemu, record.source_after, self.source_left.as_deref()));
        }
        if outcome == Outcome::Unconfirmed && left {
            warnings.push(qemu::unconfirmed_warning());
        }
        if matches!(outcome, Outcome::Failed | Outcome::Cancelled) {
            if let Some(why) = self.unwritten.as_ref().filter(|_| self.record.written() && !self.settled()) {
                warnings.push(format!(
                    "this end could not be written to the record, which still holds the state `{}`: {why}. Put that right, then \
                     run `sterna recover {}` here: until then this QEMU takes part in no other migration",
                    record.state.name(),
                    self.session.id
                ));
            }
            if self.accepted {
                warnings.extend(qemu::clean_up(&self.qmp).err());
            }
        }
        warnings
    }

    pub(super) fn finish(mut self, end: SourceOutcome) -> Report {
        let (outcome, reason) = match end {
            SourceOutcome::Machine(SourceEnd::Finished) => self.finished(),
            SourceOutcome::Machine(SourceEnd::Aborted { reason }) if self.lead.cancelled => {
                (Outcome::Cancelled, Some(reason))
            }
            SourceOutcome::Machine(SourceEnd::Aborted { reason }) => (Outcome::Failed, Some(reason)),
            SourceOutcome::Machine(SourceEnd::NotStarted) => {
                let why = self.unwritten.take().unwrap_or_default();
                (Outcome::Failed, Some(format!("the migration's record could not be written: {why}")))
            }
            SourceOutcome::Machine(SourceEnd::GuestGone) => (Outcome::Lost, Some("the source QEMU died".into())),
            SourceOutcome::Machine(end @ SourceEnd::DestinationLost { .. }) => {
                (Outcome::Unconfirmed, source_end(&end).err().map(|error| error.to_string()))
            }
            SourceOutcome::Machine(end @ (SourceEnd::Stuck { .. } | SourceEnd::Conflict)) => {
                (Outcome::Stuck, source_end(&end).err().map(|error| error.to_string()))
            }
            SourceOutcome::Undelivered if self.lead.switchover.decided() => {
                let unreachable = || "the destination did not confirm it in time".to_owned();
                (Outcome::Unconfirmed, Some(self.lead.undelivered.take().unwrap_or_else(unreachable)))
            }
            // The abort is on the disk and the guest runs here. A destination that missed the abort asks for it, or presumes it.
            SourceOutcome::Undelivered if self.lead.cancelled => (Outcome::Cancelled, Some("cancelled".into())),
            SourceOutcome::Undelivered => (Outcome::Failed, Some(self.lead.switchover.reason().to_owned())),
        };
        let sent = self.sent();
        if outcome == Outcome::Completed {
            // Figures follow the last switchover message on the same channel.
            if let Some(restore) = self.restore.take() {
                restore.keep();
            }
        }
        self.lead.abort.finish();
        self.count_rounds();
        self.lead.peer.hang_up();
        if let Some(moving) = self.moving.take() {
            moving.plane.join();
        }
        let warnings = self.warnings(outcome);
        let source_after = (outcome == Outcome::Completed).then(|| self.source_after());
        let end = self.lead.moments.running.unwrap_or_else(Instant::now);
        let (delta_cache, no_memory) = sent.delta_cache(self.delta_cache, self.options.channels);
        (self.delta_cache, self.no_deltas) = (delta_cache, self.no_deltas.or(no_memory));
        let total_ms = end.saturating_duration_since(self.started).as_secs_f64() * 1e3;
        Report {
            id: self.session.id.to_string(),
            outcome,
            reason,
            machine: self.machine_name.clone(),
            destination: self.options.to.clone(),
            total_ms,
            downtime_ms: self.lead.moments.downtime_ms(),
            downtime: self.lead.moments.parts(),
            rounds: self.rounds,
            convergence: self.watch.note().map(str::to_owned),
            post_copy: None,
            wire_bytes: sent.wire_bytes,
            content_bytes: sent.content_bytes,
            normal_pages: sent.normal_pages,
            zero_pages: sent.zero_pages,
            ratio: sent.ratio(),
            throughput: sent.wire_bytes as f64 / (total_ms / 1e3).max(1e-3),
            method: self.compression.words(&sent),
            choices: self.compression.choices(),
            channels: self.options.channels,
            encrypted: matches!(self.options.security, Security::Tls(_)),
            source_cpu_seconds: own_cpu_seconds(),
            destination_cpu_seconds: self.figures.cpu_seconds,
            destination_faults: self.figures.faults,
            placement: self.placement.clone(),
            accelerators: Vec::new(),
            delta_pages: sent.delta_pages,
            same_pages: sent.same_pages,
            device_deltas: sent.device_deltas,
            delta_cache: self.delta_cache,
            no_deltas: self.no_deltas.map(str::to_owned),
            devices: Vec::new(),
            refused_packets: self.refusals.as_ref().map_or(0, |refusals| refusals.packets()),
            source_after,
            warnings,
            mode: Some("stream".into()),
            not_direct: Some(self.not_direct.clone()),
            tracking: None,
            injection_ms: None,
            longest_settling_ms: None,
        }
    }
}
