//! Saving and loading the state of a device whose back-end is a separate process (vhost-user).
//!
//! The protocol has two messages for it, behind the protocol feature `DEVICE_STATE` (bit 19): `SET_DEVICE_STATE_FD`
//! (42) passes one end of a pipe to the back-end, `CHECK_DEVICE_STATE` (43) asks for the result. The back-end alone
//! defines the bytes in the pipe, which end with the state; an error is reported only by the second message.
//! (vhost-user specification of QEMU, "Migrating back-end state".)
//!
//! ```text
//!  back-end ── pipe ──> Saver ──> the engine ═══ network ═══> the engine ──> Loader ── pipe ──> back-end
//! ```
//!
//! The device must be suspended first: the monitor has stopped each vring (`GET_VRING_BASE`) and starts none before the
//! state was saved or loaded. The configuration around the state (memory table, vring addresses and bases, features) is
//! the monitor's own, on both sides.
//!
//! No thread here outlives a call, nothing is allocated per chunk, and each wait has a deadline. If a deadline passes
//! during a message the connection is shut down, because the protocol cannot cancel a message, and a late reply would
//! be taken for the reply to the next one. If it passes in the pipe the connection is unaffected.
//!
//! Processes that are not Rust programs must ignore `SIGPIPE`: a back-end that dies while it is written to raises it.

mod control;
mod error;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::{Errno, FdFlags};
use rustix::pipe::PipeFlags;
use vhost::vhost_user::Frontend;
use vhost::vhost_user::message::{VhostTransferStateDirection as Direction, VhostUserProtocolFeatures};

pub use error::{Error, Step};

/// The requested size of a pipe: a large pipe needs fewer context switches. The kernel may grant less
/// (`/proc/sys/fs/pipe-max-size`).
const PIPE: usize = 1 << 20;

/// Maximum bytes of a state unless [`BackEnd::with_limit`] sets another limit: 4 GiB.
pub const DEFAULT_LIMIT: u64 = 4 << 30;

/// A back-end whose state can be moved. Clones are the same back-end.
#[derive(Clone)]
pub struct BackEnd {
    name: Arc<str>,
    frontend: Frontend,
    /// A second descriptor of the connection, to detect that it broke and to shut it down while a call has locked
    /// `frontend`.
    socket: Arc<OwnedFd>,
    limit: u64,
}

impl BackEnd {
    /// Makes a back-end that errors call `name`. `negotiated` are the protocol features that the monitor has set
    /// (`SET_PROTOCOL_FEATURES`): a missing feature is reported here, long before the guest is paused.
    ///
    /// # Errors
    /// [`Error::NotNegotiated`] without `DEVICE_STATE`, [`Error::Io`] if no file descriptor is available.
    pub fn new(name: &str, frontend: &Frontend, negotiated: VhostUserProtocolFeatures) -> Result<Self, Error> {
        if !negotiated.contains(VhostUserProtocolFeatures::DEVICE_STATE) {
            return Err(Error::NotNegotiated { back_end: name.into() });
        }
        // SAFETY: `frontend` is borrowed, so its connection stays open during this call, and the result is a descriptor
        // of our own.
        let socket = unsafe { BorrowedFd::borrow_raw(frontend.as_raw_fd()) }.try_clone_to_owned();
        let socket = socket.map_err(|source| Error::Io { back_end: name.into(), step: Step::Prepare, source })?;
        Ok(BackEnd { name: name.into(), frontend: frontend.clone(), socket: socket.into(), limit: DEFAULT_LIMIT })
    }

    /// Replaces [`DEFAULT_LIMIT`] as the maximum bytes of a state, in both directions.
    #[must_use]
    pub fn with_limit(self, limit: u64) -> Self {
        BackEnd { limit, ..self }
    }

    /// Asks the back-end of a suspended device to write its state.
    ///
    /// # Errors
    /// [`Error`], also when `deadline` passes first.
    pub fn save(&self, deadline: Instant) -> Result<Saver, Error> {
        let (ours, theirs) = self.pipe()?;
        let pipe = self.hand_over(Direction::SAVE, Step::AskToSave, ours, theirs, deadline)?;
        Ok(Saver { back_end: self.clone(), pipe, bytes: 0, ended: false })
    }

    /// Asks the back-end of a suspended device to read a state.
    ///
    /// # Errors
    /// [`Error`], also when `deadline` passes first.
    pub fn load(&self, deadline: Instant) -> Result<Loader, Error> {
        let (theirs, ours) = self.pipe()?;
        let pipe = self.hand_over(Direction::LOAD, Step::AskToLoad, ours, theirs, deadline)?;
        Ok(Loader { back_end: self.clone(), pipe, bytes: 0 })
    }

