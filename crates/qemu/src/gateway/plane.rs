//! The source's data plane: channels, pipeline, and the threads that read QEMU's connections.

use std::convert::Infallible;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use sterna_engine::abort::Abort;
use sterna_engine::batch::BatchPool;
use sterna_engine::cancel::Cancel;
use sterna_engine::entry::Pipeline;
use sterna_engine::send::{SendChannel, SendContext, Sent};
use sterna_engine::session::Session;
use sterna_engine::transport::Security;
use sterna_memory::normal_page_ratio::NormalPageRatio;

use super::GatewayError;
use super::layout::Start;
use super::qemu::PAGE_SIZE;
use super::source_stream::{MainContext, StreamNews, SyncPoints, read_main, read_multifd};
use crate::stream::{MainReader, MultifdInit};
use sterna_wire::reason::Reason;

/// How QEMU's connections are treated when the migration is taken down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WhenAborted {
    /// The main channel is closed at once, which ends QEMU's migration. The multifd channels are read and discarded until QEMU closes
    /// them, or [`Plane::leave`] does. A QEMU whose multifd connections end before its migration has failed can abort, and the guest
    /// with it (10.0.2 without TLS: `yank_unregister_instance`, `QLIST_EMPTY(&entry->yankfns)`).
    CloseMain,
    /// All channels are read and discarded until [`Plane::release`]; the migration is cancelled by QMP. A QEMU whose multifd
    /// connections end in its last round can wait for its own threads for ever, with the guest stopped and the monitor dead
    /// (10.0.2, `multifd_send_sync_main`).
    Drain,
}

/// The threads that move bytes, and their shared state.
#[derive(Debug)]
pub(super) struct Plane {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) stream_channel: Arc<SendChannel>,
    pub(super) sync: Arc<SyncPoints>,
    abort: Arc<Abort>,
    when_aborted: WhenAborted,
    connections: Connections,
    threads: Vec<JoinHandle<()>>,
    /// Each thread has a clone.
    running: Sender<Infallible>,
    /// Disconnected when all threads have ended.
    ended: Receiver<Infallible>,
}

impl Plane {
    /// Opens the channels to the destination. `readers` is the number of QEMU's connections that will be read.
    pub(super) fn open(
        session: &Session,
        security: &Security,
        to: &str,
        context: &SendContext,
        readers: usize,
        cancel: &Cancel,
        when_aborted: WhenAborted,
    ) -> Result<Self, GatewayError> {
        let (channels, stream_channel) = session.open_channels(security, to, context, cancel)?;
        let pool = BatchPool::new(pool_size(channels.len(), readers), session.packet_size);
        let pipeline = Arc::new(Pipeline {
            channels,
            pool: Arc::clone(&pool),
            window: Arc::clone(&context.window),
            page_size: PAGE_SIZE,
        });
        let sync = Arc::new(SyncPoints::new(readers));
        let (window, waiting, pacer) = (Arc::clone(&context.window), Arc::clone(&sync), Arc::clone(&context.pacer));
        context.abort.on_end(move || {
            pacer.release();
            window.close();
            pool.close();
            waiting.close();
        });
        let stream_channel = Arc::new(stream_channel);
        let (running, ended) = channel();
        Ok(Self {
            pipeline,
            stream_channel,
            sync,
            abort: Arc::clone(&context.abort),
            when_aborted,
            connections: Connections(Vec::new()),
            threads: Vec::new(),
            running,
            ended,
        })
    }

    /// Starts reading the multifd channels.
    pub(super) fn read_multifd(
        &mut self,
        connections: Vec<(UnixStream, MultifdInit)>,
        ratio: &NormalPageRatio,
    ) -> io::Result<()> {
        for (stream, init) in connections {
            let rest = self.connection(&stream, WhenAborted::Drain)?;
            let (pipeline, sync, ratio) = (Arc::clone(&self.pipeline), Arc::clone(&self.sync), ratio.clone());
            self.spawn(&format!("qemu-{}", init.id), rest, move || {
                read_multifd(stream, &pipeline, &sync, ratio).map_err(|error| error.to_string())
            })?;
        }
        Ok(())
    }

