// Arbitrary bytes as a delta record.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sterna_memory::delta::fuzz_apply(data));
