// Arbitrary bytes as a control channel.
#![no_main]
#![allow(dead_code, reason = "each target uses one of the entries")]

#[path = "../entries/wire.rs"]
mod entries;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = entries::control(data);
});
