//! The program's options.

use clap::{Args, Parser};
use std::path::PathBuf;
use std::time::Duration;
use sterna::{
    Accelerators, DeviceChannels, EngineChoice, IaaVerify, Method, MethodChoice, NotConverging, Qatzip, QatzipSoftware,
    Security, Throttle, TlsSettings,
};
use sterna_microvm::{Backing, BlockConfig, Config, Execution, Fill, Pattern, Rate, Tracking, Workload};

const HELP: &str = "\
Exit codes:
  0  nothing was found wrong in the guest and its devices; it was moved, if the options say so
  1  something was found wrong
  2  the options or the machine are not possible
  3  the guest was not moved: it runs on at the source, and nothing was found wrong there
  4  the migration ended after the guest was given to the destination: look there
Signals: SIGUSR1 begins what --on-signal waits for; SIGUSR2 has the source pause its guest and send the rest, however long that
takes; SIGINT and SIGTERM cancel the migration, and end the program where there is none or it is being cancelled already.";

/// Runs a bare guest that fills, writes and verifies its memory, and moves it to another microvm.
#[derive(Parser)]
#[command(name = "microvm", after_help = HELP)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) machine: MachineOptions,
    #[command(flatten)]
    pub(crate) work: WorkOptions,
    /// Take a guest at this address instead of beginning one: HOST:PORT or unix:PATH; port 0: any free one
    #[arg(long, value_name = "ADDR", conflicts_with = "migrate_to")]
    pub(crate) incoming: Option<String>,
    /// Move the guest to the microvm that waits at this address
    #[arg(long, value_name = "ADDR")]
    pub(crate) migrate_to: Option<String>,
    #[command(flatten)]
    pub(crate) when: When,
    #[command(flatten)]
    pub(crate) source: SourceOptions,
    #[command(flatten)]
    pub(crate) destination: DestinationOptions,
    #[command(flatten)]
    pub(crate) security: SecurityOptions,
    /// Keep the migration's record in this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// How long the guest runs once its memory is filled, it has arrived, or was not moved
    #[arg(long, default_value_t = 5, conflicts_with = "passes")]
    pub(crate) seconds: u64,
    /// Instead of for a time: until it has verified all of its memory so often since then, and each device has written
    /// something
    #[arg(long, value_name = "N")]
    pub(crate) passes: Option<u64>,
    /// Write the outcome as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// What the machine is made of: the same at both ends.
#[derive(Args)]
pub(crate) struct MachineOptions {
    /// RAM in MiB, a multiple of 2
    #[arg(long, default_value_t = 256)]
    pub(crate) memory: u64,
    /// anonymous, anonymous-huge, memfd or hugetlb
    #[arg(long, default_value = "memfd", value_parser = |name: &str| choice(&BACKINGS, name))]
    backing: Backing,
    /// vCPUs, 1 to 4
    #[arg(long, default_value_t = 2)]
    vcpus: usize,
    /// auto, kvm or threads
    #[arg(long, default_value = "auto", value_parser = |name: &str| choice(&EXECUTIONS, name))]
    execution: Execution,
    /// How written pages are tracked: log, ring or write-protect
    #[arg(long, default_value = "write-protect", value_parser = |name: &str| choice(&TRACKINGS, name))]
    tracking: Tracking,
    /// Devices with a large state of their own, beside guest RAM, up to 16
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=16))]
    devices: u32,
    /// Memory of each such device, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 16, requires = "devices", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    device_state: u64,
}

/// What the guest does. One that comes from elsewhere brings it along.
#[derive(Args)]
pub(crate) struct WorkOptions {
    /// What memory is filled with: zeros, ones, sequence, random, text, corpus or mixed
    #[arg(long, default_value = "mixed", value_parser = |name: &str| choice(&Fill::ALL, name))]
    fill: Fill,
    /// The order in which pages are written again: sequential, random or hot
    #[arg(long, default_value = "random", value_parser = |name: &str| choice(&Pattern::ALL, name))]
    pattern: Pattern,
    /// Pages written again per second, or 'unlimited'
    #[arg(long, default_value = "1000", value_parser = rate)]
    write_rate: Rate,
    /// Write only the first bytes of each page again
    #[arg(long)]
    first_bytes: bool,
    /// Pages verified per second, or 'unlimited'
    #[arg(long, default_value = "2048", value_parser = rate)]
    check_rate: Rate,
    /// Percent of memory that are ever written again
    #[arg(long, default_value_t = 100)]
    span: u8,
    /// Hold the vCPUs for so many percent of the time
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=99))]
    pub(crate) throttle: u8,
    /// Nothing of the guest's own on the serial port, unless something is wrong
    #[arg(long)]
    silent: bool,
}

