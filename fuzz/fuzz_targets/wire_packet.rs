// Arbitrary bytes as a packet's header and table, and as an acknowledgement.
#![no_main]
#![allow(dead_code, reason = "each target uses one of the entries")]

#[path = "../entries/wire.rs"]
mod entries;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = entries::packet(data);
    entries::packet_repaired(data);
});
