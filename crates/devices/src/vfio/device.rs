//! The kernel's calls on a VFIO device, as the consumer needs them: two traits, so that a device in software can stand in.

use std::fmt;
use std::io;

use vfio_bindings::bindings::vfio as abi;

const STOP_COPY: u64 = abi::VFIO_MIGRATION_STOP_COPY as u64;
const P2P: u64 = abi::VFIO_MIGRATION_P2P as u64;
const PRE_COPY: u64 = abi::VFIO_MIGRATION_PRE_COPY as u64;

/// What a device can do, as `VFIO_DEVICE_FEATURE_MIGRATION` tells it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flags(pub u64);

impl Flags {
    /// STOP, STOP_COPY and RESUMING: what every device that migrates has.
    pub const STOP_COPY: Self = Self(STOP_COPY);

    /// With RUNNING_P2P (and PRE_COPY_P2P, where there is PRE_COPY).
    #[must_use]
    pub const fn with_p2p(self) -> Self {
        Self(self.0 | P2P)
    }

    /// With PRE_COPY.
    #[must_use]
    pub const fn with_pre_copy(self) -> Self {
        Self(self.0 | PRE_COPY)
    }

    /// Whether the device migrates at all.
    pub const fn stop_copy(self) -> bool {
        self.0 & STOP_COPY != 0
    }

    /// Whether the device can be kept from writing to other devices before it is stopped.
    pub const fn p2p(self) -> bool {
        self.0 & P2P != 0
    }

    /// Whether state can be read while the device runs.
    pub const fn pre_copy(self) -> bool {
        self.0 & PRE_COPY != 0
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(self.stop_copy(), "STOP_COPY"), (self.p2p(), "P2P"), (self.pre_copy(), "PRE_COPY")];
        write!(f, "{:#x}", self.0)?;
        names.iter().filter(|(set, _)| *set).try_for_each(|(_, name)| write!(f, " {name}"))
    }
}

/// States of a device: `enum vfio_device_mig_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Failed; only a reset helps.
    Error,
    /// Changes nothing, inside or outside.
    Stop,
    /// Runs.
    Running,
    /// Stopped, and its state can be read to the end.
    StopCopy,
    /// Stopped, and takes a new state.
    Resuming,
    /// Runs, but starts no DMA to other devices.
    RunningP2p,
    /// Runs, and what it has of its state can be read.
    PreCopy,
    /// Both of the last two.
    PreCopyP2p,
    /// A state of a newer kernel.
    Other(u32),
}

impl State {
    /// Every state of this interface.
    pub const ALL: [Self; 8] = [
        Self::Error,
        Self::Stop,
        Self::Running,
        Self::StopCopy,
        Self::Resuming,
        Self::RunningP2p,
        Self::PreCopy,
        Self::PreCopyP2p,
    ];

    /// The header's number.
    pub fn number(self) -> u32 {
        match self {
            Self::Other(number) => number,
            known => Self::ALL.iter().position(|state| *state == known).map_or(u32::MAX, |at| at as u32),
        }
    }

    /// The state of a number.
    pub fn from_number(number: u32) -> Self {
        Self::ALL.get(number as usize).copied().unwrap_or(Self::Other(number))
    }

    /// Whether the device runs in it, be it without DMA to others.
    pub fn runs(self) -> bool {
        matches!(self, Self::Running | Self::RunningP2p | Self::PreCopy | Self::PreCopyP2p)
    }

    /// Whether a device with these flags has this state.
    pub fn offered(self, flags: Flags) -> bool {
        match self {
            Self::Error | Self::Running => true,
            Self::Stop | Self::StopCopy | Self::Resuming => flags.stop_copy(),
            Self::RunningP2p => flags.stop_copy() && flags.p2p(),
            Self::PreCopy => flags.stop_copy() && flags.pre_copy(),
            Self::PreCopyP2p => flags.stop_copy() && flags.p2p() && flags.pre_copy(),
            Self::Other(_) => false,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "ERROR",
            Self::Stop => "STOP",
            Self::Running => "RUNNING",
            Self::StopCopy => "STOP_COPY",
            Self::Resuming => "RESUMING",
            Self::RunningP2p => "RUNNING_P2P",
            Self::PreCopy => "PRE_COPY",
            Self::PreCopyP2p => "PRE_COPY_P2P",
            Self::Other(number) => return write!(f, "state {number}, which this program does not know"),
        })
    }
}

/// What a device estimates to have for its reader while it runs: `struct vfio_precopy_info`. Both say nothing of what
/// comes once it is stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrecopyInfo {
    /// Bytes of the first pass that were not read yet. The header recommends not to stop the device before this is 0.
    pub initial_bytes: u64,
    /// Bytes that changed since they were read.
    pub dirty_bytes: u64,
}

