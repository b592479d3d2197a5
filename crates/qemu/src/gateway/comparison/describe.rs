//! Describes the machine of a QEMU by facts, which are read by QMP.
//!
//! | facts | |
//! |---|---|
//! | `cpu.N` | the place of the vCPU with QEMU's index N in the topology |
//! | `cpu.N:words`, `:on`, `:off`, `:vendor` … | what the guest sees of it: for the first vCPU, and each with other CPUID bits than the first |
//! | `cpu.smp:sockets` … | the topology |
//! | `ram.NAME` | the bytes in use of a RAM block, and those to which it may grow |
//! | `device.PATH`, `device.PATH:vectors` … | a device: its type, and properties on which its saved state depends |
//! | `disk.PATH`, `disk.PATH:bytes` … | the drive of a device, for people, and what is in it |
//! | `disk.PATH:storage`, `disk.PATH:sample` | what identifies its storage, and for a read-only one a checksum of some of it |
//! | `disk.PATH:backing` | how many images it is based on, each of which has facts as a read-only disk has: `disk.PATH:backing-1`, `disk.PATH:backing-1:storage` … |
//! | `host.boot`, `host.cpu`, `host.kernel` | the host: its present boot; what a guest sees of it that has the host's CPU under KVM |
//! | `machine`, `machine.PROPERTY` | the machine type, and properties that change what the guest sees |
//! | `memory.ADDRESS` | a memory device |
//! | `net.user` | how many network back ends of the type `user` there are: QEMU saves their state, and that of no other |
//! | `net.PATH` | the type of the back end of a virtio network device, on which its offloads depend |
//! | `uuid` | the machine's UUID |

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_wire::description::Description;
use sterna_wire::limits::MAX_CONTROL_MESSAGE;
use sterna_wire::text::cleaned;

use super::facts::Facts;
use super::storage::{self, Disk};
use super::tree::{self, Device};
use super::{cpu, host, memory};
use crate::gateway::qemu;
use crate::qmp::{Qmp, QmpError};
use crate::{discover, vcpus};

/// Properties of a machine that change what the guest sees, and that no device shows: the guest's memory map, NVDIMMs, system management mode.
const MACHINE_PROPERTIES: &[&str] = &["max-ram-below-4g", "nvdimm", "smm"];
/// Properties of a device on which the length or the meaning of its saved state depends, or what the guest sees of the device.
const DEVICE_NUMBERS: &[&str] =
    &["vectors", "num-queues", "num_queues", "max_ports", "logical_block_size", "physical_block_size"];
/// As [`DEVICE_NUMBERS`], flags: features of virtio devices, and what a disk is to its guest.
const DEVICE_FLAGS: &[&str] = &[
    "packed",
    "iommu_platform",
    "event_idx",
    "indirect_desc",
    "ctrl_vq",
    "discard",
    "write-zeroes",
    "config-wce",
    "removable",
    "intremap",
];
/// As [`DEVICE_NUMBERS`], texts.
const DEVICE_TEXTS: &[&str] = &["serial", "wwn"];
/// QEMU's value for a number that nobody has set.
const UNSET: u64 = u32::MAX as u64;
/// The type of a virtio network device.
const NETWORK: &str = "virtio-net-device";
/// Beginning of the types of flash memory, whose content is RAM: it moves with the guest, and the destination writes it into its own file.
const FLASH: &str = "cfi.pflash";
/// Maximum number of images below one disk that are compared.
const MAX_BACKING_FILES: usize = 64;
/// Beginning of the names of VMX features, of which QEMU has a hundred.
const VMX: &str = "vmx-";

