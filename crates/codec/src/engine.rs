//! What encodes: the CPU, or an accelerator that writes the same format. Where a method's own engine is not there, the CPU encodes;
//! the other side does not notice.

use crate::{CodecError, Encoder, MethodChoice};
use std::fmt;
use std::sync::Arc;

/// What may encode a method's format.
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

    /// What encodes `choice` here.
    pub fn of(&self, choice: MethodChoice) -> Engine {
        let wanted = choice.method().row().engine;
        if self.source(wanted).is_some() { wanted } else { Engine::Cpu }
    }

    /// Whether a device encodes `choice` here.
    pub fn has_hardware(&self, choice: MethodChoice) -> bool {
        self.source(choice.method().row().engine).is_some_and(EncoderSource::is_hardware)
    }

    /// Who has really encoded `choice` so far, in words, where it has an engine of its own and anything is known of that.
    pub fn account(&self, choice: MethodChoice) -> Option<String> {
        let wanted = choice.method().row().engine;
        match self.source(wanted) {
            Some(source) => source.account(),
            None => (wanted != Engine::Cpu).then(|| "CPU".to_owned()),
        }
    }

    pub(crate) fn encoder(&self, choice: MethodChoice) -> Result<Box<dyn Encoder>, CodecError> {
        let (row, level) = (choice.method().row(), choice.level().unwrap_or(0));
        match self.source(row.engine) {
            Some(source) => source.encoder(level),
            None => (row.format.encoder)(level),
        }
    }
}
