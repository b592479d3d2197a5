//! The capability registers that sysfs shows: operations, limits, features.

use std::fmt;

use crate::flags::Operation;

/// A set of operation codes: `op_cap` of a device, `op_config` of a queue.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct OperationSet {
    words: [u64; 4],
}

impl OperationSet {
    /// Makes a set of the given codes.
    pub fn of(codes: impl IntoIterator<Item = u8>) -> Self {
        let mut set = Self::default();
        for code in codes {
            set.words[usize::from(code / 64)] |= 1 << (code % 64);
        }
        set
    }

    /// Parses either form kernels have had: comma-separated 32-bit hexadecimal words, highest first (the kernel's bitmap
    /// format, Linux 6.0 and later), or space-separated 64-bit words, lowest first.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let mut words = [0_u64; 4];
        let bare = |word: &str| -> Option<u64> {
            let digits = word.trim().trim_start_matches("0x");
            let hex = (1..=16).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            hex.then(|| u64::from_str_radix(digits, 16).ok())?
        };
        if text.contains(',') {
            let parts: Vec<&str> = text.split(',').collect();
            for (index, part) in parts.iter().rev().enumerate() {
                let value = bare(part)?;
                if value > u64::from(u32::MAX) || (index >= 8 && value != 0) {
                    return None;
                }
                if index < 8 {
                    words[index / 2] |= value << (index % 2 * 32);
                }
            }
        } else {
            let mut parts = text.split_ascii_whitespace();
            words[0] = bare(parts.next()?)?;
            for (index, part) in parts.enumerate() {
                *words.get_mut(index + 1)? = bare(part)?;
            }
        }
        Some(Self { words })
    }

    /// Returns whether the code is in the set.
    pub fn contains_code(&self, code: u8) -> bool {
        self.words[usize::from(code / 64)] >> (code % 64) & 1 == 1
    }

    /// Returns whether the operation is in the set.
    pub fn contains(&self, operation: Operation) -> bool {
        self.contains_code(operation as u8)
    }

    /// Returns all codes in the set.
    pub fn codes(&self) -> impl Iterator<Item = u8> {
        let set = *self;
        (0..=u8::MAX).filter(move |code| set.contains_code(*code))
    }
}

impl fmt::Debug for OperationSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{")?;
        for (index, code) in self.codes().enumerate() {
            write!(f, "{}{code:#04x}", if index == 0 { "" } else { " " })?;
        }
        write!(f, "}}")
    }
}

/// `gen_cap`: the general capabilities register (DSA section 9.2.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GeneralCapabilities(
    /// The register.
    pub u64,
);

impl GeneralCapabilities {
    /// Descriptors may block on page faults.
    pub const fn block_on_fault(self) -> bool {
        self.bit(0)
    }

    /// Memory move between overlapping buffers works.
    pub const fn overlapping_copy(self) -> bool {
        self.bit(1)
    }

    /// Writes can be directed to the cache.
    pub const fn cache_control(self) -> bool {
        self.bit(2)
    }

    /// Destination readback works.
    pub const fn destination_readback(self) -> bool {
        self.bit(8)
    }

    /// A batch can be marked as the continuation of one with failures.
    pub const fn batch_continuation(self) -> bool {
        self.bit(15)
    }

    /// Batches of one descriptor work.
    pub const fn batch_of_one(self) -> bool {
        self.bit(52)
    }

    const fn bit(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }
}

/// `iaa_cap`: the IAA capabilities register (IAA section 7.2.2). Devices of the first generation do not have it, which is
/// the same as zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IaaCapabilities(
    /// The register.
    pub u64,
);
