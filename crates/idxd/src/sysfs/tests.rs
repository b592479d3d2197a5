//! Discovery on made-up trees: as the kernel shows them, with missing files, and with invalid values.

use std::fs;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::flags::Operation;

/// A host with one DSA and one IAA device, all enabled and correct.
struct Tree {
    directory: TempDir,
}

impl Tree {
    fn new() -> Self {
        let tree = Self { directory: TempDir::new().unwrap() };
        fs::create_dir_all(tree.sysfs()).unwrap();
        tree
    }

    /// Makes the tree in the kernel's shape: members below the device and linked beside it.
    fn with_devices() -> Self {
        let tree = Self::new();
        tree.device("dsa0", &DSA);
        tree.member("dsa0", "group0.0", &[("traffic_class_a", "1"), ("traffic_class_b", "-1")]);
        tree.member("dsa0", "engine0.0", &[("group_id", "0")]);
        tree.member("dsa0", "engine0.1", &[("group_id", "-1")]);
        tree.member("dsa0", "wq0.0", &QUEUE);
        tree.member("dsa0", "wq0.1", &QUEUE);
        tree.set("wq0.1/mode", "dedicated");
        tree.device("iax1", &IAA);
        tree.member("iax1", "engine1.0", &[("group_id", "0")]);
        tree.member("iax1", "wq1.0", &QUEUE);
        tree.unset("wq1.0/max_batch_size");
        for node in ["dsa/wq0.0", "dsa/wq0.1", "iax/wq1.0"] {
            let node = tree.directories().dev.join(node);
            fs::create_dir_all(node.parent().unwrap()).unwrap();
            fs::write(node, "").unwrap();
        }
        tree
    }

    fn sysfs(&self) -> PathBuf {
        self.directory.path().join("sys")
    }

    fn directories(&self) -> Directories {
        Directories { sysfs: self.sysfs(), dev: self.directory.path().join("dev") }
    }

    fn device(&self, name: &str, attributes: &[(&str, &str)]) {
        fs::create_dir(self.sysfs().join(name)).unwrap();
        attributes.iter().for_each(|(attribute, value)| self.set(&format!("{name}/{attribute}"), value));
    }

    fn member(&self, device: &str, name: &str, attributes: &[(&str, &str)]) {
        let path = self.sysfs().join(device).join(name);
        fs::create_dir(&path).unwrap();
        std::os::unix::fs::symlink(&path, self.sysfs().join(name)).unwrap();
        attributes.iter().for_each(|(attribute, value)| self.set(&format!("{name}/{attribute}"), value));
    }

    fn set(&self, attribute: &str, value: &str) {
        fs::write(self.sysfs().join(attribute), format!("{value}\n")).unwrap();
    }

    fn unset(&self, attribute: &str) {
        fs::remove_file(self.sysfs().join(attribute)).unwrap();
    }

    fn discover(&self) -> Vec<DeviceInfo> {
        discover(&self.directories()).unwrap()
    }

    fn queue(&self, name: &str) -> QueueInfo {
        self.discover().into_iter().flat_map(|info| info.queues).find(|queue| queue.name == name).unwrap()
    }

    fn verdict(&self) -> Unusable {
        self.queue("wq0.0").unusable.expect("it should not be usable")
    }
}

const DSA: [(&str, &str); 17] = [
    ("version", "0x100"),
    ("numa_node", "1"),
    ("state", "enabled"),
    ("configurable", "1"),
    ("pasid_enabled", "1"),
    ("max_batch_size", "1024"),
    ("max_transfer_size", "2147483648"),
    ("max_work_queues", "8"),
    ("max_work_queues_size", "128"),
    ("max_engines", "4"),
    ("max_groups", "4"),
    ("gen_cap", "0x40915f0107"),
    ("op_cap", "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03ff"),
    ("cmd_status", "0x0"),
    ("event_log_size", "64"),
    ("clients", "0"),
    ("errors", "00000000 00000000 00000000 00000000"),
];

const IAA: [(&str, &str); 6] = [
    ("version", "0x200"),
    ("numa_node", "-1"),
    ("state", "enabled"),
    ("pasid_enabled", "1"),
    ("iaa_cap", "0x101"),
    ("op_cap", "00000000,00000000,00000000,00000000,00000000,0000001c,00000000,00000005"),
];

