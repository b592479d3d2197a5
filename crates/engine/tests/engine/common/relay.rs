//! A relay between the two sides of a migration over TCP, which breaks connections.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Accepts connections and relays them to the destination until they are cut. Its threads end with the connections, and
/// when the relay is dropped.
pub(crate) struct Relay {
    address: SocketAddr,
    open: Mutex<Vec<TcpStream>>,
    refuse: AtomicBool,
    accepted: AtomicU64,
    /// The connections that break by themselves, and after how many bytes in either direction.
    plan: Vec<(u64, u64)>,
}

impl Relay {
    pub(crate) fn start(to: SocketAddr, plan: Vec<(u64, u64)>) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (open, refuse, accepted) = (Mutex::default(), AtomicBool::new(false), AtomicU64::new(0));
        let relay = Arc::new(Self { address, open, refuse, accepted, plan });
        let accepting = Arc::downgrade(&relay);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Some(relay) = accepting.upgrade() else { return };
                let number = relay.accepted.fetch_add(1, Ordering::SeqCst);
                if relay.refuse.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(to) else { continue };
                let breaks = relay.plan.iter().find(|(which, _)| *which == number).map(|(_, bytes)| *bytes);
                relay.open.lock().unwrap().extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                for (from, to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                    std::thread::spawn(move || carry(from, to, breaks));
                }
            }
        });
        relay
    }

    /// Returns the address to which the source connects.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Breaks every connection.
    pub(crate) fn cut_all(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            // The connection may have ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Closes every new connection at once from now on.
    pub(crate) fn refuse_all(&self) {
        self.refuse.store(true, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cut_all();
        // Wakes the accepting thread, which then ends.
        let _ = TcpStream::connect(self.address);
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, breaks: Option<u64>) {
    let mut buffer = vec![0; 64 << 10];
    let mut left = breaks.unwrap_or(u64::MAX);
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        let passes = (length as u64).min(left) as usize;
        if to.write_all(&buffer[..passes]).is_err() {
            break;
        }
        left -= passes as u64;
        if left == 0 {
            let _ = from.shutdown(Shutdown::Both);
            break;
        }
    }
    let _ = to.shutdown(if left == 0 { Shutdown::Both } else { Shutdown::Write });
}
