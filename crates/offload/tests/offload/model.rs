//! The product over the software model, in real time: its own threads, its backstop, the process's real page tables.
#![cfg(feature = "model")]

use std::io::BufReader;
use std::sync::Arc;
use std::time::Duration;

use crate::support::operations::{all_operations, filled};
use crate::support::{Memory, PAGE, crc32c};
use sterna_idxd_model::config::{Script, ScriptedFault};
use sterna_idxd_model::{DeviceConfig, Model, ModelConfig};
use sterna_offload::trace::Trace;
use sterna_offload::{Cause, Kind, NEVER, Offload, OffloadReport, Operation, Outcome, Recheck, Settings, Shares};
use sterna_test_kit::tools::directory_in_memory;

fn both_devices() -> ModelConfig {
    ModelConfig { devices: vec![DeviceConfig::default(), DeviceConfig::iaa()], ..ModelConfig::dsa() }
}

/// Returns settings with which no device is taken out of service, and nothing left to the CPU, because this machine is busy.
pub(crate) fn patient() -> Settings {
    let mut settings = Settings::default();
    settings.patience = Duration::from_secs(300);
    settings.retries = u32::MAX;
    settings
}

fn over(config: ModelConfig) -> (Arc<Model>, Arc<Offload>) {
    let silence = |script: &Script| matches!(script.what, ScriptedFault::DropCompletion | ScriptedFault::Halt);
    let settings = if config.faults.iter().any(silence) { Settings::default() } else { patient() };
    let model = Model::start(config).unwrap();
    let queues = sterna_offload::model::queues(&model).unwrap();
    (model, Offload::with_queues(queues, &settings).unwrap())
}

fn by_device(report: &OffloadReport) -> u64 {
    report.operations.iter().flat_map(|of| &of.engines).filter(|of| of.engine != Kind::Cpu).map(|of| of.items).sum()
}

fn causes(report: &OffloadReport) -> Vec<Cause> {
    let mut causes: Vec<_> = report
        .operations
        .iter()
        .flat_map(|of| &of.engines)
        .flat_map(|of| &of.fallbacks)
        .map(|(cause, _)| *cause)
        .collect();
    causes.dedup();
    causes
}

#[test]
fn every_operation_is_the_devices_and_right() {
    let (model, offload) = over(both_devices());
    all_operations(&offload, 5);
    let report = offload.report();
    assert!(report.taken_out.is_empty(), "{report:?}");
    assert!(by_device(&report) >= 5 * 500, "{report:?}");
    assert!(causes(&report).iter().all(|cause| *cause == Cause::PageFault), "{report:?}");
    assert!(model.counters().batches > 0);
    assert_eq!(model.counters().software_errors, 0, "nothing that the device has to refuse");
}

#[test]
fn without_batches_and_through_dedicated_queues_all_is_right_too() {
    let mut config = both_devices();
    for device in &mut config.devices {
        device.queues[0].mode = sterna_idxd_model::Mode::Dedicated;
        device.queues[0].size = 4;
        device.queues[0].max_batch_size = 1;
    }
    let (model, offload) = over(config);
    all_operations(&offload, 3);
    assert!(by_device(&offload.report()) > 0);
    assert_eq!((model.counters().overflows, model.counters().batches), (0, 0));
}

#[test]
fn whatever_the_device_does_wrong_nothing_comes_out_wrong() {
    let faults = [
        ScriptedFault::PageFault { per_mille: 500, resolvable: false },
        ScriptedFault::Late { delay_ns: 300_000 },
        ScriptedFault::Slow { factor: 50 },
        ScriptedFault::Status { code: 0x20 },
        ScriptedFault::DropCompletion,
        ScriptedFault::Halt,
    ];
    for what in faults {
        let mut config = both_devices();
        config.faults = vec![Script { every: Some(97), what: what.clone(), ..Script::default() }];
        let (_model, offload) = over(config);
        all_operations_or_leases(&offload, &what);
        offload.shutdown();
        let report = offload.report();
        assert_eq!(report.requests.made, report.requests.free, "{what:?}: {report:?}");
        assert!(report.taken_out.iter().all(|out| out.quiet), "{what:?}: {report:?}");
    }
}

