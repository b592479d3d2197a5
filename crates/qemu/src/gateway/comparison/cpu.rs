//! Compares the vCPUs of two machines: their number, topology, and features as the guest sees them.
//!
//! A guest that loses a feature dies of an invalid instruction, while its QEMU runs on. QEMU does not compare features.

use std::collections::{BTreeMap, BTreeSet};

use sterna_wire::description::Description;
use sterna_wire::text::cleaned;

use super::difference::{Difference, listed};

/// The name of the difference that only `--force-cpu` allows.
pub(super) const FEATURES: &str = "cpu.features";

/// Properties of a vCPU that are no features, and that the guest sees.
pub(super) const IDENTITY: &[&str] = &["vendor", "family", "model", "stepping"];
/// As [`IDENTITY`], numbers of which more is better.
pub(super) const SIZES: &[&str] = &["level", "xlevel", "phys-bits"];
/// The rate of a vCPU's time-stamp counter under KVM, in Hz; 0 under TCG.
pub(super) const TSC_FREQUENCY: &str = "tsc-frequency";

/// Flags of a vCPU that are no features, and that a running guest does not see (QEMU's target/i386/cpu.c, `x86_cpu_properties`). Those whose
/// names begin with `x-` are not either.
const UNSEEN: &[&str] = &[
    "check",
    "enforce",
    "fill-mtrr-mask",
    "full-cpuid-auto-level",
    "host-cache-info",
    "host-phys-bits",
    "hotpluggable",
    "hotplugged",
    "hv-enforce-cpuid",
    "hv-passthrough",
    "kvm-no-smi-migration",
    "kvm-pv-enforce-cpuid",
    "migratable",
    "pmu",
    "realized",
    "start-powered-off",
    "xen-vapic",
];

/// Flags that the guest sees, but not as features that it may use.
const SETTINGS: &[&str] =
    &["cpuid-0xb", "kvm", "l3-cache", "legacy-cache", "legacy-multi-node", "tcg-cpuid", "vmware-cpuid-freq"];

/// Features that follow from the topology, which is compared by itself. QEMU before 10.0 adds them only when the guest executes CPUID: the
/// guest sees the same.
const DERIVED: &[&str] = &["cmp-legacy", "ht"];
/// Their CPUID bits.
const DERIVED_BITS: &[(&str, u64)] = &[("1.0.EDX", 1 << 28), ("80000001.0.ECX", 1 << 1)];

/// Further names that QEMU has for features.
const ALIASES: &[&str] = &["ffxsr", "i64", "pclmuldq", "sse3", "xd"];

/// Returns whether a flag of this name may matter to the guest.
pub(super) fn is_feature(name: &str) -> bool {
    !ALIASES.contains(&name) && !UNSEEN.contains(&name) && !name.starts_with("x-")
}

/// The vCPUs of a machine, by QEMU's index: their places in the topology.
type Places<'a> = BTreeMap<u32, &'a str>;

/// Compares the facts of the family `cpu`.
pub(super) fn compare(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    let (here, there) = (places(source), places(destination));
    if here.keys().ne(there.keys()) {
        let only = |side: &str, of: &Places<'_>, other: &Places<'_>| {
            let missing: Vec<_> = of.keys().filter(|index| !other.contains_key(index)).map(u32::to_string).collect();
            if missing.is_empty() {
                String::new()
            } else {
                format!("; only the {side} has number {}", listed(&missing))
            }
        };
        found.push(Difference::refusal(
            "cpu.count",
            format!(
                "the source has {} vCPUs, the destination {}{}{}: give both the same -smp, and plug in the same vCPUs",
                here.len(),
                there.len(),
                only("source", &here, &there),
                only("destination", &there, &here)
            ),
        ));
    }
    topology(source, destination, found);
    // Most vCPUs are as the first, so that most machines have one pair.
    let pairs: BTreeMap<_, _> = here
        .keys()
        .filter(|index| there.contains_key(index))
        .filter_map(|index| {
            Some(((described(source, &here, *index)?, described(destination, &there, *index)?), *index))
        })
        .rev()
        .collect();
    let several = pairs.len() > 1;
    for ((ours, theirs), index) in pairs {
        let which = if several { format!("vCPU {index}") } else { "the vCPU".to_owned() };
        vcpu(&which, &Vcpu { of: source, index: ours }, &Vcpu { of: destination, index: theirs }, found);
    }
}

