//! VFIO: the model compared with the kernel header's state machine, and the consumer tested with the model, by calls
//! and by vfio-user.

mod conformance;
mod consumer;
mod dma;
mod random;
mod states;
mod together;
mod user;

use std::io;

use sterna_devices::vfio::model::ModelDevice;
use sterna_devices::vfio::{Chunk, Flags, Loader, Saver, VfioError};

/// Every set of optional states.
const FLAGS: [Flags; 4] = [
    Flags::STOP_COPY,
    Flags::STOP_COPY.with_p2p(),
    Flags::STOP_COPY.with_pre_copy(),
    Flags::STOP_COPY.with_p2p().with_pre_copy(),
];

const ALL: Flags = FLAGS[3];

/// Returns a state of `size` bytes without equal pieces.
fn some_state(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at ^ (at >> 8).wrapping_mul(31)) as u8).collect()
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// Reads until there is nothing now, or the end. Returns the last answer, and the bytes.
fn read_all(saver: &mut Saver<ModelDevice>) -> Result<(Chunk, Vec<u8>), VfioError> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 700];
    loop {
        match saver.read(&mut buffer)? {
            Chunk::Bytes(count) => bytes.extend(&buffer[..count]),
            other => return Ok((other, bytes)),
        }
    }
}

/// Returns a loader that is ready to load a state.
fn loading(device: &ModelDevice) -> Loader<ModelDevice> {
    let mut loader = Loader::new(device.clone(), "destination").unwrap();
    loader.begin().unwrap();
    loader
}
