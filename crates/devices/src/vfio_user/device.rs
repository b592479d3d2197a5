//! A server's device, with VFIO's interface: the specification's `DEVICE_FEATURE`, `MIG_DATA_READ`, `MIG_DATA_WRITE`
//! and `DEVICE_RESET`.

use std::io;
use std::sync::Arc;

use vfio_bindings::bindings::vfio as abi;

use super::connection::{Command, Connection};
use crate::vfio::{Data, Device, DmaRange, Flags, PrecopyInfo, State};

const GET: u32 = abi::VFIO_DEVICE_FEATURE_GET;
const SET: u32 = abi::VFIO_DEVICE_FEATURE_SET;

/// Bytes of `argsz` and `flags`, with which every feature begins, and of `argsz` and `size`, with which every piece of
/// state begins.
const HEAD: usize = 8;
/// Bytes of `iova`, `length` and `page_size`, with which a report of DMA begins.
const REPORT: usize = 24;
/// Maximum bytes of a state that are written in one message. libvfio-user treats the result of one call of `recv` as a
/// whole message (`tran_sock_recv_body`), and a unix socket returns no more in one piece than it was passed in one:
/// some 48 KiB.
const MAX_WRITTEN: usize = 32 << 10;

/// The device behind a connection.
#[derive(Debug)]
pub struct VfioUserDevice<C> {
    connection: Arc<C>,
}

impl<C> Clone for VfioUserDevice<C> {
    /// Returns the same device.
    fn clone(&self) -> Self {
        Self { connection: Arc::clone(&self.connection) }
    }
}

impl<C: Connection> VfioUserDevice<C> {
    /// Makes the device of the server at the other end.
    pub fn new(connection: Arc<C>) -> Self {
        Self { connection }
    }

    /// Gets a feature whose data has `N` bytes.
    fn get<const N: usize>(&self, feature: u32) -> io::Result<[u8; N]> {
        let (mut head, mut data) = ([0; HEAD], [0; N]);
        let request = two(HEAD + N, GET | feature)?;
        let length = call(&*self.connection, Command::DEVICE_FEATURE, [&request, &[]], [&mut head, &mut data])?;
        if length < HEAD + N {
            return Err(too_short(length, HEAD + N));
        }
        Ok(data)
    }

    /// Sets a feature; the server's reply replaces `data`.
    fn set(&self, feature: u32, data: &mut [u8]) -> io::Result<()> {
        let due = HEAD + data.len();
        let request = two(due, SET | feature)?;
        let (mut head, sent) = ([0; HEAD], data.to_vec());
        let length = call(&*self.connection, Command::DEVICE_FEATURE, [&request, &sent], [&mut head, data])?;
        if length < due { Err(too_short(length, due)) } else { Ok(()) }
    }
}

/// Calls `Connection::call` and makes its errors final: VFIO's callers repeat calls that a signal has interrupted, and
/// a server must not be able to cause this for ever.
fn call(
    connection: &impl Connection,
    command: Command,
    request: [&[u8]; 2],
    reply: [&mut [u8]; 2],
) -> io::Result<usize> {
    connection.call(command, request, reply).map_err(|error| match error.kind() {
        io::ErrorKind::Interrupted => io::Error::from_raw_os_error(libc::EIO),
        _ => error,
    })
}

fn too_short(length: usize, expected: usize) -> io::Error {
    let problem = format!("the vfio-user server's reply has {length} bytes where {expected} are due");
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// Returns two numbers of 32 bits, in the byte order of this machine, as in all of the protocol.
fn two(first: usize, second: u32) -> io::Result<[u8; 8]> {
    let first = u32::try_from(first).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&first.to_ne_bytes());
    bytes[4..].copy_from_slice(&second.to_ne_bytes());
    Ok(bytes)
}

