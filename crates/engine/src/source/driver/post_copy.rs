//! The driver in post-copy: from the request to the destination, over the channel on which the destination requests pages, to its message
//! that it has all of them, however often the connection is lost meanwhile.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use sterna_wire::control::{ControlMessage, PostCopyFigures};
use sterna_wire::switchover::SourceEvent;

use super::data_plane::Moving;
use super::{Driver, new_window};
use crate::cpu_time::{self, CpuTime};
use crate::entry::PageSearch;
use crate::pacer::Pacer;
use crate::source::unsent::PageServer;

/// The state of post-copy.
#[derive(Debug)]
pub(super) enum PostCopy {
    /// Not begun: all of RAM is sent before the guest goes on.
    No,
    /// The destination was requested to watch for missing pages.
    Requested,
    /// The destination watches for missing pages. From here on the guest can go on without all of its RAM.
    Begun(Begun),
}

/// The state of post-copy that has begun.
#[derive(Debug)]
pub(super) struct Begun {
    /// The thread that answers requests, while there are data channels.
    server: Option<JoinHandle<()>>,
    /// When the destination reported that it has all pages, and its figures.
    pub(super) done: Option<(Instant, PostCopyFigures)>,
    pub(super) reconnected: u32,
}

impl PostCopy {
    pub(super) fn begun(&self) -> Option<&Begun> {
        match self {
            Self::Begun(begun) => Some(begun),
            Self::No | Self::Requested => None,
        }
    }

    fn begun_mut(&mut self) -> Option<&mut Begun> {
        match self {
            Self::Begun(begun) => Some(begun),
            Self::No | Self::Requested => None,
        }
    }

    pub(super) fn done(&self) -> Option<(Instant, PostCopyFigures)> {
        self.begun().and_then(|begun| begun.done)
    }

    /// Waits for the thread that answers requests, whose channel is closed.
    pub(super) fn join_server(&mut self) {
        if let Some(server) = self.begun_mut().and_then(|begun| begun.server.take()) {
            // A panic of the thread has been printed.
            let _ = server.join();
        }
    }
}

impl Driver<'_> {
    /// Requests the destination to watch for missing pages.
    pub(super) fn request_post_copy(&mut self) {
        self.kernel.observer.note("the guest will go on before all of its memory is there");
        self.post_copy = PostCopy::Requested;
        self.kernel.peer.send(&ControlMessage::PostCopy);
    }

    /// Handles the destination's message that it watches for missing pages: at first, or again after it was lost.
    pub(super) fn destination_watches(&mut self) -> Option<SourceEvent> {
        let decided = self.kernel.decided();
        if !decided && self.kernel.abort.is_over() {
            // A late answer: the migration is being taken down.
            return None;
        }
        let new_channels = self.kernel.expects_new_channels();
        let outcome = match &self.post_copy {
            PostCopy::Requested if !decided => self.begin_post_copy(),
            PostCopy::Begun(begun) if decided && new_channels && begun.done.is_none() => {
                if let Err(reason) = self.resume_post_copy() {
                    tracing::info!(reason, "the rest of memory cannot be sent on yet");
                    self.kernel.peer.close();
                }
                Ok(())
            }
            _ => Err("the destination sent a message about post-copy out of turn".to_owned()),
        };
        outcome.err().map(|reason| SourceEvent::Failed { reason })
    }

    /// Handles the destination's message that it has all of the guest's memory.
    pub(super) fn destination_has_all(&mut self, figures: PostCopyFigures) -> Option<SourceEvent> {
        let decided = self.kernel.decided();
        match self.post_copy.begun_mut() {
            Some(begun) if decided => {
                begun.done.get_or_insert((Instant::now(), figures));
                None
            }
            _ => {
                Some(SourceEvent::Failed { reason: "the destination claims to have memory that it cannot have".into() })
            }
        }
    }

    fn begin_post_copy(&mut self) -> Result<(), String> {
        let server = self.serve_pages(PageServer::serve)?;
        self.post_copy = PostCopy::Begun(Begun { server: Some(server), done: None, reconnected: 0 });
        self.switch_over()
    }

    /// Opens new data channels: the destination is connected again and admits them.
    fn resume_post_copy(&mut self) -> Result<(), String> {
        self.end_data_plane();
        self.kernel.renew_channels();
        self.window = new_window(&self.kernel.session, &self.settings);
        self.pacer = Arc::new(Pacer::new(self.settings.bandwidth));
        let pipeline = self.open_ram_channels(&self.send_context(), None)?;
        self.moving = Some(Moving {
            pipeline: Arc::clone(&pipeline),
            stream: None,
            device_channels: Arc::default(),
            rounds: None,
        });
        let (unsent, ram, packet_size) = (Arc::clone(&self.unsent), self.ram.clone(), self.kernel.session.packet_size);
        let server = self.serve_pages(move |mut server| {
            server.receive_list()?;
            std::thread::scope(|scope| {
                let cpu = CpuTime::current();
                // A failure of the pipeline raises the alarm by itself.
                scope.spawn(move || {
                    let _counted = cpu.as_ref().map(CpuTime::count);
                    unsent.stream(&mut PageSearch::new(pipeline, ram, packet_size))
                });
                server.serve()
            })
        })?;
        if let Some(begun) = self.post_copy.begun_mut() {
            begun.server = Some(server);
            begun.reconnected += 1;
        }
        self.kernel.observer.note("the destination is back: what it lacks is sent on");
        Ok(())
    }

    /// Opens the post-copy channel, and has it served on a thread of its own.
    fn serve_pages(
        &self,
        serve: impl FnOnce(PageServer) -> io::Result<()> + Send + 'static,
    ) -> Result<JoinHandle<()>, String> {
        let opened = self.kernel.session.open_post_copy(self.security, self.kernel.to(), &self.kernel.abort);
        let halves = opened.map_err(|error| error.to_string())?;
        let pacer = Arc::clone(&self.pacer);
        let server =
            PageServer::new(self.ram.clone(), Arc::clone(&self.unsent), halves, self.kernel.session.rules(), pacer);
        let server = server.map_err(|error| error.to_string())?;
        let abort = Arc::clone(&self.kernel.abort);
        let thread = std::thread::Builder::new().name("page-requests".into());
        let served = move || {
            if let Err(error) = serve(server) {
                abort.lost(format_args!("the post-copy channel: {error}"));
            }
        };
        cpu_time::spawn(thread, served).map_err(|error| format!("no thread for page requests: {error}"))
    }
}
