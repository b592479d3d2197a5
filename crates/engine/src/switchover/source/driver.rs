//! What a driver of a source implements.

use sterna_wire::control::ControlMessage;
use sterna_wire::reason::Reason;
use sterna_wire::switchover::{SourceEvent, SourceGuest};

use super::SourceKernel;
use crate::vmm::GuestEnd;

/// Why a source does not send the pages that the destination lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unserved {
    /// The connection failed, for this reason: the destination is connected to anew.
    ConnectionLost(Reason),
    /// The monitor has ended, and the pages with it.
    MonitorGone,
    /// This process has no access to the pages, for this reason.
    NoPages(Reason),
}

/// What one monitor does as a source.
pub trait SourceDriver<'a> {
    /// The driver's own events.
    type Event: Send + 'static;

    /// Returns what all drivers have.
    fn kernel(&mut self) -> &mut SourceKernel<'a, Self::Event>;

    /// Begins to send the guest's memory.
    ///
    /// # Errors
    /// Why it cannot begin: the migration is aborted.
    fn start_migration(&mut self) -> Result<(), Reason>;

    /// Lets the monitor complete its part: the destination is prepared. Returns the guest's state, unless the monitor reports it later.
    ///
    /// # Errors
    /// Why it does not complete: the migration is aborted.
    fn complete(&mut self) -> Result<Option<SourceGuest>, Reason>;

    /// Ends the monitor's migration after an abort and returns the guest's state.
    ///
    /// # Errors
    /// Why the guest's state is not known: `sterna recover` has to settle the migration.
    fn end_migration(&mut self) -> Result<SourceGuest, Reason>;

    /// Resumes the guest and returns its state.
    ///
    /// # Errors
    /// Why the guest does not run: `sterna recover` has to settle the migration.
    fn resume(&mut self) -> Result<SourceGuest, Reason>;

    /// Called when the migration has failed and the guest runs here, as it does from now on.
    fn guest_stays(&mut self);

    /// Ends the monitor, or keeps it: the guest runs at the destination. Returns the state of the guest here.
    ///
    /// # Errors
    /// Why the monitor still lives although it was to be ended.
    fn end_guest(&mut self) -> Result<SourceGuest, Reason>;

    /// Ends the data channels of a destination that is lost before the decision. Goes on tracking the guest's writes, and counts as dirty everything
    /// that was not acknowledged.
    ///
    /// # Errors
    /// Why the migration cannot go on later: it is aborted.
    fn hold_rounds(&mut self) -> Result<(), Reason> {
        Err(Reason::other("the migration cannot go on after the destination was lost"))
    }

    /// Opens new data channels to a destination that is connected again, and sends the rest over them.
    ///
    /// # Errors
    /// Why there are no channels. Where a connection has failed, the source connects again; else the migration is aborted.
    fn continue_rounds(&mut self) -> Result<(), Reason> {
        Err(Reason::other("no rounds are held"))
    }

    /// Begins post-copy: answers requests for pages, pauses the guest and sends its state.
    ///
    /// # Errors
    /// Why it cannot begin: the migration is aborted.
    fn start_post_copy(&mut self) -> Result<(), Reason> {
        Err(Reason::other("post-copy is not possible at the source"))
    }

    /// Sends the pages that the destination lacks, over new channels where the destination was lost before.
    ///
    /// # Errors
    /// Why they are not sent.
    fn serve_pages(&mut self) -> Result<(), Unserved>;

    /// Returns how many pages the destination certainly lacks, because they were never sent. A destination that reports that its guest runs
    /// with all of its memory is not believed while there are any.
    fn unsent_pages(&self) -> u64 {
        0
    }

    /// Returns whether the monitor has ended, and what is left of its guest's memory with it.
    fn monitor_has_ended(&mut self) -> bool {
        false
    }

    /// Returns why the guest, which was paused, is not in this migration's hands any more, if that is so. Asked when the destination has failed:
    /// what failed there may follow from this. Waits for nothing.
    fn changed_by_others(&mut self) -> Option<Reason> {
        None
    }

    /// Returns how the guest has ended, as far as that was noticed. Waits for nothing.
    fn guest_end(&mut self) -> Option<GuestEnd> {
        None
    }

    /// Handles a message of the destination that is not about the switchover.
    fn receive(&mut self, message: ControlMessage) -> Option<SourceEvent>;

    /// Carries out the requests of other threads ([`SourceKernel::requests`]), where the driver had them
    /// [reported](crate::switchover::Events::on_request).
    fn handle_requests(&mut self) {}

    /// Handles an event of the driver's own.
    fn handle(&mut self, event: Self::Event) -> Option<SourceEvent>;

    /// Reports progress.
    fn tick(&mut self) {}

    /// Returns what the current step waits for, where more is known than the step's name.
    fn waiting_for(&self) -> Option<String> {
        None
    }

    /// Handles a cancellation after the decision.
    fn too_late_to_cancel(&mut self) {
        self.kernel().observer.note("too late to cancel: the guest already belongs to the destination");
    }
}
