//! `sterna-bench demo`: a running Linux guest moves between two QEMUs on this machine, and proves that nothing was lost.
//!
//! The two "hosts" are network namespaces joined by a virtual cable if the user may make them, else only two QEMUs. They run
//! `sterna receive` and `sterna send`, with TLS, as users do. The guest writes memory all the time and prints a counter. The proof
//! is that the counter continues where it stopped, and that the guest finds every page as it wrote it last. `report.json` has the
//! report of `sterna send`, and the guest's results.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::net::Link;
use sterna_qemu_lab::{Console, Guest, LinuxGuest, Qemu, QemuOptions, QemuVersion, Tick};

use crate::hosts::{Hosts, HostsError, Side, Sterna, doing, patiently};
use crate::signals;

/// Time limit of each step, enough for a slow machine.
const LONG: Duration = Duration::from_secs(120);
const RAM: u64 = 512 << 20;
const FILLED: u64 = 256 << 20;
const DIRTY_RATE: u64 = 20 << 20;
/// Counter lines that are shown on either side.
const SHOWN: usize = 3;
/// Counter lines that must follow each other at the destination.
const FOLLOWED: u64 = 5;

/// Move a real Linux guest between two QEMUs on this machine, and prove that it came through whole
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Directory for certificates, records and report.json
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    pub(crate) directory: PathBuf,
}

/// Runs the demo. Its report is written even if it fails.
///
/// # Errors
/// What failed.
pub(crate) fn run(args: &DemoArgs) -> Result<(), String> {
    let cancel = Cancel::new();
    signals::cancel_on_signals(cancel.clone(), crate::progress)
        .map_err(|error| format!("cannot wait for signals: {error}"))?;
    let file = args.directory.join("report.json");
    let mut report = json!({ "outcome": "failed", "guest_verified": false });
    let result = std::fs::create_dir_all(&args.directory)
        .map_err(doing(format_args!("making {}", args.directory.display())))
        .and_then(|()| show(&args.directory, &cancel, &mut report));
    if let Err(error) = &result
        && report["reason"].is_null()
    {
        report["reason"] = json!(error.to_string());
    }
    let written = std::fs::write(&file, format!("{report:#}\n"));
    if let Err(error) = result {
        return Err(format!("the demo failed: {error}"));
    }
    written.map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    println!("\nreport: {}", file.display());
    Ok(())
}

/// Runs the demo, and collects the results in `report`.
fn show(directory: &Path, cancel: &Cancel, report: &mut Value) -> Result<(), HostsError> {
    let hosts = match Hosts::namespaces(Link::default()) {
        Ok(hosts) => {
            print_line("Two hosts: network namespaces A and B, joined by a virtual cable.");
            hosts
        }
        Err(error) => {
            print_line(&format!("Two hosts on the loopback interface ({error})."));
            Hosts::loopback()
        }
    };

    let guest = LinuxGuest { memory: Some(FILLED), dirty_rate: DIRTY_RATE, ..LinuxGuest::default() };
    let version = QemuVersion::V10_0;
    let mut options = QemuOptions::new(version, Guest::Linux(guest));
    options.memory = RAM;
    options.namespace = hosts.namespace(Side::A);
    let source = Qemu::start(&options)?;
    let destination = Qemu::start(&QemuOptions { namespace: hosts.namespace(Side::B), ..options.incoming() })?;
    print_line(&format!(
        "Host A: QEMU {version} ({}) boots Linux in {} MiB. Host B: QEMU {version} waits for a guest.",
        source.accel().name(),
        RAM >> 20
    ));
    let ready = patiently(LONG, cancel, |limit| source.guest().wait_ready(limit))?;
    patiently(LONG, cancel, |limit| source.guest().wait_tick_after(4, limit))?;
    print_line(&format!(
        "The guest has filled {} MiB, rewrites {} MiB/s of it at random, and counts. On host A it says:",
        ready.pages >> 8,
        DIRTY_RATE >> 20
    ));
    for line in last_ticks(source.console(), SHOWN) {
        print_line(&format!("  {line}"));
    }

    migrate(directory, &hosts, &source, &destination, cancel, report)?;

    let first = patiently(LONG, cancel, |limit| destination.guest().wait_tick_after(0, limit))?;
    let followed = follow(&destination, &first, cancel)?;
    let verified = destination.guest().verify(LONG)?;
    // Read only now: another thread reads the source's console meanwhile.
    let last = source.guest().last_tick().ok_or_else(|| HostsError("the guest on host A never counted".into()))?;
    print_line("On host B the guest says:");
    for line in first_ticks(destination.console(), SHOWN) {
        print_line(&format!("  {line}"));
    }
    check_counter(&last, &first)?;
    print_line(&format!(
        "The counter goes on: {} was the last on host A, {} the first on host B, and {followed} follow one by one.",
        last.number, first.number
    ));
    report["guest_last_tick"] = json!(last.number);
    report["guest_first_tick_after"] = json!(first.number);
    report["guest_pages"] = json!(verified.pages);
    report["guest_bad_pages"] = json!(verified.bad);
    report["guest_pages_written"] = json!(verified.generation);
    let whole = verified.bad == 0 && verified.table_whole && verified.pages == ready.pages;
    if !whole || verified.generation <= verified.pages {
        let bad = destination.guest().bad_lines().join("; ");
        return Err(HostsError(format!("the guest finds its memory wrong on host B: {verified:?} {bad}")));
    }
    report["guest_verified"] = json!(true);
    print_line(&format!(
        "Memory is right: the guest verified all {} pages ({} writes since its start), bad=0.",
        verified.pages, verified.generation
    ));
    Ok(())
}

