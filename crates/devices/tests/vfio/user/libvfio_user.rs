//! A device that libvfio-user serves, the library that most vfio-user devices use. Runs if `STERNA_LIBVFIO_USER` names
//! a checkout of the library that was built (with `meson setup build && ninja -C build`); there are no packages.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sterna_devices::vfio::{Device, DmaLog, DmaMapping, Loader, Saver, State, VfioError};
use sterna_devices::vfio_user::{Client, Command, VfioUserDevice};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::DirtyLog;

use super::super::conformance::Conformance;
use super::{Remote, carry, some_state};

const CHECKOUT: &str = "STERNA_LIBVFIO_USER";
const DMA_MAP: Command = Command(2);
const REGION_READ: Command = Command(9);
const REGION_WRITE: Command = Command(10);
/// Bytes of the device's state in the program.
const STATE: usize = 256 << 10;

/// Builds the program; returns `None` without the library.
fn program(directory: &Path) -> Option<PathBuf> {
    let Ok(checkout) = std::env::var(CHECKOUT) else {
        println!("skipped: {CHECKOUT} names no checkout of libvfio-user (docs/devices.md says how)");
        return None;
    };
    let (include, library) = (format!("-I{checkout}/include"), format!("{checkout}/build/lib"));
    let program = directory.join("libvfio_user");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vfio/user/libvfio_user.c");
    let mut cc = Process::new("cc");
    cc.args(["-O1", "-Wall", "-Werror", &include, "-o"]).arg(&program).arg(source);
    cc.args([&format!("-L{library}"), "-lvfio-user", &format!("-Wl,-rpath,{library}")]);
    assert!(cc.status().unwrap().success(), "{cc:?}");
    Some(program)
}

/// A device in a separate process, with a monitor's other operations on it.
struct Peer {
    process: Child,
    client: Arc<Client>,
}

impl Peer {
    fn start(program: &Path, socket: &Path) -> Self {
        let mut process = Process::new(program).arg(socket).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n");
        let client = Arc::new(Client::connect(socket, Duration::from_secs(60)).unwrap());
        Self { process, client }
    }

    fn device(&self) -> Remote {
        VfioUserDevice::new(Arc::clone(&self.client))
    }

    fn region(region: u32, offset: usize, length: usize) -> Vec<u8> {
        [&(offset as u64).to_ne_bytes()[..], &region.to_ne_bytes(), &(length as u32).to_ne_bytes()].concat()
    }

    fn write(&self, region: u32, offset: usize, bytes: &[u8]) {
        // The library treats a message that the kernel would divide as truncated.
        for (number, piece) in bytes.chunks(16 << 10).enumerate() {
            let head = Self::region(region, offset + (number << 14), piece.len());
            let written = self.client.call_with(REGION_WRITE, [&head, piece], &[], [&mut [0; 16], &mut []]).unwrap();
            assert_eq!(written, 16);
        }
    }

    fn state(&self) -> Vec<u8> {
        let mut bytes = vec![0; STATE];
        let head = Self::region(0, 0, STATE);
        self.client.call_with(REGION_READ, [&head, &[]], &[], [&mut [0; 16], &mut bytes]).unwrap();
        bytes
    }

    /// Maps all of `memory`, of so many pages, at `iova`.
    fn map(&self, memory: &OwnedFd, iova: u64, pages: u64) {
        let mut request = 32u32.to_ne_bytes().to_vec();
        request.extend(3u32.to_ne_bytes());
        request.extend([0, iova, pages * 4096].map(u64::to_ne_bytes).concat());
        self.client.call_with(DMA_MAP, [&request, &[]], &[memory.as_fd()], [&mut [], &mut []]).unwrap();
    }

