//! `sterna send --dry-run`: makes every check that `send` makes before it changes anything, and reports all refusals, the destination's
//! included, rather than the first one.
//!
//! QEMU is only queried. Three steps that `send` tries are left out, because they touch QEMU: making a userfaultfd in its process, having
//! it open a private socket, and beginning a stream at the destination.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;
use sterna_codec::{Engine, EngineMissing, Engines, Iaa};
use sterna_engine::cancel::Cancel;
use sterna_engine::migration;
use sterna_engine::report::Observer;
use sterna_engine::session::{self, DRY_RUN, DryRunAnswer, Features, OPENING, Offer};
use sterna_engine::source::{NotConverging, required_features};
use sterna_engine::transport::Address;
use sterna_offload::{Accelerators, Operation};
use sterna_wire::control::{Machine, Mode};

use super::claim::Claim;
use super::comparison::{self, NotCompared};
use super::direct::{self, Inspected};
use super::error::Cause;
use super::faults;
use super::features::DRY;
use super::neighbours;
use super::source::LIBVIRTS_DIRECTLY;
use super::{GatewayError, SendMode, SendOptions, earlier, qemu};
use crate::qmp::Qmp;
use crate::settings::{Role, Settings};
use sterna_wire::reason::ErrorKind;

/// The links for which a time is estimated where no limit is given, in bits per second.
const LINKS: [u64; 3] = [1_000_000_000, 10_000_000_000, 25_000_000_000];

/// What a dry run has found out. Nothing was begun.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct DryRun {
    /// Whether the migration would begin: whether there are no refusals.
    pub would_begin: bool,
    /// Every refusal that was found.
    pub refusals: Vec<Refusal>,
    /// Differences between the machines that the guest may notice.
    pub warnings: Vec<String>,
    /// How the guest's memory would be read: `direct` or `stream`.
    pub mode: &'static str,
    /// Why not directly, if the mode is `stream`.
    pub not_direct: Vec<String>,
    /// The encoding of pages, as reports name it.
    pub method: Option<String>,
    /// Bytes of guest RAM.
    pub ram_bytes: u64,
    /// Bytes of it that are populated, where that is known: others are not read.
    pub populated_bytes: Option<u64>,
    /// How long sending the memory once takes.
    pub times: Vec<Estimate>,
    /// The target of the downtime, in milliseconds.
    pub downtime_target_ms: f64,
    /// From the channel header to the destination's reply, in milliseconds, if it answered.
    pub round_trip_ms: Option<f64>,
}

/// A reason why the migration would not begin.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Refusal {
    /// Which side refuses: `source`, `destination`, `machines` if the two machines do not fit, or `connection` if the destination was not
    /// reached.
    pub side: &'static str,
    /// The kind of failure with which `send` would end.
    #[serde(skip)]
    pub kind: ErrorKind,
    /// The reason, for people.
    pub reason: String,
}

/// How long sending the memory once takes over a link.
#[derive(Clone, Copy, Debug, Serialize)]
#[non_exhaustive]
pub struct Estimate {
    /// Bits per second of the link, or of the limit that was given.
    pub bits_per_second: u64,
    /// Seconds for all populated memory (all memory, where that is not known), uncompressed, if the guest writes nothing meanwhile.
    pub seconds: f64,
    /// Bytes that the link carries within the target of the downtime: what may be left when the guest is paused.
    pub last_round_bytes: u64,
}