fn places(description: &Description) -> Places<'_> {
    let facts = description.facts.range("cpu.".to_owned().."cpu/".to_owned());
    facts.filter_map(|(name, place)| Some((name.strip_prefix("cpu.")?.parse().ok()?, place.as_str()))).collect()
}

/// Returns the index of the vCPU whose facts are those of the vCPU `index`; none if there are none.
fn described(description: &Description, places: &Places<'_>, index: u32) -> Option<u32> {
    let first = *places.keys().next()?;
    [index, first].into_iter().find(|index| description.facts.contains_key(&format!("cpu.{index}:on")))
}

fn topology(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    let (here, there) = (places(source), places(destination));
    let mut different = Vec::new();
    for (name, ours) in source.facts.range("cpu.smp:".to_owned().."cpu.smp;".to_owned()) {
        // Another release may not know all levels. The number of vCPUs changes by hotplug.
        let theirs = destination.facts.get(name).filter(|theirs| *theirs != ours && name != "cpu.smp:cpus");
        if let Some(theirs) = theirs {
            let level = name.trim_start_matches("cpu.smp:");
            different.push(format!("{level}: {} at the source, {} at the destination", cleaned(ours), cleaned(theirs)));
        }
    }
    if different.is_empty() {
        let levels = |place: &str| -> BTreeMap<String, String> {
            let levels = place.split(' ').filter_map(|level| level.split_once('='));
            levels.map(|(name, number)| (name.to_owned(), number.to_owned())).collect()
        };
        for (index, ours) in &here {
            let Some(theirs) = there.get(index) else { continue };
            let (ours, theirs) = (levels(ours), levels(theirs));
            if ours.iter().any(|(level, number)| theirs.get(level).is_some_and(|other| other != number)) {
                let words = |place: &BTreeMap<String, String>| {
                    cleaned(
                        &place.iter().map(|(level, number)| format!("{level} {number}")).collect::<Vec<_>>().join(", "),
                    )
                };
                different.push(format!(
                    "vCPU {index}: {} at the source, {} at the destination",
                    words(&ours),
                    words(&theirs)
                ));
            }
        }
    }
    if !different.is_empty() {
        let text =
            format!("the topology of the vCPUs differs ({}): give both the same -smp and -numa", listed(&different));
        found.push(Difference::refusal("cpu.topology", text));
    }
}

/// A vCPU in a description.
struct Vcpu<'a> {
    of: &'a Description,
    index: u32,
}

impl<'a> Vcpu<'a> {
    fn fact(&self, what: &str) -> Option<&'a str> {
        self.of.facts.get(&format!("cpu.{}:{what}", self.index)).map(String::as_str)
    }

    /// Returns QEMU's names of the flags that are on, or off.
    fn flags(&self, what: &str) -> BTreeSet<String> {
        // Some have a second name with `_`, or `.`.
        let names = self.fact(what).unwrap_or_default().split(' ').filter(|name| !name.is_empty());
        let names = names.filter(|name| is_feature(name));
        let names = names.map(|name| name.replace(['_', '.'], "-"));
        names.filter(|name| !DERIVED.contains(&name.as_str())).collect()
    }

    /// Returns the CPUID bits by leaf, subleaf and register.
    fn words(&self) -> BTreeMap<&'a str, u64> {
        let words = self.fact("words").unwrap_or_default().split(' ').filter_map(|word| word.split_once('='));
        let derived = |word: &str| DERIVED_BITS.iter().find(|(of, _)| *of == word).map_or(0, |(_, bits)| *bits);
        words.filter_map(|(word, bits)| Some((word, u64::from_str_radix(bits, 16).ok()? & !derived(word)))).collect()
    }
}

/// Features that one vCPU has and another one lacks.
struct Lacking {
    names: Vec<String>,
    /// Bits of CPUID, those of the names among them.
    words: Vec<(String, u64)>,
}

