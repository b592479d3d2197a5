// Arbitrary bytes as QEMU's main channel.
#![no_main]
#![allow(dead_code, reason = "each target uses one of the entries")]

#[path = "../entries/stream.rs"]
mod entries;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = entries::main_channel(data);
});