/// Only what reads: what writes may end in a lease where the device is lost.
fn all_operations_or_leases(offload: &Offload, what: &ScriptedFault) {
    const PAGES: usize = 128;
    let (_memory, region, content) = filled(PAGES, 3);
    let channel = offload.channel();
    for _ in 0..20 {
        for operation in [Operation::ZeroMap, Operation::CopyChecksum] {
            let mut batch = channel.batch(operation);
            for at in 0..PAGES {
                batch.push(&region.range(at * PAGE, PAGE).unwrap()).unwrap();
            }
            channel.submit(batch).unwrap().into_id();
        }
        while let Some(done) = channel.wait(NEVER) {
            assert_eq!(done.outcome, Outcome::Done, "{what:?}");
            for (at, page) in content.chunks(PAGE).enumerate() {
                match done.batch.operation() {
                    Operation::ZeroMap => {
                        assert_eq!(done.batch.is_zero(at), page.iter().all(|byte| *byte == 0), "{what:?}");
                    }
                    _ => assert_eq!((done.batch.copy(at), done.batch.checksum(at)), (page, crc32c(page)), "{what:?}"),
                }
            }
        }
    }
}

#[test]
fn the_backstop_puts_away_what_nobody_waits_for_and_shutdown_with_work_outstanding_is_clean() {
    let (_model, offload) = over(both_devices());
    let (_memory, region, _) = filled(64, 5);
    let channel = offload.channel();
    for _ in 0..30 {
        let mut batch = channel.batch(Operation::Checksum);
        for at in 0..64 {
            batch.push(&region.range(at * PAGE, PAGE).unwrap()).unwrap();
        }
        drop(channel.submit(batch).unwrap());
    }
    let time = sterna_offload::SystemTime;
    assert_eq!(region.retire_by(offload.deadline(Duration::from_secs(300)), &time), Ok(()), "without anybody looking");
    let (_memory, region, _) = filled(64, 6);
    for _ in 0..10 {
        let mut batch = channel.batch(Operation::Checksum);
        batch.push(&region.range(0, 64 * PAGE).unwrap()).unwrap();
        drop(channel.submit(batch).unwrap());
    }
    drop(channel);
    offload.shutdown();
    assert_eq!(region.retire(), Ok(()));
    let requests = offload.report().requests;
    assert_eq!(requests.made, requests.free);
}

#[test]
fn a_model_is_named_by_its_file_and_the_summary_says_so() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), serde_json::to_string(&both_devices()).unwrap()).unwrap();
    let choice = format!("model:{}", file.path().display()).parse().unwrap();
    let offload = Offload::start(&choice, &patient()).unwrap();
    assert!(
        offload.summary().contains("dsa dsa0/wq0.0") && offload.summary().contains("iaa iax1/wq1.0"),
        "{}",
        offload.summary()
    );
    std::fs::write(file.path(), "{}x").unwrap();
    assert!(Offload::start(&choice, &Settings::default()).unwrap_err().to_string().contains(".tmp"));
}

/// A device that says the wrong thing about each page that it is shown alone, or in a batch.
fn liar(opcode: u8) -> ModelConfig {
    let lies = Script { opcode: Some(opcode), what: ScriptedFault::WrongResult, ..Script::default() };
    ModelConfig { faults: vec![lies], ..ModelConfig::dsa() }
}

#[test]
fn a_device_that_repeats_a_wrong_zero_is_taken_out_even_if_the_guest_may_have_written() {
    const COMPARE_PATTERN: u8 = 6;
    let model = Model::start(liar(COMPARE_PATTERN)).unwrap();
    let mut settings = patient();
    settings.recheck = Recheck::All;
    let offload = Offload::with_queues(sterna_offload::model::queues(&model).unwrap(), &settings).unwrap();
    let memory = Memory::new(32);
    (0..32).for_each(|page| memory.write(page * PAGE + 100, &[1]));
    let region = memory.region();
    region.set_racing(true);
    let all = region.range(0, 32 * PAGE).unwrap();

    // A second look that is not answered at once says nothing: the model's thread may be waiting for a core.
    for _ in 0..10_000 {
        let zero = offload.is_zero(std::slice::from_ref(&all)).unwrap();
        assert!(!zero.contains(&true), "what the CPU has read counts");
        if !offload.report().taken_out.is_empty() {
            return;
        }
    }
    panic!("{:?}", offload.report());
}

