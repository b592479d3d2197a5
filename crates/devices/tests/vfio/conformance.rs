//! The header's guarantees for every device, checked for the model, and for a real device if `STERNA_VFIO_DEVICE` names
//! one: `/dev/vfio/devices/vfio0`, or `/dev/vfio/12=0000:06:00.1` for a device of a group. The device must have a VFIO
//! driver that migrates and no user; its state is lost. Several devices of the same kind, separated by commas, are also
//! stopped and loaded together.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::user::server::{Manner, Server, reach};
use super::{FLAGS, some_state, user};
use sterna_devices::vfio::model::{Config, Fabric, ModelDevice};
use sterna_devices::vfio::{
    Chunk, Device, DmaLog, DmaMapping, DmaRange, KernelDevice, Loader, Peers, Saver, State, abort_together,
    run_together, stop_together,
};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::DirtyLog;

const REAL: &str = "STERNA_VFIO_DEVICE";

fn open(name: &str) -> io::Result<KernelDevice> {
    match name.split_once('=') {
        Some((group, device)) => KernelDevice::open_in_group(Path::new(group), device),
        None => KernelDevice::open(Path::new(name)),
    }
}

fn refused<T>(answer: io::Result<T>) {
    assert_eq!(answer.err().and_then(|error| error.raw_os_error()), Some(libc::EINVAL));
}

/// The tests, for any device.
pub(crate) struct Conformance<D>(pub(crate) Arc<D>);

impl<D: Device> Conformance<D> {
    pub(crate) fn refuses_invalid_states(&self) {
        let flags = self.0.migration().unwrap();
        let none = [State::Error, State::Other(8), State::Other(u32::MAX)];
        for state in none.into_iter().chain(State::ALL.into_iter().filter(|state| !state.offered(flags))) {
            refused(self.0.set_state(state));
            assert_eq!(self.0.state().unwrap(), State::Running, "{state}");
        }
    }

    /// Not for the kernel: Linux 6.12 does not refuse these transitions but searches for a path for ever
    /// (`vfio_mig_get_next_state` treats ERROR as a state that is not offered, and steps from ERROR to ERROR), which
    /// occupies a CPU for good. Tried with `mtty`.
    pub(crate) fn does_not_go_back_from_stop_copy(&self) {
        let stream = self.0.set_state(State::StopCopy).unwrap();
        for state in [State::PreCopy, State::PreCopyP2p] {
            refused(self.0.set_state(state));
            assert_eq!(self.0.state().unwrap(), State::StopCopy, "{state}");
        }
        drop(stream);
        assert!(self.0.set_state(State::Running).unwrap().is_none());
    }

    fn goes_to_every_state_that_it_offers(&self) {
        let flags = self.0.migration().unwrap();
        for state in State::ALL.into_iter().filter(|state| *state != State::Error && state.offered(flags)) {
            let stream = self.0.set_state(state).unwrap();
            assert_eq!(self.0.state().unwrap(), state);
            let with = matches!(state, State::PreCopy | State::PreCopyP2p | State::StopCopy | State::Resuming);
            assert_eq!(stream.is_some(), with, "{state}");
            if state == State::Resuming {
                self.0.reset().unwrap();
                assert_eq!(self.0.state().unwrap(), State::Running);
            } else {
                assert!(self.0.set_state(State::Running).unwrap().is_none(), "{state}");
            }
        }
    }

