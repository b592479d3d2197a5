//! The method `iaa` on the software model of an IAA device: what it writes is ordinary deflate, and whatever the device does, what is
//! called encoded decodes to what went in, or names the device that wrote it.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sterna_codec::{
    CodecError, Encoded, Encoder, EncoderSource, Encoding, Engine, Engines, Iaa, MAX_CONTENT, MethodChoice,
};
use sterna_idxd_model::{Model, ModelConfig};
use sterna_offload::trace::Trace;
use sterna_offload::{Bell, Kind, Nanos, Offload, OffloadReport, Operation, Settings, Time};
use sterna_test_kit::content::noise;
use sterna_test_kit::inflate::inflate;

// An inflate by nobody's library, which refuses distances beyond the window that it is given.

const BATCH: usize = 512 << 10;

const ONE: &str = r#"{"name":"iax1","kind":"iaa","queues":[{"name":"wq1.0","size":64}]}"#;
const TWO: &str = r#"{"name":"iax1","kind":"iaa","queues":[{"name":"wq1.0","size":64}]},
    {"name":"iax3","kind":"iaa","queues":[{"name":"wq3.0","size":64}]}"#;

fn settings(faults: &str) -> Settings {
    // Only a device that never answers is waited for for a short time: on a busy machine one without faults is silent for so long, too.
    let silent = ["hang", "halt", "drop_completion"].iter().any(|fault| faults.contains(fault));
    let mut settings = Settings::default();
    settings.patience = Duration::from_secs(if silent { 1 } else { 60 });
    // The model is a hundred times slower than a device, on a busy machine more.
    settings.lateness = Duration::from_secs(5);
    settings
}

/// Offload with these IAA devices in software, and what goes wrong with them.
fn with_model(devices: &str, faults: &str, settings: &Settings) -> Arc<Offload> {
    let config = ModelConfig::from_json(&format!(r#"{{"devices":[{devices}],"faults":{faults}}}"#)).unwrap();
    let model = Model::start(config).unwrap();
    Offload::with_queues(sterna_offload::model::queues(&model).unwrap(), settings).unwrap()
}

fn iaa(offload: &Arc<Offload>, verifying: bool) -> Iaa {
    Iaa::new(offload, &offload.guest(1)).unwrap().verifying(verifying)
}

fn encoding() -> Encoding {
    "deflate by iaa".parse::<MethodChoice>().unwrap().encoding(Engine::Iaa).unwrap()
}

fn content(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * (at + seed) / 977) as u8 & 0x1f).collect()
}

fn encoded(encoder: &mut dyn Encoder, content: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; content.len()];
    let Encoded::Shrunk(len) = encoder.encode(content, &mut packet).unwrap() else { panic!("it shrinks") };
    packet.truncate(len);
    packet
}

fn decodes_to(packet: &[u8], content: &[u8]) -> bool {
    let mut decoded = vec![0; content.len()];
    let decoder = encoding().format().decoder();
    decoder.unwrap().decode(packet, &mut decoded).is_ok() && decoded == content
}

/// Encodes, and has it decoded by the format's decoder, by two others, and with an IAA device's window.
fn comes_back(encoder: &mut dyn Encoder, content: &[u8]) -> Vec<u8> {
    let packet = encoded(encoder, content);
    assert!(decodes_to(&packet, content));
    assert!(inflate(&packet, 4096).unwrap() == content);
    let mut by_another = Vec::new();
    flate2::read::DeflateDecoder::new(&packet[..]).read_to_end(&mut by_another).unwrap();
    assert!(by_another == content);
    packet
}

fn items(report: &OffloadReport, kind: Kind, operation: Operation) -> u64 {
    let of = report.operations.iter().filter(|one| one.operation == operation).flat_map(|one| &one.engines);
    of.filter(|engine| engine.engine == kind).map(|engine| engine.items).sum()
}

fn deflated(offload: &Offload) -> (u64, u64) {
    let of = |kind| items(&offload.report(), kind, Operation::Deflate);
    (of(Kind::Iaa), of(Kind::Cpu))
}

