//! The cells of `sterna-bench compression`: some fifty with names, chosen so that each question has its cells, and with
//! `--long` the product of all methods, channels and networks. `--quick` measures the cells of the targets and one of
//! each other kind.

use std::path::Path;

use sterna_qemu_lab::corpus::Corpus;

use super::super::ram::writer::Pattern;

const MIB: u64 = 1 << 20;
const MB: u64 = 1_000_000;

/// The network between the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Network {
    Unlimited,
    /// 1250 MB/s.
    TenGigabit,
    Gigabit,
    HundredMegabit,
}

impl Network {
    pub(super) const ALL: [Self; 4] = [Self::Unlimited, Self::TenGigabit, Self::Gigabit, Self::HundredMegabit];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Unlimited => "unlimited",
            Self::TenGigabit => "1250 MB/s",
            Self::Gigabit => "1 Gbit/s",
            Self::HundredMegabit => "100 Mbit/s",
        }
    }

    pub(super) fn bits(self) -> Option<u64> {
        match self {
            Self::Unlimited => None,
            Self::TenGigabit => Some(10_000 * MB),
            Self::Gigabit => Some(1_000 * MB),
            Self::HundredMegabit => Some(100 * MB),
        }
    }

    /// Bytes of content: enough for the migration to take seconds.
    pub(super) fn memory(self, load: Load, quick: bool) -> u64 {
        let (usual, less) = match (self, load) {
            // Compression leaves almost nothing of it to send.
            (_, Load::Written(Pattern::Ones, _)) => (1024, 1024),
            (_, Load::Written(Pattern::Sequence, _)) => (512, 256),
            // Rounds are short, so that several fit before the migration is abandoned.
            (_, Load::Written(..)) => (256, 128),
            (Self::Unlimited | Self::TenGigabit, _) => (1024, 384),
            (Self::Gigabit, _) => (384, 192),
            (Self::HundredMegabit, _) => (40, 24),
        };
        if quick { less * MIB } else { usual * MIB }
    }
}

/// The content of memory, and whether it is written during the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// It is not written.
    Still(Corpus),
    /// It is written, at this rate in MB/s.
    Written(Pattern, u64),
}

/// Rates that are above the network's for uncompressed pages, and below it for compressed ones.
const WRITTEN: [Load; 3] =
    [Load::Written(Pattern::Ones, 250), Load::Written(Pattern::Sequence, 200), Load::Written(Pattern::Memcached, 150)];

impl Load {
    pub(super) fn corpus(self) -> Corpus {
        match self {
            Self::Still(corpus) => corpus,
            Self::Written(Pattern::Ones, _) => Corpus::Ones,
            Self::Written(Pattern::Sequence, _) => Corpus::Sequence,
            Self::Written(Pattern::Memcached, _) => Corpus::Memcached,
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Still(corpus) => corpus.name().into(),
            Self::Written(_, rate) => format!("{} written at {rate} MB/s", self.corpus().name()),
        }
    }

    /// Returns pattern and rate in bytes per second, if it is written.
    pub(super) fn writes(self) -> Option<(Pattern, u64)> {
        match self {
            Self::Still(_) => None,
            Self::Written(pattern, rate) => Some((pattern, rate * MB)),
        }
    }
}

/// A method at a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Method {
    pub(super) name: &'static str,
    pub(super) level: Option<&'static str>,
}

impl Method {
    const fn new(name: &'static str) -> Self {
        Self { name, level: None }
    }

    pub(super) const NONE: Self = Self::new("none");
    pub(super) const LZ4: Self = Self::new("lz4");
    pub(super) const ZSTD: Self = Self::new("zstd");
    pub(super) const FAST: Self = Self { name: "zstd", level: Some("-3") };
    pub(super) const ZLIB: Self = Self::new("deflate by cpu");
    pub(super) const QATZIP: Self = Self::new("deflate by qat");
    pub(super) const AUTO: Self = Self::new("auto");

    /// The fixed methods with which `auto` is compared.
    pub(super) const FIXED: [Self; 5] = [Self::NONE, Self::LZ4, Self::FAST, Self::ZSTD, Self::ZLIB];
    const ALL: [Self; 7] = [Self::NONE, Self::LZ4, Self::FAST, Self::ZSTD, Self::ZLIB, Self::QATZIP, Self::AUTO];
}

/// The mover and its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The library, with this number of channels.
    Sterna(Method, u16),
    /// QEMU, with this compression and the best number of channels.
    Qemu(&'static str),
}

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) network: Network,
    pub(super) load: Load,
    pub(super) way: Way,
}

impl Plan {
    pub(super) fn name(&self) -> String {
        let way = match self.way {
            Way::Qemu(compression) => format!("QEMU {compression}"),
            Way::Sterna(Method { name, level: None }, channels) => format!("{name} × {channels}"),
            Way::Sterna(Method { name, level: Some(level) }, channels) => format!("{name} {level} × {channels}"),
        };
        format!("{}, {}, {way}", self.network.name(), self.load.name())
    }

    pub(super) fn needs_qat(&self) -> bool {
        matches!(self.way, Way::Sterna(method, _) if method == Method::QATZIP)
    }

    /// Whether it is measured when no cells are named.
    pub(super) fn is_measured(&self, quick: bool, long: bool) -> bool {
        if quick { quick_ones().contains(self) } else { long || named().contains(self) }
    }
}

fn sterna(network: Network, load: Load, methods: &[(Method, u16)]) -> impl Iterator<Item = Plan> {
    methods.iter().map(move |(method, channels)| Plan { network, load, way: Way::Sterna(*method, *channels) })
}

