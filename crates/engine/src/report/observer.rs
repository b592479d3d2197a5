//! What is reported while a migration runs.

use serde::{Deserialize, Serialize};
use sterna_wire::switchover::{Moment, Step};

use super::devices::{DeviceProgress, waiting_for};
use crate::phase::Phase;

/// What a migration is doing right now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The phase.
    pub phase: Phase,
    /// Milliseconds since the start.
    pub elapsed_ms: u64,
    /// Round over the dirty pages, from 1.
    pub round: u64,
    /// Bytes of guest RAM.
    pub total_bytes: u64,
    /// Bytes of guest RAM that are known to be dirty and have not arrived. Goes down while a round is under way, and up when more is found
    /// to be dirty. In post-copy: bytes that the destination still lacks.
    pub remaining_bytes: u64,
    /// Normal pages sent.
    pub normal_pages: u64,
    /// Those of them of which only what had changed was sent.
    pub delta_pages: u64,
    /// Those of them that were not sent: the destination had the same already.
    pub same_pages: u64,
    /// Zero pages sent.
    pub zero_pages: u64,
    /// Bytes of content per second, over the last interval.
    pub content_rate: f64,
    /// Wire bytes so far.
    pub wire_bytes: u64,
    /// Wire bytes per second, over the last interval.
    pub wire_rate: f64,
    /// Content bytes / packet bytes so far.
    pub ratio: f64,
    /// Bytes per second that the guest dirties, as the monitor measured it.
    pub dirty_rate: f64,
    /// The downtime if the switchover began now, in ms.
    pub predicted_downtime_ms: f64,
    /// Estimated time in ms until the guest runs at the destination, in post-copy until all of its memory is there. None before the speed
    /// was measured, and where the guest dirties memory about as fast as it leaves.
    pub time_left_ms: Option<u64>,
    /// Times that the connection was lost while the guest's memory was sent.
    #[serde(default)]
    pub interruptions: u32,
    /// How long that has lasted all together, ms.
    #[serde(default)]
    pub interrupted_ms: f64,
    /// The devices whose state travels apart from the monitor's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceProgress>,
}

impl Progress {
    /// The devices that are waited for, in words for a line: the first few with where their state is, and how many more. None where there
    /// are none.
    pub fn waiting_for(&self) -> Option<String> {
        waiting_for(self.devices.iter().map(|device| (&device.device, device.phase)))
    }
}

/// What a destination is doing right now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReceiveProgress {
    /// The phase, as far as this side knows: a guest that is being paused at the source counts as running until its state arrives.
    pub phase: Phase,
    /// Milliseconds since the source was accepted.
    pub elapsed_ms: u64,
    /// Bytes of guest RAM, as the source announced them; 0 where it did not.
    pub total_bytes: u64,
    /// Bytes of pages that were placed so far, zero pages included. A page that the source sent again counts again, so that this may become
    /// more than `total_bytes`; pages that the guest never used are not sent, so that it may stay less.
    pub placed_bytes: u64,
    /// Pages with content that were placed.
    pub normal_pages: u64,
    /// Zero pages that were placed.
    pub zero_pages: u64,
    /// Bytes of pages placed per second, over the last interval.
    pub placed_rate: f64,
    /// In post-copy: bytes of the guest's memory that are still at the source, in whole pages. Else 0.
    pub missing_bytes: u64,
    /// Bytes of the guest's memory that have not arrived, as the source has reported them a few times a second; in post-copy
    /// `missing_bytes`. Becomes more when the guest dirties memory. None where the source does not report them.
    pub remaining_bytes: Option<u64>,
    /// Estimated time in ms until the guest runs here, as the source has reported it; in post-copy until all of its memory is here. None
    /// where that is unknown.
    pub time_left_ms: Option<u64>,
    /// Times that the source was lost while the guest's memory arrived.
    #[serde(default)]
    pub interruptions: u32,
    /// How long that has lasted all together, ms.
    #[serde(default)]
    pub interrupted_ms: f64,
}

/// Receives figures, notes and events while a migration runs. Called on the driver's thread.
pub trait Observer: Send + Sync {
    /// Figures of a source, a few times a second.
    fn progress(&self, progress: &Progress);

    /// Figures of a destination, a few times a second while the monitor is not busy with the guest's state. Ignored unless overridden.
    fn received(&self, _progress: &ReceiveProgress) {}

    /// A step worth a line: phases, choices and their reasons.
    fn note(&self, text: &str);

    /// This side listens at `address`. Programs that start it wait for that and read the port, so that it is told also where
    /// notes are not.
    fn listening(&self, address: &str) {
        self.note(&format!("listening on {address}"));
    }

    /// Before and after each step of the switchover, on the thread that called `run`: for tests that stop or kill the process there.
    /// Ignored unless overridden.
    fn step(&self, _moment: Moment, _step: Step) {}
}

/// For who does not want to know.
impl Observer for () {
    fn progress(&self, _: &Progress) {}

    fn note(&self, _: &str) {}
}
