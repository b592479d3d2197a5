//! One session over the real library: its software path, since these machines have no QAT.

use std::panic::AssertUnwindSafe;

use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner, contextualize_config};
use sterna_qatzip::{By, Choice, Failure, Library, OpenError, Params, Session, Software, StartError};
use sterna_test_kit::content::{code_like, noise};
use sterna_test_kit::qatzip::{library, read_gzip, software, write_gzip};

const LARGEST: usize = 600 << 10;

fn session() -> Option<Session> {
    Some(library()?.session(&software(LARGEST)).unwrap())
}

/// Compresses with room enough.
fn compressed(session: &mut Session, plain: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    let done = session.compress(plain, &mut packed, usize::MAX).unwrap();
    assert_eq!(done.bytes, packed.len());
    packed
}

/// Runs a property over one session, which so also proves that no case spoils the next. A failure names the seed.
fn over_one_session<S: Strategy>(strategy: S, test: impl Fn(&mut Session, S::Value)) {
    let Some(session) = session() else { return };
    let session = std::cell::RefCell::new(session);
    // Defaults, which PROPTEST_CASES and PROPTEST_RNG_SEED replace.
    let config = contextualize_config(ProptestConfig {
        cases: 200,
        rng_seed: RngSeed::Fixed(1),
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let seed = config.rng_seed;
    TestRunner::new(config)
        .run(&strategy, |value| {
            let session = AssertUnwindSafe(&session);
            test(&mut session.borrow_mut(), value);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("PROPTEST_RNG_SEED: {seed:?}: {failure}"));
}

/// Contents of every kind and of lengths around the borders.
fn contents() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![0..200usize, 1000..1100usize, 4090..4100usize, 65_530..65_540usize, 0..LARGEST];
    (length, any::<u64>(), 0..3u8).prop_map(|(len, seed, kind)| match kind {
        0 => vec![seed as u8; len],
        1 => noise(seed, len),
        _ => code_like(seed, len),
    })
}

#[test]
fn what_is_compressed_is_read_by_another_implementation_and_comes_back_the_same() {
    over_one_session(contents(), |session, plain| {
        let packed = compressed(session, &plain);
        assert_eq!(read_gzip(&packed), plain);
        let mut back = Vec::new();
        let done = session.decompress(&packed, &mut back, plain.len()).unwrap();
        assert_eq!((done.bytes, done.by), (plain.len(), By::Software));
        assert_eq!(back, plain);
        assert_eq!(session.renewed(), 0);
    });
}

#[test]
fn members_of_another_implementation_are_decompressed_one_or_several() {
    over_one_session(prop::collection::vec(contents(), 1..4), |session, pieces| {
        let plain = pieces.concat();
        if plain.len() > LARGEST {
            return;
        }
        let packed: Vec<u8> = pieces.iter().flat_map(|piece| write_gzip(piece)).collect();
        let mut back = Vec::new();
        assert_eq!(session.decompress(&packed, &mut back, LARGEST).map(|done| done.bytes), Ok(plain.len()));
        assert_eq!(back, plain);
    });
}

#[test]
fn every_level_compresses_and_a_higher_one_is_not_much_longer() {
    let Some(library) = library() else { return };
    let plain = code_like(7, 256 << 10);
    let mut sizes = Vec::new();
    for level in 1..=9 {
        let mut session = library.session(&Params { level, ..software(LARGEST) }).unwrap();
        let packed = compressed(&mut session, &plain);
        assert_eq!(read_gzip(&packed), plain);
        sizes.push(packed.len());
    }
    assert!(sizes[8] < sizes[0], "{sizes:?}");
}

#[test]
fn each_member_says_its_lengths_as_hardware_needs_them() {
    let Some(mut session) = session() else { return };
    let plain = code_like(3, 100_000);
    let packed = compressed(&mut session, &plain);
    assert_eq!(packed[..4], [0x1f, 0x8b, 8, 4]);
    assert_eq!(packed[10..16], [12, 0, b'Q', b'Z', 8, 0]);
    assert_eq!(packed[16..20], 100_000u32.to_le_bytes());
    assert_eq!(packed[20..24], u32::try_from(packed.len() - 32).unwrap().to_le_bytes());
}

#[test]
fn a_result_longer_than_its_room_is_refused_and_the_session_goes_on() {
    over_one_session((contents(), 1..400usize), |session, (plain, short)| {
        let packed = compressed(session, &plain);
        let mut output = Vec::new();
        let room = packed.len().saturating_sub(short);
        assert_eq!(session.compress(&plain, &mut output, room), Err(Failure::TooLong { room }));
        assert!(output.is_empty());
        assert_eq!(session.compress(&plain, &mut output, packed.len()).unwrap().bytes, packed.len());
        if !plain.is_empty() {
            let room = plain.len() - 1;
            for packed in [&packed, &write_gzip(&plain)] {
                assert_eq!(session.decompress(packed, &mut output, room), Err(Failure::TooLong { room }));
                assert!(output.is_empty());
            }
        }
        assert_eq!(session.decompress(&packed, &mut output, plain.len()).unwrap().bytes, plain.len());
        assert_eq!(output, plain);
    });
}

/// The same bytes over and over cost nothing to send and everything to receive.
#[test]
fn a_small_input_that_says_or_hides_that_it_is_huge_writes_no_more_than_its_room() {
    let Some(mut session) = session() else { return };
    let bomb = write_gzip(&vec![0; 300 << 20]);
    let mut output = Vec::new();
    assert_eq!(session.decompress(&bomb, &mut output, 4096), Err(Failure::TooLong { room: 4096 }));
    let mut says = compressed(&mut session, &[0; 4096]);
    let end = says.len();
    for at in [16, end - 4] {
        says[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    }
    assert_eq!(session.decompress(&says, &mut output, 4096), Err(Failure::TooLong { room: 4096 }));
    assert!(output.is_empty());
}

#[test]
fn input_that_is_cut_or_changed_or_anything_never_passes_for_the_content() {
    #[derive(Clone, Debug)]
    enum Harm {
        Cut(prop::sample::Index),
        Change(prop::sample::Index, u8),
        Append(Vec<u8>),
        Anything(Vec<u8>),
    }
    let bytes = || prop::collection::vec(any::<u8>(), 1..300);
    let harm = prop_oneof![
        any::<prop::sample::Index>().prop_map(Harm::Cut),
        (any::<prop::sample::Index>(), 1..=255u8).prop_map(|(at, by)| Harm::Change(at, by)),
        bytes().prop_map(Harm::Append),
        bytes().prop_map(|mut bytes| {
            if bytes[0] % 2 == 0 {
                bytes.splice(0..0, [0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 4, 255, 12, 0, b'Q', b'Z', 8, 0]);
            }
            Harm::Anything(bytes)
        }),
    ];
    let good = code_like(11, 5000);
    over_one_session((contents(), harm, any::<bool>()), |session, (plain, harm, ours)| {
        let whole = if ours { compressed(session, &plain) } else { write_gzip(&plain) };
        let mut bytes = whole.clone();
        match harm {
            Harm::Cut(at) => bytes.truncate(at.index(bytes.len())),
            Harm::Change(at, by) => {
                let at = at.index(bytes.len());
                bytes[at] ^= by;
            }
            Harm::Append(more) => bytes.extend(more),
            Harm::Anything(other) => bytes = other,
        }
        let mut output = Vec::new();
        match session.decompress(&bytes, &mut output, plain.len()) {
            // A change of time, system or name in a header harms nothing.
            Ok(_) => assert_eq!(output, plain),
            Err(_) => assert!(output.is_empty()),
        }
        let packed = compressed(session, &good);
        session.decompress(&packed, &mut output, good.len()).unwrap();
        assert_eq!(output, good);
    });
}

#[test]
fn every_cut_of_a_member_is_refused() {
    let Some(mut session) = session() else { return };
    let plain = code_like(5, 3000);
    let mut output = Vec::new();
    for whole in [compressed(&mut session, &plain), write_gzip(&plain)] {
        for end in 0..whole.len() {
            let result = session.decompress(&whole[..end], &mut output, plain.len());
            assert!(matches!(result, Err(Failure::BadInput(_))), "cut at {end} of {}: {result:?}", whole.len());
        }
    }
}

#[test]
fn lengths_beyond_what_the_session_was_made_for_are_refused_before_anything_is_copied() {
    let Some(library) = library() else { return };
    let mut session = library.session(&software(4096)).unwrap();
    let mut output = Vec::new();
    let too_large = Err(Failure::TooLarge { bytes: 4097, limit: 4096 });
    assert_eq!(session.compress(&[0; 4097], &mut output, usize::MAX), too_large);
    assert_eq!(session.decompress(&write_gzip(&[0; 10]), &mut output, 4097), too_large);
    assert!(matches!(session.decompress(&vec![0; 1 << 20], &mut output, 10), Err(Failure::TooLarge { .. })));
}

#[test]
fn output_with_room_is_not_allocated_anew() {
    let Some(mut session) = session() else { return };
    let plain = code_like(9, 64 << 10);
    let mut packed = Vec::with_capacity(64 << 10);
    let at = packed.as_ptr();
    for _ in 0..3 {
        session.compress(&plain, &mut packed, 64 << 10).unwrap();
        assert_eq!((packed.as_ptr(), packed.capacity()), (at, 64 << 10));
    }
}

#[test]
fn without_hardware_nothing_starts_unless_software_is_allowed_for_that() {
    let Some(library) = library() else { return };
    let Err(none) = library.hardware() else {
        eprintln!("skipped: this machine has QAT hardware");
        return;
    };
    for software in [Software::Forbidden, Software::WhenBusy] {
        let error = library.session(&Params { software, ..Params::default() }).unwrap_err();
        assert!(matches!(error, StartError::NoHardware(reason) if reason == none), "{error}");
        let text = error.to_string();
        assert!(text.contains("no QAT hardware") && text.contains("virtual function"), "{text}");
    }
    assert!(!library.session(&software(4096)).unwrap().on_hardware());
}

#[test]
fn parameters_out_of_range_are_refused_in_words() {
    let Some(library) = library() else { return };
    let good = software(4096);
    for (bad, word) in [
        (Params { level: 0, ..good }, "level"),
        (Params { level: 10, ..good }, "level"),
        (Params { hardware_buffer: 3000, ..good }, "hardware buffer"),
        (Params { hardware_buffer: 1 << 20, ..good }, "hardware buffer"),
        (Params { largest_job: 0, ..good }, "largest job"),
        (Params { largest_job: 65 << 20, ..good }, "largest job"),
    ] {
        let text = library.session(&bad).unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn the_same_library_is_handed_out_again_and_another_one_is_refused() {
    let Some(library) = library() else { return };
    assert!(library.file().is_file());
    let again = Library::open(&Choice::Path(library.file().to_owned())).unwrap();
    assert!(std::sync::Arc::ptr_eq(&library, &again));
    let other = Library::open(&Choice::Path("/nowhere/libqatzip.so.3".into()));
    assert!(matches!(other, Err(OpenError::Another { .. })), "{other:?}");
}

#[test]
fn a_session_whose_thread_panicked_spoils_nobody_elses() {
    let Some(library) = library() else { return };
    let mut mine = library.session(&software(64 << 10)).unwrap();
    let plain = code_like(1, 64 << 10);
    for seed in 0..8 {
        let library = std::sync::Arc::clone(&library);
        let died = std::thread::spawn(move || {
            let mut session = library.session(&software(64 << 10)).unwrap();
            let mut output = Vec::new();
            session.compress(&code_like(seed, 50_000), &mut output, 1 << 20).unwrap();
            session.decompress(&output[..output.len() / 2], &mut Vec::new(), 50_000).unwrap()
        })
        .join();
        assert!(died.is_err());
        assert_eq!(read_gzip(&compressed(&mut mine, &plain)), plain);
    }
}
