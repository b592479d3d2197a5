//! A vfio-user server for any device: it checks strictly what the specification requires of a client, and has faults on
//! demand.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_devices::vfio::{Data, Device, DmaRange, State};
use sterna_devices::vfio_user::{Client, Command, VfioUserDevice};

const GET: u32 = 1 << 16;
const SET: u32 = 1 << 17;
pub(crate) const REPLY: u32 = 1;
const NO_REPLY: u32 = 0x10;
const ERROR: u32 = 0x20;
/// `VFIO_USER_DMA_READ`: a command that the server sends.
const DMA_READ: u16 = 11;

/// The behaviour of the server.
#[derive(Clone, Debug)]
pub(crate) struct Manner {
    /// Its reply to the client's version: major, minor, and the text with the 0 behind it.
    pub(crate) version: (u16, u16),
    pub(crate) capabilities: Vec<u8>,
    /// Bytes of data that a message may carry.
    pub(crate) max_data: usize,
    /// Whether it answers `ENOMSG` if there is nothing to read now, like the kernel, instead of 0 bytes.
    pub(crate) enomsg: bool,
    /// Whether replies to reads are as long as requested, whatever their content, like libvfio-user's.
    pub(crate) padded: bool,
    /// The faulty command, after how many of them, and the fault.
    pub(crate) trouble: Option<(Command, u32, Trouble)>,
    /// Counts only commands after which the device is in this state; `None`: in any state.
    pub(crate) only_in: Option<State>,
}

impl Default for Manner {
    fn default() -> Self {
        Self::with_max_data(1 << 20)
    }
}

impl Manner {
    pub(crate) fn with_max_data(max_data: usize) -> Self {
        let capabilities = format!("{{\"capabilities\":{{\"max_msg_fds\":8,\"max_data_xfer_size\":{max_data}}}}}\0");
        let capabilities = capabilities.into_bytes();
        Self { version: (0, 1), capabilities, max_data, enomsg: false, padded: false, trouble: None, only_in: None }
    }

    pub(crate) fn trouble(command: Command, after: u32, trouble: Trouble) -> Self {
        Self { trouble: Some((command, after, trouble)), ..Self::default() }
    }
}

/// A fault of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The reply to another message.
    OtherNumber,
    /// The reply to another command.
    OtherCommand,
    /// A header with a size below its own length.
    NoSize,
    /// So many bytes behind the reply.
    Longer(usize),
    /// The reply without its last byte.
    Shorter,
    /// The reply claims more content than requested.
    ClaimsMore,
    /// An error with a payload, as libvfio-user's may have.
    LoudError(i32),
    /// This error, or 0.
    Errno(i32),
    /// No reply.
    Silence,
    /// The connection ends before the reply.
    Ends,
    /// The connection ends within the reply.
    EndsMidway,
    /// The server sends commands before the reply: with payload, without, and one that needs no reply. This is correct.
    SendsCommands,
    /// The server sends a command that is too long.
    SendsTooLong,
    /// The server sends commands without end.
    Floods,
    /// Neither a command nor a reply.
    OtherType,
    /// The reply to a change of state reports another state.
    OtherState,
}

/// A server to which the device's only client is connected.
pub(crate) struct Server {
    thread: Option<JoinHandle<()>>,
    stream: UnixStream,
}

impl Server {
    /// Serves `device`, and returns the client's end.
    pub(crate) fn start<D: Device + 'static>(device: D, manner: Manner) -> (Self, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (stream, ending) = (ours.try_clone().unwrap(), ours.try_clone().unwrap());
        let serving = Serving { device, data: None, watched: Vec::new(), stream: ours, manner };
        let thread = std::thread::spawn(move || {
            // A client that disconnects is not an error; one that is not understood is disconnected.
            let _ = serving.run();
            let _ = ending.shutdown(std::net::Shutdown::Both);
        });
        (Self { thread: Some(thread), stream }, theirs)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let panicked = self.thread.take().is_some_and(|thread| thread.join().is_err());
        assert!(!panicked || std::thread::panicking(), "the server has panicked");
    }
}

