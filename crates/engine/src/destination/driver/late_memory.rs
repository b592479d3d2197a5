//! The driver's part for post-copy: the guest starts while part of its memory is still at the source, and the source may be lost and
//! reconnect meanwhile.

use std::sync::Arc;

use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::DestinationEvent;

use super::{Driver, Event, Loading};
use crate::destination::post_copy::{PostCopy, PostCopyEvent};
use crate::migration::{POST_COPY, Phase};

impl Driver<'_> {
    /// Prepares for post-copy: the guest will go on before all of its RAM is here.
    pub(super) fn begin_post_copy(&mut self) -> Result<(), Reason> {
        if !self.receiving.acceptor.session().has(POST_COPY) {
            return Err(Reason::other("it was not agreed on"));
        }
        if self.kernel.phase != Phase::Rounds || self.faults.is_some() {
            return Err(Reason::other("it was begun already, or the guest is being switched over"));
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
        let memory = |text| Reason::new(ErrorKind::Memory, text);
        let post_copy = PostCopy::begin(self.target.ram(), news).map_err(memory)?;
        let faults = post_copy
            .handle_faults()
            .map_err(|error| Reason::other(format_args!("no thread for page faults: {error}")))?;
        self.faults = Some(faults);
        let released = Arc::clone(&post_copy);
        self.kernel.abort.on_end(move || released.release_if_not_loaded());
        self.target.begin_post_copy(post_copy).map_err(|error| memory(error.to_string()))
    }

    /// Ends the data channels that there were, and admits new ones: the source has reconnected.
    pub(super) fn admit_new_channels(&mut self) {
        self.kernel.abort.lost("the source has reconnected with new channels");
        let resumes = self.target.post_copy().is_none();
        self.target.post_copy().iter().for_each(|post_copy| post_copy.disconnected());
        self.channels.join();
        if resumes {
            // The old stream channel may wait for its readers. It is closed before there is a sink for the next one.
            self.loading = Loading::Over;
            self.receiving.acceptor.close();
            self.loading = self.state_sinks.renew();
        }
        let incarnation = self.kernel.renew_channels();
        self.occupied.renew(incarnation);
        self.receiving.acceptor.renew(incarnation, &self.kernel.abort, resumes);
    }

    pub(super) fn handle_post_copy(&mut self, news: PostCopyEvent) -> Option<DestinationEvent> {
        match news {
            PostCopyEvent::Complete => {
                self.kernel.observer.note("all of the guest's memory is here");
                Some(DestinationEvent::MemoryComplete)
            }
            PostCopyEvent::Note(text) => {
                self.kernel.observer.note(&text);
                None
            }
            PostCopyEvent::NoMemory(reason) => {
                self.kernel.observer.note(&format!("the guest waits for memory of this host: {reason}"));
                None
            }
            PostCopyEvent::Failed(reason) => {
                self.kernel.observer.note(&format!("the guest's memory: {reason}"));
                if self.kernel.may_give_up() {
                    return Some(self.kernel.fail(reason));
                }
                if let Some(event) = self.memory_not_needed() {
                    return Some(event);
                }
                self.kernel.abort.raise(reason.clone());
                Some(DestinationEvent::MemoryFailed { reason })
            }
        }
    }

    /// Returns the event by which the migration is completed although memory is missing, if the guest has ended by itself, and its process with
    /// it: nothing will read that memory.
    pub(super) fn memory_not_needed(&mut self) -> Option<DestinationEvent> {
        if self.kernel.phase != Phase::PostCopy {
            return None;
        }
        let end = self.vmm.call(|vmm| vmm.guest_end()).filter(|end| end.by_itself)?;
        self.kernel.observer.note(&format!("{}: the memory that is still at the source is not needed", end.what));
        Some(DestinationEvent::MemoryComplete)
    }
}
