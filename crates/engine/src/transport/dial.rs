//! From an address to a connected socket.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::{Address, Socket, TransportError, unix};

/// Connects, trying all addresses of a host.
pub(super) fn dial(to: &Address, limit: Duration) -> Result<Socket, TransportError> {
    let failed = |source| TransportError::Connect { address: to.to_string(), source };
    match to {
        Address::Tcp(text) => {
            host_of(text)?;
            dial_tcp(text, limit).map(Socket::from)
        }
        Address::Unix(path) => match unix::connect(path, limit) {
            Ok(stream) => Ok(stream.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(failed(io::Error::new(io::ErrorKind::TimedOut, "it accepts no connections")))
            }
            Err(error) => Err(failed(error)),
        },
        Address::Simulated(port) => port.connect().map(Socket::from).map_err(failed),
        Address::Given(given) => given.connect().map_err(failed),
    }
}

/// The host in `HOST:PORT`, without an IPv6 address's brackets.
pub(super) fn host_of(to: &str) -> Result<&str, TransportError> {
    let (host, _port) = to.rsplit_once(':').ok_or_else(|| bad_address(to, "it has no port"))?;
    Ok(host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host))
}

fn dial_tcp(to: &str, limit: Duration) -> Result<TcpStream, TransportError> {
    let deadline = Instant::now() + limit;
    let addresses: Vec<_> = match to.to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        // The standard library reports a port that is not a number as this kind; a resolver reports other kinds.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(bad_address(to, &error.to_string())),
        Err(source) => return Err(TransportError::Lookup { address: to.to_owned(), source }),
    };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (tried, address) in addresses.iter().enumerate() {
        // Each address gets a share of the remaining time, so that one address that drops all packets leaves time for
        // the others.
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / (addresses.len() - tried) as u32;
        match TcpStream::connect_timeout(address, share.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(error) if address.to_string() == to => last = error,
            Err(error) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(TransportError::Connect { address: to.to_owned(), source: last })
}

fn bad_address(address: &str, reason: &str) -> TransportError {
    TransportError::Address { address: address.to_owned(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_the_part_before_the_port() {
        assert_eq!(host_of("host.example:4444").unwrap(), "host.example");
        assert_eq!(host_of("192.0.2.1:1").unwrap(), "192.0.2.1");
        assert_eq!(host_of("[2001:db8::1]:4444").unwrap(), "2001:db8::1");
        host_of("host").unwrap_err();
    }
}
