//! `--tls` or `--insecure`: one of them must be said, so that nobody sends a guest in clear by leaving something out.

use std::path::Path;

use sterna::tls::{TlsError, TlsSettings};
use sterna::transport::Security;

use super::Failure;
use crate::args::{RecoverArgs, TlsAllowArgs, TlsArgs};

/// Makes certificates for a trial; shown where they are missing.
const HOW_TO_MAKE_CERTIFICATES: &str = "sterna cert …";

pub(super) fn source(args: &TlsArgs) -> Result<Security, Failure> {
    choose(args.tls.as_deref(), args.insecure, "--tls DIR", TlsSettings::client)
}

pub(super) fn destination(args: &TlsAllowArgs) -> Result<Security, Failure> {
    choose(args.tls.as_deref(), args.insecure, "--tls DIR --allow NAME", |dir| TlsSettings::server(dir, &args.allow))
}

/// None where the other host need not be asked, or cannot.
pub(super) fn recovery(args: &RecoverArgs) -> Result<Option<Security>, Failure> {
    if args.tls.is_none() && !args.insecure {
        return Ok(None);
    }
    let security = choose(args.tls.as_deref(), args.insecure, "--tls DIR", |dir| {
        if args.allow.is_empty() { TlsSettings::client(dir) } else { TlsSettings::server(dir, &args.allow) }
    });
    security.map(Some)
}

fn choose(
    tls: Option<&Path>,
    insecure: bool,
    option: &str,
    read: impl FnOnce(&Path) -> Result<TlsSettings, TlsError>,
) -> Result<Security, Failure> {
    match (tls, insecure) {
        (Some(dir), _) => read(dir).map(Security::Tls).map_err(|error| match error {
            TlsError::NobodyAllowed => Failure::usage(error),
            other => Failure::failed(other),
        }),
        (None, true) => Ok(Security::Insecure),
        (None, false) => Err(Failure::usage(missing(option))),
    }
}

fn missing(option: &str) -> String {
    format!(
        "say how the connection is protected: {option}, or --insecure (nothing was done)\n  \
         --tls: both hosts prove who they are, and the guest's memory is encrypted. Certificates for a trial or a small \
         site:\n    {HOW_TO_MAKE_CERTIFICATES}\n  \
         --insecure: everyone on the network path can read and change the guest's memory, with all keys and passwords in \
         it,\n    and anyone who reaches the port can pose as the other host; for networks that only you can reach"
    )
}
