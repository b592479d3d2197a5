//! From an address to a connected socket, and to the name that TLS looks for in the peer's certificate.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustls_pki_types::ServerName;

use super::{Address, Socket, TransportError, unix};

/// The name that the peer's certificate must carry.
pub(super) fn server_name(to: &Address) -> Result<ServerName<'static>, TransportError> {
    let host = match to {
        Address::Tcp(text) => host_of(text)?,
        Address::Simulated(port) => port.name(),
        Address::Unix(_) => {
            let reason = "TLS looks for the host's name in the peer's certificate, and a Unix socket has none (its \
                          mode says who may connect, so it can be used without TLS)";
            return Err(unusable(to, reason));
        }
    };
    ServerName::try_from(host.to_owned()).map_err(|_| unusable(to, "it is neither a host name nor an IP address"))
}

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
    }
}

/// The host in `HOST:PORT`, without an IPv6 address's brackets.
fn host_of(to: &str) -> Result<&str, TransportError> {
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

fn unusable(address: &Address, reason: &str) -> TransportError {
    bad_address(&address.to_string(), reason)
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
