//! Intel's `accel-config` checks two things: that the fake sysfs tree of the model looks like the kernel's, and that
//! administrators can load the output of `sterna accel plan`.
//!
//! Regular files represent attributes, so nothing can be enabled. The tests compute the kernel's answer to each write,
//! after the store functions of its `drivers/dma/idxd/sysfs.c`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use sterna_idxd::{DeviceInfo, Directories, Mode, QueueType, discover};
use sterna_idxd_model::{DeviceConfig, Kind, Mode as ModelMode, Model, ModelConfig, QueueConfig};
use sterna_qemu_lab::{AccelConfig, Configured, Tools, skip_if_unavailable};

/// A model's tree on disk, and the tool that sees it.
struct Host {
    config: ModelConfig,
    directories: Directories,
    tool: AccelConfig,
    scratch: tempfile::TempDir,
}

impl Host {
    /// Returns `None` if the tool cannot run here.
    fn new(devices: Vec<DeviceConfig>) -> Option<Host> {
        let tools = skip_if_unavailable(Tools::locate())?;
        let scratch = tempfile::tempdir().unwrap();
        let config = ModelConfig { devices, ..ModelConfig::default() };
        let tree = Model::manual(config.clone()).unwrap().write_tree(scratch.path()).unwrap();
        let tool = skip_if_unavailable(AccelConfig::new(&tools, &tree.sysfs))?;
        Some(Host { config, directories: Directories { sysfs: tree.sysfs, dev: tree.dev }, tool, scratch })
    }

    fn discovered(&self) -> Vec<DeviceInfo> {
        let devices = discover(&self.directories).unwrap();
        for info in &devices {
            assert!(info.invalid_attributes.is_empty(), "{:?}", info.invalid_attributes);
        }
        devices
    }

    fn accel_plan(&self, words: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.args(["accel", "plan", "--vms", "20"]).args(words).env("STERNA_IDXD_SYSFS", &self.directories.sysfs);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the plan's file and content.
    fn plan(&self) -> (PathBuf, Value) {
        let file = self.scratch.path().join("plan.json");
        self.accel_plan(&["--json", file.to_str().unwrap()]);
        let plan = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        (file, plan)
    }

    /// Does what `accel-config disable-device` does: every queue is as if never used, and no engine is in a group.
    fn disable(&self) {
        for info in self.discovered() {
            let device = self.directories.sysfs.join(&info.device.name);
            let spare = info.queues.iter().find(|queue| queue.queue_type == Some(QueueType::None)).unwrap();
            for queue in info.queues.iter().filter(|queue| queue.name != spare.name) {
                for attribute in fs::read_dir(device.join(&spare.name)).unwrap() {
                    let attribute = attribute.unwrap();
                    fs::copy(attribute.path(), device.join(&queue.name).join(attribute.file_name())).unwrap();
                }
            }
            for engine in &info.engines {
                fs::write(device.join(&engine.name).join("group_id"), "-1\n").unwrap();
            }
            fs::write(device.join("state"), "disabled\n").unwrap();
        }
    }
}

fn queue(name: &str, mode: ModelMode, size: u32) -> QueueConfig {
    QueueConfig { name: name.into(), mode, size, ..QueueConfig::default() }
}

/// Returns devices without a default value that a reader could guess.
fn dsa_devices() -> Vec<DeviceConfig> {
    let bulk = QueueConfig {
        threshold: 30,
        priority: 5,
        max_batch_size: 128,
        label: "bulk".into(),
        ..queue("wq0.0", ModelMode::Shared, 32)
    };
    let alone = QueueConfig {
        priority: 15,
        group_id: 2,
        block_on_fault: true,
        max_transfer_size: 1 << 20,
        label: "alone".into(),
        ..queue("wq0.3", ModelMode::Dedicated, 17)
    };
    let quiet = QueueConfig { ats_disable: true, max_batch_size: 64, ..queue("wq2.5", ModelMode::Shared, 100) };
    vec![
        DeviceConfig { engine_groups: vec![0, 0, 2, 0], queues: vec![bulk, alone], ..DeviceConfig::default() },
        DeviceConfig {
            name: "dsa2".into(),
            version: 0x200,
            numa_node: 1,
            engines: 2,
            max_work_queues_size: 100,
            max_batch_size: 512,
            max_transfer_size: 1 << 30,
            event_log: true,
            queues: vec![quiet],
            ..DeviceConfig::default()
        },
    ]
}

fn iaa_device() -> DeviceConfig {
    let wait = QueueConfig { block_on_fault: true, threshold: 60, ..queue("wq3.0", ModelMode::Shared, 64) };
    DeviceConfig { name: "iax3".into(), numa_node: 1, queues: vec![wait], ..DeviceConfig::iaa() }
}

fn all_devices() -> Vec<DeviceConfig> {
    let mut devices = dsa_devices();
    devices.push(iaa_device());
    devices
}

/// Checks that every field of `expected` is in `found`.
#[track_caller]
fn has(found: &Value, expected: &Value) {
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&found[name], value, "{name} of {}", found["dev"]);
    }
}