const QUEUE: [(&str, &str); 16] = [
    ("state", "enabled"),
    ("type", "user"),
    ("driver_name", "user"),
    ("name", "sterna"),
    ("mode", "shared"),
    ("size", "16"),
    ("threshold", "15"),
    ("priority", "10"),
    ("group_id", "0"),
    ("max_batch_size", "128"),
    ("max_transfer_size", "2097152"),
    ("block_on_fault", "0"),
    ("ats_disable", "0"),
    ("prs_disable", "0"),
    ("clients", "0"),
    ("cdev_minor", "0"),
];

#[test]
fn a_host_as_it_should_be() {
    let tree = Tree::with_devices();
    let devices = tree.discover();
    assert_eq!(devices.iter().map(|info| info.device.name.as_str()).collect::<Vec<_>>(), ["dsa0", "iax1"]);
    let dsa = &devices[0];
    assert_eq!(dsa.invalid_attributes, [] as [&str; 0]);
    assert_eq!((dsa.device.kind, dsa.device.version, dsa.device.numa_node), (Kind::Dsa, 0x100, Some(1)));
    assert_eq!((dsa.device.max_batch, dsa.device.max_transfer), (Some(1024), Some(1 << 31)));
    assert_eq!((dsa.device.max_queue_entries, dsa.device.max_engines), (Some(128), Some(4)));
    assert!(dsa.device.capabilities.unwrap().overlapping_copy() && dsa.device.is_first_generation());
    assert!(dsa.device.operations.unwrap().contains(Operation::CopyCrc));
    assert_eq!((dsa.groups[0].traffic_class_a, dsa.groups[0].traffic_class_b), (Some(1), None));
    assert_eq!(dsa.engines.iter().map(|engine| engine.group).collect::<Vec<_>>(), [Some(0), None]);

    let queue = &dsa.queues[0];
    assert_eq!((queue.name.as_str(), queue.full_name().as_str()), ("wq0.0", "dsa0/wq0.0"));
    assert_eq!((queue.mode, queue.size, queue.threshold), (Some(Mode::Shared), 16, Some(15)));
    assert_eq!((queue.max_batch, queue.max_transfer, queue.priority), (128, 2 << 20, Some(10)));
    assert_eq!(queue.unusable, None);
    assert_eq!(queue.remarks, []);
    assert_eq!(dsa.queues[1].mode, Some(Mode::Dedicated));

    let iaa = &devices[1];
    assert_eq!((iaa.device.kind, iaa.device.numa_node), (Kind::Iaa, None));
    // Bit 8: the device builds Huffman tables and headers itself.
    assert_eq!(iaa.device.iaa_capabilities.unwrap().0 >> 8 & 1, 1);
    assert_eq!(iaa.queues[0].max_batch, 1);
    assert_eq!(iaa.queues[0].node, tree.directories().dev.join("iax/wq1.0"));
    assert_eq!(iaa.queues[0].unusable, None);
    assert_eq!(iaa.queues[0].declares(0x40), Some(false));
    assert_eq!(iaa.queues[0].declares(0x42), Some(true));
}

#[test]
fn no_bus_is_an_error_that_says_what_is_missing_and_an_empty_one_is_none() {
    let tree = Tree::new();
    assert_eq!(tree.discover(), []);
    let nowhere = Directories { sysfs: tree.sysfs().join("not there"), ..tree.directories() };
    let error = discover(&nowhere).unwrap_err();
    assert!(matches!(error, DiscoverError::NoBus { .. }));
    assert!(error.to_string().contains("idxd driver"), "{error}");
    let file = Directories { sysfs: tree.directory.path().join("file"), ..tree.directories() };
    fs::write(&file.sysfs, "").unwrap();
    assert!(matches!(discover(&file).unwrap_err(), DiscoverError::Read { .. }));
}

#[test]
fn members_are_found_below_the_device_or_beside_it() {
    for keep_links in [true, false] {
        let tree = Tree::with_devices();
        let member = tree.sysfs().join("wq0.0");
        if keep_links {
            fs::remove_file(&member).unwrap();
            fs::rename(tree.sysfs().join("dsa0/wq0.0"), &member).unwrap();
        } else {
            fs::remove_file(&member).unwrap();
        }
        assert_eq!(tree.queue("wq0.0").size, 16);
    }
}