impl Lacking {
    fn of(has: &Vcpu<'_>, lacks: &Vcpu<'_>) -> Self {
        let (on, also) = (has.flags("on"), lacks.flags("on"));
        let off: BTreeSet<String> = lacks.flags("off");
        let other = lacks.words();
        let words: Vec<_> =
            has.words().into_iter().map(|(word, bits)| (word, bits & !other.get(word).unwrap_or(&0))).collect();
        let words: Vec<_> =
            words.into_iter().filter(|(_, bits)| *bits != 0).map(|(word, bits)| (word.to_owned(), bits)).collect();
        let names = on.difference(&also).filter(|name| !SETTINGS.contains(&name.as_str()));
        // A name that the other QEMU does not know may be a new name for what it always did, unless bits are missing.
        let names = names.filter(|name| off.contains(*name) || !words.is_empty());
        Self { names: names.map(|name| cleaned(name)).collect(), words }
    }

    fn is_empty(&self) -> bool {
        self.names.is_empty() && self.words.is_empty()
    }

    fn text(&self) -> String {
        let bits: u32 = self.words.iter().map(|(_, bits)| bits.count_ones()).sum();
        let mut text = listed(&self.names);
        // QEMU has no name for some bits.
        if bits as usize > self.names.len() {
            let words = self.words.iter().map(|(word, bits)| format!("CPUID {} {bits:#x}", cleaned(word)));
            let words = listed(&words.collect::<Vec<_>>());
            text = if text.is_empty() { words } else { format!("{text}; in bits: {words}") };
        }
        text
    }
}

fn vcpu(which: &str, here: &Vcpu<'_>, there: &Vcpu<'_>, found: &mut Vec<Difference>) {
    let missing = Lacking::of(here, there);
    if !missing.is_empty() {
        found.push(Difference::refusal(
            FEATURES,
            format!(
                "{which} has features at the source that it lacks at the destination: {}; the guest would be lost at the first use of one, \
                 while its QEMU runs on: start the destination's QEMU with the source's -cpu, on a host and with an accelerator that have \
                 these features",
                missing.text()
            ),
        ));
    }
    let further = Lacking::of(there, here);
    if !further.is_empty() {
        found.push(Difference::warning(
            "cpu.more-features",
            format!(
                "{which} has further features at the destination: {}; the guest runs, and can only go back if nothing in it uses them",
                further.text()
            ),
        ));
    }
    let (on, off) = (here.flags("on"), here.flags("off"));
    let (on_there, off_there) = (there.flags("on"), there.flags("off"));
    let switched: Vec<_> = SETTINGS
        .iter()
        .map(|name| (*name).to_owned())
        .filter(|name| on.contains(name) && off_there.contains(name) || off.contains(name) && on_there.contains(name))
        .collect();
    if !switched.is_empty() {
        let text =
            format!("{which} has other settings at the destination: {}; give both the same -cpu", listed(&switched));
        found.push(Difference::warning("cpu.settings", text));
    }
    identity(which, here, there, found);
    clock(which, here, there, found);
}

/// KVM scales the counter where the CPU can do that. What it need not scale is within KVM's own tolerance of 250 in a million.
fn clock(which: &str, here: &Vcpu<'_>, there: &Vcpu<'_>, found: &mut Vec<Difference>) {
    let rate = |of: &Vcpu<'_>| of.fact(TSC_FREQUENCY)?.parse::<u64>().ok().filter(|rate| *rate > 0);
    let (Some(ours), Some(theirs)) = (rate(here), rate(there)) else { return };
    if ours.abs_diff(theirs) > ours / 4000 {
        let text = format!(
            "{which} has a time-stamp counter of {ours} Hz at the source, {theirs} Hz at the destination: a host that cannot scale the counter \
             (tsc_scaling in /proc/cpuinfo of AMD; Intel since Skylake servers) lets the guest's clock run wrongly, or refuses the guest"
        );
        found.push(Difference::warning("cpu.tsc-frequency", text));
    }
}