/// When the migration begins.
#[derive(Args)]
#[group(multiple = false)]
pub(crate) struct When {
    /// Begin when the guest has verified all of its memory so often [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) after_passes: Option<u64>,
    /// Begin when the guest has worked for so long
    #[arg(long, value_name = "SECONDS")]
    pub(crate) after_seconds: Option<u64>,
    /// Begin when SIGUSR1 comes
    #[arg(long)]
    pub(crate) on_signal: bool,
}

/// How the source moves its guest.
#[derive(Args)]
pub(crate) struct SourceOptions {
    /// How pages are compressed: auto, none, lz4, zstd or deflate
    #[arg(long, default_value = "auto")]
    method: Method,
    /// What compresses by deflate: auto, cpu, qat or iaa
    #[arg(long, default_value = "auto")]
    engine: EngineChoice,
    /// Level of the method
    #[arg(long, allow_hyphen_values = true)]
    level: Option<i32>,
    /// The library of the engine qat, or its directory
    #[arg(long, value_name = "PATH")]
    qatzip_library: Option<PathBuf>,
    /// What the engine qat may do in software: forbidden, when-busy or always
    #[arg(long, value_name = "WHEN", default_value = "when-busy", value_parser = |name: &str| choice(&QATZIP_SOFTWARE, name))]
    qatzip_software: QatzipSoftware,
    /// CPUs that the sending threads may use together
    #[arg(long, value_name = "CORES")]
    pub(crate) max_cpus: Option<f64>,
    /// What helps to look for zero pages and to copy (dsa), and to compress (iaa): cpu, auto, dsa, iaa, dsa:/dev/dsa/wqX.Y,
    /// iaa:/dev/iax/wqX.Y, model:FILE; several separated by commas
    // Refused where it would not be used, so that no user believes that it is.
    #[arg(long, value_name = "LIST", default_value = "cpu", requires = "migrate_to", conflicts_with = "incoming")]
    pub(crate) accel: Accelerators,
    /// When the output of an iaa is decompressed and compared: without-checksums, always or never
    #[arg(long, value_name = "WHEN", default_value = "without-checksums", requires = "accel", value_parser = |name: &str| choice(&IAA_VERIFY, name))]
    pub(crate) iaa_verify: IaaVerify,
    /// Connections that carry pages, 1 to 64
    #[arg(long, default_value_t = 2)]
    pub(crate) channels: u16,
    /// Maximum bytes per second on the network
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) bandwidth: Option<u64>,
    /// Memory, in MiB, for copies of sent pages, so that only the changes of pages that are sent again are sent; 0:
    /// whole pages
    #[arg(long, value_name = "MIB", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1 << 30))]
    pub(crate) delta_cache: u64,
    /// Target downtime, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300)]
    downtime: u64,
    /// Give up after so many seconds
    #[arg(long, value_name = "SECONDS")]
    give_up_after: Option<u64>,
    /// Where the rounds do not converge: go-on, throttle, post-copy, or give-up
    #[arg(long, default_value = "go-on", value_parser = |name: &str| choice(&ANSWERS, name))]
    not_converging: NotConverging,
    /// Go on in post-copy after so many rounds at the latest
    #[arg(long, value_name = "ROUNDS", conflicts_with = "not_converging", value_parser = clap::value_parser!(u32).range(1..))]
    post_copy_after: Option<u32>,
    /// Connections for the state of devices alone, 1 to 63; without this, it uses those that carry pages
    #[arg(long, value_name = "N", requires = "migrate_to", requires = "devices", conflicts_with = "incoming", value_parser = clap::value_parser!(u16).range(1..=63))]
    device_channels: Option<u16>,
    /// Send the state of devices while the guest is paused, one after the other, over the connection of the machine's
    /// own state
    #[arg(long, requires = "migrate_to", requires = "devices", conflicts_with_all = ["incoming", "device_channels"])]
    serial_device_state: bool,
}