#[test]
fn pages_that_were_written_since_the_device_has_read_them_are_nobodys_fault() {
    // The page is written between the device's look and the CPU's: the completion is there, and nobody has collected it.
    let (model, _) = over(ModelConfig::dsa());
    let mut settings = patient();
    (settings.recheck, settings.threads) = (Recheck::All, false);
    let offload = Offload::with_queues(sterna_offload::model::queues(&model).unwrap(), &settings).unwrap();
    let memory = Memory::new(8);
    // Touched: a page that was never there would be the CPU's.
    (0..8).for_each(|page| memory.write(page * PAGE, &[0]));
    let region = memory.region();
    region.set_racing(true);
    let channel = offload.channel();
    let mut batch = channel.batch(Operation::ZeroMap);
    batch.push(&region.range(0, 8 * PAGE).unwrap()).unwrap();
    let before = model.counters().descriptors;
    let _ticket = channel.submit(batch).unwrap();
    // A member is counted when it was executed.
    while model.counters().descriptors < before + 8 {
        std::hint::spin_loop();
    }
    memory.write(3 * PAGE + 8, &[7]);

    let done = channel.wait(NEVER).unwrap();

    assert!(!done.batch.is_zero(3), "the CPU has seen that it is not zero");
    assert!(offload.report().taken_out.is_empty(), "{:?}", offload.report());
}

#[test]
fn a_copy_that_is_not_what_the_device_has_read_is_made_again_and_the_device_taken_out() {
    const COPY_CRC: u8 = 0x11;
    let (_model, offload) = over(liar(COPY_CRC));
    let (_memory, region, content) = filled(4, 3);
    let range = region.range(0, 4 * PAGE).unwrap();
    let batch = offload.call(Operation::CopyChecksum, |batch| batch.push(&range).map(drop)).unwrap();
    assert_eq!((batch.copy(0), batch.checksum(0)), (&content[..], crc32c(&content)));
    let report = offload.report();
    assert!(report.taken_out[0].reason.contains("copy"), "{report:?}");
    assert!(causes(&report).contains(&Cause::WrongResult));
}

#[test]
fn a_host_s_ledgers_are_kept_where_there_is_a_directory_and_missed_where_there_is_none() {
    let directory = directory_in_memory();
    for (place, ledgers) in [(directory.path().to_owned(), 1), (directory.path().join("nowhere"), 0)] {
        let model = Model::start(ModelConfig::dsa()).unwrap();
        let mut settings = patient();
        settings.shares = Shares::of_host(&place);
        let offload = Offload::with_queues(sterna_offload::model::queues(&model).unwrap(), &settings).unwrap();
        all_operations(&offload, 1);
        let kept = std::fs::read_dir(&place).map_or(0, |files| files.filter(|file| file.is_ok()).count());
        assert_eq!(kept, ledgers, "{}", place.display());
    }
}

#[test]
fn where_all_was_zero_one_descriptor_asks_for_a_run_and_what_it_stops_at_is_gone_on_with() {
    const PAGES: usize = 32;
    let model = Model::start(ModelConfig::dsa()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let trace = Arc::new(Trace::new(Box::new(file.reopen().unwrap())));
    let mut settings = patient();
    settings.trace = Some(Arc::clone(&trace));
    let offload = Offload::with_queues(sterna_offload::model::queues(&model).unwrap(), &settings).unwrap();
    let memory = Memory::new(PAGES);
    // Touched: a page that was never there would be the CPU's.
    (0..PAGES).for_each(|page| memory.write(page * PAGE, &[0]));
    let all = memory.region().range(0, PAGES * PAGE).unwrap();
    let look = || offload.is_zero(std::slice::from_ref(&all)).unwrap();

    assert_eq!((look(), look()), (vec![true; PAGES], vec![true; PAGES]));
    memory.write(5 * PAGE + 77, &[1]);
    memory.write(31 * PAGE, &[1]);
    let zero = look();

    let normal: Vec<usize> = (0..PAGES).filter(|page| !zero[*page]).collect();
    assert_eq!(normal, [5, 31]);
    trace.finish().unwrap();
    let exchanges = sterna_offload::trace::read(BufReader::new(file.reopen().unwrap())).unwrap();
    let members: Vec<usize> = exchanges.iter().map(|exchange| exchange.members.len()).collect();
    assert_eq!(members, [PAGES, 0, 0, PAGES - 6], "a batch, a run, a run that stops, and the batch behind it");
    let report = offload.report();
    assert!(report.taken_out.is_empty() && causes(&report).is_empty(), "{report:?}");
}
