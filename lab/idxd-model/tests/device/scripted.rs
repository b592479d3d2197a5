//! Faults by address, on top of another memory.

use std::sync::{Arc, Mutex};

use sterna_idxd_model::memory::{AddressSpace, Fault, PageState, Rule, ScriptedMemory, TestMemory};
use sterna_idxd_model::{DeviceConfig, Model, ModelConfig};

use crate::common::*;

fn below() -> Arc<TestMemory> {
    let memory = Arc::new(TestMemory::new());
    memory.set(DATA, 0x1_0000, PageState::Present);
    memory.set(RECORDS, 0x1000, PageState::Present);
    memory
}

#[test]
fn rules_choose_by_address_direction_and_count() {
    let memory = ScriptedMemory::new(below());
    let mut buffer = [0; 64];
    memory.add(Rule { write: Some(true), ..Rule::always(DATA + 32..DATA + 40) });
    assert_eq!(memory.read(DATA, &mut buffer), Ok(0), "the rule is for writes only");
    assert_eq!(memory.write(DATA, &[1; 64]), Err(Fault { address: DATA + 32, done: 32 }));
    assert_eq!(memory.read(DATA, &mut buffer), Ok(0));
    assert_eq!((buffer[31], buffer[32]), (1, 0), "bytes before the fault are written");
    assert_eq!(memory.write(DATA + 40, &[1; 64]), Ok(0), "behind it");
    memory.clear();
    memory.add(Rule { after: 2, times: 1, ..Rule::always(DATA..DATA + 1) });
    let faults: Vec<bool> = (0..5).map(|_| memory.read(DATA, &mut buffer).is_err()).collect();
    assert_eq!(faults, [false, false, true, false, false]);
}

#[test]
fn a_rule_that_can_be_resolved_is_gone_after_a_page_request() {
    for (resolvable, status) in [(true, 1), (false, 0x84)] {
        let (below, mut device) = (below(), DeviceConfig::default());
        device.queues[0].block_on_fault = true;
        let memory = Arc::new(ScriptedMemory::new(below.clone()));
        memory.add(Rule { resolvable, ..Rule::always(DATA + 0x2000..DATA + 0x3000) });
        let config = ModelConfig { devices: vec![device], ..ModelConfig::default() };
        let model = Model::manual_on(config, memory).unwrap();
        let raw = memmove(RECORDS, DATA + 0x8000, DATA, 0x4000).flags(BLOCK);
        assert!(model.queue("wq0.0").unwrap().enqcmd(&raw.0));
        model.settle();
        assert_eq!(seen(&below.get(RECORDS, 32)).status, status);
    }
}

/// Records the writes that reach it.
#[derive(Debug, Default)]
struct RecordsWrites(Mutex<Vec<(u64, usize)>>);

impl AddressSpace for RecordsWrites {
    fn read(&self, _address: u64, into: &mut [u8]) -> Result<u32, Fault> {
        into.fill(0);
        Ok(0)
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<u32, Fault> {
        self.0.lock().unwrap().push((address, from.len()));
        Ok(0)
    }

    fn resolve(&self, _address: u64, _write: bool) -> bool {
        true
    }
}

#[test]
fn a_records_first_byte_is_written_last_and_after_the_data() {
    let memory = Arc::new(RecordsWrites::default());
    let config = ModelConfig { devices: vec![DeviceConfig::default()], ..ModelConfig::default() };
    let model = Model::manual_on(config, memory.clone() as Arc<dyn AddressSpace>).unwrap();
    assert!(model.queue("wq0.0").unwrap().enqcmd(&memmove(RECORDS, DATA, DATA + 0x1000, 64).0));
    model.settle();
    assert_eq!(*memory.0.lock().unwrap(), [(DATA + 0x1000, 64), (RECORDS + 1, 31), (RECORDS, 1)]);
}
