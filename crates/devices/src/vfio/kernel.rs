//! A device by its file descriptor: the kernel's implementation of [`Device`].

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use vfio_bindings::bindings::vfio as abi;

use super::device::{Data, Device, DmaRange, Flags, PrecopyInfo, State};
use super::ioctl;

/// A VFIO device of the kernel.
#[derive(Debug)]
pub struct KernelDevice {
    fd: OwnedFd,
    /// Descriptors that must stay open while `fd` is used, closed after it.
    _behind: Vec<OwnedFd>,
}

impl KernelDevice {
    /// Wraps a monitor's file descriptor: of a device file bound to an iommufd, or from a group. A duplicate works too.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, _behind: Vec::new() }
    }

    /// Opens a device file (`/dev/vfio/devices/vfio0`) and binds it to a new iommufd, without any memory. For tests and
    /// tools: a monitor has the device open already, and only one process may.
    pub fn open(path: &Path) -> io::Result<Self> {
        let device: OwnedFd = open(path)?.into();
        let iommufd: OwnedFd = open(Path::new("/dev/iommu"))?.into();
        ioctl::bind_iommufd(device.as_fd(), iommufd.as_fd())?;
        Ok(Self { fd: device, _behind: vec![iommufd] })
    }

    /// Opens the device `name` (`0000:06:00.1`) of a group (`/dev/vfio/12`), with a new container, like
    /// [`open`](Self::open).
    pub fn open_in_group(group: &Path, name: &str) -> io::Result<Self> {
        let name = CString::new(name).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let container: OwnedFd = open(Path::new("/dev/vfio/vfio"))?.into();
        let group: OwnedFd = open(group)?.into();
        ioctl::group_to_container(group.as_fd(), container.as_fd())?;
        let fd = ioctl::group_device(group.as_fd(), &name)?;
        Ok(Self { fd, _behind: vec![group, container] })
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

impl AsFd for KernelDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Device for KernelDevice {
    type Data = KernelData;

    fn migration(&self) -> io::Result<Flags> {
        let flags = abi::VFIO_DEVICE_FEATURE_GET | abi::VFIO_DEVICE_FEATURE_MIGRATION;
        ioctl::feature(self.as_fd(), flags, abi::vfio_device_feature_migration::default())
            .map(|answer| Flags(answer.flags))
    }

    fn state(&self) -> io::Result<State> {
        let flags = abi::VFIO_DEVICE_FEATURE_GET | abi::VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE;
        let answer = ioctl::feature(self.as_fd(), flags, abi::vfio_device_feature_mig_state::default())?;
        Ok(State::from_number(answer.device_state))
    }

    fn set_state(&self, state: State) -> io::Result<Option<KernelData>> {
        Ok(ioctl::take_stream(self.as_fd(), state.number())?.map(|fd| KernelData { fd }))
    }

    fn data_size(&self) -> io::Result<u64> {
        let flags = abi::VFIO_DEVICE_FEATURE_GET | abi::VFIO_DEVICE_FEATURE_MIG_DATA_SIZE;
        ioctl::feature(self.as_fd(), flags, abi::vfio_device_feature_mig_data_size::default())
            .map(|answer| answer.stop_copy_length)
    }

    fn reset(&self) -> io::Result<()> {
        ioctl::reset(self.as_fd())
    }

    fn dma_logging_start(&self, page_size: u64, ranges: &[DmaRange]) -> io::Result<u64> {
        ioctl::dma_logging_start(self.as_fd(), page_size, ranges)
    }

    fn dma_logging_report(&self, range: DmaRange, page_size: u64, bitmap: &mut [u64]) -> io::Result<()> {
        ioctl::dma_logging_report(self.as_fd(), range, page_size, bitmap)
    }

    fn dma_logging_stop(&self) -> io::Result<()> {
        ioctl::feature(self.as_fd(), abi::VFIO_DEVICE_FEATURE_SET | abi::VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP, ())
    }
}

/// A stream of the kernel's.
#[derive(Debug)]
pub struct KernelData {
    fd: OwnedFd,
}

impl Data for KernelData {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.fd, buffer)?)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(&self.fd, bytes)?)
    }

    fn precopy_info(&self) -> io::Result<PrecopyInfo> {
        let info = ioctl::precopy_info(self.fd.as_fd())?;
        Ok(PrecopyInfo { initial_bytes: info.initial_bytes, dirty_bytes: info.dirty_bytes })
    }
}