    fn loads_its_own_state(&self) {
        let mut saver = Saver::new(self.0.clone(), "device under test").unwrap();
        let mut state = Vec::new();
        let mut buffer = vec![0; 100_000];
        let mut rest = |saver: &mut Saver<Arc<D>>| {
            loop {
                match saver.read(&mut buffer).unwrap() {
                    Chunk::Bytes(count) => state.extend(&buffer[..count]),
                    other => return (other, state.clone()),
                }
            }
        };
        if saver.begin(64 << 20).unwrap() {
            println!("before: {:?}", saver.remaining().unwrap());
            assert_eq!(rest(&mut saver).0, Chunk::NothingNow);
        }
        saver.quiesce().unwrap();
        saver.stop().unwrap();
        println!("stopped: {:?}", saver.remaining().unwrap());
        let (last, state) = rest(&mut saver);
        assert_eq!(last, Chunk::End);
        println!("{} bytes of state", state.len());
        saver.finish().unwrap();
        assert_eq!(self.0.state().unwrap(), State::Stop);
        saver.abort().unwrap();

        let mut loader = Loader::new(self.0.clone(), "device under test").unwrap();
        loader.begin().unwrap();
        loader.write(&state[..state.len() / 2]).unwrap();
        let error = loader.finish().unwrap_err();
        println!("half of it: {error}");
        loader.abort().unwrap();
        assert_eq!(self.0.state().unwrap(), State::Running);

        loader.begin().unwrap();
        // Divided differently than it was read.
        state.chunks(4093).for_each(|chunk| loader.write(chunk).unwrap());
        loader.finish().unwrap();
        loader.run_quiesced().unwrap();
        loader.run().unwrap();
        assert_eq!(self.0.state().unwrap(), State::Running);
    }

    pub(crate) fn runs_again_after_abort(&self) {
        let mut saver = Saver::new(self.0.clone(), "device under test").unwrap();
        for read in [0, 1, 2] {
            saver.begin(u64::MAX).unwrap();
            saver.quiesce().unwrap();
            saver.stop().unwrap();
            for _ in 0..read {
                saver.read(&mut [0; 100]).unwrap();
            }
            saver.abort_quiesced().unwrap();
            saver.abort().unwrap();
            assert_eq!(self.0.state().unwrap(), State::Running);
        }
    }

    fn logs_dma(&self) {
        let range = DmaRange { iova: 0, length: 1 << 20 };
        match self.0.dma_logging_start(4096, &[range]) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => return println!("it has no DMA log"),
            answer => println!("DMA log in pages of {} bytes", answer.unwrap()),
        }
        let mut words = [0; 4];
        let report = self.0.dma_logging_report(range, 4096, &mut words);
        self.0.dma_logging_stop().unwrap();
        match report {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                return println!("no DMA log: this kernel cannot report it (it has no CONFIG_IOMMUFD_DRIVER)");
            }
            report => report.unwrap(),
        }
        assert_eq!(words, [0; 4], "nothing has made the device write");
        // Not tested: a second start, a report without a start. `mtty` writes nothing and accepts both.
        let mapping = DmaMapping { iova: 0, pages: 256, block: 0, first_page: 0 };
        let mut log = DmaLog::new(self.0.clone(), "device under test", &[256], vec![mapping]).unwrap();
        let mut dirty = PageBitmap::new(256);
        for _ in 0..2 {
            log.start().unwrap();
            log.collect(0, &mut dirty).unwrap();
            log.stop().unwrap();
        }
        assert!(dirty.is_clean());
    }

    fn all(&self) {
        self.refuses_invalid_states();
        self.goes_to_every_state_that_it_offers();
        self.loads_its_own_state();
        self.runs_again_after_abort();
        self.logs_dma();
    }
}

