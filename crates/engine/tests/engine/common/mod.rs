//! Helpers that the tests of the channels share.

// Each test program uses a part of it.
#![allow(dead_code)]

pub(crate) mod relay;

use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_engine::receive::{PageSink, SinkError};
use sterna_engine::transport::{Connection, Reader, Security, Writer};
use sterna_wire::packet::{BlockShape, Run, RunKind};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// No test here takes longer than a few seconds on an idle machine, so an event that has not occurred within this time never does.
pub(crate) const HANG_LIMIT: Duration = Duration::from_secs(300);

/// Returns both ends of a TCP connection over loopback.
pub(crate) fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // A connection is established before it is accepted.
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// Returns the two halves of one end, without TLS.
pub(crate) fn halves(end: TcpStream) -> (Writer, Reader) {
    Connection::accept(end, &Security::Insecure).unwrap().split()
}

/// Runs `test` on another thread. Panics if it panics or hangs.
/// Ends a test that hangs. Tests take less than a minute on an idle machine; a busy one gets [`HANG_LIMIT`].
pub(crate) fn within_a_minute(test: impl FnOnce() + Send + 'static) {
    let (done, result) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        done.send(()).expect("the caller waits for it");
    });
    match result.recv_timeout(HANG_LIMIT) {
        Ok(()) => {}
        Err(RecvTimeoutError::Timeout) => panic!("the test hangs"),
        Err(RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
    }
}

/// A page's number and its content, which is empty for a zero page.
pub(crate) type PlacedPage = (u64, Vec<u8>);

/// A sink that records each placed page, in the order of arrival.
#[derive(Clone, Default)]
pub(crate) struct Placed(Arc<Mutex<Vec<PlacedPage>>>);

impl Placed {
    /// Returns the pages placed since the last call.
    pub(crate) fn take(&self) -> Vec<PlacedPage> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl PageSink for Placed {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        Ok(Arc::new([BlockShape { pages: 1 << 20, page_size: PAGE as u32 }]))
    }

    fn pages(&mut self, _: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError> {
        let mut contents = content.chunks_exact(PAGE);
        let mut placed = self.0.lock().unwrap();
        for run in runs {
            placed.extend((run.first..run.end()).map(|page| match run.kind {
                RunKind::Normal => (page, contents.next().unwrap().to_vec()),
                RunKind::Zero => (page, Vec::new()),
            }));
        }
        Ok(())
    }

    fn generation_end(&mut self, _: u64) -> Result<(), SinkError> {
        Ok(())
    }
}
