//! The source QEMU's own migration: starting it into our sockets, letting it complete, cancelling it.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sterna_engine::pacer::Pacer;
use sterna_engine::send::{DeltaSetting, SendContext};
use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::SourceGuest;

use super::driver::{Driver, Event};
use crate::gateway::GatewayError;
use crate::gateway::layout::Start;
use crate::gateway::plane::{Plane, WhenAborted};
use crate::gateway::qemu;
use crate::gateway::sockets::{SocketDir, SocketPlace};
use crate::gateway::source_stream::read_start;
use crate::qmp::{Qmp, QmpError};
use crate::settings::{Plan, Restore};
use crate::stream::{MainReader, ReturnMessage, StreamError};

/// How long QEMU may take to connect to our sockets after the command `migrate`.
const CONNECT_TIME: Duration = Duration::from_secs(10);

/// How far QEMU's migration is.
#[derive(Debug)]
pub(super) enum Stage {
    /// QEMU's settings are to be applied once the record is on the disk.
    Planned(Plan),
    /// QEMU did not take the settings.
    Untouched,
    /// QEMU has the settings, and perhaps a migration of ours.
    Begun(Box<Begun>),
}

/// A QEMU with our settings.
#[derive(Debug)]
pub(super) struct Begun {
    /// Restores the settings when it is dropped: the guest stays here.
    pub(super) restore: Option<Restore>,
    /// QEMU has accepted our `migrate`, or may have: any migration that it now has is ours.
    pub(super) accepted: bool,
    pub(super) moving: Option<Moving>,
}

/// The data plane, and the sockets of QEMU that the driver itself uses.
#[derive(Debug)]
pub(super) struct Moving {
    pub(super) plane: Plane,
    return_path: UnixStream,
    _sockets: SocketDir,
}

impl Stage {
    pub(super) fn begun(&self) -> bool {
        matches!(self, Self::Begun(_))
    }

    /// Returns whether any migration that QEMU now has is ours.
    pub(super) fn accepted(&self) -> bool {
        matches!(self, Self::Begun(begun) if begun.accepted)
    }

    pub(super) fn moving(&self) -> Option<&Moving> {
        if let Self::Begun(begun) = self { begun.moving.as_ref() } else { None }
    }

    pub(super) fn moving_mut(&mut self) -> Option<&mut Moving> {
        if let Self::Begun(begun) = self { begun.moving.as_mut() } else { None }
    }

    /// Writes a message to QEMU's return path.
    pub(super) fn return_message(&self, message: ReturnMessage) -> Result<(), StreamError> {
        self.moving().map_or(Ok(()), |moving| message.write(&moving.return_path))
    }
}

