//! One migration between two microvm processes, whose guest writes pages at a set rate.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::WarmMemory;

use super::super::measured::check_method;
use crate::hosts::{Ended, Hosts, HostsError, Side, Sterna, doing, program};

/// Bytes of a page.
pub(in super::super) const PAGE: f64 = 4096.0;
/// The least part of its set rate that a guest must reach for an attempt to count.
const MIN_ACHIEVED: f64 = 0.95;
/// The largest downtime of a success, as a multiple of the target downtime.
pub(in super::super) const MAX_DOWNTIME: f64 = 1.1;
/// Time limit of each step beside the migration itself, enough for a slow machine.
const SLACK: Duration = Duration::from_secs(60);

/// How the guest's memory is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Guest {
    /// A vCPU, its writes in KVM's dirty log; a thread where there is no KVM.
    Kvm,
    /// A thread of the monitor, its writes recorded by write protection.
    Thread,
}

impl Guest {
    pub(in super::super) const ALL: [Self; 2] = [Self::Kvm, Self::Thread];

    pub(in super::super) fn name(self) -> &'static str {
        match self {
            Self::Kvm => "KVM",
            Self::Thread => "thread",
        }
    }

    fn options(self) -> &'static str {
        match self {
            Self::Kvm => "--tracking log",
            Self::Thread => "--execution threads",
        }
    }
}

/// The guest and the settings of its migration.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Setting {
    /// The source's bandwidth limit, in bytes per second.
    pub(in super::super) bandwidth: Option<u64>,
    /// MiB of guest RAM, all of which is written repeatedly.
    pub(in super::super) memory: u64,
    pub(in super::super) fill: &'static str,
    pub(in super::super) guest: Guest,
    /// How pages are compressed: [`Site::attempt`] compares the report with it.
    pub(in super::super) method: &'static str,
    /// More options of the source, separated by spaces.
    pub(in super::super) how: &'static str,
    /// Whether the guest is throttled.
    pub(in super::super) throttles: bool,
    pub(in super::super) downtime: Duration,
    pub(in super::super) give_up_after: Duration,
}

/// The result of an attempt.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Attempt {
    /// Whether the guest was moved within the permitted downtime.
    pub(in super::super) moved: bool,
    /// The part of its set rate that the guest reached; 1: all.
    pub(in super::super) achieved: f64,
    pub(in super::super) total_ms: f64,
    pub(in super::super) downtime_ms: f64,
    pub(in super::super) rounds: f64,
    pub(in super::super) content_bytes: f64,
    pub(in super::super) ratio: f64,
    /// From the guest's start at the destination until its memory was complete, if by post-copy.
    pub(in super::super) post_copy_ms: Option<f64>,
    pub(in super::super) latency_p50_ms: f64,
    pub(in super::super) latency_p99_ms: f64,
    pub(in super::super) source_cpu: f64,
    pub(in super::super) wire_bytes: f64,
    pub(in super::super) normal_pages: f64,
    pub(in super::super) delta_pages: f64,
}

impl Attempt {
    /// Returns whether the guest was fast enough for the attempt to count.
    pub(in super::super) fn counts(&self) -> bool {
        self.achieved >= MIN_ACHIEVED
    }
}

/// Where attempts run.
pub(in super::super) struct Site<'a> {
    program: PathBuf,
    hosts: Hosts,
    cancel: &'a Cancel,
}

impl<'a> Site<'a> {
    /// Makes a site with this many CPUs for each side.
    ///
    /// # Errors
    /// There is no microvm; the text says how to build it.
    pub(in super::super) fn new(cpus: u16, cancel: &'a Cancel) -> Result<Self, HostsError> {
        Self::on(Hosts::loopback().pinned(cpus), cancel)
    }

    /// Makes a site on these hosts.
    ///
    /// # Errors
    /// As [`Site::new`].
    pub(in super::super) fn on(hosts: Hosts, cancel: &'a Cancel) -> Result<Self, HostsError> {
        let program = program("microvm", "STERNA_MICROVM", "sterna-microvm")?;
        Ok(Self { program, hosts, cancel })
    }

    /// Returns the CPUs of both sides, for the notes.
    pub(in super::super) fn cpus(&self) -> [String; 2] {
        [Side::A, Side::B].map(|side| self.hosts.cpus(side).unwrap_or_default())
    }

