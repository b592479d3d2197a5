//! The fuzz target's committed corpus, read as the target reads it: two bytes say how many words there are to apply to, the
//! rest is a delta record. What is called good must apply, what is called bad must not, and neither may write outside.

use std::path::Path;

use sterna_memory::delta::{apply, fuzz_apply};

#[test]
fn the_corpus_of_delta_records_is_read_as_the_fuzz_target_reads_it() {
    let mut kinds = [0; 2];
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/delta")).unwrap() {
        let path = entry.unwrap().path();
        let good = path.file_name().unwrap().to_string_lossy().starts_with("good-");
        let data = std::fs::read(&path).unwrap();
        fuzz_apply(&data);

        let words = usize::from(u16::from_le_bytes([data[0], data[1]]));
        // A vector of words, so that it is aligned.
        let mut target = vec![0u64; words];
        // SAFETY: words are bytes.
        let target = unsafe { std::slice::from_raw_parts_mut(target.as_mut_ptr().cast::<u8>(), 8 * words) };
        assert_eq!(apply(&data[2..], target).is_ok(), good, "{}", path.display());
        kinds[usize::from(good)] += 1;
    }
    assert!(kinds.iter().all(|number| *number > 0), "good and bad records are in the corpus: {kinds:?}");
}
