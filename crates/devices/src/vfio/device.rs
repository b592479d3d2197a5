//! The kernel's calls on a VFIO device that the consumer needs: two traits, so that a software device can be used
//! instead.

use std::fmt;
use std::io;

use vfio_bindings::bindings::vfio as abi;

const STOP_COPY: u64 = abi::VFIO_MIGRATION_STOP_COPY as u64;
const P2P: u64 = abi::VFIO_MIGRATION_P2P as u64;
const PRE_COPY: u64 = abi::VFIO_MIGRATION_PRE_COPY as u64;

/// What a device supports, as reported by `VFIO_DEVICE_FEATURE_MIGRATION`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flags(pub u64);

impl Flags {
    /// STOP, STOP_COPY and RESUMING, which every device that migrates has.
    pub const STOP_COPY: Self = Self(STOP_COPY);

    /// Adds RUNNING_P2P (and PRE_COPY_P2P, where there is PRE_COPY).
    #[must_use]
    pub const fn with_p2p(self) -> Self {
        Self(self.0 | P2P)
    }

    /// Adds PRE_COPY.
    #[must_use]
    pub const fn with_pre_copy(self) -> Self {
        Self(self.0 | PRE_COPY)
    }

    /// Returns whether the device migrates at all.
    pub const fn stop_copy(self) -> bool {
        self.0 & STOP_COPY != 0
    }

    /// Returns whether the device's writes to other devices can be suspended before it is stopped.
    pub const fn p2p(self) -> bool {
        self.0 & P2P != 0
    }

    /// Returns whether state can be read while the device runs.
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
    /// Stopped: changes nothing, inside or outside.
    Stop,
    /// Runs.
    Running,
    /// Stopped, and its state can be read to the end.
    StopCopy,
    /// Stopped, and a new state can be loaded.
    Resuming,
    /// Runs, but starts no DMA to other devices.
    RunningP2p,
    /// Runs, and its available state can be read.
    PreCopy,
    /// Both RUNNING_P2P and PRE_COPY.
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

    /// Returns the header's number.
    pub fn number(self) -> u32 {
        match self {
            Self::Other(number) => number,
            known => Self::ALL.iter().position(|state| *state == known).map_or(u32::MAX, |at| at as u32),
        }
    }

    /// Returns the state with this number.
    pub fn from_number(number: u32) -> Self {
        Self::ALL.get(number as usize).copied().unwrap_or(Self::Other(number))
    }

    /// Returns whether the device runs in this state, with or without DMA to others.
    pub fn runs(self) -> bool {
        matches!(self, Self::Running | Self::RunningP2p | Self::PreCopy | Self::PreCopyP2p)
    }

    /// Returns whether a device with these flags has this state.
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

/// A running device's estimates of the state to read: `struct vfio_precopy_info`. Neither includes the state that
/// follows once it is stopped.
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
/// All take `&self`: the kernel orders them itself, and watching DMA and saving happen on different threads.
pub trait Device: Send + Sync {
    /// A stream of state.
    type Data: Data;

    /// Queries `VFIO_DEVICE_FEATURE_MIGRATION`. `ENOTTY`: the device does not migrate.
    fn migration(&self) -> io::Result<Flags>;

    /// Queries its state: `VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE`.
    fn state(&self) -> io::Result<State>;

    /// Changes its state, by the kernel's shortest path. The steps RUNNING → PRE_COPY, RUNNING_P2P → PRE_COPY_P2P, STOP
    /// → STOP_COPY and STOP → RESUMING return a stream. After an error the device may be in any state of the path, or
    /// in ERROR.
    fn set_state(&self, state: State) -> io::Result<Option<Self::Data>>;

    /// Estimates how many bytes there are to read once it is stopped: `VFIO_DEVICE_FEATURE_MIG_DATA_SIZE`, in any
    /// state. `ENOTTY` from kernels before 6.2.
    fn data_size(&self) -> io::Result<u64>;

    /// Resets it (`VFIO_DEVICE_RESET`): to RUNNING, from any state, with the loss of its content.
    fn reset(&self) -> io::Result<()>;

    /// Starts the log: `VFIO_DEVICE_FEATURE_DMA_LOGGING_START`. `page_size` is a hint; returns the device's choice. The
    /// kernel guarantees to accept 256 ranges. `ENOTTY`: the device has no log.
    fn dma_logging_start(&self, page_size: u64, ranges: &[DmaRange]) -> io::Result<u64>;

    /// Reads the log: `VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT`. Sets in `bitmap` the bit of each page of `range` that
    /// was written, bit 0 of word 0 for the range's first page, and clears the device's log of them. Clears nothing in
    /// `bitmap`, which has a bit for every page. After an error the log is lost.
    fn dma_logging_report(&self, range: DmaRange, page_size: u64, bitmap: &mut [u64]) -> io::Result<()>;

    /// Stops the log: `VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP`.
    fn dma_logging_stop(&self) -> io::Result<()>;

    /// Returns whether each report has to cover a whole mapping. False for the kernel.
    fn reports_whole_mappings(&self) -> bool {
        false
    }
}

/// A stream of state. The driver defines its bytes: their order counts, not how they are divided.
pub trait Data: Send {
    /// Reads bytes of state: 0 at the end. `ENOMSG`: nothing now (in PRE_COPY and PRE_COPY_P2P only).
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes bytes of state, and returns how many were accepted.
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
