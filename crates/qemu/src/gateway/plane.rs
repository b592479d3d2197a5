//! The source's data plane: channels, pipeline, and the threads that read what QEMU writes.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna::abort::Abort;
use sterna::batch::BatchPool;
use sterna::cancel::Cancel;
use sterna::entry::Pipeline;
use sterna::send::{SendChannel, SendContext, Sent};
use sterna::session::Session;
use sterna::transport::Security;
use sterna_memory::normal_page_ratio::NormalPageRatio;

use super::GatewayError;
use super::layout::Start;
use super::qemu::PAGE_SIZE;
use super::source_stream::{MainContext, StreamNews, SyncPoints, read_main, read_multifd};
use crate::stream::{MainReader, MultifdInit};

/// What becomes of QEMU's connections when the migration is taken down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WhenAborted {
    /// The main channel is closed at once, by which QEMU learns of it. The multifd channels are read to nowhere until QEMU closes them
    /// itself, or [`Plane::leave`] does. A QEMU whose multifd connections end before it has given the migration up can abort, with the
    /// guest in it (10.0.2 without TLS: `yank_unregister_instance`, `QLIST_EMPTY(&entry->yankfns)`).
    CloseMain,
    /// They are read to nowhere until [`Plane::release`]; QEMU is told by QMP. A QEMU whose multifd connections end in its
    /// last round can wait for its own threads for good, with the guest stopped and the monitor dead (10.0.2,
    /// `multifd_send_sync_main`).
    Drain,
}

/// The threads that move bytes, and what they need.
#[derive(Debug)]
pub(super) struct Plane {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) stream_channel: Arc<SendChannel>,
    pub(super) sync: Arc<SyncPoints>,
    abort: Arc<Abort>,
    when_aborted: WhenAborted,
    connections: Connections,
    threads: Vec<JoinHandle<()>>,
}

impl Plane {
    /// Opens the channels to the destination. `readers` is how many connections of QEMU will be read.
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
        let pool = BatchPool::new(batches(channels.len(), readers), session.packet_size);
        let pipeline = Arc::new(Pipeline {
            channels,
            pool: Arc::clone(&pool),
            window: Arc::clone(&context.window),
            page_size: PAGE_SIZE,
        });
        let sync = Arc::new(SyncPoints::new(readers));
        let (window, waiting, pacer) = (Arc::clone(&context.window), Arc::clone(&sync), Arc::clone(&context.pacer));
        context.abort.on_end(move || {
            pacer.set_limit(None);
            window.close();
            pool.close();
            waiting.close();
        });
        let stream_channel = Arc::new(stream_channel);
        Ok(Self {
            pipeline,
            stream_channel,
            sync,
            abort: Arc::clone(&context.abort),
            when_aborted,
            connections: Connections(Vec::new()),
            threads: Vec::new(),
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

    /// Starts reading the main channel, `stream`; `start` reads its beginning, on the same thread.
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

    /// Calls `drained` with the last sequence number of each RAM channel when all of RAM is acknowledged. Where the
    /// migration is taken down before that, it is not called: somebody else has said why.
    pub(super) fn when_drained(&mut self, drained: impl FnOnce(Vec<u64>) + Send + 'static) -> io::Result<()> {
        let pipeline = Arc::clone(&self.pipeline);
        self.spawn("drain", None, move || {
            if let Ok(last) = pipeline.channels.iter().map(SendChannel::drained).collect() {
                drained(last);
            }
            Ok(())
        })
    }

    /// Keeps a connection of QEMU; gives what is to be drained when the migration was taken down.
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
        let abort = Arc::clone(&self.abort);
        self.threads.push(std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            if let Err(reason) = run() {
                abort.raise(reason);
                if let Some(rest) = rest {
                    drain(&rest);
                }
            }
        })?);
        Ok(())
    }

    /// Closes QEMU's connections: it needs them no more.
    pub(super) fn release(&self) {
        self.connections.close();
    }

    /// What went over the channels so far.
    pub(super) fn sent(&self) -> Sent {
        Sent::over(self.pipeline.channels.iter().chain([&*self.stream_channel]))
    }

    /// Gives QEMU `time` to close its connections itself, then closes them, and waits for all threads. As with [`Plane::join`] every
    /// connection to the destination is closed.
    pub(super) fn leave(mut self, time: Duration) {
        let threads = std::mem::take(&mut self.threads);
        std::thread::scope(|scope| {
            let (ended, waiting) = channel::<()>();
            let connections = &self.connections;
            scope.spawn(move || {
                if waiting.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                    connections.close();
                }
            });
            for thread in threads {
                // A panic there has been printed, and its closed connection was noticed.
                let _ = thread.join();
            }
            drop(ended);
        });
        self.join();
    }

    /// Waits for all threads. The migration has ended: every connection to the destination is closed.
    pub(super) fn join(self) {
        self.release();
        for thread in self.threads {
            // A panic there has been printed, and its closed connection was noticed.
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

/// QEMU's, closed at the latest when they are dropped: threads have clones of them.
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
    // It may have been closed by the other side already.
    let _ = stream.shutdown(Shutdown::Both);
}

/// Reads to nowhere until the connection ends.
fn drain(mut stream: &UnixStream) {
    let mut nowhere = vec![0; 256 << 10];
    while stream.read(&mut nowhere).is_ok_and(|length| length > 0) {}
}

/// Batches that are enough: what waits in queues and is being sent, and one open batch of each reader for each channel,
/// since a reader may hold those while it waits for another.
fn batches(channels: usize, readers: usize) -> usize {
    readers * (channels + 1) + 8 * channels
}
