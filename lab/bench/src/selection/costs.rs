//! Measures the costs of `auto`'s encodings on real content on this machine, and the other costs of a migration per
//! byte.
//!
//! Costs are CPU time of one pinned thread, the least of several rounds, which excludes time that other programs take
//! and mostly excludes their slowing of a shared core. Encoding by an accelerator is charged: the bytes are those of
//! the format's encoder on the CPU, the time is published or the model's.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use sterna_codec::sample::Sampler;
use sterna_codec::{CodecError, Encoded, Encoder, EncoderSource, Encoding, Engine, Engines};
use sterna_idxd_model::config::Timing;
use sterna_qemu_lab::corpus::Corpus;
use sterna_simulator::measured::thread_cpu;
use sterna_simulator::path::choices::{Batch, Trace};
use sterna_simulator::path::{self, Path};
use sterna_wire::checksum::crc32c;

use super::super::ram::pin::pin;
use super::super::ram::writer::SEED;
use crate::hosts::{HostsError, doing};

/// A packet of the engine.
const BATCH: usize = 512 << 10;
/// Bytes that are sent through a socket to measure writing and reading.
const THROUGH_SOCKET: usize = 256 << 20;
/// QAT: 3.5 GB/s of content from end to end, 60 GB with 8 threads over 50 Gbit/s (QEMU's patches for QATzip).
const QAT_BYTE: f64 = 1.0 / 3.5;
/// The cost of submitting a job to a device and collecting it, beside copies.
const SUBMISSION: f64 = 2000.0;

/// Nanoseconds for each byte, beside encoding.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bytes {
    /// Copying out of guest memory, with the checksum.
    pub(super) read: f64,
    /// Copying for an accelerator.
    pub(super) copied: f64,
    /// Writing to a connection; `received`: reading from it.
    pub(super) written: f64,
    pub(super) received: f64,
    /// The checksum at the destination.
    pub(super) placed: f64,
}

impl Bytes {
    /// Returns a path with these costs and no other limits.
    pub(super) fn path(&self) -> Path {
        Path {
            read: self.read,
            write: self.written,
            receive: self.received,
            place: self.placed,
            ..Path::link(f64::INFINITY)
        }
    }

    /// Measures them, with the sender on one of these CPUs and the receiver on the other.
    pub(super) fn measure(cpus: [usize; 2]) -> Result<Self, HostsError> {
        let (written, received) = through_socket(cpus)?;
        on_cpu(cpus[0], || {
            // Larger than the caches, so that it comes from memory as a guest's does.
            let memory = vec![1u8; 64 << 20];
            let mut batch = vec![0u8; BATCH];
            let copied = each(&memory, |piece| batch.copy_from_slice(piece));
            let read = each(&memory, |piece| {
                batch.copy_from_slice(piece);
                std::hint::black_box(crc32c(&batch));
            });
            let placed = each(&memory, |piece| {
                std::hint::black_box(crc32c(piece));
            });
            Ok(Self { read, copied, written, received, placed })
        })
    }
}

/// Returns nanoseconds per byte of `what` on each batch of `memory`: the least of several passes.
fn each(memory: &[u8], mut what: impl FnMut(&[u8])) -> f64 {
    let mut pass = || {
        let begun = thread_cpu();
        memory.chunks_exact(BATCH).for_each(&mut what);
        (thread_cpu() - begun) / memory.len() as f64
    };
    (0..5).map(|_| pass()).fold(f64::INFINITY, f64::min)
}

/// Runs `work` in a thread of its own that stays on `cpu`.
fn on_cpu<T: Send>(cpu: usize, work: impl FnOnce() -> Result<T, HostsError> + Send) -> Result<T, HostsError> {
    std::thread::scope(|scope| {
        let pinned = move || {
            pin(&[cpu]).map_err(HostsError)?;
            work()
        };
        scope.spawn(pinned).join().map_err(|_| HostsError("the thread that measures has panicked".into()))?
    })
}

