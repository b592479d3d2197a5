//! The model's state machine compared with the header, for every set of flags.

use super::{ALL, FLAGS, errno, some_state};
use sterna_devices::vfio::model::{Call, Config, Fault, Leaves, ModelDevice, arcs};
use sterna_devices::vfio::{Data, Device, Flags, State};

fn device(flags: Flags) -> ModelDevice {
    ModelDevice::new(Config::with_state(some_state(3000)).flags(flags))
}

/// Returns a device in `state`, or `None` if the state is not offered. A device in RESUMING has received a complete
/// state.
fn device_in(flags: Flags, state: State) -> Option<(ModelDevice, Option<impl Data>)> {
    if !state.offered(flags) {
        return None;
    }
    let device = device(flags);
    if state == State::Error {
        device.fail(Fault { leaves: Leaves::InError, ..Fault::of(Call::SetState) });
        device.set_state(State::Stop).unwrap_err();
        return Some((device, None));
    }
    let whole = if state == State::Resuming { whole_stream(flags) } else { Vec::new() };
    let mut stream = device.set_state(state).unwrap();
    if let (Some(stream), State::Resuming) = (&mut stream, state) {
        assert_eq!(stream.write(&whole).unwrap(), whole.len());
    }
    Some((device, stream))
}

/// Returns the stream of a stopped device of these tests.
fn whole_stream(flags: Flags) -> Vec<u8> {
    let device = device(flags);
    let mut stream = device.set_state(State::StopCopy).unwrap().unwrap();
    let mut whole = vec![0; 10_000];
    let bytes = stream.read(&mut whole).unwrap();
    whole.truncate(bytes);
    assert_eq!(stream.read(&mut [0; 10]).unwrap(), 0);
    whole
}

/// The paths that the kernel's documentation of `vfio_mig_get_next_state()` lists for a device with all optional
/// states.
#[test]
fn changes_of_state_take_the_paths_that_the_kernel_documents() {
    use State::{PreCopy as PRE, PreCopyP2p as PRE_P2P, Resuming as RES, Running as RUN, RunningP2p as P2P};
    use State::{Stop as STOP, StopCopy as COPY};
    let documented: [&[State]; 26] = [
        &[PRE, PRE_P2P, COPY],
        &[PRE, RUN, P2P],
        &[PRE, RUN, P2P, STOP],
        &[PRE, RUN, P2P, STOP, RES],
        &[PRE_P2P, P2P, RUN],
        &[PRE_P2P, P2P, STOP],
        &[PRE_P2P, P2P, STOP, RES],
        &[RES, STOP, P2P],
        &[RES, STOP, P2P, PRE_P2P],
        &[RES, STOP, P2P, RUN],
        &[RES, STOP, P2P, RUN, PRE],
        &[RES, STOP, COPY],
        &[RUN, P2P, PRE_P2P],
        &[RUN, P2P, STOP],
        &[RUN, P2P, STOP, RES],
        &[RUN, P2P, STOP, COPY],
        &[P2P, RUN, PRE],
        &[P2P, STOP, RES],
        &[P2P, STOP, COPY],
        &[STOP, P2P, PRE_P2P],
        &[STOP, P2P, RUN],
        &[STOP, P2P, RUN, PRE],
        &[COPY, STOP, RES],
        &[COPY, STOP, P2P],
        &[COPY, STOP, P2P, RUN],
        &[PRE, PRE_P2P],
    ];
    for way in documented {
        assert_eq!(arcs::path(ALL, way[0], way[way.len() - 1]).as_deref(), Some(&way[1..]), "{way:?}");
    }
}

/// Optional states that a device lacks are omitted from the paths of a device that has all of them; nothing else
/// changes.
#[test]
fn a_device_without_optional_states_skips_them() {
    let states = State::ALL.into_iter().filter(|state| *state != State::Error);
    for flags in FLAGS {
        for from in states.clone().filter(|state| state.offered(flags)) {
            for to in states.clone().filter(|state| state.offered(flags)) {
                let full = arcs::path(ALL, from, to);
                let expected = full.map(|way| way.into_iter().filter(|state| state.offered(flags)).collect::<Vec<_>>());
                assert_eq!(arcs::path(flags, from, to), expected, "{flags:?}: {from} to {to}");
            }
        }
    }
}

