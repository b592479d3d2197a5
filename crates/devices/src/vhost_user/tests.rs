//! Saver and loader with a back-end whose behaviour each test determines. A real back-end is in `tests/virtiofsd`.

mod double;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::contextualize_config;
use vhost::vhost_user::VhostUserFrontend;

use super::*;
use double::{Double, FEATURE, LOAD, NO_CHANNEL, SAVE, connected};

/// Returns a deadline that no correct test reaches, but that ends a hanging one.
fn ample() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn past() -> Instant {
    Instant::now()
}

/// Returns a state without repetitions.
fn state(length: usize) -> Vec<u8> {
    (0u32..).flat_map(|word| word.wrapping_mul(0x9e37_79b1).to_le_bytes()).take(length).collect()
}

fn read_all(saver: &mut Saver, chunk: usize) -> Result<Vec<u8>, Error> {
    let (mut whole, mut buffer) = (Vec::new(), vec![0; chunk]);
    loop {
        match saver.read(&mut buffer, ample())? {
            0 => return Ok(whole),
            read => whole.extend_from_slice(&buffer[..read]),
        }
    }
}

fn error<T>(result: Result<T, Error>) -> Error {
    match result {
        Ok(_) => panic!("this must fail"),
        Err(error) => error,
    }
}

/// Runs `test` with a back-end that performs `acts` on another thread.
fn against<T>(acts: impl FnOnce(Double) + Send + 'static, test: impl FnOnce(BackEnd) -> T) -> T {
    let (frontend, features, back_end) = connected(FEATURE);
    let acting = std::thread::spawn(move || acts(back_end));
    let result = test(BackEnd::new("disk-0", &frontend, features).expect("the feature was negotiated"));
    drop(frontend);
    acting.join().expect("the back-end saw what it expects");
    result
}

#[test]
fn a_back_end_without_the_feature_is_refused_before_any_message() {
    let (frontend, features, _back_end) = connected(0);
    let error = error(BackEnd::new("disk-0", &frontend, features));
    assert!(matches!(error, Error::NotNegotiated { .. }), "{error:?}");
    assert!(error.to_string().contains("disk-0") && error.to_string().contains("bit 19"), "{error}");
}

#[test]
fn a_monitor_that_wrongly_claims_the_feature_gets_an_error() {
    let (frontend, _, _back_end) = connected(0);
    let claimed = BackEnd::new("disk-0", &frontend, VhostUserProtocolFeatures::DEVICE_STATE).expect("it says so");
    assert!(matches!(error(claimed.save(ample())), Error::NotNegotiated { .. }));
    assert!(matches!(error(claimed.load(ample())), Error::NotNegotiated { .. }));
}

proptest! {
    #![proptest_config(contextualize_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) }))]

    /// A failure prints length and chunk, the only random values.
    #[test]
    fn a_state_of_any_length_in_any_chunks_is_saved_as_it_was_written(length in 0usize..400_000, chunk in 1usize..100_000) {
        let written = state(length);
        let expected = written.clone();
        let (read, total) = against(
            move |mut back_end| {
                let mut pipe = back_end.expect_state_fd(SAVE);
                back_end.reply(NO_CHANNEL, None);
                pipe.write_all(&written).expect("the monitor reads");
                drop(pipe);
                back_end.expect_check();
                back_end.reply(0, None);
            },
            |device| {
                let mut saver = device.save(ample()).expect("it saves");
                let whole = read_all(&mut saver, chunk).expect("all of it");
                (whole, saver.finish(ample()).expect("it is whole"))
            },
        );
        prop_assert!(read == expected);
        prop_assert_eq!(total, length as u64);
    }

    /// A failure prints length and chunk here, too.
    #[test]
    fn a_state_of_any_length_in_any_chunks_is_loaded_in_order(length in 0usize..400_000, chunk in 1usize..100_000) {
        let expected = state(length);
        let given = expected.clone();
        let total = against(
            move |mut back_end| {
                let mut pipe = back_end.expect_state_fd(LOAD);
                back_end.reply(NO_CHANNEL, None);
                let mut read = Vec::new();
                pipe.read_to_end(&mut read).expect("the monitor writes");
                assert!(read == expected, "{} bytes came of {}", read.len(), expected.len());
                back_end.expect_check();
                back_end.reply(0, None);
            },
            |device| {
                let mut loader = device.load(ample()).expect("it loads");
                for piece in given.chunks(chunk) {
                    loader.write(piece, ample()).expect("the back-end reads");
                }
                loader.finish(ample()).expect("it has taken it")
            },
        );
        prop_assert_eq!(total, length as u64);
    }
}