/// Returns nanoseconds per byte of writing to a loopback connection, and of reading from it into uncached memory.
fn through_socket(cpus: [usize; 2]) -> Result<(f64, f64), HostsError> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(doing("listening"))?;
    let to = listener.local_addr().map_err(doing("listening"))?;
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            on_cpu(cpus[1], || {
                let (mut stream, _) = listener.accept().map_err(doing("accepting"))?;
                let mut memory = vec![1u8; 64 << 20];
                let begun = thread_cpu();
                for piece in 0..THROUGH_SOCKET / BATCH {
                    let at = piece * BATCH % memory.len();
                    stream.read_exact(&mut memory[at..at + BATCH]).map_err(doing("reading"))?;
                }
                Ok((thread_cpu() - begun) / THROUGH_SOCKET as f64)
            })
        });
        let written = on_cpu(cpus[0], || {
            let mut stream = TcpStream::connect(to).map_err(doing("connecting"))?;
            let batch = vec![1u8; BATCH];
            let begun = thread_cpu();
            for _ in 0..THROUGH_SOCKET / BATCH {
                stream.write_all(&batch).map_err(doing("writing"))?;
            }
            Ok((thread_cpu() - begun) / THROUGH_SOCKET as f64)
        })?;
        let read = reading.join().map_err(|_| HostsError("the thread that reads has panicked".into()))??;
        Ok((written, read))
    })
}

/// An accelerator without function, so that the product lists what `auto` would choose from.
#[derive(Debug)]
struct Named;

impl EncoderSource for Named {
    fn encoder(&self, _level: i32) -> Result<Box<dyn Encoder>, CodecError> {
        Err(CodecError::Library { format: "none", reason: "this accelerator is there by name only" })
    }

    fn is_hardware(&self) -> bool {
        true
    }
}

/// Returns the encodings from which `auto` chooses if all accelerators are present.
pub(super) fn encodings() -> Vec<Encoding> {
    let engines = Engines::default().with_iaa(Arc::new(Named)).with_qat(Arc::new(Named));
    Encoding::auto_candidates(&engines)
}

/// Measures each encoding on `bytes` bytes of a corpus. Also returns where the content comes from.
pub(super) fn trace(
    corpus: Corpus,
    bytes: u64,
    rounds: usize,
    cpu: usize,
    beside: &Bytes,
) -> Result<(Trace, String), HostsError> {
    let content = corpus.open(bytes, SEED)?;
    let origin = content.origin().to_owned();
    let mut memory = vec![0; bytes as usize];
    content.read(0, &mut memory)?;
    let encodings = encodings();
    let trace = on_cpu(cpu, || {
        let broken = doing("measuring the ways of auto");
        measure(&memory, &encodings, rounds, beside).map_err(broken)
    })?;
    Ok((trace, origin))
}

fn measure(memory: &[u8], encodings: &[Encoding], rounds: usize, beside: &Bytes) -> Result<Trace, CodecError> {
    let mut sampler = Sampler::new()?;
    let mut coders = Vec::new();
    for encoding in encodings {
        // Encoded by the CPU, also if an accelerator is charged for it.
        let encoder = (encoding.format().row().encoder)(encoding.level().unwrap_or(0))?;
        coders.push((encoder, encoding.format().decoder()?));
    }
    let mut batch = vec![0; BATCH];
    let (mut encoded, mut decoded) = (vec![0; BATCH], vec![0; BATCH]);
    let mut batches = Vec::new();
    let mut sampling = Vec::new();
    for piece in memory.chunks_exact(BATCH) {
        // Just copied and so in a cache, as in the engine.
        batch.copy_from_slice(piece);
        let begun = thread_cpu();
        let class = sampler.class(&batch)?;
        sampling.push(thread_cpu() - begun);
        let mut made = vec![path::Encoded { size: BATCH, bytes: BATCH, ..path::Encoded::default() }; encodings.len()];
        for ((encoding, (encoder, decoder)), made) in encodings.iter().zip(&mut coders).zip(&mut made).skip(1) {
            (made.thread, made.decoding) = (f64::INFINITY, f64::INFINITY);
            for _ in 0..rounds {
                let begun = thread_cpu();
                let length = encoder.encode(&batch, &mut encoded)?;
                made.thread = made.thread.min(thread_cpu() - begun);
                let Encoded::Shrunk(length) = length else {
                    made.decoding = 0.0;
                    continue;
                };
                made.bytes = length;
                let begun = thread_cpu();
                decoder.decode(&encoded[..length], &mut decoded)?;
                made.decoding = made.decoding.min(thread_cpu() - begun);
                debug_assert!(decoded == batch, "{encoding} is no encoding");
            }
            charge(*encoding, made, beside);
        }
        batches.push(Batch { class, encoded: made });
    }
    sampling.sort_by(f64::total_cmp);
    Ok(Trace { encodings: encodings.to_vec(), batches, sampling: sampling[sampling.len() / 2] })
}

