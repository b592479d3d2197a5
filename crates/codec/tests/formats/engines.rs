//! Engines: which one encodes where the user names it or leaves it open, and that decoders do not notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use sterna_codec::{
    CodecError, Encoded, Encoder, EncoderSource, Encoding, Engine, EngineMissing, Engines, Iaa, MethodChoice,
};
use sterna_offload::{Accelerators, Offload, Settings};

fn choice(method: &str) -> MethodChoice {
    method.parse().unwrap()
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * at / 977) as u8 & 0x1f).collect()
}

/// Encodes, decodes by the format's decoder, and compares.
fn comes_back(encoder: &mut dyn Encoder, encoding: Encoding, content: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; content.len()];
    let Encoded::Shrunk(len) = encoder.encode(content, &mut packet).unwrap() else { panic!("it shrinks") };
    packet.truncate(len);
    let mut decoded = vec![0; content.len()];
    encoding.format().decoder().unwrap().decode(&packet, &mut decoded).unwrap();
    assert!(decoded == content);
    packet
}

#[test]
fn without_a_device_the_cpu_encodes_unless_an_engine_was_named() {
    let offload = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
    assert!(Iaa::new(&offload, &offload.guest(1)).is_none());
    let none = Engines::default();
    for text in ["deflate", "deflate by cpu", "deflate 9"] {
        let encoding = none.encoding(choice(text)).unwrap();
        assert_eq!((encoding.engine(), encoding.format().name()), (Engine::Cpu, "gzip"));
        comes_back(&mut encoding.encoder(&none).unwrap(), encoding, &content(64 << 10));
    }
    for engine in [Engine::Iaa, Engine::Qat] {
        let named = choice(&format!("deflate by {engine}"));
        assert_eq!(none.encoding(named), Err(EngineMissing { engine }));
        assert!(named.encoding(engine).unwrap().encoder(&none).is_err(), "the CPU does not take its place silently");
    }
}

/// Makes no encoders, and remembers for which level.
#[derive(Debug, Default)]
struct Asked(AtomicI32);

/// Software that takes a device's place.
#[derive(Debug)]
struct Software;

impl EncoderSource for Software {
    fn encoder(&self, _: i32) -> Result<Box<dyn Encoder>, CodecError> {
        Err(CodecError::Library { format: "gzip", reason: "no session" })
    }

    fn is_hardware(&self) -> bool {
        false
    }
}

impl EncoderSource for Asked {
    fn encoder(&self, level: i32) -> Result<Box<dyn Encoder>, CodecError> {
        self.0.store(level, Ordering::Relaxed);
        Err(CodecError::Library { format: "gzip", reason: "no session" })
    }

    fn is_hardware(&self) -> bool {
        true
    }
}

#[test]
fn an_engine_is_asked_for_its_own_encoding_alone_and_its_refusal_is_heard() {
    let asked = Arc::new(Asked::default());
    let engines = Engines::default().with_qat(Arc::<Asked>::clone(&asked));
    for encoding in Encoding::all_by(Engine::Cpu) {
        encoding.encoder(&engines).unwrap();
    }
    assert_eq!(asked.0.load(Ordering::Relaxed), 0);
    let qat = engines.encoding(choice("deflate 7 by qat")).unwrap();
    let refused = qat.encoder(&engines).map(|_| ()).unwrap_err();
    assert_eq!((asked.0.load(Ordering::Relaxed), refused.to_string().as_str()), (7, "gzip failed: no session"));
}

#[test]
fn where_no_engine_is_named_it_is_iaa_then_qat_hardware_then_the_cpu() {
    let device = || Arc::new(Asked::default());
    let both = Engines::default().with_qat(device()).with_iaa(device());
    let qat = Engines::default().with_qat(device());
    let software = Engines::default().with_qat(Arc::new(Software));
    for (engines, text, engine) in [
        (&both, "deflate", Engine::Iaa),
        // IAA has no levels.
        (&both, "deflate 6", Engine::Qat),
        (&both, "deflate by qat", Engine::Qat),
        (&both, "deflate by cpu", Engine::Cpu),
        (&both, "zstd", Engine::Cpu),
        (&qat, "deflate", Engine::Qat),
        (&software, "deflate", Engine::Cpu),
        (&software, "deflate by qat", Engine::Qat),
    ] {
        assert_eq!(engines.encoding(choice(text)).unwrap().engine(), engine, "{text}");
    }
}
