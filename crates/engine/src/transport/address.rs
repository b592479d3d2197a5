//! Where a destination listens: a TCP address, a Unix socket of this host, a port of a simulated network, or sockets that
//! the embedder gives.

use std::convert::Infallible;
use std::fmt::{Display, Formatter};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use super::given::{Given, SocketQueue};
use super::simulated::Port;

/// How the text of a Unix socket's address begins; QEMU writes them the same way.
const UNIX: &str = "unix:";

/// Where to listen, or to connect to.
///
/// Text that begins with `unix:` is parsed as a Unix socket, all other text as a TCP address; whether the address is
/// usable is found out on its first use. The text of an address ([`Display`]) parses to the same address, except for a
/// path that is not UTF-8, for a simulated port, which only its [`Network`](super::simulated::Network) knows, and for
/// sockets that the embedder gives.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// `HOST:PORT`, an IPv6 address in brackets.
    Tcp(String),
    /// The path of a stream socket of this host. Any process that may write to the file may connect.
    Unix(PathBuf),
    /// A port of an in-memory network, for tests.
    Simulated(Port),
    /// Sockets that the embedder makes and connects ([`Address::connecting`], [`Address::listening`],
    /// [`Address::accepted`]).
    Given(Given),
}

impl Address {
    /// Makes the address of a source that gets its connections from `connect`, so that it makes no socket itself.
    /// `destination` is `HOST:PORT` or another name, for messages and the record; with TLS, its host must be in the
    /// destination's certificate.
    ///
    /// `connect` returns a stream socket (TCP, Unix, vsock) that is connected to the destination, or why there is none.
    /// It is called for each connection, by the thread that needs one: for the control channel; when the destination has
    /// accepted the migration, for each RAM channel, the state, and channels of devices and post-copy if there are any;
    /// and for the control channel again whenever the destination was lost, perhaps for ever. It may block, for some
    /// seconds at most: meanwhile the attempt cannot be cancelled. A panic counts as an error.
    pub fn connecting(
        destination: impl Into<String>,
        connect: impl Fn() -> io::Result<OwnedFd> + Send + Sync + 'static,
    ) -> Self {
        Self::Given(Given::connecting(destination.into(), Arc::new(connect)))
    }

    /// Makes the address of a destination that accepts the connections of a listening stream socket, which is made
    /// non-blocking. The socket goes on listening after the migration, for the next one, until the address and its
    /// clones are dropped. One destination at a time uses it.
    ///
    /// # Errors
    /// `InvalidInput` if it is not a listening stream socket; or no eventfd can be made.
    pub fn listening(socket: impl Into<OwnedFd>) -> io::Result<Self> {
        Given::listening(socket.into()).map(Self::Given)
    }

    /// Makes the address of a destination whose connections are accepted elsewhere and come by the returned queue.
    /// `name` is for messages and the record. One destination at a time uses it.
    pub fn accepted(name: impl Into<String>) -> (Self, SocketQueue) {
        let (given, queue) = Given::queue(name.into());
        (Self::Given(given), queue)
    }

    /// Returns whether using the address makes a socket of the kernel.
    pub(crate) fn makes_sockets(&self) -> bool {
        matches!(self, Self::Tcp(_) | Self::Unix(_))
    }
}

impl Display for Address {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
            Self::Simulated(port) => port.fmt(f),
            Self::Given(given) => f.write_str(given.name()),
        }
    }
}

impl From<&str> for Address {
    fn from(text: &str) -> Self {
        match text.strip_prefix(UNIX) {
            Some(path) => Self::Unix(path.into()),
            None => Self::Tcp(text.to_owned()),
        }
    }
}

impl From<String> for Address {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl From<&String> for Address {
    fn from(text: &String) -> Self {
        text.as_str().into()
    }
}

impl FromStr for Address {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.into())
    }
}

impl From<&Self> for Address {
    fn from(address: &Self) -> Self {
        address.clone()
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address.to_string())
    }
}

impl From<Port> for Address {
    fn from(port: Port) -> Self {
        Self::Simulated(port)
    }
}

impl From<&Port> for Address {
    fn from(port: &Port) -> Self {
        Self::Simulated(port.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_a_unix_socket_with_the_prefix_and_tcp_without_and_the_same_again() {
        for (text, address) in [
            ("host.example:4920", Address::Tcp("host.example:4920".into())),
            ("[2001:db8::1]:4920", Address::Tcp("[2001:db8::1]:4920".into())),
            ("unix:/run/sterna/in", Address::Unix("/run/sterna/in".into())),
            ("unix:in", Address::Unix("in".into())),
            ("/run/sterna/in", Address::Tcp("/run/sterna/in".into())),
        ] {
            assert_eq!(Address::from(text), address);
            assert_eq!(address.to_string(), text);
            assert_eq!(text.parse(), Ok(address));
        }
    }
}
