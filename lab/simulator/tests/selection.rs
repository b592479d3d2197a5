//! Compares the selection of `auto` with each fixed encoding, over the same path in virtual time.

use sterna_codec::MethodChoice;
use sterna_codec::select::Class;
use sterna_simulator::path::choices::{Batch, Trace};
use sterna_simulator::path::{Encoded, Path};

const SIZE: usize = 512 << 10;

/// The costs of each encoding of a kind of content: nanoseconds and output bytes per input byte.
#[derive(Clone, Copy)]
struct Content {
    sample: f64,
    encodings: [(f64, f64); 6],
}

const TEXT: Content =
    Content { sample: 0.55, encodings: [(0.0, 1.0), (1.4, 0.5), (1.6, 0.38), (2.0, 0.33), (3.2, 0.3), (9.0, 0.27)] };
const CODE: Content =
    Content { sample: 0.65, encodings: [(0.0, 1.0), (1.2, 0.6), (1.7, 0.52), (2.4, 0.46), (4.0, 0.43), (12.0, 0.4)] };
const NOISE: Content =
    Content { sample: 1.0, encodings: [(0.0, 1.0), (0.3, 1.0), (0.5, 1.0), (0.6, 1.0), (0.9, 1.0), (3.0, 1.0)] };
/// Pictures: a smooth sky, and grass with a camera's noise.
const SKY: Content =
    Content { sample: 0.25, encodings: [(0.0, 1.0), (1.0, 0.33), (1.9, 0.25), (3.0, 0.2), (3.4, 0.197), (9.0, 0.19)] };
const GRASS: Content =
    Content { sample: 0.9, encodings: [(0.0, 1.0), (0.9, 0.97), (0.6, 1.0), (1.9, 0.86), (5.0, 0.83), (18.0, 0.78)] };
/// Nanoseconds for decoding a byte of content, by encoding.
const DECODING: [f64; 6] = [0.0, 0.3, 0.7, 0.7, 0.7, 0.7];

fn trace(contents: &[Content]) -> Trace {
    let encodings = ["none", "lz4", "zstd -1", "zstd 1", "zstd 3", "zstd 6"];
    let batch = |content: &Content| {
        let encoded = |((nanos, ratio), decoding): ((f64, f64), f64)| {
            let (size, bytes) = (SIZE, (SIZE as f64 * ratio) as usize);
            let decoding = if bytes < size { decoding * size as f64 } else { 0.0 };
            Encoded { size, bytes, thread: nanos * size as f64, engine: 0.0, decoding }
        };
        Batch {
            class: Some(Class::of(4096, (4096.0 * content.sample) as usize)),
            encoded: content.encodings.into_iter().zip(DECODING).map(encoded).collect(),
        }
    };
    Trace {
        encodings: encodings.map(|text| text.parse::<MethodChoice>().unwrap().by_cpu().unwrap()).to_vec(),
        batches: contents.iter().map(batch).collect(),
        sampling: 8000.0,
    }
}

fn best_fixed(trace: &Trace, path: &Path, batches: usize) -> f64 {
    (0..trace.encodings.len()).map(|encoding| trace.fixed(encoding, path, batches).time).fold(f64::INFINITY, f64::min)
}

/// Returns the time of `auto` as a multiple of that of the best fixed encoding.
fn to_best(trace: &Trace, path: &Path, batches: usize) -> f64 {
    trace.selected(path, batches).0.time / best_fixed(trace, path, batches)
}

/// Links of 100 Mbit/s to 40 Gbit/s, in bytes per nanosecond.
const LINKS: [f64; 6] = [0.0125, 0.125, 0.3, 0.6, 1.25, 5.0];
const CONTENTS: [(&str, Content); 3] = [("text", TEXT), ("code", CODE), ("noise", NOISE)];

