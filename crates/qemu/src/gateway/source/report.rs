//! The reports of the source's driver: progress while it runs, and the report at its end.

use std::time::Instant;

use sterna_engine::migration::{GuestState, Phase};
use sterna_engine::process::own_cpu_seconds;
use sterna_engine::report::{Outcome, Progress, Report};
use sterna_engine::send::Sent;
use sterna_engine::switchover::Ending;
use sterna_engine::transport::Security;
use sterna_wire::switchover::{SourceAfter, SourceEnd};
use sterna_wire::text::cleaned;

use super::COMMIT_ESTIMATE;
use super::driver::Driver;
use super::migration::Stage;
use crate::gateway::qemu::{self, PAGE_SIZE};

impl Driver<'_> {
    pub(super) fn sent(&self) -> Sent {
        self.stage.moving().map(|moving| moving.plane.sent()).unwrap_or_default()
    }

    /// Queries QEMU's figures and reports the progress.
    pub(super) fn report_progress(&mut self) {
        if !self.stage.begun() || self.kernel.abort.is_over() {
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
            phase: self.phase(),
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
            // Only QEMU knows when it will be content.
            time_left_ms: None,
            interruptions: 0,
            interrupted_ms: 0.0,
            devices: Vec::new(),
        };
        self.kernel.observer.progress(&self.progress);
        // Before the first pages are sent there is no rate to predict from; after the stop the rounds are over.
        if info.status == "active"
            && content_rate > 0.0
            && let Some(note) = self.watch.report(self.progress.round, self.progress.predicted_downtime_ms)
        {
            self.kernel.observer.note(note);
        }
    }

    fn phase(&self) -> Phase {
        match () {
            () if self.kernel.decided() => Phase::Committed,
            () if self.kernel.moments.paused.is_some() => Phase::SwitchingOver,
            () => Phase::Rounds,
        }
    }

    /// Returns whether the source QEMU was ended or kept.
    fn source_after(&self) -> SourceAfter {
        match self.kernel.left() {
            Some(_) => SourceAfter::Keep,
            None => self.kernel.ledger.record().source_after,
        }
    }

    /// Returns what the operator must know or do now.
    fn warnings(&self, ending: &Ending) -> Vec<String> {
        let record = self.kernel.ledger.record();
        let mut warnings = Vec::new();
        let lives = record.monitor_process.is_none_or(sterna_engine::process::lives);
        match ending.outcome {
            Outcome::Completed if lives && self.source_after() == SourceAfter::Keep => {
                warnings.push(qemu::kept_warning(record.monitor_process, record.source_after, self.kernel.left()));
            }
            Outcome::DoesNotRun if lives => warnings.push(qemu::does_not_run_warning(record.monitor_process)),
            Outcome::Unconfirmed if lives => warnings.push(qemu::unconfirmed_warning()),
            Outcome::Failed | Outcome::Cancelled | Outcome::GuestEnded => {
                warnings.extend(self.kernel.record_warning(ending));
                if self.stage.accepted() && lives {
                    warnings.extend(qemu::clean_up(&self.qmp).err());
                }
            }
            _ => {}
        }
        warnings
    }

    pub(super) fn finish(mut self, end: SourceEnd) -> Report {
        let ending = self.kernel.ending(end);
        let sent = self.sent();
        let outcome = ending.outcome;
        if let Stage::Begun(begun) = &mut self.stage
            && matches!(outcome, Outcome::Completed | Outcome::DoesNotRun)
            && let Some(restore) = begun.restore.take()
        {
            restore.keep();
        }
        self.kernel.hang_up();
        self.count_rounds();
        if let Stage::Begun(begun) = &mut self.stage
            && let Some(moving) = begun.moving.take()
        {
            moving.plane.join();
        }
        let warnings = self.warnings(&ending);
        let source_after = match outcome {
            Outcome::Completed => Some(self.source_after()),
            Outcome::DoesNotRun => Some(SourceAfter::Keep),
            _ => None,
        };
        let end = self.kernel.moments.running.unwrap_or_else(Instant::now);
        let (delta_cache, no_memory) = sent.delta_cache(self.delta_cache, self.options.channels);
        (self.delta_cache, self.no_deltas) = (delta_cache, self.no_deltas.or(no_memory));
        let total_ms = end.saturating_duration_since(self.started).as_secs_f64() * 1e3;
        let (reason, kind) = ending.for_report();
        Report {
            id: self.kernel.session.id.to_string(),
            outcome,
            reason,
            kind,
            stopped: qemu::stopped_guest(&self.qmp, outcome),
            machine: self.machine_name.clone(),
            destination: self.options.to.clone(),
            total_ms,
            downtime_ms: self.kernel.moments.downtime_ms(),
            downtime: self.kernel.moments.parts(),
            rounds: self.rounds,
            convergence: self.watch.note().map(str::to_owned),
            interruptions: 0,
            interrupted_ms: 0.0,
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
            guest_ended: self.figures.guest_ended.as_deref().map(cleaned),
            nothing_left: ending.guest == GuestState::EndedAtSource,
        }
    }
}
