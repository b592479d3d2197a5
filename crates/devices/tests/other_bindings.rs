//! The numbers of this crate against the bindings that others made from a kernel's header (crate `vfio-bindings`): also where
//! the header that is installed is too old for them. Operation numbers are not in there: `_IO` is a macro with arguments.

use std::mem::offset_of;

use sterna_devices::vfio::{State, abi};
use vfio_bindings::bindings::vfio as theirs;

#[test]
fn flags_features_and_states_are_the_same() {
    for (ours, theirs) in [
        (abi::FEATURE_GET, theirs::VFIO_DEVICE_FEATURE_GET),
        (abi::FEATURE_SET, theirs::VFIO_DEVICE_FEATURE_SET),
        (abi::FEATURE_MIGRATION, theirs::VFIO_DEVICE_FEATURE_MIGRATION),
        (abi::FEATURE_MIG_DEVICE_STATE, theirs::VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE),
        (abi::FEATURE_DMA_LOGGING_START, theirs::VFIO_DEVICE_FEATURE_DMA_LOGGING_START),
        (abi::FEATURE_DMA_LOGGING_STOP, theirs::VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP),
        (abi::FEATURE_DMA_LOGGING_REPORT, theirs::VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT),
        (abi::FEATURE_MIG_DATA_SIZE, theirs::VFIO_DEVICE_FEATURE_MIG_DATA_SIZE),
        (abi::TYPE1V2_IOMMU, theirs::VFIO_TYPE1v2_IOMMU),
        (abi::MIGRATION_STOP_COPY as u32, theirs::VFIO_MIGRATION_STOP_COPY),
        (abi::MIGRATION_P2P as u32, theirs::VFIO_MIGRATION_P2P),
        (abi::MIGRATION_PRE_COPY as u32, theirs::VFIO_MIGRATION_PRE_COPY),
        (State::Error.number(), theirs::vfio_device_mig_state_VFIO_DEVICE_STATE_ERROR),
        (State::Stop.number(), theirs::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP),
        (State::Running.number(), theirs::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING),
        (State::StopCopy.number(), theirs::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP_COPY),
        (State::Resuming.number(), theirs::vfio_device_mig_state_VFIO_DEVICE_STATE_RESUMING),
        (State::RunningP2p.number(), theirs::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING_P2P),
        (State::PreCopy.number(), theirs::vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY),
        (State::PreCopyP2p.number(), theirs::vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY_P2P),
    ] {
        assert_eq!(ours, theirs);
    }
    for state in State::ALL {
        assert_eq!(State::from_number(state.number()), state);
    }
    assert_eq!(State::from_number(8), State::Other(8));
}

#[test]
fn structures_are_the_same() {
    macro_rules! same {
        ($ours:ident, $theirs:ident, $($field:ident = $their_field:ident),+) => {
            assert_eq!(size_of::<abi::$ours>(), size_of::<theirs::$theirs>());
            $(
                assert_eq!(
                    offset_of!(abi::$ours, $field),
                    offset_of!(theirs::$theirs, $their_field),
                    "{}", stringify!($theirs.$their_field)
                );
            )+
        };
    }
    same!(Migration, vfio_device_feature_migration, flags = flags);
    same!(MigState, vfio_device_feature_mig_state, device_state = device_state, data_fd = data_fd);
    same!(MigDataSize, vfio_device_feature_mig_data_size, stop_copy_length = stop_copy_length);
    same!(
        PrecopyInfo,
        vfio_precopy_info,
        argsz = argsz,
        flags = flags,
        initial_bytes = initial_bytes,
        dirty_bytes = dirty_bytes
    );
    same!(
        DmaLoggingControl,
        vfio_device_feature_dma_logging_control,
        page_size = page_size,
        num_ranges = num_ranges,
        ranges = ranges
    );
    same!(DmaLoggingRange, vfio_device_feature_dma_logging_range, iova = iova, length = length);
    same!(
        DmaLoggingReport,
        vfio_device_feature_dma_logging_report,
        iova = iova,
        length = length,
        page_size = page_size,
        bitmap = bitmap
    );
    // Newer headers have a token at its end; the kernel takes the structure without.
    assert!(size_of::<abi::BindIommufd>() <= size_of::<theirs::vfio_device_bind_iommufd>());
    assert_eq!(offset_of!(abi::BindIommufd, iommufd), offset_of!(theirs::vfio_device_bind_iommufd, iommufd));
    assert_eq!(offset_of!(abi::BindIommufd, out_devid), offset_of!(theirs::vfio_device_bind_iommufd, out_devid));
}
