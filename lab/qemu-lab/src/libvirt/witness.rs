//! Collects the events by which the QEMUs of one guest report when it runs: the proof that it never runs twice.
//!
//! Each QEMU has a second monitor, a connection to a socket of the laboratory that exists before the QEMU. QEMU's events `STOP` and `RESUME`
//! carry the time by the clock that both QEMUs share, because both run on this machine.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::Side;
use crate::{Console, Error};

/// An event of a QEMU, or its end.
#[derive(Clone, Debug)]
struct Report {
    /// The time since 1970.
    at: Duration,
    side: Side,
    /// Counts the guest's QEMUs on this side.
    qemu: usize,
    /// Whether the guest runs from here on, if the event shows it.
    runs: Option<bool>,
    /// The event's name, and the migration's status if it has one.
    what: String,
}

#[derive(Default)]
struct Seen {
    reports: Vec<Report>,
    /// How many QEMUs have connected, by side.
    qemus: [usize; 2],
    consoles: [Option<Arc<Console>>; 2],
}

impl Seen {
    /// Returns the reports in the order of their times.
    fn in_order(&self) -> Vec<Report> {
        let mut reports = self.reports.clone();
        reports.sort_by_key(|report| report.at);
        reports
    }
}

#[derive(Default)]
struct Shared {
    seen: Mutex<Seen>,
    changed: Condvar,
}

impl Shared {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Listens to all QEMUs of one guest.
pub(super) struct Witness {
    shared: Arc<Shared>,
    listeners: Vec<UnixListener>,
}

impl Witness {
    /// Makes the sockets `NAME.monitor` and `NAME.console` in both hosts' directories.
    pub(super) fn new(name: &str, directories: [&Path; 2]) -> Result<Witness, Error> {
        let mut witness = Witness { shared: Arc::default(), listeners: Vec::new() };
        for (side, directory) in Side::ALL.into_iter().zip(directories) {
            let shared = Arc::clone(&witness.shared);
            witness.listen(&directory.join(format!("{name}.monitor")), move |stream| {
                let qemu = {
                    let mut seen = shared.seen();
                    seen.qemus[side as usize] += 1;
                    seen.qemus[side as usize]
                };
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || follow(&stream, &shared, side, qemu));
            })?;
            let shared = Arc::clone(&witness.shared);
            witness.listen(&directory.join(format!("{name}.console")), move |stream| {
                if let Ok(console) = Console::new(stream) {
                    // The console of a QEMU before is dropped outside the lock: dropping joins its thread.
                    let before = shared.seen().consoles[side as usize].replace(Arc::new(console));
                    shared.changed.notify_all();
                    drop(before);
                }
            })?;
        }
        Ok(witness)
    }

    fn listen(&mut self, path: &Path, mut take: impl FnMut(UnixStream) + Send + 'static) -> Result<(), Error> {
        let listener = UnixListener::bind(path).map_err(Error::path("listening on", path))?;
        // QEMU's user connects.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))
            .map_err(Error::path("changing the mode of", path))?;
        let accepting = listener.try_clone().map_err(Error::path("duplicating", path))?;
        std::thread::spawn(move || {
            while let Ok((stream, _)) = accepting.accept() {
                take(stream);
            }
        });
        self.listeners.push(listener);
        Ok(())
    }

    /// Returns the console of the QEMU that was last started on `side`.
    pub(super) fn console(&self, side: Side) -> Result<Arc<Console>, Error> {
        let missing = || Error::Guest(format!("no QEMU has run on {}", side.host_name()));
        self.shared.seen().consoles[side as usize].clone().ok_or_else(missing)
    }

    /// Waits for a console on `side`, which a QEMU connects while it starts.
    pub(super) fn wait_console(&self, side: Side, limit: Duration) -> Result<Arc<Console>, Error> {
        self.wait("console", limit, |seen| seen.consoles[side as usize].clone())
    }

    /// Returns how many QEMUs have been started on `side`.
    pub(super) fn qemus(&self, side: Side) -> usize {
        self.shared.seen().qemus[side as usize]
    }

    /// Waits until the QEMU that is the `qemu`-th on `side` has reported `what`.
    pub(super) fn wait_report(&self, side: Side, qemu: usize, what: &str, limit: Duration) -> Result<(), Error> {
        self.wait(what, limit, |seen| {
            let found = |report: &&Report| report.side == side && report.qemu == qemu && report.what == what;
            seen.reports.iter().find(found).map(drop)
        })
    }

    /// Waits until the guest runs on `sides` and nowhere else.
    pub(super) fn wait_running(&self, sides: &[Side], limit: Duration) -> Result<(), Error> {
        self.wait("end of the move", limit, |seen| (running(&seen.in_order()) == sides).then_some(()))
    }

    /// Returns the hosts where the guest runs.
    pub(super) fn running(&self) -> Vec<Side> {
        running(&self.shared.seen().in_order())
    }

