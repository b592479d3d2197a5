//! `sterna receive`: waits for a source and agrees with it on how the guest arrives. `session` then runs a migration by QEMU's own
//! stream; `direct` one in direct mode.

mod driver;
mod guest;
mod return_path;
mod session;

use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::{send_message, with_heartbeats};
use sterna_engine::destination::Destination;
use sterna_engine::migration::RESUME;
use sterna_engine::report::{Observer, ReceiveReport};
use sterna_engine::session::{AcceptedSource, DRY_RUN, Declined, Features, Handshake, SourceRequest, is_dry_run};
use sterna_engine::transport::{Incoming, Limits, Listener};
use sterna_wire::control::{ControlMessage, Hello, Mode};

use self::guest::Guest;
use super::claim::Claim;
use super::features::{DESTINATION, DESTINATION_WITH_DELTAS};
use super::qemu::{self, QUIT_TIME};
use super::sockets::Listens;
use super::waiting::Waiting;
use super::{GatewayError, LibvirtReceiveOptions, Monitor, Placement, ReceiveOptions, comparison, direct, earlier};
use crate::qmp::Qmp;
use crate::settings::{Role, Settings};
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::ProcessIdentity;

/// Takes one migration into the QEMU at `options.qmp`. Connections that are refused do not end it.
///
/// # Errors
/// Only for failures before a migration was accepted; the report describes every other end.
pub fn receive(
    options: &ReceiveOptions,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, GatewayError> {
    let qmp = Qmp::connect(&options.qmp).map_err(GatewayError::refused)?;
    // Held to the end: keeps every other sterna from this QEMU.
    let _claim = Claim::of(&qmp).map_err(GatewayError::refused)?;
    let settings = Settings::read(&qmp).map_err(GatewayError::refused)?;
    let refusals = settings.refusals(Role::Destination);
    if !refusals.is_empty() {
        return Err(GatewayError::refused(format_args!("this QEMU cannot take a guest: {}", refusals.join("; "))));
    }
    earlier::refuse_if_claimed(&options.state_dir, &qmp, &Monitor::from(options.qmp.as_path()))?;
    qemu::check_directories(&options.state_dir, &options.socket_dir, Listens::Qemu, &qmp)
        .map_err(GatewayError::refused)?;
    let listener = Listener::bind(&options.listen).map_err(GatewayError::refused)?;
    let address = listener.local_address();
    let incoming = listener.start(options.security.clone(), Limits::default()).map_err(GatewayError::refused)?;
    qemu::unknown_process_note(&qmp).iter().for_each(|note| observer.note(note));
    observer.listening(&address.to_string());

    match accept_source(&qmp, options, &incoming, cancel, observer)? {
        (source, Some(ready)) => direct::receive(ready, source, options, &address, incoming, cancel, observer),
        (source, None) => {
            observer.note(&format!("migration {} from {}", source.session.id, source.peer));
            if options.prefault {
                observer.note("--prefault is not used: it needs direct mode, and the source sends QEMU's own stream");
            }
            session::run(source, options, &address.to_string(), qmp, incoming, cancel, observer)
        }
    }
}

/// Takes one migration of a source whose QEMU belongs to libvirt, and has libvirt on this host run the guest.
///
/// # Errors
/// Only for failures before a migration was accepted; the report describes every other end.
pub fn receive_by_libvirt(
    options: &LibvirtReceiveOptions,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, GatewayError> {
    direct::receive_by_libvirt(options, cancel, observer)
}

/// Waits for a source whose guest can be taken. In direct mode, returns QEMU as it was prepared for that.
fn accept_source(
    qmp: &Qmp,
    options: &ReceiveOptions,
    incoming: &Incoming,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<(AcceptedSource, Option<direct::ReadyDestination>), GatewayError> {
    let guest = Guest::of(qmp);
    // QEMU's own stream has no place for deltas.
    let features = if options.placement == Placement::InStream { DESTINATION } else { DESTINATION_WITH_DELTAS };
    let mut directly = Destination::FEATURES_WITH_POST_COPY.offered.to_vec();
    directly.push(DRY_RUN);
    directly.extend((!options.waits.retry.is_zero()).then_some(RESUME));
    let directly = Features { offered: &directly, ..Destination::FEATURES_WITH_POST_COPY };
    // Pages that are to go through QEMU's own stream do not go directly.
    let takes = [(Mode::Owner, features), (Mode::Direct, directly)];
    let takes = if options.placement == Placement::InStream { &takes[..1] } else { &takes[..] };
    let refusals = |hello: &Hello| -> Vec<String> {
        let mut reasons = guest.refusals(hello);
        reasons.extend(direct::post_copy_refusal(qmp, hello));
        if is_dry_run(hello) {
            // Found out later where a migration begins.
            reasons.extend(
                Settings::read(qmp)
                    .map_or_else(|error| vec![error.to_string()], |settings| settings.refusals(Role::Destination)),
            );
            reasons.extend(direct::destination_refusal(qmp, hello));
        }
        reasons
    };
    let describe = || comparison::describe(qmp);
    let handshake = Handshake { takes, refusals: &refusals, describe: Some(&describe) };
    let waiting = Waiting::start(options.wait, cancel)?;
    waiting.watch(qmp)?;
    let identity = qemu::identity(qmp);
    let no_source = || match waiting.monitor_closed() {
        true => qemu_has_ended(qmp, identity),
        false => waiting.no_source("QEMU was not touched"),
    };
    let note_declined = |source: &Declined| match source.request {
        // The source that begins a migration has asked, too.
        SourceRequest::Description => tracing::debug!("{source}"),
        _ => observer.note(&source.to_string()),
    };
    loop {
        let mut source = handshake.first(incoming, &waiting.cancel, note_declined).ok_or_else(no_source)?;
        // Fails where the source is gone, which needs no answer.
        let refuse = |source: &mut AcceptedSource, reason: String| {
            drop(send_message(&mut source.writer, &ControlMessage::Refused(Reason::other(reason))));
        };
        if waiting.cancel.is_cancelled() {
            // The listener has ended with the wait: a source that is lost could not reconnect.
            let error = no_source();
            refuse(&mut source, error.text.clone());
            return Err(error);
        }
        if source.mode != Mode::Direct {
            return Ok((source, None));
        }
        // QEMU's monitor and its reading of the stream's beginning may take longer than a source waits without a sign of life.
        match with_heartbeats(&mut source.writer, || direct::prepare_destination(qmp, &source.machine)) {
            Ok(ready) => return Ok((source, Some(ready))),
            // The source may come again, by QEMU's own stream.
            Err(direct::Refusal::Untouched(reason)) => {
                observer.note(&format!("refused: {}: {reason}; this QEMU was not touched", source.peer));
                refuse(&mut source, reason);
            }
            Err(direct::Refusal::Begun(reason)) => {
                refuse(&mut source, reason.clone());
                let left = match qemu::quit(qmp, identity, QUIT_TIME) {
                    Ok(()) => "its QEMU was ended".to_owned(),
                    Err(error) => format!("its QEMU could not be ended: {error}"),
                };
                return Err(GatewayError::new(format!("this QEMU cannot take the guest: {reason} ({left})")));
            }
        }
    }
}

/// Returns the error for a QEMU whose monitor was closed before a source came.
fn qemu_has_ended(qmp: &Qmp, identity: Option<ProcessIdentity>) -> GatewayError {
    let how = qemu::guest_end(qmp).map_or_else(|| "its output says why".to_owned(), |end| end.what);
    let what = match qemu::has_ended(identity) {
        true => format!("QEMU has ended ({how})"),
        false => "QEMU has closed its QMP socket, or the program that forwards it has".to_owned(),
    };
    let text = format!(
        "{what} while it waited for a source: no guest was touched; start it again, and a new `sterna receive`"
    );
    GatewayError::of_kind(ErrorKind::Monitor, text)
}
