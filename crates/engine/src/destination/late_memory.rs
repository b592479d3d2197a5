//! The driver's part for post-copy: the guest starts while part of its memory is still at the source, and the source may be lost and
//! reconnect meanwhile.

use std::sync::Arc;
use std::thread::JoinHandle;

use sterna_wire::control::{ControlMessage, PostCopyFigures};
use sterna_wire::switchover::DestinationEnd;

use super::driver::{Driver, Event};
use super::post_copy::{PostCopy, PostCopyEvent};
use crate::migration::{POST_COPY, Phase};

/// The guest's memory that comes after its start.
pub(super) struct LateMemory {
    pub(super) missing: Missing,
    /// Whether the guest's start waits for new channels.
    start_waits: bool,
    /// The thread that handles page faults.
    faults: JoinHandle<()>,
}

/// The state of the guest's missing memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Missing {
    /// It is on its way.
    Awaited,
    /// It has all arrived, with these figures.
    Nothing(PostCopyFigures),
    /// It will never arrive, with the reason.
    ForGood(String),
}

impl LateMemory {
    /// Waits for the thread that handles page faults, which was stopped.
    pub(super) fn join(self) {
        // A panic of the thread has been printed.
        let _ = self.faults.join();
    }
}

impl Driver<'_> {
    /// Prepares for post-copy: the guest will go on before all of its RAM is here.
    pub(super) fn begin_post_copy(&mut self) -> Result<(), String> {
        if !self.receiving.acceptor.session().has(POST_COPY) {
            return Err("it was not agreed on".into());
        }
        if self.kernel.phase != Phase::Rounds || self.late.is_some() {
            return Err("it was begun already, or the guest is being switched over".into());
        }
        let (events, monitor_call) = (self.kernel.events.clone(), self.occupied.clone());
        let news = Box::new(move |news| {
            let failed = if let PostCopyEvent::Failed(reason) = &news { Some(reason.clone()) } else { None };
            // Queued before the alarm, whose event closes the connection to the source.
            events.send(Event::PostCopy(news));
            if let Some(reason) = failed {
                monitor_call.raise(reason);
            }
        });
        let post_copy = PostCopy::begin(self.target.ram(), news)?;
        let faults = post_copy.handle_faults().map_err(|error| format!("no thread for page faults: {error}"))?;
        let released = Arc::clone(&post_copy);
        self.kernel.abort.on_end(move || released.release_if_not_loaded());
        self.late = Some(LateMemory { missing: Missing::Awaited, start_waits: false, faults });
        self.target.begin_post_copy(post_copy)?;
        self.kernel.peer.send(&ControlMessage::PostCopyReady);
        Ok(())
    }

    /// Returns whether the guest runs here and lacks part of its memory.
    pub(super) fn lacks_pages(&self) -> bool {
        let awaited = self.late.as_ref().is_some_and(|late| late.missing == Missing::Awaited);
        awaited && self.kernel.end() == Some(&DestinationEnd::Running)
    }

    /// Begins to wait for the rest of the guest's memory: the guest runs.
    pub(super) fn await_rest(&mut self) {
        let Some(post_copy) = self.target.post_copy() else { return };
        self.kernel.phase = Phase::PostCopy;
        self.kernel.observer.note(&format!("the guest runs; {} pages are still at the source", post_copy.missing()));
        post_copy.arm();
        if self.lacks_pages() {
            // The channels may have broken meanwhile. Queued behind the event of a failure of the memory, if there is one, so that the
            // source receives that reason first.
            self.kernel.report_broken_channels();
        }
    }

    /// Returns whether the guest may start with what is known of its memory.
    ///
    /// # Errors
    /// It must never start.
    pub(super) fn may_start(&mut self) -> Result<bool, String> {
        let Some(late) = &mut self.late else {
            // All memory is in place. The channels are ended, so that no thread writes the memory of a running guest, whatever a source
            // sends.
            self.kernel.abort.finish();
            self.receiving.acceptor.join();
            return Ok(true);
        };
        match late.missing {
            Missing::Awaited if self.kernel.abort.is_over() => {
                // The monitor may touch missing memory in `resume`, and while it blocks this thread cannot accept new channels.
                self.kernel
                    .observer
                    .note("the channels of the guest's memory failed: it is started when there are new ones");
                late.start_waits = true;
                self.kernel.peer.hang_up();
                Ok(false)
            }
            Missing::Awaited | Missing::Nothing(_) => Ok(true),
            Missing::ForGood(_) => Err("part of the guest's memory will never arrive".into()),
        }
    }

    /// Queues the guest's start, if it waits: new channels are there, or never will be.
    pub(super) fn start_now(&mut self) {
        if self.late.as_mut().is_some_and(|late| std::mem::take(&mut late.start_waits)) {
            self.kernel.events.send(Event::Start);
        }
    }

    /// Handles a failure of the data channels after this side was prepared: all channels are opened anew.
    pub(super) fn await_new_channels(&mut self, reason: &str) {
        if self.lacks_pages() || self.late.as_ref().is_some_and(|late| late.start_waits) {
            self.kernel
                .observer
                .note(&format!("the channels of the guest's memory failed, and are made anew: {reason}"));
            // So that the source notices the failure, if it has not.
            self.kernel.peer.hang_up();
        }
    }

    /// Admits new data channels, when the source has reconnected.
    pub(super) fn renew_channels(&mut self) {
        let (Some(post_copy), Some(late)) = (self.target.post_copy(), &self.late) else { return };
        if self.kernel.may_give_up() || self.kernel.end().is_some_and(|end| *end != DestinationEnd::Running) {
            // The source has reconnected only to exchange that the migration has failed.
            return;
        }
        match &late.missing {
            Missing::Awaited => {}
            Missing::Nothing(figures) => return self.kernel.peer.send(&ControlMessage::PostCopyDone(*figures)),
            // The source may not have received it before.
            Missing::ForGood(reason) => return self.kernel.send_failure(reason),
        }
        self.kernel.abort.lost("the source has reconnected with new channels");
        post_copy.disconnected();
        self.channels.join();
        let incarnation = self.kernel.renew_channels();
        self.receiving.acceptor.renew(incarnation, &self.kernel.abort);
        self.kernel.peer.send(&ControlMessage::PostCopyReady);
        self.start_now();
    }

    pub(super) fn handle_post_copy(&mut self, news: PostCopyEvent) {
        let missing = match news {
            PostCopyEvent::Complete => {
                let figures = self.target.post_copy().map(|post_copy| post_copy.figures()).unwrap_or_default();
                self.kernel.observer.note("all of the guest's memory is here");
                self.kernel.peer.send(&ControlMessage::PostCopyDone(figures));
                Missing::Nothing(figures)
            }
            PostCopyEvent::Note(text) => return self.kernel.observer.note(&text),
            PostCopyEvent::NoMemory(reason) => {
                return self.kernel.observer.note(&format!("the guest waits for memory of this host: {reason}"));
            }
            PostCopyEvent::Failed(reason) => {
                self.kernel.observer.note(&format!("the guest's memory: {reason}"));
                self.kernel.send_failure(&reason);
                self.kernel.abort.raise(&reason);
                Missing::ForGood(reason)
            }
        };
        self.late.iter_mut().for_each(|late| late.missing = missing.clone());
    }
}
