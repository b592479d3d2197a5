//! The whole product as on hardware: devices found in sysfs, their files opened and mapped, and the real `ENQCMD` and
//! `MOVDIR64B` executed, which trap and are handed to the model. A process of its own, as the handlers of signals are those of
//! all its threads.
#![cfg(all(feature = "model", target_arch = "x86_64"))]

#[path = "offload/support/mod.rs"]
mod support;

use sterna_idxd::{Directories, Instructions, Opening};
use sterna_idxd_model::{DeviceConfig, Mode, Model, ModelConfig, QueueConfig, trap};
use sterna_offload::{Kind, Offload, Settings, StartError};
use support::operations::all_operations;

#[test]
fn devices_named_on_the_command_line_are_found_opened_and_do_all_operations_by_real_instructions() {
    trap::install().expect("the instructions trap on every x86-64 processor");
    // One shared queue and one dedicated one, and an IAA.
    let dedicated = QueueConfig { name: "wq0.1".into(), mode: Mode::Dedicated, size: 8, ..QueueConfig::default() };
    let mut dsa = DeviceConfig::default();
    dsa.queues.push(dedicated);
    let config = ModelConfig { devices: vec![dsa, DeviceConfig::iaa()], ..ModelConfig::dsa() };
    let model = Model::start(config).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let tree = model.write_tree(directory.path()).unwrap();

    let mut settings = Settings::default();
    settings.patience = std::time::Duration::from_secs(300);
    settings.directories = Directories { sysfs: tree.sysfs, dev: tree.dev.clone() };
    // SAFETY: the handlers were installed above, and stay; the device files of the tree are empty.
    let instructions = unsafe { Instructions::trapped() };
    settings.opening = Opening { instructions, deadline: settings.patience, ..Opening::default() };

    let error = Offload::start(&"dsa:/dev/dsa/wq7.7".parse().unwrap(), &settings).unwrap_err();
    let StartError::Missing { why, .. } = &error else { panic!("{error}") };
    assert!(why.contains("wq0.0") && why.contains("wq0.1"), "the error names what there is: {why}");

    let one = format!("dsa:{}", tree.dev.join("dsa/wq0.1").display());
    for (choice, kinds) in [("auto", 2), ("dsa,iaa", 2), ("dsa", 1), (&one, 1)] {
        let before = trap::trapped();
        let offload = Offload::start(&choice.parse().unwrap(), &settings).unwrap();
        all_operations(&offload, 2);
        let report = offload.report();
        assert!(report.taken_out.is_empty(), "{report:?}");
        let mut engines: Vec<_> = report.operations.iter().flat_map(|of| &of.engines).map(|of| of.engine).collect();
        engines.retain(|engine| *engine != Kind::Cpu);
        engines.sort_unstable();
        engines.dedup();
        assert_eq!(engines.len(), kinds, "{choice}: {}", offload.summary());
        let after = trap::trapped();
        assert!(after.movdir64b > before.movdir64b);
        assert_eq!(after.enqcmd > before.enqcmd, choice != one, "{choice}");
        offload.shutdown();
    }
    // One that does not open is not used, and that is said; asked for by name it is an error.
    std::fs::remove_file(tree.dev.join("dsa/wq0.1")).unwrap();
    let half = Offload::start(&"dsa".parse().unwrap(), &settings).unwrap();
    let (used, not_used) = half.summary().split_once("not used:").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    assert!(used.contains("dsa0/wq0.0") && not_used.contains("dsa0/wq0.1"), "{}", half.summary());
    all_operations(&half, 1);
    assert!(Offload::start(&one.parse().unwrap(), &settings).unwrap_err().to_string().contains("wq0.1"));
    assert_eq!((model.counters().overflows, model.counters().software_errors), (0, 0));
}