#[test]
fn auto_is_as_good_as_the_best_fixed_encoding_on_every_link_and_content_with_any_number_of_channels() {
    for channels in [1, 2, 4] {
        let mut product = 1.0;
        for rate in LINKS {
            for (name, content) in CONTENTS {
                let batches = channels * ((4e9 / SIZE as f64 * rate.min(1.0)) as usize + 2000);
                let ratio = to_best(&trace(&[content]), &Path { channels, ..Path::link(rate) }, batches);
                println!("{name} at {rate}, {channels} channels: {ratio:.3}");
                assert!(ratio < 1.10, "{name} at {rate} bytes per ns, {channels} channels: {ratio}");
                product *= ratio;
            }
        }
        assert!(f64::powf(product, 1.0 / 18.0) < 1.05);
    }
}

#[test]
fn learning_hardly_delays_even_a_small_guest() {
    for rate in LINKS {
        for (name, content) in CONTENTS {
            // 64 MiB on each channel.
            let ratio = to_best(&trace(&[content]), &Path::link(rate), 128);
            println!("small {name} at {rate}: {ratio:.3}");
            assert!(ratio < 1.12, "{name} at {rate} bytes per ns: {ratio}");
        }
    }
}

#[test]
fn mixed_content_moves_about_as_fast_as_by_the_best_fixed_encoding_or_faster() {
    let contents: Vec<Content> = (0..12).map(|batch| [TEXT, NOISE, CODE][batch / 4]).collect();
    for rate in [0.125, 0.3, 0.6] {
        let ratio = to_best(&trace(&contents), &Path::link(rate), 8000);
        println!("mixed at {rate}: {ratio:.3}");
        assert!(ratio < 1.05, "at {rate}: {ratio}");
    }
}

#[test]
fn long_runs_of_equal_content_neither_idle_the_network_nor_are_compressed_at_any_price() {
    let contents: Vec<Content> = (0..40).map(|batch| [SKY, GRASS][batch / 20]).collect();
    for (cores, socket) in [(1, 2 << 20), (1, 512 << 10), (2, 2 << 20), (2, 512 << 10)] {
        for rate in [0.05, 0.125, 0.3] {
            let path = Path { channels: 2, cores, socket, ..Path::link(rate) };
            let ratio = to_best(&trace(&contents), &path, 4000);
            println!("runs at {rate}, {cores} cores, sockets of {socket}: {ratio:.3}");
            assert!(ratio < 1.05, "at {rate}, {cores} cores, sockets of {socket}: {ratio}");
        }
    }
}

#[test]
fn auto_follows_a_link_that_changes_mid_way() {
    let text = trace(&[TEXT]);
    let ideal: f64 = [5.0, 0.125].map(|rate| best_fixed(&text, &Path::link(rate), 4000)).iter().sum();
    for (first, then) in [(5.0, 0.125), (0.125, 5.0)] {
        let path = Path { change: Some((4000, then)), ..Path::link(first) };
        let (took, prices) = text.selected(&path, 8000);
        assert!(took.time < 1.1 * ideal, "from {first} to {then}: {}, prices {prices:?}", took.time / ideal);
    }
}

#[test]
fn a_slow_receiver_is_not_mistaken_for_a_slow_network() {
    // The receiver has as much work with a byte of content as with a byte on the wire, and more if it must decode. The
    // first network is as fast as the receiver of uncompressed pages: compression relieves only the network.
    for (rate, max) in [(1.25, 1.2), (2.5, 1.05), (50.0, 1.05)] {
        let path = Path { receive: 0.4, place: 0.4, ..Path::link(rate) };
        let ratio = to_best(&trace(&[TEXT]), &path, 8000);
        println!("a slow receiver at {rate}: {ratio:.3}");
        assert!(ratio < max, "at {rate}: {ratio}");
    }
}

#[test]
fn expensive_writing_is_a_reason_to_compress_on_any_link() {
    let ratio = to_best(&trace(&[TEXT]), &Path { write: 4.0, ..Path::link(50.0) }, 8000);
    assert!(ratio < 1.05, "{ratio}");
}

#[test]
fn auto_stays_within_its_cpu_limit_and_uses_it() {
    for allowed in [0.1, 0.25, 0.5] {
        let (took, _) = trace(&[TEXT]).selected(&Path { allowed, ..Path::link(0.125) }, 4000);
        let part = took.cpus();
        println!("of {allowed} CPUs {part:.3} are used");
        assert!(part < 1.05 * allowed && part > 0.6 * allowed.min(0.3), "{part} of {allowed}");
    }
}
