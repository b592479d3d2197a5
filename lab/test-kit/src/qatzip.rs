//! The real QATzip, and gzip by another implementation.

use std::io::{Read, Write};
use std::sync::Arc;

use sterna_qatzip::{Choice, Library, OpenError, Params, Software};

use crate::tools;

/// Returns the library, or `None` with a line that says why the test was skipped.
///
/// # Panics
/// A library that is named, or required, cannot be opened.
#[must_use]
pub fn library() -> Option<Arc<Library>> {
    let choice = tools::qatzip_directory().map_or(Choice::System, Choice::Path);
    match Library::open(&choice) {
        Ok(library) => Some(library),
        Err(error @ OpenError::NotFound { .. }) if choice == Choice::System => {
            tools::skip_without_qatzip(&error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Returns parameters that the library's software may serve.
#[must_use]
pub fn software(largest_job: usize) -> Params {
    Params { software: Software::Always, largest_job, ..Params::default() }
}

/// Returns the content of gzip members, by another implementation.
///
/// # Panics
/// They are not whole.
#[must_use]
pub fn read_gzip(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    flate2::read::MultiGzDecoder::new(bytes).read_to_end(&mut plain).expect("gzip members");
    plain
}

/// Returns a gzip member of another implementation.
///
/// # Panics
/// Never: it is written to memory.
#[must_use]
pub fn write_gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(6));
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}
