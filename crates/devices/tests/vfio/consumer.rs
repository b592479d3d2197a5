//! One saver and one loader, each with the model.

use super::{ALL, FLAGS, loading, read_all, some_state};
use sterna_devices::vfio::model::{Call, Config, Fault, Leaves, ModelDevice};
use sterna_devices::vfio::{
    Chunk, Device, Flags, KernelDevice, Loader, PrecopyInfo, Remaining, Saver, State, VfioError,
};

fn source(flags: Flags) -> (ModelDevice, Saver<ModelDevice>) {
    let device = ModelDevice::new(Config::with_state(some_state(5000)).flags(flags));
    let saver = Saver::new(device.clone(), "source").unwrap();
    (device, saver)
}

#[test]
fn threads_may_have_savers_and_loaders_of_their_own() {
    fn send<T: Send>() {}
    send::<Saver<KernelDevice>>();
    send::<Loader<KernelDevice>>();
    send::<VfioError>();
}

#[test]
fn state_arrives_with_and_without_each_optional_state_while_the_guest_changes_it() {
    for flags in FLAGS {
        let (device, mut saver) = source(flags);
        let to = ModelDevice::new(Config::empty(5000).flags(flags));
        let mut loader = loading(&to);
        assert_eq!(saver.begin(u64::MAX).unwrap(), flags.pre_copy());
        for round in 0..3 {
            let (last, bytes) = read_all(&mut saver).unwrap();
            assert_eq!(last, Chunk::NothingNow);
            assert_eq!(bytes.is_empty(), !flags.pre_copy(), "{flags:?}, round {round}");
            loader.write(&bytes).unwrap();
            assert!(device.run(round * 1500));
        }
        saver.quiesce().unwrap();
        assert_eq!(saver.state().unwrap() != State::Running, flags.p2p() || flags.pre_copy());
        assert!(device.run(4999), "a quiesced device runs");
        saver.stop().unwrap();
        let (last, bytes) = read_all(&mut saver).unwrap();
        assert_eq!(last, Chunk::End);
        assert_eq!(saver.read(&mut [0; 1]).unwrap(), Chunk::End);
        loader.write(&bytes).unwrap();
        assert_eq!(saver.bytes_read(), loader.bytes_written());
        saver.finish().unwrap();
        loader.finish().unwrap();
        assert_eq!((device.state().unwrap(), to.state().unwrap()), (State::Stop, State::Stop));
        assert_eq!(to.contents(), device.contents());
        loader.run_quiesced().unwrap();
        loader.run().unwrap();
        assert!(to.runs_guest() && !device.runs_guest());
    }
}

#[test]
fn the_remaining_state_is_reported_and_decreases() {
    let (device, mut saver) = source(ALL);
    let before = saver.remaining().unwrap();
    assert_eq!(before.ahead, Some(PrecopyInfo::default()), "nothing can be read yet");
    assert!(before.stopped.unwrap() > 5000);
    saver.begin(u64::MAX).unwrap();
    let ahead = |saver: &Saver<ModelDevice>| saver.remaining().unwrap().ahead.unwrap();
    let begun = ahead(&saver);
    assert!(begun.initial_bytes > 5000 && begun.dirty_bytes == 0);
    let mut half = vec![0; begun.initial_bytes as usize / 2];
    assert_eq!(saver.read(&mut half).unwrap(), Chunk::Bytes(half.len()));
    assert_eq!(ahead(&saver).initial_bytes, begun.initial_bytes - half.len() as u64);
    read_all(&mut saver).unwrap();
    device.run(17);
    let (later, changed) = (saver.remaining().unwrap(), ahead(&saver));
    assert!(changed.initial_bytes == 0 && changed.dirty_bytes > 0, "{changed:?}");
    assert!(later.stopped.unwrap() > changed.dirty_bytes, "{later:?}");
    saver.stop().unwrap();
    assert_eq!(saver.remaining().unwrap(), Remaining { ahead: Some(PrecopyInfo::default()), stopped: later.stopped });
    read_all(&mut saver).unwrap();
    assert_eq!(saver.remaining().unwrap().stopped, Some(0));
}

#[test]
fn a_kernel_that_does_not_report_the_size_is_no_error_but_a_failing_one_is() {
    let device = ModelDevice::new(Config { reports_size: false, ..Config::with_state(some_state(100)) });
    assert_eq!(Saver::new(device, "nic").unwrap().remaining().unwrap().stopped, None);
    for call in [Call::DataSize, Call::PrecopyInfo] {
        let (device, mut saver) = source(ALL);
        saver.begin(u64::MAX).unwrap();
        device.fail(Fault::of(call));
        assert!(matches!(saver.remaining(), Err(VfioError::Size { .. })), "{call:?}");
        saver.remaining().unwrap();
    }
}

