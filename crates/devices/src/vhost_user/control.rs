//! The two messages, each with a deadline.
//!
//! The crate `vhost` waits for a reply without a limit, and a receive timeout on the socket only makes it retry. So the
//! call runs on the caller's thread, and a second thread, which ends with it, shuts the connection down at the
//! deadline.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Instant;

use rustix::net::{Shutdown, shutdown};
use vhost::vhost_user::message::{VhostTransferStateDirection as Direction, VhostTransferStatePhase as Phase};
use vhost::vhost_user::{Error as VhostUserError, VhostUserFrontend};

use super::{BackEnd, Error, Step};

/// Passes the back-end's end of a pipe; returns the channel that the back-end wants to use instead, if any.
pub(super) fn set_device_state_fd(
    back_end: &BackEnd,
    direction: Direction,
    step: Step,
    theirs: OwnedFd,
    deadline: Instant,
) -> Result<Option<File>, Error> {
    within(back_end, step, deadline, || back_end.frontend.set_device_state_fd(direction, Phase::STOPPED, theirs))
}

/// Asks whether the moved state is complete.
pub(super) fn check_device_state(back_end: &BackEnd, step: Step, deadline: Instant) -> Result<(), Error> {
    within(back_end, step, deadline, || back_end.frontend.check_device_state())
}

fn within<T>(
    back_end: &BackEnd,
    step: Step,
    deadline: Instant,
    call: impl FnOnce() -> vhost::Result<T>,
) -> Result<T, Error> {
    let (answered, waits) = channel::<()>();
    let (answer, expired) = thread::scope(|scope| {
        let watch = thread::Builder::new().name("vhost-user".into()).spawn_scoped(scope, move || {
            let left = deadline.saturating_duration_since(Instant::now());
            let expired = waits.recv_timeout(left) == Err(RecvTimeoutError::Timeout);
            if expired {
                // Fails only if the peer has shut it down already.
                let _ = shutdown(&*back_end.socket, Shutdown::Both);
            }
            expired
        });
        let watch = watch.map_err(|source| Error::Io { back_end: back_end.name(), step, source })?;
        let answer = call();
        drop(answered);
        Ok((answer, watch.join().unwrap_or(false)))
    })?;
    if expired {
        return Err(Error::Deadline { back_end: back_end.name(), step, disconnected: true });
    }
    answer.map_err(|error| translate(back_end, step, error))
}

fn translate(back_end: &BackEnd, step: Step, error: vhost::Error) -> Error {
    let name = back_end.name();
    match error {
        vhost::Error::VhostUserProtocol(
            VhostUserError::Disconnected | VhostUserError::PartialMessage | VhostUserError::SocketBroken(_),
        ) => Error::Gone { back_end: name, step },
        vhost::Error::VhostUserProtocol(VhostUserError::BackendInternalError) => {
            Error::Refused { back_end: name, step }
        }
        vhost::Error::VhostUserProtocol(VhostUserError::InactiveOperation(_)) => {
            Error::NotNegotiated { back_end: name }
        }
        source => Error::Protocol { back_end: name, step, source },
    }
}
