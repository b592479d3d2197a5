//! Memory devices: the guest finds a DIMM at its address. Their blocks and lengths are compared as RAM; QEMU compares nothing else of them.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sterna_wire::description::Description;
use sterna_wire::text::cleaned;

use super::difference::Difference;
use super::facts::Facts;
use crate::qmp::{Qmp, QmpError};

/// What the guest or its firmware has been shown of a memory device. A virtio-mem's `size` changes while the guest runs, and moves with it.
const SHOWN: &[&str] = &["size", "max-size", "block-size", "node", "slot"];

/// Adds each memory device by its address.
pub(super) fn describe(qmp: &Qmp, facts: &mut Facts) -> Result<(), QmpError> {
    let all = qmp.execute("query-memory-devices", json!({}))?;
    for device in all.as_array().into_iter().flatten() {
        let (kind, data) = (device["type"].as_str().unwrap_or_default(), &device["data"]);
        let Some(address) = ["addr", "memaddr"].iter().find_map(|key| data[*key].as_u64()) else { continue };
        let shown = SHOWN.iter().filter(|name| kind != "virtio-mem" || **name != "size");
        let shown = shown
            .filter_map(|name| Some(format!("{name} {}", Some(&data[*name]).filter(|value| **value != Value::Null)?)));
        let text: Vec<String> = std::iter::once(kind.to_owned()).chain(shown).collect();
        facts.insert(format!("memory.{address:#x}"), cleaned(&text.join(", ")));
    }
    Ok(())
}

/// Compares the memory devices of two machines.
pub(super) fn compare(source: &Description, destination: &Description, found: &mut Vec<Difference>) {
    let devices = |of: &Description| -> BTreeMap<String, String> {
        let facts = of.facts.range("memory.".to_owned().."memory/".to_owned());
        facts.map(|(name, value)| (name.clone(), cleaned(value))).collect()
    };
    let (here, there) = (devices(source), devices(destination));
    let names: std::collections::BTreeSet<&String> = here.keys().chain(there.keys()).collect();
    for name in names {
        let (ours, theirs) = (here.get(name), there.get(name));
        if ours == theirs {
            continue;
        }
        let words =
            |device: Option<&String>| device.map_or_else(|| "none".to_owned(), |device| format!("one ({device})"));
        let text = format!(
            "memory devices at the guest's address {}: {} at the source, {} at the destination: give both the same, with the same addr=, slot= \
             and node=",
            cleaned(name.trim_start_matches("memory.")),
            words(ours),
            words(theirs)
        );
        found.push(Difference::refusal(name.as_str(), text));
    }
}
