//! What a monitor that embeds the library does for it, at either side, and how it says that something failed.
//!
//! All methods are called one at a time, on the thread that called `run`; they may block, but while they do the migration
//! cannot be cancelled. A method that panics has failed with what the panic says; where it cannot fail, the migration has. A panic in `resume`
//! leaves open whether the guest runs.

use std::io::{Read, Write};

/// Why the monitor could not do what it was asked, in its own words.
pub type VmmError = Box<dyn std::error::Error + Send + Sync>;

/// What has become of the source's monitor once its guest runs at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterMove {
    /// It is there, with a stopped copy of the guest that must never run again.
    Kept,
    /// It has ended.
    Ended,
    /// Its guest runs: somebody has started by hand what was given away.
    RunsHere,
}

/// The monitor at the source.
pub trait SourceVmm {
    /// Name and version, for logs and reports, for instance `microvm 1.0`.
    fn name(&self) -> String;

    /// The type of the machine, which the destination's must be too; empty where there is only one, as it is unless overridden.
    fn machine_type(&self) -> String {
        String::new()
    }

    /// Waits until no input or output is under way that was begun before and writes guest RAM by other means than the CPU's page
    /// tables: reads of disks into guest RAM (`O_DIRECT`, io_uring, AIO), and whatever else has pinned pages. The guest runs on and
    /// may begin new ones.
    ///
    /// Called between each collecting of the dirty log and the reading of the pages that the log has named. A dirty log by write
    /// protection sees a writer at the page fault of the page; a device that has pinned the page before the page was protected again
    /// takes none. What such a device writes later is in no later answer of the log; so it must be there before the page is read.
    /// Does nothing unless overridden, which is right where nothing writes guest RAM in this way, or where what does is handed to the
    /// dirty log at its end.
    ///
    /// # Errors
    /// The migration fails; the guest runs on.
    fn settle_io(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Looks whether the guest may be stopped for the switchover. Called before the record says that this migration stops the guest, by
    /// which `sterna recover` lets the guest run on: a guest that somebody else has stopped is to stay as it is. Permits it unless
    /// overridden, which is right where only the monitor stops its guest.
    ///
    /// # Errors
    /// The migration fails; the guest stays as it is.
    fn may_pause(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Looks whether the guest has stood still since [`SourceVmm::pause`] returned. Called right before the decision that the guest
    /// belongs to the destination. Believes it unless overridden, which is right where only the monitor lets its guest run.
    ///
    /// # Errors
    /// The guest has run meanwhile, so that the destination's copy is of no use. The migration fails; [`SourceVmm::resume`] is called.
    fn stood_still(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Stops the guest. When this returns, no vCPU runs, no device and no thread of the monitor writes guest RAM, no input or output
    /// that writes guest RAM is under way, and the dirty log has, or will have when it is collected next, every page that was written
    /// before. A monitor whose saving of devices writes guest RAM saves them here, and hands the bytes over in [`SourceVmm::save`]:
    /// what is written after this has returned is not sent.
    ///
    /// # Errors
    /// The migration fails, and [`SourceVmm::resume`] is called in case the guest has stopped after all.
    fn pause(&mut self) -> Result<(), VmmError>;

    /// Lets the guest run on, after [`SourceVmm::pause`]: the migration has failed or was cancelled.
    ///
    /// # Errors
    /// The guest stands; the report says so.
    fn resume(&mut self) -> Result<(), VmmError>;

    /// Writes the state of vCPUs and devices, everything but RAM. The guest is paused, and guest RAM is not written any more.
    ///
    /// # Errors
    /// The migration fails and the guest is resumed.
    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError>;

    /// Writes what can be sent before the guest is paused, such as the state of devices that is large and rarely changes;
    /// [`DestinationVmm::load_ahead`] reads it. Where anything was written, the guest is not paused before the destination
    /// has loaded it. Writes nothing unless overridden.
    ///
    /// # Errors
    /// The migration fails; the guest runs on.
    fn save_ahead(&mut self, _state: &mut dyn Write) -> Result<(), VmmError> {
        Ok(())
    }

    /// About how many bytes [`SourceVmm::save`] will write, for the prediction of the downtime.
    fn state_size(&self) -> u64 {
        0
    }

    /// Slows the guest down so that it dirties memory more slowly: `percent` of the time, 0 (full speed) to 99, its vCPUs
    /// are held. Asked only when throttling was chosen; back to 0 at the end if the guest stays. Asked with the same percentage again in
    /// each round, and after a [`SourceVmm::resume`] with which rounds go on: [`SourceVmm::pause`] may end it.
    ///
    /// # Errors
    /// The guest is not slowed down, or not any more; the migration goes on without throttling and says so.
    fn throttle(&mut self, _percent: u8) -> Result<(), VmmError> {
        Err("this monitor cannot slow its guest down".into())
    }

    /// Whether the guest may go on at the destination before all of its RAM is there, and if not, why: a device that
    /// cannot wait for a page (pinned memory, VFIO, vhost without userfaultfd), for instance. Asked when post-copy was
    /// chosen.
    fn post_copy_refusal(&self) -> Option<String> {
        None
    }

    /// Whether the monitor has ended, and the guest with it. Asked where another method has failed. A monitor that embeds the library
    /// has not.
    fn has_ended(&mut self) -> bool {
        false
    }

    /// The guest, which was moved for a part, runs on here: its network addresses are announced anew, for instance. Does nothing
    /// unless overridden.
    fn stays(&mut self) {}

    /// The guest runs at the destination, which has confirmed it: the monitor is ended, or kept with a copy that must never run again.
    /// Kept unless overridden.
    ///
    /// # Errors
    /// The monitor could not be ended. The report warns of it.
    fn moved(&mut self) -> Result<AfterMove, VmmError> {
        Ok(AfterMove::Kept)
    }
}

/// The monitor at the destination.
pub trait DestinationVmm {
    /// Name and version, for logs and reports.
    fn name(&self) -> String;

    /// Reads what [`SourceVmm::save_ahead`] wrote. RAM is incomplete, and not to be looked at. The source does not pause
    /// its guest before this has returned.
    ///
    /// # Errors
    /// The migration fails; the guest runs on at the source.
    fn load_ahead(&mut self, _state: &mut dyn Read) -> Result<(), VmmError> {
        Err("the source sends state ahead, and this monitor does not take any".into())
    }

    /// Reads the state that [`SourceVmm::save`] wrote; the guest stays paused. RAM is complete, or, in post-copy, whoever
    /// touches a page that is not there yet waits for it. The state comes from another host: it is not to be trusted.
    ///
    /// # Errors
    /// The migration fails; the guest runs on at the source. This monitor's guest is of no use any more.
    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError>;

    /// Lets the guest run: it belongs to this side now. In post-copy it should not touch guest RAM: if the source is lost
    /// amid that, the page that it waits for comes only when the source was killed, or never.
    ///
    /// # Errors
    /// The guest runs at neither side. It may be tried again, unless part of its memory is still missing.
    fn resume(&mut self) -> Result<(), VmmError>;

    /// As [`SourceVmm::post_copy_refusal`], for this side's devices.
    fn post_copy_refusal(&self) -> Option<String> {
        None
    }

    /// Whether the monitor has ended, and the guest with it. Asked where another method has failed.
    fn has_ended(&mut self) -> bool {
        false
    }

    /// The guest runs here now: its network addresses are announced, for instance. Does nothing unless overridden.
    fn arrived(&mut self) {}

    /// What this side has of the guest is of no use, and must never run: a monitor that was made for it is ended. Does nothing unless
    /// overridden.
    ///
    /// # Errors
    /// The monitor could not be ended.
    fn discard(&mut self) -> Result<(), VmmError> {
        Ok(())
    }
}
