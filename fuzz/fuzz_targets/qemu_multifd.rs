// Arbitrary bytes as QEMU's multifd channel.
#![no_main]
#![allow(dead_code, reason = "each target uses one of the entries")]

#[path = "../entries/stream.rs"]
mod entries;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = entries::multifd_channel(data);
});