/// Returns the device behind a connection, with a test's time limit.
pub(crate) fn reach(stream: UnixStream) -> io::Result<VfioUserDevice<Client>> {
    Ok(VfioUserDevice::new(Arc::new(Client::new(stream, Duration::from_secs(60))?)))
}

struct Serving<D: Device> {
    device: D,
    data: Option<D::Data>,
    /// The ranges whose DMA is logged.
    watched: Vec<DmaRange>,
    stream: UnixStream,
    manner: Manner,
}

struct Message {
    id: u16,
    command: u16,
    payload: Vec<u8>,
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

fn number32(bytes: &[u8], at: usize) -> io::Result<u32> {
    let bytes = bytes.get(at..at + 4).ok_or_else(|| errno(libc::EINVAL))?;
    Ok(u32::from_ne_bytes(bytes.try_into().unwrap()))
}

fn number64(bytes: &[u8], at: usize) -> io::Result<u64> {
    let bytes = bytes.get(at..at + 8).ok_or_else(|| errno(libc::EINVAL))?;
    Ok(u64::from_ne_bytes(bytes.try_into().unwrap()))
}

fn header(id: u16, command: u16, payload: usize, flags: u32, error: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&id.to_ne_bytes());
    bytes[2..4].copy_from_slice(&command.to_ne_bytes());
    bytes[4..8].copy_from_slice(&(16 + payload as u32).to_ne_bytes());
    bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
    bytes[12..].copy_from_slice(&error.to_ne_bytes());
    bytes
}

impl<D: Device> Serving<D> {
    fn run(mut self) -> io::Result<()> {
        let version = self.receive()?;
        assert_eq!(
            (version.command, &version.payload[..4]),
            (1, &[0, 0, 1, 0][..]),
            "the connection begins with the version"
        );
        let text = version.payload[4..].strip_suffix(&[0]).expect("it ends in 0");
        let text: serde_json::Value = serde_json::from_slice(text).unwrap();
        assert_eq!(text["capabilities"]["max_data_xfer_size"], 1 << 20);
        let (major, minor) = self.manner.version;
        let mut payload = [major.to_ne_bytes(), minor.to_ne_bytes()].concat();
        payload.extend(&self.manner.capabilities);
        self.answer(&version, Ok(payload))?;
        loop {
            let message = self.receive()?;
            let answer = self.obey(&message);
            self.answer(&message, answer)?;
        }
    }

    fn receive(&mut self) -> io::Result<Message> {
        let mut bytes = [0; 16];
        self.stream.read_exact(&mut bytes)?;
        let half = |at: usize| u16::from_ne_bytes(bytes[at..at + 2].try_into().unwrap());
        let (size, flags) = (number32(&bytes, 4)? as usize, number32(&bytes, 8)?);
        assert_eq!((flags & 0xf, number32(&bytes, 12)?), (0, 0), "commands have no error");
        // The maximum size that libvfio-user accepts.
        assert!((16..=(1 << 20) + 32).contains(&size), "{size} bytes");
        let mut payload = vec![0; size - 16];
        self.stream.read_exact(&mut payload)?;
        Ok(Message { id: half(0), command: half(2), payload })
    }