    /// Starts reading the main channel, `stream`. `start` reads its beginning on the same thread.
    pub(super) fn read_main(
        &mut self,
        stream: &UnixStream,
        start: impl FnOnce() -> Result<(MainReader<UnixStream>, Start), String> + Send + 'static,
        ratio: NormalPageRatio,
        news: impl FnMut(StreamNews) + Send + 'static,
    ) -> io::Result<()> {
        let context = MainContext {
            pipeline: Arc::clone(&self.pipeline),
            sync: Arc::clone(&self.sync),
            stream_channel: Arc::clone(&self.stream_channel),
            ratio,
        };
        let rest = self.connection(stream, self.when_aborted)?;
        self.spawn("qemu-main", rest, move || {
            let (reader, start) = start()?;
            read_main(reader, &start, context, news).map_err(|error| error.to_string())
        })
    }

    /// Calls `drained` with the last sequence number of each RAM channel when all of RAM is acknowledged. If the
    /// migration is taken down before that, `drained` is not called; the alarm has the reason.
    pub(super) fn when_drained(&mut self, drained: impl FnOnce(Vec<u64>) + Send + 'static) -> io::Result<()> {
        let pipeline = Arc::clone(&self.pipeline);
        self.spawn("drain", None, move || {
            if let Ok(last) = pipeline.channels.iter().map(SendChannel::drained).collect() {
                drained(last);
            }
            Ok(())
        })
    }

    /// Keeps a connection of QEMU. Returns a handle to it if it is to be drained when the migration is taken down.
    fn connection(&mut self, stream: &UnixStream, when_aborted: WhenAborted) -> io::Result<Option<UnixStream>> {
        self.connections.0.push(stream.try_clone()?);
        let other = stream.try_clone()?;
        if when_aborted == WhenAborted::Drain {
            return Ok(Some(other));
        }
        self.abort.on_end(move || close(&other));
        Ok(None)
    }

    fn spawn(
        &mut self,
        name: &str,
        rest: Option<UnixStream>,
        run: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> io::Result<()> {
        let (abort, running) = (Arc::clone(&self.abort), self.running.clone());
        self.threads.push(Builder::new().name(name.to_owned()).spawn(move || {
            let _running = running;
            if let Err(reason) = run() {
                abort.raise(Reason::other(reason));
                if let Some(rest) = rest {
                    drain(&rest);
                }
            }
        })?);
        Ok(())
    }

    /// Closes QEMU's connections, which QEMU needs no more.
    pub(super) fn release(&self) {
        self.connections.close();
    }

    /// Returns the totals sent over all channels so far.
    pub(super) fn sent(&self) -> Sent {
        Sent::over(self.pipeline.channels.iter().chain([&*self.stream_channel]))
    }

    /// Waits up to `time` until QEMU closes its connections, then closes them and waits for all threads. Every connection to the
    /// destination must be closed, as for [`Plane::join`].
    pub(super) fn leave(mut self, time: Duration) {
        // Only the threads' own clones are left.
        self.running = channel().0;
        if self.ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
            self.connections.close();
        }
        self.join();
    }

    /// Waits for all threads. Every connection to the destination must be closed: the migration has ended.
    pub(super) fn join(self) {
        self.release();
        for thread in self.threads {
            // A panic in the thread has been printed, and its closed connection noticed.
            let _ = thread.join();
        }
        // All users of the channels have ended: the last owner ends their threads.
        if let Ok(channel) = Arc::try_unwrap(self.stream_channel) {
            channel.join();
        }
        if let Ok(pipeline) = Arc::try_unwrap(self.pipeline) {
            pipeline.channels.into_iter().for_each(SendChannel::join);
        }
    }
}

/// QEMU's connections. They are shut down when this is dropped, since threads have clones of them.
#[derive(Debug)]
struct Connections(Vec<UnixStream>);

impl Connections {
    fn close(&self) {
        self.0.iter().for_each(close);
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.close();
    }
}

fn close(stream: &UnixStream) {
    // The other side may have closed it already.
    let _ = stream.shutdown(Shutdown::Both);
}

/// Reads and discards bytes until the connection ends.
fn drain(mut stream: &UnixStream) {
    let mut discarded = vec![0; 256 << 10];
    while stream.read(&mut discarded).is_ok_and(|length| length > 0) {}
}

/// Returns how many batches the pool needs: those in queues and being sent, and one open batch of each reader for each channel,
/// since a reader may hold all of these while it waits for another batch.
fn pool_size(channels: usize, readers: usize) -> usize {
    readers * (channels + 1) + 8 * channels
}
