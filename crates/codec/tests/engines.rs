//! Methods with an engine of their own: it encodes where it is there, the CPU where it is not, and the decoder does not notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use sterna_codec::{
    CodecError, Encoded, Encoder, EncoderSource, Engine, Engines, Iaa, MAX_CONTENT, Method, MethodChoice,
};
use sterna_idxd_model::{DeviceConfig, Model, ModelConfig};
use sterna_offload::{Accelerators, Kind, Offload, Settings};

// An inflate by nobody's library, which refuses distances beyond the window that it is given.
#[path = "../../idxd-model/tests/device/inflate.rs"]
mod reference;

fn choice(method: &str) -> MethodChoice {
    MethodChoice::parse(method, None).unwrap()
}

/// Offload with an IAA device in software.
fn with_model() -> Arc<Offload> {
    let model = Model::start(ModelConfig { devices: vec![DeviceConfig::iaa()], ..ModelConfig::dsa() }).unwrap();
    Offload::over(sterna_offload::model::queues(&model).unwrap(), &Settings::default()).unwrap()
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
fn iaa_encodes_what_fits_a_batch_and_the_cpu_what_does_not() {
    let offload = with_model();
    let engines = Engines::default().with_iaa(Arc::new(Iaa::new(&offload, &offload.guest(1)).unwrap()));
    let choice = choice("iaa");
    assert_eq!(engines.of(choice), Engine::Iaa);
    let mut encoder = choice.encoder(&engines).unwrap();
    for len in [512 << 10, 4096, 40_961, 1, 512 << 10] {
        let content = content(len);
        if len > 1 {
            let packet = comes_back(&mut encoder, choice.method(), &content);
            assert!(reference::inflate(&packet, 4096).unwrap() == content);
        } else {
            assert_eq!(encoder.encode(&content, &mut [0; 8]), Ok(Encoded::Incompressible));
        }
    }
    let done = |kind| {
        let report = offload.report();
        report
            .operations
            .iter()
            .flat_map(|of| &of.engines)
            .filter(|of| of.engine == kind)
            .map(|of| of.items)
            .sum::<u64>()
    };
    assert_eq!((done(Kind::Iaa), done(Kind::Cpu)), (4, 0), "{}", offload.summary());
    // More than a batch of offload's: not even handed in.
    comes_back(&mut encoder, choice.method(), &content(MAX_CONTENT));
    assert_eq!((done(Kind::Iaa), done(Kind::Cpu)), (4, 0), "{}", offload.summary());
    assert_eq!(encoder.encode(&vec![0; MAX_CONTENT + 1], &mut []), Err(CodecError::TooLong { len: MAX_CONTENT + 1 }));
}

#[test]
fn what_iaa_cannot_shrink_goes_raw() {
    let offload = with_model();
    let source = Iaa::new(&offload, &offload.guest(1)).unwrap();
    let mut encoder = source.encoder(0).unwrap();
    let mut state = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    })
    .take(64 << 10)
    .collect();
    let mut output = vec![0; noise.len()];
    assert_eq!(encoder.encode(&noise, &mut output), Ok(Encoded::Incompressible));
    // Nor what shrinks, where there is no room for it.
    assert_eq!(encoder.encode(&content(64 << 10), &mut output[..100]), Ok(Encoded::Incompressible));
    comes_back(&mut *encoder, Method::from_name("iaa").unwrap(), &content(64 << 10));
}

#[test]
fn an_encoder_outlives_the_offload_that_shut_down() {
    let offload = with_model();
    let engines = Engines::default().with_iaa(Arc::new(Iaa::new(&offload, &offload.guest(1)).unwrap()));
    let mut encoder = choice("iaa").encoder(&engines).unwrap();
    comes_back(&mut encoder, choice("iaa").method(), &content(64 << 10));
    offload.shutdown();
    comes_back(&mut encoder, choice("iaa").method(), &content(64 << 10));
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