impl Driver<'_> {
    /// Opens the channels and has QEMU migrate into our sockets.
    pub(super) fn begin_migration(&mut self) -> Result<(), GatewayError> {
        let (sockets, listener) = SocketPlace::find(&self.options.socket_dir, self.qmp.peer_pid())
            .and_then(|place| SocketDir::listening(&place, self.kernel.session.id))
            .map_err(|error| GatewayError::new(format!("cannot make the private socket for QEMU: {error}")))?;
        let pacer = Arc::new(Pacer::new(self.options.bandwidth));
        self.kernel.pace_by(&pacer);
        let context = SendContext {
            refusals: self.refusals.clone(),
            // The channels get their caches once the blocks are known (`settle_deltas`).
            deltas: self.deltas.clone().map_or(DeltaSetting::None, DeltaSetting::SomeBlocks),
            ..SendContext::new(
                Arc::clone(&self.window),
                pacer,
                Arc::clone(&self.kernel.abort),
                self.compression.clone(),
                self.kernel.session.rules(),
            )
        };
        let channels = self.options.channels;
        let readers = 1 + usize::from(channels);
        let (security, to) = (&self.options.security, &self.options.to);
        let mut plane =
            Plane::open(&self.kernel.session, security, to, &context, readers, self.kernel.cancel, WhenAborted::Drain)?;

        let failed = |error: io::Error| GatewayError::new(format!("the private sockets for QEMU failed: {error}"));
        if self.kernel.cancel.is_cancelled() {
            return Err(GatewayError::new("cancelled").of(ErrorKind::Cancelled));
        }
        if let Stage::Planned(plan) = std::mem::replace(&mut self.stage, Stage::Untouched) {
            let failed = |error| GatewayError::new(format!("the source QEMU does not take the settings: {error}"));
            let restore = Some(plan.carry_out().map_err(failed)?);
            self.stage = Stage::Begun(Box::new(Begun { restore, accepted: false, moving: None }));
        }
        let uri = format!("unix:{}", sockets.path_for_qemu().display());
        let failed_to_start = |why: &dyn std::fmt::Display| {
            GatewayError::new(format!("the source QEMU does not start the migration: {why}"))
        };
        match self.qmp.status() {
            Ok(status) if status != "running" => return Err(failed_to_start(&format_args!("its guest is {status}"))),
            Ok(_) => {}
            Err(error) => return Err(failed_to_start(&error)),
        }
        let answer = self.qmp.execute("migrate", json!({ "uri": uri }));
        // Without an answer QEMU may have accepted the command.
        if let Stage::Begun(begun) = &mut self.stage {
            begun.accepted = !matches!(answer, Err(QmpError::Refused { .. }));
        }
        answer.map_err(|error| failed_to_start(&error))?;
        let connections = qemu::accept_migration(&listener, channels as u8, CONNECT_TIME)
            .map_err(|error| not_connected(&self.qmp, &sockets.path_for_qemu(), &error))?;

        let return_path = connections.main.try_clone().map_err(failed)?;
        let ending = return_path.try_clone().map_err(failed)?;
        // A QEMU that has sent its last page waits for the return path. Closing it is a failure for QEMU, and the guest continues.
        self.kernel.abort.on_end(move || drop(ending.shutdown(Shutdown::Write)));
        let main = connections.main.try_clone().map_err(failed)?;
        let uuid = connections.multifd.first().map_or([0; 16], |(_, init)| init.uuid);
        let ratio = NormalPageRatio::new(self.options.normal_page_ratio);
        plane.read_multifd(connections.multifd, &ratio).map_err(failed)?;
        let start = move || {
            let mut reader = MainReader::new(connections.main);
            let start = read_start(&mut reader).map_err(|error| error.to_string())?;
            Ok((reader, Start { ram_channels: channels, multifd_channels: channels as u8, uuid, ..start }))
        };
        let events = self.kernel.events.clone();
        let news = move |news| {
            events.send(Event::Stream(news));
        };
        plane.read_main(&main, start, ratio, news).map_err(failed)?;
        if let Stage::Begun(begun) = &mut self.stage {
            begun.moving = Some(Moving { plane, return_path, _sockets: sockets });
        }
        Ok(())
    }

    /// Ends QEMU's migration. Returns the guest's state after that.
    pub(super) fn cancel_migration(&mut self) -> Result<SourceGuest, Reason> {
        self.kernel.abort.raise(self.kernel.reason().clone());
        if !self.stage.accepted() {
            // Our `migrate` was refused: any migration that QEMU has was started by somebody else.
            return Ok(SourceGuest::Running);
        }
        let ended = qemu::end_migration(&self.qmp);
        if let Some(moving) = self.stage.moving() {
            moving.plane.release();
        }
        let record = self.kernel.ledger.record();
        match ended {
            Ok(SourceGuest::Completed) if !record.completion_permitted => {
                let text = "QEMU completed a migration although this one was not at its end: somebody else has moved the guest, or \
                            turned off the return path";
                Err(Reason::new(ErrorKind::Monitor, text))
            }
            Ok(state) => Ok(state),
            Err(QmpError::Closed { .. }) if qemu::has_ended(record.monitor_process) => Ok(SourceGuest::Gone),
            Err(error) => Err(qemu::failed("the source QEMU does not end its migration")(error)),
        }
    }

    /// Sends SHUT(0), at which QEMU completes. The record first notes the permission, for `recover`.
    pub(super) fn permit_completion(&mut self) -> Result<(), Reason> {
        let noted = self.kernel.ledger.write_amended(|record| record.completion_permitted = true);
        noted.map_err(|error| Reason::new(error.kind(), &error))?;
        self.stage
            .return_message(ReturnMessage::Shut(0))
            .map_err(qemu::failed("the source QEMU does not take the end of the migration"))
    }
}

/// Returns why QEMU did not connect: its own error for the migration, if it has one, tells more than `error`.
fn not_connected(qmp: &Qmp, socket: &Path, error: &io::Error) -> GatewayError {
    let why = qemu::failure(qmp).unwrap_or_else(|| error.to_string());
    GatewayError::new(format!("the source QEMU did not connect to {}: {why}", socket.display()))
}
