// Arbitrary bytes as what a connection says first, and as the answer to it.
#![no_main]
#![allow(dead_code, reason = "each target uses one of the entries")]

#[path = "../entries/wire.rs"]
mod entries;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = entries::channel_header(data);
    entries::channel_header_repaired(data);
});
