//! The interface that a monitor which embeds the library implements, at either side.
//!
//! All methods are called one at a time, on the thread that called `run`. They may block; a cancellation takes effect when
//! the method returns. A method that panics has failed with the panic's text; where the method returns no error, the migration fails. After a panic in
//! `resume` it is unknown whether the guest runs.

use std::io::{Read, Write};

use crate::opening::{Opening, Prepared};
pub use crate::vmm_error::VmmError;

/// Why a guest that was paused runs on at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResumeReason {
    /// Until it was paused the guest had written more than fits the target downtime: the rounds go on, and it is paused again later.
    RoundsGoOn,
    /// The migration was cancelled, at this side.
    Cancelled,
    /// The migration has failed; [`Source::run`](crate::source::Source::run) will return why.
    Failed,
}

/// The state of the source's monitor once its guest runs at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AfterMove {
    /// The monitor lives, with a stopped copy of the guest that must never run again.
    Kept,
    /// The monitor has ended.
    Ended,
    /// The monitor's guest runs: somebody has started it by hand although it belongs to the destination.
    RunsHere,
}

/// How a guest has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestEnd {
    /// Whether the guest has ended by itself: it has shut down, for example, or panicked. Else its monitor was ended, by something else, while
    /// the guest ran.
    pub by_itself: bool,
    /// What happened, for people: a clause, such as `the guest has shut itself down`.
    pub what: String,
}

/// The monitor at the source.
pub trait SourceVmm {
    /// Returns name and version, for logs and reports, for instance `microvm 1.0`.
    fn name(&self) -> String;

    /// Returns the type of the machine, which must be the same at the destination. Empty, as by default, where there is only one type.
    fn machine_type(&self) -> String {
        String::new()
    }