/// A range of I/O addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaRange {
    /// First address.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
}

/// The calls on a device. Errors carry the kernel's errno (`raw_os_error`).
///
/// All take `&self`: the kernel orders them itself, and who watches DMA is not who saves.
pub trait Device: Send + Sync {
    /// A stream of state.
    type Data: Data;

    /// `VFIO_DEVICE_FEATURE_MIGRATION`. `ENOTTY`: the device does not migrate.
    fn migration(&self) -> io::Result<Flags>;

    /// The state it is in: `VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE`, asked.
    fn state(&self) -> io::Result<State>;

    /// Takes it to another state, by the kernel's shortest way. A stream comes with the steps RUNNING → PRE_COPY,
    /// RUNNING_P2P → PRE_COPY_P2P, STOP → STOP_COPY and STOP → RESUMING. After an error it may be in any state of the way,
    /// or in ERROR.
    fn set_state(&self, state: State) -> io::Result<Option<Self::Data>>;

    /// About how many bytes there are to read once it is stopped: `VFIO_DEVICE_FEATURE_MIG_DATA_SIZE`, in any state.
    /// `ENOTTY` from kernels before 6.2.
    fn data_size(&self) -> io::Result<u64>;

    /// `VFIO_DEVICE_RESET`: RUNNING, from any state, and nothing left of what it held.
    fn reset(&self) -> io::Result<()>;

    /// `VFIO_DEVICE_FEATURE_DMA_LOGGING_START`. `page_size` is a hint; gives what the device chose. The kernel promises to
    /// take 256 ranges. `ENOTTY`: the device has no log.
    fn dma_logging_start(&self, page_size: u64, ranges: &[DmaRange]) -> io::Result<u64>;

    /// `VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT`: sets in `bitmap` the bit of each page of `range` that was written, bit 0
    /// of word 0 for the range's first, and forgets them. Clears nothing in `bitmap`, which has a bit for every page.
    /// After an error the log is lost.
    fn dma_logging_report(&self, range: DmaRange, page_size: u64, bitmap: &mut [u64]) -> io::Result<()>;

    /// `VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP`.
    fn dma_logging_stop(&self) -> io::Result<()>;

    /// Whether each report has to be about the whole of what was mapped at once. Not so with the kernel.
    fn reports_whole_mappings(&self) -> bool {
        false
    }
}

/// A stream of state. Its bytes are the driver's: their order counts, how they are divided does not.
pub trait Data: Send {
    /// Bytes of state: 0 at the end. `ENOMSG`: nothing now (in PRE_COPY and PRE_COPY_P2P only).
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Takes bytes of state, as many as it says.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// `VFIO_MIG_GET_PRECOPY_INFO`. `EINVAL` unless the device is in PRE_COPY or PRE_COPY_P2P.
    fn precopy_info(&self) -> io::Result<PrecopyInfo>;
}

impl<D: Device + ?Sized> Device for std::sync::Arc<D> {
    type Data = D::Data;

    fn migration(&self) -> io::Result<Flags> {
        (**self).migration()
    }

    fn state(&self) -> io::Result<State> {
        (**self).state()
    }

    fn set_state(&self, state: State) -> io::Result<Option<Self::Data>> {
        (**self).set_state(state)
    }

    fn data_size(&self) -> io::Result<u64> {
        (**self).data_size()
    }

    fn reset(&self) -> io::Result<()> {
        (**self).reset()
    }

    fn dma_logging_start(&self, page_size: u64, ranges: &[DmaRange]) -> io::Result<u64> {
        (**self).dma_logging_start(page_size, ranges)
    }

    fn dma_logging_report(&self, range: DmaRange, page_size: u64, bitmap: &mut [u64]) -> io::Result<()> {
        (**self).dma_logging_report(range, page_size, bitmap)
    }

    fn dma_logging_stop(&self) -> io::Result<()> {
        (**self).dma_logging_stop()
    }

    fn reports_whole_mappings(&self) -> bool {
        (**self).reports_whole_mappings()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_have_the_numbers_of_the_kernels_header() {
        let theirs = [
            abi::vfio_device_mig_state_VFIO_DEVICE_STATE_ERROR,
            abi::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP,
            abi::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING,
            abi::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP_COPY,
            abi::vfio_device_mig_state_VFIO_DEVICE_STATE_RESUMING,
            abi::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING_P2P,
            abi::vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY,
            abi::vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY_P2P,
        ];
        assert_eq!(State::ALL.map(State::number), theirs);
        assert_eq!(theirs.map(State::from_number), State::ALL);
        let newer = abi::vfio_device_mig_state_VFIO_DEVICE_STATE_NR;
        assert_eq!((State::from_number(newer), State::Other(newer).number()), (State::Other(newer), newer));
    }
}