    fn obey(&mut self, message: &Message) -> io::Result<Vec<u8>> {
        let payload = &message.payload;
        match Command(message.command) {
            Command::DEVICE_RESET if payload.is_empty() => {
                self.device.reset()?;
                self.data = None;
                Ok(Vec::new())
            }
            Command::DEVICE_FEATURE => self.feature(payload),
            Command::MIG_DATA_READ => {
                let (room, size) = (number32(payload, 0)? as usize, number32(payload, 4)? as usize);
                if payload.len() != 8 || size > self.manner.max_data || room < 8 + size {
                    return Err(errno(libc::EINVAL));
                }
                let bytes = self.read(size)?;
                let mut reply = (8 + bytes.len() as u32).to_ne_bytes().to_vec();
                reply.extend((bytes.len() as u32).to_ne_bytes());
                reply.extend(&bytes);
                if self.manner.padded {
                    reply.resize(8 + size, 0xee);
                }
                Ok(reply)
            }
            Command::MIG_DATA_WRITE => {
                let (room, size) = (number32(payload, 0)? as usize, number32(payload, 4)? as usize);
                assert!(payload.len() < 40_000, "libvfio-user would have read a part of it");
                if payload.len() != 8 + size || size > self.manner.max_data || room < payload.len() {
                    return Err(errno(libc::EINVAL));
                }
                let data = self.data.as_mut().ok_or_else(|| errno(libc::EINVAL))?;
                let mut bytes = &payload[8..];
                while !bytes.is_empty() {
                    let taken = data.write(bytes)?;
                    bytes = &bytes[taken..];
                }
                Ok(Vec::new())
            }
            _ => Err(errno(libc::EINVAL)),
        }
    }

    fn read(&mut self, size: usize) -> io::Result<Vec<u8>> {
        let data = self.data.as_mut().ok_or_else(|| errno(libc::EINVAL))?;
        let mut bytes = vec![0; size];
        match data.read(&mut bytes) {
            Ok(count) => bytes.truncate(count),
            Err(error) if error.raw_os_error() == Some(libc::ENOMSG) && !self.manner.enomsg => bytes.clear(),
            Err(error) => return Err(error),
        }
        Ok(bytes)
    }

    fn feature(&mut self, payload: &[u8]) -> io::Result<Vec<u8>> {
        let (room, flags) = (number32(payload, 0)? as usize, number32(payload, 4)?);
        let data = &payload[8..];
        let mut reply = payload.to_vec();
        match (flags & 0xffff, flags & !0xffff) {
            (1, GET) => {
                let flags = self.device.migration().map_err(|_| errno(libc::EINVAL))?;
                reply.extend(flags.0.to_ne_bytes());
            }
            (2, GET) => {
                reply.extend(self.device.state()?.number().to_ne_bytes());
                reply.extend([0; 4]);
            }
            (2, SET) if data.len() == 8 => {
                let to = State::from_number(number32(data, 0)?);
                let saves = |state| matches!(state, State::PreCopy | State::StopCopy);
                let goes_on = saves(self.device.state()?) && saves(to);
                let began = self.device.set_state(to)?;
                if began.is_some() || !goes_on {
                    self.data = began;
                }
            }
            (6, SET) => {
                let count = number32(data, 8)? as usize;
                if data.len() != 16 + 16 * count || number32(data, 12)? != 0 {
                    return Err(errno(libc::EINVAL));
                }
                let range = |at: usize| Ok(DmaRange { iova: number64(data, at)?, length: number64(data, at + 8)? });
                let ranges: Vec<_> = (0..count).map(|at| range(16 + 16 * at)).collect::<io::Result<_>>()?;
                let chosen = self.device.dma_logging_start(number64(data, 0)?, &ranges)?;
                self.watched = ranges;
                reply[8..16].copy_from_slice(&chosen.to_ne_bytes());
            }
            (7, SET) if data.is_empty() => self.device.dma_logging_stop()?,
            (8, GET) if data.len() == 24 => {
                let range = DmaRange { iova: number64(data, 0)?, length: number64(data, 8)? };
                let page_size = number64(data, 16)?;
                if page_size == 0 {
                    return Err(errno(libc::EINVAL));
                }
                if !self.watched.contains(&range) {
                    // libvfio-user reports only whole mappings.
                    return Err(errno(libc::ENOTSUP));
                }
                let mut bitmap = vec![0; range.length.div_ceil(page_size).div_ceil(64) as usize];
                self.device.dma_logging_report(range, page_size, &mut bitmap)?;
                reply.extend(bitmap.iter().flat_map(|word| word.to_ne_bytes()));
            }
            _ => return Err(errno(libc::EINVAL)),
        }
        if room < reply.len() {
            return Err(errno(libc::EINVAL));
        }
        let length = reply.len() as u32;
        reply[..4].copy_from_slice(&length.to_ne_bytes());
        Ok(reply)
    }