#[test]
fn a_channel_of_the_back_end_replaces_the_pipe() {
    let saved = against(
        |mut back_end| {
            let _unused = back_end.expect_state_fd(SAVE);
            let (theirs, mut ours) = std::io::pipe().expect("a pipe");
            back_end.reply(0, Some(theirs.as_fd()));
            drop(theirs);
            ours.write_all(b"by another way").expect("the monitor reads");
            drop(ours);
            back_end.expect_check();
            back_end.reply(0, None);
        },
        |device| {
            let mut saver = device.save(ample()).expect("it saves");
            let whole = read_all(&mut saver, 4).expect("all of it");
            saver.finish(ample()).expect("it is whole");
            whole
        },
    );
    assert_eq!(saved, b"by another way");
    against(
        |mut back_end| {
            let _unused = back_end.expect_state_fd(LOAD);
            let (mut ours, theirs) = std::io::pipe().expect("a pipe");
            back_end.reply(0, Some(theirs.as_fd()));
            drop(theirs);
            let mut read = Vec::new();
            ours.read_to_end(&mut read).expect("the monitor writes");
            assert_eq!(read, b"by another way");
            back_end.expect_check();
            back_end.reply(0, None);
        },
        |device| {
            let mut loader = device.load(ample()).expect("it loads");
            loader.write(b"by another way", ample()).expect("it reads");
            loader.finish(ample()).expect("it has taken it");
        },
    );
}

#[test]
fn a_program_that_the_monitor_starts_meanwhile_inherits_no_end_of_the_pipe() {
    // Otherwise the back-end would wait for the end of its state until that program ends.
    fn closed_by_exec(end: &OwnedFd) -> bool {
        rustix::io::fcntl_getfd(end).expect("its flags").contains(FdFlags::CLOEXEC)
    }
    against(
        |mut back_end| {
            let _save = back_end.expect_state_fd(SAVE);
            back_end.reply(NO_CHANNEL, None);
            let _load = back_end.expect_state_fd(LOAD);
            back_end.reply(NO_CHANNEL, None);
            let own = std::io::pipe().expect("a pipe");
            let _asked = back_end.expect_state_fd(SAVE);
            back_end.reply(0, Some(own.0.as_fd()));
        },
        |device| {
            assert!(closed_by_exec(&device.save(ample()).expect("it begins").pipe));
            assert!(closed_by_exec(&device.load(ample()).expect("it begins").pipe));
            assert!(closed_by_exec(&device.save(ample()).expect("it begins").pipe), "one that the back-end brings");
        },
    );
}

#[test]
fn a_refusal_of_the_back_end_names_it_and_the_step() {
    const FAILED: u64 = NO_CHANNEL | 1;
    for (direction, step) in [(SAVE, Step::AskToSave), (LOAD, Step::AskToLoad)] {
        let error = against(
            move |mut back_end| {
                let _pipe = back_end.expect_state_fd(direction);
                back_end.reply(FAILED, None);
            },
            |device| {
                if direction == SAVE { error(device.save(ample())) } else { error(device.load(ample())) }
            },
        );
        assert!(matches!(&error, Error::Refused { step: at, .. } if *at == step), "{error:?}");
        assert!(error.to_string().contains("disk-0"), "{error}");
    }
    let saved = against(
        |mut back_end| {
            drop(back_end.expect_state_fd(SAVE));
            back_end.reply(NO_CHANNEL, None);
            back_end.expect_check();
            back_end.reply(1, None);
        },
        |device| {
            let mut saver = device.save(ample()).expect("it begins");
            assert_eq!(saver.read(&mut [0; 8], ample()).expect("an early end"), 0);
            error(saver.finish(ample()))
        },
    );
    assert!(matches!(saved, Error::Refused { step: Step::CheckSaved, .. }), "{saved:?}");
    let loaded = against(
        |mut back_end| {
            let mut pipe = back_end.expect_state_fd(LOAD);
            back_end.reply(NO_CHANNEL, None);
            pipe.read_to_end(&mut Vec::new()).expect("it is read");
            back_end.expect_check();
            back_end.reply(1, None);
        },
        |device| {
            let mut loader = device.load(ample()).expect("it begins");
            loader.write(b"damaged", ample()).expect("it is read");
            error(loader.finish(ample()))
        },
    );
    assert!(matches!(loaded, Error::Refused { step: Step::CheckLoaded, .. }), "{loaded:?}");
}

