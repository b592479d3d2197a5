//! The format variant of the stream that a destination QEMU expects, which depends on the machine type's compatibility properties.
//!
//! Source: `hw/core/machine.c`, the `hw_compat_*` tables: `multifd-flush-after-each-section` on up to 8.0,
//! `zero-page-detection=legacy` up to 8.2, `send-switchover-start` off up to 9.2.

/// The format variant of the stream, oldest first. Each variant adds one feature to the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WireVariant {
    /// Machine types up to 8.0: every RAM section's end waits for one SYNC of each channel; zero pages travel on the
    /// main channel.
    PerSectionSync,
    /// 8.1 and 8.2: a FLUSH record waits for the SYNCs; zero pages still on the main channel.
    PerRoundSync,
    /// 9.0 to 9.2: zero pages may travel in multifd packets.
    ZeroPagesInPackets,
    /// 10.0 and later: `SWITCHOVER_START` is sent, device state may travel in multifd packets.
    SwitchoverStart,
}

impl WireVariant {
    /// The newest known variant. Unversioned names such as `q35` stand for a QEMU's newest machine type.
    pub const NEWEST: Self = Self::SwitchoverStart;

    /// Returns the variant of a machine type's name, such as `pc-q35-7.2` or `virt-9.0`.
    ///
    /// An unversioned alias (`pc`, `q35`, `virt`, `microvm`) counts as newest, which is correct only for a new QEMU: query the
    /// full name (`query-machines`) first. Returns `None` for names with a distribution's own version (`pc-q35-rhel9.4.0`,
    /// `pc-i440fx-jammy`): use [`Self::from_setup`] then.
    #[must_use]
    pub fn for_machine(name: &str) -> Option<Self> {
        let versions: Vec<(u32, u32)> = name.split('-').filter_map(version).collect();
        match versions.as_slice() {
            [] if is_unversioned(name) => Some(Self::NEWEST),
            [] => None,
            [.., newest] => Some(match *newest {
                v if v <= (8, 0) => Self::PerSectionSync,
                v if v <= (8, 2) => Self::PerRoundSync,
                v if v <= (9, 2) => Self::ZeroPagesInPackets,
                _ => Self::SwitchoverStart,
            }),
        }
    }

    /// Returns the oldest variant that fits the source's RAM setup section (with multifd on).
    ///
    /// It is correct for every destination of the same machine type, because newer variants only *allow* more.
    #[must_use]
    pub fn from_setup(had_flush: bool) -> Self {
        if had_flush { Self::PerRoundSync } else { Self::PerSectionSync }
    }

    /// Returns whether the end of each RAM section is a sync point; else the FLUSH record is.
    #[must_use]
    pub fn syncs_per_section(self) -> bool {
        self == Self::PerSectionSync
    }

    /// Returns whether multifd packets may list zero pages. An older destination ignores their count and loses the pages.
    #[must_use]
    pub fn zero_pages_in_packets(self) -> bool {
        self >= Self::ZeroPagesInPackets
    }

    /// Returns whether the destination knows `SWITCHOVER_START` and device state in multifd packets.
    #[must_use]
    pub fn switchover_start(self) -> bool {
        self >= Self::SwitchoverStart
    }
}

/// `7.2` and `7.2.1`, but not `rhel7.2`.
fn version(part: &str) -> Option<(u32, u32)> {
    let mut numbers = part.split('.').map(str::parse::<u32>);
    let (Ok(major), Ok(minor)) = (numbers.next()?, numbers.next()?) else { return None };
    numbers.all(|n| n.is_ok()).then_some((major, minor))
}

/// Names that QEMU itself uses without a version.
fn is_unversioned(name: &str) -> bool {
    const NAMES: [&str; 9] =
        ["pc", "q35", "pc-q35", "pc-i440fx", "virt", "microvm", "s390-ccw-virtio", "pseries", "isapc"];
    NAMES.contains(&name)
}
