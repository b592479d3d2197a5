// Arbitrary bytes as the content of a packet of deltas.
#![no_main]
#![allow(dead_code, reason = "each target uses one of the entries")]

#[path = "../entries/wire.rs"]
mod entries;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = entries::deltas(data);
});
