//! The `unsafe` part of the VFIO module: its operations on file descriptors, each with its structure.

use std::ffi::CStr;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use vfio_bindings::bindings::vfio as abi;

use super::device::DmaRange;

/// The operations of `<linux/vfio.h>` that are used here: the bindings have no `_IO`.
mod operation {
    use super::abi::{VFIO_BASE, VFIO_TYPE};

    /// `_IO(VFIO_TYPE, VFIO_BASE + n)`, on machines where `_IO` has no direction bits (all but MIPS, PowerPC and
    /// SPARC).
    const fn io(n: u32) -> u32 {
        ((VFIO_TYPE as u32) << 8) | (VFIO_BASE + n)
    }

    pub(super) const VFIO_SET_IOMMU: u32 = io(2);
    pub(super) const VFIO_GROUP_SET_CONTAINER: u32 = io(4);
    pub(super) const VFIO_GROUP_GET_DEVICE_FD: u32 = io(6);
    pub(super) const VFIO_DEVICE_RESET: u32 = io(11);
    pub(super) const VFIO_DEVICE_FEATURE: u32 = io(17);
    pub(super) const VFIO_DEVICE_BIND_IOMMUFD: u32 = io(18);
    pub(super) const VFIO_MIG_GET_PRECOPY_INFO: u32 = io(21);
}

/// `struct vfio_device_feature` with its data.
#[repr(C)]
struct Feature<T> {
    argsz: u32,
    flags: u32,
    data: T,
}

/// # Safety
/// `argument` must be the argument of `operation`: a number, or the address of its structure, as large and as writable
/// as the operation expects.
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
impl Plain for abi::vfio_device_feature_migration {}
impl Plain for abi::vfio_device_feature_mig_state {}
impl Plain for abi::vfio_device_feature_mig_data_size {}

fn header<T>(flags: u32, data: T) -> Feature<T> {
    const { assert!(offset_of!(Feature<T>, data) == offset_of!(abi::vfio_device_feature, data)) };
    // At most 40 bytes.
    Feature { argsz: size_of::<Feature<T>>() as u32, flags, data }
}

/// Gets or sets a feature; returns its data as the kernel left it.
pub(super) fn feature<T: Plain>(fd: BorrowedFd<'_>, flags: u32, data: T) -> io::Result<T> {
    let mut feature = header(flags, data);
    // SAFETY: the kernel reads and writes within the `argsz` bytes, and `T` consists of numbers (`Plain`).
    unsafe { call(fd, operation::VFIO_DEVICE_FEATURE, address(&mut feature)) }?;
    Ok(feature.data)
}

/// Returns the stream that a device file reported in `data_fd`.
pub(super) fn take_stream(device: BorrowedFd<'_>, state: u32) -> io::Result<Option<OwnedFd>> {
    let asked = abi::vfio_device_feature_mig_state { device_state: state, data_fd: -1 };
    let answer = feature(device, abi::VFIO_DEVICE_FEATURE_SET | abi::VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE, asked)?;
    // SAFETY: the kernel has just made it for this process, and nobody else knows its number.
    Ok((answer.data_fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(answer.data_fd) }))
}

/// `VFIO_DEVICE_RESET`
pub(super) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes nothing.
    unsafe { call(device, operation::VFIO_DEVICE_RESET, 0) }.map(|_| ())
}

/// `VFIO_MIG_GET_PRECOPY_INFO`, on a stream.
pub(super) fn precopy_info(stream: BorrowedFd<'_>) -> io::Result<abi::vfio_precopy_info> {
    let mut info = abi::vfio_precopy_info { argsz: size_of::<abi::vfio_precopy_info>() as u32, ..Default::default() };
    // SAFETY: the operation writes one structure of `argsz` bytes.
    unsafe { call(stream, operation::VFIO_MIG_GET_PRECOPY_INFO, address(&mut info)) }?;
    Ok(info)
}

/// Calls `VFIO_DEVICE_FEATURE_DMA_LOGGING_START`: returns the chosen page size.
pub(super) fn dma_logging_start(device: BorrowedFd<'_>, page_size: u64, ranges: &[DmaRange]) -> io::Result<u64> {
    let ranges: Vec<_> =
        ranges.iter().map(|r| abi::vfio_device_feature_dma_logging_range { iova: r.iova, length: r.length }).collect();
    let num_ranges = u32::try_from(ranges.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let at = ranges.as_ptr().expose_provenance() as u64;
    let control = abi::vfio_device_feature_dma_logging_control { page_size, num_ranges, __reserved: 0, ranges: at };
    let mut feature = header(abi::VFIO_DEVICE_FEATURE_SET | abi::VFIO_DEVICE_FEATURE_DMA_LOGGING_START, control);
    // SAFETY: the kernel reads `num_ranges` entries at `ranges`, which live until the end of this function, and writes
    // the structure.
    unsafe { call(device, operation::VFIO_DEVICE_FEATURE, address(&mut feature)) }?;
    Ok(feature.data.page_size)
}

/// `VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT`
///
/// # Panics
/// If `bitmap` lacks a bit for a page.
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
    let report =
        abi::vfio_device_feature_dma_logging_report { iova: range.iova, length: range.length, page_size, bitmap: at };
    let mut feature = header(abi::VFIO_DEVICE_FEATURE_GET | abi::VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT, report);
    // SAFETY: the kernel sets bits of `length / page_size` pages from `bitmap` on: within it, as was asserted.
    unsafe { call(device, operation::VFIO_DEVICE_FEATURE, address(&mut feature)) }.map(|_| ())
}

