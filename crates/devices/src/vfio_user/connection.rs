//! One command and its reply: what the device needs of whoever holds the socket.

use std::io;

/// A command of the specification, section "Commands", by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Command(pub u16);

impl Command {
    /// `VFIO_USER_VERSION`: what a connection begins with.
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

/// A connection to a server, after its version was negotiated. A server has one client: a monitor that talks to it already has this
/// connection, and lends it by this trait; [`Client`](super::Client) is for those who have none.
///
/// All take `&self`: who watches a device's DMA is not who saves its state.
pub trait Connection: Send + Sync {
    /// Bytes of data that one message may carry: the least of what both sides have said (`max_data_xfer_size`, 1 MiB where nothing was); at least 1.
    fn max_data(&self) -> usize;

    /// Sends a command, waits for its reply, and gives the length of the reply's payload. The payload sent is the parts of `request` one
    /// after the other; that of the reply fills the first part of `reply`, then the second.
    ///
    /// # Errors
    /// The server's errno (`raw_os_error`), where the reply is an error. Anything else means that the connection is of no more use; a
    /// payload that is longer than `reply` is such a case, and a server that takes too long should be.
    fn call(&self, command: Command, request: [&[u8]; 2], reply: [&mut [u8]; 2]) -> io::Result<usize>;
}
