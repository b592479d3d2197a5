//! The common part of source and destination: a device, its name, and its known state.

use std::io;

use super::device::{Device, Flags, State};
use super::error::VfioError;

/// Maximum number of attempts to make a device run again. The header leaves open which state the device is in after an
/// error; RUNNING can be reached from each possible state.
const MAX_ATTEMPTS: usize = 3;

#[derive(Debug)]
pub(super) struct Control<D> {
    pub(super) device: D,
    pub(super) name: String,
    pub(super) flags: Flags,
    /// `None` if a change failed, and the kernel does not report in which state it left the device.
    pub(super) state: Option<State>,
}

impl<D: Device> Control<D> {
    /// Queries what the device supports. It must be in RUNNING: another program may be migrating it otherwise.
    pub(super) fn new(device: D, name: String) -> Result<Self, VfioError> {
        let flags = device.migration().map_err(|source| VfioError::NoMigration { device: name.clone(), source })?;
        if !flags.stop_copy() {
            return Err(VfioError::Unsupported { device: name, flags });
        }
        let state = device.state().map_err(|source| VfioError::NoMigration { device: name.clone(), source })?;
        if state != State::Running {
            return Err(VfioError::Busy { device: name, state });
        }
        Ok(Self { device, name, flags, state: Some(state) })
    }

    pub(super) fn go(&mut self, to: State) -> Result<Option<D::Data>, VfioError> {
        let from = self.state;
        match self.device.set_state(to) {
            Ok(stream) => {
                self.state = Some(to);
                Ok(stream)
            }
            Err(source) => {
                self.state = self.device.state().ok();
                Err(VfioError::Transition { device: self.name.clone(), from, to, now: self.state, source })
            }
        }
    }

    /// As `go`, to a state with a stream.
    pub(super) fn go_for_stream(&mut self, to: State) -> Result<D::Data, VfioError> {
        let stream = self.go(to)?;
        stream.ok_or_else(|| self.stream_error(to, "no stream"))
    }

    /// As `go`, to a state without one.
    pub(super) fn go_without_stream(&mut self, to: State) -> Result<(), VfioError> {
        match self.go(to)? {
            None => Ok(()),
            Some(_) => Err(self.stream_error(to, "a stream that was not requested")),
        }
    }

    fn stream_error(&self, to: State, problem: &'static str) -> VfioError {
        VfioError::Stream { device: self.name.clone(), to, problem }
    }

    /// As `go_without_stream`, but retries. A device in ERROR is left there.
    pub(super) fn insist(&mut self, to: State) -> Result<(), VfioError> {
        let mut attempt = 1;
        loop {
            if self.state.is_none() {
                self.state = self.device.state().ok();
            }
            if self.state == Some(State::Error) {
                return Err(VfioError::NeedsReset { device: self.name.clone() });
            }
            if self.state == Some(to) {
                return Ok(());
            }
            match self.go_without_stream(to) {
                Err(VfioError::Transition { .. }) if attempt < MAX_ATTEMPTS => attempt += 1,
                Err(VfioError::Transition { now: Some(State::Error), .. }) => {
                    return Err(VfioError::NeedsReset { device: self.name.clone() });
                }
                other => return other,
            }
        }
    }

    pub(super) fn reset(&mut self) -> Result<(), VfioError> {
        self.device.reset().map_err(|source| VfioError::Reset { device: self.name.clone(), source })?;
        self.state = Some(State::Running);
        Ok(())
    }

    pub(super) fn order(&self, call: &'static str, phase: &'static str) -> VfioError {
        VfioError::Order { device: self.name.clone(), call, phase }
    }
}

/// Repeats `call` if a signal interrupted it.
pub(super) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