fn array<'a>(parent: &'a Value, name: &str) -> &'a [Value] {
    parent[name].as_array().map_or(&[], Vec::as_slice)
}

/// Returns a queue of the configuration as the tool prints it.
fn listed(device: &DeviceConfig, queue: &QueueConfig) -> Value {
    let threshold = if queue.threshold == 0 { queue.size } else { queue.threshold };
    let mut expected = json!({
        "dev": queue.name,
        "mode": if queue.mode == ModelMode::Shared { "shared" } else { "dedicated" },
        "size": queue.size,
        "group_id": queue.group_id,
        "priority": queue.priority,
        "block_on_fault": u32::from(queue.block_on_fault),
        "max_transfer_size": queue.max_transfer_size,
        "type": queue.owner,
        "name": queue.label,
        "driver_name": queue.driver_name,
        "ats_disable": u32::from(queue.ats_disable),
        "state": "enabled",
    });
    if queue.mode == ModelMode::Shared {
        expected["threshold"] = json!(threshold);
    }
    if device.kind == Kind::Dsa {
        expected["max_batch_size"] = json!(queue.max_batch_size);
    }
    expected
}

#[test]
fn accel_config_lists_every_device_of_the_model_as_it_was_configured() {
    let Some(host) = Host::new(all_devices()) else { return };

    let list: Value = serde_json::from_str(&host.tool.run(["list", "-i"]).unwrap().output).unwrap();

    let list = list.as_array().unwrap();
    assert_eq!(list.len(), host.config.devices.len());
    for (found, device) in list.iter().zip(&host.config.devices) {
        let number = &device.name[3..];
        has(
            found,
            &json!({
                "dev": device.name,
                "version": format!("{:#x}", device.version),
                "numa_node": device.numa_node,
                "max_engines": device.engines,
                "work_queue_size": device.max_work_queues_size,
                "max_transfer_size": device.max_transfer_size,
                "max_work_queues": 8,
                "max_groups": 4,
                "state": "enabled",
                "configurable": 1,
                "pasid_enabled": 1,
            }),
        );
        if device.kind == Kind::Dsa {
            assert_eq!(found["max_batch_size"], device.max_batch_size);
        }
        let groups = array(found, "groups");
        assert_eq!(groups.len(), 4);
        for (id, group) in (0..).zip(groups) {
            assert_eq!(group["dev"], format!("group{number}.{id}"));
            let expected: Vec<&QueueConfig> = device.queues.iter().filter(|queue| queue.group_id == id).collect();
            let queues = array(group, "grouped_workqueues");
            assert_eq!(queues.len(), expected.len(), "{group}");
            for (found, queue) in queues.iter().zip(expected) {
                has(found, &listed(device, queue));
            }
            let of_engine = |engine: u32| device.engine_groups.get(engine as usize).copied().unwrap_or(0);
            let engines = (0..device.engines).filter(|&engine| of_engine(engine) == id);
            let engines: Vec<Value> =
                engines.map(|engine| json!({"dev": format!("engine{number}.{engine}"), "group_id": id})).collect();
            assert_eq!(array(group, "grouped_engines"), engines, "{group}");
        }
        let spare: Vec<String> = (0..8).map(|index| format!("wq{number}.{index}")).collect();
        let spare: Vec<&String> =
            spare.iter().filter(|name| device.queues.iter().all(|queue| queue.name != **name)).collect();
        let others = array(found, "ungrouped workqueues");
        assert_eq!(others.iter().map(|queue| queue["dev"].as_str().unwrap()).collect::<Vec<_>>(), spare);
        for queue in others {
            has(queue, &json!({"size": 0, "type": "none", "state": "disabled", "name": ""}));
        }
    }
}

/// The kernel's state of a device while it is being configured.
struct Kernel<'a> {
    info: &'a DeviceInfo,
    attributes: BTreeMap<String, String>,
}

