//! `sterna recover`: makes sure that exactly one guest runs after a crash in the commit window.

use std::io::Write;

use sterna_engine::record_file::Side;
use sterna_qemu::gateway::{RecoverOptions, recover};

use super::{Failure, Session, gateway_failure, security, state_dir};
use crate::args::{RecoverArgs, ScreenArgs, SideArg};
use crate::exit::Exit;
use crate::signals::Meaning;

pub(super) fn run(args: &RecoverArgs, logging: bool) -> Result<Exit, Failure> {
    let options = RecoverOptions {
        id: args.id,
        side: args.side.map(|side| match side {
            SideArg::Source => Side::Source,
            SideArg::Destination => Side::Destination,
        }),
        fenced_peer: args.fenced_peer,
        security: security::recovery(args)?,
        wait: args.wait,
        state_dir: state_dir::choose(&args.state)?,
    };
    let session = Session::start(&ScreenArgs { quiet: false }, logging, Meaning::RECOVERY)?;
    let result = recover(&options, &session.cancel, &*session.screen);
    let cancelled = session.end();
    let text = result.map_err(|error| gateway_failure(&error, cancelled))?;
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(Exit::Completed)
}
