//! The destination of one device's state.

use std::io;

use super::control::{Control, uninterrupted};
use super::device::{Data, Device, Flags, State};
use super::error::VfioError;

/// Loads the state of one device.
///
/// Order: [`begin`](Self::begin), [`write`](Self::write) of all bytes that the source's [`Saver`](super::Saver) has
/// read, in order (in pieces of any size), [`finish`](Self::finish), and when the guest belongs to this host,
/// [`run_quiesced`](Self::run_quiesced) and [`run`](Self::run), for several devices by
/// [`run_together`](super::run_together). Until it runs, [`abort`](Self::abort) empties the device.
///
/// Dropping it leaves the device in its state.
#[derive(Debug)]
pub struct Loader<D: Device> {
    control: Control<D>,
    data: Option<D::Data>,
    written: u64,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    New,
    Loading,
    Loaded,
    Running,
    Failed,
}

impl<D: Device> Loader<D> {
    /// Makes a loader for a device in RUNNING, as it is after it was opened. `name` is for messages.
    pub fn new(device: D, name: impl Into<String>) -> Result<Self, VfioError> {
        let control = Control::new(device, name.into())?;
        Ok(Self { control, data: None, written: 0, phase: Phase::New })
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

    /// Returns the bytes loaded so far.
    pub fn bytes_written(&self) -> u64 {
        self.written
    }

    /// Returns whether it runs for the guest: [`run`](Self::run) has succeeded.
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Prepares the device for loading a state; its content is lost.
    pub fn begin(&mut self) -> Result<(), VfioError> {
        self.expect(Phase::New, "begin", "begun already")?;
        self.data = Some(self.or_fail(|control| control.go_for_stream(State::Resuming))?);
        self.phase = Phase::Loading;
        Ok(())
    }

    /// Loads the next bytes, all of them. Waits for the device where its driver does.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), VfioError> {
        self.expect(Phase::Loading, "write", "not loading")?;
        let Some(data) = &mut self.data else {
            return Err(self.control.order("write", "not loading"));
        };
        while !bytes.is_empty() {
            let error = match uninterrupted(|| data.write(bytes)) {
                Ok(accepted @ 1..) => {
                    bytes = &bytes[accepted..];
                    self.written += accepted as u64;
                    continue;
                }
                // Retrying would never end.
                Ok(0) => io::ErrorKind::WriteZero.into(),
                Err(error) => error,
            };
            self.phase = Phase::Failed;
            return Err(VfioError::Write { device: self.control.name.clone(), after: self.written, source: error });
        }
        Ok(())
    }

    /// Completes loading: the device checks the state and adopts it. It stays stopped.
    ///
    /// After an error the state was incomplete, or not for this device, or the device has failed: call
    /// [`abort`](Self::abort).
    pub fn finish(&mut self) -> Result<(), VfioError> {
        self.expect(Phase::Loading, "finish", "not loading")?;
        self.or_fail(|control| control.go_without_stream(State::Stop))?;
        self.data = None;
        self.phase = Phase::Loaded;
        Ok(())
    }

    /// Does the first half of running, for several devices: the device runs, but does not write to others yet. Does
    /// nothing if the device does not support that.
    pub fn run_quiesced(&mut self) -> Result<(), VfioError> {
        self.expect(Phase::Loaded, "run_quiesced", "not loaded, or runs already")?;
        if self.control.flags.p2p() { self.control.insist(State::RunningP2p) } else { Ok(()) }
    }

    /// Runs the device with the loaded state. Only when the guest belongs to this host: this cannot be undone.
    ///
    /// After an error it can be called again, unless the device has failed ([`VfioError::NeedsReset`]).
    pub fn run(&mut self) -> Result<(), VfioError> {
        self.expect(Phase::Loaded, "run", "not loaded, or runs already")?;
        self.control.insist(State::Running)?;
        self.phase = Phase::Running;
        Ok(())
    }

    /// Aborts loading: resets the device, the only transition out of loading. It is in RUNNING then, as after opening,
    /// with no state.
    pub fn abort(&mut self) -> Result<(), VfioError> {
        match self.phase {
            Phase::New => return Ok(()),
            Phase::Running => return Err(self.control.order("abort", "running for the guest")),
            Phase::Loading | Phase::Loaded | Phase::Failed => self.phase = Phase::Failed,
        }
        self.control.reset()?;
        self.data = None;
        self.written = 0;
        self.phase = Phase::New;
        Ok(())
    }

    fn or_fail<T>(&mut self, act: impl FnOnce(&mut Control<D>) -> Result<T, VfioError>) -> Result<T, VfioError> {
        act(&mut self.control).inspect_err(|_| self.phase = Phase::Failed)
    }

    fn expect(&self, phase: Phase, call: &'static str, otherwise: &'static str) -> Result<(), VfioError> {
        match self.phase {
            now if now == phase => Ok(()),
            Phase::Failed => Err(self.control.order(call, "failed; abort it")),
            _ => Err(self.control.order(call, otherwise)),
        }
    }
}