/// Runs `sterna receive` on B and `sterna send` on A, with new certificates.
fn migrate(
    directory: &Path,
    hosts: &Hosts,
    source: &Qemu,
    destination: &Qemu,
    cancel: &Cancel,
    report: &mut Value,
) -> Result<(), HostsError> {
    let certificates = directory.join("certificates");
    let host = hosts.address_b().to_string();
    let mut command = hosts.sterna(Side::A)?;
    command.args(["cert", "--force", "--host", &host, "--client", "host-a", "--dir"]).arg(&certificates);
    run_quietly(command)?;
    print_line(&format!("Certificates: {}.", certificates.display()));

    let mut command = hosts.sterna(Side::B)?;
    command
        .args(["receive", "--allow", "host-a", "--listen", &format!("{host}:0"), "--qmp"])
        .arg(destination.qmp_path());
    command.arg("--tls").arg(&certificates).arg("--state-dir").arg(directory.join("state-b"));
    let mut receiver = Sterna::start("B", command, true)?;
    let address = receiver.address(LONG, cancel)?;

    let sent_report = directory.join("send.json");
    // The report of an earlier run must not be mistaken for this one's.
    let _ = std::fs::remove_file(&sent_report);
    let mut command = hosts.sterna(Side::A)?;
    command.args(["send", "--to", &address, "--qmp"]).arg(source.qmp_path());
    command.arg("--tls").arg(&certificates).arg("--state-dir").arg(directory.join("state-a"));
    command.arg("--json").arg(&sent_report);
    let started = Instant::now();
    let sent = Sterna::start("A", command, true)?.finish(LONG, cancel)?;
    let elapsed = started.elapsed();
    if let Some(Value::Object(fields)) =
        std::fs::read(&sent_report).ok().and_then(|text| serde_json::from_slice(&text).ok())
    {
        for (name, value) in fields {
            report[name] = value;
        }
    }
    if !sent.status.success() {
        let last = sent.errors.last().map_or("no message", String::as_str);
        return Err(HostsError(format!("sterna send on host A: {}, {last}", sent.status)));
    }
    let received = receiver.finish(LONG, cancel)?;
    for line in &sent.output {
        print_line(&format!("  {line}"));
    }
    if !received.status.success() {
        let last = received.errors.last().map_or("no message", String::as_str);
        return Err(HostsError(format!("sterna receive on host B: {}, {last}", received.status)));
    }
    if report["outcome"] != "completed" {
        return Err(HostsError(format!(
            "sterna send wrote no report of a completed migration to {}",
            sent_report.display()
        )));
    }
    print_line(&format!("The guest moved; `sterna send` took {:.1} s in all.", elapsed.as_secs_f64()));
    Ok(())
}

/// Checks that the counter's lines at the destination are consecutive. Returns how many were checked.
fn follow(destination: &Qemu, first: &Tick, cancel: &Cancel) -> Result<u64, HostsError> {
    let mut last = first.clone();
    for _ in 0..FOLLOWED {
        let next = patiently(LONG, cancel, |limit| destination.guest().wait_tick_after(last.number, limit))?;
        if next.number != last.number + 1 || next.milliseconds < last.milliseconds || next.dirtied < last.dirtied {
            return Err(HostsError(format!("the guest's counter jumped on host B: {last:?}, then {next:?}")));
        }
        last = next;
    }
    Ok(FOLLOWED)
}

/// Checks that the counter continued. One line may be split between the two consoles, if the guest was stopped while it was
/// written; then neither console has that line.
fn check_counter(last: &Tick, first: &Tick) -> Result<(), HostsError> {
    let goes_on = (last.number + 1..=last.number + 2).contains(&first.number)
        && first.milliseconds >= last.milliseconds
        && first.dirtied >= last.dirtied;
    if goes_on {
        return Ok(());
    }
    Err(HostsError(format!("the guest's counter did not go on: last on host A {last:?}, first on host B {first:?}")))
}

fn ticks(console: &Console) -> Vec<String> {
    console.lines().into_iter().filter(|line| line.contains("sterna-guest tick ")).collect()
}

fn last_ticks(console: &Console, count: usize) -> Vec<String> {
    let mut lines = ticks(console);
    lines.split_off(lines.len().saturating_sub(count))
}

fn first_ticks(console: &Console, count: usize) -> Vec<String> {
    ticks(console).into_iter().take(count).collect()
}

fn run_quietly(mut command: Command) -> Result<(), HostsError> {
    let output = command.stdin(Stdio::null()).output().map_err(doing("starting sterna cert"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(HostsError(format!("sterna cert: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

fn print_line(text: &str) {
    // The reader of a pipe may have closed it; the report is what counts.
    let _ = writeln!(std::io::stdout(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tick(number: u64) -> Tick {
        Tick { number, milliseconds: number * 200, dirty_rate: 0, dirtied: number * 10, verified: 0, bad: 0 }
    }

    #[test]
    fn the_counter_may_lose_one_split_line_but_goes_neither_back_nor_further() {
        assert!(check_counter(&tick(7), &tick(8)).is_ok());
        assert!(check_counter(&tick(7), &tick(9)).is_ok());
        for wrong in [tick(7), tick(6), tick(10), Tick { dirtied: 3, ..tick(8) }, Tick { milliseconds: 1, ..tick(8) }] {
            assert!(check_counter(&tick(7), &wrong).is_err(), "{wrong:?}");
        }
    }
}
