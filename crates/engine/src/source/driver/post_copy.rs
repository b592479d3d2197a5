//! The driver in post-copy: sends the pages that the destination lacks, and answers its requests, however often the connection is lost
//! meanwhile.

use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use sterna_wire::control::PostCopyFigures;
use sterna_wire::reason::Reason;

use super::data_plane::Moving;
use super::{Driver, new_window};
use crate::cpu_time;
use crate::entry::PageSearch;
use crate::pacer::Pacer;
use crate::report::Shrinking;
use crate::session::SessionError;
use crate::source::unsent::PageServer;

/// The driver's part of post-copy. Whether it has begun is known to the state machine.
#[derive(Debug, Default)]
pub(super) struct PostCopy {
    /// The thread that answers requests, while there are data channels.
    server: Option<JoinHandle<()>>,
    /// The destination's figures, once it has all pages.
    pub(super) figures: PostCopyFigures,
    pub(super) reconnected: u32,
    /// The memory that the destination lacks, for estimates.
    pub(super) rest: Shrinking,
}

impl PostCopy {
    /// Waits for the thread that answers requests, whose channel is closed.
    pub(super) fn join_server(&mut self) {
        if let Some(server) = self.server.take() {
            // A panic of the thread has been printed.
            let _ = server.join();
        }
    }
}

impl Driver<'_> {
    /// Answers requests for pages, and pauses the guest: the destination watches for missing pages.
    pub(super) fn begin_post_copy(&mut self) -> Result<(), Reason> {
        self.post_copy.server = Some(self.answer_requests(PageServer::serve)?);
        self.switch_over()
    }

    /// Opens new data channels: the destination is connected again and admits them.
    pub(super) fn resume_post_copy(&mut self) -> Result<(), Reason> {
        self.end_data_plane();
        self.kernel.renew_channels();
        self.window = new_window(&self.kernel.session, &self.settings);
        self.pacer = Arc::new(Pacer::new(self.settings.bandwidth));
        self.kernel.pace_by(&self.pacer);
        let pipeline = self.open_ram_channels(&self.send_context(), None)?;
        self.moving = Some(Moving {
            pipeline: Arc::clone(&pipeline),
            stream: None,
            device_channels: Arc::default(),
            rounds: None,
        });
        let (unsent, ram, packet_size) = (Arc::clone(&self.unsent), self.ram.clone(), self.kernel.session.packet_size);
        let server = self.answer_requests(move |mut server| {
            server.receive_list()?;
            // A failure of the pipeline raises the alarm by itself.
            let stream = move || unsent.stream(&mut PageSearch::new(pipeline, ram, packet_size));
            let streaming = cpu_time::spawn(Builder::new().name("missing-pages".into()), stream)?;
            let served = server.serve();
            // A panic of the thread has been printed.
            let _ = streaming.join();
            served
        })?;
        self.post_copy.server = Some(server);
        self.post_copy.reconnected += 1;
        self.kernel.observer.note("the destination is back: what it lacks is sent on");
        Ok(())
    }

    /// Opens the post-copy channel, and has it served on a thread of its own.
    fn answer_requests(
        &self,
        serve: impl FnOnce(PageServer) -> io::Result<()> + Send + 'static,
    ) -> Result<JoinHandle<()>, Reason> {
        let opened = self.kernel.session.open_post_copy(self.security, self.kernel.to(), &self.kernel.abort);
        let halves = opened.map_err(SessionError::into_reason)?;
        let pacer = Arc::clone(&self.pacer);
        let server =
            PageServer::new(self.ram.clone(), Arc::clone(&self.unsent), halves, self.kernel.session.rules(), pacer);
        let server = server.map_err(Reason::other)?;
        let abort = Arc::clone(&self.kernel.abort);
        let thread = Builder::new().name("page-requests".into());
        let served = move || {
            if let Err(error) = serve(server) {
                abort.lost(format_args!("the post-copy channel: {error}"));
            }
        };
        cpu_time::spawn(thread, served)
            .map_err(|error| Reason::other(format_args!("no thread for page requests: {error}")))
    }
}
