//! The reports of the source's driver: progress while it runs, and at the end a report or an error.

use std::time::Instant;

use sterna_memory::PAGE_SIZE;
use sterna_wire::control::{ControlMessage, SourceProgress};
use sterna_wire::switchover::{SourceAfter, SourceEnd};
use sterna_wire::text::cleaned;

use super::Driver;
use crate::accelerator::Accelerator;
use crate::migration::{GuestState, MigrationError, PROGRESS, Phase, Side};
use crate::report::{Moments, PostCopyReport, Progress, Report, between, milliseconds};
use crate::send::Sent;
use crate::switchover::Ending;
use crate::transport::Security;

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
        self.progress.phase = self.phase();
        self.progress.content_rate = rate(sent.content_bytes, self.content_reported);
        self.progress.wire_rate = rate(sent.wire_bytes, self.progress.wire_bytes);
        self.progress.elapsed_ms = elapsed_ms;
        self.progress.normal_pages = sent.normal_pages;
        (self.progress.delta_pages, self.progress.same_pages) = (sent.delta_pages, sent.same_pages);
        self.progress.zero_pages = sent.zero_pages;
        self.progress.wire_bytes = sent.wire_bytes;
        self.progress.ratio = sent.ratio();
        self.progress.devices = self.devices.known.progress();
        (self.progress.interruptions, self.progress.interrupted_ms) = self.kernel.interruptions.figures();
        self.content_reported = sent.content_bytes;
        let (_, delivered) = self.window.delivered();
        self.stats
            .lock()
            .expect("no thread panics with the lock held")
            .fill(&mut self.progress, delivered.carried.pages());
        match self.progress.phase {
            Phase::SettingUp => self.progress.time_left_ms = None,
            Phase::Rounds => {}
            Phase::SwitchingOver | Phase::Committed => {
                let paused = self.kernel.moments.paused.map_or(0.0, |paused| paused.elapsed().as_secs_f64() * 1e3);
                let left = self.progress.predicted_downtime_ms - paused;
                self.progress.time_left_ms =
                    (self.progress.predicted_downtime_ms > 0.0).then_some(left.max(0.0) as u64);
            }
            Phase::PostCopy => {
                self.progress.remaining_bytes = self.unsent.pages() * PAGE_SIZE as u64;
                let left = self.post_copy.rest.time_left(self.progress.remaining_bytes, Instant::now());
                self.progress.time_left_ms = left.map(milliseconds);
            }
        }
        self.kernel.observer.progress(&self.progress);
        self.send_progress();
    }

    /// Sends the destination what it cannot know by itself. In post-copy it knows what it lacks. Newer figures follow for a destination
    /// that reads too slowly.
    fn send_progress(&self) {
        let Progress { phase, remaining_bytes, time_left_ms, .. } = self.progress;
        if matches!(phase, Phase::Rounds | Phase::SwitchingOver)
            && self.kernel.session.has(PROGRESS)
            && !self.kernel.peer.is_behind()
        {
            let progress = SourceProgress { remaining_bytes, time_left_ms };
            self.kernel.peer.send(&ControlMessage::Progress(progress));
        }
    }

    pub(super) fn finish(mut self, end: SourceEnd) -> Result<Report, MigrationError> {
        let ending = self.kernel.ending(end);
        self.kernel.hang_up();
        self.end_rounds();
        self.end_data_plane();
        let left = self.kernel.left().map(str::to_owned);
        if let Some(Err(busy)) = self.accelerator.as_ref().map(Accelerator::retire) {
            self.kernel.observer.note(&format!("{busy}; an accelerator out of service may still read it"));
        }
        let warnings = left.into_iter().chain(self.kernel.record_warning(&ending)).collect();
        let report = self.report(&ending, warnings);
        let phase = self.phase();
        let Ending { outcome, guest, reason } = ending;
        match reason {
            None => Ok(report),
            Some(reason) => {
                let mut error =
                    MigrationError::ended((Side::Source, phase, guest), outcome, reason, self.vmm.failures());
                error.report = Some(Box::new(report));
                Err(error)
            }
        }
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
    fn report(&mut self, ending: &Ending, warnings: Vec<String>) -> Report {
        let sent = self.sent();
        let stats = self.stats.lock().expect("no thread panics with the lock held").clone();
        let Moments { running, complete, .. } = self.kernel.moments;
        let end = complete.or(running).unwrap_or_else(Instant::now);
        let requested = self.settings.delta_cache.min(self.ram.bytes());
        let (delta_cache, no_deltas) = sent.delta_cache(requested, self.settings.channels);
        let total_ms = end.saturating_duration_since(self.started).as_secs_f64() * 1e3;
        let (reason, kind) = ending.for_report();
        let (interruptions, interrupted_ms) = self.kernel.interruptions.figures();
        Report {
            id: self.kernel.session.id.to_string(),
            outcome: ending.outcome,
            reason,
            kind,
            stopped: None,
            machine: self.vmm.name(),
            destination: self.kernel.to().to_string(),
            total_ms,
            downtime_ms: self.kernel.moments.downtime_ms(),
            downtime: self.kernel.moments.parts(),
            rounds: stats.round,
            convergence: match (stats.verdict, self.throttled) {
                (None, _) => {
                    let wanted = self.downtime().as_secs_f64() * 1e3;
                    stats.out_of_reach.filter(|_| self.kernel.moments.downtime_ms() > wanted)
                }
                (Some(verdict), 0) => Some(verdict),
                (Some(verdict), percent) => Some(format!("{verdict}; it was held for {percent} % of the time")),
            },
            interruptions,
            interrupted_ms,
            post_copy: self.kernel.post_copy_begun().then(|| PostCopyReport {
                ms: between(running, complete),
                requests: self.post_copy.figures.requests,
                latency_p50_ms: f64::from(self.post_copy.figures.latency_p50_us) / 1e3,
                latency_p99_ms: f64::from(self.post_copy.figures.latency_p99_us) / 1e3,
                reconnected: self.post_copy.reconnected,
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
            refused_packets: self.refusals.packets(),
            devices: self.devices.known.report(),
            source_after: self.ended.then_some(SourceAfter::Quit),
            warnings,
            mode: None,
            not_direct: None,
            tracking: None,
            injection_ms: None,
            longest_settling_ms: None,
            guest_ended: self.figures.guest_ended.as_deref().map(cleaned),
            nothing_left: ending.guest == GuestState::EndedAtSource,
        }
    }
}
