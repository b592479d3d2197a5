//! Content for guest memory is deterministic, repeats no page, and compresses like its kind.

use std::collections::HashSet;

use sterna_qemu_lab::corpus::Corpus;
use sterna_qemu_lab::skip_if_unavailable;

const PAGE: usize = 4096;
/// Bytes of a packet.
const BATCH: usize = 512 << 10;
const BYTES: usize = 4 << 20;

fn content(corpus: Corpus, seed: u64) -> Option<Vec<u8>> {
    let opened = skip_if_unavailable(corpus.open(BYTES as u64, seed))?;
    assert_eq!(opened.bytes(), BYTES as u64);
    assert!(!opened.origin().is_empty());
    let mut bytes = vec![0; BYTES];
    opened.read(0, &mut bytes).unwrap();
    let mut end = [0; PAGE];
    opened.read((BYTES - PAGE) as u64, &mut end).unwrap();
    assert!(end == bytes[BYTES - PAGE..]);
    assert!(opened.read((BYTES - PAGE + 1) as u64, &mut end).is_err());
    Some(bytes)
}

fn zstd_ratio(bytes: &[u8]) -> f64 {
    let mut room = vec![0; zstd_safe::compress_bound(BATCH)];
    let compressed = bytes.chunks(BATCH).map(|batch| zstd_safe::compress(room.as_mut_slice(), batch, 1).unwrap());
    bytes.len() as f64 / compressed.sum::<usize>() as f64
}

fn is_as_its_kind(corpus: Corpus, least: f64, most: f64) {
    let Some(bytes) = content(corpus, 1) else { return };
    let pages: HashSet<&[u8]> = bytes.chunks(PAGE).collect();
    let distinct = if corpus == Corpus::Ones { 1 } else { BYTES / PAGE };
    assert_eq!(pages.len(), distinct, "{corpus:?} repeats pages");
    assert!(!pages.contains([0; PAGE].as_slice()), "{corpus:?} has a zero page");
    let ratio = zstd_ratio(&bytes);
    println!("{}: zstd 1 makes it {ratio:.2} times smaller", corpus.name());
    assert!((least..most).contains(&ratio), "{corpus:?}: {ratio:.2}");
    assert!(content(corpus, 1).is_some_and(|again| again == bytes), "{corpus:?} is not the same again");
}

#[test]
fn text() {
    is_as_its_kind(Corpus::Text, 2.5, 9.0);
}

#[test]
fn binaries() {
    is_as_its_kind(Corpus::Binaries, 1.5, 5.0);
}

#[test]
fn images() {
    is_as_its_kind(Corpus::Images, 1.1, 3.0);
}

#[test]
fn compressed() {
    is_as_its_kind(Corpus::Compressed, 0.99, 1.15);
}

#[test]
fn guest_ram() {
    is_as_its_kind(Corpus::GuestRam, 1.5, 6.0);
}

#[test]
fn mixed() {
    is_as_its_kind(Corpus::Mixed, 1.3, 5.0);
}

#[test]
fn ones() {
    is_as_its_kind(Corpus::Ones, 100.0, f64::INFINITY);
}

#[test]
fn sequence() {
    is_as_its_kind(Corpus::Sequence, 2.0, 50.0);
}

#[test]
fn memcached() {
    is_as_its_kind(Corpus::Memcached, 1.4, 1.8);
}

#[test]
fn another_seed_has_other_content() {
    for corpus in [Corpus::Text, Corpus::Images, Corpus::Memcached] {
        let (Some(one), Some(other)) = (content(corpus, 1), content(corpus, 2)) else { continue };
        assert!(one != other, "{corpus:?}");
    }
}

#[test]
fn more_than_there_is_is_refused_in_words_and_nothing_is_repeated() {
    let error = Corpus::Compressed.open(1 << 40, 1).expect_err("no system has so much");
    assert!(error.is_absence() && error.to_string().contains("none is used twice"), "{error}");
}

#[test]
fn names_lead_back() {
    for corpus in Corpus::ALL {
        assert_eq!(Corpus::from_name(corpus.name()), Some(corpus));
    }
    assert_eq!(Corpus::from_name("Text"), None);
}