#[test]
fn names_that_are_not_the_kernels_are_passed_over() {
    let tree = Tree::with_devices();
    for name in [
        "dsa",
        "dsa-1",
        "dsa+1",
        "dsa99999999999",
        "dsa0x",
        "dsa00",
        "iaa3",
        "wq0",
        "wq0.",
        "wq0.x",
        "wq.0",
        "wq+0.0",
        "wq7.0",
        "wq0.00",
        "wq0.256",
    ] {
        fs::create_dir(tree.sysfs().join(name)).unwrap();
    }
    let devices = tree.discover();
    assert_eq!(devices.len(), 2);
    assert_eq!(devices[0].queues.len(), 2);
}

/// Each case: the change, part of the sentence, the commands that help.
#[test]
fn each_reason_has_its_sentence_and_its_lines() {
    // Disabling a queue loses its configuration, so each has all of it; sizes can be changed only with the device disabled.
    let start =
        "accel-config config-wq dsa0/wq0.0 --group-id=0 --mode=shared --type=user --driver-name=user --name=sterna";
    let end = "--threshold=15 --priority=10 --max-transfer-size=2097152 --max-batch-size=128";
    let configure = &*format!("{start} {end}");
    let with_size = &*format!("{start} --wq-size=16 {end}");
    let with_translation = &*format!("{configure} --ats-disable=0");
    let dedicated = &*with_translation.replace("mode=shared", "mode=dedicated").replace(" --threshold=15", "");
    let disable = "accel-config disable-wq dsa0/wq0.0";
    let enable = "accel-config enable-wq dsa0/wq0.0";
    let (disable_device, enable_device) = ("accel-config disable-device dsa0", "accel-config enable-device dsa0");
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a str, &'a [&'a str]);
    let cases: [Case<'_>; 16] = [
        (&[("wq0.0/state", "disabled")], "disabled", &[enable]),
        (&[("dsa0/state", "disabled"), ("wq0.0/state", "disabled")], "device is disabled", &[enable_device, enable]),
        (
            &[
                ("dsa0/state", "disabled"),
                ("wq0.0/state", "disabled"),
                ("engine0.0/group_id", "-1"),
                ("wq0.0/threshold", "0"),
            ],
            "device is disabled",
            &["accel-config config-engine dsa0/engine0.0 --group-id=0", with_size, enable_device, enable],
        ),
        // How entries are divided between queues is the subject of a plan.
        (&[("wq0.0/state", "disabled"), ("wq0.0/size", "0")], "not configured: it has no entries", &[]),
        (&[("wq0.0/ats_disable", "maybe")], "ats_disable in a form that", &[disable, with_translation, enable]),
        (&[("dsa0/pasid_enabled", "yes")], "device's pasid_enabled in a form that", &[]),
        (
            &[("wq0.0/type", "kernel"), ("wq0.0/driver_name", "dmaengine")],
            "belongs to the kernel (driver dmaengine)",
            &[disable, configure, enable],
        ),
        (&[("wq0.0/type", "none"), ("wq0.0/state", "disabled")], "not configured for processes", &[configure, enable]),
        (
            &[
                ("wq0.0/type", "none"),
                ("wq0.0/state", "disabled"),
                ("wq0.0/group_id", "-1"),
                ("engine0.1/group_id", "0"),
            ],
            "not configured for processes",
            &[
                disable_device,
                "accel-config config-engine dsa0/engine0.0 --group-id=0",
                "accel-config config-engine dsa0/engine0.1 --group-id=0",
                with_size,
                enable_device,
                enable,
            ],
        ),
        (&[("wq0.0/driver_name", "mdev")], "\"mdev\"", &[disable, configure, enable]),
        (&[("dsa0/pasid_enabled", "0")], "intel_iommu=on,sm_on", &[]),
        (&[("wq0.0/ats_disable", "1")], "ats_disable is 1", &[disable, with_translation, enable]),
        (
            &[("wq0.0/ats_disable", "1"), ("wq0.0/mode", "dedicated"), ("wq0.0/threshold", "0")],
            "ats_disable is 1",
            &[disable, dedicated, enable],
        ),
        (
            &[("wq0.0/mode", "dedicated"), ("wq0.0/clients", "1")],
            "another process has it open",
            &[disable, configure, enable],
        ),
        (
            &[("engine0.0/group_id", "2")],
            "no group that has an engine",
            &[
                disable,
                disable_device,
                "accel-config config-engine dsa0/engine0.1 --group-id=0",
                with_size,
                enable_device,
                enable,
            ],
        ),
        (&[("wq0.0/mode", "both")], "its mode", &[disable, configure, enable]),
    ];
    for (changes, sentence, lines) in cases {
        let tree = Tree::with_devices();
        changes.iter().for_each(|(attribute, value)| tree.set(attribute, value));
        let verdict = tree.verdict();
        assert!(verdict.reason.to_string().contains(sentence), "{changes:?}: {verdict}");
        assert_eq!(verdict.commands, lines, "{changes:?}");
        assert_eq!(verdict.to_string().contains("other queues"), lines.contains(&disable_device), "{verdict}");
    }
}