#[test]
fn every_change_of_state_is_done_or_refused_with_einval_and_nothing_changed() {
    let mut done = 0;
    let mut refused = 0;
    for flags in FLAGS {
        for from in State::ALL {
            for to in State::ALL.into_iter().chain([State::Other(8), State::Other(u32::MAX)]) {
                let Some((device, _stream)) = device_in(flags, from) else { continue };
                let allowed = from != State::Error
                    && to != State::Error
                    && to.offered(flags)
                    && !(from == State::StopCopy && matches!(to, State::PreCopy | State::PreCopyP2p));
                let answer = device.set_state(to);
                if allowed {
                    let stream = answer.unwrap_or_else(|error| panic!("{flags:?}: {from} to {to}: {error}"));
                    let saves = |state| arcs::saves(state);
                    let begins = from != to && (to == State::Resuming || (saves(to) && !saves(from)));
                    assert_eq!(stream.is_some(), begins, "{flags:?}: {from} to {to}: a stream");
                    assert_eq!(device.state().unwrap(), to);
                    done += 1;
                } else {
                    assert_eq!(errno(answer), libc::EINVAL, "{flags:?}: {from} to {to}");
                    assert_eq!(device.state().unwrap(), from, "{flags:?}: {from} to {to}");
                    refused += 1;
                }
            }
        }
    }
    // Of 5, 6, 6 and 8 states (with ERROR), without the ones above.
    assert_eq!((done, refused), (16 + 25 + 24 + 47, 5 * 10 + 6 * 10 + 6 * 10 + 8 * 10 - 112));
}

#[test]
fn a_stream_lives_as_long_as_its_states() {
    let device = device(ALL);
    let mut buffer = [0; 64];
    let mut stream = device.set_state(State::PreCopy).unwrap().unwrap();
    assert_eq!(stream.read(&mut buffer).unwrap(), 64);
    for state in [State::PreCopyP2p, State::PreCopy, State::PreCopyP2p, State::StopCopy] {
        assert!(device.set_state(state).unwrap().is_none());
        assert_eq!(stream.read(&mut buffer).unwrap(), 64, "{state}");
    }
    assert_eq!(errno(stream.write(&buffer)), libc::EBADF);
    assert!(device.set_state(State::Stop).unwrap().is_none());
    assert_eq!(errno(stream.read(&mut buffer)), libc::ENODEV);

    let mut second = device.set_state(State::Resuming).unwrap().unwrap();
    assert_eq!(second.write(&buffer).unwrap(), 64);
    assert_eq!(errno(second.read(&mut buffer)), libc::EBADF);
    assert_eq!(errno(stream.read(&mut buffer)), libc::ENODEV, "a new stream does not bring back an old one");
    device.reset().unwrap();
    assert_eq!(errno(second.write(&buffer)), libc::ENODEV);
    assert_eq!(device.state().unwrap(), State::Running);
}

#[test]
fn precopy_info_is_of_the_precopy_states_only() {
    let with = device(ALL);
    let stream = with.set_state(State::PreCopy).unwrap().unwrap();
    let initial = stream.precopy_info().unwrap().initial_bytes;
    assert!(initial > 3000, "{initial}");
    with.set_state(State::PreCopyP2p).unwrap();
    assert_eq!(stream.precopy_info().unwrap().initial_bytes, initial);
    with.set_state(State::StopCopy).unwrap();
    assert_eq!(errno(stream.precopy_info()), libc::EINVAL);

    let without = device(Flags::STOP_COPY.with_p2p());
    let stream = without.set_state(State::StopCopy).unwrap().unwrap();
    assert_eq!(errno(stream.precopy_info()), libc::ENOTTY);
}