#[test]
fn iaa_encodes_in_pieces_what_fits_a_batch_and_the_cpu_what_does_not() {
    let offload = with_model(ONE, "[]", &settings("[]"));
    let source = Arc::new(iaa(&offload, false));
    let engines = Engines::default().with_iaa(Arc::<Iaa>::clone(&source));
    assert_eq!(engines.encoding("deflate".parse().unwrap()), Ok(encoding()));
    let mut encoder = encoding().encoder(&engines).unwrap();
    for (len, pieces) in [(BATCH, 8), (4096, 1), (40_961, 3), (1, 0), (200 << 10, 8), (BATCH - 4096, 8)] {
        let (content, before) = (content(len, 0), deflated(&offload).0);
        if len > 1 {
            comes_back(&mut encoder, &content);
            assert!(encoder.producer().is_some(), "a device has written it");
        } else {
            assert_eq!(encoder.encode(&content, &mut [0; 8]), Ok(Encoded::Incompressible));
        }
        assert_eq!(deflated(&offload), (before + pieces, 0), "{len} bytes");
    }
    assert_eq!(source.account().unwrap(), "IAA 100 %");
    // More than a batch of offload's: not even handed in.
    let before = deflated(&offload);
    comes_back(&mut encoder, &content(BATCH + 4096, 0));
    assert_eq!((deflated(&offload), encoder.producer()), (before, None));
    assert!(source.account().unwrap().starts_with("IAA 7"), "{:?}", source.account());
    assert_eq!(encoder.encode(&vec![0; MAX_CONTENT + 1], &mut []), Err(CodecError::TooLong { len: MAX_CONTENT + 1 }));
}

#[test]
fn all_pieces_of_a_batch_are_with_the_device_before_the_first_is_looked_at() {
    let trace = tempfile::NamedTempFile::new().unwrap();
    let mut settings = settings("[]");
    settings.trace = Some(Arc::new(Trace::new(Box::new(trace.reopen().unwrap()))));
    let offload = with_model(ONE, "[]", &settings);
    let mut encoder = iaa(&offload, false).encoder(0).unwrap();
    comes_back(&mut *encoder, &content(BATCH, 0));
    let trace = std::fs::read_to_string(trace.path()).unwrap();
    let first: Vec<_> = trace.lines().filter_map(|line| line.split(' ').next()).collect();
    let of = |what| first.iter().filter(|kind| **kind == what).count();
    assert_eq!((of("s"), of("c")), (8, 8), "{trace}");
    let (last_in, first_out) =
        (first.iter().rposition(|kind| *kind == "s"), first.iter().position(|kind| *kind == "c"));
    assert!(last_in < first_out, "{trace}");
}

#[test]
fn what_iaa_cannot_shrink_goes_raw_and_spoils_nothing_beside_it() {
    let offload = with_model(ONE, "[]", &settings("[]"));
    for verifying in [false, true] {
        let mut encoder = iaa(&offload, verifying).encoder(0).unwrap();
        let mut output = vec![0; BATCH];
        assert_eq!(encoder.encode(&noise(1, BATCH), &mut output), Ok(Encoded::Incompressible));
        // Nor what shrinks, where there is no room for it.
        assert_eq!(encoder.encode(&content(64 << 10, 0), &mut output[..100]), Ok(Encoded::Incompressible));
        for noisy in [0, 3, 7] {
            let mut mixed = content(BATCH, noisy);
            mixed[noisy * (64 << 10)..][..64 << 10].copy_from_slice(&noise(1, 64 << 10));
            let length = comes_back(&mut *encoder, &mixed).len();
            assert!((64 << 10..BATCH - 64 * 1024).contains(&length), "{length}");
        }
    }
}

#[test]
fn an_encoder_outlives_the_offload_that_shut_down() {
    for verifying in [false, true] {
        let offload = with_model(ONE, "[]", &settings("[]"));
        let mut encoder = iaa(&offload, verifying).encoder(0).unwrap();
        comes_back(&mut *encoder, &content(64 << 10, 0));
        offload.shutdown();
        comes_back(&mut *encoder, &content(64 << 10, 0));
        assert!(encoder.producer().is_none());
    }
}

