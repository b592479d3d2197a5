//! Devices for tests: every byte of their state is known, and they check that the loaded state equals the saved one.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_engine::destination::Destination;
use sterna_engine::device_state::{Ahead, DeviceId, LoadDevice, SaveDevice};
use sterna_engine::source::Source;
use sterna_engine::vmm::VmmError;

use crate::guest::Signal;

/// The state of one device, and its faults.
#[derive(Clone, Default)]
pub(crate) struct Device {
    pub(crate) name: &'static str,
    pub(crate) instance: u32,
    /// Bytes that are saved while the guest runs, in so many turns.
    pub(crate) ahead: u64,
    pub(crate) turns: u64,
    /// How many of these are saved in the first turn; 0: as many as in each.
    pub(crate) first: u64,
    /// Bytes that are saved when the guest is paused.
    pub(crate) rest: u64,
    /// How often it counts what is left, until everything that is saved ahead was saved; 0: once.
    pub(crate) overstates: u64,
    /// Signalled when saving the source's device has ended.
    pub(crate) ended: Option<Signal>,
    /// Saving or loading fails after so many bytes.
    pub(crate) save_fails: Option<u64>,
    pub(crate) load_fails: Option<u64>,
    /// Whether the failure is a panic.
    pub(crate) panics: bool,
    /// Signals for which saving ahead, and saving while the guest is paused, wait.
    pub(crate) ahead_on: Option<Signal>,
    pub(crate) saves_on: Option<Signal>,
    /// What the device does when it saves while the guest is paused, before it writes its last byte.
    pub(crate) in_save: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Signal for which loading waits after the first byte.
    pub(crate) loads_on: Option<Signal>,
    /// Signalled when the device has been loaded.
    pub(crate) loaded: Option<Signal>,
    pub(crate) seen: Arc<Seen>,
}

/// The progress of a device.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) saved: AtomicU64,
    pub(crate) loaded_bytes: AtomicU64,
    /// Maximum bytes that were saved and not loaded yet.
    pub(crate) max_waiting: AtomicU64,
    /// Whether all of the state was loaded, and equals the saved state.
    pub(crate) whole: AtomicBool,
}

impl Device {
    pub(crate) fn new(name: &'static str, instance: u32, ahead: u64, rest: u64) -> Self {
        Self { name, instance, ahead, turns: 3, rest, ..Self::default() }
    }

    pub(crate) fn id(&self) -> DeviceId {
        DeviceId::new(self.name, self.instance)
    }

    fn bytes(&self) -> u64 {
        self.ahead + self.rest
    }

    fn is_whole(&self) -> bool {
        self.seen.whole.load(Ordering::SeqCst)
    }
}

/// All devices of a guest.
#[derive(Clone, Default)]
pub(crate) struct Devices(pub(crate) Vec<Device>);

impl Devices {
    pub(crate) fn at_source(&self, source: Source) -> Source {
        let add = |source: Source, device: &Device| {
            source.device(device.id(), Box::new(TestSaver { device: device.clone(), at: 0, turns: 0 }))
        };
        self.0.iter().fold(source, add)
    }

    /// Adds the devices in another order than at the source.
    pub(crate) fn at_destination(&self, destination: Destination) -> Destination {
        let take = |destination: Destination, device: &Device| {
            destination.device(device.id(), Box::new(TestLoader(device.clone())))
        };
        self.0.iter().rev().fold(destination, take)
    }

    /// Returns the devices for a destination whose monitor makes them.
    pub(crate) fn to_load(&self) -> Vec<(DeviceId, Box<dyn LoadDevice>)> {
        let load =
            |device: &Device| -> (_, Box<dyn LoadDevice>) { (device.id(), Box::new(TestLoader(device.clone()))) };
        self.0.iter().map(load).collect()
    }

    pub(crate) fn all_whole(&self) -> bool {
        self.0.iter().all(Device::is_whole)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(Device::bytes).sum()
    }
}