impl<'a> Kernel<'a> {
    fn new(info: &'a DeviceInfo) -> Kernel<'a> {
        Kernel { info, attributes: BTreeMap::new() }
    }

    fn number(&self, queue: &str, attribute: &str) -> u64 {
        self.attributes.get(&format!("{queue}/{attribute}")).map_or(0, |text| text.parse().unwrap())
    }

    /// Writes an attribute by the rules of the driver's store functions, for a device and queues that are disabled.
    fn store(&mut self, member: &str, attribute: &str, text: &str) {
        let device = &self.info.device;
        let line = format!("{}/{member}/{attribute} = {text:?}", device.name);
        let number = || text.parse::<u64>().unwrap_or_else(|_| panic!("{line}: no number"));
        let mut kept = text.to_owned();
        let check = |holds: bool, why: &str| assert!(holds, "{line}: {why}");
        match attribute {
            "group_id" => check(number() < device.max_groups.unwrap().into(), "there is no such group"),
            "size" => {
                let others = self.info.queues.iter().map(|queue| queue.name.as_str()).filter(|name| *name != member);
                let claimed: u64 = others.map(|name| self.number(name, "size")).sum();
                check(claimed + number() <= device.max_queue_entries.unwrap().into(), "more entries than there are");
            }
            "threshold" => {
                check((1..=self.number(member, "size")).contains(&number()), "the size must be there first");
                let mode = self.attributes.get(&format!("{member}/mode"));
                check(mode.is_none_or(|mode| mode == "shared"), "only shared queues have one");
            }
            "priority" => check(number() <= 15, "too high"),
            "block_on_fault" | "ats_disable" => check(number() <= 1, "a switch"),
            "mode" => check(text == "shared" || text == "dedicated", "no mode"),
            "type" => {
                check(["none", "kernel", "user"].contains(&text), "no type");
                // Another type clears the name.
                if self.attributes.insert(format!("{member}/type"), kept.clone()).is_none_or(|before| before != text) {
                    self.attributes.remove(&format!("{member}/name"));
                }
            }
            "name" | "driver_name" => check((1..=128).contains(&text.len()), "a name"),
            "max_transfer_size" => {
                kept = number().next_power_of_two().to_string();
                check(number() > 0 && number().next_power_of_two() <= device.max_transfer.unwrap(), "too large");
            }
            "max_batch_size" => {
                kept = number().next_power_of_two().to_string();
                let most = device.max_batch.map_or(0, u64::from);
                check(number() > 0 && number().next_power_of_two() <= most, "too large, or not there (IAA)");
            }
            _ => panic!("{line}: nothing that is configured"),
        }
        self.attributes.insert(format!("{member}/{attribute}"), kept);
    }
}

/// Checks that the kernel would have accepted every write, and would now show the content of the files.
fn the_kernel_agrees(host: &Host, devices: &[DeviceInfo], runs: &[Configured]) {
    let mut kernels: BTreeMap<&str, Kernel> =
        devices.iter().map(|info| (info.device.name.as_str(), Kernel::new(info))).collect();
    for (path, text) in runs.iter().flat_map(|run| &run.written) {
        let [device, member, attribute] = path.split('/').collect::<Vec<_>>()[..] else { panic!("{path}") };
        kernels.get_mut(device).unwrap().store(member, attribute, text);
    }
    for (device, kernel) in kernels {
        for (path, text) in kernel.attributes {
            let file = fs::read_to_string(host.directories.sysfs.join(device).join(&path)).unwrap();
            assert_eq!(file.trim_end(), text, "{device}/{path}");
        }
    }
}

/// Checks that discovery reads the plan's configuration and nothing else.
fn reads_what_the_plan_says(devices: &[DeviceInfo], plan: &Value) {
    let plan = plan.as_array().unwrap();
    assert_eq!(plan.len(), devices.len());
    for (info, planned) in devices.iter().zip(plan) {
        assert_eq!(planned["dev"], info.device.name);
        let mut left: Vec<&str> = info.queues.iter().map(|queue| queue.name.as_str()).collect();
        let mut engines = 0;
        for group in array(planned, "groups") {
            for wanted in array(group, "grouped_workqueues") {
                left.retain(|name| *name != wanted["dev"]);
                let queue = info.queues.iter().find(|queue| wanted["dev"] == queue.name).unwrap();
                let mode = if wanted["mode"] == "shared" { Mode::Shared } else { Mode::Dedicated };
                assert_eq!(queue.mode, Some(mode));
                assert_eq!(wanted["size"], queue.size);
                assert_eq!(wanted["group_id"], queue.group.unwrap());
                assert_eq!(group["dev"], format!("group{}.{}", info.device.number, queue.group.unwrap()));
                assert_eq!(wanted["priority"], queue.priority.unwrap());
                assert_eq!(wanted["block_on_fault"], u32::from(queue.block_on_fault));
                assert_eq!(wanted["max_transfer_size"], queue.max_transfer);
                // Without batches the tool sets nothing, and the driver reports one descriptor.
                assert_eq!(wanted["max_batch_size"].as_u64().unwrap_or(1), u64::from(queue.max_batch));
                assert_eq!(wanted["type"], "user");
                assert_eq!(queue.queue_type, Some(QueueType::User));
                assert_eq!(wanted["driver_name"], queue.driver.as_deref().unwrap());
                assert_eq!(wanted["name"], queue.label.as_deref().unwrap());
                assert_eq!(wanted["threshold"], queue.threshold.unwrap());
                assert!(!queue.ats_disable && !queue.prs_disable, "{queue:?}");
            }
            for wanted in array(group, "grouped_engines") {
                let engine = info.engines.iter().find(|engine| wanted["dev"] == engine.name).unwrap();
                assert_eq!(wanted["group_id"], engine.group.unwrap());
                engines += 1;
            }
        }
        assert_eq!(left.len() + 2, info.queues.len(), "two queues are planned");
        for name in left {
            let queue = info.queues.iter().find(|queue| queue.name == name).unwrap();
            assert_eq!((queue.size, &queue.queue_type, queue.group), (0, &Some(QueueType::None), None));
        }
        assert_eq!(engines, info.engines.len(), "no engine is idle");
    }
}

/// Changes the tree to what the kernel would show, device files included, after the plan's devices and queues were
/// enabled.
fn enable(directories: &Directories, plan: &Value) {
    for device in plan.as_array().unwrap() {
        let name = device["dev"].as_str().unwrap();
        let sysfs = directories.sysfs.join(name);
        fs::write(sysfs.join("state"), "enabled\n").unwrap();
        for queue in array(device, "groups").iter().flat_map(|group| array(group, "grouped_workqueues")) {
            let queue = queue["dev"].as_str().unwrap();
            fs::write(sysfs.join(queue).join("state"), "enabled\n").unwrap();
            fs::write(directories.dev.join(&name[..3]).join(queue), "").unwrap();
        }
    }
}

fn usable(devices: &[DeviceInfo]) -> Vec<String> {
    let queues = devices.iter().flat_map(|info| &info.queues).filter(|queue| queue.unusable.is_none());
    queues.map(|queue| format!("{}: {}", queue.full_name(), queue.label.as_deref().unwrap_or_default())).collect()
}

const PLANNED: [&str; 6] = [
    "dsa0/wq0.0: sterna-bulk",
    "dsa0/wq0.1: sterna-switchover",
    "dsa2/wq2.0: sterna-bulk",
    "dsa2/wq2.1: sterna-switchover",
    "iax3/wq3.0: sterna-bulk",
    "iax3/wq3.1: sterna-switchover",
];

#[test]
fn accel_config_loads_the_file_of_a_plan_and_the_driver_reads_it_back() {
    let Some(host) = Host::new(all_devices()) else { return };
    host.disable();
    let before = host.discovered();
    assert!(usable(&before).is_empty(), "all of it is disabled");
    let (file, plan) = host.plan();

    let run = host.tool.run(["load-config", "-c", file.to_str().unwrap()]).unwrap();

    let after = host.discovered();
    reads_what_the_plan_says(&after, &plan);
    the_kernel_agrees(&host, &before, &[run]);
    enable(&host.directories, &plan);
    assert_eq!(usable(&host.discovered()), PLANNED);
}

#[test]
fn accel_config_accepts_the_command_lines_of_a_plan_and_they_have_the_same_effect_as_its_file() {
    let Some(host) = Host::new(all_devices()) else { return };
    host.disable();
    let before = host.discovered();
    let (_, plan) = host.plan();
    let text = host.accel_plan(&[]);

    let mut runs = Vec::new();
    let mut enabled = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        assert_eq!(words.next(), Some("accel-config"), "{line}");
        let words: Vec<&str> = words.collect();
        match words[0] {
            "config-engine" | "config-wq" => runs.push(host.tool.run(&words).unwrap()),
            // There is no driver to bind it to.
            "enable-device" | "enable-wq" => enabled.push(words[1].to_owned()),
            _ => panic!("{line}"),
        }
    }