    /// Waits until the input and output under way has ended that writes guest RAM by other means than the CPU's page tables: reads of
    /// disks into guest RAM (`O_DIRECT`, io_uring, AIO), and anything else that has pinned pages. The guest runs on and may begin new
    /// input and output.
    ///
    /// Called between each collecting of the dirty log and the reading of the pages that the log has named. A dirty log by write
    /// protection notices a write by the page fault. A device that has pinned the page before it was protected again causes no page fault,
    /// and no later answer of the log names what it writes; so its writing must end before the page is read.
    /// Does nothing by default, which is right where nothing writes guest RAM in this way, or where such writes are marked in the dirty
    /// log when they end.
    ///
    /// # Errors
    /// The migration fails; the guest runs on.
    fn settle_io(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Checks whether the guest can still be moved, as far as the monitor knows: for example that no operator has begun something that does not
    /// go together with a migration. Called once per round, before [`SourceVmm::settle_io`]. Permits it by default, which is right where the
    /// monitor itself refuses such a thing during a migration.
    ///
    /// # Errors
    /// The migration fails; the guest runs on.
    fn check_migratable(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Checks whether the guest may be stopped for the switchover. Called before the record notes that this migration stops the guest: by
    /// that note `sterna recover` resumes the guest, and a guest that somebody else has stopped must stay stopped. Permits it by default,
    /// which is right where only the monitor stops its guest.
    ///
    /// # Errors
    /// The migration fails; the guest stays as it is.
    fn may_pause(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Checks that the guest has not run since [`SourceVmm::pause`] returned. Called right before the decision that the guest belongs to
    /// the destination. Succeeds by default, which is right where only the monitor resumes its guest.
    ///
    /// # Errors
    /// The guest has run meanwhile, so the destination's copy is of no use. The migration fails; [`SourceVmm::resume`] is called.
    fn confirm_paused(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Returns why the guest, which was paused, cannot be moved any more, if the monitor has found that since: another program has resumed the
    /// guest, for example. Called again and again until the decision, and when the destination has failed, which may follow from that; then it
    /// is the reason. Waits for no other program. Returns none by default, which is right where only the monitor resumes its guest.
    fn changed_by_others(&mut self) -> Option<VmmError> {
        None
    }

    /// Stops the guest. When this returns, no vCPU runs, no device and no thread of the monitor writes guest RAM, no input or output
    /// that writes guest RAM is under way, and the next collecting of the dirty log names every page that was written before. Only saving
    /// the state may write guest RAM after this has returned: see [`SourceVmm::save`].
    ///
    /// # Errors
    /// The migration fails, and [`SourceVmm::resume`] is called in case the guest has stopped after all.
    fn pause(&mut self) -> Result<(), VmmError>;

    /// Lets the guest run on, after [`SourceVmm::pause`]. Where the migration has failed or was cancelled, the guest stays here: the monitor
    /// may announce the guest's network addresses anew, since switches may have learned the other host's port.
    ///
    /// # Errors
    /// The guest stays paused; the report says so.
    fn resume(&mut self, reason: ResumeReason) -> Result<(), VmmError>;

    /// Writes the state of vCPUs and devices, everything but RAM, while the guest is paused. Saving may itself write guest RAM (rings of
    /// virtio devices, clocks, steal time), as long as the dirty log names these pages: the log is collected again after this method
    /// and [`SaveDevice::save`](crate::device_state::SaveDevice::save) of every device have returned. Afterwards guest RAM must not be
    /// written any more. `state` never waits for the network: what the connection does not take at once is kept in memory, so a device
    /// with more state than some MiB should be [passed separately](crate::source::Source::device).
    ///
    /// # Errors
    /// The migration fails and the guest is resumed.
    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError>;

    /// Writes the state that can be sent before the guest is paused, such as large state of devices that rarely changes;
    /// [`DestinationVmm::load_ahead`] reads it. Where anything was written, the guest is not paused before the destination
    /// has loaded it. Writes nothing by default.
    ///
    /// # Errors
    /// The migration fails; the guest runs on.
    fn save_ahead(&mut self, _state: &mut dyn Write) -> Result<(), VmmError> {
        Ok(())
    }

    /// Returns about how many bytes [`SourceVmm::save`] will write, for the prediction of the downtime.
    fn state_size(&self) -> u64 {
        0
    }

    /// Slows the guest down so that it dirties memory more slowly: its vCPUs are held for `percent` of the time, 0 (full speed) to 99.
    /// Called only when throttling was chosen; with 0 at the end if the guest stays. Called with the same percentage again in each round,
    /// and after a [`SourceVmm::resume`] with which rounds go on: [`SourceVmm::pause`] may end the throttling.
    ///
    /// # Errors
    /// The guest is not slowed down, or not any more; the migration goes on without throttling and reports it.
    fn throttle(&mut self, _percent: u8) -> Result<(), VmmError> {
        Err("this monitor cannot slow its guest down".into())
    }

    /// Returns why the guest may not go on at the destination before all of its RAM is there, if it may not: a device that
    /// cannot wait for a page (pinned memory, VFIO, vhost without userfaultfd), for instance. Called when post-copy was
    /// chosen.
    fn post_copy_refusal(&self) -> Option<String> {
        None
    }

    /// Returns whether the monitor has ended, and the guest with it. Called when another method has failed. A monitor that embeds the
    /// library has not ended.
    fn has_ended(&mut self) -> bool {
        false
    }

    /// Returns how the guest has ended, if it has. Called several times a second until the decision, and after another method has failed. A
    /// guest that has ended by itself is not moved, and not resumed: the migration ends as [`ErrorKind::GuestEnded`]. Returns none by default,
    /// which is right where the monitor returns an error from its methods once its guest has ended.
    ///
    /// [`ErrorKind::GuestEnded`]: crate::migration::ErrorKind::GuestEnded
    fn guest_end(&mut self) -> Option<GuestEnd> {
        None
    }

    /// Called when the destination has confirmed that the guest runs there: ends the monitor, or keeps it with a copy of the guest that
    /// must never run again. Keeps it by default.
    ///
    /// # Errors
    /// The monitor could not be ended. The report warns of it.
    fn guest_moved(&mut self) -> Result<AfterMove, VmmError> {
        Ok(AfterMove::Kept)
    }

    /// Called in the place of [`SourceVmm::guest_moved`] when the destination has reported that the guest, which it has started, certainly does
    /// not run there ([`DestinationVmm::why_not_running`]). The guest belongs to the destination all the same. The monitor should be kept: it
    /// has the guest as it was when it was paused, for a person who looks into that. Keeps it by default.
    ///
    /// # Errors
    /// What is wrong with the monitor. The report warns of it.
    fn guest_does_not_run(&mut self) -> Result<AfterMove, VmmError> {
        Ok(AfterMove::Kept)
    }
}

/// The monitor at the destination.
pub trait DestinationVmm {
    /// Returns name and version, for logs and reports.
    fn name(&self) -> String;

    /// Prepares for a guest that a source offers, before the migration is accepted and the guest is touched. A monitor that has RAM already
    /// checks the opening message here, if it wants to. One whose [`Destination`](crate::destination::Destination) was made
    /// [without RAM](crate::destination::Destination::without_ram) makes RAM and devices. This may take minutes: the source waits for up to
    /// ten, and meanwhile its guest runs. Called for one source after the other until one is accepted: also a source that is not refused
    /// here may be refused, or lost, right after. Returns [`Prepared::AsGiven`] by default.
    ///
    /// # Errors
    /// The source is refused and receives the reason; the destination goes on waiting for sources.
    fn prepare(&mut self, _opening: &Opening) -> Result<Prepared, VmmError> {
        Ok(Prepared::AsGiven)
    }

    /// Reads the state that [`SourceVmm::save_ahead`] wrote. RAM is incomplete and must not be read. The source does not pause
    /// its guest before this has returned.
    ///
    /// # Errors
    /// The migration fails; the guest runs on at the source.
    fn load_ahead(&mut self, _state: &mut dyn Read) -> Result<(), VmmError> {
        Err("the source sends state ahead, and this monitor does not load any".into())
    }

    /// Reads the state that [`SourceVmm::save`] wrote; the guest stays paused. RAM is complete, or, in post-copy, a thread that
    /// touches a missing page waits for it. The state comes from another host: it must not be trusted.
    ///
    /// # Errors
    /// The migration fails; the guest runs on at the source. This monitor's guest is of no use any more.
    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError>;

    /// Returns a closure that makes [`load`](Self::load) return soon, with an error. It is called, on another thread, if the migration ends
    /// while the monitor loads: a monitor that has read all of `state` and waits for something else would otherwise delay that. It may be
    /// called later, too, and does nothing then. It must not block. By default there is none.
    fn load_canceller(&self) -> Option<Box<dyn Fn() + Send>> {
        None
    }

    /// Lets the guest run: it belongs to this side now. In post-copy this method may touch guest RAM, and waits for a missing page until
    /// the source has sent it, also over a later connection. If the source is gone for good it waits for ever, and so does `run`, although
    /// the loss was recorded and reported: the monitor must be ended.
    ///
    /// # Errors
    /// The guest runs at neither side. The monitor may try again, unless part of the guest's memory is still missing.
    fn resume(&mut self) -> Result<(), VmmError>;

    /// As [`SourceVmm::post_copy_refusal`], for this side's devices.
    fn post_copy_refusal(&self) -> Option<String> {
        None
    }

    /// Returns whether the monitor has ended, and the guest with it. Called when another method has failed.
    fn has_ended(&mut self) -> bool {
        false
    }

    /// Returns how the guest, which was resumed here, has ended by itself, if it has: its first instructions may shut it down. Its migration has
    /// completed all the same, and the reports of both sides name the end. Called once the guest was resumed. Returns none by default.
    fn guest_end(&mut self) -> Option<GuestEnd> {
        None
    }

    /// Returns why the guest, which was resumed here, certainly does not run, if that is so: its monitor cannot execute it, or it has failed at
    /// once. A guest that has shut down, or that waits for an interrupt, is no such guest; nor is one of which this is only likely. The source
    /// then keeps its monitor, and both sides' migrations end as [`ErrorKind::DoesNotRun`]. Called once, after [`guest_started`], and
    /// before the source ends its monitor: this method may watch the guest for up to a second, which is no downtime. Returns none by default.
    ///
    /// [`ErrorKind::DoesNotRun`]: crate::migration::ErrorKind::DoesNotRun
    /// [`guest_started`]: DestinationVmm::guest_started
    fn why_not_running(&mut self) -> Option<String> {
        None
    }

    /// Called when the guest runs here: the monitor announces the guest's network addresses, for instance. Does nothing by default.
    fn guest_started(&mut self) {}

    /// Called when this side's copy of the guest is of no use and must never run: ends a monitor that was started for the guest. Does
    /// nothing by default.
    ///
    /// # Errors
    /// The monitor could not be ended.
    fn discard(&mut self) -> Result<(), VmmError> {
        Ok(())
    }
}