    /// Moves a guest that writes this many pages per second.
    pub(in super::super) fn attempt(&self, setting: &Setting, pages: f64) -> Result<Attempt, HostsError> {
        let Setting { bandwidth, memory, fill, guest, method, how, throttles, downtime, give_up_after } = *setting;
        let warm = WarmMemory::new(Some(memory << 20));
        warm.fill()?;
        let dir = tempfile::tempdir().map_err(doing("making a directory for reports"))?;
        let [sent_json, received_json] = ["source.json", "destination.json"].map(|name| dir.path().join(name));
        let both = format!("--memory {memory} --vcpus 1 --backing anonymous-huge --insecure --silent");
        let both = format!("{both} {}", guest.options());

        let mut command = self.command(Side::B, &both);
        let at = format!("{}:0", self.hosts.address_b());
        command.args(["--incoming", &at, "--seconds", "1", "--json"]).arg(&received_json);
        let mut receiving = Sterna::start("the destination", command, false)?;
        let address = receiving.address(SLACK, self.cancel)?;
        let mut command = self.command(Side::A, &both);
        let work = format!(
            "--fill {fill} --pattern sequential --first-bytes --write-rate {pages:.0} --check-rate 1000 \
             --after-seconds 1 --seconds 0"
        );
        let link = format!("--downtime {} --give-up-after {} {how}", downtime.as_millis(), give_up_after.as_secs());
        command.args(bandwidth.map(|bandwidth| format!("--bandwidth={bandwidth}")));
        command
            .args(["--migrate-to", &address, "--method", method])
            .args(work.split(' '))
            .args(link.split(' '))
            .arg("--json")
            .arg(&sent_json);
        let limit = SLACK + 2 * give_up_after;
        let sent = Sterna::start("the source", command, false)?.finish(limit, self.cancel)?;
        let report = read(&sent, &sent_json)?;
        // Exit code 3: the guest was not moved, and no fault was found in it.
        let moved = match sent.status.code() {
            Some(0) => true,
            Some(3) if report["error"]["guest"] == "RunsAtSource" && !report["migration"].is_null() => false,
            _ => return Err(HostsError(format!("the source: {}", sent.output.join("; ") + &sent.errors.join("; ")))),
        };
        let received = receiving.finish(SLACK, self.cancel)?;
        if moved && received.status.code() != Some(0) {
            return Err(HostsError(format!("the destination: {}", received.output.join("; "))));
        }
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let rate = |part: &Value| number(&part["written"]) / number(&part["seconds"]).max(1e-9);
        // A throttled guest must have been fast enough before the migration.
        let mut least = rate(&report["before"]);
        if !throttles {
            least = least.min(rate(&report["during"]));
        }
        let migration = &report["migration"];
        let asked = method.parse::<MethodChoice>().map_err(doing("choosing a method"))?;
        check_method(asked, migration["method"].as_str().unwrap_or_default())?;
        let longest_ms = MAX_DOWNTIME * downtime.as_secs_f64() * 1e3;
        Ok(Attempt {
            moved: moved && number(&migration["downtime_ms"]) <= longest_ms,
            achieved: if pages > 0.0 { least / pages } else { 1.0 },
            total_ms: number(&migration["total_ms"]),
            downtime_ms: number(&migration["downtime_ms"]),
            rounds: number(&migration["rounds"]),
            content_bytes: number(&migration["content_bytes"]),
            ratio: number(&migration["ratio"]),
            post_copy_ms: migration["post_copy"]["ms"].as_f64(),
            latency_p50_ms: number(&migration["post_copy"]["latency_p50_ms"]),
            latency_p99_ms: number(&migration["post_copy"]["latency_p99_ms"]),
            source_cpu: number(&migration["source_cpu_seconds"]),
            wire_bytes: number(&migration["wire_bytes"]),
            normal_pages: number(&migration["normal_pages"]),
            delta_pages: number(&migration["delta_pages"]),
        })
    }

    fn command(&self, side: Side, options: &str) -> Command {
        let mut command = self.hosts.command(side, &self.program);
        command.args(options.split(' '));
        command
    }
}

fn read(ended: &Ended, path: &std::path::Path) -> Result<Value, HostsError> {
    let failed = || format!("the source left no report: {}", ended.errors.join("; "));
    let text = std::fs::read(path).map_err(doing(failed()))?;
    serde_json::from_slice(&text).map_err(doing(failed()))
}
