//! Several devices of one guest: none may write to one that is stopped.

use super::{ALL, loading, read_all, some_state};
use sterna_devices::vfio::model::{Call, Config, Fabric, Fault, Leaves, ModelDevice};
use sterna_devices::vfio::{
    Device, Flags, Loader, Peers, Saver, State, VfioError, abort_together, run_together, stop_together,
};

fn devices(fabric: &Fabric, flags: &[Flags]) -> (Vec<ModelDevice>, Vec<Saver<ModelDevice>>) {
    let device = |flags: &Flags| ModelDevice::new(Config::with_state(some_state(2000)).flags(*flags).on(fabric));
    let devices: Vec<_> = flags.iter().map(device).collect();
    let saver = |(at, device): (usize, &ModelDevice)| Saver::new(device.clone(), format!("device {at}")).unwrap();
    let savers = devices.iter().enumerate().map(saver).collect();
    (devices, savers)
}

fn all<T>(of: &mut [T]) -> Vec<&mut T> {
    of.iter_mut().collect()
}

#[test]
fn all_are_quiesced_before_one_stops_and_all_run_quiesced_before_one_writes() {
    let fabric = Fabric::default();
    let p2p = Flags::STOP_COPY.with_p2p();
    let (devices, mut savers) = devices(&fabric, &[ALL, p2p, ALL, p2p]);
    for saver in &mut savers {
        saver.begin(u64::MAX).unwrap();
    }
    stop_together(&mut all(&mut savers), Peers::MayWrite).unwrap();
    assert!(devices.iter().all(|device| device.state().unwrap() == State::StopCopy));

    let there = Fabric::default();
    let mut loaders: Vec<Loader<ModelDevice>> = Vec::new();
    for saver in &mut savers {
        let mut loader = loading(&ModelDevice::new(Config::empty(2000).on(&there)));
        loader.write(&read_all(saver).unwrap().1).unwrap();
        saver.finish().unwrap();
        loader.finish().unwrap();
        loaders.push(loader);
    }
    assert_eq!((fabric.running(), there.running()), (0, 0));
    run_together(&mut all(&mut loaders)).unwrap();
    run_together(&mut all(&mut loaders)).unwrap();
    assert_eq!((fabric.running(), there.running()), (0, 4));
    assert_eq!(fabric.violations(), [""; 0]);
    assert_eq!(there.violations(), [""; 0]);
}

#[test]
fn the_fabric_detects_a_wrong_order() {
    let fabric = Fabric::default();
    let (_devices, mut savers) = devices(&fabric, &[ALL, ALL]);
    savers[0].stop().unwrap();
    assert_eq!(fabric.violations().len(), 1, "device 1 may write to device 0, which is stopped");
}

#[test]
fn a_device_without_p2p_is_stopped_alone_or_with_the_callers_declaration() {
    let fabric = Fabric::default();
    let (devices, mut savers) = devices(&fabric, &[ALL, Flags::STOP_COPY]);
    let error = stop_together(&mut all(&mut savers), Peers::MayWrite).unwrap_err();
    assert!(matches!(&error, VfioError::Peers { device } if device == "device 1"), "{error}");
    assert!(devices.iter().all(|device| device.state().unwrap() == State::Running));
    assert!(fabric.steps().is_empty());
    stop_together(&mut all(&mut savers), Peers::Separate).unwrap();
    abort_together(&mut all(&mut savers)).unwrap();
    stop_together(&mut all(&mut savers[1..]), Peers::MayWrite).unwrap();
    stop_together::<ModelDevice>(&mut [], Peers::MayWrite).unwrap();
}

#[test]
fn if_one_device_cannot_stop_all_run_again() {
    for call in [State::PreCopyP2p, State::StopCopy].map(Call::SetStateTo) {
        let fabric = Fabric::default();
        let (devices, mut savers) = devices(&fabric, &[ALL; 3]);
        let contents: Vec<_> = devices.iter().map(ModelDevice::contents).collect();
        savers.iter_mut().for_each(|saver| assert!(saver.begin(u64::MAX).unwrap()));
        devices[1].fail(Fault::of(call));
        let error = stop_together(&mut all(&mut savers), Peers::MayWrite).unwrap_err();
        assert!(error.to_string().contains("device 1"), "{error}");
        abort_together(&mut all(&mut savers)).unwrap();
        assert_eq!(fabric.running(), 3);
        assert!(devices.iter().map(ModelDevice::contents).eq(contents));
        assert_eq!(fabric.violations(), [""; 0]);
    }
}

#[test]
fn while_one_has_failed_no_other_may_write_and_after_its_reset_all_run() {
    let fabric = Fabric::default();
    let (devices, mut savers) = devices(&fabric, &[ALL; 3]);
    devices[0].fail(Fault { leaves: Leaves::InError, ..Fault::of(Call::SetStateTo(State::StopCopy)) });
    stop_together(&mut all(&mut savers), Peers::MayWrite).unwrap_err();
    assert!(matches!(abort_together(&mut all(&mut savers)), Err(VfioError::NeedsReset { .. })));
    let states: Vec<_> = devices.iter().map(|device| device.state().unwrap()).collect();
    assert_eq!(states, [State::Error, State::RunningP2p, State::RunningP2p]);
    savers[0].reset().unwrap();
    abort_together(&mut all(&mut savers)).unwrap();
    assert!(devices.iter().all(|device| device.state().unwrap() == State::Running));
    assert_eq!(fabric.violations(), [""; 0]);
}

#[test]
fn a_failed_run_can_be_retried() {
    let there = Fabric::default();
    let (_source, mut savers) = devices(&Fabric::default(), &[ALL; 2]);
    stop_together(&mut all(&mut savers), Peers::MayWrite).unwrap();
    let to: Vec<_> = (0..2).map(|_| ModelDevice::new(Config::empty(2000).on(&there))).collect();
    let mut loaders: Vec<_> = to.iter().map(loading).collect();
    for (saver, loader) in savers.iter_mut().zip(&mut loaders) {
        loader.write(&read_all(saver).unwrap().1).unwrap();
        loader.finish().unwrap();
    }
    (0..3).for_each(|_| to[1].fail(Fault::of(Call::SetStateTo(State::Running))));
    run_together(&mut all(&mut loaders)).unwrap_err();
    assert!(loaders[0].is_running() && !loaders[1].is_running());
    run_together(&mut all(&mut loaders)).unwrap();
    assert_eq!(there.running(), 2);
    assert_eq!(there.violations(), [""; 0]);
}
