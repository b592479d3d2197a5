//! The source of one device's state.

use std::io;

use super::control::{Control, uninterrupted};
use super::device::{Data, Device, Flags, PrecopyInfo, State};
use super::error::VfioError;

/// What [`Saver::read`] gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// So many bytes, at the beginning of the buffer.
    Bytes(usize),
    /// Nothing now: the device runs, and what it had was read, or as much of it as may be read ahead.
    NothingNow,
    /// This was all. Only after [`Saver::stop`].
    End,
}

/// What is left to read. Estimates, all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remaining {
    /// What there is to read before the device is stopped; 0 where nothing can be read ahead. `None`: the device does not say (vfio-user).
    pub ahead: Option<PrecopyInfo>,
    /// Bytes to read once the device is stopped. `None`: the device does not say (the kernel before Linux 6.2, vfio-user).
    pub stopped: Option<u64>,
}

/// Reads the state of one device: ahead while the guest runs, where the device offers that, and the rest when it is stopped.
///
/// Order: [`begin`](Self::begin), `read` as often as one likes, [`quiesce`](Self::quiesce), [`stop`](Self::stop), `read` until
/// [`Chunk::End`], [`finish`](Self::finish); or [`abort`](Self::abort) anywhere. With several devices, `quiesce` and `stop`
/// are [`stop_together`](super::stop_together), and `abort` is [`abort_together`](super::abort_together).
///
/// One dropped halfway leaves its device as it is, so also stopped: to whom the guest belongs is not decided here.
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
    /// For a device in RUNNING. `name` is for messages.
    pub fn new(device: D, name: impl Into<String>) -> Result<Self, VfioError> {
        let control = Control::new(device, name.into())?;
        Ok(Self { control, data: None, ahead: 0, read: 0, ended: false, failed: false })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.control.name
    }

    /// What the device offers.
    pub fn flags(&self) -> Flags {
        self.control.flags
    }

    /// The state it is known to be in; `None` after a failure that the kernel did not explain.
    pub fn state(&self) -> Option<State> {
        self.control.state
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Makes ready to read ahead where the device offers that, and says whether it does. At most `ahead` bytes come before
    /// the device is stopped, so that one whose state changes faster than the network does not fill it for ever.
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

    /// Whether it is being read ahead, and more may be.
    pub(crate) fn may_read_ahead(&self) -> bool {
        self.data.is_some() && self.ahead > 0 && !self.failed && self.control.state.is_some_and(State::runs)
    }

    /// What is left to read, as the device estimates it.
    pub fn remaining(&self) -> Result<Remaining, VfioError> {
        let failed = |source| VfioError::Size { device: self.control.name.clone(), source };
        let ahead = match (&self.data, self.control.state) {
            (Some(data), Some(State::PreCopy | State::PreCopyP2p)) => told(data.precopy_info()),
            _ => Ok(Some(PrecopyInfo::default())),
        };
        let stopped = told(self.control.device.data_size());
        Ok(Remaining { ahead: ahead.map_err(failed)?, stopped: stopped.map_err(failed)? })
    }

    /// Reads what comes next of the state to the beginning of `buffer`. An empty one gets nothing.
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
            // Not asked for: an answer of 0 would look like the end.
            return Ok(if most == 0 { Chunk::NothingNow } else { Chunk::Bytes(0) });
        }
        match uninterrupted(|| data.read(buffer)) {
            // The end is only in STOP_COPY; `mtty`, the kernel's sample driver, says 0 instead of `ENOMSG` before.
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

    /// Keeps the device from writing to other devices; it runs on. Does nothing where the device cannot. The guest's CPUs must
    /// have stopped: from here on nobody may touch the device.
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

    /// Stops the device. Then all the rest of its state can be read. The guest's CPUs must have stopped.
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

    /// Ends saving, after [`Chunk::End`]. The device stays stopped, with its state: [`abort`](Self::abort) still has it run
    /// again.
    pub fn finish(&mut self) -> Result<(), VfioError> {
        if !self.ended || self.failed || self.control.state != Some(State::StopCopy) {
            return Err(self.control.order("finish", "not read to its end"));
        }
        self.control.go_without_stream(State::Stop)?;
        self.data = None;
        Ok(())
    }

    /// The first half of giving up, for several devices: a stopped one runs again, but does not write to others yet. Does
    /// nothing where the device cannot do that.
    pub fn abort_quiesced(&mut self) -> Result<(), VfioError> {
        if !self.control.flags.p2p() || self.control.state.is_some_and(|state| self.given_up(state)) {
            return Ok(());
        }
        self.control.insist(State::RunningP2p)
    }

    /// Whether `abort` would do nothing.
    fn given_up(&self, state: State) -> bool {
        state == State::Running && self.data.is_none()
    }

    /// Gives up: the device runs again with the state that it has, and what was read is worth nothing. Any number of times.
    ///
    /// [`VfioError::NeedsReset`]: the device has failed, and this did not. [`reset`](Self::reset) brings it back without its
    /// state; that is the caller's decision, since the guest has to be told.
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

/// None where this is nothing that a device can be asked.
fn told<T>(answer: io::Result<T>) -> io::Result<Option<T>> {
    match answer {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Ok(None),
        answer => answer.map(Some),
    }
}