    /// Makes a pipe, reading end first.
    fn pipe(&self) -> Result<(OwnedFd, OwnedFd), Error> {
        let ends = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|error| self.io(Step::Prepare, error))?;
        // Only for speed: a user that exceeds the quota of pipe memory gets the kernel's default size.
        let _ = rustix::pipe::fcntl_setpipe_size(&ends.0, PIPE);
        Ok(ends)
    }

    /// Sends `SET_DEVICE_STATE_FD`; returns our end. A back-end may reply with a channel of its own, which then
    /// replaces the pipe. The call closes our copy of the back-end's end: the state ends when the last copy is closed.
    fn hand_over(
        &self,
        direction: Direction,
        step: Step,
        ours: OwnedFd,
        theirs: OwnedFd,
        deadline: Instant,
    ) -> Result<OwnedFd, Error> {
        let given = control::set_device_state_fd(self, direction, step, theirs, deadline)?;
        let ours = given.map_or(ours, File::into);
        let set = |()| rustix::fs::fcntl_setfl(&ours, rustix::fs::fcntl_getfl(&ours)? | OFlags::NONBLOCK);
        // The crate `vhost` receives a descriptor from the socket without this flag.
        rustix::io::fcntl_setfd(&ours, FdFlags::CLOEXEC)
            .and_then(set)
            .map_err(|error| self.io(Step::Prepare, error))?;
        Ok(ours)
    }

    /// Waits until the pipe can be read or written.
    fn wait(&self, pipe: &OwnedFd, ready: PollFlags, step: Step, deadline: Instant) -> Result<(), Error> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up by the kernel; a timeout beyond its range means none.
            let timeout = Timespec::try_from(left).ok();
            let mut watched = [
                PollFd::from_borrowed_fd(pipe.as_fd(), ready),
                PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::RDHUP),
            ];
            match poll(&mut watched, timeout.as_ref()) {
                Ok(0) => return Err(Error::Deadline { back_end: self.name(), step, disconnected: false }),
                // The pipe first: bytes that the back-end wrote before it ended must still be read.
                Ok(_) if !watched[0].revents().is_empty() => return Ok(()),
                Ok(_) => return Err(Error::Gone { back_end: self.name(), step }),
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.io(step, error)),
            }
        }
    }

    /// Counts moved bytes, and enforces the limit.
    fn count(&self, bytes: &mut u64, more: usize) -> Result<(), Error> {
        *bytes = bytes.saturating_add(more as u64);
        if *bytes > self.limit {
            return Err(Error::TooLarge { back_end: self.name(), limit: self.limit });
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.name.as_ref().into()
    }

    fn io(&self, step: Step, error: Errno) -> Error {
        Error::Io { back_end: self.name(), step, source: error.into() }
    }
}

/// Saves a back-end's state, from one thread or several in succession.
///
/// Dropping it abandons the state: the back-end finds its pipe closed, the connection stays, and the device continues
/// when its vrings are started.
pub struct Saver {
    back_end: BackEnd,
    pipe: OwnedFd,
    bytes: u64,
    ended: bool,
}

impl Saver {
    /// Reads the next piece into `buffer`: the available bytes, at least one, or 0 at the end of the state.
    ///
    /// # Errors
    /// [`Error`], also when `deadline` passes with nothing to read. The bytes read so far are then useless.
    pub fn read(&mut self, buffer: &mut [u8], deadline: Instant) -> Result<usize, Error> {
        if self.ended || buffer.is_empty() {
            return Ok(0);
        }
        loop {
            match rustix::io::read(&self.pipe, &mut *buffer) {
                Ok(0) => {
                    self.ended = true;
                    return Ok(0);
                }
                Ok(read) => {
                    self.back_end.count(&mut self.bytes, read)?;
                    return Ok(read);
                }
                Err(Errno::AGAIN) => self.back_end.wait(&self.pipe, PollFlags::IN, Step::Read, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.back_end.io(Step::Read, error)),
            }
        }
    }

    /// Asks the back-end, after the end of the state, whether the state is complete, and returns its length. Only then
    /// may it be loaded elsewhere.
    ///
    /// # Errors
    /// [`Error::Unfinished`] before the end was read, else [`Error`] from the back-end's reply, or when `deadline`
    /// passes first.
    pub fn finish(self, deadline: Instant) -> Result<u64, Error> {
        let Saver { back_end, pipe, bytes, ended } = self;
        if !ended {
            return Err(Error::Unfinished { back_end: back_end.name() });
        }
        drop(pipe);
        control::check_device_state(&back_end, Step::CheckSaved, deadline)?;
        Ok(bytes)
    }
}

/// Loads a back-end's state, from one thread or several in succession.
///
/// If it is dropped before [`Loader::finish`], the back-end has a part of a state and may consider it complete: its
/// vrings must not be started.
pub struct Loader {
    back_end: BackEnd,
    pipe: OwnedFd,
    bytes: u64,
}

impl Loader {
    /// Writes the next piece, all of it; pieces of any size, in the order in which they were read.
    ///
    /// # Errors
    /// [`Error`], also when `deadline` passes before the back-end has read all. If it stops reading, it is asked for
    /// the reason.
    pub fn write(&mut self, mut piece: &[u8], deadline: Instant) -> Result<(), Error> {
        self.back_end.count(&mut self.bytes, piece.len())?;
        while !piece.is_empty() {
            match rustix::io::write(&self.pipe, piece) {
                Ok(written) => piece = &piece[written..],
                Err(Errno::AGAIN) => self.back_end.wait(&self.pipe, PollFlags::OUT, Step::Write, deadline)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE) => {
                    control::check_device_state(&self.back_end, Step::Write, deadline)?;
                    return Err(Error::StoppedReading { back_end: self.back_end.name() });
                }
                Err(error) => return Err(self.back_end.io(Step::Write, error)),
            }
        }
        Ok(())
    }

    /// Ends the state, asks the back-end whether it has loaded it, and returns its length. Only then may its vrings be
    /// started.
    ///
    /// # Errors
    /// [`Error`] from the back-end's reply, or when `deadline` passes first.
    pub fn finish(self, deadline: Instant) -> Result<u64, Error> {
        let Loader { back_end, pipe, bytes } = self;
        drop(pipe);
        control::check_device_state(&back_end, Step::CheckLoaded, deadline)?;
        Ok(bytes)
    }
}