/// How the destination takes a guest.
#[derive(Args)]
pub(crate) struct DestinationOptions {
    /// Memory, in MiB, for the state of devices that has arrived and waits to be loaded
    #[arg(long, value_name = "MIB", default_value_t = 256, requires = "incoming", requires = "devices", conflicts_with = "migrate_to", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub(crate) device_queue: u64,
}

/// Protection of the connections.
#[derive(Args)]
pub(crate) struct SecurityOptions {
    /// Mutual TLS with the certificates of this directory, as `sterna cert` makes them
    #[arg(long, value_name = "DIR", conflicts_with = "insecure")]
    tls: Option<PathBuf>,
    /// With --incoming and --tls: a name in the certificate of a source that may send
    #[arg(long, value_name = "NAME", requires = "tls")]
    allow: Vec<String>,
    /// No TLS: everyone on the network can read and change the guest
    #[arg(long)]
    insecure: bool,
}

const BACKINGS: [(&str, Backing); 4] = [
    ("anonymous", Backing::Anonymous),
    ("anonymous-huge", Backing::AnonymousHuge),
    ("memfd", Backing::Memfd),
    ("hugetlb", Backing::HugeTlb),
];
const EXECUTIONS: [(&str, Execution); 3] =
    [("auto", Execution::Auto), ("kvm", Execution::Kvm), ("threads", Execution::Threads)];
const TRACKINGS: [(&str, Tracking); 3] =
    [("log", Tracking::Log), ("ring", Tracking::Ring), ("write-protect", Tracking::WriteProtect)];
const QATZIP_SOFTWARE: [(&str, QatzipSoftware); 3] = [
    ("forbidden", QatzipSoftware::Forbidden),
    ("when-busy", QatzipSoftware::WhenBusy),
    ("always", QatzipSoftware::Always),
];
const IAA_VERIFY: [(&str, IaaVerify); 3] =
    [("without-checksums", IaaVerify::WithoutChecksums), ("always", IaaVerify::Always), ("never", IaaVerify::Never)];
const ANSWERS: [(&str, NotConverging); 4] = [
    ("go-on", NotConverging::GoOn),
    ("throttle", NotConverging::Throttle(Throttle { initial: 20, step: 10, max: 99 })),
    ("post-copy", NotConverging::PostCopy),
    ("give-up", NotConverging::GiveUp),
];

