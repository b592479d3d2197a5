//! What a guest under KVM sees of its host, and no feature shows: with `-cpu host`, QEMU hands the host's CPU through, with what its microcode
//! and kernel make of it.

use serde_json::json;
use sterna_wire::description::Description;
use sterna_wire::text::cleaned;

use super::difference::Difference;
use super::facts::Facts;
use crate::qmp::{Qmp, QmpError};

/// Identifies the host's present boot (random(4)): the same in all containers of a host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const KERNEL: &str = "/proc/sys/kernel/osrelease";
/// Lines of /proc/cpuinfo that identify a model of CPU.
const CPU: &[&str] = &["vendor_id", "cpu family", "model", "model name", "stepping", "microcode"];

/// Adds the facts about the host on which QEMU and this process are.
pub(super) fn describe(qmp: &Qmp, facts: &mut Facts) -> Result<(), QmpError> {
    let mut add = |name: &str, value: &str| drop(facts.insert(format!("host.{name}"), cleaned(value)));
    if let Ok(boot) = std::fs::read_to_string(BOOT_ID) {
        add("boot", boot.trim());
    }
    let kvm = qmp.execute("query-kvm", json!({}))?["enabled"] == true;
    let cpus = qmp.execute("query-cpus-fast", json!({}))?;
    let kind = match cpus[0]["qom-path"].as_str() {
        Some(path) => qmp.execute("qom-get", json!({ "path": path, "property": "type" }))?,
        None => serde_json::Value::Null,
    };
    // As QEMU names the model `host`: `host-x86_64-cpu`.
    if kvm && kind.as_str().is_some_and(|kind| kind.starts_with("host-")) {
        if let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") {
            add("cpu", &cpu(&text));
        }
        if let Ok(release) = std::fs::read_to_string(KERNEL) {
            add("kernel", release.trim());
        }
    }
    Ok(())
}

/// Returns what identifies the first CPU in /proc/cpuinfo.
fn cpu(info: &str) -> String {
    let first = info.split("\n\n").next().unwrap_or_default();
    let lines = first.lines().filter_map(|line| line.split_once(':')).map(|(name, value)| (name.trim(), value.trim()));
    let model = lines.filter(|(name, _)| CPU.contains(name));
    model.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
}

/// Compares the hosts of two guests that see their host's CPU.
pub(super) fn compare(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    for (what, words) in [("cpu", "CPUs"), ("kernel", "kernels")] {
        let name = format!("host.{what}");
        if let (Some(ours), Some(theirs)) = (source.facts.get(&name), destination.facts.get(&name))
            && ours != theirs
        {
            let text = format!(
                "with -cpu host the guest sees its host's CPU, and the {words} of the hosts differ ({} at the source, {} at the destination): \
                 features are compared, other behaviour is not; a named CPU model avoids that",
                cleaned(ours),
                cleaned(theirs)
            );
            found.push(Difference::warning(name, text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_known_by_its_model_and_microcode() {
        let info = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmicrocode\t: 0x2b\nflags\t: fpu\n\nprocessor\t: 1\nmicrocode\t: 0x1\n";
        assert_eq!(cpu(info), "vendor_id GenuineIntel, cpu family 6, microcode 0x2b");
    }

    #[test]
    fn other_hosts_are_a_warning_where_the_guest_sees_them() {
        let of = |facts: &[(&str, &str)]| Description {
            facts: facts.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
            ..Description::default()
        };
        let compared = |ours: &Description, theirs: &Description| {
            let mut found = Vec::new();
            compare(ours, theirs, &mut found);
            found.into_iter().map(|one| (one.name, one.refuses)).collect::<Vec<_>>()
        };
        let one = of(&[("host.boot", "1"), ("host.cpu", "a"), ("host.kernel", "6.1")]);
        assert_eq!(
            compared(&one, &of(&[("host.boot", "2"), ("host.cpu", "a"), ("host.kernel", "6.2")])),
            [("host.kernel".to_owned(), false)]
        );
        assert_eq!(compared(&one, &of(&[("host.boot", "2")])), []);
    }
}
