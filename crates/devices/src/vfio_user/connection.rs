//! One command and its reply: the interface that the device needs to the owner of the socket.

use std::io;

/// A command of the specification, section "Commands", by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Command(pub u16);

impl Command {
    /// `VFIO_USER_VERSION`: the first command of a connection.
    pub const VERSION: Self = Self(1);
    /// `VFIO_USER_DEVICE_RESET`
    pub const DEVICE_RESET: Self = Self(13);
    /// `VFIO_USER_DEVICE_FEATURE`
    pub const DEVICE_FEATURE: Self = Self(16);
    /// `VFIO_USER_MIG_DATA_READ`
    pub const MIG_DATA_READ: Self = Self(17);
    /// `VFIO_USER_MIG_DATA_WRITE`
    pub const MIG_DATA_WRITE: Self = Self(18);
}

/// A connection to a server, after its version was negotiated. A server has one client: a monitor that is already
/// connected lends its connection by this trait; [`Client`](super::Client) is for monitors without one.
///
/// All take `&self`: watching a device's DMA and saving its state happen on different threads.
pub trait Connection: Send + Sync {
    /// Returns the bytes of data that one message may carry: the smaller of both sides' limits (`max_data_xfer_size`,
    /// 1 MiB by default); at least 1.
    fn max_data(&self) -> usize;

    /// Sends a command, waits for its reply, and returns the length of the reply's payload. The payload of the command
    /// is the concatenated parts of `request`; the payload of the reply fills the first part of `reply`, then the
    /// second.
    ///
    /// # Errors
    /// The server's errno (`raw_os_error`), if the reply is an error. Any other error means that the connection is
    /// unusable, including a payload longer than `reply`; a server that takes too long should be treated in the same
    /// way.
    fn call(&self, command: Command, request: [&[u8]; 2], reply: [&mut [u8]; 2]) -> io::Result<usize>;
}