fn identity(which: &str, here: &Vcpu<'_>, there: &Vcpu<'_>, found: &mut Vec<Difference>) {
    let mut other = Vec::new();
    for what in IDENTITY.iter().chain(SIZES) {
        let (Some(ours), Some(theirs)) = (here.fact(what), there.fact(what)) else { continue };
        if ours == theirs {
            continue;
        }
        let values = format!("{what} {} at the source, {} at the destination", cleaned(ours), cleaned(theirs));
        let smaller =
            ours.parse::<u64>().ok().zip(theirs.parse::<u64>().ok()).is_some_and(|(ours, theirs)| theirs < ours);
        match *what {
            "vendor" => found.push(Difference::refusal(
                "cpu.vendor",
                format!(
                    "{which} is of another vendor ({values}): system calls and errata differ; start the destination's QEMU with the \
                     source's -cpu, or the same vendor= in it"
                ),
            )),
            "phys-bits" if smaller => found.push(Difference::refusal(
                "cpu.phys-bits",
                format!(
                    "{which} has shorter physical addresses at the destination ({values}): give both the same phys-bits= in -cpu"
                ),
            )),
            _ => other.push(values),
        }
    }
    if !other.is_empty() {
        let text = format!(
            "{which} is another model ({}): a guest that looks again, for instance when a vCPU is plugged in, sees another CPU; give both \
             the same -cpu",
            listed(&other)
        );
        found.push(Difference::warning("cpu.model", text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(facts: &[(&str, &str)]) -> Description {
        let facts = facts.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Description { families: ["cpu".to_owned()].into(), facts: facts.collect() }
    }

    fn compared(source: &[(&str, &str)], destination: &[(&str, &str)]) -> Vec<(String, bool, String)> {
        let mut found = Vec::new();
        compare(&of(source), &of(destination), &mut found);
        found.into_iter().map(|one| (one.name, one.refuses, one.text)).collect()
    }

    fn vcpu(on: &'static str, off: &'static str, words: &'static str) -> [(&'static str, &'static str); 4] {
        [("cpu.0", ""), ("cpu.0:on", on), ("cpu.0:off", off), ("cpu.0:words", words)]
    }

    #[test]
    fn a_feature_that_is_missing_is_a_refusal_and_one_more_is_a_warning() {
        let rich = vcpu("avx2 sse4.1 sse4-1 sse4_1", "hle", "1.0.ECX=80000 7.0.EBX=20");
        let poor = vcpu("sse4.1 sse4-1 sse4_1", "avx2 hle", "1.0.ECX=80000");
        let lost = compared(&rich, &poor);
        assert!(
            matches!(&lost[..], [(name, true, text)] if name == FEATURES && text.contains("destination: avx2;")),
            "{lost:?}"
        );
        let gained = compared(&poor, &rich);
        assert!(
            matches!(&gained[..], [(name, false, text)] if name == "cpu.more-features" && text.contains(": avx2;")),
            "{gained:?}"
        );
    }

    #[test]
    fn flags_that_are_no_features_and_names_that_only_one_release_knows_are_no_refusals() {
        let source = vcpu("hotplugged realized migratable x-new check zero-fcs-fds", "kvm tcg-cpuid", "1.0.ECX=1");
        let destination = vcpu("realized kvm", "hotplugged migratable check x-new tcg-cpuid", "1.0.ECX=1");
        let found = compared(&source, &destination);
        assert!(
            matches!(&found[..], [(name, false, text)] if name == "cpu.settings" && text.contains(": kvm;")),
            "{found:?}"
        );
        // The other release lacks the bit of that name.
        let source = vcpu("zero-fcs-fds", "", "7.0.EBX=2000");
        let found = compared(&source, &vcpu("", "", ""));
        assert!(
            matches!(&found[..], [(_, true, text)] if text.contains("zero-fcs-fds") && !text.contains("CPUID")),
            "{found:?}"
        );
        // A feature without a CPUID bit, which both know.
        let found = compared(&vcpu("rdctl-no", "", ""), &vcpu("", "rdctl-no", ""));
        assert!(matches!(&found[..], [(name, true, _)] if name == FEATURES), "{found:?}");
    }

    #[test]
    fn features_that_follow_from_the_topology_are_not_compared() {
        let newer = vcpu("ht cmp-legacy cmp_legacy", "", "1.0.EDX=10000001 80000001.0.ECX=2");
        assert_eq!(compared(&newer, &vcpu("", "ht cmp-legacy cmp_legacy", "1.0.EDX=1")), []);
    }

    #[test]
    fn bits_without_a_name_are_refused_by_leaf_and_register() {
        let found = compared(&vcpu("", "", "80000021.0.EAX=6"), &vcpu("", "", "80000021.0.EAX=2"));
        assert!(matches!(&found[..], [(_, true, text)] if text.contains("CPUID 80000021.0.EAX 0x4")), "{found:?}");
    }

    #[test]
    fn each_vcpu_that_differs_from_the_first_is_compared() {
        let like_first = [("cpu.0", ""), ("cpu.1", ""), ("cpu.0:on", "avx2"), ("cpu.0:off", "")];
        let weak_second = [&like_first[..], &[("cpu.1:on", ""), ("cpu.1:off", "avx2")]].concat();
        assert_eq!(compared(&like_first, &like_first), []);
        let found = compared(&like_first, &weak_second);
        assert!(matches!(&found[..], [(_, true, text)] if text.starts_with("vCPU 1 has features")), "{found:?}");
        assert_eq!(compared(&weak_second, &weak_second), []);
    }

    #[test]
    fn other_vendors_and_shorter_addresses_are_refusals_and_other_models_a_warning() {
        let identity = |vendor: &'static str, model: &'static str, bits: &'static str| {
            [
                ("cpu.0", ""),
                ("cpu.0:on", ""),
                ("cpu.0:vendor", vendor),
                ("cpu.0:model", model),
                ("cpu.0:phys-bits", bits),
            ]
        };
        let source = identity("GenuineIntel", "6", "40");
        let names = |other: &[(&str, &str)]| {
            compared(&source, other).into_iter().map(|(name, refuses, _)| (name, refuses)).collect::<Vec<_>>()
        };
        assert_eq!(names(&identity("AuthenticAMD", "6", "40")), [("cpu.vendor".to_owned(), true)]);
        assert_eq!(names(&identity("GenuineIntel", "7", "40")), [("cpu.model".to_owned(), false)]);
        assert_eq!(names(&identity("GenuineIntel", "6", "39")), [("cpu.phys-bits".to_owned(), true)]);
        assert_eq!(names(&identity("GenuineIntel", "6", "41")), [("cpu.model".to_owned(), false)]);
    }

    #[test]
    fn another_rate_of_the_time_stamp_counter_is_a_warning() {
        let at = |rate: &'static str| [("cpu.0", ""), ("cpu.0:on", ""), ("cpu.0:tsc-frequency", rate)];
        let source = at("2000000000");
        for (other, differs) in [("2000400000", false), ("2001000000", true), ("0", false)] {
            let found = compared(&source, &at(other));
            let expected: &[(&str, bool)] = if differs { &[("cpu.tsc-frequency", false)] } else { &[] };
            assert!(
                found.iter().map(|(name, refuses, _)| (name.as_str(), *refuses)).eq(expected.iter().copied()),
                "{found:?}"
            );
        }
    }

    #[test]
    fn numbers_and_places_of_vcpus_are_compared_by_what_both_releases_know() {
        let one = [("cpu.0", "core-id=0 socket-id=0"), ("cpu.smp:sockets", "1"), ("cpu.smp:cpus", "1")];
        let newer = [
            ("cpu.0", "core-id=0 module-id=0 socket-id=0"),
            ("cpu.smp:sockets", "1"),
            ("cpu.smp:modules", "1"),
            ("cpu.smp:cpus", "2"),
        ];
        assert_eq!(compared(&one, &newer), []);
        let two = [("cpu.0", "core-id=0 socket-id=1"), ("cpu.3", ""), ("cpu.smp:sockets", "2")];
        let found = compared(&one, &two);
        assert!(
            matches!(&found[..], [(count, true, text), (topology, true, _)]
            if count == "cpu.count" && text.contains("only the destination has number 3") && topology == "cpu.topology"),
            "{found:?}"
        );
        let moved = compared(&one[..1], &two[..1]);
        assert!(
            matches!(&moved[..], [(_, true, text)] if text.contains("vCPU 0: core-id 0, socket-id 0 at the source")),
            "{moved:?}"
        );
    }
}
