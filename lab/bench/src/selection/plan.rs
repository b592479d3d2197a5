//! The cells of `sterna-bench selection` that are computed: each has a content, a network, the CPUs that may be used,
//! and an accelerator. Some forty are selected; `--long` computes the product.

use sterna_codec::{Encoding, Engine};
use sterna_qemu_lab::corpus::Corpus;
use sterna_simulator::path::Path;

use super::costs::Bytes;

/// A network, in bits per second; 0 is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Network(pub(super) u64);

const MEGABIT: u64 = 1_000_000;
const GIGABIT: u64 = 1000 * MEGABIT;

impl Network {
    pub(super) const ALL: [Self; 7] = [
        Self(100 * MEGABIT),
        Self(GIGABIT),
        Self(2500 * MEGABIT),
        Self(10 * GIGABIT),
        Self(25 * GIGABIT),
        Self(40 * GIGABIT),
        Self::UNLIMITED,
    ];
    pub(super) const UNLIMITED: Self = Self(0);

    pub(super) fn name(self) -> String {
        match self.0 {
            0 => "unlimited".into(),
            bits if bits < GIGABIT => format!("{} Mbit/s", bits / MEGABIT),
            bits => format!("{} Gbit/s", bits as f64 / GIGABIT as f64),
        }
    }

    /// Returns bytes per nanosecond, without headers.
    pub(super) fn rate(self) -> f64 {
        const PAYLOAD: f64 = 1448.0 / 1538.0;
        if self.0 == 0 { f64::INFINITY } else { self.0 as f64 / 8e9 * PAYLOAD }
    }

    /// Returns the batches of 512 KiB that a cell moves: 1 GiB or 4 GiB.
    fn batches(self) -> usize {
        if (1..=GIGABIT).contains(&self.0) { 2048 } else { 8192 }
    }
}

/// The CPUs of the sending threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Cpu {
    /// A core for each thread.
    Enough,
    /// A core for each thread, and a limit of this many CPUs for all together (`--max-cpus`).
    Allowed(f64),
    /// One core for all senders and one for all receivers, like the machine on which the real cells are measured.
    OneCore,
}

impl Cpu {
    fn name(self) -> String {
        match self {
            Self::Enough => String::new(),
            Self::Allowed(cpus) => format!(", {cpus} CPUs allowed"),
            Self::OneCore => ", on one core".into(),
        }
    }

    pub(super) fn allowed(self) -> Option<f64> {
        match self {
            Self::Allowed(cpus) => Some(cpus),
            _ => None,
        }
    }
}

/// The accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accelerator {
    None,
    /// An IAA device with this many engines: eight, or one that others leave.
    Iaa(usize),
    Qat,
}

impl Accelerator {
    fn name(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Iaa(1) => ", one engine of IAA",
            Self::Iaa(_) => ", IAA",
            Self::Qat => ", QAT",
        }
    }

    /// Returns whether an encoding is possible with it.
    pub(super) fn has(self, encoding: Encoding) -> bool {
        match encoding.engine() {
            Engine::Iaa => matches!(self, Self::Iaa(_)),
            Engine::Qat => self == Self::Qat,
            Engine::Cpu => true,
        }
    }
}

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Plan {
    pub(super) corpus: Corpus,
    pub(super) network: Network,
    /// The network from half way on.
    pub(super) then: Option<Network>,
    pub(super) channels: usize,
    pub(super) cpu: Cpu,
    pub(super) accelerator: Accelerator,
}

impl Plan {
    pub(super) const fn new(corpus: Corpus, network: Network, channels: usize) -> Self {
        Self { corpus, network, then: None, channels, cpu: Cpu::Enough, accelerator: Accelerator::None }
    }

    pub(super) fn name(&self) -> String {
        let Self { corpus, network, then, channels, cpu, accelerator } = self;
        let then = then.map_or(String::new(), |then| format!(", then {}", then.name()));
        let (corpus, network, cpu, accelerator) = (corpus.name(), network.name(), cpu.name(), accelerator.name());
        format!("virtual: {corpus}, {network}{then} × {channels}{cpu}{accelerator}")
    }

    pub(super) fn batches(&self) -> usize {
        self.then.map_or(self.network.batches(), |then| self.network.batches().max(then.batches()))
    }

    pub(super) fn path(&self, bytes: &Bytes) -> Path {
        let cores = if self.cpu == Cpu::OneCore { 1 } else { usize::MAX };
        Path {
            channels: self.channels,
            rate: self.network.rate(),
            change: self.then.map(|then| (self.batches() / 2, then.rate())),
            cores,
            allowed: self.cpu.allowed().unwrap_or(f64::INFINITY),
            engines: if let Accelerator::Iaa(engines) = self.accelerator { engines } else { 1 },
            ..bytes.path()
        }
    }
}