/// Describes the machine of this QEMU. A family of facts that cannot be read is left out.
///
/// # Errors
/// QEMU does not answer, or the machine is too large to be described.
pub(super) fn describe(qmp: &Qmp) -> Result<Description, String> {
    let mut described = Described::default();
    let tree = match qmp.human("info qtree") {
        Ok(text) => Some(tree::devices(&text)),
        Err(error) => {
            described.left_out("device", error)?;
            None
        }
    };
    described.family("machine", |facts| {
        facts.insert("machine".into(), cleaned(&qemu::machine(qmp, Duration::ZERO).machine_type));
        // The state of memory hotplug has an entry for each slot.
        if let Ok(memory) = qmp.execute("qom-get", json!({ "path": "/machine", "property": "memory" })) {
            for size in ["max-size", "slots"] {
                let number = memory[size].as_u64().map(|number| number.to_string());
                facts.extend(number.map(|number| (format!("machine.memory-{size}"), number)));
            }
        }
        for property in MACHINE_PROPERTIES {
            // Other machine types have none of them.
            if let Ok(value) = qmp.execute("qom-get", json!({ "path": "/machine", "property": property })) {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                facts.insert(format!("machine.{property}"), cleaned(&value));
            }
        }
        Ok(())
    })?;
    described.family("cpu", |facts| cpus(qmp, facts))?;
    described.family("ram", |facts| ram(qmp, facts))?;
    described.family("uuid", |facts| uuid(qmp, facts))?;
    described.family("net", |facts| networks(qmp, tree.as_deref().unwrap_or_default(), facts))?;
    if let Some(devices) = tree {
        described.family("device", |facts| {
            devices.iter().for_each(|device| of_device(device, facts));
            Ok(())
        })?;
        described.family("disk", |facts| disks(qmp, &devices, facts))?;
    }
    described.family("host", |facts| host::describe(qmp, facts))?;
    described.family("memory", |facts| memory::describe(qmp, facts))?;
    let description = described.0;
    description.check().map_err(|error| format!("this machine cannot be described: {error}"))?;
    // Its message must be readable at the other side.
    let bytes = serde_json::to_string(&description).map_or(usize::MAX, |text| text.len());
    if bytes > MAX_CONTROL_MESSAGE / 2 {
        return Err(format!("this machine cannot be described: that takes {bytes} bytes"));
    }
    Ok(description)
}

#[derive(Default)]
struct Described(Description);

impl Described {
    /// Adds the facts of a family, if QEMU reports what they need.
    fn family(&mut self, name: &str, read: impl FnOnce(&mut Facts) -> Result<(), QmpError>) -> Result<(), String> {
        let mut facts = Facts::new();
        match read(&mut facts) {
            Ok(()) => {
                self.0.families.insert(name.to_owned());
                self.0.facts.append(&mut facts);
                Ok(())
            }
            Err(error) => self.left_out(name, error),
        }
    }

    /// A QEMU may lack a command, but not be silent.
    #[allow(clippy::unused_self, reason = "it leaves the family out")]
    fn left_out(&mut self, name: &str, error: QmpError) -> Result<(), String> {
        match error {
            QmpError::Refused { .. } | QmpError::Unexpected { .. } => {
                tracing::warn!(%error, "this QEMU does not report its machine: {name}");
                Ok(())
            }
            error => Err(error.to_string()),
        }
    }
}

fn uuid(qmp: &Qmp, facts: &mut Facts) -> Result<(), QmpError> {
    let answer = qmp.execute("query-uuid", json!({}))?;
    facts.insert("uuid".into(), cleaned(answer["UUID"].as_str().unwrap_or_default()));
    Ok(())
}

fn networks(qmp: &Qmp, devices: &[Device], facts: &mut Facts) -> Result<(), QmpError> {
    let listed = qmp.human("info network")?;
    let back_ends = back_ends(&listed);
    let users = back_ends.iter().filter(|(_, kind)| *kind == "user").count();
    facts.insert("net.user".into(), users.to_string());
    // What the device offers is shown only by `x-query-virtio-status`, at which QEMU 11.1 aborts (qapi-visit-core.c, visit_start_struct).
    for device in devices.iter().filter(|device| device.kind == NETWORK) {
        let name = device.property("netdev").unwrap_or_default();
        let kind = back_ends.iter().find(|(back_end, _)| *back_end == name).map_or("none", |(_, kind)| kind);
        facts.insert(format!("net.{}", device.path), cleaned(kind));
    }
    Ok(())
}

/// Returns the names and types of back ends in the output of `info network`.
fn back_ends(listed: &str) -> Vec<(&str, &str)> {
    // ` \ n0: index=0,type=user,net=10.0.2.0,restrict=off`
    let mut found = Vec::new();
    for line in listed.lines() {
        let Some((name, properties)) = line.trim_start_matches([' ', '\\']).split_once(": ") else { continue };
        let kind = properties.split(',').find_map(|property| property.strip_prefix("type="));
        found.extend(kind.filter(|kind| *kind != "nic").map(|kind| (name, kind)));
    }
    found
}

fn ram(qmp: &Qmp, facts: &mut Facts) -> Result<(), QmpError> {
    let blocks = discover::list(qmp).map_err(|error| match error {
        discover::DiscoverError::Qmp(error) => error,
        other => QmpError::Unexpected { command: "info ramblock".into(), reason: other.to_string() },
    })?;
    for block in blocks {
        facts.insert(format!("ram.{}", cleaned(&block.name)), format!("{} {}", block.used, block.total));
    }
    Ok(())
}

