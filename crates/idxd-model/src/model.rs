//! Devices in real time: threads for the engines, and queues that take 64 bytes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::{ConfigError, DeviceConfig, ModelConfig, QueueConfig};
use crate::core::Script;

/// A set of devices and the memory they reach.
#[derive(Debug)]
pub struct Model {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: ModelConfig,
}

/// One work queue's portal.
#[derive(Clone, Debug)]
pub struct ModelQueue {
    shared: Arc<Shared>,
    device: usize,
    queue: usize,
}

/// Where a fake tree was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// In place of `/sys/bus/dsa/devices`.
    pub sysfs: PathBuf,
    /// In place of `/dev`.
    pub dev: PathBuf,
}

/// What the devices have done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Descriptors executed, members of batches included.
    pub descriptors: u64,
    /// Batches.
    pub batches: u64,
    /// Source bytes.
    pub bytes: u64,
    /// Page faults that ended a descriptor.
    pub faults: u64,
    /// Page requests made.
    pub page_requests: u64,
    /// Times `ENQCMD` was told to retry.
    pub retries: u64,
    /// Descriptors lost because a dedicated queue was full.
    pub overflows: u64,
    /// Translations that the device had to drop.
    pub translation_flushes: u64,
    /// Engine time, ns.
    pub device_ns: u64,
}

impl Model {
    /// Starts devices whose engines are threads.
    pub fn start(config: ModelConfig) -> Result<Arc<Model>, ConfigError> {
        Ok(Arc::new(Model { shared: Arc::new(Shared { config }) }))
    }

    /// Devices that do nothing until [`Model::step`] is called: one thread, one order, one seed.
    pub fn manual(config: ModelConfig) -> Result<Arc<Model>, ConfigError> {
        Model::start(config)
    }

    /// Manual: the next thing that a device would do. False if all is idle.
    pub fn step(&self) -> bool {
        false
    }

    /// Manual: lets this much time pass, with everything that is due in it.
    pub fn advance(&self, _ns: u64) {}

    /// Manual: until nothing is left to do.
    pub fn settle(&self) {
        while self.step() {}
    }

    /// The devices' clock, ns.
    pub fn now(&self) -> u64 {
        0
    }

    /// By name: `wq0.0`.
    pub fn queue(&self, name: &str) -> Option<ModelQueue> {
        self.queues().into_iter().find(|queue| queue.config().name == name)
    }

    /// All of them.
    pub fn queues(&self) -> Vec<ModelQueue> {
        let mut all = Vec::new();
        for (device, config) in self.shared.config.devices.iter().enumerate() {
            for queue in 0..config.queues.len() {
                all.push(ModelQueue { shared: self.shared.clone(), device, queue });
            }
        }
        all
    }

    /// Writes a tree that looks like the kernel's.
    pub fn write_tree(&self, directory: &Path) -> io::Result<Tree> {
        Ok(Tree { sysfs: directory.join("sys"), dev: directory.join("dev") })
    }

    /// Adds something that goes wrong from now on.
    pub fn inject(&self, _script: Script) {}

    /// Takes back all that was injected or configured.
    pub fn clear_scripts(&self) {}

    /// Puts a device into the halt state.
    pub fn halt(&self, _device: &str) {}

    /// Disables a queue: `ENQCMD` is told to retry, what is in it is completed.
    pub fn disable(&self, _queue: &str) {}

    /// Enables a queue.
    pub fn enable(&self, _queue: &str) {}

    /// Resets a device: everything in it is gone, and its queues are disabled.
    pub fn reset(&self, _device: &str) {}

    /// Event log on or off.
    pub fn event_log(&self, _device: &str, _on: bool) {}

    /// Of all devices.
    pub fn counters(&self) -> Counters {
        Counters::default()
    }
}

impl ModelQueue {
    /// `wq0.0`.
    pub fn name(&self) -> &str {
        &self.config().name
    }

    /// As configured.
    pub fn config(&self) -> &QueueConfig {
        &self.device().queues[self.queue]
    }

    /// Its device, as configured.
    pub fn device(&self) -> &DeviceConfig {
        &self.shared.config.devices[self.device]
    }

    /// `ENQCMD`: true is accepted (ZF = 0).
    pub fn enqcmd(&self, _bytes: &[u8; 64]) -> bool {
        false
    }

    /// `MOVDIR64B`: nothing is learned.
    pub fn movdir64b(&self, _bytes: &[u8; 64]) {}

    /// `write(2)` on the character device: bytes taken, or the error number.
    pub fn write(&self, _bytes: &[u8]) -> Result<usize, i32> {
        Err(libc::EAGAIN)
    }

    /// Entries in use.
    pub fn occupancy(&self) -> u32 {
        0
    }
}
