/// When the act is done: `send` is held there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// In the first round.
    FirstRound,
    /// Right before the guest is stopped, after the checks of the last round.
    LastRound,
    /// The guest was stopped.
    Stopped,
    /// The state was saved, and the last look is past.
    Saved,
    /// The destination is prepared.
    Prepared,
    /// The guest belongs to the destination, which does not know that yet.
    Decided,
}

impl Moment {
    pub(crate) const ALL: &[Self] =
        &[Self::FirstRound, Self::LastRound, Self::Stopped, Self::Saved, Self::Prepared, Self::Decided];

    /// Returns the fault point of `send`; none if it has none in this mode: QEMU itself determines its last round.
    pub(crate) fn point(self, mode: &str) -> Option<&'static str> {
        let direct = mode == "direct";
        Some(match self {
            Self::FirstRound if direct => "source.in-round",
            Self::FirstRound => "source.after-start-migration",
            Self::LastRound if direct => "source.before-stop",
            Self::LastRound => return None,
            Self::Stopped => "source.after-stop",
            Self::Saved if direct => "source.after-save",
            Self::Saved => "source.before-send-prepare",
            Self::Prepared => "source.before-relay-shut",
            Self::Decided => "source.after-record-committed",
        })
    }

    /// Returns whether the guest executes at the source.
    pub(crate) fn guest_executes(self) -> bool {
        matches!(self, Self::FirstRound | Self::LastRound)
    }

    /// Returns whether `send` looks at the source's QEMU again.
    pub(crate) fn looked_at_later(self) -> bool {
        matches!(self, Self::FirstRound | Self::LastRound | Self::Stopped)
    }
}
