//! The report: what a migration did, for people and for machines.
//!
//! One value of [`Report`] is made at the end, whatever the end was. Its JSON form (`--json`) is stable: fields are only
//! added. Times are in milliseconds, sizes in bytes, rates in bytes per second.

mod devices;
mod downtime;
mod observer;
mod time_left;

use serde::{Deserialize, Serialize};
use sterna_wire::reason::ErrorKind;
use sterna_wire::switchover::SourceAfter;
use sterna_wire::text::cleaned;

pub use self::devices::{DevicePhase, DeviceProgress, DeviceReport};
pub(crate) use self::devices::{named, waiting_for};
pub use self::downtime::{DowntimeParts, Moments, between};
pub use self::observer::{Observer, Progress, ReceiveProgress};
pub(crate) use self::time_left::{Shrinking, milliseconds};

/// Placements that are shown on a terminal: a destination may have thousands of RAM blocks, or claim so.
const MAX_PLACEMENTS: usize = 64;

/// How a migration ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The guest runs at the destination.
    Completed,
    /// It was cancelled; the guest runs at the source.
    Cancelled,
    /// It failed; the guest runs at the source.
    Failed,
    /// The decision is made, but the destination has not confirmed that the guest runs, or that it has could not be written
    /// to the record: `sterna recover` settles it.
    Unconfirmed,
    /// Nothing was decided for the destination, but the state of the guest at the source could not be determined.
    Stuck,
    /// The source's monitor died during the migration, and the guest with it.
    Lost,
    /// The guest was started at the destination and certainly does not run there. The source's monitor is kept, paused.
    DoesNotRun,
    /// The guest has ended at the source by itself before it was moved: it has shut down, or has panicked. Nothing is left to recover.
    GuestEnded,
}

/// What happened after the guest went on at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PostCopyReport {
    /// Time from the guest running at the destination to all of its RAM being there, ms.
    pub ms: f64,
    /// Pages that the guest waited for.
    pub requests: u64,
    /// Time from the fault to the page in place, of the middle request, ms.
    pub latency_p50_ms: f64,
    /// As before, of the request that 99 of 100 were faster than, ms.
    pub latency_p99_ms: f64,
    /// Times that the connection was lost and made anew meanwhile.
    pub reconnected: u32,
}

