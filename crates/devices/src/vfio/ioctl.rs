//! The `unsafe` of this crate: VFIO's operations on file descriptors, each with the structure that it takes.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::abi::{self, Feature};
use super::device::DmaRange;

/// # Safety
/// `argument` must be what `operation` takes: a number, or the address of its structure, as large and as writable as the
/// operation expects.
unsafe fn call(fd: BorrowedFd<'_>, operation: u32, argument: usize) -> io::Result<i32> {
    // SAFETY: as the caller promises.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), operation.into(), argument) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

fn address<T>(of: &mut T) -> usize {
    (&raw mut *of).expose_provenance()
}

/// A feature whose data has no addresses: plain numbers in and out.
pub(super) trait Plain: Copy {}
impl Plain for () {}
impl Plain for abi::Migration {}
impl Plain for abi::MigState {}
impl Plain for abi::MigDataSize {}

fn header<T>(flags: u32, data: T) -> Feature<T> {
    // At most 40 bytes.
    Feature { argsz: size_of::<Feature<T>>() as u32, flags, data }
}

/// Gets or sets a feature; gives its data as the kernel left it.
pub(super) fn feature<T: Plain>(fd: BorrowedFd<'_>, flags: u32, data: T) -> io::Result<T> {
    let mut feature = header(flags, data);
    // SAFETY: the kernel reads and writes within the `argsz` bytes, and `T` is numbers (`Plain`).
    unsafe { call(fd, abi::DEVICE_FEATURE, address(&mut feature)) }?;
    Ok(feature.data)
}

/// The stream that a device file said in `data_fd` to have made.
pub(super) fn take_stream(device: BorrowedFd<'_>, state: u32) -> io::Result<Option<OwnedFd>> {
    let asked = abi::MigState { device_state: state, data_fd: -1 };
    let answer = feature(device, abi::FEATURE_SET | abi::FEATURE_MIG_DEVICE_STATE, asked)?;
    // SAFETY: the kernel has just made it for this process, and nobody else knows its number.
    Ok((answer.data_fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(answer.data_fd) }))
}

/// `VFIO_DEVICE_RESET`
pub(super) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes nothing.
    unsafe { call(device, abi::DEVICE_RESET, 0) }.map(|_| ())
}

/// `VFIO_MIG_GET_PRECOPY_INFO`, on a stream.
pub(super) fn precopy_info(stream: BorrowedFd<'_>) -> io::Result<abi::PrecopyInfo> {
    let mut info = abi::PrecopyInfo { argsz: size_of::<abi::PrecopyInfo>() as u32, ..Default::default() };
    // SAFETY: the operation writes one structure of `argsz` bytes.
    unsafe { call(stream, abi::MIG_GET_PRECOPY_INFO, address(&mut info)) }?;
    Ok(info)
}

/// `VFIO_DEVICE_FEATURE_DMA_LOGGING_START`: gives the page size chosen.
pub(super) fn dma_logging_start(device: BorrowedFd<'_>, page_size: u64, ranges: &[DmaRange]) -> io::Result<u64> {
    let ranges: Vec<_> = ranges.iter().map(|r| abi::DmaLoggingRange { iova: r.iova, length: r.length }).collect();
    let num_ranges = u32::try_from(ranges.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let at = ranges.as_ptr().expose_provenance() as u64;
    let control = abi::DmaLoggingControl { page_size, num_ranges, reserved: 0, ranges: at };
    let mut feature = header(abi::FEATURE_SET | abi::FEATURE_DMA_LOGGING_START, control);
    // SAFETY: the kernel reads `num_ranges` entries at `ranges`, which live until the end of this function, and writes the
    // structure.
    unsafe { call(device, abi::DEVICE_FEATURE, address(&mut feature)) }?;
    Ok(feature.data.page_size)
}

/// `VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT`
///
/// # Panics
/// When `bitmap` has not a bit for each page.
pub(super) fn dma_logging_report(
    device: BorrowedFd<'_>,
    range: DmaRange,
    page_size: u64,
    bitmap: &mut [u64],
) -> io::Result<()> {
    assert!(
        page_size > 0 && range.length.div_ceil(page_size) <= bitmap.len() as u64 * 64,
        "{range:?} in pages of {page_size} bytes does not fit a bitmap of {} words",
        bitmap.len()
    );
    let at = bitmap.as_mut_ptr().expose_provenance() as u64;
    let report = abi::DmaLoggingReport { iova: range.iova, length: range.length, page_size, bitmap: at };
    let mut feature = header(abi::FEATURE_GET | abi::FEATURE_DMA_LOGGING_REPORT, report);
    // SAFETY: the kernel sets bits of `length / page_size` pages from `bitmap` on: within it, as was asserted.
    unsafe { call(device, abi::DEVICE_FEATURE, address(&mut feature)) }.map(|_| ())
}

/// `VFIO_DEVICE_BIND_IOMMUFD`
pub(super) fn bind_iommufd(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> io::Result<()> {
    let argsz = size_of::<abi::BindIommufd>() as u32;
    let mut bind = abi::BindIommufd { argsz, iommufd: iommufd.as_raw_fd(), ..Default::default() };
    // SAFETY: the operation reads and writes one structure of `argsz` bytes.
    unsafe { call(device, abi::DEVICE_BIND_IOMMUFD, address(&mut bind)) }.map(|_| ())
}

/// `VFIO_GROUP_SET_CONTAINER`, then `VFIO_SET_IOMMU`
pub(super) fn group_to_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let mut number = container.as_raw_fd();
    // SAFETY: the operation reads one `int`.
    unsafe { call(group, abi::GROUP_SET_CONTAINER, address(&mut number)) }?;
    // SAFETY: the operation takes a number.
    unsafe { call(container, abi::SET_IOMMU, abi::TYPE1V2_IOMMU as usize) }.map(|_| ())
}

/// `VFIO_GROUP_GET_DEVICE_FD`
pub(super) fn group_device(group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the operation reads a string that ends in 0.
    let fd = unsafe { call(group, abi::GROUP_GET_DEVICE_FD, name.as_ptr().expose_provenance()) }?;
    // SAFETY: the kernel has just made it for this process, and nobody else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
