//! IAA: standard deflate both ways, and checksums.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use sterna_idxd::iaa::{
    AnalyticsError, BitOrder, CompressAecs, CompressAecsPair, DecompressAecsPair, Descriptor, Histogram, STORED_SLACK,
};
use sterna_idxd::{NoBatches, Status, SubmitMethod, WorkQueue};
use sterna_idxd_model::{DeviceConfig, Kind, Model, ModelConfig, QueueConfig};

use crate::support::*;

fn config() -> ModelConfig {
    let queue = QueueConfig { name: "wq1.0".into(), ..QueueConfig::default() };
    let device = DeviceConfig { name: "iax1".into(), kind: Kind::Iaa, queues: vec![queue], ..DeviceConfig::default() };
    ModelConfig { devices: vec![device], ..ModelConfig::default() }
}

/// By call, and with the real instruction.
fn queues() -> Vec<(Arc<WorkQueue>, Arc<Model>, Option<Rig>)> {
    let model = Model::start(config()).unwrap();
    let by_call = open(&model, "wq1.0", SubmitMethod::Enqcmd, Duration::from_secs(10)).unwrap();
    let mut all = vec![(by_call, model, None)];
    if let Some(rig) = Rig::trapped(&config(), "wq1.0", "IAA trapped") {
        all.push((Arc::clone(&rig.queue), Arc::clone(&rig.model), Some(rig)));
    }
    all
}

fn samples() -> Vec<Vec<u8>> {
    let text: Vec<u8> =
        b"the page of a guest is often much like the page beside it; ".iter().copied().cycle().take(40_000).collect();
    let words: Vec<u8> = (0..8192_u32).flat_map(|value| (value * 3 % 1000).to_le_bytes()).collect();
    let mut far = noise(11, 5000);
    far.extend_from_within(..5000);
    vec![vec![7], vec![0; 16384], text, words, far, noise(12, 4096)]
}

/// Compresses with these codes: the stream.
fn compress(queue: &WorkQueue, source: &Area, bytes: usize, aecs: CompressAecs) -> (Vec<u8>, u32) {
    let output = Area::new((bytes + bytes / 4 + STORED_SLACK).div_ceil(PAGE));
    let pair = Arc::new(CompressAecsPair::new(aecs));
    let capacity = (bytes + bytes / 4 + STORED_SLACK) as u32;
    let done = run_iaa(queue, Descriptor::compress(source.at(0), bytes as u32, output.at(0), capacity, pair.address()));
    assert_eq!(done.status, Status::Success, "{done:?}");
    (output.get(0, done.output_bytes as usize), done.crc)
}

fn statistics(queue: &WorkQueue, source: &Area, bytes: usize) -> CompressAecs {
    let histogram = Arc::new(Histogram::new());
    let done = run_iaa(queue, Descriptor::statistics(source.at(0), bytes as u32, histogram.address()));
    assert_eq!(done.status, Status::Success, "{done:?}");
    CompressAecs::dynamic(&histogram, true).unwrap()
}

/// What zlib makes of a stream, with the window given; `None` where there is no Python.
fn zlib(stream: &[u8], window: i32) -> Option<Vec<u8>> {
    let script = format!(
        "import sys,zlib;d=zlib.decompressobj(-{window});o=d.decompress(sys.stdin.buffer.read())+d.flush();\
         assert d.eof and not d.unused_data;sys.stdout.buffer.write(o)"
    );
    python(&script, stream)
}

fn python(script: &str, input: &[u8]) -> Option<Vec<u8>> {
    let child = Command::new("python3").args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let Ok(mut child) = child else {
        println!("without zlib: there is no python3");
        return None;
    };
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    Some(output.stdout)
}

/// gzip's CRC-32, bit by bit.
fn crc32(data: &[u8]) -> u32 {
    !data.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 })
    })
}

#[test]
fn what_is_compressed_with_fixed_and_dynamic_codes_comes_back_and_is_standard_deflate() {
    for (queue, _model, _rig) in queues() {
        assert_eq!(queue.max_batch(), Err(NoBatches::Iaa));
        for data in samples() {
            let source = Area::with(&data);
            let mut sizes = Vec::new();
            for aecs in [CompressAecs::fixed(true), statistics(&queue, &source, data.len())] {
                let (stream, crc) = compress(&queue, &source, data.len(), aecs);
                assert_eq!(crc, crc32(&data));
                if let Some(inflated) = zlib(&stream, 12) {
                    assert_eq!(inflated, data, "zlib, window of 4 KiB");
                }
                let (input, output) = (Area::with(&stream), Area::new(data.len().div_ceil(PAGE)));
                let inflate = Descriptor::decompress(
                    input.at(0),
                    stream.len() as u32,
                    output.at(0),
                    (output_bytes(&data)) as u32,
                );
                let done = run_iaa(&queue, inflate);
                assert_eq!((done.status, done.output_bytes as usize), (Status::Success, data.len()), "{done:?}");
                assert_eq!((output.get(0, data.len()), done.crc), (data.clone(), crc));
                let verified = run_iaa(&queue, Descriptor::verify(input.at(0), stream.len() as u32));
                assert_eq!((verified.status, verified.crc), (Status::Success, crc), "{verified:?}");
                sizes.push(stream.len());
            }
            println!("{} bytes: fixed {}, dynamic {}", data.len(), sizes[0], sizes[1]);
        }
    }
}

