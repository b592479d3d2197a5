//! The engines that this side has. A user who names an engine gets that engine or an error; otherwise an accelerator is preferred where there
//! is one.

use crate::method::DEFLATE;
use crate::{Adaptive, CodecError, Encoder, EncoderSource, Encoding, Engine, EngineMissing, MethodChoice};
use std::sync::Arc;

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

/// The methods of the CPU that `auto` tries before an accelerator's.
const AUTO_FAST: [&str; 2] = ["none", "lz4"];
/// The engines whose deflate `auto` tries, where there is hardware.
const AUTO_ENGINES: [Engine; 2] = [Engine::Iaa, Engine::Qat];
/// The methods of the CPU that `auto` tries after an accelerator's.
const AUTO_DENSE: [&str; 4] = ["zstd -1", "zstd 1", "zstd 3", "zstd 6"];

/// What of an encoding depends on the engines that are here.
impl Encoding {
    /// Maximum number of [`Self::auto_candidates`].
    pub const MAX_AUTO_CANDIDATES: usize = AUTO_FAST.len() + AUTO_ENGINES.len() + AUTO_DENSE.len();

    /// Returns the encodings from which `auto` chooses, the cheapest first. According to the measurements, each is the best at some
    /// price.
    pub fn auto_candidates(engines: &Engines) -> Vec<Self> {
        // A build may leave methods and engines out.
        let by = |engine, text: &str| text.parse::<MethodChoice>().ok()?.encoding(engine);
        let accelerated = AUTO_ENGINES.into_iter().filter(|engine| engines.has_hardware(*engine));
        let deflate = accelerated.filter_map(|engine| by(engine, DEFLATE));
        let by_cpu = |text: &&str| by(Engine::Cpu, text);
        let fast = AUTO_FAST.iter().filter_map(by_cpu);
        fast.chain(deflate).chain(AUTO_DENSE.iter().filter_map(by_cpu)).collect()
    }

    /// Returns an encoder that skips most attempts while content does not shrink. The CPU's fails only for lack of memory.
    ///
    /// # Errors
    /// The engine is not among `engines`, or has no encoder.
    pub fn encoder(self, engines: &Engines) -> Result<Adaptive, CodecError> {
        Ok(Adaptive::new(engines.encoder(self)?))
    }

    /// As [`Self::encoder`], but the encoder tries every batch: for callers that decide themselves which batches to
    /// try.
    ///
    /// # Errors
    /// As [`Encoding::encoder`].
    pub fn non_adaptive_encoder(self, engines: &Engines) -> Result<Box<dyn Encoder>, CodecError> {
        engines.encoder(self)
    }
}
