//! Numbers and structures of `<linux/vfio.h>`. `tests/kernel_header.rs` holds them against the header that is installed.

/// `_IO(';', 100 + n)`, on machines where `_IO` has no direction bits (all but MIPS, PowerPC and SPARC).
const fn io(n: u32) -> u32 {
    ((b';' as u32) << 8) | (100 + n)
}

/// `VFIO_SET_IOMMU`
pub const SET_IOMMU: u32 = io(2);
/// `VFIO_GROUP_SET_CONTAINER`
pub const GROUP_SET_CONTAINER: u32 = io(4);
/// `VFIO_GROUP_GET_DEVICE_FD`
pub const GROUP_GET_DEVICE_FD: u32 = io(6);
/// `VFIO_DEVICE_RESET`
pub const DEVICE_RESET: u32 = io(11);
/// `VFIO_DEVICE_FEATURE`
pub const DEVICE_FEATURE: u32 = io(17);
/// `VFIO_DEVICE_BIND_IOMMUFD`
pub const DEVICE_BIND_IOMMUFD: u32 = io(18);
/// `VFIO_MIG_GET_PRECOPY_INFO`
pub const MIG_GET_PRECOPY_INFO: u32 = io(21);
/// `VFIO_TYPE1v2_IOMMU`
pub const TYPE1V2_IOMMU: u32 = 3;

/// `VFIO_DEVICE_FEATURE_GET`
pub const FEATURE_GET: u32 = 1 << 16;
/// `VFIO_DEVICE_FEATURE_SET`
pub const FEATURE_SET: u32 = 1 << 17;
/// `VFIO_DEVICE_FEATURE_MIGRATION`
pub const FEATURE_MIGRATION: u32 = 1;
/// `VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE`
pub const FEATURE_MIG_DEVICE_STATE: u32 = 2;
/// `VFIO_DEVICE_FEATURE_DMA_LOGGING_START`
pub const FEATURE_DMA_LOGGING_START: u32 = 6;
/// `VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP`
pub const FEATURE_DMA_LOGGING_STOP: u32 = 7;
/// `VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT`
pub const FEATURE_DMA_LOGGING_REPORT: u32 = 8;
/// `VFIO_DEVICE_FEATURE_MIG_DATA_SIZE`
pub const FEATURE_MIG_DATA_SIZE: u32 = 9;

/// `VFIO_MIGRATION_STOP_COPY`
pub const MIGRATION_STOP_COPY: u64 = 1 << 0;
/// `VFIO_MIGRATION_P2P`
pub const MIGRATION_P2P: u64 = 1 << 1;
/// `VFIO_MIGRATION_PRE_COPY`
pub const MIGRATION_PRE_COPY: u64 = 1 << 2;

/// `struct vfio_device_feature` with its data.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Feature<T> {
    /// Bytes of this structure.
    pub argsz: u32,
    /// Which feature, and what to do with it.
    pub flags: u32,
    /// The feature's own.
    pub data: T,
}

/// `struct vfio_device_feature_migration`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Migration {
    /// `VFIO_MIGRATION_*`
    pub flags: u64,
}

/// `struct vfio_device_feature_mig_state`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MigState {
    /// `enum vfio_device_mig_state`
    pub device_state: u32,
    /// The new stream, or -1.
    pub data_fd: i32,
}

/// `struct vfio_device_feature_mig_data_size`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MigDataSize {
    /// Bytes.
    pub stop_copy_length: u64,
}

/// `struct vfio_precopy_info`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrecopyInfo {
    /// Bytes of this structure.
    pub argsz: u32,
    /// 0.
    pub flags: u32,
    /// Left of the first pass.
    pub initial_bytes: u64,
    /// Changed since.
    pub dirty_bytes: u64,
}

/// `struct vfio_device_feature_dma_logging_control`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmaLoggingControl {
    /// In: a hint; out: the device's.
    pub page_size: u64,
    /// How many.
    pub num_ranges: u32,
    /// 0.
    pub reserved: u32,
    /// Address of as many [`DmaLoggingRange`].
    pub ranges: u64,
}

/// `struct vfio_device_feature_dma_logging_range`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmaLoggingRange {
    /// First address.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
}

/// `struct vfio_device_feature_dma_logging_report`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DmaLoggingReport {
    /// First address.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// Bytes per bit.
    pub page_size: u64,
    /// Address of words of 64 bits.
    pub bitmap: u64,
}

/// `struct vfio_device_bind_iommufd`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct BindIommufd {
    /// Bytes of this structure.
    pub argsz: u32,
    /// 0.
    pub flags: u32,
    /// An open `/dev/iommu`.
    pub iommufd: i32,
    /// The device's number there.
    pub out_devid: u32,
}
