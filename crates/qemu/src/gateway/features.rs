//! Protocol features of the gateways.

use sterna_engine::migration::{DELTA, RETRANSMIT};
use sterna_engine::session::Features;

/// Carrying QEMU's migration stream, version 1 of the records in `layout`.
const QEMU_STREAM: &str = "qemu-stream-1";

/// The features of a gateway that sends or receives deltas. A damaged packet is retransmitted from the pages that the source keeps.
pub(super) const WITH_DELTAS: Features<'static> =
    Features { offered: &[QEMU_STREAM, DELTA, RETRANSMIT], required: &[QEMU_STREAM] };

/// The features of every gateway.
pub(super) const FEATURES: Features<'static> = Features { offered: &[QEMU_STREAM], required: &[QEMU_STREAM] };
