//! The kinds of engines, and why an accelerator's work was done by the CPU.

use std::fmt::{Display, Formatter};

use serde::Serialize;

/// A kind of engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Kind {
    /// The CPU, always available.
    Cpu,
    /// Intel Data Streaming Accelerator.
    Dsa,
    /// Intel In-Memory Analytics Accelerator.
    Iaa,
}

impl Kind {
    /// Returns its name, as in `--accel`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Dsa => "dsa",
            Self::Iaa => "iaa",
        }
    }
}

/// Why work that an accelerator could have done was done by the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// A page was not present for the device.
    PageFault,
    /// The queue stayed full.
    QueueFull,
    /// The device reported an error.
    DeviceError,
    /// The device did not answer.
    Timeout,
    /// The device's result was wrong.
    WrongResult,
    /// No device was in service.
    OutOfService,
    /// The CPU was expected to be faster.
    Spilled,
    /// The device does not accept such items.
    Unsuitable,
}

impl Display for Cause {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::PageFault => "a page was not there for the device",
            Self::QueueFull => "the queue stayed full",
            Self::DeviceError => "the device failed",
            Self::Timeout => "the device did not answer",
            Self::WrongResult => "the device was wrong",
            Self::OutOfService => "no device was in service",
            Self::Spilled => "the CPU was expected to be sooner",
            Self::Unsuitable => "the device does not take such items",
        })
    }
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 8] = [
        Self::PageFault,
        Self::QueueFull,
        Self::DeviceError,
        Self::Timeout,
        Self::WrongResult,
        Self::OutOfService,
        Self::Spilled,
        Self::Unsuitable,
    ];
}