/// Returns the word of eight bytes at `at` of the state of device `instance`: all words differ.
fn word(instance: u32, at: u64) -> u64 {
    (at ^ u64::from(instance) << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Fills `buffer` with the bytes from `at` on.
fn fill(instance: u32, at: u64, buffer: &mut [u8]) {
    let mut at = at;
    let mut rest = buffer;
    while !rest.is_empty() {
        let (within, word) = ((at % 8) as usize, word(instance, at / 8).to_le_bytes());
        let count = rest.len().min(8 - within);
        let (now, after) = rest.split_at_mut(count);
        now.copy_from_slice(&word[within..within + count]);
        (at, rest) = (at + count as u64, after);
    }
}

/// Returns lengths of reads and writes, all different from those of pieces.
fn length(at: u64) -> usize {
    1 + (at.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as usize % (200 << 10)
}

struct TestSaver {
    device: Device,
    at: u64,
    turns: u64,
}

impl TestSaver {
    fn write(&mut self, up_to: u64, state: &mut dyn Write) -> Result<(), VmmError> {
        let mut buffer = vec![0; 200 << 10];
        while self.at < up_to {
            if self.device.save_fails.is_some_and(|at| self.at >= at) {
                assert!(!self.device.panics, "saving was made to panic");
                return Err("saving was made to fail".into());
            }
            let length = length(self.at).min((up_to - self.at) as usize);
            fill(self.device.instance, self.at, &mut buffer[..length]);
            state.write_all(&buffer[..length])?;
            self.at += length as u64;
            let seen = &self.device.seen;
            seen.saved.store(self.at, Ordering::SeqCst);
            seen.max_waiting
                .fetch_max(self.at - seen.loaded_bytes.load(Ordering::SeqCst).min(self.at), Ordering::SeqCst);
        }
        Ok(())
    }
}

impl SaveDevice for TestSaver {
    fn save_ahead(&mut self, state: &mut dyn Write) -> Result<Ahead, VmmError> {
        self.device.ahead_on.iter().for_each(Signal::wait);
        self.turns += 1;
        let Device { ahead, turns, first, .. } = self.device;
        let up_to = match first {
            0 => ahead * self.turns.min(turns) / turns,
            first => first + (ahead - first) * (self.turns.min(turns) - 1) / (turns - 1),
        };
        self.write(up_to, state)?;
        Ok(if self.turns < self.device.turns { Ahead::Later } else { Ahead::Nothing })
    }

    fn remaining(&mut self) -> u64 {
        let all_ahead = self.turns >= self.device.turns;
        let times = if all_ahead { 1 } else { self.device.overstates.max(1) };
        (self.device.bytes() - self.at) * times
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.device.saves_on.iter().for_each(Signal::wait);
        self.write(self.device.bytes() - 1.min(self.device.rest), state)?;
        self.device.in_save.iter().for_each(|act| act());
        self.write(self.device.bytes(), state)?;
        match self.device.save_fails {
            Some(_) => Err("saving was made to fail".into()),
            None => Ok(()),
        }
    }

    fn saving_ended(&mut self) {
        (self.at, self.turns) = (0, 0);
        self.device.ended.iter().for_each(Signal::set);
    }
}

struct TestLoader(Device);

impl LoadDevice for TestLoader {
    fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError> {
        let Device { instance, seen, .. } = &self.0;
        let (mut buffer, mut expected) = (vec![0; 200 << 10], vec![0; 200 << 10]);
        let mut at = 0;
        loop {
            if self.0.load_fails.is_some_and(|fails| at >= fails) {
                assert!(!self.0.panics, "loading was made to panic");
                return Err("loading was made to fail".into());
            }
            let most = if at == 0 && self.0.loads_on.is_some() { 1 } else { length(at) };
            let count = state.read(&mut buffer[..most])?;
            if count == 0 {
                break;
            }
            fill(*instance, at, &mut expected[..count]);
            if buffer[..count] != expected[..count] {
                return Err(format!("byte {at} or one of {count} following is not what was saved").into());
            }
            at += count as u64;
            seen.loaded_bytes.store(at, Ordering::SeqCst);
            if at == 1
                && let Some(signal) = &self.0.loads_on
            {
                signal.wait();
            }
        }
        if at != self.0.bytes() {
            return Err(format!("{at} bytes came of {}", self.0.bytes()).into());
        }
        seen.whole.store(true, Ordering::SeqCst);
        if let Some(signal) = &self.0.loaded {
            signal.set();
        }
        Ok(())
    }
}
