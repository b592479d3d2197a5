//! The source of one device's state.

use std::io;

use super::control::{Control, uninterrupted};
use super::device::{Data, Device, Flags, PrecopyInfo, State};
use super::error::VfioError;

/// The result of [`Saver::read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// This many bytes, at the beginning of the buffer.
    Bytes(usize),
    /// No bytes now: the device runs, and its available state was read, or as much of it as may be read ahead.
    NothingNow,
    /// The end of the state. Only after [`Saver::stop`].
    End,
}

/// Estimates of the state that is left to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remaining {
    /// State to read before the device is stopped; 0 where nothing can be read ahead. `None` if the device does not
    /// report it (vfio-user).
    pub ahead: Option<PrecopyInfo>,
    /// Bytes to read once the device is stopped. `None` if the device does not report it (the kernel before Linux 6.2,
    /// vfio-user).
    pub stopped: Option<u64>,
}

/// Reads the state of one device: ahead while the guest runs, if the device supports that, and the rest when it is
/// stopped.
///
/// Order: [`begin`](Self::begin), `read` any number of times, [`quiesce`](Self::quiesce), [`stop`](Self::stop), `read`
/// until [`Chunk::End`], [`finish`](Self::finish); or [`abort`](Self::abort) anywhere. For several devices use
/// [`stop_together`](super::stop_together) for `quiesce` and `stop`, and [`abort_together`](super::abort_together) for
/// `abort`.
///
/// Dropping it leaves the device in its state, possibly stopped: this type does not decide to which host the guest
/// belongs.
#[derive(Debug)]
pub struct Saver<D: Device> {
    control: Control<D>,
    data: Option<D::Data>,
    /// Bytes that may still be read while the device runs.
    ahead: u64,
    read: u64,
    ended: bool,
    failed: bool,
}

impl<D: Device> Saver<D> {
    /// Makes a saver for a device in RUNNING. `name` is for messages.
    pub fn new(device: D, name: impl Into<String>) -> Result<Self, VfioError> {
        let control = Control::new(device, name.into())?;
        Ok(Self { control, data: None, ahead: 0, read: 0, ended: false, failed: false })
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.control.name
    }

    /// Returns what the device supports.
    pub fn flags(&self) -> Flags {
        self.control.flags
    }

    /// Returns the state that it is known to be in; `None` after a failure that the kernel did not explain.
    pub fn state(&self) -> Option<State> {
        self.control.state
    }

    /// Returns the bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Starts reading ahead if the device supports that, and returns whether it does. At most `ahead` bytes are read
    /// before the device is stopped, so that a device whose state changes faster than the network does not fill it for
    /// ever.
    pub fn begin(&mut self, ahead: u64) -> Result<bool, VfioError> {
        if self.control.state != Some(State::Running) || self.data.is_some() {
            return Err(self.control.order("begin", "begun already"));
        }
        self.ahead = ahead;
        if !State::PreCopy.offered(self.control.flags) {
            return Ok(false);
        }
        self.data = Some(self.control.go_for_stream(State::PreCopy)?);
        Ok(true)
    }

    /// Returns whether it is being read ahead, and more may be read.
    pub(crate) fn may_read_ahead(&self) -> bool {
        self.data.is_some() && self.ahead > 0 && !self.failed && self.control.state.is_some_and(State::runs)
    }

    /// Returns the device's estimate of the state left to read.
    pub fn remaining(&self) -> Result<Remaining, VfioError> {
        let failed = |source| VfioError::Size { device: self.control.name.clone(), source };
        let ahead = match (&self.data, self.control.state) {
            (Some(data), Some(State::PreCopy | State::PreCopyP2p)) => supported(data.precopy_info()),
            _ => Ok(Some(PrecopyInfo::default())),
        };
        let stopped = supported(self.control.device.data_size());
        Ok(Remaining { ahead: ahead.map_err(failed)?, stopped: stopped.map_err(failed)? })
    }