#[test]
fn device_files_that_are_missing_or_closed_to_us() {
    let tree = Tree::with_devices();
    let node = tree.directories().dev.join("dsa/wq0.0");
    fs::remove_file(&node).unwrap();
    let verdict = tree.verdict();
    assert_eq!(verdict.reason, Reason::NoNode(node.clone()));
    assert!(verdict.to_string().contains(node.to_str().unwrap()));
    // Root may open anything, whatever its mode; but a file in the place of a directory is an error also for root.
    fs::write(&node, "").unwrap();
    fs::set_permissions(&node, std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
    if !rustix::process::geteuid().is_root() {
        assert_eq!(tree.verdict().reason, Reason::NoPermission(node.clone()));
    }
    assert!(Reason::NoPermission(node).to_string().contains("setfacl"));
}

#[test]
fn batches_that_are_few_or_hidden_are_remarked_upon() {
    let remark = |changes: &[(&str, &str)]| {
        let tree = Tree::with_devices();
        changes.iter().for_each(|(attribute, value)| tree.set(attribute, value));
        let queue = tree.queue("wq0.0");
        assert_eq!(queue.unusable, None);
        queue.remarks.iter().map(ToString::to_string).collect::<Vec<_>>().join("|")
    };
    assert!(remark(&[("wq0.0/max_batch_size", "1")]).contains("no batches"));
    let few = remark(&[("wq0.0/max_batch_size", "32")]);
    assert!(few.contains("--max-batch-size=128") && few.contains("--type=user") && !few.contains("--wq-size"), "{few}");
    assert!(remark(&[("dsa0/op_cap", "0,0,0,0,0,0,1,3f03fd")]).contains("CAP_SYS_RAWIO"));
    assert!(remark(&[("dsa0/version", "0x200"), ("wq0.0/op_config", "0,0,0,0,0,0,1,3f03fd")]).contains("op_config"));
    assert!(remark(&[("wq0.0/block_on_fault", "1")]).contains("--block-on-fault=0"));
}

#[test]
fn what_an_older_kernel_does_not_show_is_not_held_against_it() {
    let tree = Tree::with_devices();
    for attribute in [
        "dsa0/gen_cap",
        "dsa0/op_cap",
        "dsa0/event_log_size",
        "dsa0/numa_node",
        "wq0.0/driver_name",
        "wq0.0/ats_disable",
        "wq0.0/prs_disable",
        "wq0.0/clients",
        "wq0.0/block_on_fault",
        "wq0.0/threshold",
        "wq0.0/max_transfer_size",
    ] {
        tree.unset(attribute);
    }
    let queue = tree.queue("wq0.0");
    assert_eq!(queue.unusable, None);
    assert_eq!((queue.threshold, queue.max_transfer, queue.declares(1)), (None, 1 << 31, None));
    tree.unset("wq0.0/max_batch_size");
    assert_eq!(tree.queue("wq0.0").max_batch, 1, "no batches where none are shown");
}

#[test]
fn what_must_be_known_and_is_not_makes_a_queue_unusable() {
    for (attribute, name) in
        [("wq0.0/mode", "mode"), ("wq0.0/size", "size"), ("wq0.0/type", "type"), ("wq0.0/state", "state")]
    {
        let tree = Tree::with_devices();
        tree.unset(attribute);
        assert_eq!(tree.verdict().reason, Reason::Unknown(name));
    }
    let tree = Tree::with_devices();
    tree.unset("dsa0/state");
    assert_eq!(tree.verdict().reason, Reason::UnknownOfDevice("state"));
}

/// With the device's address translation off, writes are lost silently: a queue whose setting is unknown must not be
/// used.
#[test]
fn what_decides_about_safety_and_makes_no_sense_makes_a_queue_unusable() {
    for kind in ["garbage", "empty", "number", "directory", "loop", "nowhere", "not text", "unreadable"] {
        for (attribute, reason) in [
            ("wq0.0/ats_disable", Reason::Unknown("ats_disable")),
            ("wq0.0/driver_name", Reason::Unknown("driver_name")),
            ("dsa0/pasid_enabled", Reason::UnknownOfDevice("pasid_enabled")),
        ] {
            let tree = Tree::with_devices();
            let path = tree.sysfs().join(attribute);
            fs::remove_file(&path).unwrap();
            match kind {
                // A name may be any text; kernels without one show an empty one.
                "garbage" | "empty" | "number" if attribute.ends_with("driver_name") => continue,
                "garbage" => fs::write(&path, "no\n").unwrap(),
                "empty" => fs::write(&path, "\n").unwrap(),
                "number" => fs::write(&path, "2\n").unwrap(),
                "directory" => fs::create_dir(&path).unwrap(),
                "loop" => std::os::unix::fs::symlink(&path, &path).unwrap(),
                "nowhere" => std::os::unix::fs::symlink("/nowhere/at/all", &path).unwrap(),
                "not text" => fs::write(&path, [0xff, 0xfe, b'\n']).unwrap(),
                _ if rustix::process::geteuid().is_root() => {
                    println!("not as root, who may read everything: an attribute without permission");
                    continue;
                }
                _ => {
                    fs::write(&path, "0\n").unwrap();
                    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
                }
            }
            let verdict = tree.verdict();
            assert_eq!(verdict.reason, reason, "{attribute}: {kind}");
            assert!(verdict.to_string().contains("does not show"), "{verdict}");
        }
    }
}

#[test]
fn more_devices_than_any_host_has_are_left_out_and_counted() {
    let tree = Tree::new();
    for number in 0..300 {
        fs::create_dir(tree.sysfs().join(format!("dsa{number}"))).unwrap();
    }
    let devices = tree.discover();
    assert_eq!(devices.len(), 256);
    assert_eq!(devices[255].device.name, "dsa255", "the first, by number");
    assert_eq!(devices[255].invalid_attributes, ["44 more devices are shown than the 256 that are examined"]);
}

#[test]
fn nonsense_is_remarked_upon_and_not_reckoned_with() {
    let tree = Tree::with_devices();
    for (attribute, value) in [
        ("dsa0/version", "first"),
        ("dsa0/max_transfer_size", "99999999999999999999999999"),
        ("dsa0/max_batch_size", "4294967296"),
        ("dsa0/op_cap", "zz,1"),
        ("dsa0/numa_node", "-7"),
        ("wq0.0/threshold", "100000"),
        ("wq0.0/max_batch_size", "18446744073709551615"),
        ("wq0.0/block_on_fault", "2"),
        ("wq0.0/priority", "0xg"),
    ] {
        tree.set(attribute, value);
    }
    fs::write(tree.sysfs().join("wq0.0/name"), [0xff, 0xfe, b'\n']).unwrap();
    fs::create_dir(tree.sysfs().join("wq0.0/op_config")).unwrap();
    let devices = tree.discover();
    assert_eq!(devices[0].invalid_attributes.len(), 11, "{:#?}", devices[0].invalid_attributes);
    let queue = &devices[0].queues[0];
    assert_eq!((queue.max_batch, queue.threshold, queue.priority, &queue.label), (1, None, None, &None));
    assert_eq!((devices[0].device.version, devices[0].device.max_transfer), (0, None));
    assert_eq!(queue.unusable, None);
}

#[test]
fn attributes_that_are_no_text_files_do_not_block_discovery() {
    let tree = Tree::with_devices();
    for (attribute, kind) in [("dsa0/version", "pipe"), ("wq0.0/size", "directory"), ("wq0.0/mode", "loop")] {
        let path = tree.sysfs().join(attribute);
        fs::remove_file(&path).unwrap();
        match kind {
            // Opening a pipe for reading waits until it is opened for writing.
            "pipe" => rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap(),
            "directory" => fs::create_dir(&path).unwrap(),
            _ => std::os::unix::fs::symlink(&path, &path).unwrap(),
        }
    }
    let info = &tree.discover()[0];
    assert_eq!((info.device.version, info.queues[0].size, info.queues[0].mode), (0, 0, None));
    assert_eq!(info.invalid_attributes.len(), 2, "{:?}", info.invalid_attributes);
}

#[test]
fn a_label_cannot_smuggle_anything_into_a_root_shell() {
    let tree = Tree::with_devices();
    tree.set("wq0.0/name", "x; rm -rf /");
    tree.set("wq0.0/type", "none");
    assert!(tree.verdict().commands.iter().all(|line| !line.contains("rm")));
}

#[test]
fn both_forms_of_operation_sets_that_kernels_have_had() {
    let bitmap = "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03ff";
    let words = "0x1003f03ff 0 0 0";
    let set = OperationSet::parse(bitmap).unwrap();
    assert_eq!(OperationSet::parse(words), Some(set));
    let codes: Vec<u8> = set.codes().collect();
    assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x20]);
    assert_eq!(OperationSet::of(codes), set);
    assert_eq!(OperationSet::parse("80000000,0,0,0,0,0,0,0").unwrap().codes().collect::<Vec<_>>(), [255]);
    for wrong in ["", "x", "1 2 3 4 5", "100000000,0", "1,0,0,0,0,0,0,0,0", "-1", ",", "1,,1", "0x"] {
        assert_eq!(OperationSet::parse(wrong), None, "{wrong:?}");
    }
}

