//! What there is in the world around the two machines.

use sterna_wire::switchover::{
    DestinationAction, DestinationEnd, DestinationGuest, DestinationState, DestinationSwitchover, SourceAction,
    SourceEnd, SourceEvent, SourceGuest, SourceState, SourceSwitchover, SwitchoverMessage as Message,
};

/// How much trouble there may still be.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Budget {
    /// All kinds together.
    pub(crate) total: u8,
    /// A sterna process dies.
    pub(crate) crashes: u8,
    /// The connection breaks.
    pub(crate) losses: u8,
    /// A record cannot be written (old or new content stays), or `cont` or `quit` fails.
    pub(crate) failures: u8,
    /// Someone or something asks for the migration to end.
    pub(crate) cancels: u8,
    /// The source QEMU's migration fails by itself.
    pub(crate) qemu_failures: u8,
    /// A QEMU process dies.
    pub(crate) qemu_deaths: u8,
    /// Somebody else pauses the guest at the source, or lets it run.
    pub(crate) strangers: u8,
    /// A host goes, with disk and everything, and never comes back.
    pub(crate) hosts: u8,
    /// `recover` is called where everything is settled.
    pub(crate) stale_recovers: u8,
    /// An accelerator that writes guest RAM at the destination falls silent.
    pub(crate) silent_devices: u8,
}

/// How the guest is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// By QEMU's own migration: QEMU stops the guest, and lets it run again where SHUT does not come.
    Stream,
    /// From outside: QEMU knows of no migration. The driver stops the guest and lets it run again, and so may others by QMP.
    Direct,
    /// As [`Mode::Direct`], and the guest goes on before all of its memory is there. A monitor may also embed the driver, and die
    /// with it.
    PostCopy,
}

/// The data channels of post-copy, of one incarnation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Channels {
    /// Not opened yet.
    #[default]
    None,
    /// Open at both ends.
    Open,
    Broken,
}

/// The memory that follows the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Pages {
    /// The rounds do not converge: post-copy was asked for.
    pub(crate) wanted: bool,
    /// The post-copy channel was opened at the source.
    pub(crate) begun: bool,
    /// Neither placed nor zero at the destination: only at the source, or on their way.
    pub(crate) missing: u8,
    /// On the source's list.
    pub(crate) unsent: u8,
    /// In a data channel.
    pub(crate) travelling: u8,
    /// A thread at the destination that touches a missing page waits.
    pub(crate) watched: bool,
    /// What arrives cannot be placed any more.
    pub(crate) unplaceable: bool,
    pub(crate) channels: Channels,
    /// The source streams what is on its list.
    pub(crate) streaming: bool,
}

/// What an accelerator does with guest RAM at the destination that it was given to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Device {
    /// Nothing is out.
    Quiet,
    /// It fell silent, and may still write.
    MayWrite,
    /// So for ever, as far as anybody knows: the process has given up waiting for it.
    GivenUp,
}

/// The source's QEMU, finer than QMP shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SourceProcess {
    /// Before the migration.
    Idle,
    Migrating,
    /// Stopped; the whole stream is out; waits for SHUT.
    Finishing,
    /// Has SHUT in its socket.
    ShutGiven,
    Completed,
    /// Runs again.
    Resumed,
    Gone,
    /// In direct mode: runs, its writes are tracked.
    Tracked,
    /// In direct mode: stopped by the driver.
    Stopped,
    /// In direct mode: stopped by somebody else.
    PausedByOthers,
    /// In direct mode: let run by somebody else after the driver had stopped it.
    ResumedByOthers,
}

impl SourceProcess {
    pub(crate) fn shown(self) -> SourceGuest {
        match self {
            Self::Idle | Self::Resumed | Self::Tracked | Self::PausedByOthers | Self::ResumedByOthers => {
                SourceGuest::Running
            }
            Self::Migrating | Self::Finishing | Self::ShutGiven => SourceGuest::Migrating,
            Self::Completed | Self::Stopped => SourceGuest::Completed,
            Self::Gone => SourceGuest::Gone,
        }
    }

    pub(crate) fn is_gone(self) -> bool {
        self == Self::Gone
    }

    pub(crate) fn runs(self) -> bool {
        matches!(self, Self::Idle | Self::Migrating | Self::Resumed | Self::Tracked | Self::ResumedByOthers)
    }
}

/// The destination's QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DestinationProcess {
    Incoming {
        autostart: bool,
        whole: bool,
    },
    Paused,
    /// In post-copy: told to let the guest run, which may touch a missing page on the way.
    Starting,
    /// On the way to running it has touched a missing page.
    StartWaits,
    Running,
    Gone,
}

impl DestinationProcess {
    pub(crate) fn shown(self) -> DestinationGuest {
        match self {
            Self::Incoming { .. } => DestinationGuest::Incoming,
            Self::Paused | Self::Starting | Self::StartWaits => DestinationGuest::Paused,
            Self::Running => DestinationGuest::Running,
            Self::Gone => DestinationGuest::Gone,
        }
    }
}