    /// Returns the reports around a time at which the guest ran twice, if there was one.
    pub(super) fn ran_twice(&self) -> Option<String> {
        let reports = self.shared.seen().in_order();
        let twice = (1..=reports.len()).any(|count| running(&reports[..count]).len() > 1);
        twice.then(|| describe(&reports))
    }

    fn wait<T>(&self, what: &str, limit: Duration, mut pick: impl FnMut(&Seen) -> Option<T>) -> Result<T, Error> {
        let deadline = Instant::now() + limit;
        let mut seen = self.shared.seen();
        loop {
            if let Some(value) = pick(&seen) {
                return Ok(value);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let last = describe(&seen.in_order());
                return Err(Error::Timeout { waiting_for: what.into(), limit, last });
            }
            seen = self.shared.changed.wait_timeout(seen, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        for listener in &self.listeners {
            // Ends the thread that accepts.
            let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
        }
    }
}

/// Returns the sides whose QEMUs run the guest after `reports`; a side occurs twice if two of its QEMUs do.
fn running(reports: &[Report]) -> Vec<Side> {
    let mut running: Vec<(Side, usize)> = Vec::new();
    for report in reports {
        let qemu = (report.side, report.qemu);
        match report.runs {
            Some(true) if !running.contains(&qemu) => running.push(qemu),
            Some(false) => running.retain(|other| *other != qemu),
            _ => {}
        }
    }
    running.into_iter().map(|(side, _)| side).collect()
}

fn describe(reports: &[Report]) -> String {
    let line = |report: &Report| {
        let Report { at, side, qemu, what, .. } = report;
        format!("\n  | {}.{:06} {} QEMU {qemu}: {what}", at.as_secs(), at.subsec_micros(), side.host_name())
    };
    reports.iter().map(line).collect()
}

/// Reads a monitor to its end.
fn follow(stream: &UnixStream, shared: &Shared, side: Side, qemu: usize) {
    let report = |at: Option<Duration>, runs: Option<bool>, what: String| {
        let at = at.unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        shared.seen().reports.push(Report { at, side, qemu, runs, what });
        shared.changed.notify_all();
    };
    // QEMU sends events only after the first; the second is for what was before.
    let _ = (&*stream).write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"query-status\"}");
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let Ok(message) = serde_json::from_str::<Value>(&line) else { continue };
        if let Some(running) = message["return"]["running"].as_bool() {
            report(None, running.then_some(true), format!("connected, {}", message["return"]["status"]));
        }
        let Some(event) = message["event"].as_str() else { continue };
        let part = |name: &str| message["timestamp"][name].as_u64();
        let at = part("seconds").zip(part("microseconds"));
        let at = at.map(|(seconds, micros)| Duration::from_secs(seconds) + Duration::from_micros(micros));
        let runs = match event {
            "RESUME" => Some(true),
            "STOP" => Some(false),
            _ => None,
        };
        let status = message["data"]["status"].as_str();
        report(at, runs, status.map_or_else(|| event.to_owned(), |status| format!("{event} {status}")));
    }
    report(None, Some(false), "ended".into());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(at: u64, side: Side, qemu: usize, runs: Option<bool>) -> Report {
        Report { at: Duration::from_millis(at), side, qemu, runs, what: "RESUME".into() }
    }

    fn witness(reports: Vec<Report>) -> Witness {
        let shared = Shared::default();
        shared.seen().reports = reports;
        Witness { shared: Arc::new(shared), listeners: Vec::new() }
    }

    #[test]
    fn a_guest_that_runs_on_one_host_after_the_other_never_ran_twice() {
        let witness = witness(vec![
            report(1, Side::A, 1, Some(true)),
            // The reports of one QEMU are listed after later ones of the other.
            report(30, Side::B, 1, Some(true)),
            report(20, Side::A, 1, Some(false)),
            report(40, Side::A, 1, Some(false)),
        ]);
        assert_eq!(witness.running(), [Side::B]);
        assert_eq!(witness.ran_twice(), None);
    }

    #[test]
    fn a_source_that_resumes_while_the_destination_runs_is_found_even_when_it_is_over() {
        let witness = witness(vec![
            report(1, Side::A, 1, Some(true)),
            report(20, Side::A, 1, Some(false)),
            report(30, Side::B, 1, Some(true)),
            report(31, Side::A, 1, Some(true)),
            report(32, Side::A, 1, Some(false)),
        ]);
        assert_eq!(witness.running(), [Side::B]);
        let twice = witness.ran_twice().expect("it ran twice for a millisecond");
        assert!(twice.contains("0.031000 host-a QEMU 1: RESUME"), "{twice}");
    }

    #[test]
    fn two_qemus_of_one_host_count_as_two() {
        let witness = witness(vec![report(1, Side::A, 1, Some(true)), report(2, Side::A, 2, Some(true))]);
        assert_eq!(witness.running(), [Side::A, Side::A]);
        assert!(witness.ran_twice().is_some());
    }
}