fn of_device(device: &Device, facts: &mut Facts) {
    let name = format!("device.{}", device.path);
    for property in DEVICE_NUMBERS {
        if let Some(number) = device.number(property).filter(|number| *number != UNSET) {
            facts.insert(format!("{name}:{property}"), number.to_string());
        }
    }
    for property in DEVICE_FLAGS {
        if let Some(value) = device.property(property).filter(|value| matches!(*value, "true" | "false" | "on" | "off"))
        {
            facts.insert(format!("{name}:{property}"), value.to_owned());
        }
    }
    for property in DEVICE_TEXTS {
        if let Some(value) = device.shown(property) {
            facts.insert(format!("{name}:{property}"), cleaned(value));
        }
    }
    facts.insert(name, device.kind.clone());
}

fn disks(qmp: &Qmp, devices: &[Device], facts: &mut Facts) -> Result<(), QmpError> {
    let drives = qmp.execute("query-block", json!({}))?;
    let mut inserted_disks = Vec::new();
    for device in devices {
        let Some(drive) = device.property("drive") else { continue };
        // A drive of `-blockdev` has no name of its own, and the device names the node.
        let named = |entry: &&Value| entry["device"] == drive || entry["inserted"]["node-name"] == drive;
        let Some(entry) = drives.as_array().into_iter().flatten().find(named) else { continue };
        let name = format!("disk.{}", device.path);
        let inserted = &entry["inserted"];
        if inserted.is_object() {
            let file = inserted["file"].as_str().unwrap_or_default();
            facts.insert(name.clone(), cleaned(&format!("{drive}, {file}")));
            if let Some(bytes) = inserted["image"]["virtual-size"].as_u64() {
                facts.insert(format!("{name}:bytes"), bytes.to_string());
            }
            let read_only = inserted["ro"] == true;
            facts.insert(format!("{name}:read-only"), read_only.to_string());
            if let Some(format) = inserted["drv"].as_str() {
                facts.insert(format!("{name}:format"), cleaned(format));
            }
            if device.kind.starts_with(FLASH) {
                continue;
            }
            let backing = backing_files(&inserted["image"]);
            facts.insert(format!("{name}:backing"), backing.len().to_string());
            for (number, file) in (1..).zip(backing) {
                let name = format!("{name}:backing-{number}");
                facts.insert(name.clone(), cleaned(file));
                inserted_disks.push(Disk { name, file: file.to_owned(), read_only: true });
            }
            inserted_disks.push(Disk { name, file: file.to_owned(), read_only });
        } else {
            facts.insert(format!("{name}:medium"), "none".into());
            facts.insert(name, cleaned(drive));
        }
    }
    if let (Ok(pid), false) = (vcpus::process_of(qmp), inserted_disks.is_empty()) {
        facts.extend(storage::facts(pid, inserted_disks).into_iter().map(|(name, value)| (name, cleaned(&value))));
    }
    Ok(())
}

/// Returns the names of the files on which an image is based, the nearest first.
fn backing_files(image: &Value) -> Vec<&str> {
    let mut files = Vec::new();
    let mut image = image;
    while let (Some(backing), true) = (image.get("backing-image"), files.len() < MAX_BACKING_FILES) {
        files.push(backing["filename"].as_str().unwrap_or_default());
        image = backing;
    }
    files
}

fn cpus(qmp: &Qmp, facts: &mut Facts) -> Result<(), QmpError> {
    let answer = qmp.execute("query-cpus-fast", json!({}))?;
    let mut first: Option<Value> = None;
    let mut listed: Vec<&Value> = answer.as_array().into_iter().flatten().collect();
    listed.sort_by_key(|cpu| cpu["cpu-index"].as_u64());
    for cpu in listed {
        let (Some(index), Some(path)) = (cpu["cpu-index"].as_u64(), cpu["qom-path"].as_str()) else { continue };
        let place = cpu["props"].as_object().into_iter().flatten();
        let place: Vec<String> = place.map(|(name, value)| format!("{name}={value}")).collect();
        facts.insert(format!("cpu.{index}"), place.join(" "));
        // CPUs that are not x86 have none.
        let words = qmp.execute("qom-get", json!({ "path": path, "property": "feature-words" })).unwrap_or_default();
        if first.as_ref() != Some(&words) {
            features(qmp, path, &format!("cpu.{index}"), &words, facts)?;
        }
        first.get_or_insert(words);
    }
    if let Ok(Value::Object(smp)) = qmp.execute("qom-get", json!({ "path": "/machine", "property": "smp" })) {
        facts.extend(smp.iter().map(|(name, number)| (format!("cpu.smp:{name}"), number.to_string())));
    }
    Ok(())
}

