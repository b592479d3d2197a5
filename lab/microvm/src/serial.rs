//! Serial ports: a 16550A for each vCPU. All their lines go to one output, each in one piece. They have no interrupt, because
//! the guest uses none.

use crate::error::Error;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, SerialState, Trigger};

struct NoInterrupt;

impl Trigger for NoInterrupt {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// The output of all ports.
pub(crate) type Output = Arc<Mutex<Box<dyn Write + Send>>>;

/// Buffers a line until it is complete or has the maximum length.
struct Lines {
    line: Vec<u8>,
    output: Output,
}

impl Lines {
    const MAX_LINE_BYTES: usize = 1024;

    fn write_out(&mut self) {
        // Output without a reader is lost, as on any serial line.
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = output.write_all(&self.line).and_then(|()| output.flush());
        self.line.clear();
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.line.extend_from_slice(bytes);
        if bytes.contains(&b'\n') || self.line.len() >= Self::MAX_LINE_BYTES {
            self.write_out();
        }
        Ok(bytes.len())
    }

    /// Comes after each byte.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        // The guest may move in the middle of a line: the rest of it is printed at the destination.
        if !self.line.is_empty() {
            self.write_out();
        }
    }
}

type Device = Serial<NoInterrupt, NoEvents, Lines>;

/// The device.
pub(crate) struct SerialPort {
    device: Mutex<Device>,
}

/// The state of a port that moves. (The crate's own type cannot be serialised.)
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedSerial {
    divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    received: Vec<u8>,
}

impl SerialPort {
    pub(crate) fn new(output: &Output) -> Self {
        Self { device: Mutex::new(Serial::new(NoInterrupt, Lines { line: Vec::new(), output: Arc::clone(output) })) }
    }

    fn lock(&self) -> MutexGuard<'_, Device> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes register `register` (0 to 7).
    pub(crate) fn write(&self, register: u8, value: u8) {
        // Neither interrupt nor output can fail; in loopback mode a full buffer drops bytes, as the device does.
        let _ = self.lock().write(register, value);
    }

    /// Reads register `register` (0 to 7).
    pub(crate) fn read(&self, register: u8) -> u8 {
        self.lock().read(register)
    }

    pub(crate) fn save(&self) -> SavedSerial {
        let state = self.lock().state();
        SavedSerial {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            received: state.in_buffer,
        }
    }

    pub(crate) fn load(&self, saved: &SavedSerial) -> Result<(), Error> {
        let state = SerialState {
            baud_divisor_low: saved.divisor[0],
            baud_divisor_high: saved.divisor[1],
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: saved.received.clone(),
        };
        let mut device = self.lock();
        let lines = Lines { line: Vec::new(), output: Arc::clone(&device.writer().output) };
        *device = Serial::from_state(&state, NoInterrupt, NoEvents, lines)
            .map_err(|error| Error::State(format!("its serial port: {error:?}")))?;
        Ok(())
    }
}
