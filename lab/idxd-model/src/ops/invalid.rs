//! What the checks of both kinds of devices find.

/// Why a descriptor is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Invalid {
    pub(crate) status: u8,
    pub(crate) flags: u32,
}
