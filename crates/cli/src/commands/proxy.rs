//! `sterna proxy`: carries a migration that someone else drives. There is no report: whoever drives it has one.

use sterna_qemu::gateway::{GatewayError, ProxyReceiveOptions, ProxySendOptions, proxy_receive, proxy_send};

use super::{Exit, Failure, Session, gateway_failure, method_choice, security};
use crate::args::{ProxyReceiveArgs, ProxySendArgs};
use crate::signals::Meaning;

pub(super) fn run_send(args: &ProxySendArgs, logging: bool) -> Result<Exit, Failure> {
    let options = ProxySendOptions {
        unix: args.unix.clone(),
        opaque: args.opaque.checked().map_err(|error| Failure::usage(&error))?,
        to: args.link.to.clone(),
        security: security::source(&args.tls)?,
        channels: args.link.channels,
        method: method_choice(&args.link)?,
        qatzip: args.link.qatzip(),
        cpu: args.link.cpu,
        bandwidth: args.link.bandwidth,
        downtime: args.link.downtime,
        packet_size: args.link.packet_size,
    };
    let session = Session::start(&args.screen, logging, Meaning::RELAY)?;
    let result = proxy_send(&options, &session.cancel, &*session.screen);
    end(session, result)
}

pub(super) fn run_receive(args: &ProxyReceiveArgs, logging: bool) -> Result<Exit, Failure> {
    let options = ProxyReceiveOptions {
        unix: args.unix.clone(),
        opaque: args.opaque.checked().map_err(|error| Failure::usage(&error))?,
        listen: args.listen.clone(),
        security: security::destination(&args.tls)?,
    };
    let session = Session::start(&args.screen, logging, Meaning::RELAY)?;
    let result = proxy_receive(&options, &session.cancel, &*session.screen);
    end(session, result)
}

fn end(session: Session, result: Result<(), GatewayError>) -> Result<Exit, Failure> {
    let cancelled = session.end();
    result.map(|()| Exit::Completed).map_err(|error| gateway_failure(&error, cancelled))
}
