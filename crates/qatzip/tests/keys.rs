//! Without hardware the library's public calls look for it every time and keep one of the process's thread keys each time
//! (QATzip 1.3.1: after a thousand calls nobody in the process can make one). In a process of its own, to be counted.

use sterna_test_kit::content::code_like;
use sterna_test_kit::qatzip::{library, software};

fn free_keys() -> usize {
    let mut keys = Vec::new();
    let mut key = 0;
    // SAFETY: writes one key; no destructor.
    while unsafe { libc::pthread_key_create(&raw mut key, None) } == 0 {
        keys.push(key);
    }
    for key in &keys {
        // SAFETY: made above, used by nobody.
        unsafe { libc::pthread_key_delete(*key) };
    }
    keys.len()
}

#[test]
fn hardware_is_looked_for_once_however_many_jobs_there_are() {
    let Some(library) = library() else { return };
    let plain = code_like(1, 20_000);
    let (mut packed, mut back) = (Vec::new(), Vec::new());
    drop(library.session(&software(64 << 10)).unwrap());
    let before = free_keys();
    assert!(before > 500, "{before} keys left after one session");
    for _ in 0..4 {
        let mut session = library.session(&software(64 << 10)).unwrap();
        for _ in 0..25 {
            session.compress(&plain, &mut packed, 64 << 10).unwrap();
            session.decompress(&packed, &mut back, 64 << 10).unwrap();
            session.decompress(&packed[..9000], &mut back, 64 << 10).unwrap_err();
        }
        assert_eq!(back, []);
    }
    assert_eq!(free_keys(), before);
}