#[test]
fn in_precopy_the_stream_ends_for_now_and_in_stop_copy_for_good() {
    let device = device(ALL);
    let mut stream = device.set_state(State::PreCopy).unwrap().unwrap();
    let mut buffer = [0; 10_000];
    let first = stream.read(&mut buffer).unwrap();
    assert_eq!(errno(stream.read(&mut buffer)), libc::ENOMSG);
    assert_eq!(stream.precopy_info().unwrap(), Default::default());
    assert!(device.run(1) && device.run(2500));
    let dirty = stream.precopy_info().unwrap();
    assert!(dirty.initial_bytes == 0 && dirty.dirty_bytes > 0 && dirty.dirty_bytes < first as u64, "{dirty:?}");
    assert_eq!(stream.read(&mut buffer).unwrap() as u64, dirty.dirty_bytes);
    assert_eq!(errno(stream.read(&mut buffer)), libc::ENOMSG);

    device.set_state(State::StopCopy).unwrap();
    assert!(!device.run(1), "a stopped device must not change");
    assert_eq!(device.data_size().unwrap(), stream.read(&mut buffer).unwrap() as u64);
    assert_eq!(stream.read(&mut buffer).unwrap(), 0);
    assert_eq!(stream.read(&mut buffer).unwrap(), 0);
}

#[test]
fn an_invalid_state_is_refused_when_the_device_leaves_resuming() {
    let whole = whole_stream(ALL);
    let mut repeated = whole.clone();
    repeated.extend(&whole);
    let mut flipped = whole.clone();
    flipped[1500] ^= 1;
    let cases =
        [("nothing", &[][..]), ("a byte less", &whole[..whole.len() - 1]), ("twice", &repeated), ("a bit", &flipped)];
    for (what, bytes) in cases {
        for bad_state_is_error in [false, true] {
            let device = ModelDevice::new(Config { bad_state_is_error, ..Config::empty(3000) });
            let mut stream = device.set_state(State::Resuming).unwrap().unwrap();
            assert_eq!(stream.write(bytes).unwrap(), bytes.len());
            assert_eq!(errno(device.set_state(State::Running)), libc::EINVAL, "{what}");
            let expected = if bad_state_is_error { State::Error } else { State::Resuming };
            assert_eq!(device.state().unwrap(), expected, "{what}");
            assert!(!device.runs_guest(), "{what}");
        }
    }
    let device = ModelDevice::new(Config::empty(2999));
    device.set_state(State::Resuming).unwrap().unwrap().write(&whole).unwrap();
    assert_eq!(errno(device.set_state(State::Stop)), libc::EINVAL, "a device of another size");
}

#[test]
fn faults_leave_the_device_in_the_configured_state() {
    let cases = [
        (Leaves::Unchanged, State::PreCopy),
        (Leaves::Midway(1), State::Running),
        (Leaves::Midway(2), State::RunningP2p),
        (Leaves::Midway(99), State::RunningP2p),
        (Leaves::InError, State::Error),
    ];
    for (leaves, left) in cases {
        let device = device(ALL);
        let mut stream = device.set_state(State::PreCopy).unwrap().unwrap();
        device.fail(Fault { leaves, ..Fault::of(Call::SetStateTo(State::Stop)) });
        assert_eq!(errno(device.set_state(State::Stop)), libc::EIO, "{leaves:?}");
        assert_eq!(device.state().unwrap(), left, "{leaves:?}");
        let alive = stream.read(&mut [0; 10]).is_ok();
        assert_eq!(alive, left == State::PreCopy, "{leaves:?}");
        if left == State::Error {
            assert_eq!(errno(device.set_state(State::Running)), libc::EINVAL);
            device.reset().unwrap();
        }
        assert!(device.set_state(State::Stop).is_ok());
    }
}

#[test]
fn a_fault_occurs_once_after_its_number_of_calls() {
    let device = device(ALL);
    device.fail(Fault { after: 2, errno: libc::ENOSPC, ..Fault::of(Call::DataSize) });
    let answers: Vec<_> = (0..5).map(|_| device.data_size().map_err(|error| error.raw_os_error())).collect();
    assert_eq!(answers.iter().position(|answer| *answer == Err(Some(libc::ENOSPC))), Some(2));
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 4);
}

#[test]
fn a_device_that_does_not_migrate_answers_enotty_to_every_call() {
    let device = ModelDevice::new(Config { flags: None, dma_page_size: None, ..Config::empty(10) });
    assert_eq!(errno(device.migration()), libc::ENOTTY);
    assert_eq!(errno(device.state()), libc::ENOTTY);
    assert_eq!(errno(device.set_state(State::Stop)), libc::ENOTTY);
    assert_eq!(errno(device.data_size()), libc::ENOTTY);
    assert_eq!(errno(device.dma_logging_start(4096, &[])), libc::ENOTTY);
    assert_eq!(errno(device.dma_logging_stop()), libc::ENOTTY);
}
