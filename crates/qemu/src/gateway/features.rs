//! What a gateway can do beyond the protocol's basis.

use sterna::session::Features;

/// To carry QEMU's migration stream, version 1 of the records in `layout`.
const QEMU_STREAM: &str = "qemu-stream-1";

/// The features of every gateway.
pub(super) const FEATURES: Features<'static> = Features { offered: &[QEMU_STREAM], required: &[QEMU_STREAM] };