/// Finds out what would keep the guest of the QEMU behind `options.monitor` from being moved to `options.to`. Nothing of either QEMU changes.
///
/// # Errors
/// The source's QEMU cannot be asked.
pub fn dry_run(options: &SendOptions, cancel: &Cancel, observer: &dyn Observer) -> Result<DryRun, GatewayError> {
    let qmp = options.monitor.connect().map_err(GatewayError::untouched)?;
    let settings = Settings::read(&qmp).map_err(GatewayError::untouched)?;
    let mut found = Found::default();
    // Another sterna that is at work on this QEMU is a refusal. Held until this has ended.
    let _claim = Claim::of(&qmp).map_err(|error| found.source(&error));
    let of_settings = settings.refusals(Role::Source);
    of_settings.iter().for_each(|reason| found.source(reason));
    found.check(earlier::refuse_source(&options.state_dir, &qmp, &options.monitor, &settings.status));
    found.check(qemu::check_state_directory(&options.state_dir));
    found.check(neighbours::check_jobs(&qmp));

    let libvirts = options.monitor.is_libvirts();
    let opening = direct::opening(&options.monitor).unwrap_or_else(|reason| {
        found.source(&reason);
        Vec::new()
    });
    let inspected = direct::inspect(&qmp);
    let not_direct = match options.mode {
        SendMode::Stream if libvirts => {
            found.source(&LIBVIRTS_DIRECTLY);
            Vec::new()
        }
        _ if libvirts => {
            let kind = direct::refusal_kind(&qmp);
            inspected.obstacles.iter().for_each(|reason| found.add("source", kind, reason.clone()));
            Vec::new()
        }
        SendMode::Stream => vec!["--mode stream was given".to_owned()],
        _ => inspected.obstacles.clone(),
    };
    let mut mode = if not_direct.is_empty() { Mode::Direct } else { Mode::Owner };
    let encoding = found.encoding(options, mode);
    if mode == Mode::Owner {
        found.needs_direct(&qmp, options, &not_direct);
        found.by_stream(&qmp, options, of_settings.is_empty());
    }
    let machine = Machine { opening, ..qemu::machine(&qmp, options.downtime) };
    let mut not_direct = not_direct;
    let mut answer = ask(options, mode, &machine, &inspected, encoding, cancel);
    if let (Ok(DryRunAnswer { refusals, .. }), Mode::Direct, SendMode::Auto) = (&answer, mode, options.mode)
        && !libvirts
        && !refusals.is_empty()
    {
        // As `send`: the destination may take the guest by QEMU's stream.
        let by_stream = ask(options, Mode::Owner, &machine, &inspected, encoding, cancel);
        if matches!(&by_stream, Ok(answer) if answer.refusals.is_empty()) {
            not_direct.extend(refusals.iter().map(|reason| format!("the destination refuses it: {reason}")));
            (mode, answer) = (Mode::Owner, by_stream);
            found.needs_direct(&qmp, options, &not_direct);
            found.by_stream(&qmp, options, of_settings.is_empty());
        }
    }
    if cancel.is_cancelled() {
        return Err(GatewayError::untouched("cancelled").of(ErrorKind::Cancelled));
    }
    let mut warnings = Vec::new();
    // A destination that cannot be asked for the one cannot be asked for the other. libvirt's has no machine yet.
    if answer.is_ok() && !libvirts {
        match comparison::with_destination(&qmp, options, cancel) {
            Ok(verdict) => {
                warnings = verdict.warnings;
                verdict.refusals.into_iter().for_each(|reason| found.add("machines", ErrorKind::Refused, reason));
            }
            Err(NotCompared::Here(error)) => found.source(&error),
            Err(NotCompared::There(error)) => found.add("destination", error.kind(), error.to_string()),
        }
    }
    if mode == Mode::Owner {
        warnings.extend(faults::of_stream(&qmp).into_iter().map(str::to_owned));
    }
    let mut round_trip = None;
    match answer {
        Ok(DryRunAnswer { refusals, round_trip: measured }) => {
            round_trip = Some(measured);
            refusals.into_iter().for_each(|reason| found.add("destination", ErrorKind::Refused, reason));
        }
        Err(error) => {
            let side = if error.refused { "destination" } else { "connection" };
            found.add(side, error.kind(), error.to_string());
        }
    }
    if mode == Mode::Direct {
        observer.note("direct mode was not tried out: that would touch QEMU's process");
    }
    if libvirts {
        observer.note("libvirt at the destination was not asked to start the domain: only then it checks disks, networks and the CPU");
    }
    let ram = inspected.ram.as_ref().filter(|_| mode == Mode::Direct);
    let ram_bytes = ram.map_or(machine.ram, |ram| ram.bytes());
    let populated = inspected.populated.map(|bytes| bytes.min(ram_bytes));
    let links = options.bandwidth.map_or(LINKS.to_vec(), |limit| vec![limit.saturating_mul(8)]);
    let estimate =
        |bits_per_second: u64| Estimate::of(bits_per_second, populated.unwrap_or(ram_bytes), options.downtime);
    Ok(DryRun {
        would_begin: found.0.is_empty(),
        refusals: found.0,
        warnings,
        mode: if mode == Mode::Direct { "direct" } else { "stream" },
        not_direct: if mode == Mode::Direct { Vec::new() } else { not_direct },
        method: encoding.map(|encoding| encoding.to_string()),
        ram_bytes,
        populated_bytes: populated,
        times: links.into_iter().map(estimate).collect(),
        downtime_target_ms: options.downtime.as_secs_f64() * 1e3,
        round_trip_ms: round_trip.map(|measured| measured.as_secs_f64() * 1e3),
    })
}

