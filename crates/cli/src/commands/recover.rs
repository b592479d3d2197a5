//! `sterna recover`: makes sure that exactly one guest runs after a crash in the commit window.

use std::io::Write;

use sterna_engine::record_file::{self, Side};
use sterna_qemu::gateway::{RecoverOptions, recover};
use sterna_wire::identity::MigrationId;

use super::{Failure, Session, gateway_failure, security, state_dir};
use crate::args::{RecoverArgs, ScreenArgs, SideArg};
use crate::exit::Exit;
use crate::signals::Meaning;

pub(super) fn run(args: &RecoverArgs, logging: bool) -> Result<Exit, Failure> {
    let side = args.side.map(|side| match side {
        SideArg::Source => Side::Source,
        SideArg::Destination => Side::Destination,
    });
    match args.id {
        Some(id) => one(args, id, side, logging).map(|text| {
            let _ = writeln!(std::io::stdout(), "{text}");
            Exit::Completed
        }),
        None => all(args, side, logging),
    }
}

/// Settles one migration. Returns what was found and done.
fn one(args: &RecoverArgs, id: MigrationId, side: Option<Side>, logging: bool) -> Result<String, Failure> {
    let options = RecoverOptions {
        id,
        side,
        fenced_peer: args.fenced_peer,
        security: security::recovery(args)?,
        wait: args.wait,
        state_dir: state_dir::choose(&args.state)?,
    };
    let session = Session::start(&ScreenArgs { quiet: false }, logging, Meaning::RECOVERY)?;
    let result = recover(&options, &session.cancel, &*session.screen);
    let cancelled = session.end();
    result.map_err(|error| gateway_failure(&error, cancelled))
}

/// Settles all migrations of this host that are not settled, and says of each what was done. The first failure determines the exit code; it
/// keeps no other migration from being settled, unless it is a cancellation. A migration that another process works on, whose record is locked
/// therefore, is such a failure.
fn all(args: &RecoverArgs, side: Option<Side>, logging: bool) -> Result<Exit, Failure> {
    let dir = state_dir::choose(&args.state)?;
    let mut records = record_file::unsettled(&dir).map_err(|error| Failure::refused(&error))?;
    records.retain(|record| side.is_none_or(|side| side == Side::of(record.state)));
    records.sort_by_key(|record| record.updated_ms);
    if records.is_empty() {
        let _ = writeln!(std::io::stdout(), "no migration in {} is to be settled", dir.display());
    }
    let mut exit = Exit::Completed;
    for record in records {
        let id = record.migration;
        let (ended, text) = match one(args, id, Some(Side::of(record.state)), logging) {
            Ok(text) => (Exit::Completed, text),
            Err(failure) => (failure.exit, format!("NOT SETTLED: {}", failure.text)),
        };
        let text = sterna_wire::text::printable(&text);
        let _ = writeln!(std::io::stdout(), "{id}: {text}");
        if exit == Exit::Completed {
            exit = ended;
        }
        if ended == Exit::Cancelled {
            break;
        }
    }
    Ok(exit)
}
