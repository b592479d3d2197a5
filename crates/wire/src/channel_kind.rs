//! The kinds of channels, which the header of a connection names and the proof of its identity covers.

use crate::limits::{MAX_OPAQUE_CHANNELS, MAX_RAM_CHANNELS};

/// What a channel carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ChannelKind {
    /// Small messages in JSON; one per migration, index 0.
    Control = 1,
    /// Packets of pages, and device state mixed with them.
    Ram = 2,
    /// Device state alone; index 0 carries the part of the virtual machine's own stream that is not RAM.
    DeviceState = 3,
    /// Page requests and their replies after post-copy has started.
    PostCopy = 4,
    /// A connection of another program's protocol, carried unchanged.
    Opaque = 5,
}

impl std::fmt::Display for ChannelKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Control => "control",
            Self::Ram => "RAM",
            Self::DeviceState => "device state",
            Self::PostCopy => "post-copy",
            Self::Opaque => "opaque",
        })
    }
}

impl ChannelKind {
    pub(crate) const ALL: [Self; 5] = [Self::Control, Self::Ram, Self::DeviceState, Self::PostCopy, Self::Opaque];

    /// Returns how many channels of this kind one migration may have.
    pub const fn max_channels(self) -> u16 {
        match self {
            Self::Control => 1,
            Self::Ram | Self::DeviceState => MAX_RAM_CHANNELS,
            Self::PostCopy => 1,
            Self::Opaque => MAX_OPAQUE_CHANNELS,
        }
    }
}