#[test]
fn no_more_is_read_ahead_than_allowed_and_the_rest_comes_after_the_stop() {
    let (device, mut saver) = source(ALL);
    let mut loader = loading(&ModelDevice::new(Config::empty(5000)));
    saver.begin(1000).unwrap();
    let (last, first) = read_all(&mut saver).unwrap();
    assert_eq!((last, first.len()), (Chunk::NothingNow, 1000));
    device.run(0);
    assert_eq!(read_all(&mut saver).unwrap(), (Chunk::NothingNow, vec![]));
    saver.stop().unwrap();
    let (last, rest) = read_all(&mut saver).unwrap();
    assert_eq!(last, Chunk::End);
    loader.write(&first).unwrap();
    loader.write(&rest).unwrap();
    loader.finish().unwrap();
}

#[test]
fn an_empty_buffer_is_not_mistaken_for_the_end() {
    let (_device, mut saver) = source(ALL);
    saver.begin(u64::MAX).unwrap();
    assert_eq!(saver.read(&mut []).unwrap(), Chunk::Bytes(0));
    saver.stop().unwrap();
    assert_eq!(saver.read(&mut []).unwrap(), Chunk::Bytes(0));
    assert!(matches!(saver.read(&mut [0; 8]).unwrap(), Chunk::Bytes(8)));
}

#[test]
fn a_driver_that_says_0_instead_of_enomsg_has_not_ended() {
    let device = ModelDevice::new(Config { zero_for_nothing: true, ..Config::with_state(some_state(900)) });
    let mut saver = Saver::new(device, "mtty").unwrap();
    saver.begin(u64::MAX).unwrap();
    assert_eq!(read_all(&mut saver).unwrap().0, Chunk::NothingNow);
    saver.stop().unwrap();
    let (last, bytes) = read_all(&mut saver).unwrap();
    assert!(last == Chunk::End && !bytes.is_empty());
}

#[test]
fn enomsg_from_a_stopped_device_is_an_error() {
    let (device, mut saver) = source(ALL);
    saver.stop().unwrap();
    device.fail(Fault { errno: libc::ENOMSG, ..Fault::of(Call::Read) });
    assert!(matches!(read_all(&mut saver), Err(VfioError::Read { after: 0, .. })));
    saver.abort().unwrap();
    assert!(device.runs_guest());
}

#[test]
fn interrupting_signals_are_not_errors() {
    let (device, mut saver) = source(ALL);
    let to = ModelDevice::new(Config::empty(5000));
    let mut loader = loading(&to);
    saver.stop().unwrap();
    device.fail(Fault { errno: libc::EINTR, after: 1, ..Fault::of(Call::Read) });
    to.fail(Fault { errno: libc::EINTR, ..Fault::of(Call::Write) });
    let (last, bytes) = read_all(&mut saver).unwrap();
    assert_eq!(last, Chunk::End);
    loader.write(&bytes).unwrap();
    loader.finish().unwrap();
    assert_eq!(to.contents(), device.contents());
}

#[test]
fn after_an_abort_in_any_phase_the_source_runs_with_its_state() {
    for flags in FLAGS {
        for phase in 0..6 {
            let (device, mut saver) = source(flags);
            let contents = device.contents();
            let steps: [fn(&mut Saver<ModelDevice>); 5] = [
                |saver| assert_eq!(saver.begin(u64::MAX).unwrap(), saver.flags().pre_copy()),
                |saver| saver.quiesce().unwrap(),
                |saver| saver.stop().unwrap(),
                |saver| assert_eq!(read_all(saver).unwrap().0, Chunk::End),
                |saver| saver.finish().unwrap(),
            ];
            steps[..phase].iter().for_each(|step| step(&mut saver));
            saver.abort().unwrap();
            assert_eq!(device.state().unwrap(), State::Running, "{flags:?}, after {phase} steps");
            assert_eq!(device.contents(), contents);
            assert!(device.runs_guest());
            // And the saver can begin again.
            steps.iter().for_each(|step| step(&mut saver));
            saver.abort().unwrap();
        }
    }
}

#[test]
fn a_source_in_error_is_not_reset_behind_the_callers_back() {
    let (device, mut saver) = source(ALL);
    saver.begin(u64::MAX).unwrap();
    device.fail(Fault { leaves: Leaves::InError, ..Fault::of(Call::SetState) });
    let error = saver.stop().unwrap_err();
    assert!(matches!(error, VfioError::Transition { now: Some(State::Error), .. }), "{error}");
    assert!(error.to_string().contains("must be reset"), "{error}");
    for _ in 0..2 {
        assert!(matches!(saver.abort(), Err(VfioError::NeedsReset { .. })));
        assert_eq!(device.state().unwrap(), State::Error);
    }
    device.fail(Fault::of(Call::Reset));
    assert!(matches!(saver.reset(), Err(VfioError::Reset { .. })));
    saver.reset().unwrap();
    assert_eq!(saver.state(), Some(State::Running));
    assert_eq!(device.contents(), vec![0; 5000]);
    saver.begin(u64::MAX).unwrap();
}

