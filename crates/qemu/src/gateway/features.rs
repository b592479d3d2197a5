//! Protocol features of the gateways.

use sterna_engine::migration::{DELTA, RETRANSMIT};
use sterna_engine::session::{DESCRIPTION, DRY_RUN, Features};

/// Carrying QEMU's migration stream, version 1 of the records in `layout`.
const QEMU_STREAM: &str = "qemu-stream-1";

/// The features of a destination's gateway that accepts deltas.
pub(super) const DESTINATION_WITH_DELTAS: Features<'static> =
    Features { offered: &[QEMU_STREAM, DELTA, RETRANSMIT, DRY_RUN, DESCRIPTION], required: &[QEMU_STREAM] };

/// The features of a destination's gateway without deltas.
pub(super) const DESTINATION: Features<'static> =
    Features { offered: &[QEMU_STREAM, DRY_RUN, DESCRIPTION], required: &[QEMU_STREAM] };

/// The features of a source that asks for the destination's machine.
pub(super) const DESCRIBING: Features<'static> =
    Features { offered: &[QEMU_STREAM, DESCRIPTION], required: &[QEMU_STREAM, DESCRIPTION] };

/// The features of a source that makes a dry run.
pub(super) const DRY: Features<'static> =
    Features { offered: &[QEMU_STREAM, DRY_RUN], required: &[QEMU_STREAM, DRY_RUN] };

/// The features of a gateway that sends deltas. A damaged packet is retransmitted from the pages that the source keeps.
pub(super) const WITH_DELTAS: Features<'static> =
    Features { offered: &[QEMU_STREAM, DELTA, RETRANSMIT], required: &[QEMU_STREAM] };

/// The features of every gateway.
pub(super) const FEATURES: Features<'static> = Features { offered: &[QEMU_STREAM], required: &[QEMU_STREAM] };
