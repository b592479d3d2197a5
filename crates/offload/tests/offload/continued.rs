//! Parts of one deflate stream, written by devices (of the software model) and by the CPU, in any mix.
#![cfg(feature = "model")]

use crate::support::{Memory, PAGE};
use sterna_idxd_model::{DeviceConfig, Model, ModelConfig};
use sterna_offload::{Accelerators, CallError, Kind, Offload, Operation, PushError, Settings};

const PARTS: usize = 7;

#[test]
fn what_is_continued_is_one_stream_whoever_writes_its_parts() {
    let model = Model::start(ModelConfig { devices: vec![DeviceConfig::iaa()], ..ModelConfig::dsa() }).unwrap();
    let offload =
        Offload::with_queues(sterna_offload::model::queues(&model).unwrap(), &crate::model::patient()).unwrap();
    let cpu = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
    let memory = Memory::new(2 * PARTS);
    // All of it is there: what is not, a device leaves to the CPU.
    memory.write(0, &[0; 2 * PARTS * PAGE]);
    let region = memory.region();
    for short in 0..40 {
        // Other content each time, so that blocks end at other bits.
        let content: Vec<u8> = (0..PARTS * PAGE).map(|at| (at / (3 + short)) as u8).collect();
        memory.write(0, &content);
        let ranges: Vec<_> = (0..PARTS).map(|part| region.range(part * PAGE, PAGE - short).unwrap()).collect();
        let parts = |by: &Offload| -> Vec<Vec<u8>> {
            let (last, others) = ranges.split_last().unwrap();
            let batch = by.call(Operation::Deflate, |batch| {
                others.iter().try_for_each(|range| batch.push_continued(range).map(drop))?;
                batch.push(last).map(drop)
            });
            let batch = batch.unwrap();
            (0..PARTS).map(|item| batch.deflated(item).expect("it shrinks").to_vec()).collect()
        };
        let made = [parts(&offload), parts(&cpu)];
        let stream: Vec<u8> = (0..PARTS).flat_map(|item| made[(item + short) % 2][item].clone()).collect();
        let expected: Vec<u8> = content.chunks(PAGE).flat_map(|page| page[..PAGE - short].to_vec()).collect();
        let to = region.range(PARTS * PAGE, expected.len()).unwrap();
        for by in [&offload, &cpu] {
            let batch = by.call(Operation::Inflate, |batch| {
                batch.push_input(stream.len(), &to)?.copy_from_slice(&stream);
                Ok(())
            });
            assert_eq!(batch.unwrap().placed(0), Some(expected.len()), "{short} bytes less");
            assert!(memory.read(PARTS * PAGE, expected.len()) == expected, "{short} bytes less");
        }
    }
    let report = offload.report();
    let of_cpu = |of: &&sterna_offload::EngineReport| of.engine == Kind::Cpu || !of.fallbacks.is_empty();
    assert_eq!(report.operations.iter().flat_map(|of| &of.engines).filter(of_cpu).count(), 0, "{report:?}");
}

#[test]
fn nothing_but_deflate_is_continued() {
    let cpu = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
    let memory = Memory::new(1);
    let range = memory.region().range(0, PAGE).unwrap();
    for operation in Operation::ALL.into_iter().filter(|operation| *operation != Operation::Deflate) {
        let refused = cpu.call(operation, |batch| batch.push_continued(&range).map(drop)).map(drop);
        assert!(matches!(refused, Err(CallError::Push(PushError::Kind { .. }))), "{operation:?}: {refused:?}");
    }
}
