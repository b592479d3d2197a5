//! Errors between a monitor and a back-end. Their texts name the back-end and say what to do.

use std::fmt;

/// The step that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// Making the pipe, on this side.
    Prepare,
    /// `SET_DEVICE_STATE_FD`, direction save.
    AskToSave,
    /// Reading the state from the pipe.
    Read,
    /// `CHECK_DEVICE_STATE` after the state was read.
    CheckSaved,
    /// `SET_DEVICE_STATE_FD`, direction load.
    AskToLoad,
    /// Writing the state into the pipe.
    Write,
    /// `CHECK_DEVICE_STATE` after the state was written.
    CheckLoaded,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Prepare => "the pipe for its state was being made",
            Step::AskToSave => "it was asked to save its state",
            Step::Read => "its state was being read",
            Step::CheckSaved => "it was asked whether the saved state is complete",
            Step::AskToLoad => "it was asked to load a state",
            Step::Write => "its state was being written",
            Step::CheckLoaded => "it was asked whether it has loaded the state",
        })
    }
}

/// Why a back-end's state was not moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The feature is missing in the back-end or in the monitor's choice.
    #[error(
        "the vhost-user back-end {back_end} has not negotiated DEVICE_STATE (protocol feature bit 19), so its state cannot be moved: \
         use a release that has it, or detach the device before the guest is moved"
    )]
    NotNegotiated {
        /// Which.
        back_end: String,
    },
    /// The connection is closed: the process ended, or closed it.
    #[error(
        "the vhost-user back-end {back_end} closed its connection while {step}: its log says why it ended; the guest \
         cannot use this device until a back-end is attached again"
    )]
    Gone {
        /// Which.
        back_end: String,
        /// When.
        step: Step,
    },
    /// The back-end reported a failure. The protocol does not transmit the reason.
    #[error("the vhost-user back-end {back_end} reported a failure when {step}: the reason is in its log")]
    Refused {
        /// Which.
        back_end: String,
        /// When.
        step: Step,
    },
    /// The caller's deadline passed.
    #[error(
        "the vhost-user back-end {back_end} did not finish in time: the deadline passed while {step}; {}",
        if *disconnected { "its connection was shut down, so it must be attached again" } else { "its connection was kept" }
    )]
    Deadline {
        /// Which.
        back_end: String,
        /// When.
        step: Step,
        /// Whether the connection had to be shut down.
        disconnected: bool,
    },
    /// The state is longer than the limit.
    #[error(
        "the state of the vhost-user back-end {back_end} is longer than {limit} bytes: raise the limit if this is \
         intended"
    )]
    TooLarge {
        /// Which.
        back_end: String,
        /// In bytes.
        limit: u64,
    },
    /// `Saver::finish` was called before `Saver::read` returned 0.
    #[error(
        "the state of the vhost-user back-end {back_end} was not read to its end: read until 0 bytes are returned, \
         then finish"
    )]
    Unfinished {
        /// Which.
        back_end: String,
    },
    /// The back-end closed the pipe before it had read all, but reported success.
    #[error(
        "the vhost-user back-end {back_end} reports that it has loaded its state, but stopped reading before the end: \
         its release is probably not the one that saved the state; use the same on both sides"
    )]
    StoppedReading {
        /// Which.
        back_end: String,
    },
    /// An answer that violates the protocol.
    #[error(
        "the vhost-user back-end {back_end} violated the protocol in its answer when {step} ({source}): its connection \
         must be closed"
    )]
    Protocol {
        /// Which.
        back_end: String,
        /// When.
        step: Step,
        /// The front-end's error.
        source: vhost::Error,
    },
    /// A system call of this process failed.
    #[error("moving the state of the vhost-user back-end {back_end} failed while {step}: {source}")]
    Io {
        /// Which.
        back_end: String,
        /// When.
        step: Step,
        /// The system's error.
        source: std::io::Error,
    },
}
