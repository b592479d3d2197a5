//! The destination of one device's state.

use std::io;

use super::control::{Control, uninterrupted};
use super::device::{Data, Device, Flags, State};
use super::error::VfioError;

/// Loads the state of one device.
///
/// Order: [`begin`](Self::begin), [`write`](Self::write) of everything that the source's [`Saver`](super::Saver) gave, in its
/// order (how it is divided does not count), [`finish`](Self::finish), and when the guest belongs here,
/// [`run_quiesced`](Self::run_quiesced) and [`run`](Self::run), with several devices by
/// [`run_together`](super::run_together). Until it runs, [`abort`](Self::abort) empties the device.
///
/// One dropped halfway leaves its device as it is.
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
    /// For a device in RUNNING, as it is after it was opened. `name` is for messages.
    pub fn new(device: D, name: impl Into<String>) -> Result<Self, VfioError> {
        let control = Control::new(device, name.into())?;
        Ok(Self { control, data: None, written: 0, phase: Phase::New })
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

    /// Bytes loaded so far.
    pub fn bytes_written(&self) -> u64 {
        self.written
    }

    /// Whether it runs for the guest: [`run`](Self::run) has succeeded.
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Makes the device ready to take a state; what it had is gone.
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
                Ok(taken @ 1..) => {
                    bytes = &bytes[taken..];
                    self.written += taken as u64;
                    continue;
                }
                // Again and again would be for ever.
                Ok(0) => io::ErrorKind::WriteZero.into(),
                Err(error) => error,
            };
            self.phase = Phase::Failed;
            return Err(VfioError::Write { device: self.control.name.clone(), after: self.written, source: error });
        }
        Ok(())
    }

    /// Everything was written: the device checks it and takes it over. It stays stopped.
    ///
    /// After an error the state was not complete, not for this device, or the device has failed: [`abort`](Self::abort).
    pub fn finish(&mut self) -> Result<(), VfioError> {
        self.expect(Phase::Loading, "finish", "not loading")?;
        self.or_fail(|control| control.go_without_stream(State::Stop))?;
        self.data = None;
        self.phase = Phase::Loaded;
        Ok(())
    }

    /// The first half of running, for several devices: it runs, but does not write to others yet. Does nothing where the
    /// device cannot do that.
    pub fn run_quiesced(&mut self) -> Result<(), VfioError> {
        self.expect(Phase::Loaded, "run_quiesced", "not loaded, or runs already")?;
        if self.control.flags.p2p() { self.control.insist(State::RunningP2p) } else { Ok(()) }
    }

    /// The device runs with what was loaded. Only when the guest belongs here: there is no way back.
    ///
    /// After an error it can be called again, unless the device has failed ([`VfioError::NeedsReset`]).
    pub fn run(&mut self) -> Result<(), VfioError> {
        self.expect(Phase::Loaded, "run", "not loaded, or runs already")?;
        self.control.insist(State::Running)?;
        self.phase = Phase::Running;
        Ok(())
    }

    /// Gives up: the device is reset, which is the only way out of loading. It is in RUNNING then, as when it was opened, and
    /// has nothing to run with.
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
