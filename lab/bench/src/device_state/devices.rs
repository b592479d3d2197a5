//! Devices that save and load state at a rate, or as fast as memory can be copied; and a monitor whose guest does
//! nothing.

use std::io::{BufRead, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sterna_engine::device_state::{DeviceId, LoadDevice, SaveDevice};
use sterna_engine::vmm::{DestinationVmm, ResumeReason, SourceVmm, VmmError};

/// Bytes that a device saves or loads in one call.
const AT_ONCE: usize = 256 << 10;

/// Bytes per second; none: no limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace(pub(super) Option<u64>);

impl Pace {
    /// Waits until `bytes` may have passed since `begun`.
    fn wait(self, begun: Instant, bytes: u64) {
        let Some(rate) = self.0 else { return };
        let due = begun + Duration::from_secs_f64(bytes as f64 / rate as f64);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
}

pub(super) fn id(number: usize) -> DeviceId {
    DeviceId::new("device", number as u32)
}

/// The memory of all devices, on both sides.
pub(super) struct Memories {
    /// The same for all devices, because it is only read.
    source: Arc<Vec<u8>>,
    destinations: Vec<Arc<Mutex<Vec<u8>>>>,
}

impl Memories {
    pub(super) fn new(devices: usize, bytes: u64) -> Self {
        let word = |at: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        let source: Vec<u8> = (0..bytes / 8).flat_map(word).collect();
        let memory = |_| Arc::new(Mutex::new(vec![1; bytes as usize]));
        Self { source: Arc::new(source), destinations: (0..devices).map(memory).collect() }
    }

    pub(super) fn source(&self, _device: usize, bytes: u64) -> &[u8] {
        &self.source[..bytes as usize]
    }

    /// Calls `take` with the memory of a device of the destination.
    pub(super) fn with_destination<R>(&self, device: usize, bytes: u64, take: impl FnOnce(&mut [u8]) -> R) -> R {
        take(&mut self.destinations[device].lock().unwrap_or_else(PoisonError::into_inner)[..bytes as usize])
    }

    pub(super) fn giver(&self, _device: usize, bytes: u64, pace: Pace) -> Box<dyn SaveDevice> {
        Box::new(Giver { memory: Arc::clone(&self.source), bytes, pace })
    }

    pub(super) fn taker(&self, device: usize, bytes: u64, pace: Pace, stall: Duration) -> Box<dyn LoadDevice> {
        Box::new(Taker { memory: Arc::clone(&self.destinations[device]), bytes, pace, stall })
    }
}

struct Giver {
    memory: Arc<Vec<u8>>,
    bytes: u64,
    pace: Pace,
}

impl SaveDevice for Giver {
    fn remaining(&mut self) -> u64 {
        self.bytes
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        let begun = Instant::now();
        let mut given = 0;
        for chunk in self.memory[..self.bytes as usize].chunks(AT_ONCE) {
            given += chunk.len() as u64;
            self.pace.wait(begun, given);
            state.write_all(chunk)?;
        }
        Ok(())
    }

    fn saving_ended(&mut self) {}
}

struct Taker {
    memory: Arc<Mutex<Vec<u8>>>,
    bytes: u64,
    pace: Pace,
    stall: Duration,
}

impl LoadDevice for Taker {
    fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError> {
        std::thread::sleep(self.stall);
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        let mut taken = 0;
        for chunk in memory[..self.bytes as usize].chunks_mut(AT_ONCE) {
            state.read_exact(chunk)?;
            taken += chunk.len() as u64;
            self.pace.wait(begun, taken);
        }
        Ok(())
    }
}

/// A monitor whose guest does nothing.
pub(super) struct Idle;

impl SourceVmm for Idle {
    fn name(&self) -> String {
        "idle".into()
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    fn resume(&mut self, _: ResumeReason) -> Result<(), VmmError> {
        Ok(())
    }

    fn save(&mut self, _: &mut dyn Write) -> Result<(), VmmError> {
        Ok(())
    }
}

impl DestinationVmm for Idle {
    fn name(&self) -> String {
        "idle".into()
    }

    fn load(&mut self, _: &mut dyn Read) -> Result<(), VmmError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        Ok(())
    }
}