/// Asks the destination about a migration in `mode`.
fn ask(
    options: &SendOptions,
    mode: Mode,
    machine: &Machine,
    inspected: &Inspected,
    encoding: Option<sterna_codec::Encoding>,
    cancel: &Cancel,
) -> Result<DryRunAnswer, session::SessionError> {
    let direct = &options.direct;
    let post_copy = matches!(direct.not_converging, NotConverging::PostCopy | NotConverging::PostCopyAfter(_));
    let mut required = required_features(post_copy, direct.checksums, options.delta_cache > 0);
    required.push(DRY_RUN);
    required.extend((!machine.opening.is_empty()).then_some(OPENING));
    let (features, machine) = match (mode, &inspected.ram) {
        (Mode::Direct, Some(ram)) => {
            let blocks = migration::machine(String::new(), ram, 0).blocks;
            (Features { offered: &required, required: &required }, Machine { blocks, ..machine.clone() })
        }
        _ => (DRY, machine.clone()),
    };
    let offer = Offer {
        to: &Address::from(&options.to),
        security: &options.security,
        channels: options.channels,
        packet_size: options.packet_size,
        machine,
        mode,
        features,
        encoding: encoding.unwrap_or_default(),
        patience: Duration::ZERO,
    };
    session::dry_run(&offer, cancel)
}

/// The refusals so far.
#[derive(Default)]
struct Found(Vec<Refusal>);

impl Found {
    fn add(&mut self, side: &'static str, kind: ErrorKind, reason: String) {
        self.0.push(Refusal { side, kind, reason });
    }

    fn source(&mut self, cause: &impl Cause) {
        self.add("source", cause.kind(), cause.to_string());
    }

    fn check(&mut self, checked: Result<(), impl Cause>) {
        if let Err(cause) = checked {
            self.source(&cause);
        }
    }

    /// Adds what keeps this QEMU from migrating its guest by its own stream, with settings that can be read or not.
    fn by_stream(&mut self, qmp: &Qmp, options: &SendOptions, settings_are_fine: bool) {
        self.check(qemu::wait_cleaned_up(qmp));
        if settings_are_fine {
            self.check(Settings::plan(qmp, &super::source::wanted(options, options.downtime)).map(drop));
        }
    }

    /// Adds a refusal if the options need direct mode, which is not possible.
    fn needs_direct(&mut self, qmp: &Qmp, options: &SendOptions, not_direct: &[String]) {
        let why = not_direct.join("; ");
        if options.mode == SendMode::Direct {
            let reason = format!("the guest cannot be moved directly (--mode direct): {why}");
            self.add("source", direct::refusal_kind(qmp), reason);
        } else if options.method.requires(Engine::Iaa) {
            self.source(&format!("--engine iaa needs direct mode, and the guest cannot be moved directly: {why}"));
        } else if let Some(option) = options.direct.required() {
            self.source(&format!("{option} needs direct mode, and the guest cannot be moved directly: {why}"));
        }
    }

    /// Opens the engines and accelerators of the options, and returns the encoding that a migration would use.
    fn encoding(&mut self, options: &SendOptions, mode: Mode) -> Option<sterna_codec::Encoding> {
        let engines = match options.qatzip.engines(options.method, options.channels) {
            Ok((engines, _)) => engines,
            Err(refused) => {
                self.source(&refused);
                return None;
            }
        };
        let engines = match mode {
            Mode::Direct if options.direct.accelerators != Accelerators::cpu() => {
                self.with_accelerators(options, engines)
            }
            // `needs_direct` has the reason.
            Mode::Owner if options.method.requires(Engine::Iaa) => return None,
            _ => engines,
        };
        match engines.encoding(options.method) {
            Ok(encoding) => Some(encoding),
            Err(missing @ EngineMissing { .. }) => {
                self.source(&format!("{missing}; name one by --accel (`sterna accel list` says what is here)"));
                None
            }
        }
    }

