//! An engine that encodes: the CPU, or an accelerator as the source of its encoders.

use crate::{CodecError, Encoder};
use std::fmt;
use thiserror::Error;

/// What may encode a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// The CPU.
    Cpu,
    /// Intel's In-Memory Analytics Accelerator.
    Iaa,
    /// Intel's QuickAssist, by way of QATzip.
    Qat,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cpu => "cpu",
            Self::Iaa => "iaa",
            Self::Qat => "qat",
        })
    }
}

/// An engine was named, and this host does not have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("engine {engine} is not there: {}", self.why())]
pub struct EngineMissing {
    /// The engine.
    pub engine: Engine,
}

impl EngineMissing {
    fn why(self) -> &'static str {
        match self.engine {
            Engine::Iaa => "no IAA device is open that compresses for this migration",
            Engine::Qat => "QATzip was not started",
            Engine::Cpu => "it does not encode this method",
        }
    }
}

/// An accelerator that makes encoders of its format.
pub trait EncoderSource: Send + Sync + fmt::Debug {
    /// Makes an encoder for one channel, at this level of the method (any number where the method has none).
    ///
    /// The decoder of the format reads the encoder's output. The encoder itself finishes what the accelerator leaves undone, or returns
    /// that the batch is incompressible.
    fn encoder(&self, level: i32) -> Result<Box<dyn Encoder>, CodecError>;

    /// Returns whether a device does the work. Software is used only where the user names the engine.
    fn is_hardware(&self) -> bool;

    /// Returns which engines encoded how much, as text; none where nothing was encoded or another report contains it.
    fn account(&self) -> Option<String> {
        None
    }
}
