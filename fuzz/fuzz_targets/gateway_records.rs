// Arbitrary bytes as a record of the gateway's stream channel.
#![no_main]
#![allow(dead_code, reason = "the target only reads")]

#[path = "../entries/gateway.rs"]
mod entries;
#[path = "../../crates/qemu/src/gateway/layout.rs"]
mod layout;

/// Where the included file looks for the parsers of QEMU's stream.
mod stream {
    pub(crate) use sterna_qemu::stream::*;
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = entries::record(data);
});
