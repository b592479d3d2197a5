//! What a monitor that embeds the library does for it, at either side, and how it says that something failed.
//!
//! All methods are called one at a time, on the thread that called `run`; they may block, but while they do the migration
//! cannot be cancelled. A method that panics has failed with what the panic says; where it cannot fail, the migration has. A panic in `resume`
//! leaves open whether the guest runs.

use std::io::{Read, Write};

/// Why the monitor could not do what it was asked, in its own words.
pub type VmmError = Box<dyn std::error::Error + Send + Sync>;

/// The monitor at the source.
pub trait SourceVmm {
    /// Name and version, for logs and reports, for instance `microvm 1.0`.
    fn name(&self) -> String;

    /// Stops the guest. When this returns, no vCPU runs, no device and no thread of the monitor writes guest RAM, and the
    /// dirty log has, or will have when it is collected next, every page that was written before.
    ///
    /// # Errors
    /// The migration fails, and [`SourceVmm::resume`] is called in case the guest has stopped after all.
    fn pause(&mut self) -> Result<(), VmmError>;

    /// Lets the guest run on, after [`SourceVmm::pause`]: the migration has failed or was cancelled.
    ///
    /// # Errors
    /// The guest stands; the report says so.
    fn resume(&mut self) -> Result<(), VmmError>;

    /// Writes the state of vCPUs and devices, everything but RAM. The guest is paused.
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
    /// are held. Asked only when throttling was chosen; back to 0 at the end if the guest stays.
    ///
    /// # Errors
    /// The guest is not slowed down; the migration goes on without throttling and says so.
    fn throttle(&mut self, _percent: u8) -> Result<(), VmmError> {
        Err("this monitor cannot slow its guest down".into())
    }

    /// Whether the guest may go on at the destination before all of its RAM is there, and if not, why: a device that
    /// cannot wait for a page (pinned memory, VFIO, vhost without userfaultfd), for instance. Asked when post-copy was
    /// chosen.
    fn post_copy_refusal(&self) -> Option<String> {
        None
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
}