/// Replaces the CPU's time by an accelerator's, if the encoding is by one.
fn charge(encoding: Encoding, made: &mut path::Encoded, beside: &Bytes) {
    let engine = match encoding.engine() {
        Engine::Iaa => {
            let timing = Timing::iaa();
            timing.descriptor_ns as f64 + made.size as f64 * timing.engine_byte_ps as f64 / 1e3
        }
        Engine::Qat => made.size as f64 * QAT_BYTE,
        Engine::Cpu => return,
    };
    // Content in, encoded bytes out.
    let copies = (made.size + made.bytes) as f64 * beside.copied;
    (made.thread, made.engine) = (copies + SUBMISSION, engine);
}

#[cfg(test)]
mod tests {
    use sterna_codec::MethodChoice;
    use sterna_test_kit::content;

    use super::*;

    const BESIDE: Bytes = Bytes { read: 0.2, copied: 0.1, written: 0.3, received: 0.2, placed: 0.05 };

    #[test]
    fn every_way_is_measured_and_the_first_leaves_content_as_it_is() {
        let mut memory = vec![0u8; 2 * BATCH];
        let (text, noise) = memory.split_at_mut(BATCH);
        text.iter_mut().enumerate().for_each(|(at, byte)| *byte = b"pages of a guest "[at % 17]);
        noise.copy_from_slice(&content::noise(1, BATCH));
        let encodings = encodings();
        let trace = measure(&memory, &encodings, 1, &BESIDE).unwrap();
        assert_eq!((trace.encodings.len(), trace.batches.len()), (encodings.len(), 2));
        assert!(trace.sampling > 0.0);
        let [text, noise] = [0, 1].map(|batch: usize| &trace.batches[batch]);
        assert_ne!(text.class, noise.class);
        let raw = path::Encoded { size: BATCH, bytes: BATCH, ..path::Encoded::default() };
        assert_eq!((text.encoded[0].bytes, text.encoded[0].thread, text.encoded[0].decoding), (BATCH, 0.0, 0.0));
        for (encoding, made) in encodings.iter().zip(&text.encoded).skip(1) {
            assert!(made.bytes < BATCH / 10 && made.thread > 0.0 && made.decoding > 0.0, "{encoding}: {made:?}");
        }
        for (encoding, made) in encodings.iter().zip(&noise.encoded).skip(1) {
            assert_eq!((made.bytes, made.decoding), (raw.bytes, 0.0), "{encoding}");
        }
    }

    #[test]
    fn accelerators_are_charged_and_the_thread_only_copies() {
        let cpu = path::Encoded { size: BATCH, bytes: BATCH / 2, thread: 5e6, ..path::Encoded::default() };
        let charged = |text: &str| {
            let mut made = cpu;
            charge(text.parse::<MethodChoice>().unwrap().encodings().next().unwrap(), &mut made, &BESIDE);
            made
        };
        let copies = 1.5 * BATCH as f64 * BESIDE.copied + SUBMISSION;
        for (name, engine) in [("deflate by iaa", 400.0 + 0.495 * BATCH as f64), ("deflate by qat", BATCH as f64 / 3.5)]
        {
            let made = charged(name);
            assert!((made.thread - copies).abs() < 1.0 && (made.engine - engine).abs() < 1.0, "{name}: {made:?}");
            assert_eq!(made.bytes, cpu.bytes);
        }
        assert_eq!((charged("zstd").thread, charged("zstd").engine), (5e6, 0.0));
        assert_eq!(encodings().iter().filter(|encoding| encoding.engine() != Engine::Cpu).count(), 2);
    }
}