/// The whole account of one migration, as seen from the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The migration's id.
    pub id: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, where it did not complete.
    pub reason: Option<String>,
    /// The kind of the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<ErrorKind>,
    /// The run state of a guest that stayed at the source and does not run there, by its monitor's name: another program has stopped it or moved
    /// it elsewhere, or it has stopped by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
    /// What was moved: monitor, machine type.
    pub machine: String,
    /// Where to.
    pub destination: String,
    /// Time from the start of the migration to the guest running at the destination, ms.
    pub total_ms: f64,
    /// Time in which the guest ran at neither side, ms.
    pub downtime_ms: f64,
    /// The parts of the downtime.
    pub downtime: DowntimeParts,
    /// Rounds over the dirty pages, as the source's monitor counts them.
    pub rounds: u64,
    /// Why the rounds did not converge by themselves and what was done about it, where they did not; or why the guest
    /// stood for longer than was wanted, where that was to be expected whatever it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub convergence: Option<String>,
    /// Times that the connection was lost while the guest's memory was sent, and the migration went on later or waited for that.
    #[serde(default)]
    pub interruptions: u32,
    /// How long that has lasted all together, ms.
    #[serde(default)]
    pub interrupted_ms: f64,
    /// How post-copy went, where the guest went on at the destination before all of its RAM was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopyReport>,
    /// Bytes on the network, both directions' headers and TLS included, source to destination.
    pub wire_bytes: u64,
    /// Bytes of page content before compression.
    pub content_bytes: u64,
    /// Normal pages sent.
    pub normal_pages: u64,
    /// Zero pages sent.
    pub zero_pages: u64,
    /// Content bytes / packet bytes; 1 where nothing was compressed.
    pub ratio: f64,
    /// Wire bytes per second of total time.
    pub throughput: f64,
    /// Compression method and level.
    pub method: String,
    /// Where the method was chosen batch by batch: what was chosen when, and what held the sending up meanwhile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<String>,
    /// RAM channels.
    pub channels: u16,
    /// Whether the connections were encrypted.
    pub encrypted: bool,
    /// CPU-seconds of the sending Sterna process; of a monitor that embeds the library, those of the migration's threads, and of the thread
    /// that called `run` what was not spent in the monitor's methods.
    pub source_cpu_seconds: f64,
    /// As `source_cpu_seconds`, at the receiving side, until the guest runs there.
    pub destination_cpu_seconds: f64,
    /// Page faults of the destination's monitor during the migration.
    pub destination_faults: u64,
    /// How each RAM block was placed, and why.
    pub placement: Vec<String>,
    /// Which accelerators the source's process used for what so far, for whichever guests, and what the CPU had to do in their place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accelerators: Vec<String>,
    /// Normal pages of which only what had changed was sent.
    #[serde(default)]
    pub delta_pages: u64,
    /// Normal pages that were looked at and not sent: the destination had the same already.
    #[serde(default)]
    pub same_pages: u64,
    /// Of both, those pages of which an accelerator has found out what had changed.
    #[serde(default)]
    pub device_deltas: u64,
    /// Most bytes of memory for what had been sent, to make deltas against, all channels together, as far as it could be had; 0: none
    /// were made.
    #[serde(default)]
    pub delta_cache: u64,
    /// Why no deltas were made although memory for them was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_deltas: Option<String>,
    /// Packets whose content did not arrive as it was read from the guest, so that their pages were sent again.
    #[serde(default)]
    pub refused_packets: u32,
    /// The devices whose state travelled apart from the monitor's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceReport>,
    /// What became of the source's monitor after a migration that completed; none where that is not Sterna's to decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_after: Option<SourceAfter>,
    /// What somebody must know or do now: one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// How QEMU's guest was moved: `direct` or `stream`; none of a monitor that embeds the library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Why it was not moved directly, where it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_direct: Option<String>,
    /// In direct mode: how the guest's writes were tracked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracking: Option<String>,
    /// In direct mode: the longest time that a thread of QEMU was stopped for the tracking to be made possible, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub injection_ms: Option<f64>,
    /// In direct mode: the longest wait for QEMU's block layer to have nothing under way, ms. The guest's devices wait meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_settling_ms: Option<f64>,
    /// How the guest has ended by itself right after it was started at the destination, where it has. The migration has completed all the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_ended: Option<String>,
    /// Where the guest has ended at the source: whether it is certain that the destination has no copy of it that could run.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nothing_left: bool,
}

impl Report {
    /// Returns the words about a guest that was not moved.
    fn guest_that_stays(&self) -> String {
        match &self.stopped {
            None => "the guest runs on at the source".into(),
            Some(state) => format!("the guest stays at the source, and does not run ({state})"),
        }
    }