    /// Returns the fault for this message, if any.
    fn trouble(&mut self, message: &Message) -> Option<Trouble> {
        let (command, after, trouble) = self.manner.trouble.as_mut()?;
        let other = |state| self.device.state().is_ok_and(|is| is != state);
        if command.0 != message.command || self.manner.only_in.is_some_and(other) {
            return None;
        }
        match after.checked_sub(1) {
            Some(less) => {
                *after = less;
                None
            }
            None => Some(*trouble),
        }
    }

    fn answer(&mut self, message: &Message, answer: io::Result<Vec<u8>>) -> io::Result<()> {
        let (mut id, mut command) = (message.id, message.command);
        let trouble = self.trouble(message);
        let (mut payload, mut flags, mut error) = match answer {
            Ok(payload) => (payload, REPLY, 0),
            Err(error) => (Vec::new(), REPLY | ERROR, error.raw_os_error().unwrap_or(0) as u32),
        };
        let mut shortened = 0;
        match trouble {
            None => {}
            Some(Trouble::OtherNumber) => id = id.wrapping_add(1),
            Some(Trouble::OtherCommand) => command += 1,
            Some(Trouble::NoSize) => shortened = payload.len() + 1,
            Some(Trouble::Longer(bytes)) => payload.resize(payload.len() + bytes, 0),
            Some(Trouble::Shorter) => _ = payload.pop(),
            Some(Trouble::ClaimsMore) => payload[4..8].copy_from_slice(&u32::MAX.to_ne_bytes()),
            Some(Trouble::LoudError(number)) => {
                (payload, flags, error) = (vec![0; 70_000], REPLY | ERROR, number as u32);
            }
            Some(Trouble::Errno(number)) => (payload, flags, error) = (Vec::new(), REPLY | ERROR, number as u32),
            Some(Trouble::Silence) => return Ok(()),
            Some(Trouble::Ends) => return Err(io::ErrorKind::ConnectionAborted.into()),
            Some(Trouble::EndsMidway) => {
                let bytes = [&header(id, command, payload.len(), flags, error), &payload[..]].concat();
                self.stream.write_all(&bytes[..bytes.len() - 1])?;
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            Some(Trouble::SendsCommands) => {
                for (payload, flags) in [(5000, 0), (0, 0), (16, NO_REPLY)] {
                    self.stream.write_all(&header(77, DMA_READ, payload, flags, 0))?;
                    self.stream.write_all(&vec![1; payload])?;
                    if flags == 0 {
                        let mut refused = [0; 16];
                        self.stream.read_exact(&mut refused)?;
                        assert_eq!(refused, header(77, DMA_READ, 0, REPLY | ERROR, libc::ENOTSUP as u32));
                    }
                }
            }
            Some(Trouble::SendsTooLong) => {
                return self.stream.write_all(&header(77, DMA_READ, 1 << 30, 0, 0));
            }
            Some(Trouble::Floods) => loop {
                // So many that there is always another one.
                self.stream.write_all(&header(77, DMA_READ, 0, NO_REPLY, 0).repeat(4096))?;
            },
            Some(Trouble::OtherType) => flags = 2,
            Some(Trouble::OtherState) => payload[8] ^= 1,
        }
        let mut bytes = header(id, command, payload.len(), flags, error).to_vec();
        let size = 16 + payload.len() - shortened;
        bytes[4..8].copy_from_slice(&(size as u32).to_ne_bytes());
        bytes.extend(payload);
        self.stream.write_all(&bytes)
    }
}