fn output_bytes(data: &[u8]) -> usize {
    data.len().div_ceil(PAGE) * PAGE
}

#[test]
fn streams_of_other_makers_inflate_if_their_window_is_small_enough() {
    let data = &samples()[4];
    let deflate = |window: i32| {
        let script = format!(
            "import sys,zlib;c=zlib.compressobj(9,zlib.DEFLATED,-{window});\
             sys.stdout.buffer.write(c.compress(sys.stdin.buffer.read())+c.flush())"
        );
        python(&script, data)
    };
    let (Some(small), Some(large)) = (deflate(12), deflate(15)) else { return };
    for (queue, _model, _rig) in queues() {
        let output = Area::new(4);
        let input = Area::with(&small);
        let done =
            run_iaa(&queue, Descriptor::decompress(input.at(0), small.len() as u32, output.at(0), 4 * PAGE as u32));
        assert_eq!(done.status, Status::Success, "{done:?}");
        assert_eq!(&output.get(0, data.len()), data);
        let input = Area::with(&large);
        let done =
            run_iaa(&queue, Descriptor::decompress(input.at(0), large.len() as u32, output.at(0), 4 * PAGE as u32));
        assert_eq!((done.status, done.error), (Status::AnalyticsError, Some(AnalyticsError::BAD_DISTANCE)), "{done:?}");
    }
}

#[test]
fn an_output_that_does_not_fit_is_an_error_of_its_own_kind() {
    let data = noise(13, 8000);
    for (queue, _model, _rig) in queues() {
        let (source, output) = (Area::with(&data), Area::new(2));
        let pair = Arc::new(CompressAecsPair::new(CompressAecs::fixed(true)));
        let compress = Descriptor::compress(source.at(0), 8000, output.at(0), 4000, pair.address());
        let done = run_iaa(&queue, compress);
        let overflow = (done.status, done.error);
        assert!(
            overflow == (Status::AnalyticsError, Some(AnalyticsError::OUTPUT_OVERFLOW))
                || overflow == (Status::OutputOverflow, None),
            "{done:?}"
        );
    }
}

#[test]
fn a_decompression_goes_on_in_another_buffer() {
    let data = samples().swap_remove(2);
    for (queue, _model, _rig) in queues() {
        let source = Area::with(&data);
        let (stream, crc) = compress(&queue, &source, data.len(), CompressAecs::fixed(true));
        // Room for three whole parts: what lies behind may be the input.
        let (input, output) = (Area::with(&stream), Area::new(12));
        let state = Arc::new(DecompressAecsPair::new());
        let part = 16_000;
        let mut descriptor =
            Descriptor::decompress(input.at(0), stream.len() as u32, output.at(0), part).keeping_state(state.address());
        let (mut written, mut parts) = (0, 0);
        let last = loop {
            let done = run_iaa(&queue, descriptor);
            written += done.output_bytes as usize;
            parts += 1;
            match done.status {
                Status::OutputOverflow => {
                    descriptor = descriptor.continued(done.bytes_completed, output.at(written), part).unwrap();
                }
                Status::Success => break done,
                _ => panic!("{done:?}"),
            }
        };
        assert_eq!((written, parts), (data.len(), 3));
        assert_eq!(output.get(0, data.len()), data);
        assert_eq!(last.crc, crc, "the checksum goes on, too");
    }
}

#[test]
fn crc64_of_the_specifications_table() {
    for (queue, _model, _rig) in queues() {
        let source = Area::with(b"123456789");
        // Table 3-7's parameters, with the published check values of these algorithms.
        for (polynomial, order, invert, expected) in [
            (0x04c1_1db7_0000_0000, BitOrder::Bit0First, true, 0xcbf4_3926),
            (0x04c1_1db7_0000_0000, BitOrder::Bit7First, true, 0xfc89_1918_0000_0000),
            (0x1edc_6f41_0000_0000, BitOrder::Bit0First, true, 0xe306_9283),
            (0x8bb7_0000_0000_0000, BitOrder::Bit7First, false, 0xd0db_0000_0000_0000),
        ] {
            let done = run_iaa(&queue, Descriptor::crc64(source.at(0), 9, polynomial, order, invert));
            assert_eq!((done.status, done.crc64), (Status::Success, expected), "{polynomial:#x} {done:?}");
        }
    }
}

#[test]
fn a_fault_is_reported_and_the_job_done_again_from_its_start() {
    let data = samples().swap_remove(3);
    for (queue, _model, _rig) in queues() {
        let source = Area::with(&data);
        source.allow(3, false);
        let output = Area::new(10);
        let pair = Arc::new(CompressAecsPair::new(CompressAecs::fixed(true)));
        let bytes = data.len() as u32;
        let compress = Descriptor::compress(source.at(0), bytes, output.at(0), 10 * PAGE as u32, pair.address());
        let failed = run_iaa(&queue, compress);
        assert!(failed.status.is_page_fault(), "{failed:?}");
        assert_eq!(failed.fault.unwrap().address & !0xfff, source.at(3 * PAGE));
        source.allow(3, true);
        let done = run_iaa(&queue, compress);
        assert_eq!((done.status, done.crc), (Status::Success, crc32(&data)));
    }
}
