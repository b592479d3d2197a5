//! What a driver of a destination implements.

use std::time::Instant;

use sterna_wire::control::{ControlMessage, DestinationFigures, PostCopyFigures};
use sterna_wire::reason::Reason;
use sterna_wire::switchover::{DestinationEnd, DestinationEvent, DestinationGuest};

use super::DestinationKernel;
use crate::switchover::{LINGER, LastAnswer, Receiving};

/// What one monitor does as a destination.
pub trait DestinationDriver<'a> {
    /// The driver's own events.
    type Event: Send + 'static;

    /// Returns what all drivers have.
    fn kernel(&mut self) -> &mut DestinationKernel<'a, Self::Event>;

    /// Returns the channels on which the guest arrives; none in `sterna recover`.
    fn receiving(&mut self) -> Option<&mut Receiving> {
        None
    }

    /// Makes sure that the guest stays paused when it is loaded.
    ///
    /// # Errors
    /// Why that is not sure: the migration is aborted.
    fn clear_autostart(&mut self) -> Result<(), Reason>;

    /// Called when the channels are admitted and the source has received its welcome.
    ///
    /// # Errors
    /// Why the guest cannot be loaded: the migration is aborted.
    fn accept_stream(&mut self) -> Result<(), Reason>;

    /// Post-copy: has the missing pages of guest RAM watched.
    ///
    /// # Errors
    /// Why that is not possible: the migration is aborted.
    fn watch_missing_pages(&mut self) -> Result<(), Reason> {
        Err(Reason::other("this monitor's memory cannot be watched"))
    }

    /// After an interruption, and in post-copy: closes the data channels of older incarnations, and admits those of the newest control channel.
    fn renew_channels(&mut self) {}

    /// Post-copy: reports [`DestinationEvent::MemoryComplete`] once no page is missing any more.
    fn await_memory(&mut self) {}

    /// Starts the guest. Returns its state, unless that may take until missing memory has arrived: then the driver reports it later.
    ///
    /// # Errors
    /// Why the guest does not run: `sterna recover` has to settle the migration.
    fn start_guest(&mut self) -> Result<Option<DestinationGuest>, Reason>;

    /// Called when the guest runs here.
    fn guest_started(&mut self);

    /// Watches the first moment of the guest, which was started. Returns why the guest certainly does not run, if that is so.
    fn why_not_running(&mut self) -> Option<String> {
        None
    }

    /// Ends the monitor: its copy of the guest never ran and never will.
    ///
    /// # Errors
    /// Why the copy may still be there.
    fn discard(&mut self) -> Result<(), Reason>;

    /// Waits for a source that was lost.
    fn await_source(&mut self) {
        let kernel = self.kernel();
        if !kernel.peer.is_connected() && kernel.machine.unsure() {
            kernel.observer.note(&format!(
                "the source is lost and the guest is loaded and paused here: waiting for the source's decision which side runs it \
                 (migration {})",
                kernel.ledger.record().migration
            ));
        }
    }

    /// Called when the state machine has reached `end`.
    fn ended(&mut self, end: &DestinationEnd);

    /// Returns until when the source is answered after the end. Asked anew when the source's control channel has changed.
    fn hang_up_at(&self, answer: &LastAnswer) -> Instant {
        answer.until(LINGER)
    }

    /// Returns whether a cancellation ends the wait for a source that may still need answers.
    fn cancel_ends_lingering(&self) -> bool {
        true
    }

    /// Handles a message of the source that is not about the switchover.
    fn receive(&mut self, message: ControlMessage) -> Option<DestinationEvent>;

    /// Handles an event of the driver's own.
    fn handle(&mut self, event: Self::Event) -> Option<DestinationEvent>;

    /// Called whenever the loop is about to wait. Returns what the driver notices without an event.
    fn idle(&mut self) -> Option<DestinationEvent> {
        None
    }

    /// Returns the reason of channels that have failed by something at this side, with what the monitor reports about it.
    fn explained(&mut self, reason: Reason) -> Reason {
        reason
    }

    /// Completes the figures about this side: the guest runs here.
    fn count_figures(&mut self, _figures: &mut DestinationFigures) {}

    /// Returns the figures of post-copy, if it was begun.
    fn post_copy_figures(&mut self) -> Option<PostCopyFigures> {
        None
    }

    /// Returns how many bytes of the guest's memory are still at the source, in post-copy.
    fn missing_bytes(&self) -> u64 {
        0
    }

    /// Handles a cancellation when only the source may still end the migration.
    fn too_late_to_cancel(&mut self) {
        self.kernel().observer.note("the guest is loaded here and the source decides: this cannot be cancelled");
    }
}
