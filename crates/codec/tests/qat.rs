//! The method `qatzip` over the real library's software path: what it writes is read by everybody, and who wrote it is told.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use sterna_codec::{
    CodecError, Encoded, EncoderSource, Encoding, Engine, EngineMissing, Engines, MAX_CONTENT, MethodChoice, Qat,
    Qatzip, QatzipRefused, QatzipSoftware,
};
use sterna_test_kit::content::{code_like, noise};
use sterna_test_kit::qatzip::{library, read_gzip};

fn qat(level: i32) -> Option<Arc<Qat>> {
    Some(Arc::new(Qat::start(&library()?, level, QatzipSoftware::Always, 2, Duration::ZERO).unwrap()))
}

fn choice(level: i32) -> MethodChoice {
    format!("deflate {level} by qat").parse().unwrap()
}

fn encoding(level: i32) -> Encoding {
    choice(level).encoding(Engine::Qat).unwrap()
}

/// By the format's own decoder, by zlib, and member by member.
fn read_back(packet: &[u8], plain: &[u8]) -> usize {
    let mut decoded = vec![0; plain.len()];
    encoding(1).format().decoder().unwrap().decode(packet, &mut decoded).unwrap();
    assert!(decoded == plain, "by libdeflate");
    assert!(read_gzip(packet) == plain, "by zlib");
    let (mut members, mut rest) = (0, packet);
    while !rest.is_empty() {
        flate2::bufread::GzDecoder::new(&mut rest).read_to_end(&mut Vec::new()).unwrap();
        members += 1;
    }
    members
}

#[test]
fn what_it_writes_is_read_by_everybody_whatever_the_size() {
    for level in [1, 9] {
        let Some(qat) = qat(level) else { return };
        let engines = Engines::default().with_qat(Arc::<Qat>::clone(&qat));
        assert_eq!((engines.encoding(choice(level)), engines.account(encoding(level))), (Ok(encoding(level)), None));
        let mut encoder = encoding(level).non_adaptive_encoder(&engines).unwrap();
        let mut all = 0;
        // A page, less than a piece, a piece, a little more, a packet, more pieces than there are jobs, the largest packet.
        let sizes = [4096, 100_000, 128 << 10, 132 << 10, 512 << 10, 3 << 20, MAX_CONTENT];
        for (seed, len) in sizes.into_iter().enumerate() {
            let plain = code_like(seed as u64, len);
            let mut packet = vec![0xa5; len + 1];
            let Encoded::Shrunk(bytes) = encoder.encode(&plain, &mut packet[..len]).unwrap() else { panic!("{len}") };
            assert_eq!(packet[len], 0xa5);
            assert_eq!(read_back(&packet[..bytes], &plain), len.div_ceil(128 << 10), "one member for each piece");
            all += len;
        }
        assert!(all > 0);
        if !engines.has_hardware(Engine::Qat) {
            assert_eq!(engines.account(encoding(level)).unwrap(), "QATzip's software 100 %");
        }
    }
}

#[test]
fn what_does_not_shrink_or_has_no_room_goes_raw_and_the_next_batch_is_right() {
    let Some(qat) = qat(1) else { return };
    let mut encoder = qat.encoder(1).unwrap();
    let plain = code_like(1, 600 << 10);
    let mut packet = vec![0; plain.len()];
    // The first pieces shrink, and the last is still out when that is of no use any more.
    let mixed = [&plain[..100 << 10], &noise(1, 500 << 10)].concat();
    for round in 0..20 {
        assert_eq!(encoder.encode(&noise(round, 512 << 10), &mut packet), Ok(Encoded::Incompressible));
        assert_eq!(encoder.encode(&mixed, &mut packet[..150 << 10]), Ok(Encoded::Incompressible));
        assert_eq!(encoder.encode(&plain, &mut packet[..100]), Ok(Encoded::Incompressible));
        assert_eq!(encoder.encode(&plain[..0], &mut packet), Ok(Encoded::Incompressible));
        assert_eq!(encoder.encode(&plain[..7], &mut packet), Ok(Encoded::Incompressible));
        let Encoded::Shrunk(bytes) = encoder.encode(&plain, &mut packet).unwrap() else { panic!("it shrinks") };
        read_back(&packet[..bytes], &plain);
    }
    let long = vec![0; MAX_CONTENT + 1];
    assert_eq!(encoder.encode(&long, &mut []), Err(CodecError::TooLong { len: MAX_CONTENT + 1 }));
}

#[test]
fn channels_share_the_workers_and_outlive_them() {
    let Some(qat) = qat(1) else { return };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let mut encoder = qat.encoder(1).unwrap();
            scope.spawn(move || {
                for batch in 0..10 {
                    let plain = code_like(thread * 100 + batch, (200 << 10) + 4096 * batch as usize);
                    let mut packet = vec![0; plain.len()];
                    let Encoded::Shrunk(bytes) = encoder.encode(&plain, &mut packet).unwrap() else {
                        panic!("it shrinks")
                    };
                    read_back(&packet[..bytes], &plain);
                }
            });
        }
    });
    // Without workers the CPU goes on: here by one member for each piece, too.
    let mut encoder = qat.encoder(1).unwrap();
    drop(qat);
    let plain = code_like(7, 512 << 10);
    let mut packet = vec![0; plain.len()];
    let Encoded::Shrunk(bytes) = encoder.encode(&plain, &mut packet).unwrap() else { panic!("it shrinks") };
    assert_eq!(read_back(&packet[..bytes], &plain), 4);
}

#[test]
fn without_hardware_nothing_of_it_is_used_unless_that_was_asked_for() {
    let Some(library) = library() else { return };
    if library.hardware().is_ok() {
        eprintln!("skipped: this machine has QAT hardware");
        return;
    }
    let with = |software| Qatzip { library: Some(library.file().to_owned()), software, ..Qatzip::default() };
    for software in [QatzipSoftware::Forbidden, QatzipSoftware::WhenBusy] {
        let refused = with(software).engines(choice(1), 2).unwrap_err();
        assert!(matches!(refused, QatzipRefused::Hardware(_)), "{refused}");
        let text = refused.to_string();
        assert!(text.starts_with("engine qat is not there: QATzip found no QAT hardware"), "{text}");
    }
    let (engines, line) = with(QatzipSoftware::Always).engines(choice(3), 2).unwrap();
    assert_eq!((engines.encoding(choice(3)), engines.has_hardware(Engine::Qat)), (Ok(encoding(3)), false));
    assert!(line.unwrap().starts_with("engine qat: QATzip's own software, for there is no hardware, by /"));
    // Started for one level, it has no other.
    assert!(encoding(4).encoder(&engines).is_err());
    // What `auto` chooses from has no software of QATzip's, and where it is not named nothing is opened.
    assert!(Encoding::auto_candidates(&engines).iter().all(|way| way.engine() == Engine::Cpu));
    for other in ["auto", "none", "deflate by cpu", "deflate"] {
        let other: MethodChoice = other.parse().unwrap();
        for software in [QatzipSoftware::Forbidden, QatzipSoftware::Always] {
            let (engines, line) = with(software).engines(other, 2).unwrap();
            assert_eq!((engines.encoding(choice(1)), line), (Err(EngineMissing { engine: Engine::Qat }), None));
        }
    }
}