    /// Reads the next part of the state to the beginning of `buffer`. An empty buffer gets nothing.
    ///
    /// Waits for the device where its driver does; not for a device that has nothing now.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<Chunk, VfioError> {
        if self.failed {
            return Err(self.control.order("read", "failed; abort it"));
        }
        let ahead = match self.control.state {
            Some(State::StopCopy) => false,
            Some(state) if state.runs() => true,
            _ => return Err(self.control.order("read", "not being saved")),
        };
        if self.ended {
            return Ok(Chunk::End);
        }
        let Some(data) = &mut self.data else {
            return Ok(Chunk::NothingNow);
        };
        let most = if ahead { usize::try_from(self.ahead).unwrap_or(usize::MAX) } else { usize::MAX };
        let length = buffer.len().min(most);
        let buffer = &mut buffer[..length];
        if buffer.is_empty() {
            // Not read: a result of 0 would look like the end.
            return Ok(if most == 0 { Chunk::NothingNow } else { Chunk::Bytes(0) });
        }
        match uninterrupted(|| data.read(buffer)) {
            // The end comes only in STOP_COPY; before, `mtty`, the kernel's sample driver, returns 0 instead of
            // `ENOMSG`.
            Ok(0) if ahead => Ok(Chunk::NothingNow),
            Ok(0) => {
                self.ended = true;
                Ok(Chunk::End)
            }
            Ok(bytes) => {
                self.read += bytes as u64;
                if ahead {
                    self.ahead -= bytes as u64;
                }
                Ok(Chunk::Bytes(bytes))
            }
            Err(error) if ahead && error.raw_os_error() == Some(libc::ENOMSG) => Ok(Chunk::NothingNow),
            Err(source) => {
                self.failed = true;
                Err(VfioError::Read { device: self.control.name.clone(), after: self.read, source })
            }
        }
    }

    /// Stops the device's writes to other devices; it continues to run. Does nothing if the device does not support
    /// that. The guest's CPUs must have stopped: from here on no CPU may access the device.
    pub fn quiesce(&mut self) -> Result<(), VfioError> {
        let to = match self.control.state {
            Some(State::Running) => State::RunningP2p,
            Some(State::PreCopy) => State::PreCopyP2p,
            Some(State::RunningP2p | State::PreCopyP2p) => return Ok(()),
            _ => return Err(self.control.order("quiesce", "not running")),
        };
        if !to.offered(self.control.flags) {
            return Ok(());
        }
        self.control.go_without_stream(to)
    }

    /// Stops the device. Then the rest of its state can be read. The guest's CPUs must have stopped.
    pub fn stop(&mut self) -> Result<(), VfioError> {
        if self.failed {
            return Err(self.control.order("stop", "failed; abort it"));
        }
        if !self.control.state.is_some_and(State::runs) {
            return Err(self.control.order("stop", "not running"));
        }
        if self.data.is_some() {
            // PRE_COPY and STOP_COPY share one stream.
            self.control.go_without_stream(State::StopCopy)
        } else {
            self.data = Some(self.control.go_for_stream(State::StopCopy)?);
            Ok(())
        }
    }

    /// Ends saving, after [`Chunk::End`]. The device stays stopped, with its state: [`abort`](Self::abort) can still
    /// run it again.
    pub fn finish(&mut self) -> Result<(), VfioError> {
        if !self.ended || self.failed || self.control.state != Some(State::StopCopy) {
            return Err(self.control.order("finish", "not read to its end"));
        }
        self.control.go_without_stream(State::Stop)?;
        self.data = None;
        Ok(())
    }

    /// Does the first half of aborting, for several devices: a stopped device runs again, but does not write to others
    /// yet. Does nothing if the device does not support that.
    pub fn abort_quiesced(&mut self) -> Result<(), VfioError> {
        if !self.control.flags.p2p() || self.control.state.is_some_and(|state| self.is_aborted(state)) {
            return Ok(());
        }
        self.control.insist(State::RunningP2p)
    }

    /// Returns whether `abort` would do nothing.
    fn is_aborted(&self, state: State) -> bool {
        state == State::Running && self.data.is_none()
    }

    /// Aborts saving: the device runs again with its state, and the bytes read are useless. It may be called
    /// repeatedly.
    ///
    /// [`VfioError::NeedsReset`]: the device has failed, which `abort` cannot mend. [`reset`](Self::reset) revives it
    /// without its state; the caller decides on that, since the guest must be notified.
    pub fn abort(&mut self) -> Result<(), VfioError> {
        self.control.insist(State::Running)?;
        self.data = None;
        self.ended = false;
        self.failed = false;
        self.read = 0;
        Ok(())
    }

    /// Resets the device: it runs, and has lost all state.
    pub fn reset(&mut self) -> Result<(), VfioError> {
        self.control.reset()?;
        self.abort()
    }
}

/// Returns none if the device does not support the query.
fn supported<T>(answer: io::Result<T>) -> io::Result<Option<T>> {
    match answer {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Ok(None),
        answer => answer.map(Some),
    }
}