/// What goes wrong, with compressions or, for verified streams, with decompressions.
const FAULTS: &[(&str, &str)] = &[
    ("pages that are not there", r#"[{"every":3,"what":{"page_fault":{"per_mille":0}}}]"#),
    ("pages that go in the middle", r#"[{"every":5,"what":{"page_fault":{"per_mille":500}}}]"#),
    ("wrong records", r#"[{"per_mille":50,"what":{"status":{"code":16}}}]"#),
    ("hardware errors", r#"[{"nth":20,"what":{"status":{"code":32}}}]"#),
    ("halt", r#"[{"nth":20,"what":"halt"}]"#),
    ("hang", r#"[{"nth":20,"what":"hang"}]"#),
    ("hang in a decompression", r#"[{"opcode":66,"nth":2,"what":"hang"}]"#),
    ("lost completion", r#"[{"nth":20,"what":"drop_completion"}]"#),
    ("lost completion of a decompression", r#"[{"opcode":66,"nth":2,"what":"drop_completion"}]"#),
    ("late completions", r#"[{"per_mille":50,"what":{"late":{"delay_ns":2000000}}}]"#),
    ("slow", r#"[{"what":{"slow":{"factor":5}}}]"#),
];

#[test]
fn whatever_a_device_does_what_it_says_is_encoded_comes_back() {
    for (what, faults) in FAULTS {
        for (devices, verifying) in [(ONE, false), (TWO, true)] {
            let offload = with_model(devices, faults, &settings(faults));
            let mut encoder = iaa(&offload, verifying).encoder(0).unwrap();
            for number in 0..8 {
                let content = content(256 << 10, number);
                assert!(decodes_to(&encoded(&mut *encoder, &content), &content), "{what}, verifying {verifying}");
                assert!(!verifying || encoder.producer().is_none(), "{what}");
            }
            assert!(deflated(&offload).0 > 0, "{what}");
            drop(encoder);
            offload.shutdown();
            let requests = offload.report().requests;
            assert_eq!(requests.made, requests.free + requests.quarantined, "{what}: {requests:?}");
        }
    }
}

#[test]
fn a_wrong_stream_is_found_by_verification_and_its_device_named() {
    let offload = with_model(TWO, r#"[{"device":"iax1","opcode":67,"nth":9,"what":"wrong_result"}]"#, &settings("[]"));
    let source = iaa(&offload, true);
    let mut encoder = source.encoder(0).unwrap();
    for number in 0..8 {
        comes_back(&mut *encoder, &content(256 << 10, number));
    }
    let report = offload.report();
    let out: Vec<_> = report.taken_out.iter().map(|out| (out.device.as_str(), out.reason.as_str())).collect();
    assert_eq!(out, [("iax1", "what it had compressed decompresses to something else")]);
    // It has said nothing of zero pages, so of those nothing need be read again.
    assert_eq!(offload.wrong_results(), 0);
    // The other one has gone on.
    let words = source.account().unwrap();
    assert_eq!(words, "IAA, verified 88 %, CPU 13 % (last: a device's stream was wrong)", "{report:?}");
    assert_eq!(deflated(&offload), (64, 0));
}

#[test]
fn a_device_that_reads_a_right_stream_wrongly_is_named_and_the_stream_is_used() {
    let offload = with_model(ONE, r#"[{"opcode":66,"nth":2,"what":"wrong_result"}]"#, &settings("[]"));
    let mut encoder = iaa(&offload, true).encoder(0).unwrap();
    for number in 0..5 {
        comes_back(&mut *encoder, &content(256 << 10, number));
    }
    let reasons: Vec<_> = offload.report().taken_out.into_iter().map(|out| out.reason).collect();
    assert_eq!(reasons, ["it has decompressed to something else what the CPU reads as it should be"]);
}

#[test]
fn without_verification_a_wrong_stream_is_whose_it_is() {
    let offload = with_model(ONE, r#"[{"opcode":67,"nth":9,"what":"wrong_result"}]"#, &settings("[]"));
    let mut encoder = iaa(&offload, false).encoder(0).unwrap();
    let right: Vec<_> = (0..3)
        .map(|number| {
            let content = content(256 << 10, number);
            let right = decodes_to(&encoded(&mut *encoder, &content), &content);
            if !right {
                offload.report_wrong_result(encoder.producer().expect("a device has written it"), "it was wrong");
            }
            right
        })
        .collect();
    assert_eq!(right, [true, false, true]);
    assert_eq!(offload.report().taken_out[0].device, "iax1");
    assert_eq!((offload.wrong_results(), encoder.producer()), (0, None), "the last is the CPU's");
}

/// A clock that advances when a thread waits.
#[derive(Debug, Default)]
struct Waiting(AtomicU64);

impl Time for Waiting {
    fn now(&self) -> Nanos {
        self.0.load(Ordering::SeqCst)
    }
    fn wait(&self, _: &Bell, _: u64, until: Nanos) {
        self.0.fetch_max(until, Ordering::SeqCst);
    }
}

#[test]
fn a_device_that_is_late_is_left_alone_for_longer_and_longer() {
    let mut settings = settings("[]");
    let time = Arc::new(Waiting::default());
    (settings.time, settings.threads) = (Arc::clone(&time) as _, false);
    settings.lateness = Duration::from_millis(10);
    // It seems to be alive.
    settings.patience = Duration::from_secs(1000);
    let offload = with_model(ONE, r#"[{"opcode":67,"what":"hang"}]"#, &settings);
    let source = iaa(&offload, false);
    let mut encoder = source.encoder(0).unwrap();
    let content = content(64 << 10, 0);
    let mut waited = || {
        let before = offload.now();
        assert!(decodes_to(&encoded(&mut *encoder, &content), &content));
        offload.now() - before >= offload.lateness()
    };
    for skipped in [8, 16, 32] {
        assert!(waited(), "it is waited for");
        assert!((0..skipped).all(|_| !waited()), "{skipped} are not");
    }
    assert!(waited());
    assert_eq!(source.account().unwrap(), "CPU 100 % (last: no device answered within 10ms)");
}
