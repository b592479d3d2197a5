//! From an address to a connected socket, and the addresses that a text names.

use std::io;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType, socket};
use sterna_wire::text::cleaned;

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

/// The host in `HOST:PORT`, without an IPv6 address's brackets and zone, which only this host knows.
pub(super) fn host_of(to: &str) -> Result<&str, TransportError> {
    let (host, _port) = to.rsplit_once(':').ok_or_else(|| bad_address(to, "it has no port"))?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    Ok(bracketed.map_or(host, |host| host.split_once('%').map_or(host, |(address, _zone)| address)))
}

/// Returns the addresses that `HOST:PORT` names. A zone of an IPv6 address, which says by which network interface it is reached, may be
/// the interface's name or its number (RFC 4007, section 11); the standard library knows numbers only.
///
/// # Errors
/// `InvalidInput`: the text is no address, or names no interface of this host. Else the resolver's error.
pub(super) fn resolve(text: &str) -> io::Result<Vec<SocketAddr>> {
    let Some((address, zone, port)) = with_zone(text) else { return Ok(text.to_socket_addrs()?.collect()) };
    let by_number = zone.parse().ok().filter(|number| *number != 0);
    let scope = by_number.map_or_else(|| interface(zone), Ok)?;
    Ok(vec![SocketAddrV6::new(address, port, 0, scope).into()])
}

/// Returns the parts of `[ADDRESS%ZONE]:PORT`.
fn with_zone(text: &str) -> Option<(Ipv6Addr, &str, u16)> {
    let (host, port) = text.strip_prefix('[')?.split_once("]:")?;
    let (address, zone) = host.split_once('%')?;
    Some((address.parse().ok()?, zone, port.parse().ok()?))
}

/// Returns the number of the network interface `name`.
fn interface(name: &str) -> io::Result<u32> {
    // netdevice(7): any socket will do.
    let any = socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    name_to_index(any, name).map_err(|error| {
        let name = cleaned(name);
        io::Error::new(io::ErrorKind::InvalidInput, format!("this host has no network interface {name:?} ({error})"))
    })
}

fn dial_tcp(to: &str, limit: Duration) -> Result<TcpStream, TransportError> {
    let deadline = Instant::now() + limit;
    let addresses = match resolve(to) {
        Ok(addresses) => addresses,
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
        assert_eq!(host_of("[fe80::1%eth0]:4444").unwrap(), "fe80::1");
        host_of("host").unwrap_err();
    }

    #[test]
    fn a_zone_is_an_interface_by_name_or_number_and_an_unknown_one_is_named() {
        let lo = interface("lo").unwrap();
        for text in ["[fe80::1%lo]:4920", &format!("[fe80::1%{lo}]:4920")] {
            let expected = SocketAddrV6::new("fe80::1".parse().unwrap(), 4920, 0, lo);
            assert_eq!(resolve(text).unwrap(), [SocketAddr::from(expected)], "{text}");
        }
        for zone in ["no-such-link0", "", "0", "a-name-that-is-longer-than-any-interface-may-have"] {
            let error = resolve(&format!("[fe80::1%{zone}]:4920")).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{zone}");
            assert!(error.to_string().contains(&format!("no network interface {zone:?}")), "{error}");
        }
        assert_eq!(resolve("[::1]:4920").unwrap(), ["[::1]:4920".parse().unwrap()]);
    }
}