/// A `send` or `recover` process at the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SourceSterna {
    pub(crate) machine: SourceSwitchover,
    /// Actions not performed yet.
    pub(crate) todo: Vec<SourceAction>,
    /// The answer to a write, not given to the machine yet.
    pub(crate) written: Option<bool>,
    /// A record called durable that is not (a mutant's).
    pub(crate) late: Option<SourceState>,
    /// What the machine knows of QEMU.
    pub(crate) seen: Option<SourceGuest>,
    /// Whether it has seen the guest run after QEMU's migration was begun.
    pub(crate) seen_resumed: bool,
    pub(crate) final_state_sent: bool,
    pub(crate) dials: bool,
    /// Whether the time in which it dials may still end: it ends once.
    pub(crate) dials_in_time: bool,
    pub(crate) connected: bool,
    /// An action failed, the machine has not been told.
    pub(crate) failed: bool,
    /// The answer to [`SourceAction::ServePages`] of a process that cannot, not given to the machine yet.
    pub(crate) not_served: Option<SourceEvent>,
    /// A `recover`, which cannot serve pages.
    pub(crate) recovered: bool,
    /// It knows that the data channels are broken.
    pub(crate) broken_told: bool,
}

/// A `receive` or `recover` process at the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DestinationSterna {
    pub(crate) machine: DestinationSwitchover,
    pub(crate) todo: Vec<DestinationAction>,
    pub(crate) written: Option<bool>,
    pub(crate) seen: Option<DestinationGuest>,
    /// What the machine knows of write leases.
    pub(crate) leases_told: u32,
    pub(crate) cleared: bool,
    /// Missing pages are watched, the machine has not been told.
    pub(crate) watching: bool,
    pub(crate) loaded_told: bool,
    /// It reports when no page is missing any more.
    pub(crate) awaits_memory: bool,
    /// The driver knows that the data channels are broken.
    pub(crate) broken_told: bool,
    pub(crate) failed_told: bool,
    pub(crate) connected: bool,
    pub(crate) failed: bool,
    pub(crate) ended: bool,
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// The second place is used only where the lock is missing.
    pub(crate) source: [Option<SourceSterna>; 2],
    pub(crate) destination: Option<DestinationSterna>,
    /// How the source's last process ended, if by itself.
    pub(crate) source_end: Option<SourceEnd>,
    /// How the migration ended at the destination, by its last process.
    pub(crate) destination_end: Option<DestinationEnd>,
    /// The destination's last process has ended because nobody needed it any more.
    pub(crate) destination_left: bool,
    /// History: a process at the destination was followed by another.
    pub(crate) destination_restarted: bool,
    pub(crate) source_disk: Option<SourceState>,
    pub(crate) destination_disk: Option<DestinationState>,
    pub(crate) source_qemu: SourceProcess,
    pub(crate) destination_qemu: DestinationProcess,
    /// QEMU's migration sockets at the source are closed, or it was told to cancel.
    pub(crate) return_path_closed: bool,
    /// In direct mode: the driver has looked for the last time whether the guest stands, and decides.
    pub(crate) looked: bool,
    /// History: a guest that somebody else had paused was let run.
    pub(crate) paused_guest_resumed: bool,
    /// The whole stream is on its way.
    pub(crate) stream_sent: bool,
    /// The destination QEMU's stream was opened.
    pub(crate) feeding: bool,
    pub(crate) pages: Pages,
    /// History: the guest was started although the driver knew that nothing could bring what it may touch.
    pub(crate) started_blindly: bool,
    pub(crate) device: Device,
    /// History: it wrote under the running guest.
    pub(crate) written_under_guest: bool,
    /// What is sent arrives, or may arrive.
    pub(crate) link: bool,
    pub(crate) to_source: Vec<Message>,
    pub(crate) to_destination: Vec<Message>,
    pub(crate) source_host: bool,
    pub(crate) destination_host: bool,
    /// History: the source's rounds went on over a new connection.
    pub(crate) interrupted: bool,
    /// History: the source has read or written the decision.
    pub(crate) decided: bool,
    /// History: the guest has run at the destination.
    pub(crate) destination_ran: bool,
    /// History: the source's driver has ended QEMU before that.
    pub(crate) ended_early: bool,
    /// History: the source has told the destination to give up before it knew that the guest runs at the source.
    pub(crate) aborted_blindly: bool,
    pub(crate) source_fenced: bool,
    pub(crate) destination_fenced: bool,
    pub(crate) conflict: bool,
    pub(crate) left: Budget,
}

impl Pages {
    /// Ends the data channels, and what was on its way in them.
    pub(crate) fn lose_channels(&mut self, channels: Channels) {
        self.travelling = 0;
        self.streaming = false;
        if self.begun {
            self.channels = channels;
        }
    }
}

impl State {
    /// Breaks the control connection, and the data channels with it.
    pub(crate) fn break_link(&mut self) {
        self.link = false;
        self.pages.lose_channels(Channels::Broken);
    }

    /// Whether there is no process at the destination that could answer, and never will be.
    pub(crate) fn nobody_answers(&self) -> bool {
        self.destination.is_none() && (!self.destination_host || self.destination_disk.is_none())
    }

    /// Whether a process at the source waits for the destination's answer.
    pub(crate) fn source_asks(&self) -> bool {
        self.source[0].as_ref().is_some_and(|sterna| sterna.dials)
    }
}
