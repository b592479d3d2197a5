//! The fuzz target's committed corpus, read as the target reads it: byte 0 picks the format, bytes 1 to 3 the length of
//! the output. Nothing may panic or write outside its output, and each format's own packets must decode.

use std::collections::BTreeSet;
use std::path::Path;

use sterna_codec::{FORMATS, fuzz_decode};

#[test]
fn the_corpus_of_the_decoders_is_read_as_the_fuzz_target_reads_it() {
    let mut decoded = BTreeSet::new();
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/decode")).unwrap() {
        let path = entry.unwrap().path();
        let good = path.file_name().unwrap().to_string_lossy().starts_with("good-");
        let data = std::fs::read(&path).unwrap();
        fuzz_decode(&data);

        let length = u32::from_le_bytes([data[1], data[2], data[3], 0]) as usize;
        let row = &FORMATS[usize::from(data[0])];
        let ok = (row.decoder)().unwrap().decode(&data[4..], &mut vec![0; length]).is_ok();
        assert_eq!(ok, good, "{}", path.display());
        if ok {
            decoded.insert(row.name);
        }
    }
    assert_eq!(decoded.len(), FORMATS.len(), "each format has a packet in the corpus: {decoded:?}");
}
