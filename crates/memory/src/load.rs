//! Loads from memory that is being written: volatile, so that no compiler splits or repeats one, or assumes that memory is unchanged.

/// Loads one vector from any address, in one volatile load.
///
/// # Safety
/// It must be readable, and every value of its bytes a `V`.
#[inline(always)]
pub(crate) unsafe fn load<V: Copy>(ptr: *const u8) -> V {
    #[derive(Clone, Copy)]
    #[repr(C, packed)]
    struct Unaligned<V>(V);
    // SAFETY: the caller vouches for the bytes; a packed struct has no alignment.
    unsafe { ptr.cast::<Unaligned<V>>().read_volatile().0 }
}

/// Loads `N` vectors, one after another.
///
/// # Safety
/// As [`load`], for all of them.
#[inline(always)]
pub(crate) unsafe fn load_block<V: Copy, const N: usize>(ptr: *const u8) -> [V; N] {
    // SAFETY: the caller vouches for all of them.
    std::array::from_fn(|i| unsafe { load(ptr.add(i * size_of::<V>())) })
}
