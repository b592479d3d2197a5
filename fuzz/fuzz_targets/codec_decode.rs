// Arbitrary bytes as the payload of a packet, for each format.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_codec::fuzz_decode(data));
