//! The bytes that the kernel has received for this process, over time. They are TCP's own counters, independent of
//! those of the measured pipeline; they include what TLS adds, and no headers of TCP and IP.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::clock::now_ns;

/// The interval of sampling.
const INTERVAL: Duration = Duration::from_millis(5);
/// Where `tcpi_bytes_received` lies in `struct tcp_info` (linux/tcp.h); libc's own declaration ends before it.
const BYTES_RECEIVED: usize = 128;
/// The descriptors among which this small process has its sockets.
const DESCRIPTORS: RawFd = 128;

/// Runs `work` and meanwhile samples the time ([`now_ns`]) and the bytes that all TCP sockets of this process have
/// received since its start.
pub(crate) fn while_running<T>(work: impl FnOnce() -> T) -> (T, Vec<(u64, u64)>) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let noting = scope.spawn(|| {
            let (mut sockets, mut samples) = (Sockets::default(), Vec::new());
            while !stop.load(Ordering::Relaxed) {
                let bytes = sockets.total(bytes_received);
                samples.push((now_ns(), bytes));
                std::thread::sleep(INTERVAL);
            }
            samples
        });
        let done = work();
        stop.store(true, Ordering::Relaxed);
        (done, noting.join().expect("noting does not panic"))
    })
}

/// The sockets seen so far; their numbers are used again when they are closed.
#[derive(Debug, Default)]
struct Sockets {
    open: HashMap<RawFd, u64>,
    /// Received by those that are closed.
    closed: u64,
}

impl Sockets {
    /// Returns the bytes received by all sockets so far. `received` returns those of a descriptor that is a TCP socket.
    fn total(&mut self, received: impl Fn(RawFd) -> Option<u64>) -> u64 {
        for descriptor in 0..DESCRIPTORS {
            let now = received(descriptor);
            let before = match now {
                Some(now) => self.open.insert(descriptor, now),
                None => self.open.remove(&descriptor),
            };
            self.closed += before.filter(|before| now.is_none_or(|now| now < *before)).unwrap_or(0);
        }
        self.closed + self.open.values().sum::<u64>()
    }
}

/// Returns the bytes received by a connection; `None` if the descriptor is not a connection.
fn bytes_received(descriptor: RawFd) -> Option<u64> {
    let mut info = MaybeUninit::<[u64; 64]>::zeroed();
    let mut length = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `info`, which has that many; any content is a valid array.
    // The call changes nothing about a descriptor, whatever it is.
    let failed = unsafe {
        libc::getsockopt(descriptor, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut length)
    };
    // SAFETY: zeroed above.
    let info = unsafe { info.assume_init() };
    (failed == 0 && length as usize >= BYTES_RECEIVED + 8).then(|| info[BYTES_RECEIVED / 8])
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn what_came_in_by_a_connection_is_counted_to_the_byte_and_what_is_none_is_not_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        near.write_all(&[1; 70_001]).unwrap();
        far.read_exact(&mut [0; 70_001]).unwrap();
        assert_eq!((bytes_received(far.as_raw_fd()), bytes_received(near.as_raw_fd())), (Some(70_001), Some(0)));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!((bytes_received(file.as_raw_fd()), bytes_received(-1)), (None, None));
    }

    #[test]
    fn a_socket_that_was_closed_still_counts_also_when_its_number_is_used_again() {
        let mut sockets = Sockets::default();
        let seen = |list: &'static [(RawFd, u64)]| {
            move |descriptor| list.iter().find(|(fd, _)| *fd == descriptor).map(|(_, bytes)| *bytes)
        };
        assert_eq!(sockets.total(seen(&[(3, 10), (4, 100)])), 110);
        assert_eq!(sockets.total(seen(&[(3, 20)])), 120);
        assert_eq!(sockets.total(seen(&[(3, 5), (4, 1)])), 126);
        assert_eq!(sockets.total(seen(&[])), 126);
    }

    #[test]
    fn samples_are_in_order_and_there_while_work_runs() {
        let work = || {
            let until = now_ns() + 50_000_000;
            while now_ns() < until {
                std::thread::yield_now();
            }
            7
        };
        // On a busy machine the work may be over before the other thread has begun.
        let sampled = (0..100).map(|_| while_running(work)).find(|(_, samples)| !samples.is_empty());
        let (done, samples) = sampled.expect("samples are taken");
        assert_eq!(done, 7);
        assert!(samples.is_sorted(), "{samples:?}");
    }
}
