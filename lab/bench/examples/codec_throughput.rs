//! Measures every method on the CPU, and beside them `lz4_flex` and the deflate for IAA at other levels, on batches of 512 KiB:
//! `cargo run --release -p sterna-bench --example codec_throughput -- FILE…`
//!
//! FILEs are memory dumps or anything like guest RAM; zero pages are left out, as a sender does. Without one, the
//! example's own executable. One thread, everything in memory, best of three passes.

use std::time::Instant;
use sterna_codec::{Encoded, Encoding, Engine, Format, Method};
use sterna_offload::Deflater;

const PAGE: usize = 4096;
const BATCH: usize = 128 * PAGE;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut files: Vec<_> = std::env::args_os().skip(1).map(std::path::PathBuf::from).collect();
    if files.is_empty() {
        files.push(std::env::current_exe()?);
    }
    let mut memory = Vec::new();
    for file in files {
        let content = std::fs::read(&file)?;
        memory.extend(content.chunks_exact(PAGE).filter(|page| page.iter().any(|byte| *byte != 0)).flatten());
    }
    let batches: Vec<&[u8]> = memory.chunks_exact(BATCH).collect();
    println!("{} batches of 512 KiB", batches.len());
    // `qat_throughput` has QATzip, with whatever it finds.
    for method in Method::all().filter(|method| method.name() != "none") {
        let levels = method.row().encodings.iter().find_map(|row| row.levels).map(|levels| (levels.min, levels.max));
        let shown = Encoding::all_by(Engine::Cpu).filter(|encoding| match (encoding.level(), levels) {
            _ if encoding.method() != method => false,
            (Some(level), Some((least, most))) => [least, -1, 1, 3, 6, most].contains(&level),
            _ => true,
        });
        for encoding in shown {
            let (format, level) = (encoding.format(), encoding.level().unwrap_or(0));
            let (mut encoder, mut decoder) = ((format.row().encoder)(level)?, format.decoder()?);
            measure(
                &encoding.to_string(),
                &batches,
                |input, output| match encoder.encode(input, output).expect("a batch is short enough") {
                    Encoded::Shrunk(len) => Some(len),
                    Encoded::Incompressible => None,
                },
                |input, output| decoder.decode(input, output).expect("what was encoded decodes"),
            );
        }
    }
    let mut decoder = Format::from_name("deflate").expect("it is in the table").decoder()?;
    for level in [2, 3, 4, 6, 9] {
        let mut deflater = Deflater::at(level);
        measure(
            &format!("as iaa, zlib-rs {level}"),
            &batches,
            |input, output| deflater.deflate(input, &mut output[..input.len()]),
            |input, output| decoder.decode(input, output).expect("what was encoded decodes"),
        );
    }
    let mut table = lz4_flex::block::CompressTable::large();
    measure(
        "lz4_flex (for comparison)",
        &batches,
        |input, output| lz4_flex::block::compress_into_with_table(input, output, &mut table).ok(),
        |input, output| {
            lz4_flex::block::decompress_into(input, output).expect("what was encoded decodes");
        },
    );
    Ok(())
}

fn measure(
    name: &str,
    batches: &[&[u8]],
    mut encode: impl FnMut(&[u8], &mut [u8]) -> Option<usize>,
    mut decode: impl FnMut(&[u8], &mut [u8]),
) {
    // Twice the room: lz4_flex refuses to start where its worst case would not fit.
    let (mut output, mut decoded) = (vec![0; 2 * BATCH], vec![0; BATCH]);
    let mut packets = Vec::new();
    let (mut encoding, mut decoding) = (f64::MAX, f64::MAX);
    for _ in 0..3 {
        let began = Instant::now();
        let lens: Vec<_> = batches.iter().map(|batch| encode(batch, &mut output)).collect();
        encoding = encoding.min(began.elapsed().as_secs_f64());
        if packets.is_empty() {
            packets = batches
                .iter()
                .zip(&lens)
                .map(|(batch, len)| {
                    encode(batch, &mut output);
                    len.map(|len| output[..len].to_vec())
                })
                .collect();
        }
        let began = Instant::now();
        for packet in packets.iter().flatten() {
            decode(packet, &mut decoded);
        }
        decoding = decoding.min(began.elapsed().as_secs_f64());
    }
    let total = (batches.len() * BATCH) as f64;
    let shrunk = packets.iter().flatten().count() as f64 * BATCH as f64;
    let wire: usize = packets.iter().map(|packet| packet.as_ref().map_or(BATCH, Vec::len)).sum();
    println!(
        "{name:<26} encode {:6.0} MB/s   decode {:6.0} MB/s   ratio {:.2}",
        total / encoding / 1e6,
        shrunk / decoding / 1e6,
        total / wire as f64
    );
}
