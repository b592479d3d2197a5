//! Tests the engine `qat` without QATzip. A process of its own, since a process loads the library once.

use std::path::PathBuf;

use sterna_codec::{Engine, MethodChoice, Qatzip, QatzipRefused, QatzipSoftware};

#[test]
fn without_the_library_the_engine_is_refused_where_it_was_named_and_the_cpu_is_taken_where_it_was_not() {
    let named: MethodChoice = "deflate by qat".parse().unwrap();
    let any: MethodChoice = "deflate".parse().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let broken = directory.path().join("libqatzip.so.3");
    std::fs::write(&broken, "no library").unwrap();
    for library in [PathBuf::from("/nowhere/libqatzip.so.3"), broken] {
        for software in [QatzipSoftware::Forbidden, QatzipSoftware::WhenBusy, QatzipSoftware::Always] {
            let qatzip = Qatzip { library: Some(library.clone()), software, ..Qatzip::default() };
            let refused = qatzip.engines(named, 2).unwrap_err();
            assert!(matches!(refused, QatzipRefused::Library(_)), "{refused}");
            let text = refused.to_string();
            assert!(text.starts_with("engine qat is not there: QATzip is not available: "), "{text}");
            assert!(!text.contains('\n') && text.contains(library.file_name().unwrap().to_str().unwrap()), "{text}");

            let (engines, line) = qatzip.engines(any, 2).unwrap();
            assert_eq!((engines.encoding(any).unwrap().engine(), line), (Engine::Cpu, None));
        }
    }
}
