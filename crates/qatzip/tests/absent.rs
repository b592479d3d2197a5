//! No library, or a wrong one: one sentence each, never a crash. In a process of its own, since a library stays loaded.

use std::fs;
use std::path::Path;
use std::process::Command;

use sterna_qatzip::{Choice, Library};

fn refusal(path: &Path) -> String {
    let text = Library::open(&Choice::Path(path.to_owned())).unwrap_err().to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let text = refusal(Path::new("/nowhere/libqatzip.so.3"));
    assert!(text.contains("/nowhere/libqatzip.so.3") && text.contains("STERNA_QATZIP"), "{text}");
}

#[test]
fn a_file_that_is_no_library_is_refused_in_the_loaders_words() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("libqatzip.so.3"), "not a library").unwrap();
    let text = refusal(directory.path());
    assert!(text.contains("not available") && text.contains("libqatzip.so.3"), "{text}");
}

#[test]
fn a_library_without_the_functions_is_refused_by_the_first_that_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let library = compile(directory.path(), "int nothing;");
    let text = refusal(&library);
    let file = library.canonicalize().unwrap();
    assert!(text.starts_with(&format!("{} has no qzInit", file.display())), "{text}");
}

/// A library with every function, whose structures are not ours.
#[test]
fn a_library_with_another_layout_is_refused_before_it_is_used() {
    let functions = "
        int qzInit(void *s, unsigned char b) { return -2; }
        int qzTeardownSession(void *s) { ((void **)s)[2] = 0; return 0; }
        int qzCompress(void) { return -2; }
        int qzDecompress(void) { return -2; }
        int qzGetDeflateEndOfStream(void *s, unsigned char *e) { *e = 0; return 0; }
        void *qzMalloc(void) { return 0; }
        void qzFree(void *m) { }
        int qzSetLogLevel(int l) { return 0; }
        static int right[] = { 2, 1, 8, 3, 1, 65536, 65536, 1024, 32, 8, 0, 0, 0, 2, 0 };
        static void fill(int *p) { for (int i = 0; i < 15; i++) p[i] = right[i]; }
    ";
    let setup =
        "int qzSetupSessionDeflateExt(void *s, void *p) { ((long *)s)[0] = 11; ((void **)s)[2] = s; return 0; }";
    for (rest, word) in [
        (format!("{setup} int qzGetDefaultsDeflateExt(int *p) {{ return -1; }}"), "returned -1"),
        (format!("{setup} int qzGetDefaultsDeflateExt(int *p) {{ fill(p); p[5] = 32; return 0; }}"), "defaults"),
        (format!("{setup} int qzGetDefaultsDeflateExt(int *p) {{ fill(p); p[15] = 0; return 0; }}"), "longer"),
        (
            "int qzSetupSessionDeflateExt(void *s, void *p) { return 0; }
             int qzGetDefaultsDeflateExt(int *p) { fill(p); return 0; }"
                .into(),
            "new session",
        ),
        (
            "int qzSetupSessionDeflateExt(long *s, void *p) { s[0] = 11; s[2] = 1; s[7] = 0; return 0; }
             int qzGetDefaultsDeflateExt(int *p) { fill(p); return 0; }"
                .into(),
            "a session that was ended",
        ),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let text = refusal(&compile(directory.path(), &format!("{functions}{rest}")));
        assert!(text.contains("cannot be proved") && text.contains(word), "{text}");
    }
}

fn compile(directory: &Path, program: &str) -> std::path::PathBuf {
    let (source, library) = (directory.join("it.c"), directory.join("libqatzip.so.3"));
    fs::write(&source, program).unwrap();
    let status = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(status.success());
    library
}