/// Returns the cells that each answer a question of their own.
pub(super) fn named() -> Vec<Plan> {
    use Accelerator::{Iaa, Qat};
    use Corpus::{Binaries, Compressed, GuestRam, Images, Memcached, Mixed, Ones, Sequence, Text};
    let [slow, gigabit, two, ten, twenty_five, forty, unlimited] = Network::ALL;
    let plan = Plan::new;
    let mut plans: Vec<Plan> = Network::ALL.iter().map(|network| plan(Mixed, *network, 2)).collect();
    plans.extend([gigabit, two, ten, unlimited].map(|network| plan(Text, network, 2)));
    plans.extend([gigabit, ten].map(|network| plan(Binaries, network, 2)));
    plans.extend([slow, gigabit, two, ten].map(|network| plan(GuestRam, network, 2)));
    plans.extend([gigabit, forty].map(|network| plan(Compressed, network, 2)));
    plans.extend([plan(Images, gigabit, 2), plan(Memcached, two, 2), plan(Ones, ten, 2), plan(Sequence, two, 2)]);
    plans.extend([plan(Mixed, gigabit, 1), plan(Mixed, ten, 4), plan(GuestRam, twenty_five, 8)]);
    let cpu = |cpu, plan: Plan| Plan { cpu, ..plan };
    plans.extend([
        cpu(Cpu::Allowed(1.0), plan(Mixed, gigabit, 2)),
        cpu(Cpu::Allowed(0.5), plan(Mixed, gigabit, 2)),
        cpu(Cpu::Allowed(1.0), plan(Text, two, 4)),
        cpu(Cpu::Allowed(0.5), plan(GuestRam, slow, 2)),
        cpu(Cpu::Allowed(1.0), plan(Mixed, ten, 2)),
        cpu(Cpu::OneCore, plan(Mixed, gigabit, 2)),
        cpu(Cpu::OneCore, plan(GuestRam, two, 2)),
        cpu(Cpu::OneCore, plan(GuestRam, gigabit, 2)),
        cpu(Cpu::OneCore, plan(Images, gigabit, 2)),
        cpu(Cpu::OneCore, plan(Text, gigabit, 2)),
        cpu(Cpu::OneCore, plan(Memcached, gigabit, 2)),
        cpu(Cpu::OneCore, plan(Mixed, unlimited, 2)),
    ]);
    let with = |accelerator, plan: Plan| Plan { accelerator, ..plan };
    plans.extend([
        with(Iaa(8), plan(Mixed, ten, 2)),
        with(Iaa(8), plan(Mixed, twenty_five, 4)),
        with(Iaa(1), plan(Text, ten, 4)),
        cpu(Cpu::Allowed(0.5), with(Iaa(8), plan(GuestRam, two, 2))),
        with(Qat, plan(Mixed, gigabit, 2)),
        with(Qat, plan(Mixed, ten, 4)),
    ]);
    plans.extend([
        Plan { then: Some(gigabit), ..plan(Mixed, ten, 2) },
        Plan { then: Some(ten), ..plan(Text, gigabit, 2) },
    ]);
    plans
}

/// Returns the product of all settings, including the selected cells.
pub(super) fn all() -> Vec<Plan> {
    let mut plans = named();
    for corpus in Corpus::ALL {
        for network in Network::ALL {
            for channels in [1, 2, 4] {
                for cpu in [Cpu::Enough, Cpu::Allowed(1.0), Cpu::Allowed(0.5), Cpu::OneCore] {
                    for accelerator in [Accelerator::None, Accelerator::Iaa(8), Accelerator::Iaa(1), Accelerator::Qat] {
                        let plan = Plan { cpu, accelerator, ..Plan::new(corpus, network, channels) };
                        if !plans.contains(&plan) {
                            plans.push(plan);
                        }
                    }
                }
            }
        }
    }
    plans
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use sterna_codec::MethodChoice;

    use super::*;

    #[test]
    fn cells_have_names_of_their_own_and_each_question_has_its_cells() {
        let (named, all) = (named(), all());
        let names: HashSet<String> = all.iter().map(Plan::name).collect();
        assert_eq!(names.len(), all.len());
        assert!((30..=50).contains(&named.len()) && all.len() > 2500, "{} {}", named.len(), all.len());
        for corpus in Corpus::ALL {
            assert!(named.iter().any(|plan| plan.corpus == corpus), "{}", corpus.name());
        }
        for network in Network::ALL {
            assert!(named.iter().any(|plan| plan.network == network), "{}", network.name());
        }
        let count = |of: &dyn Fn(&Plan) -> bool| named.iter().filter(|plan| of(plan)).count();
        assert!(count(&|plan| plan.cpu != Cpu::Enough) >= 5);
        assert!(count(&|plan| plan.accelerator != Accelerator::None) >= 5);
        assert!(count(&|plan| plan.then.is_some()) == 2);
    }

    #[test]
    fn a_path_is_what_the_cell_says() {
        let bytes = Bytes { read: 0.2, written: 0.3, received: 0.25, placed: 0.05, ..Bytes::default() };
        let plan = Plan {
            then: Some(Network(10 * GIGABIT)),
            cpu: Cpu::Allowed(0.5),
            accelerator: Accelerator::Iaa(8),
            ..Plan::new(Corpus::Mixed, Network(GIGABIT), 2)
        };
        assert_eq!(plan.name(), "virtual: mixed, 1 Gbit/s, then 10 Gbit/s × 2, 0.5 CPUs allowed, IAA");
        let path = plan.path(&bytes);
        assert_eq!((path.channels, path.allowed, path.engines), (2, 0.5, 8));
        assert!((path.rate - 0.1177).abs() < 1e-4, "{}", path.rate);
        let (from, rate) = path.change.unwrap();
        assert!(from == plan.batches() / 2 && (rate / path.rate - 10.0).abs() < 1e-9);
        assert_eq!((path.read, path.write, path.receive, path.place), (0.2, 0.3, 0.25, 0.05));
        assert!(Network::UNLIMITED.rate().is_infinite());
    }

    #[test]
    fn ways_of_accelerators_need_them() {
        let encoding = |text: &str| text.parse::<MethodChoice>().unwrap().encodings().next().unwrap();
        let has = |accelerator: Accelerator| {
            ["zstd", "deflate by iaa", "deflate by qat"].map(|text| accelerator.has(encoding(text)))
        };
        assert_eq!(has(Accelerator::None), [true, false, false]);
        assert_eq!(has(Accelerator::Iaa(1)), [true, true, false]);
        assert_eq!(has(Accelerator::Qat), [true, false, true]);
    }
}