    /// Text for a terminal: what a person wants to know first, first.
    ///
    /// Part of it is the destination's word, so each line is printed without control characters: no escape sequence
    /// reaches the terminal and no line is forged.
    pub fn text(&self) -> String {
        let headline = match (self.outcome, &self.reason) {
            (Outcome::Completed, _) => {
                let now = match &self.guest_ended {
                    None => format!("the guest runs at {}", self.destination),
                    Some(how) => {
                        format!("the guest went on at {}, and has ended there by itself: {how}", self.destination)
                    }
                };
                format!("migration {} completed: {now}", self.id)
            }
            (Outcome::DoesNotRun, reason) => format!(
                "migration {}: THE GUEST DOES NOT RUN: it has arrived at {} and was started there, but {}",
                self.id,
                self.destination,
                reason.as_deref().unwrap_or("no reason given")
            ),
            (Outcome::GuestEnded, reason) => format!(
                "migration {}: {}; that was at the source, before it was moved: there is nothing to recover",
                self.id,
                reason.as_deref().unwrap_or("the guest has ended by itself")
            ),
            (Outcome::Cancelled, _) => format!("migration {} cancelled: {}", self.id, self.guest_that_stays()),
            (Outcome::Failed, reason) => format!(
                "migration {} failed: {}; {}",
                self.id,
                reason.as_deref().unwrap_or("no reason given"),
                self.guest_that_stays()
            ),
            (Outcome::Stuck, reason) => format!(
                "migration {} did not come to an end: {}; look whether the guest runs here, then `sterna recover {}`",
                self.id,
                reason.as_deref().unwrap_or("no reason given"),
                self.id
            ),
            // The destination has the guest, but not all of its memory: no copy of it can go on.
            (Outcome::Lost, reason) if self.post_copy.is_some() => format!(
                "migration {}: the guest is lost: {}; it was at {} by post-copy, without the memory that was not sent: end \
                 what is left of it on both hosts, and start it anew",
                self.id,
                reason.as_deref().unwrap_or("its memory is gone"),
                self.destination
            ),
            (Outcome::Lost, reason) if self.nothing_left => format!(
                "migration {}: the guest is lost: {}; the destination had not received all of it, so nothing is left to recover",
                self.id,
                reason.as_deref().unwrap_or("its monitor died")
            ),
            (Outcome::Lost, reason) => format!(
                "migration {}: the guest is lost: {}; if the destination is prepared, an operator there who declares the \
                 source gone for good brings it back",
                self.id,
                reason.as_deref().unwrap_or("its monitor died")
            ),
            (Outcome::Unconfirmed, reason) => format!(
                "migration {} was decided for {}, but is not settled ({}); the guest belongs to that host: never resume it here; run \
                 `sterna recover {}` on both hosts",
                self.id,
                self.destination,
                reason.as_deref().unwrap_or("connection lost"),
                self.id
            ),
        };
        let mut text = cleaned(&headline);
        let mut line = |name: &str, value: String| text.push_str(&format!("\n  {name:<12} {}", cleaned(&value)));
        for warning in &self.warnings {
            line("WARNING", warning.clone());
        }
        line("machine", self.machine.clone());
        if let Some(mode) = &self.mode {
            line("mode", self.mode_text(mode));
        }
        line("total time", format!("{:.0} ms", self.total_ms));
        let arrived = matches!(self.outcome, Outcome::Completed | Outcome::DoesNotRun);
        if arrived {
            let parts = &self.downtime;
            line(
                "downtime",
                format!(
                    "{:.0} ms = stop {:.0} + last round {:.0} + state {:.0} + load {:.0} + commit {:.0} + start {:.0}",
                    self.downtime_ms,
                    parts.stop_ms,
                    parts.last_round_ms,
                    parts.state_ms,
                    parts.load_ms,
                    parts.commit_ms,
                    parts.start_ms
                ),
            );
        }
        if self.interruptions > 0 {
            line("interrupted", interrupted(self.interruptions, self.interrupted_ms));
        }
        if let Some(post_copy) = &self.post_copy {
            line(
                "post-copy",
                format!(
                    "{:.0} ms, {} pages waited for, half of them within {:.2} ms, 99 % within {:.2} ms",
                    post_copy.ms, post_copy.requests, post_copy.latency_p50_ms, post_copy.latency_p99_ms
                ),
            );
        }
        for device in &self.devices {
            line("device", device.text());
        }
        if let Some(convergence) = &self.convergence {
            line("convergence", convergence.clone());
        }
        for accelerator in &self.accelerators {
            line("accelerator", accelerator.clone());
        }
        let deltas = match (self.delta_pages, self.same_pages) {
            (0, 0) => String::new(),
            (deltas, same) => {
                let by_device = match self.device_deltas {
                    0 => String::new(),
                    pages => format!("; {pages} of these compared by an accelerator"),
                };
                format!(" ({deltas} of them as deltas, {same} unchanged and not sent{by_device})")
            }
        };
        let Self { normal_pages, zero_pages, rounds, .. } = self;
        line("pages", format!("{normal_pages} normal{deltas}, {zero_pages} zero, in {rounds} rounds"));
        match &self.no_deltas {
            Some(why) => line("deltas", format!("none: {why}")),
            None if self.delta_cache > 0 => {
                line("deltas", format!("against what was sent before, in at most {}", bytes(self.delta_cache as f64)));
            }
            None => {}
        }
        if self.refused_packets > 0 {
            let cause = "an accelerator, the memory or the network of one of the two hosts damages data";
            line("damaged", format!("{} packets, which were sent again: {cause}", self.refused_packets));
        }
        line(
            "network",
            format!(
                "{}, {}, ratio {:.2} ({}, {} channels, {})",
                bytes(self.wire_bytes as f64),
                rate(self.throughput),
                self.ratio,
                self.method,
                self.channels,
                if self.encrypted { "TLS" } else { "not encrypted" }
            ),
        );
        for choice in &self.choices {
            line("chosen", choice.clone());
        }
        line(
            "cpu",
            format!(
                "source {:.2} s, destination {:.2} s (Sterna's own)",
                self.source_cpu_seconds, self.destination_cpu_seconds
            ),
        );
        // Under a failure they would push its reason off the screen.
        let placements = if arrived { self.placement.as_slice() } else { &[] };
        for placement in placements.iter().take(MAX_PLACEMENTS) {
            line("placement", placement.clone());
        }
        if let Some(more) = placements.len().checked_sub(MAX_PLACEMENTS).filter(|more| *more > 0) {
            line("placement", format!("and {more} more, in the report as JSON"));
        }
        text
    }
}