/// Adds what the guest sees of a vCPU.
fn features(qmp: &Qmp, path: &str, name: &str, words: &Value, facts: &mut Facts) -> Result<(), QmpError> {
    let word = |word: &Value| {
        let features = word["features"].as_u64().filter(|features| *features != 0)?;
        let leaf = word["cpuid-input-eax"].as_u64()?;
        let subleaf = word["cpuid-input-ecx"].as_u64().unwrap_or(0);
        Some(format!("{leaf:x}.{subleaf}.{}={features:x}", word["cpuid-register"].as_str()?))
    };
    if let Some(list) = words.as_array() {
        let words: Vec<_> = list.iter().filter_map(word).collect();
        facts.insert(format!("{name}:words"), words.join(" "));
    }
    let properties = properties(qmp, path)?;
    let named = |wanted: bool| {
        let names = properties.iter().filter(|(_, value)| value.as_bool() == Some(wanted));
        names.map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(" ")
    };
    facts.insert(format!("{name}:on"), named(true));
    facts.insert(format!("{name}:off"), named(false));
    for property in cpu::IDENTITY.iter().chain(cpu::SIZES).chain(&[cpu::TSC_FREQUENCY]) {
        match properties.get(*property) {
            Some(Value::String(text)) => facts.insert(format!("{name}:{property}"), cleaned(text)),
            Some(Value::Number(number)) => facts.insert(format!("{name}:{property}"), number.to_string()),
            _ => None,
        };
    }
    Ok(())
}

/// Returns a vCPU's flags, its identity, its sizes ([`cpu::IDENTITY`], [`cpu::SIZES`]) and the rate of its time-stamp counter.
fn properties(qmp: &Qmp, path: &str) -> Result<BTreeMap<String, Value>, QmpError> {
    let numbers = [cpu::IDENTITY, cpu::SIZES, &[cpu::TSC_FREQUENCY]].concat();
    let wanted = |name: &str, kind: &str| numbers.contains(&name) || kind == "bool" && cpu::is_feature(name);
    let text = |property: &Value, key: &str| property[key].as_str().unwrap_or_default().to_owned();
    if qmp.version().at_least(10, 1) {
        // All at once, since 10.1.
        if let Ok(objects) = qmp.execute("qom-list-get", json!({ "paths": [path] })) {
            let all = objects[0]["properties"].as_array().into_iter().flatten();
            let all = all.filter(|property| wanted(&text(property, "name"), &text(property, "type")));
            return Ok(all.map(|property| (text(property, "name"), property["value"].clone())).collect());
        }
    }
    let listed = qmp.execute("qom-list", json!({ "path": path }))?;
    let listed = listed.as_array().into_iter().flatten();
    let names: Vec<String> = listed
        .filter(|property| wanted(&text(property, "name"), &text(property, "type")))
        .map(|property| text(property, "name"))
        // The same names with `-`: each takes a command.
        .filter(|name| !name.contains('_'))
        .collect();
    let (vmx, others): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| name.starts_with(VMX));
    let mut found = get_all(qmp, path, others)?;
    if found.get("vmx") != Some(&Value::Bool(false)) {
        found.append(&mut get_all(qmp, path, vmx)?);
    }
    Ok(found)
}

/// Reads properties of an object. All are asked for at once, as a vCPU has hundreds. Those that can only be set are left out.
fn get_all(qmp: &Qmp, path: &str, names: Vec<String>) -> Result<BTreeMap<String, Value>, QmpError> {
    const COMMAND: &str = "qom-get";
    let limit = qmp.timeout_of(COMMAND);
    let deadline = Instant::now() + limit;
    let ask = |name: String| Ok((qmp.begin(COMMAND, json!({ "path": path, "property": name }))?, name));
    let asked = names.into_iter().map(ask).collect::<Result<Vec<_>, QmpError>>()?;
    let mut found = BTreeMap::new();
    for (mut pending, name) in asked {
        match pending.wait(deadline) {
            Ok(Some(value)) => drop(found.insert(name, value)),
            Ok(None) => {
                return Err(QmpError::Timeout { command: COMMAND.into(), waited: limit, stopped: qmp.stopped() });
            }
            Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_ends_are_read_without_the_devices_that_use_them() {
        let listed = "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\n \\ n0: index=0,type=tap,ifname=t0\n\
                      n1: index=0,type=user,net=10.0.2.0,restrict=off\nhub 0\n \\ hub0port0: #net123: index=0,type=hubport\n";
        assert_eq!(back_ends(listed), [("n0", "tap"), ("n1", "user"), ("hub0port0", "hubport")]);
        assert_eq!(back_ends(""), []);
    }
}