/// `VFIO_DEVICE_BIND_IOMMUFD`
pub(super) fn bind_iommufd(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> io::Result<()> {
    let argsz = size_of::<abi::vfio_device_bind_iommufd>() as u32;
    let mut bind = abi::vfio_device_bind_iommufd { argsz, iommufd: iommufd.as_raw_fd(), ..Default::default() };
    // SAFETY: the operation reads and writes one structure of `argsz` bytes.
    unsafe { call(device, operation::VFIO_DEVICE_BIND_IOMMUFD, address(&mut bind)) }.map(|_| ())
}

/// `VFIO_GROUP_SET_CONTAINER`, then `VFIO_SET_IOMMU`
pub(super) fn group_to_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let mut number = container.as_raw_fd();
    // SAFETY: the operation reads one `int`.
    unsafe { call(group, operation::VFIO_GROUP_SET_CONTAINER, address(&mut number)) }?;
    // SAFETY: the operation takes a number.
    unsafe { call(container, operation::VFIO_SET_IOMMU, abi::VFIO_TYPE1v2_IOMMU as usize) }.map(|_| ())
}

/// `VFIO_GROUP_GET_DEVICE_FD`
pub(super) fn group_device(group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the operation reads a string that ends in 0.
    let fd = unsafe { call(group, operation::VFIO_GROUP_GET_DEVICE_FD, name.as_ptr().expose_provenance()) }?;
    // SAFETY: the kernel has just made it for this process, and nobody else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::operation::*;

    /// Compares values that the bindings lack with the installed header, as far as it has them.
    #[test]
    fn operations_have_the_numbers_of_the_kernels_header() {
        let ours = [
            ("VFIO_SET_IOMMU", VFIO_SET_IOMMU),
            ("VFIO_GROUP_SET_CONTAINER", VFIO_GROUP_SET_CONTAINER),
            ("VFIO_GROUP_GET_DEVICE_FD", VFIO_GROUP_GET_DEVICE_FD),
            ("VFIO_DEVICE_RESET", VFIO_DEVICE_RESET),
            ("VFIO_DEVICE_FEATURE", VFIO_DEVICE_FEATURE),
            ("VFIO_DEVICE_BIND_IOMMUFD", VFIO_DEVICE_BIND_IOMMUFD),
            ("VFIO_MIG_GET_PRECOPY_INFO", VFIO_MIG_GET_PRECOPY_INFO),
        ];
        let lines = ours.map(|(name, _)| format!("#ifdef {name}\nprintf(\"{name} %lu\\n\", (long){name});\n#endif\n"));
        let program = format!(
            "#include <stdio.h>\n#include <linux/vfio.h>\nint main(void) {{\n{}return 0;\n}}\n",
            lines.concat()
        );
        let directory = tempfile::tempdir().unwrap();
        let (source, binary) = (directory.path().join("numbers.c"), directory.path().join("numbers"));
        std::fs::write(&source, program).unwrap();
        match Command::new("cc").arg("-o").arg(&binary).arg(&source).output() {
            Err(error) => return println!("skipped: there is no C compiler (cc): {error}"),
            Ok(run) if !run.status.success() => {
                return println!("skipped: no usable <linux/vfio.h>:\n{}", String::from_utf8_lossy(&run.stderr));
            }
            Ok(_) => {}
        }
        let said = String::from_utf8(Command::new(binary).output().unwrap().stdout).unwrap();
        let theirs: Vec<(&str, u32)> =
            said.lines().filter_map(|line| line.split_once(' ')).map(|(name, n)| (name, n.parse().unwrap())).collect();
        let (known, unknown): (Vec<_>, Vec<_>) =
            ours.into_iter().partition(|(name, _)| theirs.iter().any(|(theirs, _)| name == theirs));
        println!("not in this kernel's header, so not compared: {unknown:?}");
        assert_eq!(known, theirs);
        // The operations that are as old as device assignment.
        assert!(known.len() >= 4, "hardly anything was compared: {known:?}");
    }
}