impl Report {
    /// How a QEMU's guest was moved, in one line.
    fn mode_text(&self, mode: &str) -> String {
        let mut text = match (&self.tracking, &self.not_direct) {
            (Some(tracking), _) => format!("{mode}: {tracking}"),
            (None, Some(why)) => format!("{mode}; not direct: {why}"),
            (None, None) => mode.to_owned(),
        };
        if let Some(ms) = self.injection_ms {
            text.push_str(&format!("; one thread of QEMU was stopped for {ms:.1} ms to begin it"));
        }
        if let Some(ms) = self.longest_settling_ms {
            text.push_str(&format!("; disks had nothing under way after at most {ms:.1} ms"));
        }
        text
    }
}

/// The report of a destination.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReceiveReport {
    /// The migration's id.
    pub id: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, where it did not complete.
    pub reason: Option<String>,
    /// The kind of the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<ErrorKind>,
    /// Who sent.
    pub source: String,
    /// How each RAM block was placed, and why.
    pub placement: Vec<String>,
    /// Milliseconds from the end of RAM to the guest loaded and paused.
    pub load_ms: f64,
    /// Milliseconds from the decision to the guest running.
    pub start_ms: f64,
    /// Times that the source was lost while the guest's memory arrived, and the migration went on later or waited for that.
    #[serde(default)]
    pub interruptions: u32,
    /// How long that has lasted all together, ms.
    #[serde(default)]
    pub interrupted_ms: f64,
    /// How the guest has ended by itself right after it was started here, where it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_ended: Option<String>,
}

impl ReceiveReport {
    /// Text for a terminal.
    pub fn text(&self) -> String {
        let reason = self.reason.as_deref().unwrap_or("no reason given");
        let headline = match self.outcome {
            Outcome::Completed => {
                let now = match &self.guest_ended {
                    None => "the guest runs here".to_owned(),
                    Some(how) => format!("the guest went on here, and has ended by itself: {how}"),
                };
                format!("migration {} from {} completed: {now}", self.id, self.source)
            }
            Outcome::Unconfirmed | Outcome::Stuck | Outcome::Lost => format!(
                "migration {} from {}: {reason}; run `sterna recover {}` on both hosts",
                self.id, self.source, self.id
            ),
            Outcome::DoesNotRun => format!(
                "migration {} from {}: THE GUEST DOES NOT RUN: it has arrived and was started here, but {reason}. The source's monitor was \
                 kept, paused",
                self.id, self.source
            ),
            Outcome::Failed | Outcome::Cancelled | Outcome::GuestEnded => {
                format!("migration {} from {} ended: {reason}; nothing runs here", self.id, self.source)
            }
        };
        let mut text = headline;
        if self.interruptions > 0 {
            text.push_str(&format!("\n  interrupted  {}", interrupted(self.interruptions, self.interrupted_ms)));
        }
        // Under a failure they would push its reason off the screen.
        for line in self.placement.iter().filter(|_| self.outcome == Outcome::Completed) {
            text.push_str(&format!("\n  placement    {line}"));
        }
        text
    }
}

/// How often and for how long a migration was interrupted, for people.
pub fn interrupted(interruptions: u32, interrupted_ms: f64) -> String {
    let times = if interruptions == 1 { "once".into() } else { format!("{interruptions} times") };
    format!("{times}, {:.1} s all together", interrupted_ms / 1e3)
}

/// A size for people: `1.50 GiB`.
pub fn bytes(size: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = size;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{size:.0} B") } else { format!("{size:.2} {}", UNITS[unit]) }
}

