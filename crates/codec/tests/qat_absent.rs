//! The method `qatzip` where there is no library: in a process of its own, because there is one library per process.

use std::path::PathBuf;

use sterna_codec::{Encoded, Encoder, Engine, MethodChoice, Qatzip, QatzipRefused, QatzipSoftware};

#[test]
fn without_the_library_the_cpu_writes_the_same_format_unless_software_is_forbidden() {
    let choice = MethodChoice::parse("qatzip", None).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let broken = directory.path().join("libqatzip.so.3");
    std::fs::write(&broken, "no library").unwrap();
    for library in [PathBuf::from("/nowhere/libqatzip.so.3"), broken] {
        let with = |software| Qatzip { library: Some(library.clone()), software, ..Qatzip::default() };
        for software in [QatzipSoftware::WhenBusy, QatzipSoftware::Always] {
            let (engines, line) = with(software).engines(choice, 2).unwrap();
            let line = line.unwrap();
            let beginning = "method qatzip: the CPU writes its gzip: QATzip is not available: ";
            assert!(line.starts_with(beginning) && !line.contains('\n'), "{line}");
            assert!(line.contains(library.file_name().unwrap().to_str().unwrap()), "{line}");
            assert_eq!(engines.of(choice), Engine::Cpu);
            let (plain, mut packet) = (vec![7; 64 << 10], vec![0; 64 << 10]);
            let encoded = choice.encoder(&engines).unwrap().encode(&plain, &mut packet);
            assert!(matches!(encoded, Ok(Encoded::Shrunk(_))));
        }
        let refused = with(QatzipSoftware::Forbidden).engines(choice, 2).unwrap_err();
        assert!(matches!(refused, QatzipRefused::Library(_)), "{refused}");
        let beginning = "method qatzip without software is not possible: QATzip is not available: ";
        assert!(refused.to_string().starts_with(beginning), "{refused}");
    }
}