fn number32(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Returns whether the server has a saving session in this state.
fn saves(state: State) -> bool {
    matches!(state, State::PreCopy | State::PreCopyP2p | State::StopCopy)
}

impl<C: Connection> Device for VfioUserDevice<C> {
    type Data = VfioUserData<C>;

    fn migration(&self) -> io::Result<Flags> {
        Ok(Flags(u64::from_ne_bytes(self.get(abi::VFIO_DEVICE_FEATURE_MIGRATION)?)))
    }

    fn state(&self) -> io::Result<State> {
        // `device_state`, and a `data_fd` that vfio-user does not use.
        let data: [u8; 8] = self.get(abi::VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE)?;
        Ok(State::from_number(number32(&data)))
    }

    /// As the trait; the server's present state is queried to determine whether a stream begins.
    fn set_state(&self, state: State) -> io::Result<Option<VfioUserData<C>>> {
        let begins = if saves(state) || state == State::Resuming {
            let from = self.state()?;
            from != state && !(saves(from) && saves(state))
        } else {
            false
        };
        let mut data = [0; 8];
        data[..4].copy_from_slice(&state.number().to_ne_bytes());
        self.set(abi::VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE, &mut data)?;
        if number32(&data) != state.number() {
            let other = State::from_number(number32(&data));
            let problem = format!("the vfio-user server was to go to {state} and reports that it went to {other}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        Ok(begins.then(|| VfioUserData { connection: Arc::clone(&self.connection) }))
    }

    /// Always `ENOTTY`: the specification has no such feature.
    fn data_size(&self) -> io::Result<u64> {
        Err(io::Error::from_raw_os_error(libc::ENOTTY))
    }

    /// # Errors
    /// Also if the server has accepted the command, but is not in RUNNING afterwards.
    fn reset(&self) -> io::Result<()> {
        call(&*self.connection, Command::DEVICE_RESET, [&[], &[]], [&mut [], &mut []])?;
        match self.state()? {
            State::Running => Ok(()),
            // libvfio-user resets the device, but does not change its migration state.
            state => Err(io::Error::other(format!(
                "the vfio-user server is in {state} after its reset; end its process and start it again"
            ))),
        }
    }

    fn dma_logging_start(&self, page_size: u64, ranges: &[DmaRange]) -> io::Result<u64> {
        let count = u32::try_from(ranges.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
        let mut data = Vec::with_capacity(16 + 16 * ranges.len());
        data.extend(page_size.to_ne_bytes());
        data.extend(count.to_ne_bytes());
        data.extend([0; 4]);
        for range in ranges {
            data.extend(range.iova.to_ne_bytes());
            data.extend(range.length.to_ne_bytes());
        }
        self.set(abi::VFIO_DEVICE_FEATURE_DMA_LOGGING_START, &mut data)?;
        let (chosen, _) = data.split_first_chunk().expect("it begins with eight bytes");
        Ok(u64::from_ne_bytes(*chosen))
    }

    fn dma_logging_report(&self, range: DmaRange, page_size: u64, bitmap: &mut [u64]) -> io::Result<()> {
        let words = match page_size {
            0 => usize::MAX,
            size => usize::try_from(range.length.div_ceil(size).div_ceil(64)).unwrap_or(usize::MAX),
        };
        let Some(bitmap) = bitmap.get_mut(..words) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        let mut request = [0; HEAD + REPORT];
        let due = request.len() + 8 * words;
        request[..HEAD].copy_from_slice(&two(due, GET | abi::VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT)?);
        for (place, number) in request[HEAD..].chunks_exact_mut(8).zip([range.iova, range.length, page_size]) {
            place.copy_from_slice(&number.to_ne_bytes());
        }
        let (mut head, mut bits) = ([0; HEAD + REPORT], vec![0; 8 * words]);
        let length = call(&*self.connection, Command::DEVICE_FEATURE, [&request, &[]], [&mut head, &mut bits])?;
        if length < due {
            return Err(too_short(length, due));
        }
        for (word, bits) in bitmap.iter_mut().zip(bits.as_chunks().0) {
            *word |= u64::from_ne_bytes(*bits);
        }
        Ok(())
    }

    fn dma_logging_stop(&self) -> io::Result<()> {
        self.set(abi::VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP, &mut [])
    }

    /// True: libvfio-user supports no other report (`ENOTSUP`).
    fn reports_whole_mappings(&self) -> bool {
        true
    }
}

/// The session in which a server saves or loads its state. A session has no identifier: it ends when the device leaves
/// that state.
#[derive(Debug)]
pub struct VfioUserData<C> {
    connection: Arc<C>,
}

impl<C: Connection> VfioUserData<C> {
    /// Returns as much of `length` bytes as fits one message.
    fn piece(&self, length: usize) -> usize {
        // A request for 0 bytes would return 0 bytes, which means the end of a state.
        length.min(self.connection.max_data().clamp(1, 1 << 30))
    }
}

impl<C: Connection> Data for VfioUserData<C> {
    /// Returns 0 at the end, and if there is nothing now. For the specification a short read is the end, too;
    /// libvfio-user's devices may return less and have more, and all of them return 0 to a further request.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = self.piece(buffer.len());
        let mut head = [0; HEAD];
        let request = two(HEAD + most, most as u32)?;
        let reply: [&mut [u8]; 2] = [&mut head, &mut buffer[..most]];
        let length = call(&*self.connection, Command::MIG_DATA_READ, [&request, &[]], reply)?;
        // The reply may be longer than its content: libvfio-user's replies are always as long as requested.
        let given = number32(&head[4..]) as usize;
        if length < HEAD || given > most || length < HEAD + given {
            return Err(too_short(length, HEAD + given));
        }
        Ok(given)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..self.piece(bytes.len().min(MAX_WRITTEN))];
        // `argsz` counts the sent bytes, although the reply has no payload: libvfio-user refuses less.
        let head = two(HEAD + piece.len(), piece.len() as u32)?;
        call(&*self.connection, Command::MIG_DATA_WRITE, [&head, piece], [&mut [], &mut []])?;
        Ok(piece.len())
    }

    /// Always `ENOTTY`: the specification has no such command.
    fn precopy_info(&self) -> io::Result<PrecopyInfo> {
        Err(io::Error::from_raw_os_error(libc::ENOTTY))
    }
}