    let after = host.discovered();
    reads_what_the_plan_says(&after, &plan);
    the_kernel_agrees(&host, &before, &runs);
    let mut expected = Vec::new();
    for info in &after {
        expected.push(info.device.name.clone());
        let planned = info.queues.iter().filter(|queue| queue.size > 0);
        expected.extend(planned.map(|queue| queue.full_name()));
    }
    assert_eq!(enabled, expected);
}

#[test]
fn an_enabled_device_is_not_changed_by_a_plan_as_its_note_says() {
    let Some(host) = Host::new(all_devices()) else { return };
    let before = host.discovered();
    let (file, _) = host.plan();
    assert!(host.accel_plan(&[]).contains("# A device that is enabled has to be disabled first"));

    let run = host.tool.run(["load-config", "-c", file.to_str().unwrap()]).unwrap();

    assert_eq!(run.written, []);
    assert_eq!(host.discovered(), before);
}

#[test]
fn without_the_driver_name_of_newer_kernels_a_plan_can_be_loaded() {
    let Some(host) = Host::new(all_devices()) else { return };
    host.disable();
    for info in host.discovered() {
        for queue in info.queues {
            // Linux 6.1, which Debian 12 has, does not show it.
            fs::remove_file(host.directories.sysfs.join(&queue.name).join("driver_name")).unwrap();
        }
    }
    let (file, plan) = host.plan();

    host.tool.run(["load-config", "-c", file.to_str().unwrap()]).unwrap();

    enable(&host.directories, &plan);
    assert_eq!(usable(&host.discovered()), PLANNED);
}