/// A rate for people: `1.50 GB/s`, in the decimal units of networks.
pub fn rate(bytes_per_second: f64) -> String {
    const UNITS: [&str; 4] = ["B/s", "kB/s", "MB/s", "GB/s"];
    let mut rate = bytes_per_second;
    let mut unit = 0;
    while rate >= 1000.0 && unit + 1 < UNITS.len() {
        rate /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{rate:.0} B/s") } else { format!("{rate:.2} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_rates_are_written_with_their_units() {
        assert_eq!(bytes(512.0), "512 B");
        assert_eq!(bytes(1.5 * 1024.0 * 1024.0 * 1024.0), "1.50 GiB");
        assert_eq!(rate(118e6), "118.00 MB/s");
    }

    fn report(outcome: Outcome) -> Report {
        Report {
            id: "0".repeat(32),
            outcome,
            reason: None,
            kind: None,
            stopped: None,
            machine: "pc-q35-10.0".into(),
            destination: "dst-host:4920".into(),
            total_ms: 1000.0,
            downtime_ms: 100.0,
            downtime: DowntimeParts::default(),
            rounds: 2,
            convergence: None,
            interruptions: 0,
            interrupted_ms: 0.0,
            post_copy: None,
            wire_bytes: 1 << 20,
            content_bytes: 1 << 20,
            normal_pages: 256,
            zero_pages: 0,
            ratio: 1.0,
            throughput: 1e6,
            method: "none".into(),
            choices: Vec::new(),
            channels: 2,
            encrypted: true,
            source_cpu_seconds: 1.0,
            destination_cpu_seconds: 1.0,
            destination_faults: 0,
            placement: Vec::new(),
            accelerators: Vec::new(),
            delta_pages: 0,
            same_pages: 0,
            device_deltas: 0,
            delta_cache: 0,
            no_deltas: None,
            refused_packets: 0,
            devices: Vec::new(),
            source_after: None,
            warnings: Vec::new(),
            mode: None,
            not_direct: None,
            tracking: None,
            injection_ms: None,
            longest_settling_ms: None,
            guest_ended: None,
            nothing_left: false,
        }
    }

    #[test]
    fn a_guest_that_stays_and_does_not_run_is_not_called_running() {
        for outcome in [Outcome::Failed, Outcome::Cancelled] {
            assert!(report(outcome).text().contains("the guest runs on at the source"));
            let text = Report { stopped: Some("paused".into()), ..report(outcome) }.text();
            assert!(text.contains("the guest stays at the source, and does not run (paused)"), "{text}");
            assert!(!text.contains("runs on"), "{text}");
        }
    }

    #[test]
    fn interruptions_are_counted_in_a_line() {
        let text =
            |interruptions| Report { interruptions, interrupted_ms: 2_340.0, ..report(Outcome::Completed) }.text();
        assert!(!text(0).contains("interrupted"));
        assert!(text(1).contains("\n  interrupted  once, 2.3 s all together\n"), "{}", text(1));
        assert!(text(3).contains("\n  interrupted  3 times, 2.3 s all together\n"), "{}", text(3));
    }

    #[test]
    fn a_warning_stands_right_behind_the_headline() {
        let warned = Report { warnings: vec!["end the source's QEMU".into()], ..report(Outcome::Completed) };
        assert!(
            warned.text().lines().nth(1).unwrap().contains("WARNING      end the source's QEMU"),
            "{}",
            warned.text()
        );
        assert!(!report(Outcome::Completed).text().contains("WARNING"));
    }

    #[test]
    fn the_mode_is_one_line_with_what_it_cost_the_guest_or_why_it_was_not_direct() {
        let of = |report: &Report| {
            let text = report.text();
            text.lines().find_map(|line| line.strip_prefix("  mode         ")).map(str::to_owned)
        };
        let direct = Report {
            mode: Some("direct".into()),
            tracking: Some("write protection from outside".into()),
            injection_ms: Some(1.25),
            longest_settling_ms: Some(0.31),
            ..report(Outcome::Completed)
        };
        assert_eq!(
            of(&direct).unwrap(),
            "direct: write protection from outside; one thread of QEMU was stopped for 1.2 ms to begin it; disks had nothing under way \
             after at most 0.3 ms"
        );
        let stream = Report {
            mode: Some("stream".into()),
            not_direct: Some("the kernel is 6.1: 6.7 is needed\n".into()),
            ..report(Outcome::Completed)
        };
        assert_eq!(of(&stream).unwrap(), "stream; not direct: the kernel is 6.1: 6.7 is needed ");
        assert_eq!(of(&report(Outcome::Completed)), None, "a monitor that embeds the library has no such modes");
    }

    #[test]
    fn what_the_peer_said_brings_neither_escape_sequences_nor_lines_of_its_own() {
        let plain = report(Outcome::Failed).text().lines().count();
        let evil = "x\x1b[2J\r\nmigration completed\u{9b}31m\u{7f}";
        let forged = Report {
            reason: Some(evil.into()),
            kind: None,
            machine: evil.into(),
            destination: evil.into(),
            method: evil.into(),
            choices: vec![evil.into()],
            placement: vec![evil.into(), evil.into()],
            ..report(Outcome::Failed)
        };
        let outcomes = [
            Outcome::Completed,
            Outcome::Failed,
            Outcome::Unconfirmed,
            Outcome::Stuck,
            Outcome::Lost,
            Outcome::DoesNotRun,
            Outcome::GuestEnded,
        ];
        for outcome in outcomes {
            let text = Report { outcome, ..forged.clone() }.text();
            assert!(text.chars().all(|character| character == '\n' || !character.is_control()), "{text:?}");
            assert!(!text.lines().any(|line| line.starts_with("migration completed")), "{text}");
        }
        assert_eq!(forged.text().lines().count(), plain + 1, "one line for each choice, and none for placements");
        let completed = report(Outcome::Completed).text().lines().count();
        let forged = Report { outcome: Outcome::Completed, ..forged };
        assert_eq!(forged.text().lines().count(), completed + 3, "one line for each placement and choice");
    }

    #[test]
    fn a_guest_that_lacks_memory_at_the_destination_is_not_said_to_be_brought_back() {
        let lost = report(Outcome::Lost);
        assert!(lost.text().contains("brings it back"), "{}", lost.text());
        let text = Report { post_copy: Some(PostCopyReport::default()), ..lost }.text();
        assert!(text.contains("without the memory that was not sent") && !text.contains("brings it back"), "{text}");
    }

    #[test]
    fn of_a_guest_that_has_ended_no_copy_is_said_to_be_brought_back() {
        let ended =
            Report { reason: Some("the guest has shut itself down".into()), ..report(Outcome::GuestEnded) }.text();
        assert!(ended.contains("has shut itself down") && ended.contains("nothing to recover"), "{ended}");
        let lost = Report { nothing_left: true, ..report(Outcome::Lost) }.text();
        for text in [ended, lost] {
            assert!(!text.contains("brings it back") && !text.contains("runs on"), "{text}");
        }
        let moved = Report { guest_ended: Some("the guest has panicked".into()), ..report(Outcome::Completed) }.text();
        assert!(moved.contains("the guest has panicked") && !moved.contains("the guest runs"), "{moved}");
    }

    #[test]
    fn a_device_is_told_in_sizes_for_people_and_with_times_once_it_was_loaded() {
        let loaded = DeviceReport {
            device: "gpu/0".into(),
            phase: DevicePhase::Loaded,
            bytes: 3 << 20,
            ahead_bytes: 2 << 20,
            save_ms: 4.0,
            transfer_ms: 3.0,
            load_ms: 5.0,
            downtime_ms: 12.0,
        };
        let serial = DeviceReport { ahead_bytes: 0, ..loaded.clone() };
        let failed = DeviceReport { phase: DevicePhase::Loading, downtime_ms: 0.0, bytes: 2 << 20, ..loaded.clone() };
        let text = Report { devices: vec![loaded, serial, failed], ..report(Outcome::Completed) }.text();
        let told: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("  device       gpu/0: ")).collect();
        assert_eq!(
            told,
            [
                "2.00 MiB while the guest ran, 1.00 MiB while it stood, in 12 ms = save 4 + transfer 3 + load 5",
                "3.00 MiB while it stood, in 12 ms = save 4 + transfer 3 + load 5",
                "2.00 MiB while the guest ran, 0 B while it stood; loading at the destination at the end"
            ]
        );
    }

    #[test]
    fn of_many_placements_the_first_are_shown_and_the_rest_is_counted() {
        let placed = |count: usize| {
            let placement = (0..count).map(|number| format!("block {number}")).collect();
            let text = Report { placement, ..report(Outcome::Completed) }.text();
            text.lines().filter(|line| line.starts_with("  placement")).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(placed(MAX_PLACEMENTS).len(), MAX_PLACEMENTS);
        let many = placed(1000);
        assert_eq!(many.len(), MAX_PLACEMENTS + 1);
        assert!(many[MAX_PLACEMENTS].contains("and 936 more"), "{many:?}");
    }
}