#[test]
fn an_abort_is_retried_from_the_state_in_which_the_kernel_left_the_device() {
    for leaves in [Leaves::Unchanged, Leaves::Midway(1), Leaves::Midway(2)] {
        let (device, mut saver) = source(ALL);
        saver.stop().unwrap();
        device.fail(Fault { leaves, ..Fault::of(Call::SetState) });
        // And the kernel does not report the state.
        device.fail(Fault::of(Call::State));
        saver.abort().unwrap();
        assert!(device.runs_guest(), "{leaves:?}");
    }
    let (device, mut saver) = source(ALL);
    saver.stop().unwrap();
    (0..3).for_each(|_| device.fail(Fault::of(Call::SetState)));
    assert!(matches!(saver.abort(), Err(VfioError::Transition { .. })));
    saver.abort().unwrap();
    assert!(device.runs_guest());
}

#[test]
fn devices_that_cannot_be_migrated_are_refused_before_anything_is_done() {
    let none = ModelDevice::new(Config { flags: None, ..Config::empty(1) });
    let error = Saver::new(none, "0000:06:00.0").unwrap_err();
    assert!(matches!(error, VfioError::NoMigration { .. }));
    assert!(error.to_string().contains("0000:06:00.0"), "{error}");
    let newer = ModelDevice::new(Config::empty(1).flags(Flags(1 << 7)));
    assert!(matches!(Loader::new(newer, "gpu"), Err(VfioError::Unsupported { .. })));
    let (device, _) = source(ALL);
    device.set_state(State::Stop).unwrap();
    assert!(matches!(Saver::new(device, "nic"), Err(VfioError::Busy { state: State::Stop, .. })));
}

#[test]
fn calls_out_of_order_are_refused_and_change_nothing() {
    fn order<T>(result: &Result<T, VfioError>) {
        assert!(matches!(result, Err(VfioError::Order { .. })));
    }
    let (device, mut saver) = source(ALL);
    order(&saver.finish());
    saver.begin(u64::MAX).unwrap();
    order(&saver.begin(u64::MAX));
    saver.stop().unwrap();
    order(&saver.stop());
    order(&saver.quiesce());
    order(&saver.finish());
    read_all(&mut saver).unwrap();
    saver.finish().unwrap();
    order(&saver.read(&mut [0; 1]));
    assert_eq!(device.state().unwrap(), State::Stop);

    let to = ModelDevice::new(Config::empty(10));
    let mut loader = Loader::new(to.clone(), "to").unwrap();
    order(&loader.write(&[1]));
    order(&loader.finish());
    order(&loader.run());
    loader.abort().unwrap();
    loader.begin().unwrap();
    order(&loader.begin());
    order(&loader.run_quiesced());
    assert_eq!(to.state().unwrap(), State::Resuming);
}

#[test]
fn a_destination_that_cannot_load_is_reset_and_can_begin_again() {
    let (_device, mut saver) = source(ALL);
    saver.stop().unwrap();
    let (_, bytes) = read_all(&mut saver).unwrap();
    for bad_state_is_error in [false, true] {
        let to = ModelDevice::new(Config { bad_state_is_error, ..Config::empty(5000) });
        let mut loader = loading(&to);
        loader.write(&bytes[1..]).unwrap();
        assert!(matches!(loader.finish(), Err(VfioError::Transition { .. })));
        assert!(matches!(loader.finish(), Err(VfioError::Order { .. })), "failed, so it must be aborted");
        assert!(!to.runs_guest());
        loader.abort().unwrap();
        assert_eq!((to.state().unwrap(), to.runs_guest()), (State::Running, false));
        loader.begin().unwrap();
        loader.write(&bytes).unwrap();
        loader.finish().unwrap();
        loader.run().unwrap();
        assert!(matches!(loader.abort(), Err(VfioError::Order { .. })), "a guest runs with it");
        assert!(to.runs_guest());
    }
}

#[test]
fn after_a_failed_write_nothing_more_is_accepted() {
    let to = ModelDevice::new(Config { max_transfer: 3, ..Config::empty(5000) });
    let mut loader = loading(&to);
    to.fail(Fault { after: 2, errno: libc::ENOSPC, ..Fault::of(Call::Write) });
    assert!(matches!(loader.write(&[1; 100]), Err(VfioError::Write { after: 6, .. })));
    assert!(matches!(loader.write(&[1; 100]), Err(VfioError::Order { .. })));
    assert!(matches!(loader.finish(), Err(VfioError::Order { .. })));
    to.fail(Fault::of(Call::Reset));
    assert!(matches!(loader.abort(), Err(VfioError::Reset { .. })));
    loader.abort().unwrap();
}