/// `accel-config`'s own example files have commas behind the last element, which its parser accepts.
#[test]
fn the_model_reads_the_commas_and_comments_that_accel_config_loads() {
    let Some(host) = Host::new(all_devices()) else { return };
    host.disable();
    let (file, plan) = host.plan();
    let plain = ModelConfig::from_json(&plan.to_string()).unwrap();
    let text = serde_json::to_string_pretty(&plan).unwrap().replace("\n}", ",\n}").replace("\n  }", ",\n  }");
    let loose = format!("/* as an editor left it */ {} // the end\n", text.replace("\n]", ",\n]"));
    assert!(serde_json::from_str::<Value>(&loose).is_err(), "no JSON: {loose}");
    fs::write(&file, &loose).unwrap();

    host.tool.run(["load-config", "-c", file.to_str().unwrap()]).unwrap();

    enable(&host.directories, &plan);
    assert_eq!(usable(&host.discovered()), PLANNED);
    assert_eq!(ModelConfig::from_json(&loose).unwrap(), plain);
}

/// Returns a saved configuration; fields that are missing in the file have their defaults.
fn saved(device: &DeviceConfig) -> DeviceConfig {
    let of_engine = |engine: u32| device.engine_groups.get(engine as usize).copied().unwrap_or(0);
    let mut queues = device.queues.clone();
    queues.sort_by_key(|queue| queue.group_id);
    for queue in &mut queues {
        queue.threshold = match queue.mode {
            ModelMode::Shared if queue.threshold == 0 => queue.size,
            ModelMode::Shared => queue.threshold,
            ModelMode::Dedicated => 0,
        };
    }
    DeviceConfig {
        name: device.name.clone(),
        kind: device.kind,
        engines: device.engines,
        engine_groups: (0..device.engines).map(of_engine).collect(),
        queues,
        ..DeviceConfig::default()
    }
}

fn saves_and_reads_back(devices: Vec<DeviceConfig>) {
    let Some(host) = Host::new(devices) else { return };
    let file = host.scratch.path().join("saved.conf");

    host.tool.run(["save-config", "-s", file.to_str().unwrap()]).unwrap();

    let read = ModelConfig::from_json(&fs::read_to_string(&file).unwrap()).unwrap();
    let expected: Vec<DeviceConfig> = host.config.devices.iter().map(saved).collect();
    assert_eq!(read.devices, expected);
    Model::manual(read).expect("the saved file describes a model");
}

#[test]
fn a_configuration_of_dsa_devices_saved_by_accel_config_describes_the_same_model() {
    saves_and_reads_back(dsa_devices());
}

#[test]
fn a_configuration_of_an_iaa_device_saved_by_accel_config_describes_the_same_model() {
    saves_and_reads_back(vec![iaa_device()]);
}
