//! Devices for tests: they give a state whose every byte is known, and say whether it was taken as it was given.

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

/// The state of one device, and what is wrong with it.
#[derive(Clone, Default)]
pub(crate) struct Device {
    pub(crate) name: &'static str,
    pub(crate) instance: u32,
    /// Bytes that are saved while the guest runs, in so many goes.
    pub(crate) ahead: u64,
    pub(crate) goes: u64,
    /// Of them, so many in the first go; 0: as many as in each.
    pub(crate) first: u64,
    /// Bytes that are saved when it is paused.
    pub(crate) rest: u64,
    /// It says that it has endlessly much until all that goes ahead has gone.
    pub(crate) overstates: bool,
    /// Is given when the source's device has been let go of.
    pub(crate) let_go: Option<Signal>,
    /// Saving or loading fails after so many bytes.
    pub(crate) save_fails: Option<u64>,
    pub(crate) load_fails: Option<u64>,
    /// And do so by a panic.
    pub(crate) panics: bool,
    /// What goes ahead, and what goes when the guest is paused, is saved when this is given.
    pub(crate) ahead_on: Option<Signal>,
    pub(crate) saves_on: Option<Signal>,
    /// Loading goes on after the first byte when this is given.
    pub(crate) loads_on: Option<Signal>,
    /// Is given when it has been loaded.
    pub(crate) loaded: Option<Signal>,
    pub(crate) seen: Arc<Seen>,
}

/// What has become of a device.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) saved: AtomicU64,
    pub(crate) taken: AtomicU64,
    /// The most that was saved and not taken yet.
    pub(crate) most_waiting: AtomicU64,
    /// All of it was loaded, and was what was saved.
    pub(crate) whole: AtomicBool,
}

impl Device {
    pub(crate) fn new(name: &'static str, instance: u32, ahead: u64, rest: u64) -> Self {
        Self { name, instance, ahead, goes: 3, rest, ..Self::default() }
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
        let give = |source: Source, device: &Device| {
            source.device(device.id(), Box::new(Giver { device: device.clone(), at: 0, goes: 0 }))
        };
        self.0.iter().fold(source, give)
    }

    /// In another order than at the source.
    pub(crate) fn at_destination(&self, destination: Destination) -> Destination {
        let take = |destination: Destination, device: &Device| {
            destination.device(device.id(), Box::new(Taker(device.clone())))
        };
        self.0.iter().rev().fold(destination, take)
    }

    pub(crate) fn all_whole(&self) -> bool {
        self.0.iter().all(Device::is_whole)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(Device::bytes).sum()
    }
}

/// The word of eight bytes at `at` of the state of device `instance`: no two places have the same.
fn word(instance: u32, at: u64) -> u64 {
    (at ^ u64::from(instance) << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Bytes `at` and following.
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

/// Lengths of reads and writes, all different from those of pieces.
fn length(at: u64) -> usize {
    1 + (at.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as usize % (200 << 10)
}

struct Giver {
    device: Device,
    at: u64,
    goes: u64,
}

impl Giver {
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
            seen.most_waiting.fetch_max(self.at - seen.taken.load(Ordering::SeqCst).min(self.at), Ordering::SeqCst);
        }
        Ok(())
    }
}

impl SaveDevice for Giver {
    fn save_ahead(&mut self, state: &mut dyn Write) -> Result<Ahead, VmmError> {
        self.device.ahead_on.iter().for_each(Signal::wait);
        self.goes += 1;
        let Device { ahead, goes, first, .. } = self.device;
        let up_to = match first {
            0 => ahead * self.goes.min(goes) / goes,
            first => first + (ahead - first) * (self.goes.min(goes) - 1) / (goes - 1),
        };
        self.write(up_to, state)?;
        Ok(if self.goes < self.device.goes { Ahead::Later } else { Ahead::Nothing })
    }

    fn remaining(&mut self) -> u64 {
        let all_ahead = self.goes >= self.device.goes;
        if self.device.overstates && !all_ahead { u64::MAX } else { self.device.bytes() - self.at }
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.device.saves_on.iter().for_each(Signal::wait);
        self.write(self.device.bytes(), state)?;
        match self.device.save_fails {
            Some(_) => Err("saving was made to fail".into()),
            None => Ok(()),
        }
    }
}

impl Drop for Giver {
    fn drop(&mut self) {
        self.device.let_go.iter().for_each(Signal::give);
    }
}

struct Taker(Device);

impl LoadDevice for Taker {
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
            seen.taken.store(at, Ordering::SeqCst);
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
            signal.give();
        }
        Ok(())
    }
}
