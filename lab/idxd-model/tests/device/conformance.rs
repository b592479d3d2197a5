//! The conformance table: every test that it names exists, every operation and status has a row, and the document is
//! generated from it.

use std::fs;
use std::path::Path;

use sterna_idxd_model::table::{conformance, dsa, iaa};

#[test]
fn every_test_that_the_conformance_table_names_exists() {
    let crate_root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = String::new();
    let mut directories = vec![crate_root.join("src"), crate_root.join("tests")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap().flatten() {
            if entry.path().is_dir() {
                directories.push(entry.path());
            } else {
                sources += &fs::read_to_string(entry.path()).unwrap();
            }
        }
    }
    for row in conformance::ROWS {
        for test in row.tests {
            let (before, _) = sources.split_once(&format!("fn {test}(")).unwrap_or_else(|| panic!("no test {test}"));
            assert!(before.trim_end().ends_with(']'), "{test} has no #[test]");
        }
    }
}

#[test]
fn every_operation_of_the_table_has_a_row() {
    for operation in dsa::OPERATIONS.iter().chain(iaa::OPERATIONS) {
        let section = operation.section;
        let parent = section.rsplit_once('.').unwrap().0;
        let known = conformance::ROWS.iter().any(|row| {
            row.section
                .split(", ")
                .any(|part| part == section || (section.starts_with("IAA") && part.starts_with("IAA")))
                || row.section.starts_with(parent) && row.requires.starts_with(operation.name)
        });
        assert!(known, "{} ({section})", operation.name);
    }
}

#[test]
fn the_conformance_document_is_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/accelerators-conformance.md");
    if std::env::var_os("STERNA_WRITE_DOCS").is_some() {
        fs::write(&path, conformance::document()).unwrap();
    }
    assert_eq!(fs::read_to_string(&path).unwrap_or_default(), conformance::document(), "STERNA_WRITE_DOCS=1 writes it");
}