#[test]
fn a_state_that_was_not_read_to_its_end_cannot_be_finished() {
    let error = against(
        |mut back_end| {
            let mut pipe = back_end.expect_state_fd(SAVE);
            back_end.reply(NO_CHANNEL, None);
            pipe.write_all(b"more than is read").expect("it fits");
            assert!(back_end.next().is_none(), "no check is requested for an incomplete state");
        },
        |device| {
            let mut saver = device.save(ample()).expect("it begins");
            assert_eq!(saver.read(&mut [0; 4], ample()).expect("a part"), 4);
            error(saver.finish(ample()))
        },
    );
    assert!(matches!(error, Error::Unfinished { .. }), "{error:?}");
}

#[test]
fn a_back_end_that_answers_no_message_is_disconnected_at_the_deadline() {
    // The message may still arrive; no other one does, and the connection ends.
    fn hang(mut back_end: Double) {
        while let Some((request, ..)) = back_end.next() {
            assert!([double::SET_DEVICE_STATE_FD, double::CHECK_DEVICE_STATE].contains(&request), "{request}");
        }
    }
    for deadline in [past, || Instant::now() + Duration::from_millis(20)] {
        let save = against(hang, |device| error(device.save(deadline())));
        assert!(matches!(save, Error::Deadline { step: Step::AskToSave, disconnected: true, .. }), "{save:?}");
        let load = against(hang, |device| error(device.load(deadline())));
        assert!(matches!(load, Error::Deadline { step: Step::AskToLoad, disconnected: true, .. }), "{load:?}");
        assert!(load.to_string().contains("shut down"), "{load}");
        let check = against(
            |mut back_end| {
                let _pipe = back_end.expect_state_fd(LOAD);
                back_end.reply(NO_CHANNEL, None);
                hang(back_end);
            },
            |device| error(device.load(ample()).expect("it begins").finish(deadline())),
        );
        assert!(matches!(check, Error::Deadline { step: Step::CheckLoaded, disconnected: true, .. }), "{check:?}");
    }
}

#[test]
fn a_back_end_that_hangs_in_the_pipe_keeps_its_connection_at_the_deadline() {
    against(
        |mut back_end| {
            let pipe = back_end.expect_state_fd(SAVE);
            back_end.reply(NO_CHANNEL, None);
            // The second save begins while the first pipe is neither written nor closed.
            drop(back_end.expect_state_fd(SAVE));
            back_end.reply(NO_CHANNEL, None);
            drop(pipe);
            back_end.expect_check();
            back_end.reply(0, None);
        },
        |device| {
            let mut hangs = device.save(ample()).expect("it begins");
            let error = error(hangs.read(&mut [0; 8], past()));
            assert!(matches!(error, Error::Deadline { step: Step::Read, disconnected: false, .. }), "{error:?}");
            drop(hangs);
            let mut again = device.save(ample()).expect("the connection is as it was");
            assert_eq!(again.read(&mut [0; 8], ample()).expect("an empty state"), 0);
            assert_eq!(again.finish(ample()).expect("whole"), 0);
        },
    );
    let error = against(
        |mut back_end| {
            let _pipe = back_end.expect_state_fd(LOAD);
            back_end.reply(NO_CHANNEL, None);
            assert!(back_end.next().is_none(), "nothing more");
        },
        |device| {
            let mut loader = device.load(ample()).expect("it begins");
            // More than fits any pipe.
            error(loader.write(&vec![1; 4 * PIPE], past()))
        },
    );
    assert!(matches!(error, Error::Deadline { step: Step::Write, disconnected: false, .. }), "{error:?}");
}

