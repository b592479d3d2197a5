//! What a gateway can do beyond the protocol's basis.

use sterna::migration::{DELTA, SEND_AGAIN};
use sterna::session::Features;

/// To carry QEMU's migration stream, version 1 of the records in `layout`.
const QEMU_STREAM: &str = "qemu-stream-1";

/// A gateway that takes or sends pages by what has changed in them. What is damaged is sent again from what the source keeps for that.
pub(super) const WITH_DELTAS: Features<'static> =
    Features { offered: &[QEMU_STREAM, DELTA, SEND_AGAIN], required: &[QEMU_STREAM] };

/// The features of every gateway.
pub(super) const FEATURES: Features<'static> = Features { offered: &[QEMU_STREAM], required: &[QEMU_STREAM] };
