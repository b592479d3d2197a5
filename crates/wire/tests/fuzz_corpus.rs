//! The fuzz targets' committed corpus, read as the targets read it: "good-…" must be understood, "bad-…" refused.

#[path = "../../../fuzz/entries/wire.rs"]
mod entries;

use std::path::Path;

fn each(corpus: &str, mut read: impl FnMut(&[u8]) -> bool) {
    let (mut good_files, mut bad_files) = (0, 0);
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(corpus)).unwrap() {
        let path = entry.unwrap().path();
        let good = path.file_name().unwrap().to_string_lossy().starts_with("good-");
        assert_eq!(read(&std::fs::read(&path).unwrap()), good, "{}", path.display());
        *(if good { &mut good_files } else { &mut bad_files }) += 1;
    }
    assert!(good_files >= 2 && bad_files >= 2, "the corpus of {corpus} is missing");
}

#[test]
fn channel_headers() {
    each("channel_header", |data| {
        entries::channel_header_repaired(data);
        entries::channel_header(data)
    });
}

#[test]
fn packets() {
    each("packet", |data| {
        entries::packet_repaired(data);
        entries::packet(data)
    });
}

#[test]
fn deltas() {
    each("deltas", entries::deltas);
}

#[test]
fn control_messages() {
    each("control", entries::control);
}

proptest::proptest! {
    #[test]
    fn changed_bytes_never_make_a_reader_panic(at: proptest::sample::Index, to: u8, cut: proptest::sample::Index) {
        for (corpus, read) in [
            ("channel_header", (|data| { entries::channel_header_repaired(data); entries::channel_header(data) }) as fn(&[u8]) -> bool),
            ("packet", |data| { entries::packet_repaired(data); entries::packet(data) }),
            ("deltas", entries::deltas),
            ("control", entries::control),
        ] {
            each(corpus, |data| {
                let mut changed = data.to_vec();
                if !changed.is_empty() {
                    let position = at.index(changed.len());
                    changed[position] = to;
                    read(&changed);
                    changed.truncate(cut.index(data.len()));
                    read(&changed);
                }
                read(data)
            });
        }
    }
}