#[test]
fn a_back_end_that_ends_is_reported_at_every_step() {
    let asked = against(|mut back_end| drop(back_end.expect_state_fd(SAVE)), |device| error(device.save(ample())));
    assert!(matches!(asked, Error::Gone { step: Step::AskToSave, .. }), "{asked:?}");

    // A child of the back-end may still have the pipe open, so the pipe does not end.
    let (keep, kept) = std::sync::mpsc::channel();
    let reading = against(
        move |mut back_end| {
            let pipe = back_end.expect_state_fd(SAVE);
            back_end.reply(NO_CHANNEL, None);
            keep.send(pipe).expect("the test waits");
        },
        |device| error(device.save(ample()).expect("it begins").read(&mut [0; 8], ample())),
    );
    drop(kept);
    assert!(matches!(reading, Error::Gone { step: Step::Read, .. }), "{reading:?}");

    // The pipe ends too: the bytes look like a complete state until the check.
    let checking = against(
        |mut back_end| {
            let mut pipe = back_end.expect_state_fd(SAVE);
            back_end.reply(NO_CHANNEL, None);
            pipe.write_all(b"half").expect("it fits");
        },
        |device| {
            let mut saver = device.save(ample()).expect("it begins");
            match read_all(&mut saver, 16) {
                // The connection may close before the pipe.
                Err(gone) => gone,
                Ok(half) => {
                    assert_eq!(half, b"half");
                    error(saver.finish(ample()))
                }
            }
        },
    );
    assert!(matches!(checking, Error::Gone { step: Step::CheckSaved | Step::Read, .. }), "{checking:?}");

    let writing = against(
        |mut back_end| {
            let _pipe = back_end.expect_state_fd(LOAD);
            back_end.reply(NO_CHANNEL, None);
        },
        |device| {
            let mut loader = device.load(ample()).expect("it begins");
            error(loader.write(&vec![1; 4 * PIPE], ample()))
        },
    );
    assert!(matches!(writing, Error::Gone { step: Step::Write, .. }), "{writing:?}");
    assert!(writing.to_string().contains("disk-0"), "{writing}");
}

#[test]
fn a_back_end_that_stops_reading_is_asked_why() {
    for (answer, refused) in [(1, true), (0, false)] {
        let error = against(
            move |mut back_end| {
                drop(back_end.expect_state_fd(LOAD));
                back_end.reply(NO_CHANNEL, None);
                back_end.expect_check();
                back_end.reply(answer, None);
            },
            |device| error(device.load(ample()).expect("it begins").write(&vec![1; 4 * PIPE], ample())),
        );
        match error {
            Error::Refused { step: Step::Write, .. } => assert!(refused),
            Error::StoppedReading { .. } => assert!(!refused),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_state_beyond_the_limit_is_neither_saved_nor_loaded() {
    let saved = against(
        |mut back_end| {
            let mut pipe = back_end.expect_state_fd(SAVE);
            back_end.reply(NO_CHANNEL, None);
            // Fails when the monitor gives up.
            while pipe.write_all(&[7; 4096]).is_ok() {}
        },
        |device| error(read_all(&mut device.with_limit(100_000).save(ample()).expect("it begins"), 5000)),
    );
    assert!(matches!(saved, Error::TooLarge { limit: 100_000, .. }), "{saved:?}");
    let loaded = against(
        |mut back_end| {
            let mut pipe = back_end.expect_state_fd(LOAD);
            back_end.reply(NO_CHANNEL, None);
            let mut read = Vec::new();
            pipe.read_to_end(&mut read).expect("it is read");
            assert_eq!(read, [1; 10]);
        },
        |device| {
            let mut loader = device.with_limit(10).load(ample()).expect("it begins");
            loader.write(&[1; 10], ample()).expect("just as much");
            error(loader.write(&[1], ample()))
        },
    );
    assert!(matches!(loaded, Error::TooLarge { limit: 10, .. }), "{loaded:?}");
}

#[test]
fn an_invalid_answer_is_a_violation_of_the_protocol() {
    let error = against(
        |mut back_end| {
            let _pipe = back_end.expect_state_fd(SAVE);
            back_end.reply_to(double::CHECK_DEVICE_STATE, NO_CHANNEL, None);
        },
        |device| error(device.save(ample())),
    );
    assert!(matches!(error, Error::Protocol { step: Step::AskToSave, .. }), "{error:?}");
}

#[test]
fn savers_and_loaders_can_move_between_threads() {
    fn send<T: Send + 'static>() {}
    send::<BackEnd>();
    send::<Saver>();
    send::<Loader>();
    let (frontend, features, _back_end) = connected(FEATURE);
    assert!(frontend.clone().get_max_mem_slots().is_err(), "only negotiated features are available");
    BackEnd::new("disk-0", &frontend, features).expect("the feature was negotiated");
}