/// Stops all together, runs them again together, and then each with the state of the previous one.
fn several<D: Device>(devices: &[Arc<D>]) {
    let saver = |(at, device): (usize, &Arc<D>)| Saver::new(device.clone(), format!("device {at}")).unwrap();
    let mut savers: Vec<_> = devices.iter().enumerate().map(saver).collect();
    let all_p2p = savers.iter().all(|saver| saver.flags().p2p());
    let peers = if all_p2p { Peers::MayWrite } else { Peers::Separate };
    let mut states = vec![Vec::new(); devices.len()];
    let read = |saver: &mut Saver<Arc<D>>, state: &mut Vec<u8>| {
        let mut buffer = [0; 10_000];
        loop {
            match saver.read(&mut buffer).unwrap() {
                Chunk::Bytes(count) => state.extend(&buffer[..count]),
                other => return other,
            }
        }
    };
    for (saver, state) in savers.iter_mut().zip(&mut states) {
        saver.begin(64 << 20).unwrap();
        assert_eq!(read(saver, state), Chunk::NothingNow);
    }
    stop_together(&mut savers.iter_mut().collect::<Vec<_>>(), peers).unwrap();
    for (saver, state) in savers.iter_mut().zip(&mut states) {
        assert_eq!(read(saver, state), Chunk::End);
        saver.finish().unwrap();
    }
    abort_together(&mut savers.iter_mut().collect::<Vec<_>>()).unwrap();
    assert!(devices.iter().all(|device| device.state().unwrap() == State::Running));

    states.rotate_right(1);
    let loader = |(at, device): (usize, &Arc<D>)| Loader::new(device.clone(), format!("device {at}")).unwrap();
    let mut loaders: Vec<_> = devices.iter().enumerate().map(loader).collect();
    for (loader, state) in loaders.iter_mut().zip(&states) {
        loader.begin().unwrap();
        loader.write(state).unwrap();
        loader.finish().unwrap();
    }
    run_together(&mut loaders.iter_mut().collect::<Vec<_>>()).unwrap();
    assert!(devices.iter().all(|device| device.state().unwrap() == State::Running));
}

#[test]
fn several_models_run_with_each_others_state() {
    for flags in FLAGS {
        let fabric = Fabric::default();
        let state = |at: u8| some_state(4000).iter().map(|byte| byte ^ at).collect::<Vec<_>>();
        let device = |at| Arc::new(ModelDevice::new(Config::with_state(state(at)).flags(flags).on(&fabric)));
        let devices: Vec<_> = (0..3).map(device).collect();
        several(&devices);
        for (at, device) in devices.iter().enumerate() {
            assert_eq!(device.contents(), state((at as u8 + 2) % 3), "{flags:?}, device {at}");
        }
    }
}

#[test]
fn the_model_keeps_the_headers_guarantees() {
    for flags in FLAGS {
        let model = Conformance(Arc::new(ModelDevice::new(Config::with_state(some_state(4000)).flags(flags))));
        model.does_not_go_back_from_stop_copy();
        model.all();
    }
}

#[test]
fn the_model_behind_a_vfio_user_server_keeps_the_headers_guarantees() {
    for flags in user::FLAGS {
        let model = ModelDevice::new(Config::with_state(some_state(4000)).flags(flags));
        let (_server, stream) = Server::start(model, Manner::default());
        let remote = Conformance(Arc::new(reach(stream).unwrap()));
        remote.does_not_go_back_from_stop_copy();
        remote.all();
    }
}

/// One test, since a real device has one user at a time.
#[test]
fn a_real_device_keeps_the_headers_guarantees() {
    let Ok(name) = std::env::var(REAL) else {
        return println!("skipped: {REAL} names no device (docs/devices.md says how)");
    };
    let devices: Vec<_> = name
        .split(',')
        .map(|name| Arc::new(open(name).unwrap_or_else(|error| panic!("{REAL}: {name}: {error}"))))
        .collect();
    for device in &devices {
        Conformance(device.clone()).all();
    }
    println!("{} devices together", devices.len());
    several(&devices);
    devices.iter().for_each(|device| device.reset().unwrap());
}

#[test]
fn a_file_that_is_not_a_vfio_device_does_not_migrate() {
    let file = tempfile::tempfile().unwrap();
    let device = KernelDevice::new(file.into());
    assert_eq!(super::errno(device.migration()), libc::ENOTTY);
    assert_eq!(super::errno(device.set_state(State::Stop)), libc::ENOTTY);
    assert_eq!(super::errno(device.reset()), libc::ENOTTY);
    assert_eq!(super::errno(device.dma_logging_stop()), libc::ENOTTY);
    assert!(KernelDevice::open(Path::new("/dev/vfio/devices/none")).is_err());
}
