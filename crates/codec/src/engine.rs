//! The engines that encode: the CPU or an accelerator. A user who names an engine gets that engine or an error; otherwise an accelerator is
//! taken where there is one.

use crate::{CodecError, Encoder, Encoding, MethodChoice};
use std::fmt;
use std::sync::Arc;
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

/// An accelerator, as it is asked for encoders of its format.
pub trait EncoderSource: Send + Sync + fmt::Debug {
    /// An encoder for one channel, at a level of the method that asks (any number where it has none).
    ///
    /// What it writes, the decoder of the format reads. It finishes by itself what the accelerator leaves undone, or calls it
    /// incompressible.
    fn encoder(&self, level: i32) -> Result<Box<dyn Encoder>, CodecError>;

    /// Whether a device does the work, rather than software that somebody has asked for by name.
    fn is_hardware(&self) -> bool;

    /// Who has really encoded so far, in words; none where nothing was encoded, or somebody else tells it.
    fn account(&self) -> Option<String> {
        None
    }
}

/// What there is to encode with on this side, besides the CPU. Nothing by default.
#[derive(Clone, Debug, Default)]
pub struct Engines {
    iaa: Option<Arc<dyn EncoderSource>>,
    qat: Option<Arc<dyn EncoderSource>>,
}

impl Engines {
    /// These, and `source`, which writes the format `deflate`.
    #[must_use]
    pub fn with_iaa(self, source: Arc<dyn EncoderSource>) -> Self {
        Self { iaa: Some(source), ..self }
    }

    /// These, and `source`, which writes the format `gzip`.
    #[must_use]
    pub fn with_qat(self, source: Arc<dyn EncoderSource>) -> Self {
        Self { qat: Some(source), ..self }
    }

    fn source(&self, engine: Engine) -> Option<&dyn EncoderSource> {
        match engine {
            Engine::Cpu => None,
            Engine::Iaa => self.iaa.as_deref(),
            Engine::Qat => self.qat.as_deref(),
        }
    }

    /// Returns what encodes `choice` here: the engine that was named; else the first of IAA, QAT hardware and the CPU that is here and
    /// encodes the method at the chosen level.
    ///
    /// # Errors
    /// The engine that was named is not here.
    pub fn encoding(&self, choice: MethodChoice) -> Result<Encoding, EngineMissing> {
        let is_here = |encoding: &Encoding| match encoding.engine() {
            Engine::Cpu => true,
            engine if choice.requires(engine) => self.source(engine).is_some(),
            engine => self.has_hardware(engine),
        };
        let missing = || EngineMissing { engine: choice.encodings().next().map_or(Engine::Cpu, Encoding::engine) };
        choice.encodings().find(is_here).ok_or_else(missing)
    }

    /// Returns whether a device encodes here as `engine`.
    pub fn has_hardware(&self, engine: Engine) -> bool {
        self.source(engine).is_some_and(EncoderSource::is_hardware)
    }

    /// Returns as text how much of `encoding` was really encoded by its accelerator so far; none for the CPU and before the first batch.
    pub fn account(&self, encoding: Encoding) -> Option<String> {
        self.source(encoding.engine())?.account()
    }

    pub(crate) fn encoder(&self, encoding: Encoding) -> Result<Box<dyn Encoder>, CodecError> {
        match self.source(encoding.engine()) {
            Some(source) => source.encoder(encoding.level().unwrap_or(0)),
            None if encoding.engine() == Engine::Cpu => encoding.cpu_encoder(),
            None => Err(CodecError::Library { format: encoding.format().name(), reason: "its engine is not there" }),
        }
    }
}
