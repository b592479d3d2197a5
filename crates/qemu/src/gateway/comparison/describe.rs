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
//! | `machine` | the machine type |
//! | `net.user` | how many network back ends of the type `user` there are: QEMU saves their state, and that of no other |
//! | `uuid` | the machine's UUID |

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_wire::description::Description;
use sterna_wire::limits::MAX_CONTROL_MESSAGE;
use sterna_wire::text::cleaned;

use super::tree::{self, Device};
use crate::discover;
use crate::gateway::qemu;
use crate::qmp::{Qmp, QmpError};

/// Properties of a vCPU that are no features, and that the guest sees.
pub(super) const IDENTITY: &[&str] = &["vendor", "family", "model", "stepping"];
/// As [`IDENTITY`], numbers of which more is better.
pub(super) const SIZES: &[&str] = &["level", "xlevel", "phys-bits"];
/// Properties of a device on which the length or the meaning of its saved state depends.
const DEVICE_NUMBERS: &[&str] = &["vectors", "num-queues", "num_queues", "max_ports"];
/// QEMU's value for a number that nobody has set.
const UNSET: u64 = u32::MAX as u64;
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
        Ok(())
    })?;
    described.family("cpu", |facts| cpus(qmp, facts))?;
    described.family("ram", |facts| ram(qmp, facts))?;
    described.family("uuid", |facts| uuid(qmp, facts))?;
    described.family("net", |facts| networks(qmp, facts))?;
    if let Some(devices) = tree {
        described.family("device", |facts| {
            devices.iter().for_each(|device| of_device(device, facts));
            Ok(())
        })?;
        described.family("disk", |facts| disks(qmp, &devices, facts))?;
    }
    let description = described.0;
    description.check().map_err(|error| format!("this machine cannot be described: {error}"))?;
    // Its message must be readable at the other side.
    let bytes = serde_json::to_string(&description).map_or(usize::MAX, |text| text.len());
    if bytes > MAX_CONTROL_MESSAGE / 2 {
        return Err(format!("this machine cannot be described: that takes {bytes} bytes"));
    }
    Ok(description)
}

type Facts = BTreeMap<String, String>;

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

fn networks(qmp: &Qmp, facts: &mut Facts) -> Result<(), QmpError> {
    // ` \ n0: index=0,type=user,net=10.0.2.0,restrict=off`
    let users = qmp.human("info network")?.lines().filter(|line| line.contains(",type=user,")).count();
    facts.insert("net.user".into(), users.to_string());
    Ok(())
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
    facts.insert(name, device.kind.clone());
}

fn disks(qmp: &Qmp, devices: &[Device], facts: &mut Facts) -> Result<(), QmpError> {
    let drives = qmp.execute("query-block", json!({}))?;
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
            facts.insert(format!("{name}:read-only"), (inserted["ro"] == true).to_string());
            if let Some(format) = inserted["drv"].as_str() {
                facts.insert(format!("{name}:format"), cleaned(format));
            }
        } else {
            facts.insert(format!("{name}:medium"), "none".into());
            facts.insert(name, cleaned(drive));
        }
    }
    Ok(())
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
    for property in IDENTITY.iter().chain(SIZES) {
        match properties.get(*property) {
            Some(Value::String(text)) => facts.insert(format!("{name}:{property}"), cleaned(text)),
            Some(Value::Number(number)) => facts.insert(format!("{name}:{property}"), number.to_string()),
            _ => None,
        };
    }
    Ok(())
}

/// Returns a vCPU's flags, and those of [`IDENTITY`] and [`SIZES`].
fn properties(qmp: &Qmp, path: &str) -> Result<BTreeMap<String, Value>, QmpError> {
    let wanted = |name: &str, kind: &str| kind == "bool" || IDENTITY.contains(&name) || SIZES.contains(&name);
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
    let mut names: Vec<String> = listed
        .filter(|property| wanted(&text(property, "name"), &text(property, "type")))
        .map(|property| text(property, "name"))
        // The same names with `-`: each takes a command.
        .filter(|name| !name.contains('_'))
        .collect();
    // `vmx` comes before the features that need it.
    names.sort();
    let mut found = BTreeMap::new();
    for name in names {
        if name.starts_with(VMX) && found.get("vmx") == Some(&Value::Bool(false)) {
            continue;
        }
        match qmp.execute("qom-get", json!({ "path": path, "property": name })) {
            Ok(value) => drop(found.insert(name, value)),
            // A property that can only be set.
            Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}
