//! libvirt's releases.

use std::fmt;

/// The oldest release of libvirt that is accepted.
pub const OLDEST: Version = Version { major: 7, minor: 0, micro: 0 };

/// The first release that passes descriptors with commands of the monitor.
pub(crate) const PASSES_DESCRIPTORS: Version = Version { major: 8, minor: 2, micro: 0 };

/// A release of libvirt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
    /// The third number.
    pub micro: u32,
}

impl Version {
    /// Reads libvirt's own number: 1 000 000 × major + 1 000 × minor + micro.
    pub(crate) fn of(number: u64) -> Self {
        let part = |divisor: u64| (number / divisor % 1000) as u32;
        Self { major: (number / 1_000_000) as u32, minor: part(1000), micro: part(1) }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { major, minor, micro } = self;
        write!(f, "{major}.{minor}.{micro}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_libvirts_number_and_compared_by_its_parts() {
        let nine = Version::of(9_000_000);
        assert_eq!((nine.to_string(), Version::of(11_010_002).to_string()), ("9.0.0".into(), "11.10.2".into()));
        assert!(Version::of(8_001_000) < PASSES_DESCRIPTORS && PASSES_DESCRIPTORS < nine);
        assert!(Version::of(6_010_000) < OLDEST && OLDEST <= Version::of(7_000_000));
    }
}
