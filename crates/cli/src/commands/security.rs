//! `--tls` or `--insecure`: one of them must be given, so that no guest is sent unencrypted because an option was forgotten.

use std::path::Path;

use sterna_engine::tls::{TlsError, TlsSettings};
use sterna_engine::transport::Security;

use super::Failure;
use crate::args::{RecoverArgs, TlsAllowArgs, TlsArgs};

/// A command that makes certificates for a trial, shown if `--tls` is missing.
const HOW_TO_MAKE_CERTIFICATES: &str = "sterna cert --dir certs --host dst-host";

pub(super) fn source(args: &TlsArgs) -> Result<Security, Failure> {
    choose(args.tls.as_deref(), args.insecure, "--tls DIR", |dir| client(dir, args.tls_server_name.as_deref()))
}

pub(super) fn destination(args: &TlsAllowArgs) -> Result<Security, Failure> {
    choose(args.tls.as_deref(), args.insecure, "--tls DIR --allow NAME", |dir| TlsSettings::server(dir, &args.allow))
}

/// Returns none if neither `--tls` nor `--insecure` was given: `recover` then cannot ask the other host, and may not need to.
pub(super) fn recovery(args: &RecoverArgs) -> Result<Option<Security>, Failure> {
    if args.tls.is_none() && !args.insecure {
        return Ok(None);
    }
    let security = choose(args.tls.as_deref(), args.insecure, "--tls DIR", |dir| match args.allow.as_slice() {
        [] => client(dir, args.tls_server_name.as_deref()),
        allow => TlsSettings::server(dir, allow),
    });
    security.map(Some)
}

/// Returns the settings of a side that connects, and looks for `server_name` in the other's certificate if that is given.
fn client(dir: &Path, server_name: Option<&str>) -> Result<TlsSettings, TlsError> {
    let settings = TlsSettings::client(dir)?;
    match server_name {
        Some(name) => settings.with_server_name(name),
        None => Ok(settings),
    }
}

fn choose(
    tls: Option<&Path>,
    insecure: bool,
    option: &str,
    read: impl FnOnce(&Path) -> Result<TlsSettings, TlsError>,
) -> Result<Security, Failure> {
    match (tls, insecure) {
        (Some(dir), _) => read(dir).map(Security::Tls).map_err(|error| match error {
            TlsError::ServerName { .. } => Failure::usage(&format!("--tls-server-name: {error}")),
            TlsError::NobodyAllowed => Failure::usage(&format!("{error}: give it with --allow NAME")),
            TlsError::File { .. } => {
                let advice = "`sterna cert` makes a set of certificates for a trial or a small site";
                Failure::refused(&format!("{error}; {advice}"))
            }
            other => Failure::refused(&other),
        }),
        (None, true) => Ok(Security::Insecure),
        (None, false) => Err(Failure::usage(&missing(option))),
    }
}

fn missing(option: &str) -> String {
    format!(
        "say how the connection is protected: {option}, or --insecure (nothing was done)\n  \
         --tls: both hosts prove who they are, and the guest's memory is encrypted. Certificates for a trial or a small \
         site\n    (dst-host: the name or address that stands in --to): {HOW_TO_MAKE_CERTIFICATES}\n  \
         --insecure: everyone on the network path can read and change the guest's memory, with all keys and passwords in \
         it,\n    and anyone who reaches the port can pose as the other host; for networks that only you can reach"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use crate::exit::Exit;
    use clap::Parser;

    #[test]
    fn without_a_choice_the_error_shows_both_and_a_command_that_works() {
        let failure = source(&TlsArgs { tls: None, tls_server_name: None, insecure: false }).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        for part in ["--tls DIR", "--insecure", HOW_TO_MAKE_CERTIFICATES, "nothing was done"] {
            assert!(failure.text.contains(part), "{}", failure.text);
        }
        assert!(
            failure.text.lines().count() <= 6 && failure.text.lines().all(|line| line.len() <= 120),
            "{}",
            failure.text
        );
        Cli::try_parse_from(HOW_TO_MAKE_CERTIFICATES.split(' ')).expect("the command in the message");
    }

    #[test]
    fn the_receiver_must_name_who_may_send() {
        let args = TlsAllowArgs { tls: Some("certs".into()), allow: vec![], insecure: false };
        let failure = destination(&args).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.text.contains("--allow NAME"), "{}", failure.text);
    }

    #[test]
    fn missing_certificates_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let tls = Some(dir.path().to_owned());
        let failures = [
            source(&TlsArgs { tls: tls.clone(), tls_server_name: None, insecure: false }).unwrap_err(),
            destination(&TlsAllowArgs { tls, allow: vec!["a".to_owned()], insecure: false }).unwrap_err(),
        ];
        for failure in failures {
            assert_eq!(failure.exit, Exit::Refused);
            assert!(failure.text.contains(".pem") && !failure.text.contains('\n'), "{}", failure.text);
        }
    }

    #[test]
    fn insecure_is_insecure() {
        assert!(matches!(
            source(&TlsArgs { tls: None, tls_server_name: None, insecure: true }),
            Ok(Security::Insecure)
        ));
    }
}
