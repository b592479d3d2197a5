//! What can go wrong between a monitor and a back-end, in words that name the back-end and say what to do.

use std::fmt;

/// What was being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// Our own side: the pipe, its settings.
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
            Step::CheckSaved => "it was asked whether the saved state is whole",
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
    /// The feature is missing, at the back-end or in what the monitor chose.
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
        "the vhost-user back-end {back_end} closed its connection while {step}: see in its log why it ended; the guest cannot go on with \
         this device until a back-end is attached again"
    )]
    Gone {
        /// Which.
        back_end: String,
        /// When.
        step: Step,
    },
    /// The back-end answered that it failed. The protocol has no room for the reason.
    #[error("the vhost-user back-end {back_end} reported a failure when {step}: the reason is in its log")]
    Refused {
        /// Which.
        back_end: String,
        /// When.
        step: Step,
    },
    /// The caller's deadline passed.
    #[error(
        "the vhost-user back-end {back_end} was given up: the deadline passed while {step}; {}",
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
        "the state of the vhost-user back-end {back_end} is longer than {limit} bytes: raise the limit if that is meant"
    )]
    TooLarge {
        /// Which.
        back_end: String,
        /// In bytes.
        limit: u64,
    },
    /// `Saver::finish` was called before `Saver::read` gave 0.
    #[error(
        "the state of the vhost-user back-end {back_end} was not read to its end: read until nothing more comes, then finish"
    )]
    Unfinished {
        /// Which.
        back_end: String,
    },
    /// The back-end closed the pipe before it had all, and says nevertheless that all is well.
    #[error(
        "the vhost-user back-end {back_end} says that it has loaded its state, but stopped reading before the end: its release is \
         probably not the one that saved it; use the same at both sides"
    )]
    StoppedReading {
        /// Which.
        back_end: String,
    },
    /// An answer that is not of the protocol.
    #[error(
        "the vhost-user back-end {back_end} answered what the protocol does not know when {step} ({source}): its connection must be closed"
    )]
    Protocol {
        /// Which.
        back_end: String,
        /// When.
        step: Step,
        /// What the front-end makes of it.
        source: vhost::Error,
    },
    /// A system call of our own failed.
    #[error("moving the state of the vhost-user back-end {back_end} failed while {step}: {source}")]
    Io {
        /// Which.
        back_end: String,
        /// When.
        step: Step,
        /// The system's word for it.
        source: std::io::Error,
    },
}
