//! Where a destination listens: a TCP address, a Unix socket of this host, or a port of a simulated network.

use std::convert::Infallible;
use std::fmt::{Display, Formatter};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use super::simulated::Port;

/// How the text of a Unix socket's address begins; QEMU writes them the same way.
const UNIX: &str = "unix:";

/// Where to listen, or to connect to.
///
/// Text that begins with `unix:` is parsed as a Unix socket, all other text as a TCP address; whether the address is
/// usable is found out on its first use. The text of an address ([`Display`]) parses to the same address, except for a
/// path that is not UTF-8 and for a simulated port, which only its [`Network`](super::simulated::Network) knows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// `HOST:PORT`, an IPv6 address in brackets.
    Tcp(String),
    /// The path of a stream socket of this host. Any process that may write to the file may connect.
    Unix(PathBuf),
    /// A port of an in-memory network, for tests.
    Simulated(Port),
}

impl Display for Address {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
            Self::Simulated(port) => port.fmt(f),
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