    /// Makes the device write its address there.
    fn dma(&self, iova: u64) {
        self.write(1, 0, &iova.to_ne_bytes());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_device_of_libvfio_user_moves_with_its_changes_and_writes() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = program(directory.path()) else { return };
    let socket = |name: &str| directory.path().join(name);
    let (from, to) = (Peer::start(&program, &socket("from")), Peer::start(&program, &socket("to")));
    from.write(0, 0, &some_state(STATE));
    to.write(0, 0, &[9; STATE]);

    let changes = || {
        from.write(0, 123_456, &[0x55; 3000]);
        from.write(0, STATE - 1, &[0x66]);
    };
    carry(from.device(), to.device(), 1 << 20, changes).unwrap();
    let mut expected = some_state(STATE);
    expected[123_456..126_456].fill(0x55);
    expected[STATE - 1] = 0x66;
    assert!(to.state() == expected, "the state differs");
    assert_eq!((from.device().state().unwrap(), to.device().state().unwrap()), (State::Stop, State::Running));
    // And back, in small messages, all of it while the device is stopped.
    let mut saver = Saver::new(to.device(), "there").unwrap();
    assert!(!saver.flags().p2p() && saver.flags().pre_copy());
    saver.stop().unwrap();
    saver.abort().unwrap();
    from.device().set_state(State::Running).unwrap();
    carry(to.device(), from.device(), 777, || ()).unwrap();
    assert!(from.state() == expected, "the state differs");
}

#[test]
fn an_incomplete_state_does_not_load_and_a_reset_does_not_help() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = program(directory.path()) else { return };
    let peer = Peer::start(&program, &directory.path().join("peer"));
    let mut loader = Loader::new(peer.device(), "nic").unwrap();
    loader.begin().unwrap();
    loader.write(&[0; 4]).unwrap();
    let error = loader.finish().unwrap_err();
    assert!(matches!(&error, VfioError::Transition { now: Some(State::Resuming), .. }), "{error}");
    // The library resets the device, but not the state of its migration.
    let error = loader.abort().unwrap_err();
    assert!(error.to_string().contains("in RESUMING after its reset"), "{error}");
}

#[test]
fn libvfio_user_keeps_the_headers_guarantees_except_for_its_reset() {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = program(directory.path()) else { return };
    let peer = Peer::start(&program, &directory.path().join("peer"));
    let device = Conformance(Arc::new(peer.device()));
    device.refuses_invalid_states();
    device.does_not_go_back_from_stop_copy();
    device.runs_again_after_abort();
}

#[test]
fn pages_that_a_device_of_libvfio_user_writes_are_in_its_log() {
    const PAGES: u64 = 200;
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = program(directory.path()) else { return };
    let peer = Peer::start(&program, &directory.path().join("peer"));
    let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, PAGES * 4096).unwrap();
    let iovas = [0x10_0000, 1 << 32];
    iovas.iter().for_each(|iova| peer.map(&memory, *iova, PAGES));
    let mapping = |(block, iova): (usize, &u64)| DmaMapping { iova: *iova, pages: PAGES, block, first_page: 0 };
    let mappings = iovas.iter().enumerate().map(mapping).collect();
    let mut log = DmaLog::new(peer.device(), "nic", &[PAGES, PAGES], mappings).unwrap();
    peer.dma(iovas[0]);
    log.start().unwrap();
    for page in [3, 64, 199] {
        peer.dma(iovas[1] + page * 4096 + 16);
    }
    let mut dirty = [PageBitmap::new(PAGES), PageBitmap::new(PAGES)];
    for _ in 0..2 {
        for (block, dirty) in dirty.iter_mut().enumerate() {
            log.collect(block, dirty).unwrap();
        }
    }
    assert!(dirty[0].is_clean(), "the page was written before");
    let pages: Vec<u64> = (0..PAGES).filter(|page| dirty[1].contains(*page)).collect();
    assert_eq!(pages, [3, 64, 199]);
    let mut word = [0; 8];
    rustix::io::pread(&memory, &mut word, 64 * 4096 + 16).unwrap();
    assert_eq!(u64::from_ne_bytes(word), iovas[1] + 64 * 4096 + 16);
    log.stop().unwrap();
}