    fn with_accelerators(&mut self, options: &SendOptions, engines: Engines) -> Engines {
        let offload = match direct::offload(options) {
            Ok(Some(offload)) => offload,
            Ok(None) => return engines,
            Err(error) => {
                self.source(&error);
                return engines;
            }
        };
        let guest = offload.guest(options.direct.accelerator_weight);
        match Iaa::new(&offload, &guest).filter(|_| offload.accelerates(Operation::Deflate)) {
            Some(iaa) => engines.with_iaa(std::sync::Arc::new(iaa)),
            None => engines,
        }
    }
}

impl Estimate {
    fn of(bits_per_second: u64, bytes: u64, downtime: Duration) -> Self {
        let bytes_per_second = bits_per_second as f64 / 8.0;
        Self {
            bits_per_second,
            seconds: bytes as f64 / bytes_per_second,
            last_round_bytes: (bytes_per_second * downtime.as_secs_f64()) as u64,
        }
    }
}

impl DryRun {
    /// Returns the result for people.
    pub fn text(&self) -> String {
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        let mut text = match self.would_begin {
            true => "dry run: the migration would begin; nothing was begun".to_owned(),
            false => "dry run: the migration would be refused; nothing was begun".to_owned(),
        };
        let mut line = |line: String| {
            let _ = write!(text, "\n  {line}");
        };
        for Refusal { side, reason, .. } in &self.refusals {
            line(format!("{side}: {reason}"));
        }
        self.warnings.iter().for_each(|warning| line(format!("warning: {warning}")));
        let why = if self.not_direct.is_empty() {
            String::new()
        } else {
            format!("; not direct: {}", self.not_direct.join("; "))
        };
        line(format!("mode: {}{why}", self.mode));
        self.method.iter().for_each(|method| line(format!("method: {method}")));
        let populated = self.populated_bytes.map_or("how much of it is populated is not known".to_owned(), |bytes| {
            format!("{} of it populated", mib(bytes))
        });
        line(format!("RAM: {}, {populated}", mib(self.ram_bytes)));
        for Estimate { bits_per_second, seconds, last_round_bytes } in &self.times {
            line(format!(
                "at {:.2} Gbit/s: {seconds:.1} s to send it once; {} may be left for a downtime of {:.0} ms",
                *bits_per_second as f64 / 1e9,
                mib(*last_round_bytes),
                self.downtime_target_ms
            ));
        }
        line("these times assume that nothing is compressed and that the guest writes nothing; what it writes is sent again".into());
        match self.round_trip_ms {
            Some(measured) => {
                line(format!(
                    "round trip to the destination: {measured:.1} ms, which says nothing about its bandwidth"
                ));
            }
            None => line("the destination has not answered".into()),
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_is_the_time_of_the_bytes_and_what_fits_the_downtime() {
        let estimate = Estimate::of(1_000_000_000, 1 << 30, Duration::from_millis(300));
        assert!((estimate.seconds - 8.59).abs() < 0.01, "{estimate:?}");
        assert_eq!(estimate.last_round_bytes, 37_500_000);
    }

    #[test]
    fn the_text_names_every_refusal_and_its_side() {
        let refusal = |side, reason: &str| Refusal { side, kind: ErrorKind::Settings, reason: reason.into() };
        let run = DryRun {
            would_begin: false,
            refusals: vec![refusal("source", "it is paused"), refusal("destination", "another machine type")],
            warnings: vec!["another model".into()],
            mode: "stream",
            not_direct: vec!["VFIO".into()],
            method: Some("auto".into()),
            ram_bytes: 4 << 30,
            populated_bytes: Some(1 << 30),
            times: vec![Estimate::of(10_000_000_000, 1 << 30, Duration::from_millis(300))],
            downtime_target_ms: 300.0,
            round_trip_ms: None,
        };
        let text = run.text();
        for part in [
            "would be refused; nothing was begun",
            "source: it is paused",
            "destination: another machine type",
            "warning: another model",
            "mode: stream; not direct: VFIO",
            "RAM: 4096 MiB, 1024 MiB of it populated",
            "at 10.00 Gbit/s: 0.9 s",
            "the destination has not answered",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
