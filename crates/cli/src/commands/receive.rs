//! `sterna receive`: the destination's side of a migration.

use sterna_engine::report::ReceiveReport;
use sterna_qemu::gateway::{Placement, ReceiveOptions, receive};

use super::recover_command::RecoverCommand;
use super::{Failure, Summary, migration, security, state_dir};
use crate::args::ReceiveArgs;
use crate::exit::Exit;

impl Summary for ReceiveReport {
    fn exit(&self) -> Exit {
        self.outcome.into()
    }

    fn text(&self) -> String {
        self.text()
    }
}

pub(super) fn run(args: &ReceiveArgs, logging: bool) -> Result<Exit, Failure> {
    let placement = Placement::from(args.placement);
    if args.prefault && placement == Placement::InStream {
        // Refused rather than silently ignored.
        return Err(Failure::usage(&"--prefault: it needs direct mode, and --placement in-stream was given"));
    }
    let options = ReceiveOptions {
        qmp: args.qmp.clone(),
        listen: args.listen.clone(),
        security: security::destination(&args.tls)?,
        placement,
        prefault: args.prefault,
        wait: args.wait,
        waits: (&args.waits).into(),
        state_dir: state_dir::choose(&args.state)?,
        socket_dir: args.sockets.directory(),
    };
    let recover = RecoverCommand::of_destination(&args.state, &args.tls);
    migration(&args.screen, &args.report, &recover, logging, |cancel, screen| receive(&options, cancel, screen))
}