fn choice<T: Copy>(choices: &[(&str, T)], name: &str) -> Result<T, String> {
    let found = choices.iter().find(|(known, _)| *known == name).map(|(_, choice)| *choice);
    found.ok_or_else(|| {
        format!("expected one of {}", choices.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "))
    })
}

fn rate(text: &str) -> Result<Rate, String> {
    match text {
        "unlimited" => Ok(Rate::Unlimited),
        number => number.parse().map(Rate::PagesPerSecond).map_err(|_| "expected a number or 'unlimited'".to_owned()),
    }
}

impl Options {
    /// The machine.
    pub(crate) fn config(&self) -> Config {
        let MachineOptions { memory, backing, vcpus, execution, tracking, devices, device_state } = self.machine;
        let work = &self.work;
        let defaults = Workload::default();
        let workload = Workload {
            fill: work.fill,
            pattern: work.pattern,
            whole: !work.first_bytes,
            span: work.span,
            write: work.write_rate,
            check: work.check_rate,
            say_every: if work.silent { 0 } else { defaults.say_every },
        };
        let blocks = vec![BlockConfig { name: "ram".to_owned(), bytes: memory.saturating_mul(1 << 20), backing }];
        let devices = vec![device_state << 20; devices as usize];
        Config { blocks, vcpus, execution, tracking, devices, disk: None, workload }
    }

    /// Whether and how the connections are protected.
    pub(crate) fn security(&self) -> Result<Security, String> {
        let SecurityOptions { tls, allow, insecure } = &self.security;
        let read = |dir: &PathBuf| match self.incoming {
            Some(_) => TlsSettings::server(dir, allow),
            None => TlsSettings::client(dir),
        };
        match (tls, insecure) {
            (Some(dir), _) => read(dir).map(Security::Tls).map_err(|error| error.to_string()),
            (None, true) => Ok(Security::Insecure),
            (None, false) => Err("say how the connection is protected: --tls DIR or --insecure".to_owned()),
        }
    }
}

impl SourceOptions {
    pub(crate) fn method(&self) -> Result<MethodChoice, String> {
        MethodChoice::new(self.method, self.engine, self.level).map_err(|error| error.to_string())
    }

    pub(crate) fn qatzip(&self) -> Qatzip {
        Qatzip { library: self.qatzip_library.clone(), software: self.qatzip_software, ..Qatzip::default() }
    }

    pub(crate) fn downtime(&self) -> Duration {
        Duration::from_millis(self.downtime)
    }

    pub(crate) fn give_up_after(&self) -> Option<Duration> {
        self.give_up_after.map(Duration::from_secs)
    }

    pub(crate) fn not_converging(&self) -> NotConverging {
        self.post_copy_after.map_or(self.not_converging, NotConverging::PostCopyAfter)
    }

    pub(crate) fn device_channels(&self) -> DeviceChannels {
        match self.device_channels {
            Some(channels) => DeviceChannels::Own(channels),
            None if self.serial_device_state => DeviceChannels::Serial,
            None => DeviceChannels::Mixed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_accelerator_is_refused_where_nothing_would_use_it() {
        let parse = |words: &[&str]| Options::try_parse_from(["microvm", "--insecure"].iter().chain(words)).map(drop);
        assert!(parse(&["--accel", "auto", "--migrate-to", "host:1"]).is_ok());
        assert!(parse(&["--incoming", "host:1"]).is_ok());
        let verifying = ["--iaa-verify", "always", "--migrate-to", "host:1"];
        let refused = parse(&verifying).expect_err("refused").to_string();
        assert!(refused.contains("--accel"), "{refused}");
        assert!(parse(&[&verifying[..], &["--accel", "iaa"]].concat()).is_ok());
        for (words, named) in [
            (&["--accel", "auto", "--incoming", "host:1"][..], "--incoming"),
            (&["--accel", "auto"][..], "--migrate-to"),
        ] {
            let refused = parse(words).expect_err("refused").to_string();
            assert!(refused.contains("--accel") && refused.contains(named), "{refused}");
        }
    }

    #[test]
    fn ways_of_device_state_are_chosen_where_they_are_used() {
        let parse = |words: &[&str]| {
            let options = Options::try_parse_from(["microvm", "--insecure"].iter().chain(words));
            options.map(|options| options.source.device_channels()).map_err(|error| error.to_string())
        };
        let (from, to) = (["--migrate-to", "host:1", "--devices", "4"], ["--incoming", "host:1", "--devices", "4"]);
        let with = |ends: [&'static str; 4], more: &[&'static str]| [&ends[..], more].concat();
        assert_eq!(parse(&with(from, &["--device-state", "1"])), Ok(DeviceChannels::Mixed));
        assert_eq!(parse(&with(from, &["--device-channels", "63"])), Ok(DeviceChannels::Own(63)));
        assert_eq!(parse(&with(from, &["--serial-device-state"])), Ok(DeviceChannels::Serial));
        assert!(parse(&with(to, &["--device-queue", "1"])).is_ok());
        for (words, named) in [
            (with(to, &["--device-channels", "2"]), "--incoming"),
            (with(to, &["--serial-device-state"]), "--incoming"),
            (with(from, &["--device-queue", "1"]), "--migrate-to"),
            (with(from, &["--device-channels", "2", "--serial-device-state"]), "--serial-device-state"),
            (with(from, &["--device-channels", "64"]), "1..=63"),
            (vec!["--devices", "17"], "0..=16"),
            (vec!["--devices", "4", "--device-channels", "2"], "--migrate-to"),
            (vec!["--migrate-to", "host:1", "--device-channels", "2"], "--devices"),
            (vec!["--migrate-to", "host:1", "--serial-device-state"], "--devices"),
            (vec!["--incoming", "host:1", "--device-queue", "2"], "--devices"),
            (vec!["--device-state", "2"], "--devices"),
        ] {
            let refused = parse(&words).expect_err("refused");
            assert!(refused.contains(named), "{words:?}: {refused}");
        }
    }
}
