//! What a submitter learns of a batch: that it was not accepted, which one it is, and that it has completed.

use thiserror::Error;

use crate::batch::Batch;
use crate::table::Id;
use crate::work::Outcome;

/// Why a batch was not accepted. The batch was returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Reason {
    /// The batch has no items.
    #[error("the batch is empty")]
    Empty,
    /// The channel has as many batches in progress as allowed.
    #[error("as many batches are under way as one channel may have: collect completions first")]
    Full,
    /// The batch names memory of a retired region.
    #[error("the batch names memory that takes no new work: its region was retired")]
    Retired,
    /// The batch would write memory that a device out of service may still write.
    #[error("the batch would write memory that a device out of service may still write")]
    Leased,
    /// Offload is shutting down.
    #[error("offload is shutting down")]
    Closed,
}

/// Identifies a submitted batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TicketId(pub(crate) Id);

/// A completion.
#[derive(Debug)]
#[must_use]
pub struct Done {
    /// Which batch completed.
    pub ticket: TicketId,
    /// The batch, with its results.
    pub batch: Batch,
    /// How it ended.
    pub outcome: Outcome,
    /// The device that did all or most of it; none if the CPU did.
    pub producer: Option<Producer>,
}

/// The device that did a batch, to be reported ([`Offload::report_wrong_result`](crate::Offload::report_wrong_result)) if its result turns
/// out to be wrong later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Producer {
    pub(crate) engine: usize,
    pub(crate) device: usize,
}
