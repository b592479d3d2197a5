//! What `send --delta-cache` is worth: a Linux guest that writes the stamps of its pages (five words in the first 64 bytes) moves
//! through a limit of 1 Gbit/s, without deltas, with them, and with them and compression.
//!
//! `cargo build --release -p sterna-cli --bin sterna && cargo run --release -p sterna-bench --example delta_cache [MIB_FILLED [MIB_PER_SECOND]]`
//!
//! A migration that has not ended after a minute is cancelled: the guest writes faster than the limit carries.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use sterna_qemu_lab::{Dirty, Fill, Guest, LinuxGuest, Pattern, Qemu, QemuOptions, QemuVersion};

const LIMIT: &str = "1Gbit/s";
const ENOUGH: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(300);

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<u64> = std::env::args().skip(1).map(|word| word.parse()).collect::<Result<_, _>>()?;
    let filled = words.first().copied().unwrap_or(512) << 20;
    let rate = words.get(1).copied().unwrap_or(400) << 20;
    let program = std::env::current_exe()?.parent().and_then(Path::parent).ok_or("no directory")?.join("sterna");
    println!("{} MiB of random bytes, {} MiB/s of pages touched, {LIMIT}", filled >> 20, rate >> 20);
    for words in [
        &["--method", "none"][..],
        &["--method", "zstd"],
        &["--method", "none", "--delta-cache", "1GiB"],
        &["--method", "zstd", "--delta-cache", "1GiB"],
        &["--method", "none", "--delta-cache", "256MiB"],
    ] {
        let report = moved(&program, filled, rate, words)?;
        let number = |name: &str| report[name].as_f64().unwrap_or_default();
        println!(
            "{:<40} {:<9} {:>6.1} s, {:>3} rounds, downtime {:>4.0} ms, wire {:>5.0} MiB, {:>7} pages, {:>7} deltas, {:>7} same, cpu {:.1} + {:.1} s",
            words.join(" "),
            report["outcome"].as_str().unwrap_or_default(),
            number("total_ms") / 1e3,
            number("rounds"),
            number("downtime_ms"),
            number("wire_bytes") / f64::from(1 << 20),
            number("normal_pages"),
            number("delta_pages"),
            number("same_pages"),
            number("source_cpu_seconds"),
            number("destination_cpu_seconds"),
        );
    }
    Ok(())
}

fn moved(program: &Path, filled: u64, rate: u64, words: &[&str]) -> Result<Value, Box<dyn Error>> {
    let linux = LinuxGuest {
        fill: Fill::Random,
        memory: Some(filled),
        dirty_rate: rate,
        dirty: Dirty::Stamp,
        pattern: Pattern::Sequential,
        verify_rate: 0,
        ..LinuxGuest::default()
    };
    let mut options = QemuOptions::new(QemuVersion::V10_0, Guest::Linux(linux));
    options.memory = filled + (224 << 20);
    let scratch = tempfile::tempdir()?;
    let (source, destination) = (Qemu::start(&options)?, Qemu::start(&options.incoming())?);
    source.guest().wait_ready(LONG)?;
    source.guest().wait_tick_after(0, LONG)?;

    let side = |words: &[&str], qmp: &Path| {
        let mut command = Command::new(program);
        command.args(words).arg("--insecure").arg("--qmp").arg(qmp).arg("--state-dir").arg(scratch.path());
        command
    };
    let mut receive = side(&["receive", "--listen", "127.0.0.1:0"], destination.qmp_path());
    let mut receiver = Ended(receive.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?);
    let mut said = BufReader::new(receiver.0.stderr.take().ok_or("no stderr")?).lines();
    let address = loop {
        let line = said.next().ok_or("receive ended")??;
        if let Some((_, address)) = line.split_once("listening on ") {
            break address.to_owned();
        }
    };
    let rest = std::thread::spawn(move || said.for_each(drop));
    let json = scratch.path().join("report.json");
    let mut send = side(&["send", "--quiet", "--to", &address, "--bandwidth", LIMIT], source.qmp_path());
    send.args(words).arg("--json").arg(&json);
    let mut sender = Ended(send.stdout(Stdio::null()).spawn()?);
    let begun = Instant::now();
    while sender.0.try_wait()?.is_none() {
        if begun.elapsed() > ENOUGH {
            rustix::process::kill_process(rustix::process::Pid::from_child(&sender.0), rustix::process::Signal::INT)?;
            sender.0.wait()?;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    receiver.0.wait()?;
    let _ = rest.join();
    Ok(serde_json::from_slice(&std::fs::read(json)?)?)
}

/// A process that is over when this is dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