#[test]
fn the_environment_can_name_other_directories() {
    // The variables are not changed here, because other tests run in parallel. Without them the system's directories
    // are used.
    assert_eq!(Directories::system().node(Kind::Iaa, "wq1.0"), Path::new("/dev/iax/wq1.0"));
    assert_eq!(Directories::system().sysfs, Path::new("/sys/bus/dsa/devices"));
}

#[test]
fn a_queue_that_has_only_entries_can_be_set_up() {
    let tree = Tree::with_devices();
    for (attribute, value) in
        [("dsa0/state", "disabled"), ("wq0.0/state", "disabled"), ("wq0.0/type", "none"), ("engine0.0/group_id", "-1")]
    {
        tree.set(attribute, value);
    }
    let lines = tree.verdict().commands;
    assert_eq!(lines.len(), 4);
    assert!(lines[0].contains("config-engine") && lines[3].contains("enable-wq"), "{lines:?}");
    let tree = Tree::with_devices();
    fs::remove_file(tree.directories().dev.join("dsa/wq0.0")).unwrap();
    assert_eq!(tree.verdict().commands, [] as [&str; 0], "what is missing is the device file");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// With any content of the attributes discovery ends, and every number is in its range.
    #[test]
    fn no_content_of_any_attribute_does_harm(
        contents in prop::collection::vec((0..50_usize, prop_oneof![
            "[0-9]{1,30}".prop_map(String::into_bytes),
            "-?0?x?[0-9a-f,]{0,12}".prop_map(String::into_bytes),
            prop::collection::vec(any::<u8>(), 0..40),
        ]), 0..20),
    ) {
        let tree = Tree::with_devices();
        let names: Vec<String> = DSA.iter().map(|(name, _)| format!("dsa0/{name}"))
            .chain(IAA.iter().map(|(name, _)| format!("iax1/{name}")))
            .chain(QUEUE.iter().map(|(name, _)| format!("wq0.0/{name}")))
            .chain(["group0.0/traffic_class_a", "engine0.0/group_id", "wq0.0/op_config"].map(String::from))
            .collect();
        for (index, content) in contents {
            fs::write(tree.sysfs().join(&names[index % names.len()]), content).unwrap();
        }
        for info in tree.discover() {
            for queue in &info.queues {
                prop_assert!(queue.size <= 65_535 && queue.threshold.unwrap_or(0) <= queue.size);
                prop_assert!((1..=1 << 15).contains(&queue.max_batch));
                prop_assert!((1..=1 << 31).contains(&queue.max_transfer));
                prop_assert!(queue.unusable.is_some() || (queue.size > 0 && queue.mode.is_some()));
            }
        }
    }
}
