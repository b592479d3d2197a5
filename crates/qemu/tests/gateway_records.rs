//! The gateway's records: the fuzz target's committed corpus, and the examples of `docs/protocol.md`.

#![allow(dead_code, reason = "of the included files only what reads is used")]

#[path = "../../../fuzz/entries/gateway.rs"]
mod entries;
#[path = "../src/gateway/layout.rs"]
mod layout;

/// Where the included file looks for the parsers of QEMU's stream.
mod stream {
    pub(crate) use sterna_qemu::stream::*;
}

use std::path::Path;

#[test]
fn committed_corpus_is_read_as_the_fuzz_target_reads_it() {
    let (mut good_files, mut bad_files) = (0, 0);
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/gateway")).unwrap() {
        let path = entry.unwrap().path();
        let good = path.file_name().unwrap().to_string_lossy().starts_with("good-");
        assert_eq!(entries::record(&std::fs::read(&path).unwrap()), good, "{}", path.display());
        *(if good { &mut good_files } else { &mut bad_files }) += 1;
    }
    assert!(good_files >= 4 && bad_files >= 4, "the corpus is missing");
}

#[test]
fn the_documents_start_record_is_one_and_is_written_the_same_way() {
    let document =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/protocol.md")).unwrap();
    let (_, rest) = document.split_once("```json start\n").expect("the document has a start record");
    let (example, _) = rest.split_once("```").unwrap();

    let start = layout::Start::decode(example.as_bytes()).unwrap();
    let written: serde_json::Value = serde_json::from_slice(&start.encode()).unwrap();
    assert_eq!(written, serde_json::from_str::<serde_json::Value>(example).unwrap());
    assert_eq!(start.ram.blocks[0].name, "ram0");
}
