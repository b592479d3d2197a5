//! Opaque connections: bytes carried unchanged, half-closes included.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use sterna::receive::{PacketRules, ReceiveCounters, Sink, SinkError, receive_packets};
use sterna::send::{Item, SendChannel};
use sterna::transport::{Reader, Writer};

/// Bytes that are read from a connection at once.
const BUFFER: usize = 64 << 10;

/// How many opaque connections are open.
#[derive(Clone, Debug, Default)]
pub(super) struct Open(Arc<AtomicU32>);

impl Open {
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    fn enter(&self) -> Entered {
        self.0.fetch_add(1, Ordering::AcqRel);
        Entered(self.clone())
    }
}

struct Entered(Open);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Carries what `local` says to the peer, until it closes its writing half. A failure closes this connection and no
/// other. `ended` is told at the end.
pub(super) fn pump_out(
    local: UnixStream,
    channel: SendChannel,
    open: &Open,
    ended: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    let entered = open.enter();
    std::thread::Builder::new().name("opaque-out".into()).spawn(move || {
        let mut local = local;
        let mut buffer = vec![0; BUFFER];
        loop {
            let length = local.read(&mut buffer).unwrap_or(0);
            if channel.send(Item::Opaque(buffer[..length].to_vec())).is_err() {
                // The channel is gone: the other direction ends with the connection.
                let _ = local.shutdown(Shutdown::Both);
                break;
            }
            if length == 0 {
                break;
            }
        }
        // Ends the channel's queue, and waits until everything went out.
        channel.join();
        drop(entered);
        ended();
    })?;
    Ok(())
}

/// Carries what the peer says to `local`, until the peer's connection closes its writing half.
pub(super) fn pump_in(
    local: UnixStream,
    mut reader: Reader,
    mut writer: Writer,
    packet_size: usize,
    open: &Open,
    ended: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    let entered = open.enter();
    std::thread::Builder::new().name("opaque-in".into()).spawn(move || {
        let handle = local.try_clone();
        let mut sink = OpaqueSink(local);
        let rules = PacketRules { packet_size, checksums: true };
        let counters = ReceiveCounters::default();
        let received = receive_packets(&mut reader, Some(&mut writer), &mut sink, rules, &counters);
        drop((reader, writer));
        if let Err(error) = received {
            tracing::info!(%error, "an opaque connection broke");
            // Both halves: what was carried is not whole, and the local side must see it.
            let _ = handle.map(|local| local.shutdown(Shutdown::Both));
        }
        drop(entered);
        ended();
    })?;
    Ok(())
}

struct OpaqueSink(UnixStream);

impl Sink for OpaqueSink {
    fn opaque(&mut self, content: &[u8]) -> Result<(), SinkError> {
        if content.is_empty() {
            // The local side may have closed already.
            let _ = self.0.shutdown(Shutdown::Write);
            return Ok(());
        }
        Ok(self.0.write_all(content)?)
    }
}
