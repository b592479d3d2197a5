//! `sterna receive`: the destination's side of a migration.

use std::fs;
use std::path::Path;

use sterna_engine::record_file::Side;
use sterna_engine::report::ReceiveReport;
use sterna_qemu::gateway::{LibvirtReceiveOptions, Placement, ReceiveOptions, receive, receive_by_libvirt};

use super::ready_fd::ReadyFile;
use super::recover_command::RecoverCommand;
use super::{Failure, Summary, absolute, migration, security, state_dir};
use crate::args::ReceiveArgs;
use crate::control::{Subject, with_socket};
use crate::exit::Exit;

impl Summary for ReceiveReport {
    fn exit(&self) -> Exit {
        self.outcome.into()
    }

    fn text(&self) -> String {
        self.text()
    }
}

/// Reads the file of `--xml`.
fn description(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| Failure::usage(&format!("--xml {}: {error}", path.display())))
}

pub(super) fn run(args: &ReceiveArgs, logging: bool) -> Result<Exit, Failure> {
    let ready = ReadyFile::open(args.ready_fd)?;
    let placement = Placement::from(args.placement);
    if args.prefault && placement == Placement::InStream {
        // Refused rather than silently ignored.
        return Err(Failure::usage(&"--prefault: it needs direct mode, and --placement in-stream was given"));
    }
    let recover = RecoverCommand::of_destination(&args.state, &args.tls);
    if let Some(uri) = &args.libvirt {
        let options = LibvirtReceiveOptions {
            uri: Some(uri.clone()).filter(|uri| !uri.is_empty()),
            xml: args.xml.as_deref().map(description).transpose()?,
            listen: args.listen.clone(),
            security: security::destination(&args.tls)?,
            prefault: args.prefault,
            wait: args.wait,
            waits: (&args.waits).into(),
            state_dir: state_dir::choose(&args.state)?,
        };
        return migration(&args.screen, &args.report, &recover, logging, |cancel, screen| {
            let subject = subject(args, "libvirt".to_owned(), &options.state_dir);
            with_socket(subject, cancel, &ready.before(screen), |observer| {
                receive_by_libvirt(&options, cancel, observer)
            })
        });
    }
    let options = ReceiveOptions {
        qmp: args.qmp.clone().unwrap_or_default(),
        listen: args.listen.clone(),
        security: security::destination(&args.tls)?,
        placement,
        prefault: args.prefault,
        wait: args.wait,
        waits: (&args.waits).into(),
        state_dir: state_dir::choose(&args.state)?,
        socket_dir: args.sockets.directory(),
    };
    migration(&args.screen, &args.report, &recover, logging, |cancel, screen| {
        let subject = subject(args, absolute(args.qmp.as_deref()), &options.state_dir);
        with_socket(subject, cancel, &ready.before(screen), |observer| receive(&options, cancel, observer))
    })
}

/// Returns what `sterna show` shows of this side.
fn subject<'a>(args: &ReceiveArgs, monitor: String, state_dir: &'a Path) -> Subject<'a> {
    Subject { side: Side::Destination, monitor, peer: args.listen.clone(), state_dir, control: None }
}
