//! The product on its own way to a device, with the model in the device's place: queues found in a tree of sysfs, device files
//! mapped, `ENQCMD` and `MOVDIR64B` executed, which trap where the CPU has none.
#![cfg(all(feature = "model", target_arch = "x86_64"))]

mod support;

use sterna_idxd::{Directories, Instructions, Opening, Way, WorkQueue, discover};
use sterna_idxd_model::{DeviceConfig, Mode, Model, ModelConfig, QueueConfig, trap};
use sterna_offload::{Kind, NEVER, Offload, Operation, Settings};
use support::{Memory, PAGE, crc32c};

#[test]
fn pages_go_through_the_real_instructions_and_come_out_right() {
    if let Err(error) = trap::install() {
        eprintln!("skipped: {error}");
        return;
    }
    let mut device = DeviceConfig::default();
    let like = device.queues[0].clone();
    let dedicated = QueueConfig { name: "wq0.1".into(), mode: Mode::Dedicated, threshold: 0, ..like.clone() };
    device.queues = vec![like, dedicated];
    let model = Model::start(ModelConfig { devices: vec![device], ..ModelConfig::default() }).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let tree = model.write_tree(directory.path()).unwrap();
    let directories = Directories { sysfs: tree.sysfs, dev: tree.dev };
    let found = discover(&directories).unwrap().remove(0).queues;

    for (info, way) in found.into_iter().zip([Way::Enqcmd, Way::Movdir64b]) {
        // SAFETY: the handler is installed, and stays.
        let opening = Opening { instructions: unsafe { Instructions::trapped() }, ..Opening::default() };
        let queue = WorkQueue::open_with(info, &directories, &opening).unwrap();
        assert_eq!(queue.way(), way);
        let most = queue.info().max_batch;
        assert!(most > 1 && queue.max_batch() == Ok(most), "the kernel hides batches, the portal takes them");
        let before = trap::trapped();
        let offload = Offload::over(vec![queue], &Settings::default()).unwrap();
        let memory = Memory::new(32);
        memory.write(3 * PAGE + 17, &[1]);
        let region = memory.region();
        let map = offload.is_zero(&[region.range(0, 32 * PAGE).unwrap()]).unwrap();
        assert_eq!((0..32).filter(|page| !map[*page]).collect::<Vec<_>>(), [3]);
        let channel = offload.channel();
        for page in 0..32 {
            let mut batch = channel.batch(Operation::CopyChecksum);
            batch.push(&region.range(page * PAGE, PAGE).unwrap()).unwrap();
            channel.submit(batch).unwrap().into_id();
            let done = channel.wait(NEVER).unwrap();
            let right = memory.read(page * PAGE, PAGE);
            assert_eq!((done.batch.copy(0), done.batch.checksum(0)), (&right[..], crc32c(&right)));
        }
        let report = offload.report();
        let engines = report.operations.iter().flat_map(|of| &of.engines).filter(|of| of.engine != Kind::Cpu);
        assert_eq!(engines.map(|of| of.items).sum::<u64>(), 64, "{report:?}");
        let after = trap::trapped();
        let trapped = (after.enqcmd - before.enqcmd, after.movdir64b - before.movdir64b);
        assert!(if way == Way::Enqcmd { trapped.0 >= 33 } else { trapped.1 >= 33 }, "{trapped:?}");
    }
}
