//! Methods with an engine of their own: it encodes where it is there, the CPU where it is not, and the decoder does not notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use sterna_codec::{CodecError, Encoded, Encoder, EncoderSource, Engine, Engines, Iaa, Method, MethodChoice};
use sterna_offload::{Accelerators, Offload, Settings};

fn choice(method: &str) -> MethodChoice {
    MethodChoice::parse(method, None).unwrap()
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * at / 977) as u8 & 0x1f).collect()
}

/// Encodes, decodes by the format's decoder, and compares.
fn comes_back(encoder: &mut dyn Encoder, method: Method, content: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; content.len()];
    let Encoded::Shrunk(len) = encoder.encode(content, &mut packet).unwrap() else { panic!("it shrinks") };
    packet.truncate(len);
    let mut decoded = vec![0; content.len()];
    method.format().decoder().unwrap().decode(&packet, &mut decoded).unwrap();
    assert!(decoded == content);
    packet
}

#[test]
fn without_a_device_the_cpu_encodes_and_says_so() {
    let offload = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
    assert!(Iaa::new(&offload, &offload.guest(1)).is_none());
    for method in ["iaa", "qatzip"] {
        let choice = choice(method);
        assert_eq!(Engines::default().of(choice), Engine::Cpu);
        comes_back(&mut choice.encoder(&Engines::default()).unwrap(), choice.method(), &content(64 << 10));
    }
}

/// Makes no encoders, and remembers for which level.
#[derive(Debug, Default)]
struct Asked(AtomicI32);

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
fn an_engine_is_asked_for_its_own_method_alone_and_its_refusal_is_heard() {
    let asked = Arc::new(Asked::default());
    let engines = Engines::default().with_qat(Arc::<Asked>::clone(&asked));
    for method in Method::all().filter(|method| method.name() != "qatzip") {
        assert_eq!(engines.of(choice(method.name())), Engine::Cpu);
        choice(method.name()).encoder(&engines).unwrap();
    }
    assert_eq!(asked.0.load(Ordering::Relaxed), 0);
    let qatzip = MethodChoice::parse("qatzip", Some("7")).unwrap();
    assert_eq!(engines.of(qatzip), Engine::Qat);
    let refused = qatzip.encoder(&engines).map(|_| ()).unwrap_err();
    assert_eq!((asked.0.load(Ordering::Relaxed), refused.to_string().as_str()), (7, "gzip failed: no session"));
}
