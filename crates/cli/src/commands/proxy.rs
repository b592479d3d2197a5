//! `sterna proxy`: carries migrations that other programs drive, until it is stopped.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;

use sterna_engine::report::Observer;
use sterna_qemu::gateway::{
    GatewayError, ProxyReceiveOptions, ProxyReport, ProxySendOptions, ProxyStop, proxy_receive, proxy_send,
};

use super::{Failure, Session, gateway_failure, method_choice, security};
use crate::args::{ProxyReceiveArgs, ProxyReportArgs, ProxySendArgs, ScreenArgs, each_name_once};
use crate::exit::Exit;
use crate::signals::Meaning;

pub(super) fn run_send(args: &ProxySendArgs, logging: bool) -> Result<Exit, Failure> {
    let options = ProxySendOptions {
        unix: each_name_once("--unix", &args.unix).map_err(|error| Failure::usage(&error))?,
        opaque: args.opaque.checked().map_err(|error| Failure::usage(&error))?,
        to: args.link.to.clone(),
        security: security::source(&args.tls)?,
        channels: args.link.channels,
        // A proxy has QEMU's stream, which no accelerator reaches.
        method: method_choice(&args.link)?,
        qatzip: args.link.qatzip(),
        max_cpus: args.link.max_cpus,
        bandwidth: args.link.bandwidth,
        downtime: args.link.downtime,
        packet_size: args.link.packet_size,
        patience: args.wait.wait,
    };
    until_stopped(&args.screen, &args.report, logging, |stop, observer, report| {
        proxy_send(&options, stop, observer, report)
    })
}

pub(super) fn run_receive(args: &ProxyReceiveArgs, logging: bool) -> Result<Exit, Failure> {
    let options = ProxyReceiveOptions {
        unix: each_name_once("--unix", &args.unix).map_err(|error| Failure::usage(&error))?,
        opaque: args.opaque.checked().map_err(|error| Failure::usage(&error))?,
        listen: args.listen.clone(),
        security: security::destination(&args.tls)?,
        patience: args.wait.wait,
    };
    until_stopped(&args.screen, &args.report, logging, |stop, observer, report| {
        proxy_receive(&options, stop, observer, report)
    })
}

/// Runs a proxy until signals stop it: after the first it accepts no new sessions, the second closes those in progress.
fn until_stopped(
    screen: &ScreenArgs,
    report: &ProxyReportArgs,
    logging: bool,
    run: impl FnOnce(&ProxyStop, &dyn Observer, &(dyn Fn(&ProxyReport) + Sync)) -> Result<bool, GatewayError>,
) -> Result<Exit, Failure> {
    raise_file_limit();
    let reports = report.json.as_deref().map(Reports::open).transpose()?;
    let stop = ProxyStop::default();
    let session = Session::start_with([stop.drain.clone(), stop.close.clone()], screen, logging, Meaning::RELAY)?;
    let report = |report: &ProxyReport| {
        if let Some(reports) = &reports {
            reports.append(report);
        }
    };
    let result = run(&stop, &*session.screen, &report);
    session.end();
    match result {
        Ok(true) => Ok(Exit::Completed),
        Ok(false) => Ok(Exit::Cancelled),
        Err(error) => Err(gateway_failure(&error, false)),
    }
}

/// Raises the limit of open files. A proxy carries up to 256 migrations and connections at once, each with some ten descriptors; the usual
/// limit of 1024 exists for old programs that use `select` (`systemd.exec(5)`, `LimitNOFILE`).
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// The destination of the reports, one line each.
struct Reports(Mutex<Box<dyn Write + Send>>);

impl Reports {
    fn open(path: &Path) -> Result<Self, Failure> {
        let out: Box<dyn Write + Send> = if path == "-" {
            Box::new(std::io::stdout())
        } else {
            let opened = File::options().append(true).create(true).open(path);
            let failed =
                |error| Failure::refused(&format!("--json: cannot append reports to {}: {error}", path.display()));
            Box::new(opened.map_err(failed)?)
        };
        Ok(Self(Mutex::new(out)))
    }

    fn append(&self, report: &ProxyReport) {
        let mut line = serde_json::to_vec(report).expect("a report has string keys and finite numbers");
        line.push(b'\n');
        let mut out = self.0.lock().expect("writing does not panic");
        if let Err(error) = out.write_all(&line).and_then(|()| out.flush()) {
            crate::complain(&format!("--json: a report could not be written: {error}; the migration ended as it says"));
        }
    }
}
