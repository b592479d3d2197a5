//! `sterna send`: the source's side of a migration.

use sterna_engine::live_control::Control;
use sterna_engine::record_file::Side;
use sterna_engine::report::{Outcome, Report};
use sterna_qemu::gateway::{AllowedDifferences, DirectOptions, DryRun, SendOptions, dry_run, send};

use super::recover_command::RecoverCommand;
use super::{Failure, Summary, absolute, method_choice, migration, security, state_dir};
use crate::args::{ModeArg, SendArgs};
use crate::control::{Subject, with_socket};
use crate::exit::Exit;

impl Summary for Report {
    fn exit(&self) -> Exit {
        self.outcome.into()
    }

    fn text(&self) -> String {
        self.text()
    }

    fn advice(&self) -> Option<String> {
        // In post-copy the destination lacks memory: nothing brings that guest back.
        let may_be_prepared = self.outcome == Outcome::Lost && self.post_copy.is_none() && !self.nothing_left;
        may_be_prepared.then(|| format!("On the destination's host: sterna recover {} --fenced-peer", self.id))
    }
}

/// Of several refusals the first determines the code: those of the source come first.
impl Summary for DryRun {
    fn exit(&self) -> Exit {
        self.refusals.first().map_or(Exit::Completed, |refusal| refusal.kind.into())
    }

    fn text(&self) -> String {
        self.text()
    }
}

pub(super) fn run(args: &SendArgs, logging: bool) -> Result<Exit, Failure> {
    let options = SendOptions {
        monitor: args.monitor(),
        to: args.link.to.clone(),
        security: security::source(&args.tls)?,
        channels: args.link.channels,
        method: method_choice(&args.link)?,
        qatzip: args.link.qatzip(),
        max_cpus: args.link.max_cpus,
        bandwidth: args.link.bandwidth,
        downtime: args.link.downtime,
        packet_size: args.link.packet_size,
        delta_cache: args.delta_cache,
        normal_page_ratio: args.normal_page_ratio,
        allowed: AllowedDifferences { names: args.allow_difference.clone(), cpu: args.force_cpu },
        mode: args.mode.into(),
        direct: direct(args)?,
        source_after: args.source_after.into(),
        patience: args.wait,
        waits: (&args.waits).into(),
        control: Control::new(),
        state_dir: state_dir::choose(&args.state)?,
        socket_dir: args.sockets.directory(),
    };
    let recover = RecoverCommand::of_source(&args.state, &args.tls);
    match args.dry_run {
        true => {
            migration(&args.screen, &args.report, &recover, logging, |cancel, screen| dry_run(&options, cancel, screen))
        }
        false => migration(&args.screen, &args.report, &recover, logging, |cancel, screen| {
            let subject = Subject {
                side: Side::Source,
                monitor: monitor(args),
                peer: args.link.to.clone(),
                state_dir: &options.state_dir,
                control: Some(options.control.clone()),
            };
            with_socket(subject, cancel, screen, |observer| send(&options, cancel, observer))
        }),
    }
}

/// Returns how `sterna show` names the QEMU.
fn monitor(args: &SendArgs) -> String {
    args.domain.clone().unwrap_or_else(|| absolute(args.qmp.as_deref()))
}

/// Returns the options of direct mode, and refuses them if `--mode stream` excludes it.
fn direct(args: &SendArgs) -> Result<DirectOptions, Failure> {
    let direct = DirectOptions::from(&args.direct);
    match direct.given() {
        // Refused rather than silently ignored.
        Some(option) if args.mode == ModeArg::Stream => {
            Err(Failure::usage(&format!("{option}: it needs direct mode, and --mode stream was given")))
        }
        _ => Ok(direct),
    }
}