fn qemu(network: Network, load: Load, compressions: &[&'static str]) -> impl Iterator<Item = Plan> {
    compressions.iter().map(move |compression| Plan { network, load, way: Way::Qemu(compression) })
}

const MIXED: Load = Load::Still(Corpus::Mixed);

fn quick_ones() -> Vec<Plan> {
    use Network::{Gigabit, HundredMegabit, Unlimited};
    let mut plans = Vec::new();
    let cpu_bound = [Method::NONE, Method::LZ4, Method::ZSTD, Method::ZLIB, Method::AUTO].map(|method| (method, 2));
    plans.extend(sterna(Unlimited, MIXED, &cpu_bound));
    plans.extend(qemu(Unlimited, MIXED, &["none", "zstd", "zlib"]));
    let all =
        [Method::NONE, Method::LZ4, Method::FAST, Method::ZSTD, Method::ZLIB, Method::AUTO].map(|method| (method, 2));
    plans.extend(sterna(Gigabit, MIXED, &all));
    plans.extend(qemu(Gigabit, MIXED, &["zstd"]));
    plans.extend(sterna(HundredMegabit, MIXED, &[(Method::ZSTD, 2), (Method::AUTO, 2)]));
    plans.extend(sterna(Gigabit, WRITTEN[2], &[(Method::NONE, 2), (Method::ZSTD, 2), (Method::AUTO, 2)]));
    plans
}

/// Returns the cells that each answer a question of their own.
fn named() -> Vec<Plan> {
    use Network::{Gigabit, HundredMegabit, TenGigabit, Unlimited};
    let mut plans = quick_ones();
    let more = [(Method::NONE, 8), (Method::ZSTD, 8), (Method::ZSTD, 16), (Method::FAST, 2), (Method::AUTO, 8)];
    plans.extend(sterna(Unlimited, MIXED, &more));
    plans.extend(sterna(Unlimited, MIXED, &[(Method::QATZIP, 2)]));
    plans.extend(sterna(TenGigabit, MIXED, &[(Method::NONE, 4), (Method::ZSTD, 4), (Method::AUTO, 4)]));
    plans.extend(qemu(TenGigabit, MIXED, &["none"]));
    plans.extend(sterna(Gigabit, MIXED, &[(Method::QATZIP, 2)]));
    plans.extend(qemu(Gigabit, MIXED, &["none", "zlib"]));
    plans.extend(sterna(HundredMegabit, MIXED, &[(Method::ZLIB, 2)]));
    plans.extend(qemu(HundredMegabit, MIXED, &["zstd"]));
    for corpus in [Corpus::Text, Corpus::Images, Corpus::GuestRam, Corpus::Memcached] {
        plans.extend(sterna(Gigabit, Load::Still(corpus), &[(Method::ZSTD, 2), (Method::AUTO, 2)]));
    }
    for corpus in [Corpus::GuestRam, Corpus::Memcached] {
        plans.extend(qemu(Gigabit, Load::Still(corpus), &["zstd"]));
    }
    for load in WRITTEN {
        plans.extend(sterna(Gigabit, load, &[(Method::ZSTD, 2), (Method::AUTO, 2)]));
    }
    without_doubles(plans)
}

/// Returns all cells, including the product of all settings.
pub(super) fn all() -> Vec<Plan> {
    let mut plans = named();
    for network in Network::ALL {
        for channels in [2, 4, 8, 16] {
            plans.extend(sterna(network, MIXED, &Method::ALL.map(|method| (method, channels))));
        }
        plans.extend(qemu(network, MIXED, &["none", "zlib", "zstd"]));
    }
    without_doubles(plans)
}

fn without_doubles(plans: Vec<Plan>) -> Vec<Plan> {
    let mut kept = Vec::new();
    for plan in plans {
        if !kept.contains(&plan) {
            kept.push(plan);
        }
    }
    kept
}

/// Returns whether a driver of Intel QAT has a device on this machine.
pub(super) fn has_qat() -> bool {
    ["4xxx", "420xx", "c4xxx", "c6xx", "c3xxx", "dh895xcc"].iter().any(|driver| {
        let devices = std::fs::read_dir(Path::new("/sys/bus/pci/drivers").join(driver));
        // The driver's directory names each device by its address.
        devices.is_ok_and(|entries| entries.flatten().any(|entry| entry.file_name().to_string_lossy().contains(':')))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn cells_have_names_of_their_own_and_the_product_is_whole() {
        let all = all();
        let names: HashSet<String> = all.iter().map(Plan::name).collect();
        assert_eq!(names.len(), all.len());
        let product = all.iter().filter(|plan| plan.load == MIXED && matches!(plan.way, Way::Sterna(..))).count();
        assert_eq!(product, 4 * 4 * Method::ALL.len());
    }

    #[test]
    fn the_usual_table_is_much_smaller_than_the_product_and_quick_is_part_of_it() {
        let measured = |quick, long| all().into_iter().filter(|plan| plan.is_measured(quick, long)).collect::<Vec<_>>();
        let (quick, usual, long) = (measured(true, false), measured(false, false), measured(false, true));
        assert!(quick.iter().all(|plan| usual.contains(plan)) && usual.iter().all(|plan| long.contains(plan)));
        assert!((15..=24).contains(&quick.len()), "{}", quick.len());
        assert!((30..=50).contains(&usual.len()) && long.len() > 100, "{} {}", usual.len(), long.len());
    }

    #[test]
    fn what_is_written_is_more_than_the_network_carries_uncompressed() {
        for load in WRITTEN {
            let (_, rate) = load.writes().unwrap();
            assert!(rate * 8 > Network::Gigabit.bits().unwrap(), "{}", load.name());
        }
    }
}
